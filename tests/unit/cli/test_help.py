"""Tests of ``ckptconv help``, which shows the page for an error or a topic. The tests of recipes use tracebacks of
torch.
"""

from __future__ import annotations

import io
import sys

import pytest

from ckptconv.cli.main import main
from tests.support.command import Command


@pytest.mark.parametrize(
    ("text", "first", "typed"),
    [
        ("Attempting to deserialize object on CUDA device 1", "device 1 but", "--map cuda:1=cuda:0"),
        ("module.", 'Unexpected key(s) in state_dict: "module.conv.weight"', "--strip-prefix module."),
        ("completion", "with Tab", "_CKPTCONV_COMPLETE=zsh_source"),
        ("half precision", "in half the bytes", "--dtype bf16"),
        ("No module named 'ultralytics'", "No module named 'models'", "--state-dict"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "OutOfMemoryError", "--to cpu"),
        ("unexpected EOF, expected 7811 more bytes. The file might be corrupted", "central directory", "inspect"),
        ("deepspeed", "ZeRO", "ckptconv convert"),
    ],
)
def test_the_page_for_a_text_contains_a_command(text: str, first: str, typed: str, command: Command) -> None:
    said = command("help", *text.split(), out=typed).out
    assert first in said.splitlines()[0]
    assert max(map(len, said.splitlines())) <= 120 and "](" not in said


def test_several_pages_are_named_with_their_commands(command: Command) -> None:
    said = command("help", "module.").out
    assert said.count("See also: ") == 2 and "--add-prefix module." in said


def test_a_traceback_from_standard_input(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback of any length can be piped to ``ckptconv help -``."""
    text = "  File 'train.py', line 3\n" * 9000 + "Weights only load failed. Unsupported operand 149\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert command("help", "-").out.startswith("UnpicklingError: Weights only load failed ... Unsupported operand 149")


@pytest.mark.parametrize("text", ["", "xyzzy", "\x1b[31m"])
def test_a_text_without_a_page(text: str, command: Command) -> None:
    said = command("help", text, *([] if text else ["\n"]), status=1, err="ckptconv inspect FILE").err
    assert "\x1b" not in said


def test_the_name_of_a_command_shows_its_options(command: Command) -> None:
    assert command("help", "undo").out == command("undo", "-h").out
    assert command("help").out == command("-h").out
    assert main(["help", "-h"]) == 0
