"""Which ranges are asked of a server: how large, which of them together, how many at once, and for how long.

All numbers stand in :data:`POLICY`, each with its reason.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable

from ckptconv.light_dataclass import dataclass

KIB, MIB = 1 << 10, 1 << 20
#: Where a range starts and where it ends, in bytes from the start of the file.
Range = tuple[int, int]


@dataclass
class Policy:
    """How a far file is read."""

    #: The least that is asked for, from the start of the file and from its end: a zip's longest end with what torch's
    #: reader looks at before it has 68 KiB, and most headers and pickles fit. Three such requests are below 256 KiB.
    window: int = 80 * KIB
    #: Ranges that are no further apart than this are asked for together: at 20 ms and 50 MB/s a request costs as much
    #: as a megabyte, but who only looks should not read what nobody asked for.
    gap: int = 64 * KIB
    #: One request for tensors: large enough that latency is lost in it, small enough to be asked for again.
    part: int = 8 * MIB
    #: Requests at once: below what stores throttle, and at 20 ms enough for a gigabit line.
    concurrency: int = 8
    #: Headers and pickles that are held in memory, for what reads them twice.
    held: int = 64 * MIB
    #: How often one range is asked for where a server or the line fails.
    attempts: int = 5
    #: Seconds before it is asked for the second time, then twice as long each time; a server's Retry-After counts more.
    backoff: float = 0.2
    #: Seconds for one range with all its attempts: a part at 100 kB/s takes 80.
    deadline: float = 120.0
    #: Seconds without a byte after which a connection is given up.
    silence: float = 20.0
    #: Redirects that are followed; browsers follow twenty, the Hub needs two.
    redirects: int = 10


POLICY = Policy()


def merged(ranges: Iterable[Range], gap: int) -> list[Range]:
    """`ranges` in ascending order, those together that overlap or are at most `gap` bytes apart."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1] + gap:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        elif start < stop:
            result.append((start, stop))
    return result


def in_parts(ranges: Iterable[Range], part: int) -> list[Range]:
    """`ranges`, none longer than `part`."""
    return [(at, min(at + part, stop)) for start, stop in ranges for at in range(start, stop, part)]


def enlarged(wanted: Range, size: int, window: int) -> Range:
    """`wanted`, so that at least a `window` of the file's `size` bytes is asked for: what follows, at its end what
    stands before.
    """
    start, stop = wanted
    stop = min(max(stop, start + window), size)
    return (min(start, max(0, size - window)) if stop == size else start), stop


class Extents:
    """Bytes of a file that are known, at most `most` of them; the oldest are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._starts: list[int] = []  # in ascending order; extents do not overlap
        self._data: dict[int, bytes] = {}  # in the order in which they came
        self._held = 0

    def missing(self, start: int, stop: int) -> list[Range]:
        """What is not known of the bytes from `start` to `stop`."""
        gaps = []
        i = max(bisect_right(self._starts, start) - 1, 0)
        for at in self._starts[i:]:
            if at >= stop:
                break
            if at > start:
                gaps.append((start, at))
            start = max(start, at + len(self._data[at]))
        return [*gaps, (start, stop)] if start < stop else gaps

    def put(self, start: int, data: bytes) -> None:
        """Know `data`, which stands at `start`."""
        for first, last in self.missing(start, start + len(data)):
            insort(self._starts, first)
            self._data[first] = data[first - start : last - start]
            self._held += last - first
        while self._held > self._most and len(self._starts) > 1:
            oldest = next(iter(self._data))
            self._held -= len(self._data.pop(oldest))
            self._starts.remove(oldest)

    def get(self, start: int, stop: int) -> bytes | None:
        """The bytes from `start` to `stop`; None unless all are known."""
        if start >= stop:
            return b""
        if self.missing(start, stop):
            return None
        parts = []
        i = bisect_right(self._starts, start) - 1
        while start < stop:
            at = self._starts[i]
            part = self._data[at][start - at : stop - at]
            parts.append(part)
            start, i = start + len(part), i + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)
