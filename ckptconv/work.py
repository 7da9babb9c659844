"""The budget of work: count the steps that a command spends on the contents of files, and stop if there are too many.

Code that visits nodes, lists paths or pairs values charges its steps while it works. Each pickle and header that is
read adds to the budget, in proportion to its size. So the time and the memory of a command are bounded by the size of
its input, whatever the input contains. No clock is read: the same files are refused on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS

#: Characters of a text that are copied in one step.
CHARACTERS = 30


class Work:
    """A budget of steps.

    Attributes:
        left: The number of steps that are left.
        nbytes: The number of bytes for which steps were granted.
        where: The file or pickle that was read last, for errors.
    """

    __slots__ = ("_inflated", "left", "nbytes", "where")

    def __init__(self, left: int) -> None:
        self.left = left
        self._inflated = LIMITS.inflated_bytes
        self.nbytes = 0
        self.where: object = None

    def grant(self, nbytes: int, where: object = None) -> None:
        """Add the steps for a pickle or header of `nbytes` bytes, which is at `where`."""
        self.where = where or self.where
        self.nbytes += nbytes
        self.left += LIMITS.work_each * nbytes

    def take_inflated(self, size: int, stored: int) -> int:
        """Return for how many of the `size` bytes of a record, which were inflated from `stored` ones, to grant steps.

        A few deflated bytes can become many. So the number is `stored`, and a part of ``LIMITS.inflated_bytes``, which
        all records of a command share and which becomes less with each call.
        """
        more = min(max(size - stored, 0), self._inflated)
        self._inflated -= more
        return min(size, stored + more)

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
def bounded(*, is_trial: bool = False) -> Iterator[None]:
    """Limit the work in this block to a new budget. A block inside another one uses the budget of the outer block.

    A trial has its own budget even inside another block, which continues if the trial takes too much work.

    An error that does not say where it is gets the file that was read last.
    """
    if _WORK.get() is not None and not is_trial:
        yield
        return
    budget = Work(LIMITS.work)
    token = _WORK.set(budget)
    try:
        yield
    except LimitError as error:
        error.where = error.where or budget.where
        raise
    finally:
        _WORK.reset(token)


def work() -> Work:
    """Return the budget of the current block. Outside of all blocks, return an unlimited one."""
    return _WORK.get() or Work(sys.maxsize)


# How much is done

T = TypeVar("T")
#: A function that is called with the name of a step, the amount of work that is done, and the total.
Watch: TypeAlias = Callable[[str, int, int], None]
_EACH = 1000  # items
_WATCH: ContextVar[Watch | None] = ContextVar("_WATCH", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Call `watch` while the steps in this block make progress."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def tell(step: str, done: int, total: int) -> None:
    """Report progress of `step` if it is watched."""
    watch = _WATCH.get()
    if watch:
        watch(step, done, total)


def seen(step: str, items: Iterable[T], total: int) -> Iterable[T]:
    """Return `items`. If `step` is watched, report how many of the `total` items were taken."""
    return _seen(step, items, total) if _WATCH.get() else items


def _seen(step: str, items: Iterable[T], total: int) -> Iterator[T]:
    for n, item in enumerate(items):
        if not n % _EACH:
            tell(step, n, total)
        yield item
    tell(step, total, total)
