"""Which checkpoints a folder holds: files, sharded sets, folders of torch.distributed.checkpoint, and what is none of them. By names alone, all the way down."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ckptconv.errors import InputError
from ckptconv.folders import CHECKPOINT_SUFFIXES
from ckptconv.formats.shard_index import sets_in

__all__ = ["Found", "Kind", "find", "find_in"]

#: ``unentered``: a hidden folder that holds something, or a link to a folder.
Kind: TypeAlias = Literal["file", "shards", "dcp", "other", "unentered"]

_SUFFIXES = (*CHECKPOINT_SUFFIXES, ".pkl")
#: The parts of a checkpoint of torch.distributed.checkpoint, of its own format and of safetensors.
_CHUNK = re.compile(r".*\.distcp|shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_OURS = re.compile(r"\..*\.ckptconv-[0-9a-f]{6}\.tmp")  # what a conversion left that was killed


class Found(NamedTuple):
    """Something in a folder. PATH is that of the file; of ``shards`` that of their index, or of the folder where there is none; of ``dcp`` that of the folder. PARTS are the files that belong to it."""

    path: Path
    kind: Kind
    parts: tuple[Path, ...]


def find(folder: Path) -> list[Found]:
    """What is in FOLDER and in the folders below it, sorted by path. Raises InputError where a folder cannot be listed."""
    found: list[Found] = []
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        folders, files = _listed(here)
        found += _unentered(here, folders)
        found += _in_folder(here, files)
        waiting += [here / name for name, is_link in folders.items() if not (is_link or name.startswith("."))]
    return sorted(found, key=lambda each: (each.path.parts, each.kind))


def find_in(folder: Path) -> list[Found]:
    """What stands directly in FOLDER. Raises InputError where it cannot be listed."""
    return list(_in_folder(folder, _listed(folder)[1]))


def _listed(folder: Path) -> tuple[dict[str, bool], list[str]]:
    """The folders in FOLDER, with whether they are links, and all else."""
    folders: dict[str, bool] = {}
    files = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    continue
                if _is_folder(entry):
                    folders[entry.name] = entry.is_symlink()
                else:
                    files.append(entry.name)
    except OSError as error:
        raise InputError(f"a folder that cannot be listed: {error.strerror}", where=folder) from error
    return folders, sorted(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _unentered(folder: Path, inside: dict[str, bool]) -> Iterator[Found]:
    """The links to folders INSIDE of FOLDER, and the hidden folders that hold something."""
    for name, is_link in inside.items():
        if is_link or (name.startswith(".") and _holds_something(folder / name)):
            yield Found(folder / name, "unentered", ())


def _holds_something(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except OSError:  # nobody knows
        return True


def _in_folder(folder: Path, names: list[str]) -> Iterator[Found]:
    """What the files called NAMES, which stand in FOLDER, are."""
    chunks = [name for name in names if _CHUNK.fullmatch(name)]
    if chunks:
        parts = sorted([*chunks, ".metadata"] if ".metadata" in names else chunks)
        yield Found(folder, "dcp", tuple(folder / name for name in parts))
        names = sorted({*names}.difference(parts))
    taken = set()
    for index, shards in _sets(names):
        parts = [*shards, index] if index else shards
        taken.update(parts)
        yield Found(folder / index if index else folder, "shards", tuple(folder / name for name in parts))
    for name in names:
        if name not in taken:
            kind: Kind = "file" if name.lower().endswith(_SUFFIXES) else "other"
            yield Found(folder / name, kind, (folder / name,))


def _sets(names: list[str]) -> list[tuple[str | None, list[str]]]:
    """The sets of shards among NAMES: the index and the shards, of sets that have an index and of those that are complete without."""
    shards: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for each in sets_in([name]):
            if each.index is None:
                shards.setdefault((each.stem, each.suffix), []).append(name)
    return [
        (each.index, shards.get((each.stem, each.suffix), []))
        for each in sets_in(names)
        if each.index or len(each.shards) == each.count
    ]
