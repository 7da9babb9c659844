"""Read what one process had of a tensor: the state of a DTensor or a ShardedTensor in the pickle of a rank.

Sources, torch 2.13 and as far back as 2.1: ``torch/distributed/tensor/_api.py`` and ``_dtensor_spec.py`` (a DTensor's
state is ``{_local_tensor, _spec}``, and the spec has the mesh and the placements), ``torch/distributed/device_mesh.py``
and ``_mesh_layout.py``, ``torch/distributed/_shard/sharded_tensor/api.py`` (the state is ``(local shards, metadata,
...)``, and each shard says where it belongs).
"""

from __future__ import annotations

from itertools import islice
from math import prod
from operator import le, mul
from typing import NamedTuple, NoReturn

from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import FROM_TYPE, PARAMETER, TensorReader, ints_of, is_spread
from ckptconv.checkpoint.tensor_info import TensorInfo, row_major
from ckptconv.dtypes import BY_NAME, DType
from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.formats.distributed.chunks import Chunk, Cut, Strip, held_sizes, steps_of, strips_of
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Global, List, Tuple, Value, args_of, is_count, type_of
from ckptconv.pickles.paths import Place

_HERE = "torch.distributed."
_AGAIN = "save it again in the run, "
_WHOLE = (
    _AGAIN + "whole: torch.distributed.checkpoint.state_dict.get_model_state_dict(model,"
    " options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


class Part(NamedTuple):
    """What one process has of a tensor of `shape`: `placements` in it. All processes must agree on `alike`, where
    `layout` says how it is spread, in words. `device` is that of the part, if there is any.
    """

    shape: tuple[int, ...]
    dtype: DType
    layout: str
    placements: tuple[ChunkPlacement, ...]
    device: str | None
    requires_grad: bool

    @property
    def alike(self) -> tuple[object, ...]:
        return self.shape, self.dtype.name, self.layout, self.requires_grad


def spread_call(node: Value) -> Call | None:
    """The call that makes a tensor that is spread over processes, where `node` is one, or a parameter of one."""
    while isinstance(node, Call) and str(node.callable) in PARAMETER and args_of(node):
        node = args_of(node)[0]
    if not isinstance(node, Call):
        return None
    of_type = str(node.callable) in FROM_TYPE and len(args_of(node)) > 3
    return node if is_spread(args_of(node)[1] if of_type else node.callable) else None


class _Mesh(NamedTuple):
    """A mesh of processes: its `sizes` and `names`, and where in it this process is."""

    sizes: tuple[int, ...]
    names: tuple[object, ...]
    coordinate: tuple[int, ...]


class PartReader:
    """Reads the parts in the file of one `rank`, of `world` of them as far as is known."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self.checkpoint = checkpoint
        self.rank, self.world = rank, world
        self.where = str(checkpoint.source.path)
        self._parts: dict[int, Part | None] = {}
        self._fields: dict[int, dict[str, Value]] = {}
        self._meshes: dict[int, _Mesh] = {}
        self._cuts: dict[tuple[int, int, int], tuple[tuple[Cut, ...], str]] = {}
        self._strips: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[Strip, ...]]] = {}
        self._left = LIMITS.spread_steps * checkpoint.graph.opcodes

    def part(self, place: Place) -> Part | None:
        """The part that stands at `place`; None where that is no tensor spread over processes."""
        key = id(place.node)
        if key not in self._parts:
            call = spread_call(place.node)
            self._parts[key] = self._read(call, place) if call else None
        return self._parts[key]

    def _read(self, call: Call, place: Place) -> Part:
        info = self.checkpoint.tensor_nodes.get(id(place.node))
        requires_grad = bool(info and info.requires_grad)
        given = args_of(call)[3] if str(call.callable) in FROM_TYPE else None
        state = next(iter(call.states()), given)
        if isinstance(state, Tuple) and len(state.items) > 2:
            return self._sharded_tensor(state, place, requires_grad)
        slots = state.items[-1] if isinstance(state, Tuple) and state.items else state
        found = self._items(slots, place)
        shape = info.shape if info else ()
        return self._dtensor(found, shape, place, requires_grad)

    # DTensor

    def _dtensor(self, state: dict[str, Value], shape: tuple[int, ...], place: Place, requires_grad: bool) -> Part:
        spec = self._object(state.get("_spec"), place, "DTensorSpec")
        mesh = self._mesh(spec.get("mesh"), place)
        if self._shape_of(spec.get("tensor_meta"), shape) != shape:
            self._fail(place, "a DTensor says two shapes", shape, self._shape_of(spec.get("tensor_meta"), shape))
        key = id(spec.get("placements")), id(spec.get("mesh")), len(shape)  # any number of tensors can have the same
        if key not in self._cuts:
            self._cuts[key] = self._read_cuts(spec.get("placements"), mesh, len(shape), place)
        cuts, layout = self._cuts[key]
        if (shape, cuts) not in self._strips:
            self._strips[shape, cuts] = self._strips_of(shape, cuts, place)
        sizes, strips = self._strips[shape, cuts]
        self._spend(len(strips) * (2 + len(shape)), place)
        local = self._tensor(state.get("_local_tensor"), place)
        if local.shape != sizes and (0 not in local.shape or 0 not in sizes):
            self._fail(place, "the part of a DTensor has another shape than its placements say", sizes, local.shape)
        if local.dtype != (said := self.checkpoint.tensor_nodes[id(place.node)].dtype):
            self._fail(place, "the part of a DTensor has another dtype than the whole", said, local.dtype)
        found = tuple(self._placement(strip, local, place) for strip in strips)
        dtype = self._dtype(local, place)
        return Part(shape, dtype, layout, found, _device(local), requires_grad)

    def _read_cuts(self, placements: Value, mesh: _Mesh, dims: int, place: Place) -> tuple[tuple[Cut, ...], str]:
        """Return the cuts that `placements` make of a tensor of so many `dims`, and all of its layout in words."""
        words = placements.items if isinstance(placements, Tuple) else []
        if len(words) != len(mesh.sizes):
            self._fail(place, "a DTensor has another number of placements than its mesh has dimensions")
        cuts = [
            self._cut(word, parts, at, dims, place)
            for word, parts, at in zip(words, mesh.sizes, mesh.coordinate, strict=True)
        ]
        layout = ", ".join(
            f"{_said(cut)} over {cut.parts}" + (f" ({name})" if isinstance(name, str) else "")
            for cut, name in zip(cuts, mesh.names, strict=True)
        )
        return tuple(cut for cut in cuts if cut.dim is not None and cut.parts > 1), layout

    def _strips_of(
        self, shape: tuple[int, ...], cuts: tuple[Cut, ...], place: Place
    ) -> tuple[tuple[int, ...], tuple[Strip, ...]]:
        """Return the shape of what this process has of a tensor of `shape`, and its strips."""
        self._spend(steps_of(cuts), place)
        held = held_sizes(shape, cuts)
        sizes = tuple(sum(count for _, count in each) for each in held)
        if prod(map(len, held)) > LIMITS.strips:
            self._refuse(place, "a DTensor is cut into too many strips", None)
        return sizes, () if 0 in sizes else tuple(strips_of(held))

    def _cut(self, word: Value, parts: int, at: int, dims: int, place: Place) -> Cut:
        """What the placement `word` says of one dimension of the mesh, of `parts`, in which this process is `at`."""
        name = word.callable.name if isinstance(word, Call) and isinstance(word.callable, Global) else ""
        if name not in ("Replicate", "Shard", "_StridedShard"):
            what = (
                "is a sum that was never made: it is Partial"
                if name == "Partial"
                else f"has a placement that is not known: {name}"
            )
            self._refuse(place, "a DTensor " + what, "whole: tensor.full_tensor() makes it so")
        fields = self._object(word, place, name)
        if name == "Replicate":
            return Cut(parts, at, None)
        dim, split = fields.get("dim"), fields.get("split_factor", 1)
        if not is_count(dim) or dim >= dims:
            self._fail(place, "a placement cuts a dimension that the tensor has not", f"0 to {dims - 1}", _plain(dim))
        if not is_count(split) or not 0 < split <= max(self.world, 1):
            self._fail(place, "a placement has no sound split_factor", f"1 to {self.world}", _plain(split))
        return Cut(parts, at, dim, split)

    def _mesh(self, node: Value, place: Place) -> _Mesh:
        if id(node) not in self._meshes:
            self._meshes[id(node)] = self._read_mesh(self._object(node, place, "DeviceMesh"), place)
        return self._meshes[id(node)]

    def _read_mesh(self, fields: dict[str, Value], place: Place) -> _Mesh:
        rank = fields.get("_rank", self.rank)
        if rank != self.rank or type(rank) is not int:
            self._fail(place, "the file is of another rank than its name says", self.rank, _plain(rank))
        said = fields.get("_flatten_rank_map", fields.get("_flatten_mesh_list"))
        ranks = self._counts(said, place) or ()
        if said is not None and (self.rank not in ranks or max(ranks) >= self.world):
            self._fail(
                place,
                "the mesh is not one of this run",
                f"ranks below {self.world}, and {self.rank} among them",
                f"{len(ranks):,} ranks up to {max(ranks, default=0):,}",
            )
        sizes = self._mesh_sizes(fields, place)
        coordinate = self._counts(fields.get("_coordinate_on_dim"), place)
        if sizes is None or coordinate is None:
            self._refuse(place, "its DeviceMesh does not say how large it is, or where in it this rank is", None)
        if (
            len(sizes) != len(coordinate)
            or not all(at < size for at, size in zip(coordinate, sizes, strict=True))
            or prod(sizes) > self.world
        ):
            self._fail(place, "a rank is not in its mesh", f"a place in {sizes} of {self.world} ranks", coordinate)
        names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
        words = names.items if isinstance(names, Tuple) and len(names.items) == len(sizes) else [None] * len(sizes)
        return _Mesh(sizes, tuple(words), coordinate)

    def _mesh_sizes(self, fields: dict[str, Value], place: Place) -> tuple[int, ...] | None:
        """The sizes that a DeviceMesh says: by its layout since 2.9, before by the tensor of its ranks."""
        if "_layout" not in fields:
            return self._tensor(fields.get("mesh"), place).shape if "mesh" in fields else None
        layout = self._object(fields["_layout"], place, "_MeshLayout")
        axes = layout.get("axes")
        if isinstance(axes, Tuple) and len(axes.items) <= LIMITS.rank:
            shapes = [self._object(axis, place, "_FlatLayout").get("shape") for axis in axes.items]
        else:
            shape = layout.get("shape")
            shapes = shape.items[: LIMITS.rank] if isinstance(shape, Tuple) else [shape]
        sizes = [(one,) if is_count(one) else self._counts(one, place) for one in shapes]
        return tuple(prod(size) for size in sizes if size is not None) if None not in sizes else None

    # ShardedTensor

    def _sharded_tensor(self, state: Tuple, place: Place, requires_grad: bool) -> Part:
        shards = state.items[0]
        metadata = self._object(state.items[1], place, "ShardedTensorMetadata")
        shape = ints_of(metadata.get("size"))
        if shape is None or not isinstance(shards, List):
            self._fail(place, "a ShardedTensor has no size, or no list of shards")
        properties = metadata.get("tensor_properties")
        states = properties.states() if isinstance(properties, Call) else []
        word = next(iter(states), None)
        said = word.items[0] if isinstance(word, Tuple) and word.items else None
        if not isinstance(said, Global):
            self._fail(place, "a ShardedTensor says no dtype")
        if said.module != "torch" or said.name not in BY_NAME:
            self._refuse(place, "a ShardedTensor has a dtype that is not known to this version", None, said)
        found: list[ChunkPlacement] = []
        device = None
        for shard in islice(shards.elements(), LIMITS.strips):
            self._spend(2 + len(shape), place)
            fields = self._object(shard, place, "Shard")
            where = self._object(fields.get("metadata"), place, "ShardMetadata")
            chunk = Chunk(self._ints(where.get("shard_offsets"), place), self._ints(where.get("shard_sizes"), place))
            local = self._tensor(fields.get("tensor"), place)
            if local.shape != chunk.sizes or local.dtype != said.name or len(chunk.offsets) != len(shape):
                self._fail(
                    place,
                    "a shard is not what its metadata says",
                    f"{said.name} of shape {chunk.sizes}",
                    f"{local.dtype} of shape {local.shape}",
                )
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
            if 0 not in chunk.sizes and not all(map(le, ends, shape)):  # torch puts an empty one behind the end
                got = f"{chunk.sizes} at {chunk.offsets}"
                self._fail(place, "a shard lies outside of its tensor", f"inside {shape}", got)
            device = _device(local)
            if 0 not in chunk.sizes:
                found.append(self._placement(Strip(chunk, (0,) * len(shape)), local, place))
        return Part(shape, BY_NAME[said.name], "ShardedTensor", tuple(found), device, requires_grad)

    # Nodes

    def _placement(self, strip: Strip, local: TensorInfo, place: Place) -> ChunkPlacement:
        """Where the bytes of `strip` are, which `local` has."""
        storage, itemsize = local.storage, self._dtype(local, place).itemsize
        data = storage.data if storage else None
        if not isinstance(data, ByteRange) or not _apart(local) or local.conj or local.neg:
            self._refuse(
                place,
                "the part is stored in a way that torch.save has not for it: deflated, repeated, or to be conjugated",
                "as torch.save does by default",
            )
        sizes = strip.chunk.sizes
        first = local.offset + sum(map(mul, strip.start, local.stride))
        last = first + sum((size - 1) * step for size, step in zip(sizes, local.stride, strict=True))
        of = data.slice(first * itemsize, (last - first + 1) * itemsize)
        assert isinstance(of, ByteRange)
        dense = row_major(sizes)
        stride = tuple(own if size == 1 else step for size, step, own in zip(sizes, local.stride, dense, strict=True))
        return ChunkPlacement(of, strip.chunk.offsets, sizes, stride)

    def _tensor(self, node: Value, place: Place) -> TensorInfo:
        """The plain tensor `node`."""
        info = self.checkpoint.tensor_nodes.get(id(node))
        if info is None:
            reader = TensorReader(self.checkpoint.index.storage_of, self.where)
            reader.visit(Place(place, "/(part)", node, place.depth + 1))
            info = reader.nodes.get(id(node))
        if info is None or info.kind != "strided" or info.storage is None:
            self._refuse(place, "the part is no plain tensor", "as plain DTensors", info.kind if info else None)
        return info

    def _dtype(self, local: TensorInfo, place: Place) -> DType:
        if local.dtype not in BY_NAME:
            self._refuse(place, "the part has a dtype that is not known", None, local.dtype)
        return BY_NAME[local.dtype]

    def _shape_of(self, meta: Value, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape in a TensorMeta; `shape` where there is none."""
        args = args_of(meta) if isinstance(meta, Call) else []
        return ints_of(args[0]) if args else shape

    def _object(self, node: Value, place: Place, name: str) -> dict[str, Value]:
        """The attributes of `node`, an object of a class of torch.distributed called `name`."""
        if id(node) not in self._fields:
            cls = node.callable if isinstance(node, Call) else None
            if not isinstance(node, Call) or not isinstance(cls, Global):
                self._fail(place, "an object of another class", name)
            if cls.name != name or not cls.module.startswith(_HERE):
                self._refuse(place, f"a class is not known to this version in place of {name}", None, cls)
            states = node.states()
            slots = states[0].items if states and isinstance(states[0], Tuple) else states  # a class with __slots__
            self._fields[id(node)] = {}
            for state in slots[:2]:
                if state is not None:
                    self._fields[id(node)] |= self._items(state, place)
        return self._fields[id(node)]

    def _items(self, node: Value, place: Place) -> dict[str, Value]:
        """The items of `node`, a small dict of texts."""
        if not isinstance(node, Dict) or sum(1 + len(effect.values) for effect in node.effects) > LIMITS.metadata_state:
            self._refuse(
                place, "the state of a tensor that is spread over processes is not known to this version", None
            )
        return {key: effect.values[i + 1] for effect, i in node.pairs() if isinstance(key := effect.values[i], str)}

    def _spend(self, steps: int, place: Place) -> None:
        """Count `steps` of work; raise LimitError if the file asks for more than its size justifies."""
        self._left -= steps
        if self._left < 0:
            raise LimitError(
                f"at {place.path}: the tensors are split into too many pieces for a file of this size", where=self.where
            )

    def _counts(self, node: Value, place: Place) -> tuple[int, ...] | None:
        """The counts in `node`, a tuple or a list; None where it has others, or more than there are ranks."""
        if isinstance(node, List):
            items = [*islice(node.elements(), LIMITS.ranks + 1)]
        else:
            items = node.items if isinstance(node, Tuple) else [None]
        self._spend(len(items), place)
        counts = tuple(item for item in items if is_count(item)) if len(items) <= LIMITS.ranks else ()
        return counts if len(counts) == len(items) else None

    def _ints(self, node: Value, place: Place) -> tuple[int, ...]:
        counts = self._counts(node, place)
        if counts is None or len(counts) > LIMITS.rank:
            self._fail(place, "a shard has no sound offsets and sizes")
        return counts

    def _fail(self, place: Place, what: str, expected: object = None, got: object = None) -> NoReturn:
        raise MalformedError(f"at {place.path}: {what}", where=self.where, expected=expected, got=got)

    def _refuse(self, place: Place, what: str, needed: str | None, got: object = None) -> NoReturn:
        raise UnsupportedError(
            f"at {place.path}: {what}", where=self.where, got=got, hint=_AGAIN + needed if needed else _WHOLE
        )


def _said(cut: Cut) -> str:
    """`cut`, as torch writes it."""
    if cut.dim is None:
        return "Replicate"
    return f"Shard({cut.dim})" if cut.split == 1 else f"_StridedShard({cut.dim}, split_factor={cut.split})"


def _plain(value: Value) -> object:
    return value if isinstance(value, (int, str, float)) else type_of(value).__name__


def _device(info: TensorInfo) -> str | None:
    return info.storage.device if info.storage else None


def _apart(info: TensorInfo) -> bool:
    """Whether no two elements of `info` are the same bytes: a small file could ask for any number of copies."""
    end = 1
    for step, size in sorted((step, size) for size, step in zip(info.shape, info.stride, strict=True) if size > 1):
        if step < end:
            return False
        end += step * (size - 1)
    return True
