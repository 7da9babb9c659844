"""Where the project's files are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FIXTURES", "GOLDEN", "ROOT", "SUPPORT"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
SUPPORT = ROOT / "tests" / "support"
#: Texts that commands are to print.
GOLDEN = SUPPORT / "golden"
