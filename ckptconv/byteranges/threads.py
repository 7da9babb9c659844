"""Threads that make calls. If the system gives no thread, the thread that submits a call makes it.

The package starts its threads here, except for those of executors that users pass. ``concurrent.futures`` is not used:
its import takes some milliseconds, and it raises an error if the system gives no thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

#: Seconds after which an idle thread looks for a task again. In CPython 3.11, signals at random moments could leave a
#: thread asleep while a task was waiting.
_LOOK_AGAIN = 1.0

_T = TypeVar("_T")


class Cancelled(Exception):
    """The threads were shut down before one of them began the call."""


class Task(Generic[_T]):
    """A call that waits for a thread, is being made, or has ended.

    Attributes:
        started: The value of ``time.monotonic()`` when the call began, or None.
        error: What the call raised, or None.
    """

    def __init__(self, call: Callable[..., _T], *args: object) -> None:
        self.started: float | None = None
        self.error: BaseException | None = None
        self._call = partial(call, *args)
        self._result: _T
        self._begun = threading.Lock()  # held once the call has begun or is cancelled
        self._ended = threading.Event()

    def run(self) -> None:
        """Make the call, unless it is cancelled, and keep its result or its exception."""
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
        """Wait for the end of the task. Return what the call returned, or raise what it raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result


class Threads:
    """At most `most` daemon threads, each begun when a task needs it. Any thread may submit tasks.

    A context manager: leaving it shuts the threads down.
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
        """Have a thread call `call` with `args`. After a shutdown, the task is cancelled.

        If there is no thread, the call is made here. Its exception is kept, except for an interrupt, which is raised.
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
        """Cancel the tasks that no thread has begun, and end the threads. Wait for them unless `wait` is False."""
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
