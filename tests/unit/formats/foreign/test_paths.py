"""Arguments that are not valid paths. The error suggests what to type instead, and nothing is written."""

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
def test_the_error_suggests_what_to_type(
    here: Path, words: list[str], status: int, said: str, command: Command
) -> None:
    """The error for a stream, a path of Windows or a wrong size suggests what to type instead. If two words of a
    command are wrong, one of them is reported.
    """
    torch.save({"w": torch.ones(1)}, "m.pt")
    os.mkfifo("fifo")
    command(*words, status=status, err=said)
    assert sorted(os.listdir(here)) == ["fifo", "m.pt"]


def test_a_file_with_the_name_of_a_windows_path(here: Path, command: Command) -> None:
    """A file with the name of a Windows path, which contains a colon and a backslash, is read and written like any
    other.
    """
    torch.save({"w": torch.ones(1)}, "m.pt")
    os.rename("m.pt", r"C:\m.pt")
    command("inspect", r"C:\m.pt")
    command("convert", r"C:\m.pt", r"./C:\o.pt")
    assert (here / r"C:\o.pt").exists()
