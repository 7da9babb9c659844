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
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import partial_notes
from ckptconv.checkpoint.storage_ids import checked_storage_id
from ckptconv.checkpoint.tensor_info import Reference, Storage
from ckptconv.dtypes import DType
from ckptconv.errors import InputError, MalformedError
from ckptconv.pickles.graph import Graph, PersistentId
from ckptconv.pickles.rows import RowForm, RowId


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
    storages = _Storages(record, where)
    references = []
    for node in graph.references:
        try:
            references.append(Reference(node, storages.of(node)))
        except InputError as error:
            faults.found(error)
    checkpoint = Checkpoint(name, source, graph, container, references)
    checkpoint.index = Index(graph, checkpoint.root, references, where, faults)
    checkpoint.notes = partial_notes(checkpoint.tensors)
    return checkpoint


class _Storages:
    """The storages that persistent ids name, whose bytes `record` gives."""

    def __init__(self, record: Callable[[str], Data | None], where: str) -> None:
        self._record = record
        self._where = where
        self._known: dict[str, Storage] = {}
        self._dtypes: dict[str, DType] = {}  # of the first reference to each: torch has one for each storage
        self._like: dict[RowForm | None, tuple[DType, int]] = {}  # of rows of one form: dtype and size

    def of(self, node: PersistentId) -> Storage:
        """The storage that `node` names."""
        form = node.form if isinstance(node, RowId) else None
        if isinstance(node, RowId) and form in self._like:
            key, tag = node.key, node.tag
            dtype, nbytes = self._like[form]
        else:
            _, key, tag, numel = said = checked_storage_id(node, self._where)
            dtype = said.dtype
            nbytes = numel * dtype.itemsize
            if form:
                self._like[form] = dtype, nbytes
        first = self._dtypes.setdefault(key, dtype)
        if first is not dtype and first.name != dtype.name and nbytes:
            raise self._bad(key, "is described in two ways", first.storage_class, dtype.storage_class)
        known = self._known.get(key)
        if known is None:
            data = self._record(key)
            if data is None:
                raise MalformedError("the file has no such storage", where=self._where, expected=f"a record data/{key}")
            if data.length != nbytes:
                raise self._bad(key, "has another size than its record", f"{nbytes} bytes", data.length)
            known = self._known[key] = Storage(key, tag, nbytes, data)
        elif (known.nbytes, known.device) != (nbytes, tag):
            said_first = f"{known.nbytes} bytes on {known.device}"
            raise self._bad(key, "is described in two ways", said_first, f"{nbytes} bytes on {tag}")
        return known

    def _bad(self, key: str, what: str, expected: object, got: object) -> MalformedError:
        return MalformedError(f"storage {key} {what}", where=self._where, expected=expected, got=got)
