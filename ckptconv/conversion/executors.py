"""Where jobs run: in this thread, in our own processes, or on any ``concurrent.futures.Executor``.

Each hands jobs out; what is lost on the way, :mod:`ckptconv.conversion.batches` hands out again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ckptconv.byteranges.sources import is_url
from ckptconv.byteranges.spans import Progress
from ckptconv.conversion.jobs import JobExecutor, Outcome, Task, work, working
from ckptconv.light_dataclass import dataclass
from ckptconv.output.steps import DiskWait, FolderSync, Steps

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["Others", "processes"]

_WINDOW = 1000  # jobs that an executor of somebody else's holds at once
_BEHIND = 64 << 20  # bytes of files that wait for the disk at once


class _Here(JobExecutor):
    """This very thread, one job after another; `tick` is told of each number of bytes.

    While it plans and writes, other threads wait for the disk, for the files before: so many small ones at once that
    together they have no more bytes than `_BEHIND`. A larger one is alone. Outcomes come in the order of the jobs.
    """

    most = 32

    def __init__(self, tick: Progress | None) -> None:
        self.tick = tick
        self._begun: deque[_Begun] = deque()  # in the order of their jobs
        self._synced: SimpleQueue[tuple[list[_Begun], BaseException | None]] = SimpleQueue()
        self._folders: dict[FolderSync, list[_Begun]] = {}  # those that are synced, and who waits for the next time
        self._threads: ThreadPoolExecutor | None = None

    def make_room(self, task: Task) -> None:
        """Go on until what waits leaves room for `task`, and has no path that it has."""
        paths, nbytes = _extent(task)
        while self._begun and (
            nbytes + sum(each.nbytes for each in self._begun) > _BEHIND
            or any(not paths.isdisjoint(each.paths) for each in self._begun)
        ):
            self.proceed()
        with contextlib.suppress(Empty):
            while True:
                self._take(*self._synced.get_nowait())

    def submit(self, task: Task) -> Future[Outcome]:
        """Do `task` as far as it goes without the disk."""
        begun = _Begun(working(task, self.tick), Future(), *_extent(task))
        self._begun.append(begun)
        self._go_on(begun, None)
        return begun.future

    def proceed(self) -> None:
        """Go on with what waited for the disk, until there is an outcome."""
        first = self._begun[0].future if self._begun else None
        while first is not None and not first.done():
            self._take(*self._synced.get())

    def _take(self, group: list[_Begun], error: BaseException | None) -> None:
        """Go on with the `group`, whose wait is over, and let those wait who came to its folder meanwhile."""
        if isinstance(wait := group[0].wait, FolderSync) and (late := self._folders.pop(wait)):
            self._wait_for(wait, late)
        for each in group:
            self._go_on(each, error)

    def _go_on(self, begun: _Begun, error: BaseException | None) -> None:
        """Do what comes next for `begun`, whose wait raised `error`, up to the next one."""
        try:
            begun.wait = begun.steps.throw(error) if error else next(begun.steps)
        except StopIteration as end:
            begun.outcome, begun.wait = end.value, None
            while self._begun and (outcome := self._begun[0].outcome):
                self._begun.popleft().future.set_result(outcome)
            return
        if isinstance(begun.wait, FolderSync) and begun.wait in self._folders:
            self._folders[begun.wait].append(begun)
        else:
            self._wait_for(begun.wait, [begun])

    def _wait_for(self, wait: DiskWait, group: list[_Begun]) -> None:
        """Have a thread call `wait`, for all of the `group`."""
        if isinstance(wait, FolderSync):
            self._folders[wait] = []

        def sync() -> None:
            error: BaseException | None = None
            try:
                wait()
            except BaseException as raised:
                error = raised
            self._synced.put((group, error))

        if self._threads is None:
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(self.most, "ckptconv-sync")
        try:
            self._threads.submit(sync)
        except RuntimeError:  # the system gives no more
            sync()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - where nothing failed, nothing waits
        """Let what waits end where it stands: its temporary goes, or it has its name."""
        if self._threads is not None:
            self._threads.shutdown()
        while self._begun:
            self._begun.popleft().steps.close()


@dataclass
class _Begun:
    """A job that waits for the disk, or whose outcome waits for that of one before it."""

    steps: Steps[Outcome]
    future: Future[Outcome]
    paths: set[str]
    nbytes: int
    wait: DiskWait | None = None
    outcome: Outcome | None = None


def _extent(task: Task) -> tuple[set[str], int]:
    """The paths of `task`, and the bytes of its input; as many as may wait where that is no file or is the output."""
    src, dst = task.job.src, task.job.dst
    paths = {os.path.abspath(src), os.path.abspath(dst)}
    if task.stamp or is_url(src):
        return paths, _BEHIND
    try:
        found = os.stat(src)
    except (OSError, ValueError):
        return paths, 0
    return paths, found.st_size if stat.S_ISREG(found.st_mode) else _BEHIND


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
