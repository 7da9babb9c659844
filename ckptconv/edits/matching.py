"""Bound what a user's regular expression may cost on names that a file chose."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS


class _TooLongError(Exception):
    """The time for matching is over."""


@contextmanager
def bounded_matching(pattern: str, where: object) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns a name unchanged, and that is called with each name before it is matched.

    Names and the processor time for all of them together are limited. Python looks at the time between two names, in
    any thread. A single match is interrupted only by a signal: in the main thread, where the system has such timers.

    Args:
        pattern: The regular expression.
        where: The file, for errors.

    Raises:
        LimitError: A name is too long, or matching takes too long. The error has the name.
    """
    current = ""
    stop = time.thread_time() + LIMITS.match_seconds

    def about(name: str) -> str:
        nonlocal current
        current = name
        if len(name) > LIMITS.matched_name:
            raise LimitError(
                f"a name is too long to be matched with {pattern!r}",
                where=where,
                expected=f"at most {LIMITS.matched_name:,} characters",
                got=f"{len(name):,}: {name}",
            )
        if time.thread_time() > stop:
            raise _TooLongError
        return name

    try:
        with _alarm():
            yield about
    except _TooLongError:
        raise LimitError(
            f"matching {pattern!r} takes too long",
            where=where,
            expected=f"at most {LIMITS.match_seconds} s for all names",
            got=f"more, at the name {current}",
            hint="use a pattern without repetitions inside repetitions",
        ) from None


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise _TooLongError in the block after as much processor time as matching may take.

    A timer of the program that uses this package is left alone, and then nothing is raised.
    """
    import signal
    import threading

    is_possible = sys.platform not in ("win32", "emscripten") and threading.current_thread() is threading.main_thread()
    if not is_possible or signal.getitimer(signal.ITIMER_VIRTUAL)[0] or signal.getsignal(signal.SIGVTALRM):
        yield
        return
    is_on = True

    def ring(_: int, __: FrameType | None) -> None:
        if is_on:
            raise _TooLongError

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMITS.match_seconds)
    try:
        yield
    finally:
        is_on = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
