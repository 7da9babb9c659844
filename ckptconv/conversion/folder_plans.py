"""Plan the conversion of a folder that holds a sharded set, with the checkpoints and files beside it.

The folder that they become is built beside its target and takes its name at once, so nothing else can be written into
it; that is why what stands there belongs to the plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.conversion.discovery import find, find_in
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import Plan, read_and_plan
from ckptconv.conversion.target_names import Found, name_in_folder
from ckptconv.conversion.targets import refuse_one_place
from ckptconv.edits.changes import CastCount, Changes, Dropped
from ckptconv.edits.options import Edits, option_of
from ckptconv.errors import CkptconvError, NoMatchError, count, some
from ckptconv.formats.distributed import dcp, rank_files, safetensors_parts
from ckptconv.formats.foreign.paths import folder_error
from ckptconv.formats.opening import open_input
from ckptconv.formats.safetensors_header import check_nesting
from ckptconv.formats.sharded.index import family_of
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.output.far_folders import NO_OLD_SET, OldSet
from ckptconv.output.folders import names_in, no_name
from ckptconv.output.other_files import OtherFile, others_in, rest_of
from ckptconv.stores import first_bytes, is_url, list_folder

#: Plans the conversion of a source to a path, which is a folder or not.
PlanOne = Callable[[Readable, Path, bool, Edits], Plan]


@dataclass
class FolderPlan:
    """The `plan`, what could not be converted and why, the names in an old target that may go with it, the folder that
    the new one is `like`, and what of an `old` set leaves a far target.
    """

    plan: Plan
    failed: tuple[tuple[Path, CkptconvError], ...] = ()
    may_go: Callable[[str], bool] = no_name
    like: Path | None = None
    old: OldSet = NO_OLD_SET


@dataclass(eq=False)
class _Part:
    """What is `found` goes to `target`: the `plan`, without edits that are `unmatched` in it, as the
    first such `error` says; or the error alone.
    """

    found: Found
    target: Path
    plan: Plan | None = None
    error: CkptconvError | None = None
    unmatched: list[tuple[str, object]] = field(default_factory=list)


def plan_item(
    source: Readable,
    path: Path,
    edits: Edits,
    output: OutputOptions,
    *,
    is_folder: bool,
    opened: ExitStack,
) -> FolderPlan:
    """What `source` becomes at `path`, a file or a folder. What is opened is closed with `opened`."""

    def plan_one(source: Readable, path: Path, is_folder: bool, edits: Edits) -> Plan:
        return read_and_plan(source, path, edits, output, is_folder=is_folder)

    if is_folder and isinstance(source, SourceFolder) and not _is_distributed(source):
        return _plan_folder(source, path, edits, plan_one, output, opened)
    plan = plan_one(source, path, is_folder, edits)
    if not is_folder:
        about = _about_config(source.path.parent, plan) if source.is_stored and not source.is_far else []
        return FolderPlan(replace(plan, notes=(*plan.notes, *about)))
    return FolderPlan(
        plan,
        may_go=_successor(plan),
        like=source.folder if isinstance(source, SourceFolder) and source.is_stored else None,
    )


def _is_distributed(source: SourceFolder) -> bool:
    return any(each.looks_like(source) for each in (dcp, safetensors_parts, rank_files))


def _plan_folder(
    source: SourceFolder,
    target: Path,
    edits: Edits,
    plan_one: PlanOne,
    output: OutputOptions,
    opened: ExitStack,
) -> FolderPlan:
    """What the folder `source` becomes at `target`; of an index that set alone.

    What is opened is closed with `opened`, and becomes part of `source`.

    An edit that means nothing in one checkpoint is no error if it means something in another. In place, what is not
    converted stays as it is. Raises the error of the first set where none can be converted, and RefusedError where two
    files would have one name.
    """
    folder, is_whole = source.folder, source.path.is_dir()
    is_listed = output.copy_others or not source.is_far
    every = find(folder) if is_whole else find_in(folder) if is_listed else []
    chosen = [each for each in every if each.kind in ("file", "shards", "dcp")]
    if not is_whole:
        named = Found(source.path, "shards", (source.path,))  # whatever it is called
        chosen = [each for each in chosen if each.path == source.path] or [named]
    parts = [_Part(each, target / _place(each, folder, output.format)) for each in chosen]
    for part in parts:
        _plan(part, source, edits, plan_one, opened)
    typos = _typos(parts)
    done = [part for part in parts if part.plan and part not in typos]
    failed = tuple((part.found.path, part.error) for part in parts if part.error and part not in done)
    sets = [part for part in parts if part.found.kind == "shards"]
    if not done or (sets and not any(part in done for part in sets)):
        errors = (part.error for part in (*typos, *sets, *parts) if part.error)  # a typo is the user's to mend
        raise next(errors, None) or folder_error(folder)
    plan = _combined(target, folder, done)
    converted = {str(path.relative_to(folder)) for part in done for path in part.found.parts}
    notes: list[str] = []
    if _is_same_folder(folder, target):
        others = rest_of(folder, target, converted)
        may_go: Callable[[str], bool] = converted.__contains__
    else:
        may_go = _successor(plan)
        if output.copy_others:
            others, left = _others(folder, target, every, chosen, is_whole=is_whole)
            failed += tuple(left)
        else:
            others, notes = [], _about_left(folder, every)
    plan = replace(plan, others=tuple(others), notes=(*plan.notes, *notes, *_about_config(folder, plan)))
    plan = replace(plan, notes=(*plan.notes, *_about_old(plan, may_go)))
    refuse_one_place(
        [
            *((file.path, part.found.path) for part in done if part.plan for file in part.plan.files),
            *((other.path, other.source) for other in plan.others if other.kind != "folder"),
        ]
    )
    return FolderPlan(plan, failed, may_go, None if source.is_far else folder)


def _is_same_folder(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _place(found: Found, folder: Path, format: str | None) -> Path:
    """Where `found` goes in the target, as a path from there."""
    place = found.path.relative_to(folder)
    if found.kind == "shards":
        return place if found.path.is_dir() else place.parent
    return place.with_name(name_in_folder(found, format))


def _plan(part: _Part, whole: SourceFolder, edits: Edits, plan_one: PlanOne, opened: ExitStack) -> None:
    """Plan `part`, without the edits that mean nothing in it; `part` gains the plan, or the error."""
    try:
        source = open_input(part.found.path, whole.faults)
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


def _typos(parts: Iterable[_Part]) -> list[_Part]:
    """Those of `parts` that have an edit which means nothing in any that could be planned."""
    planned = [part for part in parts if part.plan]
    return [
        part for part in planned if any(all(edit in other.unmatched for other in planned) for edit in part.unmatched)
    ]


def _others(
    folder: Path, target: Path, every: list[Found], chosen: list[Found], *, is_whole: bool
) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
    """What is copied from `folder` to `target` besides, and what is not, and why."""
    taken = {str(path.relative_to(folder)) for each in chosen for path in each.parts}
    if not is_whole:  # the files beside an index, but for other checkpoints
        beside = {each.path.name for each in every if each.kind == "other"}
        taken |= {name for name in list_folder(folder)[1] if name not in beside}
    return others_in(folder, target, taken, deep=is_whole)


def _about_left(folder: Path, every: list[Found]) -> list[str]:
    """What to say of that in `folder` which is no checkpoint, where it is not copied."""
    notes: list[str] = []
    for kind, what in (("other", "other file"), ("unentered", "hidden or linked folder")):
        if names := [str(each.path.relative_to(folder)) for each in every if each.kind == kind]:
            left = f"{count(len(names), what)} left: {some(names)}; "
            notes.append(left + option("copy_others") + " copies all that is no checkpoint")
    return notes


def _about_config(folder: Path, plan: Plan) -> list[str]:
    """What to do about a model's configuration that says which dtype it has, where that is another one now."""
    new = {new for _, new in plan.changes.dtypes}
    said = _dtype_in(folder / "config.json") if new else None
    if said is None or said in new:
        return []
    return [f"config.json says dtype {said}, to which transformers casts what it loads: change it there"]


def _dtype_in(config: Path) -> str | None:
    """The dtype that a `config` of transformers says, if there is such a file and it says one."""
    data = first_bytes(config, LIMITS.config_bytes)
    try:
        check_nesting(data)
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    dtype = (found.get("dtype") or found.get("torch_dtype")) if isinstance(found, dict) else None
    return dtype if isinstance(dtype, str) else None


def _successor(plan: Plan) -> Callable[[str], bool]:
    """Which files of an old target may go because `plan` has their successors: those of the same model, in whatever
    shards and format, in the same place.
    """

    def family(name: str) -> tuple[str, str] | None:
        found = family_of(os.path.basename(name))
        return (os.path.dirname(name), found) if found else None

    new = {family(str(file.path.relative_to(plan.target))) for file in plan.files} - {None}
    return lambda name: family(name) in new


def _about_old(plan: Plan, may_go: Callable[[str], bool]) -> list[str]:
    """What of an old target the new one will not have."""
    if is_url(plan.target) or not plan.target.is_dir():
        return []
    new = {
        str(path.relative_to(plan.target)) for path in [*(f.path for f in plan.files), *(o.path for o in plan.others)]
    }
    gone = sorted(name for name in names_in(plan.target) if name not in new and may_go(name))
    return (
        [f"{count(len(gone), 'file')} of the old folder {'go' if len(gone) > 1 else 'goes'}: {some(gone)}"]
        if gone
        else []
    )


def _combined(target: Path, folder: Path, parts: list[_Part]) -> Plan:
    """One plan for all of `parts`, the paths in each but those of a set in the folder itself behind the
    name of its file.
    """
    plans = [(_prefix(part, folder), part.plan) for part in parts if part.plan]
    changes = Changes()
    for prefix, plan in plans:
        _add(changes, plan.changes, prefix)
    sets_first = sorted(parts, key=lambda part: part.found.kind != "shards")
    formats = [part.plan.formats for part in sets_first if part.plan]
    old, new = (" and ".join(dict.fromkeys(each[i] for each in formats)) for i in range(2))
    notes = []
    for part in parts:
        name = f"{part.found.path.relative_to(folder)}: " if len(parts) > 1 else ""
        notes += [name + note for note in part.plan.notes] if part.plan else []
        notes += [name + option_of(*edit) + " means nothing there" for edit in part.unmatched]
    return Plan(
        (old, new),
        target,
        True,
        tuple(file for _, plan in plans for file in plan.files),
        changes,
        tuple((prefix + a, prefix + b) for prefix, plan in plans for a, b in plan.ties),
        tuple(each for prefix, plan in plans for each in _behind(plan.left_behind, prefix)),
        tuple(notes),
    )


def _prefix(part: _Part, folder: Path) -> str:
    place = part.found.path.relative_to(folder)
    if part.found.kind == "shards":
        place = place.parent if not part.found.path.is_dir() else place
    return "" if str(place) == "." else f"{place}: "


def _behind(left: Iterable[LeftBehind], prefix: str) -> list[LeftBehind]:
    return [replace(each, path=prefix + each.path) for each in left]


def _add(changes: Changes, more: Changes, prefix: str) -> None:
    """Add `more` to `changes`, its paths behind `prefix`."""
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
