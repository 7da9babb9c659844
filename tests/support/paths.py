"""Where the project's files are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FIXTURES", "GOLDEN", "ROOT", "SUPPORT", "TESTS"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
#: Texts that commands are to print.
GOLDEN = SUPPORT / "golden"
