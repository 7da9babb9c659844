"""What the unpickler holds while it runs: the value of each node, and what is in lists and mappings by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from math import prod
from typing import Literal, TypeAlias

from ckptconv.byteranges.reading import read
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Inflate
from ckptconv.checkpoint.safe_globals import ALLOWED
from ckptconv.checkpoint.tensor_info import Storage
from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, DType
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Dict,
    Global,
    List,
    Object,
    PersistentId,
    Py2String,
    Set,
    Tuple,
    Value,
    imported_name,
    is_count,
)
from ckptconv.pickles.rows import RowCall, RowId


class Made:
    """An object of the class `cls`, of which nothing else matters.

    Attributes:
        cls: Python's name for the class.
        is_hashable: Whether it can be a key.
    """

    __slots__ = ("cls", "is_hashable")

    def __init__(self, cls: str, *, is_hashable: bool = True) -> None:
        self.cls = cls
        self.is_hashable = is_hashable


class SizeValue(Made):
    """A ``torch.Size`` of `sizes`."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: list[int]) -> None:
        super().__init__("torch.Size")
        self.sizes = sizes


class LayoutValue(Made):
    """The ``torch.layout`` called `name`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__("torch.layout")
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
BYTES = Made("builtins.bytes")
COMPLEX = Made("builtins.complex")
DEVICE = Made("torch.device")

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


_WINDOW = 1 << 20
_BEYOND_LATIN_1 = regex(rb"[\xc4-\xf4]")  # what starts a character of UTF-8 above U+00FF
_MUTABLE = (List, Dict, Set)
_MADE = frozenset((Call, RowCall, PersistentId, RowId))


@dataclass(eq=False)
class Contents:
    """The bytes that a graph refers to and does not hold.

    Attributes:
        storages: By the id of the node that refers to them; what is not there cannot be read.
        blobs: Where the long texts stand; None where they cannot be read.
        byteorder: Of the storages' numbers.
        are_there: Whether the storages are filled while the pickle is read; in torch's older format they follow it.
    """

    storages: Mapping[int, Storage] = field(default_factory=dict)
    blobs: Readable | None = None
    byteorder: str = "little"
    are_there: bool = True


def before(order: int | None, now: int | None) -> bool:
    """Whether what has the number `order` was done by `now`; edits have no number, and were done before."""
    return order is None or now is None or order < now


class Objects:
    """The values by the ids of their nodes.

    `make` gives that of a call that has none yet; `steps` is how much may be looked at again and again.
    """

    def __init__(self, contents: Contents, make: Callable[[Call], Held], steps: int) -> None:
        self.contents = contents
        self.left = steps
        self.made: dict[int, Held] = {}
        self._make = make
        self._hashable: dict[int, bool] = {}
        self._latin_1: dict[int, bool] = {}
        self._bytes_left = LIMITS.values_read
        self._copies_left = LIMITS.values_copied

    def held(self, value: Value) -> Held:
        """What the unpickler has for `value`."""
        kind = type(value)
        if kind in _MADE:
            found = self.made.get(id(value))
            if found is not None:
                return found
            if isinstance(value, PersistentId):
                return self.made.setdefault(id(value), _storage(value))
            assert isinstance(value, Call)
            return self._make(value)
        if kind is Py2String:
            assert isinstance(value, Py2String)
            return value.data.decode("utf-8", "replace") if value.text is None else value.text
        return value

    def charge(self, steps: int) -> None:
        """Count `steps`; a file that asks for the same long things again and again ends there."""
        self.left -= steps
        if self.left < 0:
            raise NotKnown("more steps than a file of its size should take")

    def copy(self, elements: int, itemsize: int) -> None:
        """Count what torch allocates for so many elements, of which the file may hold one."""
        self._copies_left -= elements * itemsize
        if self._copies_left < 0:
            raise NotKnown("more memory than a file of its size should take")

    def elements(self, value: Value, now: int | None) -> list[Value] | None:
        """What is in the tuple, list or set `value` by `now`; None where it is no such thing."""
        if isinstance(value, Tuple):
            found = value.items
        elif isinstance(value, (List, Set)):
            self.charge(len(value.effects))
            found = [item for effect in value.effects if before(effect.order, now) for item in effect.values]
        else:
            return None
        self.charge(len(found))
        return found

    def keys(self, value: Value, now: int | None) -> list[Value] | None:
        """The keys of the mapping `value` by `now`; None where it is none."""
        if not self.is_mapping(value):
            return None
        if isinstance(value, Call) and (not isinstance(value.args, Tuple) or value.args.items):
            raise NotKnown("what is in a mapping that was made of something")
        assert isinstance(value, Object)
        found = [effect.values[i] for effect, i in value.pairs() if before(effect.order, now)]
        self.charge(len(found))
        return found

    def items(self, value: Dict, now: int | None) -> Iterator[tuple[Value, Value]]:
        """The items of the dict `value` by `now`."""
        return ((e.values[i], e.values[i + 1]) for e, i in value.pairs() if before(e.order, now))

    def is_mapping(self, value: Value) -> bool:
        """Whether `value` is a dict, an OrderedDict or a Counter."""
        if not isinstance(value, Call):
            return isinstance(value, Dict)
        held = self.held(value)
        if held is not ORDERED_DICT and held is not COUNTER:
            return False
        if any(effect.opcode == "BUILD" for effect in value.effects):  # one can stand before a method
            raise NotKnown("a mapping that has attributes, where its items are wanted")
        return True

    def is_empty(self, value: Value, now: int | None) -> bool:
        """Whether Python takes `value` for false by `now`."""
        held = self.held(value)
        if isinstance(held, (bool, int, float, str)) or held is None:
            return not held
        inside = self.elements(value, now)
        if inside is None:
            inside = self.keys(value, now)
        if inside is not None:
            return not inside
        if held is UNKNOWN:
            raise AfterUnknown
        if isinstance(held, Global):
            return False
        raise NotKnown(f"whether {said(held)} counts as empty")

    def check_hashable(self, value: Value, what: str = "key") -> None:
        """Raise where Python cannot hash `value`, which is a `what`."""
        if not self._is_hashable(value, 0):
            raise Refused(f"a {what} that Python cannot hash")

    def _is_hashable(self, value: Value, depth: int) -> bool:
        if isinstance(value, Tuple):
            known = self._hashable.get(id(value))
            if known is not None:
                return known
            if depth == LIMITS.nested_calls:
                raise NotKnown("tuples in tuples too deep for a key")
            found = all(self._is_hashable(item, depth + 1) for item in value.items)
            self._hashable[id(value)] = found
            return found
        if isinstance(value, _MUTABLE):
            return False
        held = self.held(value)
        if held is UNKNOWN:
            raise AfterUnknown
        return held.is_hashable if isinstance(held, Made) else True

    # What is not in the graph

    def is_latin_1(self, text: Blob) -> bool:
        """Whether the long `text` has no character above U+00FF."""
        if id(text) not in self._latin_1:
            self._latin_1[id(text)] = not any(map(_BEYOND_LATIN_1.search, self._windows(text)))
        return self._latin_1[id(text)]

    def _windows(self, text: Blob) -> Iterator[bytes]:
        blobs = self.contents.blobs
        if blobs is None:
            raise NotKnown("a long text that cannot be read here")
        for at in range(0, text.length, _WINDOW):
            yield blobs.read(text.offset + at, min(_WINDOW, text.length - at))

    def numbers(self, tensor: TensorValue) -> list[int]:
        """The elements of `tensor`, which has 64-bit integers, in row-major order."""
        if not self.contents.are_there:
            raise NotKnown("it needs the values of a tensor before they are there")
        storage = self.contents.storages.get(id(tensor.storage.node)) if tensor.storage else None
        data = storage and storage.data
        if data is None or not isinstance(data, (ByteRange, Inflate)) or not tensor.is_plain:
            raise NotKnown("it needs the values of a tensor, which cannot be read here")
        self._bytes_left -= data.length + 8 * prod(tensor.shape)
        if self._bytes_left < 0:
            raise NotKnown("it needs the values of more tensors than are read here")
        raw = b"".join(read(data))
        at = [tensor.offset]
        for size, step in zip(tensor.shape, tensor.stride, strict=True):
            at = [start + i * step for start in at for i in range(size)]
        little = self.contents.byteorder == "little"
        return [int.from_bytes(raw[8 * i : 8 * i + 8], "little" if little else "big", signed=True) for i in at]


def _storage(node: PersistentId) -> Held:
    """The storage that `node` names, in the words of either of torch's formats."""
    parts = node.id.items if isinstance(node.id, Tuple) else []
    cls, numel = (parts[1], parts[4]) if len(parts) in (5, 6) else (None, None)
    dtype = BY_STORAGE_CLASS.get(cls.name) if isinstance(cls, Global) else None
    if dtype is None or not is_count(numel):
        return UNKNOWN
    return StorageValue(dtype, numel * dtype.itemsize, node)


_INT64 = 1 << 63


class Arguments:
    """The arguments `items` of a call with the number `now` in the pickle."""

    __slots__ = ("items", "now", "objects")

    def __init__(self, items: list[Value], objects: Objects, now: int | None) -> None:
        self.items = items
        self.objects = objects
        self.now = now

    def check_count(self, least: int, most: int | None = None) -> int:
        """The number of arguments, which must be `least` to `most`."""
        n = len(self.items)
        most = least if most is None else most
        if not least <= n <= most:
            raise Refused(f"it takes {least}{'' if most == least else f' to {most}'} arguments, and gets {n}")
        return n

    def held(self, i: int) -> Held:
        """Argument `i`, which must be known."""
        found = self.objects.held(self.items[i])
        if found is UNKNOWN:
            raise AfterUnknown
        return found

    def integer(self, i: int, what: str) -> int:
        """Argument `i`, an integer of 64 bits."""
        value = self.items[i]
        if type(value) is int and -_INT64 <= value < _INT64:
            return value
        return _integer(self.held(i), what)

    def integers(self, i: int, what: str) -> list[int]:
        """Argument `i`, a tuple, list or torch.Size of integers."""
        value = self.items[i]
        if type(value) is Tuple:
            items = value.items
        elif type(value) is List:
            items = self.objects.elements(value, self.now) or []
        else:
            held = self.held(i)
            if not isinstance(held, SizeValue):
                raise Refused(f"its {what} must be a tuple of integers, and is {said(held)}")
            items = [*held.sizes]
        if len(items) > LIMITS.rank:
            raise NotKnown(f"a {what} of {len(items):,} dimensions")
        for item in items:
            if type(item) is not int or not -_INT64 <= item < _INT64:
                numbers = [self.objects.held(each) for each in items]  # of truth values, torch looks at the first alone
                return [_integer(int(n) if i and isinstance(n, bool) else n, what) for i, n in enumerate(numbers)]
        return items  # type: ignore[return-value]  # integers, all of them

    def flag(self, i: int, what: str) -> bool:
        """Argument `i`, True or False."""
        value = self.items[i]
        if value is True or value is False:
            return value
        raise Refused(f"its {what} must be True or False, and is {said(self.held(i))}")

    def storage(self, i: int) -> StorageValue:
        """Argument `i`, a storage."""
        held = self.held(i)
        if isinstance(held, StorageValue):
            return held
        raise Refused(f"it needs a storage, and gets {said(held)}")

    def tensor(self, i: int, what: str) -> TensorValue:
        """Argument `i`, a tensor."""
        held = self.held(i)
        if isinstance(held, TensorValue):
            return held
        raise Refused(f"its {what} must be a tensor, and is {said(held)}")

    def dtype(self, i: int) -> str:
        """Argument `i`, a dtype."""
        held = self.held(i)
        module, _, name = imported_name(held, 2).rpartition(".") if isinstance(held, Global) else ("", "", "")
        if module != "torch" or name not in BY_NAME:
            raise Refused(f"its dtype must be a torch.dtype, and is {said(held)}")
        return name

    def global_name(self, i: int) -> str | None:
        """The name of argument `i`, a global; None where it is none."""
        held = self.held(i)
        if not isinstance(held, Global):
            return None
        name = imported_name(held, 2)
        if name not in ALLOWED:  # which was said of the global
            raise AfterUnknown
        return name

    def tuple(self, i: int, what: str) -> Arguments:
        """What is in argument `i`, a tuple or list."""
        items = self.objects.elements(self.items[i], self.now)
        if items is None or not isinstance(self.items[i], (Tuple, List)):
            held = self.held(i)
            if isinstance(held, (bool, int, float)) or held is None:
                raise Refused(f"its {what} must be a tuple, and is {said(held)}")
            raise NotKnown(f"its {what} is {said(held)}")
        return Arguments(items, self.objects, self.now)


def _integer(held: Held, what: str) -> int:
    if type(held) is int:
        if -_INT64 <= held < _INT64:
            return held
        raise Refused(f"its {what} has a number that does not fit 64 bits")
    if held is UNKNOWN:
        raise AfterUnknown
    if isinstance(held, TensorValue):  # of one element, a tensor counts as an integer
        raise NotKnown(f"its {what} is a tensor")
    raise Refused(f"its {what} must be an integer, and is {said(held)}")
