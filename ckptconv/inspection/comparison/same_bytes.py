"""Compare byte ranges of two files in threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import chain

from ckptconv.byteranges.spans import ByteRange

_BUFFER = 1 << 20  # bytes of each side that a thread holds
_SEGMENT = 16 << 20  # bytes that a thread takes at once
_SMALL = 128 << 10  # bytes; a range of less is not worth another thread
_MOST_THREADS = 4

#: A part of a pair of ranges: the offset in both, and the length.
Unequal = tuple[int, int]


def unequal_parts(
    pairs: Sequence[tuple[ByteRange, ByteRange]],
    progress: Callable[[int], None] | None = None,
    counts: Callable[[int, Unequal], bool] = lambda i, part: True,
) -> dict[int, list[Unequal]]:
    """Where `pairs` of ranges of one length differ: by their index, the parts, of some megabytes, in which they do.

    Those that are the same are not in it.

    `progress` is called with the number of bytes that were compared since the last time, `counts` with each part and
    the index of its pair, in any thread: whether the part matters. Raises what reading and these raise.
    """
    found: dict[int, list[Unequal]] = {}
    large = []
    for i, (a, b) in enumerate(pairs):
        if a.length > _SMALL:
            large.append(i)
        elif a.length and a.source.read(a.offset, a.length) != b.source.read(b.offset, b.length):
            found.update({i: [(0, a.length)]} if counts(i, (0, a.length)) else {})
    reader = _Reader(pairs, large, progress, counts)
    threads = min(_MOST_THREADS, os.cpu_count() or 1, sum(-(-pairs[i][0].length // _SEGMENT) for i in large))
    if threads:
        from concurrent.futures import ThreadPoolExecutor  # which costs every other command some milliseconds

        with ThreadPoolExecutor(threads, "ckptconv-diff") as pool:
            try:
                running = []
                try:
                    for _ in range(threads):
                        running.append(pool.submit(reader.run))
                except RuntimeError:  # the system gives no more: who asks does it
                    reader.run()
                for done in running:
                    done.result()
            finally:
                reader.stopped = True
    for i, parts in reader.found.items():
        found[i] = sorted(parts)
    return found


class _Reader:
    """What the threads share: the segments that nobody has taken, and what was found."""

    def __init__(
        self,
        pairs: Sequence[tuple[ByteRange, ByteRange]],
        large: Sequence[int],
        progress: Callable[[int], None] | None,
        counts: Callable[[int, Unequal], bool],
    ) -> None:
        self.pairs = pairs
        self.progress = progress
        self.counts = counts
        self.found: dict[int, list[Unequal]] = {}
        self.stopped = False
        self.lock = threading.Lock()
        self.segments = chain.from_iterable(
            ((i, at, min(_SEGMENT, pairs[i][0].length - at)) for at in range(0, pairs[i][0].length, _SEGMENT))
            for i in large
        )

    def run(self) -> None:
        """Compare segments until there are none."""
        buffers = bytearray(_BUFFER), bytearray(_BUFFER)
        try:
            while (segment := self.take()) is not None:
                i, offset, length = segment
                same = self.same_bytes(*self.pairs[i], offset, length, buffers)
                unequal = offset + same, length - same
                matters = same < length and self.counts(i, unequal)
                with self.lock:
                    if matters:
                        self.found.setdefault(i, []).append(unequal)
                    if self.progress:
                        self.progress(length)
        except BaseException:
            self.stopped = True
            raise

    def take(self) -> tuple[int, int, int] | None:
        with self.lock:
            return None if self.stopped else next(self.segments, None)

    def same_bytes(
        self, a: ByteRange, b: ByteRange, offset: int, length: int, buffers: tuple[bytearray, bytearray]
    ) -> int:
        """How many bytes of a segment are the same, in whole buffers."""
        for at in range(0, length, _BUFFER):
            n = min(_BUFFER, length - at)
            left, right = buffers if n == _BUFFER else (bytearray(n), bytearray(n))
            a.source.read_into(a.offset + offset + at, memoryview(left))
            b.source.read_into(b.offset + offset + at, memoryview(right))
            if left != right:  # of two bytearrays, and not of views, which would be compared number by number
                return at
        return length
