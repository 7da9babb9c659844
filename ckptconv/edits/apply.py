"""Apply edits to the graph of a checkpoint, in place, and return what changed.

Order: selection, unwrap, strip, rename, add, dtypes, devices, compaction.
"""

from __future__ import annotations

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import detect
from ckptconv.edits.changes import Changes
from ckptconv.edits.dtype_casts import cast
from ckptconv.edits.options import Edits
from ckptconv.edits.rename import NameEditor
from ckptconv.edits.retag import retag
from ckptconv.edits.selection import select
from ckptconv.edits.views import compact

__all__ = ["apply"]


def apply(checkpoint: Checkpoint, edits: Edits) -> Changes:
    """Edit CHECKPOINT's graph.

    Raises UsageError, NoMatchError, CollisionError, RefusedError, before or after touching it: use it no more then.
    """
    changes = Changes(left_behind=select(checkpoint, edits))
    detected = detect(checkpoint)
    NameEditor(checkpoint, detected, changes).run(edits)
    if edits.dtypes:
        cast(checkpoint, edits.dtypes, detected, changes)
    if edits.devices:
        retag(checkpoint, edits.devices, detected.rng_storages, changes)
        changes.rng_states = [
            info.path for info in detected.rng_states if info.storage and info.storage.device == "cpu"
        ]
    if edits.compact:
        compact(checkpoint, changes)
    return changes
