"""CRC-32 checksums of byte ranges, computed in threads beside other work."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType

from ckptconv.byteranges.spans import ByteRange, Literal, Piece
from ckptconv.errors import DOWNLOAD_AGAIN, InputError, MalformedError

_CHUNK = 1 << 20  # bytes; stays in a processor's cache between reading and summing
_MOST_THREADS = 4
_WORTH_THREADS = 64 << 10  # bytes: starting threads takes as long as summing some megabytes
_WORTH_FASTER = 16 << 10  # bytes: what is faster costs as much to import as summing a megabyte


def checksum(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """The CRC-32 of `data` behind what has the one `before`."""
    return (crc32_for_much() if len(data) >= _WORTH_FASTER else zlib.crc32)(data, before)


@cache
def crc32_for_much() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """The fastest function: that of the extra ``fast``, several times as fast as zlib's, where it is installed."""
    try:
        from zlib_ng.zlib_ng import crc32
    except ImportError:
        return zlib.crc32
    return crc32


class Sums:
    """The checksums of `spans`, which are made of ranges.

    A context manager: leaving it ends the threads, whether they are done or not.

    `keep_going`: what is wrong with one stops no other; ``errors`` has it by the place
    of the span, whose checksum is 0 then.
    """

    def __init__(self, spans: Sequence[Piece], *, keep_going: bool = False) -> None:
        self.errors: dict[int, InputError] = {}
        self._keep_going = keep_going
        self._spans = spans
        self._results = [0] * len(spans)
        self._next = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None
        is_much = sum(span.length for span in spans) >= _WORTH_THREADS
        count = min(_MOST_THREADS, os.cpu_count() or 1, len(spans)) if is_much else 0  # else who asks computes them
        self._threads = [threading.Thread(target=self._run, name="ckptconv-sums", daemon=True) for _ in range(count)]

    def __enter__(self) -> Sums:
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: who asks for the results computes them
                del self._threads[i:]
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raise what went wrong so far: MalformedError where a range is not what its
        checksum says, or what reading raised.
        """
        if self._error is not None:
            raise self._error

    def results(self) -> Sequence[int]:
        """All checksums, in the order of the spans; helps to compute what is left. Raises as :meth:`check` does."""
        if self._next < len(self._spans):
            self._run()
        for thread in self._threads:
            thread.join()
        self.check()
        return self._results

    def _run(self) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while (i := self._take()) is not None:
                try:
                    self._results[i] = self._sum(self._spans[i], buffer)
                except InputError as error:
                    if not self._keep_going:
                        raise
                    self.errors[i] = error
        except BaseException as error:  # handed to the thread that asks
            self._error = error
            self._stopped = True

    def _take(self) -> int | None:
        """The index of a span that nobody has taken."""
        with self._lock:
            i = self._next
            self._next += 1
        return i if i < len(self._spans) and not self._stopped else None

    def _sum(self, data: Piece, buffer: memoryview) -> int:
        found = 0
        for span in data.ranges():
            for at in range(0, span.length, _CHUNK):
                if self._stopped:
                    return 0
                chunk = buffer[: min(_CHUNK, span.length - at)]
                span.source.read_into(span.offset + at, chunk)
                found = checksum(chunk, found)
        if isinstance(data, ByteRange):
            check_crc32(data.crc32, found, data.where)
        return found


def crc32_of(piece: ByteRange | Literal, start: int = 0) -> int:
    """The CRC-32 of a piece, here and now.

    Args:
        piece: What it is of.
        start: The CRC-32 of what stands before it.
    """
    if isinstance(piece, Literal):
        return checksum(piece.data, start)
    for at in range(0, piece.length, _CHUNK):
        start = checksum(piece.source.read(piece.offset + at, min(_CHUNK, piece.length - at)), start)
    return start


def check_crc32(expected: int | None, found: int, where: str) -> None:
    """Raise MalformedError unless a checksum is what it should be, where that is known."""
    if expected is not None and found != expected:
        raise MalformedError(
            "the record is damaged: its checksum is wrong",
            where=where,
            expected=f"{expected:08x}",
            got=f"{found:08x}",
            hint=DOWNLOAD_AGAIN,
        )
