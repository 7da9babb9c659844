"""A checkpoint as data: its graph, its storages, and an index that is derived from both.

This module knows no container: the caller provides the bytes of each storage by its key. Source of the persistent ids:
``torch/serialization.py`` (``persistent_id``) of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace

from ckptconv.byteranges.fault_sink import FaultSink
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Data
from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.rebuild_functions import partial_notes
from ckptconv.checkpoint.safe_globals import PlainOutline
from ckptconv.checkpoint.state_dicts import Detected, detect
from ckptconv.checkpoint.storage_ids import checked_storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Reference, Replica, Storage, TensorInfo
from ckptconv.dtypes import DType
from ckptconv.errors import InputError, MalformedError
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Global, Graph, Object, PersistentId, strings_of, walk
from ckptconv.pickles.paths import Place
from ckptconv.pickles.rows import RowCall, RowForm, RowId, subgraph
from ckptconv.work import seen


@dataclass(eq=False)
class Checkpoint:
    """One parsed checkpoint.

    Edits change the graph and the storages of the ``references`` in place. The ``index`` is derived from them: call
    :meth:`changed` after an edit of the graph.

    Attributes:
        format: The name of the format, for reports.
        source: The source from which the checkpoint was read.
        graph: The graph of its pickle.
        container: Data that the reader of the format keeps for its writer.
        references: The persistent ids with their storages.
        blobs: The source of the long texts, or None if they are in `source`.
        byteorder: The byte order of the storages, ``little`` or ``big``.
        is_byteorder_said: Whether the file contains the byte order. Otherwise it is little, unless torch is told
            otherwise.
        is_state_dict: Whether the root is a state dict in every file of this format.
        ties: The names that such a format records as tied, each with the name whose tensor is stored.
        metadata: The metadata of the container (safetensors).
        unused: Data in the file that the checkpoint does not use.
        class_ids: For torch's older format: the persistent ids by which it refers to classes of modules, with the
            source code of the class. The graph contains the classes.
        script_classes: For a TorchScript archive: the names of the parameters and of the buffers of each class of
            modules. None for other files.
        beside: Other pickles of the file or folder that are not in the graph, by their names. They are not converted.
        notes: Messages for the report.
        warnings: The notes that matter to everyone who loads, compares or verifies the checkpoint.
        replicas: Data with copies in several files that must be equal
            (:func:`~ckptconv.checkpoint.merging.refuse_different`).
        root: The place of the root of the graph. It has a parent if the checkpoint was selected from a larger one.
        index: The index of the current graph.
        before_renaming: The index before tensors were renamed, or None.
    """

    format: str
    source: Readable
    graph: Graph
    container: object
    references: list[Reference]
    blobs: Readable | None = None
    byteorder: str = "little"
    is_byteorder_said: bool = True
    is_state_dict: bool = False
    ties: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    unused: list[LeftBehind] = field(default_factory=list)
    class_ids: dict[Global, PersistentId] = field(default_factory=dict)
    script_classes: dict[str, tuple[list[str], list[str]]] | None = None
    beside: dict[str, Checkpoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    root: Place = field(init=False)
    index: Index = field(init=False)
    before_renaming: Index | None = field(init=False, default=None)
    _detected: Detected | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.root = Place(None, "", self.graph.root, 0)
        self.index = Index(self.graph, self.root, self.references, str(self.source.path))

    def changed(self) -> None:
        """Rebuild the index after an edit of the graph."""
        self.root = replace(self.root, node=self.graph.root)
        self.index.end()
        self.index = Index(self.graph, self.root, self.references, str(self.source.path))
        self._detected = None

    def forget_graph(self) -> None:
        """Free the graph, which takes much memory. The checkpoint has no objects after that."""
        self.graph = replace(self.graph, root=None, outer_calls=[], references=[], shared=set(), byte_strings=[])
        self.graph.changed, self.graph.written, self.references, self.before_renaming = [], {}, [], None
        self.changed()

    def renamed(self) -> None:
        """Rebuild the index after tensors were renamed, and keep the old one as ``before_renaming``."""
        self.before_renaming, counts = self.index, self.index.tensor_counts
        self.changed()
        self.index.tensor_counts = counts

    def restrict(self, root: Place) -> None:
        """Make the node at `root` the root of the graph.

        Nodes that it does not use are removed from the lists of nodes.

        Paths and the order of effects do not change.
        """
        graph = self.graph
        graph.root, self.root, graph.left_out = root.node, root, []
        nodes = list(walk([*graph.discarded, graph.root], parts=PlainOutline()))
        reached = set(map(id, nodes))
        rows = ([call] if isinstance(call, RowCall) and call.form else call.calls() for call in graph.outer_calls)
        graph.globals = [node for node in graph.globals if id(node) in reached]
        graph.outer_calls = [node for calls in rows for node in calls if id(node) in reached]
        graph.references = [node for node in graph.references if id(node) in reached]
        self.references = [each for each in self.references if id(each.node) in reached]
        self.changed()
        self.index.nodes = nodes

    def warn(self, text: str) -> None:
        """Add `text` to the notes and to the warnings."""
        self.notes.append(text)
        self.warnings.append(text)

    def part(self, root: Place) -> Checkpoint:
        """Return the data at `root` as a new checkpoint. Both checkpoints use the same nodes."""
        graph = subgraph(self.graph, root.node)
        storage_of = self.index.storage_of
        part = replace(
            self, graph=graph, references=[Reference(each, storage_of[id(each)]) for each in graph.references]
        )
        part.root = root
        part.changed()
        return part

    def restart_paths(self) -> None:
        """Let paths begin at the root of this checkpoint, if it was selected from a larger one."""
        if self.root.parent:
            self.root = Place(None, "", self.graph.root, 0)
            self.changed()

    @property
    def detected(self) -> Detected:
        """The state dicts, optimizers, modules and RNG states of the current graph."""
        if self._detected is None:
            self._detected = detect(self.index, is_state_dict=self.is_state_dict, scripts=self.script_classes)
        return self._detected

    @property
    def source_places(self) -> list[Place]:
        """The places with the names that tensors had before they were renamed, for ``--include`` and ``--exclude``."""
        return (self.before_renaming or self.index).places

    # The most used parts of the index

    @property
    def places(self) -> list[Place]:
        """The places of nodes."""
        return self.index.places

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors by path."""
        return self.index.tensors

    @property
    def tensor_nodes(self) -> dict[int, TensorInfo]:
        """The tensors by the id of their nodes."""
        return self.index.tensor_nodes

    @property
    def storages(self) -> dict[str, Storage]:
        """The storages by key, in the order of first use."""
        return self.index.storages

    def named_tensors(self, mapping: Object) -> dict[str, TensorInfo]:
        """Return the tensors in `mapping` that have a name, by name."""
        infos = self.tensor_nodes
        return {name: infos[id(node)] for name, node in strings_of(mapping).items() if id(node) in infos}


def checkpoint_of(
    name: str,
    source: Readable,
    graph: Graph,
    container: object,
    record: Callable[[str], Data | None],
    where: str,
    faults: FaultSink | None = None,
) -> Checkpoint:
    """Return the checkpoint of `graph`, with its storages, tensors and places.

    Args:
        name: The name of the format.
        source: The source from which the graph was read.
        graph: The graph.
        container: Data that the reader of the format keeps for its writer.
        record: Returns the bytes of the storage with a key, or None if there is no such storage.
        where: The name of the file in errors.
        faults: The sink for faults, or None for the sink of the source.

    Raises:
        MalformedError, UnsupportedError, LimitError: There is a fault, and the sink raises faults.
    """
    faults = faults or source.faults
    for call in graph.outer_calls:
        if isinstance(call.callable, PersistentId):
            faults.found(MalformedError("a storage is called as if it were a class", where=where))
    references = _references(graph, record, where, faults)
    checkpoint = Checkpoint(name, source, graph, container, references)
    checkpoint.index = Index(graph, checkpoint.root, references, where, faults)
    checkpoint.notes = partial_notes(checkpoint.tensors)
    return checkpoint


def _references(graph: Graph, record: Callable[[str], Data | None], where: str, faults: FaultSink) -> list[Reference]:
    """Return the persistent ids of `graph` with their storages.

    An id with a fault is left out, and its fault is passed to the sink.
    """
    references: list[Reference] = []
    storages: dict[str, Storage] = {}
    dtypes: dict[str, DType] = {}  # of the first reference to each storage, which has one in torch
    like: dict[RowForm | None, tuple[DType, int]] = {}  # dtype and size of rows of one form

    def bad(key: str, what: str, expected: object, got: object) -> MalformedError:
        return MalformedError(f"storage {key} {what}", where=where, expected=expected, got=got)

    for node in seen("storages", graph.references, len(graph.references)):
        try:
            form = node.form if isinstance(node, RowId) else None
            if isinstance(node, RowId) and form in like:
                key, tag = node.key, node.tag
                dtype, nbytes = like[form]
            else:
                _, key, tag, numel = parts = checked_storage_id(node, where)
                dtype = parts.dtype
                nbytes = numel * dtype.itemsize
                if form:
                    like[form] = dtype, nbytes
            first = dtypes.setdefault(key, dtype)
            if first is not dtype and first.name != dtype.name and nbytes:
                raise bad(key, "is described in two ways", first.storage_class, dtype.storage_class)
            storage = storages.get(key)
            if storage is None:
                data = record(key)
                if data is None:
                    expected = f"a record data/{key}"
                    raise MalformedError("the file has no such storage", where=where, expected=expected)
                if data.length != nbytes:
                    raise bad(key, "has a different size from its record", f"{nbytes} bytes", data.length)
                storage = storages[key] = Storage(key, tag, nbytes, data)
            elif (storage.nbytes, storage.device) != (nbytes, tag):
                expected = f"{storage.nbytes} bytes on {storage.device}"
                raise bad(key, "is described in two ways", expected, f"{nbytes} bytes on {tag}")
            references.append(Reference(node, storage))
        except InputError as error:
            faults.found(error)
    return references
