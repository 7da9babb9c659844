"""Where the project's files are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FIXTURES", "GOLDEN", "ROOT", "SUPPORT", "UNIT"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
SUPPORT = ROOT / "tests" / "support"
UNIT = ROOT / "tests" / "unit"
#: Texts that commands are to print.
GOLDEN = SUPPORT / "golden"
