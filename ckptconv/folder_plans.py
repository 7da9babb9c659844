"""Everything in a folder that holds a sharded set, as one plan: the sets, the checkpoints beside them, and other files.

The folder that they become is built beside its target and takes its name at once, so nothing else can be written into it; that is why what stands there belongs to the plan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptconv.errors import CkptconvError, NoMatchError, count, some
from ckptconv.finding import Found, find, find_in
from ckptconv.model import CastCount, Changes, Dropped, Edits, LeftBehind, OutFile, Plan, Span
from ckptconv.output_folders import no_name
from ckptconv.sources import Source, SourceFolder, open_input
from ckptconv.targets import name_in_folder

__all__ = ["FolderPlan", "PlanOne", "plan_folder"]

_SHOWN = 3  # names in a note
#: What the Hub's tools call a model: it goes when another takes the folder's place.
_MODELS = re.compile(r"(diffusion_pytorch_|adapter_|pytorch_)?model(\.[\w-]+)?(-\d{5}-of-\d{5}(\.[\w-]+)?)?(\.safetensors|\.bin)(\.index(\.[\w-]+)?\.json)?", re.ASCII)  # fmt: skip

#: Plans the conversion of a source to a path, which is a folder or not.
PlanOne = Callable[["Source | SourceFolder", Path, bool, Edits], Plan]


@dataclass
class FolderPlan:
    """The PLAN, what could not be converted and why, and the names in an old target that may go with it."""

    plan: Plan
    failed: tuple[tuple[Path, CkptconvError], ...] = ()
    may_go: Callable[[str], bool] = no_name


@dataclass
class _Part:
    """What is FOUND goes to TARGET. UNMATCHED are the edits that mean nothing in it, with the error of the first."""

    found: Found
    target: Path
    plan: Plan | None = None
    error: CkptconvError | None = None
    unmatched: list[tuple[str, object]] = field(default_factory=list)


def plan_folder(
    source: SourceFolder, target: Path, edits: Edits, plan_one: PlanOne, *, format: str | None, copy_others: bool, opened: ExitStack
) -> FolderPlan:  # fmt: skip
    """What the folder SOURCE becomes at TARGET; of an index that set alone. What is opened is closed with OPENED, and becomes part of SOURCE.

    An edit that means nothing in one checkpoint is no error if it means something in another. Raises the first error where nothing can be converted.
    """
    is_whole = source.path.is_dir()
    every = find(source.folder) if is_whole else find_in(source.folder)
    chosen = [each for each in every if each.kind in ("file", "shards", "dcp")]
    if not is_whole:
        named = Found(source.path, "shards", (source.path,))  # whatever it is called
        chosen = [each for each in chosen if each.path == source.path] or [named]
    others = [each for each in every if each.kind == "other"]
    parts = [_Part(each, target / _place(each, source.folder, format)) for each in chosen]
    for part in parts:
        _plan(part, source, edits, plan_one, opened)
    _refuse_typos(parts)
    planned = [part for part in parts if part.plan]
    failed = tuple((part.found.path, part.error) for part in parts if part.error)
    if not planned:
        raise failed[0][1]
    files = [file for part in planned if part.plan for file in part.plan.files]
    if copy_others:
        files += [_copied(source, each.path, target) for each in others]
        others = []
    plan = _combined(target, source.folder, planned, files, _about(others))
    return FolderPlan(plan, failed, _may_go(source.folder, target, planned))


def _place(found: Found, folder: Path, format: str | None) -> Path:
    """Where FOUND goes in the target, as a path from there."""
    place = found.path.relative_to(folder)
    if found.kind == "shards":
        return place if found.path.is_dir() else place.parent
    if found.kind == "dcp":
        return place.with_name(f"{place.name}.safetensors" if format == "safetensors" else f"{place.name}.pt")
    return place.with_name(name_in_folder(place.name, format))


def _plan(part: _Part, whole: SourceFolder, edits: Edits, plan_one: PlanOne, opened: ExitStack) -> None:
    """Plan PART, without the edits that mean nothing in it; PART gains the plan, or the error."""
    try:
        source = open_input(part.found.path)
        opened.enter_context(source)
        whole.add(source)
        while part.plan is None:
            try:
                part.plan = plan_one(source, part.target, part.found.kind == "shards", edits)
            except NoMatchError as error:
                part.error = part.error or error
                if error.unmatched is None:
                    raise
                part.unmatched.append(error.unmatched)
                edits = edits.without(*error.unmatched)
    except CkptconvError as error:
        part.error, part.unmatched = error, []


def _refuse_typos(parts: Iterable[_Part]) -> None:
    """Let those of PARTS fail that have an edit which means nothing in all of them that could be planned; the others lose their error."""
    planned = [part for part in parts if part.plan]
    for part in planned:
        if any(all(edit in other.unmatched for other in planned) for edit in part.unmatched):
            part.plan = None
    for part in planned:
        if part.plan:
            part.error = None


def _copied(source: SourceFolder, path: Path, target: Path) -> OutFile:
    """The file PATH as it is."""
    name = path.relative_to(source.folder)
    opened = source.open(str(name))
    return OutFile(target / name, (Span(opened, 0, opened.size),) if opened.size else (), opened.size)


def _about(others: list[Found]) -> tuple[str, ...]:
    if not others:
        return ()
    names = some([each.path.name for each in others], _SHOWN)
    return (f"{count(len(others), 'other file')} left: {names}; --copy-others takes them along",)


def _may_go(folder: Path, target: Path, planned: list[_Part]) -> Callable[[str], bool]:
    """Which files of an old TARGET the new one may lack: those that were converted, in place; else what is a model by its name, an older one."""
    try:
        in_place = os.path.samefile(folder, target)
    except OSError:
        in_place = False
    if not in_place:
        return lambda name: bool(_MODELS.fullmatch(os.path.basename(name)))
    converted = {str(path.relative_to(folder)) for part in planned for path in part.found.parts}
    return converted.__contains__


def _combined(target: Path, folder: Path, parts: list[_Part], files: list[OutFile], notes: tuple[str, ...]) -> Plan:
    """One plan for all of PARTS, the paths in each but the set's own behind the name of its file."""
    plans = [(_prefix(part, folder), part.plan) for part in parts if part.plan]
    sets = [part.plan for part in parts if part.plan and part.found.kind == "shards"]
    changes = Changes()
    for prefix, plan in plans:
        _add(changes, plan.changes, prefix)
    return Plan(
        sets[0].formats if sets else plans[0][1].formats, target, True, tuple(files), changes,
        tuple((prefix + a, prefix + b) for prefix, plan in plans for a, b in plan.ties),
        tuple(each for prefix, plan in plans for each in _behind(plan.left_behind, prefix)),
        (*(prefix + note for prefix, plan in plans for note in plan.notes), *notes),
    )  # fmt: skip


def _prefix(part: _Part, folder: Path) -> str:
    place = part.found.path.relative_to(folder)
    if part.found.kind == "shards":
        place = place.parent if not part.found.path.is_dir() else place
    return "" if str(place) == "." else f"{place}: "


def _behind(left: Iterable[LeftBehind], prefix: str) -> list[LeftBehind]:
    return [replace(each, path=prefix + each.path) for each in left]


def _add(changes: Changes, more: Changes, prefix: str) -> None:
    """Add MORE to CHANGES, its paths behind PREFIX."""
    for tags, (tensors, nbytes) in more.devices.items():
        before = changes.devices.get(tags, (0, 0))
        changes.devices[tags] = before[0] + tensors, before[1] + nbytes
    for dtypes, cast in more.dtypes.items():
        so_far = changes.dtypes.get(dtypes, CastCount(0, 0, 0))
        changes.dtypes[dtypes] = CastCount(*map(sum, zip(so_far, cast, strict=True)))
    for why, paths in more.not_cast.items():
        changes.not_cast.setdefault(why, []).extend(prefix + path for path in paths)
    changes.names += [replace(change, path=prefix + change.path) for change in more.names]
    changes.unprefixed += more.unprefixed
    changes.left_behind += _behind(more.left_behind, prefix)
    changes.separated += [
        {dtype: [prefix + path for path in paths] for dtype, paths in groups.items()} for groups in more.separated
    ]
    changes.compacted = Dropped(*map(sum, zip(changes.compacted, more.compacted, strict=True)))
    changes.rng_states += [prefix + path for path in more.rng_states]
    changes.notes += [prefix + note for note in more.notes]
