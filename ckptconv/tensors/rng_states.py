"""Find RNG states among tensors in memory, by the rules of :mod:`ckptconv.checkpoint.rng_states`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckptconv.checkpoint.rng_states import CPU_RNG_BYTES, has_device_word, has_rng_word
from ckptconv.tensors.containers import Slot


def rng_states(places: Iterable[Slot], alone: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Return the tensors at `places` that are states of random generators.

    `alone` returns whether nothing else uses the storage of a tensor. That holds for each state.
    """
    possible = [place for place in places if _is_bytes(place.node) and alone(place.node)]
    judge = _Judge(possible)
    return [place.node for place in possible if judge.is_state(place)]


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a plain vector of bytes that fills its storage, as each state is."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == torch.uint8
        and tensor.layout == torch.strided
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel()
    )


class _Judge:
    """The rules, for the tensors that can be states by their form."""

    def __init__(self, possible: list[Slot]) -> None:
        self.possible = {id(place.node) for place in possible}
        self.certain = {id(place.node) for place in possible if place.node.numel() == CPU_RNG_BYTES}
        self.hinted = {id(place.node) for place in possible if any(has_rng_word(a.key) for a in place.upwards())}

    def is_state(self, place: Slot) -> bool:
        """Return whether the tensor at `place` is a state, by its size, its keys or its neighbours."""
        if id(place.node) in self.certain:
            return True
        around = [above.node for above in place.upwards()][1:]
        if self.is_in_state_dict([node for node in reversed(around) if isinstance(node, dict)]):
            return False
        if id(place.node) in self.hinted:
            return True
        item = next(each for each in place.upwards() if not (each.above and isinstance(each.above.node, (list, tuple))))
        nearest = item.above and item.above.node
        if not isinstance(nearest, dict) or not has_device_word(item.key):
            return False
        return any(id(value) in self.certain for value in nearest.values()) or {"python", "numpy"} <= nearest.keys()

    def is_in_state_dict(self, dicts: list[dict[Any, Any]]) -> bool:
        """Return whether one of `dicts` is a state dict.

        `dicts` are the dictionaries around a tensor, the outermost first. The dictionaries in an optimizer's state are
        not state dicts.
        """
        for node in dicts:
            if isinstance(getattr(node, "_metadata", None), Mapping):
                return True
            if {"state", "param_groups"} <= node.keys():
                return False
            tensors = {id(value) for value in node.values() if isinstance(value, torch.Tensor)}
            if tensors and all(map(_may_be_in_state_dict, node.keys(), node.values())) and not self.are_states(tensors):
                return True
        return False

    def are_states(self, tensors: set[int]) -> bool:
        """Return whether all of `tensors`, given by their ids, may be states."""
        return tensors <= (self.certain | self.hinted if tensors.isdisjoint(self.certain) else self.possible)


def _may_be_in_state_dict(key: object, value: object) -> bool:
    """Return whether a state dict can have `value` under `key`."""
    if not isinstance(key, str):
        return False
    return value is None or isinstance(value, torch.Tensor) or key.endswith("_extra_state")
