"""Hold signals back while a file changes, so that none of them leaves it half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class HeldSignals:
    """The signals that came and wait for their handlers."""

    def __init__(self) -> None:
        #: The handlers that the held signals had before, by their numbers.
        self.handlers: dict[int, Callable[[int, FrameType | None], Any] | int] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal `number`: the handler in its place."""
        self._came.append((number, frame))

    def deliver(self, *, last: bool = False) -> None:
        """Call the handlers of the signals that came, which may raise.

        A signal without a handler of Python's, which would end the process, is sent again if this is the `last` time.
        """
        for number, frame in self._came[:]:
            handler = self.handlers[number]
            if callable(handler) or last:
                self._came.remove((number, frame))
                handler(number, frame) if callable(handler) else signal.raise_signal(number)


@contextmanager
def signals_held(done: str) -> Iterator[HeldSignals]:
    """Hold SIGINT, SIGTERM and SIGHUP back in this block, unless they are ignored, and deliver them after it.

    What their handlers raise gets a note: what the block has `done`, or the error in which it ended. Python calls
    handlers in the main thread only, so no other thread has to hold anything.
    """
    held = HeldSignals()
    try:
        with ExitStack() as after:
            if threading.current_thread() is threading.main_thread():
                for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
                    handler = signal.getsignal(number)
                    if handler not in (None, signal.SIG_IGN):  # None: a handler in C, which Python cannot put back
                        held.handlers[number] = handler
                        signal.signal(number, held.hold)
                        after.callback(signal.signal, number, handler)
            yield held
    except Exception as error:
        done = str(error)
        raise
    finally:
        try:
            held.deliver(last=True)
        except BaseException as error:
            with_note(error, done)
            raise


def with_note(error: BaseException, note: str) -> None:
    """Add a `note` for people to `error`, as ``BaseException.add_note`` of Python 3.11 does."""
    vars(error).setdefault("__notes__", []).append(note)
