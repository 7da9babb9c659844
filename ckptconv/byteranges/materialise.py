"""Produce the bytes of any piece, one buffer at a time: copied, inflated, gathered, assembled, scaled or cast."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.rounding import RoundingBuffer, needs_torch
from ckptconv.byteranges.sources import OpenFile
from ckptconv.byteranges.spans import Assemble, ByteRange, Cast, Gather, Inflate, InflateSlice, Piece, Scaled
from ckptconv.byteranges.threads import Task
from ckptconv.errors import OutputError
from ckptconv.system import calls

if TYPE_CHECKING:
    from ckptconv.byteranges.kernels.casting import CastBuffer


class Pieces:
    """A reader of pieces. Each piece can be read any number of times.

    A context manager: leaving it removes the temporary files with inflated bytes.

    Attributes:
        spooled_bytes: How many bytes these files will need.
        overflowed: The number of elements that were too large for their new dtype, by the ``paths`` of the
            :class:`~ckptconv.byteranges.spans.Cast`. Only elements that tensors use are counted.
    """

    def __init__(self, pieces: Iterable[Piece], folder: Path | None = None) -> None:
        """Prepare to read `pieces`. If one of them needs torch, its import begins in a thread.

        Deflated pieces that are read at arbitrary offsets are inflated into files without a name in `folder`, or in the
        system's folder for temporary files if `folder` is None.
        """
        pieces = list(pieces)
        self._folder = folder
        self._inflated: dict[int, ByteRange] = {}
        self._files = ExitStack()
        self._importing = _begin_import() if any(map(needs_torch, pieces)) else None
        self.spooled_bytes = sum({id(of): of.length for piece in pieces if (of := piece.spooled())}.values())
        self.overflowed: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def chunks(self, piece: Piece) -> Iterator[bytes | memoryview]:
        """Yield the bytes of `piece` in buffers. A buffer is valid until the next is requested.

        Raises the errors of reading.
        """
        if needs_torch(piece):
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
        """Fill `buffer` with the bytes at `offset` of `piece`, which is a literal, consists of ranges, or is a scaled
        weight.
        """
        if not isinstance(piece, Scaled):
            reading.read_into(piece, offset, buffer)
            return
        from ckptconv.byteranges.scaling import read_scaled

        read_scaled(piece, offset, buffer)

    def located(self, piece: Piece) -> Piece:
        """Return `piece`.

        For a slice of deflated bytes, return the range of a temporary file that contains the slice.
        """
        if not isinstance(piece, InflateSlice):
            return piece
        return self._seekable(piece.of).slice(piece.offset, piece.length)

    def buffer_for(self, piece: Cast, nbytes: int) -> CastBuffer | RoundingBuffer:
        """Return a buffer that casts up to `nbytes` source bytes of `piece` in one step."""
        if not needs_torch(piece):
            return RoundingBuffer(nbytes)
        self._await_import()
        from ckptconv.byteranges.kernels.casting import CastBuffer

        return CastBuffer(piece, nbytes)

    def _await_import(self) -> None:
        """Wait until the modules that need torch are imported. Raises the exception of the import."""
        self._importing = self._importing or _begin_import()
        self._importing.result()

    def count_overflow(self, piece: Cast, count: int) -> None:
        """Add `count` to the overflows of `piece`."""
        if count:
            self.overflowed[piece.paths] = self.overflowed.get(piece.paths, 0) + count

    def _cast(self, piece: Cast) -> Iterator[memoryview]:
        """Yield the bytes of the cast `piece` in buffers of complete elements.

        Raises MalformedError if its source range has a wrong checksum.
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
        """Return `data` as a range. Deflated data is inflated into a temporary file by the first call.

        Raises OutputError.
        """
        if isinstance(data, ByteRange):
            return data
        if id(data) not in self._inflated:
            import tempfile

            try:
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    spool = OpenFile(os.dup(file.fileno()), data.of.source.path, data.length)
                    self._files.callback(os.close, spool.fd)
                    self._inflated[id(data)] = ByteRange(spool, 0, data.length)
                    for chunk in reading.inflated(data):
                        file.write(chunk)
            except OSError as error:
                what = f"compressed data of {data.of.source.path} cannot be unpacked to a temporary file"
                raise self._no_room(what, data.length, error.strerror or error) from error
        return self._inflated[id(data)]

    def check_space(self) -> None:
        """Raise OutputError if there is less free space than the temporary files need."""
        if self.spooled_bytes:
            try:
                free = calls.free_space(self._spool_folder())
            except OSError as error:
                what = "compressed data cannot be unpacked to a temporary file"
                raise self._no_room(what, self.spooled_bytes, error.strerror or error) from error
            if free < self.spooled_bytes:
                what = "not enough free space to unpack compressed data"
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


def _checked(span: ByteRange) -> Iterator[bytes]:
    """Yield the bytes of `span`, then raise MalformedError if its checksum is wrong."""
    crc32 = 0
    for chunk in reading.read(span):
        crc32 = checksum(chunk, crc32)
        yield chunk
    check_crc32(span.crc32, crc32, span.where)


def fillings(chunks: Iterable[bytes | memoryview], room: memoryview) -> Iterator[int]:
    """Copy `chunks` into the buffer `room` again and again.

    Yield the number of bytes in it when it is full, and at the end.
    """
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
    """Start to import the modules that need torch, in a thread, and return the task.

    The import takes as long as copying some gigabytes. Python raises KeyboardInterrupt in the main thread, so Ctrl-C
    does not interrupt the import.
    """
    task = Task(_import_kernels)
    try:
        threading.Thread(target=task.run, name="ckptconv-import").start()
    except RuntimeError:  # the system gives no thread
        task.run()
    return task


def _import_kernels() -> None:
    """Import the modules that need torch.

    Ctrl-C is delayed until the end, because it would break the import of torch.
    """
    with calls.interrupts_blocked():
        from ckptconv.byteranges.kernels import casting, gathering  # noqa: F401
