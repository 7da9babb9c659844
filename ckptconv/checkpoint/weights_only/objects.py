"""The values that torch's ``weights_only`` unpickler would have while it reads a graph.

Only values that later steps depend on are modelled. Atoms, tuples, lists, dicts, sets and globals are their own values.
The value of a Python 2 string is the text decoded with ``encoding="utf-8"``. The value of a call is an object of one of
the classes in this module. The contents of lists and mappings depend on the step, because effects come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from math import prod
from typing import Literal, TypeAlias

from ckptconv.byteranges.reading import Latin1Text, read
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Inflate
from ckptconv.checkpoint.tensor_info import Storage
from ckptconv.checkpoint.torch_versions import Rules
from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, DType
from ckptconv.errors import MalformedError
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
    """A value of which only the class is known.

    Attributes:
        cls: The name of the class in Python.
        is_hashable: Whether the value can be a key.
    """

    __slots__ = ("cls", "is_hashable")

    def __init__(self, cls: str, *, is_hashable: bool = True) -> None:
        self.cls = cls
        self.is_hashable = is_hashable


class SizeValue(Made):
    """A ``torch.Size`` that contains `sizes`."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: list[int]) -> None:
        super().__init__("torch.Size")
        self.sizes = sizes


class LayoutValue(Made):
    """A ``torch.layout``. `name` is its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__("torch.layout")
        self.name = name


class StorageValue:
    """A storage with this dtype and number of bytes. `node` is the persistent id that refers to it."""

    __slots__ = ("dtype", "nbytes", "node")

    def __init__(self, dtype: DType, nbytes: int, node: PersistentId) -> None:
        self.dtype = dtype
        self.nbytes = nbytes
        self.node = node


@dataclass(slots=True, eq=False)
class TensorValue:
    """A tensor. Shape, stride and offset count elements.

    Attributes:
        dtype: torch's name of the dtype.
        shape: The sizes. Empty for a nested tensor.
        stride: The strides. Empty if the tensor is not strided.
        offset: The offset of the first element in the storage.
        storage: The storage, or None if the tensor has no storage of its own.
        kind: ``strided``, ``quantized``, ``sparse`` or ``nested``.
        device: ``cpu`` or ``meta``.
        is_parameter: Whether the class is ``torch.nn.Parameter`` and not ``torch.Tensor``.
        requires_grad: Whether it requires gradients.
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
    """The class of UNKNOWN, the value of a step that is not modelled."""

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


def describe(held: Held) -> str:
    """Return a description of `held` for messages, such as ``a tensor`` or ``a dict``, or the name of a global."""
    if isinstance(held, Made):
        return f"a {held.cls.removeprefix('builtins.')}"
    if isinstance(held, Global):
        return str(held)
    return _WORDS.get(type(held), "an object")


Answer: TypeAlias = Literal["loads", "refused", "not known"]
Known: TypeAlias = Literal["refused", "not known"]


class Refused(Exception):
    """Raised if torch raises an exception at this step. The text is the reason, in torch's terms."""


class NotKnown(Exception):
    """Raised if the result of torch for this step is not modelled. The text describes the missing knowledge."""


class AfterUnknown(NotKnown):
    """Raised if the step depends on an unknown value. Another Reason already describes this value."""


@dataclass(frozen=True, eq=False)
class Reason:
    """A reason why a graph does not load, or why it is not known whether it loads.

    Attributes:
        known: ``refused`` if torch refuses the graph, or ``not known``.
        text: The reason in words, or the name of a global.
        node: The node of the step, or None if the reason concerns the complete file.
        needs: The module whose import makes the unpickler accept the global, or None.
        is_spelling: Whether torch would accept the same content if it were written with other opcodes.
    """

    known: Known
    text: str
    node: Value = None
    needs: str | None = None
    is_spelling: bool = False


_MUTABLE = (List, Dict, Set)
_MADE = frozenset((Call, RowCall, PersistentId, RowId))


@dataclass(eq=False)
class Contents:
    """The bytes outside of the pickle that a graph refers to.

    Attributes:
        storages: The readable storages, by the id of the persistent id that refers to them.
        blobs: The source of the long texts, or None if they cannot be read.
        byteorder: The byte order of the storages, ``little`` or ``big``.
        are_there: Whether the storages are filled while the pickle is read. In torch's older format they come after the
            pickle.
    """

    storages: Mapping[int, Storage] = field(default_factory=dict)
    blobs: Readable | None = None
    byteorder: str = "little"
    are_there: bool = True


def before(order: int | None, now: int | None) -> bool:
    """Return whether the effect with the number `order` comes before the step `now`.

    This is True if either is None: effects of edits have no number and count as done.
    """
    return order is None or now is None or order < now


class Objects:
    """The values of nodes, by the ids of the nodes.

    Args:
        contents: The bytes that the graph refers to.
        make: Returns the value of a call that has no value yet.
        steps: The number of steps that may be spent on repeated looks at the same values.
        rules: The rules of the torch version.
    """

    def __init__(self, contents: Contents, make: Callable[[Call], Held], steps: int, rules: Rules) -> None:
        self.contents = contents
        self.rules = rules
        self.left = steps
        self.made: dict[int, Held] = {}
        self._make = make
        self._hashable: dict[int, bool] = {}
        self._latin_1: dict[int, bool] = {}
        self._bytes_left = LIMITS.values_read
        self._copies_left = LIMITS.values_copied

    def held(self, value: Value) -> Held:
        """Return the value of `value`.

        The value of a call or persistent id is determined once. The value of a Python 2 string is text. All other nodes
        and atoms are their own values.
        """
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
        """Subtract `steps` from the steps left.

        Raise NotKnown if none are left: the file repeats the same long values too often.
        """
        self.left -= steps
        if self.left < 0:
            raise NotKnown("more steps than a file of its size should take")

    def copy(self, elements: int, itemsize: int) -> None:
        """Count the memory that torch would allocate for `elements` elements of `itemsize` bytes.

        Raises NotKnown above the limit. A small file can make torch allocate much memory, because one stored
        element can be expanded to many.
        """
        self._copies_left -= elements * itemsize
        if self._copies_left < 0:
            raise NotKnown("more memory than a file of its size should take")

    def elements(self, value: Value, now: int | None) -> list[Value] | None:
        """Return the elements of the tuple, list or set `value` before the step `now`. Return None for other values.

        Raises NotKnown if too many elements have been looked at.
        """
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
        """Return the keys of the mapping `value` before the step `now`. Return None if `value` is not a mapping.

        Raises NotKnown if the mapping was constructed from arguments or has attributes.
        """
        if not self.is_mapping(value):
            return None
        if isinstance(value, Call) and (not isinstance(value.args, Tuple) or value.args.items):
            raise NotKnown("an item of a mapping that was created from another object")
        assert isinstance(value, Object)
        found = [effect.values[i] for effect, i in value.pairs() if before(effect.order, now)]
        self.charge(len(found))
        return found

    def items(self, value: Dict, now: int | None) -> Iterator[tuple[Value, Value]]:
        """Yield the items of the dict `value` before the step `now`."""
        return ((e.values[i], e.values[i + 1]) for e, i in value.pairs() if before(e.order, now))

    def is_mapping(self, value: Value) -> bool:
        """Return whether `value` is a dict, an OrderedDict or a Counter.

        Raises NotKnown if `value` has attributes, because an attribute can hide a method.
        """
        if not isinstance(value, Call):
            return isinstance(value, Dict)
        held = self.held(value)
        if held is not ORDERED_DICT and held is not COUNTER:
            return False
        if any(effect.opcode == "BUILD" for effect in value.effects):  # an attribute can hide a method
            raise NotKnown("the items of a mapping with attributes")
        return True

    def is_empty(self, value: Value, now: int | None) -> bool:
        """Return whether `value` is false in a condition at the step `now`.

        Raises AfterUnknown if the value is not known, and NotKnown if its truth is not.
        """
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
        raise NotKnown(f"the truth value of {describe(held)}")

    def check_hashable(self, value: Value, what: str = "key") -> None:
        """Raise Refused if Python cannot hash `value`. `what` is the word for the value in the message."""
        if not self._is_hashable(value, 0):
            raise Refused(f"a {what} that Python cannot hash")

    def _is_hashable(self, value: Value, depth: int) -> bool:
        """Return whether Python can hash `value`, which is inside of `depth` tuples.

        Raises AfterUnknown if the value is not known, and NotKnown if tuples are nested too deeply.
        """
        if isinstance(value, Tuple):
            known = self._hashable.get(id(value))
            if known is not None:
                return known
            if depth == LIMITS.nested_calls:
                raise NotKnown("a key of tuples that are nested too deeply")
            found = all(self._is_hashable(item, depth + 1) for item in value.items)
            self._hashable[id(value)] = found
            return found
        if isinstance(value, _MUTABLE):
            return False
        held = self.held(value)
        if held is UNKNOWN:
            raise AfterUnknown
        return held.is_hashable if isinstance(held, Made) else True

    # Bytes outside the graph

    def is_latin_1(self, text: Blob) -> bool:
        """Return whether the long text `text` has no character above U+00FF. Raise NotKnown if it cannot be read."""
        if self.contents.blobs is None:
            raise NotKnown("a long text that cannot be read here")
        if id(text) not in self._latin_1:
            try:
                Latin1Text(ByteRange(self.contents.blobs, text.offset, text.length))
                self._latin_1[id(text)] = True
            except MalformedError:
                self._latin_1[id(text)] = False
        return self._latin_1[id(text)]

    def numbers(self, tensor: TensorValue, *, at_end: bool = False) -> list[int]:
        """Return the elements of `tensor`, of dtype int64 or int32, in row-major order.

        `at_end` is True if torch reads them when all storages are filled, and not at this step. Raises NotKnown if the
        elements cannot be read, or if too many bytes have been read by this method.
        """
        if not (self.contents.are_there or at_end):
            raise NotKnown("it needs the values of a tensor before they are loaded")
        storage = self.contents.storages.get(id(tensor.storage.node)) if tensor.storage else None
        data = storage and storage.data
        if data is None or not isinstance(data, (ByteRange, Inflate)) or not tensor.is_plain:
            raise NotKnown("it needs the values of a tensor, which cannot be read here")
        n = BY_NAME[tensor.dtype].itemsize
        self._bytes_left -= data.length + 8 * prod(tensor.shape)
        if self._bytes_left < 0:
            raise NotKnown("it needs the values of more tensors than are read here")
        raw = b"".join(read(data))
        at = [tensor.offset]
        for size, step in zip(tensor.shape, tensor.stride, strict=True):
            at = [start + i * step for start in at for i in range(size)]
        little = self.contents.byteorder == "little"
        return [int.from_bytes(raw[n * i : n * i + n], "little" if little else "big", signed=True) for i in at]


def _storage(node: PersistentId) -> Held:
    """Return the storage that the persistent id `node` names, or UNKNOWN if it is not in one of torch's two forms."""
    parts = node.id.items if isinstance(node.id, Tuple) else []
    cls, numel = (parts[1], parts[4]) if len(parts) in (5, 6) else (None, None)
    dtype = BY_STORAGE_CLASS.get(cls.name) if isinstance(cls, Global) else None
    if dtype is None or not is_count(numel):
        return UNKNOWN
    return StorageValue(dtype, numel * dtype.itemsize, node)


_INT64 = 1 << 63


class Arguments:
    """The arguments of a call at one step. Each method raises Refused if torch or Python refuses the argument.

    Args:
        items: The arguments.
        objects: The values of all nodes.
        now: The step, or None after all steps.
    """

    __slots__ = ("items", "now", "objects")

    def __init__(self, items: list[Value], objects: Objects, now: int | None) -> None:
        self.items = items
        self.objects = objects
        self.now = now

    def check_count(self, least: int, most: int | None = None) -> int:
        """Return the number of arguments. Raise Refused if it is not between `least` and `most`.

        If `most` is None, the number must be `least`.
        """
        n = len(self.items)
        most = least if most is None else most
        if not least <= n <= most:
            raise Refused(f"it takes {least}{'' if most == least else f' to {most}'} arguments, not {n}")
        return n

    def held(self, i: int) -> Held:
        """Return the value of argument `i`. Raise AfterUnknown if it is not known."""
        found = self.objects.held(self.items[i])
        if found is UNKNOWN:
            raise AfterUnknown
        return found

    def integer(self, i: int, what: str) -> int:
        """Return argument `i`, which must be an integer of 64 bits. `what` is its name in messages."""
        return _integer(self.held(i), what)

    def integers(self, i: int, what: str) -> list[int]:
        """Return the integers in argument `i`, which must be a tuple, list or torch.Size.

        `what` is its name in messages.

        Raises NotKnown for more dimensions than the limit.
        """
        value = self.items[i]
        if type(value) is Tuple:
            items = value.items
        elif type(value) is List:
            items = self.objects.elements(value, self.now) or []
        else:
            held = self.held(i)
            if not isinstance(held, SizeValue):
                raise Refused(f"its {what} must be a tuple of integers, not {describe(held)}")
            items = [*held.sizes]
        if len(items) > LIMITS.rank:
            raise NotKnown(f"a {what} of {len(items):,} dimensions")
        numbers = [self.objects.held(item) for item in items]  # torch refuses a bool only as the first
        return [_integer(int(n) if i and isinstance(n, bool) else n, what) for i, n in enumerate(numbers)]

    def flag(self, i: int, what: str) -> bool:
        """Return argument `i`, which must be True or False. `what` is its name in messages."""
        value = self.items[i]
        if value is True or value is False:
            return value
        raise Refused(f"its {what} must be True or False, not {describe(self.held(i))}")

    def storage(self, i: int) -> StorageValue:
        """Return argument `i`, which must be a storage."""
        held = self.held(i)
        if isinstance(held, StorageValue):
            return held
        raise Refused(f"it needs a storage, not {describe(held)}")

    def tensor(self, i: int, what: str) -> TensorValue:
        """Return argument `i`, which must be a tensor. `what` is its name in messages."""
        held = self.held(i)
        if isinstance(held, TensorValue):
            return held
        raise Refused(f"its {what} must be a tensor, not {describe(held)}")

    def dtype(self, i: int) -> str:
        """Return the name of the dtype in argument `i`, without ``torch.``.

        Raise Refused if it is not a known dtype.
        """
        held = self.held(i)
        module, _, name = imported_name(held, 2).rpartition(".") if isinstance(held, Global) else ("", "", "")
        if module != "torch" or name not in BY_NAME:
            raise Refused(f"its dtype must be a torch.dtype, not {describe(held)}")
        return name

    def global_name(self, i: int) -> str | None:
        """Return the name of the global in argument `i`, or None if the argument is not a global.

        Raises AfterUnknown if the unpickler does not accept the global, which another Reason describes.
        """
        held = self.held(i)
        if not isinstance(held, Global):
            return None
        name = imported_name(held, 2)
        if not self.objects.rules.allow(name):  # the global has its own reason
            raise AfterUnknown
        return name

    def tuple(self, i: int, what: str) -> Arguments:
        """Return the elements of argument `i`, a tuple or list, as arguments. `what` is its name in messages.

        Raises NotKnown for other values, except for numbers and None, which torch refuses.
        """
        items = self.objects.elements(self.items[i], self.now)
        if items is None or not isinstance(self.items[i], (Tuple, List)):
            held = self.held(i)
            if isinstance(held, (bool, int, float)) or held is None:
                raise Refused(f"its {what} must be a tuple, not {describe(held)}")
            raise NotKnown(f"its {what} is {describe(held)}")
        return Arguments(items, self.objects, self.now)


def _integer(held: Held, what: str) -> int:
    """Return `held` if it is an integer of 64 bits. `what` is its name in messages.

    Raises Refused for other values, NotKnown for a tensor, and AfterUnknown for a value that is not known.
    """
    if type(held) is int:
        if -_INT64 <= held < _INT64:
            return held
        raise Refused(f"its {what} has a number that does not fit 64 bits")
    if held is UNKNOWN:
        raise AfterUnknown
    if isinstance(held, TensorValue):  # a tensor with one element counts as an integer
        raise NotKnown(f"its {what} is a tensor")
    raise Refused(f"its {what} must be an integer, not {describe(held)}")
