"""torch's format from before 1.6: reader and writer.

Layout: five pickles one behind another, then the storages, in the order of their keys:

    magic number          0x1950a86a20f9469cfc6c
    version               1001
    sys_info              {'protocol_version': 1001, 'little_endian': True, 'type_sizes': {...}}; no reader needs it
    object                storages in it are persistent ids ('storage', class, key, location, elements, view), the first
                          mention of a module's class is ('module', class, the file that defines it, its source text)
    keys                  a list of the storages' keys
    for each key          the number of elements (8 bytes, little-endian), and the storage's bytes, little-endian
                          on every machine

VIEW is None, or (key, offset, elements) where torch before 0.4 stored a part of a storage under a key of its own. There
is no checksum, and no alignment.

Source: ``_legacy_save`` and ``_legacy_load`` in ``torch/serialization.py`` of torch 2.13. What it writes and cannot
read back is read here: the persistent ids as texts that protocol 0 makes, and ``UntypedStorage``, under which it stores
dtypes that have no storage class of their own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.sources import Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Literal, Piece
from ckptconv.checkpoint.legacy_python import modernize, text_of
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.rebuild_functions import STRIDED, ints_of
from ckptconv.checkpoint.safe_globals import refused_opcodes
from ckptconv.checkpoint.storage_ids import STORAGE, StorageId, changed_id, new_id, no_class, storage_id
from ckptconv.dtypes import BY_STORAGE_CLASS, UNTYPED
from ckptconv.errors import DOWNLOAD_AGAIN, MalformedError, RefusedError, UnsupportedError, some
from ckptconv.formats.layout import (
    Layout,
    file_of,
    little_endian,
    pickle_pieces,
    refuse_unknown_dtypes,
    renumber,
    say_for_older_loaders,
    storage_classes,
    texts_left_behind,
)
from ckptconv.formats.torch_files import MAGIC, LegacyFile, looks_like_legacy
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import (
    AT_ONCE,
    Call,
    Dict,
    Effect,
    Global,
    Graph,
    List,
    Node,
    PersistentId,
    Tuple,
    Value,
    args_of,
    children,
    is_count,
    replace_nodes,
    set_items,
    walk,
)
from ckptconv.pickles.parser import parse

#: What protocol 0 makes of a persistent id: its repr.
_ID_TEXT = regex(
    r"\('storage', <class 'torch\.(?:storage\.)?(\w+)'>, '([^'\\]+)', '([^'\\]+)', (0|[1-9][0-9]{0,18}), None\)"
)


class _View(NamedTuple):
    """A part of a storage: its own key, where it starts, and how many elements it has."""

    key: str
    offset: int
    elements: int


@dataclass(eq=False)
class LegacyId:
    """What one persistent id says: a storage, and which part of it is meant, where that is not the whole."""

    node: PersistentId
    whole: StorageId
    view: _View | None


def read_ids(graph: Graph, where: str) -> tuple[list[LegacyId], dict[Global, PersistentId]]:
    """Rewrite the persistent ids of `graph`. Gives those of storages, now of five parts, and those of classes.

    The id of a class is replaced by the class itself.
    """
    ids: list[LegacyId] = []
    classes: dict[Node, Node] = {}
    class_ids: dict[Global, PersistentId] = {}
    named: set[Node] = set()
    texts: dict[Node, str] = {}
    for node in graph.references:
        parts = _from_text(node.id, where) if isinstance(node.id, str) else node.id
        items = parts.items if isinstance(parts, Tuple) else []
        kind = text_of(items[0]) if items else None
        if kind == "module" and len(items) == 4 and isinstance(items[1], Global):
            cls = classes[node] = Global(items[1].module, items[1].name)
            class_ids[cls] = node
            named.add(items[1])
        elif kind == STORAGE and len(items) == 6:
            ids.append(_read_id(node, items, texts, where))
        else:
            raise MalformedError(
                "a persistent id names neither a storage nor a class",
                where=where,
                expected="('storage', class, key, location, elements, view)",
                got=f"{kind!r}, {len(items)} parts",
            )
    if classes:
        replace_nodes(graph, classes)
        in_use = set(walk([graph.root, *graph.discarded]))
        graph.globals = [node for node in graph.globals if node in in_use or node not in named] + [*class_ids]
    graph.references = [each.node for each in ids]
    return ids, class_ids


def _read_id(node: PersistentId, items: list[Value], texts: dict[Node, str], where: str) -> LegacyId:
    def text(value: Value) -> str | None:
        said = text_of(value)
        return said if said is None or not isinstance(value, Node) else texts.setdefault(value, said)

    kind, cls, key, tag, numel, view = items
    if not isinstance(cls, Global) or cls.name not in BY_STORAGE_CLASS:
        raise no_class(cls, where)
    key_text, tag_text = text(key), text(tag)
    if key_text is None or tag_text is None or not is_count(numel):
        raise MalformedError("a persistent id has parts of wrong types", where=where)
    node.id = Tuple([text(kind), cls, key_text, tag_text, numel])
    return LegacyId(node, storage_id(node), _view(view, numel, where))


def _view(view: Value, numel: int, where: str) -> _View | None:
    if view is None:
        return None
    key, offset, size = view.items if isinstance(view, Tuple) and len(view.items) == 3 else (None, None, None)
    text = text_of(key)
    if text is None or not is_count(offset) or not is_count(size) or offset + size > numel:
        raise MalformedError(
            "the view of a storage is none", where=where, expected=f"(key, offset, size) within {numel} elements"
        )
    return _View(text, offset, size)


def _from_text(text: str, where: str) -> Tuple:
    """The id of the storage that `text`, a persistent id of protocol 0, names."""
    found = _ID_TEXT.fullmatch(text)
    if not found or max(map(len, found.group(2, 3))) > LIMITS.id_text:
        raise UnsupportedError(
            "a persistent id of protocol 0 names no storage; torch reads none of these", where=where, got=text[:80]
        )
    cls, key, tag, numel = found.groups()
    module = "torch.storage" if cls == "UntypedStorage" else "torch"
    return as_a_whole(new_id(Global(module, cls), key, tag, int(numel)))


def as_a_whole(five: Value) -> Tuple:
    """The id of a whole storage in six parts, from one in `five`; the sixth, for a view, is None."""
    assert isinstance(five, Tuple)
    return Tuple([*five.items, None])


# Parts of storages


def flatten_views(graph: Graph, ids: list[LegacyId], spans: dict[str, ByteRange], where: str) -> list[str]:
    """Move tensors from a part of a storage to the whole storage, at an offset, as torch's later formats have it.

    A part that is used in another way becomes a storage of its own. Gives warnings.
    """
    views = {each.node: each for each in ids if each.view}
    if not views:
        return []
    _check_keys(ids, where)
    calls = [c for c in graph.calls if str(c.callable) in STRIDED and _storage_of(c) in views and is_count(_offset(c))]
    alone = _used_alone(graph, views, {id(call.args) for call in calls})
    for node in alone:
        _stand_alone(views[node], spans)
    for call in calls:
        storage, offset, *sizes = args_of(call)
        assert isinstance(storage, PersistentId) and is_count(offset)
        view = views[storage].view
        if view and storage not in alone:
            _check_within(view, offset, sizes, where)
            call.args = Tuple([storage, offset + view.offset, *sizes])
    what = f"parts of storages, as torch before 0.4 stored them, are taken for storages of their own: {len(alone):,}"
    return [what + " that share no bytes with others any more"] if alone else []


def _check_keys(ids: list[LegacyId], where: str) -> None:
    """Raise MalformedError if a part has the key of a storage (torch has one table for both) or two descriptions."""
    storages = {each.whole.key for each in ids}
    known: dict[str, tuple[str, _View]] = {}
    for each in ids:
        view = each.view
        if view and view.key in storages:
            raise MalformedError(f"{view.key} is the key of a storage and of a part of one", where=where)
        if view and known.setdefault(view.key, (each.whole.key, view)) != (each.whole.key, view):
            raise MalformedError(f"the part {view.key} of a storage is described in two ways", where=where)


def _used_alone(graph: Graph, views: Container[Node], tensors: set[int]) -> set[PersistentId]:
    """Those of `views` that stand elsewhere than in the arguments of `tensors` (by id)."""
    nodes = walk([graph.root, *graph.discarded])
    used = [graph.root, *(child for node in nodes if id(node) not in tensors for child in children(node))]
    return {node for node in used if isinstance(node, PersistentId) and node in views}


def _stand_alone(part: LegacyId, spans: dict[str, ByteRange]) -> None:
    """Make a storage of `part`."""
    assert part.view
    key, offset, elements = part.view
    whole, itemsize = spans[part.whole.key], part.whole.dtype.itemsize
    part.node.id = changed_id(part.node, key=key, numel=elements)
    spans[key] = ByteRange(whole.source, whole.offset + offset * itemsize, elements * itemsize)


def _check_within(view: _View, offset: int, sizes: list[Value], where: str) -> None:
    """Raise MalformedError if a tensor at `offset` with these `sizes`, shape and stride, reaches outside `view`."""
    shape, stride = [ints_of(size) or () for size in (*sizes, None, None)[:2]]
    end = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=False)) + 1
    if 0 not in shape and end > view.elements:
        raise MalformedError(
            "a tensor reaches outside its part of a storage",
            where=where,
            expected=f"at most {view.elements:,} elements",
            got=f"{end:,}",
        )


def _storage_of(call: Call) -> Node | None:
    args = args_of(call)
    return args[0] if args and isinstance(args[0], PersistentId) else None


def _offset(call: Call) -> Value:
    args = args_of(call)
    return args[1] if len(args) > 1 else None


NAME = WRITERS["legacy"].name
looks_like = looks_like_legacy
_KIND = "a checkpoint in torch's format from before 1.6"
_VERSION = 1001
_PICKLES = 5
_WORDS = frozenset(["protocol_version", "little_endian", "type_sizes", "short", "int", "long"])  # in sys_info
_SIZE = 8  # bytes of the number of elements before each storage


# Reading


def read(source: Readable) -> Checkpoint:
    """The checkpoint in `source`. Raises MalformedError, UnsupportedError, LimitError."""
    parsed = parse_file(source, 0, source.size, str(source.path))
    checkpoint = checkpoint_of(NAME, source, parsed.graph, parsed, parsed.spans.get, str(source.path))
    checkpoint.class_ids = parsed.class_ids
    checkpoint.notes += parsed.notes
    for text in parsed.warnings:
        checkpoint.warn(text)
    return checkpoint


def parse_file(source: Readable, start: int, end: int, where: str) -> LegacyFile:
    """The file that stands in bytes `start` to `end` of `source`, its graph in the words of torch's zip format.

    Raises MalformedError, UnsupportedError, LimitError.
    """
    source.faults.pickles(PickleSequence(where, SliceSource(source, start, end - start), _PICKLES))
    try:
        head, notes, before, at = _read_head(source, start, end, where)
        graph, end_of_object = parse(source.read, end, where=where, offset=at)
        keys, end_of_keys = parse(source.read, end, where=where, offset=end_of_object)
    except MalformedError as error:
        error.what = f"{_KIND} that was truncated, or damaged, inside its pickles: " + error.what
        error.hint = DOWNLOAD_AGAIN
        raise
    _refuse_code(keys, where)
    ids, class_ids = read_ids(graph, where)
    modernize(graph)
    listed = _keys(keys.root, where)
    spans = _read_sizes(source, end_of_keys, end, listed, ids, where)
    warnings = flatten_views(graph, ids, spans, where)
    around, length = [*before, keys], end_of_object - at
    return LegacyFile(head, graph, frozenset(listed), spans, class_ids, notes, warnings, around, at, length)


def _read_head(
    source: Readable, start: int, end: int, where: str
) -> tuple[ByteRange | None, list[str], list[Graph], int]:
    """The pickles before the object, if torch's safe loader takes them and no byte strings are in them but torch's own
    words; notes; their graphs; and where the object starts.
    """
    usual = _head()
    if source.read(start, min(len(usual), end - start)) == usual:
        return ByteRange(source, start, len(usual)), [], [], start + len(usual)
    graphs, at = [], start
    for _ in range(3):
        graph, at = parse(source.read, end, where=where, offset=at)
        _refuse_code(graph, where)
        graphs.append(graph)
    magic, version, sys_info = graphs
    if magic.root != MAGIC:
        raise MalformedError("the magic number is another", where=where, expected=f"{MAGIC:#x}")
    if version.root != _VERSION:
        raise UnsupportedError(f"{_KIND}, of an unknown version", where=where, expected=_VERSION)
    note = "it says that it is big-endian; torch writes this format little-endian everywhere, and so it was read"
    is_usual = not any(refused_opcodes(each) or not _WORDS.issuperset(_texts(each)) for each in graphs)
    head = ByteRange(source, start, at - start) if is_usual else None
    return head, [note] if _says_big_endian(sys_info.root) else [], graphs, at


def _texts(graph: Graph) -> list[str | None]:
    """The byte strings in `graph`, those that are no texts as None."""
    return [text_of(value) for value in graph.byte_strings]


def _refuse_code(graph: Graph, where: str) -> None:
    if graph.calls or graph.globals or graph.references or graph.extensions:
        raise MalformedError(
            "there is code in the pickles around the object, which hold numbers and texts", where=where
        )


def _says_big_endian(sys_info: Value) -> bool:
    items = [(e.values[i], e.values[i + 1]) for e, i in sys_info.pairs()] if isinstance(sys_info, Dict) else []
    return any(text_of(key) == "little_endian" and value is False for key, value in items)


def _keys(root: Value, where: str) -> list[str]:
    keys = [text_of(key) for key in root.elements()] if isinstance(root, List) else [None]
    if None in keys or len(set(keys)) != len(keys):
        raise MalformedError("the storages' keys are no list of different texts", where=where)
    return [key for key in keys if key is not None]


# Storages


def _read_sizes(
    source: Readable, at: int, end: int, keys: list[str], ids: list[LegacyId], where: str
) -> dict[str, ByteRange]:
    """The bytes of the storages, which must fill the file from `at` to `end`."""
    first: dict[str, StorageId] = {}
    for each in (id_.whole for id_ in ids):
        other = first.setdefault(each.key, each)
        if other.dtype.name != each.dtype.name and each.numel:
            source.faults.found(
                MalformedError(
                    f"storage {each.key} is described in two ways", where=where, expected=other.cls, got=each.cls
                )
            )
    if first.keys() != set(keys):
        missing, extra = first.keys() - set(keys), set(keys) - first.keys()
        raise MalformedError(
            "the list of keys is not that of the storages that the object refers to",
            where=where,
            expected=f"{len(first)} keys",
            got=f"{len(missing)} missing, {len(extra)} of nothing",
        )
    whole = at + sum(_SIZE + first[key].numel * first[key].dtype.itemsize for key in keys)
    if whole > end:
        raise MalformedError(
            f"{_KIND} that was truncated: {whole - end:,} of {whole:,} bytes missing",
            where=where,
            hint=DOWNLOAD_AGAIN,
        )
    sizes = {key: first[key].numel * first[key].dtype.itemsize for key in keys}
    starts = [*accumulate((_SIZE + sizes[key] for key in keys), initial=at)]
    unread = {start for start in starts[:-1] if source.spares(start, _SIZE, "storage length")}
    source.prefetch((start, start + _SIZE) for start in starts[:-1] if start not in unread)
    spans = {}
    for key in keys:
        said = first[key].numel.to_bytes(_SIZE, "little") if at in unread else source.read(at, _SIZE)
        numel = int.from_bytes(said, "little", signed=True)
        if numel != first[key].numel:
            raise MalformedError(
                f"storage {key} has another size than its persistent id says",
                where=f"{where} at byte {at}",
                expected=f"{first[key].numel:,} elements",
                got=f"{numel:,}",
            )
        spans[key] = ByteRange(source, at + _SIZE, numel * first[key].dtype.itemsize)
        at += _SIZE + spans[key].length
    if at != end:
        source.faults.found(
            MalformedError(
                "bytes behind the last storage",
                where=f"{where} at byte {at}",
                expected="the end of the file",
                got=f"{end - at:,} bytes",
                hint="several checkpoints in one file must be taken apart with torch.load, one after another",
            )
        )
    return spans


# Writing

_WHAT = "a file in torch's format from before 1.6"
_SHOWN = 5  # paths in an error
#: Calls that read a tensor's values. Packed weights of quantized modules are objects of torch's C++, or convolutions
#: that pack them.
_EARLY_READERS = regex(
    r"torch\._utils\._rebuild_(nested_tensor|device_tensor_from_cpu_tensor)|torch\._C\.Generator"
    r"|torch\.(_C\.)?ScriptObject"
    r"|torch\.(ao\.)?nn\.(intrinsic\.)?quantized\.(\w+\.)*\w*Conv\w*"
)


def layout(checkpoint: Checkpoint, path: Path) -> Layout:
    """The file that `checkpoint`, edited, becomes at `path`. Raises RefusedError for what torch could not read back."""
    refuse_unknown_dtypes(checkpoint)
    say_for_older_loaders(checkpoint)
    _refuse_early_readers(checkpoint)
    classes = storage_classes(checkpoint, _WHAT)
    own = checkpoint.container if isinstance(checkpoint.container, LegacyFile) else None
    if own is None:
        new = renumber(checkpoint)
        storages = {new[key]: storage for key, storage in checkpoint.storages.items()}
    else:
        first = [key for key in own.spans if key in checkpoint.storages]
        storages = {key: checkpoint.storages[key] for key in dict.fromkeys([*first, *checkpoint.storages])}
    respell(checkpoint)
    head, keys = (own and own.head) or Literal(_head()), Literal(_pickled(_list([*storages])))
    pieces: list[Piece] = [head, *pickle_pieces(checkpoint), keys]
    for key, storage in storages.items():
        itemsize = BY_STORAGE_CLASS[classes[storage]].itemsize
        if own is not None and key in own.keys and isinstance(storage.data, ByteRange):  # the number before it stays
            pieces.append(ByteRange(storage.data.source, storage.data.offset - _SIZE, storage.data.length + _SIZE))
            continue
        pieces.append(Literal((storage.nbytes // itemsize).to_bytes(_SIZE, "little")))
        if storage.nbytes:
            pieces.append(little_endian(storage, classes[storage], checkpoint.byteorder))
    file = file_of(path, pieces, storages.values())
    return Layout((file,), tuple(texts_left_behind(checkpoint)), ties=tuple(checkpoint.ties.items()))


def storage_file_head(cls: Global, key: str, tag: str, numel: int) -> bytes:
    """All that stands before the bytes of the one storage that a file holds and nothing else, as
    :func:`torch.storage._load_from_bytes` takes it.
    """
    reference = PersistentId(as_a_whole(new_id(cls, key, tag, numel)))
    return _head() + _pickled(reference) + _pickled(_list([key])) + numel.to_bytes(_SIZE, "little")


def retagged(file: LegacyFile, tag: str) -> Graph:
    """The object of a file that holds one storage and nothing else, with another `tag`, as this format says it."""
    reference = file.graph.root
    assert isinstance(reference, PersistentId)
    return replace(file.graph, root=PersistentId(as_a_whole(changed_id(reference, tag=tag)), reference.order))


def unreadable(checkpoint: Checkpoint) -> str | None:
    """What of `checkpoint` torch cannot read back from this format, in words."""
    if _early_readers(checkpoint):
        return "nested tensors, generators and packed weights of quantized modules"
    untyped = {each.storage for each in checkpoint.references if storage_id(each.node).dtype is UNTYPED}
    dtypes = {info.dtype for info in checkpoint.tensors.values() if info.storage in untyped}
    return some(sorted(dtypes), _SHOWN) or "storages without a dtype" if untyped else None


def _early_readers(checkpoint: Checkpoint) -> set[int]:
    """The ids of calls that need values while the pickle is read, before those of the storages are there."""
    return {id(call) for call in checkpoint.graph.calls if _EARLY_READERS.fullmatch(str(call.callable))}


def _refuse_early_readers(checkpoint: Checkpoint) -> None:
    early = _early_readers(checkpoint)
    found = [place.path for place in checkpoint.source_places if id(place.node) in early]
    if early:
        raise RefusedError(
            f"{_WHAT} cannot hold what needs its values while it is loaded (nested tensors, generators, packed weights"
            " of quantized modules): torch finds whatever memory held",
            where=checkpoint.source.path,
            got=some(found, _SHOWN) if found else f"{len(early):,} inside of tensors",
            hint=option("format", "pt") + " writes it",
        )


def respell(checkpoint: Checkpoint) -> None:
    """Say ids and classes as this format does, in the graph of `checkpoint`."""
    for reference in checkpoint.references:
        reference.node.id = as_a_whole(reference.node.id)
    if checkpoint.class_ids:
        replace_nodes(checkpoint.graph, cast("dict[Node, Node]", checkpoint.class_ids))
    checkpoint.changed()


@cache
def _head() -> bytes:
    """The three pickles before the object."""
    sizes = _dict([("short", 2), ("int", 4), ("long", 4)])
    sys_info = _dict([("protocol_version", _VERSION), ("little_endian", True), ("type_sizes", sizes)])
    return _pickled(MAGIC) + _pickled(_VERSION) + _pickled(sys_info)


def _pickled(value: Value) -> bytes:
    graph = Graph(value, 2, 0, frozenset(), [], [], [], [], set())
    return b"".join(piece for piece in emit(graph, loadable=True) if isinstance(piece, bytes))


def _dict(items: list[tuple[str, Value]]) -> Dict:
    return set_items(Dict(), [part for item in items for part in item])


def _list(items: list[str]) -> List:
    made = List()
    for at in range(0, len(items), AT_ONCE):
        values: list[Value] = [*items[at : at + AT_ONCE]]
        made.add(Effect("APPEND" if len(values) == 1 else "APPENDS", values, None))
    return made
