"""The calls that torch's ``weights_only`` unpickler allows, and the arguments that torch accepts for them.

The first half of the module is for rebuild functions, which build tensors. The second half is for containers, numbers,
``torch.Size``, ``torch.device`` and layouts.

Each function takes the arguments of a call and returns its value. It raises Refused if torch raises an exception,
NotKnown if the behavior of torch is not modelled, and AfterUnknown if an argument is not known.

Sources, torch 2.6 to 2.15: ``torch/_utils.py`` (the rebuild functions), ``torch/nn/parameter.py``, ``torch/_tensor.py``
and tests of torch's C++ code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TypeAlias

from ckptconv.checkpoint.weights_only.objects import (
    BYTEARRAY,
    BYTES,
    COMPLEX,
    COUNTER,
    DEVICE,
    ORDERED_DICT,
    SET,
    UNKNOWN,
    AfterUnknown,
    Arguments,
    Held,
    LayoutValue,
    Made,
    NotKnown,
    Refused,
    SizeValue,
    StorageValue,
    TensorValue,
    describe,
)
from ckptconv.dtypes import BY_NAME
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, Dict, Global, Tuple, Value

#: Returns the value of a call with these arguments.
Maker: TypeAlias = Callable[[Arguments], Held]

_PARAMETER = "torch.nn.parameter.Parameter"
DIFFERENTIABLE = ("float", "bfloat", "complex", "bcomplex")  # prefixes of dtypes that can require gradients
_QUANTIZED = ("qint", "quint")
_ODD = ("bits", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "float4_e2m1fn_x2")
_COMPRESSED = ("torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr", "torch.sparse_bsc")
#: Attributes of tensors that torch's own code sets in another way than plain attributes.
ATTRIBUTES = frozenset(
    (
        "H", "T", "_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_has_grad_dtype_override",
        "_has_symbolic_sizes_strides", "_post_accumulate_grad_hooks", "_python_dispatch", "_version", "data",
        "device", "dtype", "grad", "grad_dtype", "grad_fn", "imag", "is_cpu", "is_cuda", "is_ipu", "is_leaf",
        "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_sparse",
        "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize", "layout", "mH", "mT", "name", "names", "nbytes",
        "ndim", "output_nr", "real", "requires_grad", "retains_grad", "shape", "volatile",
    )
)  # a table  # fmt: skip


# Strided tensors


def _view(
    storage: StorageValue, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and stride of a view of `storage`, as ``Tensor.set_`` computes them.

    If `stride` is empty, the view is contiguous. `dtype` is the dtype of the elements. Raises Refused if the view
    is not inside the storage, and NotKnown for extreme shapes.
    """
    if offset < 0:
        raise Refused(f"its storage offset is negative: {offset}")
    if len(shape) != len(stride):
        if stride:
            raise Refused(f"its shape has {len(shape)} numbers, and its stride {len(stride)}")
        stride = [prod(shape[i + 1 :]) for i in range(len(shape))]
    last = offset
    elements = 1
    for n, step in zip(shape, stride, strict=True):
        if n < 0:
            raise Refused(f"its shape has a negative number: {n}")
        elements *= n
        last += (n - 1) * step
    if not elements:
        if prod(max(n, 1) for n in shape) >= LIMITS.elements or offset >= LIMITS.elements:
            raise NotKnown("an empty tensor with a dimension that is too large")
    elif elements >= LIMITS.elements or any(step < 0 for step in stride):
        raise NotKnown("a tensor with too many elements or a negative stride")
    elif (needed := BY_NAME[dtype].bytes_of(last + 1)) > storage.nbytes:
        raise Refused(f"it reaches over {needed:,} bytes of a storage of {storage.nbytes:,}")
    return tuple(shape), tuple(stride)


def _strided(args: Arguments, dtype: str | None = None) -> TensorValue:
    """Return the tensor of the first four arguments: storage, offset, shape and stride.

    `dtype` is the dtype, or None for that of the storage.
    """
    storage = args.storage(0)
    dtype = dtype or storage.dtype.name
    offset = args.integer(1, "storage offset")
    shape, stride = _view(storage, offset, args.integers(2, "shape"), args.integers(3, "stride"), dtype)
    return TensorValue(dtype, shape, stride, offset, storage)


def check_gradient(requires_grad: bool, dtype: str) -> None:
    """Raise Refused if `requires_grad` is True and a tensor of this `dtype` cannot require gradients."""
    if requires_grad and not dtype.startswith(DIFFERENTIABLE):
        raise Refused(f"a tensor of {dtype} cannot require gradients")


def _lazy_bits(args: Arguments, i: int, tensor: TensorValue) -> TensorValue:
    """Return `tensor` with the lazy bits in argument `i`, a dict from ``conj`` and ``neg`` to bools.

    There may be no argument.
    """
    value = args.items[i] if i < len(args.items) else None
    if value is None or (not isinstance(value, Dict) and args.objects.is_empty(value, args.now)):
        return tensor
    if not isinstance(value, Dict):
        if args.objects.is_mapping(value):
            raise NotKnown("metadata of a tensor that is not a plain dict")
        raise Refused(f"its metadata must be a dict, not {describe(args.held(i))}")
    for key, bit in args.objects.items(value, args.now):
        name = args.objects.held(key)
        if not isinstance(name, str):
            raise Refused("its metadata has a key that is not a string")
        if name not in ("conj", "neg") or not isinstance(bit, bool):
            raise NotKnown("metadata of a tensor other than its conj and neg bits")
        if name == "conj" and not tensor.dtype.startswith(("complex", "bcomplex")):
            raise Refused(f"its metadata has a conj bit, which a tensor of {tensor.dtype} cannot have")
        tensor.is_plain = False
    return tensor


def _tensor(args: Arguments) -> TensorValue:
    """Return the tensor of ``_rebuild_tensor(storage, offset, size, stride)``."""
    args.check_count(4)
    return _strided(args)


def _tensor_v2(args: Arguments) -> TensorValue:
    """Return the tensor of ``_rebuild_tensor_v2``, which also has ``requires_grad``, hooks and optional metadata."""
    args.check_count(6, 7)
    tensor = _strided(args)
    tensor.requires_grad = args.flag(4, "requires_grad")
    if tensor.requires_grad:
        check_gradient(True, tensor.dtype)
    return _lazy_bits(args, 6, tensor) if len(args.items) > 6 else tensor


def _tensor_v3(args: Arguments) -> TensorValue:
    """Return the tensor of ``_rebuild_tensor_v3``, which has a dtype and optional metadata after the hooks."""
    args.check_count(7, 8)
    dtype = "float32" if args.items[6] is None else args.dtype(6)
    tensor = _strided(args, dtype)
    if args.items[4] is not None and args.flag(4, "requires_grad"):
        check_gradient(True, dtype)
        raise Refused(f"torch cannot load a tensor of {dtype} that requires gradients and is not a Parameter")
    return _lazy_bits(args, 7, tensor)


def _meta_tensor(args: Arguments) -> TensorValue:
    """Return the meta tensor of ``(dtype, size, stride, requires_grad)``."""
    args.check_count(4)
    dtype = "float32" if args.items[0] is None else args.dtype(0)
    shape, stride = args.integers(1, "shape"), args.integers(2, "stride")
    if len(shape) != len(stride):
        raise Refused(f"its shape has {len(shape)} numbers, and its stride {len(stride)}")
    if any(n < 0 for n in shape):
        raise Refused("its shape has a negative number")
    if any(n < 0 for n in stride) or prod(max(n, 1) for n in shape) * 16 >= LIMITS.elements:
        raise NotKnown("a meta tensor whose shape is too large")
    if sum(n * step for n, step in zip(shape, stride, strict=True)) * 16 >= LIMITS.elements:
        raise NotKnown("a meta tensor whose stride is too large")
    if dtype.startswith(_QUANTIZED):
        raise Refused("a quantized tensor cannot be without data")
    requires_grad = args.items[3] is not None and args.flag(3, "requires_grad")
    check_gradient(requires_grad, dtype)
    return TensorValue(dtype, tuple(shape), tuple(stride), device="meta", requires_grad=requires_grad)


def empty(dtype: str) -> Maker:
    """Return a function that returns a tensor of `dtype` without elements.

    torch before 0.4 wrote a call for such a tensor, and set its state afterwards.
    """

    def make(args: Arguments) -> TensorValue:
        if args.items:
            raise NotKnown("a tensor that its class creates from another object")
        return TensorValue(dtype, (0,), (1,))

    return make


def sparse_of_class(args: Arguments) -> Held:
    """Raise NotKnown for a sparse tensor that is created by a call of its class.

    No version of torch writes such a call.
    """
    raise NotKnown(f"a sparse tensor that its class creates from {len(args.items)} arguments")


def set_view(tensor: TensorValue, args: Arguments) -> TensorValue:
    """Return the tensor after ``tensor.set_(storage, offset, shape, stride)``.

    `args` are the state of a tensor of torch before 0.4. Raises Refused if torch refuses the storage, and NotKnown for
    other states and for tensors that are not strided.
    """
    if len(args.items) != 4 or tensor.kind != "strided" or tensor.device != "cpu" or not tensor.is_plain:
        raise NotKnown("the state of a tensor that is not a view of a storage")
    if tensor.requires_grad:
        raise Refused("the storage of a tensor that requires gradients cannot be set")
    storage = args.storage(0)
    if storage.dtype.name != tensor.dtype:
        raise Refused(f"a tensor of {tensor.dtype} gets a storage of {storage.dtype.name}")
    found = _strided(args)
    return replace(found, is_parameter=tensor.is_parameter)


# Quantized


def _qtensor(args: Arguments) -> TensorValue:
    """Return the tensor of ``_rebuild_qtensor``: storage, offset, size, stride, quantizer, ``requires_grad`` and
    hooks.
    """
    args.check_count(7)
    storage = args.storage(0)
    if not storage.dtype.name.startswith(_QUANTIZED):
        raise Refused(f"a quantized tensor gets a storage of {storage.dtype.name}")
    tensor = _strided(args)
    if BY_NAME[tensor.dtype].bytes_of(prod(tensor.shape)) > storage.nbytes:  # torch allocates this memory first
        args.objects.copy(prod(tensor.shape), 4)
    params = args.tuple(4, "quantizer")
    scheme = params.global_name(0) if params.items else None
    if scheme == "torch.per_tensor_affine":
        _check_affine(params)
    elif scheme in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams"):
        _check_per_channel(params, tensor.shape)
    else:
        raise Refused("it has no quantization scheme that torch loads")
    if args.flag(5, "requires_grad"):
        raise Refused("a quantized tensor cannot require gradients")
    tensor.kind = "quantized"
    return tensor


def _check_affine(params: Arguments) -> None:
    """Raise an error if the arguments ``(scheme, scale, zero point)`` of a quantizer are not valid."""
    params.check_count(3)
    scale = params.held(1)
    if not isinstance(scale, (bool, int, float)):
        raise (
            NotKnown("a scale that is not a number") if isinstance(scale, TensorValue) else Refused("its scale is None")
        )
    try:
        float(scale)
    except OverflowError:
        raise Refused("its scale does not fit a float") from None
    params.integer(2, "zero point")


def _check_per_channel(params: Arguments, shape: tuple[int, ...]) -> None:
    """Raise an error if a quantizer ``(scheme, scales, zero points, axis)`` does not fit a tensor of this `shape`."""
    params.check_count(4)
    axis = params.integer(3, "axis")
    wrong = Refused if params.objects.rules.since(2, 13) else NotKnown  # torch itself checks it since then
    if not 0 <= axis < len(shape):
        raise wrong(f"its axis {axis} is not one of its {len(shape)} dimensions")
    for i, what in ((1, "scales"), (2, "zero points")):
        held = params.held(i)
        if not isinstance(held, TensorValue):
            raise NotKnown(f"{what} that are not a tensor")
        if held.kind != "strided" or held.device != "cpu" or not held.is_plain or is_odd(held.dtype):
            raise NotKnown(f"{what} that are not a plain tensor")
        if len(held.shape) != 1:
            raise Refused(f"its {what} have {len(held.shape)} dimensions")
        if held.shape[0] != shape[axis]:
            raise wrong(f"it has {held.shape[0]:,} {what} for {shape[axis]:,} channels")
        if held.dtype not in ("float64", "int64"):
            params.objects.copy(held.shape[0], 8)
        if i == 1 and not held.dtype.startswith(("float", "bfloat")):
            raise Refused(f"its scales are {held.dtype}")


def is_odd(dtype: str) -> bool:
    """Return whether torch cannot convert numbers to and from the dtype `dtype`."""
    return dtype.startswith((*_ODD[:1], *_QUANTIZED)) or dtype in _ODD


# Sparse and nested


def _sparse(args: Arguments) -> TensorValue:
    """Return the sparse tensor of ``(layout, data)``."""
    args.check_count(2)
    held = args.held(0)
    if not isinstance(held, LayoutValue) or not held.name.startswith("torch.sparse_"):
        raise Refused(f"{held.name if isinstance(held, LayoutValue) else describe(held)} is not a sparse layout")
    data = args.tuple(1, "data")
    return _compressed(data, held.name) if held.name in _COMPRESSED else _coordinates(data)


def _coordinates(args: Arguments) -> TensorValue:
    """Return the sparse tensor of ``(indices, values, size)``.

    A fourth argument tells whether the indices are coalesced.
    """
    n = args.check_count(3, 4)
    indices, values = _plain_part(args, 0, "indices"), _plain_part(args, 1, "values")
    shape = _sparse_shape(args, 2)
    is_coalesced = n == 4 and args.items[3] is not None and args.flag(3, "is_coalesced")
    if len(indices.shape) != 2:
        raise Refused(f"its indices have {len(indices.shape)} dimensions")
    if is_odd(indices.dtype):
        raise NotKnown(f"indices of {indices.dtype}")
    if indices.dtype != "int64":
        args.objects.copy(prod(indices.shape), 8)
    if not values.shape or values.shape[0] != indices.shape[1]:
        raise Refused(f"it has {indices.shape[1]:,} indices, and values of the shape {values.shape}")
    dense = len(values.shape) - 1
    if len(shape) != indices.shape[0] + dense:
        raise Refused(f"its size has {len(shape)} dimensions, but its indices and values {indices.shape[0] + dense}")
    if tuple(shape[len(shape) - dense :]) != values.shape[1:]:
        raise Refused(f"its values have the shape {values.shape}, which does not match its size")
    if _checks_indices(args):
        numbers, nnz = _index_numbers(args, indices, in_place=indices.dtype == "int64"), indices.shape[1]
        rows = [numbers[i : i + nnz] for i in range(0, len(numbers), nnz)] if nnz else []
        _check_range(rows, shape)
        if is_coalesced and any(a >= b for a, b in pairwise(zip(*rows, strict=True))):
            raise Refused("its indices are not sorted, although it is marked as coalesced")
    return TensorValue(values.dtype, tuple(shape), kind="sparse", device=values.device)


def _checks_indices(args: Arguments) -> bool:
    """Return whether this version of torch compares the indices of a sparse tensor with its size when it loads it."""
    return args.objects.rules.since(2, 14) or not args.objects.rules.since(2, 8)


def _index_numbers(args: Arguments, indices: TensorValue, *, in_place: bool) -> list[int]:
    """Return the elements of `indices`. Raise NotKnown if they cannot be read.

    torch reads them when all storages are filled. `in_place` is False if torch has copied `indices` before that.
    """
    if indices.dtype not in ("int64", "int32"):
        raise NotKnown(f"indices of {indices.dtype}")
    return args.objects.numbers(indices, at_end=in_place)


def _check_range(rows: Iterable[Sequence[int]], shape: Sequence[int]) -> None:
    """Raise Refused if an index in one of `rows` is negative, or not less than the size for this row in `shape`."""
    for row, size in zip(rows, shape, strict=False):
        if row and not 0 <= min(row) <= max(row) < size:
            raise Refused(f"it has the indices {min(row)} to {max(row)} for a dimension of size {size:,}")


def _check_compressed(args: Arguments, layout: str, parts: Sequence[TensorValue], shape: list[int]) -> None:
    """Raise Refused unless the `parts` of a compressed tensor meet the conditions that torch documents.

    `parts` are the compressed indices, the plain indices and the values. `shape` is the size of the tensor.

    Source: ``torch/sparse`` documentation and ``ValidateCompressedIndicesCommon.h``.
    """
    compressed, plain, values = parts
    batch, blocks = len(compressed.shape) - 1, 2 if layout.startswith("torch.sparse_bs") else 0
    batches, grid, rest = tuple(shape[:batch]), shape[batch : batch + 2], values.shape[batch + 1 :]
    sizes, dense = rest[:blocks] or (1, 1), tuple(shape[batch + 2 :])
    if len(sizes) != 2 or len(grid) != 2 or not all(n and not size % n for size, n in zip(grid, sizes, strict=True)):
        raise Refused("its indices and values do not have the dimensions of its layout")
    grid = [size // n for size, n in zip(grid, sizes, strict=True)]
    lines, places = grid if layout in ("torch.sparse_csr", "torch.sparse_bsr") else grid[::-1]
    nnz = values.shape[batch] if batch < len(values.shape) else 0
    if (compressed.shape, plain.shape) != ((*batches, lines + 1), (*batches, nnz)):
        raise Refused(
            f"its indices have the shapes {compressed.shape} and {plain.shape}, which does not match its size"
        )
    if (values.shape[:batch], rest[blocks:]) != (batches, dense):
        raise Refused(f"its values have the shape {values.shape}, which does not match its size")
    if compressed.dtype != plain.dtype:
        raise Refused(f"its indices are {compressed.dtype} and {plain.dtype}")
    starts, indices = (_index_numbers(args, part, in_place=True) for part in (compressed, plain))
    for i in range(prod(batches)):
        own, row = starts[i * (lines + 1) :][: lines + 1], indices[i * nnz :][:nnz]
        _check_range([row], [places])
        runs = [(row[a:b], b - a) for a, b in pairwise(own)]
        is_sound = own[0] == 0 and own[-1] == nnz and all(0 <= n <= places for _, n in runs)
        if not is_sound or any(a >= b for run, _ in runs for a, b in pairwise(run)):
            raise Refused("its indices are not sorted")


def _compressed(args: Arguments, layout: str) -> TensorValue:
    """Return the sparse tensor of ``(compressed indices, plain indices, values, size)``, in this `layout`.

    torch 2.8 to 2.13 do not compare the shapes of these arguments when they load them.
    """
    args.check_count(4)
    parts = [_plain_part(args, i, what) for i, what in enumerate(("indices", "indices", "values"))]
    if len({part.device for part in parts}) > 1:
        raise Refused("its indices and values are on different devices")
    shape = _sparse_shape(args, 3)
    if not all(part.shape for part in parts) or any(is_odd(part.dtype) for part in parts):
        raise NotKnown("a sparse tensor of scalars, or of unusual dtypes")
    for part in parts[:2]:
        if part.dtype not in ("int64", "int32"):
            args.objects.copy(prod(part.shape), 8)
    if _checks_indices(args):
        _check_compressed(args, layout, parts, shape)
    return TensorValue(parts[2].dtype, tuple(shape), kind="sparse", device=parts[2].device)


def _plain_part(args: Arguments, i: int, what: str) -> TensorValue:
    """Return argument `i`, a strided CPU tensor of which a sparse tensor consists. `what` is its name in messages."""
    held = args.held(i)
    if not isinstance(held, TensorValue):
        raise NotKnown(f"{what} of a sparse tensor that are {describe(held)}")
    if held.kind != "strided":
        raise NotKnown(f"{what} of a sparse tensor that are {held.kind} themselves")
    if i == 0 and held.device != "cpu":
        raise NotKnown("a sparse tensor without data")
    if is_odd(held.dtype) and held.dtype != "float4_e2m1fn_x2":
        raise NotKnown(f"a sparse tensor of {held.dtype}")
    if held.device != "cpu":
        raise Refused("its indices and values are on different devices")
    return held


def _sparse_shape(args: Arguments, i: int) -> list[int]:
    """Return the sizes in argument `i`. Raise Refused if one is negative, and NotKnown if they are extreme."""
    shape = args.integers(i, "size")
    if any(n < 0 for n in shape):
        raise Refused("its size has a negative number")
    if prod(max(n, 1) for n in shape) >= LIMITS.elements:
        raise NotKnown("a sparse tensor whose size is too large")
    return shape


def _nested(args: Arguments) -> TensorValue:
    """Return the nested tensor of ``(buffer, sizes, strides, offsets)``.

    Every tensor that the last three describe must be inside the storage of the buffer. torch before 2.8 does not
    check this, and no version checks for a negative offset.
    """
    args.check_count(4)
    wrong = Refused if args.objects.rules.since(2, 8) else NotKnown
    buffer = args.tensor(0, "buffer")
    if buffer.kind != "strided" or buffer.device != "cpu" or not buffer.is_plain or buffer.storage is None:
        raise NotKnown("a nested tensor whose buffer is not a plain tensor")
    if len(buffer.shape) != 1:
        raise Refused(f"its buffer has {len(buffer.shape)} dimensions")
    sizes, strides, offsets = (
        _nested_part(args, i, what, wrong) for i, what in ((1, "sizes"), (2, "strides"), (3, "offsets"))
    )
    if len(sizes.shape) != 2 or sizes.shape != strides.shape:
        raise Refused(f"its sizes have the shape {sizes.shape}, and its strides {strides.shape}")
    if offsets.shape != sizes.shape[:1]:
        raise Refused(f"it has {sizes.shape[0]} parts, and offsets of the shape {offsets.shape}")
    n, (shapes, steps, starts) = sizes.shape[1], map(args.objects.numbers, (sizes, strides, offsets))
    for i, start in enumerate(starts):
        if start < 0:
            raise NotKnown(f"a part of a nested tensor begins at {start}")
        try:
            _view(buffer.storage, start, shapes[n * i : n * i + n], steps[n * i : n * i + n], buffer.dtype)
        except Refused as error:
            raise wrong(str(error)) from None
    return TensorValue(buffer.dtype, (), kind="nested")


def _nested_part(args: Arguments, i: int, what: str, wrong: type[Refused | NotKnown]) -> TensorValue:
    """Return argument `i`, a strided int64 tensor on the CPU. `what` is its name in messages.

    Raises `wrong` for another dtype, and NotKnown for another kind of tensor.
    """
    held = args.tensor(i, what)
    if held.kind != "strided" or held.device != "cpu":
        raise NotKnown(f"{what} of a nested tensor that are not a plain tensor")
    if held.dtype != "int64":
        raise wrong(f"its {what} are {held.dtype} and not int64")
    return held


# Other devices, and wrappers


def _from_cpu_tensor(args: Arguments) -> TensorValue:
    """Return the tensor of ``(data, dtype, device, requires_grad)``.

    If ``torch.load`` has a ``map_location``, this is the CPU tensor itself, in the dtype.
    """
    args.check_count(4)
    data = args.tensor(0, "data")
    if not args.objects.contents.are_there:
        raise NotKnown("it needs the values of a tensor before they are loaded")
    dtype = data.dtype if args.items[1] is None else args.dtype(1)
    if data.kind != "strided" or data.device != "cpu" or not data.is_plain or data.requires_grad:
        raise NotKnown("a tensor of another device whose data is not a plain tensor")
    if dtype != data.dtype and (is_odd(dtype) or is_odd(data.dtype)):
        raise NotKnown(f"a conversion of {data.dtype} to {dtype}")
    requires_grad = args.flag(3, "requires_grad")
    check_gradient(requires_grad, dtype)
    if dtype != data.dtype:
        args.objects.copy(prod(data.shape), 16)
    else:
        data.requires_grad = requires_grad
        return data
    return TensorValue(dtype, data.shape, requires_grad=requires_grad, is_plain=False)


def _from_numpy(args: Arguments) -> Held:
    """Raise Refused: no call that the unpickler allows builds a numpy array."""
    args.check_count(4)
    raise Refused("it needs a NumPy array, which the unpickler does not allow")


def _wrapper(args: Arguments) -> Held:
    """Raise Refused: the unpickler allows no subclass of torch.Tensor for this call."""
    args.check_count(8)
    args.global_name(0)
    raise Refused("it needs a subclass of torch.Tensor that the unpickler does not allow")


# Parameters, and tensors with attributes


def parameter(args: Arguments) -> TensorValue:
    """Return the value of ``torch.nn.Parameter(data, requires_grad)``. Both arguments are optional."""
    return _parameter_of(args, args.check_count(0, 2))


def _parameter_of(args: Arguments, n: int) -> TensorValue:
    """Return the parameter of the data in the first argument.

    The second of `n` arguments is ``requires_grad``, or True.
    """
    requires_grad = args.flag(1, "requires_grad") if n > 1 else True
    if not n or args.items[0] is None:
        return TensorValue("float32", (0,), (1,), is_parameter=True, requires_grad=requires_grad)
    data = args.tensor(0, "data")
    check_gradient(requires_grad, data.dtype)
    return replace(data, is_parameter=True, requires_grad=requires_grad, is_plain=data.is_plain)


def from_type(args: Arguments) -> Held:
    """Return the tensor of ``_rebuild_from_type_v2(function, type, arguments, state)``."""
    args.check_count(4)
    name = args.global_name(0)
    make = REBUILD.get(name) if name else None
    if make is None:
        raise NotKnown(f"a subclass made by {name or 'an object that is not a function'}")
    made = make(args.tuple(2, "arguments"))
    cls = args.global_name(1)
    if cls not in ("torch.Tensor", _PARAMETER):
        raise NotKnown(f"a tensor of the class {cls}") if cls else Refused("the class of a tensor is not a class")
    if not isinstance(made, TensorValue):
        raise AfterUnknown
    is_parameter = cls == _PARAMETER
    if made.is_parameter != is_parameter:
        raise NotKnown("a tensor that becomes a Parameter, or a Parameter that becomes a tensor")
    return with_attributes(made, args)


def with_attributes(tensor: TensorValue, args: Arguments) -> TensorValue:
    """Return `tensor` with the attributes in the fourth argument.

    The argument is a mapping, or a pair of mappings for an object with slots.
    """
    state = args.items[3]
    if isinstance(state, Tuple) and len(state.items) != 2:
        raise Refused(f"its state is a tuple of {len(state.items)}")
    for part in state.items if isinstance(state, Tuple) else [state]:
        keys = args.objects.keys(part, args.now)
        if keys is None and not args.objects.is_empty(part, args.now):
            raise Refused(f"its state must be a dict, not {describe(args.objects.held(part))}")
        for key in keys or ():
            name = args.objects.held(key)
            if not isinstance(name, str):
                raise Refused("an attribute's name is not a string")
            if name in ATTRIBUTES or name.startswith("__"):
                raise NotKnown(f"the attribute {name[:40]!r}, which torch sets in a special way")
            tensor.is_plain = False
    return tensor


REBUILD: dict[str, Maker] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _qtensor,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu_tensor,
    "torch._utils._rebuild_parameter": lambda args: _parameter_of(args, args.check_count(3)),
    "torch._utils._rebuild_parameter_with_state": lambda args: with_attributes(
        _parameter_of(args, args.check_count(4)), args
    ),
}


# Containers, numbers, devices and layouts

#: The names of the layouts in ``torch``.
LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
)
_DEVICE = regex(r"([a-z]+)(?::(0|[1-9][0-9]{0,8}))?")
#: The types of devices whose names torch knows on every machine.
DEVICE_TYPES = frozenset(
    (
        "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
        "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
    )
)  # a table  # fmt: skip
_LATIN_1 = frozenset(("latin1", "latin-1", "latin_1", "iso-8859-1"))
_UTF_8 = frozenset(("utf-8", "utf8"))
_NUMBERS = (bool, int, float)
_AT_ONCE = 100  # characters that count as one step when they are encoded


def ordered_dict(args: Arguments) -> Made:
    """Return the value of ``OrderedDict()``, optionally with a mapping or pairs as its argument."""
    if args.check_count(0, 1):
        value = args.items[0]
        if not args.objects.is_mapping(value):
            for pair in _elements(args, value):
                parts = _elements(args, pair)
                if len(parts) != 2:
                    raise Refused("its items must be pairs")
                args.objects.check_hashable(parts[0])
    return ORDERED_DICT


def counter(args: Arguments) -> Made:
    """Return the value of ``Counter()``, optionally with a mapping, or elements to count, as its argument."""
    if args.check_count(0, 1):
        value = args.items[0]
        if value is not None and not args.objects.is_mapping(value):
            for item in _elements(args, value):
                args.objects.check_hashable(item)
    return COUNTER


def set_(args: Arguments) -> Made:
    """Return the value of ``set()``, optionally with an iterable as its argument."""
    if args.check_count(0, 1):
        for item in _elements(args, args.items[0]):
            args.objects.check_hashable(item, "member of a set")
    return SET


def _elements(args: Arguments, value: Value) -> list[Value]:
    """Return the elements of `value` when Python iterates over it. Raise Refused if it is not iterable."""
    found = args.objects.elements(value, args.now)
    if found is None:
        found = args.objects.keys(value, args.now)
    if found is not None:
        return found
    held = args.objects.held(value)
    if isinstance(held, (str, SizeValue)):
        items: list[Value] = [*(held if isinstance(held, str) else held.sizes)]
        args.objects.charge(len(items))
        return items
    if isinstance(held, (*_NUMBERS, Global)) or held is None:
        raise Refused(f"it cannot iterate over {describe(held)}")
    if held is UNKNOWN:
        raise AfterUnknown
    raise NotKnown(f"the items of {describe(held)}")


def complex_(args: Arguments) -> Made:
    """Return the value of ``complex()`` with up to two numbers as arguments."""
    for i in range(args.check_count(0, 2)):
        held = args.held(i)
        if isinstance(held, Made) and held is COMPLEX:
            continue
        if not isinstance(held, _NUMBERS):
            if held is None or isinstance(held, (Tuple, Dict)):
                raise Refused(f"it takes numbers, not {describe(held)}")
            raise NotKnown(f"a number made from {describe(held)}")
        try:
            float(held)
        except OverflowError:
            raise Refused("it gets an integer that is too large for a float") from None
    return COMPLEX


def encode(args: Arguments) -> Made:
    """Return the value of ``_codecs.encode(text, encoding)``. Older protocols write bytes as this call."""
    n = args.check_count(1, 3)
    held = args.held(0)
    encoding = args.held(1) if n > 1 else "utf-8"
    if n > 2 or not isinstance(held, (str, Blob)) or not isinstance(encoding, str):
        if n == 2 and isinstance(held, (*_NUMBERS, type(None))) and encoding in _LATIN_1:
            raise Refused(f"it takes a text, not {describe(held)}")
        raise NotKnown("an encoding as torch.save does not write it")
    _check_encodable(args, held, encoding.lower())
    return BYTES


def _check_encodable(args: Arguments, text: str | Blob, encoding: str) -> None:
    """Raise Refused if `text` cannot be encoded with `encoding`, and NotKnown if this encoding is not modelled."""
    if encoding not in _LATIN_1 and (encoding not in _UTF_8 or isinstance(text, Blob)):
        raise NotKnown(f"the encoding {encoding[:40]!r}")
    fits = True
    if isinstance(text, Blob):
        fits = args.objects.is_latin_1(text)
    else:
        args.objects.charge(len(text) // _AT_ONCE)
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            fits = False
    if not fits:
        raise Refused(f"a text has characters that {encoding} cannot encode")


def bytearray_(args: Arguments) -> Made:
    """Return the value of ``bytearray()`` with bytes, a text and its encoding, a length, or a sequence of numbers."""
    n = args.check_count(0, 3)
    held = args.held(0) if n else BYTES
    if n > 1:
        encoding = args.held(1)
        if n > 2 or not isinstance(held, (str, Blob)) or not isinstance(encoding, str):
            raise NotKnown("a bytearray as pickle does not write it")
        _check_encodable(args, held, encoding.lower())
    elif isinstance(held, (str, Blob, float)) or held is None:
        raise Refused(f"it takes bytes, not {describe(held)}")
    elif isinstance(held, int):
        if held < 0:
            raise Refused("its length is negative")
        if held > LIMITS.inline_bytes:
            raise NotKnown(f"it takes {held:,} bytes of memory")
        args.objects.copy(held, 1)
    elif held is not BYTES and held is not BYTEARRAY:
        for item in _elements(args, args.items[0]):
            held = args.objects.held(item)
            if not isinstance(held, int):
                raise NotKnown(f"a bytearray made from {describe(held)}")
            if not 0 <= held < 256:
                raise Refused("a byte must be in range(0, 256)")
    return BYTEARRAY


def size(args: Arguments) -> Made:
    """Return the value of ``torch.Size()``, optionally with an iterable of integers as its argument."""
    if not args.check_count(0, 1):
        return SizeValue([])
    sizes = []
    for item in _elements(args, args.items[0]):
        held = args.objects.held(item)
        if not isinstance(held, int):
            if isinstance(held, (float, str, Tuple)) or held is None:
                raise Refused(f"it takes integers, not {describe(held)}")
            raise NotKnown(f"a size that is {describe(held)}")
        sizes.append(int(held))
    return SizeValue(sizes)


def device(args: Arguments) -> Made:
    """Return the value of ``torch.device()`` with a text and an optional index as arguments."""
    n = args.check_count(1, 2)
    held = args.held(0)
    if n == 1 and held is DEVICE:
        return DEVICE
    if n == 1 and type(held) is int:
        raise NotKnown("a device given as a number, which depends on the machine")
    if not isinstance(held, str):
        raise Refused(f"it takes a text, not {describe(held)}") if held is None else NotKnown("a device")
    found = _DEVICE.fullmatch(held)
    if found is None or found[1] not in DEVICE_TYPES:
        raise Refused(f"torch knows no device {held[:40]!r}")
    if n == 2 and args.items[1] is not None:
        index = args.integer(1, "index")
        if index < 0 or found[2] is not None:
            raise Refused(f"the index of a device is {index}")
    return DEVICE


def layout(args: Arguments) -> Held:
    """Return the value of ``torch.serialization._get_layout(name)``, a layout."""
    args.check_count(1)
    held = args.held(0)
    if held not in LAYOUTS:
        raise Refused(f"torch has no layout {held[:40]!r}" if isinstance(held, str) else "torch has no such layout")
    assert isinstance(held, str)
    return LayoutValue(held)
