"""Filesystems that are mounted for a while, which needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["mounted"]


@contextmanager
def mounted(at: Path, *words: object) -> Iterator[Path]:
    """What ``mount`` makes of `words`, at the folder `at`, which is made if it is not there."""
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", *map(str, words), str(at)], check=True, capture_output=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
