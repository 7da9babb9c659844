"""Tests of edits from file to file. Names are changed wherever they are used, and devices only in location tags.
Results are compared with torch.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import ckptconv
from ckptconv.edits.changes import OptimizerChange
from ckptconv.errors import CollisionError, NoMatchError, UsageError
from tests.support.hostile_bytes import saved
from tests.support.judge import assert_same, tags_of
from tests.support.round_trips import round_trip

W = torch.zeros(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.head = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


def refused(folder: Path, obj: object, **edits: Any) -> str:
    """Return the message of the error that converting `obj` raises. Assert that nothing is written."""
    with pytest.raises((NoMatchError, CollisionError, UsageError)) as caught:
        round_trip(folder, obj, **edits)
    assert [path.name for path in folder.iterdir()] == ["src.pt"]
    return str(caught.value)


def renamed(obj: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in obj.items()}


# Prefixes of DataParallel


def test_strip_gives_the_state_dict_of_the_wrapped_module(fixtures: Path, tmp_path: Path) -> None:
    """``strip_prefix`` gives the state dict of the wrapped module, with its names, order, values and ``_metadata``. The
    module loads it strictly.
    """
    report = ckptconv.convert(fixtures / "dataparallel.pt", tmp_path / "x.pt", strip_prefix="module.")
    state, tags = tags_of(tmp_path / "x.pt", weights_only=True)
    assert_same(state, tags_of(fixtures / "cpu.pt")[0])
    assert state._metadata == Net().state_dict()._metadata
    assert list(state._metadata) == list(Net().state_dict()._metadata)
    assert set(tags) == {"cuda:0"}
    Net().load_state_dict(state, strict=True)
    assert len(report.changes.names) == 11
    assert (report.changes.names[0].old, report.changes.names[0].new) == ("module.conv.weight", "conv.weight")
    assert report.changes.unprefixed == 0


def test_add_gives_the_state_dict_of_the_wrapper(fixtures: Path, tmp_path: Path) -> None:
    """``add_prefix`` gives the result of ``nn.DataParallel(net).state_dict()``, with the wrapper's entry first in
    ``_metadata``.
    """
    ckptconv.convert(fixtures / "cuda0.pt", tmp_path / "x.pt", add_prefix="module.")
    state, _ = tags_of(tmp_path / "x.pt", weights_only=True)
    assert_same(state, tags_of(fixtures / "dataparallel.pt")[0])
    assert list(state._metadata.items()) == list(nn.DataParallel(Net()).state_dict()._metadata.items())
    nn.DataParallel(Net()).load_state_dict(state, strict=True)


def test_strip_agrees_with_torchs_function(fixtures: Path, tmp_path: Path) -> None:
    """``strip_prefix`` gives the result of ``consume_prefix_in_state_dict_if_present`` if all names have the prefix."""
    ckptconv.convert(fixtures / "dataparallel.pt", tmp_path / "x.pt", strip_prefix="module.")
    expected, _ = tags_of(fixtures / "dataparallel.pt")
    consume_prefix_in_state_dict_if_present(expected, "module.")
    assert_same(tags_of(tmp_path / "x.pt")[0], expected)


@pytest.mark.parametrize("prefix", ["module", "module.", ["module"], ("module.",)])
def test_module_means_module_dot(fixtures: Path, tmp_path: Path, prefix: Any) -> None:
    """A prefix can be given with or without its dot, alone or in a sequence."""
    report = ckptconv.convert(fixtures / "dataparallel.pt", tmp_path / "x.pt", strip_prefix=prefix)
    assert report.changes.names[0].new == "conv.weight"


def test_strip_rename_add_in_that_order(fixtures: Path, tmp_path: Path) -> None:
    """Prefixes are stripped before names are renamed, and added after that, whatever the order of the keywords is."""
    ckptconv.convert(
        fixtures / "dataparallel.pt",
        tmp_path / "x.pt",
        add_prefix="net",
        rename=[("^conv", "stem")],
        strip_prefix="module",
    )
    state, _ = tags_of(tmp_path / "x.pt")
    assert list(state)[:3] == ["net.stem.weight", "net.stem.bias", "net.bn.weight"]
    assert list(state._metadata)[:4] == ["", "net", "net.stem", "net.bn"]


def test_nested_wrapper(tmp_path: Path) -> None:
    """Stripping a prefix of two segments removes the entries of both wrappers from ``_metadata``. Adding the prefix
    restores them.
    """
    wrapped = nn.DataParallel(nn.DataParallel(Net())).state_dict()
    stripped, _ = round_trip(tmp_path, wrapped, strip_prefix="module.module.")
    assert list(stripped._metadata.items()) == list(Net().state_dict()._metadata.items())
    again, _ = round_trip(tmp_path, stripped, add_prefix="module.module")
    assert list(again._metadata.items()) == list(wrapped._metadata.items())


segment = st.sampled_from(["module", "mod", "features", "0", "w", "a b", "_orig_mod", "é"])
name = st.lists(segment, min_size=1, max_size=4).map(".".join)


def state_dict_of(names: list[str], *, metadata: bool) -> Any:
    """Return a state dict like that of a module. With `metadata`, it has an entry in ``_metadata`` for every module
    above a name.
    """
    state: Any = OrderedDict((name, torch.full((2,), float(i))) for i, name in enumerate(names))
    if metadata:
        modules = {".".join(name.split(".")[:n]) for name in names for n in range(name.count(".") + 1)}
        state._metadata = OrderedDict((module, {"version": 2 if module else 1}) for module in sorted(modules))
    return state


@given(st.lists(name, min_size=1, max_size=8, unique=True), name, st.booleans())
def test_strip_undoes_add(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], prefix: str, metadata: bool
) -> None:
    """For any names and any prefix, ``strip_prefix`` reverses ``add_prefix``."""
    folder = tmp_path_factory.getbasetemp()
    state = state_dict_of(names, metadata=metadata)
    added, _ = round_trip(folder, state, add_prefix=prefix)
    assert list(added) == [f"{prefix}.{name}" for name in names]
    assert_same(round_trip(folder, added, strip_prefix=prefix)[0], state)


@given(st.lists(name, min_size=1, max_size=8, unique=True), name, st.booleans())
def test_add_undoes_strip(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], prefix: str, metadata: bool
) -> None:
    """If every name has the prefix, ``add_prefix`` reverses ``strip_prefix``."""
    folder = tmp_path_factory.getbasetemp()
    wrapped = state_dict_of([f"{prefix}.{name}" for name in names], metadata=metadata)
    if metadata:
        for above in [entry for entry in wrapped._metadata if prefix.startswith(entry + ".")]:
            wrapped._metadata[above] = {"version": 1}  # the wrapper's own entry
    stripped, _ = round_trip(folder, wrapped, strip_prefix=prefix)
    assert list(stripped) == names
    assert_same(round_trip(folder, stripped, add_prefix=prefix)[0], wrapped)


# Which names change

#: A model, its average with the same keys in another order, and another model.
TWINS = {"model": {"a.w": W, "a.b": W}, "ema": {"a.b": W, "a.w": W}, "critic": {"c.w": W}}
TWINS_WRAPPED = {
    "model": {"module.a.w": W, "module.a.b": W},
    "ema": {"module.a.b": W, "module.a.w": W},
    "critic": {"c.w": W},
}
SEVERAL = {"g": {"module.w": W}, "d": {"module.v": W}, "plain": {"u": W}}
#: The saved object, the edits, and the expected result.
NAMES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "repeated prefixes apply in turn": (
        {"a.b.w": W},
        {"strip_prefix": ["a", "b"], "add_prefix": ["c", "d"]},
        {"d.c.w": W},
    ),
    "a segment is no other that starts alike": (
        {"module.w": W, "modern.w": W},
        {"strip_prefix": "module"},
        {"w": W, "modern.w": W},
    ),
    "one level at a time, an inner module survives": (
        OrderedDict([("module.module.w", W), ("module.conv.module.w", W)]),
        {"strip_prefix": "module"},
        OrderedDict([("module.w", W), ("conv.module.w", W)]),
    ),
    "names without the prefix stay in their places": (
        OrderedDict([("step", W), ("module.weight", W), ("module.bias", W), ("ema.w", W)]),
        {"strip_prefix": "module"},
        OrderedDict([("step", W), ("weight", W), ("bias", W), ("ema.w", W)]),
    ),
    "swapped names do not collide: only the result counts": (
        {"a.w": W, "b.w": torch.ones(2)},
        {"rename": [("^a", "c"), ("^b", "a"), ("^c", "b")]},
        {"b.w": W, "a.w": torch.ones(2)},
    ),
    "a prefix comes off every state dict that has it": (
        SEVERAL,
        {"strip_prefix": "module"},
        {"g": {"w": W}, "d": {"v": W}, "plain": {"u": W}},
    ),
    "a rename serves every state dict": (
        {"student": {"w": W}, "teacher": {"w": W}},
        {"rename": [("^", "module.")]},
        {"student": {"module.w": W}, "teacher": {"module.w": W}},
    ),
    "twins follow, another state dict does not": (TWINS, {"add_prefix": "module"}, TWINS_WRAPPED),
    "twins follow back": (TWINS_WRAPPED, {"strip_prefix": "module"}, TWINS),
    "an optimizer is stripped whole, of a tied weight's name too": (
        {"model": {"module.w": W}, "opt": {"state": {"module.z": 1, "module.w": 2}, "param_groups": []}},
        {"strip_prefix": "module"},
        {"model": {"w": W}, "opt": {"state": {"z": 1, "w": 2}, "param_groups": []}},
    ),
    "an optimizer of another model gets no prefix": (
        {
            "model": {"w": W, "b": W},
            "disc": {"w": W, "c": W},
            "other": {"state": {"w": 1}, "param_groups": [{"params": ["w", "c"]}]},
            "own": {"state": {"w": 1}, "param_groups": [{"params": ["w", "b"]}]},
        },
        {"add_prefix": "module"},
        {
            "model": {"module.w": W, "module.b": W},
            "disc": {"w": W, "c": W},
            "other": {"state": {"w": 1}, "param_groups": [{"params": ["w", "c"]}]},
            "own": {"state": {"module.w": 1}, "param_groups": [{"params": ["module.w", "module.b"]}]},
        },
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_that_change(tmp_path: Path, case: str) -> None:
    """The names in the table change wherever they are used, and keep their positions."""
    obj, edits, expected = NAMES[case]
    assert_same(round_trip(tmp_path, obj, **edits)[0], expected)


# Prefixes end at segments


def test_a_near_prefix_is_named(tmp_path: Path) -> None:
    """A prefix with a typing error matches nothing, and the error suggests the existing prefix."""
    for said in ("modul", "modul.", "moduel."):
        line = refused(tmp_path, {"module.w": W, "net.w": W}, strip_prefix=said)
        assert line.endswith("; strip_prefix='module.' may be meant")


def test_select_in_a_state_dict_suggests_no_path(tmp_path: Path) -> None:
    """If the checkpoint is itself a state dict, the error of ``select`` suggests no path."""
    assert "such as ." not in refused(tmp_path, {"module.w": W}, select="model")


def test_anchored_at_segments(tmp_path: Path) -> None:
    """``mod`` is not a prefix of ``module.w``, because prefixes end at a dot. The error lists the existing prefixes and
    suggests ``rename``.
    """
    line = refused(tmp_path, {"module.w": W, "modern.w": W}, strip_prefix="mod")
    assert "module. (1), modern. (1)" in line
    assert "rename=[('^mod', '')]" in line


def test_a_prefix_that_is_stripped_too_often(tmp_path: Path) -> None:
    """A prefix that is stripped more often than it occurs is an error."""
    with pytest.raises(NoMatchError):
        round_trip(tmp_path, {"module.w": W, "conv.module.w": W}, strip_prefix=["module", "module", "module"])


def test_a_wrapper_inside_the_model(fixtures: Path, tmp_path: Path) -> None:
    """A DataParallel around a part of the model does not put ``module.`` at the start of the names. ``strip_prefix`` is
    refused, and ``rename`` removes it also from ``_metadata``.
    """
    source = fixtures / "dataparallel_features.pt"
    with pytest.raises(NoMatchError, match=r"features. \(4\), classifier. \(2\)"):
        ckptconv.convert(source, tmp_path / "x.pt", strip_prefix="module.")
    ckptconv.convert(source, tmp_path / "x.pt", rename=[(r"^features\.module\.", "features.")])
    net = nn.Module()
    net.features = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
    net.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8, 2))
    state, _ = tags_of(tmp_path / "x.pt")
    assert net.load_state_dict(state, strict=True)
    assert list(state._metadata.items()) == list(net.state_dict()._metadata.items())


def test_mixed_names_are_counted(tmp_path: Path) -> None:
    """Names without the prefix are counted, also in other state dicts. The report lists the changed names."""
    state = OrderedDict([("step", W), *nn.DataParallel(nn.Linear(2, 1)).state_dict().items(), ("ema.w", W)])
    _, report = round_trip(tmp_path, state, strip_prefix="module")
    assert report.changes.unprefixed == 2
    assert [(change.path, change.old, change.new) for change in report.changes.names] == [
        (".", "module.weight", "weight"),
        (".", "module.bias", "bias"),
    ]
    _, report = round_trip(tmp_path, SEVERAL, strip_prefix="module")
    assert report.changes.unprefixed == 1


def test_metadata_of_a_state_dict_without_the_prefix_stays(tmp_path: Path) -> None:
    """The ``_metadata`` of a state dict without the prefix is not changed, although one of its modules without
    parameters is named like the prefix.
    """
    other = nn.Sequential(OrderedDict(module=nn.ReLU(), fc=nn.Linear(1, 1))).state_dict()
    wrapped = nn.DataParallel(nn.Linear(1, 1)).state_dict()
    both, _ = round_trip(tmp_path, {"model": wrapped, "other": other}, strip_prefix="module")
    assert list(both["model"]._metadata) == [""]
    assert_same(both["other"], other)


def test_metadata_of_a_single_layer(tmp_path: Path) -> None:
    """If the wrapped module is a single layer, the entry of the layer replaces the entry of the wrapper in
    ``_metadata``. ``add_prefix`` restores the original entries.
    """
    wrapped = nn.DataParallel(nn.BatchNorm1d(2)).state_dict()
    stripped, _ = round_trip(tmp_path, wrapped, strip_prefix="module")
    assert dict(stripped._metadata) == {"": {"version": 2}}
    added, _ = round_trip(tmp_path, nn.BatchNorm1d(2).state_dict(), add_prefix="module")
    assert list(added._metadata.items()) == list(wrapped._metadata.items())


def test_metadata_longer_than_a_batch(tmp_path: Path) -> None:
    """pickle writes mappings in batches of 1,000 items. An entry of ``_metadata`` can be removed from the last
    batch.
    """
    state = state_dict_of([f"module.layer{i}.w" for i in range(999)], metadata=True)
    entries = state._metadata
    assert len(entries) == 1001
    entries.move_to_end("")
    stripped, _ = round_trip(tmp_path, state, strip_prefix="module")
    assert list(stripped._metadata) == ["", *sorted(f"layer{i}" for i in range(999))]


# Collisions and typos


@pytest.mark.parametrize(
    ("obj", "edits"),
    [
        ({"module.w": W, "w": W}, {"strip_prefix": "module"}),
        ({"w": W, "module.w": W}, {"strip_prefix": "module"}),
        ({"x": {"module.w": W, "w": W}}, {"rename": [(r"^module\.", "")]}),
        ({"state": {"module.w": {}, "w": {}}, "param_groups": []}, {"strip_prefix": "module"}),
        ({"module.w": W, "w": W}, {"strip_prefix": "module", "add_prefix": "module"}),
    ],
)
def test_two_names_that_become_one(tmp_path: Path, obj: object, edits: Any) -> None:
    """Two names that would become equal are refused, also in an optimizer or if a later edit makes them different. The
    error contains both names.
    """
    line = refused(tmp_path, obj, **edits)
    assert "two names would become" in line
    assert "'module.w'" in line and "'w'" in line


@pytest.mark.parametrize(
    ("obj", "edits", "said"),
    [
        ({"model.w": W, "model.b": W, "net.w": W}, {"strip_prefix": "module"}, "prefixes model. (2), net. (1)"),
        ({"w": W}, {"strip_prefix": "module"}, "no prefixes"),
        ([W], {"strip_prefix": "module"}, "no state dict"),
        ({f"m{i}.w": W for i in range(7)}, {"strip_prefix": "module"}, "..."),
        ({"w": W}, {"rename": [("conv", "x")]}, "no name matches 'conv'"),
        ({"module.w": W}, {"select": "model"}, "the checkpoint is itself a state dict; to see the contents: "),
        ({"w": W}, {"strip_prefix": ""}, "rename="),
        ({"w": W}, {"strip_prefix": "."}, "rename="),
        ({"w": W}, {"add_prefix": "a..b"}, "rename="),
        ({"w": W}, {"add_prefix": [".a"]}, "rename="),
        ([W], {"rename": [("conv", "x")]}, "no state dict"),
        ([W], {"add_prefix": "module"}, "no state dict"),
        ({"w": W}, {"rename": [("(", "x")]}, "is not a valid regular expression"),
        ({"w": W}, {"rename": [("w", r"\1")]}, "is not a valid regular expression"),
        ({"m": {"a.w": W}}, {"exclude": "b*"}, "no name in a state dict matches 'b*' (expected something like m/a.w)"),
        ({"m": {"a.w": W}}, {"exclude": "a"}, "m/a.w); try: exclude='a.*'"),
        ({"m": {"b.a.w": W}}, {"exclude": "a"}, "try: exclude='*.a.*'"),
        ({"m": {"a.w": W}}, {"include": "m"}, "for the part of that name: select='m'"),
        ({"m": {"a.w": W}}, {"include": "m.*"}, "for the part of that name: select='m'"),
        ({"m": {"a.w": W}}, {"exclude": "m"}, "for the part of that name: drop='m'"),
        ({"m": {"a.w": W}}, {"include": "n/*"}, "no tensor matches 'n/*' (expected something like m/a.w)"),
        (
            {"m": {"a.w": W}, "n": {"b": W}},
            {"select": "a.w"},
            "nothing at a.w (expected a path such as m (8 bytes), n (8 bytes))",
        ),
        ({"m": {"a.w": W}}, {"select": ""}, "there is nothing at ''"),
    ],
)
def test_edits_without_a_match(tmp_path: Path, obj: object, edits: Any, said: str) -> None:
    """An edit that matches nothing is an error. The message shows the existing prefixes or paths."""
    assert said in refused(tmp_path, obj, **edits)


def test_add_prefix_with_several_state_dicts(tmp_path: Path) -> None:
    """If several state dicts could be meant, ``add_prefix`` is refused. The error lists them and suggests ``rename``
    for all of them.
    """
    obj = {"student": {"w": W}, "teacher": {"w": W}}
    line = refused(tmp_path, obj, add_prefix="module")
    assert "student, teacher" in line
    assert "rename=[('^', 'module.')]" in line


# Rename


def test_rename_is_re_sub(tmp_path: Path) -> None:
    """``rename`` works like ``re.sub`` on every name. The modules in ``_metadata`` are renamed too."""
    state, report = round_trip(tmp_path, Net().state_dict(), rename=[(r"^head\.(\d)", r"fc\1")])
    assert list(state)[-4:] == ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]
    assert list(state._metadata) == ["", "conv", "bn", "head", "fc0", "fc1"]
    assert len(report.changes.names) == 4


@pytest.mark.parametrize(
    ("names", "edits", "modules"),
    [
        (["a.b.w"], {"rename": [(r"(\.|$)", r"!\1")]}, ["", "a!", "a!.b!"]),
        (["a.b.w"], {"rename": [("^", "x_")]}, ["", "x_a", "x_a.b"]),
        (["a.b.w"], {"rename": [("^", "x.")]}, ["x", "x.a", "x.a.b"]),
        (["a.b.w"], {"rename": [(r"\.", "_")]}, ["", "a", "a.b"]),
        (["a.b.w"], {"rename": [(r"[^.]*$", "v")]}, ["", "a", "a.b"]),
        (["a.b.w"], {"rename": [(r"^a\.", "")]}, ["", "b"]),
        (["a.b.w", "a.c.w"], {"strip_prefix": "a.b"}, ["a", "", "a.c"]),
    ],
    ids=[
        "every segment",
        "a word",
        "a module",
        "dots",
        "the last segment",
        "the first",
        "one of two",
    ],
)
def test_renamed_modules_in_metadata(tmp_path: Path, names: list[str], edits: Any, modules: list[str]) -> None:
    """The modules in ``_metadata`` are renamed like the parts of names before a dot. An entry is kept if its renamed
    part does not end at a dot.
    """
    state, _ = round_trip(tmp_path, state_dict_of(names, metadata=True), **edits)
    assert list(state._metadata) == modules


# Loading into the original model


class Named(nn.Module):
    """A model with modules that are really named ``module``, at the start of names and inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.hidden = nn.ModuleList([nn.ModuleDict({"module": nn.BatchNorm1d(2)})])


class Layers(nn.Module):
    """A model whose blocks are called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.add_module(name, nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]))


def training(model: nn.Module) -> dict[str, Any]:
    """Return a training checkpoint with the state dicts of `model` and its average."""
    averaged = torch.optim.swa_utils.AveragedModel(model)
    return {"epoch": 3, "ema": averaged.state_dict(), "model": nn.DataParallel(model).state_dict(), "lists": [W]}


def only_module() -> nn.Module:
    return nn.Sequential(OrderedDict(module=nn.BatchNorm1d(2)))


STRICT: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[], nn.Module]]] = {
    "strip": (lambda: nn.DataParallel(Named()).state_dict(), {"strip_prefix": "module"}, Named),
    "strip of two": (
        lambda: nn.DataParallel(nn.DataParallel(Net())).state_dict(),
        {"strip_prefix": ["module"] * 2},
        Net,
    ),
    "strip a trainer's": (lambda: nn.ModuleDict({"model": Net()}).state_dict(), {"strip_prefix": "model"}, Net),
    "add": (lambda: Named().state_dict(), {"add_prefix": "module"}, lambda: nn.DataParallel(Named())),
    "add of two": (
        lambda: Net().state_dict(),
        {"add_prefix": ["a", "b.c"]},
        lambda: nn.ModuleDict({"b": nn.ModuleDict({"c": nn.ModuleDict({"a": Net()})})}),
    ),
    "unwrap": (lambda: nn.DataParallel(Named()).state_dict(), {"unwrap": True}, Named),
    "unwrap of module.module": (lambda: nn.DataParallel(only_module()).state_dict(), {"unwrap": True}, only_module),
    "rename": (lambda: Layers("h").state_dict(), {"rename": [(r"^h\.", "layers.")]}, lambda: Layers("layers")),
    "rename inside": (lambda: Named().state_dict(), {"rename": [(r"\.module\.", ".norm."), ("norm", "module")]}, Named),
    "select": (lambda: {"student": Net().state_dict(), "teacher": Named().state_dict()}, {"select": "teacher"}, Named),
    "select in a list": (
        lambda: {"rank": [Net().state_dict(), {"model": Named().state_dict()}]},
        {"select": "rank[1]/model"},
        Named,
    ),
    "state_dict": (lambda: training(Named()), {"state_dict": True, "unwrap": True}, Named),
    "state_dict of a module": (lambda: nn.DataParallel(Named()), {"state_dict": True, "strip_prefix": "module"}, Named),
    "average": (lambda: training(Named()), {"select": "ema", "exclude": "n_averaged", "unwrap": True}, Named),
    "average, its prefix": (
        lambda: training(Named()),
        {"select": "ema", "exclude": "n_*", "strip_prefix": "module"},
        Named,
    ),
    "include": (lambda: Net().state_dict(), {"include": "head.*", "strip_prefix": "head"}, lambda: Net().head),
    "exclude": (
        lambda: Layers("h").state_dict(),
        {"exclude": ["h.*.1.*", "h.1.*", "h.2.*", "stem.*"], "strip_prefix": "h.0.0"},
        lambda: nn.Linear(2, 2),
    ),
}


@pytest.mark.parametrize("case", STRICT)
def test_the_model_loads_the_output(tmp_path: Path, case: str) -> None:
    """The model loads the output with ``strict=True``, with equal values and the same versions in ``_metadata``."""
    make, edits, model = STRICT[case]
    state, _ = round_trip(tmp_path, make(), weights_only=True, **edits)
    wanted = model()
    wanted.load_state_dict(state, strict=True)
    own = wanted.state_dict()
    assert all(torch.equal(state[name], own[name]) for name in own)
    assert set(state) == set(own)
    versions = getattr(state, "_metadata", own._metadata)
    assert {path: versions.get(path) for path in own._metadata} == dict(own._metadata)


# All places of names


def test_twins_are_reported(tmp_path: Path) -> None:
    """The report lists each changed name in the model and in its average."""
    _, report = round_trip(tmp_path, TWINS, add_prefix="module")
    assert {change.path for change in report.changes.names} == {"model", "ema"}


def test_optimizers_keyed_by_names_follow(tmp_path: Path) -> None:
    """Names in an optimizer's ``state``, ``params`` and ``param_names`` are changed. Equal texts elsewhere are data of
    the user and are not changed.
    """
    names = ["module.w", "module.b"]
    obj = {
        "model": dict.fromkeys(names, W),
        "optimizer": {
            "state": {name: {"step": 1} for name in names},
            "param_groups": [{"params": list(names), "param_names": list(names), "tag": names[0]}],
        },
        "frozen": list(names),
        "lr_of": {names[0]: 0.1},
    }
    expected: Any = copy.deepcopy(obj)
    expected["model"] = renamed(expected["model"], **{"module.w": "w", "module.b": "b"})
    optimizer = expected["optimizer"]
    optimizer["state"] = renamed(optimizer["state"], **{"module.w": "w", "module.b": "b"})
    optimizer["param_groups"][0] |= {"params": ["w", "b"], "param_names": ["w", "b"]}
    stripped, _ = round_trip(tmp_path, obj, strip_prefix="module")
    assert stripped["optimizer"] == optimizer
    assert list(stripped["model"]) == ["w", "b"]
    assert (stripped["frozen"], stripped["lr_of"]) == (names, {names[0]: 0.1})
    again, _ = round_trip(tmp_path, stripped, add_prefix="module")
    assert again["optimizer"] == obj["optimizer"]


def test_an_optimizer_keyed_by_integers_is_untouched(tmp_path: Path) -> None:
    """An optimizer's state keyed by integers is not changed. Its ``param_names`` are, and torch loads the result."""
    net = nn.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(net.named_parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    obj = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    stripped, report = round_trip(tmp_path, obj, strip_prefix="module")
    assert report.changes.optimizers == {"optimizer": OptimizerChange(names=2)}
    assert "2 names in the optimizer at optimizer changed with them" in str(report)
    expected = obj["optimizer"]
    assert expected["param_groups"][0].pop("param_names") == ["module.weight", "module.bias"]
    assert stripped["optimizer"]["param_groups"][0].pop("param_names") == ["weight", "bias"]
    assert_same(stripped["optimizer"], expected)
    torch.optim.AdamW(nn.Linear(2, 1).parameters()).load_state_dict(stripped["optimizer"])


def test_a_file_with_only_an_optimizer(tmp_path: Path) -> None:
    """In a file that contains only an optimizer, strip and rename apply to its parameter names."""
    obj = {"state": {"module.w": {"step": 1}}, "param_groups": [{"params": ["module.w", "b"]}]}
    stripped, report = round_trip(tmp_path, obj, strip_prefix="module")
    assert stripped == {"state": {"w": {"step": 1}}, "param_groups": [{"params": ["w", "b"]}]}
    assert report.changes.unprefixed == 1
    assert [(change.path, change.old, change.new) for change in report.changes.names] == [(".", "module.w", "w")]
    assert round_trip(tmp_path, obj, rename=[(r"^module\.", "")])[0] == stripped


def test_shared_metadata_is_edited_once(tmp_path: Path) -> None:
    """If two state dicts share ``_metadata``, it is edited once and stays shared."""
    state = nn.DataParallel(nn.DataParallel(nn.Linear(1, 1))).state_dict()
    twin = copy.copy(state)
    assert twin._metadata is state._metadata
    both, _ = round_trip(tmp_path, {"model": state, "ema": twin}, strip_prefix="module")
    assert both["model"]._metadata is both["ema"]._metadata
    assert list(both["model"]._metadata.items()) == list(
        nn.DataParallel(nn.Linear(1, 1)).state_dict()._metadata.items()
    )


def test_changes_of_names_keep_the_tags(fixtures: Path, tmp_path: Path) -> None:
    """A change of names does not change the location tags."""
    ckptconv.convert(fixtures / "two_gpus.pt", tmp_path / "a.pt", add_prefix="module")
    assert Counter(tags_of(tmp_path / "a.pt")[1]) == {"cuda:0": 7, "cuda:1": 4}


# Devices


@pytest.mark.parametrize("name", ["cpu", "cuda0", "two_gpus", "dataparallel", "tied", "resnet18", "training"])
def test_to_cpu_is_what_torch_loads(fixtures: Path, tmp_path: Path, name: str) -> None:
    """The output equals the input that is loaded with ``map_location='cpu'``."""
    ckptconv.convert(fixtures / f"{name}.pt", tmp_path / "x.pt", map_location="cpu")
    expected = torch.load(fixtures / f"{name}.pt", map_location="cpu", weights_only=False)
    assert_same(torch.load(tmp_path / "x.pt", weights_only=False), expected)


@pytest.mark.parametrize(
    ("map_location", "tags"),
    [
        ("cpu", {"cpu": 11}),
        ("gpu", {"cuda:0": 11}),
        (torch.device("cuda:3"), {"cuda:3": 11}),
        ({"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, {"cuda:1": 7, "cuda:0": 4}),
        ({"cuda:1": "cuda:0"}, {"cuda:0": 11}),
        ({"cuda": "xpu"}, {"xpu:0": 7, "xpu:1": 4}),
        ({"cuda:1": "mps", "any": "cpu"}, {"cpu": 7, "mps": 4}),
        (lambda tag: "cpu" if tag == "cuda:1" else tag, {"cuda:0": 7, "cpu": 4}),
        ({"cpu": "gpu"}, {"cuda:0": 7, "cuda:1": 4}),
    ],
)
def test_tags_in_the_file(fixtures: Path, tmp_path: Path, map_location: Any, tags: dict[str, int]) -> None:
    """The output contains the requested location tags and equal tensors."""
    ckptconv.convert(fixtures / "two_gpus.pt", tmp_path / "x.pt", map_location=map_location)
    state, found = tags_of(tmp_path / "x.pt")
    assert Counter(found) == tags
    assert_same(state, tags_of(fixtures / "two_gpus.pt")[0])


def test_ties_stay_tied(fixtures: Path, tmp_path: Path) -> None:
    """The storage of a tied tensor is moved once, and the tensors stay tied."""
    report = ckptconv.convert(fixtures / "tied.pt", tmp_path / "x.pt", map_location="cuda:1")
    state, tags = tags_of(tmp_path / "x.pt")
    assert tags == ["cuda:1"]
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert report.changes.devices == {("cpu", "cuda:1"): (2, 96)}


def test_generator_states_stay_on_the_cpu(fixtures: Path, tmp_path: Path) -> None:
    """With ``map_location='cuda:1'``, generator states stay on the CPU and are listed in the report. Other tensors
    move, and a device in ``args`` is not changed.
    """
    report = ckptconv.convert(fixtures / "training.pt", tmp_path / "x.pt", map_location="cuda:1")
    tags: dict[int, str] = {}

    def note(storage: Any, tag: str) -> Any:
        tags[storage.data_ptr()] = tag
        return storage

    loaded = torch.load(tmp_path / "x.pt", map_location=note, weights_only=False)
    for state in (loaded["rng_state"]["cpu"], loaded["rng_state"]["cuda"]):
        assert tags[state.data_ptr()] == "cpu"
    assert Counter(tags.values()) == {"cuda:1": 35, "cpu": 2}
    assert report.changes.rng_states == ["rng_state/cpu", "rng_state/cuda"]
    assert report.changes.devices["cuda:0", "cuda:1"][0] == 27
    assert report.changes.devices["cpu", "cuda:1"][0] == 8
    assert loaded["args"].device == "cuda:0"


KEPT = ["rng_state/cpu", "rng_state/cuda"]


@pytest.mark.parametrize(
    ("map_location", "kept", "tags"),
    [
        ({"cpu": "cuda:1"}, KEPT, {"cuda:0": 27, "cuda:1": 8, "cpu": 2}),
        (lambda tag: "cuda:1", KEPT, {"cuda:1": 35, "cpu": 2}),
        ({"any": "cuda:1"}, [], {"cuda:1": 37}),
    ],
    ids=["map", "function", "any"],
)
def test_maps_keep_generator_states(
    fixtures: Path, tmp_path: Path, map_location: Any, kept: list[str], tags: dict[str, int]
) -> None:
    """A mapping or a function keeps generator states on the CPU. A rule for ``any`` moves them."""
    report = ckptconv.convert(fixtures / "training.pt", tmp_path / "x.pt", map_location=map_location)
    assert report.changes.rng_states == kept
    assert Counter(tags_of(tmp_path / "x.pt")[1]) == tags


def test_a_strayed_generator_state_comes_back(tmp_path: Path) -> None:
    """A generator state that is on a GPU moves to the CPU, because torch can use it only there."""
    obj = {"rng": torch.get_rng_state(), "w": [W]}
    _, report = round_trip(tmp_path, obj, tags=["cuda:0"], map_location="cuda:1")
    assert tags_of(tmp_path / "dst.pt")[1] == ["cpu", "cuda:1"]
    assert report.changes.devices == {("cuda:0", "cpu"): (1, 5056), ("cuda:0", "cuda:1"): (1, 8)}


def test_the_users_own_strings_and_devices_stay(tmp_path: Path) -> None:
    """torch pickles one text ``'cpu'`` for location tags and for data of the user. Only the location tags change, and a
    ``torch.device`` does not.
    """
    name = "module.w"
    obj = {
        "model": {name: W},
        "config": {"device": "cpu", "devices": ["cpu", "cpu"], "cpu": name},
        "device": torch.device("cpu"),
        "names": [name, name],
    }
    data = saved(obj)
    assert data.count(b"X\x03\x00\x00\x00cpu") == 2  # one for the tag and the user's strings, one in torch.device
    assert data.count(b"X\x08\x00\x00\x00module.w") == 1
    (tmp_path / "src.pt").write_bytes(data)
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", map_location="cuda:1", strip_prefix="module")
    out, tags = tags_of(tmp_path / "dst.pt")
    assert tags == ["cuda:1"]
    assert list(out["model"]) == ["w"]
    for key in ("config", "device", "names"):
        assert_same(out[key], obj[key])


def test_a_map_that_matches_nothing_is_noted(fixtures: Path, tmp_path: Path) -> None:
    """A rule that matches no tensor is noted, unless a more specific rule applies to its tensors."""
    rules = {"cuda:5": "cpu", "xpu": "cpu", "cuda:0": "cuda:1", "cuda": "cpu", "any": "cpu"}
    report = ckptconv.convert(fixtures / "cuda0.pt", tmp_path / "x.pt", map_location=rules)
    assert [note for note in report.notes if "mapping" in note] == [
        "no tensor is on 'cuda:5', so mapping it changed nothing",
        "no tensor is on 'xpu', so mapping it changed nothing",
    ]
    assert set(tags_of(tmp_path / "x.pt")[1]) == {"cuda:1"}


def test_nothing_to_do_changes_nothing(fixtures: Path, tmp_path: Path) -> None:
    """If all tensors are on the requested device, the report contains no change, and the object is the same."""
    report = ckptconv.convert(fixtures / "cuda0.pt", tmp_path / "x.pt", map_location="gpu")
    assert (report.changes.devices, report.changes.names) == ({}, [])
    assert_same(tags_of(tmp_path / "x.pt"), tags_of(fixtures / "cuda0.pt"))
