"""Several files as one text of bytes, so that a fuzzer can change what stands in a folder: NAME, a newline, the length,
a newline, the bytes, one file behind another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["pack", "unpack", "write"]

_HEAD = re.compile(rb"([^\n]{1,120})\n([0-9]{1,6})\n")


def pack(files: Mapping[str, bytes]) -> bytes:
    """`files` by name, as one."""
    return b"".join(
        b"%s\n%d\n%s" % (name.encode("utf-8", "surrogateescape"), len(data), data) for name, data in files.items()
    )


def unpack(packed: bytes) -> dict[str, bytes]:
    """The files in `packed`, as far as it makes sense; the last one can be truncated."""
    files: dict[str, bytes] = {}
    at = 0
    while head := _HEAD.match(packed, at):
        end = head.end() + int(head[2])
        files[head[1].decode("utf-8", "surrogateescape")] = packed[head.end() : end]
        at = end
    return files


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """`files`, into `folder`; one with a name that leads elsewhere is none."""
    for name, data in files.items():
        if name not in (".", "..") and not {"/", "\0"} & set(name):
            (folder / name).write_bytes(data)
