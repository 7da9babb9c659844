"""The input: a file opened once and read by position, so that nothing that happens to it can kill or mislead the process.

Never mapped into memory: a mapped file that is truncated by somebody else ends the reader with SIGBUS.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from ckptconv.commands import shell
from ckptconv.errors import InputChangedError, InputError
from ckptconv.folders import folder_error, name_like

__all__ = ["Readable", "Source"]

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class Readable:
    """An open file, read by position. ``path`` is for messages, ``fd`` -1 where the kernel has no file for it, ``size`` in bytes."""

    path: Path
    fd: int
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Exactly LENGTH bytes at OFFSET. Raises InputChangedError where the file has become shorter."""
        parts = []
        while length:
            try:
                part = os.pread(self.fd, length, offset)
            except OSError as error:
                raise self._unreadable(error, offset) from error
            if not part:
                raise self._too_short(offset + length)
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill BUFFER with what stands at OFFSET. Raises as :meth:`read` does."""
        while buffer:
            try:
                done = os.preadv(self.fd, [buffer], offset)
            except OSError as error:
                raise self._unreadable(error, offset) from error
            if not done:
                raise self._too_short(offset + len(buffer))
            offset += done
            buffer = buffer[done:]

    def is_same_file(self, other: os.stat_result) -> bool:  # noqa: ARG002 - what is in memory alone is no file
        """Whether OTHER is this very file, under whatever name."""
        return False

    def check_unchanged(self) -> None:
        """Raise InputChangedError if it is not what it was when it was opened."""

    def _unreadable(self, error: OSError, offset: int) -> InputError:
        return InputError(f"cannot be read: {error.strerror}", where=f"{self.path} at byte {offset}")

    def _too_short(self, expected: int) -> InputChangedError:
        return InputChangedError(
            "the file became shorter while it was read", where=self.path, expected=f"{expected} bytes"
        )


class Source(Readable):
    """A regular file, open for reading. A context manager; closing twice is harmless."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open PATH. Raises InputError where it cannot be read or is no regular file."""
        if not os.fspath(path):  # pathlib takes it for the folder that we are in
            raise InputError("no path given: it is empty")
        self.path = Path(os.fsdecode(path))
        try:
            mode = os.stat(self.path).st_mode  # before open: a FIFO waits for a writer, a device may do anything
            if stat.S_ISDIR(mode):
                raise folder_error(self.path)
            if not stat.S_ISREG(mode):
                raise InputError(f"{_kind(mode)} and not a file", where=self.path)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            near = name_like(self.path) if isinstance(error, FileNotFoundError) else None
            hint = f"is it {shell(near)}?" if near else None
            raise InputError(f"cannot be read: {error.strerror}", where=self.path, hint=hint) from error
        except ValueError as error:  # a NUL in the path
            raise InputError("no such path can exist", where=self.path) from error
        self._stat = os.fstat(self.fd)
        if not stat.S_ISREG(self._stat.st_mode):  # another took its place in between
            self.close()
            raise InputError(f"{_kind(self._stat.st_mode)} and not a file", where=self.path)
        self.size = self._stat.st_size

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_same_file(self, other: os.stat_result) -> bool:
        """Whether OTHER is this very file, under whatever name."""
        return (self._stat.st_dev, self._stat.st_ino) == (other.st_dev, other.st_ino)

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the file is not what it was when it was opened."""
        now = os.fstat(self.fd)
        for what in ("st_size", "st_mtime_ns", "st_ino"):
            before, after = getattr(self._stat, what), getattr(now, what)
            if before != after:
                raise InputChangedError(
                    f"the file changed while it was read: {what[3:]}", where=self.path, expected=before, got=after
                )


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")
