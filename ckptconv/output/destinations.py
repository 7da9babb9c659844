"""What planned files are written to, by position: a file of the kernel's, or a file object that somebody else has open.

A file object is written from its position on, as ``torch.save`` does it.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol, TypeAlias

from ckptconv.errors import ArgumentTypeError, OutputError
from ckptconv.output import filesystem
from ckptconv.stores.memory import BinaryFile, path_of, seeking


class WritableFile(BinaryFile, Protocol):
    """A file object as ``open(path, "wb")`` and ``io.BytesIO`` give them; it is read only where that is asked for."""

    def write(self, data: memoryview, /) -> int | None:
        """Write `data` at the position, or the first of it, and say how many bytes."""


#: What can be written: a path, or a file object.
Output: TypeAlias = "str | os.PathLike[str] | WritableFile"


class Destination(Protocol):
    """Where bytes go. ``fd`` is -1 where the kernel has no file for it. All methods raise OSError."""

    fd: int

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put `data` at `at`; threads may do so at once."""

    def read(self, at: int, length: int) -> bytes:
        """What stands at `at`, at most `length` bytes."""

    def start_writeback(self, at: int, length: int) -> None:
        """Have what was put there written to the disk, and do not wait for it."""


class FileDestination:
    """The file `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put `data` at `at`."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fd, view, at)
            at += done
            view = view[done:]

    def read(self, at: int, length: int) -> bytes:
        """What stands at `at`."""
        return os.pread(self.fd, length, at)

    def start_writeback(self, at: int, length: int) -> None:
        """Begin to write it to the disk."""
        filesystem.start_writeback(self.fd, at, length)

    def settle(self) -> None:
        """Wait for what is not written yet: nothing. Raises what went wrong with it."""


class FileObjectDestination:
    """`file`, from its position on, which is behind what was written after :meth:`finish`. Its caller closes it."""

    fd = -1

    def __init__(self, file: WritableFile) -> None:
        """Raises ArgumentTypeError for a file of text, UsageError where `file` cannot seek or cannot be written."""
        self.path = path_of(file)
        self._file, self._lock = file, threading.Lock()
        with seeking(file, "cannot be written", "save to an io.BytesIO(), and write its getvalue()"):
            try:
                file.write(memoryview(b""))
            except TypeError as error:
                hint = "open it with mode 'wb'"
                raise ArgumentTypeError("the file is open as text", where=self.path, hint=hint) from error
            self._start = file.tell()

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put `data` at `at`."""
        view, end = memoryview(data), self._start + at + len(data)
        with self._lock:
            self._file.seek(self._start + at)
            while view:
                done = self._file.write(view)
                view = view[len(view) if done is None else done :]
            if self._file.tell() != end:
                raise OutputError("the file object writes elsewhere than it was told to: is it open for appending?")

    def read(self, at: int, length: int) -> bytes:
        """What stands at `at`."""
        with self._lock:
            self._file.seek(self._start + at)
            parts = []
            while length and (part := self._file.read(length)):
                parts.append(part)
                length -= len(part)
            return b"".join(parts)

    def start_writeback(self, at: int, length: int) -> None:
        """Nothing: when a file object reaches a disk is its own affair."""

    def finish(self, size: int) -> None:
        """Go behind what was written, `size` bytes."""
        self._file.seek(self._start + size)
