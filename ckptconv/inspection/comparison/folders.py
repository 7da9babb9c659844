"""Pair the checkpoints of two folders by their names."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ckptconv.conversion.discovery import find
from ckptconv.conversion.target_names import Found, name_in_folder
from ckptconv.stores import is_folder, locate

_ANY = "safetensors"  # every checkpoint can be converted to it, so its file names do not depend on the container


class Pair(NamedTuple):
    """Two checkpoints with the same name. One is None if a side has no such checkpoint."""

    name: str
    a: Path | None
    b: Path | None


def pairs_of(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[Pair] | None:
    """Return the pairs of checkpoints to compare, sorted by name. Return None if `a` and `b` themselves are compared.

    If both are folders of checkpoints, a name is the path in the folder. ``model.pt`` and ``model.safetensors`` are
    paired if no other file on either side would have that name after a conversion. If one is such a folder and the
    other is a file, the only pair is the file and the checkpoint with the same name, unless both are the same file.

    Raises InputError if a folder cannot be listed.
    """
    paths = [locate(each) for each in (a, b)]
    folders = [_named_in(each) if is_folder(each) else {} for each in paths]
    if all(folders):
        return _paired(*folders)
    if not any(folders) or is_folder(paths[0]) == is_folder(paths[1]):
        return None
    file = paths[1 if folders[0] else 0]
    if not file.is_file():
        return None
    alone = {file.name: Found(file, "file", (file,))}
    pairs = _paired(*(each or alone for each in folders))
    return [pair for pair in pairs if pair.a and pair.b and not _is_same(pair.a, pair.b)] or None


def _is_same(a: Path, b: Path) -> bool:
    """Return whether `a` and `b` are the same file."""
    return a == b or (a.exists() and b.exists() and a.samefile(b))


def _named_in(folder: Path) -> dict[str, Found]:
    """Return the checkpoints in `folder` by their relative paths.

    Return an empty dict if the folder is a checkpoint itself.
    """
    every = [each for each in find(folder) if each.kind in ("file", "shards", "dcp")]
    if any(each.kind != "file" and each.parts[0].parent == folder for each in every):
        return {}
    return {str(each.path.relative_to(folder)): each for each in every}


def _paired(a: dict[str, Found], b: dict[str, Found]) -> list[Pair]:
    """Return the pairs of `a` and `b`: first by equal names, then by names that would be equal after a conversion."""
    pairs = [Pair(name, a[name].path, b[name].path) for name in a.keys() & b.keys()]
    rest = [{name: each for name, each in side.items() if name not in other} for side, other in ((a, b), (b, a))]
    keys = [{name: _key(name, each) for name, each in side.items()} for side in rest]
    unique = [{key for key, n in Counter(side.values()).items() if n == 1} for side in keys]
    meant = {key: name for name, key in keys[1].items() if key in unique[0] & unique[1]}
    for name, key in keys[0].items():
        other = meant.get(key)
        pairs.append(Pair(name, rest[0][name].path, rest[1].pop(other).path if other is not None else None))
    pairs += [Pair(name, None, each.path) for name, each in rest[1].items()]
    return sorted(pairs)


def _key(name: str, found: Found) -> str:
    """Return a key for `found`, whose relative path is `name`.

    It is the same for the same checkpoint in another format.
    """
    if found.kind == "shards":
        return name if found.path.is_dir() else os.path.dirname(name)
    return os.path.join(os.path.dirname(name), name_in_folder(found, _ANY))
