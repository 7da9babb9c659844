"""numpy's arrays, scalars and dtypes: tensors, Python values and texts.

Source: ``array_reduce``, ``array_setstate`` (``methods.c``) and ``_frombuffer`` (``numeric.py``) of numpy 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Cast, Data
from ckptconv.checkpoint.describe import describe
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.new_tensors import TensorCalls, row_major
from ckptconv.checkpoint.tensor_info import Reference, Storage
from ckptconv.dtypes import BY_NAME
from ckptconv.edits.loadable.numpy_dtypes import numpy_dtype
from ckptconv.edits.loadable.pickled import NotPlain, Pickled, bytes_of, count_of, data_of, pickled
from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    AT_ONCE,
    Call,
    Effect,
    Global,
    List,
    Node,
    PersistentId,
    Tuple,
    Value,
    args_of,
    imported_name,
)

_ARRAYS = ("numpy.ndarray", "numpy.matrix", "numpy.memmap")
_MODULES = ("numpy.core", "numpy._core")
#: What pickles call to make an array, and a scalar.
RECONSTRUCT = tuple(f"{module}.multiarray._reconstruct" for module in _MODULES)
FROM_BUFFER = tuple(f"{module}.numeric._frombuffer" for module in _MODULES)
SCALAR = tuple(f"{module}.multiarray.scalar" for module in _MODULES)


def is_array(value: Value) -> bool:
    """Whether `value` is an array of numpy's."""
    name = imported_name(value.callable, 2) if isinstance(value, Call) and isinstance(value.callable, Global) else ""
    return name in RECONSTRUCT or name in FROM_BUFFER


def dtype_text(dtype: Value) -> str:
    """The text of which ``numpy.dtype`` makes `dtype`. Raises NotPlain."""
    return numpy_dtype(dtype).text


def type_text(name: str) -> str:
    """The text of which ``numpy.dtype`` makes the dtype of numpy's type `name`."""
    return name.rpartition(".")[2].removesuffix("_")


class _Array:
    """An array as its pickle says it: `shape`, `dtype`, `strides` in elements, and `data`, a bytes object or a list."""

    def __init__(self, made: Pickled) -> None:
        self.data: Value
        if made.cls in FROM_BUFFER:
            self.data, dtype, shape, order = made.args[:4] if len(made.args) in (4, 5) else (None, None, None, None)
            axes = made.args[4] if len(made.args) == 5 else None
            order = text_of(order) or ""
            states: list[Value] = [*made.states]
        else:
            cls = made.args[0] if made.args else None
            if not isinstance(cls, Global) or imported_name(cls, 2) not in _ARRAYS:
                raise NotPlain("it is an array of a class of its own")
            state = made.states[0] if len(made.states) == 1 else None
            if not isinstance(state, Tuple) or len(state.items) != 5:
                raise NotPlain("its state is not one of numpy's arrays")
            _, shape, dtype, fortran, self.data = state.items
            order, axes, states = ("F" if fortran else "C"), None, []
        if states or made.items or made.elements or not isinstance(shape, Tuple):
            raise NotPlain("it is not said as numpy says an array")
        self.shape = tuple(count_of(size) for size in shape.items)
        if len(self.shape) > LIMITS.rank:
            raise NotPlain(f"it has more than {LIMITS.rank} dimensions")
        self.dtype = numpy_dtype(dtype)
        self.strides = row_major(self.shape)
        if order == "F":
            self.strides = row_major(self.shape[::-1])[::-1]
        elif order == "K" and axes is not None:
            self.shape, self.strides = _transposed(self.shape, axes)
        elif order != "C":
            raise NotPlain("the order of its elements is not known")

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


def _transposed(shape: tuple[int, ...], axes: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of an array whose elements stand in order in one of `shape`, of which it has the `axes`."""
    order = [count_of(axis) for axis in axes.items] if isinstance(axes, Tuple) else []
    if sorted(order) != [*range(len(shape))]:
        raise NotPlain("the order of its axes is none")
    strides = row_major(shape)
    return tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)


def scalar(made: Pickled) -> Value:
    """Return the Python value of a scalar. Raises NotPlain."""
    dtype, value = made.args if len(made.args) == 2 and not made.states else (None, None)
    read = numpy_dtype(dtype)
    if read.kind == "O":
        return value
    data = bytes_of(value)
    if data is None or len(data) != read.itemsize:
        raise NotPlain("it has not as many bytes as its dtype says")
    return read.reader()(data)


def scalar_text(call: Call) -> str | None:
    """Return the value and the dtype of the scalar that `call` makes, or None if it makes nothing of the kind."""
    made = pickled(call)
    if made is None or made.cls not in SCALAR:
        return None
    try:
        value, dtype = scalar(made), dtype_text(made.args[0])
    except NotPlain:
        return None
    return None if isinstance(value, Node) else f"{describe(value)} (numpy {dtype})"


class Arrays:
    """Makes tensors of arrays, for `checkpoint`, whose references gain theirs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._blobs: Readable = checkpoint.blobs or checkpoint.source
        self._calls = TensorCalls(checkpoint.graph)
        # no record of a zip has such a name, so none is taken for the storage's; a writer gives it another
        self._keys = (key for i in count() if (key := f"\0{i}") not in checkpoint.storages)
        self._room, self._values = LIMITS.gathered(checkpoint.source.size), LIMITS.pickle_opcodes
        #: The arrays, by the ids of their nodes, that belong to the state of a random generator.
        self.in_states: set[int] = set()

    def array(self, made: Pickled) -> Value:
        """The tensor, or the nested lists, for an array. Raises NotPlain."""
        array = _Array(made)
        dtype = array.dtype
        if dtype.kind == "O":
            return self._objects(array)
        data = data_of(array.data, self._blobs)
        if data.length != array.numel * dtype.itemsize:
            raise NotPlain("it has not as many bytes as its shape and dtype say")
        if dtype.torch and id(made.call) not in self.in_states:
            return self._tensor(array, dtype.torch, data)
        self._spend(data.length, values=array.numel + prod(array.shape[:-1]))
        if array.numel and not dtype.itemsize:
            raise NotPlain("its elements have no bytes")
        held, read = data.source.read(data.offset, data.length), dtype.reader()
        return _nested(array, lambda i: read(held[i * dtype.itemsize : (i + 1) * dtype.itemsize]))

    def _spend(self, nbytes: int, values: int = 0) -> None:
        """Bound what is made of byte strings, of which a pickle can use one any number of times, and of shapes."""
        self._room -= nbytes
        self._values -= values
        if self._room < 0 or self._values < 0:
            raise LimitError(
                "its arrays would take far more bytes than the file has", where=self._checkpoint.source.path
            )

    def _objects(self, array: _Array) -> Value:
        """Nested lists of what an array of objects holds, which a pickle lists in the order of the indices."""
        items = [*array.data.elements()] if isinstance(array.data, List) else []
        if len(items) != array.numel:
            raise NotPlain("it holds not as many objects as its shape says")
        self._spend(0, values=prod(array.shape[:-1]))
        array.strides = row_major(array.shape)
        return _nested(array, items.__getitem__)

    def _tensor(self, array: _Array, name: str, data: ByteRange) -> Call:
        dtype, key = BY_NAME[name], next(self._keys)
        self._spend(data.length)
        # torch turns round what a class of storages says is a number, and nothing in an UntypedStorage
        order = self._checkpoint.byteorder if dtype.storage_class else "little"
        piece: Data = data
        if dtype.itemsize > 1 and (array.dtype.order == ">") != (order == "big"):
            piece = Cast(data, name, name, data.length, swapped_in=True)
        call = self._calls.tensor(dtype, array.shape, key, data.length)
        args = args_of(call)
        if array.strides != row_major(array.shape):
            args[3] = Tuple([*array.strides])
        assert isinstance(args[0], PersistentId)
        self._checkpoint.references.append(Reference(args[0], Storage(key, "cpu", data.length, piece)))
        return call


def _nested(array: _Array, element: Callable[[int], Value]) -> Value:
    """Nested lists as ``tolist()`` gives them; `element` gives that with a number."""
    shape, strides = array.shape, array.strides

    def part(dimension: int, at: int) -> Value:
        if dimension == len(shape):
            return element(at)
        values = [part(dimension + 1, at + i * strides[dimension]) for i in range(shape[dimension])]
        made = List()
        for start in range(0, len(values), AT_ONCE):
            made.add(Effect("APPENDS", values[start : start + AT_ONCE], None))
        return made

    return part(0, 0)
