"""What a reader does with a fault in its input: raise it, or collect it and go on.

A command that needs a checkpoint has the first fault raised; ``verify`` collects all. A reader gives a fault to
:meth:`FaultSink.found` of its source, and goes on without the member, the tensor or the shard. If it cannot go on, it
raises the fault, and a caller that collects faults adds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ckptconv.byteranges.spans import ByteRange, ByteSource, Inflate
from ckptconv.errors import CkptconvError, InputError
from ckptconv.limits import LIMITS


class UnreadRecord(NamedTuple):
    """Bytes that a reader does not need to read, and their name in errors."""

    name: str
    data: ByteRange | Inflate


class PickleSequence(NamedTuple):
    """Consecutive pickles, `number` of them, from the start of `of` on, and their name in errors.

    `known` contains the globals that a program that reads them has to know.
    """

    name: str
    of: ByteSource
    number: int
    known: Collection[str] = ()


class FaultSink:
    """A sink that raises each fault.

    A context manager: an InputError that is raised in the block is given to :meth:`found`. If that returns, the reader
    goes on after the block.
    """

    def __enter__(self) -> FaultSink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, InputError):
            self.found(error)
            return True
        return False

    def found(self, error: CkptconvError) -> None:
        """Take the fault `error`, and return if the reader should go on."""
        raise error

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Take `records` that have a checksum or a deflate stream to check. This sink does not check them."""

    def unreachable(self, error: CkptconvError) -> None:
        """Take the reason why bytes could not be read, an `error` that the caller will raise, handle or drop.

        Later faults may be consequences of it.
        """

    def pickles(self, found: PickleSequence) -> None:
        """Take pickles that are about to be parsed. A sink that goes on if they are invalid scans what they name."""

    def about(self, part: str) -> FaultSink:  # noqa: ARG002 - a raised error passes code that knows the part
        """Return the sink for a `part` of the file."""
        return self

    def again(self) -> FaultSink:
        """Return the sink for a whole that is merged from parts that were read before."""
        return self


#: The usual sink.
RAISED = FaultSink()


class CollectingSink(FaultSink):
    """A sink that keeps all faults.

    Attributes:
        errors: The faults in the order in which they were found, each message once, at most ``LIMITS.findings``.
        more: The number of further faults.
        not_read: For each time that bytes could not be read, the number of faults before and the reason.
        records: The records that were not read.
        named: The pickles.
    """

    def __init__(self) -> None:
        self.errors: list[CkptconvError] = []
        self.more = 0
        self.not_read: list[tuple[int, CkptconvError]] = []
        self.records: list[UnreadRecord] = []
        self.named: list[PickleSequence] = []
        self._lines: set[str] = set()

    def found(self, error: CkptconvError) -> None:
        """Keep `error`."""
        line = str(error)
        if line in self._lines:
            return
        if len(self.errors) == LIMITS.findings:
            self.more += 1
            return
        self._lines.add(line)
        self.errors.append(error.with_traceback(None))  # the traceback would keep all that was read

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Keep `records`."""
        self.records += records

    def unreachable(self, error: CkptconvError) -> None:
        """Keep `error`."""
        self.not_read.append((len(self.errors), error))

    def pickles(self, found: PickleSequence) -> None:
        """Keep the pickles."""
        self.named.append(found)

    def about(self, part: str) -> FaultSink:
        """Return a sink that names `part` in each fault, and gives it to this one."""
        return _About(self, part)

    def again(self) -> FaultSink:
        """Return this sink if it has no faults, so that it takes those that only the whole has.

        Otherwise return a sink that is dropped, because the whole has the faults of its parts again.
        """
        return CollectingSink() if self.errors else self


class _About(FaultSink):
    """A sink that gives the faults of a `part` to the sink `of`."""

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
