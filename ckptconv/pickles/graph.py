"""The nodes of a pickle's graph: what the pickle says, without doing it.

Atoms are Python's own ``None``, ``bool``, ``int``, ``float``, ``str`` and ``bytes``; everything else is a node. Sharing
is identity (``a is b``), for strings too. Nodes have no equality, no hash of content and no repr of content, so that
nothing that a file says can make them expensive. Cycles are legal.

What a pickle does to an object after making it (``BUILD``, ``APPENDS``, ``SETITEMS``, ``ADDITEMS``) is an
:class:`Effect` in the object's ``effects``, as are calls, persistent ids and frozensets themselves; ``order`` says
when, counted from 1 in the source. A node that an edit makes has no ``order``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from itertools import islice
from typing import TypeAlias, TypeGuard, TypeVar

from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

__all__ = [
    "AT_ONCE",
    "NO_EFFECTS",
    "SET_CLASSES",
    "Blob",
    "ByteArray",
    "Call",
    "Dict",
    "Effect",
    "Extension",
    "FrozenSet",
    "Global",
    "Graph",
    "List",
    "Node",
    "Object",
    "PersistentId",
    "Py2String",
    "Set",
    "Tuple",
    "Value",
    "args_of",
    "children",
    "gc_paused",
    "is_count",
    "is_global",
    "members_of",
    "replace_nodes",
    "set_items",
    "strings_of",
    "subgraph",
    "walk",
]

#: Items in one APPENDS or SETITEMS, as pickle's own writer has it.
AT_ONCE = 1000

#: What a pickle calls to make a set before protocol 4, in which sets have opcodes.
SET_CLASSES = ("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset")


class Node:
    """Whatever is no atom. Compares and hashes by identity."""

    __slots__ = ()


class Global(Node):
    """``module.name``, as the pickle spells it; never imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Extension(Node):
    """A number that stands for a global in the reading process's ``copyreg`` registry (EXT1, EXT2, EXT4)."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class Py2String(Node):
    """A Python 2 ``str``: bytes that the reader decodes or not, by its ``encoding`` argument.

    ``text`` is what UTF-8 makes of it, one object however often it is asked for; None where it is no UTF-8.
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
    """A text or bytes object too long to hold: `length` bytes at `offset` of the pickle.

    `kind` is ``str``, ``bytes``, ``bytearray`` or ``py2``.
    """

    __slots__ = ("kind", "length", "offset")

    def __init__(self, kind: str, offset: int, length: int) -> None:
        self.kind = kind
        self.offset = offset
        self.length = length


class ByteArray(Node):
    """A ``bytearray`` (BYTEARRAY8); mutable, so it has an identity."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Tuple(Node):
    """A tuple; it can hold itself only through something mutable."""

    __slots__ = ("items",)

    def __init__(self, items: list[Value]) -> None:
        self.items = items


class FrozenSet(Node):
    """A frozenset, its members in the order in which the pickle names them.

    Making it hashes them, which can depend on their state, so it has an order.
    """

    __slots__ = ("items", "order")

    def __init__(self, items: list[Value], order: int | None = None) -> None:
        self.items = items
        self.order = order


class Effect:
    """Something done to an object: `opcode` is the pickle opcode's name, `values` its operands
    (keys and values in turn for SETITEMS).
    """

    __slots__ = ("opcode", "order", "values")

    def __init__(self, opcode: str, values: list[Value], order: int | None) -> None:
        self.opcode = opcode
        self.values = values
        self.order = order


#: Shared while empty: most objects never get an effect.
NO_EFFECTS: list[Effect] = []


class Object(Node):
    """Whatever has effects: a list, dict or set, or the result of a call."""

    __slots__ = ("effects",)

    def __init__(self) -> None:
        self.effects = NO_EFFECTS

    def add(self, effect: Effect) -> None:
        """Append `effect` to what is done to this object."""
        if self.effects is NO_EFFECTS:
            self.effects = [effect]
        else:
            self.effects.append(effect)

    def pairs(self) -> Iterator[tuple[Effect, int]]:
        """Where this mapping's items stand: ``effect.values[i]`` is a key, ``effect.values[i + 1]`` its value."""
        for effect in self.effects:
            if effect.opcode in ("SETITEM", "SETITEMS"):
                for i in range(0, len(effect.values), 2):
                    yield effect, i

    def entries(self) -> Iterator[tuple[Value, Value]]:
        """This mapping's keys and values, in order; a key as often as it is set."""
        for effect in self.effects:
            if effect.opcode in ("SETITEM", "SETITEMS"):
                values = iter(effect.values)
                yield from zip(values, values, strict=True)

    def states(self) -> list[Value]:
        """The states that this object is given."""
        return [effect.values[0] for effect in self.effects if effect.opcode == "BUILD"]

    def elements(self) -> Iterator[Value]:
        """The elements of this list or set, in order."""
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
    """The result of a call that the pickle asks for and nobody makes.

    `kind` is the opcode: ``REDUCE`` calls ``callable(*args)``, ``NEWOBJ`` and ``NEWOBJ_EX`` call
    ``callable.__new__(callable, *args, **kwargs)``, ``OBJ`` (INST too) makes an instance in Python 2's way, its
    arguments in a Tuple of our own. ``args`` is a Tuple, or a Call that gives one (``torch.Size``).
    """

    __slots__ = ("args", "callable", "kind", "kwargs", "order")

    def __init__(
        self, kind: str, callable_: Value, args: Value, kwargs: Value = None, order: int | None = None
    ) -> None:
        self.effects = NO_EFFECTS  # not by super().__init__(): of all objects these are the most
        self.kind = kind
        self.callable = callable_
        self.args = args
        self.kwargs = kwargs
        self.order = order

    def calls(self) -> list[Call]:
        """This call, behind those inside that the list of a graph's outer calls leaves out."""
        return [self]


class PersistentId(Node):
    """A reference to something outside the pickle; in torch's files, to a storage."""

    __slots__ = ("id", "order")

    def __init__(self, id_: Value, order: int | None = None) -> None:
        self.id = id_
        self.order = order


Value: TypeAlias = "Node | bool | int | float | str | bytes | None"


@dataclass(eq=False)
class Graph:
    """One parsed pickle. ``protocol`` is what its header says, ``used`` the codes of the opcodes in it.

    ``globals``, ``calls`` and ``references`` (persistent ids) are all that the source has, in its order, so that nobody
    has to walk the graph for them; edits do not keep them up to date. If it ``has_inner_calls``, ``outer_calls``
    leaves out calls that ``Call.calls()`` gives: each of a global, without arguments, just before the outer call.
    ``discarded`` holds what the pickle made and threw away again, where it had effects (a call whose result is popped
    is still a call). ``shared`` are the nodes that the pickle names more than once. ``byte_strings`` and ``extensions``
    are all of these that the source has, those that it throws away too. ``changed`` are the objects to which the source
    does something after making them, ``written`` the calls, as the source has them, that a reader put into today's
    words. ``left_out`` leads to what the parts of a graph that was put together have, and it has not.
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
        """All calls, those inside ``outer_calls`` too, which become nodes for that."""
        if self.has_inner_calls:
            self.calls = [each for call in self.outer_calls for each in call.calls()]
        return self.outer_calls

    @calls.setter
    def calls(self, calls: list[Call]) -> None:
        self.outer_calls = calls
        self.has_inner_calls = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection meanwhile: a graph is large and alive, and looking through it for
    garbage again and again doubles the time. What was made counts as old afterwards, else it would be looked through
    right away.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # else the caller has frozen objects, which must stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def children(node: Value) -> list[Value]:
    """What `node` is made of, in the order in which a pickle says it."""
    if isinstance(node, (Tuple, FrozenSet)):
        return node.items
    if isinstance(node, PersistentId):
        return [node.id]
    if not isinstance(node, Object):
        return []
    found = [node.callable, node.args] if isinstance(node, Call) else []
    if isinstance(node, Call) and node.kwargs is not None:
        found.append(node.kwargs)
    for effect in node.effects:
        found += effect.values
    return found


def walk(roots: list[Value], seen: set[int] | None = None) -> Iterator[Node]:
    """Every node that `roots` lead to, once, in the order in which a pickle says them.

    Those whose id is in `seen` are left out and added.
    """
    seen = set() if seen is None else seen
    todo = roots[::-1]
    while todo:
        node = todo.pop()
        if isinstance(node, Node) and id(node) not in seen:
            seen.add(id(node))
            yield node
            todo += children(node)[::-1]


def subgraph(graph: Graph, root: Value) -> Graph:
    """What `root` leads to, as a graph of its own on the same nodes."""
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
    """`mapping`, on which `items` are set, keys and values in turn, as many at once as pickle does."""
    for at in range(0, len(items), 2 * AT_ONCE):
        mapping.add(Effect("SETITEMS", items[at : at + 2 * AT_ONCE], None))
    return mapping


def args_of(call: Call) -> list[Value]:
    """The arguments of `call`; none where they are themselves what a call gives."""
    return call.args.items if isinstance(call.args, Tuple) else []


def members_of(node: Value, most: int | None = None) -> list[Value] | None:
    """What is in a sequence or set, None if `node` is neither.

    Before protocol 4 a set is a call of its class with a sequence, of which the first `most` will do where that is
    given: any number of calls can have the same one.
    """
    if isinstance(node, Call) and is_global(node.callable, *SET_CLASSES) and not node.effects:
        made_of = args_of(node)
        if isinstance(node.args, Tuple) and not made_of:
            return []
        node = made_of[0] if len(made_of) == 1 and isinstance(made_of[0], (Tuple, List)) else None
    else:
        most = None
    if isinstance(node, (Tuple, FrozenSet)):
        return node.items[:most]
    return list(islice(node.elements(), most)) if isinstance(node, (List, Set)) else None


def replace_nodes(graph: Graph, new: Mapping[Node, Node]) -> None:
    """Put in `graph`, wherever one of the nodes `new` stands, what it stands for there.

    What a new node is made of is looked through as well.
    """

    def of(value: Value) -> Value:
        return new.get(value, value) if isinstance(value, Node) else value

    graph.root = of(graph.root)
    graph.discarded = [of(value) for value in graph.discarded]
    for node in walk([graph.root, *graph.discarded]):  # children are asked for after their parent was seen to
        if isinstance(node, (Tuple, FrozenSet)):
            node.items = [of(item) for item in node.items]
        elif isinstance(node, PersistentId):
            node.id = of(node.id)
        elif isinstance(node, Object):
            if isinstance(node, Call):
                node.callable, node.args, node.kwargs = of(node.callable), of(node.args), of(node.kwargs)
            for effect in node.effects:
                effect.values = [of(value) for value in effect.values]
    graph.shared |= {new[node] for node in new if node in graph.shared}


def is_global(node: Value, *names: str) -> bool:
    """Whether `node` is one of the globals `names`, given as ``module.name``."""
    return isinstance(node, Global) and f"{node.module}.{node.name}" in names


def strings_of(mapping: Object) -> dict[str, Value]:
    """`mapping`'s string keys and their values, the last of each."""
    return {key: value for key, value in mapping.entries() if isinstance(key, str)}


def is_count(value: Value) -> TypeGuard[int]:
    """Whether `value` can be a number of elements: an integer that is not negative, below the limit."""
    return type(value) is int and 0 <= value < LIMITS.elements
