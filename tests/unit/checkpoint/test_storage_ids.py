"""Tests of the persistent ids of storages: how they are read, written and changed."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

from ckptconv.checkpoint.storage_ids import (
    StorageId,
    changed_id,
    checked_storage_id,
    new_id,
    storage_id,
    storage_sizes,
)
from ckptconv.errors import MalformedError, UnsupportedError
from ckptconv.pickles.graph import Global, Graph, PersistentId, Py2String, Tuple, Value
from ckptconv.pickles.parser import parse

HALF = Global("torch", "HalfStorage")


def graph_of(*ids: Any) -> Graph:
    """Return the graph of a pickle with the persistent ids `ids`."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ids[obj.index] if isinstance(obj, Mention) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump([Mention(i) for i in range(len(ids))])
    data = file.getvalue()
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="")
    return graph


class Mention:
    """An object that is pickled as a persistent id."""

    def __init__(self, index: int) -> None:
        self.index = index


def test_parts_of_an_id_that_torch_writes() -> None:
    (node,) = graph_of(("storage", torch.HalfStorage, "7", "cuda:1", 3)).references
    said = checked_storage_id(node, "x")
    assert said == storage_id(node)
    assert (str(said.cls), said.key, said.tag, said.numel) == ("torch.HalfStorage", "7", "cuda:1", 3)
    assert (said.dtype.name, said.dtype.itemsize) == ("float16", 2)


def test_new_id_contains_its_parts() -> None:
    node = PersistentId(new_id(HALF, "7", "cpu", 3))
    assert checked_storage_id(node, "x") == StorageId(HALF, "7", "cpu", 3)


def test_python_2_strings_are_read_and_kept() -> None:
    word, key, tag = (Py2String(text) for text in (b"storage", b"7", b"cpu"))
    node = PersistentId(Tuple([word, HALF, key, tag, 3]))
    assert checked_storage_id(node, "x") == storage_id(node) == StorageId(HALF, "7", "cpu", 3)
    new = changed_id(node, tag="cuda:0").items
    assert new[0] is word
    assert new[2] is key
    assert new[3] == "cuda:0"


@pytest.mark.parametrize(
    "change",
    [{"cls": Global("torch", "ByteStorage")}, {"key": ""}, {"tag": "mps"}, {"numel": 0}, {"key": "8", "numel": 4}, {}],
)
def test_changed_id_is_a_copy_with_only_the_given_changes(change: dict[str, Any]) -> None:
    old = new_id(HALF, "7", "cpu", 3)
    node, before = PersistentId(old), [*old.items]
    new = changed_id(node, **change)
    assert node.id is old
    assert new is not old
    assert old.items == before
    assert storage_id(PersistentId(new)) == storage_id(node)._replace(**change)
    kept = [a is b for a, b in zip(new.items, before, strict=True)]
    assert kept == [True, *(field not in change for field in StorageId._fields)]


@pytest.mark.parametrize(
    ("id_", "what"),
    [
        ("storage", "does not name a storage"),
        (Tuple([]), "does not name a storage"),
        (Tuple(["module", HALF, "7", "cpu", 3]), "does not name a storage"),
        (Tuple(["storage", "HalfStorage", "7", "cpu", 3]), "does not name a storage class"),
        (Tuple(["storage", Global("numpy", "HalfStorage"), "7", "cpu", 3]), "does not name a storage class"),
        (Tuple(["storage", Global("torch", "Tensor"), "7", "cpu", 3]), "does not name a storage class"),
        (Tuple(["storage", HALF, 7, "cpu", 3]), "has parts of wrong types"),
        (Tuple(["storage", HALF, "7", "", 3]), "has parts of wrong types"),
        (Tuple(["storage", HALF, "7", None, 3]), "has parts of wrong types"),
        (Tuple(["storage", HALF, "7", "cpu", -1]), "has parts of wrong types"),
        (Tuple(["storage", HALF, "7", "cpu", True]), "has parts of wrong types"),
    ],
)
def test_malformed_ids_are_refused(id_: Value, what: str) -> None:
    with pytest.raises(MalformedError) as info:
        checked_storage_id(PersistentId(id_), "the file")
    assert info.value.what == f"a persistent id {what}"
    assert info.value.where == "the file"


@pytest.mark.parametrize(
    "id_",
    [
        Tuple(["storage", HALF, "7", "cpu", 3, None]),
        Tuple(["storage", Global("torch", "Float6Storage"), "7", "cpu", 3]),
    ],
    ids=["six parts", "another class of torch's"],
)
def test_id_of_a_later_torch_is_not_damage(id_: Tuple) -> None:
    """An id with more parts, or with an unknown storage class of torch, is reported as unsupported, not as
    malformed.
    """
    with pytest.raises(UnsupportedError, match="not known to this version"):
        checked_storage_id(PersistentId(id_), "the file")


def test_sizes_of_valid_storages() -> None:
    graph = graph_of(
        ("storage", torch.HalfStorage, "a", "cpu", 3),
        ("storage", torch.LongStorage, "b", "cpu", 2, None),  # an id of the legacy format
        ("storage", torch.HalfStorage, "c", "cpu", -1),
        ("storage", torch.Tensor, "d", "cpu", 3),
        ("storage", torch.HalfStorage, 5, "cpu", 3),
        ("module", torch.HalfStorage, "e", "cpu", 3),
        ("storage", torch.HalfStorage, "f"),
        "g",
    )
    assert storage_sizes(graph) == {"a": 6, "b": 16}
