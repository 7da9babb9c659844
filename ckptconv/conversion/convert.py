"""A conversion, readable aloud: open, edit, plan, write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptconv.byteranges.sources import Readable, Source, SourceFolder, open_input
from ckptconv.checkpoint.model import Checkpoint, Edits, Other, OutFile, Overflow, Plan, Progress, Report
from ckptconv.checkpoint.safe_globals import is_allowed
from ckptconv.conversion.folder_plans import FolderPlan, plan_folder, successor
from ckptconv.conversion.targets import find_item, format_of, usual_format
from ckptconv.edits.apply import apply
from ckptconv.edits.devices import Devices, MapLocation, to_devices
from ckptconv.edits.dtype_rules import DTypeLike, to_dtypes
from ckptconv.edits.names import strings
from ckptconv.errors import CkptconvError, DangerousError, RefusedError, UsageError, some
from ckptconv.formats import opening, safetensors, torchscript
from ckptconv.formats.distributed import dcp, safetensors_parts
from ckptconv.formats.opening import WRITERS
from ckptconv.formats.sharded import shards
from ckptconv.output import files as output_files
from ckptconv.output.folders import no_name, write_folder
from ckptconv.pickles.graph import uncollected
from ckptconv.safety.scan import dangers_carried
from ckptconv.wording import for_python

__all__ = ["convert", "edits_from", "make_plan", "report_of", "run", "write"]

_SHOWN = 5  # dangers in an error


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

    SRC is a file; a sharded set as the Hub has them, by its folder or index; or a folder of ``torch.distributed.checkpoint``. The two become one file where DST has a suffix; a set stays a set where DST is a folder, with the checkpoints
    that stand beside it. A folder of many checkpoints is for :func:`convert_many`.

    ``map_location``: a device for all tensors (``'cpu'``, ``'gpu'``, ``'cuda:1'``), a mapping from devices to devices (``{'cuda:0': 'cuda:1', 'any': 'cpu'}``), or a
    function from tag to tag. States of random generators stay on the CPU, where torch needs them.
    ``state_dict``: take the state dict alone, wherever it is; safetensors always does. ``select``: the path of the part to take, such as ``ema/model``. ``include``,
    ``exclude``: globs on names in state dicts, or on paths where they have a slash.
    ``unwrap``: take out what wrappers (DataParallel, torch.compile, FSDP and others) put into names. ``strip_prefix``, ``add_prefix``: prefixes of the names in state dicts, such as ``module.``. ``rename``: (regular expression, replacement) for names.
    ``dtype``: ``'bf16'`` (or ``torch.bfloat16``) for the floating-point weights, ``{'*.norm.*': 'fp32'}`` for what globs mean, or several of both (``['bf16', '*.norm.*=fp32']``). ``compact``: drop the bytes of storages that no tensor shows.
    ``format``: ``'pt'``, ``'safetensors'``, ``'legacy'`` (torch's format before 1.6) or ``'pickle'``, where DST's suffix does not say it; a plain pickle stays one in a ``.pkl``. ``copy_tied``: write tied tensors to safetensors under each name.
    ``max_shard_size``: write shards of at most so much (``'5GB'``) with their index to the folder DST. ``copy_others``: of a folder, copy what is no checkpoint too. ``jobs``: threads that write the files of a folder.
    ``force``: DST may exist, and may be SRC. ``dry_run``: only say what would be done. ``verify``: read DST back before it appears.
    ``allow_unsafe``: carry over calls that no checkpoint needs (``os.system`` and the like); nothing is ever run here.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError`; DST is then as it was.
    """
    _check_flags(state_dict=state_dict, copy_tied=copy_tied, force=force, dry_run=dry_run, copy_others=copy_others)
    edits = edits_from(
        map_location=map_location, state_dict=state_dict, select=select, include=include, exclude=exclude,
        unwrap=unwrap, strip_prefix=strip_prefix, rename=rename, add_prefix=add_prefix, dtype=dtype, compact=compact,
    )  # fmt: skip
    return run(
        src, dst, edits, format=format, copy_tied=copy_tied, max_shard_size=max_shard_size, copy_others=copy_others,
        force=force, dry_run=dry_run, verify=verify, allow_unsafe=allow_unsafe, jobs=jobs,
    )  # fmt: skip


def edits_from(
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
) -> Edits:
    """The keywords of :func:`convert` as data. Raises TypeError where one is of a wrong type, UsageError where it makes no sense."""
    _check_flags(state_dict=state_dict, unwrap=unwrap, compact=compact)
    return Edits(
        to_devices(map_location), select, state_dict, strings("include", include), strings("exclude", exclude),
        strings("strip_prefix", strip_prefix), _pairs(rename), strings("add_prefix", add_prefix), unwrap, to_dtypes(dtype), compact,
    )  # fmt: skip


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            part = "; a part is taken with select=PATH" if name == "state_dict" else ""
            raise TypeError(f"{name} must be True or False, not {flag!r}{part}")


def _pairs(rename: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    found = tuple(rename) if isinstance(rename, Iterable) else (rename,)
    if not all(isinstance(pair, (tuple, list)) and [type(word) for word in pair] == [str, str] for pair in found):
        raise TypeError(f"rename must be pairs like [('^module[.]', '')], not {rename!r}")
    return tuple((old, new) for old, new in found)


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
    """:func:`convert` with the edits as data. PROGRESS is called with the planned size, and what it gives with each number of bytes written.

    IS_FOLDER: DST is the very file, or the very folder, to be written; None: that is still to be found out. JOBS: threads that write the files of a folder.
    """
    started = time.monotonic()
    about: tuple[str, ...] = ()
    if is_folder is None:
        item = find_item(src, dst, format=format, in_shards=max_shard_size is not None, copy_others=copy_others)
        dst, is_folder, about = item.dst, item.is_folder, item.notes

    def plan_one(source: Source | SourceFolder, path: Path, is_folder: bool, edits: Edits) -> Plan:
        checkpoint = opening.read(source)
        usual = shards.format_of(checkpoint) if is_folder else usual_format(path.name, checkpoint.format)
        return make_plan(
            checkpoint, path, edits, format=meant or usual, copy_tied=copy_tied, allow_unsafe=allow_unsafe,
            is_folder=is_folder, max_shard_size=max_shard_size if is_folder else None,
        )  # fmt: skip

    path = Path(dst)
    if is_folder and (
        path.name in ("", "..") or os.path.islink(os.path.abspath(path))
    ):  # a link to a folder is that folder
        path = Path(os.path.realpath(path))
    meant = format if is_folder else format_of(path, format)
    with ExitStack() as opened:
        source = open_input(src)
        opened.enter_context(source)
        if not is_folder:
            _check_target(source, path, force=force)
        with uncollected():
            is_dcp = isinstance(source, SourceFolder) and any(
                each.looks_like(source) for each in (dcp, safetensors_parts)
            )
            if is_folder and isinstance(source, SourceFolder) and not is_dcp:
                whole = plan_folder(
                    source, path, edits, plan_one, format=format, copy_others=copy_others, opened=opened
                )  # fmt: skip
            else:
                plan = plan_one(source, path, is_folder, edits)
                whole = FolderPlan(plan, may_go=successor(plan)) if is_folder else FolderPlan(plan)
        whole.plan = replace(whole.plan, notes=(*whole.plan.notes, *about))
        overflowed: Overflow = {}
        if not dry_run:
            with progress(whole.plan.size) if progress else nullcontext() as tick:
                overflowed = write(
                    whole.plan, source, replace=force, verify=verify, jobs=jobs, progress=tick, may_go=whole.may_go, like=whole.like
                )  # fmt: skip
        return report_of(
            whole.plan, source, seconds=time.monotonic() - started, written=not dry_run, overflowed=overflowed, failed=whole.failed
        )  # fmt: skip


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
        plan.target, plan.files, source, replace=replace, verify=verify, jobs=jobs, progress=progress, may_go=may_go,
        others=plan.others, like=like,
    )  # fmt: skip


def report_of(
    plan: Plan, source: Readable, *, seconds: float, written: bool, overflowed: Overflow,
    failed: tuple[tuple[Path, CkptconvError], ...] = (),
) -> Report:  # fmt: skip
    """What was done, or would be, by PLAN on SOURCE; writing found out what OVERFLOWED, planning what FAILED."""
    others = [other for other in plan.others if other.kind == "file"]
    inside: list[OutFile | Other] = [*plan.files, *others] if plan.is_folder else []
    files = tuple((str(file.path.relative_to(plan.target)), file.size) for file in inside)
    return Report(
        str(source.path), str(plan.target), plan.formats, plan.size, plan.changes, plan.ties, plan.left_behind, plan.notes,
        seconds, written, overflowed, files, tuple((str(path), error) for path, error in failed),
    )  # fmt: skip


def make_plan(
    checkpoint: Checkpoint,
    path: Path,
    edits: Edits,
    *,
    format: str = "pt",
    copy_tied: bool = False,
    allow_unsafe: bool = False,
    is_folder: bool = False,
    max_shard_size: int | str | None = None,
) -> Plan:
    """Everything about the output, before a byte of it is written. CHECKPOINT is edited. IS_FOLDER: PATH is one, for shards of at most MAX_SHARD_SIZE, or those that the source has."""
    if copy_tied and format != "safetensors":
        raise UsageError("--copy-tied is for safetensors: ties stay ties in torch's format", where=path)
    torchscript.refuse(checkpoint, weights=edits.state_dict or format == "safetensors")
    notes: list[str] = []
    if max_shard_size is not None:
        edits = replace(edits, state_dict=True)
    if format == "safetensors":
        notes = _about_devices(checkpoint, edits)
        if edits.compact:
            notes.append("--compact has nothing to do for safetensors, which holds what tensors show and no more")
        edits = replace(edits, state_dict=True, devices=Devices(), compact=False)
    changes = apply(checkpoint, edits)
    if format != "safetensors":
        if not allow_unsafe:
            _refuse_dangers(checkpoint, as_archive=format == "pt")
        notes = _about_code(checkpoint) if format != "pickle" else []
    if is_folder:
        layout = shards.layout(checkpoint, path, format, copy_tied=copy_tied, max_shard_size=max_shard_size)
    elif format == "safetensors":
        layout = safetensors.layout(checkpoint, path, copy_tied=copy_tied)
    else:
        layout = WRITERS[format].layout(checkpoint, path)
    name = safetensors.NAME if format == "safetensors" else WRITERS[format].NAME
    if len(layout.files) > 1:
        name = f"{shards.NAME} {name}"
    return Plan(
        (checkpoint.format, name), path, is_folder, layout.files, changes, layout.ties,
        (*changes.left_behind, *layout.left_behind, *checkpoint.unused),
        (*checkpoint.notes, *changes.notes, *layout.notes, *notes),
    )  # fmt: skip


def _about_devices(checkpoint: Checkpoint, edits: Edits) -> list[str]:
    """What becomes of devices in a format that stores none."""
    if edits.devices:
        return ["no device was changed: safetensors stores none, and whoever loads it says where to"]
    tags = sorted({storage.device for storage in checkpoint.storages.values()} - {"cpu"})
    return [f"safetensors stores no device ({', '.join(tags)} here): whoever loads it says where to"] if tags else []


def _about_code(checkpoint: Checkpoint) -> list[str]:
    """What the output still needs, which no edit of devices or names takes away."""
    unknown = list(dict.fromkeys(str(node) for node in checkpoint.graph.globals if not is_allowed(node)))
    if not unknown:
        return []
    more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
    return [
        f"torch.load(weights_only=True) refuses the output for its {unknown[0]}{more}: inspect says what to do about that"
    ]


def _refuse_dangers(checkpoint: Checkpoint, *, as_archive: bool) -> None:
    found = dangers_carried(checkpoint, as_archive=as_archive)
    dangers = [concern for concern in found if concern.dangerous]
    if found:
        raise DangerousError(
            "this file names what no checkpoint needs, and loading it may call that" if dangers else "there are pickles inside this file that cannot be judged",
            where=checkpoint.source.path, got=some([f"{each.name} at {each.path}" for each in dangers or found], _SHOWN),
            hint="do not load it; --allow-unsafe carries the call over, unrun" if dangers else "--allow-unsafe carries them over as they are",
        )  # fmt: skip


def _check_target(source: Readable, path: Path, *, force: bool) -> None:
    """Raise where PATH can hold no file."""
    try:
        same = source.is_same_file(os.stat(path))
    except OSError:
        same = False
    if same and not force:
        raise RefusedError("the output is the input", where=path, hint="--force converts it in place, safely")
    output_files.check_target(path, replace=force)
