"""What matches nothing: the table in docs/no-match.md is what happens."""

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

#: What is typed for each row: it matches nothing in a checkpoint of ``{'w': ...}`` on the CPU, and something beside it.
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
    """Where each option matches nothing: on the CPU, of one name."""
    return saved_at(tmp_path / "a.pt", {"w": torch.ones(3)})


def test_each_row_is_typed() -> None:
    """Each row of the page is typed here, and no other."""
    assert ROWS.keys() == TYPED.keys()


@pytest.mark.parametrize("row", ROWS)
def test_one_file(nothing: Path, row: str, command: Command) -> None:
    """An error that writes nothing, or a note beside the output."""
    if row == "add-prefix P":
        torch.save([torch.ones(3)], nothing)
    word = ROWS[row].split(" | ")[0]
    out = nothing.with_name("out.pt")
    said = command("convert", nothing, out, *shlex.split(TYPED[row]), status=STATUS[word])
    assert ("  note  " in said.err) == out.exists() == (word == "note")


@pytest.mark.parametrize("row", ROWS)
def test_a_file_of_several(nothing: Path, row: str, command: Command) -> None:
    """Beside one in which it matches: the batch says what was left out, or fails in part."""
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
def test_a_word_that_is_no_device(nothing: Path, typed: str, meant: str, command: Command) -> None:
    """The nearest right word is in the hint, for every format of the output, and for a target alike."""
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


def test_a_tag_that_the_file_has_is_a_device(nothing: Path, command: Command) -> None:
    """Letter for letter, whatever it is."""
    zoo.save({"w": torch.ones(3)}, nothing, ("odd:1",))
    out = nothing.with_name("out.pt")
    command("convert", nothing, out, "--map", "odd:=cpu", status=2, err="odd:1")
    command("convert", nothing, out, "--map", "odd:1=cpu")
    assert torch.load(out)["w"].device.type == "cpu"
