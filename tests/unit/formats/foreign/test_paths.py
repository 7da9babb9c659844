"""What is typed in place of a path: the error says what to type instead, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.command import Command

SAVE = "save it to a file first: streams cannot be read"
CAT = "write to a file, then send it with cat"
WINDOWS = "a Windows path, which this system does not understand; under WSL, use "


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["inspect", "-"], 1, "save it to a file first"),
        (["convert", "-", "o.pt"], 2, "save it to a file first"),
        (["convert", "m.pt", "-"], 2, CAT),
        (["convert", "-", "-"], 2, CAT),
        (["inspect", "fifo"], 1, SAVE),
        (["verify", "fifo"], 1, SAVE),
        (["inspect", "/dev/null"], 1, SAVE),
        (["convert", "m.pt", "fifo"], 1, CAT),
        (["convert", "m.pt", "/dev/null", "--force"], 1, CAT),
        (["inspect", r"C:\Users\me\m.pt"], 1, WINDOWS + "/mnt/c/Users/me/m.pt"),
        (["inspect", "d:/m x.pt"], 1, WINDOWS + "'/mnt/d/m x.pt'"),
        (["convert", "m.pt", r"C:\m.pt"], 2, WINDOWS + "/mnt/c/m.pt"),
        (
            ["convert", "m.pt", "o.pt", "--max-shard-size", "5GiBB"],
            2,
            "got 5GiBB); did you mean: --max-shard-size 5GB",
        ),
        (["convert", "m.pt", "o.pt", "--max-shard-size", "5GB"], 2, "--max-shard-size needs a folder"),
    ],
)
def test_the_error_says_what_to_do(here: Path, words: list[str], status: int, said: str, command: Command) -> None:
    """Of streams, of Windows' paths, and of two things that are wrong in one line the first one."""
    torch.save({"w": torch.ones(1)}, "m.pt")
    os.mkfifo("fifo")
    command(*words, status=status, err=said)
    assert sorted(os.listdir(here)) == ["fifo", "m.pt"]


def test_a_file_that_is_called_so(here: Path, command: Command) -> None:
    """A name with a colon and a backslash is one that a file can have here."""
    torch.save({"w": torch.ones(1)}, "m.pt")
    os.rename("m.pt", r"C:\m.pt")
    command("inspect", r"C:\m.pt")
    command("convert", r"C:\m.pt", r"./C:\o.pt")
    assert (here / r"C:\o.pt").exists()
