"""Where everything stands: a walk over the graph that gives each node a path, in the order in which the pickle says it.

Each node is entered once, where it stands first: a graph can have more paths than atoms. What LEAF says is a leaf is reported wherever it
stands and never entered here, but for what LEAF hands back. Knows no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ckptconv.errors import LimitError
from ckptconv.graph import Call, Dict, Effect, FrozenSet, List, Node, Object, PersistentId, Set, Tuple, Value
from ckptconv.limits import LIMITS
from ckptconv.model import Place
from ckptconv.names import escaped, key_segment

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
        todo += list(_numbered_again(inside))[::-1]


def _numbered_again(siblings: Iterable[Place]) -> Iterator[Place]:
    """SIBLINGS with segments that are all different: a key can be set twice, an attribute too."""
    times: Counter[str] = Counter()
    for place in siblings:
        times[place.segment] += 1
        again = times[place.segment]
        yield place if again == 1 else replace(place, segment=f"{place.segment}\\{again}")


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
            yield _below(place, f"/({escaped(name) if isinstance(name, str) else i})", effect.values[i + 1])


def _effects(place: Place, node: Object) -> Iterator[Place]:
    """What was put into NODE, of whatever kind it is."""
    count = pairs = 0
    for effect in node.effects:
        if effect.opcode == "BUILD":
            yield from _attributes(place, effect.values[0])
        elif effect.opcode in ("SETITEM", "SETITEMS"):
            yield from _items(place, effect, pairs)
            pairs += len(effect.values) // 2
        else:
            yield from _numbered(place, "/{{{}}}" if effect.opcode == "ADDITEMS" else "[{}]", effect.values, count)
            count += len(effect.values)


def _items(place: Place, effect: Effect, start: int) -> Iterator[Place]:
    """The values of a mapping, and those of its keys that are objects."""
    for n, i in enumerate(range(0, len(effect.values), 2), start):
        key, value = effect.values[i], effect.values[i + 1]
        if isinstance(key, Node):
            yield _below(place, f"/<{n}>", key)
        yield _below(place, key_segment(key, n), value, key if isinstance(key, str) else None)


def _attributes(place: Place, state: Value) -> Iterator[Place]:
    """What BUILD gives an object: attributes, where the state is a dict of them."""
    names = list(state.pairs()) if isinstance(state, Dict) else []
    if names and all(isinstance(effect.values[i], str) for effect, i in names):
        for effect, i in names:
            name = str(effect.values[i])
            yield _below(place, "/." + escaped(name), effect.values[i + 1], name)
    elif isinstance(state, (Dict, List, Set)) and not state.effects:
        return
    elif state is not None:
        yield _below(place, "/.__state__", state)
