"""Turn signals into exceptions, and delay them while a file is changed."""

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
    """Set `handler` for the signals `names` during this block, except for ignored signals (``nohup``).

    The previous handlers are added to `before`, by the numbers of the signals. A handler in C is not replaced, because
    Python could not restore it.
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
    """Call `handler`, which raises an exception, on SIGTERM and similar signals, so that a command ends as on Ctrl-C.

    The interpreter prints and drops such an exception, and KeyboardInterrupt, if it is raised in a callback of an
    import or in a ``__del__``. In this block it is raised again a moment later.
    """
    hook = sys.unraisablehook

    def raise_later(unraisable: UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            hook(unraisable)
            return

        def raise_it(_: int, frame: FrameType | None) -> None:
            while frame:  # inside this hook the interpreter would drop the exception too
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
    """The signals that have arrived but are delayed.

    Attributes:
        handlers: The previous handlers of the delayed signals, by their numbers.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, _Handler | int] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Record the signal `number`. This method is the handler while signals are delayed."""
        self._arrived.append((number, frame))

    def deliver(self, *, last: bool = False) -> None:
        """Call the previous handlers of the signals that have arrived. They may raise exceptions.

        A signal without a handler in Python, which would end the process, is sent again only if this is the `last`
        call.
        """
        for number, frame in self._arrived[:]:
            handler = self.handlers[number]
            if callable(handler) or last:
                self._arrived.remove((number, frame))
                handler(number, frame) if callable(handler) else signal.raise_signal(number)


@contextmanager
def signals_held(done: str) -> Iterator[HeldSignals]:
    """Delay SIGINT, SIGTERM and similar signals in this block, and deliver them after it.

    An exception that a handler raises gets a note: the error that ended the block, or else `done`, a text about what
    the block has done. Python calls handlers only in the main thread, so nothing is delayed in other threads.
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
