"""End on SIGTERM and SIGHUP as on Ctrl-C: by an exception, so that what was begun is put away."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_MOMENT = 0.01  # seconds


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have `handler`, which raises an exception, called on SIGTERM and SIGHUP, unless they are ignored (``nohup``).

    Its exception, or that of Ctrl-C, is raised again a moment later where the interpreter would print it and go on: in
    a callback of an import, or in a ``__del__``.
    """
    hook, before = sys.unraisablehook, {}
    for number in (getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)

    def raise_later(lost: UnraisableHookArgs) -> None:
        error = lost.exc_value
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            hook(lost)
            return

        def raise_it(*_: object) -> None:
            raise error

        signal.signal(signal.SIGALRM, raise_it)
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)

    sys.unraisablehook = raise_later
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, old in before.items():
            signal.signal(number, old)
