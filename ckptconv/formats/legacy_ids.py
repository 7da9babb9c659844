"""Persistent ids as torch wrote them before 1.6, in six parts: read into five, with the views of storages resolved."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.checkpoint.rebuild_functions import STRIDED, ints_of
from ckptconv.checkpoint.storage_ids import STORAGE, StorageId, changed_id, new_id, no_class, storage_id
from ckptconv.dtypes import BY_STORAGE_CLASS
from ckptconv.errors import MalformedError, UnsupportedError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Global,
    Graph,
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
