"""Spawned workers that ignore SIGINT and exit with their parent.

A module of its own because what it imports costs every start of the command, and most commands need no second process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from ckptconv.conversion.jobs import JobExecutor, Outcome, Task, finished, work
from ckptconv.errors import UsageError

__all__ = ["Processes"]

_PLACES = 4096  # for processes, by their numbers: two in one would only make the bar wrong
_PATIENCE = 10.0  # seconds that a process has for putting its temporary file away


class _Spawning(SpawnContext):
    """Starts processes from nothing, because a fork copies the locks of other threads, and knows which."""

    def __init__(self) -> None:
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **keywords: Any) -> SpawnProcess:  # type: ignore[override]
        """A process that is not started yet."""
        self.started.append(SpawnProcess(*args, **keywords))
        return self.started[-1]


class Processes(JobExecutor):
    """Processes of our own, so many `workers`, and new ones where one of them was killed."""

    alone = True

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.most = 2 * workers  # so that none of them waits for work
        self.context = _Spawning()
        self.bytes = self.context.RawArray("q", _PLACES)  # no lock: whoever is killed holding it would stop all
        self.pool: ProcessPoolExecutor | None = None

    def submit(self, task: Task) -> Future[Outcome]:
        """Hand `task` over, to processes that are started if there are none."""
        try:
            pickle.dumps(task)
        except Exception as error:
            said = UsageError(f"it cannot be handed to another process: {error}", where=task.job.src)
            return finished(Outcome(task.job, error=said))
        with _without_interrupts():
            try:
                return self._pool().submit(_in_process, task)
            except RuntimeError:  # a process was killed
                self._end(failed=True)
                return self._pool().submit(_in_process, task)

    def _pool(self) -> ProcessPoolExecutor:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(
                self.workers, mp_context=self.context, initializer=_begin_process, initargs=(self.bytes,)
            )
        return self.pool

    def written(self) -> int:
        """What all processes have written."""
        return sum(self.bytes)

    def close(self, *, failed: bool) -> None:
        """Let the processes end; where something `failed`, now."""
        self._end(failed=failed)

    def _end(self, *, failed: bool) -> None:
        pool, self.pool = self.pool, None
        if pool is None:
            return
        pool.shutdown(wait=not failed, cancel_futures=True)
        started, self.context.started = self.context.started, []
        ours = [process for process in started if failed and process.pid is not None]
        try:
            for process in ours:
                process.terminate()
            for process in ours:
                process.join(_PATIENCE)
        finally:
            for process in ours:
                process.kill()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back in this thread, and for good in processes that are started inside."""
    resource_tracker.ensure_running()  # which would let Ctrl-C through again where it is started inside
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Process:
    """What a process knows of itself: whether it is `busy` with a job, and where it says how many `bytes` it wrote."""

    busy = False
    bytes: Any = None


def _begin_process(written: Any) -> None:
    """What each process does first.

    Ctrl-C it never hears of: that is for the one that has started it, which says what is to end, or ends itself.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, _end_process)
    _Process.bytes = written
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_process(*_: object) -> None:
    if _Process.busy:
        for number in (signal.SIGTERM, signal.SIGHUP):  # a second one would end the clean-up
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt  # so that the temporary file goes
    os._exit(1)


def _end_with_parent() -> None:
    """Wait for the end of the process that has started this one, which may be killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _in_process(task: Task) -> Outcome:
    """:func:`work` in a process of ours."""
    place = os.getpid() % _PLACES

    def tick(nbytes: int) -> None:
        _Process.bytes[place] += nbytes

    _Process.busy = True
    try:
        return work(task, tick)
    except KeyboardInterrupt:
        os._exit(1)
    finally:
        _Process.busy = False
