"""Reading and writing at an offset on systems without pread and pwrite: seek, then read or write, under a lock."""

from __future__ import annotations

import os
import threading

_MOST = 1 << 24  # bytes of one call
_LOCKS = [threading.Lock() for _ in range(32)]  # shared by the descriptors with the same remainder


def pread(fd: int, length: int, offset: int) -> bytes:
    """Return at most `length` bytes at `offset`. Return no bytes at the end of the file. Raises OSError."""
    with _LOCKS[fd % len(_LOCKS)]:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, min(length, _MOST))


def pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write `data`, or its first bytes, at `offset`. Return the number of bytes written. Raises OSError."""
    with _LOCKS[fd % len(_LOCKS)]:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, memoryview(data)[:_MOST])


def pread_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Read bytes at `offset` into `buffer`. Return the number of bytes read, 0 at the end of the file.

    Raises OSError.
    """
    data = pread(fd, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)
