"""Threads that read, cast, checksum and write the blocks of a file at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import check_crc32, checksum, combined
from ckptconv.byteranges.materialise import CastBuffer, Pieces
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Cast, Concat
from ckptconv.dtypes import BY_NAME
from ckptconv.light_dataclass import dataclass
from ckptconv.output.threads import Threads

CAST_BLOCK = 4 << 20  # bytes of the source that a thread holds
_MOST_THREADS = 4
_NOTHING = Concat((), ByteRange(Readable(), 0, 0), 0)  # what a buffer is made for: a cast of anything


@dataclass(frozen=True)
class _Done:
    """What became of a block: bytes written, the checksums of what was read and of what was
    written, numbers that were too large.
    """

    read: int
    crc32_read: int
    written: int
    crc32_written: int
    overflowed: int


class CastThreads:
    """Casts pieces beside whatever else is being done.

    A context manager: leaving it ends the threads, whether they are done or not.
    """

    def __init__(self, pieces: Pieces, write: Callable[[int, memoryview], None]) -> None:
        """`pieces` makes the buffers; `write` puts bytes at a place."""
        self._pieces, self._write = pieces, write
        self._own = threading.local()  # what each thread keeps from block to block
        self._tasks: list[tuple[Cast, list[Future[_Done]]]] = []
        self._threads = Threads(min(_MOST_THREADS, os.cpu_count() or 1), "ckptconv-cast")
        #: By the id of a piece, the checksum of what was written for it.
        self.sums: dict[int, int] = {}

    def __enter__(self) -> CastThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def begin(self, piece: Cast, at: int) -> None:
        """Have `piece`, which is made of what stands in the source as it is, written to `at`."""
        old, new = BY_NAME[piece.old].itemsize, BY_NAME[piece.new].itemsize
        elements = piece.length // new
        step = CAST_BLOCK // max(old, new)
        blocks = [(start, min(step, elements - start)) for start in range(0, elements, step)]
        submit = self._threads.submit
        futures = [submit(self._cast, piece, start * old, n * old, at + start * new) for start, n in blocks]
        self._tasks.append((piece, futures))

    def finish(self, progress: Callable[[int], None] | None) -> None:
        """Wait for everything that has begun. Raises what went wrong."""
        for piece, blocks in self._tasks:
            crc32_read = crc32_written = overflowed = 0
            for block in blocks:
                done = block.result()
                crc32_read = combined(crc32_read, done.crc32_read, done.read)
                crc32_written = combined(crc32_written, done.crc32_written, done.written)
                overflowed += done.overflowed
                if progress:
                    progress(done.written)
            if span := piece.checked_range():
                check_crc32(span.crc32, crc32_read, span.where)
            self.sums[id(piece)] = crc32_written
            self._pieces.count_overflow(piece, overflowed)
        self._tasks.clear()

    def _cast(self, piece: Cast, offset: int, length: int, at: int) -> _Done:
        """Cast `length` bytes at `offset` of what `piece` is made of, and write the result to `at`."""
        buffer = self._buffer(piece)
        data = buffer.room[:length]
        reading.read_into(piece.of, offset, data)
        crc32_read = checksum(data) if piece.checked_range() else 0
        result, overflowed = buffer.cast(length, offset, piece.shown)
        self._write(at, result)
        return _Done(length, crc32_read, len(result), checksum(result), overflowed)

    def _buffer(self, piece: Cast) -> CastBuffer:
        """This thread's buffer for `piece`.

        Most pieces of a file ask for the same, and memory that was just given is slow.
        """
        key = replace(piece, of=_NOTHING, length=CAST_BLOCK, paths=(), shown=())
        if getattr(self._own, "key", None) != key:
            self._own.key = key
            self._own.buffer = self._pieces.buffer_for(key, CAST_BLOCK)
        buffer: CastBuffer = self._own.buffer
        return buffer
