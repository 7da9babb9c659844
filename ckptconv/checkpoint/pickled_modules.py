"""Find modules that were pickled as objects (``torch.save(model)``), and determine the state dict of each.

The code follows ``Module.state_dict()`` of torch 2.13 (``torch/nn/modules/module.py``) on the graph: parameters,
persistent buffers, and then the inner modules, without None values, with each tensor detached. No class is needed.
Values that only the code of a class adds are missing: ``get_extra_state()``, hooks, and the numbers of quantized
modules (``scale``). ``_metadata`` is missing, too, because no pickle contains the version of each class. Without
it, torch assumes the oldest version of a module. torch's own modules still load their tensors then: they lack only
values that they add by themselves (the counter of ``BatchNorm``). Quantized modules are the exception, because
newer versions expect tuples.

The root of a TorchScript archive is such a module, too. Its class, in the code of the archive, lists the parameters and
buffers (:mod:`ckptconv.formats.torchscript`).

The packed weights of quantized modules are objects of torch's C++ code. ``state_dict()`` returns them as tuples or as
objects, which cannot be stored as tensors. Here their names are ``NAME.weight`` and ``NAME.bias`` for linear layers,
``NAME`` for a single tensor, and otherwise ``NAME.0`` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.rebuild_functions import FROM_TYPE, PARAMETER, STRIDED
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Global,
    Node,
    Object,
    Tuple,
    Value,
    args_of,
    children,
    is_global,
    members_of,
    strings_of,
)
from ckptconv.pickles.paths import Place

PARTS = ("_parameters", "_buffers", "_modules")
_FX = "torch.fx.graph_module"  # its modules are calls with a dict of their attributes
_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"  # the result of torch.compile: a call with the module
_MADE_BY_A_CALL = (_FX, _COMPILED.rpartition(".")[0])
_PACKED_LINEAR = "__torch__.torch.classes.quantized.LinearPackedParamsBase"
_OLD_CLASS = (
    "copyreg._reconstructor",
    "copy_reg._reconstructor",
)  # used by protocols 0 and 1, with the class as an argument
#: The positions of the tensors in the state of a quantized convolution: ``_ConvNd.__getstate__`` in
#: ``torch/ao/nn/quantized/modules/conv.py``.
_CONV_STATE = {"weight": 10, "bias": 11}
_CONV_LENGTH = 15
_NOT_PERSISTENT = "_non_persistent_buffers_set"
#: Attributes that torch itself uses in every module, from ``Module.__init__`` of torch 0.1 to 2.13.
_BOOKKEEPING = {
    _NOT_PERSISTENT, "training", "_backend", "_is_full_backward_hook", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_load_state_dict_post_hooks", "_load_state_dict_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks",
}  # a table  # fmt: skip
#: The limit on the cost of names, fixed and for each opcode. A parameter takes some thirty opcodes. One module can be
#: in another twice, that one in a third twice, and so on.
_ROOM, _ROOM_EACH = 500_000, 50


@dataclass(frozen=True, eq=False)
class PickledModule:
    """A module that was pickled as an object.

    Attributes:
        path: The path of the module.
        place: The place of the module.
        cls: The name of its class in the pickle.
        tensors: The tensors of its state dict by name, in the order of ``state_dict()``.
        places: The places of these tensors, by name.
        unknown: Values in its state dict, by name, that are neither known tensors nor modules.
        opened: The ids of the nodes that belong to the module itself: objects, states and mappings, also of inner
            modules.
        modules: The ids of the module and its inner modules.
        holders: The ids of the nodes that contain the tensors.
        trouble: The reason why its state dict cannot be determined, or None.
    """

    path: str
    place: Place
    cls: str
    tensors: dict[str, Node] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    unknown: dict[str, Value] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    modules: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    trouble: str | None = None

    def names(self) -> list[str]:
        """Return the names of the state dict, in order."""
        return list(self.tensors)

    def items(self) -> Iterable[tuple[Value, Value]]:
        """Return the names and tensors of the state dict."""
        return self.tensors.items()

    def is_bookkeeping(self, place: Place) -> bool:
        """Return whether `place` is an attribute that torch sets in every module.

        Examples are ``training`` and an empty dict of hooks. The attribute can belong to this module or to an inner
        one.
        """
        is_inside = place.parent is not None and id(place.parent.node) in self.modules
        if not is_inside or place.key not in _BOOKKEEPING or place.segment != f"/.{place.key}":
            return False
        return place.key == _NOT_PERSISTENT or _is_empty(place.node)


def read_modules(index: Index, scripts: Mapping[str, tuple[list[str], list[str]]] | None) -> list[PickledModule]:
    """Return the modules of `index` that are not inside another module, each at its shortest path.

    `scripts` is None except for a TorchScript archive: there it contains the names of the parameters and buffers of
    each class, and only the root can be a module.
    """
    reader = _Reader(index, scripts or {})
    places = index.places if scripts is None else index.places[:1]
    nodes = {id(place.node) for place in places if reader.is_module(place.node)}
    outermost: dict[int, Place] = {}
    for place in places if nodes else ():
        if id(place.node) in nodes and not any(id(above.node) in nodes for above in [*place.upwards()][1:]):
            known = outermost.setdefault(id(place.node), place)
            if place.depth < known.depth:
                outermost[id(place.node)] = place
    for place in index.places if outermost else ():
        if id(place.node) in reader.tensors and place.parent is not None:
            reader.standing.setdefault((id(place.parent.node), place.key, id(place.node)), place)
    return [reader.module_at(place) for place in outermost.values()]


@dataclass(eq=False)
class _Level:
    """The content of one module, without the content of its inner modules.

    Attributes:
        tensors: For each tensor: its name, the node that contains it, its key there or None, and the tensor.
        modules: The names and nodes of the inner modules.
        unknown: The names and values of everything else.
        opened: The nodes that belong to the module.
    """

    tensors: list[tuple[str, Node, str | None, Node]] = field(default_factory=list)
    modules: list[tuple[str, Call]] = field(default_factory=list)
    unknown: list[tuple[str, Value]] = field(default_factory=list)
    opened: list[Node] = field(default_factory=list)


class _Reader:
    """Reads modules. Each module is read once, even if several modules contain it."""

    def __init__(self, index: Index, scripts: Mapping[str, tuple[list[str], list[str]]]) -> None:
        self.tensors = index.tensor_nodes
        self.scripts = scripts
        self.room = _ROOM + _ROOM_EACH * index.graph.opcodes
        self.modules: dict[int, bool] = {}
        self.items: dict[int, dict[str, Value]] = {}
        self.sets: dict[int, frozenset[str]] = {}
        self.levels: dict[int, _Level] = {}
        self.packed: dict[int, tuple[list[tuple[Node, Node]], list[Node]]] = {}
        #: The places of tensors, by the node that contains them, their key there, and the tensor.
        self.standing: dict[tuple[int, str | None, int], Place] = {}

    # Recognising modules

    def is_module(self, node: Value) -> bool:
        """Return whether `node` is a module: an object with the content of one, or a result of torch.compile with
        one.
        """
        if not isinstance(node, Call):
            return False
        made = isinstance(node.callable, Global) and node.callable.module in _MADE_BY_A_CALL
        if not (node.effects or made or self.scripts):  # most calls
            return False
        if id(node) not in self.modules:
            inner: Value = node
            while isinstance(inner, Call) and is_global(inner.callable, _COMPILED):
                inner = next(iter(args_of(inner)), None)
            self.modules[id(node)] = isinstance(inner, Call) and id(inner) not in self.tensors and self.has_parts(inner)
        return self.modules[id(node)]

    def has_parts(self, node: Call) -> bool:
        """Return whether the object `node` has the content of a module.

        This is a module of TorchScript, a quantized convolution, or an object with ``_parameters``, ``_buffers`` and
        ``_modules``.
        """
        if self.scripts:
            return _class_of(node) in self.scripts
        if _conv_state(node) is not None:
            return True
        return all(isinstance(self.attribute(node, part), (Dict, Call)) for part in PARTS)

    def attribute(self, node: Call, name: str) -> Value:
        """Return the attribute `name` of the object `node`, or None. If several states set it, the last one counts."""
        for state in reversed(_states(node)):
            value = self.strings(state).get(name)
            if value is not None:
                return value
        return None

    def strings(self, mapping: Value) -> dict[str, Value]:
        """Return the string keys of `mapping` with their last values.

        The dict is empty if `mapping` is not a mapping.
        """
        if not isinstance(mapping, Object):
            return {}
        if id(mapping) not in self.items:  # any number of modules can share it
            self.items[id(mapping)] = strings_of(mapping)
        return self.items[id(mapping)]

    def members(self, node: Value) -> frozenset[str]:
        """Return the strings in the set or sequence `node`. The set is empty for other values."""
        if id(node) not in self.sets:  # any number of modules can share it
            self.sets[id(node)] = frozenset(each for each in members_of(node) or () if isinstance(each, str))
        return self.sets[id(node)]

    # The content of one module

    def level(self, node: Call) -> _Level:
        """Return the content of the module `node`, without the content of its inner modules."""
        if id(node) not in self.levels:
            self.levels[id(node)] = level = _Level(opened=[node])
            conv = _conv_state(node)
            if self.scripts:
                self.read_script(node, level)
            elif is_global(node.callable, _COMPILED):
                inner = args_of(node)[0]
                assert isinstance(inner, Call)
                level.modules.append(("_orig_mod", inner))
            elif conv is not None:
                level.opened.append(conv)
                for name, index in _CONV_STATE.items():
                    self.add(level, name, conv, None, conv.items[index])
            else:
                self.read(node, level)
        return self.levels[id(node)]

    def read(self, node: Call, level: _Level) -> None:
        """Add the parameters, persistent buffers, packed weights and inner modules of `node` to `level`."""
        states = _states(node)
        level.opened += states
        level.opened += [state for state in node.states() if isinstance(state, Tuple)]
        parameters, buffers, modules = (self.attribute(node, part) for part in PARTS)
        passing = self.members(self.attribute(node, _NOT_PERSISTENT))
        for mapping, left_out in ((parameters, frozenset[str]()), (buffers, passing)):
            assert isinstance(mapping, Object)
            level.opened.append(mapping)
            for name, value in self.strings(mapping).items():
                if name not in left_out:
                    self.add(level, name, mapping, name, value)
        for state in states:
            for name, value in self.strings(state).items():
                if isinstance(value, Call) and is_global(value.callable, "torch.ScriptObject", "torch._C.ScriptObject"):
                    self.add_packed(level, name, value)
        assert isinstance(modules, Object)
        level.opened.append(modules)
        self.room -= sum(len(self.strings(each)) for each in (*states, parameters, buffers, modules))
        for name, value in self.strings(modules).items():
            if self.is_module(value):
                assert isinstance(value, Call)
                level.modules.append((name, value))
            elif value is not None:
                level.unknown.append((name, value))

    def read_script(self, node: Call, level: _Level) -> None:
        """Add the parameters, buffers and inner modules of `node` to `level`, in the order of its attributes.

        `node` is a module of TorchScript.
        """
        attributes: dict[str, Value] = {}
        for state in _states(node):
            attributes |= self.strings(state)
        self.room -= len(attributes)
        for names in map(frozenset, self.scripts[_class_of(node)]):
            found = [(name, attributes[name]) for name in attributes if name in names]
            level.tensors += [
                (n, node, n, value) for n, value in found if isinstance(value, Node) and id(value) in self.tensors
            ]
        level.modules += [
            (n, value) for n, value in attributes.items() if isinstance(value, Call) and self.is_module(value)
        ]

    def add(self, level: _Level, name: str, holder: Node, key: str | None, value: Value) -> None:
        """Add `value` to `level`: to the tensors if it is one, otherwise to the unknown values. None is left out.

        `holder` is the node that contains the value, and `key` its key there or None.
        """
        if isinstance(value, Node) and id(value) in self.tensors:
            level.tensors.append((name, holder, key, value))
        elif value is not None:
            level.unknown.append((name, value))

    def add_packed(self, level: _Level, name: str, packed: Call) -> None:
        """Add the tensors of the C++ object `packed`, the attribute `name`, to `level`."""
        if id(packed) not in self.packed:
            self.packed[id(packed)] = self.tensors_below(packed)
        found, opened = self.packed[id(packed)]
        self.room -= len(opened)
        level.opened += opened
        state = next(iter(packed.states()), None)
        if isinstance(state, Tuple) and state.items[1:] == [_PACKED_LINEAR] and len(found) <= 2:
            names = ["weight", "bias"]
        else:
            names = [name] if len(found) == 1 else [f"{name}.{i}" for i in range(len(found))]
        level.tensors += [(each, holder, None, node) for each, (holder, node) in zip(names, found, strict=False)]

    def tensors_below(self, packed: Call) -> tuple[list[tuple[Node, Node]], list[Node]]:
        """Return the tensors in `packed`, each with the node that contains it. Return all other nodes in it, too."""
        found: list[tuple[Node, Node]] = []
        opened: dict[int, Node] = {id(packed): packed}
        todo: list[tuple[Node, Value]] = [(packed, child) for child in reversed(children(packed))]
        while todo:
            holder, node = todo.pop()
            if not isinstance(node, (Object, Tuple)) or id(node) in opened:
                continue
            if id(node) in self.tensors:
                found.append((holder, node))
            else:
                opened[id(node)] = node
                todo += [(node, child) for child in reversed(children(node))]
        return found, list(opened.values())

    # The complete module

    def module_at(self, place: Place) -> PickledModule:
        """Return the module at `place`, with the tensors of all its inner modules.

        ``trouble`` is set, and the tensors are empty, if a module contains itself or if there are too many names.
        """
        node = place.node
        assert isinstance(node, Call)
        module = PickledModule(place.path, place, _class_of(node))
        above: set[int] = set()
        todo: list[tuple[str, Call | None]] = [("", node)]
        way: list[Call] = []
        while todo:
            prefix, inner = todo.pop()
            if inner is None:
                above.discard(id(way.pop()))
                continue
            trouble = f"a module contains itself, at {prefix[:-1]}" if id(inner) in above else None
            if trouble is None and self.room < 0:
                trouble = "its modules contain one another so often that there are too many names"
            if trouble:
                return PickledModule(module.path, place, module.cls, opened={id(node)}, trouble=trouble)
            level = self.level(inner)
            self.room -= sum(len(prefix) + len(each[0]) + 50 for each in level.tensors) + 50 + len(prefix)
            self.room -= len(level.modules) + len(level.unknown) + len(level.opened)
            above.add(id(inner))
            way.append(inner)
            module.modules.add(id(inner))
            module.opened.update(map(id, level.opened))
            for name, holder, key, tensor in level.tensors:
                module.tensors[prefix + name] = tensor
                module.holders.add(id(holder))
                standing = self.standing.get((id(holder), key, id(tensor)))
                if standing is not None:
                    module.places[prefix + name] = standing
            module.unknown.update((prefix + name, value) for name, value in level.unknown)
            todo.append((prefix, None))
            todo += [(f"{prefix}{name}.", each) for name, each in reversed(level.modules)]
        return module


def _states(node: Call) -> list[Dict]:
    """Return the dicts of attributes of the object `node`, in order.

    An object with slots has a pair of dicts: its attributes and its slots. A module of torch.fx has one as an argument.
    """
    found: list[Value] = []
    if isinstance(node.callable, Global) and node.callable.module == _FX:
        found += args_of(node)[:1]
    for state in node.states():
        found += state.items if isinstance(state, Tuple) and len(state.items) == 2 else [state]
    return [state for state in found if isinstance(state, Dict)]


def _conv_state(node: Call) -> Tuple | None:
    """Return the state of `node` if it is a quantized convolution, or None."""
    cls = node.callable
    if not isinstance(cls, Global) or "quantized" not in cls.module or "Conv" not in cls.name:
        return None
    state = next(iter(node.states()), None)
    return state if isinstance(state, Tuple) and len(state.items) == _CONV_LENGTH else None


def _class_of(node: Call) -> str:
    """Return the name of the class of `node`, or ``?`` if it is not a global."""
    cls: Value = node.callable
    if is_global(cls, *_OLD_CLASS) and args_of(node):
        cls = args_of(node)[0]
    return str(cls) if isinstance(cls, Global) else "?"


def _is_empty(node: Value) -> bool:
    """Return whether `node` is an atom, or a mapping, list, set or call without items and arguments."""
    if not isinstance(node, Object):
        return not isinstance(node, Node)
    return not node.effects and not (isinstance(node, Call) and children(node.args))


def detached(node: Node) -> Node:
    """Return the tensor `node` as ``detach()`` returns it: not a parameter, without gradient and attributes.

    If the tensor has another class than ``torch.Tensor``, it is returned unchanged.
    """
    while isinstance(node, Call):
        name, args = str(node.callable), args_of(node)
        if name in PARAMETER and args and isinstance(args[0], Call):
            node = args[0]
        elif name in FROM_TYPE and str(args[0]) in STRIDED and is_global(args[1], "torch.Tensor"):
            node = Call("REDUCE", args[0], args[2])
        else:
            break
    if not isinstance(node, Call) or str(node.callable) not in STRIDED:
        return node
    args, at = args_of(node), 5 if str(node.callable).endswith("_qtensor") else 4
    if not node.effects and (len(args) <= at or args[at] is not True):
        return node
    return Call("REDUCE", node.callable, Tuple([*args[:at], False, *args[at + 1 :]]))
