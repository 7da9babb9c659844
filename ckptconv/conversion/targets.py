"""Find the checkpoints that a command converts, and the path and kind of each output."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ckptconv.conversion.discovery import find, find_in, is_hub_blob, is_part
from ckptconv.conversion.options import USUAL, OutputOptions
from ckptconv.conversion.target_names import Found, Kind, name_in_folder
from ckptconv.edits.options import NO_EDITS, Edits
from ckptconv.errors import InputError, MissingInputError, RefusedError, UsageError, count, some
from ckptconv.formats.distributed import rank_names, zero_names
from ckptconv.formats.foreign.paths import folder_error, no_path_error, odd_suffix_error
from ckptconv.formats.sharded.index import is_index_file, sets_in
from ckptconv.formats.writers import SUFFIXES, WRITERS, admitted, suffix_of
from ckptconv.hints import Placeholder, command, option
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.stores import is_folder, is_url, locate, place_below, store_of
from ckptconv.system import calls


@dataclass(frozen=True)
class Request:
    """One conversion and its options.

    Attributes:
        src: The input: a file, a sharded set (its folder or index), a folder of torch.distributed.checkpoint, or the
            rank files of a run (their folder or pattern).
        dst: The file to write, or the folder if `is_folder`. With ``output.in_place`` it is `src`.
        kind: The kind of `src`. ``other`` is not a checkpoint and is copied unchanged.
        edits: The changes to the checkpoint.
        output: The options of the output.
        is_folder: Whether `dst` is a folder of files.
        within: For ``other``: the folder that the target of a link must be inside. Otherwise None.
        notes: Notes that the report includes.
        given: The keywords from which `edits` and `output` were read, for commands in messages.
    """

    src: Path
    dst: Path
    kind: Kind
    edits: Edits = NO_EDITS
    output: OutputOptions = USUAL
    is_folder: bool = False
    within: Path | None = None
    notes: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """All conversions that a command requests.

    Attributes:
        requests: The conversions.
        is_batch: Whether the arguments can select any number of checkpoints, even if they select one.
        other: For a batch: the files in the input folders that are not converted.
        unentered: The hidden folders and the links to folders, which are not searched.
        notes: Notes about the command as such.
    """

    requests: tuple[Request, ...]
    is_batch: bool = False
    other: tuple[Path, ...] = ()
    unentered: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def is_there(request: Request) -> bool:
    """Return whether the output of `request` exists. An empty folder does not count as existing."""
    return store_of(request.dst, writing=True).exists(request.dst, is_folder=request.is_folder)


def size_of(request: Request) -> int:
    """Return the size of the input of `request`, in bytes. For a folder, this includes everything below it.

    Return 0 if the input cannot be listed.
    """
    try:
        if not is_folder(request.src):
            return request.src.stat().st_size
        return sum(os.path.getsize(part) for each in find(request.src) for part in each.parts)
    except (OSError, InputError):  # reading the input raises this error again
        return 0


# One request


def find_request(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], edits: Edits = NO_EDITS, output: OutputOptions = USUAL
) -> Request:
    """Return the one conversion that `src` and `dst` select.

    With ``output.in_place``, `dst` is ignored and no folder is listed.

    Raises:
        UsageError: `src` contains several checkpoints.
        CkptconvError: One of the errors of :func:`list_requests`.
    """
    if output.in_place:
        path = Path(os.fsdecode(src))
        return Request(path, path, "file", edits, output)
    listing = list_requests([src], dst, edits, output)
    if len(listing.requests) != 1:
        raise UsageError(
            f"{len(listing.requests):,} checkpoints in the folder",
            where=src,
            expected="one",
            hint="to convert all of them: " + command("convert_many", src, dst),
        )
    return listing.requests[0]


def find_target(src: Path, dst: str | os.PathLike[str], format: str | None) -> tuple[Path, str | None]:
    """Return the path of the output for the file `src`, and its format.

    If `dst` is a folder, the output keeps the name of `src`. If the suffix of that name does not allow `format`, the
    name becomes the Hub's name for the format (``pytorch_model.bin`` becomes ``model.safetensors``), or gets another
    suffix.

    Returns:
        The path and the format: `format`, or else the only format that the suffix of the path allows. The format
        is None if the suffix allows several.

    Raises:
        UsageError: `format` and the suffix contradict each other, or `dst` cannot be a path.
    """
    path = _checked(dst, format)
    if not _is_folder(dst):
        _refuse_odd_suffix(path, format, [src])
    else:
        path = path / name_in_folder(Found(src, "file", (src,)), format)
    return path, format_of(path, format)


def format_of(path: Path, format: str | None) -> str | None:
    """Return `format`, or else the only format that the suffix of `path` allows.

    Return None if the suffix allows several.

    Raises UsageError if `format` and the suffix contradict each other.
    """
    words = [writer.word for writer in admitted(path.name)]
    if format and format not in words:
        raise UsageError(
            f"the suffix means {' or '.join(words)}, not " + option("format", format),
            where=path,
            hint="change one of them",
        )
    return format or (words[0] if len(words) == 1 else None)


def _checked(dst: str | os.PathLike[str], format: str | None) -> Path:
    """Return `dst` as a path.

    Raises UsageError if `dst` is empty or impossible, or `format` is unknown. Raises another error if `dst` cannot be
    written, such as a URL of a web server.
    """
    path = calls.usable(dst if isinstance(dst, Path) else Path(dst))
    if not os.fspath(dst):
        raise UsageError("no output given: its path is empty")
    if "\0" in os.fspath(path) or not calls.can_be_name(path.name or "x"):
        raise UsageError("this path cannot exist", where=path)
    if not getattr(dst, "can_write", False) and (error := no_path_error(dst, is_output=True)):
        raise error
    if format is not None and format not in WRITERS:
        raise UsageError(f"there is no format {format!r}", expected=" or ".join(WRITERS))
    return path


def _refuse_odd_suffix(path: Path, format: str | None, sources: Iterable[Path]) -> None:
    """Raise UsageError if `format` is None and the suffix of `path` belongs to a kind of file that is never written."""
    if format is None and (error := odd_suffix_error(path, SUFFIXES, sources)):
        raise error


def _is_folder(dst: str | os.PathLike[str]) -> bool:
    """Return whether `dst` is an existing folder, or ends in a slash."""
    return os.path.isdir(locate(dst)) or os.fspath(dst).endswith(calls.SEPARATORS)


# Several requests


def list_requests(
    srcs: Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    edits: Edits = NO_EDITS,
    output: OutputOptions = USUAL,
) -> Listing:
    """Return all conversions that `srcs` and `dst` select. Folders are listed. No file is opened.

    `dst` is a folder if it exists as one, ends in a slash, or has no suffix and does not exist.

    Raises:
        UsageError: The arguments contradict each other.
        RefusedError: Two outputs would have the same path.
        InputError: A folder contains no checkpoint.
    """
    dst = locate(dst) if is_url(dst) else dst
    path = _checked(dst, output.format)
    if output.max_shard_size is not None:
        from ckptconv.formats.sharded.writing import parse_size  # only needed for shards

        parse_size(output.max_shard_size)
    if not all(map(os.fspath, srcs)):  # pathlib takes it for the current folder
        raise InputError("no path given: it is empty")
    paths: Sequence[Path] = [locate(src) for src in srcs]
    # If another process creates the folder between these two look-ups, the output is still a folder.
    to_folder = not (suffix_of(path.name) or os.path.lexists(path)) or _is_folder(dst)
    if not _is_folder(dst):
        _refuse_odd_suffix(path, output.format, paths)
    _check_ranks(output, path)
    if output.copy_others and (web := next((src for src in paths if os.fspath(src).startswith("http")), None)):
        raise UsageError(option("copy_others") + " needs a folder, and web servers do not list their files", where=web)
    if output.copy_others and all(src.is_file() and not is_index_file(src) for src in paths):
        raise UsageError(option("copy_others") + " needs a folder as the input", where=paths[0])
    if len(paths) > 1 and not to_folder:
        paths = _as_pattern(paths)
    asked = Request(Path(), path, "file", edits, output)
    if len(paths) == 1:
        listing = _of_one(paths[0], dst, asked, to_folder=to_folder)
    elif not to_folder:
        raise UsageError(
            "several inputs need a folder as the output",
            where=path,
            expected="a folder, or a path without a suffix",
            hint=_merging(paths, path),
        )
    else:
        parts = [_of_several(src, asked) for src in paths]
        listing = Listing(
            tuple(request for part in parts for request in part.requests),
            True,
            tuple(other for part in parts for other in part.other),
            tuple(folder for part in parts for folder in part.unentered),
            _about_shards(paths),
        )
    _refuse_one_name(listing.requests)
    _refuse_among_parts(listing)
    return listing


def _check_ranks(output: OutputOptions, path: Path) -> None:
    """Raise UsageError if ``--ranks`` is used without a format with a file for each process, or is out of bounds.

    With such a format, raise UsageError also for options that cannot be combined with it.
    """
    if not output.is_for_ranks:
        if output.ranks != 1:
            raise UsageError(option("ranks", output.ranks) + " needs " + option("format", "dcp"), where=path)
        return
    if not 1 <= output.ranks <= LIMITS.ranks:
        raise UsageError("no such number of processes", where=path, expected=f"1 to {LIMITS.ranks:,}", got=output.ranks)
    wrong = [option("max_shard_size", None)] if output.max_shard_size is not None else []
    wrong += [option("copy_others")] if output.copy_others else []
    if wrong:
        raise UsageError(wrong[0] + " cannot be combined with " + option("format", output.format), where=path)


def list_in_place(
    srcs: Sequence[str | os.PathLike[str]],
    edits: Edits = NO_EDITS,
    output: OutputOptions = USUAL,
) -> Listing:
    """Return the changes in place of all checkpoints that `srcs` select, including those in and below folders.

    Raises:
        MissingInputError: One of several `srcs` does not exist. If it is the last one, the hint explains that it would
            be the output without ``--in-place``.
        InputError: A folder contains no checkpoint.
    """
    requests: list[Request] = []
    unentered: list[Path] = []
    for src in map(Path, srcs if len(srcs) > 1 else ()):
        if not os.path.lexists(src):  # before the first file is changed
            last = "without " + option("in_place") + " the last path is the output"
            hint = last if src == Path(srcs[-1]) else None
            raise MissingInputError("no such file, so nothing was changed", where=src, hint=hint)
    for src in map(Path, srcs):
        found = find(src) if os.path.isdir(src) else [Found(src, "file", (src,))]
        unentered += [each.path for each in found if each.kind == "unentered"]
        checkpoints = [each for each in found if each.kind not in ("unentered", "other")]
        if not checkpoints:
            raise folder_error(src)
        is_set = len(checkpoints) == 1 and checkpoints[0].kind != "file" and checkpoints[0].parts[0].parent == src
        for each in checkpoints:
            path = src if is_set else each.path
            requests.append(Request(path, path, each.kind, edits, output))
    return Listing(tuple(requests), len(requests) > 1, unentered=tuple(unentered))


def _merging(srcs: Sequence[Path], path: Path) -> str | None:
    """Return a hint with the command that merges `srcs` into `path`.

    Return None unless they are in one folder with an index.
    """
    folder, *others = {src.parent for src in srcs}
    is_set = not others and any(map(is_index_file, folder.glob("*.index.json")))
    return "to merge a sharded set: " + command("convert", folder, path) if is_set else None


def _of_one(src: Path, dst: str | os.PathLike[str], asked: Request, *, to_folder: bool) -> Listing:
    """Return the conversions for `src`, which is the only input.

    Args:
        src: The input.
        dst: The output as the user gave it.
        asked: A request without an input. Its ``dst`` is the path of the output.
        to_folder: Whether that path is a folder, or becomes one.
    """
    path, output = asked.dst, asked.output
    is_set = output.writes_folder
    is_dir = is_folder(src)
    kind: Kind | None = _kind_of(src) if is_dir else "shards" if is_index_file(src) else "file"
    if not to_folder and (is_set or output.copy_others):
        asking = option("copy_others")
        if is_set:
            asking = option("format", output.format) if output.is_for_ranks else option("max_shard_size", None)
        what = asking + " needs a folder as the output"
        raise UsageError(what, where=path, expected="a folder, or a path without a suffix")
    is_one = is_set or not to_folder
    if rank_names.is_pattern(src) or (
        not kind and is_one and (rank_names.are_in(src) or zero_names.files_of(src) is not None)
    ):
        return _of_ranks(src, asked, to_folder=to_folder)
    if kind == "file" and not is_set:
        return Listing((replace(asked, src=src, dst=find_target(src, dst, output.format)[0]),))
    if not to_folder:
        if kind is None:
            raise folder_error(src)
        format_of(path, output.format)
        notes = _about_others(src, _beside(src, kind)) if is_dir else ()
        return Listing((replace(asked, src=src, kind=kind, notes=notes),))
    if is_dir:
        _refuse_inside(path, src)
    if kind == "shards" or (kind and is_set):
        notes = _about_others(src, _beside(src, kind), hint=False) if is_dir and output.is_for_ranks else ()
        return Listing((replace(asked, src=src, kind=kind, is_folder=True, notes=notes),))
    return _of_tree(src, path, asked)


def _kind_of(folder: Path) -> Kind | None:
    """Return the kind of the checkpoint that the files directly in `folder` form: ``shards`` or ``dcp``.

    Return None if they form none.
    """
    kinds = {each.kind for each in find_in(folder)}
    return "shards" if "shards" in kinds else "dcp" if "dcp" in kinds else None


def _beside(folder: Path, kind: Kind) -> tuple[Path, ...]:
    """Return the files in and below `folder` that do not belong to its own checkpoint, which is of this `kind`."""
    return tuple(
        each.path
        for each in find(folder)
        if each.kind != "unentered" and (each.kind != kind or each.parts[0].parent != folder)
    )


def _about_others(folder: Path, other: Sequence[Path], *, hint: bool = True) -> tuple[str, ...]:
    """Return a tuple with a note about the `other` files in `folder`, which are not converted, if there are any.

    With `hint`, the note names the option that copies them.
    """
    if not other:
        return ()
    left = f"{count(len(other), 'other file')} left: {some([str(path.relative_to(folder)) for path in other])}"
    them = "it" if len(other) == 1 else "them"
    return (left + "; to a folder, " + option("copy_others") + f" copies {them}" if hint else left,)


def _about_shards(srcs: Sequence[Path]) -> tuple[str, ...]:
    """Return a tuple with a note about the inputs that are single shards without their index, if there are any."""
    shards = [src for src in srcs if sets_in([src.name]) and not is_index_file(src)]
    if not shards:
        return ()
    of_set = command("convert", shards[0].parent, Placeholder("OUT_FOLDER"))
    return (f"{count(len(shards), 'shard')} without an index; to convert the set: " + of_set,)


def _of_several(src: Path, asked: Request) -> Listing:
    """Return the conversions for `src`, one of several inputs.

    The output keeps its name, in ``asked.dst``, as in ``cp -r``.
    """
    if not is_folder(src):
        kind: Kind = "shards" if is_index_file(src) else "file"
        return Listing((_in_folder(Found(src, kind, (src,)), asked.dst, asked),))
    target = asked.dst / os.path.basename(os.path.abspath(src))
    _refuse_inside(target, src)
    if _kind_of(src) == "shards":
        return Listing((replace(asked, src=src, dst=target, kind="shards", is_folder=True),))
    return _of_tree(src, target, asked)


def _as_pattern(srcs: Sequence[Path]) -> Sequence[Path]:
    """Return a list with the pattern of `srcs` if all of them are rank files of one run in one folder.

    Otherwise return `srcs`.

    Raises UsageError if the folder contains more rank files of the run than `srcs`.
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


def _of_ranks(src: Path, asked: Request, *, to_folder: bool) -> Listing:
    """Return the one request that merges the rank files `src`, a folder or a pattern, into one checkpoint."""
    path, output = asked.dst, asked.output
    is_set = to_folder and output.writes_folder
    if not to_folder:
        format_of(path, output.format)
    elif not is_set:
        path = path / name_in_folder(Found(src, "ranks", ()), output.format)
    found = [each.path for each in find(src) if each.kind != "unentered"] if src.is_dir() else []
    zero = zero_names.files_of(src) if src.is_dir() and not rank_names.are_in(src) else None
    other = [
        each
        for each in found
        if not (zero.has(src, each) if zero else each.parent == src and rank_names.pattern_of(each.name))
    ]
    notes = _about_others(src, other, hint=False)
    return Listing((replace(asked, src=src, dst=path, kind="ranks", is_folder=is_set, notes=notes),))


def _of_tree(src: Path, path: Path, asked: Request) -> Listing:
    """Return the requests for everything in the folder `src`. The outputs are in the folder `path`.

    If `src` itself is a checkpoint, its output is in ``asked.dst``. A folder that directly contains a sharded set gives
    one request, which includes everything below it. Raises InputError if there is no checkpoint.
    """
    found = find(src)
    sets = {each.parts[0].parent for each in found if each.kind == "shards" and each.parts}
    outermost = {folder for folder in sets if not any(above in sets for above in folder.parents)}
    requests = [
        replace(asked, src=folder, dst=path / place_below(folder, src, path), kind="shards", is_folder=True)
        for folder in outermost
    ]
    other, unentered, inside = [], [], replace(asked, within=src)
    for each in found:
        if each.kind == "unentered":
            unentered.append(each.path)
        elif outermost and not outermost.isdisjoint((each.path, *each.path.parents)):
            continue
        elif each.kind == "other" and not asked.output.copy_others:
            other.append(each.path)
        else:
            folder = asked.dst if each.path == src else path / place_below(each.path, src, path).parent
            requests.append(_in_folder(each, folder, inside))
    if all(request.kind == "other" for request in requests):
        raise folder_error(src)
    requests.sort(key=lambda request: request.src.parts)
    return Listing(tuple(requests), True, tuple(other), tuple(unentered))


def _in_folder(found: Found, folder: Path, asked: Request) -> Request:
    """Return the request that converts or copies `found` to a path in `folder`."""
    is_set = found.kind == "shards" or (asked.output.writes_folder and found.kind != "other")
    dst = folder / name_in_folder(found, asked.output.format, is_folder=is_set)
    notes = _about_others(found.path, _beside(found.path, "dcp")) if found.kind == "dcp" and not is_set else ()
    return replace(asked, src=found.path, dst=dst, kind=found.kind, is_folder=is_set, notes=notes)


# Conflicts


def _refuse_inside(path: Path, folder: Path) -> None:
    """Raise UsageError if the output folder `path` is inside the input `folder`."""
    if _is_inside(path, folder):
        raise UsageError(
            "the output is a folder inside the input",
            where=path,
            hint="choose a folder outside of it, or the input itself",
        )


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether `path` is below `folder`, after all links are resolved. `path` need not exist."""
    return any(_is_same(each, folder) for each in Path(os.path.realpath(path)).parents)


def _refuse_among_parts(listing: Listing) -> None:
    """Raise UsageError if an output could be mistaken for one of the files of its input checkpoint.

    An output file with an unrelated name may be next to them.
    """
    for request in listing.requests:
        if request.kind not in ("dcp", "shards", "ranks"):
            continue
        folder = request.src if request.src.is_dir() else request.src.parent
        if not (_is_inside(request.dst, folder) or _is_same(request.dst, folder)):
            continue
        is_file = not (listing.is_batch or request.is_folder)
        is_beside = is_file and _is_same(request.dst.parent, folder)
        if is_part(folder / request.dst.name, request.kind) if is_beside else request.kind == "dcp" and not is_file:
            src = request.src if request.src.name.strip(".") else Path(os.path.abspath(request.src))
            raise UsageError(
                "the output would be among the files of the input",
                where=request.dst,
                expected="a path outside of it",
                hint=None if request.is_folder else command("convert", src, src.with_name(f"{src.name}.pt")),
            )


def _is_same(path: Path, other: Path) -> bool:
    """Return whether both paths lead to the same file, on systems that ignore the case of letters too."""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def _refuse_one_name(requests: Sequence[Request]) -> None:
    """Raise RefusedError if two of `requests` have the same output.

    It is raised also if an output is inside the output folder of another request.
    """
    refuse_one_place((request.dst, request.src) for request in requests)
    folders = {request.dst: request for request in requests if request.is_folder}
    for request in requests if folders else ():
        above = next((folders[parent] for parent in request.dst.parents if parent in folders), None)
        if above is not None:
            raise RefusedError(
                f"{request.src} would be written into the output folder of {above.src}",
                where=request.dst,
                hint="convert them to separate folders",
            )


def refuse_one_place(targets: Iterable[tuple[Path, Path]]) -> None:
    """Raise RefusedError if two of `targets` have the same output. Each item is a pair of an output and its input."""
    origin: dict[Path, Path] = {}
    spelled: dict[str, Path] = {}  # by the text without the case of its letters
    for path, src in targets:
        other = path if path in origin else spelled.setdefault(os.fspath(path).casefold(), path)
        if path in origin or (other != path and _ignores_case(path)):
            raise RefusedError(
                f"{origin[other]} and {src} would both be written to this path",
                where=path,
                hint="convert them to separate folders",
            )
        origin[path] = src


def _ignores_case(path: Path) -> bool:
    """Return whether the filesystem of `path` ignores the case of letters. `path` need not exist."""
    for folder in Path(os.path.abspath(path)).parents:
        with suppress(OSError), os.scandir(folder) as entries:
            for name in (entry.name for entry in entries if entry.name != entry.name.swapcase()):
                return _is_same(folder / name, folder / name.swapcase())
    return False


def through_link(src: Path, dst: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the path to write for `dst`, and notes. They differ from `dst` only if `dst` is the same link as `src`.

    Then the file that the link leads to is converted, and the link is kept. A link into the Hub's cache is itself
    replaced, because the name of the file in the cache is its checksum.
    """
    if not os.path.islink(dst) or os.path.abspath(src) != os.path.abspath(dst):
        return dst, ()
    real = Path(os.path.realpath(dst))
    if is_hub_blob(real):
        return dst, (f"{dst} was a link into the Hub's cache, where {real.name[:12]} is unchanged",)
    return real, (f"{dst} is a link: {real} is converted, and the link is kept",)
