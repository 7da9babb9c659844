"""Convert one checkpoint: open, edit, plan, write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptconv.byteranges.sources import Readable, Source, SourceFolder
from ckptconv.byteranges.spans import Overflow, Progress
from ckptconv.conversion.folder_plans import FolderPlan, plan_folder, successor
from ckptconv.conversion.plan import Plan, Report, make_plan, report_of
from ckptconv.conversion.targets import find_item, format_of, usual_format
from ckptconv.edits.devices import MapLocation
from ckptconv.edits.dtype_rules import DTypeLike
from ckptconv.edits.options import Edits, check_flags, edits_from
from ckptconv.errors import RefusedError
from ckptconv.formats import opening
from ckptconv.formats.distributed import dcp, safetensors_parts
from ckptconv.formats.opening import open_input
from ckptconv.formats.sharded import writing
from ckptconv.hints import for_python
from ckptconv.output import files as output_files
from ckptconv.output.folders import no_name, write_folder
from ckptconv.pickles.graph import gc_paused

__all__ = ["convert", "run", "write"]


@for_python
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    map_location: MapLocation | None = None,
    state_dict: bool = False,
    select: str | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    unwrap: bool = False,
    strip_prefix: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    add_prefix: str | Iterable[str] = (),
    dtype: DTypeLike | None = None,
    compact: bool = False,
    format: Literal["pt", "legacy", "pickle", "safetensors"] | None = None,
    copy_tied: bool = False,
    max_shard_size: int | str | None = None,
    copy_others: bool = False,
    force: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    allow_unsafe: bool = False,
    jobs: int = 1,
) -> Report:
    """Write the checkpoint SRC to DST, changed as asked, without loading or running it.

    SRC is a file; a sharded set as the Hub has them, by its folder or index; or a folder of
    ``torch.distributed.checkpoint``. The two become one file where DST has a suffix; a set stays a set where DST is a
    folder, with the checkpoints that stand beside it. A folder of many checkpoints is for :func:`convert_many`.

    ``map_location``: a device for all tensors (``'cpu'``, ``'gpu'``, ``'cuda:1'``), a mapping from devices to devices
    (``{'cuda:0': 'cuda:1', 'any': 'cpu'}``), or a function from tag to tag. States of random generators stay on the
    CPU, where torch needs them. ``state_dict``: take the state dict alone, wherever it is; safetensors always does.
    ``select``: the path of the part to take, such as ``ema/model``. ``include``, ``exclude``: globs on names in state
    dicts, or on paths where they have a slash. ``unwrap``: take out what wrappers (DataParallel, torch.compile, FSDP
    and others) put into names. ``strip_prefix``, ``add_prefix``: prefixes of the names in state dicts, such as
    ``module.``. ``rename``: (regular expression, replacement) for names. ``dtype``: ``'bf16'`` (or ``torch.bfloat16``)
    for the floating-point weights, ``{'*.norm.*': 'fp32'}`` for what globs mean, or several of both (``['bf16',
    '*.norm.*=fp32']``). ``compact``: drop the bytes of storages that no tensor shows. ``format``: ``'pt'``,
    ``'safetensors'``, ``'legacy'`` (torch's format before 1.6) or ``'pickle'``, where DST's suffix does not say it; a
    plain pickle stays one in a ``.pkl``. ``copy_tied``: write tied tensors to safetensors under each name.
    ``max_shard_size``: write shards of at most so much (``'5GB'``) with their index to the folder DST. ``copy_others``:
    of a folder, copy what is no checkpoint too. ``jobs``: threads that write the files of a folder. ``force``: DST may
    exist, and may be SRC. ``dry_run``: only say what would be done. ``verify``: read DST back before it appears.
    ``allow_unsafe``: carry over calls that no checkpoint needs (``os.system`` and the like); nothing is ever run here.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError`; DST is then as it was.
    """
    check_flags(state_dict=state_dict, copy_tied=copy_tied, force=force, dry_run=dry_run, copy_others=copy_others)
    edits = edits_from(
        map_location=map_location,
        state_dict=state_dict,
        select=select,
        include=include,
        exclude=exclude,
        unwrap=unwrap,
        strip_prefix=strip_prefix,
        rename=rename,
        add_prefix=add_prefix,
        dtype=dtype,
        compact=compact,
    )
    return run(
        src,
        dst,
        edits,
        format=format,
        copy_tied=copy_tied,
        max_shard_size=max_shard_size,
        copy_others=copy_others,
        force=force,
        dry_run=dry_run,
        verify=verify,
        allow_unsafe=allow_unsafe,
        jobs=jobs,
    )


def run(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    edits: Edits,
    *,
    format: str | None = None,
    copy_tied: bool = False,
    force: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    allow_unsafe: bool = False,
    max_shard_size: int | str | None = None,
    copy_others: bool = False,
    is_folder: bool | None = None,
    jobs: int = 1,
    progress: Callable[[int], AbstractContextManager[Progress | None]] | None = None,
) -> Report:
    """:func:`convert` with the edits as data.

    PROGRESS is called with the planned size, and what it gives with each number of bytes written.
    IS_FOLDER: DST is the very file, or the very folder, to be written; None: that is still to be found out.
    JOBS: threads that write the files of a folder.
    """
    started = time.monotonic()
    about: tuple[str, ...] = ()
    if is_folder is None:
        item = find_item(src, dst, format=format, in_shards=max_shard_size is not None, copy_others=copy_others)
        dst, is_folder, about = item.dst, item.is_folder, item.notes

    def plan_one(source: Source | SourceFolder, path: Path, is_folder: bool, edits: Edits) -> Plan:
        checkpoint = opening.read(source)
        usual = writing.format_of(checkpoint) if is_folder else usual_format(path.name, checkpoint.format)
        return make_plan(
            checkpoint,
            path,
            edits,
            format=meant or usual,
            copy_tied=copy_tied,
            allow_unsafe=allow_unsafe,
            is_folder=is_folder,
            max_shard_size=max_shard_size if is_folder else None,
        )

    path = Path(dst)
    # a link to a folder is that folder
    if is_folder and (path.name in ("", "..") or os.path.islink(os.path.abspath(path))):
        path = Path(os.path.realpath(path))
    meant = format if is_folder else format_of(path, format)
    with ExitStack() as opened:
        source = open_input(src)
        opened.enter_context(source)
        if not is_folder:
            _check_target(source, path, force=force)
        with gc_paused():
            is_dcp = isinstance(source, SourceFolder) and any(
                each.looks_like(source) for each in (dcp, safetensors_parts)
            )
            if is_folder and isinstance(source, SourceFolder) and not is_dcp:
                whole = plan_folder(
                    source, path, edits, plan_one, format=format, copy_others=copy_others, opened=opened
                )
            else:
                plan = plan_one(source, path, is_folder, edits)
                whole = FolderPlan(plan, may_go=successor(plan)) if is_folder else FolderPlan(plan)
        whole.plan = replace(whole.plan, notes=(*whole.plan.notes, *about))
        overflowed: Overflow = {}
        if not dry_run:
            with progress(whole.plan.size) if progress else nullcontext() as tick:
                overflowed = write(
                    whole.plan,
                    source,
                    replace=force,
                    verify=verify,
                    jobs=jobs,
                    progress=tick,
                    may_go=whole.may_go,
                    like=whole.like,
                )
        return report_of(
            whole.plan,
            source,
            seconds=time.monotonic() - started,
            written=not dry_run,
            overflowed=overflowed,
            failed=whole.failed,
        )


def write(
    plan: Plan,
    source: Readable,
    *,
    replace: bool,
    verify: bool,
    jobs: int = 1,
    progress: Progress | None = None,
    may_go: Callable[[str], bool] = no_name,
    like: Path | None = None,
) -> Overflow:
    """Carry out PLAN on SOURCE; what overflowed. Raises what :func:`ckptconv.output.files.write` raises."""
    if not plan.is_folder:
        return output_files.write(plan.files[0], source, replace=replace, verify=verify, progress=progress)
    return write_folder(
        plan.target,
        plan.files,
        source,
        replace=replace,
        verify=verify,
        jobs=jobs,
        progress=progress,
        may_go=may_go,
        others=plan.others,
        like=like,
    )


def _check_target(source: Readable, path: Path, *, force: bool) -> None:
    """Raise where PATH can hold no file."""
    try:
        same = source.is_same_file(os.stat(path))
    except OSError:
        same = False
    if same and not force:
        raise RefusedError("the output is the input", where=path, hint="--force converts it in place, safely")
    output_files.check_target(path, replace=force)
