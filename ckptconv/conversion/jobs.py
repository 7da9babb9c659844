"""One conversion as a picklable job, and its outcome.

:func:`work` raises nothing, so that one that fails stops no other.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.reading import crc32_of
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, OutFile, Progress
from ckptconv.conversion.convert import running
from ckptconv.conversion.in_place import change_in_place
from ckptconv.conversion.options import JobOptions, OutputOptions
from ckptconv.conversion.plan import Report
from ckptconv.conversion.targets import Item, find_item, is_there
from ckptconv.edits.changes import Changes
from ckptconv.edits.options import Edits, edits_from, option_of
from ckptconv.errors import CkptconvError, InputChangedError, NoMatchError, TargetExistsError, UsageError, redacted
from ckptconv.hints import joined, option, unknown_keyword
from ckptconv.light_dataclass import dataclass
from ckptconv.output import far_targets
from ckptconv.output import files as output_files
from ckptconv.output.other_files import check_inside, open_other
from ckptconv.output.steps import Steps, run_steps
from ckptconv.stores import is_url


@dataclass(frozen=True)
class Job:
    """One conversion: of `src` to `dst`, with `edits`, which are keywords of :func:`ckptconv.convert`.

    Three more of them are known: ``skip_existing`` (what is there already is left as it is, whatever ``force`` says),
    ``copy`` (`src` is no checkpoint: it is copied as it is) and ``within`` (with ``copy``: the folder out of which no
    link is followed). With ``in_place`` the two paths are one.
    """

    src: str | os.PathLike[str]
    dst: str | os.PathLike[str]
    edits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise TypeError or UsageError for keywords that nobody knows, or that make no sense."""
        known = JobOptions.__annotations__
        for name in self.edits:
            if name not in known:
                raise unknown_keyword("convert", name, self.edits[name], [*known])
        object.__setattr__(self, "edits", dict(self.edits))  # a view of somebody's dict, which no process could get
        self.as_edits()
        if self.as_output().in_place and Path(self.dst) != Path(self.src):
            raise UsageError("an in-place change has no output", got=os.fspath(self.dst))

    def __repr__(self) -> str:
        """The call that makes it, without the secrets of URLs."""
        src, dst = (redacted(each) if isinstance(each, str) else each for each in (self.src, self.dst))
        return f"Job(src={src!r}, dst={dst!r}, edits={self.edits!r})"

    def as_edits(self) -> Edits:
        """Those of the keywords that change something in the checkpoint."""
        return self._said[0]

    def as_output(self) -> OutputOptions:
        """Those of the keywords that say something about the output."""
        return self._said[1]

    @cached_property
    def _said(self) -> tuple[Edits, OutputOptions]:
        """The keywords as data, which the jobs of one batch mostly share."""
        try:
            return _as_data(tuple((name, value, type(value)) for name, value in self.edits.items()))
        except TypeError:  # something in it may change, and has no hash; or is wrong, which is said once more
            return edits_from(**self.edits), OutputOptions.of(self.edits)


@lru_cache(maxsize=16)
def _as_data(keywords: tuple[tuple[str, object, type], ...]) -> tuple[Edits, OutputOptions]:
    options: dict[str, Any] = {name: value for name, value, _ in keywords}
    return edits_from(**options), OutputOptions.of(options)


@dataclass(frozen=True)
class Outcome:
    """What became of `job`: a `report`, an `error`, or neither, where it was `skipped` because its output is there.

    ``trace`` is the traceback of an error that is a bug. ``unmatched`` are edits that mean nothing in this checkpoint;
    in a report's job they meant something in another one.
    """

    job: Job
    report: Report | None = None
    error: CkptconvError | None = None
    skipped: bool = False
    trace: str = ""
    unmatched: tuple[tuple[str, object], ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether what it is of is no checkpoint."""
        return bool(self.job.edits.get("copy"))


class Task(NamedTuple):
    """A job as it is handed to who does it.

    `dropped`: edits that mean nothing in it. `new`: its output was not there when all began. `lost`: somebody may have
    done it already, of whom nothing was heard. `stamp`: of an input that is the output too, what it was when all began.
    """

    job: Job
    dropped: tuple[tuple[str, object], ...] = ()
    new: bool = False
    lost: bool = False
    stamp: tuple[int, ...] | None = None


class JobExecutor:
    """Where jobs are done. By itself this class starts nothing.

    Attributes:
        most: How many jobs it takes at once.
        alone: Whether a job that was lost is done again with nothing beside it, because it may have ended the process.
        repeats: Whether it may do a job again of its own accord.
    """

    most = 1
    alone = False
    repeats = False

    def submit(self, task: Task) -> Future[Outcome]:
        """Have `task` done."""
        raise NotImplementedError

    def written(self) -> int:
        """The bytes that were written, so far as it is known here."""
        return 0

    def make_room(self, task: Task) -> None:
        """Work on submitted tasks until `task` can be too, if the executor works in this thread."""

    def proceed(self) -> None:
        """Work on submitted tasks until one is done, if the executor works in this thread."""

    def close(self, *, failed: bool) -> None:
        """End what the executor has started; at once if `failed`."""


def finished(outcome: Outcome) -> Future[Outcome]:
    """A future that has its `outcome`."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def work(task: Task, tick: Progress | None = None) -> Outcome:
    """What becomes of `task`.

    Raises nothing but KeyboardInterrupt and the like. `tick` is called with each number of bytes written.
    """
    return run_steps(working(task, tick))


def working(task: Task, tick: Progress | None = None) -> Steps[Outcome]:
    """The steps of :func:`work`."""
    job = task.job
    try:
        return (yield from _converting(task, tick))
    except NoMatchError as error:
        return Outcome(job, error=error, unmatched=_unmatched(task, error))
    except CkptconvError as error:
        return Outcome(job, error=error)
    except Exception as error:
        what = f"a bug in ckptconv: {type(error).__name__}: {error}"
        return Outcome(job, error=CkptconvError(what, where=job.src), trace=traceback.format_exc())


def _converting(task: Task, tick: Progress | None) -> Steps[Outcome]:
    job = task.job
    output = job.as_output()
    item = Item(Path(job.src), Path(job.dst), "file") if output.in_place else find_item(job.src, job.dst, output)
    if job.edits.get("skip_existing") and is_there(item):
        return Outcome(job, skipped=True)
    if task.stamp is not None and stamp_of(item.src) != task.stamp:
        raise InputChangedError(
            "it is not what it was when the batch began",
            where=item.src,
            hint="it was to be converted in place, and may have been: inspect it before it is converted again",
        )
    try:
        return Outcome(job, report=(yield from _run(item, task, tick)))
    except TargetExistsError as error:
        # A process that is killed right after its work was done has told nobody.
        if task.new and task.lost and (report := _done_before(item, task)) is not None:
            return Outcome(job, report=report)
        error.hint = joined(error.hint, option("skip_existing") + " leaves what is there", separator=", ")
        raise


def _run(item: Item, task: Task, tick: Progress | None) -> Steps[Report]:
    """Convert `item`, without the edits that mean nothing in it, and make the folders above its output."""
    if is_url(item.dst):  # stores have no folders
        return (yield from _run_to(item, item.dst, task, tick))
    if not task.job.as_output().dry_run:
        output_files.make_folder(item.dst.parent, like=item.src.parent)
        return (yield from _run_to(item, item.dst, task, tick))
    if item.dst.parent.is_dir():
        return (yield from _run_to(item, item.dst, task, tick))
    with tempfile.TemporaryDirectory(prefix="ckptconv-") as folder:  # stands for the one that is still to be made
        report = yield from _run_to(item, Path(folder) / item.dst.name, task, tick)
        return replace(report, dst=str(item.dst))


def _run_to(item: Item, dst: Path, task: Task, tick: Progress | None) -> Steps[Report]:
    job = task.job
    if job.edits.get("copy"):
        return (yield from _copying(item.src, dst, job, tick))
    edits = job.as_edits()
    for dropped in task.dropped:
        edits = edits.without(*dropped)
    output = job.as_output()
    if output.in_place:
        report = change_in_place(item.src, edits, output)
    else:
        steps = running(item.src, dst, edits, output, is_folder=item.is_folder, progress=lambda _: nullcontext(tick))
        report = yield from steps
    notes = [*item.notes, *(option_of(*each) + " means nothing here" for each in task.dropped)]
    return replace(report, notes=(*report.notes, *notes)) if notes else report


def _copying(src: Path, dst: Path, job: Job, tick: Progress | None) -> Steps[Report]:
    """Copy `src` to `dst` as it is."""
    output = job.as_output()
    if "within" in job.edits and not is_url(src):
        check_inside(src, Path(job.edits["within"]))
    how: dict[str, Any] = {"replace": output.force, "verify": output.verify, "progress": tick}
    with open_other(src) as source:
        file = OutFile.copy_of(source, dst)
        check = far_targets.check_object if is_url(dst) else output_files.check_target
        check(dst, replace=output.force)
        if not output.dry_run and is_url(dst):
            far_targets.far_writer(dst).upload([file], source, **how)
        elif not output.dry_run:
            yield from output_files.writing(file, source, **how)
        return Report(str(src), str(dst), ("", ""), source.size, Changes(), (), (), (), 0.0, not output.dry_run)


def _done_before(item: Item, task: Task) -> Report | None:
    """The report of the conversion of `item` if what is there is its output: converted once more,
    beside it, it has the same bytes. Else None.
    """
    again = output_files.temporary_beside(item.dst)
    with output_files.as_output_error(item.dst):
        os.mkdir(again, 0o700)
    try:
        report = run_steps(_run_to(item, again / item.dst.name, task, None))
        is_same = _content(again / item.dst.name) == _content(item.dst)
    finally:
        shutil.rmtree(again, ignore_errors=True)
    return replace(report, dst=str(item.dst)) if is_same else None


def _content(path: Path) -> dict[str, tuple[int, int]]:
    """The sizes and checksums of the file `path`, or of the files in the folder `path`."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    found = {}
    for each in files:
        with Source(each) as source:
            found[str(each.relative_to(path))] = source.size, crc32_of(ByteRange(source, 0, source.size))
    return found


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes when the file or folder `path` is replaced, or written to."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


# Edits that mean nothing in one file


def _unmatched(task: Task, error: NoMatchError) -> tuple[tuple[str, object], ...]:
    """All edits that mean nothing in `task`'s input, of which `error` is about the first, if the
    rest could be done without them; else none.
    """
    found: tuple[tuple[str, object], ...] = task.dropped
    last: CkptconvError = error
    while isinstance(last, NoMatchError) and last.unmatched is not None and last.unmatched not in found:
        found += (last.unmatched,)
        job = replace(task.job, edits={**task.job.edits, "dry_run": True})
        outcome = _planned(task._replace(job=job, dropped=found))
        if outcome is None:
            return found
        last = outcome
    return ()


def _planned(task: Task) -> CkptconvError | None:
    """What is in the way of `task`, a dry run."""
    try:
        run_steps(_converting(task, None))
    except CkptconvError as error:
        return error
    return None
