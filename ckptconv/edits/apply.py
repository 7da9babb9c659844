"""Apply edits to the graph of a checkpoint, in place, and return the changes.

Order: selection, unwrap, strip, rename, regroup, add, like, optimizer, scales, dtypes, devices, loadable, compaction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckptconv.checkpoint.merging import refuse_different
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import Detected
from ckptconv.edits.changes import Changes
from ckptconv.edits.dtype_casts import cast
from ckptconv.edits.error_paths import names_checkpoint
from ckptconv.edits.loadable.making import make_loadable
from ckptconv.edits.optimizers import Followers
from ckptconv.edits.options import NO_EDITS, Edits
from ckptconv.edits.rename import NameEditor
from ckptconv.edits.retag import about_kept_devices, retag
from ckptconv.edits.selection import select
from ckptconv.edits.views import compact
from ckptconv.hints import option


@names_checkpoint
def apply(
    checkpoint: Checkpoint,
    edits: Edits,
    *,
    is_emitted: bool = True,
    like: Checkpoint | None = None,
    model: Checkpoint | None = None,
) -> Changes:
    """Apply `edits` to the graph of `checkpoint`, in place, and return the changes.

    Args:
        checkpoint: The checkpoint. After an error it may be half edited, and must not be used.
        edits: The edits.
        is_emitted: Whether the graph will be written as a pickle. It is not for safetensors, nor for a comparison; then
            optimizers are not edited.
        like: The checkpoint in the file ``edits.like``, or None.
        model: The checkpoint in the file ``edits.model``, or None.

    Raises:
        UsageError, NoMatchError, CollisionError, RefusedError: The edits are not valid, or not for this checkpoint.
    """
    optimizers = partial(Followers, checkpoint, in_order=edits.optimizer_order == "model", model=model)
    changes = _select(checkpoint, edits, optimizers, is_emitted=is_emitted)
    refuse_different(checkpoint)
    if edits == NO_EDITS:
        return changes
    detected = checkpoint.detected
    # before the names are edited: after that, all places would have to be found again
    about_kept = about_kept_devices(checkpoint, edits.devices) if edits.devices else []
    if edits.regroup:
        _edit_names(checkpoint, detected, replace(edits, add_prefix=()), changes)
        _regroup(checkpoint, edits, changes, optimizers() if is_emitted else None)
        detected = checkpoint.detected
        edits = replace(edits, unwrap=False, strip_prefix=(), rename=())
    _edit_names(checkpoint, detected, edits, changes)
    if like is not None:
        from ckptconv.edits.like import make_like  # lazily, for start-up

        make_like(checkpoint, like, changes, in_order=edits.optimizer_order == "model")
        detected = checkpoint.detected
    if edits.optimizer and is_emitted:
        optimizers().key_by(edits.optimizer, changes)
    if edits.regroup and changes.optimizers:
        optimizers().check_order(changes)
    if edits.dtypes:
        from ckptconv.edits.dequantizing import dequantize  # lazily, for start-up

        if dequantize(checkpoint, edits.dtypes, changes):
            detected = checkpoint.detected
        cast(checkpoint, edits.dtypes, detected, changes)
    if edits.devices:
        retag(checkpoint, edits.devices, detected.rng_storages, changes)
        changes.notes += about_kept
        states = detected.rng_states
        changes.rng_states = [info.path for info in states if info.storage and info.storage.device == "cpu"]
    if edits.loadable or edits.loadable_objects:
        make_loadable(checkpoint, changes, objects=edits.loadable_objects)
    if edits.compact:
        compact(checkpoint, changes)
    return changes


def _select(checkpoint: Checkpoint, edits: Edits, optimizers: Callable[[], Followers], *, is_emitted: bool) -> Changes:
    """Select the requested data, and remove the state of removed weights from optimizers. Return the changes."""
    averages = checkpoint.detected.averages() if edits.state_dict and edits.select is None else []
    is_partial = edits.drop or edits.include or edits.exclude
    followers = optimizers() if is_partial and is_emitted else None
    if followers:
        edits = followers.take_globs(edits)
    changes = Changes(left_behind=select(checkpoint, edits, is_emitted=is_emitted))
    if followers:
        followers.follow_selection(changes)
    for average in averages:
        text = f"{average.path} is an average of the weights (EMA) and is not saved; to extract only the average: "
        changes.notes.append(text + option("select", average.path))
    return changes


def _regroup(checkpoint: Checkpoint, edits: Edits, changes: Changes, followers: Followers | None) -> None:
    """Regroup the tensors of `checkpoint`, and change its optimizers accordingly if `followers` is not None."""
    from ckptconv.edits.regroup import regroup  # lazily, for start-up

    if followers is None or not followers.optimizers:
        regroup(checkpoint, edits, changes)
        return
    from ckptconv.edits.regroup_optimizers import follow

    is_beside = followers.of is not checkpoint
    regroup(followers.of, edits, Changes() if is_beside else changes, partial(follow, followers, changes))


def _edit_names(checkpoint: Checkpoint, detected: Detected, edits: Edits, changes: Changes) -> None:
    if edits.unwrap or edits.strip_prefix or edits.rename or edits.add_prefix:
        NameEditor(checkpoint, detected, changes).run(edits)
