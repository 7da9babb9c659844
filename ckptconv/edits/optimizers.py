"""Let optimizers follow their parameters: what is left out of a state dict, is left out of its optimizers too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.optimizers import (
    Key,
    Optimizer,
    Weights,
    candidates,
    is_key,
    keys_of,
    mismatched,
    optimizers_in,
    weights_in,
)
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.edits.changes import Changes, OptimizerChange
from ckptconv.edits.parameters import ParameterChange
from ckptconv.edits.selection import leave_out
from ckptconv.errors import RefusedError, some
from ckptconv.hints import option
from ckptconv.pickles.graph import AT_ONCE, Effect, List, Object, Value
from ckptconv.pickles.paths import key_segment

_WITH_WEIGHTS = "the state of weights that are left out"


class Followers:
    """The optimizers of a checkpoint, and the state dicts that they can belong to, as they are before edits."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.where = checkpoint.source.path
        detected = checkpoint.detected
        self.optimizers = optimizers_in(checkpoint.index, detected) if detected.optimizer_nodes else []
        averages = {id(found) for found in detected.averages()} if self.optimizers else set()
        models = [found for found in detected.state_dicts if id(found) not in averages] if self.optimizers else []
        self._models: list[tuple[StateDict, Weights]] = [
            (found, weights_in(found, checkpoint.index)) for found in models
        ]

    def follow_selection(self, changes: Changes) -> None:
        """Leave out the state of parameters whose weights were left out, and count the others again.

        Raise RefusedError if it is not sure which parameters these are.
        """
        there = {id(node) for node in self.checkpoint.index.nodes} if self.optimizers else set()
        steps: list[tuple[Weights, ParameterChange]] = []
        for found, weights in self._models:
            if id(found.node) in there:
                gone = weights.shapes.keys() - set(found.names())
                steps.append((weights, ParameterChange(dropped=frozenset(gone))))
        if not any(change.dropped for _, change in steps):
            return
        for optimizer in self.optimizers:
            if id(optimizer.node) in there:
                gone_keys = self._keys_dropped(optimizer, steps)
                if gone_keys:
                    self._leave_out(optimizer, gone_keys, changes)

    def _keys_dropped(self, optimizer: Optimizer, steps: Sequence[tuple[Weights, ParameterChange]]) -> set[Key]:
        """Return the parameters of `optimizer` that go with what `steps` drop. Raise RefusedError if it is not sure."""
        if optimizer.trouble:
            raise self._refused(optimizer, steps, optimizer.trouble)
        changed = {id(weights): change for weights, change in steps}
        possible = candidates(optimizer, [weights for _, weights in self._models])
        if not possible:
            raise self._refused(optimizer, steps, "no state dict in the file has its parameters")
        answers = []
        for weights in possible:
            dropped = changed[id(weights)].dropped if id(weights) in changed else frozenset()
            for name, shape, own in mismatched(optimizer, weights):
                got = f"its state of {name} has the shape {[*shape]}, and the weight {[*own]}"
                raise self._refused(optimizer, steps, got)
            answer, doubt = _keys_dropped(optimizer, weights, dropped)
            if doubt:
                raise self._refused(optimizer, steps, doubt)
            answers.append(answer)
        if any(answer != answers[0] for answer in answers):
            raise self._refused(optimizer, steps, f"it can belong to {some([weights.path for weights in possible])}")
        return answers[0]

    def _refused(
        self, optimizer: Optimizer, steps: Sequence[tuple[Weights, ParameterChange]], why: str
    ) -> RefusedError:
        names = [name for _, change in steps for name in sorted(change.dropped)]
        return RefusedError(
            f"it is not known which state in the optimizer at {optimizer.path} goes with {some(names)}",
            where=self.where,
            got=why,
            hint="without the optimizer: " + option("drop", optimizer.path),
        )

    def _leave_out(self, optimizer: Optimizer, gone: set[Key], changes: Changes) -> None:
        """Leave out the parameters `gone` of `optimizer`."""
        index = self.checkpoint.index
        segments = {key_segment(key, 0) for key in gone}
        unwanted = [
            place
            for place in index.every_place
            if place.parent and place.parent.node is optimizer.state and place.segment in segments
        ]
        changes.left_behind += leave_out(self.checkpoint, unwanted, _WITH_WEIGHTS)
        kept = [[key for key in group.params if key not in gone] for group in optimizer.groups]
        count_again(optimizer, kept)
        self.checkpoint.changed(same_tensors=True)
        changes.optimizers.setdefault(optimizer.path, OptimizerChange()).left_out += len(gone)


def _keys_dropped(optimizer: Optimizer, weights: Weights, dropped: frozenset[str]) -> tuple[set[Key], str | None]:
    """Return the parameters of `optimizer` that go with `dropped`, names in `weights`, and why that is not sure."""
    kept = {first: name for name, first in weights.first.items() if name not in dropped}
    if optimizer.names is not None:
        there = {weights.first.get(name) for name in optimizer.names.values() if name not in dropped}
        gone = {key for key, name in optimizer.names.items() if name in dropped}
        names_gone = [optimizer.names[key] for key in gone]
        torn = [name for name in names_gone if weights.first[name] in kept.keys() - there]
    else:
        answer = keys_of([name for name in weights.untied if name not in kept], optimizer, weights)
        torn = [name for name in weights.untied if name in dropped and name in kept]
        if isinstance(answer, tuple):
            keys, names = answer
            return set(), f"{some([str(key) for key in keys])} can be {some(names)}, which have the same shape"
        if not keys_of(torn, optimizer, weights):
            torn = []
        gone = answer
    if torn:
        return set(), f"{torn[0]} has another name that stays ({kept[weights.first[torn[0]]]})"
    return gone, None


def count_again(optimizer: Optimizer, groups: Sequence[Sequence[Key]]) -> None:
    """Give each group of `optimizer` the parameters that `groups` have for it, numbered from 0.

    Names stay as they are. The state must have no other parameters.
    """
    order = [key for group in groups for key in group]
    new: dict[Key, Key] = {key: key if isinstance(key, str) else n for n, key in enumerate(order)}
    for group, params in zip(optimizer.groups, groups, strict=True):
        _set_list(group.node, "params", [new[key] for key in params])
        if group.names is not None:
            name_of = dict(zip(group.params, group.names, strict=True))
            _set_list(group.node, "param_names", [name_of[key] for key in params])
    _set_keys(optimizer.state, new)


def _set_keys(state: Object, new: Mapping[Key, Key]) -> None:
    """Replace the keys of `state` by their values in `new`."""
    for effect, i in state.pairs():
        key = effect.values[i]
        if is_key(key):
            effect.values[i] = new.get(key, key)


def _set_list(group: Object, key: str, values: Sequence[Value]) -> None:
    """Set the item `key` of `group`, which has one, to a new list of `values`."""
    new = List()
    for at in range(0, len(values), AT_ONCE):
        new.add(Effect("APPENDS", [*values[at : at + AT_ONCE]], None))
    for effect, i in group.pairs():
        if effect.values[i] == key:
            effect.values[i + 1] = new
