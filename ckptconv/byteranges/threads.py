"""Threads that run calls. If the system cannot start a thread, the thread that submits a call runs it.

All threads of the package are started here, except for those of executors that users pass. ``concurrent.futures`` is
not used, because its import takes some milliseconds, and it raises an error if no thread can be started.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

#: Seconds after which an idle thread looks for a task again. In CPython 3.11, a signal at the wrong moment can leave a
#: thread asleep although a task is waiting.
_LOOK_AGAIN = 1.0

_T = TypeVar("_T")


class Cancelled(Exception):
    """The threads were shut down before the call began."""


class Task(Generic[_T]):
    """A call that waits for a thread, is running, or has ended.

    Attributes:
        started: The value of ``time.monotonic()`` when the call began, or None.
        error: The exception that the call raised, or None.
    """

    def __init__(self, call: Callable[..., _T], *args: object) -> None:
        self.started: float | None = None
        self.error: BaseException | None = None
        self._call = partial(call, *args)
        self._result: _T
        self._begun = threading.Lock()  # locked once the call has begun or is cancelled
        self._ended = threading.Event()

    def run(self) -> None:
        """Run the call, unless it is cancelled or has begun. Keep its result or its exception."""
        if self._begun.acquire(blocking=False):
            self.started = time.monotonic()
            try:
                self._result = self._call()
            except BaseException as error:
                self.error = error
            self._ended.set()

    def cancel(self) -> None:
        """End the task with the exception :class:`Cancelled`, unless the call has begun."""
        if self._begun.acquire(blocking=False):
            self.error = Cancelled()
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end of the task. Return whether it has ended."""
        return self._ended.wait(timeout)

    def result(self) -> _T:
        """Wait for the end of the task. Return the result of the call, or raise its exception."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result


@cache
def processors() -> int:
    """Return the number of processors. It is found once, because ``os.cpu_count`` reads a file at each call."""
    return os.cpu_count() or 1


class Threads:
    """A pool of at most `most` daemon threads. A thread is started when a task needs it. Any thread may submit tasks.

    A context manager: leaving it shuts the pool down.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._is_shut_down = False

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, call: Callable[..., _T], *args: object) -> Task[_T]:
        """Run `call` with `args` in a thread of the pool. After a shutdown, the returned task is cancelled.

        If the pool has no thread, the call runs in this thread. Its exception is kept in the task, except for
        KeyboardInterrupt and the like, which are raised.
        """
        task = Task(call, *args)
        with self._lock:
            if self._is_shut_down:
                task.cancel()
                return task
            self._unfinished += 1
            if self._unfinished > len(self._threads) < self._most:
                self._begin_thread()
            if self._threads:
                self._tasks.put(task)
                return task
        self._run(task)
        if task.error is not None and not isinstance(task.error, Exception):
            raise task.error
        return task

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.append(thread)  # before it starts, because Ctrl-C can interrupt the start
        try:
            thread.start()
        except RuntimeError:  # the system gives no thread
            self._threads.remove(thread)

    def _work(self) -> None:
        while not self._is_shut_down:
            with contextlib.suppress(Empty):
                if task := self._tasks.get(timeout=_LOOK_AGAIN):
                    self._run(task)

    def _run(self, task: Task[Any]) -> None:
        task.run()
        with self._lock:
            self._unfinished -= 1

    def shutdown(self, *, wait: bool = True) -> None:
        """Cancel the tasks that have not begun, and end the threads. Wait for the threads unless `wait` is False."""
        with self._lock:
            self._is_shut_down = True
        with contextlib.suppress(Empty):
            while task := self._tasks.get_nowait():
                task.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if wait and thread.is_alive():  # a thread whose start was interrupted finds no task, and ends by itself
                thread.join()
