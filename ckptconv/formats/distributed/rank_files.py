"""Sets of rank files: what each process of one FSDP run saved with torch.save, read as one checkpoint.

Layout: each file (:mod:`ckptconv.formats.distributed.rank_names` has their names) is a checkpoint of its own kind with
the same keys. A DTensor or ShardedTensor in it (:mod:`ckptconv.formats.distributed.rank_parts`) is that process's part,
and says where it belongs; parts are put together by position, as those of torch.distributed.checkpoint are. All else
every process has a copy of: the first one's is taken, and what must be the same is kept in the checkpoint's
``replicas``, which whoever edits it compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement, Gather, Piece
from ckptconv.checkpoint.index import leaf_of
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import partial_notes
from ckptconv.checkpoint.storage_ids import changed_id, storage_id
from ckptconv.checkpoint.tensor_info import Replica, TensorInfo, piece_of, row_major
from ckptconv.errors import LimitError, MalformedError, UnsupportedError, some
from ckptconv.errors import count as counted
from ckptconv.formats.distributed.chunks import Chunk, assembled, check_cover
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
    Tuple,
    Value,
    replace_nodes,
    type_of,
)
from ckptconv.pickles.paths import Place, child_places
from ckptconv.stores import list_folder

NAME = "rank files"
_FLAT = ("_flat_param", "flat_param")
_COPY = "copy the files of all ranks into one folder, under the names that the run gave them"


def looks_like(folder: SourceFolder) -> bool:
    """Whether `folder`, given as such or as a pattern, has the files of a run, by their names."""
    if folder.is_whole:
        return are_in(folder.folder)
    return set_of(folder.path) is not None and "*" in folder.path.name


def read(folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint:
    """The checkpoint in the rank files of `folder`, each of which `read_file` reads.

    Raises MalformedError, UnsupportedError, LimitError, and what that raises.
    """
    found = _chosen(folder)
    ranks = [rank for rank, _ in found.names]
    if not ranks:
        raise UnsupportedError("no file has such a name", where=folder.path, got=found.pattern)
    if len({*ranks}) != len(ranks):
        times = Counter(ranks)
        twice = [name for rank, name in found.names if times[rank] > 1]
        raise MalformedError("two files are of one rank", where=folder.folder, got=some(twice), hint=_COPY)
    world = found.world or ranks[-1] + 1
    if ranks[-1] >= world:
        raise MalformedError(
            "a rank that the run did not have",
            where=folder.folder,
            expected=f"0 to {world - 1}",
            got=found.names[-1][1],
        )
    if found.missing:
        raise MalformedError(
            f"the files of {counted(len(found.missing), 'rank')} of {world:,} are missing",
            where=folder.folder,
            got=f"no {some(found.missing)}",
            hint=_COPY,
        )
    folder.missing(name for _, name in found.names)  # which opens those that are far, several at once
    parts = [read_file(folder.open(name)) for _, name in found.names]
    checkpoint = _Reader(folder, parts, world).checkpoint()
    checkpoint.notes.append(f"put together from {counted(world, 'rank file')}, {found.pattern}")
    beside = [each for each in sets_in(list_folder(folder.folder)[1]) if each.pattern != found.pattern]
    if folder.is_whole and beside:
        alone = command("inspect", folder.folder / beside[0].pattern)
        checkpoint.notes.append(
            f"beside it: {some([each.pattern for each in beside])}, each a checkpoint of its own: " + alone
        )
    return checkpoint


def _chosen(folder: SourceFolder) -> RankSet:
    """The set that `folder` means. Raises UnsupportedError where that could be several."""
    if not folder.is_whole:
        found = set_of(folder.path)
        assert found is not None
        return found
    names = list_folder(folder.folder)[1]
    chosen = main_set(names)
    if chosen is None:
        several = [each.pattern for each in sets_in(names)]
        raise UnsupportedError(
            f"the rank files of {counted(len(several), 'checkpoint')}",
            where=folder.path,
            got=some(several),
            hint="give one of them: " + command("convert", folder.folder / several[0], Placeholder("OUT")),
        )
    return chosen


class _Reader:
    """Puts the checkpoints of all ranks together: what stands in the first, and what the others have for it."""

    def __init__(self, folder: SourceFolder, parts: list[Checkpoint], world: int) -> None:
        self.folder = folder
        self.parts = parts
        self.readers = [PartReader(part, rank, world) for rank, part in enumerate(parts)]
        self.files = [part.source.path.name for part in parts]
        #: What ranks have parts of: where it stands in the first, and the parts; by the id of its node there.
        self.spread: dict[int, tuple[Place, list[Part]]] = {}
        self.replicas: list[Replica] = []
        self.merger = Merger(folder)
        self.keys = map(str, count())
        self.tied: dict[object, str] = {}  # the key of a storage, by what it is made of
        self.tags: dict[str, str] = {}
        #: Places that may still be looked at: the first file is compared with each other one, which is much the same.
        self.left = 4 * sum(part.graph.opcodes for part in parts)

    def checkpoint(self) -> Checkpoint:
        """All of it."""
        first, *others = self.parts
        for place in first.places:
            part = self.readers[0].part(place)
            if place.key and place.key.rpartition(".")[2].startswith(_FLAT):
                raise _flat(first, place)
            if part:
                self.spread.setdefault(id(place.node), (place, [part]))
        for k in range(1, len(self.parts)):
            _Comparison(self, k).run()
        about_parts = partial_notes(first.tensors)
        first.notes = [note for note in first.notes if note not in about_parts]
        new: dict[Node, Node] = {}
        for place, parts in self.spread.values():
            call = spread_call(place.node)
            if call and len(parts) == len(self.parts) and call not in new:  # else something around it differs
                new[call] = self.tensor(place, parts)
        replace_nodes(first.graph, new)
        first.changed()
        checkpoint = self.merger.checkpoint(NAME, self.merger.take(first, in_order=True))
        checkpoint.graph.left_out += [*new, *(each.graph.root for each in others)]
        checkpoint.unused += [
            replace(left, path=f"{part.source.path.name}/{left.path}") for part in others for left in part.unused
        ]
        checkpoint.replicas = self.replicas
        return checkpoint

    def tensor(self, place: Place, parts: list[Part]) -> Call:
        """The tensor at `place`, of its `parts`."""
        first = parts[0]
        found: dict[Chunk, tuple[ChunkPlacement, int]] = {}
        for rank, part in enumerate(parts):
            for placement in part.placements:
                known, other = found.setdefault(Chunk(placement.offsets, placement.sizes), (placement, rank))
                if known is not placement:
                    pieces = _piece(known, first.dtype.itemsize), _piece(placement, first.dtype.itemsize)
                    self.replicas.append(Replica(place, (self.files[other], self.files[rank]), pieces))
        check_cover(self.folder.path, place.path, first.shape, [*found])
        placements = [placement for placement, _ in found.values()]
        data = assembled(first.shape, first.dtype.itemsize, placements, self.folder.path)
        same = first.shape, first.dtype.name, *placements
        key = next(self.keys)
        if placements:
            key = self.tied.setdefault(same, key)
        self.merger.records.setdefault(key, data)
        call = self.merger.calls.tensor(first.dtype, first.shape, key, data.length)
        assert isinstance(call.args, Tuple)
        call.args.items[4] = first.requires_grad
        reference = call.args.items[0]
        assert isinstance(reference, PersistentId)
        reference.id = changed_id(reference, tag=self.tag_of(key, parts))
        return call

    def tag_of(self, key: str, parts: list[Part]) -> str:
        """The device of the storage `key`, of `parts`: that which the first rank has its part on."""
        return self.tags.setdefault(key, next((part.device for part in parts if part.device), "cpu"))


def _flat(checkpoint: Checkpoint, place: Place) -> UnsupportedError:
    return UnsupportedError(
        f"{place.path} is the flat parameter of FSDP's LOCAL_STATE_DICT, and no file says which weights are in it",
        where=checkpoint.source.path,
        hint="save it again in the run, with StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT",
    )


def _piece(placement: ChunkPlacement, itemsize: int) -> Piece:
    """The elements of `placement` in row-major order."""
    if placement.stride == row_major(placement.sizes):
        return placement.of
    length = itemsize
    for size in placement.sizes:
        length *= size
    return Gather(placement.of, itemsize, placement.sizes, placement.stride, 0, length)


class _Comparison:
    """Compares what the rank `k` has with what the first one has, node by node."""

    def __init__(self, whole: _Reader, k: int) -> None:
        self.whole, self.rank = whole, k
        self.a, self.b = whole.parts[0], whole.parts[k]
        self.readers = whole.readers[0], whole.readers[k]
        self.files = whole.files[0], whole.files[k]
        self.spread = whole.spread
        self.leaves = leaf_of(self.a.tensor_nodes), leaf_of(self.b.tensor_nodes)
        self.todo: list[tuple[Place, Place]] = []

    def run(self) -> None:
        """Compare all; what the first has that is spread over ranks gains this one's part."""
        self.todo.append((Place(None, "", self.a.graph.root, 0), Place(None, "", self.b.graph.root, 0)))
        seen: set[tuple[int, int]] = set()
        while self.todo:
            a, b = self.todo.pop()
            pair = id(a.node), id(b.node)
            if not (isinstance(a.node, Node) and pair in seen):
                seen.add(pair)
                self.compare(a, b)

    def compare(self, a: Place, b: Place) -> None:
        """Compare what stands at `a` and `b`; what stands in them is still to be compared."""
        parts = self.readers[0].part(a), self.readers[1].part(b)
        if parts[0] and parts[1]:
            self.add(a, parts[0], parts[1])
        elif parts[0] or parts[1]:
            self.differ(a)
        else:
            infos = self.a.tensor_nodes.get(id(a.node)), self.b.tensor_nodes.get(id(b.node))
            if infos[0] and infos[1] and infos[0].storage and infos[1].storage and _is_plain(infos[0], infos[1]):
                self.same_bytes(a, infos[0], infos[1])
                self.inside(child_places(a, self.leaves[0]), child_places(b, self.leaves[1]), a)
            elif self.is_same(a, b):
                self.inside(child_places(a, _no_leaf), child_places(b, _no_leaf), a)
            else:
                self.differ(a)

    def add(self, place: Place, first: Part, part: Part) -> None:
        """Let the tensor at `place` have the `part` of this rank."""
        if first.alike != part.alike:
            raise MalformedError(
                f"{place.path} is another tensor than in {self.files[0]}: the files are not of one run",
                where=self.b.source.path,
                expected=f"{first.dtype.name} of shape {first.shape}, {first.layout}",
                got=f"{part.dtype.name} of shape {part.shape}, {part.layout}",
            )
        _, parts = self.spread.setdefault(id(place.node), (place, [first]))
        if len(parts) == self.rank:  # else it stands at another place too, and has this part
            parts.append(part)

    def same_bytes(self, place: Place, a: TensorInfo, b: TensorInfo) -> None:
        """The tensors `a` and `b` at `place` must be the same."""
        alike = ("dtype", "shape", "requires_grad", "is_parameter", "conj", "neg")
        if any(getattr(a, each) != getattr(b, each) for each in alike):
            self.differ(place)
        elif a.nbytes:
            self.replica(place, piece_of(a, self.a.byteorder), piece_of(b, self.b.byteorder))

    def is_same(self, a: Place, b: Place) -> bool:
        """Whether `a` and `b` say the same, but for what stands in them and for bytes, which are compared later."""
        x, y = a.node, b.node
        if type_of(x) is not type_of(y):
            return False
        if isinstance(x, PersistentId) and isinstance(y, PersistentId):
            stores = self.a.index.storage_of[id(x)], self.b.index.storage_of[id(y)]
            self.replica(a, stores[0].data, stores[1].data)
            return storage_id(x).dtype == storage_id(y).dtype
        if isinstance(x, Blob) and isinstance(y, Blob):
            places = ((part.blobs or part.source, blob) for part, blob in ((self.a, x), (self.b, y)))
            one, other = (ByteRange(source, blob.offset, blob.length) for source, blob in places)
            self.replica(a, one, other)
            return x.kind == y.kind
        if isinstance(x, Call) and isinstance(y, Call):
            return x.kind == y.kind and _said(x.callable) == _said(y.callable)
        return _said(x) == _said(y)

    def inside(self, ours: list[Place], theirs: list[Place], place: Place) -> None:
        """What stands in `place`, in both files, is to be compared: the items of mappings by their keys."""
        self.whole.left -= 1 + len(ours) + len(theirs)
        if self.whole.left < 0:
            raise LimitError("comparing the files takes too many steps", where=self.b.source.path)
        by_segment = {each.segment: each for each in theirs}
        if isinstance(place.node, (Dict, Call)):
            more = by_segment.keys() - {each.segment for each in ours}
            if more:
                raise MalformedError(
                    f"it has what {self.files[0]} has not: the files are not of one run",
                    where=self.b.source.path,
                    got=some([by_segment[each].path for each in sorted(more)]),
                )
        elif [each.segment for each in ours] != [each.segment for each in theirs]:
            self.differ(place)
            return
        for each in ours:
            if each.segment in by_segment:
                self.todo.append((each, by_segment[each.segment]))
            else:
                self.differ(each)

    def replica(self, place: Place, a: Piece, b: Piece) -> None:
        if a.length != b.length:
            self.differ(place)
        else:
            self.whole.replicas.append(Replica(place, self.files, (a, b)))

    def differ(self, place: Place) -> None:
        """Note that what stands at `place` is not the same in both: without pieces there is nothing to compare."""
        self.whole.replicas.append(Replica(place, self.files))


def _is_plain(a: TensorInfo, b: TensorInfo) -> bool:
    return a.kind == b.kind == "strided"


def _no_leaf(node: Node) -> None:  # noqa: ARG001 - nothing is one
    return None


def _said(value: Value) -> object:
    """What `value` says itself, to be compared with what another one of its type says."""
    if isinstance(value, (Global, Extension)):
        return str(value) if isinstance(value, Global) else value.code
    if isinstance(value, (Py2String, ByteArray)):
        return value.data
    if isinstance(value, float):
        return repr(value)  # NaN is NaN, and -0.0 not 0.0
    return type(value) if isinstance(value, Node) else value
