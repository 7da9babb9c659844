"""Compare the records of a file with the checksums that the file has for them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from ckptconv.byteranges.checksums import check_crc32, checksum, combined
from ckptconv.byteranges.fault_sink import FaultSink, UnreadRecord
from ckptconv.byteranges.reading import announce, crc32_of, inflated, located
from ckptconv.byteranges.sources import Readable, Source, SourceFolder
from ckptconv.byteranges.spans import ByteRange, Inflate, Piece, Progress
from ckptconv.byteranges.threads import Threads
from ckptconv.errors import InputError

_CHUNK = 1 << 20  # bytes that stay in a processor's cache between reading and summing
_MOST_THREADS = 4
_WORTH_THREADS = 64 << 10  # bytes: to start threads takes as long as to sum some megabytes
_PIECE = 16 << 20  # bytes that a thread sums as one task
_BATCH = 64  # pieces between two reports of progress


class CheckingSink(FaultSink):
    """A sink that raises each fault, and that compares the records of the file with their checksums.

    Attributes:
        checked: The number of records that were compared.
        nbytes: The number of their bytes.
    """

    def __init__(self, keep: Path | None = None) -> None:
        """Check records. A remote file's are kept in the folder `keep`, because they will be read again."""
        self.checked = self.nbytes = 0
        self._keep = keep
        self._records: list[UnreadRecord] = []

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Remember `records` for :meth:`check`."""
        self._records += records

    @property
    def waiting(self) -> int:
        """The number of bytes that :meth:`check` will read."""
        return length_of(self._records)

    def check(self, counted: Progress | None = None) -> None:
        """Compare the records that were added since the last call. Call `counted` with numbers of bytes.

        Raises InputError.
        """
        records, self._records = self._records, []
        check_records(records, self, counted, keep=self._keep)
        self.checked += len(records)
        self.nbytes += length_of(records)


def length_of(records: Iterable[UnreadRecord]) -> int:
    """Return the number of bytes in `records`, after inflating."""
    return sum(record.data.length for record in records)


def check_records(
    records: list[UnreadRecord],
    faults: FaultSink,
    counted: Progress | None = None,
    *,
    keep: Path | None = None,
) -> None:
    """Compare `records` with their checksums, and give each fault to the sink `faults`.

    Records that are deflated, or not in a file, are compared first and in this thread.

    Args:
        records: What to compare.
        faults: Takes the faults.
        counted: Is called with the number of bytes of each piece that is done.
        keep: As for :func:`~ckptconv.byteranges.reading.announce`.
    """
    counted = counted or (lambda nbytes: None)
    announce([record.data for record in records], keep=keep)
    for record in records:
        if not _is_for_threads(record.data):
            with faults:
                if isinstance(record.data, Inflate):
                    deque(inflated(record.data), maxlen=0)  # which checks it
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
    """Return whether several threads may read `data` at once: it is stored, in a file here or in a remote one."""
    if isinstance(data, Inflate):
        return False
    source, _ = located(data)
    return isinstance(source, (Source, SourceFolder)) or (isinstance(source, Readable) and source.is_far)


def _pieces(data: ByteRange | Inflate) -> Iterator[ByteRange]:
    """Yield the parts of the range `data` that threads read one at a time."""
    for span in data.ranges():
        for at in range(0, span.length, _PIECE):
            yield ByteRange(span.source, span.offset + at, min(_PIECE, span.length - at))


def _sums(records: list[UnreadRecord], counted: Progress) -> Iterator[tuple[int, InputError | None]]:
    """Yield the checksum of each piece of `records`, or 0 and the error if the piece cannot be read."""
    pieces = (piece for record in records for piece in _pieces(record.data))
    while batch := [*islice(pieces, _BATCH)]:
        with Sums(batch, keep_going=True) as sums:
            results = sums.results()
        counted(sum(piece.length for piece in batch))
        yield from ((crc32, sums.errors.get(i)) for i, crc32 in enumerate(results))


class Sums:
    """The CRC-32 of each of `spans`, pieces that are made of ranges, computed in threads.

    Bytes that several ranges contain are read and summed once. A context manager: leaving it ends the threads, finished
    or not.

    Attributes:
        errors: By the index of a span, the InputError that was raised while it was read. Its checksum is 0.
    """

    def __init__(self, spans: Sequence[Piece], *, keep_going: bool = False) -> None:
        """Sum `spans`. With `keep_going`, an InputError is put into :attr:`errors` and the other spans are summed."""
        self.errors: dict[int, InputError] = {}
        self._keep_going = keep_going
        self._spans = spans
        self._runs = _runs(spans)
        self._found: dict[int, int | InputError] = {}  # the checksum of each range or what reading raised, by its id
        self._next = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._error: BaseException | None = None
        is_much = sum(span.length for span in spans) >= _WORTH_THREADS
        self._most = min(_MOST_THREADS, os.cpu_count() or 1, len(self._runs)) if is_much else 0
        self._threads = Threads(self._most, "ckptconv-sums")

    def __enter__(self) -> Sums:
        for _ in range(self._most):
            self._threads.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        self._threads.shutdown()

    def check(self) -> None:
        """Raise the exception that ended the summing, if there is one.

        It is a MalformedError if a range has a wrong checksum, or what reading raised.
        """
        if self._error is not None:
            raise self._error

    def results(self) -> Sequence[int]:
        """Compute what is left, here too, and return all checksums in the order of the spans.

        Raises what :meth:`check` raises.
        """
        if self._next < len(self._runs):
            self._run()
        self._threads.shutdown()
        self.check()
        return [self._result(i, span) for i, span in enumerate(self._spans)]

    def _result(self, i: int, span: Piece) -> int:
        """Return the checksum of `span`, which has the index `i`, from those of its ranges."""
        crc32 = 0
        for part in span.ranges():
            found = self._found[id(part)]
            if isinstance(found, InputError):
                self.errors[i] = found
                return 0
            crc32 = combined(crc32, found, part.length)
        return crc32

    def _run(self) -> None:
        """Sum runs until none is left. Keep the exception that ends this for :meth:`check`."""
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while (i := self._take()) is not None:
                try:
                    self._sum(self._runs[i], buffer)
                except InputError as error:
                    if not self._keep_going:
                        raise
                    self._found.update((id(part), error) for part in self._runs[i])
        except BaseException as error:
            self._error = error
            self._is_stopped = True

    def _take(self) -> int | None:
        """Return the index of a run that no thread has taken, or None."""
        with self._lock:
            i = self._next
            self._next += 1
        return i if i < len(self._runs) and not self._is_stopped else None

    def _sum(self, run: list[ByteRange], buffer: memoryview) -> None:
        """Find the checksum of each range of `run`: from those of the bytes up to its start and up to its end."""
        source, at = located(run[0])
        starts = [located(part)[1] for part in run]
        crc32, crc32_until = 0, {at: 0}
        for bound in sorted({*starts, *(start + part.length for start, part in zip(starts, run, strict=True))}):
            while at < bound:
                if self._is_stopped:
                    return
                chunk = buffer[: min(_CHUNK, bound - at)]
                source.read_into(at, chunk)
                crc32 = checksum(chunk, crc32)
                at += len(chunk)
            crc32_until[bound] = crc32
        for start, part in zip(starts, run, strict=True):
            crc32 = combined(crc32_until[start], crc32_until[start + part.length], part.length)
            check_crc32(part.crc32, crc32, part.where)
            self._found[id(part)] = crc32


def _runs(spans: Iterable[Piece]) -> list[list[ByteRange]]:
    """Return the ranges of `spans` in runs: ranges of one source that overlap, by their offsets.

    The runs are in the order in which `spans` begin to need them.
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
