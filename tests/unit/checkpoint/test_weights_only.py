"""Tests of the copy of torch's ``weights_only`` unpickler, which creates no objects: its tables, its results and its
cost.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import _weights_only_unpickler as safe

from ckptconv.checkpoint.safe_globals import ALLOWED, TENSOR_CLASSES
from ckptconv.checkpoint.weights_only import tensors
from ckptconv.checkpoint.weights_only.objects import Contents, Reason
from ckptconv.checkpoint.weights_only.unpickler import MAKERS, may_have_obstacles, obstacles, reasons
from ckptconv.dtypes import BY_NAME
from ckptconv.pickles.graph import Graph
from ckptconv.pickles.parser import parse
from tests.support.memory import memory_below


def graph_of(data: bytes) -> Graph:
    return parse(lambda offset, length: data[offset : offset + length], len(data), where="here")[0]


def found_in(body: bytes, contents: Contents | None = None) -> list[Reason]:
    return list(reasons(graph_of(b"\x80\x02" + body + b"."), contents))


# Tables


def test_every_allowed_callable_is_modelled() -> None:
    """Every allowed global that is callable has a row in the table, except storages and GPU tensors."""
    torchs = safe._get_allowed_globals()
    assert MAKERS.keys() <= ALLOWED
    for name in torchs.keys() - MAKERS.keys():
        is_of_gpu = name.startswith("torch.cuda.") and name.endswith("Tensor")
        assert is_of_gpu or name.startswith("torch.storage.") or not callable(torchs[name]), name


def test_classes_of_tensors() -> None:
    """Every class of tensors creates an empty tensor of its dtype."""
    for name, dtype in TENSOR_CLASSES.items():
        made = getattr(torch, name)()
        assert (str(made.dtype), made.shape) == (f"torch.{dtype}", (0,))


def test_attributes_that_torch_sets_itself() -> None:
    """The attributes that torch sets itself are those with a descriptor that has a setter. Other attributes are stored
    in the dict of the tensor.
    """
    torch.zeros(0)  # skips the test if torch is not installed
    found = {
        name
        for cls in torch.nn.Parameter.__mro__
        for name, value in vars(cls).items()
        if hasattr(type(value), "__set__") and not name.startswith("__")
    }
    assert "data" in found <= tensors.ATTRIBUTES
    tensor: Any = torch.ones(1)
    for name in ("note", "to", "detach", "a b", ""):
        setattr(tensor, name, 1)
        assert name in vars(tensor) and name not in tensors.ATTRIBUTES


def test_layouts_and_devices() -> None:
    """The tables contain the layouts and device types of the installed torch."""
    torch.zeros(0)  # skips the test if torch is not installed
    assert {str(value) for value in vars(torch).values() if isinstance(value, torch.layout)} == tensors.LAYOUTS
    with pytest.raises(RuntimeError, match="Expected one of") as error:
        torch.device("foo")
    listed = str(error.value).split("one of ")[1].split(" device")[0]
    assert set(listed.split(", ")) == tensors.DEVICE_TYPES


@pytest.mark.parametrize("name", [name for name in BY_NAME if hasattr(torch, name)])
def test_dtypes_that_require_gradients_or_are_converted(name: str) -> None:
    """The tables state correctly which dtypes can require gradients and which can be converted."""
    dtype = getattr(torch, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = torch.empty((0,), dtype=dtype)
        differentiable, convertible = True, True
        try:
            torch.nn.Parameter(bare, requires_grad=True)
        except RuntimeError:
            differentiable = False
        try:
            torch.ones(1).to(dtype)
        except (RuntimeError, NotImplementedError):
            convertible = False
    assert name.startswith(tensors.DIFFERENTIABLE) == differentiable
    assert tensors.is_odd(name) != convertible


# Order


def test_a_mapping_is_checked_as_it_is_when_it_is_used() -> None:
    """An attribute that is added to a state after a call has used the state is not checked. An attribute that is added
    before the call is checked.
    """
    used = b"ctorch._utils\n_rebuild_parameter_with_state\n(N\x89N}q\x00tR"
    item = b"h\x00K\x01K\x02s\x86"
    assert found_in(used + item) == []
    early = b"}q\x00K\x01K\x02sctorch._utils\n_rebuild_parameter_with_state\n(N\x89Nh\x00tR"
    assert [each.text for each in found_in(b"(" + early + b"t")] == [
        "torch._utils._rebuild_parameter_with_state: an attribute's name is not a string"
    ]


def test_a_call_that_depends_on_a_refused_call_is_not_reported() -> None:
    """If a call depends on a refused call, only the refused call is reported."""
    (reason,) = found_in(b"ctorch._utils\n_rebuild_parameter\n(cfoo\nBar\n)R\x89NtR")
    assert (reason.text, reason.known) == ("foo.Bar", "refused")


def test_a_malformed_persistent_id() -> None:
    """The storage of a malformed persistent id is not known, so the verdict is 'not known'."""
    (reason,) = found_in(b"ctorch._utils\n_rebuild_tensor\n(K\x01QK\x00))tR")
    assert reason.known == "not known"


# Cost


def repeated(call: bytes, shared: bytes, times: int) -> bytes:
    """Return a pickle that repeats `call` `times` times. Its argument is the object that `shared` creates."""
    return shared + b"q\x00" + b"".join(call.replace(b"%", b"h\x00") for _ in range(times)) + b"t"


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize(
    ("call", "shared"),
    [
        (b"cbuiltins\nset\n%\x85R", b"(](" + b"K\x01" * 20_000 + b"e"),
        (b"ccollections\nOrderedDict\n%\x85R", b"(](" + b"NN\x86" * 5_000 + b"e"),
        (
            b"ctorch._utils\n_rebuild_parameter_with_state\n(N\x89N%tR",
            b"(}(" + b"".join(b"X\x05\0\0\0%05dN" % i for i in range(5_000)) + b"u",
        ),
        (b"c_codecs\nencode\n%X\x06\0\0\0latin1\x86R", b"(X" + (60_000).to_bytes(4, "little") + b"\xc3\xa4" * 30_000),
        (b"ctorch\nSize\n%\x85R", b"((" + b"K\x01" * 20_000 + b"t"),
        (b"cbuiltins\nbytearray\n%\x85R", b"(J\xff\xff\x00\x00"),
    ],
)
def test_long_arguments_that_are_used_repeatedly(call: bytes, shared: bytes) -> None:
    """Checking the same long argument again and again stops at a limit, and the verdict is 'not known'."""
    found = found_in(repeated(call, shared, 5_000))
    assert found and {each.known for each in found} == {"not known"}
    assert "than a file of its size should take" in found[0].text
    assert found_in(repeated(call, shared, 3)) == []


@pytest.mark.untraced
def test_memory_of_many_reasons() -> None:
    """A reason for each of 20,000 unknown classes takes at most 600 bytes of memory."""
    body = b"(" + b"".join(b"cq\nA%d\n" % i for i in range(20_000)) + b"t"
    graph = graph_of(b"\x80\x02" + body + b".")
    with memory_below(20_000 * 600):
        assert len(list(reasons(graph))) == 20_000


# Functions for writers


def test_may_have_obstacles() -> None:
    """`may_have_obstacles` finds obstacles by the globals and opcodes, without a walk of the graph. It does not check
    calls and arguments.
    """
    sound = graph_of(pickle.dumps({"a": [1, {2: (3,)}]}, 2))
    assert not may_have_obstacles(sound) and not list(obstacles(sound))
    late = graph_of(b"\x80\x02ctorch\nfloat32\n)R.")
    assert not may_have_obstacles(late) and [text for text, _ in obstacles(late)] == [
        "torch.float32: it cannot be called"
    ]
    frozen = graph_of(pickle.dumps(frozenset(), 4))
    assert may_have_obstacles(frozen) and [text for text, _ in obstacles(frozen)] == ["a frozenset"]
