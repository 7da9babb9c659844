"""Options that match nothing. The table in docs/no-match.md describes the behavior, and each of its rows is tested."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import ckptconv
from tests.support import zoo
from tests.support.command import Command
from tests.support.conversions import refused, saved_at

DOC = (Path(__file__).parents[3] / "docs" / "no-match.md").read_text()
ROWS = dict(re.findall(r"^\| `--(.*?)` \| .* \| (.*? \| .*?) \|$", DOC, re.MULTILINE))

#: The options for each row. They match nothing in ``{'w': ...}`` on the CPU, and something in another file.
TYPED = {
    "select PATH": "--select model",
    "include GLOB": "--include model.*",
    "drop PATH": "--drop model.w",
    "exclude GLOB": "--exclude model.*",
    "strip-prefix P": "--strip-prefix model.",
    "rename REGEX REPL": "--rename ^model[.] net.",
    "regroup RULE": "--regroup model.{n}=net.{n}",
    "add-prefix P": "--add-prefix net.",
    "dtype GLOB=D": "--dtype model.*=bf16",
    "map WORD=NEW": "--map odd:1=cpu",
    "map OLD=NEW": "--map cuda:1=cpu",
    "to DEVICE": "--to cpu",
    "dtype D": "--dtype float32",
    "unwrap": "--unwrap",
    "optimizer FORM": "--optimizer names",
    "loadable": "--loadable",
    "compact": "--compact",
}
STATUS = {"error": 1, "usage error": 2, "note": 0}


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    """Return the path of a checkpoint in which each option matches nothing: it contains only a tensor ``w`` on
    the CPU.
    """
    return saved_at(tmp_path / "a.pt", {"w": torch.ones(3)})


def test_each_row_is_tested() -> None:
    """``TYPED`` contains exactly the rows of the page."""
    assert ROWS.keys() == TYPED.keys()


@pytest.mark.parametrize("row", ROWS)
def test_one_file(nothing: Path, row: str, command: Command) -> None:
    """For a single file, the command fails and writes nothing, or it prints a note and writes the output."""
    if row == "add-prefix P":
        torch.save([torch.ones(3)], nothing)
    word = ROWS[row].split(" | ")[0]
    out = nothing.with_name("out.pt")
    said = command("convert", nothing, out, *shlex.split(TYPED[row]), status=STATUS[word])
    assert ("  note  " in said.err) == out.exists() == (word == "note")


@pytest.mark.parametrize("row", ROWS)
def test_a_file_of_several(nothing: Path, row: str, command: Command) -> None:
    """In a batch, a file in which the option matches is always converted. The file without a match is converted or left
    out, as the table states.
    """
    if row == "add-prefix P":
        torch.save([torch.ones(3)], nothing)
    beside = nothing.with_name("b.pt")
    weights = {"model.w": torch.ones(3), "v": torch.ones(3), "model.0": torch.ones(3)}
    zoo.save({"model": weights} if row == "select PATH" else weights, beside, ("odd:1",))
    word = ROWS[row].split(" | ")[1]
    out = nothing.with_name("out")
    command("convert", nothing, beside, f"{out}/", *shlex.split(TYPED[row]), status=0 if word == "note" else 3)
    assert (out / "b.pt").exists() and (out / "a.pt").exists() == (word == "note")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cuda0", "cuda:0"),
        ("0", "cuda:0"),
        ("3", "cuda:3"),
        ("cuda:*", "cuda"),
        ("CUDA:1", "cuda:1"),
        ("cuda:01", "cuda:1"),
        ("gpuu", "gpu"),
        ("all", "any"),
        ("mps0", "mps"),
        ("rocm:2", "cuda:2"),
        ("cuda:300", "cuda"),
    ],
)
def test_a_word_that_is_not_a_device(nothing: Path, typed: str, meant: str, command: Command) -> None:
    """A word that is not a device is refused, and the error suggests the nearest valid one. The format of the output
    does not matter. The Python API and ``--to`` make the same suggestion.
    """
    for name in ("out.pt", "out.safetensors"):
        out = nothing.with_name(name)
        command("convert", nothing, out, "--map", f"{typed}=cpu", status=2, err=f"--map {meant}=cpu may be meant")
        assert not out.exists()
    refused(
        ckptconv.UsageError,
        re.escape(f"map_location={{{meant!r}: 'cpu'}} may be meant"),
        nothing,
        nothing.with_name("out.pt"),
        map_location={typed: "cpu"},
    )
    if typed not in ("all", "cuda:300"):
        command("convert", nothing, nothing.with_name("out.pt"), "--to", typed, status=2, err=f"did you mean {meant}?")


def test_a_location_tag_of_the_file_is_a_device(nothing: Path, command: Command) -> None:
    """A location tag that occurs in the file is a valid device, exactly as it is written."""
    zoo.save({"w": torch.ones(3)}, nothing, ("odd:1",))
    out = nothing.with_name("out.pt")
    command("convert", nothing, out, "--map", "odd:=cpu", status=2, err="odd:1")
    command("convert", nothing, out, "--map", "odd:1=cpu")
    assert torch.load(out)["w"].device.type == "cpu"
