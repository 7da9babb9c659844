"""The data that is derived from a graph: its nodes, their users, their places, and the tensors.

Each attribute is computed at its first use. After an edit of the graph, the checkpoint creates a new index
(``Checkpoint.changed``). The old index keeps what it has computed and computes nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cached_property

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.checkpoint.rebuild_functions import TensorReader, device_arguments, is_word
from ckptconv.checkpoint.safe_globals import PlainOutline
from ckptconv.checkpoint.tensor_info import DeviceArgument, Reference, Storage, TensorInfo
from ckptconv.checkpoint.weights_only.unpickler import obstacles
from ckptconv.pickles.graph import Call, Global, Graph, Node, PersistentId, Value, args_of, walk
from ckptconv.pickles.paths import Leaf, Place, Referrers, find_places
from ckptconv.pickles.rows import outline
from ckptconv.work import seen

#: The ends of the names of functions that give a tensor the attributes in their fourth argument.
_WITH_STATE = ("_with_state", "_rebuild_from_type", "_rebuild_from_type_v2")


class Index:
    """The data that is derived from a graph. The graph must not be edited while the index is used.

    Args:
        graph: The graph.
        root: The place of its root.
        references: The storages of its persistent ids.
        where: The file, for errors.
        faults: The sink for faults of tensors.
    """

    def __init__(
        self, graph: Graph, root: Place, references: list[Reference], where: str, faults: FaultSink = RAISED
    ) -> None:
        self._graph: Graph | None = graph
        #: The place of the root.
        self.root = root
        self._references = references
        self._where = where
        self._faults = faults
        #: Returns the children of a node.
        self.parts = PlainOutline()

    def end(self) -> None:
        """Stop computing, because the graph is about to be edited."""
        self._graph = None

    @property
    def graph(self) -> Graph:
        """The graph, until it is edited."""
        assert self._graph is not None, "the graph has changed since this index was made of it"
        return self._graph

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes in the order of the pickle, without those inside plain rows. Discarded values come first."""
        return list(walk([*self.graph.discarded, self.graph.root], parts=self.parts))

    @cached_property
    def referrers(self) -> Referrers:
        """The users of each node, and paths for nodes without a place."""
        graph = self.graph
        nodes = walk([graph.root, *graph.discarded], parts=self.parts) if graph.discarded else self.nodes
        return Referrers(graph, self.every_place, nodes, self.parts)

    @cached_property
    def obstacles(self) -> list[tuple[str, Value]]:
        """The objects that torch's safe loader refuses in any spelling, each with the reason."""
        return list(obstacles(self.graph, self.nodes))

    # Storages

    @cached_property
    def storage_of(self) -> dict[int, Storage]:
        """The storage of each persistent id, by the id of its node."""
        return {id(reference.node): reference.storage for reference in self._references}

    @cached_property
    def storages(self) -> dict[str, Storage]:
        """The storages by key, in the order of first use."""
        return {reference.storage.key: reference.storage for reference in self._references}

    @cached_property
    def device_arguments(self) -> list[DeviceArgument]:
        """The devices that are arguments of calls, and not tags of storages."""
        return [argument for call in self.graph.outer_calls for argument in device_arguments(call)]

    def storages_below(self, *roots: Value, seen: set[int] | None = None) -> list[Storage]:
        """Return the storages that can be reached from `roots`, each once.

        Nodes whose ids are in `seen` are skipped. The ids of the other nodes are added to `seen`, if it is not None.
        """
        nodes = walk([*roots], seen, outline)
        return list(dict.fromkeys(self.storage_of[id(node)] for node in nodes if isinstance(node, PersistentId)))

    # Places and tensors

    @cached_property
    def _found(self) -> tuple[dict[str, TensorInfo], dict[int, TensorInfo]]:
        reader = TensorReader(self.storage_of, self._where, self._faults)
        places = []
        every = find_places(self.root, leaf_of(reader.nodes), self._where, self.graph.opcodes)
        for place in seen("places", every, len(self.storage_of)):
            places.append(place)
            reader.visit(place)
        self.every_place = places
        return reader.tensors, reader.nodes

    @cached_property
    def every_place(self) -> list[Place]:
        """All places, each after the place that contains it."""
        leaf = leaf_of(self.tensor_nodes)
        found: list[Place] | None = vars(self).get("every_place")
        return [*find_places(self.root, leaf, self._where, self.graph.opcodes)] if found is None else found

    def forget_places(self) -> None:
        """Free the places, which take much memory. They are found again if they are needed."""
        vars(self).pop("every_place", None)
        vars(self).pop("places", None)

    @cached_property
    def places(self) -> list[Place]:
        """The places of nodes. Places of atoms are left out."""
        return [place for place in self.every_place if isinstance(place.node, Node)]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors by path."""
        return self._found[0]

    @cached_property
    def tensor_counts(self) -> Counter[Storage]:
        """The number of paths with tensors on each storage."""
        return Counter(info.storage for info in self.tensors.values() if info.storage)

    @property
    def is_unshared(self) -> bool:
        """Whether each tensor has a storage of its own. If so, no tensors are tied or overlap."""
        return len(self.tensor_counts) == len(self.tensors)

    @property
    def tensor_nodes(self) -> dict[int, TensorInfo]:
        """The tensors by the id of their node, with their first path."""
        return self._found[1]

    def attribute_places(self, tensors: Iterable[Value]) -> list[Place]:
        """Return the places of the attributes of `tensors`, which are nodes."""
        leaf = leaf_of(self.tensor_nodes)
        owners = {id(node) for node in tensors if isinstance(node, Call) and leaf(node)}
        return [place for place in self.every_place if place.parent is not None and id(place.parent.node) in owners]

    def places_in_root(self) -> list[Place]:
        """Return the places directly in the root, without the root itself."""
        return [place for place in self.every_place if place.parent is self.root and place.node is not self.root.node]

    def places_in(self, opened: Container[int]) -> Iterator[Place]:
        """Yield the places directly below nodes whose ids are in `opened`, in order.

        The places of these nodes are left out.
        """

        def leaf(node: Node) -> list[Value] | None:
            return None if id(node) in opened else []

        for place in find_places(self.root, leaf, self._where, self.graph.opcodes):
            if id(place.node) not in opened:
                yield place


def leaf_of(tensors: Mapping[int, TensorInfo]) -> Leaf:
    """Return the leaf function for :func:`~ckptconv.pickles.paths.find_places`.

    Leaves are `tensors`, given by the ids of their nodes, and torch's calls that contain only a word or numbers.
    Below a tensor, only its attributes are listed.
    """

    def leaf(node: Node) -> list[Value] | None:
        if not isinstance(node, Call) or id(node) not in tensors:
            return [] if is_word(node) else None
        with_state = isinstance(node.callable, Global) and node.callable.name.endswith(_WITH_STATE)
        if not node.effects and not with_state:
            return []  # most tensors have no attributes
        if with_state and tensors[id(node)].kind != "jagged":  # the state of a jagged tensor repeats its parts
            return args_of(node)[3:4] + node.states()
        return node.states()

    return leaf
