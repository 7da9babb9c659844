"""Tests of the suggestions for words that users type instead of commands and options. The error suggests the intended
command line, and this command line works.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from ckptconv.cli.guesses import COMMANDS, OPTIONS, PATHS
from tests.support.command import Command, in_one_line
from tests.support.suggestions import COMMANDS as OURS
from tests.support.suggestions import FLAGS

MEANT = {
    # flags
    "convert ddp.pt o.pt --device cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --device=cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt -device cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt --to cpu --dst o.pt": "convert ddp.pt --to cpu o.pt",
    "convert ddp.pt -o o.pt --to cpu": "convert ddp.pt --to cpu o.pt",
    "convert --output o.pt ddp.pt": "convert ddp.pt o.pt",
    "convert ddp.pt o.pt --map_location cpu": "convert ddp.pt o.pt --map-location cpu",
    "convert ddp.pt o.pt --strip": "convert ddp.pt o.pt --strip-prefix module.",
    "convert --strip ddp.pt o.pt": "convert --strip-prefix module. ddp.pt o.pt",
    "convert ddp.pt o.pt --remove-prefix module.": "convert ddp.pt o.pt --strip-prefix module.",
    "convert ddp.pt o.pt --half": "convert ddp.pt o.pt --dtype fp16",
    "convert ddp.pt o.pt --fp16": "convert ddp.pt o.pt --dtype fp16",
    "convert ddp.pt o --out-format safetensors": "convert ddp.pt o --format safetensors",
    "convert ddp.pt --list": "inspect ddp.pt",
    "inspect ddp.pt --list": "inspect ddp.pt",
    "inspect ddp.pt --tensors": "inspect ddp.pt",
    "convert ddp.pt o.pt --gpu 0": "convert ddp.pt o.pt --to cuda:0",
    "convert ddp.pt o.pt --mps": "convert ddp.pt o.pt --to mps",
    "convert ddp.pt o.pt --remove-module": "convert ddp.pt o.pt --strip-prefix module.",
    "convert ddp.pt o.pt --replace-prefix module. net.": "convert ddp.pt o.pt --rename module. net.",
    "convert ddp.pt o.pt --uncompile --cpu -f": "convert ddp.pt o.pt --unwrap --to cpu -f",
    "convert ddp.pt o.pt --legacy": "convert ddp.pt o.pt --format legacy",
    "convert ddp.pt o.pt --recursive --cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --shrink": "convert ddp.pt o.pt --compact",
    "convert run.pt o.pt --drop-optimizer": "convert run.pt o.pt --drop optimizer",
    "convert run.pt o.pt --ema": "convert run.pt o.pt --select ema",
    "convert run.pt o.pt --extract model": "convert run.pt o.pt --select model",
    "convert ddp.pt o.pt --dtype bf16 --keep-fp32 *.w": "convert ddp.pt o.pt --dtype bf16 --dtype '*.w=fp32'",
    "convert ddp.pt o --shards 4": "convert ddp.pt o --max-shard-size 5GB",
    # values
    "convert ddp.pt o.pt --precision 16": "convert ddp.pt o.pt --dtype fp16",
    "convert ddp.pt o.pt --precision bf16-mixed": "convert ddp.pt o.pt --dtype bf16",
    "convert ddp.pt o.pt --precision=32-true": "convert ddp.pt o.pt --dtype fp32",
    "convert ddp.pt o.pt --bits 16": "convert ddp.pt o.pt --dtype fp16",
    "convert ddp.pt o.pt --torch-dtype float61": "convert ddp.pt o.pt --dtype float16",
    "convert ddp.pt o.pt --fp8": "convert ddp.pt o.pt --dtype float8_e4m3fn",
    "convert ddp.pt o.pt --devices cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --devices 1": "convert ddp.pt o.pt --to cuda:1",
    "convert ddp.pt o.pt --device CPU": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --device cuda 1": "convert ddp.pt o.pt --to cuda:1",
    "convert ddp.pt o.pt --device cuda0": "convert ddp.pt o.pt --to cuda:0",
    "convert ddp.pt o.pt --device cuda:0=cpu": "convert ddp.pt o.pt --map cuda:0=cpu",
    "convert ddp.pt o.pt -d cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --safetensors": "convert ddp.pt o.safetensors --format safetensors",
    "convert ddp.pt o.pt --safe_serialization": "convert ddp.pt o.safetensors --format safetensors",
    "convert ddp.pt o.pt --weights-only True": "convert ddp.pt o.pt --state-dict",
    "inspect ddp.pt --stats": "inspect ddp.pt --values",
    "inspect ddp.pt --check-nan": "inspect ddp.pt --fail-on nan",
    "inspect ddp.pt --shapes": "inspect ddp.pt",
    # typing errors in guesses, abbreviated or useless options, options before the command, -o without an output
    "convert ddp.pt o.pt --devise cpu": "convert ddp.pt o.pt --to cpu",
    "convert ddp.pt o.pt --precison bf16": "convert ddp.pt o.pt --dtype bf16",
    "convert ddp.pt o.pt --dry": "convert ddp.pt o.pt --dry-run",
    "inspect ddp.pt --gpu": "convert ddp.pt OUT --to cuda",
    "inspect -q ddp.pt": "inspect ddp.pt",
    "inspect ddp.pt --silent": "inspect ddp.pt",
    "-q inspect ddp.pt": "inspect ddp.pt",
    "-f convert ddp.pt o.pt": "convert -f ddp.pt o.pt",
    "--quiet verify ddp.pt": "verify --quiet ddp.pt",
    "convert ddp.pt --to cpu -o": "convert ddp.pt --to cpu OUT",
    # several guesses, options of other commands, and typing errors
    "convert --input ddp.pt --output o.pt --cpu -y": "convert ddp.pt --to cpu --force o.pt",
    "convert ddp.pt o.pt --dtpye bf16": "convert ddp.pt o.pt --dtype bf16",
    "convert ddp.pt o.pt --dry_run": "convert ddp.pt o.pt --dry-run",
    "convert ddp.pt o.pt --tree": "inspect ddp.pt --tree",
    "verify ddp.pt --to cpu": "convert ddp.pt OUT --to cpu",
    "inspect ddp.pt --verbose": "inspect ddp.pt --all",
    "diff ddp.pt ddp.pt --strip module.": "diff ddp.pt ddp.pt --strip-prefix module.",
    "verify ddp.pt -s": "verify ddp.pt --quiet",
    # commands
    "info ddp.pt": "inspect ddp.pt",
    "show ddp.pt": "inspect ddp.pt",
    "ls ddp.pt -l": "inspect ddp.pt",
    "to-safetensors ddp.pt o.safetensors": "convert ddp.pt o.safetensors --format safetensors",
    "strip ddp.pt": "convert ddp.pt OUT --strip-prefix module.",
    "split ddp.pt": "convert ddp.pt OUT --max-shard-size 5GB",
    "shrink ddp.pt o.pt": "convert ddp.pt o.pt --compact",
    "count ddp.pt": "inspect ddp.pt",
    "doctor ddp.pt": "inspect ddp.pt",
    "fix ddp.pt": "inspect ddp.pt",
    "version": "--version",
    "-v": "--version",
    "ddp.pt --cpu": "convert ddp.pt OUT --to cpu",
    "ddp.pt o.pt --cpu": "convert ddp.pt o.pt --to cpu",
    "conver ddp.pt o.pt": "convert ddp.pt o.pt",
    "ddp.pt": "inspect ddp.pt",
    "ddp.pt o.pt": "convert ddp.pt o.pt",
    "--to cpu ddp.pt o.pt": "convert --to cpu ddp.pt o.pt",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with three checkpoints: a wrapped model, a training file, and a state dict of two tensors."""
    monkeypatch.chdir(tmp_path)
    torch.save({"module.w": torch.ones(3)}, "ddp.pt")
    torch.save({"model": {"w": torch.ones(3)}, "ema": {"w": torch.ones(3)}, "optimizer": {}}, "run.pt")
    torch.save({"a.w": torch.ones(3), "a.b": torch.ones(3)}, "two.pt")


@pytest.mark.parametrize("typed", MEANT)
def test_the_intended_command_line_is_suggested(typed: str, command: Command) -> None:
    """A command line with a guess fails before anything is written. The error suggests the complete intended command
    line, which succeeds.
    """
    said = command(*typed.split(), status=2)
    assert said.err.count("\n") in (2, 3) and said.out == ""
    meant = in_one_line(said.err).strip().rpartition("did you mean: ckptconv ")[2]
    assert meant == MEANT[typed]
    assert sorted(each.name for each in Path().iterdir()) == ["ddp.pt", "run.pt", "two.pt"]
    command(*shlex.split(meant), status=1 if meant.startswith("diff") else 0)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            "convert ddp.pt o.pt --frobnicate",
            "convert has no option --frobnicate; to list its options: ckptconv convert -h",
        ),
        (
            "convert ddp.pt o.pt --half --frobnicate",
            "convert has no option --half; to list its options: ckptconv convert -h",
        ),
        (
            "convert ddp.pt o.pt --quantize 8bit",
            "convert has no option --quantize; to list its options: ckptconv convert -h",
        ),
        (
            "convert ddp.pt o --format hf",
            "--format has no hf (expected pt, legacy, pickle, safetensors, dcp); did you mean: --format s",
        ),
        ("convert ddp.pt o --format=orbax", "--format has no orbax (expected pt, legacy, pickle, safetensors, dcp)\n"),
        ("convert ddp.pt o.pt --rename s/module/net/", "did you mean: --rename module net"),
        ("convert ddp.pt o.pt --map cuda:1:cuda:0", "did you mean: --map cuda:1=cuda:0"),
        ("frobnicate ddp.pt", "there is no command frobnicate (expected convert, diff"),
        ("convert ddp.pt o.pt --device", "ckptconv convert ddp.pt o.pt --to VALUE"),
        ("convert 'a b.pt' o.pt --cpu", "ckptconv convert 'a b.pt' o.pt --to cpu"),
        ("convert ddp.pt o.pt --bits 8", "convert has no option --bits; to list its options: ckptconv convert -h"),
        (
            "convert ddp.pt o.pt --device auto",
            "convert has no option --device; to list its options: ckptconv convert -h",
        ),
        ("convert ddp.pt o.pt -p module.", "convert has no option -p; to list its options: ckptconv convert -h"),
        ("convert ddp.pt o.pt --dtype fp4", "float8_e5m2)\n"),
        ("convert ddp.pt o.pt --dtype '*.w=16'", "did you mean: --dtype '*.w=fp16'"),
        ("convert ddp.pt o --max-shard-size 5GiBB", "got 5GiBB); did you mean: --max-shard-size 5GB"),
        ("convert ddp.pt o --max-shard-size big", "got big)\n"),
        ("convert ddp.pt o --format .PTH", "--format has no .PTH (expected pt, legacy, pickle, safetensors, dcp)"),
        ("convert ddp.pt o --format PT", "did you mean: --format pt"),
        ("convert ddp.pt o.pt --jobs two", "--jobs 'two' is not a whole number of at least 1 (expected --jobs N)"),
        ("convert ddp.pt o.pt -j 0", "--jobs '0' is not a whole number of at least 1"),
        ("diff ddp.pt run.pt --rtol=1e-3x", "--rtol '1e-3x' is not a number (expected --rtol X)"),
        ("diff ddp.pt run.pt ddp.pt", "Got unexpected extra argument (ddp.pt) (expected ckptconv diff A B)"),
        (r"convert ddp.pt o.pt --rename '(\w+)\.' '$1_'", r"did you mean: --rename '(\w+)\.' '\1_'"),
        (r"convert ddp.pt o.pt --rename '(?P<a>\w+)' '${a}1'", r"--rename '(?P<a>\w+)' '\g<a>1'"),
        (r"convert ddp.pt o.pt --rename '(\w+)' '${1}0'", r"did you mean: --rename '(\w+)' '\g<1>0'"),
        (r"convert ddp.pt o.pt --rename '\w+' '\1'", "put ( ) around the text in the pattern"),
        ("convert ddp.pt o.pt --rename '*.w' w", "in a regular expression, .* means the same as * in a glob"),
        ("completion", "did you mean: ckptconv help completion"),
        ("--install-completion zsh", "did you mean: ckptconv help completion"),
    ],
)
def test_unclear_words(typed: str, words: str, command: Command) -> None:
    """If the intended option or value is not clear, the error suggests no complete command line. Arguments in
    suggestions are quoted, and a missing value is shown as VALUE.
    """
    command(*shlex.split(typed), status=2, err=words)


def test_a_broken_link_is_not_a_pattern(command: Command) -> None:
    """A broken symbolic link is not reported as a quoted pattern."""
    Path("link.pt").symlink_to("nothing.pt")
    assert "pattern" not in command("inspect", "link.pt", status=1).err


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("convert run.pt o.pt --drop optimizer_state_dict", "did you mean optimizer?"),
        (
            r"convert two.pt o.pt --rename '\w+$' w",
            r"put ( ) around it in the pattern and write '\1' in the replacement",
        ),
        ("inspect '*.pt'", "type the pattern without quotes: the shell then gives the names of the files"),
    ],
)
def test_arguments_that_almost_match(typed: str, words: str, command: Command) -> None:
    """If an argument does not match the contents of the file or the folder, the error suggests what probably does."""
    command(*shlex.split(typed), status=1, err=words)


def test_guesses_lead_to_existing_options() -> None:
    """Every guess in the tables leads to an existing option or command, and no guess is the name of an existing one."""
    every = set().union(*FLAGS.values())
    guesses = [guess for _, row in OPTIONS for guess in row.split()]
    for option, row in OPTIONS:
        flag = option.words()[0][0]
        having = {name for name in OURS if flag in FLAGS[name]}
        assert having, flag
        for guess in row.split():
            assert any(f"--{guess}" not in FLAGS[name] for name in having), guess
    assert every.isdisjoint(f"--{guess}" for guess in PATHS)
    assert len(guesses) > 60 and OURS.keys().isdisjoint(COMMANDS)
    assert {name for name, _ in COMMANDS.values()} <= OURS.keys()
