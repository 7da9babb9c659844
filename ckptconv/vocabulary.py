"""torch's words over the graph: persistent ids are storages, calls of ``_rebuild_*`` are tensors.

Sources, torch 2.13: ``torch/_utils.py`` (the rebuild functions and their arguments), ``torch/_tensor.py`` (``_reduce_ex_internal``, which writes them) and
``torch/serialization.py`` (``persistent_id``). Knows no container: what a storage's key stands for is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TypeGuard

from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, BY_WORD, DType
from ckptconv.errors import LimitError, MalformedError
from ckptconv.graph import Call, Dict, Global, Graph, Node, PersistentId, Py2String, Tuple, Value, is_global, walk
from ckptconv.limits import LIMITS
from ckptconv.model import Checkpoint, DeviceArgument, Inflate, Place, Reference, Span, Storage, TensorInfo
from ckptconv.ordering import forget_order
from ckptconv.places import find_places
from ckptconv.sources import Readable

__all__ = ["OtherDType", "attributes", "checkpoint_of", "every_place", "places_in", "restrict", "torch_device"]

_STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")
#: The position of the device among the arguments of those rebuild functions that have one.
_DEVICE_ARGUMENT = {
    "torch._utils._rebuild_device_tensor_from_numpy": 2,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": 2,
    "torch._utils._rebuild_xla_tensor": 2,
    "torch._utils._rebuild_wrapper_subclass": 6,
}
_FROM_TYPE = (
    "torch._tensor._rebuild_from_type_v2",
    "torch.tensor._rebuild_from_type_v2",
    "torch._tensor._rebuild_from_type",
    "torch.tensor._rebuild_from_type",
)
_WITH_DEVICE = frozenset((*_DEVICE_ARGUMENT, *_FROM_TYPE))
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_STRIDED = (
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor",
)
_REBUILDERS = frozenset(
    {
        *_DEVICE_ARGUMENT, *_FROM_TYPE, *_PARAMETER, *_STRIDED,
        "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor", "torch._utils._rebuild_meta_tensor_no_storage",
    }
)  # fmt: skip


def checkpoint_of(
    name: str,
    source: Readable,
    graph: Graph,
    container: object,
    record: Callable[[str], Span | Inflate | None],
    where: str,
) -> Checkpoint:
    """The checkpoint that GRAPH describes, in the format NAME: its storages, tensors and places. Raises MalformedError, LimitError.

    RECORD gives the bytes that a storage's key stands for; WHERE is for errors.
    """
    storages: dict[str, Storage] = {}
    references = [Reference(node, _storage(node, storages, record, where)) for node in graph.references]
    arguments = [argument for call in graph.calls for argument in _device_arguments(call)]
    places, tensors, nodes = _index(Place(None, "", graph.root, 0), references, where)
    return Checkpoint(name, source, graph, container, storages, references, arguments, places, tensors, nodes)


def restrict(checkpoint: Checkpoint, root: Place) -> None:
    """Make what stands at ROOT the whole checkpoint. Paths stay those of the source."""
    graph = checkpoint.graph
    graph.root = root.node
    reached = {id(node) for node in walk([*graph.discarded, root.node])}
    graph.globals = [node for node in graph.globals if id(node) in reached]
    graph.calls = [node for node in graph.calls if id(node) in reached]
    graph.references = [node for node in graph.references if id(node) in reached]
    forget_order(graph)
    checkpoint.references = [each for each in checkpoint.references if id(each.node) in reached]
    checkpoint.storages = {each.storage.key: each.storage for each in checkpoint.references}
    checkpoint.device_arguments = [each for each in checkpoint.device_arguments if id(each.call) in reached]
    checkpoint.places, checkpoint.tensors, checkpoint.tensor_nodes = _index(
        root, checkpoint.references, str(checkpoint.source.path)
    )


def _index(
    root: Place, references: list[Reference], where: str
) -> tuple[list[Place], dict[str, TensorInfo], dict[int, TensorInfo]]:
    """The places from ROOT on, and the tensors by path and by node."""
    reader = _TensorReader({id(each.node): each.storage for each in references}, where)
    places = []
    for place in find_places(root, _leaf(reader.nodes), where):
        if isinstance(place.node, Node):  # atoms are many, and only the summary asks for them
            places.append(place)
            reader.visit(place)
    return places, reader.tensors, reader.nodes


class OtherDType(Global):
    """A dtype that safetensors has and torch has not. No pickle can say it: the parser makes plain globals."""

    __slots__ = ()


def every_place(checkpoint: Checkpoint) -> list[Place]:
    """The places of CHECKPOINT, those of atoms too."""
    return list(find_places(checkpoint.root, _leaf(checkpoint.tensor_nodes), str(checkpoint.source.path)))


def attributes(checkpoint: Checkpoint, tensors: Iterable[Value]) -> list[Place]:
    """What stands in TENSORS as their attributes."""
    having = {id(node) for node in tensors if isinstance(node, Call) and _leaf(checkpoint.tensor_nodes)(node)}
    if not having:
        return []
    return [each for each in every_place(checkpoint) if each.parent is not None and id(each.parent.node) in having]


def places_in(checkpoint: Checkpoint, opened: Container[int]) -> Iterator[Place]:
    """The places right inside the nodes OPENED (by id), from the root on; the opened nodes themselves are not among them."""

    def leaf(node: Node) -> list[Value] | None:
        return None if id(node) in opened else []

    for place in find_places(checkpoint.root, leaf, str(checkpoint.source.path)):
        if id(place.node) not in opened:
            yield place


def _leaf(tensors: Mapping[int, TensorInfo]) -> Callable[[Node], list[Value] | None]:
    """For the walk: TENSORS (by the id of their node) and torch's small words are leaves; a tensor's attributes stand in it."""

    def leaf(node: Node) -> list[Value] | None:
        if not isinstance(node, Call) or id(node) not in tensors:
            return [] if _is_word(node) else None
        function, args = str(node.callable), _args(node)
        has_state = function in _FROM_TYPE or function.endswith("_with_state")
        built = [effect.values[0] for effect in node.effects if effect.opcode == "BUILD"]
        return args[3:4] + built if has_state else built

    return leaf


# Storages


def _text(value: Value) -> str | None:
    """A string, in Python 3's way or in Python 2's."""
    if isinstance(value, Py2String):
        return value.data.decode("ascii", "replace")
    return value if isinstance(value, str) else None


def _storage(
    node: PersistentId, storages: dict[str, Storage], record: Callable[[str], Span | Inflate | None], where: str
) -> Storage:
    """The storage that NODE names; STORAGES gains it."""
    expected = "('storage', class, key, location, elements)"
    items = node.id.items if isinstance(node.id, Tuple) else []
    if len(items) != 5 or _text(items[0]) != "storage":
        raise MalformedError(
            "a persistent id names no storage", where=where, expected=expected, got=f"{len(items)} parts"
        )
    cls, key, tag, numel = items[1], _text(items[2]), _text(items[3]), items[4]
    if not isinstance(cls, Global) or cls.module not in _STORAGE_MODULES or cls.name not in BY_STORAGE_CLASS:
        raise MalformedError(
            "a persistent id names no storage class",
            where=where,
            expected=expected,
            got=cls if isinstance(cls, Global) else type(cls).__name__,
        )
    if key is None or not tag or not _is_count(numel):
        raise MalformedError("a persistent id has parts of wrong types", where=where, expected=expected)
    nbytes = numel * BY_STORAGE_CLASS[cls.name].itemsize
    known = storages.get(key)
    if known is None:
        data = record(key)
        if data is None:
            raise MalformedError("the file has no such storage", where=where, expected=f"a record data/{key}")
        if data.length != nbytes:
            raise MalformedError(
                f"storage {key} has another size than its record",
                where=where,
                expected=f"{nbytes} bytes",
                got=data.length,
            )
        known = storages[key] = Storage(key, tag, nbytes, data)
    elif (known.nbytes, known.device) != (nbytes, tag):
        raise MalformedError(
            f"storage {key} is described in two ways", where=where,
            expected=f"{known.nbytes} bytes on {known.device}", got=f"{nbytes} bytes on {tag}",
        )  # fmt: skip
    return known


def _is_count(value: Value) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


# Devices as arguments


def torch_device(node: Value) -> str | None:
    """The device that NODE says: a call of ``torch.device``, or a string."""
    if isinstance(node, Call) and is_global(node.callable, "torch.device") and isinstance(node.args, Tuple):
        parts = node.args.items
        if parts and all(isinstance(part, str) or (type(part) is int and 0 <= part < 1000) for part in parts):
            return ":".join(str(part) for part in parts if isinstance(part, (str, int)))
        return None
    return node if isinstance(node, str) else None


def _device_arguments(call: Call) -> list[DeviceArgument]:
    function, args = call.callable, call.args
    name = str(function) if isinstance(function, Global) else ""
    if name not in _WITH_DEVICE:
        return []
    nested = name in _FROM_TYPE
    if nested and isinstance(args, Tuple) and len(args.items) >= 3:
        function, args = args.items[0], args.items[2]
    index = _DEVICE_ARGUMENT.get(str(function)) if isinstance(function, Global) else None
    if index is None or not isinstance(args, Tuple) or len(args.items) <= index:
        return []
    device = torch_device(args.items[index])
    return [] if device is None else [DeviceArgument(call, nested, index, device)]


# Tensors


class _Bad(Exception):
    """The arguments of a rebuild call do not describe a tensor."""

    def __init__(self, what: str, expected: object = None, got: object = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.got = what, expected, got


class _TensorReader:
    """Reads rebuild calls; remembers the tensors, each under every path at which it stands."""

    def __init__(self, storages: dict[int, Storage], where: str) -> None:
        self.storages = storages
        self.where = where
        self.nodes: dict[int, TensorInfo] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.same: dict[tuple[object, ...], str] = {}

    def visit(self, place: Place) -> None:
        """Remember the tensor at PLACE, if there is one."""
        node = place.node
        function = _rebuilder(node)
        if not isinstance(node, Call) or function is None:
            return
        info = self.nodes.get(id(node))
        try:
            if info is None:
                info = self.read(function, _args(node))
                if any(effect.opcode != "BUILD" for effect in node.effects):
                    raise _Bad("items are set on a tensor")
        except LimitError as error:
            error.where = f"{self.where}: at {place.path}"
            raise
        except _Bad as bad:
            raise MalformedError(
                f"at {place.path}: {bad.what}", where=self.where, expected=bad.expected, got=bad.got
            ) from None
        if info is None:
            return
        if id(node) in self.nodes:
            info = replace(info)  # the same tensor in another place
        info.path, info.name = place.path, place.key
        info.tied_to = self.first_of(info, node, info.path)
        self.nodes.setdefault(id(node), info)
        self.tensors[info.path] = info

    def first_of(self, info: TensorInfo, node: Node, path: str) -> str | None:
        """The path of an earlier tensor that is the same: the same storage, offset, shape, stride and dtype."""
        key = info.view if info.storage is not None and info.nbytes else (id(node),)
        first = self.same.setdefault(key, path)
        return None if first == path else first

    def read(self, function: str, args: list[Value]) -> TensorInfo | None:
        """The tensor that FUNCTION makes of ARGS; None where something inside it is unknown."""
        if function in _STRIDED:
            return self.strided(function, args)
        if function in _PARAMETER:
            inner = self.inner(args, 0)
            return inner and replace(inner, requires_grad=_at(args, 1) is True, is_parameter=True)
        if function in _FROM_TYPE:
            name, inside = _at(args, 0), _at(args, 2)
            if not is_global(name, *_REBUILDERS) or not isinstance(inside, Tuple):
                return None
            return self.read(str(name), inside.items)
        if function == "torch._utils._rebuild_meta_tensor_no_storage":
            return self.described("meta", args, 0, 1, 2, "meta", 3)
        if function == "torch._utils._rebuild_wrapper_subclass":
            return self.described("wrapper", args, 1, 2, 3, torch_device(_at(args, 6)) or "unknown", 7)
        if function == "torch._utils._rebuild_sparse_tensor":
            return self.sparse(args)
        inner = self.inner(args, 0)
        if function == "torch._utils._rebuild_nested_tensor":
            return inner and replace(inner, kind="nested")
        return self.from_array(args, inner)

    def inner(self, args: list[Value], index: int) -> TensorInfo | None:
        node = _at(args, index)
        function = _rebuilder(node)
        if not isinstance(node, Call) or function is None:
            return None
        return self.nodes.get(id(node)) or self.read(function, _args(node))

    def strided(self, function: str, args: list[Value]) -> TensorInfo | None:
        """``(storage, storage_offset, size, stride, ...)``, within the storage's bounds."""
        node = _at(args, 0)
        storage = self.storages.get(id(node))
        if storage is None or not isinstance(node, PersistentId):
            return None
        assert isinstance(node.id, Tuple) and isinstance(node.id.items[1], Global)
        dtype = BY_STORAGE_CLASS[node.id.items[1].name]
        metadata = _at(args, 6)
        if function.endswith("_v3"):
            dtype, metadata = _dtype(_at(args, 6)), _at(args, 7)
        offset = _count(_at(args, 1))
        shape, stride = _sizes(_at(args, 2), _at(args, 3))
        quantized = function.endswith("_rebuild_qtensor")
        _check_bounds(storage, dtype, offset, shape, stride)
        return TensorInfo(
            "", None, "quantized" if quantized else "strided", dtype.name, shape, stride, offset, storage.device,
            dtype.bytes_of(prod(shape)), storage, _at(args, 5 if quantized else 4) is True, False, _is_contiguous(shape, stride),
            conj=_has_bit(metadata, "conj"), neg=_has_bit(metadata, "neg"),
        )  # fmt: skip

    def described(
        self, kind: str, args: list[Value], dtype: int, size: int, stride: int, device: str, requires_grad: int
    ) -> TensorInfo:
        """A tensor without a storage of its own, which its arguments describe."""
        shape, strides = _sizes(_at(args, size), _at(args, stride))
        name = _dtype(_at(args, dtype)).name
        return TensorInfo(
            "", None, kind, name, shape, strides, 0, device, 0, None,
            _at(args, requires_grad) is True, False, _is_contiguous(shape, strides),
        )  # fmt: skip

    def sparse(self, args: list[Value]) -> TensorInfo | None:
        """``(layout, (indices, values, size, ...))`` or ``(layout, (compressed, plain, values, size))``."""
        data = _at(args, 1)
        parts = data.items if isinstance(data, Tuple) else []
        tensors = [self.inner(parts, i) for i in range(len(parts))]
        inner = [tensor for tensor in tensors if tensor]
        sizes = [_ints(part) for part, tensor in zip(parts, tensors, strict=True) if tensor is None]
        shape = next((size for size in sizes if size is not None), None)
        if len(inner) < 2 or shape is None:
            return None
        return replace(
            inner[-1], kind="sparse", shape=shape, stride=(), offset=0, storage=None, contiguous=False,
            nbytes=sum(tensor.nbytes for tensor in inner),
        )  # fmt: skip

    def from_array(self, args: list[Value], inner: TensorInfo | None) -> TensorInfo:
        """``(data, dtype, device, requires_grad)``, where data is a CPU tensor or a numpy array."""
        device = torch_device(_at(args, 2)) or "unknown"
        shape, nbytes = (inner.shape, inner.nbytes) if inner else ((), 0)
        name = _dtype(_at(args, 1)).name
        return TensorInfo(
            "", None, "device", name, shape, (), 0, device, nbytes, None, _at(args, 3) is True, False, True
        )


def _rebuilder(node: Value) -> str | None:
    """The name of the rebuild function that NODE calls, if it calls one."""
    if isinstance(node, Call) and isinstance(node.callable, Global) and isinstance(node.args, Tuple):
        name = f"{node.callable.module}.{node.callable.name}"
        return name if name in _REBUILDERS else None
    return None


def _is_word(node: Node) -> bool:
    """Whether NODE is one of torch's small words, which nothing of interest stands in."""
    return isinstance(node, Call) and is_global(
        node.callable, "torch.device", "torch.Size", "_codecs.encode", "torch.serialization._get_layout"
    )


def _args(call: Call) -> list[Value]:
    return call.args.items if isinstance(call.args, Tuple) else []


def _at(args: list[Value], index: int) -> Value:
    if index < len(args):
        return args[index]
    return None


def _dtype(node: Value) -> DType:
    if isinstance(node, Global) and node.module == "torch" and node.name in BY_NAME:
        return BY_NAME[node.name]
    if isinstance(node, OtherDType):
        return BY_WORD[node.name]
    raise _Bad("a tensor has no dtype that is known", got=node if isinstance(node, Global) else type(node).__name__)


def _has_bit(metadata: Value, name: str) -> bool:
    """Whether a rebuild call's last argument, a dict, sets one of torch's lazy bits (``torch._utils.set_tensor_metadata``)."""
    if not isinstance(metadata, Dict):
        return False
    values = [effect.values[i + 1] for effect, i in metadata.pairs() if effect.values[i] == name]
    return bool(values) and values[-1] is True


def _count(value: Value) -> int:
    if type(value) is int and 0 <= value < 1 << 62:
        return value
    raise _Bad("a tensor's offset is no count of elements", got=value if type(value) is int else type(value).__name__)


def _ints(node: Value) -> tuple[int, ...] | None:
    """Sizes: a tuple, or a call of ``torch.Size`` with one."""
    if isinstance(node, Call) and is_global(node.callable, "torch.Size"):
        node = _at(_args(node), 0)
    if not isinstance(node, Tuple) or not all(_is_count(item) for item in node.items):
        return None
    return tuple(item for item in node.items if isinstance(item, int))


def _sizes(size: Value, stride: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, strides = _ints(size), _ints(stride)
    if shape is None or strides is None or len(shape) != len(strides):
        raise _Bad("a tensor's shape and stride do not fit", "two tuples of as many counts")
    if len(shape) > LIMITS.rank:
        raise LimitError("a tensor has too many dimensions", expected=f"at most {LIMITS.rank}", got=len(shape))
    return shape, strides


def _check_bounds(storage: Storage, dtype: DType, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """The last element must lie in the storage. (Python's integers do not overflow.)"""
    if 0 in shape:
        return
    end = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if dtype.bytes_of(end) > storage.nbytes:
        raise _Bad("a tensor reaches outside its storage", f"at most {storage.nbytes} bytes", dtype.bytes_of(end))


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements stand one behind another in row-major order, as torch's ``is_contiguous`` means it."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True
