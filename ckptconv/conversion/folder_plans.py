"""Plan the conversion of one source: a file, a set, or a folder with a sharded set, other checkpoints and other files.

A new folder is built next to its target and replaces an old one in one step. So the plan contains everything that the
folder will contain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import Literal, OutFile
from ckptconv.conversion.discovery import find, find_in
from ckptconv.conversion.plan import Plan, read_and_plan
from ckptconv.conversion.target_names import Found, name_in_folder
from ckptconv.conversion.targets import Request, refuse_one_place
from ckptconv.edits.changes import Changes
from ckptconv.edits.options import option_of
from ckptconv.errors import CkptconvError, NoMatchError, count, some
from ckptconv.formats.distributed import dcp
from ckptconv.formats.foreign.paths import folder_error
from ckptconv.formats.opening import folder_format, open_input
from ckptconv.formats.safetensors_header import check_nesting
from ckptconv.formats.sharded.index import NAME as SHARDED
from ckptconv.formats.sharded.index import family_of
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.output.folders import OtherFile, names_in, rest_of
from ckptconv.stores import first_bytes, list_folder, place_below, store_of


@dataclass(frozen=True, eq=False)
class _Part:
    """A checkpoint in the folder that is converted.

    Attributes:
        found: The checkpoint.
        plan: Its plan, without the edits that match nothing in it. None if it cannot be converted.
        error: The reason why there is no plan, or the first error about an edit that matches nothing. Otherwise None.
        unmatched: The edits that match nothing in it, as fields and values of :class:`Edits`.
    """

    found: Found
    plan: Plan | None = None
    error: CkptconvError | None = None
    unmatched: tuple[tuple[str, object], ...] = ()


def plan_source(source: Readable, request: Request, opened: ExitStack) -> Plan:
    """Return the plan of `request` for its input `source`. Other sources that are opened are closed with `opened`."""
    folder = source if isinstance(source, SourceFolder) else None
    is_one = request.output.is_for_ranks or (folder and (format_ := folder_format(folder)) and format_.NAME != SHARDED)
    if request.is_folder and folder and not is_one:
        return _plan_folder(folder, request, opened)
    plan = read_and_plan(source, request)
    if request.is_folder:
        return replace(plan, may_go=_successor(plan), like=folder.folder if folder and folder.is_stored else None)
    about = _about_config(source.path.parent, plan) if source.is_stored else []
    return replace(plan, notes=(*plan.notes, *about)) if about else plan


def _plan_folder(source: SourceFolder, request: Request, opened: ExitStack) -> Plan:
    """Return the plan of `request` for the folder `source`, or only for the set if it is an index.

    An edit may match nothing in a checkpoint if it matches in another. In place, files that are not converted stay.
    Files that are opened become parts of `source`. Raises the first error if no set can be converted, and RefusedError
    for two files with the same path.
    """
    folder, target, output, is_whole = source.folder, request.dst, request.output, source.path.is_dir()
    is_listed = output.copy_others or source.is_stored
    every = find(folder) if is_whole else find_in(folder) if is_listed else []
    chosen = [found for found in every if found.kind in ("file", "shards", "dcp")]
    if not is_whole:
        named = Found(source.path, "shards", (source.path,))  # an index may have any name
        chosen = [found for found in chosen if found.path == source.path] or [named]
    parts = [_plan_part(found, source, request, opened) for found in chosen]
    typos = _typos(parts)
    done = [part for part in parts if part.plan and part not in typos]
    failed = tuple((part.found.path, part.error) for part in parts if part.error and part not in done)
    sets = [part for part in parts if part.found.kind == "shards"]
    if not done or (sets and not any(part in done for part in sets)):
        errors = (part.error for part in (*typos, *sets, *parts) if part.error)  # the user can correct a typo
        raise next(errors, None) or folder_error(folder)
    plan = _combined(target, folder, done)
    converted = {str(path.relative_to(folder)) for part in done for path in part.found.parts}
    others: Sequence[OtherFile] = ()
    notes: list[str] = []
    may_go = _successor(plan)
    if _is_same_folder(folder, target):
        others = rest_of(folder, target, converted)
        may_go = converted.__contains__
    elif output.copy_others:
        taken = {str(path.relative_to(folder)) for found in chosen for path in found.parts}
        if not is_whole:  # next to an index, other checkpoints are not copied
            beside = {found.path.name for found in every if found.kind == "other"}
            taken |= {name for name in list_folder(folder)[1] if name not in beside}
        others, left = store_of(folder).others_in(folder, target, taken, deep=is_whole)
        failed += tuple(left)
    else:
        notes = _about_left(folder, every)
    refuse_one_place(
        [
            *((file.path, part.found.path) for part in done if part.plan for file in part.plan.files),
            *((other.path, other.source) for other in others if other.kind != "folder"),
        ]
    )
    configs, others, about = _plain_configs(done, others)
    plan = replace(plan, files=(*plan.files, *configs))
    new = [file.path for file in plan.files] + [other.path for other in others]
    notes += [*about, *_about_config(folder, plan), *_about_old(target, new, may_go)]
    return replace(
        plan,
        others=tuple(others),
        notes=(*plan.notes, *notes),
        failed=failed,
        may_go=may_go,
        like=folder if source.is_stored else None,
    )


def _plain_configs(
    parts: Sequence[_Part], others: Sequence[OtherFile]
) -> tuple[list[OutFile], Sequence[OtherFile], list[str]]:
    """Return new ``config.json`` files for models that are dequantized, the `others` without the old ones, and notes.

    Args:
        parts: The checkpoints of the folder.
        others: Other files that the new folder will contain.
    """
    dtypes: dict[Path, set[str]] = {}
    for part in parts:
        if part.plan and part.plan.changes.dequantized and not part.plan.changes.still_quantized:
            folder = part.found.path if part.found.path.is_dir() else part.found.path.parent
            dtypes.setdefault(folder, set()).update(new for _, new in part.plan.changes.dtypes)
    files: list[OutFile] = []
    left: list[OtherFile] = []
    notes: list[str] = []
    for other in others:
        words = dtypes.get(other.source.parent) if other.kind in ("file", "kept") else None
        name = other.source.name
        if words and name == "config.json" and (data := _plain_config(other.source, words)):
            files.append(OutFile(other.path, (Literal(data),), len(data)))
            notes.append(f"{name} is written without quantization_config, with dtype {' and '.join(sorted(words))}")
        elif words and name == "hf_quant_config.json" and other.kind == "file":
            notes.append(f"{name} is not copied: the weights are no longer quantized")
        else:
            left.append(other)
    return files, left, notes


def _plain_config(config: Path, dtypes: set[str]) -> bytes | None:
    """Return the content of the file `config` without ``quantization_config``. Return None if there is no such entry.

    If `dtypes` has one item, it becomes the dtype in the file.
    """
    parsed = _parsed(config)
    inner = [each for each in (parsed, *(parsed or {}).values()) if isinstance(each, dict)]
    if not any(isinstance(each.pop("quantization_config", None), dict) for each in inner):
        return None
    for each in inner:
        for key in {"dtype", "torch_dtype"} & each.keys() if len(dtypes) == 1 else ():
            each[key] = next(iter(dtypes)) if isinstance(each[key], str) else each[key]
    return json.dumps(parsed, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _is_same_folder(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _plan_part(found: Found, source: SourceFolder, request: Request, opened: ExitStack) -> _Part:
    """Plan the conversion of `found`, a checkpoint in the folder `source`, to the same relative path in the output."""
    place = place_below(found.path, source.folder, request.dst)
    is_folder = found.kind == "shards"
    if not is_folder:
        place = place.with_name(name_in_folder(found, request.output.format))
    elif not found.path.is_dir():
        place = place.parent
    request = replace(request, dst=request.dst / place, is_folder=is_folder)
    first: NoMatchError | None = None
    unmatched: tuple[tuple[str, object], ...] = ()
    try:
        part = open_input(found.path, source.faults)
        opened.enter_context(part)
        source.add(part)
        while True:
            try:
                plan = read_and_plan(part, request)
                return _Part(found, plan, first, unmatched)
            except NoMatchError as error:
                first = first or error
                if error.unmatched is None:
                    raise
                unmatched += (error.unmatched,)
                request = replace(request, edits=request.edits.without(*error.unmatched))
    except CkptconvError as error:
        return _Part(found, error=error)


def _typos(parts: Sequence[_Part]) -> list[_Part]:
    """Return those of `parts` that have an edit which matches nothing in any of the planned parts."""
    planned = [part for part in parts if part.plan]
    return [
        part for part in planned if any(all(edit in other.unmatched for other in planned) for edit in part.unmatched)
    ]


def _combined(target: Path, folder: Path, parts: Sequence[_Part]) -> Plan:
    """Return one plan for all `parts` of `folder`.

    Paths in a checkpoint get the name of its file as a prefix, except for a set directly in `folder`.
    """
    plans = []
    notes: list[str] = []
    changes = Changes()
    for part in parts:
        path = part.found.path
        place = path.relative_to(folder)
        name = f"{place}: " if len(parts) > 1 else ""
        if part.found.kind == "shards" and not path.is_dir():
            place = place.parent
        prefix = "" if str(place) == "." else f"{place}: "
        if part.plan:
            plans.append((prefix, part.plan))
            changes.add(part.plan.changes, prefix)
            notes += [name + note for note in part.plan.notes]
        notes += [name + option_of(*edit) + " matches nothing there" for edit in part.unmatched]
    sets_first = sorted(parts, key=lambda part: part.found.kind != "shards")
    formats = [part.plan.formats for part in sets_first if part.plan]
    old, new = (" and ".join(dict.fromkeys(pair[i] for pair in formats)) for i in range(2))
    return Plan(
        formats=(old, new),
        target=target,
        is_folder=True,
        files=tuple(file for _, plan in plans for file in plan.files),
        changes=changes,
        ties=tuple((prefix + a, prefix + b) for prefix, plan in plans for a, b in plan.ties),
        left_behind=tuple(
            replace(left, path=prefix + left.path) for prefix, plan in plans for left in plan.left_behind
        ),
        notes=tuple(notes),
    )


def _about_left(folder: Path, every: Sequence[Found]) -> list[str]:
    """Return notes about the files and folders in `folder` that are neither converted nor copied."""
    notes: list[str] = []
    for kind, what in (("other", "other file"), ("unentered", "hidden or linked folder")):
        if names := [str(found.path.relative_to(folder)) for found in every if found.kind == kind]:
            left = f"{count(len(names), what)} left: {some(names)}; "
            notes.append(left + option("copy_others") + " copies all files that are not checkpoints")
    return notes


def _about_config(folder: Path, plan: Plan) -> list[str]:
    """Return a note if ``config.json`` in `folder` does not describe the new weights.

    A plan that writes a new configuration needs no note.
    """
    new = {new for _, new in plan.changes.dtypes}
    parsed = _parsed(folder / "config.json") if new else None
    if not parsed or any(file.path.name == "config.json" for file in plan.files):
        return []
    if plan.changes.dequantized and isinstance(parsed.get("quantization_config"), dict):
        if plan.changes.still_quantized:
            return ["config.json has quantization_config: list the modules there that are no longer quantized"]
        return [
            "config.json has quantization_config, which is wrong for the new weights: remove it; for a folder, "
            + option("copy_others")
            + " writes one without"
        ]
    configured = parsed.get("dtype") or parsed.get("torch_dtype")
    if not isinstance(configured, str) or configured in new:
        return []
    return [f"config.json has dtype {configured}, and transformers casts the weights to it: change it there"]


def _parsed(config: Path) -> dict[str, Any] | None:
    """Return the content of the JSON file `config`, or None if it cannot be read or is not a JSON object."""
    data = first_bytes(config, LIMITS.config_bytes)
    try:
        check_nesting(data)
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _successor(plan: Plan) -> Callable[[str], bool]:
    """Return a function that tells whether a file of an old target, given by its relative path, is replaced by `plan`.

    Files of the same model in the same folder are replaced, in any format and number of shards. Files of a DCP
    checkpoint are replaced by those of another DCP checkpoint.
    """

    def family(name: str) -> tuple[str, str] | None:
        model = dcp.NAME if dcp.is_own_file(os.path.basename(name)) else family_of(os.path.basename(name))
        return (os.path.dirname(name), model) if model else None

    new = {family(str(file.path.relative_to(plan.target))) for file in plan.files} - {None}
    return lambda name: family(name) in new


def _about_old(target: Path, new: Sequence[Path], may_go: Callable[[str], bool]) -> list[str]:
    """Return a note about the files of the old folder `target` that will be deleted: `may_go` is true and they are not
    in `new`.
    """
    if not (store_of(target, writing=True).has_folders and target.is_dir()):
        return []
    kept = {str(path.relative_to(target)) for path in new}
    gone = sorted(name for name in names_in(target) if name not in kept and may_go(name))
    if not gone:
        return []
    return [f"{count(len(gone), 'file')} of the old folder {'go' if len(gone) > 1 else 'goes'}: {some(gone)}"]
