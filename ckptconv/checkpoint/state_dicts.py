"""Detect state dicts, optimizers, modules and states of random generators (RNG). Nothing is changed.

An RNG state is a contiguous 1-D ``uint8`` tensor that does not share its storage, and for which one of these is true:

- It has 5,056 elements, or belongs to a ``torch.Generator``.
- It is outside of state dicts, below a key with one of the words ``rng``, ``seed``, ``random``, ``generator``.
- It is outside of state dicts, at a key that names a device (``cuda``, ``torch.cuda``), in a mapping that also contains
  a state of the first kind, or the keys ``python`` and ``numpy``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.pickled_modules import PickledModule, read_modules
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo
from ckptconv.errors import at_path
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Effect,
    List,
    Node,
    Object,
    Tuple,
    Value,
    is_global,
    members_of,
    strings_of,
)
from ckptconv.pickles.paths import Place
from ckptconv.pickles.rows import RowCall
from ckptconv.work import work

#: The length of ``torch.get_rng_state()``: ``torch/csrc/…/CPUGeneratorImpl`` packs the CPU's Mersenne Twister so.
CPU_RNG_BYTES = 5056
_RNG_WORDS = {"rng", "seed", "random", "generator"}
#: Words in the keys of the states of each device, as Trainer (``cuda``) and Lightning (``torch.cuda``) write them.
_DEVICE_WORDS = {"torch", "cpu", "cuda", "gpu", "mps", "xpu", "hpu", "mtia", "npu", "mlu", "musa", "privateuseone"}

#: Attributes of a pickled module that contain its tensors. Names in them have no prefix to take off.
_MODULE_PARTS = ("/._parameters", "/._buffers")
#: Matches the path of an average of weights.
IS_AVERAGE = regex(r"(?i)(?<![a-z])(ema|averaged?|swa|shadow)(?![a-z])")
_MAIN_NAMES = (
    "state_dict", "model", "model_state_dict", "module", "net", "network", "params", "weights", "model_state",
)  # fmt: skip
_STEPS = 4  # of work for a pair that takes a hundred bytes of memory


@dataclass(frozen=True, eq=False)
class StateDict:
    """A state dict.

    Attributes:
        path: Its first path.
        node: Its mapping.
        metadata: Its ``_metadata`` (module path → version), or None.
    """

    path: str
    node: Object
    metadata: Object | None

    def names(self) -> list[str]:
        """Return its string keys, in order."""
        return [key for key, _ in self.node.entries() if isinstance(key, str)]

    def items(self) -> Iterator[tuple[Value, Value]]:
        """Yield its keys and values."""
        return self.node.entries()


@dataclass(frozen=True, eq=False)
class NamedOptimizer:
    """An optimizer that refers to its parameters by names.

    Attributes:
        path: Its path.
        places: The effect and the index of each parameter name in the graph.
    """

    path: str
    places: list[tuple[Effect, int]]

    def names(self) -> list[str]:
        """Return the parameter names, each as often as it occurs."""
        return [name for effect, i in self.places if isinstance(name := effect.values[i], str)]


@dataclass(frozen=True, eq=False)
class Detected:
    """The result of :func:`detect`.

    Attributes:
        root: The path of the root of the checkpoint.
        modules: The pickled modules.
        state_dicts: The state dicts.
        optimizers: The optimizers that refer to their parameters by names.
        optimizer_nodes: The ids of the mappings of all optimizers.
        rng_states: The states of random generators.
    """

    root: str
    modules: list[PickledModule]
    state_dicts: list[StateDict]
    optimizers: list[NamedOptimizer]
    optimizer_nodes: set[int]
    rng_states: list[TensorInfo]

    @property
    def rng_storages(self) -> set[Storage]:
        """The storages of the states of random generators."""
        return {info.storage for info in self.rng_states if info.storage}

    def main(self) -> list[StateDict] | list[PickledModule]:
        """Return the state dict or module to use if the user names none, as a list of one.

        The first of these that exists: the only state dict under a usual name; the only module under a usual name,
        if no state dict has one; the only state dict; the only module, if there is no state dict. If there are
        several, the list has several elements; if there are none, it is empty.
        """
        modules = [module for module in self.modules if module.tensors or module.trouble]
        usual = [state_dict for state_dict in self.state_dicts if self.is_usual(state_dict.path)]
        usual_modules = [module for module in modules if self.is_usual(module.path)]
        if len(usual) == 1:
            return usual
        return usual_modules if len(usual_modules) == 1 and not usual else self.state_dicts or modules

    def averages(self) -> list[StateDict]:
        """Return the state dicts that are averages (EMA) of the main state dict.

        Their path contains a word such as ``ema``, and all their names occur in the main one. The list is empty if
        :meth:`main` does not return a single state dict.
        """
        main = self.main()
        if len(main) != 1 or not isinstance(main[0], StateDict):
            return []
        found = [each for each in self.state_dicts if each is not main[0] and IS_AVERAGE.search(each.path)]
        names = {name.removeprefix("module.") for name in main[0].names()} if found else set()
        return [each for each in found if names.issuperset(name.removeprefix("module.") for name in each.names())]

    def hint_of_modules(self) -> str | None:
        """Return a hint to extract the state dict of a pickled module, or None if there is no module with tensors."""
        first = next((module for module in self.modules if module.tensors), None)
        if first is None:
            return None
        return (
            f"the names are in a pickled module ({first.cls}{at_path(first.path)}): "
            + option("state_dict")
            + " extracts its state dict, whose names can be changed"
        )

    def is_usual(self, path: str) -> bool:
        """Return whether `path` is a usual name of a model, such as ``model`` or ``state_dict``.

        The path must be a key or attribute of the root.
        """
        above = "" if self.root == "." else self.root + "/"
        return path.removeprefix(above).removeprefix(".") in _MAIN_NAMES


def detect(
    index: Index, *, is_state_dict: bool = False, scripts: Mapping[str, tuple[list[str], list[str]]] | None = None
) -> Detected:
    """Return the state dicts, optimizers, modules and RNG states of a graph.

    Args:
        index: The index of the graph.
        is_state_dict: Whether the root is a state dict because of the file format. Then it is accepted without a check.
        scripts: The classes of modules of a TorchScript archive, or None for other files.
    """
    detected = Detected(index.root.path, read_modules(index, scripts), [], [], set(), [])
    rng = _rng_rules(index)
    closed = {id(module.place.node) for module in detected.modules}  # nodes that contain no further state dict
    inside: set[int] = set()  # places in closed nodes
    first: set[int] = set()
    in_states: dict[int, Value] = {}
    for place in index.places:
        node = place.node
        if isinstance(node, RowCall) and not node.effects:
            continue  # most tensors, which contain nothing
        if id(node) in closed or id(place.parent) in inside:
            inside.add(id(place))
        if id(node) in first:
            continue
        first.add(id(node))
        if id(place) in inside or place.segment in _MODULE_PARTS:
            continue
        if not isinstance(node, (Dict, Call)) or id(node) in index.tensor_nodes:
            continue
        if isinstance(node, Call) and not is_global(node.callable, "collections.OrderedDict") and not any(node.pairs()):
            continue
        metadata, keys = _metadata_of(node, in_states), strings_of(node)
        if is_state_dict:
            detected.state_dicts.append(StateDict(place.path, node, None))
        elif metadata is None and {"state", "param_groups"} <= keys.keys():
            detected.optimizer_nodes.add(id(node))
            if names := _names_in_optimizer(keys):
                detected.optimizers.append(NamedOptimizer(place.path, names))
        elif metadata is not None or _looks_like_state_dict(node, index):
            tensors = index.tensor_nodes.keys() & {id(value) for _, value in node.entries()}
            if metadata is not None or not rng.are_states(tensors):
                detected.state_dicts.append(StateDict(place.path, node, metadata))
        else:
            continue
        closed.add(id(node))
        inside.add(id(place))
    state_dicts = {id(each.node) for each in detected.state_dicts}

    def is_in_state_dict(place: Place) -> bool:
        return any(id(above.node) in state_dicts for above in [*place.upwards()][1:])

    states = (place for place in rng.places if rng.is_state(place, is_in_state_dict))
    detected.rng_states.extend(index.tensor_nodes[id(place.node)] for place in states)
    return detected


def _metadata_of(node: Object, in_states: dict[int, Value]) -> Object | None:
    """Return the ``_metadata`` attribute that ``Module.state_dict()`` sets on `node`, or None.

    `in_states` caches the ``_metadata`` of each state by its id, because any number of mappings can share a state.
    """
    for state in node.states():
        if isinstance(state, Dict):
            if id(state) not in in_states:
                in_states[id(state)] = strings_of(state).get("_metadata")
            metadata = in_states[id(state)]
            if isinstance(metadata, (Dict, Call)):
                return metadata
    return None


def _looks_like_state_dict(node: Object, index: Index) -> bool:
    """Return whether all keys of `node` are strings and all values tensors, None or extra states.

    At least one value must be a tensor.
    """
    tensors = 0
    for key, value in node.entries():
        if not isinstance(key, str):
            return False
        if isinstance(value, Node) and id(value) in index.tensor_nodes:
            tensors += 1
        elif value is not None and not key.endswith("_extra_state"):
            return False
    return tensors > 0


def _names_in_optimizer(keys: dict[str, Value]) -> list[tuple[Effect, int]]:
    """Return the effect and index of each parameter name in an optimizer with these `keys`.

    The list is empty if the optimizer refers to its parameters by numbers.
    """
    state, holder = keys["state"], keys["param_groups"]
    places = [*state.pairs()] if isinstance(state, Object) else []
    members = members_of(holder) if isinstance(holder, List) else None
    groups = [each for each in members or () if isinstance(each, Object)]
    lists = [items.get(key) for items in map(strings_of, dict.fromkeys(groups)) for key in ("params", "param_names")]
    for each in dict.fromkeys(each for each in lists if isinstance(each, List)):  # groups can share a list
        places += [(effect, i) for effect in each.effects for i in range(len(effect.values))]
    work().charge(_STEPS * len(places))  # many optimizers can share a state or a list
    return [(effect, i) for effect, i in places if isinstance(effect.values[i], str)]


# States of random generators


class RngRules:
    """The rules that decide which tensors are states of random generators.

    They are used for nodes of a graph and for objects in memory.

    Attributes:
        places: The places of the tensors that can be states, by their form.
        certain: The ids of the tensors that are states by their size or their container.
        hinted: The ids of the tensors with a word for a generator in their path.
    """

    def __init__(
        self, places: list[Any], is_certain: Callable[[Any], bool], items: Callable[[Any], Mapping[Any, Any] | None]
    ) -> None:
        """Take `places`, which have a node, a key and a parent. `items` returns the items of a mapping, else None."""
        self.places = places
        self._possible = {id(place.node) for place in places}
        self.certain = {id(place.node) for place in places if is_certain(place)}
        self.hinted = {
            id(place.node)
            for place in places
            if any(not _RNG_WORDS.isdisjoint(_words(above.key)) for above in place.upwards())
        }
        self._items = items
        self._mappings: dict[int, bool] = {}  # whether a mapping has a certain state, or python's and numpy's

    def are_states(self, tensors: set[int]) -> bool:
        """Return whether all of `tensors`, given by their ids, can be RNG states.

        If none of them is certain, each must have a word for a generator in its path.
        """
        return tensors <= (self.certain | self.hinted if tensors.isdisjoint(self.certain) else self._possible)

    def is_state(self, place: Any, is_in_state_dict: Callable[[Any], bool]) -> bool:
        """Return whether the tensor at `place` is an RNG state, by its size, its keys or its neighbours.

        `is_in_state_dict` returns whether a place is inside a state dict.
        """
        if id(place.node) in self.certain:
            return True
        if is_in_state_dict(place):
            return False
        if id(place.node) in self.hinted:
            return True
        sequences = (List, Tuple, list, tuple)
        item = next(each for each in place.upwards() if not (each.parent and isinstance(each.parent.node, sequences)))
        mapping = item.parent and item.parent.node
        if _DEVICE_WORDS.isdisjoint(_words(item.key)):
            return False
        if id(mapping) not in self._mappings:  # it can have any number of tensors
            items = self._items(mapping) or {}
            has_certain = any(id(value) in self.certain for value in items.values())
            self._mappings[id(mapping)] = has_certain or {"python", "numpy"} <= items.keys()
        return self._mappings[id(mapping)]


def _rng_rules(index: Index) -> RngRules:
    """Return the rules for the tensors of `index`."""

    def is_certain(place: Place) -> bool:
        return index.tensor_nodes[id(place.node)].nbytes == CPU_RNG_BYTES or any(
            isinstance(above.node, Call) and is_global(above.node.callable, "torch._C.Generator")
            for above in place.upwards()
        )

    def items(node: Value) -> dict[str, Value] | None:
        return strings_of(node) if isinstance(node, (Dict, Call)) else None

    return RngRules(_rng_candidates(index), is_certain, items)


def _words(key: object) -> list[str]:
    """Return the words in `key`, in lower case. The list is empty if `key` is not a string."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key) if isinstance(key, str) else []
    return [word.lower() for word in words]


def _rng_candidates(index: Index) -> list[Place]:
    """Return the first place of each contiguous 1-D uint8 tensor that uses all of its storage and does not share it."""
    nodes, places = index.tensor_nodes, dict[int, Place]()
    if not any(info.dtype == "uint8" for info in nodes.values()):
        return []
    users: Counter[Storage] = Counter(index.storage_of.values())
    for place in index.places:
        info = nodes.get(id(place.node))
        if info is None or info.storage is None or info.dtype != "uint8" or len(info.shape) != 1 or not info.contiguous:
            continue
        if users[info.storage] == 1 and info.nbytes == info.storage.nbytes:
            places.setdefault(id(place.node), place)
    return list(places.values())
