"""The persistent id by which a pickle refers to a storage: ``('storage', class, key, location, elements)``.

Source: ``torch/serialization.py`` (``persistent_id``) of torch 2.13. A changed id uses the unchanged items of the old
id, because a pickle writes shared objects once. Strings of Python 2 stay strings of Python 2.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, cast

from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.dtypes import BY_STORAGE_CLASS, DType
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.pickles.graph import Global, Graph, PersistentId, Tuple, Value, is_count, type_of
from ckptconv.pickles.rows import RowId

STORAGE = "storage"
_MODULES = ("torch", "torch.storage", "torch.cuda")


class StorageId(NamedTuple):
    """The content of a persistent id.

    Attributes:
        cls: The storage class.
        key: The key of the storage.
        tag: The location tag.
        numel: The number of elements of the class.
    """

    cls: Global
    key: str
    tag: str
    numel: int

    @property
    def dtype(self) -> DType:
        """The dtype of the storage class."""
        return BY_STORAGE_CLASS[self.cls.name]


def storage_id(node: Value) -> StorageId:
    """Return the content of `node`, a persistent id that :func:`checked_storage_id` has accepted.

    All texts are ``str``.
    """
    if isinstance(node, RowId) and (form := node.form):
        return StorageId(form.cls, node.key, node.tag, form.numel)
    assert isinstance(node, PersistentId) and isinstance(node.id, Tuple)
    cls, key, tag, numel = node.id.items[1:5]
    return StorageId(cast("Global", cls), text_of(key) or "", text_of(tag) or "", cast("int", numel))


def checked_storage_id(node: PersistentId, where: str) -> StorageId:
    """Return the content of a persistent id from a file, after a check. All texts are ``str``.

    Args:
        node: The persistent id.
        where: The file, for errors.

    Raises:
        MalformedError: The id does not refer to a storage.
        UnsupportedError: The id has too many items, or a storage class that this version does not know.
    """
    if isinstance(node, RowId) and (form := node.form) and node.tag and form.word == STORAGE:
        cls = form.cls
        if cls.module in _MODULES and cls.name in BY_STORAGE_CLASS and is_count(form.numel):
            return StorageId(cls, node.key, node.tag, form.numel)
    expected = "('storage', class, key, location, elements)"
    items = node.id.items if isinstance(node.id, Tuple) else []
    parts = f"{len(items)} parts"
    if len(items) < 5 or text_of(items[0]) != STORAGE:
        raise MalformedError("a persistent id does not name a storage", where=where, expected=expected, got=parts)
    if len(items) > 5:
        raise UnsupportedError(
            "a persistent id has parts that are not known to this version", where=where, expected=expected, got=parts
        )
    named, key, tag, numel = items[1], text_of(items[2]), text_of(items[3]), items[4]
    if not isinstance(named, Global) or named.module not in _MODULES or named.name not in BY_STORAGE_CLASS:
        raise no_class(named, where)
    if key is None or not tag or not is_count(numel):
        raise MalformedError("a persistent id has parts of wrong types", where=where, expected=expected)
    return StorageId(named, key, tag, numel)


def no_class(named: Value, where: str) -> InputError:
    """Return the error for a persistent id with `named` in place of a known storage class.

    The error is UnsupportedError if the name is like that of a class of torch, and otherwise MalformedError.
    """
    got = named if isinstance(named, Global) else type_of(named).__name__
    if isinstance(named, Global) and named.module in _MODULES and named.name.endswith("Storage"):
        return UnsupportedError("a storage class that is not known to this version", where=where, got=got)
    return MalformedError("a persistent id does not name a storage class", where=where, got=got)


def new_id(cls: Global, key: str, tag: str, numel: int) -> Tuple:
    """Return the tuple for the :class:`PersistentId` of a storage.

    `tag` is the location tag, and `numel` counts elements.
    """
    return Tuple([STORAGE, cls, key, tag, numel])


def changed_id(
    node: PersistentId,
    *,
    cls: Global | None = None,
    key: str | None = None,
    tag: str | None = None,
    numel: int | None = None,
) -> Tuple:
    """Return a new tuple for the persistent id `node`, with the items that are not None replaced.

    `node` does not change.
    """
    assert isinstance(node.id, Tuple)
    word, *old = node.id.items
    new = (cls, key, tag, numel)
    return Tuple([word, *(before if part is None else part for before, part in zip(old, new, strict=True))])


def change_id(node: PersistentId, *, key: str | None = None, tag: str | None = None) -> None:
    """Replace the key and the location tag in `node`, if they are not None."""
    if isinstance(node, RowId) and node.form:
        node.key = node.key if key is None else key
        node.tag = node.tag if tag is None else tag
    else:
        node.id = changed_id(node, key=key, tag=tag)


def storage_sizes(graph: Graph) -> dict[str, int]:
    """Return the number of bytes of each storage to which `graph` refers, by the key of the storage.

    Persistent ids that are not valid are left out. The pickle need not come from torch.
    """
    sizes: dict[str, int] = {}
    for node in graph.references:
        parts = node.id.items[:5] if isinstance(node.id, Tuple) else []  # the older format has a sixth
        with suppress(InputError):
            storage = checked_storage_id(PersistentId(Tuple(parts)), "")
            sizes[storage.key] = storage.numel * storage.dtype.itemsize
    return sizes
