"""Where jobs run: in this thread, in our own processes, or on any ``concurrent.futures.Executor``.

Each hands jobs out; what is lost on the way, :mod:`ckptconv.conversion.batches` hands out again.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Protocol

from ckptconv.byteranges.spans import Progress
from ckptconv.conversion.jobs import Outcome, Task, work

__all__ = ["JobExecutor", "others", "processes"]

_WINDOW = 1000  # jobs that an executor of somebody else's holds at once


class JobExecutor(Protocol):
    """Where jobs are done.

    MOST: how many it takes at once. ALONE: a job that was lost is done again with nothing beside it, because it may be
    what ended the process. REPEATS: it may do a job again of its own accord.
    """

    most: int
    alone: bool
    repeats: bool

    def submit(self, task: Task) -> Future[Outcome]:
        """Have TASK done."""

    def written(self) -> int:
        """The bytes that were written, so far as it is known here."""

    def close(self, *, failed: bool) -> None:
        """End what the executor has started; at once if FAILED."""


class _Here:
    """This very thread, one job after another."""

    most = 1
    alone = False
    repeats = False

    def __init__(self, tick: Progress | None) -> None:
        self.tick = tick

    def submit(self, task: Task) -> Future[Outcome]:
        """Do TASK."""
        future: Future[Outcome] = Future()
        future.set_result(work(task, self.tick))
        return future

    def written(self) -> int:
        """Nothing that TICK has not been told."""
        return 0

    def close(self, *, failed: bool) -> None:
        """Nothing was started."""


class _Others:
    """Somebody else's EXECUTOR, which stays open."""

    most = _WINDOW
    alone = False
    repeats = True

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def submit(self, task: Task) -> Future[Outcome]:
        """Hand TASK over."""
        return self.executor.submit(work, task)

    def written(self) -> int:
        """Nobody tells."""
        return 0

    def close(self, *, failed: bool) -> None:
        """It is not ours."""


def others(executor: Executor) -> JobExecutor:
    """Somebody else's EXECUTOR, which stays open."""
    return _Others(executor)


def processes(workers: int, tick: Progress | None = None) -> JobExecutor:
    """So many WORKERS; this process itself if that is one, which calls TICK with each number of bytes written."""
    if workers <= 1:
        return _Here(tick)

    from ckptconv.conversion.process_pool import Processes  # which costs every other command some milliseconds

    return Processes(workers)
