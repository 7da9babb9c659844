"""Destinations of bytes: files, also with direct I/O, which bypasses the page cache.

An output that is large compared with the available memory would displace all other files from the cache, and would not
be in the cache when it is read. `docs/speed.md` has measurements.

Direct writes take their bytes from a mapping of the source, which only the kernel reads. So if the source becomes
shorter, the call fails (EFAULT) and the process goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ckptconv.byteranges import reading
from ckptconv.byteranges.spans import FILESYSTEM_BLOCK, ByteRange, OutFile
from ckptconv.byteranges.threads import Task, Threads
from ckptconv.system import calls, filesystem

WINDOW = 8 << 20  # bytes of one write
_AT_ONCE = 4  # concurrent writes
_SHARE = 2  # files of at least half of the available memory are large: they do not fit into it together with the source
_LEAST = 64 << 20  # bytes: smaller outputs always use the cache
_OLD_LIMIT = "memory.limit_in_bytes"  # the name in version 1 of control groups
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14
#: Errors of the write or of the mapping: not supported (as in FUSE with direct_io), too many files, no memory.
_REFUSED = (
    *(errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP),
    *(errno.ENODEV, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
)


class Destination(Protocol):
    """A file to which bytes are written. ``fd`` is -1 if the kernel has no descriptor for it.

    All methods raise OSError.
    """

    fd: int

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write `data` at the offset `at`. Several threads may do so concurrently."""

    def read(self, at: int, length: int) -> bytes:
        """Return at most `length` bytes at the offset `at`."""

    def start_writeback(self, at: int, length: int) -> None:
        """Start to write these bytes to the disk, without waiting for the end."""


class FileDestination:
    """The open file `fd` as a destination."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write `data` at the offset `at`."""
        view = memoryview(data)
        while view:
            done = calls.pwrite(self.fd, view, at)
            at += done
            view = view[done:]

    def read(self, at: int, length: int) -> bytes:
        """Return at most `length` bytes at the offset `at`."""
        return calls.pread(self.fd, length, at)

    def start_writeback(self, at: int, length: int) -> None:
        """Start to write these bytes to the disk."""
        filesystem.start_writeback(self.fd, at, length)

    def settle(self) -> None:
        """Wait for the end of all writes. Here, every write has already ended."""


def planned_directly(files: tuple[OutFile, ...], target: Path) -> tuple[OutFile, ...]:
    """Return `files`. Those that should be written with direct I/O have `direct` set.

    None is set unless all files together are large compared with the available memory. Then it is set for files that
    consist mostly of copied blocks, if the filesystem allows direct I/O. `target` is the file, or the folder of the
    files.
    """
    total = sum(file.size for file in files)
    if total < _LEAST or total * _SHARE < available_memory():
        return files
    folder = target if target.is_dir() else target.parent
    return tuple(replace(file, direct=2 * _aligned(file) > file.size and _is_possible(file, folder)) for file in files)


def _aligned(file: OutFile) -> int:
    """Return how many bytes of `file` are stored in a source at the same offset modulo a block."""
    at = aligned = 0
    for piece in file.pieces:
        if isinstance(piece, ByteRange) and piece.source.fd >= 0 and (piece.offset - at) % FILESYSTEM_BLOCK == 0:
            aligned += piece.length
        at += piece.length
    return aligned


def _is_possible(file: OutFile, folder: Path) -> bool:
    """Return whether `file` can be written with direct I/O in `folder`, and cannot share blocks with its source
    instead.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.close(_reopened(fd))
        return not shares_blocks(fd, file)
    except OSError:
        return False
    finally:
        os.close(fd)


def shares_blocks(fd: int, file: OutFile) -> bool:
    """Return whether the open file `fd` can share blocks with the source of the longest range of `file`.

    The attempt may write a block of that range to `fd`.
    """
    ranges = (span for piece in file.pieces for span in piece.ranges())
    longest = max(ranges, key=lambda span: span.length, default=None)
    if longest is None or longest.source.fd < 0 or min(longest.source.size, file.size) < FILESYSTEM_BLOCK:
        return False
    return filesystem.share_block(longest.source.fd, fd, FILESYSTEM_BLOCK)


def _reopened(fd: int) -> int:
    """Open the file `fd` again for direct I/O. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)


def available_memory() -> int:
    """Return how many bytes of files fit into the page cache.

    This is the available memory of the system, or the limit of the process's control groups if that is lower.
    """
    limits = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        limits.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            folder, name = ("/sys/fs/cgroup", "memory.max") if not kinds else ("/sys/fs/cgroup/memory", _OLD_LIMIT)
            if not kinds or "memory" in kinds.split(","):
                for path in (f"{folder}{group}", folder):
                    with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                        limits.append(int(Path(path, name).read_text()))
    return min(limits)


class DirectDestination(FileDestination):
    """The file `fd`, to which blocks of other files are copied with direct I/O, several windows at the same time.

    A context manager: leaving it ends the threads.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._direct = _reopened(fd)
        self._threads = Threads(_AT_ONCE, "ckptconv-direct")
        self._running: deque[Task[None]] = deque()

    def __enter__(self) -> DirectDestination:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._threads.shutdown()
        finally:
            os.close(self._direct)

    def copy(self, at: int, span: ByteRange) -> None:
        """Start to copy `span`, at most one window of complete blocks, to `at`. Raises errors of earlier copies."""
        while len(self._running) >= _AT_ONCE:
            self._running.popleft().result()
        self._running.append(self._threads.submit(self._copy, at, span))

    def settle(self) -> None:
        """Wait for the end of all copies. Raises their errors."""
        while self._running:
            self._running.popleft().result()

    def _copy(self, at: int, span: ByteRange) -> None:
        try:
            self._write_mapped(at, span)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter than the range
            if isinstance(error, OSError) and error.errno not in _REFUSED:
                raise
            for chunk in reading.read(span):
                self.write(at, chunk)
                at += len(chunk)

    def _write_mapped(self, at: int, span: ByteRange) -> None:
        import mmap

        fd, length, offset = span.source.fd, span.length, span.offset
        mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)  # unmapped with the view
        with contextlib.suppress(OSError):  # an older kernel; if a page cannot be read, the write fails
            mapped.madvise(_MADV_POPULATE_READ)
        view = memoryview(mapped)
        while view:
            done = os.pwrite(self._direct, view, at)
            at, view = at + done, view[done:]
