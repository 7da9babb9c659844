"""The result of a writer, and what writers share: pickles, storages, and the errors for what they cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ckptconv.byteranges.spans import ByteRange, Cast, Data, Inflate, Literal, OutFile, Piece, joined
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import change_id, storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Storage, TensorInfo, glob_of, matches
from ckptconv.checkpoint.weights_only.unpickler import can_be_made_loadable
from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, UNTYPED
from ckptconv.errors import LimitError, RefusedError, size
from ckptconv.hints import Placeholder, option
from ckptconv.hints import joined as joined_hints
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, Call, Dict, Graph, Py2String, Tuple
from ckptconv.pickles.paths import Place, is_item, is_repeated

_LISTED = 20  # tensors in an error


@dataclass(frozen=True)
class Layout:
    """The result of a format's writer.

    Attributes:
        files: The files to write.
        left_behind: The parts of the source that the files cannot contain.
        notes: Notes for the report.
        ties: Pairs of a name and the name that it is tied to, if a file or its source records them as texts.
    """

    files: tuple[OutFile, ...]
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


def file_of(path: Path, pieces: list[Piece], storages: Iterable[Storage]) -> OutFile:
    """Return the file at `path` that consists of `pieces`, in a format without checksums.

    Checksums that `storages` have are verified during the copy.
    """
    # ranges that the copy reads completely
    read_anyway = {id(piece.checked_range()) for piece in pieces}
    spans = {id(span): span for each in storages for span in each.data.with_checksums()}
    sums = [span for key, span in spans.items() if key not in read_anyway]
    return OutFile(path, joined(pieces), sum(piece.length for piece in pieces), tuple(sums))


def check_growth(files: Iterable[OutFile], checkpoint: Checkpoint, hint: str) -> None:
    """Raise LimitError with this `hint` if `files` are too large for what they are made of: views of one storage, each
    of which is written out, can make terabytes of a small file.
    """
    files = list(files)
    written, held = sum(file.size for file in files), checkpoint.source.size
    if written > LIMITS.written(held):
        held = max(held, _read_once(piece for file in files for piece in file.pieces))
    if written > LIMITS.written(held):
        raise LimitError(
            "the tensors repeat the same bytes, and the output would be too large",
            where=checkpoint.source.path,
            expected=f"at most {size(LIMITS.written(held))}",
            got=f"{size(written)} of {size(held)}",
            hint=hint,
        )


def _read_once(pieces: Iterable[Piece]) -> int:
    """Return how many bytes `pieces` are made of, inflated, each byte of a source counted once."""
    spans: set[tuple[int, int, int]] = set()
    inflated: dict[tuple[int, int], int] = {}
    for piece in pieces:
        of = piece.uncast()
        deflated = of if isinstance(of, Inflate) else of.spooled()
        if deflated:
            inflated[id(deflated.of.source), deflated.of.offset] = deflated.length
        else:
            spans.update((id(span.source), span.offset, span.offset + span.length) for span in piece.read_from())
    read, end = sum(inflated.values()), (0, 0)
    for source, start, stop in sorted(spans):
        after = max(start, end[1]) if source == end[0] else start
        read += max(0, stop - after)
        end = source, max(stop, after)
    return read


def cannot_hold(checkpoint: Checkpoint, what: str, troubles: list[tuple[Place, str]]) -> RefusedError:
    """The error for a target, `what`, that cannot hold some tensors: where each stands, its
    trouble, and how to leave all of them out.
    """
    of_source: dict[int, list[Place]] = {}
    for place in checkpoint.source_places:
        of_source.setdefault(id(place.node), []).append(place)
    listed = ", ".join(f"{of_source.get(id(place.node), [place])[0].path} ({trouble})" for place, trouble in troubles)
    once = [p for place, _ in troubles if not is_repeated(place) for p in of_source.get(id(place.node), [])]
    droppable = all(is_item(p) and p.parent and isinstance(p.parent.node, (Dict, Call)) for p in once)
    if not droppable or len({id(place.node) for place in once}) == len(checkpoint.tensor_nodes):
        once = []  # what has no key cannot be left out, or nothing would be left
    globs = _globs(checkpoint, once)
    hint = "to leave them out: " + option("exclude", globs) if globs else None
    if len(globs) > _LISTED:
        listed = f"{len(troubles):,} tensors: {listed}"
        such = ", as often as it takes, such as " + option("exclude", globs[0])
        hint = "to leave them out: " + option("exclude", Placeholder("GLOB")) + such
    return RefusedError(f"{what} cannot hold {listed}", where=checkpoint.source.path, hint=hint)


def _globs(checkpoint: Checkpoint, places: list[Place]) -> tuple[str, ...]:
    """The globs that mean the tensors at `places`: names in state dicts, elsewhere paths, which need a slash. None if
    one of them would mean another tensor too.
    """
    named = {id(found.node) for found in checkpoint.detected.state_dicts} if places else set()

    def said(place: Place) -> tuple[str, str | None]:
        if place.parent and id(place.parent.node) in named:
            return place.path, place.key
        return (place.path if "/" in place.path else f"./{place.path}"), None

    globs = tuple(glob_of(*said(place)) for place in places)
    meant = {id(place.node) for place in places}
    loose = [glob for glob, place in zip(globs, places, strict=True) if not f"{place.path}{place.key}".isprintable()]
    others = [said(place) for place in checkpoint.source_places if loose and id(place.node) not in meant]
    return () if any(matches(glob, *other) for glob in loose for other in others) else globs


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
        error.hint = joined_hints(option("format", "pt") + " writes them", error.hint)
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
