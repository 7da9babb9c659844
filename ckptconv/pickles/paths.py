r"""The path of each node in a graph, in the order of the pickle.

A path consists of segments:

    ========================  ==========================================================
    ``optimizer/state``       string keys, joined by ``/``
    ``[0]``, ``[None]``       the index in a list, or the literal of a key that is not a string
    ``/.name``                an attribute (the state of BUILD is a dict)
    ``/.__state__``           other state
    ``/(0)``, ``/(name)``     an argument; ``/(call)`` is the callable, ``/(*)`` the call that returns all arguments
    ``/{0}``                  a member of a set, by position
    ``/<0>``                  a key of a mapping that is an object, by position; ``[<0>]`` is its value
    ``.``                     the root
    ========================  ==========================================================

In a string key, a backslash escapes ``/``, ``[`` and backslash, and one of ``.({<`` at the start of the key. An empty
key is ``\e``. If the same segment occurs again below one parent (a key that is set twice), it ends in ``\2``.

Each node is entered once, at its first position: a graph can have more paths than there are atoms. A node for which the
function `leaf` returns a list is reported at each position, and only the values in that list are entered below it.
Arguments and states are listed below the first object that has them: any number of objects can share them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from ckptconv.errors import LimitError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Effect,
    FrozenSet,
    Global,
    Graph,
    List,
    Node,
    Object,
    PersistentId,
    Set,
    Tuple,
    Value,
    children,
    latin_1_text,
    walk,
)
from ckptconv.pickles.rows import RowCall
from ckptconv.work import work

_LONGEST_LITERAL = 80
_TOO_LONG = "the paths in the checkpoint are too long"
_STEPS = 4  # of work for each place, which takes a hundred bytes of memory
_STEPS_INSIDE = 5  # of work for each node that is not a tensor
_SPECIAL = tuple(".({<")  # first characters of segments that are not string keys

_SEGMENT = regex(
    r"""\[ (?: '(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | [^]'"] )* \] (?:\\[0-9]+)?   # [0], [(1, 'a')], [0]\2
      | / (?:\\. | [^\\/[])*                                                       # /weight, /a\/b, /.name, /(0)
    """,
    re.DOTALL | re.VERBOSE,
)


#: Returns the states of a leaf, whose attributes are listed below it, or None for a node that is not a leaf.
Leaf = Callable[[Node], "list[Value] | None"]


@dataclass(eq=False, slots=True)  # not frozen, which would make creation three times as slow
class Place:
    """A position of a node in a graph.

    Attributes:
        parent: The place that contains this one, or None for the root.
        segment: The last segment of the path, as in the table above.
        node: The node or atom at this position.
        depth: The number of segments of the path.
        key: The string key in the mapping that contains the node, the name of the attribute, or None.
        length: The number of characters of the path. It is 0 until :func:`find_places` has yielded the place.
    """

    parent: Place | None
    segment: str
    node: Value
    depth: int
    key: str | None = None
    length: int = 0  # of the path

    @property
    def path(self) -> str:
        """The path, as ``inspect`` prints it."""
        if self.parent is not None and self.parent.parent is None:  # most tensors are directly below the root
            if self.key and len(self.segment) == len(self.key) + 1:  # without escapes: share one text
                return self.key
            return self.segment.removeprefix("/") or "."
        segments: list[str] = []
        place: Place | None = self
        # without upwards(), for speed: each tensor's path is needed several times
        while place is not None and place.parent is not None:
            segments.append(place.segment)
            place = place.parent
        return "".join(reversed(segments)).removeprefix("/") or "."

    def upwards(self) -> Iterator[Place]:
        """Yield this place, then its parent, and so on up to the root."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent


def find_places(start: Value | Place, leaf: Leaf, where: str, opcodes: int = 0) -> Iterator[Place]:
    """Yield `start` and every place below it, each after its parent, in the order of the pickle.

    A node with several positions is entered at the first one only.

    Args:
        start: The root node, or a known place.
        leaf: Returns the states of a leaf, or None for a node that is not a leaf.
        where: Name of the pickle in errors.
        opcodes: Number of opcodes of the pickle. It limits the total number of characters in all paths.

    Raises:
        LimitError: The nesting is too deep, the paths are too long, or the budget of work is used up.
    """
    budget = work()
    entered: set[Node] = set()
    listed: set[int] = set()
    room = LIMITS.paths(opcodes)
    todo = [start if isinstance(start, Place) else Place(None, "", start, 0)]
    while todo:
        place = todo.pop()
        parent = place.parent
        place.length = len(place.segment) + (parent.length if parent else 0)
        room -= place.length
        if room < 0:
            raise LimitError(_TOO_LONG, where=where, expected=f"at most {LIMITS.paths(opcodes):,} characters in all")
        yield place
        node = place.node
        if not isinstance(node, Node) or node in entered:
            continue
        if isinstance(node, RowCall) and leaf(node) == []:
            continue  # most tensors: nothing is below them
        if place.depth >= LIMITS.nesting:
            raise LimitError(
                "the checkpoint is nested too deeply", where=where, expected=f"at most {LIMITS.nesting:,} levels"
            )
        entered.add(node)
        try:
            below = child_places(place, leaf, listed)
            budget.charge(_STEPS_INSIDE + _STEPS * len(below))
            below.reverse()
            todo += below
        except LimitError as error:
            error.where = where
            raise


def child_places(
    place: Place, leaf: Leaf, listed: set[int] | None = None, passed_over: Container[int] = ()
) -> list[Place]:
    """Return the places directly below `place`, in the order of the pickle.

    Args:
        place: The place to look into.
        leaf: Returns the states of a leaf, or None for a node that is not a leaf. Below a leaf, only the attributes in
            these states are listed.
        listed: The ids of arguments and states that were listed before: they are left out, and new ones are added.
        passed_over: The ids of values with string keys that are left out.

    Raises:
        LimitError: The keys of one mapping are too long.
    """
    node = place.node
    listed = set() if listed is None else listed
    states = leaf(node) if isinstance(node, Node) else []
    if states is None:
        places = _inside(place, listed, passed_over)
    else:
        places = [attribute for state in states for attribute in _attributes(place, state, listed)]
    if len(places) > 1 and isinstance(node, (Call, Dict)):
        _number_again(places)
    return places


def parts_listed(node: Call, leaf: Leaf) -> list[Value]:
    """Return the arguments and states of `node` whose contents :func:`child_places` lists below it.

    For a leaf, these are the states that `leaf` returns, without the arguments.
    """
    states = leaf(node)
    return [node.args, node.kwargs, *node.states()] if states is None else states


def is_item(place: Place) -> bool:
    """Return whether `place` is the value under a key of a mapping, or an element of a list or tuple.

    Attributes, arguments, members of sets and keys are not items.
    """
    return place.segment.startswith("[") or (place.segment[:1] == "/" and place.segment[1:2] not in _SPECIAL)


def _inside(place: Place, listed: set[int], passed_over: Container[int]) -> list[Place]:
    """Return the places directly below `place`, whose node is not a leaf."""
    node = place.node
    if isinstance(node, Tuple):
        return _numbered(place, "[%d]", node.items)
    if isinstance(node, FrozenSet):
        return _numbered(place, "/{%d}", node.items)
    if isinstance(node, (List, Set)):
        return _numbered(place, "[%d]" if isinstance(node, List) else "/{%d}", list(node.elements()))
    if isinstance(node, PersistentId):
        return [_below(place, "/(0)", node.id)] if isinstance(node.id, Node) and not isinstance(node.id, Tuple) else []
    places: list[Place] = []
    if isinstance(node, Call):
        places += _arguments(place, node, listed)
    if isinstance(node, Object):
        places += _effects(place, node, listed, passed_over)
    return places


def is_repeated(place: Place) -> bool:
    r"""Return whether the segment of `place` ends in a number such as ``\2``, because the same key is set before."""
    return re.search(r"(?<!\\)(\\\\)*\\[0-9]+$", place.segment) is not None


def item_segments(mapping: Object) -> list[str]:
    r"""Return the segments of the values of `mapping`, in order.

    A segment that occurs again ends in ``\2``, ``\3`` and so on.
    """
    segments = [key_segment(effect.values[i], n) for n, (effect, i) in enumerate(mapping.pairs())]
    return _all_different(segments)


def _number_again(siblings: list[Place]) -> None:
    r"""Change the segments of `siblings` so that all are different.

    A key or attribute that is set again ends in ``\2``.
    """
    for place, segment in zip(siblings, _all_different([place.segment for place in siblings]), strict=True):
        place.segment = segment


def _all_different(segments: list[str]) -> list[str]:
    r"""Return `segments` with ``\2``, ``\3`` and so on added to each segment that occurred before."""
    if len(set(segments)) == len(segments):
        return segments
    times: dict[str, int] = {}
    different = []
    for segment in segments:
        times[segment] = again = times.get(segment, 0) + 1
        different.append(segment if again == 1 else f"{segment}\\{again}")
    return different


def _below(place: Place, segment: str, node: Value, key: str | None = None) -> Place:
    """Return the place of `node` below `place`."""
    return Place(place, segment, node, place.depth + 1, key)


def _numbered(place: Place, form: str, items: list[Value], start: int = 0) -> list[Place]:
    """Return the places of `items` below `place`.

    `form` is a format with ``%d`` for the position, which is counted from `start`.
    """
    depth = place.depth + 1
    return [Place(place, form % i, item, depth) for i, item in enumerate(items, start)]


def _arguments(place: Place, call: Call, listed: set[int]) -> list[Place]:
    """Return the places of the callable and the arguments of `call`, which is at `place`.

    The callable gets a place only if it is a call. Arguments whose ids are in `listed` are left out.
    """
    places: list[Place] = []
    if isinstance(call.callable, Call):
        places.append(_below(place, "/(call)", call.callable))
    if isinstance(call.args, Tuple) and _is_first(call.args, listed):
        places += _numbered(place, "/(%d)", call.args.items)
    elif isinstance(call.args, Call):
        places.append(_below(place, "/(*)", call.args))
    if isinstance(call.kwargs, Dict) and _is_first(call.kwargs, listed):
        _check_keys(call.kwargs)
        for effect, i in call.kwargs.pairs():
            name = effect.values[i]
            segment = f"/({escape_segment(name) if isinstance(name, str) else i})"
            places.append(_below(place, segment, effect.values[i + 1]))
    return places


def _is_first(part: Node, listed: set[int]) -> bool:
    """Return whether the id of `part` is not yet in `listed`, and add it."""
    if id(part) in listed:
        return False
    listed.add(id(part))
    return True


def _check_keys(mapping: Object) -> None:
    """Raise LimitError if the string keys of `mapping` are too long in total.

    A small pickle can contain one long key and set it many times.
    """
    lengths = [len(key) for key, _ in mapping.entries() if isinstance(key, str)]
    most = LIMITS.paths(2 * len(lengths))
    if sum(lengths) > most:
        raise LimitError(_TOO_LONG, expected=f"at most {most:,} characters in the keys of one mapping")


def _effects(place: Place, node: Object, listed: set[int], passed_over: Container[int]) -> list[Place]:
    """Return the places of the values that effects have put into `node`, a mapping or the result of a call at `place`.

    States whose ids are in `listed` are left out, and values with string keys whose ids are in `passed_over`.
    """
    places: list[Place] = []
    if node.effects:
        _check_keys(node)
    count = pairs = 0
    for effect in node.effects:
        if effect.opcode == "BUILD":
            places += _attributes(place, effect.values[0], listed)
        elif effect.opcode in ("SETITEM", "SETITEMS"):
            places += _items(place, effect, pairs, passed_over)
            pairs += len(effect.values) // 2
        else:
            places += _numbered(place, "/{%d}" if effect.opcode == "ADDITEMS" else "[%d]", effect.values, count)
            count += len(effect.values)
    return places


def _items(place: Place, effect: Effect, start: int, passed_over: Container[int]) -> list[Place]:
    """Return the places of the values that `effect` sets, and of the keys that are nodes.

    `start` is the number of items that earlier effects have set. Values with string keys whose ids are in `passed_over`
    are left out.
    """
    places: list[Place] = []
    depth = place.depth + 1
    values = iter(effect.values)
    for n, (key, value) in enumerate(zip(values, values, strict=True), start):
        if isinstance(key, str):
            if not passed_over or id(value) not in passed_over:
                places.append(Place(place, key_segment(key, n), value, depth, key))
            continue
        if isinstance(key, Node):
            places.append(_below(place, f"/<{n}>", key))
        places.append(Place(place, key_segment(key, n), value, depth))
    return places


def _attributes(place: Place, state: Value, listed: set[int]) -> list[Place]:
    """Return the places of the attributes that BUILD sets from `state`.

    If `state` is a dict whose keys are all strings, each item is an attribute. Other state gets one place,
    ``/.__state__``. The list is empty if `state` is None or empty, or a dict whose id is in `listed`.
    """
    if isinstance(state, Dict) and not _is_first(state, listed):
        return []
    items = [*state.entries()] if isinstance(state, Dict) else []
    if isinstance(state, Dict):
        _check_keys(state)
    if items and all(isinstance(name, str) for name, _ in items):
        return [
            _below(place, "/." + escape_segment(name), value, name) for name, value in items if isinstance(name, str)
        ]
    if state is None or (isinstance(state, (Dict, List, Set)) and not state.effects):
        return []
    return [_below(place, "/.__state__", state)]


def key_segment(key: Value, position: int) -> str:
    """Return the segment of the value under `key`.

    A string key gives ``/key``, another short key its literal in brackets, and any other key ``[<position>]``, where
    `position` is the number of items before it in the mapping.
    """
    if isinstance(key, str):
        return ("/\\" if key[:1] in _SPECIAL else "/") + escape_segment(key)
    literal = _literal(key)
    return f"[{literal}]" if literal else f"[<{position}>]"


def escape_segment(word: str) -> str:
    r"""Return `word` with a backslash before each ``/``, ``[`` and backslash. An empty word becomes ``\e``."""
    if "/" in word or "[" in word or "\\" in word:
        word = re.sub(r"[\\/\[]", r"\\\g<0>", word)
    return word or "\\e"


def _literal(key: Value) -> str | None:
    """Return the Python literal of `key`, or None if it is not short and simple.

    Simple keys are atoms, bytes, and tuples of at most 8 simple keys. A short literal has at most 80 characters.
    """
    if isinstance(key, Call):
        key = _encoded_bytes(key)
    if isinstance(key, Tuple):
        parts = [
            _literal(item) if isinstance(item, Call) or not isinstance(item, Node) else None for item in key.items[:9]
        ]
        if len(parts) > 8 or None in parts:
            return None
        text = "(" + ", ".join(map(str, parts)) + (",)" if len(parts) == 1 else ")")
    elif (
        isinstance(key, Node)
        or (isinstance(key, (str, bytes)) and len(key) > _LONGEST_LITERAL)
        or (isinstance(key, int) and key.bit_length() > 200)
    ):
        return None
    else:
        text = repr(key)
    return text if len(text) <= _LONGEST_LITERAL else None


def _encoded_bytes(call: Call) -> Value:
    """Return the bytes that `call` makes from a short Latin-1 text, as torch saves bytes. Otherwise return `call`."""
    text = latin_1_text(call)
    if isinstance(text, str) and len(text) <= _LONGEST_LITERAL:
        with suppress(UnicodeEncodeError):
            return text.encode("latin-1")
    return call


def parse_path(path: str) -> list[str]:
    """Return the segments of `path`, in the form of :func:`key_segment`. The path of the root, ``.``, has none."""
    if path == ".":
        return []
    return _SEGMENT.findall(path if path.startswith("[") else "/" + path)


_THROWN_AWAY = "(a discarded value)"


class Referrers:
    """The users of each node of a graph. A node uses its children.

    Byte strings count as nodes here, each object for itself, also if two are equal.

    Args:
        graph: The graph.
        places: The places of its nodes. Of several places of a node, the first is used.
        nodes: All nodes of the graph in the order of the pickle, or None to walk the graph.
        parts: Returns the children of a node.
    """

    def __init__(
        self,
        graph: Graph,
        places: Iterable[Place],
        nodes: Iterable[Node] | None = None,
        parts: Callable[[Value], list[Value]] = children,
    ) -> None:
        self.root = graph.root
        self.discarded = {id(node) for node in graph.discarded}
        self._first: dict[int, Node] = {}
        self._more: dict[int, list[Node]] = {}  # the other users; few nodes have any
        budget = work()
        for node in walk([graph.root, *graph.discarded]) if nodes is None else nodes:
            below = parts(node)
            budget.charge(1 + len(below))
            for child in below:
                if isinstance(child, (Node, bytes)):
                    if id(child) in self._first:
                        self._more.setdefault(id(child), []).append(node)
                    else:
                        self._first[id(child)] = node
        #: Ids of nodes that no node with a place contains.
        self.lost: set[int] = set()
        self.places: dict[int, Place] = {}
        for place in places:
            self.places.setdefault(id(place.node), place)

    def users(self, node: Value) -> Iterable[Node]:
        """Return the users of `node`, once for each reference."""
        first = self._first.get(id(node))
        return () if first is None else chain((first,), self._more.get(id(node), ()))

    def of(self, node: Value) -> tuple[Value, int]:
        """Return a node to show in place of `node`, and the number of further references to `node`.

        For a global that its first user calls, this is the call and the number of other references. For any other
        global, it is the global and the same number. For a node that is not a global or that nothing refers to, it is
        the node and 0.
        """
        user = self._first.get(id(node))
        if not isinstance(node, Global) or user is None:
            return node, 0
        is_called = isinstance(user, Call) and user.callable is node
        return user if is_called else node, len(self._more.get(id(node), ()))

    def has(self, node: Value) -> bool:
        """Return whether the graph still contains `node`: below its root, or among the objects that it discards.

        `node` must be a node or byte string.
        """
        return node is self.root or id(node) in self._first or id(node) in self.discarded

    def path(self, node: Value) -> str:
        """Return the path of `node`, or of the nearest node that contains it and has a place.

        If there is none, the pickle discards the value. Then return a description of this in place of a path.
        """
        climbed: set[int] = set()
        while id(node) not in self.places and id(node) not in self.lost:
            user = next((user for user in self.users(node) if id(user) not in climbed), None)
            if user is None:
                break
            climbed.add(id(node))
            node = user
        place = self.places.get(id(node))
        if place is None and node is self.root:
            return "."
        if place is None:
            self.lost |= climbed  # these are not climbed again
            return _THROWN_AWAY
        self.places.update(dict.fromkeys(climbed, place))
        return place.path

    def above(self, nodes: Iterable[Value]) -> set[int]:
        """Return the ids of `nodes` and of all nodes that contain them, directly or not."""
        reached: set[int] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if id(node) not in reached:
                reached.add(id(node))
                todo += self.users(node)
        return reached
