"""``ckptconv inspect`` as its users meet it: what it shows in a pipe, as JSON and on a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
import torch

from ckptconv import convert, inspect
from tests.support.command import Command


def rows_of(printed: str) -> list[list[str]]:
    """What a pipe gets: the columns of each tensor."""
    return [line.split("\t") for line in printed.splitlines() if "\t" in line]


def test_inspect_piped_is_plain(fixtures: Path, command: Command) -> None:
    """Without a terminal: facts, then a line with tabs for each tensor, all of them."""
    printed = command("inspect", fixtures / "training.pt", out=("RNG states", "cuda:0", "state dict", "epoch")).out
    paths = [tensor["path"] for tensor in inspect(fixtures / "training.pt")["tensors"]]
    assert [row[0].split(" = ")[0] for row in rows_of(printed)] == paths


def test_inspect_json_is_the_summary(fixtures: Path, command: Command) -> None:
    """--json prints what the function returns."""
    path = fixtures / "two_gpus.pt"
    assert command.json("inspect", path) == json.loads(json.dumps(inspect(path)))


def test_inspect_selects_and_sorts(fixtures: Path, command: Command) -> None:
    """--include and --exclude take names or paths, --sort and --limit order and cut; a glob for nothing is an error."""
    path = fixtures / "training.pt"

    def shown(key: str, *flags: str) -> list[str]:
        return [tensor[key] for tensor in command.json("inspect", path, *flags)["tensors"]]

    names = shown("name", "--include", "*weight")
    assert names
    assert all(name.endswith("weight") for name in names)
    paths = shown("path", "--include", "*/exp_avg", "--exclude", "*state[[]0]*/*")
    assert paths
    assert all(path.endswith("/exp_avg") and "state[0]" not in path for path in paths)
    paths = shown("path", "--sort", "name", "--all")
    assert paths == sorted(paths)
    first, _ = rows_of(command("inspect", path, "--sort", "size", "--limit", "2").out)
    assert int(first[-1]) == max(tensor["nbytes"] for tensor in inspect(path)["tensors"])
    command("inspect", path, "--exclude", "no such*", status=1, err="no such*")


def test_inspect_of_several_goes_on_after_an_error(fixtures: Path, tmp_path: Path, command: Command) -> None:
    """One unreadable file does not stop the others; the status tells. An empty line stands between two."""
    (tmp_path / "empty.pt").touch()
    good = fixtures / "cpu.pt"
    command("inspect", tmp_path / "empty.pt", good, status=1, err="empty", out="cpu.pt")
    first, second = command("inspect", good, good, "--limit", "1").out.split("\n\n" + str(fixtures))
    assert first + "\n" == str(fixtures) + second


@pytest.mark.parametrize("width", [80, 200])
def test_inspect_fits_a_terminal(fixtures: Path, width: int, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal no line is wider than it, the table has a heading, rows fill the screen but for the prompt's line,
    at least 10 and at most 40, with a word about the rest, and --all shows every tensor.
    """
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    path = fixtures / "resnet18.pt"
    total = len(inspect(path)["tensors"])
    for height, drawn in ((5, 10), (30, None), (200, 40)):
        monkeypatch.setenv("LINES", str(height))
        lines = command("inspect", path).out.splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.split() == ["tensor", "dtype", "shape", "device", "size"] for line in lines)
        assert lines[-1].endswith(" more tensors (--all shows them)")
        assert rows(lines) == drawn if drawn else height - 2 <= len(lines) < height
    assert rows(command("inspect", path, "--limit", "33").out.splitlines()) == 33
    assert rows(command("inspect", path, "--all").out.splitlines()) == total
    monkeypatch.setenv("LINES", "30")
    assert 28 <= len(command("inspect", path, "--tree").out.splitlines()) < 30


def rows(lines: list[str]) -> int:
    return sum(line.rstrip("▏▎▍▌▋▊▉█ ").endswith(" B") and " cpu " in line for line in lines)


def test_a_command_that_the_terminal_breaks_takes_several_lines(
    fixtures: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path in a command is never broken here; the screen has fewer rows for the table then."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    path = shutil.copy(fixtures / "resnet18.pt", tmp_path / ("x" * 200 + ".pt"))
    convert(path, dst := tmp_path / ("y" * 200 + ".pt"), map_location="npu:0")
    lines = click.unstyle(command("inspect", dst).out).splitlines()
    assert max(map(len, lines)) > 200
    assert 38 <= sum(-(-max(1, len(line)) // 80) for line in lines) < 40


def test_tree_groups_modules(fixtures: Path, command: Command) -> None:
    """--tree: a level for each module, with the number and bytes of what is below; single branches are joined."""
    path = fixtures / "dataparallel.pt"
    total = len(inspect(path)["tensors"])
    command("inspect", path, "--tree", out=(f"\nmodule.  {total} tensors", "\n    weight  float32"))


def test_terminal_escapes_are_escaped(tmp_path: Path, command: Command) -> None:
    """A name from a file cannot move the cursor, colour the screen or look like another name."""
    torch.save({"a\x1b[2Jb\u202ec": torch.zeros(1), "text": "\x07bell"}, tmp_path / "x.pt")
    for extra in ([], ["--tree"]):
        printed = command("inspect", tmp_path / "x.pt", *extra, out="\\x1b").out
        assert not {"\x1b", "\u202e", "\x07"} & set(printed)
