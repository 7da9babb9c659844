"""Where jobs run: in this thread, in our own processes, or on any ``concurrent.futures.Executor``.

Executors only run jobs. A job that is lost is submitted again by :mod:`ckptconv.conversion.batches`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue

from ckptconv.byteranges.sources import is_url
from ckptconv.byteranges.spans import Progress
from ckptconv.conversion.jobs import Job, JobExecutor, Outcome, Task, work, working
from ckptconv.light_dataclass import dataclass
from ckptconv.output.steps import DiskWait, FolderSync, Steps
from ckptconv.output.threads import Threads

_WINDOW = 1000  # jobs that an executor of somebody else's holds at once
_WAITING = 64 << 20  # bytes of input files whose outputs wait for the disk at once
_AT_ONCE = 32  # files that wait so
_OPEN = 8  # files that each of them may have open: its input, its output, a folder, with room for what is inflated


class _ThisThread(JobExecutor):
    """This very thread, which plans and writes one job after another; `tick` is called with each number of bytes.

    Meanwhile other threads wait for the disk for the jobs before. At most `most` jobs wait, whose inputs together have
    at most `_WAITING` bytes. A larger job is done alone. Outcomes come in the order of the jobs.
    """

    def __init__(self, tick: Progress | None) -> None:
        self.tick = tick
        self.most = _most_at_once()
        self._begun: deque[_Begun] = deque()  # in the order of their jobs
        self._synced: SimpleQueue[tuple[list[_Begun], BaseException | None]] = SimpleQueue()
        #: Folders that are being synced, each with the jobs that wait for its next sync.
        self._folders: dict[FolderSync, list[_Begun]] = {}
        self._threads = Threads(self.most, "ckptconv-sync")
        #: What the jobs that have begun have of paths, each alone, and of bytes; and what the next one will have.
        self._paths: set[str] = set()
        self._nbytes = 0
        self._next: tuple[Job, set[str], int] | None = None

    def make_room(self, task: Task) -> None:
        """Finish waiting jobs until there is room for `task`, and none of them shares a path with it."""
        _, paths, nbytes = self._asked(task)
        while self._begun and (self._nbytes + nbytes > _WAITING or not self._paths.isdisjoint(paths)):
            self.proceed()
        with contextlib.suppress(Empty):
            while True:
                self._wait_is_over(*self._synced.get_nowait())

    def submit(self, task: Task) -> Future[Outcome]:
        """Do `task` up to its first wait for the disk."""
        _, paths, nbytes = self._asked(task)
        self._next = None
        begun = _Begun(working(task, self.tick), Future(), paths, nbytes)
        self._begun.append(begun)
        self._paths |= paths
        self._nbytes += nbytes
        self._go_on(begun, None)
        return begun.future

    def _asked(self, task: Task) -> tuple[Job, set[str], int]:
        """The job of `task`, with what it will have of paths and bytes, for which the filesystem is asked once."""
        if self._next is None or self._next[0] is not task.job:
            self._next = task.job, *_paths_and_size(task)
        return self._next

    def proceed(self) -> None:
        """Go on with waiting jobs until the first of them has its outcome."""
        first = self._begun[0].future if self._begun else None
        while first is not None and not first.done():
            self._wait_is_over(*self._synced.get())

    def _wait_is_over(self, group: list[_Begun], error: BaseException | None) -> None:
        """Go on with the `group`, whose wait raised `error`. Jobs that reached its folder during the wait wait next."""
        if isinstance(wait := group[0].wait, FolderSync) and (late := self._folders.pop(wait)):
            self._wait_for(wait, late)
        for each in group:
            self._go_on(each, error)

    def _go_on(self, begun: _Begun, error: BaseException | None) -> None:
        """Do the job `begun`, whose wait raised `error`, up to its next wait."""
        try:
            begun.wait = begun.steps.throw(error) if error else next(begun.steps)
        except StopIteration as end:
            begun.outcome, begun.wait = end.value, None
            while self._begun and (outcome := self._begun[0].outcome):
                done = self._begun.popleft()
                self._paths -= done.paths
                self._nbytes -= done.nbytes
                done.future.set_result(outcome)
            return
        if isinstance(begun.wait, FolderSync) and begun.wait in self._folders:
            self._folders[begun.wait].append(begun)
        else:
            self._wait_for(begun.wait, [begun])

    def _wait_for(self, wait: DiskWait, group: list[_Begun]) -> None:
        """Have a thread call `wait`, once for all jobs of the `group`."""
        if isinstance(wait, FolderSync):
            self._folders[wait] = []
        self._threads.submit(self._sync, wait, group)

    def _sync(self, wait: DiskWait, group: list[_Begun]) -> None:
        """Call `wait`, in a thread, and say so."""
        error: BaseException | None = None
        try:
            wait()
        except BaseException as raised:
            error = raised
        self._synced.put((group, error))

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - where nothing failed, nothing waits
        """End the waiting jobs where they are: each deletes its temporary file, unless that has its name already."""
        with contextlib.ExitStack() as ending:  # each of them, also where Ctrl-C comes once more
            for begun in self._begun:
                ending.callback(begun.steps.close)
            self._threads.shutdown()


@dataclass
class _Begun:
    """A job that waits for the disk, or is done and waits for the outcome of a job before it."""

    steps: Steps[Outcome]
    future: Future[Outcome]
    paths: set[str]
    nbytes: int
    wait: DiskWait | None = None
    outcome: Outcome | None = None


def _most_at_once() -> int:
    """How many files may wait for the disk at once, where the system lets so many be open."""
    try:
        import resource  # which is of Unix alone
    except ImportError:
        return _AT_ONCE
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _AT_ONCE if hard == resource.RLIM_INFINITY else max(1, min(_AT_ONCE, hard // _OPEN))


def _paths_and_size(task: Task) -> tuple[set[str], int]:
    """The paths of `task`, and the bytes of its input. A task that must be alone counts as `_WAITING` bytes.

    Alone are those whose input is the output, is far, or is not one file: a set has all of its files open.
    """
    src, dst = task.job.src, task.job.dst
    paths = {os.path.abspath(src), os.path.abspath(dst)}
    is_index = not task.job.edits.get("copy") and os.fspath(src).lower().endswith(".json")
    if task.stamp or is_url(src) or is_index:
        return paths, _WAITING
    try:
        found = os.stat(src)
    except (OSError, ValueError):  # or a pattern
        return paths, _WAITING
    return paths, found.st_size if stat.S_ISREG(found.st_mode) else _WAITING


class GivenExecutor(JobExecutor):
    """The `executor` that a caller gave, which stays open."""

    most = _WINDOW
    repeats = True

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def submit(self, task: Task) -> Future[Outcome]:
        """Submit `task` to the executor."""
        return self.executor.submit(work, task)


def processes(workers: int, tick: Progress | None = None) -> JobExecutor:
    """An executor of so many `workers`. One worker is this thread, which calls `tick` with the bytes it writes."""
    if workers <= 1:
        return _ThisThread(tick)

    from ckptconv.conversion.process_pool import Processes  # which costs every other command some milliseconds

    return Processes(workers)
