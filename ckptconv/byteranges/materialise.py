"""Produce the bytes of any piece, a buffer at a time: copied, inflated, gathered, assembled, scaled or cast."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Assemble, ByteRange, Cast, Gather, Inflate, InflateSlice, Piece, Scaled
from ckptconv.byteranges.threads import Task
from ckptconv.errors import OutputError
from ckptconv.system import calls

if TYPE_CHECKING:
    from ckptconv.byteranges.kernels.casting import CastBuffer


class Pieces:
    """A reader of pieces, each of which can be read any number of times.

    A context manager: leaving it removes the files that hold inflated bytes.

    Attributes:
        spooled_bytes: How many bytes these files will need.
        overflowed: By the ``paths`` of a :class:`~ckptconv.byteranges.spans.Cast`, how many of the numbers that its
            tensors show were too large for the new dtype.
    """

    def __init__(self, pieces: Iterable[Piece], folder: Path | None = None) -> None:
        """Prepare to read `pieces`: begin to import torch if one of them needs it.

        Deflated bytes that are read at any offset are inflated into files without a name in `folder`, or, if that is
        None, in the system's folder for temporary files.
        """
        pieces = list(pieces)
        self._folder = folder
        self._inflated: dict[int, ByteRange] = {}
        self._files = ExitStack()
        self._importing = _begin_import() if any(piece.is_computed for piece in pieces) else None
        self.spooled_bytes = sum({id(of): of.length for piece in pieces if (of := piece.spooled())}.values())
        self.overflowed: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def chunks(self, piece: Piece) -> Iterator[bytes | memoryview]:
        """Yield the bytes of `piece` in buffers, each valid until the next is asked for. Raises what reading raises."""
        if piece.is_computed:
            self._await_import()
        piece = self.located(piece)
        if isinstance(piece, Gather):
            from ckptconv.byteranges.kernels.gathering import gather

            yield from gather(piece, self._seekable(piece.of))
        elif isinstance(piece, Assemble):
            from ckptconv.byteranges.kernels.gathering import assemble

            yield from assemble(piece)
        elif isinstance(piece, Cast):
            yield from self._cast(piece)
        elif isinstance(piece, Scaled):
            room = memoryview(bytearray(min(piece.length, reading.BUFFER)))
            for at in range(0, piece.length, len(room)):
                out = room[: piece.length - at]
                self.read_into(piece, at, out)
                yield out
        else:
            yield from reading.read(piece)

    def read_into(self, piece: Piece, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset` of a piece that is a literal, made of ranges, or a scaled weight."""
        if not isinstance(piece, Scaled):
            reading.read_into(piece, offset, buffer)
            return
        self._await_import()
        from ckptconv.byteranges.kernels.scaling import read_scaled

        read_scaled(piece, offset, buffer)

    def located(self, piece: Piece) -> Piece:
        """Return `piece`, or for a slice of deflated bytes the range of the inflated file that contains it."""
        if not isinstance(piece, InflateSlice):
            return piece
        return self._seekable(piece.of).slice(piece.offset, piece.length)

    def buffer_for(self, piece: Cast, nbytes: int) -> CastBuffer:
        """Return a buffer that casts at most `nbytes` bytes of what `piece` is made of at once."""
        self._await_import()
        from ckptconv.byteranges.kernels.casting import CastBuffer

        return CastBuffer(piece, nbytes)

    def _await_import(self) -> None:
        """Wait until the modules that need torch are imported. Raises what the import raises."""
        self._importing = self._importing or _begin_import()
        self._importing.result()

    def count_overflow(self, piece: Cast, count: int) -> None:
        """Add `count` numbers of `piece` to those that were too large."""
        if count:
            self.overflowed[piece.paths] = self.overflowed.get(piece.paths, 0) + count

    def _cast(self, piece: Cast) -> Iterator[memoryview]:
        """Yield the bytes of `piece` in buffers of whole elements.

        Raises MalformedError if the range that it is made of has a wrong checksum.
        """
        buffer = self.buffer_for(piece, min(reading.BUFFER, piece.of.length))
        at = 0
        span = piece.checked_range()
        for filled in fillings(_checked(span) if span else self.chunks(piece.of), buffer.room):
            result, overflowed = buffer.cast(filled, at, piece.shown)
            self.count_overflow(piece, overflowed)
            at += filled
            yield result

    def _seekable(self, data: ByteRange | Inflate) -> ByteRange:
        """Return `data`, or for deflated data a range of a file into which it is inflated once. Raises OutputError."""
        if isinstance(data, ByteRange):
            return data
        if id(data) not in self._inflated:
            import tempfile

            try:
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    spool = _Spool(os.dup(file.fileno()), data)
                    self._files.callback(os.close, spool.fd)
                    self._inflated[id(data)] = ByteRange(spool, 0, data.length)
                    for chunk in reading.inflated(data):
                        file.write(chunk)
            except OSError as error:
                what = f"a deflated part of {data.of.source.path} cannot be inflated there"
                raise self._no_room(what, data.length, error.strerror or error) from error
        return self._inflated[id(data)]

    def check_space(self) -> None:
        """Raise OutputError if there is less free space than the files with inflated bytes need."""
        if self.spooled_bytes:
            try:
                free = calls.free_space(self._spool_folder())
            except OSError as error:
                what = "what is deflated cannot be inflated there"
                raise self._no_room(what, self.spooled_bytes, error.strerror or error) from error
            if free < self.spooled_bytes:
                what = "not enough free space to inflate compressed data"
                raise self._no_room(what, self.spooled_bytes, f"{free:,} bytes")

    def _no_room(self, what: str, needed: int, got: object) -> OutputError:
        try:
            where: object = self._spool_folder()
        except OSError:
            where = "temporary files"
        hint = "set TMPDIR to a folder with enough space" if self._folder is None else None
        return OutputError(what, where=where, expected=f"{needed:,} bytes temporarily", got=got, hint=hint)

    def _spool_folder(self) -> str | Path:
        import tempfile

        return self._folder or tempfile.gettempdir()


class _Spool(Readable):
    """The open file `fd`, which holds the inflated bytes of `data`."""

    def __init__(self, fd: int, data: Inflate) -> None:
        self.path, self.fd, self.size = data.of.source.path, fd, data.length


def _checked(span: ByteRange) -> Iterator[bytes]:
    """Yield the bytes of `span`, then raise MalformedError if its checksum is wrong."""
    crc32 = 0
    for chunk in reading.read(span):
        crc32 = checksum(chunk, crc32)
        yield chunk
    check_crc32(span.crc32, crc32, span.where)


def fillings(chunks: Iterable[bytes | memoryview], room: memoryview) -> Iterator[int]:
    """Copy `chunks` into `room`, and yield the number of bytes in it each time it is full, and at the end."""
    filled = 0
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            length = min(len(left), len(room) - filled)
            room[filled : filled + length] = left[:length]
            filled, left = filled + length, left[length:]
            if filled == len(room):
                yield filled
                filled = 0
    if filled:
        yield filled


def _begin_import() -> Task[None]:
    """Begin to import the modules that need torch, in a thread: it takes as long as to copy some gigabytes.

    Python gives Ctrl-C to the main thread, so Ctrl-C does not interrupt the import.
    """
    task = Task(_import_kernels)
    try:
        threading.Thread(target=task.run, name="ckptconv-import").start()
    except RuntimeError:  # the system gives no thread
        task.run()
    return task


def _import_kernels() -> None:
    """Import the modules that need torch. Ctrl-C waits for the end, because it breaks the import of torch."""
    with calls.interrupts_blocked():
        from ckptconv.byteranges.kernels import casting, gathering, scaling  # noqa: F401
