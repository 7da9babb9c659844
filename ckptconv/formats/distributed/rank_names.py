"""Names of rank files: which files in a folder belong to one run, according to their names.

Layout: each process of a run saves its own file with torch.save, and its rank is in the name:

    model_world_size_4_rank_0.pt    as verl and others write it, next to ``optim_...`` and ``extra_state_...``
    model_final.rank_0.pth          without the number of ranks

A set of such files is named by its pattern, ``model_world_size_4_rank_*.pt``.
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
_OTHERS = ("optim", "extra_state", "extra")  # how the names of sets begin that are next to the model's


class RankSet(NamedTuple):
    """The files of one run.

    Attributes:
        pattern: The pattern of their names.
        world: The number of ranks, or None if it is not in the names.
        names: The rank and the name of each file that exists, sorted.
    """

    pattern: str
    world: int | None
    names: tuple[tuple[int, str], ...]

    @property
    def missing(self) -> list[str]:
        """The names of the missing files.

        If the number of ranks is unknown, only ranks below the highest one can be missing.
        """
        existing = {rank for rank, _ in self.names}
        every = range(self.world or max(existing, default=-1) + 1)
        return [self.pattern.replace("*", str(rank)) for rank in every if rank not in existing]


def _parsed(name: str) -> tuple[str, int | None, int | None]:
    """Return the pattern of the set that `name` belongs to, the number of ranks, and the rank.

    The pattern is empty if `name` is not the name of a rank file. A number is None if it is not in the name.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        return "", None, None
    rank = None if parts[3] == "*" else int(parts[3])
    return f"{parts[1]}*{parts[4]}", int(parts[2]) if parts[2] else None, rank


def sets_in(names: Iterable[str]) -> list[RankSet]:
    """Return the sets of rank files among `names`, sorted by their patterns."""
    sets: dict[tuple[str, int | None], list[tuple[int, str]]] = {}
    for name in names:
        pattern, world, rank = _parsed(name)
        if rank is not None:
            sets.setdefault((pattern, world), []).append((rank, name))
    return [RankSet(pattern, world, tuple(sorted(files))) for (pattern, world), files in sorted(sets.items())]


def are_in(folder: Path) -> bool:
    """Return whether `folder` contains a set of rank files whose names have the number of ranks."""
    return folder.is_dir() and any(run.world for run in sets_in(list_folder(folder)[1]))


def pattern_of(name: str) -> str | None:
    """Return the pattern of the set that the rank file `name` belongs to, or None if it is not a rank file."""
    return _parsed(name)[0] or None


def stem_of(pattern: str) -> str:
    """Return the name, without a suffix, for the checkpoint that is merged from the files of `pattern`.

    It is the part of `pattern` before the rank, or ``model`` if nothing is before it.
    """
    return re.sub(r"[-_.]?(world_size_[0-9]+_)?rank_\*.*", "", pattern) or "model"


def as_sets(paths: Iterable[str], *, least: int = 1) -> list[str]:
    """Return `paths`, in which the rank files of a run are replaced by their pattern.

    Files are kept if their names do not have the number of ranks, or if fewer than `least` files of the run are given.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        pattern, world, rank = _parsed(name)
        groups.setdefault(os.path.join(folder, pattern) if world and rank is not None else path, []).append(path)
    return [path for key, group in groups.items() for path in ([key] if len(group) >= least else group)]


def is_pattern(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is the pattern of a set of rank files. False if there is a file of that name."""
    pattern, _, rank = _parsed(os.path.basename(path))
    return bool(pattern) and rank is None and not os.path.lexists(path)


def set_of(path: Path) -> RankSet | None:
    """Return the set with the pattern `path`, or the set that the rank file `path` belongs to.

    Return None if `path` is neither, or if the folder cannot be listed. The set is empty if no file matches.
    """
    pattern, world, _ = _parsed(path.name)
    if not pattern:
        return None
    try:
        names = list_folder(path.parent)[1]
    except InputError:
        return None
    run = next((run for run in sets_in(names) if run.pattern == pattern), None)
    return run or RankSet(pattern, world, ())


def main_set(names: Iterable[str]) -> RankSet | None:
    """Return the set in a folder with `names` that the folder stands for: the only one, or the only one of a model.

    Names of other sets begin with ``optim`` or ``extra``. Return None if there is no such set, or more than one.
    """
    every = [run for run in sets_in(names) if run.world is not None]
    models = [run for run in every if not run.pattern.startswith(_OTHERS)]
    if len(every) == 1:
        return every[0]
    return models[0] if len(models) == 1 else None


def about_one(path: Path) -> str | None:
    """Return a note on the file `path` if it is one of several rank files, according to its name.

    Otherwise return None. The note says which files are missing, and which command merges the set.
    """
    run = set_of(path)
    if run is None or (run.world is None and len(run.names) < 2):
        return None
    missing = run.missing
    world = run.world or len(run.names) + len(missing)
    gone = f"{len(missing):,} of {world:,} are missing here: {missing[0]}" if missing else None
    return joined(gone, command("convert", path.with_name(run.pattern), Placeholder("OUT")) + " merges all of them")
