"""The nodes of a pickle's graph, which record what the pickle does without doing it.

Atoms are Python's own ``None``, ``bool``, ``int``, ``float``, ``str`` and ``bytes``. Every other value is a node. Two
places share a value if they contain the same object (``a is b``), for strings too. Nodes have no equality, no hash and
no repr that depends on their content, so that no file can make these operations expensive. Cycles are legal.

A pickle can change an object after making it (``BUILD``, ``APPENDS``, ``SETITEMS``, ``ADDITEMS``). Each such change is
an :class:`Effect` in the object's ``effects``. Making a call, a persistent id or a frozenset is an effect too. The
``order`` of an effect is its position among all effects of the source, counted from 1. What an edit adds has no order
(None).
"""

from __future__ import annotations

import gc
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from itertools import islice
from typing import TypeAlias, TypeGuard, TypeVar

from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.work import bounded, work

#: The largest number of items in one APPENDS or SETITEMS, as in pickle's own writer.
AT_ONCE = 1000

#: The classes that a pickle calls to make a set before protocol 4, which introduced opcodes for sets.
SET_CLASSES = ("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset")


class Node:
    """A value that is not an atom. Nodes compare and hash by identity."""

    __slots__ = ()


class Global(Node):
    """``module.name``, as spelled in the pickle. It is never imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Extension(Node):
    """A number that stands for a global in the ``copyreg`` registry of the reading process (EXT1, EXT2, EXT4)."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class Py2String(Node):
    """A Python 2 ``str``: bytes that an unpickler decodes or not, depending on its ``encoding`` argument.

    ``text`` is ``data`` decoded as UTF-8, or None if ``data`` is not UTF-8. It is the same object each time.
    """

    __slots__ = ("_text", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._text: str | None = None

    @property
    def text(self) -> str | None:
        if self._text is None:
            with suppress(UnicodeDecodeError):
                self._text = self.data.decode()
        return self._text


class Blob(Node):
    """A text or byte string that stays in the source: `length` bytes at `offset` of the source.

    `kind` is ``str``, ``bytes``, ``bytearray`` or ``py2``.
    """

    __slots__ = ("kind", "length", "offset")

    def __init__(self, kind: str, offset: int, length: int) -> None:
        self.kind = kind
        self.offset = offset
        self.length = length


class ByteArray(Node):
    """A ``bytearray`` (BYTEARRAY8). It is a node and not an atom because it is mutable."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Tuple(Node):
    """A tuple. It can contain itself only through a mutable object."""

    __slots__ = ("items",)

    def __init__(self, items: list[Value]) -> None:
        self.items = items


class FrozenSet(Node):
    """A frozenset, with its members in the order of the pickle.

    Making a frozenset hashes its members, and a hash can depend on a member's state. So a frozenset has an order.
    """

    __slots__ = ("items", "order")

    def __init__(self, items: list[Value], order: int | None = None) -> None:
        self.items = items
        self.order = order


class Effect:
    """A change of an object.

    `opcode` is the name of the pickle opcode. `values` are its operands: keys and values in turn for SETITEMS. `order`
    is the position in the source, or None for an effect that an edit has added.
    """

    __slots__ = ("opcode", "order", "values")

    def __init__(self, opcode: str, values: list[Value], order: int | None) -> None:
        self.opcode = opcode
        self.values = values
        self.order = order


#: The list of effects that all objects without effects share: most objects never get an effect.
NO_EFFECTS: list[Effect] = []


class Object(Node):
    """A node that can have effects: a list, a dict, a set or the result of a call."""

    __slots__ = ("effects",)

    def __init__(self) -> None:
        self.effects = NO_EFFECTS

    def add(self, effect: Effect) -> None:
        """Append `effect` to the effects of this object."""
        if self.effects is NO_EFFECTS:
            self.effects = [effect]
        else:
            self.effects.append(effect)

    def pairs(self) -> Iterator[tuple[Effect, int]]:
        """Yield the position of each item of this mapping, as an effect and an index.

        ``effect.values[i]`` is the key and ``effect.values[i + 1]`` is the value.
        """
        for effect in self.effects:
            if effect.opcode in ("SETITEM", "SETITEMS"):
                for i in range(0, len(effect.values), 2):
                    yield effect, i

    def entries(self) -> Iterator[tuple[Value, Value]]:
        """Yield the keys and values of this mapping, in order. A key that is set twice is yielded twice."""
        for effect in self.effects:
            if effect.opcode in ("SETITEM", "SETITEMS"):
                values = iter(effect.values)
                yield from zip(values, values, strict=True)

    def states(self) -> list[Value]:
        """Return the states that BUILD gives to this object, in order."""
        return [effect.values[0] for effect in self.effects if effect.opcode == "BUILD"]

    def elements(self) -> Iterator[Value]:
        """Yield the elements of this list or set, in order."""
        for effect in self.effects:
            if effect.opcode in ("APPEND", "APPENDS", "ADDITEMS"):
                yield from effect.values


class List(Object):
    """A list."""

    __slots__ = ()


class Dict(Object):
    """A dict."""

    __slots__ = ()


class Set(Object):
    """A set."""

    __slots__ = ()


class Call(Object):
    """The result of a call that the pickle asks for. The call is never made.

    `kind` is the name of the opcode. ``REDUCE`` calls ``callable(*args)``. ``NEWOBJ`` and ``NEWOBJ_EX`` call
    ``callable.__new__(callable, *args, **kwargs)``. ``OBJ``, which also stands for INST, makes an instance as Python 2
    did; its arguments are in a Tuple that the pickle does not contain. ``args`` is a Tuple, or a Call that returns a
    tuple (``torch.Size``).
    """

    __slots__ = ("args", "callable", "kind", "kwargs", "order")

    def __init__(
        self, kind: str, callable_: Value, args: Value, kwargs: Value = None, order: int | None = None
    ) -> None:
        self.effects = NO_EFFECTS  # without super().__init__(), for speed: most objects are calls
        self.kind = kind
        self.callable = callable_
        self.args = args
        self.kwargs = kwargs
        self.order = order

    def calls(self) -> list[Call]:
        """Return the inner calls that ``Graph.outer_calls`` leaves out, followed by this call."""
        return [self]


class PersistentId(Node):
    """A reference to something outside the pickle. In torch's files it refers to a storage."""

    __slots__ = ("id", "order")

    def __init__(self, id_: Value, order: int | None = None) -> None:
        self.id = id_
        self.order = order


Value: TypeAlias = "Node | bool | int | float | str | bytes | None"


@dataclass(eq=False)
class Graph:
    """A parsed pickle.

    ``protocol`` is the protocol in its header, ``opcodes`` the number of opcodes that were executed, and ``used`` the
    codes of these opcodes.

    ``globals``, ``calls`` and ``references`` (persistent ids) list all nodes of these kinds in the order of the source,
    so that nobody has to walk the graph to find them. Edits do not keep them up to date. If ``has_inner_calls`` is set,
    ``outer_calls`` leaves out the calls that ``Call.calls()`` lists before the outer call. Each of these calls a global
    without arguments.

    ``discarded`` lists values with calls or persistent ids that the pickle made and threw away: a call whose result is
    popped is still a call. ``shared`` contains the nodes that the pickle reads from the memo or names more than once.
    ``byte_strings`` and ``extensions`` list all nodes of these kinds, including those that the source throws away.
    ``changed`` lists the objects that have effects in the source.

    ``written`` maps each call that a reader has replaced by its modern equivalent to the call in the source.
    ``left_out`` lists the values of the parts of a merged graph that the merged graph may not contain.
    """

    root: Value
    protocol: int
    opcodes: int
    used: frozenset[int]
    globals: list[Global]
    outer_calls: list[Call]
    references: list[PersistentId]
    discarded: list[Value]
    shared: set[Node]
    byte_strings: list[Value] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    changed: list[Object] = field(default_factory=list)
    written: dict[Call, Call] = field(default_factory=dict)
    left_out: list[Value] = field(default_factory=list)
    has_inner_calls: bool = False

    @property
    def calls(self) -> list[Call]:
        """All calls, including inner calls. Reading this property makes the nodes of the inner calls."""
        if self.has_inner_calls:
            self.calls = [each for call in self.outer_calls for each in call.calls()]
        return self.outer_calls

    @calls.setter
    def calls(self, calls: list[Call]) -> None:
        self.outer_calls = calls
        self.has_inner_calls = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, and bound the work on graphs (:mod:`ckptconv.work`).

    A graph is large and stays alive, so collections would double the time. Afterwards everything that was made counts
    as old, so that the next collection does not look through it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with bounded():
            yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # otherwise the caller has frozen objects, which must stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def type_of(value: Value) -> type:
    """Return the type of `value`. For a node of a row it is the type that the node has outside of rows."""
    return Call if isinstance(value, Call) else PersistentId if isinstance(value, PersistentId) else type(value)


def kind_of(value: Value) -> str:
    """Return the name of the type of `value` for errors."""
    return type_of(value).__name__.lower()


def children(node: Value) -> list[Value]:
    """Return the values that `node` consists of, in the order of the pickle. An atom has none."""
    if isinstance(node, (Tuple, FrozenSet)):
        return node.items
    if isinstance(node, PersistentId):
        return [node.id]
    if not isinstance(node, Object):
        return []
    parts = [node.callable, node.args] if isinstance(node, Call) else []
    if isinstance(node, Call) and node.kwargs is not None:
        parts.append(node.kwargs)
    for effect in node.effects:
        parts += effect.values
    return parts


def walk(roots: list[Value], seen: set[int] | None = None) -> Iterator[Node]:
    """Yield every node that `roots` lead to, once, in the order of the pickle.

    Nodes whose id is in `seen` are left out. The ids of all other nodes are added to `seen`. Raise LimitError if the
    budget of work is used up.
    """
    visited: set[object] = set() if seen is None else seen  # type: ignore[assignment]
    todo = roots[::-1]
    budget = work()
    while todo:
        node = todo.pop()
        mark: object = node if seen is None else id(node)  # a node as its own mark takes less memory
        if isinstance(node, Node) and mark not in visited:
            visited.add(mark)
            budget.left -= 1  # without charge(), for speed
            if budget.left < 0:
                raise budget.used_up()
            yield node
            todo += children(node)[::-1]


def subgraph(graph: Graph, root: Value) -> Graph:
    """Return the part of `graph` that `root` leads to, as a graph of the same nodes."""
    reached = list(walk([root]))
    return replace(
        graph,
        root=root,
        globals=[node for node in reached if isinstance(node, Global)],
        outer_calls=[node for node in reached if isinstance(node, Call)],
        has_inner_calls=False,
        references=[node for node in reached if isinstance(node, PersistentId)],
        discarded=[],
        left_out=[],
    )


_Mapping = TypeVar("_Mapping", bound=Object)


def set_items(mapping: _Mapping, items: list[Value]) -> _Mapping:
    """Add `items`, keys and values in turn, to `mapping` and return `mapping`.

    Each effect gets at most as many items as pickle's own writer puts into one SETITEMS.
    """
    for at in range(0, len(items), 2 * AT_ONCE):
        mapping.add(Effect("SETITEMS", items[at : at + 2 * AT_ONCE], None))
    return mapping


def replace_items(mapping: Object, items: Iterable[tuple[Value, Value]]) -> None:
    """Give `mapping` these `items` in place of its own."""
    others = [effect for effect in mapping.effects if effect.opcode not in ("SETITEM", "SETITEMS")]
    mapping.effects = []
    set_items(mapping, [each for item in items for each in item]).effects += others


def args_of(call: Call) -> list[Value]:
    """Return the arguments of `call`, or an empty list if the arguments are the result of another call."""
    return call.args.items if isinstance(call.args, Tuple) else []


def latin_1_text(node: Value) -> Value:
    """Return the text that `node` encodes as Latin-1, which is how protocol 2 writes bytes, or None.

    Protocol 2 has no opcode for bytes, and torch's safe loader accepts this call instead.
    """
    if not isinstance(node, Call) or not is_global(node.callable, "_codecs.encode") or node.effects:
        return None
    text, codec = args_of(node) if len(args_of(node)) == 2 else (None, None)
    return text if codec in ("latin1", "latin-1") else None


def members_of(node: Value, most: int | None = None) -> list[Value] | None:
    """Return the members of a sequence or set, or None if `node` is neither.

    Before protocol 4 a set is a call of its class with a sequence. From such a sequence only the first `most` members
    are returned, if `most` is given: any number of calls can share one sequence.
    """
    if isinstance(node, Call) and is_global(node.callable, *SET_CLASSES) and not node.effects:
        args = args_of(node)
        if isinstance(node.args, Tuple) and not args:
            return []
        node = args[0] if len(args) == 1 and isinstance(args[0], (Tuple, List)) else None
    else:
        most = None
    if isinstance(node, (Tuple, FrozenSet)):
        return node.items[:most]
    return list(islice(node.elements(), most)) if isinstance(node, (List, Set)) else None


def replace_nodes(graph: Graph, new: Mapping[Node, Node]) -> None:
    """Replace nodes in `graph` in place, wherever they occur.

    `new` maps each old node to its replacement. The children of a replacement are replaced too.
    """

    def swap(value: Value) -> Value:
        return new.get(value, value) if isinstance(value, Node) else value

    graph.root = swap(graph.root)
    graph.discarded = [swap(value) for value in graph.discarded]
    for node in walk([graph.root, *graph.discarded]):  # walk asks for children after their parent was changed
        if isinstance(node, (Tuple, FrozenSet)):
            node.items = [swap(item) for item in node.items]
        elif isinstance(node, PersistentId):
            node.id = swap(node.id)
        elif isinstance(node, Object):
            if isinstance(node, Call):
                node.callable, node.args, node.kwargs = (
                    swap(node.callable),
                    swap(node.args),
                    swap(node.kwargs),
                )
            for effect in node.effects:
                effect.values = [swap(value) for value in effect.values]
    graph.shared |= {new[node] for node in new if node in graph.shared}


def is_global(node: Value, *names: str) -> bool:
    """Return whether `node` is one of the globals `names`, each given as ``module.name``."""
    return isinstance(node, Global) and f"{node.module}.{node.name}" in names


def strings_of(mapping: Object) -> dict[str, Value]:
    """Return the string keys of `mapping` with their values. The last value of a key counts."""
    return {key: value for key, value in mapping.entries() if isinstance(key, str)}


def is_count(value: Value) -> TypeGuard[int]:
    """Return whether `value` can be a number of elements: an ``int``, not negative, and below ``LIMITS.elements``."""
    return type(value) is int and 0 <= value < LIMITS.elements


def imported_name(node: Global, protocol: int) -> str:
    """Return ``module.name`` as it is looked up for `node` in a pickle of this `protocol`. Nothing is imported."""
    return ".".join(imported_as(node, protocol))


def imported_as(node: Global, protocol: int) -> tuple[str, str]:
    """Return the module and the name of :func:`imported_name`.

    Source: CPython's ``Lib/pickle.py``, ``_Unpickler.find_class``.
    """
    module, name = node.module, node.name
    if protocol < 3:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
    return module, name
