"""Results of functions on files: frozen, with attributes, a JSON form, the text of the command, and a short
``repr``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import ckptconv
from tests.support.command import Command

DDP = "dataparallel.pt"
CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...], str]] = {
    "Summary": (lambda: ckptconv.inspect(DDP), ("inspect", DDP), f"{DDP}: torch zip, "),
    "Verdict": (lambda: ckptconv.verify(DDP), ("verify", DDP), f"ok: {DDP}: torch zip, "),
    "Difference": (lambda: ckptconv.diff(DDP, "cpu.pt"), ("diff", DDP, "cpu.pt"), "different: "),
    "Report": (
        lambda: ckptconv.convert(DDP, "out.pt", map_location="cuda:1", dry_run=True),
        ("convert", DDP, "out.pt", "--to", "cuda:1", "--dry-run"),
        "out.pt: torch zip, would write ",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_output_of_the_command(
    name: str, fixtures: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``str`` of a result is the command's output to a pipe. ``as_dict`` is the command's output with ``--json``."""
    monkeypatch.chdir(fixtures)
    call, typed, title = CASES[name]
    result, status = call(), 1 if name == "Difference" else 0
    assert type(result) is getattr(ckptconv, name)
    assert str(result) + "\n" == command(*typed, status=status).out
    assert str(result).splitlines()[-1 if name == "Verdict" else 0].startswith(title)
    shown, said = result.as_dict(), command.json(*typed, status=status)
    assert json.loads(json.dumps({**shown, "seconds": 0})) == {**said, "seconds": 0}
    assert shown["schema_version"] == 1
    assert repr(result).startswith(f"<{name}: {title}")
    assert len(repr(result)) < 200
    field = "src" if name == "Report" else "a" if name == "Difference" else "path"
    with pytest.raises(FrozenInstanceError):
        setattr(result, field, "other")


def test_rows_of_a_summary_are_frozen_objects(fixtures: Path) -> None:
    """The facts of a row are its attributes. In the JSON form, tuples are lists."""
    summary = ckptconv.inspect(fixtures / "cpu.pt")
    row = summary.tensors[0]
    assert (row.path, row.name, row.shape, row.device) == ("conv.weight", "conv.weight", (2, 1, 3, 3), "cpu")
    assert not hasattr(row, "__dict__")
    with pytest.raises(FrozenInstanceError):
        row.device = "cuda:0"  # type: ignore[misc]
    assert summary.as_dict()["tensors"][0]["shape"] == [2, 1, 3, 3]
    assert summary.as_dict()["devices"] == {"cpu": {"tensors": 11, "nbytes": 304}}
    assert summary.devices["cpu"].tensors == summary.state_dicts[0].tensors == 11
