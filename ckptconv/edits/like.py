"""Give a checkpoint the names, their order and the parameter groups of another one (``--like``).

No values are made up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ckptconv.checkpoint.merging import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.optimizers import Key, Optimizer, ParameterGroup
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.edits.changes import Changes
from ckptconv.edits.optimizers import Followers, are_same, options_of, rewrite, set_list
from ckptconv.edits.selection import leave_out
from ckptconv.errors import RefusedError, at_path, count, some
from ckptconv.pickles.graph import Dict, Node, replace_items, set_items

_NOT_THERE = "not in the other checkpoint"


def make_like(checkpoint: Checkpoint, other: Checkpoint, changes: Changes, *, in_order: bool) -> None:
    """Give `checkpoint` the names of `other`, in their order, and its optimizers the parameter groups of `other`.

    Names that `other` does not have are removed. A note lists names that only `other` has.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        other: The other checkpoint.
        changes: The report.
        in_order: Whether the user asserts that the parameters of both are in the order of their models.

    Raises:
        RefusedError: It is not clear what belongs together, or which options a group would have.
    """
    ours = Followers(checkpoint, in_order=in_order, model=other)
    theirs = Followers(other, in_order=in_order)
    names = [ours.names_of(each) for each in ours.optimizers]  # as long as the weights are in their order
    by_path = {each.path: each for each in theirs.optimizers}
    extra: set[str] = set()
    if checkpoint.detected.state_dicts:
        extra = _order_weights(checkpoint, _main(checkpoint), _main(other), changes)
    for optimizer, name_of in zip(ours.optimizers, names, strict=True):
        is_only = len(ours.optimizers) == len(theirs.optimizers) == 1
        like = theirs.optimizers[0] if is_only else by_path.get(optimizer.path)
        if like is None:
            changes.notes.append(f"{other.source.path} has no optimizer like {optimizer.path}, which keeps its groups")
            ours.leave_out(optimizer, {key for key, name in name_of.items() if name in extra}, _NOT_THERE, changes)
            continue
        theirs_of = theirs.names_of(like)
        wanted = [[theirs_of[key] for key in group.params] for group in like.groups]
        _order_optimizer(ours, optimizer, name_of, wanted, changes)
    checkpoint.changed()
    drop_effect_order(checkpoint)


def _main(checkpoint: Checkpoint) -> StateDict:
    """Return the main state dict of `checkpoint`. Raise RefusedError if there is none or several."""
    found = [each for each in checkpoint.detected.main() if isinstance(each, StateDict)]
    if len(found) != 1:
        got = some([each.path for each in found]) or "none"
        raise RefusedError("one state dict is needed for the order of names", got=got)
    return found[0]


def _order_weights(checkpoint: Checkpoint, ours: StateDict, theirs: StateDict, changes: Changes) -> set[str]:
    """Give the state dict `ours` of `checkpoint` the names of `theirs`, in their order.

    Return the names that were removed.

    Raises RefusedError if they have no name in common.
    """
    place_of = {name: i for i, name in enumerate(theirs.names())}
    names = ours.names()
    if not place_of.keys() & set(names):
        got = f"{some(names)}; the other has {some([*place_of])}"
        raise RefusedError("the other checkpoint has none of the names", got=got)
    extra = [
        place
        for place in checkpoint.places
        if place.parent and place.parent.node is ours.node and place.key is not None and place.key not in place_of
    ]
    if extra:
        changes.left_behind += leave_out(checkpoint, extra, _NOT_THERE)
    _note_missing(ours.path, place_of.keys() - set(names), changes)
    items = sorted(ours.node.entries(), key=lambda item: place_of.get(item[0], -1) if isinstance(item[0], str) else -1)
    if [key for key, _ in items if isinstance(key, str)] != ours.names():
        replace_items(ours.node, items)
        changes.reordered.append(ours.path)
    return set(names) - place_of.keys()


def _note_missing(path: str, names: Collection[str], changes: Changes) -> None:
    if names:
        changes.notes.append(
            f"{path} does not have {count(len(names), 'name')} of the other checkpoint: {some(sorted(names))}"
        )


def _order_optimizer(
    ours: Followers, optimizer: Optimizer, names: dict[Key, str], wanted: Sequence[Sequence[str]], changes: Changes
) -> None:
    """Give `optimizer` the parameter groups `wanted`.

    Args:
        ours: The optimizers of the checkpoint.
        optimizer: The optimizer.
        names: The names of its parameters.
        wanted: The names of the parameters of each group.
        changes: The report.

    Raises:
        RefusedError: The options of a group are not known.
    """
    key_of = {name: key for key, name in names.items()}
    listed = {name for group in wanted for name in group}
    extra = {key for key, name in names.items() if name not in listed}
    ours.leave_out(optimizer, extra, _NOT_THERE, changes, renumber=False)
    _note_missing(optimizer.path, listed - key_of.keys(), changes)
    groups, graph = [], ours.checkpoint.graph
    home = {names[key]: i for i, each in enumerate(optimizer.groups) for key in each.params}
    for i, group in enumerate(wanted):
        origins = [optimizer.groups[n] for n in sorted({home[name] for name in group if name in home})]
        options = [options_of(each) for each in origins or ([] if group else optimizer.groups[i : i + 1])]
        if not options or not all(are_same(each, options[0]) for each in options):
            raise RefusedError(
                f"it is not known which options group {i} of the optimizer{at_path(optimizer.path)} has",
                got="parameters of groups with different options"
                if options
                else f"none of {some(group)} is in a group",
            )
        graph.shared.update(each for each in options[0] if isinstance(each, Node))
        node = set_items(Dict(), [*options[0], "params", None])
        keys = [key_of.get(name, name) for name in group]
        groups.append(ParameterGroup(node, keys, optimizer.groups[0].names))
    set_list(optimizer.node, "param_groups", [group.node for group in groups])
    new = replace(optimizer, groups=groups)
    every = dict(names)
    every.update((name, name) for name in listed)
    rewrite(new, [group.params for group in groups], every, is_named=optimizer.is_named)
    ours.change_of(optimizer, changes).groups = len(groups)
