"""Tests of the command ``ckptconv inspect``: its output to a pipe, as JSON and on a terminal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from ckptconv import convert, inspect
from tests.support.command import Command


def rows_of(printed: str) -> list[list[str]]:
    """Return the columns of each tensor from the output to a pipe."""
    return [line.split("\t") for line in printed.splitlines() if "\t" in line]


def test_inspect_piped_is_plain(fixtures: Path, command: Command) -> None:
    """Without a terminal, `inspect` prints facts and then one line with tabs for each tensor."""
    printed = command("inspect", fixtures / "training.pt", out=("RNG states", "cuda:0", "optimizer", "epoch")).out
    paths = [tensor.path for tensor in inspect(fixtures / "training.pt").tensors]
    assert [row[0].split(" = ")[0] for row in rows_of(printed)] == paths


def test_inspect_json_is_the_summary(fixtures: Path, command: Command) -> None:
    """``--json`` prints the result of the function `inspect`."""
    path = fixtures / "two_gpus.pt"
    assert command.json("inspect", path) == json.loads(json.dumps(inspect(path).as_dict()))


def test_inspect_selects_and_sorts(fixtures: Path, command: Command) -> None:
    """``--include`` and ``--exclude`` accept names and paths. ``--sort`` and ``--limit`` sort and limit the rows. A
    pattern without a match is an error.
    """
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
    assert int(first[-1]) == max(tensor.nbytes for tensor in inspect(path).tensors)
    command("inspect", path, "--exclude", "no such*", status=1, err="no such*")


def test_inspect_of_several_goes_on_after_an_error(fixtures: Path, tmp_path: Path, command: Command) -> None:
    """If one of several files cannot be read, the others are still shown, and the exit status is 1. An empty line
    separates two files.
    """
    (tmp_path / "empty.pt").touch()
    good = fixtures / "cpu.pt"
    command("inspect", tmp_path / "empty.pt", good, status=1, err="empty", out="cpu.pt")
    first, second = command("inspect", good, good, "--limit", "1").out.split("\n\n" + str(fixtures))
    assert first + "\n" == str(fixtures) + second


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that turns standard output into a terminal of `width` columns without colors."""

    def made(width: int) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))

    return made


@pytest.mark.parametrize("width", [80, 200])
def test_inspect_fits_a_terminal(fixtures: Path, width: int, command: Command, terminal: Callable[[int], None]) -> None:
    """On a terminal, the output fits the width and 24 lines with the prompt. The last line states the number of hidden
    tensors, which ``--limit`` and ``--all`` show.
    """
    terminal(width)
    path = fixtures / "resnet18.pt"
    total = len(inspect(path).tensors)
    lines = command("inspect", path).out.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.split() == ["tensor", "dtype", "shape", "device", "size"] for line in lines)
    assert lines[-1].endswith(" more tensors (--all shows them)")
    assert len(lines) == 23
    assert len(command("inspect", path, "--tree").out.splitlines()) == 23
    assert rows(command("inspect", path, "--limit", "33").out.splitlines()) == 33
    assert rows(command("inspect", path, "--all").out.splitlines()) == total


def test_the_verdict_and_the_parts_come_first(
    fixtures: Path, command: Command, terminal: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, the 24 lines for a complete training file contain the verdict, the devices, the parts of the file,
    and rows of tensors.
    """
    terminal(80)
    monkeypatch.chdir(fixtures)
    lines = command("inspect", "training.pt").out.splitlines()
    assert len(lines) <= 23
    labels = [line[2:16].strip() for line in lines if line.startswith("  ") and line[2] not in " …"]
    assert [label for label in labels if label != "note"][:5] == [
        "loads here",
        "because",
        "devices",
        "model",
        "optimizer",
    ]
    missing = next(line for line in lines if "more lines (--all shows them)" in line)
    whole = command("inspect", "training.pt", "--all").out.splitlines()
    assert whole.index("") - lines.index(missing) == int(missing.split()[1])
    assert sum("  float32  " in line for line in lines) >= 5


def test_a_folder_and_more_than_two_files_are_a_table(
    fixtures: Path, tmp_path: Path, command: Command, terminal: Callable[[int], None]
) -> None:
    """`inspect` prints a table for a folder or for more than two files. It contains a line for each checkpoint, also
    for a set of shards or an unreadable file, and the number of checkpoints that load here.
    """
    for name in ("cpu.pt", "cuda0.pt"):
        shutil.copy(fixtures / name, tmp_path)
    convert(fixtures / "cpu.pt", tmp_path / "npu.pt", map_location="npu:0")
    convert(fixtures / "resnet18.pt", tmp_path / "hub/", format="safetensors", max_shard_size="1kB")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "damaged.pt").write_bytes((fixtures / "cpu.pt").read_bytes()[:600])
    (tmp_path / "notes.txt").write_text("none")
    printed = command("inspect", tmp_path, status=1, err="empty.pt: the file is empty").out.splitlines()
    table = {Path(row[0]).name: row[1:] for row in (line.split("\t") for line in printed) if len(row) > 1}
    size = str((tmp_path / "cpu.pt").stat().st_size)
    assert table["cpu.pt"] == ["torch zip", size, "11", "cpu", "yes"]
    assert table["cuda0.pt"][-2:] == ["cuda:0", "yes" if torch.cuda.is_available() else "no: device"]
    assert table["npu.pt"][-2:] == ["npu:0", "not known"]
    assert table["empty.pt"] == ["–", "0", "–", "–", "not readable"]
    assert table["damaged.pt"][1] == "600"
    (shards,) = set(table) - {"cpu.pt", "cuda0.pt", "npu.pt", "empty.pt", "damaged.pt"}
    assert table[shards][0] == "sharded safetensors" and table[shards][2:] == ["122", "–", "yes"]
    assert printed[-1].startswith("6 checkpoints, ")
    assert "2 cannot be read" in printed[-1] and "1 is not known to load here" in printed[-1]
    some = [tmp_path / name for name in ("cpu.pt", "npu.pt", "cuda0.pt")]
    assert len(command("inspect", *some).out.splitlines()) == 4
    largest = command("inspect", *some, "--sort", "size", "--limit", "1").out.splitlines()
    assert largest[1:-1] == ["  … 2 more checkpoints (--all shows them)"]
    found = [json.loads(each) for each in command("inspect", tmp_path, "--json", status=1).out.splitlines()]
    assert {Path(each["path"]).name for each in found} == table.keys()
    errors = {Path(each["path"]).name: each["error"] for each in found if "error" in each}
    assert {name: each["type"] for name, each in errors.items()} == {
        "empty.pt": "UnsupportedError",
        "damaged.pt": "MalformedError",
    }
    assert errors["empty.pt"]["what"] == "the file is empty" and "download" in errors["empty.pt"]["text"]
    assert command("inspect", *some, "--tree").out.count("\n  loads here ") == 3
    terminal(80)
    drawn = command("inspect", *some * 8).out.splitlines()
    assert len(drawn) == 23 and max(map(len, drawn)) <= 80
    assert "(--all shows them)" in drawn[-2] + drawn[-3]
    everything = command("inspect", *some * 8, "--all").out.splitlines()
    assert sum("torch zip" in line for line in everything) == 24
    assert drawn[0].split() == ["checkpoint", "format", "size", "tensors", "devices", "loads", "here"]


def test_two_files_are_two_views(fixtures: Path, command: Command, terminal: Callable[[int], None]) -> None:
    """Two files are shown one below the other, each as if it were the only one."""
    terminal(80)
    paths = [fixtures / "cpu.pt", fixtures / "resnet18.pt"]
    one, two = (command("inspect", path).out for path in paths)
    assert command("inspect", *paths).out == f"{one}\n{two}"


def test_a_terminal_without_unicode_gets_ascii(fixtures: Path, tmp_path: Path) -> None:
    """If standard output supports only ASCII, the output of every command is ASCII, also for files with other names."""
    shutil.copy(fixtures / "training.pt", tmp_path / "é.pt")
    torch.save({"ü": torch.ones(2, 3), "empty": torch.ones(0, 3)}, tmp_path / "x.pt")
    for words in (
        ("inspect", "é.pt"), ("inspect", "x.pt"), ("inspect", "."), ("inspect", "x.pt", "--tree"), ("verify", "é.pt"),
        ("diff", "x.pt", "é.pt"), ("convert", "é.pt", "o.pt", "--to", "cuda:1", "--dry-run"), ("inspect", "→.pt"),
    ):  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-m", "ckptconv", *words], cwd=tmp_path, capture_output=True, check=False,
            env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert (ran.stdout + ran.stderr).isascii(), words
        assert b"Traceback" not in ran.stderr


def rows(lines: list[str]) -> int:
    return sum(line.rstrip("▏▎▍▌▋▊▉█ ").endswith(" B") and " cpu " in line for line in lines)


def test_a_command_that_the_terminal_breaks_takes_several_lines(
    fixtures: Path, tmp_path: Path, command: Command, terminal: Callable[[int], None]
) -> None:
    """A path in a suggested command is not broken into lines, and the table has fewer rows so that the output still
    fits the terminal.
    """
    terminal(80)
    path = shutil.copy(fixtures / "resnet18.pt", tmp_path / ("x" * 200 + ".pt"))
    convert(path, dst := tmp_path / ("y" * 200 + ".pt"), map_location="npu:0")
    lines = click.unstyle(command("inspect", dst).out).splitlines()
    assert max(map(len, lines)) > 200
    assert 22 <= sum(-(-max(1, len(line)) // 80) for line in lines) < 24


def test_tree_groups_modules(fixtures: Path, command: Command) -> None:
    """``--tree`` shows a level for each module, with the number of tensors below it. Levels with one branch are
    joined.
    """
    path = fixtures / "dataparallel.pt"
    total = len(inspect(path).tensors)
    command("inspect", path, "--tree", out=(f"\nmodule.  {total} tensors", "\n    weight  float32"))


def test_terminal_escapes_are_escaped(tmp_path: Path, command: Command) -> None:
    """Control characters in a file's names and texts are escaped in the output."""
    torch.save({"a\x1b[2Jb\u202ec": torch.zeros(1), "text": "\x07bell"}, tmp_path / "x.pt")
    for extra in ([], ["--tree"]):
        printed = command("inspect", tmp_path / "x.pt", *extra, out="\\x1b").out
        assert not {"\x1b", "\u202e", "\x07"} & set(printed)
