"""What is found in a folder, and the name that it gets in another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ckptconv.formats.distributed import rank_names
from ckptconv.formats.sharded.index import hub_name
from ckptconv.formats.writers import DEFAULT, WRITERS, admitted, split_suffix

#: ``ranks``: the rank files of one run, where they are to become one; else each is a file. ``unentered``: a hidden
#: folder that holds something, or a link to a folder.
Kind: TypeAlias = Literal["file", "shards", "dcp", "ranks", "other", "unentered"]


class Found(NamedTuple):
    """Something in a folder.

    Attributes:
        path: The file. For ``shards`` the index, or the folder if there is none; for ``dcp`` the folder.
        kind: What it is.
        parts: The files that belong to it.
    """

    path: Path
    kind: Kind
    parts: tuple[Path, ...]


def name_in_folder(found: Found, format: str | None, *, is_folder: bool = False) -> str:
    """Return the name that the output of `found` gets in a folder.

    A file keeps its name if its suffix allows the format. Otherwise it gets the name that the Hub's tools know, or
    another suffix. A folder of torch.distributed.checkpoint gets a suffix after its complete name.

    Args:
        found: A checkpoint. Anything else keeps its name.
        format: The format that was asked for. If it is None, parts keep their format, and a suffix decides otherwise.
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
