"""Detect state dicts, optimizers, modules and states of random generators. Changes nothing.

A state of a random generator (RNG) is a contiguous 1-D ``uint8`` tensor that shares its storage with no other and

- has 5,056 elements, or belongs to a ``torch.Generator``; or
- is outside of state dicts, below a key with one of the words ``rng``, ``seed``, ``random``, ``generator``; or
- is outside of state dicts, at a key that names a device (``cuda``, ``torch.cuda``) in a mapping that also has a state
  of the first kind, or ``python`` and ``numpy`` as keys. A ``mask`` next to a state is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.pickled_modules import PickledModule, read_modules
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Dict, Effect, List, Node, Object, Tuple, Value, is_global, strings_of
from ckptconv.pickles.paths import Place
from ckptconv.pickles.rows import RowCall

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
        """Return the RNG states. `state_dicts` are the ids of the state dicts' nodes."""
        return [self._info(place) for place in self._candidates if self._is_rng(place, state_dicts)]

    def are_all_tensors_of(self, node: Object) -> bool:
        """Return whether all tensors in the mapping `node` are RNG states."""
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
    """Return whether `key` is a text with a word for a generator in it."""
    return not _RNG_WORDS.isdisjoint(_words(key))


def has_device_word(key: object) -> bool:
    """Return whether `key` is a text with the word of a device, or torch's name, in it."""
    return not _DEVICE_WORDS.isdisjoint(_words(key))


def _words(key: object) -> list[str]:
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key) if isinstance(key, str) else []
    return [word.lower() for word in found]


def _rng_candidates(index: Index) -> list[Place]:
    """Return the first place of each contiguous 1-D uint8 tensor that shares its storage with no other."""
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
    """Return whether `place` is in the state of a ``torch.Generator``: (seed, offset, state)."""
    return any(isinstance(a.node, Call) and is_global(a.node.callable, "torch._C.Generator") for a in place.upwards())


#: Where a pickled module keeps its tensors: attributes of the object, whose names have no prefix to take off.
_MODULE_PARTS = ("/._parameters", "/._buffers")
#: In the path of what is an average of weights.
IS_AVERAGE = regex(r"(?i)(?<![a-z])(ema|averaged?|swa|shadow)(?![a-z])")
_MAIN_NAMES = (
    "state_dict",
    "model",
    "model_state_dict",
    "module",
    "net",
    "network",
    "params",
    "weights",
    "model_state",
)


@dataclass(frozen=True, eq=False)
class StateDict:
    """A state dict, its first path, and its ``_metadata`` (module path → version), if it has one."""

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
    """The parameter names in the lists and mappings of an optimizer: (effect, index) of each name in the graph."""

    path: str
    places: list[tuple[Effect, int]]

    def names(self) -> list[str]:
        """Return the names, each as often as it is used."""
        return [name for effect, i in self.places if isinstance(name := effect.values[i], str)]


@dataclass(frozen=True, eq=False)
class Detected:
    """The result of :func:`detect`.

    ``optimizers`` are those with names of parameters in them, ``optimizer_nodes`` all, by the ids of their mappings.
    ``root`` is the path of the checkpoint itself.
    """

    state_dicts: list[StateDict]
    optimizers: list[NamedOptimizer]
    optimizer_nodes: set[int]
    rng_states: list[TensorInfo]
    root: str
    modules: list[PickledModule]

    @property
    def rng_storages(self) -> set[Storage]:
        """The storages of the states of random generators."""
        return {info.storage for info in self.rng_states if info.storage}

    def main(self) -> list[StateDict] | list[PickledModule]:
        """Return the state dict, or the module, that is meant if the user names none, as a list of one.

        It is the state dict under a usual name; else the module under a usual name, if no state dict has one; else the
        only state dict, or the only module if there is no state dict. The list has several members, or none, if that is
        not clear.
        """
        modules = [found for found in self.modules if found.tensors or found.trouble]
        usual = [found for found in self.state_dicts if self.is_usual(found.path)]
        usual_modules = [found for found in modules if self.is_usual(found.path)]
        if len(usual) == 1:
            return usual
        return usual_modules if len(usual_modules) == 1 and not usual else self.state_dicts or modules

    def averages(self) -> list[StateDict]:
        """Return the state dicts that are averages (EMA) of the main one.

        They are at a path with a word for that, and have no other names than it has. Empty if :meth:`main` gives no
        single state dict.
        """
        main = self.main()
        if len(main) != 1 or not isinstance(main[0], StateDict):
            return []
        found = [each for each in self.state_dicts if each is not main[0] and IS_AVERAGE.search(each.path)]
        names = {name.removeprefix("module.") for name in main[0].names()} if found else set()
        return [each for each in found if names.issuperset(name.removeprefix("module.") for name in each.names())]

    def hint_of_modules(self) -> str | None:
        """Return what to type if names are missing that the state dict of a module would have, or None."""
        modules = [found for found in self.modules if found.tensors]
        if not modules:
            return None
        first = f"{modules[0].cls} at {modules[0].path}"
        return (
            f"there are names in a whole module ({first}): "
            + option("state_dict")
            + " takes its state dict out, to which this then applies"
        )

    def is_usual(self, path: str) -> bool:
        """Return whether `path` is a name that people give their model, at the root or as its attribute."""
        above = "" if self.root == "." else self.root + "/"
        return path.removeprefix(above).removeprefix(".") in _MAIN_NAMES


def detect(
    index: Index, *, is_state_dict: bool = False, scripts: Mapping[str, tuple[list[str], list[str]]] | None = None
) -> Detected:
    """Return the state dicts, optimizers, modules and generator states of a graph.

    Args:
        index: The index of the graph.
        is_state_dict: Whether its root is a state dict, by its format.
        scripts: The classes of modules of a TorchScript archive.
    """
    reader = _Reader(index, is_state_dict, read_modules(index, scripts))
    return Detected(
        reader.state_dicts,
        reader.optimizers,
        reader.optimizer_nodes,
        reader.rng.outside({id(found.node) for found in reader.state_dicts}),
        index.root.path,
        reader.modules,
    )


class _Reader:
    """Looks at each mapping once, outermost first."""

    def __init__(self, index: Index, is_state_dict: bool, modules: list[PickledModule]) -> None:
        self.tensor_nodes = index.tensor_nodes
        self.root_is_state_dict = is_state_dict
        self.modules = modules
        self.rng = RngStates(index)
        self.state_dicts: list[StateDict] = []
        self.optimizers: list[NamedOptimizer] = []
        self.optimizer_nodes: set[int] = set()
        self.closed = {id(found.place.node) for found in modules}  # nodes inside which there is no state dict
        self.in_states: dict[int, Value] = {}  # ``_metadata`` by the ids of states, which mappings can share
        inside: set[int] = set()  # places in what is closed
        first: set[int] = set()
        for place in index.places:
            if isinstance(place.node, RowCall) and not place.node.effects:
                continue  # most tensors: nothing stands in them
            if id(place.node) in self.closed or id(place.parent) in inside:
                inside.add(id(place))
            if id(place.node) not in first:
                first.add(id(place.node))
                node = None if id(place) in inside or place.segment in _MODULE_PARTS else self.mapping(place)
                if node:
                    self.classify(place, node)
                    if id(node) in self.closed:
                        inside.add(id(place))

    def mapping(self, place: Place) -> Object | None:
        node = place.node
        if not isinstance(node, (Dict, Call)) or id(node) in self.tensor_nodes:
            return None
        if isinstance(node, Call) and not is_global(node.callable, "collections.OrderedDict") and not any(node.pairs()):
            return None
        return node

    def classify(self, place: Place, node: Object) -> None:
        metadata = self.metadata_of(node)
        keys = strings_of(node)
        if self.root_is_state_dict:
            self.closed.add(id(node))
            self.state_dicts.append(StateDict(place.path, node, None))
        elif metadata is None and {"state", "param_groups"} <= keys.keys():
            self.closed.add(id(node))
            self.optimizer_nodes.add(id(node))
            self.optimizers += _named_optimizer(place.path, keys)
        elif metadata is not None or self.looks_like_state_dict(node):
            self.closed.add(id(node))
            if metadata is not None or not self.rng.are_all_tensors_of(node):
                self.state_dicts.append(StateDict(place.path, node, metadata))

    def metadata_of(self, node: Object) -> Object | None:
        """Return the ``_metadata`` attribute that ``Module.state_dict()`` sets, or None."""
        for state in node.states():
            if isinstance(state, Dict):
                if id(state) not in self.in_states:
                    self.in_states[id(state)] = strings_of(state).get("_metadata")
                found = self.in_states[id(state)]
                if isinstance(found, (Dict, Call)):
                    return found
        return None

    def looks_like_state_dict(self, node: Object) -> bool:
        tensors = 0
        for key, value in node.entries():
            if not isinstance(key, str):
                return False
            if isinstance(value, Node) and id(value) in self.tensor_nodes:
                tensors += 1
            elif value is not None and not key.endswith("_extra_state"):
                return False
        return tensors > 0


def _named_optimizer(path: str, keys: dict[str, Value]) -> list[NamedOptimizer]:
    """Return the optimizer at `path` in a list if it has names of parameters. One keyed by integers has none."""
    state, holder = keys["state"], keys["param_groups"]
    named = [*state.pairs()] if isinstance(state, Object) else []
    groups = [each for each in holder.elements() if isinstance(each, Object)] if isinstance(holder, List) else []
    lists = [found.get(key) for found in map(strings_of, dict.fromkeys(groups)) for key in ("params", "param_names")]
    for each in dict.fromkeys(each for each in lists if isinstance(each, List)):  # groups can share one
        named += [(effect, i) for effect in each.effects for i in range(len(effect.values))]
    names = [(effect, i) for effect, i in named if isinstance(effect.values[i], str)]
    return [NamedOptimizer(path, names)] if names else []
