"""What a reader does with a fault in its input: raise it, or collect it and go on.

Whoever wants a checkpoint has the first fault raised; ``verify`` collects them all.

A reader hands a fault to :meth:`FaultSink.found` of its source and goes on without the member, the tensor or the shard
that is meant. Where it cannot go on it raises, and who collects takes that as one more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ckptconv.byteranges.spans import ByteRange, ByteSource, Inflate
from ckptconv.errors import CkptconvError, InputError
from ckptconv.limits import LIMITS


class UnreadRecord(NamedTuple):
    """Bytes that a reader has no need to look at, and what they are called in errors."""

    name: str
    data: ByteRange | Inflate


class PickleSequence(NamedTuple):
    """`number` pickles one behind the other, from the start of `of` on, and what they are called in errors.

    `known` are the globals that whoever reads them has to know.
    """

    name: str
    of: ByteSource
    number: int
    known: Collection[str] = ()


class FaultSink:
    """For those who want a sound checkpoint or none: what is found is raised.

    A context manager: an InputError that is raised inside is found, and the reader goes on behind it.
    """

    def __enter__(self) -> FaultSink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, InputError):
            self.found(error)
            return True
        return False

    def found(self, error: CkptconvError) -> None:
        """Take `error`, and return if the reader should go on."""
        raise error

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """`records` have a checksum, or a deflate stream, that could be checked. Here nobody asks."""

    def unreachable(self, error: CkptconvError) -> None:
        """Bytes could not be read, for the reason `error`, which whoever asked for them raises, handles or drops. What
        is found from then on may be due to that.
        """

    def pickles(self, found: PickleSequence) -> None:
        """`found` are about to be parsed. Only who goes on where they cannot be asks for what they name."""

    def about(self, part: str) -> FaultSink:  # noqa: ARG002 - an error that is raised passes who knows
        """The sink for a `part` of the file."""
        return self

    def again(self) -> FaultSink:
        """The sink for parts that were read before and are now put together."""
        return self


#: The sink of those who say nothing.
RAISED = FaultSink()


class CollectingSink(FaultSink):
    """For those who want to know all: ``errors`` in the order in which they were found, each line once, at most
    ``LIMITS.findings`` of them and how many MORE; what is unread, and every pickle.
    """

    def __init__(self) -> None:
        self.errors: list[CkptconvError] = []
        self.more = 0
        self.not_read: list[tuple[int, CkptconvError]] = []  # how many faults were known, and why bytes did not come
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
        self.errors.append(error.with_traceback(None))  # which would keep all that was read

    def unread(self, records: Iterable[UnreadRecord]) -> None:
        """Keep `records`."""
        self.records += records

    def unreachable(self, error: CkptconvError) -> None:
        """Keep `error`."""
        self.not_read.append((len(self.errors), error))

    def pickles(self, found: PickleSequence) -> None:
        """Keep `found`."""
        self.named.append(found)

    def about(self, part: str) -> FaultSink:
        """One that says what is found to be of `part`."""
        return _About(self, part)

    def again(self) -> FaultSink:
        """Return one that keeps nothing if there are faults: the whole has those of its parts again. Else return this
        one, for faults that only the whole has.
        """
        return CollectingSink() if self.errors else self


class _About(FaultSink):
    """The sink `of`, for a `part`."""

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
