"""Threads that take tasks as they come. Where the system gives no more threads, whoever hands a task over does it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

#: Seconds after which a thread without a task looks again. With CPython 3.11 some slept on beside a task where signals
#: came at random moments.
_LOOK_AGAIN = 1.0

_T = TypeVar("_T")
_Task: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]"


class Threads:
    """At most `most` threads, begun as they are needed by one thread, which hands tasks over and ends them.

    Unlike with :mod:`concurrent.futures` a task is queued only when there is a thread for it, so each is done once.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._ended = False

    def submit(self, call: Callable[..., _T], *args: object) -> Future[_T]:
        """Have `call` called with `args`. What it gives or raises is in the future."""
        future: Future[_T] = Future()
        with self._lock:
            self._unfinished += 1
        if self._unfinished > len(self._threads) < self.most:
            self._begin()
        if self._threads:
            self._tasks.put((future, call, args))
        else:
            self._do(future, call, args)
        return future

    def _begin(self) -> None:
        """Have one thread more, if the system gives one."""
        thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._threads.append(thread)  # before it starts: Ctrl-C may come while that is waited for
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)

    def _work(self) -> None:
        while not self._ended:
            with contextlib.suppress(Empty):
                if task := self._tasks.get(timeout=_LOOK_AGAIN):
                    self._do(*task)

    def _do(self, future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = call(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        with self._lock:
            self._unfinished -= 1

    def shutdown(self) -> None:
        """End the threads behind what they are doing; what is still queued is cancelled."""
        self._ended = True
        with contextlib.suppress(Empty):
            while task := self._tasks.get_nowait():
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread.is_alive():  # else Ctrl-C came before it had started, and it finds no task any more
                thread.join()
