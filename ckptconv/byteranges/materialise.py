"""Produce the bytes of any piece, a buffer at a time: copied, inflated, gathered, assembled or cast."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import (
    Assemble,
    ByteRange,
    Cast,
    Gather,
    Inflate,
    InflateSlice,
    Piece,
)
from ckptconv.errors import OutputError

if TYPE_CHECKING:
    from concurrent.futures import Future


class CastBuffer(Protocol):
    """What :mod:`ckptconv.byteranges.kernels.casting` has, with room for bytes to cast."""

    room: memoryview

    def cast(self, filled: int, at: int, shown: Sequence[tuple[int, int]]) -> tuple[memoryview, int]: ...


class Pieces:
    """Reads `every` piece, any number of times.

    A context manager: leaving it forgets what was inflated, for a while, into files without a name in `folder` (else
    where the system has such).
    """

    def __init__(self, every: Iterable[Piece], folder: Path | None = None) -> None:
        every = list(every)
        self._folder = folder
        self._inflated: dict[int, ByteRange] = {}
        self._importing = _begin_import() if any(piece.is_computed for piece in every) else None
        #: Bytes that temporary files in `folder` need.
        self.spooled_bytes = sum({id(of): of.length for piece in every if (of := piece.spooled())}.values())
        #: By the paths of a :class:`Cast`, how many of the numbers that tensors show
        #: were too large for their new dtype.
        self.overflowed: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> Pieces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for span in self._inflated.values():
            os.close(span.source.fd)

    def chunks(self, piece: Piece) -> Iterator[bytes | memoryview]:
        """The bytes of `piece`, each buffer good until the next is asked for. Raises what reading raises."""
        if piece.is_computed:
            self._await_import()
        piece = self.located(piece)
        if isinstance(piece, Gather):
            from ckptconv.byteranges.kernels.gathering import gather

            yield from gather(piece, self._whole(piece.of))
        elif isinstance(piece, Assemble):
            from ckptconv.byteranges.kernels.gathering import assemble

            yield from assemble(piece)
        elif isinstance(piece, Cast):
            yield from self._cast(piece)
        else:
            yield from reading.read(piece)

    def located(self, piece: Piece) -> Piece:
        """`piece`; a part of a deflated piece becomes the range of the inflated file that holds it."""
        if not isinstance(piece, InflateSlice):
            return piece
        return self._whole(piece.of).slice(piece.offset, piece.length)

    def buffer_for(self, piece: Cast, most: int) -> CastBuffer:
        """What casts `piece`, at most so many bytes of what it is made of at once."""
        self._await_import()
        from ckptconv.byteranges.kernels.casting import TorchCastBuffer

        return TorchCastBuffer(piece, most)

    def _await_import(self) -> None:
        """Wait until the modules that need torch are imported. Raises what the import raises."""
        if self._importing is not None:
            self._importing.result()

    def count_overflow(self, piece: Cast, numbers: int) -> None:
        """Remember that so many `numbers` of `piece` were too large."""
        if numbers:
            self.overflowed[piece.paths] = self.overflowed.get(piece.paths, 0) + numbers

    def _cast(self, piece: Cast) -> Iterator[memoryview]:
        """`piece`, in buffers of whole elements; what it is made of is checked where it has a checksum.

        Raises MalformedError.
        """
        buffer = self.buffer_for(piece, reading.BUFFER)
        at = 0
        span = piece.checked_range()
        for filled in fillings(_checked(span) if span else self.chunks(piece.of), buffer.room):
            result, overflowed = buffer.cast(filled, at, piece.shown)
            self.count_overflow(piece, overflowed)
            at += filled
            yield result

    def _whole(self, data: ByteRange | Inflate) -> ByteRange:
        """`data` where it can be read at any place: what is deflated is inflated once."""
        if isinstance(data, ByteRange):
            return data
        if id(data) not in self._inflated:
            import tempfile  # which costs every other conversion a megabyte

            spool = Readable()
            spool.path = data.of.source.path
            try:
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    spool.fd = os.dup(file.fileno())
                    self._inflated[id(data)] = ByteRange(spool, 0, data.length)
                    for chunk in reading.inflated(data):
                        file.write(chunk)
            except OSError as error:
                raise self._no_room(
                    f"a deflated part of {spool.path} cannot be inflated there", data.length, error.strerror or error
                ) from error
        return self._inflated[id(data)]

    def check_space(self) -> None:
        """Raise OutputError where what is deflated is larger, inflated, than what is free for it."""
        if self.spooled_bytes:
            try:
                space = os.statvfs(self._spool_folder())
            except OSError as error:
                raise self._no_room(
                    "what is deflated cannot be inflated there", self.spooled_bytes, error.strerror or error
                ) from error
            free = space.f_bavail * space.f_frsize
            if free < self.spooled_bytes:
                raise self._no_room("too little free space for what is deflated", self.spooled_bytes, f"{free:,} bytes")

    def _no_room(self, what: str, needed: int, got: object) -> OutputError:
        try:
            where: object = self._spool_folder()
        except OSError:
            where = "temporary files"
        hint = "set TMPDIR to a folder that has room" if self._folder is None else None
        return OutputError(what, where=where, expected=f"{needed:,} bytes for a while", got=got, hint=hint)

    def _spool_folder(self) -> str | Path:
        import tempfile

        return self._folder or tempfile.gettempdir()


def _checked(span: ByteRange) -> Iterator[bytes]:
    """The bytes of a range, compared with its checksum when all of them are given."""
    crc32 = 0
    for chunk in reading.read(span):
        crc32 = checksum(chunk, crc32)
        yield chunk
    check_crc32(span.crc32, crc32, span.where)


def fillings(chunks: Iterable[bytes | memoryview], room: memoryview) -> Iterator[int]:
    """Fill `room` with what `chunks` give, over and over: how many bytes are in it, each
    time that it is full, and at the end.
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


def _begin_import() -> Future[None]:
    """Import the modules that need torch in a thread, because the import takes as long as copying some gigabytes.

    Python gives Ctrl-C to the main thread, so it does not interrupt the import.
    """
    from concurrent.futures import Future, ThreadPoolExecutor  # which cost every other conversion some milliseconds

    threads = ThreadPoolExecutor(1, "ckptconv-import")
    try:
        return threads.submit(_import_kernels)
    except RuntimeError:  # the system gives no threads
        _import_kernels()
        done: Future[None] = Future()
        done.set_result(None)
        return done
    finally:
        threads.shutdown(wait=False)


def _import_kernels() -> None:
    """Import the modules that need torch. Ctrl-C waits until then, because torch cannot be interrupted there."""
    import signal  # which a browser has not whole

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        from ckptconv.byteranges.kernels import casting, gathering  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
