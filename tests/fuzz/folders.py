"""Several files as one byte string, so that a fuzzer can change the content of a folder.

Each file is stored as its name, a newline, its length, a newline and its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["pack", "unpack", "write"]

_HEAD = re.compile(rb"([^\n]{1,120})\n([0-9]{1,6})\n")


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return `files`, which maps names to bytes, as one byte string."""
    return b"".join(
        b"%s\n%d\n%s" % (name.encode("utf-8", "surrogateescape"), len(data), data) for name, data in files.items()
    )


def unpack(packed: bytes) -> dict[str, bytes]:
    """Return the files in `packed` until the first invalid header. The last file can be truncated."""
    files: dict[str, bytes] = {}
    at = 0
    while head := _HEAD.match(packed, at):
        end = head.end() + int(head[2])
        files[head[1].decode("utf-8", "surrogateescape")] = packed[head.end() : end]
        at = end
    return files


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write `files` to `folder`. Names that lead to other folders are ignored."""
    for name, data in files.items():
        if name not in (".", "..") and not {"/", "\0"} & set(name):
            (folder / name).write_bytes(data)
