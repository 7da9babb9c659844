"""The paths of the project's files, and a function that creates empty files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FIXTURES", "GOLDEN", "ROOT", "SUPPORT", "TESTS", "fill"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
#: The expected output of commands.
GOLDEN = SUPPORT / "golden"


def fill(folder: Path, *names: str) -> None:
    """Create empty files with `names` in `folder`. A name that ends with a slash creates an empty folder."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
