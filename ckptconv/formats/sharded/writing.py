"""Plan the files of a sharded checkpoint: the shards of the source, or new shards by size, and their index.

A tie is recorded in the metadata of its shard, as in any safetensors file, and in the index, as
``save_torch_state_dict`` of huggingface_hub does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.spans import Literal, OutFile
from ckptconv.checkpoint.merging import split
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import is_word
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo, left_behind_at
from ckptconv.errors import ArgumentTypeError, RefusedError, UsageError, count, some
from ckptconv.formats.distributed.rank_names import about_one
from ckptconv.formats.layout import Layout, about_tensors
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
    """A planned shard.

    Attributes:
        name: The name of the file.
        root: The mapping of names to tensors.
        like: The checkpoint of the source's shard that is kept, or None for a new shard.
        metadata: The strings for the metadata of the file.
    """

    name: str
    root: Object
    like: Checkpoint | None
    metadata: dict[str, str]


@dataclass(frozen=True)
class _Set:
    """A planned set of shards.

    Attributes:
        files: The shards.
        index: The name of the index, or None if there is only one file.
        metadata: The metadata of the index, without ``total_size`` and ties.
        left_behind: The contents of the source that the set cannot contain.
        notes: Notes for the report.
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
    """Plan the shards of an edited `checkpoint` in `folder`, with the index as the last file.

    Args:
        checkpoint: The checkpoint. This function may change it.
        folder: The folder of the shards.
        writer: The format of each shard.
        copy_tied: Whether to write a tied tensor under each of its names.
        max_shard_size: The largest size of a new shard, as :func:`parse_size` reads it. None keeps the shards of the
            source.

    Raises:
        UsageError: The format has no shards, the size is not valid, or there are neither shards nor a size.
        RefusedError: Shards cannot contain the checkpoint.
    """
    if not writer.shards:
        raise UsageError(
            option("format", writer.word) + " writes one file, and no shards", where=folder, expected=words("shards")
        )
    partial = [path for path, info in checkpoint.tensors.items() if info.kind == "partial"]
    if partial:
        raise RefusedError(
            f"one process's part of a tensor cannot be a shard: {some(partial, _SHOWN)}",
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
            "the output is one file, but DST is a folder",
            where=folder,
            hint="a path with a suffix, such as out.pt, is one file",
        )
    return _laid_out(checkpoint, folder, writer, planned, copy_tied=copy_tied)


def _as_it_was(checkpoint: Checkpoint, container: ShardedContainer, writer: Writer) -> _Set:
    """Plan the shards of the source without the items that edits removed. A shard without items is left out.

    If the format changes, the shards and the index get names of the new format. Raises RefusedError if two shards would
    have one name.
    """
    kept = {id(effect) for effect in container.root.effects}
    for shard in container.shards:
        shard.root.effects = [effect for effect in shard.root.effects if id(effect) in kept]
    shards = [shard for shard in container.shards if any(shard.root.pairs())]
    names = [shard.name for shard in shards]
    index, metadata = container.index, dict(container.metadata)
    if writer.objects is container.shards[0].part.is_state_dict:  # the format changes
        names = [of_other_suffix(name, writer.shard_suffix) for name in names]
        index = of_other_suffix(index, writer.shard_suffix)
    texts = [shard.part.metadata for shard in shards]
    if writer.texts:  # each shard keeps its own texts
        checkpoint.unused = [left for left in checkpoint.unused if left not in container.contradictions]
    else:
        texts = [{} for _ in shards]
        metadata = {key: text for key, text in checkpoint.metadata.items() if key != FORMAT_KEY} | metadata
    if len(shards) < len(container.shards):
        names = renumbered(names)
    if len({*names, index}) <= len(names):
        raise RefusedError(f"two shards would have the same name: {some(names, _SHOWN)}", where=checkpoint.source.path)
    left = _uncounted(checkpoint, container, metadata)
    files = [_File(name, shard.root, shard.part, own) for name, shard, own in zip(names, shards, texts, strict=True)]
    return _Set(files, index, metadata, left)


def _uncounted(checkpoint: Checkpoint, container: ShardedContainer, metadata: dict[str, Any]) -> list[LeftBehind]:
    """Remove ``total_parameters`` from `metadata` if edits removed names, because the number is then wrong.

    Return the removed value as left behind, or an empty list.
    """
    root = checkpoint.graph.root
    if _TOTAL_PARAMETERS not in metadata or (isinstance(root, Object) and len(names_of(root)) == container.names):
        return []
    del metadata[_TOTAL_PARAMETERS]
    why = "wrong after tensors were left out"
    return [LeftBehind(f"{container.index}/metadata/{_TOTAL_PARAMETERS}", 0, why)]


def _dealt(
    checkpoint: Checkpoint,
    container: ShardedContainer | None,
    writer: Writer,
    max_shard_size: int | str,
    *,
    copy_tied: bool,
) -> _Set:
    """Plan new shards for the items of `checkpoint`, each of at most `max_shard_size`. Raises UsageError, RefusedError.

    Items without tensors go into the first shard.
    """
    items, left = _items_of(checkpoint)
    if writer.views:
        weights = _weights_of_storages(checkpoint, items)
    else:
        weights = _weights_of_tensors(checkpoint, items, copy_tied=copy_tied)
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
    notes: tuple[str, ...] = ()
    if dealt.too_large:
        are, get = ("is", "gets") if dealt.too_large == 1 else ("are", "get")
        larger = f"{count(dealt.too_large, 'tensor')} {are} larger than "
        notes = (larger + option("max_shard_size", max_shard_size) + f" and {get} a separate shard",)
    return _Set(files, dealt.index, metadata, left, notes)


def _items_of(checkpoint: Checkpoint) -> tuple[dict[str, Value], list[LeftBehind]]:
    """Return the items of the root by name, and the root's attributes, which are left behind.

    Shards have no place for attributes. Raises RefusedError if an item has no name, or a name that another item has
    too.
    """
    root = checkpoint.graph.root
    assert isinstance(root, Object)  # it is a state dict
    places = checkpoint.index.places_in_root()
    odd = [
        place.path
        for place in places
        if is_item(place) and (place.key is None or not is_text(place.key) or is_repeated(place))
    ]
    if odd:
        raise RefusedError(
            f"an index cannot contain tensors without a name: {some(odd, _SHOWN)}", where=checkpoint.source.path
        )
    others = [place for place in places if not is_item(place)]
    kept = [info.storage for info in checkpoint.tensors.values()]
    items = {place.key: place.node for place in places if is_item(place) and place.key is not None}
    return items, left_behind_at(others, checkpoint.index.storage_of, kept, "shards cannot store attributes")


def _laid_out(checkpoint: Checkpoint, folder: Path, writer: Writer, planned: _Set, *, copy_tied: bool) -> Layout:
    """Return the files of a `planned` set in `folder`, with the index last. Raises RefusedError."""
    files: list[OutFile] = []
    left = {(lost.path, lost.why): lost for lost in planned.left_behind}
    notes = dict.fromkeys(planned.notes)
    ties: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    tensors: dict[str, TensorInfo] = {}
    total_size = 0
    parts = split(checkpoint, [(file.root, file.like) for file in planned.files])
    for file, part in zip(planned.files, parts, strict=True):
        names = dict.fromkeys(names_of(file.root), file.name)
        part.ties = {name: kept for name, kept in part.ties.items() if name in names and kept in names}
        part.metadata = file.metadata
        laid = writer.lay_out(part, folder / file.name, copy_tied=copy_tied)
        if writer.views:
            total_size += sum(storage.nbytes for storage in part.storages.values())
            weight_map |= names
        else:
            tied = dict(laid.ties)
            own = {info.name: info for info in part.tensors.values() if info.name is not None and info.name in names}
            written = {name: info for name, info in own.items() if name not in tied}
            total_size += sum(info.nbytes for info in written.values())
            weight_map |= dict.fromkeys(written, file.name)
            tensors |= own
        files += laid.files
        left |= {(lost.path, lost.why): lost for lost in laid.left_behind}
        ties |= laid.ties
    notes |= dict.fromkeys(about_tensors(tensors, writer.name))
    if planned.index:
        metadata = planned.metadata
        if not writer.ties:
            false = {
                key: text
                for key, text in metadata.items()
                if key not in weight_map and isinstance(text, str) and text in weight_map
            }
            for key, text in false.items():
                lost = LeftBehind(f"{planned.index}/metadata/{key}", len(text.encode()), "it would be read as a tie")
                left[lost.path, lost.why] = lost
            metadata = ties | {key: value for key, value in metadata.items() if key not in false}
        data = index_bytes({**metadata, TOTAL_SIZE: total_size}, weight_map)
        files.append(OutFile(folder / planned.index, (Literal(data),), len(data)))
    return Layout(tuple(files), tuple(left.values()), tuple(notes), tuple(ties.items()))


# Dealing tensors into shards by size. The planner is huggingface_hub's, so that a set has the shards that the Hub's own
# tools would have made. It needs only sizes, and not torch.


class Weight(NamedTuple):
    """The size of a tensor. Tensors of one `group` must be in one shard, where they take `nbytes` together."""

    nbytes: int
    group: Hashable


@dataclass(frozen=True)
class Deal:
    """The shards for a set of tensors.

    Attributes:
        files: The name of each file, and the names of its tensors in the order of the state dict.
        index: The name of the index, or None if there is only one file.
        too_large: The number of groups that are larger than the limit on shards.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    index: str | None
    too_large: int = 0


def parse_size(size: int | str) -> int:
    """Return `size` in bytes. It is an integer or a string such as ``5GB``, with decimal units.

    Raises UsageError if the string is not a size or the size is 0, and TypeError for other types.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ArgumentTypeError(f"max_shard_size must be a text such as '5GB' or a number of bytes, not {size!r}")
    match = _SIZE.fullmatch(str(size))
    unit = match["unit"] if match else None
    if match is None or (unit is None and "." in match["number"]):
        near = re.match(r"\s*([0-9]{1,18})\s*([KMGT])", str(size), re.IGNORECASE)
        raise UsageError(
            option("max_shard_size", None) + " is not a size",
            expected=_EXAMPLES,
            got=size,
            hint="did you mean: " + option("max_shard_size", f"{near[1]}{near[2].upper()}B") if near else None,
        )
    nbytes = int(float(match["number"]) * _UNITS[unit.upper()]) if unit else int(match["number"])
    if nbytes == 0:
        raise UsageError(option("max_shard_size", None) + " is not a file size", expected=_EXAMPLES, got=size)
    return nbytes


def deal(weights: Mapping[str, Weight], max_shard_size: int | str, stem: str, suffix: str) -> Deal:
    """Return the shards for tensors, none of them larger than `max_shard_size` unless it contains only one group.

    huggingface_hub plans the shards.

    Args:
        weights: The size of each tensor, by name.
        max_shard_size: The largest size, as :func:`parse_size` reads it.
        stem: The start of the shards' names.
        suffix: The suffix of the shards.

    Raises:
        UsageError: The size is not valid, there would be too many shards, huggingface_hub is not installed, or there
            are several groups and all are larger than the size, which indicates a typing error.
    """
    most = parse_size(max_shard_size)
    sizes = [nbytes for nbytes in {weight.group: weight.nbytes for weight in weights.values()}.values() if nbytes]
    too_large = sum(nbytes > most for nbytes in sizes)
    if too_large == len(sizes) > 1:
        raise UsageError(
            option("max_shard_size", max_shard_size) + " is smaller than every tensor",
            expected=f"at least {min(sizes):,} bytes",
            got=f"{most:,}",
            hint="a number without a unit means bytes" if str(most) == str(max_shard_size).strip() else None,
        )
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise UsageError(
            option("max_shard_size", None) + " needs huggingface_hub, which plans the shards",
            hint='pip install "ckptconv[hub]"',
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
            hint="use a larger size",
        )
    place = {name: i for i, name in enumerate(weights)}  # the planner puts tied tensors last
    files = tuple(
        (file, tuple(sorted(names, key=place.__getitem__))) for file, names in split.filename_to_tensors.items()
    )
    return Deal(files, index_name(stem, suffix) if len(files) > 1 else None, too_large)


def _weights_of_tensors(checkpoint: Checkpoint, items: Mapping[str, Value], *, copy_tied: bool) -> dict[str, Weight]:
    """Return the sizes of the tensors in `items`, for a format that stores each tensor separately.

    Tied tensors are one group, unless `copy_tied` is true. Items that are not tensors are left out.
    """
    weights: dict[str, Weight] = {}
    for name, value in items.items():
        info = checkpoint.tensor_nodes.get(id(value))
        if info is not None:
            group = name if copy_tied or info.storage is None or not info.nbytes else info.view
            weights[name] = Weight(info.nbytes, group)
    return weights


def _weights_of_storages(checkpoint: Checkpoint, items: Mapping[str, Value]) -> dict[str, Weight]:
    """Return the sizes of the `items` that are or contain tensors, for a format that stores storages.

    Items that share a storage or an object are one group, which has the name of one of them.
    """
    above = {name: name for name in items}  # a forest: the names of one group lead to one root
    owner: dict[int, str] = {}  # the id of a node or storage → the name that led to it first

    def group_of(name: str) -> str:
        """Return the name of the group of `name`."""
        while above[name] != name:
            above[name] = name = above[above[name]]
        return name

    def reach(name: str, thing: object) -> bool:
        """Return whether `thing`, which `name` contains, is reached for the first time.

        If not, join the groups of `name` and of the item that reached it first.
        """
        if id(thing) in owner:
            above[group_of(name)] = group_of(owner[id(thing)])
            return False
        owner[id(thing)] = name
        return True

    storages = checkpoint.index.storage_of
    for name, value in items.items():
        todo = [value]
        while todo:
            node = todo.pop()
            if not isinstance(node, Node) or isinstance(node, Global) or is_word(node):
                continue  # texts, classes and devices: sharing them means nothing
            if reach(name, node):
                todo += children(node)
            if id(node) in storages:
                reach(name, storages[id(node)])
    nbytes: Counter[str] = Counter()
    for storage in checkpoint.storages.values():
        if id(storage) in owner:
            nbytes[group_of(owner[id(storage)])] += storage.nbytes
    groups = {name: group_of(name) for name in items}
    return {
        name: Weight(nbytes[groups[name]], groups[name])
        for name, value in items.items()
        if nbytes[groups[name]] or id(value) in checkpoint.tensor_nodes
    }
