"""Read a set of shards as one checkpoint, and compare its index with the shards.

The shards become one graph with one root, a mapping of all names in the order of the files, so that edits reach all
shards at once. A tensor that is missing, occurs in two shards, or is in another shard than the index names, is a fault:
readers with and without the index would see different checkpoints. :mod:`ckptconv.formats.sharded.index` has the layout
of the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import MalformedError, UnsupportedError, some
from ckptconv.formats.foreign.paths import folder_error
from ckptconv.formats.sharded.index import (
    NAME,
    TOTAL_SIZE,
    Index,
    Shard,
    ShardedContainer,
    find_set,
    index_name,
    read_index,
    refuse_missing,
    refuse_unnamed,
    sets_in,
)
from ckptconv.hints import Placeholder, command
from ckptconv.pickles.graph import Call, Dict, Object, Tuple, is_global, set_items, strings_of

FORMAT_KEY = "format"
_SHOWN = 5  # names in an error
_ITEMS = ("SETITEM", "SETITEMS")


def looks_like(folder: SourceFolder) -> bool:
    """Return whether `folder` is the path of an index, or a folder that contains shards."""
    return not folder.path.is_dir() or bool(sets_in(folder.names()))


def read(folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint:
    """Return the checkpoint merged from the shards in `folder`. `read_file` reads one shard.

    A shard that cannot be read is a fault. Raises MalformedError, RefusedError if the folder has several models,
    UnsupportedError, LimitError, and the errors of `read_file`.
    """
    shard_set = find_set(folder.path, folder.faults)
    if shard_set is None:
        raise folder_error(folder.path)
    index = read_index(folder.open(shard_set.index)) if shard_set.index else None
    names = index.shards() if index else [*shard_set.shards]
    if index:
        refuse_unnamed(folder, index)
    names = refuse_missing(folder, names)
    merger = Merger(folder)
    shards = []
    for name in names:
        with folder.faults:
            part = read_file(folder.open(name))
            shards.append(Shard(name, part, _root_of(part, name)))
            merger.take(part, in_order=True)
    if not shards:
        raise MalformedError("none of its shards can be read", where=folder.path)
    formats = {shard.part.format: shard.name for shard in shards}
    if len(formats) > 1:
        listed = ", ".join(f"{name} is {format_}" for format_, name in formats.items())
        what = f"the shards of one checkpoint are of different formats: {listed}"
        folder.faults.found(UnsupportedError(what, where=folder.path))
    in_shards = _check_names(folder, shards, index)
    ties = {name: kept for shard in shards for name, kept in shard.part.ties.items()}
    if index and shards[0].part.is_state_dict:
        ties |= _tied_by_index(index, in_shards)
    root = _merged([shard.root for shard in shards])
    entries = index.metadata.items() if index else ()
    metadata = {key: value for key, value in entries if value != ties.get(key)}
    texts, contradictions = _texts(shards, metadata)
    container = ShardedContainer(
        root,
        tuple(shards),
        shard_set.index or index_name(shard_set.stem, shard_set.suffix),
        metadata,
        len(names_of(root)),
        contradictions,
    )
    checkpoint = merger.checkpoint(f"{NAME} {shards[0].part.format}", root, container)
    checkpoint.is_state_dict = shards[0].part.is_state_dict
    checkpoint.ties = ties
    checkpoint.metadata = texts
    checkpoint.unused += contradictions
    if index:
        checkpoint.unused += [
            LeftBehind(f"{container.index}/{key}", 0, "no index contains such a part") for key in index.others
        ]
    return checkpoint


def _root_of(part: Checkpoint, name: str) -> Object:
    """Return the root of the shard `part`, a mapping of names to tensors. Its attributes are removed and left behind.

    `name` is the name of the file. Raises UnsupportedError if the root is not such a mapping, and MalformedError if a
    name occurs twice.
    """
    root = part.graph.root
    if isinstance(root, Call):
        is_empty = isinstance(root.args, Tuple) and not root.args.items
        is_mapping = is_empty and is_global(root.callable, "collections.OrderedDict")
    else:
        is_mapping = isinstance(root, Dict)
    if not isinstance(root, Object) or not is_mapping:
        raise _no_shard(part, "the shard is not a mapping from names to tensors")
    keys = [effect.values[i] for effect, i in root.pairs()]
    if not all(isinstance(key, str) for key in keys):
        raise _no_shard(part, "the shard has keys that are not names")
    if len({*keys}) != len(keys):
        (twice, _), *_ = Counter(keys).most_common(1)
        raise MalformedError("a name occurs twice in the shard", where=part.source.path, got=repr(twice))
    if any(effect.opcode not in _ITEMS for effect in root.effects):
        part.unused.append(LeftBehind(f"{name}/._metadata", 0, "a set of shards cannot store attributes"))
        if isinstance(root, Call):
            kept = part.graph.written[root] = Call(root.kind, root.callable, root.args, root.kwargs, root.order)
            kept.effects = root.effects
        root.effects = [effect for effect in root.effects if effect.opcode in _ITEMS]
    return root


def _no_shard(part: Checkpoint, what: str) -> UnsupportedError:
    """Return an UnsupportedError with the message `what` for the shard `part`. Its hint converts only this file."""
    return UnsupportedError(
        what,
        where=part.source.path,
        hint="convert it by itself: " + command("convert", part.source.path, Placeholder("OUT")),
    )


def _merged(roots: list[Object]) -> Object:
    """Return a mapping with the items of all `roots`. It contains the same effects, so an edit changes both."""
    first = roots[0]
    root: Object = Dict()
    if isinstance(first, Call) and all(isinstance(shard_root, Call) for shard_root in roots):
        root = Call(first.kind, first.callable, Tuple([]))
    for shard_root in roots:
        for effect in shard_root.effects:
            root.add(effect)
    return root


def _check_names(folder: SourceFolder, shards: list[Shard], index: Index | None) -> dict[str, Shard]:
    """Return the first shard of each name, by name.

    Report a fault if a name is in several shards, or if `index` disagrees with the shards. `index` may be None.
    """
    in_shards: dict[str, Shard] = {}
    doubled: dict[str, str] = {}
    for shard in shards:
        for name in names_of(shard.root):
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
    moved = [
        f"{name!r} in {in_shards[name].name} and not in {shard}"
        for name, shard in places.items()
        if name in in_shards and in_shards[name].name != shard
    ]
    unknown = [
        f"{name!r} in {shard.name}" for name, shard in in_shards.items() if name not in places and name not in recorded
    ]
    for what, names in (
        ("no shard, but in the index", missing),
        ("a shard other than the index says", moved),
        ("a shard, but not in the index", unknown),
    ):
        if names:
            folder.faults.found(_contradiction(folder, shards, what, names, may_go=True))
    return in_shards


def _contradiction(
    folder: SourceFolder, shards: list[Shard], what: str, names: list[str], *, may_go: bool
) -> MalformedError:
    """Return the error for tensors that are in wrong shards.

    Args:
        folder: The folder.
        shards: All shards.
        what: A description of the wrong location, such as "more than one shard".
        names: A text for each tensor, with its name and its shards.
        may_go: Whether the shards are consistent without the index.
    """
    alone = command("convert", folder.folder / shards[0].name, Placeholder("OUT"))
    hint = "convert the shards one by one: " + alone
    sets = sets_in(shard.name for shard in shards)
    if may_go and len(sets) == 1 and len(shards) == sets[0].count:
        hint = "if the shards are right, delete the index; otherwise " + hint
    are = "tensor is" if len(names) == 1 else "tensors are"
    return MalformedError(f"{len(names):,} {are} in {what}: {some(names, _SHOWN)}", where=folder.path, hint=hint)


def names_of(root: Object) -> list[str]:
    """Return the names in `root`, a mapping, in order."""
    return [key for effect, i in root.pairs() if isinstance(key := effect.values[i], str)]


def _tied_by_index(index: Index, in_shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return the ties that only the metadata of `index` records: the second name, and the name of the tensor.

    The second names are added to the shards of their tensors.
    """
    ties = {
        name: kept
        for name, kept in index.metadata.items()
        if isinstance(kept, str) and kept in in_shards and name not in in_shards and name != FORMAT_KEY
    }
    tensors = {id(shard): strings_of(shard.root) for shard in {in_shards[kept] for kept in ties.values()}}
    for name, kept in ties.items():
        shard = in_shards[kept]
        tensor = tensors[id(shard)][kept]
        assert isinstance(tensor, Call)
        set_items(shard.root, [name, Call(tensor.kind, tensor.callable, tensor.args)])
    return ties


def _texts(shards: Iterable[Shard], metadata: Mapping[str, Any]) -> tuple[dict[str, str], tuple[LeftBehind, ...]]:
    """Return the metadata strings of the index and all shards, merged, and those that differ from the merged ones.

    A string in `metadata`, which is that of the index, or in an earlier shard takes precedence. The result lists the
    differing strings as left behind.
    """
    texts = {key: text for key, text in metadata.items() if isinstance(text, str) and key != TOTAL_SIZE}
    differ: dict[str, LeftBehind] = {}
    for shard in shards:
        for key, text in shard.part.metadata.items():
            if texts.setdefault(key, text) != text:
                left = f"{shard.name}/__metadata__/{key}"
                differ.setdefault(key, LeftBehind(left, len(text.encode()), "other shards have different text there"))
    return texts, tuple(differ.values())
