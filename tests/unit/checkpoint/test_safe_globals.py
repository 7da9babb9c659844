"""Comparisons of the copied rules of torch's ``weights_only`` unpickler with the unpickler itself."""

from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
import warnings
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import _weights_only_unpickler as safe

from ckptconv.checkpoint.safe_globals import ADDED_BY, ALLOWED, IMPORTED_WITH_TORCH, needed_import, refused_opcodes
from ckptconv.checkpoint.torch_versions import Rules, version_of
from ckptconv.checkpoint.weights_only.unpickler import can_be_made_loadable, obstacles, reasons
from ckptconv.errors import MalformedError
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Graph
from ckptconv.pickles.parser import parse


def graph_of(data: bytes) -> Graph:
    return parse(lambda offset, length: data[offset : offset + length], len(data), where="here")[0]


def loads(data: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about every protocol except 2
        return safe.load(io.BytesIO(data), encoding="utf-8")


def test_allowlist_is_that_of_torch() -> None:
    """The allowlist for the installed version equals the allowlist of the installed torch."""
    rules = Rules(version_of(torch.__version__))
    assert set(safe._get_allowed_globals()) == {name for name in ALLOWED if rules.allow(name)}


@pytest.mark.untraced
def test_globals_that_imports_add() -> None:
    """The tables contain the globals that ``import torch``, and imports of torch's own modules, add to the
    allowlist.
    """
    program = """
import importlib, sys, torch
from torch.serialization import get_safe_globals
def names(): return {t[1] if isinstance(t, tuple) else f"{t.__module__}.{t.__qualname__}" for t in get_safe_globals()}
seen = names()
print(*sorted(seen))
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(*sorted(names() - seen))
    seen = names()
"""
    command = [sys.executable, "-W", "ignore", "-c", program, *ADDED_BY]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    first, *others = (set(line.split()) for line in lines)
    rules = Rules(version_of(torch.__version__))
    assert {name for name in IMPORTED_WITH_TORCH if rules.add(name)} <= first and all(map(rules.add, first))
    assert all(found <= ours for found, ours in zip(others, ADDED_BY.values(), strict=True)) and all(others)


def test_globals_that_torchao_adds() -> None:
    """A class that ``import torchao`` adds to the allowlist in the installed version requires that import. The classes
    that ``torchao.prototype.mx_formats`` adds require its import.
    """
    pytest.importorskip("torchao", reason="torchao is not installed: pip install --no-deps torchao==0.18.0")
    program = """
import torch
def names(): return {t[1] if isinstance(t, tuple) else f"{t.__module__}.{t.__qualname__}" for t in get()}
get = torch.serialization.get_safe_globals
import torchao
print(*sorted(names()))
import torchao.prototype.mx_formats
print(*sorted(names()))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    first, second = ({name for name in line.split() if name.startswith("torchao.")} for line in lines[-2:])
    assert first and {needed_import(name) for name in first} == {"torchao"}
    assert {needed_import(name) for name in second - first} == {"torchao.prototype.mx_formats"}


def test_names_of_python_2_are_mapped_as_torch_maps_them() -> None:
    """torch maps fewer names of Python 2 than Python does. None of the additional mappings leads to an allowed
    global.
    """
    for old, new in NAME_MAPPING.items() - torch._utils.NAME_MAPPING.items():
        assert ".".join(new) not in ALLOWED, old
    for module, other in IMPORT_MAPPING.items() - torch._utils.IMPORT_MAPPING.items():
        assert not any(name.rpartition(".")[0] == other for name in ALLOWED), module
    assert torch._utils.NAME_MAPPING.items() <= NAME_MAPPING.items()
    assert torch._utils.IMPORT_MAPPING.items() <= IMPORT_MAPPING.items()


TAKEN = [
    {"a": [1, -1, 300, 70_000, 1 << 40, -(1 << 2000), 2.5, None, True, ("t",), (), (1, 2, 3, 4)]},
    OrderedDict(a=1, b=OrderedDict()),
    Counter("aab"),
    b"",
    b"\xff\x00" * 200,
    bytearray(b"xyz"),
    {1, "a"},
    set(),
    1j,
    torch.Size([2, 3]),
    torch.device("cuda:0"),
    torch.float8_e5m2,
    "\ud800",
    [b"same"] * 3,
]
REFUSED = [
    frozenset({1}),
    argparse.Namespace(a=1),
    1 << 3000,
    -(1 << 2040),
    deque([1]),
    print,
    {"x": [frozenset()]},
    range(3),
    ...,
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("obj", TAKEN, ids=range(len(TAKEN)))  # not repr: the order of a set differs between processes
def test_accepted_objects_are_made_loadable(obj: object, protocol: int) -> None:
    """A pickle of an accepted object has no obstacles in protocols 3 to 5. After it is emitted as loadable, torch's
    unpickler returns an equal object.
    """
    data = pickle.dumps(obj, protocol)
    graph = graph_of(data)
    if protocol > 2:
        assert list(obstacles(graph)) == []
    if list(obstacles(graph)):
        return  # protocols 0 to 2 write bytes and sets with calls that torch does not allow
    out = b"".join(part for part in emit(graph, loadable=can_be_made_loadable(graph)) if isinstance(part, bytes))
    assert out[:2] == b"\x80\x02"
    result = loads(out)
    assert type(result) is type(obj)
    assert result == obj
    assert refused_opcodes(graph_of(out)) == []


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("obj", REFUSED, ids=lambda obj: repr(obj)[:20])
def test_refused_objects_are_refused_by_torch(obj: object, protocol: int) -> None:
    """A pickle of a refused object has an obstacle and cannot be made loadable, and torch's unpickler raises an
    error.
    """
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
def test_agrees_with_torch_on_pickles_that_no_pickler_writes(data: bytes) -> None:
    """Pickles that no pickler writes are refused by both ckptconv and torch's unpickler. They contain old opcodes,
    extensions, or assignments to objects of the wrong type.
    """
    graph = graph_of(data)
    assert list(obstacles(graph)) or refused_opcodes(graph)
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        loads(data)


def test_a_popped_call_is_an_obstacle() -> None:
    """A call whose result is discarded is an obstacle, because it cannot be written without POP."""
    graph = graph_of(b"\x80\x02ctorch\nSize\n)\x85R0N.")
    assert [reason for reason, _ in obstacles(graph)] == ["a call whose result is discarded"]


# Comparison with torch's unpickler for generated pickles


CALLED = [
    b"collections\nOrderedDict", b"collections\nCounter", b"torch\nSize", b"torch\ndevice", b"__builtin__\nset",
    b"builtins\nset", b"__builtin__\nbytearray", b"__builtin__\ncomplex", b"__builtin__\ndict", b"__builtin__\nlist",
    b"copy_reg\n_reconstructor", b"UserDict\nUserDict", b"argparse\nNamespace", b"os\ngetcwd", b"torch\nTensor",
    b"torch.nn.parameter\nParameter",
]  # a table  # fmt: skip
ATOMS = [
    b"N", b"\x88", b"K\x01", b"J\xff\xff\xff\xff", b"G" + bytes(8), b"X\x01\x00\x00\x00a", b"U\x01a",
    b"U\x02\xc3\xa4", b"U\x01\xff", b"\x8a\x01\x07", b"I7\n", b"L7L\n", b"S'a'\n", b"Va\n", b"\x8c\x01a", b"C\x01a",
    b"T\x01\x00\x00\x00a", b"]", b")", b"}", b"\x8f", b"(l", b"(d", b"(t", b"ctorch\nfloat32\n",
    b"c__builtin__\nset\n", b"cos\ngetcwd\n", b"\x82\x01",
]  # a table  # fmt: skip
#: Modifications of the value on top of the stack: an opcode and its operands.
DONE = [
    b"K\x01K\x02s", b"(K\x01K\x02u", b"(u", b"K\x01a", b"(K\x01e", b"}X\x01\x00\x00\x00aK\x01sb", b"0N",
    b"2\x85\x85", b"\x85", b"q\x00h\x00\x86", b"(K\x01\x90", b"\x94", b"p5\n",
]  # a table  # fmt: skip


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    """Generate pickles of one to three values. A value may be the result of a call, may be modified, and may contain
    the previous value.
    """
    header = draw(st.sampled_from([b"\x80\x02", b"\x80\x02", b"\x80\x03", b"\x80\x04", b""]))
    body = b""
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            value = (
                b"c"
                + draw(st.sampled_from(CALLED))
                + b"\n"
                + draw(st.sampled_from([b")R", b")R", b")\x81", b"K\x02\x85R"]))
            )
        else:
            value = draw(st.sampled_from(ATOMS))
        value += b"".join(draw(st.lists(st.sampled_from(DONE), max_size=2)))
        body = b"(" + body + value + b"t" if body else value
    return header + body + b"."


@pytest.mark.untraced
@given(data=pickles())
@settings(max_examples=600)
@example(data=b"\x80\x03c__builtin__\nset\n)R.")
@example(data=b"\x80\x02U\x01\xff.")
@example(data=b"\x80\x02c__builtin__\nset\n)RK\x01K\x02s.")
def test_simulation_agrees_with_torchs_unpickler(data: bytes) -> None:
    """If torch's unpickler refuses a generated pickle, ckptconv gives a reason. If it loads the pickle, ckptconv does
    not report it as refused.
    """
    try:
        graph = graph_of(data)
    except MalformedError:
        return
    found = {each.known for each in reasons(graph)}
    obstructed = bool(list(obstacles(graph)))
    try:
        loads(data)
    except Exception:
        assert found
    else:
        assert "refused" not in found and not obstructed
