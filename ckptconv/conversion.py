"""A conversion, readable aloud: open, edit, plan, write."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from ckptconv import formats, output
from ckptconv.dangers import dangerous_globals
from ckptconv.edits import apply
from ckptconv.errors import DangerousError, RefusedError, UsageError
from ckptconv.formats import torch_zip
from ckptconv.graph import uncollected
from ckptconv.locations import MapLocation, to_devices
from ckptconv.model import Checkpoint, Edits, Plan, Progress, Report
from ckptconv.sources import Source

__all__ = ["convert", "make_plan", "run"]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    map_location: MapLocation | None = None,
    strip_prefix: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    add_prefix: str | Iterable[str] = (),
    force: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    allow_unsafe: bool = False,
) -> Report:
    """Write the checkpoint SRC to DST, changed as asked, without loading or running it.

    ``map_location``: a device for all tensors (``'cpu'``, ``'gpu'``, ``'cuda:1'``), a mapping from devices to devices (``{'cuda:0': 'cuda:1', 'any': 'cpu'}``), or a
    function from tag to tag. States of random generators stay on the CPU, where torch needs them.
    ``strip_prefix``, ``add_prefix``: prefixes of the names in state dicts, such as ``module.``. ``rename``: (regular expression, replacement) for names.
    ``force``: DST may exist, and may be SRC. ``dry_run``: only say what would be done. ``verify``: read DST back before it appears.
    ``allow_unsafe``: carry over calls that no checkpoint needs (``os.system`` and the like); nothing is ever run here.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError`; DST is then as it was.
    """
    edits = Edits(
        to_devices(map_location), _listed(strip_prefix), tuple((old, new) for old, new in rename), _listed(add_prefix)
    )
    return run(src, dst, edits, force=force, dry_run=dry_run, verify=verify, allow_unsafe=allow_unsafe)


def _listed(prefixes: str | Iterable[str]) -> tuple[str, ...]:
    return (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)


def run(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    edits: Edits,
    *,
    force: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    allow_unsafe: bool = False,
    progress: Progress | None = None,
) -> Report:
    """:func:`convert` with the edits as data. PROGRESS is called with each number of bytes written."""
    started = time.monotonic()
    with Source(src) as source:
        target = _target(source, dst, force=force)
        plan = make_plan(source, target, edits, allow_unsafe=allow_unsafe)
        if not dry_run:
            output.write(plan.file, source, replace=force, verify=verify, progress=progress)
        return Report(
            str(source.path), str(target), plan.file.size, plan.changes, plan.left_behind, plan.notes,
            time.monotonic() - started, not dry_run,
        )  # fmt: skip


def make_plan(source: Source, target: Path, edits: Edits, *, allow_unsafe: bool = False) -> Plan:
    """Everything about the output, before a byte of it is written."""
    with uncollected():
        checkpoint = formats.read(source)
        changes = apply(checkpoint, edits)
        if not allow_unsafe:
            _refuse_dangers(checkpoint)
        file, left_behind = torch_zip.layout(checkpoint, target)
    notes = tuple(checkpoint.notes + changes.notes)
    return Plan(file, changes, tuple(left_behind), notes)


def _refuse_dangers(checkpoint: Checkpoint) -> None:
    dangers = sorted(dangerous_globals(checkpoint.graph))
    if dangers:
        raise DangerousError(
            "this file names what no checkpoint needs, and loading it may call that", where=checkpoint.source.path,
            got=", ".join(dangers[:5]), hint="do not load it; --allow-unsafe carries the call over, unrun",
        )  # fmt: skip


def _target(source: Source, dst: str | os.PathLike[str], *, force: bool) -> Path:
    """The file to write: DST, or in the folder DST the source's name."""
    path = Path(dst)
    if "\0" in os.fspath(path):
        raise UsageError("no such path can exist", where=path)
    if path.is_dir() or os.fspath(dst).endswith(os.sep):
        path = path / source.path.name
    if path.suffix == ".safetensors":
        raise UsageError("this version writes torch's zip format alone", where=path, expected="a name like model.pt")
    try:
        same = source.is_same_file(os.stat(path))
    except OSError:
        same = False
    if same and not force:
        raise RefusedError("the output is the input", where=path, hint="--force converts it in place, safely")
    output.check_target(path, replace=force)
    return path
