"""torch's format from before 1.6: reader and writer.

Layout: five pickles, one after another, then the storages in the order of their keys:

    magic number          0x1950a86a20f9469cfc6c
    version               1001
    sys_info              {'protocol_version': 1001, 'little_endian': True, 'type_sizes': {...}}; no reader needs it
    object                storages in it are persistent ids ('storage', class, key, location, elements, view); the first
                          reference to a module's class is ('module', class, the file that defines it, its source text)
    keys                  a list of the storages' keys
    for each key          the number of elements (8 bytes, little-endian), and the storage's bytes, little-endian
                          on every machine

VIEW is None, or (key, offset, elements) for a view of a storage: before 0.4, torch stored it under a key of its own.
The format has no checksums and no alignment.

Source: ``_legacy_save`` and ``_legacy_load`` in ``torch/serialization.py`` of torch 2.13. Some files that torch writes
and cannot read back are read here: persistent ids as the texts of protocol 0, and ``UntypedStorage``, under which torch
stores dtypes without a storage class.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.sources import Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Literal, Piece
from ckptconv.checkpoint.legacy_python import modernize, text_of
from ckptconv.checkpoint.merging import empty_graph
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.rebuild_functions import STRIDED, ints_of
from ckptconv.checkpoint.safe_globals import PlainOutline, refused_opcodes
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
    torch_layout,
)
from ckptconv.formats.torch_files import MAGIC, LegacyFile, looks_like_legacy
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.emitter import pickle_of
from ckptconv.pickles.graph import (
    Call,
    Dict,
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
    walk,
)
from ckptconv.pickles.parser import parse

NAME = WRITERS["legacy"].name
looks_like = looks_like_legacy
_KIND = "a checkpoint in torch's format from before 1.6"
_WHAT = "a file in torch's format from before 1.6"
_VERSION = 1001
_PICKLES = 5
_WORDS = frozenset(["protocol_version", "little_endian", "type_sizes", "short", "int", "long"])  # in sys_info
#: The three pickles before the object, as torch writes them.
_HEAD = b"".join(
    pickle.dumps(value, 2)
    for value in (
        MAGIC,
        _VERSION,
        {"protocol_version": _VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}},
    )
)
_SIZE = 8  # bytes of the number of elements before each storage
_SHOWN = 5  # paths in an error
#: A persistent id in protocol 0, which writes its repr.
_ID_TEXT = regex(
    r"\('storage', <class 'torch\.(?:storage\.)?(\w+)'>, '([^'\\]+)', '([^'\\]+)', (0|[1-9][0-9]{0,18}), None\)"
)
#: Calls that read a tensor's values. Packed weights of quantized modules are objects of torch's C++, or convolutions
#: that pack them.
_EARLY_READERS = regex(
    r"torch\._utils\._rebuild_(nested_tensor|device_tensor_from_cpu_tensor)|torch\._C\.Generator"
    r"|torch\.(_C\.)?ScriptObject"
    r"|torch\.(ao\.)?nn\.(intrinsic\.)?quantized\.(\w+\.)*\w*Conv\w*"
)


# Reading


def read(source: Readable) -> Checkpoint:
    """Return the checkpoint in `source`, a file in this format.

    Raises MalformedError if the file is damaged, UnsupportedError if its version or a persistent id is unknown, and
    LimitError.
    """
    parsed = parse_file(source, 0, source.size, str(source.path))
    checkpoint = checkpoint_of(NAME, source, parsed.graph, parsed, parsed.spans.get, str(source.path))
    checkpoint.class_ids = parsed.class_ids
    checkpoint.notes += parsed.notes
    for text in parsed.warnings:
        checkpoint.warn(text)
    return checkpoint


def parse_file(source: Readable, start: int, end: int, where: str) -> LegacyFile:
    """Return the parsed file in bytes `start` to `end` of `source`. Its graph is spelled as in torch's zip format.

    `where` names the file in errors. Raises the same errors as :func:`read`.
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
    ids, class_ids = _read_ids(graph, where)
    modernize(graph)
    listed = [text_of(key) for key in keys.root.elements()] if isinstance(keys.root, List) else [None]
    known = [key for key in listed if key is not None]
    if len({*known}) != len(listed):
        raise MalformedError("the storages' keys are not a list of distinct strings", where=where)
    spans = _read_sizes(source, end_of_keys, end, known, ids, where)
    warnings = _flatten_views(graph, ids, spans, where)
    return LegacyFile(
        head=head,
        graph=graph,
        keys=frozenset(known),
        spans=spans,
        class_ids=class_ids,
        notes=notes,
        warnings=warnings,
        around=[*before, keys],
        pickle_offset=at,
        pickle_length=end_of_object - at,
    )


def _read_head(
    source: Readable, start: int, end: int, where: str
) -> tuple[ByteRange | None, list[str], list[Graph], int]:
    """Read the three pickles before the object, which begin at `start`.

    Returns:
        - Their bytes, to be copied to an output. None if torch's safe loader refuses them, or if ``sys_info`` contains
          other strings than torch's.
        - Notes for the report.
        - Their graphs. Empty if the bytes are exactly those that torch writes.
        - The position of the object.
    """
    if source.read(start, min(len(_HEAD), end - start)) == _HEAD:
        return ByteRange(source, start, len(_HEAD)), [], [], start + len(_HEAD)
    graphs, at = [], start
    for _ in range(3):
        graph, at = parse(source.read, end, where=where, offset=at)
        _refuse_code(graph, where)
        graphs.append(graph)
    magic, version, sys_info = (graph.root for graph in graphs)
    if magic != MAGIC:
        raise MalformedError("the magic number is wrong", where=where, expected=f"{MAGIC:#x}")
    if version != _VERSION:
        raise UnsupportedError(f"{_KIND}, of an unknown version", where=where, expected=_VERSION)
    is_usual = not any(
        refused_opcodes(graph) or not _WORDS.issuperset(map(text_of, graph.byte_strings)) for graph in graphs
    )
    items = [(e.values[i], e.values[i + 1]) for e, i in sys_info.pairs()] if isinstance(sys_info, Dict) else []
    notes = []
    if any(text_of(key) == "little_endian" and value is False for key, value in items):
        notes = ["it is marked as big-endian, but was read as little-endian, as torch always writes this format"]
    return ByteRange(source, start, at - start) if is_usual else None, notes, graphs, at


def _refuse_code(graph: Graph, where: str) -> None:
    """Raise MalformedError if the pickle `graph` contains globals, calls or references.

    It is one of the pickles around the object, which contain only numbers, strings and containers of them.
    """
    if graph.calls or graph.globals or graph.references or graph.extensions:
        raise MalformedError(
            "the pickles around the object contain code; they should contain only numbers and strings", where=where
        )


class _View(NamedTuple):
    """A view of a storage, stored under a key of its own: `elements` elements from element `offset` of the storage."""

    key: str
    offset: int
    elements: int


class _Id(NamedTuple):
    """A reference to a storage, or to a view of the storage if `view` is not None."""

    node: PersistentId
    storage: StorageId
    view: _View | None


def _read_ids(graph: Graph, where: str) -> tuple[list[_Id], dict[Global, PersistentId]]:
    """Rewrite the persistent ids of `graph` as torch's zip format spells them.

    Return the references to storages, whose ids now have five items, and the references to classes by class. In the
    graph, the classes replace their references. Raises MalformedError, UnsupportedError.
    """
    ids: list[_Id] = []
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
    graph.references = [id_.node for id_ in ids]
    return ids, class_ids


def _read_id(node: PersistentId, items: list[Value], texts: dict[Node, str], where: str) -> _Id:
    """Give `node` a persistent id with five items, and return the storage or view to which it refers.

    `items` are the six items of the old id. `texts` has the strings of string nodes, so that equal nodes share one
    object. Raises MalformedError if an item has the wrong type, or if the view does not lie in the storage.
    """

    def text(value: Value) -> str | None:
        string = text_of(value)
        return string if string is None or not isinstance(value, Node) else texts.setdefault(value, string)

    kind, cls, key, tag, numel, view = items
    if not isinstance(cls, Global) or cls.name not in BY_STORAGE_CLASS:
        raise no_class(cls, where)
    key_text, tag_text = text(key), text(tag)
    if key_text is None or tag_text is None or not is_count(numel):
        raise MalformedError("a persistent id has parts of wrong types", where=where)
    node.id = Tuple([text(kind), cls, key_text, tag_text, numel])
    if view is None:
        return _Id(node, storage_id(node), None)
    key, offset, size = view.items if isinstance(view, Tuple) and len(view.items) == 3 else (None, None, None)
    view_key = text_of(key)
    if view_key is None or not is_count(offset) or not is_count(size) or offset + size > numel:
        raise MalformedError(
            "the view of a storage is not valid", where=where, expected=f"(key, offset, size) within {numel} elements"
        )
    return _Id(node, storage_id(node), _View(view_key, offset, size))


def _from_text(text: str, where: str) -> Tuple:
    """Return the six-item persistent id in `text`, the repr of a tuple, which protocol 0 stores.

    Raises UnsupportedError if `text` is not the id of a storage.
    """
    match = _ID_TEXT.fullmatch(text)
    if not match or max(map(len, match.group(2, 3))) > LIMITS.id_text:
        raise UnsupportedError(
            "a persistent id of protocol 0 does not name a storage, and torch does not read such files",
            where=where,
            got=text[:80],
        )
    cls, key, tag, numel = match.groups()
    module = "torch.storage" if cls == "UntypedStorage" else "torch"
    return _in_six(new_id(Global(module, cls), key, tag, int(numel)))


def _in_six(five: Value) -> Tuple:
    """Return the persistent id `five`, which has five items, with a sixth item: None, because it is not a view."""
    assert isinstance(five, Tuple)
    return Tuple([*five.items, None])


def _flatten_views(graph: Graph, ids: list[_Id], spans: dict[str, ByteRange], where: str) -> list[str]:
    """Replace tensors on views by tensors on their storages, at a larger offset, as torch's later formats do.

    If a view is used in another way than as the first argument of a rebuild call, it becomes a storage of its own. Its
    bytes are added to `spans`, the bytes of the storages by key, and a warning is returned. Raises MalformedError.
    """
    views = {id_.node: id_ for id_ in ids if id_.view}
    if not views:
        return []
    _check_keys(ids, where)
    calls: list[tuple[Call, PersistentId, int]] = []
    for call in graph.calls:
        storage, offset = (*args_of(call), None, None)[:2]
        if (
            isinstance(storage, PersistentId)
            and storage in views
            and str(call.callable) in STRIDED
            and is_count(offset)
        ):
            calls.append((call, storage, offset))
    rebuilt = {id(call.args) for call, _, _ in calls}
    nodes = walk([graph.root, *graph.discarded])
    used = [graph.root, *(child for node in nodes if id(node) not in rebuilt for child in children(node))]
    alone = {node for node in used if isinstance(node, PersistentId) and node in views}
    for node in alone:
        _, storage_id_, view = views[node]
        assert view
        data, itemsize = spans[storage_id_.key], storage_id_.dtype.itemsize
        node.id = changed_id(node, key=view.key, numel=view.elements)
        spans[view.key] = ByteRange(data.source, data.offset + view.offset * itemsize, view.elements * itemsize)
    for call, storage, offset in calls:
        view = views[storage].view
        if view and storage not in alone:
            sizes = args_of(call)[2:]
            _check_within(view, offset, sizes, where)
            call.args = Tuple([storage, offset + view.offset, *sizes])
    what = f"parts of storages (torch before 0.4) are read as separate storages: {len(alone):,}"
    return [what] if alone else []


def _check_keys(ids: list[_Id], where: str) -> None:
    """Raise MalformedError if a view has the key of a storage, or if two ids describe one view differently.

    torch has one table for the keys of storages and views.
    """
    storages = {id_.storage.key for id_ in ids}
    known: dict[str, tuple[str, _View]] = {}
    for _, storage, view in ids:
        if view and view.key in storages:
            raise MalformedError(f"{view.key} is the key of both a storage and a part of one", where=where)
        if view and known.setdefault(view.key, (storage.key, view)) != (storage.key, view):
            raise MalformedError(f"the part {view.key} of a storage is described in two ways", where=where)


def _check_within(view: _View, offset: int, sizes: list[Value], where: str) -> None:
    """Raise MalformedError if a tensor with the first element `offset` reaches outside of `view`.

    `sizes` contains the shape and the stride.
    """
    shape, stride = [ints_of(size) or () for size in (*sizes, None, None)[:2]]
    end = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=False)) + 1
    if 0 not in shape and end > view.elements:
        raise MalformedError(
            "a tensor reaches outside its part of a storage",
            where=where,
            expected=f"at most {view.elements:,} elements",
            got=f"{end:,}",
        )


def _read_sizes(
    source: Readable, at: int, end: int, keys: list[str], ids: list[_Id], where: str
) -> dict[str, ByteRange]:
    """Return the bytes of the storages by key. They must fill `source` from `at` to `end`, in the order of `keys`.

    Raises MalformedError if a storage is missing, truncated or of another size than its persistent id in `ids`. Smaller
    defects, such as bytes after the last storage, are reported as faults.
    """
    first: dict[str, StorageId] = {}
    for _, storage, _ in ids:
        other = first.setdefault(storage.key, storage)
        if other.dtype.name != storage.dtype.name and storage.numel:
            what = f"storage {storage.key} is described in two ways"
            source.faults.found(MalformedError(what, where=where, expected=other.cls, got=storage.cls))
    if first.keys() != set(keys):
        missing, extra = first.keys() - set(keys), set(keys) - first.keys()
        raise MalformedError(
            "the list of keys does not match the storages that the object refers to",
            where=where,
            expected=f"{len(first)} keys",
            got=f"{len(missing)} missing, {len(extra)} unused",
        )
    sizes = {key: first[key].numel * first[key].dtype.itemsize for key in keys}
    *starts, whole_end = accumulate((_SIZE + sizes[key] for key in keys), initial=at)
    if whole_end > end:
        raise MalformedError(
            f"{_KIND} that was truncated: {whole_end - end:,} of {whole_end:,} bytes missing",
            where=where,
            hint=DOWNLOAD_AGAIN,
        )
    unread = {start for start in starts if source.spares(start, _SIZE, "storage length")}
    source.prefetch((start, start + _SIZE) for start in starts if start not in unread)
    spans = {}
    for key, start in zip(keys, starts, strict=True):
        numel = first[key].numel
        if start not in unread:
            numel = int.from_bytes(source.read(start, _SIZE), "little", signed=True)
        if numel != first[key].numel:
            raise MalformedError(
                f"storage {key} has a different size from its persistent id",
                where=f"{where} at byte {start}",
                expected=f"{first[key].numel:,} elements",
                got=f"{numel:,}",
            )
        spans[key] = ByteRange(source, start + _SIZE, sizes[key])
    if whole_end != end:
        source.faults.found(
            MalformedError(
                "bytes after the last storage",
                where=f"{where} at byte {whole_end}",
                expected="the end of the file",
                got=f"{end - whole_end:,} bytes",
                hint="several checkpoints in one file must be taken apart with torch.load, one after another",
            )
        )
    return spans


# Writing


def layout(checkpoint: Checkpoint, path: Path) -> Layout:
    """Plan the file at `path` for an edited `checkpoint`.

    Raises RefusedError if torch could not read the file, because a tensor needs its values while the object is
    unpickled or has a dtype without a storage class.
    """
    refuse_unknown_dtypes(checkpoint)
    say_for_older_loaders(checkpoint)
    if early := _early_readers(checkpoint):
        paths = [place.path for place in checkpoint.source_places if id(place.node) in early]
        raise RefusedError(
            f"{_WHAT} cannot store objects that need values while they are loaded (nested tensors, generators,"
            " packed weights of quantized modules): torch would read undefined memory",
            where=checkpoint.source.path,
            got=some(paths, _SHOWN) if paths else f"{len(early):,} inside of tensors",
            hint=option("format", "pt") + " writes it",
        )
    classes = storage_classes(checkpoint, _WHAT)
    own = checkpoint.container if isinstance(checkpoint.container, LegacyFile) else None
    if own is None:
        new = renumber(checkpoint)
        storages = {new[key]: storage for key, storage in checkpoint.storages.items()}
    else:
        first = [key for key in own.spans if key in checkpoint.storages]
        storages = {key: checkpoint.storages[key] for key in dict.fromkeys([*first, *checkpoint.storages])}
    respell(checkpoint)
    head, keys = (own and own.head) or Literal(_HEAD), Literal(pickle.dumps([*storages], 2))
    pieces: list[Piece] = [head, *pickle_pieces(checkpoint), keys]
    for key, storage in storages.items():
        itemsize = BY_STORAGE_CLASS[classes[storage]].itemsize
        if own is not None and key in own.keys and isinstance(storage.data, ByteRange):  # with the number before it
            pieces.append(ByteRange(storage.data.source, storage.data.offset - _SIZE, storage.data.length + _SIZE))
            continue
        pieces.append(Literal((storage.nbytes // itemsize).to_bytes(_SIZE, "little")))
        if storage.nbytes:
            pieces.append(little_endian(storage, classes[storage], checkpoint.byteorder))
    return torch_layout(checkpoint, file_of(path, pieces, storages.values()), has_sources=True)


def storage_file_head(cls: Global, key: str, tag: str, numel: int) -> bytes:
    """Return the bytes before the storage in a file that contains only one storage.

    ``torch.storage._load_from_bytes`` loads such files. `cls`, `key`, `tag` and `numel` go into the persistent id.
    """
    graph = empty_graph()
    graph.root = PersistentId(_in_six(new_id(cls, key, tag, numel)))
    return _HEAD + pickle_of(graph, loadable=True) + pickle.dumps([key], 2) + numel.to_bytes(_SIZE, "little")


def retagged(file: LegacyFile, tag: str) -> Graph:
    """Return the graph of `file`, which contains one storage, with location tag `tag`, spelled as in this format."""
    reference = file.graph.root
    assert isinstance(reference, PersistentId)
    return replace(file.graph, root=PersistentId(_in_six(changed_id(reference, tag=tag)), reference.order))


def unreadable(checkpoint: Checkpoint) -> str | None:
    """Return a description of the tensors in `checkpoint` that torch cannot read from this format, or None."""
    if _early_readers(checkpoint):
        return "nested tensors, generators and packed weights of quantized modules"
    untyped = {ref.storage for ref in checkpoint.references if storage_id(ref.node).dtype is UNTYPED}
    dtypes = {info.dtype for info in checkpoint.tensors.values() if info.storage in untyped}
    return some(sorted(dtypes), _SHOWN) or "storages without a dtype" if untyped else None


def _early_readers(checkpoint: Checkpoint) -> set[int]:
    """Return the Python ids of calls that need the values of storages while the object is unpickled.

    In this format the storages follow the object, so these calls would see memory without defined content.
    """
    is_plain = PlainOutline().is_plain
    calls = (each for call in checkpoint.graph.outer_calls if not is_plain(call) for each in call.calls())
    return {id(call) for call in calls if _EARLY_READERS.fullmatch(str(call.callable))}


def respell(checkpoint: Checkpoint) -> None:
    """Change the ids of storages and the references to classes in the graph to the spelling of this format.

    The graph of `checkpoint` is changed in place.
    """
    for reference in checkpoint.references:
        reference.node.id = _in_six(reference.node.id)
    if checkpoint.class_ids:
        replace_nodes(checkpoint.graph, cast("dict[Node, Node]", checkpoint.class_ids))
    checkpoint.changed()
