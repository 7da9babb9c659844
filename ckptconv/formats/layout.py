"""The result of a writer, and functions that several writers share, for pickles, storages and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptconv.byteranges.spans import ByteRange, Cast, Data, Inflate, Literal, OutFile, Piece, joined
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import change_id, storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Storage, TensorInfo, glob_of, matches
from ckptconv.checkpoint.weights_only.unpickler import can_be_made_loadable
from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, UNTYPED
from ckptconv.errors import LimitError, RefusedError, count, size
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
        left_behind: The contents of the source that the files cannot contain.
        notes: Notes for the report.
        ties: Pairs of a name and the name that it is tied to, if a file or its source records them as strings.
    """

    files: tuple[OutFile, ...]
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


def file_of(path: Path, pieces: list[Piece], storages: Iterable[Storage]) -> OutFile:
    """Return a file at `path` with the content `pieces`, in a format without checksums.

    The checksums that `storages` have in the source are verified during the copy.
    """
    # ranges that the copy reads completely
    read_anyway = {id(piece.checked_range()) for piece in pieces}
    spans = {id(span): span for storage in storages for span in storage.data.with_checksums()}
    sums = [span for key, span in spans.items() if key not in read_anyway]
    return OutFile(path, joined(pieces), sum(piece.length for piece in pieces), tuple(sums))


def check_growth(files: Iterable[OutFile], checkpoint: Checkpoint, *, keeps_views: bool) -> None:
    """Raise LimitError if `files` are too large for the bytes that they are made from.

    Many views of one storage, each written in full, could make terabytes from a small file.
    """
    files = list(files)
    written, source_size = sum(file.size for file in files), checkpoint.source.size
    if written > LIMITS.written(source_size):
        source_size = max(source_size, _read_once(piece for file in files for piece in file.pieces))
    if written > LIMITS.written(source_size):
        other = "" if keeps_views else option("format", "pt") + " keeps views as they are; "
        raise LimitError(
            "the tensors repeat the same bytes, and the output would be too large",
            where=checkpoint.source.path,
            expected=f"at most {size(LIMITS.written(source_size))}",
            got=f"{size(written)} of {size(source_size)}",
            hint=other + "to take some of the tensors: " + option("include", Placeholder("GLOB")),
        )


def _read_once(pieces: Iterable[Piece]) -> int:
    """Return the number of bytes that `pieces` read, after inflating. A byte that is read twice counts once."""
    spans: set[tuple[int, int, int]] = set()
    inflated: dict[tuple[int, int], int] = {}
    for piece in pieces:
        data = piece.uncast()
        deflated = data if isinstance(data, Inflate) else data.spooled()
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
    """Return the error for a target that cannot store some tensors. Its hint is the option that leaves them out.

    Args:
        checkpoint: The edited checkpoint.
        what: The name of the target.
        troubles: The place of each tensor in the graph, and the reason.
    """
    of_source: dict[int, list[Place]] = {}
    for place in checkpoint.source_places:
        of_source.setdefault(id(place.node), []).append(place)
    listed = ", ".join(f"{of_source.get(id(place.node), [place])[0].path} ({trouble})" for place, trouble in troubles)
    once = [p for place, _ in troubles if not is_repeated(place) for p in of_source.get(id(place.node), [])]
    droppable = all(is_item(p) and p.parent and isinstance(p.parent.node, (Dict, Call)) for p in once)
    if not droppable or len({id(place.node) for place in once}) == len(checkpoint.tensor_nodes):
        once = []  # a tensor without a key cannot be left out, or no tensor would remain
    globs = _globs(checkpoint, once)
    hint = "to leave them out: " + option("exclude", globs) if globs else None
    if len(globs) > _LISTED:
        listed = f"{len(troubles):,} tensors: {listed}"
        such = ", once for each, such as " + option("exclude", globs[0])
        hint = "to leave them out: " + option("exclude", Placeholder("GLOB")) + such
    return RefusedError(f"{what} cannot store {listed}", where=checkpoint.source.path, hint=hint)


def too_large(info: TensorInfo) -> str | None:
    """Return the reason why the tensor `info` is too large to be written out, or None if it is not.

    Its elements are views of a storage, and repeat the bytes of the storage too often.
    """
    assert info.storage is not None
    most = LIMITS.gathered(info.storage.nbytes)
    return f"its {info.nbytes:,} bytes exceed the limit of {most:,}" if info.nbytes > most else None


def about_tensors(tensors: Mapping[str, TensorInfo], name: str) -> Iterator[str]:
    """Yield notes on the named `tensors` of a file or set: wrappers in all names, and properties that `name`, a format
    of tensors, does not store.
    """
    for wrapper in ("module.", "_orig_mod."):
        if tensors and all(each.startswith(wrapper) for each in tensors):
            yield f"every name starts with {wrapper}: " + option("strip_prefix", wrapper) + " removes it"
    yield from about_parameters(tensors.values(), name)


def about_parameters(infos: Iterable[TensorInfo], name: str) -> Iterator[str]:
    """Yield a note if there are parameters among `infos`, which a file of the format `name` does not record."""
    parameters = sum(info.requires_grad or info.is_parameter for info in infos)
    if parameters:
        yield f"{name} does not store requires_grad, which {count(parameters, 'parameter')} had"


def _globs(checkpoint: Checkpoint, places: list[Place]) -> tuple[str, ...]:
    """Return globs that match the tensors at `places`.

    They are names in state dicts, and otherwise paths, which contain a slash. Return an empty tuple if a glob would
    match another tensor too.
    """
    state_dicts = {id(detected.node) for detected in checkpoint.detected.state_dicts} if places else set()

    def path_and_name(place: Place) -> tuple[str, str | None]:
        if place.parent and id(place.parent.node) in state_dicts:
            return place.path, place.key
        return (place.path if "/" in place.path else f"./{place.path}"), None

    globs = tuple(glob_of(*path_and_name(place)) for place in places)
    wanted = {id(place.node) for place in places}
    loose = [glob for glob, place in zip(globs, places, strict=True) if not f"{place.path}{place.key}".isprintable()]
    others = [path_and_name(place) for place in checkpoint.source_places if loose and id(place.node) not in wanted]
    return () if any(matches(glob, *other) for glob in loose for other in others) else globs


def renumber(checkpoint: Checkpoint) -> dict[str, str]:
    """Give the storages in the graph new keys, 0, 1, ..., in the order of first use.

    Return the new keys by the old ones.
    """
    keys = {old: str(new) for new, old in enumerate(checkpoint.storages)}
    for reference in checkpoint.references:
        change_id(reference.node, key=keys[reference.storage.key])
    checkpoint.changed()
    return keys


def pickle_pieces(
    checkpoint: Checkpoint, graph: Graph | None = None, *, short: bool = False
) -> list[Literal | ByteRange]:
    """Return the pickle of `checkpoint`, or of `graph`, another graph with blobs in the same source.

    Long byte strings are ranges of the source. If `short` is true, the memo contains only values that are read again.
    """
    from ckptconv.pickles.emitter import emit  # lazily, for start-up

    graph = graph or checkpoint.graph
    splice = not short and not checkpoint.source.is_far  # splicing reads the source again
    parts = emit(graph, loadable=can_be_made_loadable(graph), short=short, splice=splice)
    return [Literal(part) if isinstance(part, bytes) else blob_bytes(checkpoint, part) for part in parts]


def blob_bytes(checkpoint: Checkpoint, blob: Blob) -> ByteRange:
    """Return the range of the source that contains `blob`, a long byte string in the pickle."""
    return ByteRange(checkpoint.blobs or checkpoint.source, blob.offset, blob.length)


def say_for_older_loaders(checkpoint: Checkpoint) -> None:
    """Rename the module ``torch.tensor`` to ``torch._tensor`` in the graph of `checkpoint`.

    Only torch's zip loader understands the old name (``load_module_mapping`` in ``torch/serialization.py``).
    """
    for node in checkpoint.graph.globals:
        if node.module == "torch.tensor":
            node.module = "torch._tensor"
    checkpoint.changed()


def torch_layout(
    checkpoint: Checkpoint, file: OutFile, notes: tuple[str, ...] = (), *, has_sources: bool = False
) -> Layout:
    """Return the layout of `file`, which is in a format of torch, with `notes`.

    The layout lists the contents of `checkpoint` that the file cannot contain: metadata strings, and the source code of
    classes unless `has_sources` is true.
    """
    left_behind = [
        LeftBehind(f"__metadata__/{key}", len(text.encode()), "torch's format cannot store it")
        for key, text in checkpoint.metadata.items()
        if key != "format"
    ]
    sources: dict[str, LeftBehind] = {}
    for cls, reference in () if has_sources else checkpoint.class_ids.items():
        text = reference.id.items[3] if isinstance(reference.id, Tuple) else None
        if isinstance(text, str):
            nbytes = len(text.encode("utf-8", "surrogatepass"))
        else:
            nbytes = text.length if isinstance(text, Blob) else len(text.data) if isinstance(text, Py2String) else 0
        if nbytes:
            why = "only torch's older format can store it"
            sources[str(cls)] = LeftBehind(f"the source code of {cls}", nbytes, why)
    return Layout((file,), (*left_behind, *sources.values()), notes, tuple(checkpoint.ties.items()))


def refuse_unknown_dtypes(checkpoint: Checkpoint) -> None:
    """Raise RefusedError if a tensor in `checkpoint` has a dtype that torch does not have."""
    if not any(storage_id(reference.node).dtype is UNTYPED for reference in checkpoint.references):
        return
    troubles = _dtypes(checkpoint, lambda info: info.dtype not in BY_NAME)
    if troubles:
        raise cannot_hold(checkpoint, "torch", troubles)


def _dtypes(checkpoint: Checkpoint, is_trouble: Callable[[TensorInfo], bool]) -> list[tuple[Place, str]]:
    """Return the place and the dtype of each tensor for which `is_trouble` returns true."""
    nodes = checkpoint.tensor_nodes
    tensors = [(place, nodes[id(place.node)]) for place in checkpoint.places if id(place.node) in nodes]
    return [(place, info.dtype) for place, info in tensors if is_trouble(info)]


def storage_classes(checkpoint: Checkpoint, what: str) -> dict[Storage, str]:
    """Return the name of each storage's class, for a format in which a storage has exactly one class.

    Raises RefusedError if a storage has only the class for bytes without a dtype, because torch could not read it. The
    error calls the target `what`.
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
        f"{what} cannot store a storage without a dtype",
        where=checkpoint.source.path,
        hint=option("format", "pt") + " writes it",
    )


def little_endian(storage: Storage, cls: str, byteorder: str) -> Data:
    """Return the bytes of `storage` as little-endian numbers of the class `cls`.

    `byteorder` is the byte order of the source, ``little`` or ``big``.
    """
    dtype = BY_STORAGE_CLASS[cls]
    data = storage.data
    if byteorder == "little" or dtype.itemsize == 1:
        return data
    if isinstance(data, Cast):
        return replace(data, swapped_out=False)
    return Cast(data, dtype.name, dtype.name, storage.nbytes, swapped_in=True)
