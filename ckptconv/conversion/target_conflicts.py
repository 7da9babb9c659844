"""Refuse targets that stand in the way of each other, or of what they are made of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptconv.conversion.discovery import is_part
from ckptconv.conversion.items import Item, Listing
from ckptconv.errors import RefusedError, UsageError
from ckptconv.hints import command


def refuse_inside(path: Path, folder: Path) -> None:
    """Raise UsageError where `path`, a folder to be made, stands in `folder`, which is read."""
    if _is_inside(path, folder):
        raise UsageError(
            "the output is a folder within the input",
            where=path,
            hint="give one that stands elsewhere, or the input itself",
        )


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, which need not exist, stands in `folder`, wherever links lead."""
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def refuse_among_parts(listing: Listing) -> None:
    """Raise UsageError where an item of `listing` would be one of the parts that it is made of, or a folder among them:
    nobody could tell them apart afterwards. A file that is asked for by its own name may stand beside them.
    """
    for item in listing.items:
        if item.kind not in ("dcp", "shards", "ranks"):
            continue
        folder = item.src if item.src.is_dir() else item.src.parent
        if not (_is_inside(item.dst, folder) or _is_same(item.dst, folder)):
            continue
        is_file = not (listing.is_batch or item.is_folder)
        is_beside = is_file and _is_same(item.dst.parent, folder)
        if is_part(folder / item.dst.name, item.kind) if is_beside else item.kind == "dcp" and not is_file:
            src = item.src if item.src.name.strip(".") else Path(os.path.abspath(item.src))
            raise UsageError(
                "the output would stand among the parts of the input",
                where=item.dst,
                expected="a path outside of it",
                hint=None if item.is_folder else command("convert", src, src.with_name(f"{src.name}.pt")),
            )


def _is_same(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def refuse_one_name(items: Sequence[Item]) -> None:
    """Raise RefusedError where two of `items` would be written to one place, or one within the folder of another."""
    refuse_one_place((item.dst, item.src) for item in items)
    folders = {item.dst: item for item in items if item.is_folder}
    for item in items if folders else ():
        above = next((folders[parent] for parent in item.dst.parents if parent in folders), None)
        if above is not None:
            raise RefusedError(
                f"{item.src} would go into the folder that {above.src} becomes",
                where=item.dst,
                hint="convert them to folders of their own",
            )


def refuse_one_place(targets: Iterable[tuple[Path, Path]]) -> None:
    """Raise RefusedError where two of `targets`, each a path and what becomes it, have one path."""
    origin: dict[Path, Path] = {}
    for path, src in targets:
        if path in origin:
            raise RefusedError(
                f"{origin[path]} and {src} would both become it",
                where=path,
                hint="convert them to folders of their own",
            )
        origin[path] = src
