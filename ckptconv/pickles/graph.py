"""The nodes of a pickle's graph. They record the operations of the pickle, which are never executed.

Atoms are Python's own ``None``, ``bool``, ``int``, ``float``, ``str`` and ``bytes``. Every other value is a node. A
value is shared if two positions contain the same object (``a is b``); this is true for strings, too. Nodes have no
equality, hash or repr that depends on their content, because a file could make these operations slow. Cycles are
allowed.

A pickle can change an object after its creation (``BUILD``, ``APPENDS``, ``SETITEMS``, ``ADDITEMS``). Each change is an
:class:`Effect` in the object's ``effects``. The creation of a call, a persistent id or a frozenset counts as an effect,
too. The ``order`` of an effect is its position among all effects of the source, counted from 1, or None if an edit has
added the effect.
"""

from __future__ import annotations

import gc
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from itertools import islice
from typing import TypeAlias, TypeGuard, TypeVar

from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.work import bounded, work

#: The largest number of items in one APPENDS or SETITEMS, as in pickle's own writer.
AT_ONCE = 1000

_MOST_MOVED = 1_000_000  # objects: some 120 MB
_moved = 0  # objects that were moved to the garbage collector's oldest generation since the last full collection

#: The classes that a pickle calls to make a set before protocol 4, which introduced opcodes for sets.
SET_CLASSES = ("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset")


class Node:
    """A value that is not an atom. Nodes compare and hash by identity."""

    __slots__ = ()


class Global(Node):
    """The global ``module.name``, as spelled in the pickle. It is never imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Extension(Node):
    """The number of a global in the ``copyreg`` registry of the reading process (opcodes EXT1, EXT2, EXT4)."""

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
    """A long text or byte string that is not read: `length` bytes at `offset` of the source.

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

    Its creation hashes its members, and a hash can depend on the state of a member. So it has an order, like an effect.
    """

    __slots__ = ("items", "order")

    def __init__(self, items: list[Value], order: int | None = None) -> None:
        self.items = items
        self.order = order


class Effect:
    """A change of an object.

    Attributes:
        opcode: The name of the pickle opcode.
        values: The operands of the opcode. For SETITEMS: keys and values in turn.
        order: The position among the effects of the source, or None if an edit has added the effect.
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
        """Yield the effect and the index of each item of this mapping.

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
        """Return the states that BUILD sets on this object, in order."""
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
    """The result of a call in the pickle. The call is never executed.

    Attributes:
        kind: The name of the opcode. ``REDUCE`` calls ``callable(*args)``. ``NEWOBJ`` and ``NEWOBJ_EX`` call
            ``callable.__new__(callable, *args, **kwargs)``. ``OBJ``, which is also used for INST, creates an
            instance as Python 2 did; its arguments are in a Tuple that the pickle does not contain.
        callable: The value that is called.
        args: A Tuple, or a Call that returns a tuple (``torch.Size``).
        kwargs: A Dict for ``NEWOBJ_EX``, or None.
        order: As for an :class:`Effect`.
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
        """Return the inner calls that ``Graph.outer_calls`` leaves out, followed by this call.

        Only a row of a tensor has inner calls.
        """
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

    Edits do not update the lists of nodes.

    Attributes:
        root: The value of the pickle.
        protocol: The protocol in the header.
        opcodes: The number of opcodes that were read.
        used: The codes of these opcodes.
        globals: All globals, in the order of the source.
        outer_calls: All calls, in the order of the source. If ``has_inner_calls`` is True, it lacks the calls that
            ``Call.calls()`` returns before the outer call. Each of these calls a global.
        references: All persistent ids, in the order of the source.
        discarded: Values with calls or persistent ids that the pickle creates and then discards. Their calls still
            happen.
        shared: The nodes that the pickle reads from the memo or names more than once.
        byte_strings: All byte strings, including discarded ones.
        extensions: All extension codes, including discarded ones.
        changed: The objects that have effects in the source.
        written: For each call that a reader has replaced by its modern equivalent: the call in the source.
        left_out: For a merged graph: values of the merged files that it may not contain.
        has_inner_calls: Whether ``outer_calls`` lacks inner calls.
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
        """All calls, including inner calls. Reading this property creates the nodes of the inner calls."""
        if self.has_inner_calls:
            self.calls = [*dict.fromkeys(each for call in self.outer_calls for each in call.calls())]
        return self.outer_calls

    @calls.setter
    def calls(self, calls: list[Call]) -> None:
        self.outer_calls = calls
        self.has_inner_calls = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, and limit the work on graphs (:mod:`ckptconv.work`), inside a ``with`` block.

    A graph is large and stays alive, so collections would double the time. At the end, all objects are moved to the
    oldest generation, so that the next collection does not visit them. Python does not count the objects that are moved
    in this way, so without the collection at the start, garbage would stay in a program that reads many files.
    """
    global _moved
    enabled = gc.isenabled()
    if enabled and _moved > _MOST_MOVED:
        gc.collect()
        _moved = 0
    gc.disable()
    try:
        with bounded():
            yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # otherwise the caller has frozen objects, which must stay frozen
                _moved += gc.get_count()[0]  # the objects made since the last time
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def type_of(value: Value) -> type:
    """Return the type of `value`: ``Call`` and ``PersistentId`` for their subclasses, which nodes of rows have."""
    return Call if isinstance(value, Call) else PersistentId if isinstance(value, PersistentId) else type(value)


def kind_of(value: Value) -> str:
    """Return the name of the type of `value` for errors, in lower case."""
    return type_of(value).__name__.lower()


def children(node: Value) -> list[Value]:
    """Return the values that `node` consists of, in the order of the pickle. An atom has none.

    The list may be the node's own: do not change it.
    """
    if isinstance(node, (Tuple, FrozenSet)):
        return node.items
    if not isinstance(node, Object):
        return [node.id] if isinstance(node, PersistentId) else []
    parts: list[Value] = []
    if isinstance(node, Call):
        parts = [node.callable, node.args] if node.kwargs is None else [node.callable, node.args, node.kwargs]
    elif len(node.effects) == 1:
        return node.effects[0].values
    for effect in node.effects:
        parts += effect.values
    return parts


def walk(
    roots: list[Value], seen: set[int] | None = None, parts: Callable[[Value], list[Value]] = children
) -> Iterator[Node]:
    """Yield every node that can be reached from `roots`, once, in the order of the pickle.

    Nodes whose ids are in `seen` are skipped, with everything below them. The ids of all yielded nodes are added to
    `seen`. `parts` returns the children of a node to visit. Raises LimitError if the budget of work is used up.
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
            todo += reversed(parts(node))


_Object = TypeVar("_Object", bound=Object)


def set_items(mapping: _Object, items: list[Value]) -> _Object:
    """Add `items`, keys and values in turn, to `mapping`. Return `mapping`.

    One effect is added for each 1,000 items, as pickle's own writer does. Raises LimitError if the budget of work is
    used up, because many objects can share the container that the items are from.
    """
    work().charge(len(items))
    for at in range(0, len(items), 2 * AT_ONCE):
        mapping.add(Effect("SETITEMS", items[at : at + 2 * AT_ONCE], None))
    return mapping


def add_elements(holder: _Object, elements: Sequence[Value]) -> _Object:
    """Add `elements` to the list or set `holder`, as :func:`set_items` does. Return `holder`."""
    work().charge(len(elements))
    opcode = "APPENDS" if isinstance(holder, List) else "ADDITEMS"
    for at in range(0, len(elements), AT_ONCE):
        holder.add(Effect(opcode, [*elements[at : at + AT_ONCE]], None))
    return holder


def replace_items(mapping: Object, items: Iterable[tuple[Value, Value]]) -> None:
    """Replace all items of `mapping` by `items`. Other effects stay, after the new items."""
    others = [effect for effect in mapping.effects if effect.opcode not in ("SETITEM", "SETITEMS")]
    mapping.effects = []
    set_items(mapping, [each for item in items for each in item]).effects += others


def args_of(call: Call) -> list[Value]:
    """Return the arguments of `call`, or an empty list if the arguments are the result of another call."""
    return call.args.items if isinstance(call.args, Tuple) else []


def latin_1_text(node: Value) -> Value:
    """Return the text that `node` encodes as Latin-1, or None if `node` is not such a call.

    Protocol 2 writes bytes as this call, because it has no opcode for bytes.
    """
    if not isinstance(node, Call) or not is_global(node.callable, "_codecs.encode") or node.effects:
        return None
    text, codec = args_of(node) if len(args_of(node)) == 2 else (None, None)
    return text if codec in ("latin1", "latin-1") else None


def members_of(node: Value, most: int | None = None) -> list[Value] | None:
    """Return the members of a tuple, list, set or frozenset. Return None if `node` is none of these.

    Before protocol 4, a set is a call of its class with a sequence. Of such a call, only the first `most` members are
    returned if `most` is not None, because many calls can share one long sequence. Raises LimitError if the budget of
    work is used up.
    """
    if isinstance(node, Call) and is_global(node.callable, *SET_CLASSES) and not node.effects:
        args = args_of(node)
        if isinstance(node.args, Tuple) and not args:
            return []
        node = args[0] if len(args) == 1 and isinstance(args[0], (Tuple, List)) else None
    else:
        most = None
    if isinstance(node, (Tuple, FrozenSet)):
        members = node.items[:most]
    elif isinstance(node, (List, Set)):
        members = list(islice(node.elements(), most))
    else:
        return None
    work().charge(len(members))
    return members


def replace_nodes(graph: Graph, new: Mapping[Node, Node]) -> None:
    """Replace nodes everywhere in `graph`, in place.

    `new` maps each old node to the new one. Nodes inside a new node are replaced, too. The lists of nodes are not
    updated.
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
    """Return whether `node` is a global whose ``module.name`` is in `names`."""
    return isinstance(node, Global) and f"{node.module}.{node.name}" in names


def strings_of(mapping: Object) -> dict[str, Value]:
    """Return a dict of the string keys of `mapping` and their values.

    If a key is set twice, the last value is returned. Raises LimitError if the budget of work is used up, because many
    objects can share a mapping.
    """
    entries = [*mapping.entries()]
    work().charge(len(entries))
    return {key: value for key, value in entries if isinstance(key, str)}


def is_count(value: Value) -> TypeGuard[int]:
    """Return whether `value` can be a number of elements.

    This is an ``int``, not a bool, of at least 0 and less than ``LIMITS.elements``.
    """
    return type(value) is int and 0 <= value < LIMITS.elements


def imported_name(node: Global, protocol: int) -> str:
    """Return the ``module.name`` that Python looks up for `node` in a pickle of this `protocol`. Nothing is imported.

    Below protocol 3, names of Python 2 are mapped to those of Python 3.
    """
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
