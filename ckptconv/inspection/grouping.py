"""Find the built-in rules that match a checkpoint, by its names, its shapes and its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.edits.regroup_files import check_model, read_rules, shipped_rules
from ckptconv.edits.regroup_items import Items, Maker, apply_rules
from ckptconv.edits.regroup_plan import Group
from ckptconv.edits.regroup_rules import Rule
from ckptconv.errors import CkptconvError
from ckptconv.hints import Option
from ckptconv.lazy_regex import regex

_NUMBER = regex(r"\.[0-9]{1,18}(?=\.)")


class _Shapes(Maker[Any]):
    """Applies rules to the shapes of the tensors of `checkpoint`, without their data."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.source: Readable = checkpoint.source

    def tensor(self, value: object) -> TensorInfo | None:
        """Return `value` if it is a tensor, else None."""
        return value if isinstance(value, TensorInfo) else None

    def resolved(self, rule: Rule) -> Rule:
        """Return `rule` with numbers instead of names of sizes. Raise RefusedError if it is for another model."""
        check_model(self.source, rule)
        return super().resolved(rule)

    def made(self, group: Group, _values: Sequence[TensorInfo], like: Any) -> list[TensorInfo]:
        """Return the new tensors of `group`. Only their dtype and shape are correct."""
        shapes = [group.geometry.shape]
        if group.rule.whole_is_read:
            shapes = [box.shape for box in group.geometry.boxes()]
        return [replace(like, shape=shape) for shape in shapes]


def rules_between(a: Checkpoint, b: Checkpoint) -> tuple[Option, ...] | None:
    """Return the options that regroup the tensors of `a` like those of `b`. None if no built-in rules do that.

    The names, dtypes and shapes must be the same afterwards. Each checkpoint must have one state dict, and `a` no
    optimizer.
    """
    if len(a.detected.state_dicts) != 1 or len(b.detected.state_dicts) != 1 or a.detected.optimizer_nodes:
        return None
    wanted = {name: (info.dtype, info.shape) for name, info in _tensors(b)}
    for name in shipped_rules():
        for reverse in (False, True):
            items: Items[Any] = Items(_tensors(a), "")
            try:
                apply_rules(read_rules(name, (), reverse=reverse), [items], _Shapes(a))
            except CkptconvError:
                continue
            if {key: (info.dtype, info.shape) for key, info in items.values.items()} == wanted:
                return (Option("rules", (name,)), *([Option("reverse")] if reverse else []))
    return None


def rules_that_stack(checkpoint: Checkpoint) -> Option | None:
    """Return the option that stacks the experts of `checkpoint`. None if its experts are not stored one by one."""
    names = {
        _NUMBER.sub(".0", name)  # numbers in rules match any number
        for found in checkpoint.detected.state_dicts
        for name in found.names()
        if ".experts." in name
    }
    for file in shipped_rules() if names else ():
        try:
            for rule in read_rules(file, (), reverse=False):
                if rule.whole_is_read is False and rule.stacked and any(rule.named[0].match(name) for name in names):
                    check_model(checkpoint.source, rule)
                    return Option("rules", (file,))
        except CkptconvError:  # the rules are for another model, or its config.json cannot be read
            continue
    return None


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the names and tensors of the first state dict of `checkpoint`."""
    for name, value in checkpoint.detected.state_dicts[0].items():
        info = checkpoint.tensor_nodes.get(id(value))
        if isinstance(name, str) and info is not None:
            yield name, info
