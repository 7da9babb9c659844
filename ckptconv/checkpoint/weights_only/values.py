"""The values that the unpickler would hold, as far as what it does next depends on them.

Atoms stand for themselves, Python 2's strings as the text that ``encoding="utf-8"`` makes of them, globals, tuples,
lists, dicts and sets as their nodes. What a call makes is one of the classes here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckptconv.dtypes import DType
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Blob, Dict, Global, List, PersistentId, Set, Tuple, Value


class Made:
    """An object of the class `cls`, of which nothing else matters.

    Attributes:
        cls: Python's name for the class.
        is_hashable: Whether it can be a key.
    """

    __slots__ = ("cls", "is_hashable")

    def __init__(self, cls: str, *, is_hashable: bool) -> None:
        self.cls = cls
        self.is_hashable = is_hashable


class SizeValue(Made):
    """A ``torch.Size`` of `sizes`."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: list[int]) -> None:
        super().__init__("torch.Size", is_hashable=True)
        self.sizes = sizes


class LayoutValue(Made):
    """The ``torch.layout`` called `name`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__("torch.layout", is_hashable=True)
        self.name = name


class StorageValue:
    """A storage: its dtype and its size in bytes, and the node that refers to it."""

    __slots__ = ("dtype", "nbytes", "node")

    def __init__(self, dtype: DType, nbytes: int, node: PersistentId) -> None:
        self.dtype = dtype
        self.nbytes = nbytes
        self.node = node


@dataclass(slots=True, eq=False)
class TensorValue:
    """A tensor. Shape, stride and offset count elements; those of a layout that is not strided are not held.

    Attributes:
        dtype: torch's name for it.
        shape: The sizes.
        stride: The strides.
        offset: Where it starts in its storage.
        storage: What it shows; None where it has none of its own.
        kind: ``strided``, ``quantized``, ``sparse`` or ``nested``.
        device: ``cpu`` or ``meta``.
        is_parameter: Whether its class is ``torch.nn.Parameter`` and not ``torch.Tensor``.
        requires_grad: Whether it does.
        is_plain: Whether it has no attributes and no lazy bits.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage: StorageValue | None = None
    kind: str = "strided"
    device: str = "cpu"
    is_parameter: bool = False
    requires_grad: bool = False
    is_plain: bool = True


class _Unknown:
    """What nobody here knows."""

    __slots__ = ()


UNKNOWN = _Unknown()
Held: TypeAlias = "Value | Made | StorageValue | TensorValue | _Unknown"

ORDERED_DICT = Made("collections.OrderedDict", is_hashable=False)
COUNTER = Made("collections.Counter", is_hashable=False)
SET = Made("builtins.set", is_hashable=False)
BYTEARRAY = Made("builtins.bytearray", is_hashable=False)
BYTES = Made("builtins.bytes", is_hashable=True)
COMPLEX = Made("builtins.complex", is_hashable=True)
DEVICE = Made("torch.device", is_hashable=True)

_WORDS: dict[type, str] = {
    type(None): "None",
    bool: "a truth value",
    int: "an integer",
    float: "a float",
    str: "a text",
    bytes: "a byte string",
    Blob: "a text",
    Tuple: "a tuple",
    List: "a list",
    Dict: "a dict",
    Set: "a set",
    StorageValue: "a storage",
    TensorValue: "a tensor",
}


def said(held: Held) -> str:
    """What `held` is, for a reason."""
    if isinstance(held, Made):
        return f"a {held.cls.removeprefix('builtins.')}"
    if isinstance(held, Global):
        return str(held)
    return _WORDS.get(type(held), "an object")


#: The version of torch that is modelled.
TORCH = "2.13"

Answer: TypeAlias = Literal["loads", "refused", "not known"]
Known: TypeAlias = Literal["refused", "not known"]


class Refused(Exception):
    """torch raises an exception here; the text says why, in torch's terms."""


class NotKnown(Exception):
    """What torch does here is not modelled; the text says what."""


class AfterUnknown(NotKnown):
    """It depends on a value of which was already said that it is not known, or refused."""


@dataclass(frozen=True, eq=False)
class Reason:
    """Why a graph does not load, or why that is not known.

    Attributes:
        known: Which of the two.
        text: The reason, in words; of a global, its name.
        node: The node at which it happens; None where it is the file as a whole.
        needs: The module of torch or torchao that makes the unpickler take it once it is imported.
        is_spelling: Whether the same, written in another way, would be taken.
    """

    known: Known
    text: str
    node: Value = None
    needs: str | None = None
    is_spelling: bool = False
