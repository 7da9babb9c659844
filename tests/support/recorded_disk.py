"""A disk that records all requests in order.

Usage: ``python recorded_disk.py FILE IMAGE LOG`` serves the file IMAGE as FILE. The program ends when FILE is unmounted
or when its parent process is dead.

A loop device on FILE sends every write and every flush of its filesystem to this process through the kernel's FUSE
(linux/fuse.h). The process executes one request after another, and records each one before it answers. Therefore the
log is the history of a disk. After a loss of power, the disk contains everything that was written before the last
flush, and any part of the later writes (:meth:`History.cut`). Data that is still in the kernel's memory or caches is
not in the log.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_IN = struct.Struct("<IIQQIIIHH")  # fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, ...
_OUT = struct.Struct("<IiQ")  # fuse_out_header: len, error, unique
_AT = struct.Struct("<QQI")  # the start of fuse_read_in and fuse_write_in: fh, offset, size
_WRITE_HEAD = 40  # bytes of fuse_write_in
_ATTRIBUTES = struct.Struct("<QII6Q10I")
_FORGET, _GETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT = 2, 3, 14, 15, 16, 17, 18, 20, 25, 26
_INTERRUPT, _BATCH_FORGET = 36, 42
_MOST = 128 << 10  # largest number of bytes in a request
_BUFFER = 1 << 20
_FOPEN_DIRECT_IO = 1
_BIG_WRITES = 1 << 5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

#: The head of a record of the log: an offset, and the length of the bytes that follow. A flush has the length 0.
_RECORD = struct.Struct("<QQ")
_SECTOR = 512  # the unit that a disk writes completely or not at all


def serve(file: str, image: BinaryIO, log: BinaryIO) -> None:
    """Answer the requests of the kernel until `file` is unmounted. `log` must not be buffered."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode={stat.S_IFREG:o},user_id=0,group_id=0".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"disk", os.fsencode(file), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "cannot mount")
    size = os.fstat(image.fileno()).st_size
    while True:
        try:
            request = os.read(device, _BUFFER)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            raise
        _, opcode, unique, *_ = _IN.unpack_from(request)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            continue
        answer = _answer(opcode, request[_IN.size :], size, image, log)
        code, data = (-errno.ENOSYS, b"") if answer is None else (0, answer)
        os.write(device, _OUT.pack(_OUT.size + len(data), code, unique) + data)


def _answer(opcode: int, body: bytes, size: int, image: BinaryIO, log: BinaryIO) -> bytes | None:
    """Return the answer for the kernel, or None if the request is not supported."""
    if opcode == _INIT:
        return struct.pack("<IIIIHHIIHHII", 7, 31, _MOST, _BIG_WRITES, 1, 1, _MOST, 1, 0, 0, 0, 0) + bytes(24)
    if opcode == _GETATTR:
        numbers = (1, size, size // 512, 0, 0, 0, 0, 0, 0, stat.S_IFREG | 0o600, 1, 0, 0, 0, 4096, 0)
        return _ATTRIBUTES.pack(3600, 0, 0, *numbers)
    if opcode == _OPEN:
        return struct.pack("<QII", 1, _FOPEN_DIRECT_IO, 0)
    if opcode == _READ:
        _, offset, length = _AT.unpack_from(body)
        return os.pread(image.fileno(), length, offset)
    if opcode == _WRITE:
        _, offset, length = _AT.unpack_from(body)
        data = body[_WRITE_HEAD : _WRITE_HEAD + length]
        log.write(_RECORD.pack(offset, length) + data)
        return struct.pack("<II", os.pwrite(image.fileno(), data, offset), 0)
    if opcode == _FSYNC:
        log.write(_RECORD.pack(0, 0))
        return b""
    if opcode == _STATFS:
        return struct.pack("<5Q4I", size // 4096, 0, 0, 1, 0, 4096, 255, 4096, 0) + bytes(24)
    return b"" if opcode in (_RELEASE, _FLUSH) else None


def records(log: bytes) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield the requests in `log`: the end of the record in `log`, the offset, and the bytes (None for a flush)."""
    at = 0
    while at < len(log):
        offset, length = _RECORD.unpack_from(log, at)
        at += _RECORD.size + length
        yield at, offset, log[at - length : at] if length else None


class History:
    """The disk over time. `image` contains the first state of the disk and everything that is durable so far."""

    def __init__(self, image: Path, log: bytes) -> None:
        self.image = image
        self._records = list(records(log))
        self._next = 0
        self._pending: list[tuple[int, bytes]] = []  # written since the last flush

    @property
    def ends(self) -> list[int]:
        """The ends of the records in the log, which are all moments at which power can be lost."""
        return [end for end, _, _ in self._records]

    def go_to(self, end: int) -> None:
        """Apply all records up to `end`. Going back is not possible."""
        with self.image.open("r+b") as file:
            while self._next < len(self._records) and self._records[self._next][0] <= end:
                _, offset, data = self._records[self._next]
                self._next += 1
                if data is not None:
                    self._pending.append((offset, data))
                    continue
                for at, each in self._pending:
                    os.pwrite(file.fileno(), each, at)
                self._pending.clear()

    def cut(self, disk: Path, choice: random.Random) -> str:
        """Simulate a loss of power: write a part of the unflushed data to `disk`, which is a copy of the image.

        Return how the part was chosen: all data, nothing, some of the writes, or some of their sectors. A write at
        offset 0 is never divided, because it contains the superblock, and ext4 refuses a superblock with an old sector.
        """
        how = choice.choice(["all", "nothing", "writes", "sectors"])
        with disk.open("r+b") as file:
            for offset, data in self._pending:
                step = _SECTOR if how == "sectors" and offset else len(data)
                for at in range(0, len(data), step):
                    if how == "all" or (how != "nothing" and choice.random() < 0.5):
                        os.pwrite(file.fileno(), data[at : at + step], offset + at)
        return how


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(sys.argv[2], "r+b", buffering=0) as image, open(sys.argv[3], "wb", buffering=0) as log:
        serve(sys.argv[1], image, log)
