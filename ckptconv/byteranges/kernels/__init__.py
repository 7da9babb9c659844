"""Loops over numbers that need torch. Imported only when numbers are cast, gathered, assembled or compared."""

from ckptconv.errors import require_torch

require_torch("computing numbers")
