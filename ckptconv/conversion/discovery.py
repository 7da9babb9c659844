"""Find the checkpoints in a folder by name: files, sharded sets and folders of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptconv.conversion.target_names import Found, Kind
from ckptconv.errors import InputError
from ckptconv.formats.distributed import zero_names
from ckptconv.formats.distributed.dcp import looks_like_metadata
from ckptconv.formats.distributed.megatron import files_in
from ckptconv.formats.distributed.rank_names import pattern_of
from ckptconv.formats.foreign.paths import FILE_SUFFIXES
from ckptconv.formats.sharded.index import sets_in
from ckptconv.lazy_regex import regex
from ckptconv.output.files import is_own_file
from ckptconv.stores import list_folder

#: The chunk files of torch.distributed.checkpoint, in its own format and in safetensors.
_CHUNK = regex(r".*\.distcp|shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")

#: The folders in the Hub's cache. ``snapshots`` contains links to files in ``blobs``.
_OF_CACHE = {"blobs", "refs", "snapshots"}


def find(folder: Path) -> list[Found]:
    """Return the checkpoints and other files in and below `folder`, sorted by path.

    Raise InputError if it cannot be listed.

    Links to folders and hidden folders are not searched. They are in the result with the kind ``unentered``.
    """
    found: list[Found] = []
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        folders, files = list_folder(here)
        found += _unentered(here, folders)
        found += _in_folder(here, files)
        if folders.keys() >= _OF_CACHE:
            del folders["blobs"]
        waiting += [here / name for name, is_link in folders.items() if not (is_link or name.startswith("."))]
    return sorted(found, key=lambda each: (each.path.parts, each.kind))


def find_in(folder: Path) -> list[Found]:
    """Return the checkpoints and other files directly in `folder`. Raise InputError if it cannot be listed."""
    return list(_in_folder(folder, list_folder(folder)[1]))


def is_part(path: Path, kind: Kind) -> bool:
    """Return whether a file at `path` would, by its name, belong to a checkpoint of this `kind` in its folder."""
    if kind == "ranks":
        return pattern_of(path.name) is not None or zero_names.is_part(path.name)
    names = sorted({*list_folder(path.parent)[1], path.name})
    return any(path in found.parts for found in _in_folder(path.parent, names) if found.kind == kind)


def is_hub_blob(path: Path) -> bool:
    """Return whether `path` is a file in the Hub's cache, whose name is its checksum."""
    return path.parent.name == "blobs" and (path.parent.parent / "snapshots").is_dir()


def _unentered(folder: Path, inside: dict[str, bool]) -> Iterator[Found]:
    """Yield the folders in `folder` that are not searched: links, and hidden folders that are not empty.

    `inside` maps the names of all folders in it to whether they are links.
    """
    for name, is_link in inside.items():
        if not is_own_file(name) and (is_link or (name.startswith(".") and _holds_something(folder / name))):
            yield Found(folder / name, "unentered", ())


def _holds_something(folder: Path) -> bool:
    try:
        return any(list_folder(folder))
    except InputError:  # not known
        return True


def _in_folder(folder: Path, names: list[str]) -> Iterator[Found]:
    """Yield the checkpoints and other files that the files `names` in `folder` form."""
    names = [name for name in names if not is_own_file(name)]
    chunks = [name for name in names if _CHUNK.fullmatch(name)]
    if ".metadata" in names and (chunks or looks_like_metadata(folder)):
        chunks += [".metadata", *{*files_in(folder, names)}.intersection(names)]
    if chunks:
        parts = sorted(chunks)
        yield Found(folder, "dcp", tuple(folder / name for name in parts))
        names = sorted({*names}.difference(parts))
    taken = set()
    for each in sets_in(names):
        if each.index or each.count:  # some files may be missing; the reader of the set raises an error
            parts = [*each.shards, *([each.index] if each.index else [])]
            taken.update(parts)
            place = folder / each.index if each.index else folder
            yield Found(place, "shards", tuple(folder / name for name in parts))
    for name in names:
        if name not in taken:
            kind: Kind = "file" if name.lower().endswith(FILE_SUFFIXES) else "other"
            yield Found(folder / name, kind, (folder / name,))
