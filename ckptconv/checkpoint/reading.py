"""Make a checkpoint of a graph: check what its persistent ids say, and find its tensors.

Source: ``torch/serialization.py`` (``persistent_id``) of torch 2.13. Knows no container: what a storage's key stands
for is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptconv.byteranges.fault_sink import FaultSink
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Data
from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.model import Checkpoint, Reference, Storage
from ckptconv.checkpoint.rebuild_functions import partial_notes
from ckptconv.checkpoint.storage_ids import checked_storage_id
from ckptconv.dtypes import DType
from ckptconv.errors import InputError, MalformedError
from ckptconv.pickles.graph import Graph, PersistentId

__all__ = ["checkpoint_of"]


def checkpoint_of(
    name: str,
    source: Readable,
    graph: Graph,
    container: object,
    record: Callable[[str], Data | None],
    where: str,
    faults: FaultSink | None = None,
) -> Checkpoint:
    """The checkpoint that `graph` describes, in the format `name`: its storages, tensors and places.

    Raises MalformedError, LimitError.

    `record` gives the bytes that a storage's key stands for; `where` is for errors; `faults` takes what
    is wrong, instead of the source's own sink.
    """
    faults = faults or source.faults
    for call in graph.outer_calls:
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
    checkpoint = Checkpoint(name, source, graph, container, references)
    checkpoint.index = Index(graph, checkpoint.root, references, where, faults)
    checkpoint.notes = partial_notes(checkpoint.tensors)
    return checkpoint


def _storage(
    node: PersistentId,
    storages: dict[str, Storage],
    classes: dict[str, DType],
    record: Callable[[str], Data | None],
    where: str,
) -> Storage:
    """The storage that `node` names; `storages` gains it, and `classes` what its class says."""
    cls, key, tag, numel = said = checked_storage_id(node, where)
    dtype = said.dtype
    nbytes = numel * dtype.itemsize
    first = classes.setdefault(key, dtype)
    if first.name != dtype.name and nbytes:  # torch has one for each storage: that of the first reference
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
