"""A conversion, readable aloud: open, edit, plan, write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptconv import formats, output
from ckptconv.dangers import dangerous_globals
from ckptconv.dtype_rules import DTypeLike, to_dtypes
from ckptconv.edits import apply
from ckptconv.errors import DangerousError, RefusedError, UsageError
from ckptconv.formats import WRITERS, safetensors, torchscript
from ckptconv.graph import uncollected
from ckptconv.locations import Devices, MapLocation, to_devices
from ckptconv.model import Checkpoint, Edits, Overflow, Plan, Progress, Report
from ckptconv.names import strings
from ckptconv.safe_loader import is_allowed
from ckptconv.sources import Readable, Source
from ckptconv.targets import find_target, usual_format
from ckptconv.wording import for_python

__all__ = ["convert", "edits_from", "make_plan", "report_of", "run"]


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
    force: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    allow_unsafe: bool = False,
) -> Report:
    """Write the checkpoint SRC to DST, changed as asked, without loading or running it.

    ``map_location``: a device for all tensors (``'cpu'``, ``'gpu'``, ``'cuda:1'``), a mapping from devices to devices (``{'cuda:0': 'cuda:1', 'any': 'cpu'}``), or a
    function from tag to tag. States of random generators stay on the CPU, where torch needs them.
    ``state_dict``: take the state dict alone, wherever it is; safetensors always does. ``select``: the path of the part to take, such as ``ema/model``. ``include``,
    ``exclude``: globs on names in state dicts, or on paths where they have a slash.
    ``unwrap``: take out what wrappers (DataParallel, torch.compile, FSDP and others) put into names. ``strip_prefix``, ``add_prefix``: prefixes of the names in state dicts, such as ``module.``. ``rename``: (regular expression, replacement) for names.
    ``dtype``: ``'bf16'`` (or ``torch.bfloat16``) for the floating-point weights, ``{'*.norm.*': 'fp32'}`` for what globs mean, or several of both (``['bf16', '*.norm.*=fp32']``). ``compact``: drop the bytes of storages that no tensor shows.
    ``format``: ``'pt'``, ``'safetensors'``, ``'legacy'`` (torch's format before 1.6) or ``'pickle'``, where DST's suffix does not say it; a plain pickle stays one in a ``.pkl``. ``copy_tied``: write tied tensors to safetensors under each name.
    ``force``: DST may exist, and may be SRC. ``dry_run``: only say what would be done. ``verify``: read DST back before it appears.
    ``allow_unsafe``: carry over calls that no checkpoint needs (``os.system`` and the like); nothing is ever run here.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError`; DST is then as it was.
    """
    _check_flags(state_dict=state_dict, copy_tied=copy_tied, force=force, dry_run=dry_run)
    edits = edits_from(
        map_location=map_location, state_dict=state_dict, select=select, include=include, exclude=exclude,
        unwrap=unwrap, strip_prefix=strip_prefix, rename=rename, add_prefix=add_prefix, dtype=dtype, compact=compact,
    )  # fmt: skip
    return run(
        src, dst, edits, format=format, copy_tied=copy_tied, force=force, dry_run=dry_run, verify=verify,
        allow_unsafe=allow_unsafe,
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
    progress: Callable[[int], AbstractContextManager[Progress | None]] | None = None,
) -> Report:
    """:func:`convert` with the edits as data. PROGRESS is called with the planned size, and what it gives with each number of bytes written."""
    started = time.monotonic()
    with Source(src) as source:
        path, meant = find_target(source.path, dst, format)
        _check_target(source, path, force=force)
        with uncollected():
            checkpoint = formats.read(source)
            plan = make_plan(
                checkpoint, path, edits, format=meant or usual_format(path.name, checkpoint.format),
                copy_tied=copy_tied, allow_unsafe=allow_unsafe,
            )  # fmt: skip
        overflowed: Overflow = {}
        if not dry_run:
            with progress(plan.file.size) if progress else nullcontext() as tick:
                overflowed = output.write(plan.file, source, replace=force, verify=verify, progress=tick)
        return report_of(
            plan, source, seconds=time.monotonic() - started, written=not dry_run, overflowed=overflowed
        )  # fmt: skip


def report_of(plan: Plan, source: Readable, *, seconds: float, written: bool, overflowed: Overflow) -> Report:
    """What was done, or would be, by PLAN on SOURCE; writing found out what OVERFLOWED."""
    return Report(
        str(source.path), str(plan.file.path), plan.formats, plan.file.size, plan.changes, plan.ties, plan.left_behind, plan.notes,
        seconds, written, overflowed,
    )  # fmt: skip


def make_plan(
    checkpoint: Checkpoint,
    path: Path,
    edits: Edits,
    *,
    format: str = "pt",
    copy_tied: bool = False,
    allow_unsafe: bool = False,
) -> Plan:
    """Everything about the output, before a byte of it is written. CHECKPOINT is edited."""
    if copy_tied and format != "safetensors":
        raise UsageError("--copy-tied is for safetensors: ties stay ties in torch's format", where=path)
    torchscript.refuse(checkpoint, weights=edits.state_dict or format == "safetensors")
    notes: list[str] = []
    if format == "safetensors":
        notes = _about_devices(checkpoint, edits)
        if edits.compact:
            notes.append("--compact has nothing to do for safetensors, which holds what tensors show and no more")
        changes = apply(checkpoint, replace(edits, state_dict=True, devices=Devices(), compact=False))
        layout = safetensors.layout(checkpoint, path, copy_tied=copy_tied)
    else:
        changes = apply(checkpoint, edits)
        if not allow_unsafe:
            _refuse_dangers(checkpoint)
        notes = _about_code(checkpoint) if format != "pickle" else []
        layout = WRITERS[format].layout(checkpoint, path)
    return Plan(
        (checkpoint.format, safetensors.NAME if format == "safetensors" else WRITERS[format].NAME), layout.file, changes, layout.ties,
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


def _refuse_dangers(checkpoint: Checkpoint) -> None:
    dangers = sorted(dangerous_globals(checkpoint.graph))
    if dangers:
        raise DangerousError(
            "this file names what no checkpoint needs, and loading it may call that", where=checkpoint.source.path,
            got=", ".join(dangers[:5]), hint="do not load it; --allow-unsafe carries the call over, unrun",
        )  # fmt: skip


def _check_target(source: Source, path: Path, *, force: bool) -> None:
    try:
        same = source.is_same_file(os.stat(path))
    except OSError:
        same = False
    if same and not force:
        raise RefusedError("the output is the input", where=path, hint="--force converts it in place, safely")
    output.check_target(path, replace=force)
