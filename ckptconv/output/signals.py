"""Turn signals into exceptions, and hold them back while a file changes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.system import calls

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"


@contextmanager
def _handling(names: Sequence[str], handler: _Handler, before: dict[int, _Handler | int]) -> Iterator[None]:
    """Set `handler` for the signals `names` during this block, except for ignored ones (``nohup``).

    Put the handlers that they had into `before`, by their numbers. A handler in C is left, because Python cannot put it
    back.
    """
    with ExitStack() as after:
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
            old = signal.getsignal(number)
            if old not in (None, signal.SIG_IGN):
                before[number] = old
                signal.signal(number, handler)
                after.callback(signal.signal, number, old)
        yield


@contextmanager
def handled_by(handler: _Handler) -> Iterator[None]:
    """Call `handler`, which raises an exception, on SIGTERM and the like, so that a command ends as on Ctrl-C.

    In a callback of an import or in a ``__del__``, the interpreter would print that exception, or Ctrl-C's, and go on:
    it is raised again a moment later.
    """
    hook = sys.unraisablehook

    def raise_later(unraisable: UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            hook(unraisable)
            return

        def raise_it(_: int, frame: FrameType | None) -> None:
            while frame:  # inside this hook the interpreter would drop it too
                if frame.f_code is raise_later.__code__:
                    calls.call_soon(raise_it)
                    return
                frame = frame.f_back
            raise error

        calls.call_soon(raise_it)

    with _handling(calls.ENDING, handler, {}):
        sys.unraisablehook = raise_later
        try:
            yield
        finally:
            sys.unraisablehook = hook


class HeldSignals:
    """The signals that arrived and wait for their handlers.

    Attributes:
        handlers: The handlers of the signals that are held back, by their numbers.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, _Handler | int] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal `number`: the handler while signals are held back."""
        self._arrived.append((number, frame))

    def deliver(self, *, last: bool = False) -> None:
        """Call the handlers of the signals that arrived, which may raise.

        A signal without a handler in Python, which would end the process, is sent again if this is the `last` time.
        """
        for number, frame in self._arrived[:]:
            handler = self.handlers[number]
            if callable(handler) or last:
                self._arrived.remove((number, frame))
                handler(number, frame) if callable(handler) else signal.raise_signal(number)


@contextmanager
def signals_held(done: str) -> Iterator[HeldSignals]:
    """Hold back SIGINT, SIGTERM and the like in this block, and deliver them after it.

    An exception that a handler raises gets a note: the error that ended the block, or `done`, which says what the block
    did. Python calls handlers in the main thread only, so in other threads nothing is held back.
    """
    held = HeldSignals()
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _handling(("SIGINT", *calls.ENDING) if is_main else (), held.hold, held.handlers):
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
    """Add `note` to `error`, as ``BaseException.add_note`` of Python 3.11 does."""
    vars(error).setdefault("__notes__", []).append(note)
