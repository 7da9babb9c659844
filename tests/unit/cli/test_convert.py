"""Tests of the command ``ckptconv convert``: its reports, JSON output, dry runs and errors."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from tests.support.command import Command, in_one_line
from tests.support.reduced import Reduced


def test_to_cpu_strips_and_reports(ddp: Path, command: Command) -> None:
    """``convert --to cpu --strip-prefix`` reports the changed devices and names on standard error, and torch loads the
    output.
    """
    out = ddp.with_name("plain.pt")
    said = command("convert", ddp, out, "--to", "cpu", "--strip-prefix", "module", err=("cuda:0 → cpu", "module."))
    assert said.out == ""
    assert not any(name.startswith("module.") for name in torch.load(out))


def test_convert_json_is_on_stdout(ddp: Path, command: Command) -> None:
    """``--json`` prints a report with a schema version and the size in bytes."""
    report = command.json("convert", ddp, ddp.with_name("o.pt"), "--map", "cuda:0=cuda:1")
    assert report["schema_version"] == 1
    assert report["written"] is True
    assert report["size"] == ddp.with_name("o.pt").stat().st_size
    assert [(d["old"], d["new"]) for d in report["devices"]] == [("cuda:0", "cuda:1")]


def test_dry_run_writes_nothing(ddp: Path, command: Command) -> None:
    """A dry run prints its plan on standard output, with every name if ``-v`` is given, and creates no file."""
    words = "convert", ddp, ddp.with_name("o.pt"), "--strip-prefix", "module.", "-n", "-v"
    printed = command(*words, out="would write").out
    assert printed.count(" → ") == len(torch.load(ddp, map_location="cpu"))
    assert os.listdir(ddp.parent) == ["ddp.pt"]


def test_quiet_prints_nothing(ddp: Path, command: Command) -> None:
    """``-q`` silences the report of a conversion, but not an error."""
    words = "convert", ddp, ddp.with_name("o.pt"), "--to", "cpu", "-q"
    assert command(*words) == ("", "")
    command(*words, status=1, err="--force")


def test_unsafe_is_refused_and_carried_inert(tmp_path: Path, command: Command) -> None:
    """A file that calls os.system is refused. With ``--allow-unsafe`` the call is copied as data and is never
    executed.
    """
    attack = Reduced(os.system, (f"touch {tmp_path / 'ran'}",))
    torch.save({"w": torch.zeros(2), "x": attack}, tmp_path / "bad.pt")
    out = tmp_path / "out.pt"
    command("convert", tmp_path / "bad.pt", out, "--to", "cpu", status=1, err="posix.system")
    assert not out.exists()
    command("convert", tmp_path / "bad.pt", out, "--to", "cuda:1", "--allow-unsafe")
    command("inspect", out, out="DANGEROUS")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("flag", ["-n", "--dry-run", "-f", "--to"])
def test_an_option_is_not_a_replacement(fixtures: Path, tmp_path: Path, command: Command, flag: str) -> None:
    """If the replacement after ``--rename`` is missing, an option that follows is not taken as the replacement."""
    line = f"expected the replacement for 'conv', got the option {flag} "
    command("convert", fixtures / "cpu.pt", tmp_path / "out.pt", "--rename", "conv", flag, status=2, err=line)
    assert not (tmp_path / "out.pt").exists()


def test_reports_are_on_stderr_and_results_on_stdout(ddp: Path, command: Command) -> None:
    """Reports about written, skipped and restored files are printed on standard error. Dry runs and JSON are printed on
    standard output.
    """
    out, folder = ddp.with_name("o.pt"), f"{ddp.with_name('out')}/"
    batch = ("convert", ddp, ddp.with_name("copy.pt"), folder)
    shutil.copy(ddp, ddp.with_name("copy.pt"))
    for words in (
        ("convert", ddp, out),
        ("convert", ddp, out, "--skip-existing"),
        batch,
        (*batch, "--skip-existing"),
        ("convert", out, "--in-place", "--to", "cpu"),
        ("undo", out),
    ):
        said = command(*words)
        assert said.out == "" and said.err, words
    for words in (
        ("convert", ddp, out, "-f", "-n"),
        ("convert", ddp, out, "-f", "--json"),
        (*batch, "-f", "-n"),
        (*batch, "-f", "--json"),
        ("convert", out, "--in-place", "--to", "cpu", "-n"),
    ):
        said = command(*words)
        assert said.out and said.err == "", words


def test_one_is_singular(ddp: Path, command: Command) -> None:
    """Messages of several commands use the singular for one item."""
    torch.save({"module.w": torch.ones(1), "n": 1}, ddp)
    said = command("convert", ddp, ddp.with_name("o.pt"), "--state-dict", "--strip-prefix", "module.", status=1).err
    torch.save({"state_dict": {"module.w": torch.ones(1)}, "epoch": 1}, ddp)
    said += command("convert", ddp, ddp.with_name("o.pt"), "--to", "cuda", "--strip-prefix", "module.", "-n").out
    ddp.with_name("out").mkdir()
    said += command("convert", ddp.parent, ddp.with_name("out"), "-n", status=2).err
    said += command("convert", ddp, ddp.with_name("out"), "--select", "state_dict", "-v").err
    said += command("verify", ddp).out
    cut = ddp.with_name("cut.safetensors")
    save_file({"w": torch.ones(1)}, cut)
    cut.write_bytes(cut.read_bytes()[:-1])
    said += command("inspect", cut, status=1, err="1 byte of").err
    assert not re.search(r"(?<![\d,.])1 [a-z]+s\b", said), said


def test_in_place_with_an_option_that_rewrites_tensors(ddp: Path, command: Command) -> None:
    """``--in-place`` with an option that rewrites tensors is refused before anything changes. The error suggests the
    command that writes a new file, with all given options.
    """
    before, out = ddp.read_bytes(), ddp.with_name("out.pt")
    edits = ("--to", "cpu", "--map", "cuda:1=cuda:0", "--dtype", "bf16", "--rename", "^module[.]", "")
    said = command(
        "convert", ddp, *edits, "-i", "--no-undo", status=2, err="--dtype cannot be used with --in-place"
    ).err
    words = shlex.split(in_one_line(said).partition("write a new file: ")[2])
    assert words == ["ckptconv", "convert", str(ddp), "OUT", *edits] and ddp.read_bytes() == before
    command(*words[1:3], out, *words[4:])
    with ckptconv.open(out) as new:
        assert "bfloat16" in {tensor.dtype for tensor in new.tensors.values()}


def test_in_place_with_a_missing_output(ddp: Path, command: Command) -> None:
    """``--in-place`` with a missing last path is refused before anything changes. The error suggests a command without
    the path and a command that writes a new file, with all given options. If another path is missing, the error
    suggests no command.
    """
    here, out, before = ddp, ddp.with_name("out it is.pt"), ddp.read_bytes()
    edits = ("--to", "cpu", "--rename", "a b", "$c", "--rename", "0", "x")
    said = command("convert", here, out, *edits, "-fi", "--no-undo", status=1, err="nothing was changed").err
    typed = " ".join(map(shlex.quote, edits))
    assert f"did you mean: ckptconv convert {here} {typed} --force --in-place --no-undo; or: " in in_one_line(said)
    assert f"; or: ckptconv convert {here} {shlex.quote(str(out))} {typed} --force\n" in in_one_line(said)
    assert here.read_bytes() == before and os.listdir(here.parent) == ["ddp.pt"]
    said = command("convert", out, here, *edits, "-i", status=1, err="nothing was changed").err
    assert "ckptconv convert" not in said and here.read_bytes() == before
