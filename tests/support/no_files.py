"""What can stand where a regular file should."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["NO_FILES"]

#: By what it is: a function that makes it at a path.
NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "FIFO": lambda path: os.mkfifo(path),  # asked for when a test needs it: not every system has one
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
