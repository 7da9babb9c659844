"""Work that stops where it waits for the disk, so that its caller can do other work meanwhile.

Such work is a generator. It yields each wait, and what the wait raises is thrown into it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from functools import wraps
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class FileSync(NamedTuple):
    """A wait until the bytes of the open file `fd` are on the disk. Calling it raises OSError."""

    fd: int

    def __call__(self) -> None:
        os.fsync(self.fd)


class FolderSync(NamedTuple):
    """A wait until all names that stand in `folder` when it begins are on the disk. Calling it raises OSError."""

    folder: Path

    def __call__(self) -> None:
        sync_folder(self.folder)


DiskWait: TypeAlias = "FileSync | FolderSync"
#: Work that yields each of its waits, and returns a result.
Steps: TypeAlias = Generator[DiskWait, None, _T]


def run_steps(steps: Steps[_T]) -> _T:
    """Do `steps` in this thread, with all their waits; give their result."""
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


def waited_for(steps: Callable[_P, Steps[_T]]) -> Callable[_P, _T]:
    """The function that does in this thread, with all its waits, what `steps` gives the steps of."""

    @wraps(steps)
    def do(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run_steps(steps(*args, **kwargs))

    return do


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
