"""A checkpoint in shards, as the Hub's tools keep it: several files with parts of one state dict, and the index that says which tensor is where. :mod:`ckptconv.formats.sharded.index` has the layout.

Read, the shards become one graph under one root, a mapping of all names in the order of the files, so edits reach all of them at once. What the index says is compared with what the shards hold: where a tensor is
missing, doubled, or in another shard, a reader that believes the index and one that does not would see two checkpoints.

Written, each shard stays the file that it was, or the names are dealt anew, by size. A tie is recorded in its shard, as in any safetensors file, and in the index, where huggingface_hub's ``save_torch_state_dict`` has it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.sources import Source, SourceFolder
from ckptconv.checkpoint.index import places_in
from ckptconv.checkpoint.merging import Merger, split
from ckptconv.checkpoint.model import Checkpoint, Layout, LeftBehind, OutFile
from ckptconv.checkpoint.state_dicts import strings_of
from ckptconv.edits.selection import left_behind_at
from ckptconv.errors import (
    InputError,
    MalformedError,
    RefusedError,
    UnsupportedError,
    UsageError,
    count,
    some,
)
from ckptconv.formats import safetensors, torch_zip
from ckptconv.formats.foreign.folders import folder_error
from ckptconv.formats.safetensors_header import is_text
from ckptconv.formats.sharded.index import (
    TOTAL_SIZE,
    Index,
    find_set,
    index_bytes,
    index_name,
    of_other_suffix,
    read_index,
    refuse_missing,
    refuse_unnamed,
    renumbered,
    sets_in,
    stem_for,
)
from ckptconv.formats.sharded.planning import Weight, deal, weights_of_storages, weights_of_tensors
from ckptconv.hints import shell
from ckptconv.pickles.graph import Call, Dict, Object, Tuple, Value, is_global, set_items
from ckptconv.pickles.paths import is_item, is_repeated

__all__ = ["NAME", "Container", "format_of", "layout", "looks_like", "read"]

NAME = "sharded"
_TOTAL_PARAMETERS = "total_parameters"  # transformers' count, which leaves out buffers
_FORMAT = "format"
_SHOWN = 5  # names in an error
_ITEMS = ("SETITEM", "SETITEMS")


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of a set: its NAME, the checkpoint in it as it was read, and its ROOT, which has its items in common with the root of all."""

    name: str
    part: Checkpoint
    root: Object


@dataclass(frozen=True, eq=False)
class Container:
    """What the reader keeps for the writer: the set as it was. INDEX is the name that its index has or would have, METADATA what stands in it, NAMES how many there were.

    CONTRADICTIONS are texts that shards have and that differ from one to the other.
    """

    root: Object
    shards: tuple[Shard, ...]
    index: str
    metadata: Mapping[str, Any]
    names: int
    contradictions: tuple[LeftBehind, ...]


def looks_like(folder: SourceFolder) -> bool:
    """Whether FOLDER is an index, or has shards."""
    if not folder.path.is_dir():
        return True
    try:
        return bool(sets_in(os.listdir(folder.path)))
    except OSError:
        return False


# Reading


def read(folder: SourceFolder, read_file: Callable[[Source], Checkpoint]) -> Checkpoint:
    """The set of shards in FOLDER, each of which READ_FILE reads. Raises MalformedError, RefusedError, and what that raises."""
    found = find_set(folder.path, folder.faults)
    if found is None:
        raise folder_error(folder.path)
    index = read_index(folder.open(found.index)) if found.index else None
    names = index.shards() if index else [*found.shards]
    if index:
        refuse_unnamed(folder.folder, index, folder.faults)
    names = refuse_missing(folder.folder, names, folder.faults)
    merger = Merger(folder)
    shards = []
    for name in names:
        try:
            part = read_file(folder.open(name))
            shards.append(Shard(name, part, _root_of(part, name)))
            merger.take(part, in_order=True)
        except InputError as error:
            folder.faults.found(error)
    if not shards:
        raise MalformedError("none of its shards can be read", where=folder.path)
    _check_formats(folder, shards)
    in_shards = _check_names(folder, shards, index)
    ties = {name: kept for shard in shards for name, kept in shard.part.ties.items()}
    if index and shards[0].part.is_state_dict:
        ties |= _tied_by_index(index, in_shards)
    root = _merged([shard.root for shard in shards])
    said = index.metadata.items() if index else ()
    metadata = {key: value for key, value in said if value != ties.get(key)}
    texts, contradictions = _texts(shards, metadata)
    container = Container(
        root, tuple(shards), found.index or index_name(found.stem, found.suffix), metadata, len(_names(root)), contradictions
    )  # fmt: skip
    checkpoint = merger.checkpoint(f"{NAME} {shards[0].part.format}", root, container)
    checkpoint.is_state_dict = shards[0].part.is_state_dict
    checkpoint.ties = ties
    checkpoint.metadata = texts
    checkpoint.unused += contradictions
    if index:
        checkpoint.unused += [
            LeftBehind(f"{container.index}/{key}", 0, "no index has such a part") for key in index.others
        ]
    return checkpoint


def _root_of(part: Checkpoint, name: str) -> Object:
    """The mapping of names that the shard PART, called NAME, is; it loses its attributes, which have no place in a set. Raises UnsupportedError, MalformedError."""
    root = part.graph.root
    is_ordered = isinstance(root, Call) and is_global(root.callable, "collections.OrderedDict")
    if not isinstance(root, Object) or not (isinstance(root, Dict) or (is_ordered and _is_empty(root))):
        raise _no_shard(part, "the shard is no mapping of names to tensors")
    keys = [effect.values[i] for effect, i in root.pairs()]
    if not all(isinstance(key, str) for key in keys):
        raise _no_shard(part, "the shard has keys that are no names")
    if len({*keys}) != len(keys):
        (twice, _), *_ = Counter(keys).most_common(1)
        raise MalformedError("a name stands twice in the shard", where=part.source.path, got=repr(twice))
    if any(effect.opcode not in _ITEMS for effect in root.effects):
        part.unused.append(LeftBehind(f"{name}/._metadata", 0, "a set of shards has no place for attributes"))
        root.effects = [effect for effect in root.effects if effect.opcode in _ITEMS]
    return root


def _is_empty(call: Value) -> bool:
    return isinstance(call, Call) and isinstance(call.args, Tuple) and not call.args.items


def _no_shard(part: Checkpoint, what: str) -> UnsupportedError:
    return UnsupportedError(
        what, where=part.source.path, hint=f"convert it alone: {shell('ckptconv', 'convert', part.source.path, 'OUT')}"
    )


def _merged(roots: list[Object]) -> Object:
    """A mapping of all that ROOTS have: the effects are theirs, so that what changes in one changes in the other."""
    first = roots[0]
    root: Object = Dict()
    if isinstance(first, Call) and all(isinstance(each, Call) for each in roots):
        root = Call(first.kind, first.callable, Tuple([]))
    for each in roots:
        for effect in each.effects:
            root.add(effect)
    return root


def _check_formats(folder: SourceFolder, shards: list[Shard]) -> None:
    formats = {shard.part.format: shard.name for shard in shards}
    if len(formats) > 1:
        listed = ", ".join(f"{name} is {format_}" for format_, name in formats.items())
        folder.faults.found(
            UnsupportedError(f"the shards of one checkpoint are of different formats: {listed}", where=folder.path)
        )


def _check_names(folder: SourceFolder, shards: list[Shard], index: Index | None) -> dict[str, Shard]:
    """The shard of each name that stands in one, all of them where the INDEX, if there is one, has them. Raises MalformedError."""
    in_shards: dict[str, Shard] = {}
    doubled: dict[str, str] = {}
    for shard in shards:
        for name in _names(shard.root):
            first = in_shards.setdefault(name, shard)
            if first is not shard:
                doubled[name] = f"{name!r} in {first.name} and {shard.name}"
    if doubled:
        folder.faults.found(_contradiction(folder, shards, "more than one shard", [*doubled.values()], may_go=False))
    if index is None:
        return in_shards
    recorded = {name for shard in shards for name in shard.part.ties}
    read = {shard.name for shard in shards}
    places = {name: shard for name, shard in index.weight_map.items() if shard in read}
    missing = [f"{name!r} not in {shard}" for name, shard in places.items() if name not in in_shards]
    moved = [f"{name!r} in {in_shards[name].name} and not in {shard}" for name, shard in places.items() if name in in_shards and in_shards[name].name != shard]  # fmt: skip
    unknown = [f"{name!r} in {shard.name}" for name, shard in in_shards.items() if name not in places and name not in recorded]  # fmt: skip
    for what, found in (
        ("no shard, but in the index", missing), ("another shard than the index says", moved), ("a shard, but not in the index", unknown),
    ):  # fmt: skip
        if found:
            folder.faults.found(_contradiction(folder, shards, what, found, may_go=True))
    return in_shards


def _contradiction(
    folder: SourceFolder, shards: list[Shard], what: str, found: list[str], *, may_go: bool
) -> MalformedError:
    """The error for tensors that stand in WHAT; FOUND names each and says where. MAY_GO: without the index there would be no contradiction."""
    alone = shell("ckptconv", "convert", folder.folder / shards[0].name, "OUT")
    hint = f"convert the shards one by one: {alone}"
    sets = sets_in(shard.name for shard in shards)
    if may_go and len(sets) == 1 and len(shards) == sets[0].count:
        hint = f"if the shards are right, take the index away, and they are believed; else {hint}"
    stands = "tensor stands" if len(found) == 1 else "tensors stand"
    return MalformedError(f"{len(found):,} {stands} in {what}: {some(found, _SHOWN)}", where=folder.path, hint=hint)


def _names(root: Object) -> list[str]:
    return [key for effect, i in root.pairs() if isinstance(key := effect.values[i], str)]


def _tied_by_index(index: Index, in_shards: Mapping[str, Shard]) -> dict[str, str]:
    """The names that the INDEX alone records, with those of the tensors that they are tied to; the shards of these gain them."""
    ties = {
        name: kept
        for name, kept in index.metadata.items()
        if isinstance(kept, str) and kept in in_shards and name not in in_shards and name != _FORMAT
    }
    tensors = {id(shard): strings_of(shard.root) for shard in {in_shards[kept] for kept in ties.values()}}
    for name, kept in ties.items():
        shard = in_shards[kept]
        tensor = tensors[id(shard)][kept]
        assert isinstance(tensor, Call)
        set_items(shard.root, [name, Call(tensor.kind, tensor.callable, tensor.args)])
    return ties


def _texts(shards: Iterable[Shard], metadata: Mapping[str, Any]) -> tuple[dict[str, str], tuple[LeftBehind, ...]]:
    """The texts of the shards and of the index as those of one file; and those that shards have and that differ."""
    texts = {key: text for key, text in metadata.items() if isinstance(text, str) and key != TOTAL_SIZE}
    differ: dict[str, LeftBehind] = {}
    for shard in shards:
        for key, text in shard.part.metadata.items():
            if texts.setdefault(key, text) != text:
                left = f"{shard.name}/__metadata__/{key}"
                differ.setdefault(key, LeftBehind(left, len(text.encode()), "other shards have another text there"))
    return texts, tuple(differ.values())


# Writing


class _File(NamedTuple):
    """A file to be laid out: its name, its root, the part that it stays, if it does, and the texts for its own metadata."""

    name: str
    root: Object
    like: Checkpoint | None
    metadata: dict[str, str]


@dataclass(frozen=True)
class _Set:
    """The files of a set, the name of its index, if it has one, what that says beside sizes and places, and what to say of all."""

    files: list[_File]
    index: str | None
    metadata: dict[str, Any]
    left_behind: list[LeftBehind]
    notes: tuple[str, ...] = ()


def layout(
    checkpoint: Checkpoint,
    folder: Path,
    format: str,
    *,
    copy_tied: bool = False,
    max_shard_size: int | str | None = None,
) -> Layout:
    """The files that CHECKPOINT, edited, becomes in FOLDER, the index last: the shards that it has, or shards of at most MAX_SHARD_SIZE. Raises UsageError, RefusedError."""
    if format not in ("pt", "safetensors"):
        raise UsageError(f"--format {format} writes one file, and no shards", where=folder, expected="pt or safetensors")  # fmt: skip
    suffix = ".safetensors" if format == "safetensors" else ".bin"
    container = checkpoint.container if isinstance(checkpoint.container, Container) else None
    if max_shard_size is not None:
        planned = _dealt(checkpoint, container, suffix, max_shard_size, copy_tied=copy_tied)
    elif container and checkpoint.graph.root is container.root:
        planned = _as_it_was(checkpoint, container, suffix)
    else:
        raise UsageError(
            "what is to be written is not in shards, and a folder is the output", where=folder,
            hint="--max-shard-size 5GB makes shards of it; a path with a suffix, one file",
        )  # fmt: skip
    return _Writer(checkpoint, folder, format, copy_tied).layout(planned)


def format_of(checkpoint: Checkpoint) -> str:
    """The format of shards that are made of CHECKPOINT where nobody says which: what holds names and tensors alone stays safetensors."""
    return "safetensors" if checkpoint.is_state_dict else "pt"


def _as_it_was(checkpoint: Checkpoint, container: Container, suffix: str) -> _Set:
    """Each shard, without what the edits took out of it; those that are empty then are left out."""
    kept = {id(effect) for effect in container.root.effects}
    for shard in container.shards:
        shard.root.effects = [effect for effect in shard.root.effects if id(effect) in kept]
    shards = [shard for shard in container.shards if any(shard.root.pairs())]
    names = [shard.name for shard in shards]
    index, metadata = container.index, dict(container.metadata)
    if (suffix == ".safetensors") != container.shards[0].part.is_state_dict:
        names = [of_other_suffix(name, suffix) for name in names]
        index = of_other_suffix(index, suffix)
    texts = [shard.part.metadata for shard in shards]
    if suffix == ".safetensors":  # each keeps its own
        checkpoint.unused = [each for each in checkpoint.unused if each not in container.contradictions]
    else:
        texts = [{} for _ in shards]
        metadata = {key: text for key, text in checkpoint.metadata.items() if key != _FORMAT} | metadata
    if len(shards) < len(container.shards):
        names = renumbered(names)
    if len({*names, index}) <= len(names):
        raise RefusedError(
            f"two shards would have one name: {some(names, _SHOWN)}", where=checkpoint.source.path,
            hint="--max-shard-size 5GB makes new ones",
        )  # fmt: skip
    left = _uncounted(checkpoint, container, metadata)
    files = [_File(name, shard.root, shard.part, own) for name, shard, own in zip(names, shards, texts, strict=True)]
    return _Set(files, index, metadata, left)


def _uncounted(checkpoint: Checkpoint, container: Container, metadata: dict[str, Any]) -> list[LeftBehind]:
    """Take out of METADATA what would be false by now; what that is."""
    root = checkpoint.graph.root
    if _TOTAL_PARAMETERS not in metadata or (isinstance(root, Object) and len(_names(root)) == container.names):
        return []
    del metadata[_TOTAL_PARAMETERS]
    return [LeftBehind(f"{container.index}/metadata/{_TOTAL_PARAMETERS}", 0, "tensors were left out, so it is false")]


def _dealt(
    checkpoint: Checkpoint, container: Container | None, suffix: str, max_shard_size: int | str, *, copy_tied: bool
) -> _Set:
    """The names of CHECKPOINT dealt anew, by size."""
    items, left = _items_of(checkpoint)
    weights: dict[str, Weight]
    if suffix == ".safetensors":
        weights = weights_of_tensors(checkpoint, items, copy_tied=copy_tied)
    else:
        weights = weights_of_storages(checkpoint, items)
    if not weights:
        raise RefusedError("there is no tensor to put into shards", where=checkpoint.source.path)
    stem = stem_for(container.index if container else checkpoint.source.path.name, suffix)
    dealt = deal(weights, max_shard_size, stem, suffix)
    others = {name for name in items if name not in weights}
    texts = dict(checkpoint.metadata)
    metadata = {**(container.metadata if container else {}), **texts}
    left += _uncounted(checkpoint, container, metadata) if container else []
    files = []
    for i, (file, names) in enumerate(dealt.files):
        mine = {*names, *others} if i == 0 else {*names}
        root = Dict()
        set_items(root, [word for name, value in items.items() if name in mine for word in (name, value)])
        own = {key: text for key, text in texts.items() if key == _FORMAT} if dealt.index else texts
        files.append(_File(file, root, None, own))
    if dealt.index is None:
        left += [LeftBehind(f"{container.index}/metadata/{key}", 0, "one file has no index") for key, value in metadata.items() if container and not isinstance(value, str) and key not in (TOTAL_SIZE, _TOTAL_PARAMETERS)]  # fmt: skip
    metadata.pop(_FORMAT, None)
    notes = (_about_size(dealt.too_large, max_shard_size),) if dealt.too_large else ()
    return _Set(files, dealt.index, metadata, left, notes)


def _about_size(too_large: int, max_shard_size: int | str) -> str:
    are, have = ("is", "has") if too_large == 1 else ("are", "have")
    return f"{count(too_large, 'tensor')} {are} larger than --max-shard-size {max_shard_size} and {have} a shard each"


def _items_of(checkpoint: Checkpoint) -> tuple[dict[str, Value], list[LeftBehind]]:
    """The items of CHECKPOINT's root by name, and what else stands in it, which no shard will have. Raises RefusedError."""
    root = checkpoint.graph.root
    assert isinstance(root, Object)  # a state dict was taken
    places = list(places_in(checkpoint, {id(root)}))
    odd = [place.path for place in places if is_item(place) and (place.key is None or not is_text(place.key) or is_repeated(place))]  # fmt: skip
    if odd:
        raise RefusedError(
            f"an index cannot hold what has no name of its own: {some(odd, _SHOWN)}", where=checkpoint.source.path
        )
    others = [place for place in places if not is_item(place)]
    kept = [info.storage for info in checkpoint.tensors.values()]
    items = {place.key: place.node for place in places if is_item(place) and place.key is not None}
    return items, left_behind_at(checkpoint, others, kept, "shards have no place for attributes")


class _Writer:
    """Lays out the files of a set, and gathers what they say of themselves."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, format_: str, copy_tied: bool) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.is_safetensors = format_ == "safetensors"
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
            files.append(OutFile(self.folder / planned.index, (data,), len(data)))
        return Layout(tuple(files), tuple(left.values()), tuple(notes), tuple(self.ties.items()))

    def metadata(self, planned: _Set, left: dict[tuple[str, str], LeftBehind]) -> dict[str, Any]:
        """What the index says beside sizes and places, ties among it; LEFT gains what cannot stand there."""
        if not self.is_safetensors:
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
        names = _names(file.root)
        mine = {*names}
        part.ties = {name: kept for name, kept in part.ties.items() if name in mine and kept in mine}
        part.metadata = file.metadata
        path = self.folder / file.name
        if self.is_safetensors:
            laid = safetensors.layout(part, path, copy_tied=self.copy_tied)
            tied = dict(laid.ties)
            written = [info for info in part.tensors.values() if info.name in mine and info.name not in tied]
            self.total_size += sum(info.nbytes for info in written)
            self.weight_map |= {info.name: file.name for info in written if info.name is not None}
            return laid
        self.total_size += sum(storage.nbytes for storage in part.storages.values())
        self.weight_map |= dict.fromkeys(names, file.name)
        return torch_zip.layout(part, path)
