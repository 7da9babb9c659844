"""docs/threats.md names a test in each of its rows, and contains every test in ``test_threats.py``."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

_PAGE = (ROOT / "docs/threats.md").read_text()
_USUAL = "tests/hostile/test_threats.py"
_TEST = re.compile(r"`(?:(tests/[a-z0-9_/]+\.py)::)?(test_[a-z0-9_]+)`")


def defined_in(file: str) -> list[str]:
    """Return the names of the tests in `file`."""
    return re.findall(r"^def (test_[a-z0-9_]+)\(", (ROOT / file).read_text(), re.MULTILINE)


def test_each_row_names_existing_tests() -> None:
    rows = [line for line in _PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| input"))]
    rows = [line for line in rows if not line.endswith("| test |")]
    assert len(rows) > 60
    for row in rows:
        named = _TEST.findall(row.rsplit(" | ", 1)[1])
        assert named, row
        for file, name in named:
            assert name in defined_in(file or _USUAL), row


def test_each_test_of_the_threats_has_a_row() -> None:
    named = {name for file, name in _TEST.findall(_PAGE) if not file}
    assert set(defined_in(_USUAL)) <= named
