"""File objects that the caller has opened: their interface, and reading and writing them by position."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import STEP, Readable
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
    """The methods that reading needs of a file object, such as those of ``open(path, "rb")`` and ``io.BytesIO``."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes from the position on. Return no bytes at the end of the file."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Set the position to `offset` from the start. If `whence` is 1, count from the position.

        If it is 2, count from the end.
        """

    def tell(self) -> int:
        """Return the position."""


class WritableFile(BinaryFile, Protocol):
    """The methods that writing needs of a file object, such as those of ``open(path, "wb")``.

    It is read only to verify.
    """

    def write(self, data: memoryview, /) -> int | None:
        """Write `data`, or its first bytes, at the position.

        Return the number of bytes written, or None if all were written.
        """


#: What can be read: a path, or a file object.
Input: TypeAlias = "str | os.PathLike[str] | BinaryFile"
#: What can be written: a path, or a file object.
Output: TypeAlias = "str | os.PathLike[str] | WritableFile"


class FileObjectSource(Readable):
    """The file object `file` as a source, from byte 0 to its end. The caller closes it.

    The position is restored after each read, because it belongs to the caller. Threads read one at a time.
    """

    def __init__(self, file: BinaryFile, faults: FaultSink = RAISED) -> None:
        """Check `file`, and find its size.

        Raises ArgumentTypeError if it is open as text, and UsageError if it cannot seek or cannot be read.
        """
        self.path, self.faults = path_of(file), faults
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
        """Set the position during the ``with`` block, and restore it afterwards.

        `offset` and `whence` are those of ``seek``.
        """
        with self._lock:
            before = self._file.tell()
            try:
                self._file.seek(offset, whence)
                yield
            finally:
                self._file.seek(before)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises UnreadableError, or an InputError if the file is too short.
        """
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
        """Raise InputChangedError if the size has changed, and UnreadableError if it cannot be found."""
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
    """Return the path `given`.

    For a file object, return its ``name`` if that is a string, or else a name for messages.
    """
    if not is_file_object(given):
        return Path(os.fsdecode(given))
    name = getattr(given, "name", None)
    return Path(name if isinstance(name, str) and name else UNNAMED)


@contextlib.contextmanager
def seeking(file: BinaryFile, otherwise: str, hint: str) -> Iterator[None]:
    """Raise UsageError if `file` cannot seek, or if the ``with`` block fails.

    `hint` is the hint of the first error, and `otherwise` the text of the second ("cannot be read").
    """
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
    """The file object `file` as an output, written from its position on. The caller closes it.

    After :meth:`write_all`, the position is after the last byte.
    """

    fd = -1

    def __init__(self, file: WritableFile) -> None:
        """Check `file`, and remember its position.

        Raises ArgumentTypeError if it is open as text, and UsageError if it cannot seek or cannot be written.
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
        """Write `data` at `at` bytes from the start position. Raises OutputError if `file` writes elsewhere."""
        view, end = memoryview(data), self._start + at + len(data)
        with self._lock:
            self._file.seek(self._start + at)
            while view:
                done = self._file.write(view)
                view = view[len(view) if done is None else done :]
            if self._file.tell() != end:
                raise OutputError("the file object writes to a wrong position: is it open for appending?")

    def read(self, at: int, length: int) -> bytes:
        """Return at most `length` bytes at `at` bytes from the start position."""
        with self._lock:
            self._file.seek(self._start + at)
            parts = []
            while length and (part := self._file.read(length)):
                parts.append(part)
                length -= len(part)
            return b"".join(parts)

    def start_writeback(self, at: int, length: int) -> None:
        """Do nothing: the owner of a file object decides when its bytes reach a disk. `at` and `length` are ignored."""

    def write_all(self, file: OutFile, *, verify: bool) -> Overflow:
        """Write `file`, and return the numbers that overflowed in casts, by tensor.

        With `verify`, all bytes are read back and compared. After an error, the bytes written so far stay. Raises
        OutputError, and the errors of reading the ranges of `file`.
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
