"""Fault sinks: the objects that decide whether a fault in an input is raised, or is collected so that reading goes on.

Most commands raise the first fault. ``verify`` collects all of them. A reader passes a fault to :meth:`FaultSink.found`
of its source. If this call returns, the reader goes on without the member, the tensor or the shard. If the reader
cannot go on, it raises the fault, and a caller that collects faults adds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ckptconv.byteranges.spans import ByteRange, ByteSource, Inflate
from ckptconv.errors import CkptconvError, InputError
from ckptconv.limits import LIMITS


class UnreadRecord(NamedTuple):
    """A record whose bytes the reader does not need, but whose checksum can be verified. `name` is for errors."""

    name: str
    data: ByteRange | Inflate


class PickleSequence(NamedTuple):
    """A sequence of `number` pickles at the start of `of`. `name` is for errors.

    `known` contains the globals that belong to the format. They are not reported as unsafe.
    """

    name: str
    of: ByteSource
    number: int
    known: Collection[str] = ()


class FaultSink:
    """A sink that raises each fault, and the base class of all sinks.

    A context manager: an InputError that is raised in the block is passed to :meth:`found`. If that returns, the code
    after the block runs.
    """

    def __enter__(self) -> FaultSink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, InputError):
            self.found(error)
            return True
        return False

    def found(self, error: CkptconvError) -> None:
        """Raise `error`. In other sinks: record it, and return, so that the reader goes on."""
        raise error

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Receive `records` that have a checksum or a deflate stream to check. This sink ignores them."""

    def unreachable(self, error: CkptconvError) -> None:
        """Receive the reason why bytes could not be read. The caller raises, handles or ignores `error` itself.

        Later faults may follow from it.
        """

    def pickles(self, found: PickleSequence) -> None:
        """Receive the pickles that are about to be parsed.

        A collecting sink scans their globals if they turn out to be invalid.
        """

    def about(self, part: str) -> FaultSink:  # noqa: ARG002 - whoever catches the error knows it
        """Return a sink for faults in `part` of the file. Here: this sink."""
        return self

    def again(self) -> FaultSink:
        """Return a sink for a checkpoint that is merged from files that were read with this sink. Here: this sink."""
        return self


#: The usual sink.
RAISED = FaultSink()


class CollectingSink(FaultSink):
    """A sink that records all faults.

    Attributes:
        errors: The faults in the order in which they were found, without repetitions, at most ``LIMITS.findings``.
        more: The number of further faults.
        not_read: Reasons why bytes could not be read, each with the number of faults that were recorded before.
        records: The records whose bytes were not read.
        named: The pickles that were parsed.
    """

    def __init__(self) -> None:
        self.errors: list[CkptconvError] = []
        self.more = 0
        self.not_read: list[tuple[int, CkptconvError]] = []
        self.records: list[UnreadRecord] = []
        self.named: list[PickleSequence] = []
        self._lines: set[str] = set()

    def found(self, error: CkptconvError) -> None:
        """Record `error`, unless the same message was recorded before."""
        line = str(error)
        if line in self._lines:
            return
        if len(self.errors) == LIMITS.findings:
            self.more += 1
            return
        self._lines.add(line)
        self.errors.append(error.with_traceback(None))  # the traceback would keep all data of the reader in memory

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Record `records`."""
        self.records += records

    def unreachable(self, error: CkptconvError) -> None:
        """Record `error`, with the number of faults so far."""
        self.not_read.append((len(self.errors), error))

    def pickles(self, found: PickleSequence) -> None:
        """Record the pickles `found`."""
        self.named.append(found)

    def about(self, part: str) -> FaultSink:
        """Return a sink that adds the name `part` to each fault and passes it to this sink."""
        return _About(self, part)

    def again(self) -> FaultSink:
        """Return this sink if it has no faults. Otherwise return a new one, whose faults are ignored.

        A merged checkpoint would repeat the faults of its files. If these have none, its faults are new.
        """
        return CollectingSink() if self.errors else self


class _About(FaultSink):
    """A sink that adds the name `part` to faults and records, and passes them to the sink `of`."""

    def __init__(self, of: FaultSink, part: str) -> None:
        self.of = of
        self.part = part

    def found(self, error: CkptconvError) -> None:
        error.what = f"{self.part}: " + error.what
        self.of.found(error)

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        self.of.unread(UnreadRecord(f"{record.name} of {self.part}", record.data) for record in records)

    def unreachable(self, error: CkptconvError) -> None:
        self.of.unreachable(error)

    def pickles(self, found: PickleSequence) -> None:
        self.of.pickles(found._replace(name=f"{found.name} of {self.part}"))

    def about(self, part: str) -> FaultSink:
        return _About(self, part)

    def again(self) -> FaultSink:
        return self.of.again()
