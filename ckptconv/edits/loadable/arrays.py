"""Convert numpy's arrays, scalars and dtypes to tensors, Python values and texts.

Source: ``array_reduce``, ``array_setstate`` (``methods.c``), ``arraydescr_reduce``, ``arraydescr_setstate``
(``descriptor.c``) and ``_frombuffer`` (``numeric.py``) of numpy 1 and 2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count
from math import prod

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Cast, Data
from ckptconv.checkpoint.describe import describe
from ckptconv.checkpoint.legacy_python import bytes_of, text_of
from ckptconv.checkpoint.merging import TensorCalls
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import Reference, Storage, row_major
from ckptconv.dtypes import BY_NAME
from ckptconv.edits.loadable.pickled import LONGEST_WORD, NotPlain, Pickled, count_of, data_of, pickled
from ckptconv.errors import LimitError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Global,
    List,
    Node,
    PersistentId,
    Tuple,
    Value,
    add_elements,
    args_of,
    imported_name,
    members_of,
    set_items,
    strings_of,
)
from ckptconv.work import CHARACTERS, work

_NAME = regex(r"([biufcOSUVMm])([0-9]{0,9})|(\?)")
#: The names of dtypes, which torch and numpy share, by kind and size.
_TORCH = {
    ("b", 1): "bool", ("i", 1): "int8", ("i", 2): "int16", ("i", 4): "int32", ("i", 8): "int64", ("u", 1): "uint8",
    ("u", 2): "uint16", ("u", 4): "uint32", ("u", 8): "uint64", ("f", 2): "float16", ("f", 4): "float32",
    ("f", 8): "float64", ("c", 8): "complex64", ("c", 16): "complex128",
}  # a table  # fmt: skip
#: The formats of the module struct for one element. A complex number is two floats.
_STRUCT = {
    "bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I",
    "uint64": "Q", "float16": "e", "float32": "f", "float64": "d", "complex64": "ff", "complex128": "dd",
}  # a table  # fmt: skip
_STEPS = 5  # of work for a dtype
_TIME_BYTES = 8
_NO_TIME = -(1 << 63)
#: Units of time: the seconds in each, and the characters of its ISO text.
_LONG_UNITS = {"D": (86_400, 10), "h": (3_600, 13), "m": (60, 16)}
#: The second and its parts: the digits after the point.
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9, "ps": 12, "fs": 15, "as": 18}


@dataclass(frozen=True)
class NumpyDType:
    """A dtype of numpy.

    Attributes:
        kind: numpy's letter for the kind of the dtype.
        itemsize: The bytes of an element.
        order: The byte order: ``<``, ``>``, or ``|`` if there is none.
        unit: The unit of time for ``M`` and ``m``, or an empty string.
        fields: The name, dtype and offset of each field of a structured dtype (``V``).
    """

    kind: str
    itemsize: int
    order: str
    unit: str = ""
    fields: tuple[tuple[str, NumpyDType, int], ...] = ()

    @property
    def torch(self) -> str | None:
        """The name of torch's dtype, or None if torch has no such dtype."""
        return _TORCH.get((self.kind, self.itemsize))

    @property
    def text(self) -> str:
        """The text for ``numpy.dtype``. Raises NotPlain for a structured dtype."""
        if self.fields:
            raise NotPlain("a structured dtype has no short name")
        if self.torch and self.order != ">":
            return self.torch
        if self.kind == "O":
            return "object"
        size = self.itemsize // 4 if self.kind == "U" else self.itemsize
        return f"{self.order}{self.kind}{size}{self.unit and f'[{self.unit}]'}"

    def reader(self) -> Callable[[bytes], Value]:
        """Return a function that converts the bytes of an element to a Python value.

        Both functions may raise NotPlain.
        """
        if self.torch:
            return self._number(_STRUCT[self.torch])
        if self.fields:
            return self._record
        reader: dict[str, Callable[[bytes], Value]] = {
            "S": lambda data: data.rstrip(b"\0"),
            "V": bytes,
            "U": self._text,
            "f": lambda data: _long_double(data[::-1] if self.order == ">" else data),
            "M": self._time,
            "m": self._span,
        }
        if self.kind not in reader:
            raise NotPlain(f"elements of its dtype {self.text} have no exact plain form")
        return reader[self.kind]

    def _number(self, form: str) -> Callable[[bytes], Value]:
        """Return a function that reads a number of the struct format `form`. Two letters stand for a complex number."""
        unpack = struct.Struct((">" if self.order == ">" else "<") + form).unpack
        if len(form) == 1:
            return lambda data: unpack(data)[0]
        return lambda data: Call("REDUCE", Global("builtins", "complex"), Tuple([*unpack(data)]))

    def _record(self, data: bytes) -> Value:
        """Return a dict of the fields in `data`, by name."""
        items: list[Value] = []
        for name, dtype, offset in self.fields:
            items += (name, dtype.reader()(data[offset : offset + dtype.itemsize]))
        return set_items(Dict(), items)

    def _text(self, data: bytes) -> str:
        """Return a text in UTF-32, without the zeros at its end. Raise NotPlain if it is not Unicode."""
        try:
            text = data.decode("utf-32-be" if self.order == ">" else "utf-32-le", "surrogatepass")
        except UnicodeDecodeError:
            raise NotPlain("it contains text that is not valid Unicode") from None
        return text.rstrip("\0")

    def _count(self, data: bytes) -> int | None:
        """Return the number of units of a time in `data`, or None for NaT."""
        count = int.from_bytes(data, "big" if self.order == ">" else "little", signed=True)
        return None if count == _NO_TIME else count

    def _time(self, data: bytes) -> str:
        """Return a datetime64 as numpy prints it. Raise NotPlain if it has no ISO text."""
        count = self._count(data)
        if count is None:
            return "NaT"
        try:
            if self.unit in ("Y", "M"):
                years, months = divmod(count, 12) if self.unit == "M" else (count, 0)
                date = datetime(1970 + years, 1 + months, 1)
                return f"{date:%Y}".zfill(4) + (f"-{date.month:02}" if self.unit == "M" else "")
            seconds, characters = _LONG_UNITS.get(self.unit, (1, 19))
            digits = 0 if self.unit in _LONG_UNITS else _DIGITS[self.unit]
            whole, rest = divmod(count * seconds, 10**digits)
            text = (datetime(1970, 1, 1) + timedelta(seconds=whole)).isoformat()[:characters]
        except (OverflowError, ValueError, KeyError):
            raise NotPlain(f"a time in it, in the unit {self.unit or 'none'}, cannot be written in ISO form") from None
        return text + (f".{rest:0{digits}}" if digits else "")

    def _span(self, data: bytes) -> str:
        """Return a timedelta64 as an ISO duration, or ``NaT``. Raise NotPlain for an unknown unit."""
        count = self._count(data)
        if count is None:
            return "NaT"
        sign = "-" if count < 0 else ""
        if self.unit in _LONG_UNITS:
            return f"{sign}P{'' if self.unit == 'D' else 'T'}{abs(count)}{self.unit.upper()}"
        if self.unit not in _DIGITS:
            raise NotPlain(f"a span of time in it, in the unit {self.unit or 'none'}, cannot be written in ISO form")
        digits = _DIGITS[self.unit]
        whole, rest = divmod(abs(count), 10**digits)
        return f"{sign}PT{whole}{f'.{rest:0{digits}}' if digits else ''}S"


def _long_double(data: bytes) -> float:
    """Return the float that is equal to a long double of an x86 processor. Raise NotPlain if there is none.

    Such a number has 80 bits, followed by arbitrary bytes. Long doubles of 16 bytes from other processors, except
    for zero, do not end in zero bytes.
    """
    mantissa, exponent = int.from_bytes(data[:8], "little"), int.from_bytes(data[8:10], "little")
    sign, exponent = (-1.0 if exponent >> 15 else 1.0), exponent & 0x7FFF
    is_x86 = len(data) == 12 or (len(data) == 16 and data[14:] == b"\0\0")
    if is_x86 and not mantissa and not exponent:
        return 0.0 * sign
    if not is_x86 or not mantissa >> 63 or exponent == 0x7FFF:
        raise NotPlain("it contains a long double that a float may not represent exactly")
    shift = exponent - 16383 - 63
    zeros = (mantissa & -mantissa).bit_length() - 1
    try:
        number = float(mantissa >> zeros) * 2.0 ** (shift + zeros) if shift + zeros >= -1074 else 0.0
    except OverflowError:
        number = 0.0
    if (mantissa >> zeros).bit_length() > 53 or not number or number == float("inf"):
        raise NotPlain("it contains a long double that a float cannot represent exactly")
    return sign * number


def numpy_dtype(value: Value, depth: int = 8) -> NumpyDType:
    """Return the dtype that `value` builds. Raise NotPlain if its form is not known.

    Structured dtypes may be nested up to `depth` levels.
    """
    work().charge(_STEPS)  # any number of fields and arrays can share it
    made = pickled(value) if isinstance(value, Call) else None
    if made is None or made.cls != "numpy.dtype" or not made.args or len(made.states) != 1 or not depth:
        raise NotPlain("its dtype is not in the form that NumPy writes")
    name, state = text_of(made.args[0]), made.states[0]
    found = _NAME.fullmatch(name) if name else None
    if found is None or not isinstance(state, Tuple) or len(state.items) not in (8, 9):
        raise NotPlain(f"its dtype is {name[:LONGEST_WORD] if name else 'not one of NumPy'}")
    kind, itemsize = ("b", 1) if found[3] else (found[1], int(found[2] or 0))
    order = _word(state.items[1])
    inner, names, fields, size = state.items[2:6]
    if kind == "U":
        itemsize *= 4
    if (kind in "SUV" and size not in (-1, itemsize)) or (kind in "Mm" and itemsize != _TIME_BYTES):
        raise NotPlain("its dtype has two different sizes")
    dtype = NumpyDType(kind, itemsize, order)
    if order not in ("<", ">") and not (order == "|" and (kind in "OSV" or itemsize == 1)):
        raise NotPlain("its dtype has no byte order")
    if kind in "Mm":
        return NumpyDType(kind, itemsize, order, _unit(state.items[8:]))
    if inner is not None or names is not None or fields is not None:
        return _structured(dtype, inner, names, fields, depth)
    return dtype


def _word(value: Value) -> str:
    """Return the short text `value`, which is bytes in pickles of Python 2. Other values give an empty string."""
    data = bytes_of(value)
    return data.decode("latin-1") if data is not None else text_of(value) or ""


def _unit(metadata: list[Value]) -> str:
    """Return the unit of time in the metadata of a dtype. Raise NotPlain for a multiple of a unit."""
    parts = metadata[0].items if metadata and isinstance(metadata[0], Tuple) else []
    unit = parts[1].items if len(parts) == 2 and isinstance(parts[1], Tuple) else []
    word = _word(unit[0]) if len(unit) == 4 else ""
    if len(unit) != 4 or [number for number in unit[1:3] if number != 1] or len(word) > LONGEST_WORD:
        raise NotPlain("its unit of time is a multiple, or not valid")
    return word


def _structured(dtype: NumpyDType, inner: Value, names: Value, fields: Value, depth: int) -> NumpyDType:
    """Return `dtype` with its fields. Raise NotPlain if it is not a structured dtype or a field is not known.

    The other arguments are the items of its state. `depth` is as in :func:`numpy_dtype`.
    """
    if dtype.kind != "V" or inner is not None or not isinstance(names, Tuple) or not isinstance(fields, Dict):
        raise NotPlain("its elements are arrays")
    known = strings_of(fields)
    found = []
    for value in names.items:
        name = text_of(value)
        parts = known.get(name) if name is not None else None
        if name is None or not isinstance(parts, Tuple) or len(parts.items) < 2:
            raise NotPlain("its dtype has a field without a definition")
        field, offset = numpy_dtype(parts.items[0], depth - 1), count_of(parts.items[1])
        if field.kind == "O" or offset + field.itemsize > dtype.itemsize:
            raise NotPlain("its dtype has a field of objects, or one outside its bytes")
        found.append((name, field, offset))
    if len({name for name, _, _ in found}) != len(found) or not found:
        raise NotPlain("its dtype has no fields, or two with the same name")
    return NumpyDType("V", dtype.itemsize, dtype.order, fields=tuple(found))


_ARRAYS = ("numpy.ndarray", "numpy.matrix", "numpy.memmap")
_MODULES = ("numpy.core", "numpy._core")
#: The functions that pickles call to make an array, or a scalar.
RECONSTRUCT = tuple(f"{module}.multiarray._reconstruct" for module in _MODULES)
FROM_BUFFER = tuple(f"{module}.numeric._frombuffer" for module in _MODULES)
SCALAR = tuple(f"{module}.multiarray.scalar" for module in _MODULES)


def is_array(value: Value) -> bool:
    """Return whether `value` is a call that builds a numpy array."""
    name = imported_name(value.callable, 2) if isinstance(value, Call) and isinstance(value.callable, Global) else ""
    return name in RECONSTRUCT or name in FROM_BUFFER


class _Array:
    """An array as its pickle describes it.

    Args:
        made: The object. NotPlain is raised if its form is not known.

    Attributes:
        shape: The shape.
        dtype: The dtype.
        strides: The strides in elements.
        data: The data: a bytes object, or a list of objects.
    """

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
                raise NotPlain("it is an instance of a subclass of ndarray")
            state = made.states[0] if len(made.states) == 1 else None
            if not isinstance(state, Tuple) or len(state.items) != 5:
                raise NotPlain("its state is not in the form that NumPy writes")
            _, shape, dtype, fortran, self.data = state.items
            order, axes, states = ("F" if fortran else "C"), None, []
        if states or made.items or made.elements or not isinstance(shape, Tuple):
            raise NotPlain("it is not in the form that NumPy writes")
        if len(shape.items) > LIMITS.rank:  # any number of arrays can share it
            raise NotPlain(f"it has more than {LIMITS.rank} dimensions")
        self.shape = tuple(count_of(size) for size in shape.items)
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
    """Return the shape and strides of an array of `shape` after a transposition.

    Raise NotPlain if `axes` are not valid.
    """
    items = axes.items if isinstance(axes, Tuple) else []
    order = [count_of(axis) for axis in items] if len(items) == len(shape) else None
    if order is None or sorted(order) != [*range(len(shape))]:
        raise NotPlain("the order of its axes is not valid")
    strides = row_major(shape)
    return tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)


def scalar(made: Pickled) -> Value:
    """Return the Python value of a numpy scalar. Raise NotPlain if there is no equal value."""
    dtype, value = made.args if len(made.args) == 2 and not made.states else (None, None)
    read = numpy_dtype(dtype)
    if read.kind == "O":
        return value
    data = bytes_of(value)
    if data is None or len(data) != read.itemsize:
        raise NotPlain("its number of bytes does not match its dtype")
    work().charge(len(data) // CHARACTERS)  # any number of scalars can share them
    return read.reader()(data)


def scalar_text(call: Call) -> str | None:
    """Return the value and dtype of the numpy scalar that `call` builds, as a text.

    Return None if it does not build one.
    """
    made = pickled(call)
    if made is None or made.cls not in SCALAR:
        return None
    try:
        value, dtype = scalar(made), numpy_dtype(made.args[0]).text
    except NotPlain:
        return None
    return None if isinstance(value, Node) else f"{describe(value)} (numpy {dtype})"


class Arrays:
    """Converts arrays to tensors, and adds their storages to the references of `checkpoint`.

    Attributes:
        in_states: The ids of the arrays in states of random generators. These arrays become lists.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._blobs: Readable = checkpoint.blobs or checkpoint.source
        self._calls = TensorCalls(checkpoint.graph)
        # no record of a zip has such a name; writers choose another one
        self._keys = (key for i in count() if (key := f"\0{i}") not in checkpoint.storages)
        self._room, self._values = LIMITS.gathered(checkpoint.source.size), LIMITS.pickle_opcodes
        self.in_states: set[int] = set()

    def array(self, made: Pickled) -> Value:
        """Return a tensor or nested lists for an array.

        Nested lists are returned if torch does not have the dtype, or if the array is in the state of a random
        generator.

        Raises:
            NotPlain: The array cannot be converted exactly.
            LimitError: All arrays together would take far more bytes than the file.
        """
        array = _Array(made)
        dtype = array.dtype
        if dtype.kind == "O":
            return self._objects(array)
        data = data_of(array.data, self._blobs)
        if data.length != array.numel * dtype.itemsize:
            raise NotPlain("its number of bytes does not match its shape and dtype")
        if dtype.torch and id(made.call) not in self.in_states:
            return self._tensor(array, dtype.torch, data)
        self._spend(data.length, values=array.numel + prod(array.shape[:-1]))
        work().charge(data.length // CHARACTERS)
        if array.numel and not dtype.itemsize:
            raise NotPlain("its elements have no bytes")
        held, read = data.source.read(data.offset, data.length), dtype.reader()
        return _nested(array, lambda i: read(held[i * dtype.itemsize : (i + 1) * dtype.itemsize]))

    def _spend(self, nbytes: int, values: int = 0) -> None:
        """Count `nbytes` bytes and `values` values that the conversion creates. Raise LimitError above the limits.

        A small pickle can use one byte string any number of times.
        """
        self._room -= nbytes
        self._values -= values
        if self._room < 0 or self._values < 0:
            raise LimitError("its arrays would take far more bytes than the file has")

    def _objects(self, array: _Array) -> Value:
        """Return nested lists of the elements of an array of objects. Pickles store them in row-major order.

        Raises NotPlain if their number does not match the shape.
        """
        items = (members_of(array.data) if isinstance(array.data, List) else None) or []
        if len(items) != array.numel:
            raise NotPlain("its number of objects does not match its shape")
        self._spend(0, values=prod(array.shape[:-1]))
        array.strides = row_major(array.shape)
        return _nested(array, items.__getitem__)

    def _tensor(self, array: _Array, name: str, data: ByteRange) -> Call:
        """Return the call that builds a tensor of torch's dtype `name` on a new storage on the CPU.

        `data` is its bytes.
        """
        dtype, key = BY_NAME[name], next(self._keys)
        self._spend(data.length)
        # torch swaps the bytes of typed storages on loading, but not those of an UntypedStorage
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
    """Return nested lists like those of ``tolist()``. `element` returns the element at an index of the data."""
    shape, strides = array.shape, array.strides

    def part(dimension: int, at: int) -> Value:
        if dimension == len(shape):
            return element(at)
        inner = [part(dimension + 1, at + i * strides[dimension]) for i in range(shape[dimension])]
        return add_elements(List(), inner)

    return part(0, 0)
