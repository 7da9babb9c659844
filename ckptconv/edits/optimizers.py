"""Change optimizers together with their weights, and let them refer to parameters by names or by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.optimizers import (
    Key,
    Optimizer,
    ParameterGroup,
    Weights,
    candidates,
    is_key,
    keys_of,
    names_in,
    optimizers_in,
    weights_in,
)
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.checkpoint.tensor_info import matches
from ckptconv.edits.changes import Changes, OptimizerChange
from ckptconv.edits.options import Edits
from ckptconv.edits.selection import leave_out
from ckptconv.errors import LimitError, NoMatchError, RefusedError, at_path, some
from ckptconv.hints import Placeholder, joined, option
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Effect, List, Node, Object, Tuple, Value, add_elements, replace_items
from ckptconv.pickles.paths import key_segment
from ckptconv.work import work

_T = TypeVar("_T")
_WITH_WEIGHTS = "the state of weights that are left out"


class Followers:
    """The optimizers of a checkpoint and the state dicts to which they can belong, before an edit.

    Args:
        checkpoint: The checkpoint.
        in_order: Whether the user asserts that the parameters are in the order of the model.
        model: The checkpoint with the model, or None. It is used if `checkpoint` has no state dict.
    """

    def __init__(self, checkpoint: Checkpoint, *, in_order: bool = False, model: Checkpoint | None = None) -> None:
        self.checkpoint = checkpoint
        self.in_order = in_order
        self.optimizers = optimizers_in(checkpoint.index, checkpoint.detected)
        is_beside = model is not None and self.optimizers and not checkpoint.detected.state_dicts
        #: The checkpoint with the model.
        self.of = of = model if model is not None and is_beside else checkpoint
        self._kept: set[str] | None = None  # the names to keep in the model of another checkpoint
        averages = {id(found) for found in of.detected.averages()}
        if len(self.optimizers) * len(of.detected.state_dicts) > LIMITS.optimizer_steps // 100:
            raise LimitError("too many optimizers and state dicts")
        self.models: list[tuple[StateDict, Weights]] = [
            (found, weights_in(found, of.index, is_ordered=not of.is_state_dict))
            for found in of.detected.state_dicts
            if self.optimizers and id(found) not in averages
        ]

    def take_globs(self, edits: Edits) -> Edits:
        """Return `edits` without the globs that match names in the model of another checkpoint.

        These globs then select parameters of the optimizers. If the model is in the same checkpoint, `edits` is
        returned unchanged. Raises NoMatchError if a glob without a slash matches no name.
        """
        if self.of is self.checkpoint:
            return edits
        names = {name for _, weights in self.models for name in weights.shapes}
        self._kept = names
        fields = "include", "exclude"
        for field in fields:
            hits: set[str] = set()
            for glob in (glob for glob in getattr(edits, field) if "/" not in glob):
                found = {name for name in names if matches(glob, name, name)}
                if not found:
                    raise NoMatchError(f"no name in the model matches {glob!r}", unmatched=(field, glob))
                hits |= found
            if hits:
                self._kept = self._kept & hits if field == "include" else self._kept - hits
        paths: Any = {field: tuple(glob for glob in getattr(edits, field) if "/" in glob) for field in fields}
        return replace(edits, **paths)

    def follow_selection(self, changes: Changes) -> None:
        """Remove the state of weights that were removed from the checkpoint.

        Raises RefusedError if it is not known which state belongs to them.
        """
        remaining = set(map(id, self.checkpoint.index.nodes)) if self.models else set()
        dropped: dict[int, frozenset[str]] = {}
        for found, weights in self.models:
            if id(found.node) in remaining or self._kept is not None:
                kept = set(found.names()) if self._kept is None else self._kept
                dropped[id(weights)] = frozenset(weights.shapes.keys() - kept)
        names = [name for each in dropped.values() for name in sorted(each)]
        if not names:
            return
        for optimizer in self.optimizers:
            if id(optimizer.node) in self.checkpoint.detected.optimizer_nodes:
                ask = partial(_keys_dropped, optimizer, dropped, in_order=self.in_order)
                gone = self.agreed(optimizer, f"which state goes with {some(names)}", ask)
                self.leave_out(optimizer, gone, _WITH_WEIGHTS, changes)

    def names_of(self, optimizer: Optimizer) -> dict[Key, str]:
        """Return the name of each parameter of `optimizer`. Raise RefusedError if it is not known."""
        if optimizer.names and not self.candidates(optimizer):
            return optimizer.names
        ask = partial(names_in, optimizer, in_order=self.in_order)
        return self.agreed(optimizer, "which parameter belongs to which weight", ask)

    def candidates(self, optimizer: Optimizer) -> list[Weights]:
        """Return the weights of all state dicts to which `optimizer` can belong.

        Averages of weights are not considered.
        """
        return candidates(optimizer, [weights for _, weights in self.models])

    def agreed(self, optimizer: Optimizer, what: str, ask: Callable[[Weights], _T | str]) -> _T:
        """Return the result of `ask` for the state dicts to which `optimizer` can belong, if it is the same for all.

        Args:
            optimizer: The optimizer.
            what: The question, for the error.
            ask: Returns the answer for one state dict, or a text with the reason why it is not known.

        Raises:
            RefusedError: There is no such state dict, the answers differ, or one is a reason.
        """
        every = self.candidates(optimizer)
        answers = [optimizer.trouble] if optimizer.trouble else [ask(weights) for weights in every]
        doubt: str | None = next((each for each in answers if isinstance(each, str)), None)
        if not answers:
            doubt = "no state dict contains its parameters" if self.models else "there is no state dict"
        elif not doubt and any(answer != answers[0] for answer in answers):
            doubt = f"it can belong to {some([weights.path for weights in every])}"
        if doubt is None:
            answer = answers[0]
            assert not isinstance(answer, str)
            return answer
        hints: list[str] = []
        if optimizer.trouble:
            pass  # options about weights do not help
        elif not self.models:
            hints.append("use the file with the weights: " + option("model", Placeholder("FILE")))
        elif every and not (self.in_order or optimizer.names):
            order = " if it was created with model.parameters(), or with parts of it in that order"
            hints.append(option("optimizer_order", "model") + order)
        if optimizer.path != ".":
            hints.append("to leave out the optimizer: " + option("drop", optimizer.path))
        raise RefusedError(
            f"it is not known {what} in the optimizer{at_path(optimizer.path)}",
            where=self.checkpoint.source.path,  # the state dict can be in another checkpoint
            got=doubt,
            hint=joined(*hints, separator="; or ") if hints else None,
        )

    def change_of(self, optimizer: Optimizer, changes: Changes) -> OptimizerChange:
        """Return the entry for `optimizer` in `changes`. Its ``names_from`` is set if it was not."""
        change = changes.optimizers.setdefault(optimizer.path, OptimizerChange())
        known = "itself" if optimizer.names else "order" if self.in_order else "shapes"
        change.names_from = change.names_from or known
        return change

    def check_order(self, changes: Changes) -> None:
        """Raise RefusedError if a regrouped optimizer has numbers, and the order of the new parameters is not known."""
        for optimizer in self.optimizers:
            change = changes.optimizers.get(optimizer.path, OptimizerChange())
            if not change.regrouped or change.groups is not None or optimizer.is_named:
                continue
            torn = [name for group in optimizer.groups for name in _torn(group.names or ())]
            if self.in_order and not torn:
                continue
            hints = [
                option("optimizer", "names") + " needs no order",
                option("like", Placeholder("FILE")) + " uses the order of a checkpoint of the new model",
            ]
            if not torn:
                order = " if the new model.parameters() have the order of the names in the output"
                hints.append(option("optimizer_order", "model") + order)
            raise RefusedError(
                f"the new parameter numbers are not known for the optimizer{at_path(optimizer.path)}",
                got=f"{torn[0]} without the other parameters of its module" if torn else None,
                hint=joined(*hints, separator="; "),
            )

    def leave_out(
        self, optimizer: Optimizer, gone: set[Key], why: str, changes: Changes, *, renumber: bool = True
    ) -> None:
        """Remove the state of the parameters `gone` of `optimizer`. Do nothing if there are none.

        Args:
            optimizer: The optimizer.
            gone: The parameters.
            why: The reason, for the report.
            changes: The report.
            renumber: Whether to remove the parameters from the groups, too, and to number the others from 0.
        """
        if not gone:
            return
        segments = {key_segment(key, 0) for number in gone for key in (number, str(number))}
        unwanted = [
            place
            for place in self.checkpoint.index.every_place
            if place.parent and place.parent.node is optimizer.state and place.segment in segments
        ]
        changes.left_behind += leave_out(self.checkpoint, unwanted, why)
        if renumber:
            kept = [[key for key in group.params if key not in gone] for group in optimizer.groups]
            rewrite(optimizer, kept, optimizer.names, is_named=optimizer.is_named)
            self.checkpoint.changed()
        self.change_of(optimizer, changes).left_out += len(gone)

    def key_by(self, form: str, changes: Changes) -> None:
        """Let each optimizer refer to its parameters by `form`: ``names`` or ``numbers``.

        Add a note if all do so already.

        Raises RefusedError if the names are not known.
        """
        others = [
            each
            for each in self.optimizers
            if each.trouble
            or (each.params and each.is_named != (form == "names"))
            or (each.has_texts and form == "numbers")
        ]
        for optimizer in others:
            is_renumbered = not optimizer.trouble and not optimizer.is_named and form == "numbers"
            names = optimizer.names if is_renumbered else self.names_of(optimizer)
            rewrite(optimizer, [group.params for group in optimizer.groups], names, is_named=form == "names")
            change = self.change_of(optimizer, changes)
            change.keyed_by, change.names_from = form, "itself" if is_renumbered else change.names_from
        if others:
            self.checkpoint.changed()
        else:
            changes.notes.append(
                "every optimizer is keyed like this already, so " + option("optimizer", form) + " changed nothing"
            )


def _keys_dropped(
    optimizer: Optimizer, every: Mapping[int, frozenset[str]], weights: Weights, *, in_order: bool
) -> set[Key] | str:
    """Return the parameters of `optimizer` that are removed with names in `weights`, or a text with a doubt.

    `every` contains the removed names of each state dict, by the id of its weights. `in_order` is as in
    :class:`Followers`.
    """
    dropped = every.get(id(weights), frozenset())
    kept = {first: name for name, first in weights.first.items() if name not in dropped}
    names = names_in(optimizer, weights, in_order=in_order)
    if isinstance(names, dict):
        updated = {weights.first.get(name) for name in names.values() if name not in dropped}
        gone: set[Key] | str = {key for key, name in names.items() if name in dropped}
        torn = [names[key] for key in gone if weights.first[names[key]] in kept.keys() - updated]
    elif in_order or optimizer.names is not None:
        return names
    else:
        gone = keys_of([name for name in weights.untied if name not in kept], optimizer, weights)
        torn = [name for name in weights.untied if name in dropped and name in kept]
        torn = torn if keys_of(torn, optimizer, weights) else []
    if torn and not isinstance(gone, str):
        return f"{torn[0]} has another name that is unchanged ({kept[weights.first[torn[0]]]})"
    return gone


def rewrite(
    optimizer: Optimizer, groups: Sequence[Sequence[Key]], names: dict[Key, str] | None, *, is_named: bool
) -> None:
    """Give each group of `optimizer` the parameters in `groups`, numbered from 0 or by their names, and change its
    state.

    Args:
        optimizer: The optimizer. Its state must have no other parameters.
        groups: The keys of the parameters of each group.
        names: The name of each parameter, or None. With numbers, the names are written as ``param_names``. They are not
            written if names replace numbers, because ``set_optimizer_state_dict`` then fails if the run's own
            optimizer has none (``full_state_dict``, torch 2.13).
        is_named: Whether to write names and not numbers.
    """
    order = [key for group in groups for key in group]
    new: dict[Key, Key] = {key: names[key] if names and is_named else n for n, key in enumerate(order)}
    for group, params in zip(optimizer.groups, groups, strict=True):
        set_list(group.node, "params", [new[key] for key in params])
        if is_named and not optimizer.is_named:
            replace_items(group.node, [item for item in group.node.entries() if item[0] != "param_names"])
        elif names and (group.names is not None or not is_named):
            set_list(group.node, "param_names", [names[key] for key in params])
    for effect, i in optimizer.state.pairs():
        stored = effect.values[i]
        key = optimizer.key(stored)
        key = stored if key is None and is_key(stored) else key
        if key is not None:
            effect.values[i] = new.get(key, stored)


def _torn(names: Iterable[str]) -> Iterator[str]:
    """Yield the names that are separated from other names of their module.

    ``model.parameters()`` never separates them.
    """
    seen: set[str] = set()
    last = None
    for name in names:
        module = name.rpartition(".")[0]
        if module != last and module in seen:
            yield name
        seen.add(module)
        last = module


def options_of(group: ParameterGroup) -> list[Value]:
    """Return the options of `group` (``lr`` and others), keys and values in turn, without its parameters."""
    options = [each for item in group.node.entries() if item[0] not in ("params", "param_names") for each in item]
    work().charge(len(options))  # they are asked for again for each change of a parameter
    return options


def are_same(a: Value | list[Value], b: Value | list[Value]) -> bool:
    """Return whether `a` and `b` are certainly equal.

    They are if they are the same node, equal atoms, or tuples and lists of such values.
    """
    todo: list[tuple[Value | list[Value], Value | list[Value]]] = [(a, b)]
    seen: set[tuple[int, int]] = set()  # tuples can share members, and be nested deeply
    while todo:
        a, b = todo.pop()
        if isinstance(a, Tuple) and isinstance(b, Tuple) and a is not b:
            if (id(a), id(b)) in seen:
                continue
            seen.add((id(a), id(b)))
            work().charge(len(a.items))  # any number of groups can have them
            a, b = a.items, b.items
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            todo += zip(a, b, strict=True)
        elif not (a is b or (type(a) is type(b) and not isinstance(a, (Node, list)) and a == b)):
            return False
    return True


def set_list(mapping: Object, key: str, values: Sequence[Value]) -> None:
    """Set the item `key` of `mapping` to a new list of `values`. The item is added if `mapping` does not contain it."""
    new = add_elements(List(), values)
    for effect, i in mapping.pairs():
        if effect.values[i] == key:
            effect.values[i + 1] = new
            return
    mapping.add(Effect("SETITEM", [key, new], None))
