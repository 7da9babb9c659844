"""Pair inputs with outputs: the path and the format of each target."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptconv.conversion.discovery import find, find_in, is_hub_blob, is_part
from ckptconv.conversion.options import USUAL, OutputOptions
from ckptconv.conversion.target_names import Found, Kind, name_in_folder
from ckptconv.errors import InputError, MissingInputError, RefusedError, UsageError, count, some
from ckptconv.formats.distributed import rank_names
from ckptconv.formats.foreign.paths import folder_error, no_path_error, odd_suffix_error
from ckptconv.formats.sharded.index import is_index_file, sets_in
from ckptconv.formats.writers import SUFFIXES, WRITERS, admitted, suffix_of
from ckptconv.hints import Placeholder, command, option
from ckptconv.light_dataclass import dataclass
from ckptconv.output import far_targets
from ckptconv.stores import is_folder, is_url, list_folder, locate


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


def find_target(src: Path, dst: str | os.PathLike[str], format: str | None) -> tuple[Path, str | None]:
    """The file that is meant by `dst` for the file `src`, and its format: `format`, else what its suffix says.

    None where it leaves that open.

    To a folder it keeps the name of `src`, or gets a suffix for `format` where its own does not admit that;
    the Hub's names for one thing (``pytorch_model.bin``, ``model.safetensors``) follow. Raises UsageError
    where format and suffix contradict each other.
    """
    path = _checked(dst, format)
    if not _is_folder(dst):
        _refuse_odd_suffix(path, format, [src])
    else:
        path = path / name_in_folder(Found(src, "file", (src,)), format)
    return path, format_of(path, format)


def format_of(path: Path, format: str | None) -> str | None:
    """The format of the file `path`: `format`, else what its suffix says; None where it leaves that open.

    Raises UsageError where the two contradict each other.
    """
    words = [writer.word for writer in admitted(path.name)]
    if format and format not in words:
        raise UsageError(
            f"the suffix says {' or '.join(words)} and " + option("format", format),
            where=path,
            hint="change one of them",
        )
    return format or (words[0] if len(words) == 1 else None)


def list_items(
    srcs: Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    output: OutputOptions = USUAL,
) -> Listing:
    """What `srcs` and `dst` mean, each path of the output once; nothing is read but folders.

    Raises UsageError for what makes no sense, RefusedError where two outputs would have one name, InputError where a
    folder holds no checkpoint.
    """
    dst = locate(dst) if is_url(dst) else dst
    path = _checked(dst, output.format)
    if output.max_shard_size is not None:
        from ckptconv.formats.sharded.writing import parse_size  # for shards alone

        parse_size(output.max_shard_size)
    if not all(map(os.fspath, srcs)):  # pathlib takes it for the folder that we are in
        raise InputError("no path given: it is empty")
    paths: Sequence[Path] = [locate(each) for each in srcs]
    if not _is_folder(dst):
        _refuse_odd_suffix(path, output.format, paths)
    if output.copy_others and (web := next((src for src in paths if os.fspath(src).startswith("http")), None)):
        raise UsageError(option("copy_others") + " looks into a folder, and web servers list none", where=web)
    if output.copy_others and all(_is_file(src) and not is_index_file(src) for src in paths):
        raise UsageError(option("copy_others") + " is for folders, and the input is none", where=paths[0])
    if len(paths) > 1 and not _will_be_folder(path, dst):
        paths = _as_pattern(paths)
    if len(paths) == 1:
        listing = _of_one(paths[0], path, dst, output)
    elif not _will_be_folder(path, dst):
        raise UsageError(
            "several inputs need a folder to go to",
            where=path,
            expected="a folder, or a path without a suffix",
            hint=_merging(paths, path),
        )
    else:
        parts = [_of_several(src, path, output) for src in paths]
        listing = Listing(
            tuple(item for part in parts for item in part.items),
            True,
            tuple(other for part in parts for other in part.other),
            tuple(each for part in parts for each in part.unentered),
            _about_shards(paths),
        )
    refuse_one_name(listing.items)
    refuse_among_parts(listing)
    return listing


def _merging(srcs: Sequence[Path], path: Path) -> str | None:
    """What to type to merge `srcs` into `path`, where they lie in one folder with their index."""
    folder, *others = {src.parent for src in srcs}
    is_set = not others and any(map(is_index_file, folder.glob("*.index.json")))
    return "to merge a sharded set: " + command("convert", folder, path) if is_set else None


def list_in_place(srcs: Sequence[str | os.PathLike[str]]) -> Listing:
    """The checkpoints that `srcs` mean, each to be changed in its own files; of folders, all in them and below.

    Raises InputError where a folder holds none.
    """
    items: list[Item] = []
    unentered: list[Path] = []
    for src in map(Path, srcs if len(srcs) > 1 else ()):
        if not os.path.lexists(src):  # before another one is changed: the last may be meant as the output
            last = "without " + option("in_place") + " the last path is the output"
            hint = last if src == Path(srcs[-1]) else None
            raise MissingInputError("no such file, so nothing was changed", where=src, hint=hint)
    for src in map(Path, srcs):
        found = find(src) if os.path.isdir(src) else [Found(src, "file", (src,))]
        unentered += [each.path for each in found if each.kind == "unentered"]
        here = [each for each in found if each.kind not in ("unentered", "other")]
        if not here:
            raise folder_error(src)
        is_set = len(here) == 1 and here[0].kind != "file" and here[0].parts[0].parent == src
        paths = [src] if is_set else [each.path for each in here]
        items += [Item(path, path, each.kind) for path, each in zip(paths, here, strict=True)]
    return Listing(tuple(items), len(items) > 1, unentered=tuple(unentered))


def find_item(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    output: OutputOptions = USUAL,
) -> Item:
    """The one conversion that `src` and `dst` mean.

    Raises as :func:`list_items` does, and UsageError where they mean several.
    """
    listing = list_items([src], dst, output)
    if len(listing.items) != 1:
        raise UsageError(
            f"{len(listing.items):,} checkpoints are in it",
            where=src,
            expected="one",
            hint=command("convert_many", src, dst) + " converts all of them",
        )
    return listing.items[0]


def through_link(src: str | os.PathLike[str], dst: Path) -> tuple[Path, tuple[str, ...]]:
    """The file to be replaced where `dst` is `src` by name, and what to say of it.

    A link stays, and what it leads to is converted; in the Hub's cache the link is replaced, because that file's name
    is its checksum. Any other `dst` is what it is.
    """
    if not os.path.islink(dst) or os.path.abspath(src) != os.path.abspath(dst):
        return dst, ()
    real = Path(os.path.realpath(dst))
    if is_hub_blob(real):
        return dst, (f"{dst} was a link into the Hub's cache, where {real.name[:12]} stays as it was",)
    return real, (f"{dst} is a link, which stays: {real} is what is converted",)


def _checked(dst: str | os.PathLike[str], format: str | None) -> Path:
    path = dst if isinstance(dst, Path) else Path(dst)
    if not os.fspath(dst):
        raise UsageError("no output given: its path is empty")
    if "\0" in os.fspath(path):
        raise UsageError("no such path can exist", where=path)
    is_object = isinstance(dst, Path) and is_url(dst) and not os.fspath(dst).startswith(("http", "hf:"))
    if not is_object and (error := no_path_error(dst, is_output=True)):
        raise error
    if format is not None and format not in WRITERS:
        raise UsageError(f"no format is called {format!r}", expected=" or ".join(WRITERS))
    return path


def _refuse_odd_suffix(path: Path, format: str | None, sources: Iterable[Path]) -> None:
    """Raise UsageError where the name `path` promises what nobody said, and it would not be."""
    error = odd_suffix_error(path, SUFFIXES, sources) if format is None else None
    if error:
        raise error


def _is_folder(dst: str | os.PathLike[str]) -> bool:
    """Whether `dst` is a folder, or is said to be one."""
    return os.path.isdir(dst) or os.fspath(dst).endswith(os.sep)


def _is_file(path: Path) -> bool:
    """Whether there is a file at `path`, and no folder; of a URL that is no folder this is so."""
    return not is_folder(path) if is_url(path) else path.is_file()


def _will_be_folder(path: Path, dst: str | os.PathLike[str]) -> bool:
    """Whether `path`, as `dst` says it, is a folder, or is not there and has no suffix.

    Asked in this order, a folder that somebody else makes meanwhile is one either way.
    """
    return not (suffix_of(path.name) or os.path.lexists(path)) or _is_folder(dst)


def _of_one(src: Path, path: Path, dst: str | os.PathLike[str], output: OutputOptions) -> Listing:
    """What `src` alone means, which goes to `path`, as `dst` says it."""
    to_folder = _will_be_folder(path, dst)
    is_dir = is_folder(src)
    kind: Kind | None = _kind_of(src) if is_dir else "shards" if is_index_file(src) else "file"
    if not to_folder and (output.in_shards or output.copy_others):
        asked = option("max_shard_size", None) if output.in_shards else option("copy_others")
        raise UsageError(asked + " writes a folder", where=path, expected="a folder, or a path without a suffix")
    if rank_names.is_pattern(src) or (not kind and (output.in_shards or not to_folder) and rank_names.are_in(src)):
        return _of_ranks(src, path, output, to_folder=to_folder)
    if kind == "file" and not output.in_shards:
        return Listing((Item(src, find_target(src, dst, output.format)[0], kind),))
    if not to_folder:
        if kind is None:
            raise folder_error(src)
        format_of(path, output.format)
        other = _beside(src, kind) if is_dir else ()
        return Listing((Item(src, path, kind, notes=_about_others(src, other)),), other=other)
    if is_dir:
        refuse_inside(path, src)
    if kind == "shards" or (kind and output.in_shards):
        return Listing((Item(src, path, kind, is_folder=True),))
    return _of_tree(src, path, path, output)


def _beside(folder: Path, kind: Kind) -> tuple[Path, ...]:
    """What is in `folder` and below and is no part of the checkpoint of this `kind` that `folder` is."""
    return tuple(
        each.path
        for each in find(folder)
        if each.kind != "unentered" and (each.kind != kind or each.parts[0].parent != folder)
    )


def _about_others(folder: Path, other: tuple[Path, ...]) -> tuple[str, ...]:
    """What to say of what is `other` in `folder` than the checkpoint that becomes one file."""
    if not other:
        return ()
    names = some([str(path.relative_to(folder)) for path in other])
    them = "it" if len(other) == 1 else "them"
    left = f"{count(len(other), 'other file')} left: {names}; to a folder, "
    return (left + option("copy_others") + f" takes {them} along",)


def _about_shards(srcs: Sequence[Path]) -> tuple[str, ...]:
    """What to say where some of `srcs` are shards by themselves, as ``model-*.safetensors``
    gives them: their index stays behind.
    """
    shards = [src for src in srcs if sets_in([src.name]) and not is_index_file(src)]
    if not shards:
        return ()
    whole = command("convert", shards[0].parent, Placeholder("OUT_FOLDER"))
    return (f"{count(len(shards), 'shard')} by themselves get no index: " + whole + " converts the set",)


def _of_several(src: Path, path: Path, output: OutputOptions) -> Listing:
    """What `src` means among several inputs: it goes to the folder `path` under its own name, as ``cp -r`` has it."""
    if not is_folder(src):
        return Listing((_item(Found(src, "shards" if is_index_file(src) else "file", (src,)), path, output),))
    target = path / os.path.basename(os.path.abspath(src))
    refuse_inside(target, src)
    if _kind_of(src) == "shards":
        return Listing((Item(src, target, "shards", is_folder=True),))
    return _of_tree(src, target, path, output)


def _as_pattern(srcs: Sequence[Path]) -> Sequence[Path]:
    """The pattern of the rank files that `srcs` are, all of one run; `srcs` where they are others.

    Raises UsageError where some of the run's files that are there are not among them.
    """
    found, folder = rank_names.set_of(srcs[0]), srcs[0].parent
    if found is None or any(src.parent != folder or rank_names.pattern_of(src.name) != found.pattern for src in srcs):
        return srcs
    pattern, left = folder / found.pattern, {name for _, name in found.names} - {src.name for src in srcs}
    if left:
        raise UsageError(
            f"{count(len(left), 'file')} of the same run left out: {some(sorted(left))}",
            where=pattern,
            expected="all files of a run, which become one",
            hint=command("convert", pattern, Placeholder("OUT")),
        )
    return [pattern]


def _of_ranks(src: Path, path: Path, output: OutputOptions, *, to_folder: bool) -> Listing:
    """What the rank files become that `src` means, a folder or a pattern: one checkpoint at `path`."""
    if not to_folder:
        format_of(path, output.format)
    elif not output.in_shards:
        path = path / name_in_folder(Found(src, "ranks", ()), output.format)
    other = [each.path for each in find(src) if each.kind != "unentered"] if src.is_dir() else []
    other = [each for each in other if each.parent != src or not rank_names.pattern_of(each.name)]
    left = f"{count(len(other), 'other file')} left: {some([str(each.relative_to(src)) for each in other])}"
    item = Item(src, path, "ranks", is_folder=to_folder and output.in_shards, notes=(left,) if other else ())
    return Listing((item,), other=tuple(other))


def _kind_of(folder: Path) -> Kind | None:
    """What the files that stand directly in `folder` are, if they are one checkpoint together."""
    kinds = {each.kind for each in find_in(folder)}
    return "shards" if "shards" in kinds else "dcp" if "dcp" in kinds else None


def _of_tree(src: Path, path: Path, beside: Path, output: OutputOptions) -> Listing:
    """Everything in the folder `src`, to the folder `path`.

    What `src` itself is, if it is a checkpoint, to the folder `beside`. A folder that directly holds a sharded set is
    one item, with all that is below it.
    """
    found = find(src)
    sets = {each.parts[0].parent for each in found if each.kind == "shards" and each.parts}
    whole = {folder for folder in sets if not any(above in sets for above in folder.parents)}
    items = [Item(folder, path / folder.relative_to(src), "shards", is_folder=True) for folder in whole]
    other, unentered = [], []
    for each in found:
        if each.kind == "unentered":
            unentered.append(each.path)
        elif whole and not whole.isdisjoint((each.path, *each.path.parents)):
            continue
        elif each.kind == "other" and not output.copy_others:
            other.append(each.path)
        else:
            place = beside if each.path == src else path / each.path.parent.relative_to(src)
            items.append(replace(_item(each, place, output), within=src))
    if all(item.kind == "other" for item in items):
        raise folder_error(src)
    items.sort(key=lambda item: item.src.parts)
    return Listing(tuple(items), True, tuple(other), tuple(unentered))


def _item(found: Found, folder: Path, output: OutputOptions) -> Item:
    """What becomes of `found`, in `folder`."""
    is_folder = found.kind == "shards" or (output.in_shards and found.kind != "other")
    name = name_in_folder(found, output.format, is_folder=is_folder)
    return Item(found.path, folder / name, found.kind, is_folder=is_folder)
