"""Lines of a report."""

from __future__ import annotations

from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.edits.changes import Changes, NameChange
from ckptconv.render.report import report_lines
from tests.support.results import make_report


def test_report_lines_group_names() -> None:
    """A report shows one example of each pattern. With ``every_name`` it shows all names."""
    changes = Changes()
    changes.names = [NameChange("m", f"module.{i}", str(i)) for i in range(3)]
    changes.unprefixed = 2
    changes.rng_states = ["rng"]
    left = (LeftBehind("data/3", 5, "unused"),)
    report = make_report(changes=changes, left_behind=left, notes=("a note",), seconds=0.5, written=True)
    short, long = list(report_lines(report)), list(report_lines(report, every_name=True))
    assert sum("→" in line for line in short) == 1
    assert sum("→" in line for line in long) == 3
    for words in (
        "module.* → *: 3 names in m, such as module.0 → 0",
        "2 names without",
        "1 state of",
        "unused: data/3 (5 B)",
        "a note",
        "0.50 s",
    ):
        assert any(words in line for line in short)
    assert "none" in "".join(report_lines(make_report()))
