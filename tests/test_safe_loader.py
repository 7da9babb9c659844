"""The static copy of what torch's ``weights_only`` unpickler takes, compared with that unpickler."""

from __future__ import annotations

import argparse
import io
import pickle
import warnings
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import _weights_only_unpickler as safe

from ckptconv.graph import Graph
from ckptconv.pickles import emit, parse
from ckptconv.safe_loader import ALLOWED, can_be_made_loadable, obstacles, refused_opcodes


def graph_of(data: bytes) -> Graph:
    return parse(lambda offset, length: data[offset : offset + length], len(data), where="here")[0]


def loads(data: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of every protocol but 2
        return safe.load(io.BytesIO(data), encoding="utf-8")


def test_list_is_that_of_torch() -> None:
    """The allowlist of the torch that the tests run with, name for name."""
    assert set(safe._get_allowed_globals()) == ALLOWED


TAKEN = [
    {"a": [1, -1, 300, 70_000, 1 << 40, -(1 << 2000), 2.5, None, True, ("t",), (), (1, 2, 3, 4)]},
    OrderedDict(a=1, b=OrderedDict()), Counter("aab"), b"", b"\xff\x00" * 200, bytearray(b"xyz"), {1, "a"}, set(), 1j,
    torch.Size([2, 3]), torch.device("cuda:0"), torch.float8_e5m2, "\ud800", [b"same"] * 3,
]  # fmt: skip
REFUSED = [
    frozenset({1}), argparse.Namespace(a=1), 1 << 3000, -(1 << 2040), deque([1]), print, {"x": [frozenset()]}, range(3), ...,
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("obj", TAKEN, ids=repr)
def test_what_is_taken_comes_out_loadable(obj: object, protocol: int) -> None:
    """Whatever protocol it came in: nothing is in the way, and torch's unpickler gives the object back."""
    data = pickle.dumps(obj, protocol)
    graph = graph_of(data)
    if protocol > 2:
        assert list(obstacles(graph)) == []
    if list(obstacles(graph)):
        return  # protocols 0 to 2 write bytes and sets by calls that torch does not know
    out = b"".join(part for part in emit(graph, loadable=can_be_made_loadable(graph)) if isinstance(part, bytes))
    assert out[:2] == b"\x80\x02"
    result = loads(out)
    assert type(result) is type(obj)
    assert result == obj
    assert refused_opcodes(graph_of(out)) == []


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("obj", REFUSED, ids=lambda obj: repr(obj)[:20])
def test_what_is_refused_is_refused_by_torch(obj: object, protocol: int) -> None:
    """An obstacle is one: the unpickler raises, and nothing pretends that it could be made loadable."""
    data = pickle.dumps(obj, protocol)
    assert list(obstacles(graph_of(data)))
    assert not can_be_made_loadable(graph_of(data))
    with pytest.raises(pickle.UnpicklingError):
        loads(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02ccollections\nOrderedDict\n)RK\x01a.",
        b"\x80\x02ctorch\nSize\n)\x85R}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02ctorch\nSize\n)\x85RK\x01K\x02s.",
        b"\x80\x02(ccollections\nOrderedDict\no.",
        b"\x80\x02N0N.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_agrees_with_torch_on_what_no_pickler_writes(data: bytes) -> None:
    """Effects on the wrong things, old opcodes, extensions: both refuse."""
    graph = graph_of(data)
    assert list(obstacles(graph)) or refused_opcodes(graph)
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        loads(data)


def test_a_popped_call_is_an_obstacle() -> None:
    """A call whose result is thrown away cannot be said without POP."""
    graph = graph_of(b"\x80\x02ctorch\nSize\n)\x85R0N.")
    assert [reason for reason, _ in obstacles(graph)] == ["a call whose result is thrown away"]
