"""Run many conversions. If one fails, the others go on. A job whose process ended without an answer is run again.

Jobs run in this thread, in worker processes, or on any executor with the ``submit`` of :mod:`concurrent.futures` (Dask,
mpi4py, ...), as ``docs/scale.md`` shows.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ckptconv.byteranges.sources import SourceFolder
from ckptconv.byteranges.spans import Progress
from ckptconv.byteranges.threads import Threads
from ckptconv.conversion.jobs import Job, JobExecutor, Outcome, Task, job_of, stamp_of, work, working
from ckptconv.conversion.options import JobOptions, parse_options, takes
from ckptconv.conversion.targets import list_in_place, list_requests
from ckptconv.errors import CkptconvError, MissingInputError, OutputError, RefusedError, UsageError
from ckptconv.formats import opening
from ckptconv.formats.sharded import reading, writing
from ckptconv.formats.sharded.index import find_set
from ckptconv.formats.writers import writer_for
from ckptconv.hints import for_python
from ckptconv.light_dataclass import dataclass
from ckptconv.output import files as output_files
from ckptconv.output.files import DiskWait, Steps, sync
from ckptconv.pickles.graph import gc_paused
from ckptconv.system import calls

if TYPE_CHECKING:
    from typing_extensions import Unpack

_WINDOW = 1000  # jobs that an executor of the caller gets at the same time
_WAITING = 64 << 20  # bytes of input files whose outputs wait for the disk at the same time
_AT_ONCE = 32  # files that wait for the disk at the same time
_OPEN = 8  # files that each of them may have open: its input, its output, a folder, inflated bytes


class _ThisThread(JobExecutor):
    """An executor that plans and writes one job after another in this thread.

    Meanwhile other threads wait for the disk for earlier jobs. At most `most` jobs wait, whose inputs have at most
    `_WAITING` bytes together. A larger job is done without others. Outcomes are delivered in the order of the jobs.
    `tick` is called with the number of bytes written since its last call.
    """

    def __init__(self, tick: Progress | None) -> None:
        self.tick = tick
        #: The limit of open files bounds this number.
        self.most = int(max(1, min(_AT_ONCE, calls.open_limits()[1] // _OPEN)))
        self._begun: deque[_Begun] = deque()  # in the order of their jobs
        self._synced: SimpleQueue[tuple[list[_Begun], BaseException | None]] = SimpleQueue()
        #: Folders that are being synced, each with the jobs that wait for its next sync.
        self._folders: dict[Path, list[_Begun]] = {}
        self._threads = Threads(self.most, "ckptconv-sync")
        self._next: tuple[Task, set[str], int] | None = None  # with the paths and the bytes of its input

    def make_room(self, task: Task) -> None:
        """Finish waiting jobs until `task` fits within the limits and none of them has a path in common with it."""
        if self._next is None or self._next[0] is not task:
            self._next = task, *_paths_and_size(task)
        _, paths, nbytes = self._next
        while self._begun and (
            sum(each.nbytes for each in self._begun) + nbytes > _WAITING
            or any(not each.paths.isdisjoint(paths) for each in self._begun)
        ):
            self.proceed()
        with contextlib.suppress(Empty):
            while True:
                self._wait_is_over(*self._synced.get_nowait())

    def submit(self, task: Task) -> Future[Outcome]:
        """Run `task` up to its first wait for the disk. :meth:`make_room` must be called with the same task before."""
        assert self._next is not None
        _, paths, nbytes = self._next
        begun = _Begun(working(task, self.tick), Future(), paths, nbytes)
        self._begun.append(begun)
        self._go_on(begun, None)
        return begun.future

    def proceed(self) -> None:
        """Continue waiting jobs until the first of them has its outcome."""
        first = self._begun[0].future if self._begun else None
        while first is not None and not first.done():
            self._wait_is_over(*self._synced.get())

    def _wait_is_over(self, group: list[_Begun], error: BaseException | None) -> None:
        """Continue the jobs of `group`, whose common wait has ended, perhaps with `error`.

        Jobs that began to wait for the same folder in the meantime are the next group.
        """
        if isinstance(wait := group[0].wait, Path) and (late := self._folders.pop(wait)):
            self._wait_for(wait, late)
        for each in group:
            self._go_on(each, error)

    def _go_on(self, begun: _Begun, error: BaseException | None) -> None:
        """Continue the job `begun` up to its next wait, or to its end.

        `error` is the exception of its last wait, or None.
        """
        try:
            begun.wait = begun.steps.throw(error) if error else next(begun.steps)
        except StopIteration as end:
            begun.outcome, begun.wait = end.value, None
            while self._begun and (outcome := self._begun[0].outcome):
                self._begun.popleft().future.set_result(outcome)
            return
        if isinstance(begun.wait, Path) and begun.wait in self._folders:
            self._folders[begun.wait].append(begun)
        else:
            self._wait_for(begun.wait, [begun])

    def _wait_for(self, wait: DiskWait, group: list[_Begun]) -> None:
        """Start `wait` in a thread, once for all jobs of `group`."""
        if isinstance(wait, Path):
            self._folders[wait] = []
        self._threads.submit(self._sync, wait, group)

    def _sync(self, wait: DiskWait, group: list[_Begun]) -> None:
        """Run `wait` in a thread, and queue `group` with the exception of `wait` or None."""
        error: BaseException | None = None
        try:
            sync(wait)
        except BaseException as raised:
            error = raised
        self._synced.put((group, error))

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - where nothing failed, nothing waits
        """Cancel the waiting jobs.

        A job deletes its temporary file, unless the file was renamed to the output already.
        """
        with contextlib.ExitStack() as ending:  # each of them, also where Ctrl-C comes once more
            for begun in self._begun:
                ending.callback(begun.steps.close)
            self._threads.shutdown()


@dataclass
class _Begun:
    """A job that waits for the disk, or that is done and waits until earlier jobs have delivered their outcomes."""

    steps: Steps[Outcome]
    future: Future[Outcome]
    paths: set[str]
    nbytes: int
    wait: DiskWait | None = None
    outcome: Outcome | None = None


def _paths_and_size(task: Task) -> tuple[set[str], int]:
    """Return the paths of `task`, and the bytes of its input.

    For a task that must run without others, return `_WAITING` bytes.

    A task must run without others if its input is the output, is remote, or is not one file, because a set keeps all
    its files open.
    """
    src, dst = task.job.src, task.job.dst
    paths = {os.path.abspath(src), os.path.abspath(dst)}
    is_copy = task.job.request is not None and task.job.request.kind == "other"
    is_index = not is_copy and os.fspath(src).lower().endswith(".json")
    if task.stamp or is_index:
        return paths, _WAITING
    try:
        found = os.stat(src)
    except (OSError, ValueError):  # or a pattern
        return paths, _WAITING
    return paths, found.st_size if stat.S_ISREG(found.st_mode) else _WAITING


class GivenExecutor(JobExecutor):
    """The `executor` of a caller. It is not shut down."""

    most = _WINDOW
    repeats = True

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def submit(self, task: Task) -> Future[Outcome]:
        """Submit `task` to the executor."""
        return self.executor.submit(work, task)


def processes(workers: int, tick: Progress | None = None) -> JobExecutor:
    """Return an executor with this number of `workers`.

    One worker is this thread, which calls `tick` with bytes written.
    """
    if workers <= 1:
        return _ThisThread(tick)

    from ckptconv.conversion.process_pool import Processes  # which costs every other command some milliseconds

    return Processes(workers)


_ATTEMPTS = 3  # attempts for a job that is lost each time
_POLL = 0.2  # seconds between two looks at what was written


@for_python
def convert_many(
    jobs: Iterable[Job], executor: Executor | None = None, *, done: Callable[[Outcome], object] | None = None
) -> list[Outcome]:
    """Convert all `jobs`.

    An edit that matches nothing in a checkpoint is left out there, if it matches in another checkpoint. Such
    checkpoints are converted last. Missing folders of outputs are created.

    Args:
        jobs: The conversions and their options.
        executor: Runs the jobs: any object with the interface of :class:`concurrent.futures.Executor`, which is not
            shut down. None: processes, one for each core, that end with this call. If `jobs` contain a function of the
            main module, that module must be guarded by ``if __name__ == "__main__"``.
        done: Called with each outcome as soon as it is known.

    Returns:
        The outcome of each job, in the order of the jobs. Errors are in the outcomes and are not raised.
    """

    def tell(outcome: Outcome) -> Outcome:
        if done is not None:
            done(outcome)
        return outcome

    todo = list(jobs)
    if executor is not None:
        return run_jobs(todo, GivenExecutor(executor), tell)
    return run_jobs(todo, processes(min(os.cpu_count() or 1, len(todo) or 1)), tell)


@for_python
@takes(JobOptions)
def jobs_in(
    src: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    **options: Unpack[JobOptions],
) -> list[Job]:
    """Return the jobs that convert the checkpoints in and below a folder into another folder.

    A sharded set, or a folder of torch.distributed.checkpoint, is one job.

    Args:
        src: The folder; or several files and folders, whose outputs keep their names in `dst`.
        dst: The folder of the outputs. With ``in_place`` it is the folder `src`.
        **options: The keys of :class:`~ckptconv.conversion.options.JobOptions`.

    Returns:
        A job for each checkpoint. With ``copy_others``, also a job for each other file.

    Raises:
        UsageError: The arguments contradict each other.
        RefusedError: Two outputs would have the same path.
        InputError: There is no checkpoint.
        ArgumentTypeError: An option has a wrong type, or no option has that name.
    """
    srcs = [src] if isinstance(src, (str, os.PathLike)) else list(src)
    edits, output = parse_options(options)
    if output.in_place and not any(Path(src) == Path(dst) for src in srcs):
        raise UsageError("an in-place change has no output", got=os.fspath(dst))
    listing = list_in_place(srcs, edits, output) if output.in_place else list_requests(srcs, dst, edits, output)
    return [job_of(request, options) for request in listing.requests]


@for_python
def write_index(folder: str | os.PathLike[str]) -> Path:
    """Write the index of a set of shards, after each shard was converted by a job of its own.

    Args:
        folder: The folder with the shards.

    Returns:
        The path of the index.

    Raises:
        MissingInputError: The folder does not exist.
        MalformedError: A shard is missing, or two shards contain the same name.
        RefusedError: There are no shards, or there is already an index.
    """
    folder = os.fspath(folder)
    if not os.path.isdir(folder):
        raise MissingInputError("there is no such folder", where=folder, expected="a folder with shards")
    with SourceFolder(folder, open_file=partial(opening.open_file, is_part=True)) as source, gc_paused():
        found = find_set(source.path)
        if found is None or found.index is not None:
            what = "no shards are in it" if found is None else f"its shards have an index, {found.index}"
            raise RefusedError(what, where=folder, expected="shards without an index")
        checkpoint = reading.read(source, opening.read)
        index = writing.layout(checkpoint, source.path, writer_for(objects=not checkpoint.is_state_dict)).files[-1]
        output_files.write(index, source, replace=False, verify=False)
    return index.path


# All jobs


def run_jobs(
    jobs: Sequence[Job], executor: JobExecutor, done: Callable[[Outcome], Outcome], tick: Progress | None = None
) -> list[Outcome]:
    """Run `jobs`, and return their outcomes in the same order.

    Args:
        jobs: The jobs.
        executor: Runs the jobs. It is closed at the end.
        done: Called with each outcome. It returns the outcome to put into the result.
        tick: Called with the number of bytes written since its last call.
    """
    made: list[Path] = []
    failed = True
    try:
        outcomes = _all(jobs, executor, done, tick, made)
        failed = False
    finally:
        executor.close(failed=failed)
        for folder in sorted(set(made), reverse=True):  # remove the folders in which nothing was written
            with contextlib.suppress(OSError):
                folder.rmdir()
    return [outcomes[i] for i in range(len(jobs))]


def _all(
    jobs: Sequence[Job],
    executor: JobExecutor,
    done: Callable[[Outcome], Outcome],
    tick: Progress | None,
    made: list[Path],
) -> dict[int, Outcome]:
    """Return the outcomes of `jobs` by their index. Jobs with an edit that matches nothing are run again at the end.

    The second time, the edit is left out if it matched in another job. Otherwise the first outcome stays. Folders that
    have to be created are added to `made`.
    """
    outcomes: dict[int, Outcome] = {}
    put_off: dict[int, Outcome] = {}
    known: set[tuple[str, object]] = set()  # the edits that match in at least one checkpoint
    with closing(_each(dict(enumerate(_tasks(jobs, made))), executor, tick)) as each:
        for i, outcome in each:
            known |= _matched(outcome)
            if outcome.unmatched:
                put_off[i] = outcome
            else:
                outcomes[i] = done(outcome)
    if any(not known.issuperset(outcome.unmatched) for outcome in put_off.values()):
        # the conversion of a skipped output is not known, so plan it to find the edits that match
        skipped = {i: Task(jobs[i], is_rehearsal=True) for i, outcome in outcomes.items() if outcome.skipped}
        with closing(_each(skipped, executor, None)) as each:
            known |= {edit for _, outcome in each for edit in _matched(outcome)}
    again: dict[int, Task] = {}
    for i, outcome in sorted(put_off.items()):
        if known.issuperset(outcome.unmatched):
            again[i] = next(_tasks([jobs[i]], made))._replace(dropped=outcome.unmatched)
        else:
            outcomes[i] = done(outcome)
    with closing(_each(again, executor, tick)) as each:
        for i, outcome in each:
            outcomes[i] = done(replace(outcome, unmatched=again[i].dropped))
    return outcomes


def _tasks(jobs: Sequence[Job], made: list[Path]) -> Iterator[Task]:
    """Yield a task for each of `jobs`, with facts about the output before the batch begins.

    The missing parent folders of outputs are added to `made`.
    """
    last = None
    for job in jobs:
        src, dst = Path(job.src), Path(job.dst)
        if not job.edits.get("dry_run") and dst.parent != last:
            last = dst.parent
            made += takewhile(lambda folder: not os.path.lexists(folder), (last, *last.parents))
        is_new, stamp = not os.path.lexists(dst), None
        if not is_new:
            with contextlib.suppress(OSError, ValueError):
                stamp = stamp_of(src) if os.path.samefile(src, dst) else None
        yield Task(job, new=is_new, stamp=stamp)


def _matched(outcome: Outcome) -> set[tuple[str, object]]:
    """Return the edits that matched something in this job. If `outcome` does not show them, return none."""
    if outcome.is_copy or not (outcome.report or outcome.unmatched):
        return set()
    return set(outcome.job.parsed()[0].several()).difference(outcome.unmatched)


def _each(
    tasks: Mapping[int, Task], executor: JobExecutor, tick: Progress | None
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield the outcomes of `tasks` with their index, as soon as they are known. Submit lost tasks again.

    A task is lost if `executor` raises an error instead of an outcome, for example because a process was killed. After
    several losses of the same task, an error is its outcome.
    """
    waiting = deque(tasks)
    suspects: deque[int] = deque()  # tasks that were lost together; one of them may be the cause
    running: dict[Future[Outcome], int] = {}
    finished: SimpleQueue[Future[Outcome]] = SimpleQueue()
    lost: Counter[int] = Counter()
    suspected = False  # whether a suspect is running
    before = executor.written()
    try:
        while waiting or suspects or running:
            while not suspected and (waiting or suspects) and len(running) < (1 if suspects else executor.most):
                executor.make_room(tasks[(suspects or waiting)[0]])
                if not finished.empty():  # report the finished task first
                    break
                suspected = bool(suspects)
                i = (suspects or waiting).popleft()
                try:
                    future = executor.submit(tasks[i]._replace(lost=executor.repeats or lost[i] > 0))
                except Exception as broken:  # the executor is broken or shut down
                    future = Future()
                    future.set_exception(broken)
                running[future] = i
                future.add_done_callback(finished.put)
            if finished.empty():
                executor.proceed()
            with contextlib.suppress(Empty):
                future = finished.get(timeout=_POLL)
                i, suspected = running.pop(future), False
                error = _loss(future)
                if error is None:
                    yield i, future.result()
                else:
                    lost[i] += 1
                    if lost[i] < _ATTEMPTS:
                        (suspects if executor.alone else waiting).append(i)
                    else:
                        yield i, Outcome(tasks[i].job, error=_lost(tasks[i].job, error))
            if tick is not None and (now := executor.written()) > before:
                tick(now - before)
                before = now
    finally:
        for future in running:
            future.cancel()


def _loss(future: Future[Outcome]) -> BaseException | None:
    """Return the reason why `future` has no outcome, or None if it has one.

    KeyboardInterrupt and SystemExit are raised.
    """
    if future.cancelled():
        return OutputError("it was cancelled")
    error = future.exception()
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    return error


def _lost(job: Job, error: BaseException) -> CkptconvError:
    return OutputError(
        f"its process ended too early, {_ATTEMPTS} times ({type(error).__name__}: {error})",
        where=job.src,
        hint="if memory ran out, convert fewer at a time",
    )
