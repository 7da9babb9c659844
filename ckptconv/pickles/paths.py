r"""The path of each node in a graph, in the order in which the pickle says it.

A path is made of segments:

    ========================  ==========================================================
    ``optimizer/state``       string keys, joined by ``/``
    ``[0]``, ``[None]``       a list's index, or a key that is no string, by its literal
    ``/.name``                an attribute (state of BUILD that is a dict)
    ``/.__state__``           other state
    ``/(0)``, ``/(name)``     an argument; ``/(call)`` is what is called, ``/(*)`` all arguments, if they are a call
    ``/{0}``                  a member of a set, by position
    ``/<0>``                  a mapping's key itself, by position, where it is an object; ``[<0>]`` is its value
    ``.``                     the root
    ========================  ==========================================================

In a string key, ``/``, ``[`` and backslash are escaped by a backslash, and so is one of ``.({<`` at its start; an empty
key is ``\\e``. What would be a segment's second use in one place (a key that is set twice) has ``\\2`` behind it.

Each node is entered once, where it stands first: a graph can have more paths than there are atoms. What LEAF says is a
leaf is reported wherever it stands and never entered, but for what LEAF hands back. Arguments and states, which are
listed below the object that has them, are listed once as such: any number of objects can have the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from ckptconv.errors import LimitError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Effect,
    FrozenSet,
    List,
    Node,
    Object,
    PersistentId,
    Set,
    Tuple,
    Value,
    args_of,
    is_global,
)
from ckptconv.pickles.rows import RowCall

__all__ = [
    "Leaf",
    "Place",
    "child_places",
    "escape_segment",
    "find_places",
    "is_item",
    "is_repeated",
    "item_segments",
    "key_segment",
    "parse_path",
    "parts_listed",
]

_LONGEST_LITERAL = 80
_TOO_LONG = "the paths of what is in the checkpoint are too long"
_SPECIAL = tuple(".({<")  # begins a segment that is no string key

_SEGMENT = regex(
    r"""\[ (?: '(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | [^]'"] )* \] (?:\\[0-9]+)?   # [0], [(1, 'a')], [0]\2
      | / (?:\\. | [^\\/[])*                                                       # /weight, /a\/b, /.name, /(0)
    """,
    re.DOTALL | re.VERBOSE,
)


#: For a leaf: what stands in it as its attributes, if anything. None for what is no leaf.
Leaf = Callable[[Node], "list[Value] | None"]


@dataclass(eq=False, slots=True)  # not frozen: that makes a million of them three times as slow
class Place:
    """Where `node` stands first: `segment`, as the table above says, below `parent`.

    ``key`` is the key where the segment is a mapping's string key.
    """

    parent: Place | None
    segment: str
    node: Value
    depth: int
    key: str | None = None
    length: int = 0  # of the path, once the walk has come by

    @property
    def path(self) -> str:
        """The path, as ``inspect`` prints it."""
        if self.parent is not None and self.parent.parent is None:  # most tensors stand right below the root
            if self.key and len(self.segment) == len(self.key) + 1:  # nothing in it is escaped: one text for both
                return self.key
            return self.segment.removeprefix("/") or "."
        segments: list[str] = []
        place: Place | None = self
        # not by upwards(): asked for each tensor, again and again
        while place is not None and place.parent is not None:
            segments.append(place.segment)
            place = place.parent
        return "".join(reversed(segments)).removeprefix("/") or "."

    def upwards(self) -> Iterator[Place]:
        """This place, what it stands in, what that stands in, up to the root."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent


def find_places(start: Value | Place, leaf: Leaf, where: str, opcodes: int = 0) -> Iterator[Place]:
    """Every place from `start` on, a root or a place that is known, its parent before it.

    Raises LimitError where nesting is too deep, or the paths are too long for a pickle of so many `opcodes`.
    """
    entered: set[int] = set()
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
        if not isinstance(node, Node) or id(node) in entered:
            continue
        if isinstance(node, RowCall) and leaf(node) == []:
            continue  # most tensors: nothing stands in them
        if place.depth >= LIMITS.nesting:
            raise LimitError(
                "the checkpoint is nested too deeply", where=where, expected=f"at most {LIMITS.nesting:,} levels"
            )
        entered.add(id(node))
        try:
            todo += child_places(place, leaf, listed)[::-1]
        except LimitError as error:
            error.where = where
            raise


def child_places(place: Place, leaf: Leaf, listed: set[int] | None = None) -> list[Place]:
    """The places right below `place`, in the order in which the pickle says
    what stands there.

    Below what `leaf` says is a leaf, its attributes. Arguments and states in `listed`, by their ids, are left out, and
    the others are put there.
    """
    node = place.node
    listed = set() if listed is None else listed
    states = leaf(node) if isinstance(node, Node) else []
    if states is None:
        found = _inside(place, listed)
    else:
        found = [attribute for state in states for attribute in _attributes(place, state, listed)]
    if isinstance(node, (Call, Dict)) and found:
        _number_again(found)
    return found


def parts_listed(node: Call, leaf: Leaf) -> list[Value]:
    """The arguments and states of `node` that :func:`child_places` lists below it."""
    states = leaf(node)
    return [node.args, node.kwargs, *node.states()] if states is None else states


def is_item(place: Place) -> bool:
    """Whether `place` is the value under a key of a mapping, or an element of a list or tuple.

    Not an attribute, argument, member or key.
    """
    return place.segment.startswith("[") or (place.segment[:1] == "/" and place.segment[1:2] not in _SPECIAL)


def _inside(place: Place, listed: set[int]) -> list[Place]:
    node = place.node
    if isinstance(node, Tuple):
        return _numbered(place, "[%d]", node.items)
    if isinstance(node, FrozenSet):
        return _numbered(place, "/{%d}", node.items)
    if isinstance(node, (List, Set)):
        return _numbered(place, "[%d]" if isinstance(node, List) else "/{%d}", list(node.elements()))
    if isinstance(node, PersistentId):
        return [_below(place, "/(0)", node.id)] if isinstance(node.id, Node) and not isinstance(node.id, Tuple) else []
    found: list[Place] = []
    if isinstance(node, Call):
        found += _arguments(place, node, listed)
    if isinstance(node, Object):
        found += _effects(place, node, listed)
    return found


def is_repeated(place: Place) -> bool:
    """Whether `place`'s key was set before, to another value or the same."""
    return re.search(r"(?<!\\)(\\\\)*\\[0-9]+$", place.segment) is not None


def item_segments(mapping: Object) -> list[str]:
    """The segments of the values of `mapping`'s items, in order."""
    segments = [key_segment(effect.values[i], n) for n, (effect, i) in enumerate(mapping.pairs())]
    return _all_different(segments)


def _number_again(siblings: list[Place]) -> None:
    """Give `siblings` segments that are all different: a key can be set twice, an attribute too."""
    for place, segment in zip(siblings, _all_different([place.segment for place in siblings]), strict=True):
        place.segment = segment


def _all_different(segments: list[str]) -> list[str]:
    if len(set(segments)) == len(segments):
        return segments
    times: dict[str, int] = {}
    different = []
    for segment in segments:
        times[segment] = again = times.get(segment, 0) + 1
        different.append(segment if again == 1 else f"{segment}\\{again}")
    return different


def _below(place: Place, segment: str, node: Value, key: str | None = None) -> Place:
    return Place(place, segment, node, place.depth + 1, key)


def _numbered(place: Place, form: str, items: list[Value], start: int = 0) -> list[Place]:
    depth = place.depth + 1
    return [Place(place, form % i, item, depth) for i, item in enumerate(items, start)]


def _arguments(place: Place, call: Call, listed: set[int]) -> list[Place]:
    found: list[Place] = []
    if isinstance(call.callable, Call):
        found.append(_below(place, "/(call)", call.callable))
    if isinstance(call.args, Tuple) and _is_first(call.args, listed):
        found += _numbered(place, "/(%d)", call.args.items)
    elif isinstance(call.args, Call):
        found.append(_below(place, "/(*)", call.args))
    if isinstance(call.kwargs, Dict) and _is_first(call.kwargs, listed):
        _check_keys(call.kwargs)
        for effect, i in call.kwargs.pairs():
            name = effect.values[i]
            segment = f"/({escape_segment(name) if isinstance(name, str) else i})"
            found.append(_below(place, segment, effect.values[i + 1]))
    return found


def _is_first(part: Node, listed: set[int]) -> bool:
    """Whether `part` is not in `listed` yet, where it is from now on."""
    if id(part) in listed:
        return False
    listed.add(id(part))
    return True


def _check_keys(mapping: Object) -> None:
    """Raise LimitError where segments for the keys of `mapping` would be too long: one key can stand there twice, and
    many times.
    """
    lengths = [len(key) for key, _ in mapping.entries() if isinstance(key, str)]
    most = LIMITS.paths(2 * len(lengths))
    if sum(lengths) > most:
        raise LimitError(_TOO_LONG, expected=f"at most {most:,} characters in the keys of one mapping")


def _effects(place: Place, node: Object, listed: set[int]) -> list[Place]:
    """What was put into `node`, a mapping or the result of a call."""
    found: list[Place] = []
    if node.effects:
        _check_keys(node)
    count = pairs = 0
    for effect in node.effects:
        if effect.opcode == "BUILD":
            found += _attributes(place, effect.values[0], listed)
        elif effect.opcode in ("SETITEM", "SETITEMS"):
            found += _items(place, effect, pairs)
            pairs += len(effect.values) // 2
        else:
            found += _numbered(place, "/{%d}" if effect.opcode == "ADDITEMS" else "[%d]", effect.values, count)
            count += len(effect.values)
    return found


def _items(place: Place, effect: Effect, start: int) -> list[Place]:
    """The values of a mapping, and those of its keys that are objects."""
    found: list[Place] = []
    depth = place.depth + 1
    values = iter(effect.values)
    for n, (key, value) in enumerate(zip(values, values, strict=True), start):
        if isinstance(key, str):
            found.append(Place(place, key_segment(key, n), value, depth, key))
            continue
        if isinstance(key, Node):
            found.append(_below(place, f"/<{n}>", key))
        found.append(Place(place, key_segment(key, n), value, depth))
    return found


def _attributes(place: Place, state: Value, listed: set[int]) -> list[Place]:
    """What BUILD gives an object: attributes, where the state is a dict of them."""
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
    """The segment for the value under `key`, the `position`-th of its mapping."""
    if isinstance(key, str):
        return ("/\\" if key[:1] in _SPECIAL else "/") + escape_segment(key)
    literal = _literal(key)
    return f"[{literal}]" if literal else f"[<{position}>]"


def escape_segment(word: str) -> str:
    """`word` with what would end a segment escaped."""
    if "/" in word or "[" in word or "\\" in word:
        word = re.sub(r"[\\/\[]", r"\\\g<0>", word)
    return word or "\\e"


def _literal(key: Value) -> str | None:
    """`key` as Python would write it, if it is short and made of atoms alone: a nested key could take
    forever to print.
    """
    if isinstance(key, Call):
        key = _said_bytes(key)
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


def _said_bytes(call: Call) -> Value:
    """The bytes that `call` gives if it is the one that stands for them in protocol 2, which is
    what torch's safe loader takes; else `call`.
    """
    text, encoding = args_of(call) if len(args_of(call)) == 2 else (None, None)
    if (
        is_global(call.callable, "_codecs.encode")
        and isinstance(text, str)
        and len(text) <= _LONGEST_LITERAL
        and encoding == "latin1"
        and not call.effects
    ):
        with suppress(UnicodeEncodeError):
            return text.encode("latin-1")
    return call


def parse_path(path: str) -> list[str]:
    """The segments of `path`, from the root on, as :func:`key_segment` writes them; the root itself has none."""
    if path == ".":
        return []
    return _SEGMENT.findall(path if path.startswith("[") else "/" + path)
