"""Comparison of two folders: checkpoints with the same name are compared, and a name on only one side is a
difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.inspection.comparison.folders import pairs_of
from tests.support.command import Command

STATE = {"w": torch.arange(10.0), "b": torch.ones(500)}


def folder(path: Path, files: Mapping[str, object]) -> Path:
    """Write `files` to the folder at `path`, with safetensors or torch according to the suffix, and return `path`."""
    for name, obj in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        save = save_file if name.endswith(".safetensors") else torch.save
        save(obj, path / name)  # type: ignore[operator]
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return folder(tmp_path / "a", {"one.pt": STATE, "deep/two.pt": STATE})


def test_folders_are_compared_by_name(a: Path, tmp_path: Path, command: Command) -> None:
    """Each pair of checkpoints has its own lines. The last line counts the results, and the worst result determines the
    exit status.
    """
    b = folder(tmp_path / "b", {"one.pt": STATE, "deep/two.pt": {**STATE, "w": torch.zeros(10)}})
    command("diff", a, a, out=("deep/two.pt: the same: 2 tensors", "one.pt: the same", "2 checkpoints: 2 the same\n"))
    said = command("diff", a, b, status=1, out="deep/two.pt: different: values of 1 tensor").out
    assert said.endswith("2 checkpoints: 1 different, 1 the same\n")
    torch.save(STATE, b / "three.pt")
    (a / "one.pt").rename(a / "four.pt")
    said = command("diff", a, b, status=1, out=("four.pt: only in A\n", "one.pt: only in B\n", "three.pt: only")).out
    assert said.endswith("4 checkpoints: 1 different, 1 only in A, 2 only in B\n")
    assert command("diff", a, b, "-q", status=1).out == ""
    lines = [json.loads(line) for line in command("diff", a, b, "--json", status=1).out.splitlines()]
    assert [line["same"] for line in lines] == [False] * 4
    assert (lines[1]["a"], lines[1]["b"]) == (str(a / "four.pt"), None)


def test_an_unreadable_file_does_not_stop_the_others(a: Path, tmp_path: Path, command: Command) -> None:
    """A file that cannot be read determines the exit status, but the other pairs are compared. An invalid option is an
    error.
    """
    b = folder(tmp_path / "b", {"one.pt": STATE, "deep/two.pt": STATE})
    (b / "deep/two.pt").write_bytes(b"no checkpoint")
    said = command("diff", a, b, status=2, out="one.pt: the same")
    assert "deep/two.pt: " in said.err and "1 not compared, 1 the same" in said.out
    command("diff", a, b, "--rtol", "nan", status=2, err="is not a tolerance")


def test_names_of_several_containers_are_one(a: Path, tmp_path: Path, command: Command) -> None:
    """Checkpoints and shard sets with the same stem are paired across formats. If two files could be the counterpart,
    neither is paired.
    """
    b = folder(tmp_path / "b", {"one.safetensors": STATE, "deep/two.bin": STATE})
    command("diff", a, b, out="2 checkpoints: 2 the same")
    save_file(STATE, b / "deep/two.safetensors")
    assert [(each.name, each.a is None, each.b is None) for each in pairs_of(a, b) or ()] == [
        ("deep/two.bin", True, False),
        ("deep/two.pt", False, True),
        ("deep/two.safetensors", True, False),
        ("one.pt", False, False),
    ]
    runs = [tmp_path / name for name in ("run", "run2")]
    for run, suffix in zip(runs, ("pt", "safetensors"), strict=True):
        (run / "step").mkdir(parents=True)
        ckptconv.convert(a / "one.pt", run / "step", max_shard_size=2010, format=suffix, force=True)
        torch.save(STATE, run / "m.pt")
    command("diff", *runs, out="2 checkpoints: 2 the same")
    assert pairs_of(runs[0] / "step", runs[1] / "step") is None
    command("diff", runs[0] / "step", runs[1] / "step", out="the same: 2 tensors")


def test_a_folder_and_a_file(a: Path, tmp_path: Path, command: Command) -> None:
    """A file is compared with the file of the same stem in a folder, in either order. The command fails if the folder
    has none, or if it would be the same file.
    """
    save_file(STATE, tmp_path / "one.safetensors")
    for pair in ((a, tmp_path / "one.safetensors"), (tmp_path / "one.safetensors", a)):
        assert command("diff", *pair).out.startswith("the same: 2 tensors")
    (tmp_path / "one.safetensors").rename(tmp_path / "other.safetensors")
    command("diff", a, tmp_path / "other.safetensors", status=2, err="a folder, not a file")
    command("diff", a / "one.pt", a, status=2, err="a folder, not a file")
    command("diff", a, tmp_path / "missing.pt", status=2, err="No such file")
    (tmp_path / "empty").mkdir()
    command("diff", tmp_path / "empty", tmp_path / "empty", status=2, err="a folder, not a file")
