"""The table of dtypes: torch's name, storage class, item size, and safetensors' name.

Sources: ``torch.storage._dtype_to_storage_type_map`` and ``_new_dtypes`` of torch 2.15, ``Dtype`` in ``tensor.rs`` of
safetensors 0.8. Tests compare the table with them.
"""

from __future__ import annotations

from ckptconv.light_dataclass import dataclass


@dataclass(frozen=True)
class DType:
    """A dtype of torch or safetensors.

    Attributes:
        name: The name in torch without ``torch.``, or safetensors' name if torch has no such dtype.
        storage_class: The name of the class of its storages, or None if these are UntypedStorage.
        itemsize: The bytes of an item.
        packed: The number of elements in an item.
        word: The name in safetensors, or None.
    """

    name: str
    storage_class: str | None
    itemsize: int
    packed: int = 1
    word: str | None = None

    def bytes_of(self, elements: int) -> int:
        """Return how many bytes `elements` elements need. A last item that is not full counts completely."""
        return -(-elements // self.packed) * self.itemsize


_TABLE = (
    DType("float64", "DoubleStorage", 8, word="F64"),
    DType("float32", "FloatStorage", 4, word="F32"),
    DType("float16", "HalfStorage", 2, word="F16"),
    DType("bfloat16", "BFloat16Storage", 2, word="BF16"),
    DType("int64", "LongStorage", 8, word="I64"),
    DType("int32", "IntStorage", 4, word="I32"),
    DType("int16", "ShortStorage", 2, word="I16"),
    DType("int8", "CharStorage", 1, word="I8"),
    DType("uint8", "ByteStorage", 1, word="U8"),
    DType("bool", "BoolStorage", 1, word="BOOL"),
    DType("complex128", "ComplexDoubleStorage", 16),
    DType("complex64", "ComplexFloatStorage", 8, word="C64"),
    DType("qint8", "QInt8Storage", 1),
    DType("qint32", "QInt32Storage", 4),
    DType("quint8", "QUInt8Storage", 1),
    DType("quint4x2", "QUInt4x2Storage", 1, packed=2),
    DType("quint2x4", "QUInt2x4Storage", 1, packed=4),
    DType("uint16", None, 2, word="U16"),
    DType("uint32", None, 4, word="U32"),
    DType("uint64", None, 8, word="U64"),
    DType("complex32", None, 4),
    DType("bcomplex32", None, 4),
    DType("float8_e4m3fn", None, 1, word="F8_E4M3"),
    DType("float8_e4m3fnuz", None, 1, word="F8_E4M3FNUZ"),
    DType("float8_e5m2", None, 1, word="F8_E5M2"),
    DType("float8_e5m2fnuz", None, 1, word="F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", None, 1, word="F8_E8M0"),
    DType("float4_e2m1fn_x2", None, 1, word="F4"),
    DType("bits8", None, 1),
    DType("bits16", None, 2),
    DType("bits1x8", None, 1),
    DType("bits2x4", None, 1),
    DType("bits4x2", None, 1),
    *(DType(f"{kind}{bits}", None, 1) for kind in ("int", "uint") for bits in range(1, 8)),  # meta and wrappers only
)

#: Dtypes that safetensors has and torch does not. An element of F4 is half of one of torch's float4_e2m1fn_x2.
_WITHOUT_TORCH = (
    DType("F4", None, 1, 2, "F4"),
    DType("F6_E2M3", None, 3, 4, "F6_E2M3"),
    DType("F6_E3M2", None, 3, 4, "F6_E3M2"),
)

#: The dtype of ``UntypedStorage``, whose items are bytes.
UNTYPED = DType("uint8", "UntypedStorage", 1)

BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_STORAGE_CLASS = {dtype.storage_class: dtype for dtype in (*_TABLE, UNTYPED) if dtype.storage_class}
#: By safetensors' name. Elements are counted as in safetensors.
BY_WORD = {dtype.word: dtype for dtype in (*_TABLE, *_WITHOUT_TORCH) if dtype.word}
#: Dtypes of the codes of quantized weights, in torch and in layouts of other programs.
CODES = frozenset(
    ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "int8", "uint8", "int32"]
)


def get_dtype(name: str) -> DType:
    """Return the dtype whose name in torch, or else in safetensors, is `name`. Raises KeyError without one."""
    return BY_NAME.get(name) or BY_WORD[name]
