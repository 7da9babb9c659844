"""The safetensors format: reader and writer. :mod:`ckptconv.formats.safetensors_header` describes the layout.

The file contains named tensors, each complete and in row-major order, without devices, views or objects. It is read as
the graph of a pickled dict of tensors on ``cpu``, so that every edit and every writer can process it. The format cannot
give a tensor two names. So the metadata records a second name as ``second → first``, as the library's ``save_model``
does, and such an entry is read as a tie.

The header is written in the order of the state dict. The data is sorted by the size of elements, the largest first, so
that each tensor is aligned.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Literal, Piece
from ckptconv.checkpoint.merging import TensorCalls, empty_graph
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.quantization import torchao_layout
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo, left_behind_at, piece_of
from ckptconv.dtypes import BY_NAME, BY_WORD, get_dtype
from ckptconv.errors import RefusedError
from ckptconv.formats.distributed.rank_names import about_one
from ckptconv.formats.distributed.safetensors_parts import SHARDING_INFO, is_part, part_error, saved_offsets
from ckptconv.formats.layout import Layout, about_tensors, cannot_hold, file_of, too_large
from ckptconv.formats.safetensors_header import METADATA, Entry, header_bytes, is_text, read_header
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import joined
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Dict, Graph, Object, PersistentId, Value, set_items, walk
from ckptconv.pickles.paths import Place, is_item, is_repeated

NAME = WRITERS["safetensors"].name
_LENGTH = 8  # bytes of the header's length, before the header
_FORMAT = "format"  # the metadata key that names the framework; never a tie
_PACKED = "float4_e2m1fn_x2"  # each element contains two elements of F4
_PART = "one process's part of it"
_MERGE = (
    "save the whole tensor in the run that has all parts (tensor.full_tensor(), or full_state_dict=True), "
    "or with torch.distributed.checkpoint, and merge the folder with its dcp_to_torch_save"
)
_FLATTEN = (
    "torchao converts it for save_file: flatten_tensor_state_dict(state_dict) in "
    "torchao.prototype.safetensors.safetensors_support, which also returns the metadata"
)
_REAL = {"float64", "float32", "float16", "bfloat16"}
_COMPLEX = {"complex64"}


@dataclass(frozen=True, eq=False)
class DataStart:
    """The container of a checkpoint from a safetensors file: the position of the data, which the writer needs."""

    data_offset: int


def looks_like(head: bytes) -> bool:
    """Return whether a file that starts with `head` can have this format.

    It must start with a length below a terabyte, followed by spaces and a brace.
    """
    return head[5:8] == bytes(3) and head[8:].lstrip(b" \t\r\n")[:1] in (b"{", b"") and len(head) > 8


# Reading


def read(source: Readable) -> Checkpoint:
    """Return the checkpoint in `source`.

    Raises MalformedError, LimitError, and UnsupportedError if the file contains slices of distributed tensors.
    """
    header = read_header(source)
    metadata = dict(header.metadata or {})
    offsets = saved_offsets(header, source.path)
    if offsets is not None and is_part(source.path, offsets):
        raise part_error(source)
    about_parts = metadata.pop(SHARDING_INFO, None)
    names = {entry.name for entry in header.entries}
    ties = {name: kept for name, kept in metadata.items() if _is_tie(name, kept, names)}
    spans = {
        str(i): ByteRange(source, header.data_offset + entry.start, entry.end - entry.start)
        for i, entry in enumerate(header.entries)
    }
    container = DataStart(header.data_offset)
    checkpoint = checkpoint_of(NAME, source, _graph(header.entries, ties), container, spans.get, str(source.path))
    checkpoint.is_state_dict = True
    checkpoint.ties = ties
    checkpoint.metadata = {key: value for key, value in metadata.items() if key not in ties}
    if about_parts is not None:
        where = LeftBehind(f"{METADATA}/{SHARDING_INFO}", len(about_parts.encode()), "all tensors are whole")
        checkpoint.unused.append(where)
    return checkpoint


def _is_tie(key: str, text: str, names: Container[str]) -> bool:
    """Return whether the metadata entry `key`: `text` records that `key` is a second name of the tensor `text`.

    `names` are the names of all tensors.
    """
    return text in names and key not in names and key != _FORMAT


def _graph(entries: tuple[Entry, ...], ties: dict[str, str]) -> Graph:
    """Return the graph of a dict with the tensors `entries`, as ``torch.save`` would pickle it.

    For each tie, the dict contains one more tensor on the same storage.
    """
    graph = empty_graph()
    calls = TensorCalls(graph)
    items: list[Value] = []
    keys = {entry.name: str(i) for i, entry in enumerate(entries)}
    for name, kept in [*((entry.name, entry.name) for entry in entries), *ties.items()]:
        key = keys[kept]
        entry = entries[int(key)]
        dtype, shape = BY_WORD[entry.word], entry.shape
        if entry.word == "F4" and shape and shape[-1] % 2 == 0:  # torch counts pairs; it cannot store odd numbers
            dtype, shape = BY_NAME[_PACKED], (*shape[:-1], shape[-1] // 2)
        items += (name, calls.tensor(dtype, shape, key, entry.end - entry.start))
    assert isinstance(graph.root, Dict)
    set_items(graph.root, items)
    return graph


# Writing


def layout(checkpoint: Checkpoint, path: Path, *, copy_tied: bool = False) -> Layout:
    """Plan the file at `path` for `checkpoint`, which must be a state dict.

    If `copy_tied` is true, tied tensors are written under each of their names. Raises RefusedError, which names all
    tensors that the format cannot store.
    """
    taken, left_behind = _sort_out(checkpoint)
    container = checkpoint.container if isinstance(checkpoint.container, DataStart) else None
    false = {key: text for key, text in checkpoint.metadata.items() if _is_tie(key, text, taken)}
    left_behind += [
        LeftBehind(f"{METADATA}/{key}", len(text.encode()), "it would be read as a tie") for key, text in false.items()
    ]
    metadata = {} if NAME in checkpoint.format else {_FORMAT: "pt"}  # a source in safetensors has its own entry
    metadata |= {key: text for key, text in checkpoint.metadata.items() if key not in false}
    written = taken if copy_tied else _untied(taken, metadata)
    order = sorted(written, key=lambda name: _order_of_data(written[name], as_it_is=container is not None))
    pieces: list[Piece] = []
    entries: dict[str, Entry] = {}
    at = 0
    for name in order:
        info = written[name]
        word, shape = _word_and_shape(info)
        entries[name] = Entry(name, word, shape, at, at + info.nbytes)
        at += info.nbytes
        if info.nbytes:
            pieces.append(piece_of(info, checkpoint.byteorder))
    header = header_bytes(
        metadata or None, (entries[name] for name in written), like=container.data_offset if container else None
    )
    storages = dict.fromkeys(info.storage for info in written.values() if info.storage and info.nbytes)
    ties = tuple((name, metadata[name]) for name in taken if name not in written)
    file = file_of(path, [Literal(header), *pieces], storages)
    return Layout((file,), tuple(left_behind), tuple(about_tensors(taken, NAME)), ties)


def header_in_place(checkpoint: Checkpoint, container: DataStart) -> bytes | None:
    """Return the length and the header of `checkpoint`, whose tensors were renamed, in as many bytes as they have now.

    Return None if the new header is longer, or if tensors were removed. The data keeps its position.
    """
    taken, _ = _sort_out(checkpoint)
    kept = read_header(checkpoint.source).metadata
    metadata = {key: text for key, text in (kept or {}).items() if key not in checkpoint.ties}
    entries = []
    for name, info in _untied(taken, metadata).items():
        word, shape = _word_and_shape(info)
        data = info.storage and info.storage.data.stored()
        start = data.offset + info.offset * get_dtype(info.dtype).itemsize - container.data_offset if data else 0
        entries.append(Entry(name, word, shape, start, start + info.nbytes))
    if sum(entry.end - entry.start for entry in entries) != checkpoint.source.size - container.data_offset:
        return None  # a hole, which no reader accepts
    header = header_bytes(metadata if metadata or kept is not None else None, entries)
    text = header[_LENGTH:].rstrip(b" ")
    available = container.data_offset - _LENGTH
    return available.to_bytes(_LENGTH, "little") + text.ljust(available) if len(text) <= available else None


def _sort_out(checkpoint: Checkpoint) -> tuple[dict[str, TensorInfo], list[LeftBehind]]:
    """Return the tensors by name, in the order of the state dict, and the contents that the file cannot have.

    Raises RefusedError if the format cannot store some tensor, or if no tensor has a name.
    """
    if not isinstance(checkpoint.graph.root, Object):
        raise RefusedError("a safetensors file contains only named tensors", where=checkpoint.source.path)
    taken: dict[str, TensorInfo] = {}
    others: list[Place] = []
    tensors: list[Place] = []
    troubles: list[tuple[Place, str]] = []
    index = checkpoint.index
    for place in index.places_in_root():
        info = index.tensor_nodes.get(id(place.node))
        if is_item(place) and is_repeated(place):
            troubles.append((place, "a second value with that name"))
        elif info is None or not is_item(place):
            others.append(place)
        elif trouble := _trouble(place, info):
            troubles.append((place, trouble))
        elif place.key is not None:
            taken[place.key] = info
            tensors.append(place)
    if troubles:
        error = cannot_hold(checkpoint, NAME, troubles)
        if any(trouble == _PART for _, trouble in troubles):
            error.hint = joined(about_one(checkpoint.source.path) or _MERGE, error.hint)
        if any(torchao_layout(place.node) for place, _ in troubles):
            error.hint = joined(_FLATTEN, error.hint)
        raise error
    others += index.attribute_places(place.node for place in tensors)
    kept = [info.storage for info in taken.values()]
    if not taken and any(isinstance(node, PersistentId) for node in walk([place.node for place in others])):
        raise RefusedError("none of its tensors has a name", where=checkpoint.source.path)
    versions = [place for place in others if place.segment == "/._metadata"]
    rest = [place for place in others if place.segment != "/._metadata"]
    return taken, [
        *left_behind_at(rest, index.storage_of, kept, "no tensor with a name"),
        *left_behind_at(versions, index.storage_of, kept, "module version numbers"),
    ]


def _trouble(place: Place, info: TensorInfo) -> str | None:
    """Return the reason why the format cannot store the tensor `info` at `place`, or None if it can."""
    dtype = get_dtype(info.dtype)
    if place.key is None:
        return "its key is not a string"
    if place.key == METADATA:
        return "the name is reserved"
    if not is_text(place.key):
        return "its name is not a string"
    if info.kind == "partial":
        return _PART
    if info.kind != "strided" or info.storage is None:
        return torchao_layout(place.node) or info.kind
    if dtype.word is None:
        return info.dtype
    if info.dtype == _PACKED and not info.shape:
        return f"a scalar of {_PACKED}"
    if (info.conj and info.dtype not in _COMPLEX) or (info.neg and info.dtype not in _COMPLEX | _REAL):
        return f"{info.dtype} to be conjugated or negated"
    return too_large(info)


def _untied(taken: dict[str, TensorInfo], metadata: dict[str, str]) -> dict[str, TensorInfo]:
    """Return `taken` with each tensor once, under its first name.

    The other names of a tensor are added to `metadata` as ties. A name that is a key in `metadata` already keeps its
    own copy of the tensor. Tensors without bytes are not tied.
    """
    first: dict[tuple[object, ...], str] = {}
    written: dict[str, TensorInfo] = {}
    for name, info in taken.items():
        kept = first.setdefault(info.view, name) if info.nbytes else name
        if kept == name or name in metadata:
            written[name] = info
        else:
            metadata[name] = kept
    return written


def _order_of_data(info: TensorInfo, *, as_it_is: bool) -> tuple[int, int]:
    """Return the sort key of the tensor `info` in the data: tensors with the largest elements come first.

    If `as_it_is` is true, tensors with equally large elements keep the order of the source, so that long ranges can be
    copied at once.
    """
    dtype = get_dtype(info.dtype)
    assert info.storage is not None
    span = info.storage.data.stored() if as_it_is else None
    at = span.offset if span else 0
    return (-dtype.itemsize if dtype.packed == 1 else 0, at)


def _word_and_shape(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of `info` in safetensors' terms. Packed elements count separately."""
    if info.dtype == _PACKED:
        return "F4", (*info.shape[:-1], 2 * info.shape[-1])
    return get_dtype(info.dtype).word or "", info.shape
