"""Filesystems that are mounted for a while, which needs root."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["mounted"]

_CLONE_NEWNS = 0x20000  # linux/sched.h


@contextmanager
def mounted(at: Path, *words: object) -> Iterator[Path]:
    """What ``mount`` makes of `words`, at the folder `at`, which is made if it is not there.

    Only this process and its children see it.
    """
    _mount_apart()
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", *map(str, words), str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


@cache
def _mount_apart() -> None:
    """Give this process mounts of its own: if it is killed, the kernel unmounts them, and frees their loop devices."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "the process gets no mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
