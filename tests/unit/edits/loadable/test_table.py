"""Tests of the table of ``--loadable``. For each row, torch loads the plain data with ``weights_only=True``, and it is
compared with the original object.
"""

from __future__ import annotations

import argparse
import datetime
import optparse
import pathlib
import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptconv
from ckptconv.edits.loadable.table import BY_CLASS, NUMPY_TYPE, NUMPY_TYPES, OTHER, ROWS
from ckptconv.errors import RefusedError
from ckptconv.pickles.rows import RowCall
from tests.support.command import Command
from tests.support.conversions import refused
from tests.support.judge import assert_same

DOC = (Path(__file__).parents[4] / "docs" / "loadable.md").read_text()
HOUR = datetime.timedelta(hours=1)
Save = Callable[[Any, Path], None]


def save_pickle(obj: Any, path: Path) -> None:
    """Write `obj` to `path` with ``pickle.dumps`` in protocol 5."""
    path.write_bytes(pickle.dumps(obj, 5))


#: Functions that write a file: torch's two formats, the first one in protocol 5, and a plain pickle.
SAVE: dict[str, Save] = {
    "zip": torch.save,
    "protocol 5": lambda obj, path: torch.save(obj, path, pickle_protocol=5),
    "legacy": lambda obj, path: torch.save(obj, path, _use_new_zipfile_serialization=False),
    "pickle": save_pickle,
}


def loadable(obj: Any, path: Path, save: Save = torch.save, **options: Any) -> tuple[Any, list[tuple[str, str, str]]]:
    """Save `obj` at `path` and make the file loadable. Return the object that torch loads from the output, and the
    converted objects with their old and new kinds.
    """
    save(obj, path)
    out = path.with_name("out.pt")
    report = ckptconv.convert(path, out, force=True, **{"loadable": True, **options})
    assert ckptconv.inspect(out).torch_load.answer == "loads"
    return torch.load(out, weights_only=True), [made[:3] for made in report.changes.made_plain]


def a_class(monkeypatch: pytest.MonkeyPatch, full: str, *bases: type, **body: Any) -> Any:
    """Create a class of a package that is not installed, and install its modules. Return the class."""
    module, _, name = full.rpartition(".")
    cls = type(name, bases, {"__module__": module, **body})
    packages = module.split(".")
    for n in range(1, len(packages)):  # parent packages are imported first
        parent = ".".join(packages[:n])
        monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, types.ModuleType(parent)))
    made = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, made)
    setattr(made, name, cls)
    return cls


def state_of(state: np.random.RandomState) -> Any:
    """Return the dict that ``set_state`` accepts, with a list instead of the array."""
    said = state.get_state(legacy=False)
    return {**said, "state": {**said["state"], "key": said["state"]["key"].tolist()}}


#: Objects of Python, torch and numpy, and the plain data that they become.
PLAIN: list[tuple[Any, Any]] = [
    (argparse.Namespace(lr=0.1, tags=["a"], sub=argparse.Namespace(x=1)), {"lr": 0.1, "tags": ["a"], "sub": {"x": 1}}),
    (types.SimpleNamespace(b=None, a=True), {"b": None, "a": True}),
    (argparse.Namespace(), {}),
    (optparse.Values({"lr": 1}), {"lr": 1}),
    (defaultdict(list, {"b": [1], "a": []}), {"b": [1], "a": []}),
    (defaultdict(None, {1: 2}), {1: 2}),
    (deque([1, (2, 3)], maxlen=5), [1, (2, 3)]),
    (deque("ab"), ["a", "b"]),
    (frozenset([3]), {3}),
    (b"", b""),
    (pathlib.PurePosixPath("/runs/1"), "/runs/1"),
    (pathlib.PurePosixPath("."), "."),
    (pathlib.PureWindowsPath("C:/runs/1"), "C:\\runs\\1"),
    (torch.torch_version.TorchVersion("2.13.0+cpu"), "2.13.0+cpu"),
    (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), "2026-01-02T03:04:05.000006"),
    (datetime.datetime(1, 1, 1, tzinfo=datetime.timezone.utc), "0001-01-01T00:00:00+00:00"),
    (datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(-5 * HOUR / 2)), "2026-01-02T00:00:00-02:30"),
    (datetime.date(2026, 12, 31), "2026-12-31"),
    (datetime.time(23, 59, 1, 2, datetime.timezone(HOUR)), "23:59:01.000002+01:00"),
    (datetime.timedelta(days=2, seconds=3, microseconds=4), "P2DT3.000004S"),
    (datetime.timedelta(seconds=-1), "-P0DT1S"),
    (np.float64(0.1), 0.1), (np.float32(0.1), float(np.float32(0.1))), (np.float16(0.1), float(np.float16(0.1))),
    (np.int8(-1), -1), (np.int64(-(2**63)), -(2**63)), (np.uint64(2**64 - 1), 2**64 - 1), (np.bool_(True), True),
    (np.complex64(1 + 2j), 1 + 2j), (np.complex128(-0.0j), -0.0j), (np.str_("é\U0001f600"), "é\U0001f600"),
    (np.bytes_(b"a\0b"), b"a\0b"), (np.longdouble(0.5), 0.5), (np.longdouble(-3), -3.0), (np.longdouble(0), 0.0),
    (np.datetime64("2026-01-02T03:04"), "2026-01-02T03:04"), (np.datetime64("NaT", "s"), "NaT"),
    (np.dtype("float32"), "float32"), (np.dtype(">i8"), ">i8"), (np.dtype("U5"), "<U5"), (np.dtype("S3"), "|S3"),
    (np.dtype("M8[ms]"), "<M8[ms]"), (np.dtype(object), "object"), (np.dtype(bool), "bool"),
    (np.random.RandomState(0), state_of(np.random.RandomState(0))),
    (np.float32, "float32"), (np.bool_, "bool"), (np.uint8, "uint8"),
]  # a table  # fmt: skip
#: Objects that torch loads with ``weights_only=True``. They are not changed.
STAYS: list[Any] = [
    None, True, 1, 1.5, "a", b"ab", (1,), [2], {3: 4}, {5}, 1j, bytearray(b"x"), OrderedDict(a=1), Counter("aab"),
    torch.Size([2]), torch.device("cuda:1"), torch.float32, torch.nn.Parameter(torch.ones(2)),
]  # a table  # fmt: skip


@pytest.mark.parametrize("save", SAVE)
def test_every_object_becomes_plain(tmp_path: Path, save: str) -> None:
    """Every kind of object becomes plain data with its exact value. Objects that torch loads anyway are not changed and
    not reported.
    """
    found, made = loadable([*(old for old, _ in PLAIN), *STAYS], tmp_path / "a.pt", SAVE[save])
    assert_same(found[: len(PLAIN)], [new for _, new in PLAIN])
    assert_same(found[len(PLAIN) :], STAYS)
    named = {int(path[1:-1]) for path, _, _ in made if path.count("[") == 1 and path.endswith("]")}
    assert named == {i for i, (old, _) in enumerate(PLAIN) if old != b""}


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_random_states_draw_the_same(tmp_path: Path, generator: Any) -> None:
    """A converted RandomState draws the same numbers. A Generator also has a seed sequence, and is refused."""
    state = np.random.RandomState(generator(3))
    state.standard_normal(3)
    found, _ = loadable({"rng": state}, tmp_path / "a.pt")
    again = np.random.RandomState(generator())
    again.set_state(found["rng"])
    assert again.standard_normal(9).tolist() == state.standard_normal(9).tolist()
    torch.save([np.random.Generator(generator(3))], tmp_path / "a.pt")
    refused(RefusedError, r"generator_ctor at \[0\]", tmp_path / "a.pt", tmp_path / "b.pt", loadable=True)


@pytest.mark.filterwarnings("ignore:The 'generic' unit")
def test_numpy_reads_the_texts_of_dtypes_and_times() -> None:
    """The text of a dtype, scalar type or time gives the same dtype, type or time in numpy."""
    for old, new in PLAIN:
        if isinstance(old, np.dtype):
            assert np.dtype(new) == old
        elif isinstance(old, type):
            assert np.dtype(new).type is old
        elif isinstance(old, np.datetime64):
            assert str(np.datetime64(new)) == str(old)


MAPPINGS = next(row for row in ROWS if row.title == "dict with attributes").classes


@pytest.mark.parametrize("full", MAPPINGS)
def test_dicts_with_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    """A dict with attributes becomes a dict of its items, if its attributes are equal to its items, are markers, or are
    the dict itself.
    """
    cls = a_class(monkeypatch, full, dict)
    items = {"lr": 0.1, "sub": [1], 3: None}
    bare, twice, itself = cls(items), cls(items), cls(items)
    twice.__dict__.update({"lr": 0.1, "sub": items["sub"], "__immutable__": True})
    itself.__dict__ = itself
    found, made = loadable({"bare": bare, "twice": twice, "itself": itself}, tmp_path / "a.pt")
    assert_same(found, {name: {**items} for name in ("bare", "twice", "itself")})
    assert made == [(path, "dict with attributes", "dict") for path in ("bare", "twice", "itself")]


def test_mappings_that_are_called_with_their_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict whose class is called with the items, as mmengine pickles it, becomes a dict."""
    cls = a_class(
        monkeypatch, "mmengine.config.config.ConfigDict", dict, __reduce_ex__=lambda self, _: (cls, ({**self},))
    )
    found, _ = loadable({"cfg": cls(a=1, b=cls(c=2))}, tmp_path / "a.pt")
    assert_same(found, {"cfg": {"a": 1, "b": {"c": 2}}})


def test_attributes_that_are_not_items_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict with an attribute that is not one of its items is refused."""
    made = a_class(monkeypatch, "munch.Munch", dict)(a=1)
    made.__dict__["b"] = 2
    with pytest.raises(ckptconv.errors.RefusedError, match="its attribute b is not one of its items"):
        loadable({"cfg": made, "w": 1}, tmp_path / "a.pt")


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Return a function that converts data to containers like those of OmegaConf: nodes with their parents and
    metadata.
    """
    names = ("dictconfig.DictConfig", "listconfig.ListConfig", "nodes.AnyNode", "base.Metadata")
    mapping, sequence, node, about = (a_class(monkeypatch, f"omegaconf.{name}", object) for name in names)

    def kept(content: Any, parent: Any = None) -> Any:
        made = {dict: mapping, list: sequence}.get(type(content), node)()
        made._metadata = about()
        made._metadata.__dict__ = {"ref_type": Any, "object_type": dict, "resolver_cache": defaultdict(dict)}
        made._parent = parent
        if isinstance(content, dict):
            made._content = {key: kept(value, made) for key, value in content.items()}
        elif isinstance(content, list):
            made._content = [kept(value, made) for value in content]
        else:
            made._val = content
        return made

    return kept


def test_omegaconf(tmp_path: Path, omegaconf: Callable[[Any], Any]) -> None:
    """OmegaConf containers become dicts and lists of the values. An interpolation stays a text and is reported. A path
    becomes a text.
    """
    content = {"lr": 0.1, "l": [1, "${lr}", {"n": None}], "missing": "???", 3: pathlib.PurePosixPath("a/b")}
    found, made = loadable({"cfg": omegaconf(content)}, tmp_path / "a.pt")
    assert_same(found, {"cfg": {"lr": 0.1, "l": [1, "${lr}", {"n": None}], "missing": "???", 3: "a/b"}})
    assert [path for path, old, _ in made if old == "OmegaConf interpolation"] == ["cfg/._content/l/._content[1]"]
    assert {old for _, old, _ in made} == {"OmegaConf container", "OmegaConf interpolation", "path"}


def test_shared_objects_stay_shared(tmp_path: Path) -> None:
    """Shared objects are shared after the conversion, and ties and other objects are not changed."""
    args, array, weight = argparse.Namespace(lr=1), np.arange(4.0), torch.ones(2, 3)
    obj = {"a": args, "b": [args, array], "c": array, "tied": {"v": weight[0], "w": weight}, "n": OrderedDict(x=1)}
    obj["n"]._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    found, _ = loadable(obj, tmp_path / "a.pt")
    plain = {"lr": 1}
    tensor = torch.arange(4.0, dtype=torch.float64)
    assert_same(found, {**obj, "a": plain, "b": [plain, tensor], "c": tensor})


def test_objects_that_contain_themselves(tmp_path: Path) -> None:
    """A namespace, a defaultdict and an array of objects may contain themselves."""
    args: Any = argparse.Namespace(lr=1)
    args.me = args
    known: Any = defaultdict(list)
    known["me"] = known
    array = np.empty(1, object)
    array[0] = array
    found, _ = loadable({"args": args, "known": known, "array": array}, tmp_path / "a.pt")
    assert found["args"]["me"] is found["args"] and found["args"]["lr"] == 1
    assert found["known"]["me"] is found["known"]
    assert found["array"][0] is found["array"]


def test_keys_and_members(tmp_path: Path) -> None:
    """Keys and members of sets may become numbers and texts. The conversion is refused if a key would become a set, or
    if two keys or members would become equal.
    """
    found, _ = loadable({np.int64(1): "a", pathlib.PurePosixPath("x"): {np.int64(2), "b"}}, tmp_path / "a.pt")
    assert found == {1: "a", "x": {2, "b"}}
    for obj, words in (
        ({"k": {frozenset([1]): 2}}, "would get a set as one of its keys"),
        ({"k": {pathlib.PurePosixPath("a"): 1, "a": 2}}, "two keys of a mapping or set would become equal"),
        ({"k": {pathlib.PurePosixPath("a"), "a"}}, "two members of a mapping or set would become equal"),
        ({"k": {(pathlib.PurePosixPath("a"), 1): 1, ("a", 1): 2}}, "two keys of a mapping or set would become equal"),
    ):
        with pytest.raises(ckptconv.errors.RefusedError, match=words):
            loadable({**obj, "w": 1}, tmp_path / "a.pt")


class Odd:
    """An object of a class that is not in the table."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_loadable_objects(tmp_path: Path) -> None:
    """``loadable_objects`` converts other objects to dicts with the name of their class, and classes to dicts with
    their name. A result of a call such as range is refused.
    """
    obj = {"o": Odd(a=1, w=torch.ones(2)), "kind": Odd, "done": range(1, 3)}
    with pytest.raises(ckptconv.errors.RefusedError, match=r"range at done"):
        loadable(obj, tmp_path / "a.pt", loadable_objects=True)
    del obj["done"]
    found, made = loadable(obj, tmp_path / "a.pt", loadable_objects=True)
    name = f"{__name__}.Odd"
    assert_same(found, {"o": {"__class__": name, "a": 1, "w": torch.ones(2)}, "kind": {"__global__": name}})
    assert [path for path, _, _ in made] == ["o", "kind"]


def test_reserved_names(tmp_path: Path) -> None:
    """An attribute with a reserved name is not overwritten. The object is refused."""
    with pytest.raises(ckptconv.errors.RefusedError, match="a reserved name, such as __class__"):
        loadable({"o": Odd(__args__=1), "w": 1}, tmp_path / "a.pt", loadable_objects=True)


def test_nothing_to_do(tmp_path: Path, command: Command) -> None:
    """If all objects are plain data already, the report contains a note."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    command("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--loadable", err="plain data already")


@pytest.mark.untraced
@pytest.mark.parametrize(
    "edits",
    [
        {"loadable": True}, {"loadable_objects": True}, {"state_dict": True}, {"drop": "args"}, {"drop": "optimizer"},
        {"exclude": "model/4.*", "drop": "optimizer", "map_location": "cuda:1"},
        {"select": "optimizer", "loadable": True},
    ],
)  # a table  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_rows_of_tensors_are_not_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, edits: Any
) -> None:
    """The nodes inside the rows of tensors are not created. The output is the same as if they were."""
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(40)))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    args, parameters = argparse.Namespace(lr=1), [*net.parameters()]
    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "args": args, "net": parameters}
    torch.save(parts, tmp_path / "a.pt", pickle_protocol=protocol)
    with monkeypatch.context() as patch:
        patch.setattr(RowCall, "row", None)
        ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", **edits)
    before, made = (tmp_path / "b.pt").read_bytes(), RowCall._make
    expanded: list[RowCall] = []
    monkeypatch.setattr(RowCall, "_make", lambda row, form: (expanded.append(row), made(row, form)))
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", force=True, **edits)
    assert (tmp_path / "b.pt").read_bytes() == before
    assert len(expanded) < 80  # of 400: some for each form of rows


def test_the_docs_have_the_same_table() -> None:
    """The documentation contains every row of the table with its classes and texts."""
    for row in (*ROWS, NUMPY_TYPE, OTHER):
        assert f"| {row.title} |" in DOC and f"| {row.plain} | {row.why} |" in DOC, row.title
    for name in {name.rpartition(".")[2].lstrip("_") for name in (*BY_CLASS, *NUMPY_TYPES)}:
        assert name in DOC, name
