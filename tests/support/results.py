"""Results that tests print without a conversion."""

from __future__ import annotations

from typing import Any

from ckptconv.conversion.plan import Report
from ckptconv.edits.changes import Changes

__all__ = ["make_report"]


def make_report(**given: Any) -> Report:
    """Return the report of a dry run without changes, with the fields `given`."""
    usual = {"src": "a.pt", "dst": "b.pt", "formats": ("torch zip", "torch zip"), "size": 1000, "changes": Changes()}
    return Report(**{**usual, **given})
