"""Detect RNG states among tensors in memory, by the rules of :mod:`ckptconv.checkpoint.rng_states`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckptconv.checkpoint.rng_states import CPU_RNG_BYTES, has_device_word, has_rng_word
from ckptconv.tensors.containers import Slot

__all__ = ["rng_states"]


def rng_states(places: Iterable[Slot], alone: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Those of the tensors at `places`. `alone` says whether one has its storage to itself, as a state has."""
    possible = [place for place in places if _is_bytes(place.node) and alone(place.node)]
    judge = _Judge(possible)
    return [place.node for place in possible if judge.is_state(place)]


def _is_bytes(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == torch.uint8
        and tensor.layout == torch.strided
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel()
    )


class _Judge:
    def __init__(self, possible: list[Slot]) -> None:
        self.possible = {id(place.node) for place in possible}
        self.certain = {id(place.node) for place in possible if place.node.numel() == CPU_RNG_BYTES}
        self.hinted = {id(place.node) for place in possible if any(has_rng_word(a.key) for a in place.upwards())}

    def is_state(self, place: Slot) -> bool:
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
        """Whether one of `dicts`, the outermost first, is a state dict; there is none in an optimizer's."""
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
        return tensors <= (self.certain | self.hinted if tensors.isdisjoint(self.certain) else self.possible)


def _may_be_in_state_dict(key: object, value: object) -> bool:
    if not isinstance(key, str):
        return False
    return value is None or isinstance(value, torch.Tensor) or key.endswith("_extra_state")
