"""Index a graph: its storages, and the tensors at their paths.

Source: ``torch/serialization.py`` (``persistent_id``) of torch 2.13. Knows no container: what a storage's key stands
for is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Data
from ckptconv.checkpoint.model import Checkpoint, Reference, Storage, TensorInfo
from ckptconv.checkpoint.rebuild_functions import FROM_TYPE, TensorReader, device_arguments, is_word, partial_notes
from ckptconv.checkpoint.storage_ids import checked_storage_id
from ckptconv.dtypes import DType
from ckptconv.errors import InputError, MalformedError
from ckptconv.pickles.graph import Call, Graph, Node, PersistentId, Value, args_of, walk
from ckptconv.pickles.paths import Leaf, Place, find_places

__all__ = ["attribute_places", "checkpoint_of", "every_place", "index_again", "leaf_of", "places_in", "restrict"]


def checkpoint_of(
    name: str,
    source: Readable,
    graph: Graph,
    container: object,
    record: Callable[[str], Data | None],
    where: str,
    faults: FaultSink | None = None,
) -> Checkpoint:
    """The checkpoint that GRAPH describes, in the format NAME: its storages, tensors and places.

    Raises MalformedError, LimitError.

    RECORD gives the bytes that a storage's key stands for; WHERE is for errors; FAULTS takes what
    is wrong, instead of the source's own sink.
    """
    faults = faults or source.faults
    for call in graph.calls:
        if isinstance(call.callable, PersistentId):
            faults.found(MalformedError("a storage is called as if it were a class", where=where))
    storages: dict[str, Storage] = {}
    classes: dict[str, DType] = {}
    references = []
    for node in graph.references:
        try:
            references.append(Reference(node, _storage(node, storages, classes, record, where)))
        except InputError as error:
            faults.found(error)
    arguments = [argument for call in graph.calls for argument in device_arguments(call)]
    places, tensors, nodes = _index(Place(None, "", graph.root, 0), references, where, graph.opcodes, faults)
    notes = partial_notes(tensors)
    return Checkpoint(
        name, source, graph, container, storages, references, arguments, places, tensors, nodes, notes=notes
    )


def restrict(checkpoint: Checkpoint, root: Place) -> None:
    """Make what stands at ROOT the whole checkpoint. Paths, and the order of effects, stay those of the source."""
    graph = checkpoint.graph
    graph.root = root.node
    reached = {id(node) for node in walk([*graph.discarded, root.node])}
    graph.globals = [node for node in graph.globals if id(node) in reached]
    graph.calls = [node for node in graph.calls if id(node) in reached]
    graph.references = [node for node in graph.references if id(node) in reached]
    checkpoint.references = [each for each in checkpoint.references if id(each.node) in reached]
    checkpoint.storages = {each.storage.key: each.storage for each in checkpoint.references}
    checkpoint.device_arguments = [each for each in checkpoint.device_arguments if id(each.call) in reached]
    checkpoint.places, checkpoint.tensors, checkpoint.tensor_nodes = _index(
        root, checkpoint.references, str(checkpoint.source.path), graph.opcodes
    )


def index_again(checkpoint: Checkpoint) -> None:
    """Give what is in CHECKPOINT the paths that edits left it: from its own root on, with its new names."""
    checkpoint.places, checkpoint.tensors, checkpoint.tensor_nodes = _index(
        Place(None, "", checkpoint.graph.root, 0),
        checkpoint.references,
        str(checkpoint.source.path),
        checkpoint.graph.opcodes,
    )


def _index(
    root: Place, references: list[Reference], where: str, opcodes: int, faults: FaultSink = RAISED
) -> tuple[list[Place], dict[str, TensorInfo], dict[int, TensorInfo]]:
    """The places from ROOT on, and the tensors by path and by node."""
    reader = TensorReader({id(each.node): each.storage for each in references}, where, faults)
    places = []
    for place in find_places(root, leaf_of(reader.nodes), where, opcodes):
        if isinstance(place.node, Node):  # atoms are many, and only the summary asks for them
            places.append(place)
            reader.visit(place)
    return places, reader.tensors, reader.nodes


def every_place(checkpoint: Checkpoint) -> list[Place]:
    """The places of CHECKPOINT, those of atoms too."""
    return list(_walk(checkpoint, leaf_of(checkpoint.tensor_nodes)))


def attribute_places(checkpoint: Checkpoint, tensors: Iterable[Value]) -> list[Place]:
    """What stands in TENSORS as their attributes."""
    having = {id(node) for node in tensors if isinstance(node, Call) and leaf_of(checkpoint.tensor_nodes)(node)}
    if not having:
        return []
    return [each for each in every_place(checkpoint) if each.parent is not None and id(each.parent.node) in having]


def places_in(checkpoint: Checkpoint, opened: Container[int]) -> Iterator[Place]:
    """The places right inside the nodes OPENED (by id), from the root on; the opened
    nodes themselves are not among them.
    """

    def leaf(node: Node) -> list[Value] | None:
        return None if id(node) in opened else []

    for place in _walk(checkpoint, leaf):
        if id(place.node) not in opened:
            yield place


def _walk(checkpoint: Checkpoint, leaf: Leaf) -> Iterator[Place]:
    return find_places(checkpoint.root, leaf, str(checkpoint.source.path), checkpoint.graph.opcodes)


def leaf_of(tensors: Mapping[int, TensorInfo]) -> Leaf:
    """For a walk: TENSORS (by the id of their node) and torch's small words are
    leaves; a tensor's attributes stand in it.
    """

    def leaf(node: Node) -> list[Value] | None:
        if not isinstance(node, Call) or id(node) not in tensors:
            return [] if is_word(node) else None
        function, args = str(node.callable), args_of(node)
        has_state = function in FROM_TYPE or function.endswith("_with_state")
        built = [effect.values[0] for effect in node.effects if effect.opcode == "BUILD"]
        return args[3:4] + built if has_state else built

    return leaf


# Storages


def _storage(
    node: PersistentId,
    storages: dict[str, Storage],
    classes: dict[str, DType],
    record: Callable[[str], Data | None],
    where: str,
) -> Storage:
    """The storage that NODE names; STORAGES gains it, and CLASSES what its class says."""
    cls, key, tag, numel = said = checked_storage_id(node, where)
    nbytes = numel * said.dtype.itemsize
    first = classes.setdefault(key, said.dtype)
    if first.name != said.dtype.name and nbytes:  # torch has one for each storage: that of the first reference
        raise MalformedError(
            f"storage {key} is described in two ways", where=where, expected=first.storage_class, got=cls.name
        )
    known = storages.get(key)
    if known is None:
        data = record(key)
        if data is None:
            raise MalformedError("the file has no such storage", where=where, expected=f"a record data/{key}")
        if data.length != nbytes:
            raise MalformedError(
                f"storage {key} has another size than its record",
                where=where,
                expected=f"{nbytes} bytes",
                got=data.length,
            )
        known = storages[key] = Storage(key, tag, nbytes, data)
    elif (known.nbytes, known.device) != (nbytes, tag):
        raise MalformedError(
            f"storage {key} is described in two ways",
            where=where,
            expected=f"{known.nbytes} bytes on {known.device}",
            got=f"{nbytes} bytes on {tag}",
        )
    return known
