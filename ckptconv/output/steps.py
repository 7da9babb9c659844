"""Work that stops wherever the disk has to be waited for, so that whoever runs it can do other work meanwhile.

Such work is a generator: it yields each wait, and gets what that raises thrown in.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

__all__ = ["DiskWait", "FileSync", "FolderSync", "Steps", "run_steps", "sync_folder"]

_T = TypeVar("_T")


class FileSync(NamedTuple):
    """Let the bytes of the open file `fd` reach the disk. Raises OSError."""

    fd: int

    def __call__(self) -> None:
        os.fsync(self.fd)


class FolderSync(NamedTuple):
    """Let the names in `folder` reach the disk; one serves all names that stood there when it began. Raises OSError."""

    folder: Path

    def __call__(self) -> None:
        sync_folder(self.folder)


DiskWait: TypeAlias = "FileSync | FolderSync"
#: Work that gives a result, and yields what to wait for on the way.
Steps: TypeAlias = Generator[DiskWait, None, _T]


def run_steps(steps: Steps[_T]) -> _T:
    """Do `steps` here, and wait for the disk whenever they ask for it; what comes of them."""
    try:
        wait = next(steps)
        while True:
            try:
                wait()
            except BaseException as error:
                wait = steps.throw(error)
            else:
                wait = next(steps)
    except StopIteration as end:
        result: _T = end.value
        return result


def sync_folder(folder: Path) -> None:
    """Let the names in `folder` reach the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
