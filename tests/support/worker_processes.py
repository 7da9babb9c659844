"""Functions that find the processes that a conversion starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["our_workers", "processes_with"]


def processes_with(mark: str) -> list[int]:
    """Return the ids of the processes whose environment contains `mark`, without those that have ended."""
    return _found("environ", mark)


def our_workers() -> list[int]:
    """Return the ids of the worker processes that this process has started and that have not ended."""
    started = _found("cmdline", "ckptconv.conversion.worker")
    return [pid for pid in started if f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()]


def _found(file: str, text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / file).read_bytes():
                found.append(int(folder.name))
    return found
