"""What is found in a folder, and the name of what becomes of it in another."""

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

    `path` is that of the file; of ``shards`` that of their index, or of the folder where there is none; of ``dcp`` that
    of the folder. `parts` are the files that belong to it.
    """

    path: Path
    kind: Kind
    parts: tuple[Path, ...]


def name_in_folder(found: Found, format: str | None, *, is_folder: bool = False) -> str:
    """The name in a folder of what becomes of `found`, whatever the way in.

    A file keeps its name where its suffix admits the format; else it has the name that the Hub's tools know, or another
    suffix. A folder of torch.distributed.checkpoint gets a suffix behind its whole name.

    Args:
        found: A checkpoint; what is none keeps its name.
        format: What the user asked for. None: parts become what they are files of, all else what its suffix says.
        is_folder: It becomes a folder of shards, which has no suffix.
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
