"""Threads that ask servers, several at once, and for whom nobody waits longer than until the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotDone
from queue import SimpleQueue

from ckptconv.byteranges.far.planning import POLICY
from ckptconv.errors import TransferError

_GRACE = 2.0  # seconds in which a request that notices the deadline itself says more than we can


class Task(Future[bytes]):
    """A request that is waiting, on its way or answered."""

    def __init__(self, ask: Callable[[], bytes], where: object) -> None:
        super().__init__()
        self._ask, self._where = ask, where
        self._started: float | None = None

    def run(self) -> None:
        """Ask."""
        if not self.set_running_or_notify_cancel():
            return
        self._started = time.monotonic()
        try:
            self.set_result(self._ask())
        except BaseException as error:  # for who waits
            self.set_exception(error)

    def wait(self) -> bytes:
        """What the server answered. Raises what asking raised, and TransferError past the deadline."""
        most = POLICY.deadline + _GRACE
        while True:
            try:
                return self.result(timeout=min(1.0, most))
            except NotDone:
                if self.done():  # just now
                    return self.result()
                if self._started is not None and time.monotonic() - self._started > most:
                    what = f"no answer within {POLICY.deadline:g} s"
                    raise TransferError(what, where=self._where, hint="try again later") from None
            except CancelledError:
                raise TransferError("the file was closed while it was read", where=self._where) from None


class Workers:
    """At most as many threads as requests are made at once. They are daemons: one that a server holds up for ever ends
    with the process.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._left = 0
        self._is_closed = False

    def submit(self, ask: Callable[[], bytes], where: object) -> Task:
        """Have `ask` called."""
        task = Task(ask, where)
        with self._lock:
            if self._is_closed:
                raise TransferError("the file was closed while it was read", where=where)
            self._left += 1
            is_new = self._threads < min(self._left, POLICY.concurrency)
            self._threads += is_new
        self._waiting.put(task)
        if is_new:
            threading.Thread(target=self._run, name="ckptconv-far", daemon=True).start()
        return task

    def _run(self) -> None:
        while task := self._waiting.get():
            task.run()
            with self._lock:
                self._left -= 1

    def close(self) -> None:
        """Let the threads end when they have nothing to wait for."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._threads):
                self._waiting.put(None)
