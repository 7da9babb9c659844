"""Ask a server for one range, again where that may help, until a deadline; and hold each answer against the first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ckptconv.byteranges.far.planning import POLICY
from ckptconv.byteranges.far.secrets import Secrets
from ckptconv.errors import InputChangedError, LimitError, TransferError
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

_T = TypeVar("_T")
_LARGEST = (1 << 63) - 1  # bytes of a file, and of no header's number more


@dataclass(frozen=True)
class Version:
    """What a server says of the file that it sends from: its size, and what changes with its content."""

    size: int
    etag: str | None = None
    modified: str | None = None

    @property
    def strong_etag(self) -> str | None:
        """The ETag, where it stands for these very bytes."""
        return self.etag if self.etag and not self.etag.startswith("W/") else None


@dataclass(frozen=True)
class Answer:
    """The bytes of a range, and the version of the file that they are of."""

    data: bytes
    version: Version


class Entry(NamedTuple):
    """A file in a far folder: its path from there, its size, and the ETag that tells it from another one there, if the
    store lists those.
    """

    place: str
    size: int
    etag: str | None = None


class Transient(Exception):
    """A fault that may be gone when one asks again: what it is, and after how many seconds the server wants that."""

    def __init__(self, what: str, after: float | None = None) -> None:
        super().__init__(what)
        self.after = after


class Deadline:
    """A time of :func:`time.monotonic`, `at`, which can be put off."""

    def __init__(self, at: float) -> None:
        self.at = at


class Transport(Protocol):
    """How ranges of one file come, and the secrets that are sent for them."""

    secrets: Secrets

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """The bytes from `start` to `stop`, or to the end if that comes first, of the version `expected`.

        Raises Transient, and what is never worth another try: MissingInputError, InputError, InputChangedError,
        UnsupportedError, TransferError. It gives up at `deadline`, a time of :func:`time.monotonic`.
        """

    def close(self) -> None:
        """Let connections go."""


class Requests:
    """The requests for one file, all of one version of it."""

    def __init__(self, transport: Transport, where: object) -> None:
        self._transport, self._where = transport, where
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.version: Version | None = None

    def get(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`; the first time, to the end of the file if that comes first.

        Raises InputError.
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
        """Raise InputChangedError where `answer` is of another version than the first was."""
        with self._lock:
            first = self.version = self.version or answer.version
        for what in ("size", "etag", "modified"):
            before, now = getattr(first, what), getattr(answer.version, what)
            if before != now:
                what = f"the file changed while it was read: {what}"
                raise InputChangedError(what, where=where, expected=before, got=now)

    def close(self) -> None:
        """Let connections go, and end what waits."""
        self._closed.set()
        self._transport.close()


def retried(ask: Callable[[float], _T], where: object, wait: Callable[[float], object] = time.sleep) -> _T:
    """What `ask` gives, which is called with a deadline, and again where it raises Transient and that may help.

    Raises TransferError when it does not, and what `ask` raises.
    """
    deadline = time.monotonic() + POLICY.deadline
    for attempt in range(1, POLICY.attempts + 1):
        try:
            return ask(deadline)
        except Transient as error:
            seconds = max(error.after or 0.0, POLICY.backoff * 2 ** (attempt - 1))
            if attempt == POLICY.attempts or time.monotonic() + seconds >= deadline:
                tries = f"attempt {attempt} of at most {POLICY.attempts} within {POLICY.deadline:g} s"
                raise TransferError(f"{error} ({tries})", where=where, hint="try again later") from error
        wait(seconds)
    raise AssertionError("the last attempt has raised")


def paged(ask: Callable[[str, float], tuple[list[Entry], str | None]], first: str, where: object) -> Iterator[Entry]:
    """What a server lists, a page at a time: `ask` gives the page at a place, from `first` on, and that of the next.

    Raises LimitError for more than anybody waits for, and what :func:`retried` raises.
    """
    at: str | None = first
    seen = 0
    while at is not None:
        page, at = retried(partial(ask, at), where)
        seen += len(page) or LIMITS.far_files // 100  # a page without any costs a request, too
        if seen > LIMITS.far_files:
            what, most = "the folder has too many files", f"at most {LIMITS.far_files:,}"
            raise LimitError(what, where=where, expected=most, hint="give one of the folders in it")
        yield from page


def number(text: str | None) -> int | None:
    """Return the number in a header: ASCII digits, and no more than a file has bytes. None for anything else."""
    text = (text or "").strip(" \t")
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST))
    return int(text) if is_number and int(text) <= _LARGEST else None


def check_range(said: str | None, start: int, stop: int, where: object) -> tuple[int, int]:
    """Where the range ends that a Content-Range says, and how large the file is.

    Raises TransferError where it is not the range that was asked for.
    """
    unit, _, rest = (said or "").strip().partition(" ")
    span, _, total = rest.partition("/")
    first, _, last = span.partition("-")
    at, end, size = number(first), number(last), number(total)
    if unit.lower() != "bytes" or at is None or end is None or size is None:
        what = "the server does not say which bytes it sends"
        raise TransferError(what, where=where, expected="bytes A-B/SIZE", got=said)
    if at != start or end + 1 != min(stop, size):
        raise TransferError(
            "the server sends other bytes than were asked for", where=where, expected=f"{start}-{stop - 1}", got=said
        )
    return end + 1, size


def received(chunks: Iterator[bytes], length: int | None, deadline: float, most: int = 0) -> bytes:
    """All of `chunks`, which must have `length` bytes; where nobody said how many, at most `most`. Raises Transient."""
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > (most if length is None else length):
            raise Transient(f"the server sent more than the {length or most:,} bytes that it promised")
        if time.monotonic() > deadline:
            raise Transient(f"the server is too slow: {len(data):,} bytes came")
    if length is not None and len(data) < length:
        raise Transient(f"the connection was cut: {len(data):,} of {length:,} bytes came")
    return bytes(data)
