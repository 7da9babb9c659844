"""Filesystem objects that can exist at the path of a regular file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["NO_FILES"]

#: Functions that create an object at a path, by the kind of the object.
NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "FIFO": lambda path: os.mkfifo(path),  # looked up when it is called, because not every system has it
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
