"""File objects that the caller has open: what they must offer, and reading and writing them by position."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import STEP, ComputedSource
from ckptconv.errors import (
    ArgumentTypeError,
    CkptconvError,
    InputChangedError,
    OutputError,
    UnreadableError,
    UsageError,
)
from ckptconv.hints import UNNAMED

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ckptconv.byteranges.spans import OutFile, Overflow


class BinaryFile(Protocol):
    """A file object like those of ``open(path, "rb")`` and ``io.BytesIO``, as far as reading needs it."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes from the position, and none at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to `offset` from the start, or from the position (`whence` is 1), or from the end (2)."""

    def tell(self) -> int:
        """Return the position."""


class WritableFile(BinaryFile, Protocol):
    """A file object like those of ``open(path, "wb")`` and ``io.BytesIO``. It is read only to verify."""

    def write(self, data: memoryview, /) -> int | None:
        """Write `data`, or its first bytes, at the position. Return the number of bytes written, or None for all."""


#: What can be read: a path, or a file object.
Input: TypeAlias = "str | os.PathLike[str] | BinaryFile"
#: What can be written: a path, or a file object.
Output: TypeAlias = "str | os.PathLike[str] | WritableFile"


class FileObjectSource(ComputedSource):
    """`file`, which its caller has open and closes, from byte 0 to its end.

    The position is the caller's: it is restored after each read. Threads take turns.
    """

    def __init__(self, file: BinaryFile, faults: FaultSink = RAISED) -> None:
        """Take `file`.

        Raises ArgumentTypeError for a file of text, and UsageError if `file` cannot seek or be read.
        """
        self.path, self.fd, self.faults = path_of(file), -1, faults
        self._file, self._lock = file, threading.Lock()
        with seeking(file, "cannot be read", "io.BytesIO(f.read()) can"):
            if isinstance(cast("object", file.read(0)), str):
                raise ArgumentTypeError("the file is open as text", where=self.path, hint="open it with mode 'rb'")
            self.size = self._size()

    def _size(self) -> int:
        with self._position(0, os.SEEK_END):
            return self._file.tell()

    @contextlib.contextmanager
    def _position(self, offset: int, whence: int = os.SEEK_SET) -> Iterator[None]:
        """Set the position for the body of the ``with``, and restore it afterwards."""
        with self._lock:
            before = self._file.tell()
            try:
                self._file.seek(offset, whence)
                yield
            finally:
                self._file.seek(before)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset`. Raises the errors of :meth:`read`."""
        end = offset + len(buffer)
        try:
            with self._position(offset):
                while buffer and (part := self._file.read(min(len(buffer), STEP))):
                    buffer[: len(part)] = part
                    buffer = buffer[len(part) :]
        except (OSError, ValueError) as error:  # a ValueError: it was closed
            found = UnreadableError(f"cannot be read: {error}", where=f"{self.path} at byte {offset}")
            self.faults.unreachable(found)
            raise found from error
        if buffer:
            raise self._too_short(end)

    def check_unchanged(self) -> None:
        """Raise InputChangedError if its size is not what it was."""
        try:
            size = self._size()
        except (OSError, ValueError) as error:
            raise UnreadableError(f"cannot be read: {error}", where=self.path) from error
        if size != self.size:
            raise InputChangedError(
                "the file changed while it was read: size", where=self.path, expected=self.size, got=size
            )


def is_file_object(given: object) -> TypeIs[BinaryFile]:
    """Return whether `given` is a file object and not a path."""
    return not isinstance(given, (str, bytes, os.PathLike)) and (hasattr(given, "read") or hasattr(given, "write"))


def path_of(given: Input) -> Path:
    """Return the path `given`. For a file object, return its ``name`` if that is a text, or a name for messages."""
    if not is_file_object(given):
        return Path(os.fsdecode(given))
    name = getattr(given, "name", None)
    return Path(name if isinstance(name, str) and name else UNNAMED)


@contextlib.contextmanager
def seeking(file: BinaryFile, otherwise: str, hint: str) -> Iterator[None]:
    """Raise UsageError with `hint` if `file` cannot seek, or with the text `otherwise` if the body fails."""
    try:
        has_both = hasattr(file, "seek") and hasattr(file, "tell")
        if not has_both or not getattr(file, "seekable", lambda: True)():
            raise UsageError("the file object cannot seek", where=path_of(file), hint=hint)
        yield
    except CkptconvError:  # some are ValueErrors
        raise
    except (AttributeError, OSError, ValueError) as error:
        why = "it is not open for that" if isinstance(error, io.UnsupportedOperation) else error
        raise UsageError(f"the file object {otherwise}: {why}", where=path_of(file)) from error


class FileObjectDestination:
    """`file`, written from its position on, which is after the last byte when :meth:`write_all` ends.

    Its caller closes it.
    """

    fd = -1

    def __init__(self, file: WritableFile) -> None:
        """Take `file`, to be written from its position on.

        Raises ArgumentTypeError for a file of text, and UsageError if `file` cannot seek or be written.
        """
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
        """Write `data` at `at`."""
        view, end = memoryview(data), self._start + at + len(data)
        with self._lock:
            self._file.seek(self._start + at)
            while view:
                done = self._file.write(view)
                view = view[len(view) if done is None else done :]
            if self._file.tell() != end:
                raise OutputError("the file object writes elsewhere than it was told to: is it open for appending?")

    def read(self, at: int, length: int) -> bytes:
        """Return at most `length` bytes at `at`."""
        with self._lock:
            self._file.seek(self._start + at)
            parts = []
            while length and (part := self._file.read(length)):
                parts.append(part)
                length -= len(part)
            return b"".join(parts)

    def start_writeback(self, at: int, length: int) -> None:
        """Do nothing: the owner of a file object decides when it reaches a disk."""

    def write_all(self, file: OutFile, *, verify: bool) -> Overflow:
        """Write `file`, and return what overflowed. After an error, the bytes written so far stay.

        Raises OutputError, and what reading the ranges of `file` raises. With `verify` all is read back and compared.
        """
        from ckptconv.output.files import as_output_error
        from ckptconv.output.transfer import Transfer

        transfer = Transfer(file, file.path.parent, compared=verify)
        with as_output_error(file.path), transfer:
            transfer.fill(self, None)
            if verify:
                transfer.compare(self)
            self._file.seek(self._start + file.size)
        return transfer.overflowed
