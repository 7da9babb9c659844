"""Compare records, which readers have no need to look at, with the checksums that their files have for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType

from ckptconv.byteranges.checksums import check_crc32, checksum, combined
from ckptconv.byteranges.fault_sink import FaultSink, UnreadRecord
from ckptconv.byteranges.reading import announce, crc32_of, inflated, located
from ckptconv.byteranges.sources import Readable, Source, SourceFolder
from ckptconv.byteranges.spans import ByteRange, Inflate, Piece, Progress
from ckptconv.errors import InputError

_CHUNK = 1 << 20  # bytes; stays in a processor's cache between reading and summing
_MOST_THREADS = 4
_WORTH_THREADS = 64 << 10  # bytes: starting threads takes as long as summing some megabytes
_PIECE = 16 << 20  # bytes that a thread sums at once
_BATCH = 64  # pieces between two words about progress


class CheckingSink(FaultSink):
    """For those who want a sound checkpoint or none, and its records compared with their checksums, if they have any.

    ``checked`` is the number of records that were compared, ``nbytes`` their bytes.
    """

    def __init__(self, keep: Path | None = None) -> None:
        """`keep`: the folder for what is read of a far file, which will be read again."""
        self.checked = self.nbytes = 0
        self._keep = keep
        self._records: list[UnreadRecord] = []

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Keep `records`."""
        self._records += records

    @property
    def waiting(self) -> int:
        """The bytes that :meth:`check` will read."""
        return length_of(self._records)

    def check(self, counted: Progress | None = None) -> None:
        """Compare what was read since the last time; `counted` is called with bytes. Raises InputError."""
        records, self._records = self._records, []
        check_records(records, self, counted, keep=self._keep)
        self.checked += len(records)
        self.nbytes += length_of(records)


def length_of(records: Iterable[UnreadRecord]) -> int:
    """The bytes of `records`, as they stand in the file."""
    return sum(record.data.length for record in records)


def check_records(
    records: list[UnreadRecord], faults: FaultSink, counted: Progress | None = None, *, keep: Path | None = None
) -> None:
    """Compare `records` with their checksums. `faults` takes what is wrong; `counted` is called with the bytes of each
    piece that is done. `keep` is as for :func:`~ckptconv.byteranges.reading.announce`.
    """
    counted = counted or _unheard
    announce([record.data for record in records], keep=keep)
    apart = [record for record in records if isinstance(record.data, Inflate) or not _is_in_file(record.data)]
    alone = {id(record) for record in apart}
    for record in apart:
        with faults:
            _check_here(record)
        counted(record.data.length)
    plain = [record for record in records if id(record) not in alone]
    sums = _sums(plain, counted)
    for record in plain:
        crc32, unreadable = 0, None
        for i, piece in enumerate(_pieces(record.data)):
            found, wrong = next(sums)
            crc32 = combined(crc32, found, piece.length) if i else found
            unreadable = unreadable or wrong
        with faults:
            if unreadable:
                raise unreadable
            check_crc32(record.data.crc32, crc32, record.name)


def _unheard(nbytes: int) -> None:
    """Nobody asks how far it is."""


def _is_in_file(span: ByteRange) -> bool:
    """Whether threads may read the source of `span` at once: the kernel does, what stands in for a file may not."""
    source, _ = located(span)
    return isinstance(source, (Source, SourceFolder)) or (isinstance(source, Readable) and source.is_far)


def _check_here(record: UnreadRecord) -> None:
    """Compare `record` with its checksum, here and now. Raises InputError."""
    if isinstance(record.data, Inflate):
        for _ in inflated(record.data):
            pass
        return
    check_crc32(record.data.crc32, crc32_of(record.data), record.name)


def _pieces(data: ByteRange | Inflate) -> Iterator[ByteRange]:
    """`data`, which is a range, in pieces for several threads."""
    for span in data.ranges():
        for at in range(0, span.length, _PIECE):
            yield ByteRange(span.source, span.offset + at, min(_PIECE, span.length - at))


def _sums(records: list[UnreadRecord], counted: Callable[[int], None]) -> Iterator[tuple[int, InputError | None]]:
    """The checksum of each piece of `records`, or why there is none."""
    pieces = (piece for record in records for piece in _pieces(record.data))
    while batch := [*islice(pieces, _BATCH)]:
        with Sums(batch, keep_going=True) as sums:
            results = sums.results()
        counted(sum(piece.length for piece in batch))
        yield from ((crc32, sums.errors.get(i)) for i, crc32 in enumerate(results))


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
