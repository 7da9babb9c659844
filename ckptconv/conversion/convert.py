"""Convert one checkpoint: open, edit, plan, write."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptconv.byteranges.fault_sink import RAISED
from ckptconv.byteranges.record_checks import CheckingSink
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Meter, OutFile, Overflow, Progress
from ckptconv.conversion.folder_plans import FolderPlan, plan_item
from ckptconv.conversion.in_place import change_in_place
from ckptconv.conversion.options import USUAL, ConvertOptions, OutputOptions, takes
from ckptconv.conversion.plan import Report, Verified, report_of
from ckptconv.conversion.targets import find_item, format_of, through_link
from ckptconv.edits.options import Edits, edits_from
from ckptconv.errors import ArgumentTypeError, RefusedError, TargetExistsError, UsageError, count, size
from ckptconv.formats.opening import open_input
from ckptconv.hints import for_python, option
from ckptconv.output import far_targets
from ckptconv.output import files as output_files
from ckptconv.output.direct_writes import planned_directly
from ckptconv.output.far_folders import old_set
from ckptconv.output.folders import NewFolder, write_folder
from ckptconv.output.other_files import OtherFile
from ckptconv.output.steps import Steps, waited_for
from ckptconv.pickles.graph import gc_paused
from ckptconv.stores import is_url

if TYPE_CHECKING:
    from typing_extensions import Unpack


@for_python
@takes(ConvertOptions)
def convert(
    src: str | os.PathLike[str], dst: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> Report:
    """Write the checkpoint `src` to `dst`, changed as asked, without loading or running it.

    Args:
        src: A file; a sharded set as the Hub has them, by its folder or index; a folder of
            ``torch.distributed.checkpoint``; or the rank files of an FSDP run, by their folder or their name with ``*``
            for the rank. A folder of many checkpoints is for :func:`convert_many`.
        dst: A file, which sets become too where it has a suffix; or a folder, where a set stays a set, with the
            checkpoints that stand beside it. Nothing with ``in_place=True``.
        **options: The keys of :class:`~ckptconv.conversion.options.ConvertOptions`.

    Returns:
        A report of what was done, or would be.

    Raises:
        CkptconvError: One of its subclasses; `dst` is then as it was.
        ArgumentTypeError: An option has a wrong type, or there is none of that name.
    """
    output = OutputOptions.of(options)
    edits = edits_from(**options)
    if output.in_place:
        if dst is not None:
            raise UsageError("an in-place change has no output", got=os.fspath(dst))
        return change_in_place(src, edits, output)
    if dst is None:
        raise ArgumentTypeError("convert() needs dst, the output, unless in_place is True")
    return run(src, dst, edits, output)


def running(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    edits: Edits,
    output: OutputOptions = USUAL,
    *,
    is_folder: bool | None = None,
    progress: Meter | None = None,
) -> Steps[Report]:
    """The steps of :func:`convert`, with its options as data.

    Args:
        src: As for :func:`convert`.
        dst: As for :func:`convert`.
        edits: What to change in the checkpoint.
        output: What to write, and how.
        is_folder: `dst` is the very file, or the very folder, to be written; None: that is still to be found out.
        progress: Called with how many bytes there will be: those written, and those of far files read to compare. What
            it gives is called with each number of them.
    """
    started = time.monotonic()
    path, is_folder, output, about = _target(src, dst, output, is_folder)
    with ExitStack() as opened:
        faults = CheckingSink(keep=_folder_for(path)) if output.verify else None
        if output.download and not is_folder:
            _check_target(None, path, force=output.force)
        download = output.download and _folder_for(path)
        source = open_input(src, faults or RAISED, download=download, progress=progress)
        opened.enter_context(source)
        if not is_folder:
            _check_target(source, path, force=output.force)
        with gc_paused():
            whole = plan_item(source, path, edits, output, is_folder=is_folder, opened=opened)
        about += _placed(whole, path, output)
        if about:
            whole.plan = replace(whole.plan, notes=(*whole.plan.notes, *about))
        overflowed: Overflow = {}
        verified = None
        if not output.dry_run:
            read = faults.waiting if faults and source.is_far else 0  # here it takes no time to speak of
            with progress(read + _work(whole, output)) if progress else nullcontext() as tick:
                if faults:
                    faults.check(tick if read else None)
                    verified = Verified(faults.checked, faults.nbytes, output=True)
                overflowed = yield from _writing(whole, source, output, tick)
        return report_of(
            whole.plan,
            source,
            seconds=time.monotonic() - started,
            written=not output.dry_run,
            overflowed=overflowed,
            failed=whole.failed,
            verified=verified,
        )


#: :func:`running` with all its waits.
run = waited_for(running)


def _work(whole: FolderPlan, output: OutputOptions) -> int:
    """How many bytes are written to carry out the plan `whole`, or read back from a store."""
    if not is_url(whole.plan.target):
        return whole.plan.size
    others = sum(other.size for other in whole.plan.others) * (1 + output.verify)
    return others + int(far_targets.far_writer(whole.plan.target).work_of(whole.plan.files, verify=output.verify))


def _target(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], output: OutputOptions, is_folder: bool | None
) -> tuple[Path, bool, OutputOptions, tuple[str, ...]]:
    """The path that is written, whether it is a folder, `output` with the format that its name means, and notes."""
    about: tuple[str, ...] = ()
    if is_folder is None:
        item = find_item(src, dst, output)
        dst, is_folder, about = item.dst, item.is_folder, item.notes
    path = dst if isinstance(dst, Path) else Path(dst)
    if not is_folder:
        if (format_ := format_of(path, output.format)) != output.format:
            output = replace(output, format=format_)
        if output.force:
            path, link = through_link(src, path)
            about += link
    elif path.name in ("", "..") or os.path.islink(os.path.abspath(path)):  # a link to a folder is that folder
        path = Path(os.path.realpath(path))
    return path, is_folder, output, about


def _placed(whole: FolderPlan, path: Path, output: OutputOptions) -> tuple[str, ...]:
    """Plan how the files of `whole` get to `path`: around the page cache here, in the place of an old set in a store.
    Notes about it.
    """
    if not is_url(path):
        if (files := planned_directly(whole.plan.files, path)) is not whole.plan.files:
            whole.plan = replace(whole.plan, files=files)
        return ()
    about: tuple[str, ...] = ()
    if whole.plan.is_folder:
        new: list[OutFile | OtherFile] = [*whole.plan.files, *whole.plan.others]
        whole.old = old_set(path, new, whole.may_go, replace=output.force)
        if others := [other for other in whole.plan.others if other.kind != "folder"]:
            nbytes = size(sum(other.size for other in others))
            about = (f"{count(len(others), 'other file')} ({nbytes}) copied first, one after another",)
    upload: tuple[str, ...] = far_targets.far_writer(path).about_upload(whole.plan.files, verify=output.verify)
    return about + upload + whole.old.about


def _writing(
    whole: FolderPlan, source: Readable, output: OutputOptions, progress: Progress | None = None
) -> Steps[Overflow]:
    """The steps of carrying out the plan `whole` on `source`; what overflowed.

    Raises what :func:`ckptconv.output.files.write` raises. `progress` is called with each number of bytes written.
    """
    plan = whole.plan
    if is_url(plan.target):
        how: dict[str, Any] = {"replace": output.force, "verify": output.verify, "progress": progress}
        with far_targets.others_uploaded(plan.others, **how):
            overflowed: Overflow = far_targets.far_writer(plan.target).upload(plan.files, source, old=whole.old, **how)
        return overflowed
    if not plan.is_folder:
        file, force, verify = plan.files[0], output.force, output.verify
        return (yield from output_files.writing(file, source, replace=force, verify=verify, progress=progress))
    new = NewFolder(plan.target, plan.files, plan.others, whole.may_go, whole.like)
    return write_folder(new, source, replace=output.force, verify=output.verify, jobs=output.jobs, progress=progress)


#: :func:`_writing` with all its waits.
write = waited_for(_writing)


def _folder_for(path: Path) -> Path:
    """Where files can stand for a while that are needed to write `path`."""
    if is_url(path):
        import tempfile  # which costs every other conversion a megabyte

        return Path(tempfile.gettempdir())
    return path if path.is_dir() else path.parent


def _check_target(source: Readable | None, path: Path, *, force: bool) -> None:
    """Raise where `path` can hold no file."""
    if is_url(path):
        far_targets.check_object(path, replace=force)
        return
    try:
        output_files.check_target(path, replace=force)
    except TargetExistsError:
        with contextlib.suppress(OSError):  # a link to nowhere, or it is gone by now
            if source is not None and source.is_same_file(os.stat(path)):
                hint = option("force") + " converts it in place, safely"
                raise RefusedError("the output is the input", where=path, hint=hint) from None
        raise
