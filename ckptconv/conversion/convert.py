"""Convert one checkpoint: locate, open, edit, plan, write, report."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.byteranges.fault_sink import RAISED
from ckptconv.byteranges.record_checks import CheckingSink
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Meter, OutFile, Overflow, Progress
from ckptconv.conversion.folder_plans import plan_source
from ckptconv.conversion.in_place import change_in_place
from ckptconv.conversion.options import ConvertOptions, OutputOptions, parse_options, takes
from ckptconv.conversion.plan import Plan, Report, Verified, report_of
from ckptconv.conversion.targets import Request, find_request, through_link
from ckptconv.edits.changes import Changes
from ckptconv.errors import ArgumentTypeError, RefusedError, TargetExistsError, UsageError
from ckptconv.formats.opening import open_input
from ckptconv.hints import for_python, option
from ckptconv.output.files import Steps, waited_for
from ckptconv.output.folders import NewFolder, check_inside
from ckptconv.pickles.graph import gc_paused
from ckptconv.stores import store_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@for_python
@takes(ConvertOptions)
def convert(
    src: str | os.PathLike[str], dst: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> Report:
    """Convert the checkpoint `src` to `dst`, without loading it or running its code.

    Args:
        src: A file; a sharded set as on the Hub, by its folder or index; a folder of ``torch.distributed.checkpoint``;
            or the rank files of an FSDP run, by their folder or their name with ``*`` for the rank. For a folder of
            many checkpoints, call :func:`convert_many`.
        dst: A file, or a folder. If it is a file, a set becomes one file. In a folder a set stays a set, and the other
            checkpoints of its folder are converted too. Omit it with ``in_place=True``.
        **options: The keys of :class:`~ckptconv.conversion.options.ConvertOptions`.

    Returns:
        A report of the conversion, or with ``dry_run`` of its plan.

    Raises:
        CkptconvError: One of its subclasses. `dst` is then unchanged.
        ArgumentTypeError: An option has a wrong type, or no option has that name.
    """
    edits, output = parse_options(options)
    if output.in_place and dst is not None:
        raise UsageError("an in-place change has no output", got=os.fspath(dst))
    if dst is None:
        if not output.in_place:
            raise ArgumentTypeError("convert() needs dst, the output, unless in_place is True")
        dst = src
    return run(replace(find_request(src, dst, edits, output), given=options))


def running(request: Request, progress: Meter | None = None) -> Steps[Report]:
    """Run the conversion `request`, in steps that wait for the disk. Return the report.

    Args:
        request: The conversion.
        progress: Called with the number of bytes that will be written, and of remote bytes that will be read for
            ``verify``. It returns a context manager for a function that is called with the bytes done since its last
                call.

    Raises:
        CkptconvError: The conversion failed. The target is unchanged.
    """
    if request.output.in_place:
        return change_in_place(request)
    if request.kind == "other":
        return (yield from _copying(request, progress))
    started = time.monotonic()
    output = request.output
    path, link = _path_of(request)
    request = request if path == request.dst else replace(request, dst=path)
    with ExitStack() as opened:
        store = store_of(path, writing=True)
        faults = CheckingSink(keep=store.scratch(path)) if output.verify else None
        if output.download and not request.is_folder:
            _check_target(None, path, force=output.force)
        download = output.download and store.scratch(path)
        source = opened.enter_context(open_input(request.src, faults or RAISED, download=download, progress=progress))
        if not request.is_folder:
            _check_target(source, path, force=output.force)
        with gc_paused():
            plan = plan_source(source, request, opened)
        placed = store.place(plan.as_new(), replace=output.force, verify=output.verify)
        plan = replace(plan, files=placed.files, old=placed.old, notes=plan.notes + link + placed.notes)
        verified = overflowed = None
        if not output.dry_run:
            read = faults.waiting if faults and source.is_far else 0  # a local file is compared in no time
            with progress(read + placed.work) if progress else nullcontext() as tick:
                if faults:
                    faults.check(tick if read else None)
                    verified = Verified(faults.checked, faults.nbytes, output=True)
                overflowed = yield from _writing(plan, source, output, tick)
        return report_of(
            plan,
            source,
            seconds=time.monotonic() - started,
            written=not output.dry_run,
            overflowed=overflowed,
            verified=verified,
            notes=request.notes,
        )


#: :func:`running`, with all its waits in this thread.
run = waited_for(running)


def _path_of(request: Request) -> tuple[Path, tuple[str, ...]]:
    """Return the path to write for `request`, after links are followed, and notes about a link."""
    path = request.dst
    if not request.is_folder:
        return through_link(request.src, path) if request.output.force else (path, ())
    if path.name in ("", "..") or os.path.islink(os.path.abspath(path)):  # a link to a folder is that folder
        path = Path(os.path.realpath(path))
    return path, ()


def _check_target(source: Readable | None, path: Path, *, force: bool) -> None:
    """Raise an error if the file `path` may not be written.

    Raise RefusedError if `path` is `source`, unless `force` is set.
    """
    try:
        store_of(path, writing=True).check_target(path, replace=force)
    except TargetExistsError:
        with contextlib.suppress(OSError):  # the file may be gone by now
            if source is not None and source.is_same_file(os.stat(path)):
                hint = option("force") + " replaces it"
                raise RefusedError("the output is the same file as the input", where=path, hint=hint) from None
        raise


def _writing(plan: Plan, source: Readable, output: OutputOptions, progress: Progress | None = None) -> Steps[Overflow]:
    """Carry out `plan` for `source`, in steps. Return the numbers of elements that overflowed.

    `progress` is called with the number of bytes written since its last call. Raises the errors of
    :func:`ckptconv.output.files.write`.
    """
    return store_of(plan.target, writing=True).writing(
        plan.as_new(),
        source,
        replace=output.force,
        verify=output.verify,
        jobs=output.jobs,
        progress=progress,
        old=plan.old,
    )


#: :func:`_writing`, with all its waits in this thread.
write = waited_for(_writing)


def _copying(request: Request, progress: Meter | None) -> Steps[Report]:
    """Copy ``request.src``, which is not a checkpoint, unchanged, in steps. Return the report."""
    src, dst, output = request.src, request.dst, request.output
    from_store, store = store_of(src), store_of(dst, writing=True)
    if request.within and from_store.has_folders:
        check_inside(src, request.within)
    with from_store.open(src) as source:
        store.check_target(dst, replace=output.force)
        if not output.dry_run:
            new = NewFolder(dst, [OutFile.copy_of(source, dst)], is_folder=False)
            with progress(source.size) if progress else nullcontext() as tick:
                yield from store.writing(new, source, replace=output.force, verify=output.verify, progress=tick)
        return Report(
            src=str(src),
            dst=str(dst),
            formats=("", ""),
            size=source.size,
            changes=Changes(),
            written=not output.dry_run,
        )
