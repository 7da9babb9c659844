"""Which nodes refer to which, and the path of a node that has no place of its own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ckptconv.pickles.graph import Call, Global, Graph, Node, Value, children, walk
from ckptconv.pickles.paths import Place

__all__ = ["Referrers"]

_THROWN_AWAY = "what is made and thrown away"


class Referrers:
    """The users of each node of `graph`, whose nodes stand at `places`.

    Byte strings count as nodes: one that holds something is one object. `nodes` are those of `graph` in the order in
    which the pickle says them, where they are known.
    """

    def __init__(self, graph: Graph, places: Iterable[Place], nodes: Iterable[Node] | None = None) -> None:
        self.root = graph.root
        self.discarded = {id(node) for node in graph.discarded}
        self._first: dict[int, Node] = {}
        self._more: dict[int, list[Node]] = {}  # of few nodes
        for node in walk([graph.root, *graph.discarded]) if nodes is None else nodes:
            for child in children(node):
                if isinstance(child, (Node, bytes)):
                    if id(child) in self._first:
                        self._more.setdefault(id(child), []).append(node)
                    else:
                        self._first[id(child)] = node
        #: Nodes from which there is no way to a place.
        self.lost: set[int] = set()
        self.places: dict[int, Place] = {}
        for place in places:
            self.places.setdefault(id(place.node), place)

    def users(self, node: Value) -> Iterable[Node]:
        """What `node` stands in, once for each place."""
        first = self._first.get(id(node))
        return () if first is None else chain((first,), self._more.get(id(node), ()))

    def of(self, node: Value) -> tuple[Value, int]:
        """What `node` stands in or is first, and in how many more places; what is called stands where its call does."""
        user = self._first.get(id(node))
        if not isinstance(node, Global) or user is None:
            return node, 0
        is_called = isinstance(user, Call) and user.callable is node
        return user if is_called else node, len(self._more.get(id(node), ()))

    def has(self, node: Value) -> bool:
        """Whether the graph has `node` still: in its value, or in what is thrown away after something was
        done to it.
        """
        return node is self.root or id(node) in self._first or id(node) in self.discarded

    def path(self, node: Value) -> str:
        """Where `node` stands, or what it is a part of."""
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
            self.lost |= climbed  # nobody climbs there again
            return _THROWN_AWAY
        self.places.update(dict.fromkeys(climbed, place))
        return place.path

    def above(self, nodes: Iterable[Value]) -> set[int]:
        """The ids of `nodes` and of all that they stand in."""
        found: set[int] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if id(node) not in found:
                found.add(id(node))
                todo += self.users(node)
        return found
