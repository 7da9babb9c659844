"""Drop the bytes of storages that no tensor shows. What is left keeps its order, and what views share they go on sharing."""

from __future__ import annotations

from ckptconv.checkpoint.model import Changes, Checkpoint, Dropped
from ckptconv.edits.views import Group, Views, packed_ranges

__all__ = ["compact"]


def compact(checkpoint: Checkpoint, changes: Changes) -> None:
    """Let each storage of CHECKPOINT hold no more than its views reach over. One that something else refers to, or that is deflated, stays whole."""
    views = Views(checkpoint)
    storages = dropped = 0
    for storage, users in views.of_storage.items():
        before = storage.nbytes
        kept = sum(stop - start for start, stop in packed_ranges(storage.data, users))
        if storage in views.used_otherwise or kept == before:
            continue
        views.restate(storage, [Group(users)], pack=True)
        storages, dropped = storages + 1, dropped + before - storage.nbytes
    views.conclude()
    changes.compacted = Dropped(storages, dropped)
    if not storages:
        changes.notes.append(
            "tensors show every byte of the storages that could be compacted, so --compact changed nothing"
        )
