"""Where everything stands: a walk over the graph that gives each node a path, in the order in which the pickle says it.

Each node is entered once, where it stands first: a graph can have more paths than atoms. What LEAF says is a leaf is reported wherever it
stands and never entered here, but for what LEAF hands back. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckptconv.checkpoint.model import Place
from ckptconv.edits.names import escaped, key_segment
from ckptconv.errors import LimitError
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
)

__all__ = ["Leaf", "find_places", "inside", "is_item", "is_repeated", "item_segments"]

#: For a leaf: what stands in it as its attributes, if anything. None for what is no leaf.
Leaf = Callable[[Node], "list[Value] | None"]


def find_places(start: Value | Place, leaf: Leaf, where: str, opcodes: int = 0) -> Iterator[Place]:
    """Every place from START on, a root or a place that is known, its parent before it.

    Raises LimitError where nesting is too deep, or the paths are too long for a pickle of so many OPCODES.
    """
    entered: set[int] = set()
    room = LIMITS.path_characters + LIMITS.path_characters_each * opcodes
    todo = [start if isinstance(start, Place) else Place(None, "", start, 0)]
    while todo:
        place = todo.pop()
        place.length = len(place.segment) + (place.parent.length if place.parent else 0)
        room -= place.length
        if room < 0:
            raise LimitError(
                "the paths of what is in the checkpoint are too long", where=where,
                expected=f"at most {LIMITS.path_characters:,} characters in all, and {LIMITS.path_characters_each} for each opcode",
            )  # fmt: skip
        yield place
        node = place.node
        if not isinstance(node, Node) or id(node) in entered:
            continue
        if place.depth >= LIMITS.nesting:
            raise LimitError(
                "the checkpoint is nested too deeply", where=where, expected=f"at most {LIMITS.nesting:,} levels"
            )
        entered.add(id(node))
        todo += inside(place, leaf)[::-1]


def inside(place: Place, leaf: Leaf) -> list[Place]:
    """The places right below PLACE, in the order in which the pickle says what stands there; below what LEAF says is a leaf, its attributes."""
    node = place.node
    states = leaf(node) if isinstance(node, Node) else []
    if states is None:
        found = _inside(place)
    else:
        found = [attribute for state in states for attribute in _attributes(place, state)]
    if not isinstance(node, (Tuple, FrozenSet, List, Set)):
        _number_again(found)
    return found


def is_item(place: Place) -> bool:
    """Whether PLACE is the value under a key of a mapping, or an element of a list or tuple; not an attribute, argument, member or key."""
    return place.segment.startswith("[") or (place.segment[:1] == "/" and place.segment[1:2] not in tuple(".({<"))


def _inside(place: Place) -> list[Place]:
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
        found += _arguments(place, node)
    if isinstance(node, Object):
        found += _effects(place, node)
    return found


def is_repeated(place: Place) -> bool:
    """Whether PLACE's key was set before, to another value or the same."""
    return re.search(r"(?<!\\)(\\\\)*\\[0-9]+$", place.segment) is not None


def item_segments(mapping: Object) -> list[str]:
    """The segments of the values of MAPPING's items, in order."""
    segments = [key_segment(effect.values[i], n) for n, (effect, i) in enumerate(mapping.pairs())]
    return _all_different(segments)


def _number_again(siblings: list[Place]) -> None:
    """Give SIBLINGS segments that are all different: a key can be set twice, an attribute too."""
    for place, segment in zip(siblings, _all_different([place.segment for place in siblings]), strict=True):
        place.segment = segment


def _all_different(segments: list[str]) -> list[str]:
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


def _arguments(place: Place, call: Call) -> list[Place]:
    found: list[Place] = []
    if isinstance(call.callable, Call):
        found.append(_below(place, "/(call)", call.callable))
    if isinstance(call.args, Tuple):
        found += _numbered(place, "/(%d)", call.args.items)
    elif isinstance(call.args, Call):
        found.append(_below(place, "/(*)", call.args))
    if isinstance(call.kwargs, Dict):
        for effect, i in call.kwargs.pairs():
            name = effect.values[i]
            segment = f"/({escaped(name) if isinstance(name, str) else i})"
            found.append(_below(place, segment, effect.values[i + 1]))
    return found


def _effects(place: Place, node: Object) -> list[Place]:
    """What was put into NODE, a mapping or the result of a call."""
    found: list[Place] = []
    count = pairs = 0
    for effect in node.effects:
        if effect.opcode == "BUILD":
            found += _attributes(place, effect.values[0])
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
    for n, i in enumerate(range(0, len(effect.values), 2), start):
        key, value = effect.values[i], effect.values[i + 1]
        if isinstance(key, Node):
            found.append(_below(place, f"/<{n}>", key))
        found.append(_below(place, key_segment(key, n), value, key if isinstance(key, str) else None))
    return found


def _attributes(place: Place, state: Value) -> list[Place]:
    """What BUILD gives an object: attributes, where the state is a dict of them."""
    items = [(effect.values[i], effect.values[i + 1]) for effect, i in state.pairs()] if isinstance(state, Dict) else []
    if items and all(isinstance(name, str) for name, _ in items):
        return [_below(place, "/." + escaped(name), value, name) for name, value in items if isinstance(name, str)]
    if state is None or (isinstance(state, (Dict, List, Set)) and not state.effects):
        return []
    return [_below(place, "/.__state__", state)]
