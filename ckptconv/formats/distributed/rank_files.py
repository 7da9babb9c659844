"""Sets of rank files: the files that the processes of one FSDP run saved with torch.save, read as one checkpoint.

Layout: each file (:mod:`ckptconv.formats.distributed.rank_names` has their names) is a complete file of torch.save.
All have the same keys. A DTensor or ShardedTensor in a file (:mod:`ckptconv.formats.distributed.rank_parts`) is the
slice of that process, and contains its position. Slices are merged by position, as those of
torch.distributed.checkpoint are. Every process has a copy of everything else. The copy of the first rank is used, and
the copies that must be equal are listed in the checkpoint's ``replicas``, which are compared after edits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement, Gather, Piece
from ckptconv.checkpoint.blocks import assembled
from ckptconv.checkpoint.index import leaf_of
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import partial_notes
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.checkpoint.tensor_info import Replica, piece_of, row_major
from ckptconv.errors import LimitError, MalformedError, UnsupportedError, count, some
from ckptconv.formats.distributed.chunks import Chunk, check_cover
from ckptconv.formats.distributed.rank_names import RankSet, are_in, main_set, set_of, sets_in
from ckptconv.formats.distributed.rank_parts import Part, PartReader, spread_call
from ckptconv.hints import Placeholder, command
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
    Extension,
    Global,
    Node,
    PersistentId,
    Py2String,
    Value,
    args_of,
    replace_nodes,
    type_of,
)
from ckptconv.pickles.paths import Place, child_places
from ckptconv.stores import list_folder

NAME = "rank files"
_FLAT = ("_flat_param", "flat_param")
_COPY = "copy the files of all ranks into one folder, with their original names"


def looks_like(folder: SourceFolder) -> bool:
    """Return whether `folder` is a set of rank files: a folder that contains one, or a pattern."""
    if folder.is_whole:
        return are_in(folder.folder)
    return set_of(folder.path) is not None and "*" in folder.path.name


def read(folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint:
    """Return the checkpoint merged from the rank files of `folder`. `read_file` reads one file.

    Raises MalformedError if files are missing or of different runs, UnsupportedError, LimitError, and the errors of
    `read_file`.
    """
    run = _chosen(folder)
    ranks = [rank for rank, _ in run.names]
    if not ranks:
        raise UnsupportedError("no file has such a name", where=folder.path, got=run.pattern)
    if len({*ranks}) != len(ranks):
        times = Counter(ranks)
        twice = [name for rank, name in run.names if times[rank] > 1]
        raise MalformedError("two files belong to the same rank", where=folder.folder, got=some(twice), hint=_COPY)
    world = run.world or ranks[-1] + 1
    if ranks[-1] >= world:
        raise MalformedError(
            "a rank that the run did not have",
            where=folder.folder,
            expected=f"0 to {world - 1}",
            got=run.names[-1][1],
        )
    if run.missing:
        raise MalformedError(
            f"the files of {count(len(run.missing), 'rank')} of {world:,} are missing",
            where=folder.folder,
            got=f"no {some(run.missing)}",
            hint=_COPY,
        )
    folder.missing(name for _, name in run.names)  # opens remote files, several at once
    parts = [read_file(folder.open(name)) for _, name in run.names]
    checkpoint = _Reader(folder, parts, world).checkpoint()
    checkpoint.notes.append(f"put together from {count(world, 'rank file')}, {run.pattern}")
    others = [other.pattern for other in sets_in(list_folder(folder.folder)[1]) if other.pattern != run.pattern]
    if folder.is_whole and others:
        inspect = command("inspect", folder.folder / others[0])
        checkpoint.notes.append(f"not part of it: {some(others)}, each a separate checkpoint: " + inspect)
    return checkpoint


def _chosen(folder: SourceFolder) -> RankSet:
    """Return the set of rank files in `folder`, or with its pattern.

    Raises UnsupportedError if the folder contains several sets, none of which is that of the model.
    """
    if not folder.is_whole:
        run = set_of(folder.path)
        assert run is not None
        return run
    names = list_folder(folder.folder)[1]
    chosen = main_set(names)
    if chosen is None:
        several = [run.pattern for run in sets_in(names)]
        raise UnsupportedError(
            f"the rank files of {count(len(several), 'checkpoint')}",
            where=folder.path,
            got=some(several),
            hint="give one of them: " + command("convert", folder.folder / several[0], Placeholder("OUT")),
        )
    return chosen


class _Reader:
    """The merger of the checkpoints of all ranks.

    It keeps the checkpoint of the first rank, and completes its tensors.
    """

    def __init__(self, folder: SourceFolder, parts: list[Checkpoint], world: int) -> None:
        self.folder = folder
        self.parts = parts
        self.readers = [PartReader(part, rank, world) for rank, part in enumerate(parts)]
        self.files = [part.source.path.name for part in parts]
        #: The distributed tensors by the id of the node in the first rank: the place there, and the slices.
        self.spread: dict[int, tuple[Place, list[Part]]] = {}
        self.replicas: list[Replica] = []
        self.merger = Merger(folder)
        #: The number of steps left. The first file is compared with each other file, so each file counts several times.
        self.left = 4 * sum(part.graph.opcodes for part in parts)

    def checkpoint(self) -> Checkpoint:
        """Return the merged checkpoint.

        Raises MalformedError, UnsupportedError or LimitError if the files cannot be merged.
        """
        first, *others = self.parts
        for place in first.places:
            part = self.readers[0].part(place)
            if place.key and place.key.rpartition(".")[2].startswith(_FLAT):
                raise UnsupportedError(
                    f"{place.path} is the flat parameter of FSDP's LOCAL_STATE_DICT, and no file says which weights are"
                    " in it",
                    where=first.source.path,
                    hint="save it again in the run, with StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT",
                )
            if part:
                self.spread.setdefault(id(place.node), (place, [part]))
        for rank in range(1, len(self.parts)):
            _Comparison(self, rank).run()
        about_parts = partial_notes(first.tensors)
        first.notes = [note for note in first.notes if note not in about_parts]
        new: dict[Node, Node] = {}
        for place, parts in self.spread.values():
            call = spread_call(place.node)
            if call and len(parts) == len(self.parts) and call not in new:  # otherwise a container differs
                new[call] = self.tensor(place, parts)
        replace_nodes(first.graph, new)
        first.changed()
        checkpoint = self.merger.checkpoint(NAME, self.merger.take(first, in_order=True))
        checkpoint.graph.left_out += [*new, *(other.graph.root for other in others)]
        checkpoint.unused += [
            replace(left, path=f"{part.source.path.name}/{left.path}") for part in others for left in part.unused
        ]
        checkpoint.replicas = self.replicas
        return checkpoint

    def tensor(self, place: Place, parts: list[Part]) -> Call:
        """Return a call that rebuilds the tensor at `place` from its `parts`, one for each rank.

        Slices that several ranks have are added to `replicas`. Raises MalformedError if the slices leave holes or
        overlap.
        """
        first = parts[0]
        chunks: dict[Chunk, tuple[ChunkPlacement, int]] = {}
        for rank, part in enumerate(parts):
            for placement in part.placements:
                known, other = chunks.setdefault(Chunk(placement.offsets, placement.sizes), (placement, rank))
                if known is not placement:
                    pieces = _piece(known, first.dtype.itemsize), _piece(placement, first.dtype.itemsize)
                    self.replicas.append(Replica(place, (self.files[other], self.files[rank]), pieces))
        check_cover(self.folder.path, place.path, first.shape, [*chunks])
        placements = [placement for placement, _ in chunks.values()]
        data = assembled(first.shape, first.dtype.itemsize, placements, self.folder.path)
        # The storage is on the device of the first rank that has a slice of it.
        tag = next((part.device for part in parts if part.device), "cpu")
        shared = (first.shape, first.dtype.name, *placements) if placements else None
        call = self.merger.tensor(first.dtype, first.shape, data, tag, shared=shared)
        args_of(call)[4] = first.requires_grad
        return call


def _piece(placement: ChunkPlacement, itemsize: int) -> Piece:
    """Return the elements of the slice `placement` in row-major order.

    `itemsize` is the number of bytes of an element.
    """
    if placement.stride == row_major(placement.sizes):
        return placement.of
    return Gather(placement.of, itemsize, placement.sizes, placement.stride, 0, prod(placement.sizes) * itemsize)


class _Comparison:
    """The comparison of the checkpoint of `rank` with that of the first rank, node by node."""

    def __init__(self, whole: _Reader, rank: int) -> None:
        self.whole, self.rank = whole, rank
        self.a, self.b = whole.parts[0], whole.parts[rank]
        self.files = whole.files[0], whole.files[rank]
        self.leaves = leaf_of(self.a.tensor_nodes), leaf_of(self.b.tensor_nodes)
        self.todo: list[tuple[Place, Place]] = []

    def run(self) -> None:
        """Compare all nodes. The slices of this rank are added to the distributed tensors of `whole`.

        Raises MalformedError if the files are of different runs, and LimitError after too many steps.
        """
        self.todo.append((Place(None, "", self.a.graph.root, 0), Place(None, "", self.b.graph.root, 0)))
        seen: set[tuple[int, int]] = set()
        while self.todo:
            a, b = self.todo.pop()
            pair = id(a.node), id(b.node)
            if not (isinstance(a.node, Node) and pair in seen):
                seen.add(pair)
                self.compare(a, b)

    def compare(self, a: Place, b: Place) -> None:
        """Compare the nodes at `a` in the first rank and `b` in this one, and queue their members.

        Raises MalformedError if a distributed tensor has other properties. Other differences are recorded as replicas.
        """
        first, part = self.whole.readers[0].part(a), self.whole.readers[self.rank].part(b)
        if first and part:
            if first.alike != part.alike:
                raise MalformedError(
                    f"{a.path} differs from the tensor in {self.files[0]}: the files are not from the same run",
                    where=self.b.source.path,
                    expected=f"{first.dtype.name} of shape {first.shape}, {first.layout}",
                    got=f"{part.dtype.name} of shape {part.shape}, {part.layout}",
                )
            _, parts = self.whole.spread.setdefault(id(a.node), (a, [first]))
            if len(parts) == self.rank:  # else the tensor is also at another place, and has this part
                parts.append(part)
        elif first or part:
            self.differ(a)
        elif (
            (x := self.a.tensor_nodes.get(id(a.node)))
            and (y := self.b.tensor_nodes.get(id(b.node)))
            and x.storage
            and y.storage
            and x.kind == y.kind == "strided"
        ):
            alike = ("dtype", "shape", "requires_grad", "is_parameter", "conj", "neg")
            if any(getattr(x, name) != getattr(y, name) for name in alike):
                self.differ(a)
            elif x.nbytes:
                self.replica(a, piece_of(x, self.a.byteorder), piece_of(y, self.b.byteorder))
            self.inside(child_places(a, self.leaves[0]), child_places(b, self.leaves[1]), a)
        elif self.is_same(a, b):
            self.inside(child_places(a, leaf_of({})), child_places(b, leaf_of({})), a)
        else:
            self.differ(a)

    def is_same(self, a: Place, b: Place) -> bool:
        """Return whether the nodes at `a` and `b` are equal, apart from their members and bytes.

        Members are compared later. Bytes are added to the replicas.
        """
        x, y = a.node, b.node
        if type_of(x) is not type_of(y):
            return False
        if isinstance(x, PersistentId) and isinstance(y, PersistentId):
            self.replica(a, self.a.index.storage_of[id(x)].data, self.b.index.storage_of[id(y)].data)
            return storage_id(x).dtype == storage_id(y).dtype
        if isinstance(x, Blob) and isinstance(y, Blob):
            one, other = (
                ByteRange(part.blobs or part.source, blob.offset, blob.length)
                for part, blob in ((self.a, x), (self.b, y))
            )
            self.replica(a, one, other)
            return x.kind == y.kind
        if isinstance(x, Call) and isinstance(y, Call):
            return x.kind == y.kind and _comparable(x.callable) == _comparable(y.callable)
        return _comparable(x) == _comparable(y)

    def inside(self, ours: list[Place], theirs: list[Place], place: Place) -> None:
        """Queue the members `ours` and `theirs` of the nodes at `place` for comparison.

        Members of mappings are matched by key. Raises MalformedError if this rank has a key that the first rank does
        not have, and LimitError after too many steps.
        """
        self.whole.left -= 1 + len(ours) + len(theirs)
        if self.whole.left < 0:
            raise LimitError("comparing the files takes too many steps", where=self.b.source.path)
        by_segment = {their.segment: their for their in theirs}
        segments = [our.segment for our in ours]
        if isinstance(place.node, (Dict, Call)):
            more = by_segment.keys() - segments
            if more:
                raise MalformedError(
                    f"it has an item that {self.files[0]} does not have: the files are not from the same run",
                    where=self.b.source.path,
                    got=some([by_segment[segment].path for segment in sorted(more)]),
                )
        elif segments != [their.segment for their in theirs]:
            self.differ(place)
            return
        for our in ours:
            if our.segment in by_segment:
                self.todo.append((our, by_segment[our.segment]))
            else:
                self.differ(our)

    def replica(self, place: Place, a: Piece, b: Piece) -> None:
        """Record that the bytes `a` and `b` at `place` must be equal."""
        if a.length != b.length:
            self.differ(place)
        else:
            self.whole.replicas.append(Replica(place, self.files, (a, b)))

    def differ(self, place: Place) -> None:
        """Record that the files differ at `place`, as a replica without bytes."""
        self.whole.replicas.append(Replica(place, self.files))


def _comparable(value: Value) -> object:
    """Return the content of `value` without its members, in a form that can be compared with ``==``."""
    if isinstance(value, (Global, Extension)):
        return str(value) if isinstance(value, Global) else value.code
    if isinstance(value, (Py2String, ByteArray)):
        return value.data
    if isinstance(value, float):
        return repr(value)  # NaN equals NaN, and -0.0 is not 0.0
    return type(value) if isinstance(value, Node) else value
