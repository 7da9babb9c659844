"""Which nodes refer to which, and the path of a node that has no place of its own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ckptconv.pickles.graph import Call, Global, Graph, Node, Value, children, walk
from ckptconv.pickles.paths import Place

_THROWN_AWAY = "what is made and thrown away"


class Referrers:
    """The users of each node of a graph. A user of a node is a node that has it as a child.

    Byte strings count as nodes here. Two equal byte strings are different if they are different objects.

    Args:
        graph: The graph.
        places: The places of its nodes. The first place of a node counts.
        nodes: All nodes of the graph in the order of the pickle, if the caller has them.
    """

    def __init__(self, graph: Graph, places: Iterable[Place], nodes: Iterable[Node] | None = None) -> None:
        self.root = graph.root
        self.discarded = {id(node) for node in graph.discarded}
        self._first: dict[int, Node] = {}
        self._more: dict[int, list[Node]] = {}  # the other users; few nodes have any
        for node in walk([graph.root, *graph.discarded]) if nodes is None else nodes:
            for child in children(node):
                if isinstance(child, (Node, bytes)):
                    if id(child) in self._first:
                        self._more.setdefault(id(child), []).append(node)
                    else:
                        self._first[id(child)] = node
        #: Ids of nodes from which no path leads to a place.
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
        """Return whether the graph still contains `node`, in its value or in what it throws away.

        `node` must be a node or byte string.
        """
        return node is self.root or id(node) in self._first or id(node) in self.discarded

    def path(self, node: Value) -> str:
        """Return the path of `node`, or of the nearest node above it that has a place.

        If there is none, the value is thrown away; return a description that says so.
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
        """Return the ids of `nodes` and of all nodes that lead to them."""
        reached: set[int] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if id(node) not in reached:
                reached.add(id(node))
                todo += self.users(node)
        return reached
