"""Read the slice of a tensor that one process saved: the state of a DTensor or a ShardedTensor in the pickle of a rank.

Sources, torch 2.13 and as far back as 2.1: ``torch/distributed/tensor/_api.py`` and ``_dtensor_spec.py`` (a DTensor's
state is ``{_local_tensor, _spec}``, and the spec has the mesh and the placements), ``torch/distributed/device_mesh.py``
and ``_mesh_layout.py``, ``torch/distributed/_shard/sharded_tensor/api.py`` (the state is ``(local shards, metadata,
...)``, and each shard has its position).
"""

from __future__ import annotations

from itertools import islice
from math import prod
from operator import le, mul
from typing import NamedTuple, NoReturn

from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.blocks import sliced
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import FROM_TYPE, PARAMETER, TensorReader, ints_of, is_spread
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.dtypes import BY_NAME, DType
from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.formats.distributed.chunks import Chunk, Cut, Strip, held_sizes, is_apart, steps_of, strips_of
from ckptconv.formats.distributed.metadata import plain
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Global, List, Tuple, Value, args_of, is_count
from ckptconv.pickles.paths import Place
from ckptconv.work import CHARACTERS, work

_HERE = "torch.distributed."
_AGAIN = "save it again in the run, "
_WHOLE = (
    _AGAIN + "whole: torch.distributed.checkpoint.state_dict.get_model_state_dict(model,"
    " options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


class Part(NamedTuple):
    """The slice of a tensor that one process has.

    Attributes:
        shape: The shape of the complete tensor.
        dtype: The dtype.
        layout: A description of how the tensor is distributed.
        placements: The positions of the slice in the tensor, with its bytes. Empty if the process has no elements.
        device: The device of the slice, or None if the process has none.
        requires_grad: Whether the tensor requires a gradient.
    """

    shape: tuple[int, ...]
    dtype: DType
    layout: str
    placements: tuple[ChunkPlacement, ...]
    device: str | None
    requires_grad: bool

    @property
    def alike(self) -> tuple[object, ...]:
        """The properties that must be equal in all processes."""
        return self.shape, self.dtype.name, self.layout, self.requires_grad


def spread_call(node: Value) -> Call | None:
    """Return the call that rebuilds a distributed tensor, if `node` is such a tensor or a parameter that wraps one.

    Return None for other nodes.
    """
    while isinstance(node, Call) and str(node.callable) in PARAMETER and args_of(node):
        node = args_of(node)[0]
    if not isinstance(node, Call):
        return None
    of_type = str(node.callable) in FROM_TYPE and len(args_of(node)) > 3
    return node if is_spread(args_of(node)[1] if of_type else node.callable) else None


#: For each dimension of a mesh of processes: its size, the position of this process in it, and its name, if it has one.
_Mesh = list[tuple[int, int, object]]


class PartReader:
    """A reader of the slices in the file of one `rank`. The run had `world` ranks.

    Any number of tensors can share a spec, a mesh and placements, so these are read once.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self.checkpoint = checkpoint
        self.rank, self.world = rank, world
        self.where = str(checkpoint.source.path)
        self._place = checkpoint.root  # of the part that is being read
        self._parts: dict[int, Part | None] = {}
        self._fields: dict[int, dict[str, Value]] = {}
        self._meshes: dict[int, _Mesh] = {}
        self._cuts: dict[tuple[int, int, int], tuple[tuple[Cut, ...], str]] = {}
        self._strips: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[Strip, ...]]] = {}
        self._left = LIMITS.spread_steps * checkpoint.graph.opcodes

    def part(self, place: Place) -> Part | None:
        """Return the slice of the distributed tensor at `place`, or None if another object is there.

        Raises MalformedError, UnsupportedError, LimitError.
        """
        key = id(place.node)
        if key not in self._parts:
            call = spread_call(place.node)
            self._place = place
            self._parts[key] = self._read(call) if call else None
        return self._parts[key]

    def _read(self, call: Call) -> Part:
        info = self.checkpoint.tensor_nodes.get(id(self._place.node))
        given = args_of(call)[3] if str(call.callable) in FROM_TYPE else None
        state = next(iter(call.states()), given)
        if isinstance(state, Tuple) and len(state.items) > 2:
            return self._sharded_tensor(state, bool(info and info.requires_grad))
        fields = self._items(state.items[-1] if isinstance(state, Tuple) and state.items else state)
        if info is None:
            self._fail("a DTensor has no shape")
        return self._dtensor(fields, info)

    # DTensor

    def _dtensor(self, state: dict[str, Value], info: TensorInfo) -> Part:
        """Return the slice of the DTensor `info`, whose `state` has the spec and the local tensor."""
        shape = info.shape
        spec = self._object(state.get("_spec"), "DTensorSpec")
        mesh = self._mesh(spec.get("mesh"))
        meta = spec.get("tensor_meta")
        args = args_of(meta) if isinstance(meta, Call) else []
        if args and ints_of(args[0]) != shape:
            self._fail("a DTensor has two different shapes", shape, ints_of(args[0]))
        key = id(spec.get("placements")), id(spec.get("mesh")), len(shape)
        if key not in self._cuts:
            self._cuts[key] = self._read_cuts(spec.get("placements"), mesh, len(shape))
        cuts, layout = self._cuts[key]
        if (shape, cuts) not in self._strips:
            self._spend(steps_of(cuts))
            held = held_sizes(shape, cuts)
            held_shape = tuple(sum(count for _, count in stretches) for stretches in held)
            if prod(map(len, held)) > LIMITS.strips:
                self._refuse("a DTensor is cut into too many strips")
            self._strips[shape, cuts] = held_shape, () if 0 in held_shape else tuple(strips_of(held))
        sizes, strips = self._strips[shape, cuts]
        self._spend(len(strips) * (2 + len(shape)))
        local = self._tensor(state.get("_local_tensor"))
        if local.shape != sizes and (0 not in local.shape or 0 not in sizes):
            self._fail("the shape of a DTensor's part does not match its placements", sizes, local.shape)
        if local.dtype != info.dtype:
            self._fail("the part of a DTensor has a different dtype from the whole", info.dtype, local.dtype)
        placements = tuple(self._placement(strip, local) for strip in strips)
        return Part(shape, self._dtype(local), layout, placements, _device(local), info.requires_grad)

    def _read_cuts(self, placements: Value, mesh: _Mesh, rank: int) -> tuple[tuple[Cut, ...], str]:
        """Return the cuts that `placements` make of a tensor with `rank` dimensions, and a description of the layout.

        The description also has the dimensions of `mesh` that cut nothing. Raises UnsupportedError for a Partial
        placement, and MalformedError if a placement does not fit the tensor.
        """
        words = placements.items if isinstance(placements, Tuple) else []
        if len(words) != len(mesh):
            self._fail("a DTensor does not have one placement for each dimension of its mesh")
        cuts, layout = [], []
        for word, (parts, at, name) in zip(words, mesh, strict=True):
            kind = word.callable.name if isinstance(word, Call) and isinstance(word.callable, Global) else ""
            if kind not in ("Replicate", "Shard", "_StridedShard"):
                what = f"has a placement that is not known: {kind}"
                if kind == "Partial":
                    what = "is Partial: its sum was never computed"
                self._refuse(f"a DTensor {what}", needed="complete: tensor.full_tensor()")
            fields = self._object(word, kind)
            description = kind
            if kind != "Replicate":
                dim, split = fields.get("dim"), fields.get("split_factor", 1)
                if not is_count(dim) or dim >= rank:
                    self._fail(
                        "a placement cuts a dimension that the tensor does not have", f"0 to {rank - 1}", plain(dim)
                    )
                if not is_count(split) or not 0 < split <= max(self.world, 1):
                    self._fail("a placement has no valid split_factor", f"1 to {self.world}", plain(split))
                description = f"Shard({dim})" if split == 1 else f"_StridedShard({dim}, split_factor={split})"
                if parts > 1:
                    cuts.append(Cut(parts, at, dim, split))
            layout.append(f"{description} over {parts}" + (f" ({name})" if isinstance(name, str) else ""))
            work().charge(1 + len(layout[-1]) // CHARACTERS)  # the name of a mesh can be long, and in many layouts
        return tuple(cuts), ", ".join(layout)

    def _mesh(self, node: Value) -> _Mesh:
        """Return for each dimension of the mesh `node` its size, the position of this process, and its name.

        Raises MalformedError if this rank is not in the mesh, and UnsupportedError if the mesh lacks these values.
        """
        if id(node) in self._meshes:
            return self._meshes[id(node)]
        fields = self._object(node, "DeviceMesh")
        rank = fields.get("_rank", self.rank)
        if rank != self.rank or type(rank) is not int:
            self._fail("the rank in the file differs from the rank in its name", self.rank, plain(rank))
        listed = fields.get("_flatten_rank_map", fields.get("_flatten_mesh_list"))
        ranks = self._counts(listed) or ()
        if listed is not None and (self.rank not in ranks or max(ranks) >= self.world):
            self._fail(
                "the mesh is not from this run",
                f"ranks below {self.world}, and {self.rank} among them",
                f"{len(ranks):,} ranks up to {max(ranks, default=0):,}",
            )
        sizes: tuple[int, ...] | None = None
        if "_layout" in fields:  # since torch 2.9
            layout = self._object(fields["_layout"], "_MeshLayout")
            axes = layout.get("axes")
            if isinstance(axes, Tuple) and len(axes.items) <= LIMITS.rank:
                shapes = [self._object(axis, "_FlatLayout").get("shape") for axis in axes.items]
            else:
                shape = layout.get("shape")
                shapes = shape.items[: LIMITS.rank] if isinstance(shape, Tuple) else [shape]
            counts = [(one,) if is_count(one) else self._counts(one) for one in shapes]
            sizes = tuple(prod(size) for size in counts if size is not None) if None not in counts else None
        elif "mesh" in fields:  # the tensor of its ranks
            sizes = self._tensor(fields["mesh"]).shape
        coordinate = self._counts(fields.get("_coordinate_on_dim"))
        if sizes is None or coordinate is None:
            self._refuse("its DeviceMesh does not record its size, or the place of this rank in it")
        if (
            len(sizes) != len(coordinate)
            or not all(at < size for at, size in zip(coordinate, sizes, strict=True))
            or prod(sizes) > self.world
        ):
            self._fail("a rank is not in its mesh", f"a place in {sizes} of {self.world} ranks", coordinate)
        names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
        words = names.items if isinstance(names, Tuple) and len(names.items) == len(sizes) else [None] * len(sizes)
        self._meshes[id(node)] = [*zip(sizes, coordinate, words, strict=True)]
        return self._meshes[id(node)]

    # ShardedTensor

    def _sharded_tensor(self, state: Tuple, requires_grad: bool) -> Part:
        shards = state.items[0]
        metadata = self._object(state.items[1], "ShardedTensorMetadata")
        shape = ints_of(metadata.get("size"))
        if shape is None or not isinstance(shards, List):
            self._fail("a ShardedTensor has no size, or no list of shards")
        properties = metadata.get("tensor_properties")
        word = next(iter(properties.states()), None) if isinstance(properties, Call) else None
        dtype = word.items[0] if isinstance(word, Tuple) and word.items else None
        if not isinstance(dtype, Global):
            self._fail("a ShardedTensor has no dtype")
        if dtype.module != "torch" or dtype.name not in BY_NAME:
            self._refuse("a ShardedTensor has a dtype that is not known to this version", dtype)
        placements: list[ChunkPlacement] = []
        device = None
        for shard in islice(shards.elements(), LIMITS.strips):
            self._spend(2 + len(shape))
            fields = self._object(shard, "Shard")
            position = self._object(fields.get("metadata"), "ShardMetadata")
            offsets, sizes = (self._counts(position.get(name)) for name in ("shard_offsets", "shard_sizes"))
            if offsets is None or sizes is None or max(len(offsets), len(sizes)) > LIMITS.rank:
                self._fail("a shard has no valid offsets and sizes")
            local = self._tensor(fields.get("tensor"))
            if local.shape != sizes or local.dtype != dtype.name or not len(offsets) == len(sizes) == len(shape):
                self._fail(
                    "a shard does not match its metadata",
                    f"{dtype.name} of shape {sizes}",
                    f"{local.dtype} of shape {local.shape}",
                )
            device = _device(local)
            if 0 in sizes:  # torch puts an empty shard after the end
                continue
            if not all(map(le, map(sum, zip(offsets, sizes, strict=True)), shape)):
                self._fail("a shard lies outside of its tensor", f"inside {shape}", f"{sizes} at {offsets}")
            placements.append(self._placement(Strip(Chunk(offsets, sizes), (0,) * len(shape)), local))
        return Part(shape, BY_NAME[dtype.name], "ShardedTensor", tuple(placements), device, requires_grad)

    # Nodes

    def _placement(self, strip: Strip, local: TensorInfo) -> ChunkPlacement:
        """Return the position of `strip` in the complete tensor, with its bytes in the tensor `local`.

        Raises UnsupportedError if the bytes are deflated, overlap, or are lazily conjugated or negated.
        """
        storage, itemsize = local.storage, self._dtype(local).itemsize
        data = storage.data if storage else None
        if not isinstance(data, ByteRange) or not is_apart(local) or local.conj or local.neg:
            self._refuse(
                "the part is not stored as torch.save stores it: it is compressed, repeated, or to be conjugated",
                needed="as torch.save does by default",
            )
        first = local.offset + sum(map(mul, strip.start, local.stride))
        stored = ChunkPlacement(data, strip.chunk.offsets, local.shape, local.stride)
        return sliced(stored, first, strip.chunk.sizes, itemsize)

    def _tensor(self, node: Value) -> TensorInfo:
        """Return the description of the plain tensor `node`.

        Raises UnsupportedError if it is another kind of tensor or object.
        """
        info = self.checkpoint.tensor_nodes.get(id(node))
        if info is None:
            reader = TensorReader(self.checkpoint.index.storage_of, self.where)
            reader.visit(Place(self._place, "/(part)", node, self._place.depth + 1))
            info = reader.nodes.get(id(node))
        if info is None or info.kind != "strided" or info.storage is None:
            self._refuse("the part is not a plain tensor", info.kind if info else None, needed="as plain DTensors")
        return info

    def _dtype(self, local: TensorInfo) -> DType:
        if local.dtype not in BY_NAME:
            self._refuse("the part has a dtype that is not known", local.dtype)
        return BY_NAME[local.dtype]

    def _object(self, node: Value, name: str) -> dict[str, Value]:
        """Return the attributes of `node`, an object of the class `name` in torch.distributed.

        Raises MalformedError if it is not an object, and UnsupportedError if it has another class.
        """
        if id(node) not in self._fields:
            cls = node.callable if isinstance(node, Call) else None
            if not isinstance(node, Call) or not isinstance(cls, Global):
                self._fail("an object of another class", name)
            if cls.name != name or not cls.module.startswith(_HERE):
                self._refuse(f"this version does not know a class that is used for {name}", cls)
            states = node.states()
            slots = states[0].items if states and isinstance(states[0], Tuple) else states  # a class with __slots__
            self._fields[id(node)] = {}
            for state in slots[:2]:
                if state is not None:
                    self._fields[id(node)] |= self._items(state)
        return self._fields[id(node)]

    def _items(self, node: Value) -> dict[str, Value]:
        """Return the items of the small dict `node` whose keys are strings.

        Raises UnsupportedError if it is not one.
        """
        if not isinstance(node, Dict) or sum(1 + len(effect.values) for effect in node.effects) > LIMITS.metadata_state:
            self._refuse("the state of a tensor that is spread over processes is not known to this version")
        return {key: effect.values[i + 1] for effect, i in node.pairs() if isinstance(key := effect.values[i], str)}

    def _spend(self, steps: int) -> None:
        """Count `steps` of work. Raises LimitError if the file requires more work than its size justifies."""
        self._left -= steps
        if self._left < 0:
            raise LimitError(
                f"at {self._place.path}: the tensors are split into too many pieces for a file of this size",
                where=self.where,
            )

    def _counts(self, node: Value) -> tuple[int, ...] | None:
        """Return the integers in `node`, a tuple or a list. Return None if it has other elements or too many."""
        if isinstance(node, List):
            items = [*islice(node.elements(), LIMITS.ranks + 1)]
        else:
            items = node.items if isinstance(node, Tuple) else [None]
        self._spend(len(items))
        counts = tuple(item for item in items if is_count(item)) if len(items) <= LIMITS.ranks else ()
        return counts if len(counts) == len(items) else None

    def _fail(self, what: str, expected: object = None, got: object = None) -> NoReturn:
        raise MalformedError(f"at {self._place.path}: {what}", where=self.where, expected=expected, got=got)

    def _refuse(self, what: str, got: object = None, *, needed: str | None = None) -> NoReturn:
        """Raise UnsupportedError. `needed` says how to save the tensor again: by default, as a complete tensor."""
        hint = _AGAIN + needed if needed else _WHOLE
        raise UnsupportedError(f"at {self._place.path}: {what}", where=self.where, got=got, hint=hint)


def _device(info: TensorInfo) -> str | None:
    return info.storage.device if info.storage else None
