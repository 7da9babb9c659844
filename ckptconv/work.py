"""The budget of work: count the steps that a command spends on the contents of files, and stop if there are too many.

Code that visits nodes, lists paths or pairs values charges its steps while it works. Each pickle and header that is
read adds to the budget, in proportion to its size. So the time and the memory of a command are bounded by the size of
its input, whatever the input contains. No clock is read: the same files are refused on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS


class Work:
    """A budget: the number of steps that are ``left``, and the number of bytes for which steps were granted."""

    __slots__ = ("left", "nbytes")

    def __init__(self, left: int) -> None:
        self.left = left
        self.nbytes = 0

    def grant(self, nbytes: int) -> None:
        """Add the steps for a pickle or header of `nbytes` bytes."""
        self.nbytes += nbytes
        self.left += LIMITS.work_each * nbytes

    def charge(self, steps: int) -> None:
        """Subtract `steps` from the budget. Raise LimitError if it is exhausted, in this call and in each later one."""
        self.left -= steps
        if self.left < 0:
            raise self.used_up()

    def check(self) -> None:
        """Raise LimitError if the budget is exhausted.

        Called at the end, because other code may have caught the first error.
        """
        self.charge(0)

    def used_up(self) -> LimitError:
        """Return the error for an exhausted budget."""
        return LimitError(
            "its contents take too much work",
            expected=f"at most {LIMITS.work + LIMITS.work_each * self.nbytes:,} steps for {self.nbytes:,} bytes",
        )


_WORK: ContextVar[Work | None] = ContextVar("_WORK", default=None)


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the work in this block to a new budget. A block inside another one uses the budget of the outer block."""
    if _WORK.get() is not None:
        yield
        return
    token = _WORK.set(Work(LIMITS.work))
    try:
        yield
    finally:
        _WORK.reset(token)


def work() -> Work:
    """Return the budget of the current block. Outside of all blocks, return an unlimited one."""
    return _WORK.get() or Work(sys.maxsize)
