"""Filesystems that are mounted temporarily, which requires root."""

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
    """Mount a filesystem at the folder `at` with the arguments `words` of ``mount``, and yield `at`.

    The folder is created if it does not exist. Only this process and its children see the mount.
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
    """Give this process a separate mount namespace. If the process is killed, the kernel unmounts its filesystems and
    frees their loop devices.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "the process gets no mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
