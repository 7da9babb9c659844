"""``ckptconv inspect`` as its users meet it: what it shows in a pipe, as JSON and on a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
import torch

from ckptconv import convert, inspect
from ckptconv.cli.main import main


def test_inspect_piped_is_plain(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: facts, then a line with tabs for each tensor, all of them."""
    assert main(["inspect", str(fixtures / "training.pt")]) == 0
    printed = capsys.readouterr().out
    summary = inspect(fixtures / "training.pt")
    assert [line.split("\t")[0].split(" = ")[0] for line in printed.splitlines() if "\t" in line] == [
        t["path"] for t in summary["tensors"]
    ]
    for word in ("RNG states", "cuda:0", "state dict", "epoch"):
        assert word in printed


def test_inspect_json_is_the_summary(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints what the function returns."""
    assert main(["inspect", str(fixtures / "two_gpus.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(inspect(fixtures / "two_gpus.pt")))


def test_inspect_selects_and_sorts(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--include and --exclude take names or paths, --sort and --limit order and cut; a glob for nothing is an error."""
    path = str(fixtures / "training.pt")
    assert main(["inspect", path, "--include", "*weight", "--json"]) == 0
    names = [tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert names
    assert all(name.endswith("weight") for name in names)
    assert main(["inspect", path, "--include", "*/exp_avg", "--exclude", "*state[[]0]*/*", "--json"]) == 0
    paths = [tensor["path"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert paths
    assert all(path.endswith("/exp_avg") and "state[0]" not in path for path in paths)
    assert main(["inspect", path, "--sort", "size", "--limit", "2"]) == 0
    sizes = [int(line.split("\t")[-1]) for line in capsys.readouterr().out.splitlines() if "\t" in line]
    assert len(sizes) == 2
    assert sizes[0] == max(t["nbytes"] for t in inspect(path)["tensors"])
    assert main(["inspect", path, "--sort", "name", "--all", "--json"]) == 0
    paths = [tensor["path"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert paths == sorted(paths)
    assert main(["inspect", path, "--exclude", "no such*"]) == 1
    assert "no such*" in capsys.readouterr().err


def test_inspect_of_several_goes_on_after_an_error(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unreadable file does not stop the others; the status tells. An empty line stands between two."""
    (tmp_path / "empty.pt").touch()
    assert main(["inspect", str(tmp_path / "empty.pt"), str(fixtures / "cpu.pt")]) == 1
    captured = capsys.readouterr()
    assert "empty" in captured.err
    assert "cpu.pt" in captured.out
    assert main(["inspect", *2 * [str(fixtures / "cpu.pt")], "--limit", "1"]) == 0
    first, second = capsys.readouterr().out.split("\n\n" + str(fixtures))
    assert first + "\n" == str(fixtures) + second


@pytest.mark.parametrize("width", [80, 200])
def test_inspect_fits_a_terminal(
    fixtures: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than it, the table has a heading, rows fill the screen but for the prompt's line,
    at least 10 and at most 40, with a word about the rest, and --all shows every tensor.
    """
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    path = str(fixtures / "resnet18.pt")
    total = len(inspect(path)["tensors"])
    for height, drawn in ((5, 10), (30, None), (200, 40)):
        monkeypatch.setenv("LINES", str(height))
        assert main(["inspect", path]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.split() == ["tensor", "dtype", "shape", "device", "size"] for line in lines)
        assert lines[-1].endswith(" more tensors (--all shows them)")
        assert rows(lines) == drawn if drawn else height - 2 <= len(lines) < height
    assert main(["inspect", path, "--limit", "33"]) == 0
    assert rows(capsys.readouterr().out.splitlines()) == 33
    assert main(["inspect", path, "--all"]) == 0
    assert rows(capsys.readouterr().out.splitlines()) == total
    monkeypatch.setenv("LINES", "30")
    assert main(["inspect", path, "--tree"]) == 0
    assert 28 <= len(capsys.readouterr().out.splitlines()) < 30


def rows(lines: list[str]) -> int:
    return sum(line.rstrip("▏▎▍▌▋▊▉█ ").endswith(" B") and " cpu " in line for line in lines)


def test_a_command_that_the_terminal_breaks_takes_several_lines(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path in a command is never broken here; the screen has fewer rows for the table then."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    path = shutil.copy(fixtures / "resnet18.pt", tmp_path / ("x" * 200 + ".pt"))
    convert(path, dst := tmp_path / ("y" * 200 + ".pt"), map_location="npu:0")
    assert main(["inspect", str(dst)]) == 0
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) > 200
    assert 38 <= sum(-(-max(1, len(line)) // 80) for line in lines) < 40


def test_tree_groups_modules(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tree: a level for each module, with the number and bytes of what is below; single branches are joined."""
    assert main(["inspect", str(fixtures / "dataparallel.pt"), "--tree"]) == 0
    printed = capsys.readouterr().out
    total = len(inspect(fixtures / "dataparallel.pt")["tensors"])
    assert f"\nmodule.  {total} tensors" in printed
    assert "\n    weight  float32" in printed


def test_terminal_escapes_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name from a file cannot move the cursor, colour the screen or look like another name."""
    torch.save({"a\x1b[2Jb\u202ec": torch.zeros(1), "text": "\x07bell"}, tmp_path / "x.pt")
    for extra in ([], ["--tree"]):
        assert main(["inspect", str(tmp_path / "x.pt"), *extra]) == 0
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "\u202e" not in printed
        assert "\x07" not in printed
        assert "\\x1b" in printed
