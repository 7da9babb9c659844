"""The RNG rule: which tensors are states of random generators, which belong on the CPU.

A state is a contiguous 1-D ``uint8`` tensor that has its storage to itself and

- has 5,056 elements, or belongs to a ``torch.Generator``; or
- stands outside state dicts, below a key with one of the words ``rng``, ``seed``, ``random``, ``generator``; or
- stands outside state dicts, in a mapping that has a state of the first kind, or ``python`` and ``numpy`` as keys, at a
  key that names a device there (``cuda``, ``torch.cuda``). A ``mask`` beside a state is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo
from ckptconv.pickles.graph import Call, Dict, List, Object, Tuple, is_global, strings_of
from ckptconv.pickles.paths import Place

#: ``torch.get_rng_state()`` of the CPU's Mersenne Twister: ``torch/csrc/…/CPUGeneratorImpl`` packs 5,056 bytes.
CPU_RNG_BYTES = 5056
_RNG_WORDS = {"rng", "seed", "random", "generator"}
#: In the keys of the states of each device, as Trainer (``cuda``) and Lightning (``torch.cuda``) write them.
_DEVICE_WORDS = {"torch", "cpu", "cuda", "gpu", "mps", "xpu", "hpu", "mtia", "npu", "mlu", "musa", "privateuseone"}


class RngStates:
    """The tensors of `index` that could be RNG states, and how sure that is without knowing its state dicts."""

    def __init__(self, index: Index) -> None:
        self._tensor_nodes = index.tensor_nodes
        self._candidates = _rng_candidates(index)
        self._possible = {id(p.node) for p in self._candidates}
        self._certain = {
            id(p.node) for p in self._candidates if self._info(p).nbytes == CPU_RNG_BYTES or _is_generator_state(p)
        }
        self._hinted = {id(p.node) for p in self._candidates if any(has_rng_word(a.key) for a in p.upwards())}
        self._rng_mappings: dict[int, bool] = {}  # whether a certain state, or python's and numpy's, is in it

    def outside(self, state_dicts: Container[int]) -> list[TensorInfo]:
        """The RNG states, where `state_dicts` are the ids of the state dicts' nodes."""
        return [self._info(place) for place in self._candidates if self._is_rng(place, state_dicts)]

    def are_all_tensors_of(self, node: Object) -> bool:
        """Whether the mapping `node` holds RNG states and no other tensors."""
        values = [id(value) for _, value in node.entries()]
        if any(each in self._tensor_nodes and each not in self._possible for each in values):
            return False
        tensors = self._tensor_nodes.keys() & values
        return tensors <= (self._certain | self._hinted if tensors.isdisjoint(self._certain) else self._possible)

    def _info(self, place: Place) -> TensorInfo:
        return self._tensor_nodes[id(place.node)]

    def _is_rng(self, place: Place, state_dicts: Container[int]) -> bool:
        if id(place.node) in self._certain:
            return True
        above = list(place.upwards())[1:]
        if any(id(outer.node) in state_dicts for outer in above):
            return False
        if id(place.node) in self._hinted:
            return True
        item = next(
            each for each in place.upwards() if not (each.parent and isinstance(each.parent.node, (List, Tuple)))
        )
        mapping = item.parent and item.parent.node
        if not isinstance(mapping, (Dict, Call)) or not has_device_word(item.key):
            return False
        if id(mapping) not in self._rng_mappings:  # asked once for each of its tensors
            beside = strings_of(mapping)
            sibling = any(id(value) in self._certain for value in beside.values())
            self._rng_mappings[id(mapping)] = sibling or {"python", "numpy"} <= beside.keys()
        return self._rng_mappings[id(mapping)]


def has_rng_word(key: object) -> bool:
    """Whether `key` is a text with a word for a generator in it."""
    return not _RNG_WORDS.isdisjoint(_words(key))


def has_device_word(key: object) -> bool:
    """Whether `key` is a text with the word of a device in it, or torch's name."""
    return not _DEVICE_WORDS.isdisjoint(_words(key))


def _words(key: object) -> list[str]:
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key) if isinstance(key, str) else []
    return [word.lower() for word in found]


def _rng_candidates(index: Index) -> list[Place]:
    """Contiguous 1-D uint8 tensors that have their storage to themselves, where they stand first."""
    nodes, found = index.tensor_nodes, dict[int, Place]()
    if not any(info.dtype == "uint8" for info in nodes.values()):
        return []
    users: Counter[Storage] = Counter(index.storage_of.values())
    for place in index.places:
        info = nodes.get(id(place.node))
        if info is None or info.storage is None or info.dtype != "uint8" or len(info.shape) != 1 or not info.contiguous:
            continue
        if users[info.storage] == 1 and info.nbytes == info.storage.nbytes:
            found.setdefault(id(place.node), place)
    return list(found.values())


def _is_generator_state(place: Place) -> bool:
    """Whether it stands in the state of a ``torch.Generator``: (seed, offset, state)."""
    return any(isinstance(a.node, Call) and is_global(a.node.callable, "torch._C.Generator") for a in place.upwards())
