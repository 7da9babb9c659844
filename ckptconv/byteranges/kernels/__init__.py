"""Loops over numbers that need torch. Imported only when numbers are cast, gathered, assembled, summed or compared.

The import raises MissingTorchError if torch is not installed or cannot be imported.
"""

from ckptconv.errors import MissingTorchError, require_torch

require_torch("computing numbers")
try:
    import torch as torch
except Exception as error:
    raise MissingTorchError(
        "torch is installed, but cannot be imported",
        got=f"{type(error).__name__}: {error}",
        hint="reinstall it; inspect, verify, and convert of devices and names work without torch",
    ) from error
