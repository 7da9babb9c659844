"""Names of rank files: which files of a folder are those of one run, by their names alone.

Layout: each process of a run saves a file of its own with torch.save, and its rank stands in the name:

    model_world_size_4_rank_0.pt    as verl and others have it; beside it ``optim_...`` and ``extra_state_...``
    model_final.rank_0.pth          without the number of ranks

A set of them is called by its pattern, ``model_world_size_4_rank_*.pt``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ckptconv.errors import InputError
from ckptconv.hints import Placeholder, command, joined
from ckptconv.lazy_regex import regex
from ckptconv.stores import list_folder

_NAME = regex(r"(.*?(?:world_size_([1-9][0-9]{0,4})_)?rank_)([0-9]{1,5}|\*)((?:\.[A-Za-z]\w*)+)")
_BESIDE = ("optim", "extra_state", "extra")  # how the sets are called that stand beside the model's


class RankSet(NamedTuple):
    """The files of one run: the `pattern` of their names, how many its `world` has where the names say it, and the
    names with their ranks.
    """

    pattern: str
    world: int | None
    names: tuple[tuple[int, str], ...]

    @property
    def missing(self) -> list[str]:
        """The names of those that are not there, as far as the names say it."""
        there = {rank for rank, _ in self.names}
        every = range(self.world or max(there, default=-1) + 1)
        return [self.pattern.replace("*", str(rank)) for rank in every if rank not in there]


def sets_in(names: Iterable[str]) -> list[RankSet]:
    """The sets among `names`, sorted by their patterns."""
    found: dict[tuple[str, int | None], list[tuple[int, str]]] = {}
    for name in names:
        parts = _NAME.fullmatch(name)
        if parts and parts[3] != "*":
            key = f"{parts[1]}*{parts[4]}", int(parts[2]) if parts[2] else None
            found.setdefault(key, []).append((int(parts[3]), name))
    return [RankSet(pattern, world, tuple(sorted(files))) for (pattern, world), files in sorted(found.items())]


def are_in(folder: Path) -> bool:
    """Whether `folder` has a set by its names. Without the number of ranks a name is no sign of one."""
    return folder.is_dir() and any(each.world for each in sets_in(list_folder(folder)[1]))


def pattern_of(name: str) -> str | None:
    """The pattern of the set that a file called `name` belongs to."""
    parts = _NAME.fullmatch(name)
    return f"{parts[1]}*{parts[4]}" if parts else None


def stem_of(pattern: str) -> str:
    """What the whole is called whose files have this `pattern`: ``model``."""
    return re.sub(r"[-_.]?(world_size_[0-9]+_)?rank_\*.*", "", pattern) or "model"


def as_sets(paths: Iterable[str], *, least: int = 1) -> list[str]:
    """Return `paths`, with the pattern in place of the rank files of each run whose names say how many they are, if at
    `least` so many of the run's files are among them.
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        parts = _NAME.fullmatch(name)
        is_of_run = parts and parts[2] and parts[3] != "*"
        found.setdefault(os.path.join(folder, pattern_of(name) or "") if is_of_run else path, []).append(path)
    return [each for key, group in found.items() for each in ([key] if len(group) >= least else group)]


def is_pattern(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the pattern of a set, and no file."""
    parts = _NAME.fullmatch(os.path.basename(path))
    return bool(parts and parts[3] == "*") and not os.path.lexists(path)


def set_of(path: Path) -> RankSet | None:
    """The set that the pattern `path` means, or that the file `path` belongs to by its name.

    None where it is called otherwise, or its folder cannot be listed.
    """
    parts = _NAME.fullmatch(path.name)
    if parts is None:
        return None
    try:
        names = list_folder(path.parent)[1]
    except InputError:
        return None
    pattern = pattern_of(path.name) or ""
    found = next((each for each in sets_in(names) if each.pattern == pattern), None)
    return found or RankSet(pattern, int(parts[2]) if parts[2] else None, ())


def main_set(names: Iterable[str]) -> RankSet | None:
    """The one set among `names` that a folder with them is: the model's, where others stand beside it.

    None where there is none, or nothing says which.
    """
    every = [each for each in sets_in(names) if each.world is not None]
    models = [each for each in every if not each.pattern.startswith(_BESIDE)]
    if len(every) == 1:
        return every[0]
    return models[0] if len(models) == 1 else None


def about_one(path: Path) -> str | None:
    """What to say of the file `path` if it is one of a set, by its name: which are missing, and what merges them."""
    found = set_of(path)
    if found is None or (found.world is None and len(found.names) < 2):
        return None
    missing = found.missing
    world = found.world or len(found.names) + len(missing)
    gone = f"{len(missing):,} of {world:,} are missing here: {missing[0]}" if missing else None
    merges = command("convert", path.with_name(found.pattern), Placeholder("OUT")) + " makes one of all of them"
    return joined(gone, merges)
