"""Checkpoints found in a folder, and the names of their outputs in another folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ckptconv.formats.distributed import rank_names
from ckptconv.formats.sharded.index import hub_name
from ckptconv.formats.writers import DEFAULT, WRITERS, admitted, split_suffix

#: ``ranks``: the rank files of one run, if they are merged into one checkpoint; otherwise each is a ``file``.
#: ``unentered``: a hidden folder with files in it, or a link to a folder.
Kind: TypeAlias = Literal["file", "shards", "dcp", "ranks", "other", "unentered"]


class Found(NamedTuple):
    """A checkpoint, another file, or a folder that is not searched.

    Attributes:
        path: The file. For ``shards`` it is the index, or the folder without an index. For ``dcp`` it is the folder.
        kind: Its kind.
        parts: The files that belong to it.
    """

    path: Path
    kind: Kind
    parts: tuple[Path, ...]


def name_in_folder(found: Found, format: str | None, *, is_folder: bool = False) -> str:
    """Return the name of the output of `found` in a folder.

    A file keeps its name if the suffix allows the format. Otherwise it gets the name that the Hub's tools use, or
    another suffix. A folder of torch.distributed.checkpoint keeps its complete name and gets a suffix.

    Args:
        found: A checkpoint. Anything else keeps its name.
        format: The requested format. None: the format of the files of a folder is kept, and otherwise the suffix
            determines the format.
        is_folder: Whether the output is a folder of shards, which has no suffix.
    """
    name = os.path.basename(os.path.abspath(found.path))
    stem, suffix, _ = split_suffix(name) if found.kind == "file" else (name, "", "")
    if is_folder:
        is_index = found.kind == "shards" and not found.path.is_dir()
        return name.split(".")[0] if is_index else stem or name
    if found.kind == "ranks":
        return rank_names.stem_of(name) + (WRITERS[format] if format else DEFAULT).new_suffix
    if found.kind == "dcp":
        of_parts = (each for each in WRITERS.values() if all(part.suffix in each.suffixes for part in found.parts))
        return name + (WRITERS[format] if format else next(of_parts, DEFAULT)).new_suffix
    if found.kind == "other" or format is None or (suffix and WRITERS[format] in admitted(name)):
        return name
    writer = WRITERS[format]
    return (writer.hub and hub_name(stem, writer.hub)) or stem + writer.new_suffix
