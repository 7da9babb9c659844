"""Globals of Python, torch and their dependencies that attacks use are dangerous. Globals of honest objects are not.

CKPTCONV_SCANNERS names a folder with the unpacked source distributions of other pickle scanners. Their samples of
attacks and their lists are tested too.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import decimal
import enum
import fractions
import functools
import ipaddress
import logging
import operator
import os
import pathlib
import pickle
import random
import re
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch

from ckptconv.checkpoint.dangerous_calls import dangerous_globals, reaches
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.cli.main import main
from ckptconv.inspection.verification import verify
from ckptconv.pickles.graph import Global, Graph
from ckptconv.pickles.parser import parse
from tests.support import global_calls as ways
from tests.support.gadgets import GADGETS
from tests.support.zoo import NEEDS_PROTOCOL, ZOO, save


def graph_of(data: bytes) -> Graph:
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    return graph


# Attacks


@pytest.mark.parametrize("name", GADGETS)
def test_gadgets(here: Path, name: str) -> None:
    """Each gadget is dangerous in a checkpoint and in a pickle inside a byte string. ``verify`` fails and does not run
    the gadget.
    """
    inside = ways.NESTS["BINBYTES"](GADGETS[name].pickle)
    for i, data in enumerate((ways.checkpoint(GADGETS[name].code), ways.checkpoint(inside))):
        path = here / f"{i}.pt"
        path.write_bytes(data)
        verdict = verify(path)
        assert "dangerous" in {finding.level for finding in verdict.findings}, verdict.findings
        assert not verdict.ok and verdict.safety == "dangerous"
        assert main(["verify", str(path)]) == 1
    assert sorted(path.name for path in here.iterdir()) == ["0.pt", "1.pt"]


# Honest objects


class Colour(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    ONE = 1


Point = collections.namedtuple("Point", "x y")


class Holder:
    """An object with attributes, a method, and a constructor with keyword arguments."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, object]]:
        return (), dict(self.__dict__)

    def __new__(cls, **attributes: object) -> Holder:
        del attributes
        return super().__new__(cls)

    def method(self) -> None:
        """Do nothing."""


class Registry(dict[str, object]):
    """A subclass of dict with a method whose name is also the name of a harmful function."""

    def load(self) -> None:
        """Do nothing."""


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1), torch.nn.LSTM(2, 2), torch.nn.Embedding(2, 2),
        torch.nn.TransformerEncoderLayer(2, 1, 2), torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)),
        torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))]),
    )  # fmt: skip


def _optimizer() -> list[object]:
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    return [
        optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), torch.amp.GradScaler("cpu"),
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1),
    ]  # fmt: skip


HONEST: dict[str, Callable[[], object]] = {
    "numbers": lambda: [fractions.Fraction(1, 2), decimal.Decimal("1.5"), 1j, range(3), slice(1), ..., NotImplemented],
    "times": lambda: [
        datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(1), datetime.date.today(),
        datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    ],
    "containers": lambda: [
        collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("a"),
        collections.deque([1], 2), collections.ChainMap({1: 2}), Point(1, 2), frozenset([1]), bytearray(b"1"),
        types.SimpleNamespace(a=1), argparse.Namespace(a=1), Registry(a=1), types.MappingProxyType,
    ],
    "names": lambda: [
        pathlib.PosixPath("/a"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a"), uuid.uuid4(),
        ipaddress.ip_address("::1"), re.compile("a"), Colour.RED, Flags.ONE, os.stat("/"), os.terminal_size((1, 2)),
    ],
    "functions": lambda: [
        len, torch.relu, torch.nn.functional.gelu, np.argmax, np.add, operator.itemgetter(1),
        operator.attrgetter("a.b"),
        functools.partial(torch.nn.functional.gelu, approximate="tanh"), functools.partial(torch.optim.Adam, lr=1.0),
        functools.partial(torch.nn.init.normal_, std=0.02), torch.nn.init.xavier_uniform_, print, str.lower, dict.get,
    ],
    "methods": lambda: [
        logging.getLogger("a").info, re.compile("a").match, [].append, {}.get, random.Random(1).choice,
        np.random.RandomState(1).normal, np.random.default_rng(1).normal, Holder(a=1).method, Registry().load, "a".join,
        torch.nn.Linear(1, 1).forward, np.ones(2).copy, torch.distributions.Normal(0.0, 1.0).sample,
    ],
    "random states": lambda: [
        random.Random(1), random.getstate(), np.random.get_state(), np.random.RandomState(1), np.random.default_rng(1),
        np.random.SeedSequence(1), torch.get_rng_state(),
    ],
    "arrays": lambda: [
        np.ones((2, 2)), np.float32(1), np.dtype("f4"), np.array(["a", None], object), np.ma.masked_array([1], [True]),
        np.rec.array([(1, 2)], names="a,b"), np.datetime64("2020-01-01"), np.str_("a"),
    ],
    "classes": lambda: [
        int, object, type(None), torch.nn.Linear, torch.optim.Adam, np.float32, Colour, typing.Any, list[int],
        typing.Callable[[int], int], dict[str, int], pathlib.PosixPath, torch.utils.data.DataLoader, logging.Logger,
    ],
    "exceptions": lambda: [ValueError("a"), OSError(1, "a"), UnicodeDecodeError("utf-8", b"a", 0, 1, "b"), KeyError(1)],
    "objects": lambda: [Holder(a=1, loader=torch.utils.data.DataLoader), logging.getLogger("a"), object(), Holder()],
    "networks": _network,
    "optimizers": _optimizer,
    "torch": lambda: [
        torch.device("cpu"), torch.float32, torch.Size([1]), torch.strided, torch.contiguous_format, torch.ones(2),
        torch.utils.data.TensorDataset(torch.ones(2)), torch.utils.data.SequentialSampler([1]), torch.__version__,
        torch.utils.data.Subset([1, 2], [0]), torch.distributions.Normal(0.0, 1.0), torch.finfo,
        torch.nn.functional.interpolate, torch.iinfo,
    ],
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", HONEST)
def test_honest_objects(kind: str, protocol: int) -> None:
    """Objects that programs save next to tensors are not dangerous in any protocol, and every call in them is known."""
    made = HONEST[kind]()
    read = 0
    for each in made if isinstance(made, list) else [made]:
        try:
            data = pickle.dumps(each, protocol)
        except (TypeError, pickle.PicklingError, AttributeError):  # this protocol cannot save the object
            continue
        graph = graph_of(data)
        read += 1
        found = [name for name in dangerous_globals(graph) if name != "torch.storage._load_from_bytes"]
        assert not found and not any(kind == "unknown" for _, _, kind in reaches(graph)), each
    assert read


@pytest.mark.parametrize("protocol", range(2, 6))
def test_expressions(protocol: int) -> None:
    """Numbers of sympy are pickled as texts that nothing evaluates, so they are not dangerous."""
    x, f = sympy.Symbol("x", positive=True), sympy.Function("f")
    for each in (
        sympy.Float(1.5), x**2 + 0.1 * sympy.sin(x), f(1.5), sympy.Max(sympy.Dummy("a"), 0.1), sympy.Idx("i"),
        sympy.ImmutableMatrix([[1, 2.5]]), sympy.Eq(x, sympy.Rational(1, 3)), sympy.Piecewise((x, x > 0.5), (0, True)),
    ):  # fmt: skip
        graph = graph_of(pickle.dumps(each, protocol))
        assert not list(dangerous_globals(graph)) and not list(reaches(graph)), each


def test_an_array_in_a_file(tmp_path: Path) -> None:
    """A memmap is pickled with its numbers and opens no file, so it is not dangerous."""
    array = np.memmap(tmp_path / "x", "f4", "w+", shape=(2,))
    for protocol in range(6):
        assert not list(dangerous_globals(graph_of(pickle.dumps(array, protocol))))


# Samples and lists of other scanners


@pytest.mark.filterwarnings("ignore")  # warnings of torch about prototypes
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(tmp_path: Path, name: str) -> None:
    """No object of the zoo that torch saves is dangerous or unknown."""
    path = tmp_path / "x.pt"
    save(ZOO[name](), path, pickle_protocol=NEEDS_PROTOCOL.get(name, 2))
    assert not [finding for finding in verify(path).findings if finding.level in ("dangerous", "unknown")]


def _scanners() -> Path:
    folder = os.environ.get("CKPTCONV_SCANNERS")
    if not folder:
        pytest.skip("CKPTCONV_SCANNERS names no folder of other scanners")
    return Path(folder)


_HOSTILE = ("attack", "exploit", "malicious", "evil", "nested_pickle_raw", "multistage", "decode_exec")


def test_samples_of_other_scanners() -> None:
    """Every attack among the samples of other scanners fails ``verify``. None of their honest samples is dangerous."""
    files = [path for path in _scanners().rglob("*") if path.suffix in (".pkl", ".pt", ".pth", ".bin", ".pickle")]
    hostile = [path for path in files if any(word in str(path.relative_to(_scanners())) for word in _HOSTILE)]
    assert hostile
    for path in hostile:
        assert not verify(path, strict=True).ok, path
    for path in set(files) - set(hostile):
        if path.name.startswith("safe"):
            assert "dangerous" not in {finding.level for finding in verify(path).findings}, path


#: Globals that other scanners list and ckptconv judges by their use. pickle itself writes some of them, and ckptconv
#: checks what they fetch or call. Functions of cloudpickle carry code, so they need code, as a saved function does.
#: Complete modules are listed if a part of them is harmless, or if any project can have a module of that name.
_JUDGED_BY_USE = {
    "partial", "getattr", "attrgetter", "itemgetter", "methodcaller", "_builtin_type", "_make_function",
    "_function_setstate", "_make_cell", "_make_empty_cell", "subimport", "uuid.*", "pickle.*", "_pickle.*", "profile.*",
    "test.*",
}  # fmt: skip


def test_lists_of_other_scanners() -> None:
    """Every global that picklescan lists as unsafe is dangerous, except those that are judged by their use."""
    (source,) = _scanners().rglob("picklescan/scanner.py")
    tree = ast.parse(source.read_text("utf-8"))
    (unsafe,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_unsafe_globals"
    )
    missed = []
    for module, names in unsafe.items():
        for name in [names] if isinstance(names, str) else names:
            known = name in _JUDGED_BY_USE or f"{module}.{name}" in _JUDGED_BY_USE
            if not known and not is_dangerous(Global(module, "anything" if name == "*" else name)):
                missed.append(f"{module}.{name}")
    assert len(unsafe) > 50 and not missed
