"""Folders of torch.distributed.checkpoint (DCP): the checkpoint of several processes, read in one process.

Layout: ``.metadata`` (:mod:`ckptconv.formats.distributed.metadata`) lists the items. Each process wrote its own files:

    .metadata               written last, by one process
    __RANK_NUMBER.distcp    files of torch.save one after another (:mod:`ckptconv.formats.torch_zip`): one for each
                            chunk of a tensor, one for each object that is not a tensor

Source: ``torch/distributed/checkpoint/filesystem.py`` (``_write_item``) and ``_traverse.py`` (``set_element``) of torch
2.13.

The result equals that of ``dcp_to_torch_save`` in ``format_utils.py``: nested dicts and lists as they were saved, and
complete tensors in row-major order, on the CPU. One thing differs: a lazy conjugation or negation is not resolved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import zip_longest
from math import prod
from operator import is_not
from pathlib import Path
from typing import TypeVar

from ckptconv.byteranges.sources import Readable, SliceSource, SourceFolder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.blocks import assembled
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo, row_major
from ckptconv.errors import InputError, MalformedError, UnsupportedError, count, some
from ckptconv.formats import torch_zip
from ckptconv.formats.distributed import megatron
from ckptconv.formats.distributed.chunk_files import ChunkFiles, in_file, where_of
from ckptconv.formats.distributed.chunks import Chunk, check_cover, is_apart
from ckptconv.formats.distributed.metadata import ItemPath, Metadata, TensorItem, read_metadata
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Dict, Effect, List, Object, Value, add_elements, set_items, walk
from ckptconv.stores import first_bytes, list_folder

NAME = "DCP"
METADATA = ".metadata"
_OWN_METADATA = regex(r"__[0-9]+\.metadata")
_OF_RANK = regex(r"__[0-9]+_[0-9]+\.distcp")
_SUFFIX = ".distcp"
_HEAD, _TAIL = 1 << 10, 2 << 10  # bytes of a tensor's file before its storage, and after it
_T = TypeVar("_T")
_COPY = "copy the whole folder: each process of the run wrote files of its own"


class _Leaf:
    """An item in the tree of names: its `name`, and its value after it was read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Value = None


class _Branch(dict["str | int", "_Branch | _Leaf"]):
    """A dict or list in the tree of names. It is a list if `kind`, the type of its keys, is int.

    A list has `length` elements. Those without a key here belong to no item.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.length = 0


@dataclass(frozen=True, eq=False)
class DcpFolder:
    """The container of a DCP checkpoint. Changes in place need it.

    Attributes:
        file: ``.metadata``.
        metadata: The content of that file.
        tree: The items, nested as in the checkpoint.
        devices: The devices of the storages, by their keys.
        objects: The effects on objects that are stored in other files than ``.metadata``, and the values of these
            effects as they were read.
    """

    file: Readable
    metadata: Metadata
    tree: _Branch
    devices: dict[str, str]
    objects: list[tuple[Effect, list[Value]]]


def looks_like(folder: SourceFolder) -> bool:
    """Return whether `folder` is a DCP checkpoint: it contains ``.distcp`` files, or a ``.metadata`` that is a pickle.

    False if the user gave an index or a pattern instead of the folder.
    """
    if not folder.is_whole:
        return False
    _, names = list_folder(folder.folder)
    return any(name.endswith(_SUFFIX) for name in names) or (METADATA in names and looks_like_metadata(folder.folder))


def is_own_file(name: str) -> bool:
    """Return whether torch.distributed.checkpoint writes files called `name`."""
    return name == METADATA or bool(_OF_RANK.fullmatch(name))


def looks_like_metadata(folder: Path) -> bool:
    """Return whether ``.metadata`` in `folder` starts like a pickle. Other programs have files of that name too."""
    return first_bytes(folder / METADATA, 1) == b"\x80"


def read(folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint:
    """Return the checkpoint in `folder`. `read_file` reads a separate file of Megatron-Core.

    Raises MalformedError if ``.metadata`` is missing or damaged, UnsupportedError if it describes something unknown,
    LimitError, and InputError if a file cannot be read.
    """
    _, names = list_folder(folder.folder)
    if METADATA in names:
        metadata = read_metadata(folder.open(METADATA))
        return _Reader(folder, metadata, read_file, megatron.files_in(folder.folder, names)).checkpoint()
    if any(map(_OWN_METADATA.fullmatch, names)):
        raise UnsupportedError(
            "each process of the run wrote its own metadata (use_collectives=False), so the whole is not described",
            where=folder.path,
            hint="load it in a run of as many processes, and save it again with use_collectives",
        )
    raise MalformedError(
        f"a checkpoint of torch.distributed.checkpoint without {METADATA}, which is written last: the save or the"
        " copy is incomplete",
        where=folder.path,
        hint=_COPY,
    )


class _Reported(InputError):
    """The error for an item that depends on a fault which was reported before."""


class _Reader:
    """The reader of one folder, which puts its items together.

    `read_file` reads the files `of_megatron`, which Megatron-Core writes next to the items. There may be none.
    """

    def __init__(
        self,
        folder: SourceFolder,
        metadata: Metadata,
        read_file: Callable[[Readable], Checkpoint],
        of_megatron: list[str],
    ) -> None:
        self.folder = folder
        self.where = folder.folder / METADATA
        self.read_file = read_file
        self.of_megatron = of_megatron
        self.empty: list[LeftBehind] = []
        if of_megatron:
            metadata, self.empty = megatron.nested(metadata, of_megatron, self.where)
        self.metadata = metadata
        self.left_out = len(self.empty)
        self.left = {key: place for key, place in metadata.stored.items() if key[0] not in metadata.unread}
        self.gone: set[str] = set()  # files that are missing or too short
        self.merger = Merger(folder)
        self.chunk_files = ChunkFiles()
        self.strides: dict[tuple[object, ...], tuple[int, ...]] = {}  # of chunks that were checked

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint with all items. An item that cannot be read is reported as a fault and left out."""
        self.check_files()
        covered: set[int] = set()  # most tensors have the shape and the chunks of others
        for name, item in self.metadata.items.items():
            if item is None or id(item) in covered:
                continue
            with self.folder.faults:
                check_cover(self.where, name, item.shape, item.chunks)
                covered.add(id(item))
        nest = _Nest(str(self.where))
        for name in self.metadata.items:
            nest.add(name, self.metadata.paths.get(name, (name,)))
        objects: list[Value] = []
        for leaf in nest.leaves():  # in the order in which they are written
            item = self.metadata.items[leaf.name]
            try:
                leaf.value = self.object(leaf.name) if item is None else self.tensor(leaf.name, item)
            except InputError as error:
                self.report(error)
            if item is None:
                objects.append(leaf.value)
        common = nest.root.get("common")
        if self.of_megatron and isinstance(common, _Leaf):
            common.value = megatron.common_of(common.value)
        effects = [effect for node in walk(objects) if isinstance(node, Object) for effect in node.effects]
        container = DcpFolder(
            self.folder.open(METADATA), self.metadata, nest.root, {}, [(effect, [*effect.values]) for effect in effects]
        )
        checkpoint = self.merger.checkpoint(NAME, nest.value(), container)
        container.devices.update((key, storage.device) for key, storage in checkpoint.storages.items())
        checkpoint.unused += (
            LeftBehind(name, place.length, f"{METADATA} does not describe such a part")
            for (name, _), place in self.left.items()
        )
        checkpoint.unused += self.empty
        if nest.holes:
            checkpoint.notes.append(
                f"{count(nest.holes, 'list element')} without a saved value (an empty dict or list): None is used"
            )
        if self.of_megatron:
            value = common.value if isinstance(common, _Leaf) else None
            checkpoint.notes += megatron.notes_on(self.folder.path, value, self.metadata.items, self.left_out)
        return checkpoint

    def report(self, error: InputError) -> None:
        """Pass `error` to the fault sink, unless its cause was reported before."""
        if not isinstance(error, _Reported):
            self.folder.faults.found(error)

    def check_files(self) -> None:
        """Report a fault for files that are missing or too short, and remember them in `gone`."""
        places: dict[str, list[tuple[int, int]]] = {}
        for place in self.metadata.stored.values():
            places.setdefault(place.file, []).append((place.offset, place.offset + place.length))
        links = {file for file in places if os.path.islink(self.folder.folder / file)}  # opened later, for the error
        missing = self.folder.missing(places.keys() - links)
        if missing:
            self.report(
                MalformedError(
                    f"{count(len(missing), 'file')} of {len(places):,} {'is' if len(missing) == 1 else 'are'} missing",
                    where=self.folder.path,
                    got=f"no {some(sorted(missing))}",
                    hint=_COPY,
                )
            )
        self.gone.update(missing)
        for file in sorted(places.keys() - self.gone):
            try:
                self.check_file(file, sorted(places[file]))
            except InputError as error:
                self.report(error)
                self.gone.add(file)

    def check_file(self, name: str, ranges: list[tuple[int, int]]) -> None:
        """Check the size of the file `name`, and prefetch the ends of its `ranges`, sorted pairs of start and stop.

        Bytes outside of the ranges are listed as left behind. Raises InputError if the file cannot be opened, or ends
        before the last range.
        """
        covered = end = 0
        for start, stop in ranges:
            covered += max(stop - max(start, end), 0)
            end = max(end, stop)
        source = self.folder.open(name)
        if source.size > covered:
            self.empty.append(LeftBehind(name, source.size - covered, "nothing is stored there"))
        if source.size < end:
            raise MalformedError(
                f"the file was truncated: {count(end - source.size, 'byte')} missing",
                where=self.folder.folder / name,
                expected=f"at least {end:,} bytes",
                got=f"{source.size:,}",
                hint="copy it again",
            )
        source.prefetch(
            part
            for start, stop in ranges
            for part in ((start, min(start + _HEAD, stop)), (max(stop - _TAIL, start), stop))
        )

    def window(self, name: str, offsets: tuple[int, ...] | None) -> SliceSource:
        """Return the bytes of a chunk of the tensor `name` at `offsets`.

        If `offsets` is None, return those of the object `name`. Raises MalformedError if the metadata gives no
        position, and an already reported error if the file is missing.
        """
        place = self.left.pop((name, offsets), None)
        if place is None:
            raise MalformedError(
                f"{name!r} is not stored in any file",
                where=self.where,
                got=None if offsets is None else f"the chunk at {offsets}",
            )
        if place.file in self.gone:
            raise _Reported("its file is missing or incomplete")
        return SliceSource(self.folder.open(place.file), place.offset, place.length)

    def object(self, name: str) -> Value:
        """Return the object `name`, which is not a tensor. It can be anything that ``torch.save`` takes."""
        if name == megatron.COMMON and name in self.of_megatron:
            return self.merger.take(self.read_file(self.folder.open(name)), in_order=True)
        window = self.window(name, None)
        part = _read_about(name, window, torch_zip.read_inner)
        for storage in part.storages.values():
            storage.data = in_file(storage.data, window)
        return self.merger.take(part, in_order=True)

    def tensor(self, name: str, item: TensorItem) -> Value:
        """Return a call that rebuilds the tensor `name` from all its chunks.

        Raises InputError if a chunk cannot be read, and UnsupportedError if only some chunks are lazily conjugated or
        negated.
        """
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
                self.report(error)
                is_whole = False
                continue
            placements.append(placement)
            if put_off not in (None, (info.conj, info.neg)):
                raise UnsupportedError(
                    f"some chunks of {name!r} are still to be conjugated or negated, and others are not",
                    where=self.where,
                    hint="save it again with resolved tensors: tensor.resolve_conj().resolve_neg()",
                )
            put_off = info.conj, info.neg
        if not is_whole:
            raise _Reported("not all of its chunks can be read")
        data = assembled(item.shape, item.dtype.itemsize, placements, self.folder.path)
        return self.merger.tensor(item.dtype, item.shape, data, "cpu", *(put_off or ()))

    def placement(self, name: str, item: TensorItem, chunk: Chunk) -> tuple[ChunkPlacement, TensorInfo]:
        """Return the position of the bytes of `chunk`, and the tensor that the chunk's file describes.

        Raises MalformedError if that tensor does not match `item`, UnsupportedError if it is not a plain strided tensor
        that fills its storage, and InputError if the file cannot be read. `name` is for errors.
        """
        window = self.window(name, chunk.offsets)
        file = _read_about(name, window, self.chunk_files.read)
        info, data = file.info, file.data
        known = (info, item.dtype.name, chunk.sizes, file.is_little_endian)
        if info and isinstance(data, ByteRange) and known in self.strides:  # files that are alike have one info
            return ChunkPlacement(data, chunk.offsets, chunk.sizes, self.strides[known]), info
        if info is None or data is None or info.kind != "strided":
            raise UnsupportedError(
                f"a chunk of {name!r} is not a plain tensor",
                where=where_of(window),
                got=info.kind if info else None,
                hint="load it with the framework that wrote it, and save plain tensors",
            )
        if (info.dtype, info.shape) != (item.dtype.name, chunk.sizes):
            raise MalformedError(
                f"a chunk of {name!r} does not match {METADATA}",
                where=where_of(window),
                expected=f"{item.dtype.name} of shape {chunk.sizes}",
                got=f"{info.dtype} of shape {info.shape}",
            )
        fills_storage = info.storage and info.storage.nbytes == info.nbytes and info.offset == 0 and is_apart(info)
        if not isinstance(data, ByteRange) or not fills_storage or not file.is_little_endian:
            raise UnsupportedError(
                f"a chunk of {name!r} is stored in a way that torch.distributed.checkpoint does not use",
                where=where_of(window),
                expected="all of a storage, little-endian and not compressed",
            )
        self.strides[known] = stride = row_major(chunk.sizes) if info.contiguous else info.stride
        return ChunkPlacement(data, chunk.offsets, chunk.sizes, stride), info


def _read_about(name: str, window: SliceSource, read: Callable[[SliceSource], _T]) -> _T:
    """Return ``read(window)``. Make errors and faults name the item `name` and its position."""
    part = f"{name!r}, stored at byte {window.offset:,}"
    window.faults = window.faults.about(part)
    try:
        return read(window)
    except InputError as error:
        error.what = f"{part}: " + error.what
        raise


def new_paths(folder: DcpFolder, root: Value) -> dict[str, ItemPath] | None:
    """Return the path of each item in `root`, whose keys were edited, by the item's old name.

    Return None if anything but keys changed, because the rest is not stored in ``.metadata``.
    """
    if any(len(old) != len(effect.values) or any(map(is_not, old, effect.values)) for effect, old in folder.objects):
        return None
    paths: dict[str, ItemPath] = {}
    todo: list[tuple[_Branch | _Leaf | None, Value, ItemPath]] = [(folder.tree, root, ())]
    while todo:
        at, node, path = todo.pop()
        if isinstance(at, _Leaf):
            if at.value is not node:
                return None
            paths[at.name] = path
        elif isinstance(at, _Branch) and isinstance(node, Dict):
            for inner, (effect, i) in zip(at.values(), node.pairs(), strict=True):
                key = effect.values[i]
                assert isinstance(key, str)
                todo.append((inner, effect.values[i + 1], (*path, key)))
        elif isinstance(at, _Branch) and isinstance(node, List):
            todo += ((at.get(i), value, (*path, i)) for i, value in enumerate(node.elements()))
    return paths


class _Nest:
    """A builder of nested dicts and lists from the paths of items, as torch's ``set_element`` builds them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.root = _Branch(str)
        self.holes = 0  # the number of list elements without an item, so far

    def add(self, name: str, path: ItemPath) -> None:
        """Add the item `name` at `path`.

        Raises MalformedError if another item needs the same place for something else.
        """
        at: _Branch | _Leaf = self.root
        for key, following in zip_longest(path, path[1:]):
            is_free = isinstance(at, _Branch) and isinstance(key, at.kind) and (following is not None or key not in at)
            if not isinstance(at, _Branch) or not is_free:
                raise MalformedError(f"{name!r} and another item have the same path in planner_data", where=self.where)
            if key not in at:
                self.put(at, key, _Leaf(name) if following is None else _Branch(type(following)), name)
            at = at[key]

    def put(self, at: _Branch, key: str | int, value: _Branch | _Leaf, name: str) -> None:
        """Set the free `key` of `at` to `value`, which is or contains the item `name`.

        Raises MalformedError if lists have too many elements without an item.
        """
        if isinstance(key, int):
            self.holes += max(key + 1 - at.length, 0) - 1
            if self.holes > LIMITS.list_holes:
                raise MalformedError(
                    "a list has too many places without a value",
                    where=self.where,
                    expected=f"at most {LIMITS.list_holes:,}",
                    got=f"index {key} of {name!r}",
                )
            at.length = max(at.length, key + 1)
        at[key] = value

    def leaves(self) -> Iterator[_Leaf]:
        """Yield the items in the order of the nested structure."""
        todo: list[_Branch | _Leaf] = [self.root]
        while todo:
            at = todo.pop()
            if isinstance(at, _Leaf):
                yield at
            else:
                todo += [at[key] for key in (sorted(at) if at.kind is int else at)][::-1]

    def value(self) -> Value:
        """Return the nested structure as a graph of Dict and List nodes. List elements without an item are None."""
        nodes: dict[int, Dict | List] = {}
        todo: list[_Branch] = []

        def node_of(at: _Branch | _Leaf | None) -> Value:
            if not isinstance(at, _Branch):
                return at.value if at else None
            todo.append(at)
            nodes[id(at)] = List() if at.kind is int else Dict()
            return nodes[id(at)]

        root = node_of(self.root)
        for at in todo:  # grows meanwhile
            node = nodes[id(at)]
            if at.kind is int:
                add_elements(node, [node_of(at.get(i)) for i in range(at.length)])
            else:
                set_items(node, [word for key, inner in at.items() for word in (key, node_of(inner))])
        return root
