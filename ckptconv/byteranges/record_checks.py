"""Verify the records of a file: compare them with the checksums that the file declares."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from ckptconv.byteranges.checksums import check_crc32, checksum, combined
from ckptconv.byteranges.fault_sink import FaultSink, UnreadRecord
from ckptconv.byteranges.reading import AHEAD, Window, announce, crc32_of, inflated, located, shared_source
from ckptconv.byteranges.spans import ByteRange, ByteSource, Inflate, Piece, Progress
from ckptconv.byteranges.threads import Threads, processors
from ckptconv.errors import InputError

_CHUNK = 1 << 20  # bytes that stay in a processor's cache between reading and summing
_MOST_THREADS = 4
_WORTH_THREADS = 64 << 10  # bytes: starting threads takes as long as summing some megabytes
_PIECE = 16 << 20  # bytes that a thread sums in one task
_BATCH = 64  # pieces between two reports of progress


class CheckingSink(FaultSink):
    """A sink that raises each fault, and can verify the records of the file.

    Attributes:
        checked: The number of records that were verified.
        nbytes: The number of their bytes.
    """

    def __init__(self, keep: Path | None = None) -> None:
        """Make a sink without records. `keep` is a folder for the bytes of remote files, which will be read again."""
        self.checked = self.nbytes = 0
        self._keep = keep
        self._records: list[UnreadRecord] = []

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Queue `records` for :meth:`check`."""
        self._records += records

    @property
    def waiting(self) -> int:
        """The number of bytes that the next call of :meth:`check` will read."""
        return length_of(self._records)

    def check(self, counted: Progress | None = None) -> None:
        """Verify the records that were queued since the last call. `counted` is called with numbers of bytes.

        Raises InputError at the first wrong record.
        """
        records, self._records = self._records, []
        check_records(records, self, counted, keep=self._keep)
        self.checked += len(records)
        self.nbytes += length_of(records)


def length_of(records: Iterable[UnreadRecord]) -> int:
    """Return the total number of bytes in `records`, after inflating."""
    return sum(record.data.length for record in records)


def check_records(
    records: list[UnreadRecord],
    faults: FaultSink,
    counted: Progress | None = None,
    *,
    keep: Path | None = None,
) -> None:
    """Verify `records`, and pass each fault to the sink `faults`.

    Records that are deflated, or are not in a file, are verified first and in this thread.

    Args:
        records: The records.
        faults: The sink for faults.
        counted: Called with the number of bytes that were verified since its last call.
        keep: As for :func:`~ckptconv.byteranges.reading.announce`.
    """
    counted = counted or (lambda nbytes: None)
    announce([record.data for record in records], keep=keep)
    for record in records:
        if not _is_for_threads(record.data):
            with faults:
                if isinstance(record.data, Inflate):
                    deque(inflated(record.data), maxlen=0)  # the end of the generator verifies the checksum
                else:
                    check_crc32(record.data.crc32, crc32_of(record.data), record.name)
            counted(record.data.length)
    others = [record for record in records if _is_for_threads(record.data)]
    sums = _sums(others, counted)
    for record in others:
        crc32, unreadable = 0, None
        for piece in _pieces(record.data):
            piece_crc32, error = next(sums)
            crc32 = combined(crc32, piece_crc32, piece.length)
            unreadable = unreadable or error
        with faults:
            if unreadable:
                raise unreadable
            check_crc32(record.data.crc32, crc32, record.name)


def _is_for_threads(data: ByteRange | Inflate) -> bool:
    """Return whether several threads can read `data` at the same time."""
    return isinstance(data, ByteRange) and shared_source(data) is not None


def _pieces(data: ByteRange | Inflate) -> Iterator[ByteRange]:
    """Yield slices of the range `data`. A thread reads one slice at a time."""
    for span in data.ranges():
        for at in range(0, span.length, _PIECE):
            yield ByteRange(span.source, span.offset + at, min(_PIECE, span.length - at))


def _sums(records: list[UnreadRecord], counted: Progress) -> Iterator[tuple[int, InputError | None]]:
    """Yield the checksum of each slice of `records` and None. If it cannot be read, yield 0 and the error."""
    pieces = (piece for record in records for piece in _pieces(record.data))
    while batch := [*islice(pieces, _BATCH)]:
        with Sums(batch, keep_going=True) as sums:
            results = sums.results()
        counted(sum(piece.length for piece in batch))
        yield from ((crc32, sums.errors.get(i)) for i, crc32 in enumerate(results))


class Sums:
    """A computation, in threads, of the CRC-32 of each of `spans`, which are pieces that consist of ranges.

    Bytes that several ranges contain are read only once. A context manager: leaving it ends the threads, even if they
    have not finished.

    Attributes:
        errors: The InputError that was raised while a span was read, by the index of the span. Its checksum is 0.
    """

    def __init__(self, spans: Sequence[Piece], *, keep_going: bool = False) -> None:
        """Prepare to sum `spans`.

        With `keep_going`, an InputError is recorded in :attr:`errors`, and the other spans are summed. Otherwise it
        ends the computation.
        """
        self.errors: dict[int, InputError] = {}
        self._keep_going = keep_going
        self._spans = spans
        self._runs = _runs(spans)
        self._found: dict[int, int | InputError] = {}  # by the id of a range, its checksum or the error of reading
        self._next = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._error: BaseException | None = None
        # of many short runs, threads would only wait for each other
        is_much = sum(span.length for span in spans) >= max(_WORTH_THREADS, len(self._runs) * AHEAD)
        self._most = min(_MOST_THREADS, processors() - 1, len(self._runs)) if is_much else 0
        self._threads = Threads(self._most, "ckptconv-sums")

    def __enter__(self) -> Sums:
        for _ in range(self._most):
            self._threads.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        self._threads.shutdown()

    def check(self) -> None:
        """Raise the exception that ended the computation, if there is one.

        It is a MalformedError if a range has a wrong checksum, or an error of reading.
        """
        if self._error is not None:
            raise self._error

    def results(self) -> Sequence[int]:
        """Compute the remaining checksums, in this thread too. Return all checksums in the order of the spans.

        Raises the exceptions of :meth:`check`.
        """
        if self._next < len(self._runs):
            self._run()
        self._threads.shutdown()
        self.check()
        return [self._result(i, span) for i, span in enumerate(self._spans)]

    def _result(self, i: int, span: Piece) -> int:
        """Return the checksum of `span`, which has the index `i`, combined from those of its ranges.

        If a range could not be read, its error is added to ``errors``, and 0 is returned.
        """
        crc32 = 0
        for part in span.ranges():
            found = self._found[id(part)]
            if isinstance(found, InputError):
                self.errors[i] = found
                return 0
            crc32 = combined(crc32, found, part.length)
        return crc32

    def _run(self) -> None:
        """Sum runs until none is left. An exception is kept for :meth:`check`."""
        buffer = memoryview(bytearray(_CHUNK))
        window: Window[ByteSource] | None = None
        try:
            while (i := self._take()) is not None:
                source, at = located(self._runs[i][0])
                if window is None or window.source is not source:
                    window = Window(source)
                try:
                    self._sum(self._runs[i], at, window, buffer)
                except InputError as error:
                    if not self._keep_going:
                        raise
                    self._found.update((id(part), error) for part in self._runs[i])
        except BaseException as error:
            self._error = error
            self._is_stopped = True

    def _take(self) -> int | None:
        """Return the index of the next run. Return None if there are no more, or the computation has ended."""
        with self._lock:
            i = self._next
            self._next += 1
        return i if i < len(self._runs) and not self._is_stopped else None

    def _sum(self, run: list[ByteRange], at: int, window: Window[ByteSource], buffer: memoryview) -> None:
        """Compute the checksum of each range of `run`, from the checksums of the bytes before its start and before its
        end.

        The run begins at the offset `at` of the source of `window`.
        """
        starts = [located(part)[1] for part in run]
        crc32, crc32_until = 0, {at: 0}
        bounds = sorted({*starts, *(start + part.length for start, part in zip(starts, run, strict=True))})
        is_short = bounds[-1] - at <= AHEAD
        for bound in bounds:
            while at < bound:
                if self._is_stopped:
                    return
                length = min(_CHUNK, bound - at)
                chunk: bytes | memoryview
                if is_short:
                    chunk = window.read(at, length)
                else:
                    chunk = buffer[:length]
                    window.source.read_into(at, chunk)
                crc32 = checksum(chunk, crc32)
                at += length
            crc32_until[bound] = crc32
        for start, part in zip(starts, run, strict=True):
            crc32 = combined(crc32_until[start], crc32_until[start + part.length], part.length)
            check_crc32(part.crc32, crc32, part.where)
            self._found[id(part)] = crc32


def _runs(spans: Iterable[Piece]) -> list[list[ByteRange]]:
    """Return the ranges of `spans` in runs. A run contains ranges of one source that overlap, sorted by offset.

    The runs are in the order in which `spans` first need them.
    """
    places = [(*located(part), part) for span in spans for part in span.ranges()]
    runs: list[tuple[int, list[ByteRange]]] = []
    end = 0, 0
    for i in sorted(range(len(places)), key=lambda i: (id(places[i][0]), places[i][1])):
        source, offset, part = places[i]
        if (id(source), offset) < end:
            first, run = runs[-1]
            runs[-1] = min(first, i), run
            run.append(part)
            end = max(end, (id(source), offset + part.length))
        else:
            runs.append((i, [part]))
            end = id(source), offset + part.length
    return [run for _, run in sorted(runs, key=lambda each: each[0])]
