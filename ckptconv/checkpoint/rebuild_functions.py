"""Read torch's ``_rebuild_*`` calls: the tensors that they build, and the devices of these tensors.

Sources, torch 2.13: ``torch/_utils.py`` (the rebuild functions and their arguments) and ``torch/_tensor.py``
(``_reduce_ex_internal``, which writes the calls).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, TypeGuard

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.checkpoint.tensor_info import DeviceArgument, Storage, TensorInfo
from ckptconv.dtypes import BY_NAME, BY_WORD, DType
from ckptconv.errors import InputError, LimitError, MalformedError, UnsupportedError, some
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Global,
    List,
    Node,
    Tuple,
    Value,
    args_of,
    is_count,
    is_global,
    strings_of,
    type_of,
)
from ckptconv.pickles.paths import Place
from ckptconv.pickles.rows import RowCall, RowForm
from ckptconv.work import CHARACTERS, work

FROM_CPU_TENSOR = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
#: The position of the device among the arguments of rebuild functions.
_DEVICE_ARGUMENT = {
    "torch._utils._rebuild_device_tensor_from_numpy": 2,
    FROM_CPU_TENSOR: 2,
    "torch._utils._rebuild_xla_tensor": 2,
    "torch._utils._rebuild_wrapper_subclass": 6,
}
FROM_TYPE = (
    "torch._tensor._rebuild_from_type_v2",
    "torch.tensor._rebuild_from_type_v2",
    "torch._tensor._rebuild_from_type",
    "torch.tensor._rebuild_from_type",
)
_WITH_DEVICE = frozenset((*_DEVICE_ARGUMENT, *FROM_TYPE))
PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
STRIDED = (
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor",
)
_JAGGED = "torch.nested._internal.nested_tensor._rebuild_njt"
_SHOWN = 3  # paths in a note
_LONGEST_DEVICE = 100  # characters; any number of tensors can share one
_facts_of = attrgetter(*TensorInfo.__slots__)
#: Classes in modules below ``torch.distributed`` whose objects contain one process's part of a tensor that is spread
#: over several processes.
_PARTIAL = ("DTensor", "ShardedTensor")
_REBUILDERS = frozenset(
    {
        *_DEVICE_ARGUMENT,
        *FROM_TYPE,
        *PARAMETER,
        *STRIDED,
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_meta_tensor_no_storage",
        _JAGGED,
    }
)


class OtherDType(Global):
    """A dtype of safetensors that torch does not have.

    It is never read from a pickle: the parser creates ``Global`` nodes.
    """

    __slots__ = ()


# Devices as arguments


def _is_device(value: Value) -> TypeGuard[str]:
    """Return whether `value` is a string that can be the name of a device."""
    return isinstance(value, str) and len(value) <= _LONGEST_DEVICE


def torch_device(node: Value) -> str | None:
    """Return the device that `node`, a short string or a call of ``torch.device``, names, or None for other values."""
    if isinstance(node, Call) and is_global(node.callable, "torch.device") and isinstance(node.args, Tuple):
        parts = node.args.items
        if 0 < len(parts) < 3 and all(_is_device(part) or (type(part) is int and 0 <= part < 1000) for part in parts):
            return ":".join(str(part) for part in parts if isinstance(part, (str, int)))
        return None
    return node if _is_device(node) else None


def device_arguments(call: Call) -> list[DeviceArgument]:
    """Return the device among the arguments of `call`, as a list of one element. The list is empty if there is none."""
    function = call.callable
    name = str(function) if isinstance(function, Global) else ""
    if name not in _WITH_DEVICE:
        return []
    args = call.args
    nested = name in FROM_TYPE
    if nested and isinstance(args, Tuple) and len(args.items) >= 3:
        function, args = args.items[0], args.items[2]
    index = _DEVICE_ARGUMENT.get(str(function)) if isinstance(function, Global) else None
    if index is None or not isinstance(args, Tuple) or len(args.items) <= index:
        return []
    device = torch_device(args.items[index])
    return [] if device is None else [DeviceArgument(call, nested, index, device)]


# Tensors


@dataclass(frozen=True)
class StridedPart:
    """The call of a rebuild function that builds a strided tensor.

    Attributes:
        function: The name of the rebuild function.
        callable: The node of the rebuild function.
        args: The arguments of the rebuild function.
        nested: Whether these arguments are inside those of ``_rebuild_from_type_v2``, which sets the class of the
            tensor.
    """

    function: str
    callable: Value
    args: Tuple
    nested: bool


def strided_part(call: Call) -> StridedPart | None:
    """Return the rebuild call in `call` that builds a strided tensor, or None.

    It is `call` itself, or the call that ``_rebuild_from_type_v2`` makes.
    """
    function, args, nested = call.callable, call.args, str(call.callable) in FROM_TYPE
    if nested:
        outer = [*args_of(call), None, None, None]
        function, args = outer[0], outer[2]
    if is_global(function, *STRIDED) and isinstance(args, Tuple) and args.items:
        return StridedPart(str(function), function, args, nested)
    return None


def cpu_tensor_in(call: Call) -> Call | None:
    """Return the call that builds the CPU tensor which `call` copies to a device. Return None for other calls.

    torch saves tensors of a backend without storages (XLA) in this form. Return None, too, if the CPU tensor is
    quantized, not strided, or has effects.
    """
    args = args_of(call) if is_global(call.callable, FROM_CPU_TENSOR) else []
    inner = args[0] if len(args) == 4 else None
    if not isinstance(inner, Call) or inner.effects or not isinstance(args[3], bool):
        return None
    part = strided_part(inner)
    return inner if part and not part.nested and len(part.args.items) > 4 and "qtensor" not in part.function else None


class TensorReader:
    """Reads rebuild calls and collects the tensors by node and by path.

    Args:
        storages: The storages, by the id of their persistent id.
        where: The name of the checkpoint in errors.
        faults: The sink for invalid tensors.
    """

    def __init__(self, storages: Mapping[int, Storage], where: str, faults: FaultSink = RAISED) -> None:
        self.storages = storages
        self.where = where
        self.faults = faults
        self.nodes: dict[int, TensorInfo] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.same: dict[tuple[object, ...], str] = {}
        self.first: dict[int, TensorInfo] = {}  # the first tensor with bytes on each storage, by its id
        self.inside: dict[int, TensorInfo | None] = {}  # tensors that are arguments of calls
        #: For each form of rows: the fields of its tensors, and the number of bytes of a storage that they span.
        self.alike: dict[RowForm | None, tuple[Sequence[Any], int]] = {}
        self.depth = 0

    def visit(self, place: Place) -> None:
        """Record the tensor at `place`.

        Do nothing if the node does not build a tensor; report a fault if the tensor is invalid.
        """
        node = place.node
        if not isinstance(node, Call):
            return
        known = self.nodes.get(id(node))
        info = TensorInfo(*_facts_of(known)) if known else self.of_row(node)  # faster than replace()
        if info is None or node.effects:
            function = self.rebuilder(node)
            if info is None and function is None and not is_spread(node.callable):
                return
            info = self.checked(node, function, info, place)
        if info is None:
            return
        info.path, info.name = place.path, place.key
        info.tied_to = self.first_of(info, node)
        self.nodes.setdefault(id(node), info)
        self.tensors[info.path] = info

    def checked(self, node: Call, function: str | None, info: TensorInfo | None, place: Place) -> TensorInfo | None:
        """Return the tensor that `node` builds, or None if it cannot be determined.

        Report a fault if the arguments are invalid or if items are set on the tensor.

        Args:
            node: The call at `place`.
            function: The name of the rebuild function, or None for an old ``ShardedTensor``.
            info: The tensor, if it was read before, or None.
            place: The place of the call, for errors.
        """
        try:
            if info is None:
                info = self.made_by(function, node) if function else self.sharded_object(node)
            if node.effects and any(effect.opcode != "BUILD" for effect in node.effects):
                raise MalformedError("items are set on a tensor")
        except InputError as error:
            if isinstance(error, LimitError):
                error.where = f"{self.where}: at {place.path}"
            else:
                error.what, error.where = f"at {place.path}: {error.what}", self.where
            self.faults.found(error)
        return info

    def made_by(self, function: str, call: Call) -> TensorInfo | None:
        """Return the tensor that the `call` of `function` builds.

        Return None if a storage or an inner tensor is unknown.

        Raises InputError if the arguments are invalid, and LimitError if calls are nested too deeply.
        """
        info = self.of_row(call)
        if info is None:
            form = call.row if isinstance(call, RowCall) else None
            info = self.read(function, args_of(call))
            if form and info and info.kind == "strided":
                reach = _layout(info.shape, info.stride)[1]
                end = BY_NAME[info.dtype].bytes_of(info.offset + reach if reach else 0)
                self.alike[form] = _facts_of(info), end
        return info

    def of_row(self, call: Call) -> TensorInfo | None:
        """Return the tensor of `call`, if it is a row whose form was read before and the tensor fits its storage.

        Otherwise None.
        """
        if not isinstance(call, RowCall) or (like := self.alike.get(call.row)) is None:
            return None
        storage = self.storages.get(id(call.reference))
        if storage is None or like[1] > storage.nbytes:
            return None
        info = TensorInfo(*like[0])
        info.storage = storage
        return info

    def rebuilder(self, call: Call) -> str | None:
        """Return the name of the rebuild function that `call` calls, or None if it is not a known one."""
        function = call.callable
        is_row = isinstance(call, RowCall) and call.form
        if not isinstance(function, Global) or not (is_row or isinstance(call.args, Tuple)):
            return None
        return name if (name := str(function)) in _REBUILDERS else None

    def first_of(self, info: TensorInfo, node: Node) -> str | None:
        """Return the path of an earlier tensor with the same kind and view, or None if this is the first.

        A tensor without a storage or bytes is the same only if its `node` is the same.
        """
        if info.storage is not None and info.nbytes:
            other = self.first.setdefault(id(info.storage), info)
            if other is info:
                return None  # most tensors do not share their storage
            self.same.setdefault((other.kind, *other.view), other.path)
            key: tuple[object, ...] = (info.kind, *info.view)
        else:
            key = (id(node),)
        first = self.same.setdefault(key, info.path)
        if first == info.path:
            return None
        work().charge(len(first) // CHARACTERS)  # reports have it for each tied tensor
        return first

    def read(self, function: str, args: list[Value]) -> TensorInfo | None:
        """Return the tensor that `function` builds from `args`. Return None if a storage or an inner tensor is unknown.

        Raises InputError if the arguments are invalid, and LimitError if calls are nested too deeply.
        """
        if self.depth == LIMITS.nested_calls:
            raise LimitError(
                "the calls that create a tensor are nested too deeply", expected=f"at most {LIMITS.nested_calls}"
            )
        self.depth += 1
        try:
            return self.of_call(function, args)
        finally:
            self.depth -= 1

    def of_call(self, function: str, args: list[Value]) -> TensorInfo | None:
        """Return the tensor of a call, or None, as :meth:`read` does, without counting the depth of calls."""
        if function in STRIDED:
            return self.strided(function, args)
        if function in PARAMETER:
            inner = self.inner(args, 0)
            return inner and replace(inner, requires_grad=_at(args, 1) is True, is_parameter=True)
        if function in FROM_TYPE:
            name, inside = _at(args, 0), _at(args, 2)
            if not is_global(name, *_REBUILDERS) or not isinstance(inside, Tuple):
                return None
            return self.read(str(name), inside.items)
        if function == "torch._utils._rebuild_meta_tensor_no_storage":
            return self.described("meta", args, "meta", 3)
        if function == "torch._utils._rebuild_wrapper_subclass":
            kind = "partial" if is_spread(_at(args, 0)) else "wrapper"
            return self.described(kind, args[1:], torch_device(_at(args, 6)), 6)
        if function == "torch._utils._rebuild_sparse_tensor":
            return self.sparse(args)
        if function == _JAGGED:
            inner = self.inner([_item(_at(args, 0), "values")], 0)
            grad = _item(_at(args, 0), "requires_grad") is True
            return inner and replace(inner, kind="jagged", requires_grad=grad)
        inner = self.inner(args, 0)
        if function == "torch._utils._rebuild_nested_tensor":
            return inner and replace(inner, kind="nested")
        return self.from_array(args, inner)

    def inner(self, args: list[Value], index: int) -> TensorInfo | None:
        """Return the tensor that argument `index` builds. Return None if the argument is not a rebuild call."""
        node = _at(args, index)
        function = self.rebuilder(node) if isinstance(node, Call) else None
        if not isinstance(node, Call) or function is None:
            return None
        if id(node) not in self.inside:  # any number of calls can share it
            self.inside[id(node)] = self.nodes.get(id(node)) or self.made_by(function, node)
        return self.inside[id(node)]

    def strided(self, function: str, args: list[Value]) -> TensorInfo | None:
        """Return the tensor of ``(storage, storage_offset, size, stride, ...)``. Return None if the storage is unknown.

        Raises InputError if an argument is invalid or the tensor exceeds its storage.
        """
        node = _at(args, 0)
        storage = self.storages.get(id(node))
        if storage is None:
            return None
        dtype, metadata = storage_id(node).dtype, _at(args, 6)
        if function.endswith("_v3"):
            dtype, metadata = _dtype(_at(args, 6)), _at(args, 7)
        offset = _at(args, 1)
        if not is_count(offset):
            got = offset if type(offset) is int else type_of(offset).__name__
            raise MalformedError("a tensor's offset is not a number of elements", got=got)
        shape, stride = _sizes(_at(args, 2), _at(args, 3))
        quantized = function.endswith("_rebuild_qtensor")
        elements, reach, is_contiguous = _layout(shape, stride)
        if dtype.bytes_of(end := offset + reach if reach else 0) > storage.nbytes:
            expected = f"at most {storage.nbytes} bytes"
            raise MalformedError("a tensor reaches outside its storage", expected=expected, got=dtype.bytes_of(end))
        return TensorInfo(
            "",
            None,
            "quantized" if quantized else "strided",
            dtype.name,
            shape,
            stride,
            offset,
            None,
            dtype.bytes_of(elements),
            storage,
            _at(args, 5 if quantized else 4) is True,
            False,
            is_contiguous,
            conj=_has_bit(metadata, "conj"),
            neg=_has_bit(metadata, "neg"),
        )

    def strided_or_none(self, function: str, args: list[Value]) -> TensorInfo | None:
        """Return the strided tensor that `function` builds from `args`. Return None if the arguments are invalid."""
        try:
            return self.strided(function, args)
        except InputError:
            return None

    def described(self, kind: str, args: list[Value], device: str | None, requires_grad: int) -> TensorInfo:
        """Return a tensor without a storage of its own, as its arguments describe it.

        Args:
            kind: The kind of the tensor.
            args: The arguments. The first three are the dtype, the size and the stride.
            device: The device, or None if it is unknown.
            requires_grad: The position of ``requires_grad`` in `args`.
        """
        shape, strides = _sizes(_at(args, 1), _at(args, 2))
        name = _dtype(_at(args, 0)).name
        return TensorInfo(
            "",
            None,
            kind,
            name,
            shape,
            strides,
            0,
            device,
            0,
            None,
            _at(args, requires_grad) is True,
            False,
            _layout(shape, strides)[2],
        )

    def sparse(self, args: list[Value]) -> TensorInfo | None:
        """Return the sparse tensor of ``(layout, data)``, or None if there is no size or fewer than two known inner
        tensors.

        The data is ``(indices, values, size, ...)`` or ``(compressed, plain, values, size)``.
        """
        data = _at(args, 1)
        parts = data.items[:4] if isinstance(data, Tuple) else []
        tensors = [self.inner(parts, i) for i in range(len(parts))]
        inner = [tensor for tensor in tensors if tensor]
        sizes = [ints_of(part) for part, tensor in zip(parts, tensors, strict=True) if tensor is None]
        shape = next((size for size in sizes if size is not None), None)
        if len(inner) < 2 or shape is None:
            return None
        return replace(
            inner[-1],
            kind="sparse",
            shape=shape,
            stride=(),
            offset=0,
            own_device=inner[-1].device,
            storage=None,
            contiguous=False,
            nbytes=sum(tensor.nbytes for tensor in inner),
        )

    def sharded_object(self, call: Call) -> TensorInfo | None:
        """Return the tensor in a ``ShardedTensor`` of older versions of torch, or None if its state is different.

        Such an object was not a tensor. Its state is ``(local shards, metadata, ...)``.
        """
        state = _built(call)
        parts = state.items if isinstance(state, Tuple) else []
        shards, metadata = _at(parts, 0), _built(_at(parts, 1))
        shard = _built(_at(shards.effects[0].values, 0)) if isinstance(shards, List) and shards.effects else None
        slots = _at(shard.items, 1) if isinstance(shard, Tuple) else None
        local = self.inner([_item(slots, "tensor")], 0)
        size = _at(metadata.items, 1) if isinstance(metadata, Tuple) else _item(metadata, "size")
        shape = ints_of(size)
        if local is None or shape is None:
            return None
        return TensorInfo("", None, "partial", local.dtype, shape, (), 0, local.device, 0, None, False, False, False)

    def from_array(self, args: list[Value], inner: TensorInfo | None) -> TensorInfo:
        """Return the tensor of ``(data, dtype, device, requires_grad)``. The data is a CPU tensor or a NumPy array.

        Args:
            args: The arguments.
            inner: The CPU tensor, or None for a NumPy array. The shape is then unknown, and is ``()``.
        """
        device = torch_device(_at(args, 2))
        if inner and inner.kind == "strided" and not inner.is_parameter and inner.dtype == _dtype(_at(args, 1)).name:
            return replace(inner, own_device=device, requires_grad=_at(args, 3) is True)
        shape, nbytes = (inner.shape, inner.nbytes) if inner else ((), 0)
        name = _dtype(_at(args, 1)).name
        return TensorInfo(
            "", None, "device", name, shape, (), 0, device, nbytes, None, _at(args, 3) is True, False, True
        )


def is_word(node: Node) -> bool:
    """Return whether `node` calls ``torch.device``, ``torch.Size``, ``_codecs.encode`` or ``_get_layout``.

    Such calls contain only a word or numbers, so paths do not go into them.
    """
    return isinstance(node, Call) and is_global(
        node.callable, "torch.device", "torch.Size", "_codecs.encode", "torch.serialization._get_layout"
    )


def _at(args: list[Value], index: int) -> Value:
    """Return argument `index`, or None if there are fewer arguments."""
    if index < len(args):
        return args[index]
    return None


def _dtype(node: Value) -> DType:
    """Return the dtype that `node` names. Raise InputError if it is not a dtype or not a known one."""
    if isinstance(node, Global) and node.module == "torch" and node.name in BY_NAME:
        return BY_NAME[node.name]
    if isinstance(node, OtherDType):
        return BY_WORD[node.name]
    if isinstance(node, Global) and node.module == "torch":
        raise UnsupportedError("a tensor has a dtype that is not known to this version", got=node)
    raise MalformedError("a tensor has no dtype", got=node if isinstance(node, Global) else type_of(node).__name__)


def _has_bit(metadata: Value, name: str) -> bool:
    """Return whether `metadata`, the last argument of a rebuild call, sets the lazy bit `name` (``conj`` or ``neg``).

    Source: ``torch._utils.set_tensor_metadata``.
    """
    return isinstance(metadata, Dict) and strings_of(metadata).get(name) is True


def is_spread(cls: Value) -> bool:
    """Return whether `cls` is DTensor or ShardedTensor: its objects contain only the shard of one process."""
    return isinstance(cls, Global) and cls.name in _PARTIAL and cls.module.startswith("torch.distributed.")


def partial_notes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return a list with one note about the partial tensors among `tensors`. The list is empty if there are none."""
    paths = [path for path, info in tensors.items() if info.kind == "partial"]
    what = "the file contains one process's part of each, but the shapes of the complete tensors"
    return [f"partial: {some(paths, _SHOWN)}; {what}"] if paths else []


def _built(node: Value) -> Value:
    """Return the state of the object `node`. Return None if it has other effects or no state."""
    states = node.states() if isinstance(node, Call) and len(node.effects) == 1 else []
    return next(iter(states), None)


def _item(mapping: Value, key: str) -> Value:
    """Return the value of `key` in `mapping`, or None if it is not among the first 8 items.

    Further items are not searched, because any number of objects can share one mapping.
    """
    entries = islice(mapping.entries(), 8) if isinstance(mapping, Dict) else ()
    return next((value for found, value in entries if found == key), None)


def ints_of(node: Value) -> tuple[int, ...] | None:
    """Return the sizes in `node`, a tuple or a call of ``torch.Size`` with a tuple. Return None for other values.

    Raises LimitError if there are too many sizes.
    """
    if isinstance(node, Call) and is_global(node.callable, "torch.Size"):
        node = _at(args_of(node), 0)
    if not isinstance(node, Tuple):
        return None
    if len(node.items) > LIMITS.rank:  # any number of tensors can share them
        raise LimitError("a tensor has too many dimensions", expected=f"at most {LIMITS.rank}", got=len(node.items))
    return tuple(node.items) if all(map(is_count, node.items)) else None  # type: ignore[arg-type]  # all are counts


def _sizes(size: Value, stride: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `size` and `stride` as tuples of integers.

    Raises MalformedError unless both are such tuples of the same length.
    """
    shape, strides = ints_of(size), ints_of(stride)
    if shape is None or strides is None or len(shape) != len(strides):
        raise MalformedError(
            "a tensor's shape and stride do not match", expected="two tuples of non-negative integers, of equal length"
        )
    return shape, strides


@lru_cache(maxsize=1024)  # many tensors of a checkpoint have the same shape
def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int, bool]:
    """Return the number of elements of a view, its reach, and whether it is contiguous.

    The reach is the number of elements of the storage from the first to the last one. Contiguous means the same as
    torch's ``is_contiguous``: the elements are consecutive, in row-major order.
    """
    if 0 in shape:
        return 0, 0, True
    reach, expected, is_contiguous = 1, 1, True
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        is_contiguous = is_contiguous and (size == 1 or step == expected)
        reach += (size - 1) * step
        expected *= size
    return expected, reach, is_contiguous
