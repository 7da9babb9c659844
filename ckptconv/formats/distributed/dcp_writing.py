"""Write folders of torch.distributed.checkpoint (DCP) for any number of processes, in one process.

:mod:`ckptconv.formats.distributed.dcp` has the layout. Nested dicts and lists are flattened to items as
``flatten_state_dict`` does. A tensor is cut into rows as ``torch.chunk`` does. Each chunk and each object becomes a
separate file of ``torch.save`` inside the file of its process. Source: ``_nested_dict.py``, ``_traverse.py`` and
``filesystem.py`` (``_write_item``) in ``torch/distributed/checkpoint`` of torch 2.13.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from math import prod
from pathlib import Path

from ckptconv.byteranges.spans import ByteRange, Deferred, Literal, OutFile, Piece, joined
from ckptconv.checkpoint.merging import TensorCalls, drop_effect_order, empty_graph
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import change_id
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo, left_behind_at, piece_of
from ckptconv.dtypes import BY_NAME, DType
from ckptconv.errors import LimitError, RefusedError, at_path, count, some
from ckptconv.formats.distributed.chunks import Chunk, rows_of_ranks
from ckptconv.formats.distributed.dcp import METADATA
from ckptconv.formats.distributed.metadata import ItemPath, Metadata, Stored, TensorItem, metadata_bytes
from ckptconv.formats.layout import Layout, about_parameters, cannot_hold, pickle_pieces, renumber, too_large
from ckptconv.formats.torch_zip import PICKLE, ZipWriter
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.emitter import pickle_of
from ckptconv.pickles.graph import Call, Dict, Global, List, Node, Tuple, Value, is_global, walk
from ckptconv.pickles.paths import Place, is_item
from ckptconv.work import work

_NAME = WRITERS["dcp"].name
_STEPS = 80  # of work for the file of an object
_LEAF_STEPS = 25  # of a string or a number: an item of a long log takes 10 bytes or more, each of which grants 4
_CHARACTERS = 16  # added to the name of each item for the limit on all names


def layout(checkpoint: Checkpoint, path: Path, *, ranks: int = 1) -> Layout:
    """Plan the folder `path` for an edited `checkpoint`: a file for each of `ranks` processes, and ``.metadata`` last.

    A process without data has no file. Raises RefusedError, which names the values that the format cannot store, and
    LimitError if the names or the objects are too long together.
    """
    flat = _flattened(checkpoint)
    left_behind = _refuse_or_leave(checkpoint, flat)
    files = [_RankFile(f"__{rank}_0.distcp") for rank in range(ranks)]
    items: dict[str, TensorItem | None] = {}
    stored: dict[tuple[str, tuple[int, ...] | None], Stored] = {}
    room = LIMITS.pickle_bytes
    for name, (_, node) in flat.items.items():
        info = checkpoint.tensor_nodes.get(id(node))
        if info is None:
            items[name] = None
            work().charge(_STEPS if isinstance(node, Node) else _LEAF_STEPS)
            file = _object_file(checkpoint, node)
            room -= sum(piece.length for piece in file.pieces if isinstance(piece, Literal))
            if room < 0:  # values can share a string, and each file has its own copy
                most = f"at most {LIMITS.pickle_bytes:,} bytes"
                raise LimitError("the objects are too large", where=checkpoint.source.path, expected=most)
            stored[name, None] = files[0].add(file)
            continue
        chunks = rows_of_ranks(info.shape, ranks)
        items[name] = TensorItem(BY_NAME[info.dtype], info.shape, list(chunks.values()))
        for rank, chunk in chunks.items():
            stored[name, chunk.offsets] = files[rank].add(_chunk_file(checkpoint, info, chunk))
    metadata = metadata_bytes(Metadata(items, {name: path for name, (path, _) in flat.items.items()}, stored))
    written = [file for file in files if file.size]
    for i, span in enumerate(_not_compared(checkpoint, written)):
        written[i % len(written)].sums.append(span)
    return Layout(
        (
            *(file.planned(path) for file in written),
            OutFile(path / METADATA, (Literal(metadata),), len(metadata)),
        ),
        tuple(left_behind),
        tuple(_notes(checkpoint, flat)),
    )


# Items


@dataclass(frozen=True)
class _Flat:
    """The items of a checkpoint.

    Attributes:
        items: The path and the value of each item, by its name.
        opened: The Python ids of the mappings and lists that were flattened.
        empty: The names of empty mappings, which DCP does not store.
        numbered: The names of the items whose keys are not strings. The keys become strings.
    """

    items: dict[str, tuple[ItemPath, Value]]
    opened: set[int]
    empty: list[str]
    numbered: list[str]


def _flattened(checkpoint: Checkpoint) -> _Flat:
    """Return the items of `checkpoint`.

    Raises RefusedError if it is not a dict, is empty, or two items would have one name, and LimitError if the names are
    too long or values share too many nodes.
    """
    root, where = checkpoint.graph.root, checkpoint.source.path
    if not _is_mapping(root):
        raise RefusedError(f"{_NAME} contains named values, but the checkpoint is not a dict", where=where)
    lists = _opened_lists(checkpoint)
    flat = _Flat({}, set(), [], [])
    room = most = LIMITS.paths(checkpoint.graph.opcodes)
    nodes = LIMITS.shared_nodes + checkpoint.graph.opcodes
    todo: list[tuple[ItemPath, Value]] = [((), root)]
    while todo:
        path, node = todo.pop()
        name = ".".join(map(str, path))
        room -= len(name) + _CHARACTERS
        if room < 0 or len(path) > LIMITS.nesting:
            raise LimitError(
                "the names of all items are too long", where=where, expected=f"at most {most:,} characters"
            )
        inner: list[tuple[ItemPath, Value]] | None = None
        if isinstance(node, (Dict, Call)) and _is_mapping(node):
            inner = [((*path, key), value) for key, value in _items_of(node, name, where, flat.numbered).items()]
            flat.empty.extend([name] if path and not inner else [])
        elif isinstance(node, List) and id(node) in lists:
            inner = [((*path, i), value) for i, value in enumerate(node.elements())]
        if inner is not None:
            flat.opened.add(id(node))
            todo += reversed(inner)
        elif name in flat.items:
            raise RefusedError(
                f"two values would have the same name in {_NAME}, which joins keys with dots",
                where=where,
                got=f"{name!r} for {flat.items[name][0]} and {path}",
                hint=option("select") + " takes one of the parts",
            )
        else:
            flat.items[name] = path, node
            nodes -= 0 if id(node) in checkpoint.tensor_nodes else sum(1 for _ in islice(walk([node]), nodes + 1))
            if nodes < 0:  # values can share nodes, and each file has its own copies
                raise LimitError("its objects share too many parts", where=where)
    if not flat.items:
        raise RefusedError("there is nothing to write", where=where)
    return flat


def _is_mapping(node: Value) -> bool:
    """Return whether `node` is a dict, an OrderedDict or a defaultdict that receives all its items by effects."""
    if isinstance(node, Call):
        if is_global(node.callable, "collections.OrderedDict"):
            return isinstance(node.args, Tuple) and not node.args.items
        return is_global(node.callable, "collections.defaultdict")
    return isinstance(node, Dict)


def _items_of(node: Dict | Call, name: str, where: Path, numbered: list[str]) -> dict[str, Value]:
    """Return the items of the mapping `node` by their keys as strings.

    The names of keys that are not strings are added to `numbered`. `name` is the path of the mapping. Raises
    RefusedError if a key is neither a string nor a short number, or if two keys become the same string.
    """
    items: dict[str | float | None, Value] = {}  # bool and int are numbers too
    for key, value in node.entries():
        # Python does not print longer integers, and any number of them can have one hash
        if isinstance(key, (Node, bytes)) or (isinstance(key, int) and abs(key) >= LIMITS.elements):
            what = f"a key in {name or 'the checkpoint'} is neither a string nor a number of at most 62 bits"
            raise RefusedError(what, where=where, hint=option("select") + " takes one of the parts")
        items[key] = value  # a key that is set twice keeps its first place and its last value
    texts = {str(key): value for key, value in items.items()}
    if len(texts) < len(items):
        raise RefusedError(f"two keys in {name or 'the checkpoint'} become the same string", where=where)
    numbered += (f"{name}.{key}" if name else str(key) for key in items if not isinstance(key, str))
    return texts


def _opened_lists(checkpoint: Checkpoint) -> set[int]:
    """Return the Python ids of the lists that contain a tensor or a mapping, directly or in nested lists."""
    holders: dict[int, list[List]] = {}
    todo: list[List] = []
    for node in (node for node in checkpoint.index.nodes if isinstance(node, List)):
        for element in node.elements():
            if id(element) in checkpoint.tensor_nodes or _is_mapping(element):
                todo.append(node)
            elif isinstance(element, List):
                holders.setdefault(id(element), []).append(node)
    opened: set[int] = set()
    while todo:
        node = todo.pop()
        if id(node) not in opened:
            opened.add(id(node))
            todo += holders.get(id(node), ())
    return opened


def _refuse_or_leave(checkpoint: Checkpoint, flat: _Flat) -> list[LeftBehind]:
    """Return the contents of `checkpoint` that the folder cannot have.

    Raises RefusedError for items that it cannot store.
    """
    index = checkpoint.index
    values = {id(node) for _, node in flat.items.values()}
    places = {id(place.node): place for place in reversed(index.every_place) if id(place.node) in values}
    tensors = [(places[key], info) for key, info in index.tensor_nodes.items() if key in places]
    troubles = [(place, trouble) for place, info in tensors if (trouble := _trouble(info))]
    if troubles:
        raise cannot_hold(checkpoint, _NAME, troubles)
    refused: dict[str, str] = {}
    for key, place in places.items() if index.obstacles else ():
        if key not in index.tensor_nodes and (obstacles := checkpoint.part(place).index.obstacles):
            reason, node = obstacles[0]
            refused[place.path] = str(node) if isinstance(node, Global) else reason
    if refused:
        raise RefusedError(
            f"{_NAME} is loaded without torch's safe loader, so nothing is written that this loader refuses",
            where=checkpoint.source.path,
            got=some([reason + at_path(path) for path, reason in refused.items()], 5),
            hint=option("loadable") + " converts data objects; to leave it out: " + option("drop", tuple(refused)),
        )
    kept = [info.storage for _, info in tensors]
    inside = ((place, place.parent.node) for place in index.every_place if place.parent)
    others = [
        place
        for place, holder in inside
        if id(holder) in flat.opened and not (is_item(place) or isinstance(holder, List))
    ]
    return [
        *left_behind_at(others, index.storage_of, kept, f"{_NAME} cannot store attributes"),
        *(LeftBehind(name, 0, f"{_NAME} stores no empty dict") for name in flat.empty),
    ]


def _trouble(info: TensorInfo) -> str | None:
    """Return the reason why the format cannot store the tensor `info`, or None if it can."""
    if info.kind != "strided" or info.storage is None:
        return info.kind
    return too_large(info) if info.dtype in BY_NAME else info.dtype


def _notes(checkpoint: Checkpoint, flat: _Flat) -> Iterator[str]:
    """Yield notes on changes that a reader of the folder will see: keys, ties and requires_grad."""
    if flat.numbered:
        text = f"keys that are not strings become strings: {some(flat.numbered)}"
        if checkpoint.detected.optimizer_nodes and any(".state." in f".{name}" for name in flat.numbered):
            text += "; set_optimizer_state_dict needs names: " + option("optimizer", "names")
        yield text
    every = [checkpoint.tensor_nodes.get(id(node)) for _, node in flat.items.values()]
    tensors = [info for info in every if info and info.nbytes]
    tied = len(tensors) - len({info.view for info in tensors})
    if tied:
        yield f"{_NAME} cannot store ties: {count(tied, 'tied tensor')} written again"
    yield from about_parameters(tensors, _NAME)


# Files


class _RankFile:
    """The planned file of one process, which contains files of torch.save one after another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.pieces: list[Piece] = []
        self.sums: list[Piece] = []
        self.size = 0

    def add(self, file: OutFile) -> Stored:
        """Append `file`, and return its position."""
        own = slice(len(self.sums), len(self.sums) + len(file.sums))
        self.pieces += (_later(piece, own) if isinstance(piece, Deferred) else piece for piece in file.pieces)
        self.sums += file.sums
        self.size += file.size
        return Stored(self._name, self.size - file.size, file.size)

    def planned(self, folder: Path) -> OutFile:
        """Return this file, to be written in `folder`."""
        return OutFile(folder / self._name, joined(self.pieces), self.size, tuple(self.sums))


def _later(piece: Deferred, own: slice) -> Deferred:
    """Return `piece`, which is computed from checksums, for a file that has more checksums.

    The piece then uses the slice `own` of the checksums of that file.
    """
    return Deferred(piece.length, lambda sums: piece.make(sums[own]))


def _not_compared(checkpoint: Checkpoint, files: Iterable[_RankFile]) -> list[ByteRange]:
    """Return the ranges of `checkpoint` with checksums that are not verified by writing `files`."""
    pieces = [piece for file in files for piece in (*file.pieces, *file.sums)]
    compared = {id(verified) for piece in pieces for verified in (piece, piece.checked_range())}
    spans = [span for storage in checkpoint.storages.values() for span in storage.data.with_checksums()]
    return [span for span in spans if id(span) not in compared]


def _chunk_file(checkpoint: Checkpoint, info: TensorInfo, chunk: Chunk) -> OutFile:
    """Return the file of torch.save that contains the rows `chunk` of the tensor `info`."""
    dtype = BY_NAME[info.dtype]
    offset = info.offset + chunk.offsets[0] * info.stride[0] if chunk.offsets else info.offset
    rows = replace(info, shape=chunk.sizes, offset=offset, nbytes=dtype.bytes_of(prod(chunk.sizes)))
    return _saved([Literal(_pickle_of(dtype, chunk.sizes))], {"0": piece_of(rows, checkpoint.byteorder)})


@lru_cache(maxsize=1024)  # a model has many tensors of one shape
def _pickle_of(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor with this `dtype` and `shape` that fills the storage with the key 0."""
    graph = empty_graph()
    graph.root = TensorCalls(graph).tensor(dtype, shape, "0", dtype.bytes_of(prod(shape)))
    return pickle_of(graph, loadable=True)


def _object_file(checkpoint: Checkpoint, value: Value) -> OutFile:
    """Return the file of torch.save that contains `value`. Its tensors are on the CPU.

    Raises RefusedError if `value` has tensors in big-endian order.
    """
    if not isinstance(value, Node):
        return _saved([Literal(pickle.dumps(value, 2))], {})  # as torch.save does, and faster than a graph
    part = checkpoint.part(Place(None, "", value, 0))
    if part.storages and part.byteorder != "little":
        raise RefusedError(f"{_NAME} stores little-endian numbers", where=checkpoint.source.path)
    drop_effect_order(part)
    for reference in part.references:
        change_id(reference.node, tag="cpu")
    keys = renumber(part)
    return _saved(pickle_pieces(part), {keys[key]: storage.data for key, storage in part.storages.items()})


def _saved(pieces: list[Literal | ByteRange], storages: Mapping[str, Piece]) -> OutFile:
    """Return a file of torch.save with the `pieces` of a pickle and the `storages` by key."""
    writer = ZipWriter("archive", checked=True)
    writer.pickle(PICKLE, pieces, like=None)
    return writer.with_storages(storages, "little").finish(Path("archive"))
