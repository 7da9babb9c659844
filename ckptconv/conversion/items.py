"""What a command means to convert: each item, with its input and its output."""

from __future__ import annotations

import os
from pathlib import Path

from ckptconv.byteranges.given_paths import is_folder
from ckptconv.byteranges.sources import is_url, list_folder
from ckptconv.conversion.discovery import find
from ckptconv.conversion.target_names import Kind
from ckptconv.errors import InputError
from ckptconv.light_dataclass import dataclass
from ckptconv.output import far_targets


@dataclass(frozen=True)
class Item:
    """One conversion: of the file, sharded set or DCP folder `src`, to the file `dst`, or to the folder `dst` if it
    `is_folder`. ``other`` is no checkpoint, and copied, but for a link out of the folder `within`. `notes`: what
    else to know.
    """

    src: Path
    dst: Path
    kind: Kind
    is_folder: bool = False
    notes: tuple[str, ...] = ()
    within: Path = Path()


@dataclass(frozen=True)
class Listing:
    """What a command means: its `items`, and, of folders, what is `other` and is left (where one checkpoint becomes a
    file, all else in its folder), and what was `unentered` (links to folders, hidden ones). `is_batch`: there could be
    any number of them. `notes`: what else to know.
    """

    items: tuple[Item, ...]
    is_batch: bool = False
    other: tuple[Path, ...] = ()
    unentered: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def is_there(item: Item) -> bool:
    """Whether the output of `item` exists; an empty folder does not count as one."""
    if is_url(item.dst):
        return far_targets.is_there(item.dst, is_folder=item.is_folder)
    if item.is_folder and item.dst.is_dir():
        return any(list_folder(item.dst))
    return os.path.lexists(item.dst)


def size_of(item: Item) -> int:
    """The bytes of what `item` is made of, as far as they can be told without reading it.

    What stands below a folder counts.
    """
    try:
        if not is_folder(item.src):
            return item.src.stat().st_size
        return sum(os.path.getsize(part) for each in find(item.src) for part in each.parts)
    except (OSError, InputError):  # whoever reads it will say so
        return 0
