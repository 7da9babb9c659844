"""A check that the index of a checkpoint agrees with its graph at every access.

If an edit forgets to call ``Checkpoint.changed``, the index keeps outdated places, tensors or users of nodes. Nothing
fails until an option needs them. Therefore the tests check the index after each edit.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import Detected, detect
from ckptconv.checkpoint.tensor_info import DeviceArgument, TensorInfo
from ckptconv.pickles.graph import Node, Value, children, walk
from ckptconv.pickles.paths import Place, Referrers
from ckptconv.pickles.rows import RowCall, RowId

__all__ = ["assert_fresh", "check_each_access"]

_PARTS = {"_found", "device_arguments", "every_place", "nodes", "obstacles", "places", "referrers"}
_PARTS |= {"storage_of", "storages", "tensor_counts"}


def assert_fresh(checkpoint: Checkpoint) -> None:
    """Assert that the index of `checkpoint` and its detected contents equal those of a new index of the same graph."""
    index = vars(checkpoint)["index"]
    now = Index(checkpoint.graph, checkpoint.root, checkpoint.references, "")
    inside = _inside_rows(now.nodes)
    for part in vars(index).keys() & _PARTS:
        old, new = _plain(vars(index)[part]), _plain(getattr(now, part))
        if part == "nodes":
            old, new = {*old} - inside, {*new} - inside
        elif part == "referrers":
            old, new = ({key: users for key, users in each.items() if key not in inside} for each in (old, new))
        assert old == new, f"{part} of the index is not so any more"
    detected = checkpoint._detected
    again = detect(now, is_state_dict=checkpoint.is_state_dict, scripts=checkpoint.script_classes)
    assert detected is None or _plain(detected) == _plain(again), "what was detected is not so any more"


def _inside_rows(nodes: list[Node]) -> set[int]:
    """Return the ids of the nodes inside the rows of `nodes`, as far as these nodes were created.

    An index does not notice that such nodes are created, and need not.
    """
    rows = [node for node in nodes if isinstance(node, RowCall) and not node.form]
    return {id(node) for row in rows for node in walk(children(row), parts=_created)}


def _created(node: Value) -> list[Value]:
    """Return the children of `node` without creating them."""
    return [] if isinstance(node, RowId) and node.form else children(node)


def check_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call :func:`assert_fresh` when a line of the package reads an index, once for each line and index."""
    asked: set[tuple[object, ...]] = set()
    kept: list[Index] = []  # keeps each index alive, so that no other object gets its id

    def get(checkpoint: Checkpoint) -> Index:
        index: Index = vars(checkpoint)["index"]
        caller = sys._getframe(1)
        if caller.f_code in (Checkpoint.changed.__code__, Checkpoint.renamed.__code__):
            return index
        if isinstance(vars(Checkpoint).get(caller.f_code.co_name), property) and caller.f_back:
            caller = caller.f_back
        at = id(index), caller.f_code, caller.f_lineno
        if at not in asked:
            asked.add(at)
            kept.append(index)
            assert_fresh(checkpoint)
        return index

    def set_(checkpoint: Checkpoint, index: Index) -> None:
        vars(checkpoint)["index"] = index

    monkeypatch.setattr(Checkpoint, "index", property(get, set_), raising=False)


def _plain(value: Any) -> Any:
    """Return `value` in a form that compares by content, except that nodes and storages compare by identity."""
    if isinstance(value, Place):
        return value.path, id(value.node), value.key, value.depth
    if isinstance(value, TensorInfo):
        return id(value.storage), [getattr(value, name) for name in TensorInfo.__slots__ if name != "storage"]
    if isinstance(value, DeviceArgument):
        return id(value.call), value.nested, value.index, value.device
    if isinstance(value, Referrers):
        users = {key: [id(user), *map(id, value._more.get(key, ()))] for key, user in value._first.items()}
        return {**users, 0: [id(value.root), *sorted(value.discarded)]}
    if isinstance(value, Detected):
        modules = [(each.path, each.cls, _plain(each.tensors), each.trouble) for each in value.modules]
        state_dicts = [(each.path, id(each.node), id(each.metadata)) for each in value.state_dicts]
        optimizers = [(each.path, [(id(effect), i) for effect, i in each.places]) for each in value.optimizers]
        return modules, state_dicts, optimizers, value.optimizer_nodes, _plain(value.rng_states), value.root
    if isinstance(value, dict):
        return [(key, _plain(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, str) else id(value)
