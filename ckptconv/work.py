"""The budget of work: count the steps that a command takes on what files contain, and refuse what takes too many.

Code that visits nodes, lists paths or pairs values charges its steps while it works. Pickles and headers that are read
add to the budget, in proportion to their bytes. So the time and the memory of a command are bounded by the size of
what it reads, whatever that contains. No clock is read: the same files are refused on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS


class Work:
    """The steps that are ``left``, and the bytes for which they were granted."""

    __slots__ = ("left", "nbytes")

    def __init__(self, left: int) -> None:
        self.left = left
        self.nbytes = 0

    def grant(self, nbytes: int) -> None:
        """Add the steps for `nbytes` of a pickle or header."""
        self.nbytes += nbytes
        self.left += LIMITS.work_each * nbytes

    def charge(self, steps: int) -> None:
        """Take `steps`. Raise LimitError if too few are left, each time from then on."""
        self.left -= steps
        if self.left < 0:
            raise self.used_up()

    def check(self) -> None:
        """Raise LimitError if the steps are used up: an error that another error hid must not be lost."""
        self.charge(0)

    def used_up(self) -> LimitError:
        """Return the error for too many steps."""
        return LimitError(
            "its contents take too much work",
            expected=f"at most {LIMITS.work + LIMITS.work_each * self.nbytes:,} steps for {self.nbytes:,} bytes",
        )


_WORK: ContextVar[Work | None] = ContextVar("_WORK", default=None)


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the work in this block. A block inside another one has no budget of its own."""
    if _WORK.get() is not None:
        yield
        return
    token = _WORK.set(Work(LIMITS.work))
    try:
        yield
    finally:
        _WORK.reset(token)


def work() -> Work:
    """Return the budget of the current block. Outside of blocks it has no end: there, commands work on results."""
    return _WORK.get() or Work(sys.maxsize)
