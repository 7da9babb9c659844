"""Where jobs run: in this thread, in our own processes, or on any ``concurrent.futures.Executor``.

Each hands jobs out; what is lost on the way, :mod:`ckptconv.conversion.batches` hands out again.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

from ckptconv.byteranges.spans import Progress
from ckptconv.conversion.jobs import JobExecutor, Outcome, Task, finished, work

__all__ = ["Others", "processes"]

_WINDOW = 1000  # jobs that an executor of somebody else's holds at once


class _Here(JobExecutor):
    """This very thread, one job after another; `tick` is told of each number of bytes."""

    def __init__(self, tick: Progress | None) -> None:
        self.tick = tick

    def submit(self, task: Task) -> Future[Outcome]:
        """Do `task`."""
        return finished(work(task, self.tick))


class Others(JobExecutor):
    """Somebody else's `executor`, which stays open."""

    most = _WINDOW
    repeats = True

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def submit(self, task: Task) -> Future[Outcome]:
        """Hand `task` over."""
        return self.executor.submit(work, task)


def processes(workers: int, tick: Progress | None = None) -> JobExecutor:
    """So many `workers`; this process itself if that is one, which calls `tick` with each number of bytes written."""
    if workers <= 1:
        return _Here(tick)

    from ckptconv.conversion.process_pool import Processes  # which costs every other command some milliseconds

    return Processes(workers)
