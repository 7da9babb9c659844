"""What the writers of torch's formats share: pickle pieces, storage keys and classes, and what they cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptconv.byteranges.spans import ByteRange, Cast, Data, Literal
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import change_id, storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Storage, TensorInfo
from ckptconv.checkpoint.weights_only.unpickler import can_be_made_loadable
from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, UNTYPED
from ckptconv.errors import RefusedError
from ckptconv.formats.refusals import cannot_hold
from ckptconv.hints import joined, option
from ckptconv.pickles.graph import Blob, Graph, Py2String, Tuple
from ckptconv.pickles.paths import Place


def renumber(checkpoint: Checkpoint) -> dict[str, str]:
    """Give storages keys from 0 on, in the order of first use, in the graph too; old key → new key."""
    keys = {old: str(new) for new, old in enumerate(checkpoint.storages)}
    for reference in checkpoint.references:
        change_id(reference.node, key=keys[reference.storage.key])
    checkpoint.changed(same_tensors=True, same_places=True)
    return keys


def pickle_pieces(
    checkpoint: Checkpoint, graph: Graph | None = None, *, short: bool = False
) -> list[Literal | ByteRange]:
    """The pickle of `checkpoint`, or of another `graph` in it, its blobs as ranges of what they stand in.

    `short`: with as little in the memo as will do.
    """
    from ckptconv.pickles.emitter import emit  # which reading does without

    graph = graph or checkpoint.graph
    splice = not short and not checkpoint.source.is_far  # from where it would have to be read once more
    parts = emit(graph, loadable=can_be_made_loadable(graph), short=short, splice=splice)
    return [Literal(part) if isinstance(part, bytes) else blob_bytes(checkpoint, part) for part in parts]


def blob_bytes(checkpoint: Checkpoint, blob: Blob) -> ByteRange:
    """Where the bytes of `blob`, which the source's pickle has, stand."""
    return ByteRange(checkpoint.blobs or checkpoint.source, blob.offset, blob.length)


def say_for_older_loaders(checkpoint: Checkpoint) -> None:
    """Name what torch's zip loader alone finds under its old name (``load_module_mapping`` in
    ``torch/serialization.py``) by the new one.
    """
    for node in checkpoint.graph.globals:
        if node.module == "torch.tensor":
            node.module = "torch._tensor"
    checkpoint.changed(same_tensors=True)


def texts_left_behind(checkpoint: Checkpoint) -> list[LeftBehind]:
    """The texts of a container that has some, for which torch's formats have no place."""
    return [
        LeftBehind(f"__metadata__/{key}", len(text.encode()), "torch's format has no place for it")
        for key, text in checkpoint.metadata.items()
        if key != "format"
    ]


def sources_left_behind(checkpoint: Checkpoint) -> list[LeftBehind]:
    """The source code of classes, for which torch's older format alone has a place."""
    found: dict[str, LeftBehind] = {}
    for cls, named in checkpoint.class_ids.items():
        text = named.id.items[3] if isinstance(named.id, Tuple) else None
        if isinstance(text, str):
            size = len(text.encode("utf-8", "surrogatepass"))
        else:
            size = text.length if isinstance(text, Blob) else len(text.data) if isinstance(text, Py2String) else 0
        if size:
            why = "torch's older format alone has a place for it"
            found[str(cls)] = LeftBehind(f"the source code of {cls}", size, why)
    return list(found.values())


def refuse_unknown_dtypes(checkpoint: Checkpoint) -> None:
    """Raise RefusedError where a tensor has a dtype that torch has not, of which it can have no storages."""
    if not any(storage_id(each.node).dtype is UNTYPED for each in checkpoint.references):
        return
    troubles = _dtypes(checkpoint, lambda info: info.dtype not in BY_NAME)
    if troubles:
        raise cannot_hold(checkpoint, "torch", troubles)


def _dtypes(checkpoint: Checkpoint, is_trouble: Callable[[TensorInfo], bool]) -> list[tuple[Place, str]]:
    """Where tensors stand that are trouble, and their dtypes."""
    nodes = checkpoint.tensor_nodes
    found = [(place, nodes[id(place.node)]) for place in checkpoint.places if id(place.node) in nodes]
    return [(place, info.dtype) for place, info in found if is_trouble(info)]


# For formats that know one class for each storage


def storage_classes(checkpoint: Checkpoint, what: str) -> dict[Storage, str]:
    """The class of each storage.

    Raises RefusedError, in which `what` is the target, where torch could not read it back: it knows one class for each,
    and none that counts bytes.
    """
    classes: dict[Storage, str] = {}
    refused: set[Storage] = set()
    what = f"{what} that torch can read back"
    for reference in checkpoint.references:
        name = storage_id(reference.node).cls.name
        classes[reference.storage] = name
        if name == UNTYPED.storage_class:
            refused.add(reference.storage)
    if not refused:
        return classes
    troubles = _dtypes(checkpoint, lambda info: info.storage in refused)
    if troubles:
        error = cannot_hold(checkpoint, what, troubles)
        error.hint = joined(option("format", "pt") + " writes them", error.hint)
        raise error
    raise RefusedError(
        f"{what} cannot hold a storage without a dtype",
        where=checkpoint.source.path,
        hint=option("format", "pt") + " writes it",
    )


def little_endian(storage: Storage, cls: str, byteorder: str) -> Data:
    """The bytes of `storage`, of class `cls`, the numbers turned round where they come from a big-endian zip."""
    dtype = BY_STORAGE_CLASS[cls]
    data = storage.data
    if byteorder == "little" or dtype.itemsize == 1:
        return data
    if isinstance(data, Cast):
        return replace(data, swapped_out=False)
    return Cast(data, dtype.name, dtype.name, storage.nbytes, swapped_in=True)
