"""Folders of torch.distributed.checkpoint (DCP): the checkpoint of several processes, read without any of them.

Layout: ``.metadata`` (:mod:`ckptconv.formats.distributed.metadata`) says what there is;
each process wrote files of its own:

    .metadata               written last, by one process
    __RANK_NUMBER.distcp    files of torch.save one behind another (:mod:`ckptconv.formats.torch_zip`): one for each
                            chunk of a tensor, one for each object that is no tensor

Source: ``torch/distributed/checkpoint/filesystem.py`` (``_write_item``) and
``_traverse.py`` (``set_element``) of torch 2.13.

What comes out is what ``dcp_to_torch_save`` of ``format_utils.py`` makes: nested dicts and lists as they were saved,
tensors whole and in row-major order, on the CPU. But where torch had put off to conjugate or negate a tensor, that
stays to be done, as in any other file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from math import prod
from operator import is_not
from pathlib import Path
from typing import TypeAlias

from ckptconv.byteranges.sources import Readable, SliceSource, SourceFolder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo, row_major
from ckptconv.errors import InputError, MalformedError, UnsupportedError, some
from ckptconv.errors import count as counted
from ckptconv.formats import torch_zip
from ckptconv.formats.distributed.chunk_files import ChunkFiles, in_file
from ckptconv.formats.distributed.chunks import Chunk, assembled, check_cover
from ckptconv.formats.distributed.metadata import ItemPath, Metadata, Stored, TensorItem, read_metadata
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import AT_ONCE, Dict, Effect, List, Object, Value, set_items, walk
from ckptconv.stores import first_bytes, list_folder

NAME = "DCP"
METADATA = ".metadata"
_OWN_METADATA = regex(r"__[0-9]+\.metadata")
_SUFFIX = ".distcp"
_HEAD, _TAIL = 1 << 10, 2 << 10  # bytes of a tensor's file before its storage, and behind it
_PICKLE = b"\x80"  # how a pickle begins: others give files that name, too
_COPY = "copy the whole folder: each process of the run wrote files of its own"

#: Nested dicts and lists with items in them; None: a place in a list that nothing belongs to.
_Tree: TypeAlias = "dict[str, _Tree] | list[_Tree | None] | _Leaf"


class _Leaf:
    """The item `name`, and what it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Value = None


@dataclass(frozen=True, eq=False)
class DcpFolder:
    """What the reader keeps for changes in place.

    Attributes:
        file: ``.metadata``.
        metadata: What that says.
        tree: Where the items stand, as in the checkpoint.
        devices: Those of the storages, by their keys.
        objects: What is done to objects that are stored in other files than ``.metadata``, and with which values.
    """

    file: Readable
    metadata: Metadata
    tree: dict[str, _Tree]
    devices: dict[str, str]
    objects: list[tuple[Effect, list[Value]]]


def looks_like(folder: SourceFolder) -> bool:
    """Whether `folder`, given as such, is one, or what is left of one."""
    if not folder.is_whole:
        return False
    _, names = list_folder(folder.folder)
    return any(name.endswith(_SUFFIX) for name in names) or (METADATA in names and looks_like_metadata(folder.folder))


def looks_like_metadata(folder: Path) -> bool:
    """Whether ``.metadata`` in `folder`, as others call a file too, is the one that stands beside parts: a pickle."""
    return first_bytes(folder / METADATA, 1) == _PICKLE


def read(
    folder: SourceFolder,
    read_file: Callable[[Readable], Checkpoint],  # noqa: ARG001 - its files are parts
) -> Checkpoint:
    """The checkpoint in `folder`.

    Raises MalformedError, UnsupportedError, LimitError, and InputError where a file cannot be read.
    """
    _, names = list_folder(folder.folder)
    if METADATA not in names:
        raise _without_metadata(folder, names)
    metadata = read_metadata(folder.open(METADATA))
    return _Reader(folder, metadata).checkpoint()


def _without_metadata(folder: SourceFolder, names: list[str]) -> InputError:
    """The error for a folder that has parts and nothing that says of what."""
    if any(map(_OWN_METADATA.fullmatch, names)):
        return UnsupportedError(
            "each process of the run wrote metadata of its own (use_collectives=False), so nothing says what the"
            " whole is",
            where=folder.path,
            hint="load it in a run of as many processes, and save it again with use_collectives",
        )
    return MalformedError(
        f"a checkpoint of torch.distributed.checkpoint without {METADATA}, which is written last: it was not saved to"
        " its end, or not copied whole",
        where=folder.path,
        hint=_COPY,
    )


class _Said(InputError):
    """What is wrong with an item was said before: for who collects faults, and goes on with the next."""


class _Reader:
    """Puts the items of one folder together."""

    def __init__(self, folder: SourceFolder, metadata: Metadata) -> None:
        self.folder = folder
        self.where = folder.folder / METADATA
        self.metadata = metadata
        self.left = {key: place for key, place in metadata.stored.items() if key[0] not in metadata.unread}
        self.gone: set[str] = set()  # files that are not there, or not whole
        self.empty: list[LeftBehind] = []  # of files, bytes that belong to nothing
        self.merger = Merger(folder)
        self.chunk_files = ChunkFiles()
        self.keys = map(str, count())

    def checkpoint(self) -> Checkpoint:
        """All of it."""
        self.check_files()
        for name, item in self.metadata.items.items():
            with self.folder.faults:
                if item is not None:
                    check_cover(self.where, name, item.shape, item.chunks)
        nest = _Nest(str(self.where))
        for name in self.metadata.items:
            nest.add(name, self.metadata.paths.get(name, (name,)))
        for leaf in nest.leaves():  # in the order in which they are written
            item = self.metadata.items[leaf.name]
            try:
                leaf.value = self.object(leaf.name) if item is None else self.tensor(leaf.name, item)
            except InputError as error:
                self.found(error)
        stored = [leaf.value for leaf in nest.leaves() if self.metadata.items[leaf.name] is None]
        kept = [effect for node in walk(stored) if isinstance(node, Object) for effect in node.effects]
        container = DcpFolder(
            self.folder.open(METADATA), self.metadata, nest.root, {}, [(effect, [*effect.values]) for effect in kept]
        )
        checkpoint = self.merger.checkpoint(NAME, nest.value(), container)
        container.devices.update((key, storage.device) for key, storage in checkpoint.storages.items())
        checkpoint.unused += (
            LeftBehind(name, place.length, f"{METADATA} describes no such part")
            for (name, _), place in self.left.items()
        )
        checkpoint.unused += self.empty
        if nest.holes:
            checkpoint.notes.append(
                f"{counted(nest.holes, 'place')} in lists with nothing saved for them (an empty dict or list): None"
                " stands there"
            )
        return checkpoint

    def found(self, error: InputError) -> None:
        """`error`, unless it was said before."""
        if not isinstance(error, _Said):
            self.folder.faults.found(error)

    def check_files(self) -> None:
        """It is a fault where files are missing or too short."""
        places: dict[str, list[tuple[int, int]]] = {}
        for place in self.metadata.stored.values():
            places.setdefault(place.file, []).append((place.offset, place.offset + place.length))
        links = {file for file in places if os.path.islink(self.folder.folder / file)}  # which opening says more of
        missing = self.folder.missing(places.keys() - links)
        if missing:
            self.found(
                MalformedError(
                    f"{counted(len(missing), 'file')} of {len(places):,} {'is' if len(missing) == 1 else 'are'}"
                    " missing",
                    where=self.folder.path,
                    got=f"no {some(sorted(missing))}",
                    hint=_COPY,
                )
            )
        self.gone.update(missing)
        for file in sorted(places.keys() - self.gone):
            try:
                self.check_size(file, sorted(places[file]))
                self.folder.open(file).prefetch(each for place in places[file] for each in _ends(*place))
            except InputError as error:
                self.found(error)
                self.gone.add(file)

    def check_size(self, name: str, places: list[tuple[int, int]]) -> None:
        """Raise InputError where the file `name` cannot be opened, or ends before the last of `places`, from and to
        which bytes something is stored in it; note in how many bytes nothing is.
        """
        covered = end = 0
        for start, stop in places:
            covered += max(stop - max(start, end), 0)
            end = max(end, stop)
        size = self.folder.open(name).size
        if size > covered:
            self.empty.append(LeftBehind(name, size - covered, "nothing is stored in that much of it"))
        if size < end:
            raise MalformedError(
                f"the file was truncated: {counted(end - size, 'byte')} missing",
                where=self.folder.folder / name,
                expected=f"at least {end:,} bytes",
                got=f"{size:,}",
                hint="copy it again",
            )

    def window(self, name: str, offsets: tuple[int, ...] | None) -> SliceSource:
        """Where the chunk of `name` at `offsets` is stored, or the object `name`."""
        place: Stored | None = self.left.pop((name, offsets), None)
        if place is None:
            raise MalformedError(
                f"{name!r} is stored nowhere",
                where=self.where,
                got=None if offsets is None else f"the chunk at {offsets}",
            )
        if place.file in self.gone:
            raise _Said("its file is not there, or not whole")
        return SliceSource(self.folder.open(place.file), place.offset, place.length)

    def object(self, name: str) -> Value:
        """What is no tensor: whatever ``torch.save`` takes."""
        window = self.window(name, None)
        with _about(name, window):
            part = torch_zip.read_inner(window)
        for storage in part.storages.values():
            storage.data = in_file(storage.data, window)
        return self.merger.take(part, in_order=True)

    def tensor(self, name: str, item: TensorItem) -> Value:
        """A tensor, of all its chunks."""
        placements = []
        is_whole = True
        put_off = None
        for chunk in dict.fromkeys(item.chunks):
            if not prod(chunk.sizes):
                self.left.pop((name, chunk.offsets), None)
                continue
            try:
                placement, info = self.placement(name, item, chunk)
            except InputError as error:
                self.found(error)
                is_whole = False
                continue
            placements.append(placement)
            if put_off not in (None, (info.conj, info.neg)):
                raise UnsupportedError(
                    f"some chunks of {name!r} are still to be conjugated or negated, and others are not",
                    where=self.where,
                    hint="save it again, of tensors that were resolved: tensor.resolve_conj().resolve_neg()",
                )
            put_off = info.conj, info.neg
        if not is_whole:
            raise _Said("not all of its chunks can be read")
        data = assembled(item.shape, item.dtype.itemsize, placements, self.folder.path)
        key = next(self.keys)
        self.merger.records[key] = data
        return self.merger.calls.tensor(item.dtype, item.shape, key, data.length, *(put_off or ()))

    def placement(self, name: str, item: TensorItem, chunk: Chunk) -> tuple[ChunkPlacement, TensorInfo]:
        """`chunk` of the tensor `name`, which must be what the metadata says, and no more; and what its file says."""
        window = self.window(name, chunk.offsets)
        with _about(name, window):
            file = self.chunk_files.read(window)
        info, of = file.info, file.data
        if info is None or of is None or info.kind != "strided":
            raise UnsupportedError(
                f"a chunk of {name!r} is no plain tensor",
                where=_where(window),
                got=info.kind if info else None,
                hint="load it with the framework that wrote it, and save plain tensors",
            )
        if (info.dtype, info.shape) != (item.dtype.name, chunk.sizes):
            raise MalformedError(
                f"a chunk of {name!r} is not what {METADATA} says",
                where=_where(window),
                expected=f"{item.dtype.name} of shape {chunk.sizes}",
                got=f"{info.dtype} of shape {info.shape}",
            )
        if not isinstance(of, ByteRange) or not _fills(info) or not file.is_little_endian:
            raise UnsupportedError(
                f"a chunk of {name!r} is stored in a way that torch.distributed.checkpoint does not have",
                where=_where(window),
                expected="all of a storage, little-endian and not compressed",
            )
        return (
            ChunkPlacement(of, chunk.offsets, chunk.sizes, row_major(chunk.sizes) if info.contiguous else info.stride),
            info,
        )


def _ends(start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is read of a file from `start` to `stop` to know what is in it."""
    return (start, min(start + _HEAD, stop)), (max(stop - _TAIL, start), stop)


def _where(window: SliceSource) -> str:
    return f"{window.path} at byte {window.offset:,}"


@contextmanager
def _about(name: str, window: SliceSource) -> Iterator[None]:
    """Errors meanwhile are about the item `name`, in `window`."""
    part = f"{name!r}, stored at byte {window.offset:,}"
    window.faults = window.faults.about(part)
    try:
        yield
    except InputError as error:
        error.what = f"{part}: " + error.what
        raise


def _fills(info: TensorInfo) -> bool:
    """Whether `info` shows each byte of its storage once."""
    steps = sorted((step, size) for size, step in zip(info.shape, info.stride, strict=True) if size > 1)
    expected = 1
    for step, size in steps:
        if step != expected:
            return False
        expected *= size
    return info.storage is not None and info.offset == 0 and info.storage.nbytes == info.nbytes


def new_paths(folder: DcpFolder, root: Value) -> dict[str, ItemPath] | None:
    """Where each item stands in `root`, whose names were edited; None where what is stored elsewhere has changed."""
    if any(len(old) != len(effect.values) or any(map(is_not, old, effect.values)) for effect, old in folder.objects):
        return None
    paths: dict[str, ItemPath] = {}
    todo: list[tuple[_Tree | None, Value, ItemPath]] = [(folder.tree, root, ())]
    while todo:
        at, node, path = todo.pop()
        if isinstance(at, _Leaf):
            if at.value is not node:
                return None
            paths[at.name] = path
        elif isinstance(at, dict) and isinstance(node, Dict):
            for inner, (effect, i) in zip(at.values(), node.pairs(), strict=True):
                key = effect.values[i]
                assert isinstance(key, str)
                todo.append((inner, effect.values[i + 1], (*path, key)))
        elif isinstance(at, list) and isinstance(node, List):
            todo += (
                (inner, value, (*path, i)) for i, (inner, value) in enumerate(zip(at, node.elements(), strict=True))
            )
    return paths


# Nested dicts and lists


class _Nest:
    """Puts items where they belong in nested dicts and lists, as torch's ``set_element`` does."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.root: dict[str, _Tree] = {}
        self.holes = 0  # places in lists that nothing belongs to, so far

    def add(self, name: str, path: ItemPath) -> None:
        """Put the item `name` at `path`. Raises MalformedError where it cannot stand there."""
        at: _Tree = self.root
        for key, following in pairwise(path):
            inner = self.get(at, key, name)
            at = self.put(at, key, {} if isinstance(following, str) else [], name) if inner is None else inner
        self.put(at, path[-1], _Leaf(name), name)

    def get(self, at: _Tree, key: str | int, name: str) -> _Tree | None:
        """What stands at `key` in `at`."""
        if isinstance(at, dict) and isinstance(key, str):
            return at.get(key)
        if isinstance(at, list) and isinstance(key, int):
            return at[key] if key < len(at) else None
        raise self.clash(name)

    def put(self, at: _Tree, key: str | int, value: _Tree, name: str) -> _Tree:
        """`value`, put at `key` in `at`, where nothing may stand."""
        if self.get(at, key, name) is not None:
            raise self.clash(name)
        if isinstance(at, list) and isinstance(key, int):
            self.holes += key - len(at) if key >= len(at) else -1
            if self.holes > LIMITS.list_holes:
                raise MalformedError(
                    "a list has too many places that nothing belongs to",
                    where=self.where,
                    expected=f"at most {LIMITS.list_holes:,}",
                    got=f"index {key} of {name!r}",
                )
            at += [None] * (key + 1 - len(at))
            at[key] = value
        elif isinstance(at, dict) and isinstance(key, str):
            at[key] = value
        return value

    def clash(self, name: str) -> MalformedError:
        return MalformedError(
            f"{name!r} and another item cannot both stand where planner_data puts them", where=self.where
        )

    def leaves(self) -> Iterator[_Leaf]:
        """The items, in the order in which they stand."""
        todo: list[_Tree | None] = [self.root]
        while todo:
            at = todo.pop()
            if isinstance(at, _Leaf):
                yield at
            elif at is not None:
                todo += [*(at.values() if isinstance(at, dict) else at)][::-1]

    def value(self) -> Value:
        """The graph of all of it."""
        nodes: dict[int, Dict | List] = {}

        def node_of(at: _Tree | None) -> Value:
            if at is None:
                return None
            if isinstance(at, _Leaf):
                return at.value
            if id(at) not in nodes:
                nodes[id(at)] = Dict() if isinstance(at, dict) else List()
                todo.append(at)
            return nodes[id(at)]

        todo: list[dict[str, _Tree] | list[_Tree | None]] = []
        root = node_of(self.root)
        for at in todo:  # which grows
            node = nodes[id(at)]
            if isinstance(at, dict):
                set_items(node, [each for key, inner in at.items() for each in (key, node_of(inner))])
            else:
                for start in range(0, len(at), AT_ONCE):
                    node.add(Effect("APPENDS", [node_of(inner) for inner in at[start : start + AT_ONCE]], None))
        return root
