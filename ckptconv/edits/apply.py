"""Apply edits to the graph of a checkpoint, in place, and return what changed.

Order: selection, unwrap, strip, rename, add, dtypes, devices, loadable, compaction.
"""

from __future__ import annotations

from ckptconv.checkpoint.merging import refuse_different
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.edits.changes import Changes
from ckptconv.edits.dtype_casts import cast
from ckptconv.edits.loadable.making import make_loadable
from ckptconv.edits.options import Edits
from ckptconv.edits.rename import NameEditor
from ckptconv.edits.retag import about_kept_devices, retag
from ckptconv.edits.selection import select
from ckptconv.edits.views import compact
from ckptconv.hints import option


def apply(checkpoint: Checkpoint, edits: Edits, *, is_emitted: bool = True) -> Changes:
    """Edit the graph of a checkpoint, in place.

    Args:
        checkpoint: After an error it may be half edited: use it no more.
        edits: What is asked for.
        is_emitted: Whether a pickle will be made of it; not for safetensors, nor to compare it.

    Returns:
        What changed.

    Raises:
        UsageError, NoMatchError, CollisionError, RefusedError: The edits make no sense, or none here.
    """
    averages = checkpoint.detected.averages() if edits.state_dict and edits.select is None else []
    changes = Changes(left_behind=select(checkpoint, edits, is_emitted=is_emitted))
    for each in averages:
        text = f"{each.path} is an average of the weights (EMA) and is left behind; to take only the average: "
        changes.notes.append(text + option("select", each.path))
    refuse_different(checkpoint)
    detected = checkpoint.detected
    # asked here, as an edit of names would have the places looked for anew
    about_kept = about_kept_devices(checkpoint, edits.devices) if edits.devices else []
    NameEditor(checkpoint, detected, changes).run(edits)
    if edits.dtypes:
        cast(checkpoint, edits.dtypes, detected, changes)
    if edits.devices:
        retag(checkpoint, edits.devices, detected.rng_storages, changes)
        changes.notes += about_kept
        changes.rng_states = [
            info.path for info in detected.rng_states if info.storage and info.storage.device == "cpu"
        ]
    if edits.loadable or edits.loadable_objects:
        make_loadable(checkpoint, changes, objects=edits.loadable_objects)
    if edits.compact:
        compact(checkpoint, changes)
    return changes
