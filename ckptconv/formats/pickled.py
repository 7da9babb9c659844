"""The pickle of a checkpoint as a writer needs it: in pieces, its storages numbered anew."""

from __future__ import annotations

from ckptconv.dtypes import BY_NAME
from ckptconv.graph import Blob, Tuple
from ckptconv.model import Checkpoint, LeftBehind, Span
from ckptconv.old_spellings import text_of
from ckptconv.pickles import emit
from ckptconv.safe_loader import can_be_made_loadable
from ckptconv.selection import cannot_hold

__all__ = [
    "blob_bytes",
    "pickle_pieces",
    "refuse_unknown_dtypes",
    "renumber",
    "sources_left_behind",
    "texts_left_behind",
]


def renumber(checkpoint: Checkpoint) -> dict[str, str]:
    """Give storages keys from 0 on, in the order of first use, in the graph too; old key → new key."""
    keys = {old: str(new) for new, old in enumerate(checkpoint.storages)}
    for reference in checkpoint.references:
        assert isinstance(reference.node.id, Tuple)
        kind, cls, _, tag, numel = reference.node.id.items
        reference.node.id = Tuple([kind, cls, keys[reference.storage.key], tag, numel])
    return keys


def pickle_pieces(checkpoint: Checkpoint) -> list[bytes | Span]:
    """The pickle, its blobs as ranges of the source, or as bytes where the source's pickle is in memory."""
    parts = emit(checkpoint.graph, loadable=can_be_made_loadable(checkpoint.graph))
    return [part if isinstance(part, bytes) else blob_bytes(checkpoint, part) for part in parts]


def blob_bytes(checkpoint: Checkpoint, blob: Blob) -> bytes | Span:
    """Where the bytes of BLOB, which the source's pickle has, stand."""
    if checkpoint.pickle is None:
        return Span(checkpoint.source, blob.offset, blob.length)
    return checkpoint.pickle[blob.offset : blob.offset + blob.length]


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
        size = text.length if isinstance(text, Blob) else len(text_of(text) or "")
        if size:
            found[str(cls)] = LeftBehind(
                f"the source code of {cls}", size, "torch's older format alone has a place for it"
            )
    return list(found.values())


def refuse_unknown_dtypes(checkpoint: Checkpoint) -> None:
    """Raise RefusedError where a tensor has a dtype that torch has not."""
    troubles = [
        (place, info.dtype)
        for place in checkpoint.places
        if (info := checkpoint.tensor_nodes.get(id(place.node))) and info.dtype not in BY_NAME
    ]
    if troubles:
        raise cannot_hold(checkpoint, "torch", troubles)
