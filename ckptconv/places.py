"""Where everything stands: a walk over the graph that gives each node a path, in the order in which the pickle says it.

Each node is entered once, where it stands first: a graph can have more paths than atoms. What LEAF says is a leaf is reported wherever it
stands and never entered here, but for what LEAF hands back. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.errors import LimitError
from ckptconv.graph import Call, Dict, Effect, FrozenSet, List, Node, Object, PersistentId, Set, Tuple, Value
from ckptconv.limits import LIMITS
from ckptconv.model import Place
from ckptconv.names import key_segment

__all__ = ["find_places"]

#: For a leaf: what stands in it as its attributes, if anything. None for what is no leaf.
Leaf = Callable[[Node], "list[Value] | None"]


def find_places(root: Value, leaf: Leaf, where: str) -> Iterator[Place]:
    """Every place below ROOT, its parent before it. Raises LimitError where nesting is too deep."""
    entered: set[int] = set()
    todo = [Place(None, "", root, 0)]
    while todo:
        place = todo.pop()
        yield place
        node = place.node
        if not isinstance(node, Node) or id(node) in entered:
            continue
        if place.depth >= LIMITS.nesting:
            raise LimitError(
                "the checkpoint is nested too deeply", where=where, expected=f"at most {LIMITS.nesting:,} levels"
            )
        entered.add(id(node))
        states = leaf(node)
        inside = _inside(place) if states is None else (p for state in states for p in _attributes(place, state))
        todo += list(inside)[::-1]


def _inside(place: Place) -> Iterator[Place]:
    node = place.node
    if isinstance(node, Tuple):
        yield from _numbered(place, "[{}]", node.items)
    elif isinstance(node, FrozenSet):
        yield from _numbered(place, "/{{{}}}", node.items)
    elif isinstance(node, PersistentId):
        if isinstance(node.id, Node) and not isinstance(node.id, Tuple):
            yield _below(place, "/(0)", node.id)
    elif isinstance(node, Object):
        if isinstance(node, Call):
            yield from _arguments(place, node)
        yield from _effects(place, node)


def _below(place: Place, segment: str, node: Value, key: str | None = None) -> Place:
    return Place(place, segment, node, place.depth + 1, key)


def _numbered(place: Place, form: str, items: list[Value], start: int = 0) -> Iterator[Place]:
    for i, item in enumerate(items, start):
        yield _below(place, form.format(i), item)


def _arguments(place: Place, call: Call) -> Iterator[Place]:
    if isinstance(call.callable, Call):
        yield _below(place, "/(call)", call.callable)
    if isinstance(call.args, Tuple):
        yield from _numbered(place, "/({})", call.args.items)
    if isinstance(call.kwargs, Dict):
        for effect, i in call.kwargs.pairs():
            name = effect.values[i]
            yield _below(place, f"/({name if isinstance(name, str) else i})", effect.values[i + 1])


def _effects(place: Place, node: Object) -> Iterator[Place]:
    """What was put into NODE, of whatever kind it is."""
    count = pairs = builds = 0
    times: dict[str, int] = {}
    for effect in node.effects:
        if effect.opcode == "BUILD":
            builds += 1
            yield from _attributes(place, effect.values[0], "" if builds == 1 else f"\\{builds}")
        elif effect.opcode in ("SETITEM", "SETITEMS"):
            yield from _items(place, effect, pairs, times)
            pairs += len(effect.values) // 2
        else:
            yield from _numbered(place, "/{{{}}}" if effect.opcode == "ADDITEMS" else "[{}]", effect.values, count)
            count += len(effect.values)


def _items(place: Place, effect: Effect, start: int, times: dict[str, int]) -> Iterator[Place]:
    """The values of a mapping, and those of its keys that are objects. TIMES counts how often each key was set."""
    for n, i in enumerate(range(0, len(effect.values), 2), start):
        key, value = effect.values[i], effect.values[i + 1]
        if isinstance(key, Node):
            yield _below(place, f"/<{n}>", key)
        segment = key_segment(key, n)
        times[segment] = times.get(segment, 0) + 1
        if times[segment] > 1:
            segment += f"\\{times[segment]}"
        yield _below(place, segment, value, key if isinstance(key, str) else None)


def _attributes(place: Place, state: Value, again: str = "") -> Iterator[Place]:
    """What BUILD gives an object: attributes, where the state is a dict of them. AGAIN ends the segments of a later BUILD."""
    names = list(state.pairs()) if isinstance(state, Dict) else []
    if names and all(isinstance(effect.values[i], str) for effect, i in names):
        for effect, i in names:
            name = str(effect.values[i])
            yield _below(place, "/." + key_segment("x" + name, 0)[2:] + again, effect.values[i + 1], name)
    elif isinstance(state, (Dict, List, Set)) and not state.effects:
        return
    elif state is not None:
        yield _below(place, "/.__state__" + again, state)
