"""Request ranges of a remote file: their sizes, how many at once, retries and deadlines.

All answers must be of the version of the file that the first answer was of. All numbers are in :data:`POLICY`.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ckptconv.errors import InputChangedError, LimitError, TransferError
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.stores.urls import Secrets

KIB, MIB = 1 << 10, 1 << 20
#: Where a range starts and where it ends, in bytes from the start of the file.
Range = tuple[int, int]


@dataclass
class Policy:
    """The sizes, counts and times for reading remote files."""

    #: The least bytes to request at the start and the end of the file. A zip's longest end with the bytes that torch's
    #: reader checks before that has 68 KiB, and most headers and pickles fit. Three such requests are below 256 KiB.
    window: int = 80 * KIB
    #: Ranges that are at most this far apart are requested together. At 20 ms and 50 MB/s a request costs as much as a
    #: megabyte, but inspecting a file should not read bytes that are not needed.
    gap: int = 64 * KIB
    #: The bytes of one request for tensors: large enough to hide latency, small enough to be repeated.
    part: int = 8 * MIB
    #: The number of requests at once: few enough for stores not to throttle, and at 20 ms enough for a gigabit line.
    concurrency: int = 8
    #: The bytes kept in memory, because headers and pickles are read more than once.
    held: int = 64 * MIB
    #: The number of requests for one range, if the server or the connection fails.
    attempts: int = 5
    #: The seconds before the second request, doubled for each later one. A longer Retry-After of the server counts.
    backoff: float = 0.2
    #: The seconds for one range with all its attempts. A part at 100 kB/s takes 80.
    deadline: float = 120.0
    #: The seconds for all pages of a list, and for one request that changes a store: S3 takes minutes to complete a
    #: large upload.
    patience: float = 1200.0
    #: The seconds without a byte after which a connection is closed.
    silence: float = 20.0
    #: The number of redirects that are followed. Browsers follow twenty, the Hub needs two.
    redirects: int = 10


POLICY = Policy()


def merged(ranges: Iterable[Range], gap: int) -> list[Range]:
    """Return `ranges` in ascending order.

    Ranges that overlap or are at most `gap` bytes apart are joined, empty ones dropped.
    """
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1] + gap:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        elif start < stop:
            result.append((start, stop))
    return result


def in_parts(ranges: Iterable[Range], part: int) -> list[Range]:
    """Return `ranges`, cut into ranges of at most `part` bytes."""
    return [(at, min(at + part, stop)) for start, stop in ranges for at in range(start, stop, part)]


def enlarged(wanted: Range, size: int, window: int) -> Range:
    """Return the range `wanted`, enlarged to at least `window` bytes within a file of `size` bytes.

    Bytes after the range are added first. At the end of the file, bytes before the range are added.
    """
    start, stop = wanted
    stop = min(max(stop, start + window), size)
    return (min(start, max(0, size - window)) if stop == size else start), stop


class Extents:
    """A cache of bytes of a file. It holds about `most` bytes, and forgets the oldest ones first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._starts: list[int] = []  # in ascending order; extents do not overlap
        self._data: dict[int, bytes] = {}  # in the order in which they came
        self._held = 0

    def missing(self, start: int, stop: int) -> list[Range]:
        """Return the ranges between `start` and `stop` that are not in the cache."""
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
        """Add `data`, the bytes from `start` on, to the cache."""
        for first, last in self.missing(start, start + len(data)):
            insort(self._starts, first)
            self._data[first] = data[first - start : last - start]
            self._held += last - first
        while self._held > self._most and len(self._starts) > 1:
            oldest = next(iter(self._data))
            self._held -= len(self._data.pop(oldest))
            self._starts.remove(oldest)

    def get(self, start: int, stop: int) -> bytes | None:
        """Return the bytes from `start` to `stop`, or None if one of them is not in the cache."""
        if self.missing(start, stop):
            return None
        first, last = max(bisect_right(self._starts, start) - 1, 0), bisect_left(self._starts, stop)
        return b"".join(self._data[at][max(start - at, 0) : stop - at] for at in self._starts[first:last])


_T = TypeVar("_T")
_LARGEST = (1 << 63) - 1  # bytes of a file, and of no header's number more


@dataclass(frozen=True)
class Version:
    """The version of a file: its size, and its ETag and time of change if the server sends them."""

    size: int
    etag: str | None = None
    modified: str | None = None

    @property
    def strong_etag(self) -> str | None:
        """The ETag if it changes with every byte of the file, else None."""
        return self.etag if self.etag and not self.etag.startswith("W/") else None


@dataclass(frozen=True)
class Answer:
    """The bytes of a range, and the version of the file that they are from."""

    data: bytes
    version: Version


class Entry(NamedTuple):
    """A file in a remote folder: its relative path `place`, its size, and its ETag if the store lists ETags."""

    place: str
    size: int
    etag: str | None = None


class Transient(Exception):
    """An error that may not occur again.

    Attributes:
        after: The number of seconds that the server asks to wait, or None.
        last: The error to raise after the last attempt. None: a TransferError.
    """

    def __init__(self, what: str, after: float | None = None, last: Exception | None = None) -> None:
        super().__init__(what)
        self.after, self.last = after, last


class Deadline:
    """A time `at` of :func:`time.monotonic`. It can be changed while a request runs.

    `most` is the largest number of bytes that one answer can have, with its headers.
    """

    def __init__(self, at: float, most: float = math.inf) -> None:
        self.at, self.most = at, most


class Transport(Protocol):
    """The interface of a reader of ranges of one file.

    Attributes:
        secrets: The secrets that its requests contain.
    """

    secrets: Secrets

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """Return the bytes from `start` to `stop`, or to the end of the file, of the version `expected`.

        `expected` is None for the first request. The request ends at `deadline`, a time of :func:`time.monotonic`.
        Raises Transient if a retry may help. Otherwise raises MissingInputError, InputError, InputChangedError,
        UnsupportedError or TransferError.
        """

    def close(self) -> None:
        """Close all connections."""


class Requests:
    """The requests for one file. They are repeated if that may help, and all answers must be of one version."""

    def __init__(self, transport: Transport, where: object) -> None:
        self._transport, self._where = transport, where
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.version: Version | None = None

    def get(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`.

        The first request may return fewer bytes, up to the end of the file. Raises InputError.
        """
        where = f"{self._where} at byte {start}"

        def ask(deadline: float) -> Answer:
            if self._closed.is_set():
                raise TransferError("the file was closed while it was read", where=where)
            return self._transport.get(start, stop, self.version, deadline)

        with self._transport.secrets.kept():
            answer = retried(ask, where, self._closed.wait)
            self._check(answer, where)
        return answer.data

    def _check(self, answer: Answer, where: str) -> None:
        """Raise InputChangedError if `answer` is of another version of the file than the first answer."""
        with self._lock:
            first = self.version = self.version or answer.version
        for what in ("size", "etag", "modified"):
            before, now = getattr(first, what), getattr(answer.version, what)
            if before != now:
                what = f"the file changed while it was read: {what}"
                raise InputChangedError(what, where=where, expected=before, got=now)

    def close(self) -> None:
        """Close all connections, and end all waiting."""
        self._closed.set()
        self._transport.close()


def retried(ask: Callable[[float], _T], where: object, wait: Callable[[float], object] = time.sleep) -> _T:
    """Return the result of `ask`, which is called with a deadline, and again if it raises Transient.

    `wait` is called with the seconds between two calls. After the last attempt or the deadline, raises the error in the
    Transient, or a TransferError that names `where`. Raises other errors of `ask` at once.
    """
    deadline = time.monotonic() + POLICY.deadline
    for attempt in range(1, POLICY.attempts + 1):
        try:
            return ask(deadline)
        except Transient as error:
            seconds = max(error.after or 0.0, POLICY.backoff * 2 ** (attempt - 1))
            if attempt == POLICY.attempts or time.monotonic() + seconds >= deadline:
                if error.last:
                    raise error.last from None
                tries = f"attempt {attempt} of at most {POLICY.attempts} within {POLICY.deadline:g} s"
                raise TransferError(f"{error} ({tries})", where=where, hint="try again later") from error
        wait(seconds)
    raise AssertionError("the last attempt has raised")


_LESS = "give one of the folders in it"


def paged(ask: Callable[[str, float], tuple[list[Entry], str | None]], first: str, where: object) -> Iterator[Entry]:
    """Yield the entries of all pages of a listing.

    Args:
        ask: A function that takes the token of a page and a deadline, and returns its entries and the token of the next
            page or None.
        first: The token of the first page.
        where: The name of the folder in errors.

    Raises LimitError if there are too many entries, TransferError if all pages together take too long, and the errors
    of :func:`retried`.
    """
    at: str | None = first
    seen = 0
    ends = time.monotonic() + POLICY.patience
    while at is not None:
        if time.monotonic() > ends:
            raise TransferError(f"the list did not end within {POLICY.patience:g} s", where=where, hint=_LESS)
        page, at = retried(partial(ask, at), where)
        seen += len(page) or LIMITS.far_files // 100  # a page without any costs a request, too
        if seen > LIMITS.far_files:
            what, most = "the folder has too many files", f"at most {LIMITS.far_files:,}"
            raise LimitError(what, where=where, expected=most, hint=_LESS)
        yield from page


def number(text: str | None) -> int | None:
    """Return the number in the header value `text`. None unless it consists of ASCII digits and is below 2^63."""
    text = (text or "").strip(" \t")
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST))
    return int(text) if is_number and int(text) <= _LARGEST else None


def check_range(said: str | None, start: int, stop: int, where: object) -> tuple[int, int]:
    """Return the end of the range in `said`, the header Content-Range, and the size of the file.

    Raises TransferError if it is not the requested range from `start` to `stop`.
    """
    unit, _, rest = (said or "").strip().partition(" ")
    span, _, total = rest.partition("/")
    first, _, last = span.partition("-")
    at, end, size = number(first), number(last), number(total)
    if unit.lower() != "bytes" or at is None or end is None or size is None:
        what = "the server does not state which bytes it sends"
        raise TransferError(what, where=where, expected="bytes A-B/SIZE", got=said)
    if at != start or end + 1 != min(stop, size):
        raise TransferError(
            "the server sends other bytes than requested", where=where, expected=f"{start}-{stop - 1}", got=said
        )
    return end + 1, size


def received(chunks: Iterator[bytes], length: int | None, deadline: float, most: int = 0) -> bytes:
    """Return the bytes of all `chunks`.

    Raises Transient unless there are exactly `length` bytes (at most `most` if `length` is None), or after `deadline`.
    """
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > (most if length is None else length):
            raise Transient(f"the server sent more than the announced {length or most:,} bytes")
        if time.monotonic() > deadline:
            raise Transient(f"the server is too slow: {len(data):,} bytes came")
    if length is not None and len(data) < length:
        raise Transient(f"the connection was cut: {len(data):,} of {length:,} bytes came")
    return bytes(data)
