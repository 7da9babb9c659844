"""The zoo: one example of everything that people save, as builders by name, and ``save``, which writes GPU tags on a
machine without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import functools
import itertools
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

#: The location tags that storages get in turn.
TAGS = ("cpu", "cuda:0", "cuda:1", "mps", "xpu:1")
#: The sizes of the generator states in the objects of RNG. Nothing else in these objects has such a size.
RNG_SIZES = (5056, 16)


def save(obj: Any, path: Any, tags: Sequence[str] = TAGS, **kwargs: Any) -> None:
    """Save `obj` with ``torch.save``, with `tags` on the storages in turn. `kwargs` are further arguments of
    ``torch.save``.
    """
    with tagging(tags):
        torch.save(obj, path, **kwargs)


def tagging(tags: Sequence[str] = TAGS) -> Any:
    """Return a context in which saved storages get `tags` in turn."""
    given: dict[int, str] = {}
    turn = itertools.cycle(tags)

    def tag(storage: Any) -> str:
        key = storage._cdata
        if key not in given:
            given[key] = next(turn)
        return given[key]

    return mock.patch("torch.serialization.location_tag", tag)


# Classes of objects in the zoo


@dataclass
class Config:
    """A dataclass that contains a tensor."""

    name: str = "net"
    device: str = "cuda:0"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    weight: Any = None


@dataclass(frozen=True)
class Frozen:
    """A frozen dataclass, which is hashable."""

    a: int
    b: str


class Slotted:
    """A class with ``__slots__``, one of them empty, and without a ``__dict__``."""

    __slots__ = ("a", "b", "empty")


class SlotsAndDict(Slotted):
    """A class with ``__slots__`` in its base and a ``__dict__``. Its state is a pair."""


class WithNewArgs(tuple[Any, ...]):
    """A class with ``__getnewargs_ex__``, whose objects are created by ``__new__`` with keywords."""

    def __new__(cls, *items: int, scale: int = 1) -> WithNewArgs:
        made = super().__new__(cls, [item * scale for item in items])
        made.scale = scale
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, int]]:
        return tuple(item // self.scale for item in self), {"scale": self.scale}


class WithState:
    """A class whose state is not a dict."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __getstate__(self) -> tuple[int, str]:
        return (self.value, "state")

    def __setstate__(self, state: tuple[int, str]) -> None:
        self.value = state[0]


class ListAndDict(list[Any]):
    """A list with attributes."""


class DictWithAttributes(dict[Any, Any]):
    """A dict with attributes."""


class Member:
    """An object in a set that it refers to."""

    def __repr__(self) -> str:
        return "Member"


class Outer:
    """A class with an inner class, whose dotted qualified name requires protocol 4."""

    @dataclass
    class Inner:
        """An inner class."""

        value: int = 3

    def method(self) -> str:
        """Return a text. The bound method is pickled as ``getattr(obj, 'method')``."""
        return "bound"


class AttributedTensor(torch.Tensor):
    """A tensor subclass without behavior. Attributes are stored in its ``__dict__``."""


class WrapperTensor(torch.Tensor):
    """A tensor without a storage that wraps another tensor, like those of libraries for quantization and
    parallelism.
    """

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: str) -> WrapperTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=device
        )

    def __init__(self, inner: torch.Tensor, device: str) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)

    def __repr__(self) -> str:
        return "WrapperTensor"


class Rebuilt:
    """An object that is pickled like a tensor of an accelerator whose tensors are saved by way of the CPU or of
    numpy.
    """

    def __init__(self, function: str, data: Any, device: Any) -> None:
        self.call = function, data, device

    def __reduce__(self) -> Any:
        function, data, device = self.call
        return getattr(torch._utils, function), (data, torch.float32, device, False)


Pair = namedtuple("Pair", ["left", "right"])


class Net(nn.Module):
    """A module with parameters, buffers, a tie and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.head = nn.Linear(4, 4, bias=False)
        self.tail = nn.Linear(4, 4)
        self.tail.weight = self.head.weight
        self.register_buffer("none", None)
        self.register_buffer("temporary", torch.ones(2), persistent=False)
        self.register_forward_hook(a_function)


def a_function(*args: Any) -> None:
    """Do nothing. A pickle names this function."""


# Tensors


#: Every dtype of torch. Aliases such as ``float`` and ``float32`` are one dtype.
DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
#: Names of the dtypes that only tensors without their own storage can have.
SUB_BYTE = re.compile(r"torch\.u?int[1-7]")


def counted(dtype: torch.dtype, n: int = 6) -> torch.Tensor:
    """Return `n` elements of `dtype` whose bytes are all different, up to 251 bytes."""
    return (torch.arange(n * dtype.itemsize) % 251).to(torch.uint8).view(dtype)


def dtypes() -> Any:
    """Return a tensor of every dtype that can view arbitrary bytes, and a tensor of bool."""
    kinds = [
        dtype
        for dtype in DTYPES
        if SUB_BYTE.fullmatch(str(dtype)) is None and "qint" not in str(dtype) and "quint" not in str(dtype)
    ]
    found = {str(dtype): counted(dtype) for dtype in kinds if dtype != torch.bool}
    return {**found, "bool": torch.tensor([True, False, True])}


def special_values() -> Any:
    """Return NaNs with payloads, infinities, -0.0 and denormals, as tensors and as Python floats."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(1 << 31), 1, 0x7F800000], dtype=torch.int64).to(torch.int32)
    nan = np.array([0x7FF8000000000123], dtype=np.uint64).view(np.float64)[0]
    return {"tensor": bits.view(torch.float32), "floats": [float(nan), -0.0, 5e-324, float("inf"), -float("nan"), 0.1]}


def views() -> Any:
    """Return views that are transposed, expanded, sliced, offset, unfolded or overlapping, on a shared storage and on
    separate ones.
    """
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "t": base.t(),
        "row": base[2],
        "column": base[:, 3],
        "strided": base[::2, 1::2],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "unfolded": torch.arange(8.0).unfold(0, 4, 2),
        "diagonal": base.diagonal(),
        "channels_last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }


def ties() -> Any:
    """Return a tensor under several names, and another tensor on the same storage."""
    weight = nn.Parameter(torch.arange(6.0))
    return {"a": weight, "b": weight, "c": weight.detach(), "nested": {"again": weight}}


def small() -> Any:
    """Return tensors without dimensions, without elements, with one element, and with many dimensions."""
    empty = torch.empty(0)
    return [
        torch.tensor(3.5),
        empty,
        empty,
        torch.empty(2, 0, 3),
        torch.ones(1),
        torch.ones((1,) * 25),
        torch.ones(4)[4:],
    ]


def sparse() -> Any:
    """Return sparse tensors: COO, coalesced and not, and the four compressed layouts."""
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    loose = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 4), check_invariants=True
    )
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": loose,
        "hybrid": torch.ones(2, 3).to_sparse(1),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((1, 2)),
        "requires_grad": dense.to_sparse().requires_grad_(),
    }


def quantized() -> Any:
    """Return tensors that are quantized per tensor and per channel."""
    numbers = torch.arange(6.0).reshape(2, 3)
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([1, 2])
    return {
        "qint8": torch.quantize_per_tensor(numbers, 0.1, 3, torch.qint8),
        "quint8": torch.quantize_per_tensor(numbers, 0.1, 3, torch.quint8),
        "qint32": torch.quantize_per_tensor(numbers, 0.1, 3, torch.qint32),
        "quint4x2": torch.quantize_per_channel(numbers, scales.float(), scales.float(), 0, torch.quint4x2),
        "per_channel": torch.quantize_per_channel(numbers, scales, zeros, 0, torch.qint8),
    }


def meta() -> Any:
    """Return tensors without data, next to one with data."""
    return [
        *(torch.empty(3, dtype=dtype, device="meta") for dtype in DTYPES if SUB_BYTE.fullmatch(str(dtype))),
        torch.empty(3, 4, device="meta"),
        nn.Parameter(torch.empty(2, device="meta", dtype=torch.bfloat16)),
        torch.ones(2),
    ]


def conj_neg() -> Any:
    """Return tensors that are lazily conjugated, lazily negated, or both."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    return {
        "z": z,
        "conj": z.conj(),
        "neg": torch.ones(2, dtype=torch.complex64).conj().imag,
        "both": torch._neg_view(z.conj()),
    }


def nested() -> Any:
    """Return a strided tensor of torch.nested."""
    return torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)])


def two_dtypes() -> Any:
    """Return tensors whose storage is saved with two storage classes: float8 as UntypedStorage, and uint8 as
    ByteStorage.
    """
    x = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"float8": x, "uint8": x.view(torch.uint8), "uint16": x.view(torch.uint16)[1:]}


def parameters() -> Any:
    """Return parameters with and without gradient and attributes, and a plain tensor with attributes."""
    plain, tagged, tensor = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(3)), torch.ones(4)
    tagged.tensor_parallel, tagged.device_hint, tensor.note = True, torch.device("cuda:1"), {"of": tagged}
    return [
        plain,
        tagged,
        tensor,
        torch.ones(2, requires_grad=True),
        nn.Buffer(torch.ones(1)),
        nn.ParameterList([tagged]),
    ]


def subclass() -> Any:
    """Return tensors of a subclass, with attributes that include a tensor."""
    tensor = torch.arange(4.0).as_subclass(AttributedTensor)
    tensor.scale, tensor.note = torch.tensor(2.0), "weights"
    return {"subclass": tensor, "view": tensor[1:].as_subclass(AttributedTensor), "scale": tensor.scale}


def storages() -> Any:
    """Return bare storages, typed and untyped, one of which belongs to a tensor."""
    tensor, doubles = torch.arange(4, dtype=torch.uint8), torch.ones(2, dtype=torch.float64).untyped_storage()
    return {
        "tensor": tensor,
        "its": tensor.untyped_storage(),
        "empty": torch.UntypedStorage(0),
        "typed": torch.storage.TypedStorage(wrap_storage=doubles, dtype=torch.float64, _internal=True),
    }


# Modules, optimizers, generators


def module() -> Any:
    """Return a complete nn.Module."""
    torch.manual_seed(0)
    return Net()


def state_dict() -> Any:
    """Return an OrderedDict with ``_metadata``."""
    return module().state_dict()


def training() -> Any:
    """Return a training checkpoint: a model, AdamW after a step, a scheduler, arguments, and RNG states of the CPU and
    of (simulated) GPUs.
    """
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(device=torch.device("cuda:0"), lr=0.1, path=pathlib.PurePosixPath("/data")),
        "device": "cuda:0",
        "rng": rng(),
    }


def rng() -> Any:
    """Return RNG states in the form of the Trainer class of transformers."""
    cpu = torch.Generator().manual_seed(7).get_state()
    cuda = torch.arange(16, dtype=torch.uint8)
    numpy_state = np.random.RandomState(3).get_state()
    return {"python": (3, (1, 2, 3), None), "numpy": numpy_state, "cpu": cpu, "cuda": cuda, "weight": torch.ones(3)}


def generator() -> Any:
    """Return a torch.Generator, and a tensor."""
    return {"generator": torch.Generator().manual_seed(11), "weight": torch.ones(3)}


def user_data() -> Any:
    """Return devices that belong to the user, next to a tensor with the same location tag. All names of devices are the
    same string.
    """
    cuda = "cuda:0"
    return {
        "device": cuda,
        "object": torch.device(cuda),
        "list": [cuda, "cpu", "mps"],
        cuda: torch.ones(2),
        "dtype": torch.float8_e5m2,
        "size": torch.Size([2, 3]),
    }


# Python's own objects, and numpy's


def numpy_objects() -> Any:
    """Return numpy arrays (contiguous and not, structured, and of objects), scalars and dtypes."""
    return {
        "array": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "scalar": np.float32(1.5),
        "bool": np.bool_(True),
        "text": np.array(["a", "bc"]),
        "objects": np.array([None, "x", (1, 2)], dtype=object),
        "record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "dtype": np.dtype("f4"),
        "date": np.datetime64("2024-01-02"),
        "none": np.empty((0, 3)),
        "many": np.arange(20_000),
    }


def sets() -> Any:
    """Return sets and frozensets, including empty and shared ones."""
    shared = frozenset({"a", 1})
    return [set(), {1, "b", (2, 3)}, frozenset(), shared, shared, {shared}, set(range(3000))]


def cycles() -> Any:
    """Return a list that contains itself, a dict that contains itself, a tuple that contains itself through a list, and
    an object whose attribute contains the object.
    """
    a_list: list[Any] = [torch.ones(1)]
    a_list.append(a_list)
    a_dict: dict[str, Any] = {"x": 1}
    a_dict["self"] = a_dict
    inside: list[Any] = []
    a_tuple = (1, inside)
    inside.append(a_tuple)
    an_object = Config()
    an_object.weight = {"owner": an_object}
    return {"list": a_list, "dict": a_dict, "tuple": a_tuple, "object": an_object}


def set_cycle() -> Any:
    """Return an object with an attribute that is a set that contains the object.

    In protocol 2, which has no opcode for sets, pickle breaks the cycle where it can.
    """
    member = Member()
    member.friends = {member}
    return member


def objects() -> Any:
    """Return dataclasses, objects with slots, with ``__getnewargs_ex__`` and with states that are not dicts, and
    subclasses of containers.
    """
    slotted, both = Slotted(), SlotsAndDict()
    slotted.a, slotted.b = 1, torch.ones(2)
    both.a, both.c = 2, "three"
    a_list, a_dict = ListAndDict([1, torch.ones(1)]), DictWithAttributes(x=1)
    a_list.note, a_dict.note = "list", a_list
    return [
        Config(weight=torch.ones(2)),
        Frozen(1, "b"),
        {Frozen(2, "c"): 1},
        slotted,
        both,
        WithNewArgs(1, 2, scale=3),
        WithState(5),
        a_list,
        a_dict,
        argparse.Namespace(x=1),
        Pair(torch.ones(1), 2),
        a_function,
        Config,
        nn.Linear,
        functools.partial(a_function, 1, key=torch.ones(1)),
        Ellipsis,
        slice(1, 2),
        datetime.datetime(2024, 1, 2, 3, 4, 5),
        decimal.Decimal("1.10"),
        pathlib.PurePosixPath("/a/b"),
        range(3),
        NotImplemented,
    ]


def qualified() -> Any:
    """Return an inner class and an object of it."""
    return [Outer.Inner(), Outer.Inner]


def method() -> Any:
    """Return a bound method, which pickle writes as a call of ``getattr``."""
    return [nn.Identity().extra_repr, torch.ones(1)]


def containers() -> Any:
    """Return containers of the ``collections`` module."""
    ordered = OrderedDict([("b", 1), ("a", torch.ones(1))])
    ordered.move_to_end("b")
    return {
        "ordered": ordered,
        "default": defaultdict(list, {"a": [1]}),
        "of_dict": defaultdict(dict),
        "counter": Counter("abca"),
        "deque": deque([1, torch.ones(1)], maxlen=5),
        "endless": deque("ab"),
        "empty": OrderedDict(),
        "namedtuple": Pair(1, (2, 3)),
    }


def keys() -> Any:
    """Return keys that are not names: other types, and strings that can cause problems in a terminal, a path or an
    encoder.
    """
    odd = [0, -1, 1 << 70, None, b"bytes", (1, "a"), (), 1.5, float("nan"), -0.0, False, frozenset({1}), Frozen(3, "d")]
    texts = [
        "",
        " ",
        "a/b",
        "a[0]",
        "a\\b",
        "a.b",
        ".",
        "/",
        "\0",
        "\x1b[31m",
        "\n",
        "ä",
        "\ud800",
        "\U0001f600",
        "‮",
        "__class__",
    ]
    return {key: torch.full((1,), i) for i, key in enumerate([*odd, *texts])}


def long_values() -> Any:
    """Return values whose length takes more than one byte, or that are larger than the program holds in memory."""
    return {
        "text": "ä" * 35_000 + "x" * 35_000,
        "bytes": bytes(range(256)) * 800,
        "bytearray": bytearray(b"\xff\0" * 50_000),
        "k" * 70_000: 1,
        "weight": torch.ones(3),
        "integers": [1 << 2999, -(1 << 2999), 255, 256, 65535, 65536, -1, -(1 << 31), 1 << 31, -(1 << 31) - 1, 1 << 63],
        "list": list(range(2500)),
        "dict": dict.fromkeys(range(2500), "v"),
    }


def atoms() -> Any:
    """Return None, booleans, numbers, text, bytes, and small containers."""
    return [
        None,
        True,
        False,
        0,
        -7,
        1.5,
        2 - 3j,
        complex(float("nan"), -0.0),
        "",
        "text",
        b"",
        b"\0\xff",
        bytearray(),
        bytearray(b"ab"),
        (),
        [],
        {},
        ((1,), [(2, 3), (4, 5, 6), (7, 8, 9, 10)]),
    ]


def allowed() -> Any:
    """Return objects that torch's safe loader accepts if they are written as it expects: sets, bytes, bytearrays,
    complex numbers and counters.
    """
    inside = {"two", 2}
    return {
        "set": inside,
        "again": inside,
        "empty": set(),
        "many": set(range(3000)),
        "bytes": [b"\0\xff", bytes(range(256)) * 4],
        "bytearray": [bytearray(), bytearray(b"ab") * 300],
        "complex": 1 - 2j,
        "counter": Counter(["one", "two", "one"]),
        "ordered": OrderedDict(weight=torch.ones(2)),
        "integers": [1 << 2000, -1, 1 << 40],
        "text": "x" * 300,
        "device": torch.device("mps"),
        "size": torch.Size([1]),
    }


def wide() -> Any:
    """Return more strings, tensors and globals than one byte can number in the memo."""
    return {f"layer.{i}.weight": torch.full((2,), float(i)) for i in range(100)}


#: Functions that return the objects, by their names.
ZOO: dict[str, Callable[[], Any]] = {
    builder.__name__: builder
    for builder in (
        dtypes,
        special_values,
        views,
        ties,
        small,
        sparse,
        quantized,
        meta,
        conj_neg,
        nested,
        two_dtypes,
        parameters,
        subclass,
        storages,
        module,
        state_dict,
        training,
        rng,
        generator,
        user_data,
        numpy_objects,
        sets,
        cycles,
        set_cycle,
        objects,
        qualified,
        method,
        containers,
        keys,
        long_values,
        atoms,
        allowed,
        wide,
    )
}
#: Objects with states of random generators.
RNG = ("training", "rng", "generator")
#: The lowest protocol that an object needs, if it is not 2.
NEEDS_PROTOCOL = {"qualified": 4, "set_cycle": 4}
