"""A conversion as a picklable job, and its outcome.

:func:`work` does not raise errors, so a job that fails does not stop the others.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.reading import crc32_of
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Progress
from ckptconv.conversion.convert import run, running
from ckptconv.conversion.options import JobOptions, OutputOptions, parse_options
from ckptconv.conversion.plan import Report
from ckptconv.conversion.targets import Request, find_request, is_there
from ckptconv.edits.options import Edits, option_of
from ckptconv.errors import CkptconvError, InputChangedError, NoMatchError, TargetExistsError, UsageError, redacted
from ckptconv.hints import joined, option, unknown_keyword
from ckptconv.light_dataclass import dataclass
from ckptconv.output import files as output_files
from ckptconv.output.files import Steps, run_steps
from ckptconv.stores import is_url, store_of


@dataclass(frozen=True)
class Job:
    """A conversion as a picklable object.

    Attributes:
        src: The input.
        dst: The output. With ``in_place`` it is `src`.
        edits: The keywords of :func:`ckptconv.convert`, and ``skip_existing``: an existing output is not replaced, even
            with ``force``.
        request: The resolved paths and options, if :func:`ckptconv.jobs_in` created the job. None: they are resolved
            when the job runs.
    """

    src: str | os.PathLike[str]
    dst: str | os.PathLike[str]
    edits: Mapping[str, Any] = field(default_factory=dict)
    request: Request | None = None

    def __post_init__(self) -> None:
        """Check the keywords, and copy them to a dict.

        Raises ArgumentTypeError or UsageError if a keyword is unknown or its value is wrong, or if a change in place
        has another output.
        """
        known = JobOptions.__annotations__
        for name in self.edits:
            if name not in known:
                raise unknown_keyword("convert", name, self.edits[name], [*known])
        object.__setattr__(self, "edits", dict(self.edits))  # other kinds of mappings may not be picklable
        if self.request is None and self.parsed()[1].in_place and Path(self.dst) != Path(self.src):
            raise UsageError("an in-place change has no output", got=os.fspath(self.dst))

    def __repr__(self) -> str:
        """Return the call that creates the job, without the secrets of URLs."""
        src, dst = (redacted(each) if isinstance(each, str) else each for each in (self.src, self.dst))
        return f"Job(src={src!r}, dst={dst!r}, edits={self.edits!r})"

    def parsed(self) -> tuple[Edits, OutputOptions]:
        """Return the keywords in `edits` as edits of the checkpoint and options of the output."""
        if self.request:
            return self.request.edits, self.request.output
        return parse_options(self.edits)

    def located(self) -> Request:
        """Return `request`. If it is None, resolve `src` and `dst`.

        Raises the errors of :func:`~ckptconv.conversion.targets.find_request`.
        """
        return self.request or replace(find_request(self.src, self.dst, *self.parsed()), given=self.edits)


def job_of(request: Request, given: Mapping[str, Any]) -> Job:
    """Return the job for `request`, which was created from the keywords `given`."""
    src = request.src if is_url(request.src) else str(request.src)  # the text of a URL object is incomplete
    dst = f"{request.dst}".rstrip("/") + "/" if request.is_folder else str(request.dst)
    return Job(src, dst, given, replace(request, given=given))


@dataclass(frozen=True)
class Outcome:
    """The result of a job: a report, an error, or neither if it was skipped because the output exists.

    Attributes:
        job: The job.
        report: The report, or None.
        error: The error, or None.
        skipped: Whether the job was skipped.
        trace: The traceback, if the error is a bug. Otherwise empty.
        unmatched: The edits that match nothing in this checkpoint. If there is a report, they match in another one.
    """

    job: Job
    report: Report | None = None
    error: CkptconvError | None = None
    skipped: bool = False
    trace: str = ""
    unmatched: tuple[tuple[str, object], ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether the input is not a checkpoint, so that it is copied unchanged."""
        return self.job.request is not None and self.job.request.kind == "other"


class Task(NamedTuple):
    """A job, and facts about it that an executor passes to :func:`work`.

    Attributes:
        job: The job.
        dropped: Edits that match nothing in the input and are left out.
        new: Whether the output did not exist when the batch began.
        lost: Whether a process may have done the job before and ended without an answer.
        stamp: If the output is the input, the :func:`stamp_of` of the input when the batch began. Otherwise None.
        is_rehearsal: Whether to plan the conversion only, even if the output exists.
    """

    job: Job
    dropped: tuple[tuple[str, object], ...] = ()
    new: bool = False
    lost: bool = False
    stamp: tuple[int, ...] | None = None
    is_rehearsal: bool = False


class JobExecutor:
    """The base class of executors, which run jobs.

    Attributes:
        most: How many jobs the executor accepts at the same time.
        alone: Whether a lost job has to run again without others, because it may have ended the process.
        repeats: Whether the executor may run a job again by itself.
    """

    most = 1
    alone = False
    repeats = False

    def submit(self, task: Task) -> Future[Outcome]:
        """Start `task`. Return the future of its outcome."""
        raise NotImplementedError

    def written(self) -> int:
        """Return how many bytes the running jobs have written. 0 if this is not known."""
        return 0

    def make_room(self, task: Task) -> None:
        """Work on submitted tasks until `task` can be submitted.

        Does nothing unless the executor works in this thread.
        """

    def proceed(self) -> None:
        """Work on submitted tasks until one is done. Does nothing unless the executor works in this thread."""

    def close(self, *, failed: bool) -> None:
        """End the threads or processes of the executor. With `failed`, do not wait for them."""


def work(task: Task, tick: Progress | None = None) -> Outcome:
    """Run `task` and return its outcome. Only KeyboardInterrupt, SystemExit and the like are raised.

    `tick` is called with the number of bytes written since its last call.
    """
    return run_steps(working(task, tick))


def working(task: Task, tick: Progress | None = None) -> Steps[Outcome]:
    """Run `task` as :func:`work` does, in steps that wait for the disk."""
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
    job, request = task.job, task.job.located()
    if task.is_rehearsal:
        output = replace(request.output, dry_run=True, force=True, skip_existing=False)
        request = replace(request, output=output)
    if request.output.skip_existing and is_there(request):
        return Outcome(job, skipped=True)
    if task.stamp is not None and stamp_of(request.src) != task.stamp:
        raise InputChangedError(
            "the file has changed since the batch began",
            where=request.src,
            hint="the in-place conversion may have been done: inspect the file before you convert it again",
        )
    for dropped in task.dropped:
        note = option_of(*dropped) + " matches nothing in this file"
        request = replace(request, edits=request.edits.without(*dropped), notes=(*request.notes, note))
    try:
        return Outcome(job, report=(yield from _run(request, tick)))
    except TargetExistsError as error:
        # A process that was killed right after the conversion could not answer.
        if task.new and task.lost and (report := _done_before(request)) is not None:
            return Outcome(job, report=report)
        error.hint = joined(error.hint, option("skip_existing") + " keeps the existing output", separator=", ")
        raise


def _run(request: Request, tick: Progress | None) -> Steps[Report]:
    """Run `request` in steps. Before that, create the missing parent folders of its output, unless it is in a store."""
    folder, stands_in = request.dst.parent, None
    with ExitStack() as opened:
        if store_of(request.dst, writing=True).has_folders:
            if not request.output.dry_run:
                output_files.make_folder(folder, like=request.src.parent)
            elif not folder.is_dir():
                stands_in = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ckptconv-")))
        asked = replace(request, dst=stands_in / request.dst.name) if stands_in else request
        report = yield from running(asked, lambda _: nullcontext(tick))
        return replace(report, dst=str(request.dst)) if stands_in else report


def _done_before(request: Request) -> Report | None:
    """Return the report about `request` if its output exists and has the right bytes. Otherwise return None.

    The input is converted again, to a temporary folder next to the output, and the bytes are compared.
    """
    again = output_files.temporary_beside(request.dst)
    with output_files.as_output_error(request.dst):
        os.mkdir(again, 0o700)
    try:
        report = run(replace(request, dst=again / request.dst.name))
        is_same = _content(again / request.dst.name) == _content(request.dst)
    finally:
        shutil.rmtree(again, ignore_errors=True)
    return replace(report, dst=str(request.dst)) if is_same else None


def _content(path: Path) -> dict[str, tuple[int, int]]:
    """Return the size and checksum of the file `path`, or of each file below the folder `path`, by relative path."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    sums = {}
    for file in files:
        with Source(file) as source:
            sums[str(file.relative_to(path))] = source.size, crc32_of(ByteRange(source, 0, source.size))
    return sums


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return the inode, size and modification time of `path`, which change when it is replaced or written to."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _unmatched(task: Task, error: NoMatchError) -> tuple[tuple[str, object], ...]:
    """Return all edits that match nothing in the input of `task`. `error` names the first.

    Return an empty tuple if the conversion would fail without these edits too.
    """
    unmatched: tuple[tuple[str, object], ...] = task.dropped
    given = [*task.job.parsed()[0].several()]
    last: CkptconvError = error
    while isinstance(last, NoMatchError) and (edit := last.unmatched) and unmatched.count(edit) < given.count(edit):
        unmatched += (edit,)
        try:
            run_steps(_converting(task._replace(is_rehearsal=True, dropped=unmatched), None))
        except CkptconvError as error:
            last = error
        else:
            return unmatched
    return ()
