"""Lay out a checkpoint as shards and their index: the shards that it came in, or new ones by size.

A tie is recorded in its shard, as in any safetensors file, and in the index, where huggingface_hub's
``save_torch_state_dict`` has it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.spans import Literal, OutFile
from ckptconv.checkpoint.merging import split
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import is_word
from ckptconv.checkpoint.tensor_info import LeftBehind, left_behind_at
from ckptconv.errors import ArgumentTypeError, RefusedError, UsageError, count, some
from ckptconv.formats.distributed.rank_names import about_one
from ckptconv.formats.layout import Layout
from ckptconv.formats.safetensors_header import is_text
from ckptconv.formats.sharded.index import (
    TOTAL_SIZE,
    ShardedContainer,
    index_bytes,
    index_name,
    of_other_suffix,
    renumbered,
    stem_for,
)
from ckptconv.formats.sharded.reading import FORMAT_KEY, names_of
from ckptconv.formats.writers import Writer, words
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Dict, Global, Node, Object, Value, children, set_items
from ckptconv.pickles.paths import is_item, is_repeated

_SHOWN = 5  # names in an error
_TOTAL_PARAMETERS = "total_parameters"  # transformers' count, which leaves out buffers
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = regex(r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>[KMGT]B)?\s*", re.IGNORECASE)
_EXAMPLES = "5GB, 500MB or a number of bytes"


class _File(NamedTuple):
    """A file to be laid out: its name, its root, the part that it stays, if it does,
    and the texts for its own metadata.
    """

    name: str
    root: Object
    like: Checkpoint | None
    metadata: dict[str, str]


@dataclass(frozen=True)
class _Set:
    """The files of a set, the name of its index, if it has one, what that says beside
    sizes and places, and what to say of all.
    """

    files: list[_File]
    index: str | None
    metadata: dict[str, Any]
    left_behind: list[LeftBehind]
    notes: tuple[str, ...] = ()


def layout(
    checkpoint: Checkpoint,
    folder: Path,
    writer: Writer,
    *,
    copy_tied: bool = False,
    max_shard_size: int | str | None = None,
) -> Layout:
    """The files that `checkpoint`, edited, becomes in `folder`, the index last: the shards that it has, or shards of at
    most `max_shard_size`. Raises UsageError, RefusedError.
    """
    if not writer.shards:
        raise UsageError(
            option("format", writer.word) + " writes one file, and no shards", where=folder, expected=words("shards")
        )
    partial = [path for path, info in checkpoint.tensors.items() if info.kind == "partial"]
    if partial:
        raise RefusedError(
            f"one process's part of a tensor is no shard: {some(partial, _SHOWN)}",
            where=checkpoint.source.path,
            hint=about_one(checkpoint.source.path),
        )
    container = checkpoint.container if isinstance(checkpoint.container, ShardedContainer) else None
    if max_shard_size is not None:
        planned = _dealt(checkpoint, container, writer, max_shard_size, copy_tied=copy_tied)
    elif container and checkpoint.graph.root is container.root:
        planned = _as_it_was(checkpoint, container, writer)
    else:
        raise UsageError(
            "what is to be written is not in shards, and a folder is the output",
            where=folder,
            hint="a path with a suffix, such as out.pt, is one file",
        )
    return _SetWriter(checkpoint, folder, writer, copy_tied).layout(planned)


def _as_it_was(checkpoint: Checkpoint, container: ShardedContainer, writer: Writer) -> _Set:
    """Each shard, without what the edits took out of it; those that are empty then are left out."""
    kept = {id(effect) for effect in container.root.effects}
    for shard in container.shards:
        shard.root.effects = [effect for effect in shard.root.effects if id(effect) in kept]
    shards = [shard for shard in container.shards if any(shard.root.pairs())]
    names = [shard.name for shard in shards]
    index, metadata = container.index, dict(container.metadata)
    if writer.objects is container.shards[0].part.is_state_dict:  # of another format than they were
        names = [of_other_suffix(name, writer.shard_suffix) for name in names]
        index = of_other_suffix(index, writer.shard_suffix)
    texts = [shard.part.metadata for shard in shards]
    if writer.texts:  # each keeps its own
        checkpoint.unused = [each for each in checkpoint.unused if each not in container.contradictions]
    else:
        texts = [{} for _ in shards]
        metadata = {key: text for key, text in checkpoint.metadata.items() if key != FORMAT_KEY} | metadata
    if len(shards) < len(container.shards):
        names = renumbered(names)
    if len({*names, index}) <= len(names):
        raise RefusedError(
            f"two shards would have one name: {some(names, _SHOWN)}",
            where=checkpoint.source.path,
        )
    left = _uncounted(checkpoint, container, metadata)
    files = [_File(name, shard.root, shard.part, own) for name, shard, own in zip(names, shards, texts, strict=True)]
    return _Set(files, index, metadata, left)


def _uncounted(checkpoint: Checkpoint, container: ShardedContainer, metadata: dict[str, Any]) -> list[LeftBehind]:
    """Take out of `metadata` what would be false by now; what that is."""
    root = checkpoint.graph.root
    if _TOTAL_PARAMETERS not in metadata or (isinstance(root, Object) and len(names_of(root)) == container.names):
        return []
    del metadata[_TOTAL_PARAMETERS]
    return [LeftBehind(f"{container.index}/metadata/{_TOTAL_PARAMETERS}", 0, "tensors were left out, so it is false")]


def _dealt(
    checkpoint: Checkpoint,
    container: ShardedContainer | None,
    writer: Writer,
    max_shard_size: int | str,
    *,
    copy_tied: bool,
) -> _Set:
    """The names of `checkpoint` dealt anew, by size."""
    items, left = _items_of(checkpoint)
    weights: dict[str, Weight]
    if writer.views:
        weights = weights_of_storages(checkpoint, items)
    else:
        weights = weights_of_tensors(checkpoint, items, copy_tied=copy_tied)
    if not weights:
        raise RefusedError("there is no tensor to put into shards", where=checkpoint.source.path)
    stem = stem_for(container.index if container else checkpoint.source.path.name, writer.shard_suffix)
    dealt = deal(weights, max_shard_size, stem, writer.shard_suffix)
    others = {name for name in items if name not in weights}
    texts = dict(checkpoint.metadata)
    metadata = {**(container.metadata if container else {}), **texts}
    left += _uncounted(checkpoint, container, metadata) if container else []
    files = []
    for i, (file, names) in enumerate(dealt.files):
        mine = {*names, *others} if i == 0 else {*names}
        root = set_items(Dict(), [word for name, value in items.items() if name in mine for word in (name, value)])
        own = {key: text for key, text in texts.items() if key == FORMAT_KEY} if dealt.index else texts
        files.append(_File(file, root, None, own))
    if dealt.index is None:
        left += [
            LeftBehind(f"{container.index}/metadata/{key}", 0, "one file has no index")
            for key, value in metadata.items()
            if container and not isinstance(value, str) and key not in (TOTAL_SIZE, _TOTAL_PARAMETERS)
        ]
    metadata.pop(FORMAT_KEY, None)
    notes = (_about_size(dealt.too_large, max_shard_size),) if dealt.too_large else ()
    return _Set(files, dealt.index, metadata, left, notes)


def _about_size(too_large: int, max_shard_size: int | str) -> str:
    are, have = ("is", "has") if too_large == 1 else ("are", "have")
    larger = f"{count(too_large, 'tensor')} {are} larger than "
    return larger + option("max_shard_size", max_shard_size) + f" and {have} a shard each"


def _items_of(checkpoint: Checkpoint) -> tuple[dict[str, Value], list[LeftBehind]]:
    """The items of `checkpoint`'s root by name, and what else stands in it, which no shard will have.

    Raises RefusedError.
    """
    root = checkpoint.graph.root
    assert isinstance(root, Object)  # a state dict was taken
    places = checkpoint.index.places_in_root()
    odd = [
        place.path
        for place in places
        if is_item(place) and (place.key is None or not is_text(place.key) or is_repeated(place))
    ]
    if odd:
        raise RefusedError(
            f"an index cannot hold what has no name of its own: {some(odd, _SHOWN)}", where=checkpoint.source.path
        )
    others = [place for place in places if not is_item(place)]
    kept = [info.storage for info in checkpoint.tensors.values()]
    items = {place.key: place.node for place in places if is_item(place) and place.key is not None}
    return items, left_behind_at(others, checkpoint.index.storage_of, kept, "shards have no place for attributes")


class _SetWriter:
    """Lays out the files of a set, and gathers what they say of themselves."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, writer: Writer, copy_tied: bool) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.writer = writer
        self.copy_tied = copy_tied
        self.weight_map: dict[str, str] = {}
        self.total_size = 0
        self.ties: dict[str, str] = {}

    def layout(self, planned: _Set) -> Layout:
        """All files, the index last."""
        files: list[OutFile] = []
        left: dict[tuple[str, str], LeftBehind] = {(each.path, each.why): each for each in planned.left_behind}
        notes: dict[str, None] = dict.fromkeys(planned.notes)
        parts = split(self.checkpoint, [(file.root, file.like) for file in planned.files])
        for file, part in zip(planned.files, parts, strict=True):
            laid = self.part(part, file)
            files += laid.files
            left |= {(each.path, each.why): each for each in laid.left_behind}
            notes |= dict.fromkeys(laid.notes)
            self.ties |= dict(laid.ties)
        if planned.index:
            metadata = self.metadata(planned, left)
            data = index_bytes({**metadata, TOTAL_SIZE: self.total_size}, self.weight_map)
            files.append(OutFile(self.folder / planned.index, (Literal(data),), len(data)))
        return Layout(tuple(files), tuple(left.values()), tuple(notes), tuple(self.ties.items()))

    def metadata(self, planned: _Set, left: dict[tuple[str, str], LeftBehind]) -> dict[str, Any]:
        """What the index says beside sizes and places, ties among it; `left` gains what cannot stand there."""
        if self.writer.ties:
            return planned.metadata
        metadata: dict[str, Any] = dict(self.ties)
        for key, value in planned.metadata.items():
            if isinstance(value, str) and value in self.weight_map and key not in self.weight_map:
                each = LeftBehind(f"{planned.index}/metadata/{key}", len(value.encode()), "it would be read as a tie")
                left[each.path, each.why] = each
            else:
                metadata[key] = value
        return metadata

    def part(self, part: Checkpoint, file: _File) -> Layout:
        """One shard."""
        names = names_of(file.root)
        mine = {*names}
        part.ties = {name: kept for name, kept in part.ties.items() if name in mine and kept in mine}
        part.metadata = file.metadata
        laid = self.writer.lay_out(part, self.folder / file.name, copy_tied=self.copy_tied)
        if self.writer.views:
            self.total_size += sum(storage.nbytes for storage in part.storages.values())
            self.weight_map |= dict.fromkeys(names, file.name)
            return laid
        mine.difference_update(dict(laid.ties))
        written = [info for info in part.tensors.values() if info.name in mine]
        self.total_size += sum(info.nbytes for info in written)
        self.weight_map |= {info.name: file.name for info in written if info.name is not None}
        return laid


# Dealing tensors into shards by size. The planner is huggingface_hub's, so that a set has the shards that the Hub's own
# tools would have made. It needs only sizes, and not torch.


class Weight(NamedTuple):
    """What a tensor adds to its shard: `nbytes`, and once for all that have the same `group`, which stay together."""

    nbytes: int
    group: Hashable


@dataclass(frozen=True)
class Deal:
    """`files` with the names of the tensors in each, in the order of the state dict.

    The name of the `index`, None for one file; and how many tensors are `too_large`, so that their shards are, tied
    ones counted once.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    index: str | None
    too_large: int = 0


def parse_size(size: int | str) -> int:
    """`size` in bytes: an integer, or a text such as ``5GB``, in which units are decimal.

    Raises UsageError, TypeError.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ArgumentTypeError(f"max_shard_size must be a text such as '5GB' or a number of bytes, not {size!r}")
    found = _SIZE.fullmatch(str(size))
    unit = found["unit"] if found else None
    if found is None or (unit is None and "." in found["number"]):
        near = re.match(r"\s*([0-9]{1,18})\s*([KMGT])", str(size), re.IGNORECASE)
        raise UsageError(
            option("max_shard_size", None) + " is not a size",
            expected=_EXAMPLES,
            got=size,
            hint="is this meant: " + option("max_shard_size", f"{near[1]}{near[2].upper()}B") if near else None,
        )
    nbytes = int(float(found["number"]) * _UNITS[unit.upper()]) if unit else int(found["number"])
    if nbytes == 0:
        raise UsageError(option("max_shard_size", None) + " is no size of a file", expected=_EXAMPLES, got=size)
    return nbytes


def deal(weights: Mapping[str, Weight], max_shard_size: int | str, stem: str, suffix: str) -> Deal:
    """The shards for tensors of these `weights`, by name, none larger than `max_shard_size` unless one group is.

    Raises UsageError, also where there are several groups and each is: that is a typo.
    """
    most = parse_size(max_shard_size)
    sizes = [nbytes for nbytes in {each.group: each.nbytes for each in weights.values()}.values() if nbytes]
    too_large = sum(nbytes > most for nbytes in sizes)
    if too_large == len(sizes) > 1:
        raise UsageError(
            option("max_shard_size", max_shard_size) + " is less than any tensor has",
            expected=f"at least {min(sizes):,} bytes",
            got=f"{most:,}",
            hint="a number without a unit is bytes" if str(most) == str(max_shard_size).strip() else None,
        )
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise UsageError(
            option("max_shard_size", None) + " needs huggingface_hub, which plans the shards",
            hint="pip install 'ckptconv[hub]'",
        ) from error
    literal = stem.replace("{", "{{").replace("}", "}}")
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        get_storage_id=lambda weight: weight.group,
        filename_pattern=f"{literal}{{suffix}}{suffix}",
        max_shard_size=most,
    )
    if len(split.filename_to_tensors) > LIMITS.shards:
        raise UsageError(
            option("max_shard_size", max_shard_size) + f" would take {len(split.filename_to_tensors):,} shards",
            expected=f"at most {LIMITS.shards:,}",
            hint="say a larger one",
        )
    place = {name: i for i, name in enumerate(weights)}  # the planner puts what is tied last
    files = tuple(
        (file, tuple(sorted(names, key=place.__getitem__))) for file, names in split.filename_to_tensors.items()
    )
    return Deal(files, index_name(stem, suffix) if len(files) > 1 else None, too_large)


# What a tensor weighs


def weights_of_tensors(checkpoint: Checkpoint, items: Mapping[str, Value], *, copy_tied: bool) -> dict[str, Weight]:
    """The tensors among `items` of `checkpoint`, each written out by itself.

    What is tied stays together, unless it is copied.
    """
    weights: dict[str, Weight] = {}
    for name, value in items.items():
        info = checkpoint.tensor_nodes.get(id(value))
        if info is not None:
            group = name if copy_tied or info.storage is None or not info.nbytes else info.view
            weights[name] = Weight(info.nbytes, group)
    return weights


def weights_of_storages(checkpoint: Checkpoint, items: Mapping[str, Value]) -> dict[str, Weight]:
    """Those of `items` of `checkpoint` that are tensors or hold some, with the bytes of their storages.

    What shares a storage or an object stays together.
    """
    groups = _Groups(checkpoint, items)
    weights: dict[str, Weight] = {}
    for name, value in items.items():
        group = groups.of(name)
        if groups.nbytes.get(group) or id(value) in checkpoint.tensor_nodes:
            weights[name] = Weight(groups.nbytes.get(group, 0), group)
    return weights


class _Groups:
    """Which of `items` lead to one node or storage.

    A group is called by the name of one of its members; NBYTES are those of its storages.
    """

    def __init__(self, checkpoint: Checkpoint, items: Mapping[str, Value]) -> None:
        self.above = {name: name for name in items}
        self.owner: dict[int, str] = {}  # the id of a node or storage → the name that led to it first
        storages = checkpoint.index.storage_of
        for name, value in items.items():
            todo = [value]
            while todo:
                node = todo.pop()
                if not isinstance(node, Node) or isinstance(node, Global) or is_word(node):
                    continue  # texts, classes, devices: what is shared and means nothing
                if self.meet(name, node):
                    todo += children(node)
                if id(node) in storages:
                    self.meet(name, storages[id(node)])
        self.nbytes: dict[str, int] = {}
        for storage in checkpoint.storages.values():
            if id(storage) in self.owner:
                group = self.of(self.owner[id(storage)])
                self.nbytes[group] = self.nbytes.get(group, 0) + storage.nbytes

    def meet(self, name: str, thing: object) -> bool:
        """Whether `thing`, to which `name` leads, is new; if not, `name` and the first that led to it are one group."""
        if id(thing) not in self.owner:
            self.owner[id(thing)] = name
            return True
        self.above[self.of(name)] = self.of(self.owner[id(thing)])
        return False

    def of(self, name: str) -> str:
        """The group of `name`."""
        while self.above[name] != name:
            self.above[name] = name = self.above[self.above[name]]
        return name
