"""List what stays behind when a part of a checkpoint is taken or a format cannot hold it, with its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptconv.checkpoint.tensor_info import LeftBehind, Storage
from ckptconv.pickles.graph import walk
from ckptconv.pickles.paths import Place


def left_behind_at(
    places: Iterable[Place], storage_of: Mapping[int, Storage], kept: Iterable[Storage | None], why: str
) -> list[LeftBehind]:
    """What stands at `places`, each with the bytes of the storages that go with it: those that are not `kept`, each
    counted once. `storage_of` is the index's.
    """
    counted = {id(storage) for storage in kept}
    seen: set[int] = set()
    left = []
    for place in places:
        nbytes = 0
        for node in walk([place.node], seen):
            storage = storage_of.get(id(node))
            if storage is not None and id(storage) not in counted:
                counted.add(id(storage))
                nbytes += storage.nbytes
        left.append(LeftBehind(place.path, nbytes, why))
    return left
