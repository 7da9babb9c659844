"""List what stays behind when a part of a checkpoint is taken or a format cannot hold it, with its bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.checkpoint.model import Checkpoint, LeftBehind, Storage
from ckptconv.pickles.graph import PersistentId, Value, walk
from ckptconv.pickles.paths import Place

__all__ = ["left_behind_at", "storages_below"]


def left_behind_at(
    checkpoint: Checkpoint, places: Iterable[Place], kept: Iterable[Storage | None], why: str
) -> list[LeftBehind]:
    """What stands at PLACES, each with the bytes of the storages that go with it: those
    that are not KEPT, each counted once.
    """
    by_node = {id(reference.node): reference.storage for reference in checkpoint.references}
    counted = {id(storage) for storage in kept}
    seen: set[int] = set()
    left = []
    for place in places:
        nbytes = 0
        for node in walk([place.node], seen):
            storage = by_node.get(id(node))
            if storage is not None and id(storage) not in counted:
                counted.add(id(storage))
                nbytes += storage.nbytes
        left.append(LeftBehind(place.path, nbytes, why))
    return left


def storages_below(checkpoint: Checkpoint, *roots: Value) -> list[Storage]:
    """The storages that ROOTS lead to, each once."""
    by_node = {id(reference.node): reference.storage for reference in checkpoint.references}
    return list(dict.fromkeys(by_node[id(node)] for node in walk([*roots]) if isinstance(node, PersistentId)))
