"""Laws of the edits on generated checkpoints: which edits undo each other, which have no effect a second time, that the
order of flags does not matter, and that a flag equals its keyword.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

import ckptconv
from ckptconv.cli.convert import convert_command
from ckptconv.cli.main import main
from ckptconv.edits.names import unwrapped
from tests.support import zoo
from tests.support.command import Command
from tests.support.conversions import saved_at
from tests.support.injection import content_of
from tests.support.judge import assert_same, assert_same_files, tags_of
from tests.support.paths import ROOT
from tests.support.reduced import Reduced

#: Each example writes several files to a disk, so a thousand examples are enough for the long run.
FEW = settings(max_examples=min(settings().max_examples, 1000))

_ELEMENTS = 12  # of each storage
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
#: Views of a storage: the complete storage, so that two names are tied, a slice, steps, a transposed view, a row, a
#: view that overlaps itself, an empty view, and a copy.
_VIEWS = (
    lambda base: base,
    lambda base: base[2:7],
    lambda base: base[::3],
    lambda base: base.view(3, 4).T,
    lambda base: base.view(3, 4)[1],
    lambda base: base.as_strided((2, 3), (1, 2), 4),
    lambda base: base[:0],
    lambda base: base.clone(),
)
_SEGMENTS = ("module", "_orig_mod", "net", "a", "b", "100", "norm", "é")  # no name is the number of a storage
_NAMES = st.lists(st.sampled_from(_SEGMENTS), min_size=1, max_size=4).map(".".join)


@st.composite
def state_dicts(draw: st.DrawFn) -> Any:
    """Draw a state dict of tensors that share a few storages. About half of them have the ``_metadata`` of modules."""
    bases = [
        torch.arange(_ELEMENTS).sub(5).to(dtype)
        for dtype in draw(st.lists(st.sampled_from(_DTYPES), min_size=1, max_size=3))
    ]
    names = draw(st.lists(_NAMES, min_size=1, max_size=6, unique=True))
    found = OrderedDict((name, draw(st.sampled_from(_VIEWS))(draw(st.sampled_from(bases)))) for name in names)
    if draw(st.booleans()):
        modules = {".".join(name.split(".")[:n]) for name in names for n in range(name.count(".") + 1)}
        versions = OrderedDict((module, {"version": 1}) for module in sorted(modules))
        found._metadata = versions  # type: ignore[attr-defined]
        return found
    return dict(found)


def _twin(state: Any) -> Any:
    twin = type(state)((name, value.clone()) for name, value in state.items())
    if hasattr(state, "_metadata"):
        twin._metadata = OrderedDict(
            (str(module.encode(), "utf-8"), dict(entry)) for module, entry in state._metadata.items()
        )
    return twin


def _optimizer(draw: st.DrawFn, names: list[str]) -> Any:
    """Return an optimizer of the parameters `names`, keyed by names or by numbers."""
    keys: list[Any] = names if draw(st.booleans()) else list(range(len(names)))
    state = {key: {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), 0.5)} for key in keys}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(keys), "param_names": list(names)}]}


@st.composite
def checkpoints(draw: st.DrawFn) -> Any:
    """Draw a state dict alone, one under a usual name, or one in the checkpoint of a training run, with its average,
    its optimizer, lists, and sometimes a generator's state.
    """
    state = draw(state_dicts())
    shape = draw(st.sampled_from(["root", "nested", "training"]))
    if shape == "root":
        return state
    if shape == "nested":
        return {"epoch": 3, "state_dict": state}
    values = list(state.values())
    obj = {
        "model": state,
        "ema": _twin(state),
        "optimizer": _optimizer(draw, list(state)),
        "queue": [values[0], (values[-1], torch.ones(3).expand(2, 3))],
    }
    if draw(st.booleans()):
        obj |= {"rng": torch.zeros(5056, dtype=torch.uint8), "args": {"device": "cpu", "name": next(iter(state))}}
    return obj


def _state_of(obj: Any) -> Any:
    """Return the state dict of `obj` that a command without a selection edits."""
    return obj.get("model", obj.get("state_dict", obj))


def _convert(folder: Path, src: str, dst: str, **edits: Any) -> ckptconv.Report:
    return ckptconv.convert(folder / src, folder / dst, force=True, **edits)


def _assert_identity(folder: Path, *edits: dict[str, Any]) -> None:
    """Fail unless `edits`, one after another, preserve what torch reads, including the location tags.

    A second round must preserve every byte. The first round may change bytes, because names and tags that share a
    string with other values get a string of their own.
    """
    at = "in.pt"
    for trip in ("first.pt", "second.pt"):
        for each in edits:
            _convert(folder, at, trip, **each)
            at = trip
    assert_same_files(folder / "in.pt", folder / "first.pt")
    assert (folder / "first.pt").read_bytes() == (folder / "second.pt").read_bytes()


# Edits that undo each other

#: Mappings of devices that end where they began, one after another.
THERE_AND_BACK = (
    ({"cuda:0": "cuda:1", "cuda:1": "cuda:0"},) * 2,
    ({"cuda:0": "cuda:1", "cuda:1": "mps", "mps": "cuda:0"},) * 3,
    ({"cuda": "npu"}, {"npu": "cuda"}),
)
#: Patterns and replacements that undo each other.
RENAMES = (
    (("^", "x_"), ("^x_", "")),
    (("^", "net."), (r"^net\.", "")),
    (("norm", "ln"), ("ln", "norm")),
    ((r"(\.|$)", r"!\1"), (r"!(\.|$)", r"\1")),
)


@pytest.mark.slow
@FEW
@given(checkpoints(), _NAMES)
def test_strip_undoes_add(folder: Path, obj: Any, prefix: str) -> None:
    """``strip_prefix`` undoes ``add_prefix`` in the state dict, its average, its ``_metadata`` and an optimizer that is
    keyed by names.
    """
    torch.save(obj, folder / "in.pt")
    _convert(folder, "in.pt", "there.pt", add_prefix=prefix)
    there = tags_of(folder / "there.pt")[0]
    names = [f"{prefix}.{name}" for name in _state_of(obj)]
    assert list(_state_of(there)) == list(there.get("ema", _state_of(there))) == names
    if "optimizer" in there:
        assert there["optimizer"]["param_groups"][0]["param_names"] == names
    _assert_identity(folder, {"add_prefix": prefix}, {"strip_prefix": prefix})


@FEW
@given(checkpoints())
def test_to_a_gpu_and_back(folder: Path, obj: Any) -> None:
    """Tensors on the CPU are on the CPU again after a conversion to a GPU and back. The generator's state stays on the
    CPU.
    """
    zoo.save(obj, folder / "in.pt", ["cpu"])
    _convert(folder, "in.pt", "there.pt", map_location="cuda:1")
    assert set(tags_of(folder / "there.pt")[1]) == ({"cuda:1", "cpu"} if "rng" in obj else {"cuda:1"})
    _assert_identity(folder, {"map_location": "cuda:1"}, {"map_location": "cpu"})


@FEW
@given(
    checkpoints(),
    st.permutations(["cuda:0", "cuda:1", "mps", "xpu:1"]),
    st.integers(1, 4),
    st.sampled_from(THERE_AND_BACK),
)
def test_tags_go_and_come_back(folder: Path, obj: Any, tags: list[str], number: int, maps: Any) -> None:
    """Location tags are restored by two swaps of two devices, three rotations of three devices, and a mapping of a
    device family and back.
    """
    obj.pop("rng", None)  # mappings move it to the CPU
    zoo.save(obj, folder / "in.pt", tags[:number])
    _assert_identity(folder, *({"map_location": rules} for rules in maps))


@FEW
@given(checkpoints(), st.sampled_from(RENAMES))
def test_names_go_and_come_back(folder: Path, obj: Any, renames: Any) -> None:
    """A rename and its reverse restore all names, in two conversions and in one. The rules change a word, the start of
    a name, a prefix or the end of a segment.
    """
    there, back = renames
    torch.save(obj, folder / "in.pt")
    if not any(re.search(there[0], name) for name in _state_of(obj)):
        with pytest.raises(ckptconv.NoMatchError):
            _convert(folder, "in.pt", "there.pt", rename=[there])
        return
    _assert_identity(folder, {"rename": [there]}, {"rename": [back]})
    _assert_identity(folder, {"rename": [there, back]})


# Edits that have no effect a second time


@FEW
@given(checkpoints())
def test_unwrapped_twice_is_once(folder: Path, obj: Any) -> None:
    """A second ``unwrap`` changes nothing. The exception is a ``module.`` in front of all remaining names, which can be
    the model's own.
    """
    torch.save(obj, folder / "in.pt")
    try:
        _convert(folder, "in.pt", "once.pt", unwrap=True)
    except ckptconv.CollisionError:
        names = unwrapped(_state_of(obj))
        assert len(set(names.values())) < len(names)
        return
    state = _state_of(tags_of(folder / "once.pt")[0])
    if not all(name.startswith("module.") for name in state):
        report = _convert(folder, "once.pt", "twice.pt", unwrap=True)
        assert report.changes.names == []
        assert (folder / "once.pt").read_bytes() == (folder / "twice.pt").read_bytes()


# Dtypes and compacting

#: A common target dtype, and a larger dtype that contains all of its values.
SMALL_AND_LARGE = (
    ("bf16", torch.bfloat16, "fp32", torch.float32),
    ("fp16", torch.float16, "fp32", torch.float32),
    ("bf16", torch.bfloat16, "fp64", torch.float64),
    ("fp16", torch.float16, "fp64", torch.float64),
)
#: Edits of names and devices.
OTHERS: tuple[dict[str, Any], ...] = (
    {"rename": [("^", "x.")]},
    {"map_location": "cuda:1"},
    {"map_location": {"cuda": "xpu"}, "add_prefix": "x"},
)


def _leaves(obj: Any) -> list[torch.Tensor]:
    """Return the tensors in `obj`, in order."""
    return [leaf for leaf in tree_flatten(obj)[0] if isinstance(leaf, torch.Tensor)]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else _bits(tensor.reshape(1))


@pytest.mark.parametrize(("small", "dtype", "large", "wide"), SMALL_AND_LARGE)
def test_down_undoes_up(folder: Path, small: str, dtype: torch.dtype, large: str, wide: torch.dtype) -> None:
    """Every number of the smaller dtype survives a cast to the larger dtype and back. Every NaN becomes the NaN of
    torch's ``.to()``, and for bfloat16 that of torch's scalar code, because its vector code differs.
    """
    every = torch.arange(65536).to(torch.uint16).view(dtype)
    torch.save({"w": every}, folder / "in.pt")
    _convert(folder, "in.pt", "up.pt", dtype=large)
    up = torch.load(folder / "up.pt")["w"]
    assert _bits(up) == _bits(every.to(wide))
    _convert(folder, "up.pt", "down.pt", dtype=small)
    down = torch.load(folder / "down.pt")["w"]
    wanted = every.to(wide).to(dtype)
    if dtype == torch.bfloat16:
        wanted.view(torch.int16)[wanted.isnan()] = 0x7FC0
    assert _bits(down) == _bits(wanted)
    assert _bits(down[~every.isnan()]) == _bits(every[~every.isnan()])


@FEW
@given(checkpoints(), st.sampled_from(SMALL_AND_LARGE))
def test_casts_are_torchs(folder: Path, obj: Any, dtypes: Any) -> None:
    """A cast gives each floating-point tensor of the state dicts the result of torch's ``.to()``, and preserves other
    tensors and the optimizer. A second cast, or one by way of a larger dtype, changes nothing.
    """
    small, dtype, large, _ = dtypes
    torch.save(obj, folder / "in.pt")
    _convert(folder, "in.pt", "once.pt", dtype=small)
    found = torch.load(folder / "once.pt")
    for which in ("model", "ema"):
        states = (obj[which], found[which]) if which in obj else (_state_of(obj), _state_of(found))
        for before, after in zip(*(state.values() for state in states), strict=True):
            wanted = before.to(dtype) if before.is_floating_point() else before
            assert (after.dtype, after.shape, after.stride()) == (wanted.dtype, before.shape, before.stride())
            assert _bits(after) == _bits(wanted)
    if "optimizer" in obj:
        assert_same(found["optimizer"], obj["optimizer"])
    _convert(folder, "once.pt", "twice.pt", dtype=small)
    assert (folder / "once.pt").read_bytes() == (folder / "twice.pt").read_bytes()
    _convert(folder, "once.pt", "up.pt", dtype=large)
    _convert(folder, "up.pt", "down.pt", dtype=small)
    assert_same(torch.load(folder / "down.pt"), found)


def _extent(tensor: torch.Tensor) -> range:
    """Return the range of bytes in its storage from the first to the last byte that `tensor` uses."""
    if not tensor.numel():
        return range(0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return range(first * tensor.itemsize, (first + last + 1) * tensor.itemsize)


@FEW
@given(checkpoints())
def test_compact_keeps_tensors(folder: Path, obj: Any) -> None:
    """``compact`` preserves values, shapes, strides and shared storages. Afterwards each storage contains only bytes
    that a tensor spans, and a second ``compact`` changes nothing.
    """
    torch.save(obj, folder / "in.pt")
    _convert(folder, "in.pt", "once.pt", compact=True)
    before, after = _leaves(obj), _leaves(torch.load(folder / "once.pt"))
    used: dict[int, set[int]] = {}
    for a, b in zip(before, after, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert _bits(a) == _bits(b)
        used.setdefault(b.untyped_storage()._cdata, set()).update(_extent(b))
    for (a, b), (c, d) in itertools.combinations(zip(before, after, strict=True), 2):
        if not a.numel() or not c.numel():  # torch.load gives each empty tensor its own storage
            continue
        together = a.untyped_storage()._cdata == c.untyped_storage()._cdata
        assert together == (b.untyped_storage()._cdata == d.untyped_storage()._cdata)
        first, second = _extent(a), _extent(c)
        if together and set(first) & set(second):
            assert second.start - first.start == _extent(d).start - _extent(b).start
    for b in after:
        assert len(used[b.untyped_storage()._cdata]) == b.untyped_storage().nbytes()
    _convert(folder, "once.pt", "twice.pt", compact=True)
    assert (folder / "once.pt").read_bytes() == (folder / "twice.pt").read_bytes()


@FEW
@given(checkpoints(), st.sampled_from(["bf16", "fp64"]), st.sampled_from(OTHERS))
def test_values_names_and_devices_are_apart(folder: Path, obj: Any, dtype: str, others: dict[str, Any]) -> None:
    """Casting and compacting before, after or together with edits of names and devices give the same result for torch,
    including location tags.
    """
    zoo.save(obj, folder / "in.pt", ["cuda:0", "cpu"])
    values = {"dtype": dtype, "compact": True}
    _convert(folder, "in.pt", "at once.pt", **values, **others)
    _convert(folder, "in.pt", "values.pt", **values)
    _convert(folder, "values.pt", "values first.pt", **others)
    _convert(folder, "in.pt", "others.pt", **others)
    _convert(folder, "others.pt", "others first.pt", **values)
    for way in ("values first.pt", "others first.pt"):
        assert_same_files(folder / way, folder / "at once.pt")


# A flag equals its keyword

#: Rules for a tensor ``x.qkv.weight`` of six rows.
_SPLIT, _SIZED = "**.qkv.* = **.q.*:1, **.k.*:1, **.v.*:1", "x.qkv.weight = q.weight[$Q], k.weight[4]"
_JOINED = "q.weight:1, k.weight:1 = x.qkv.weight"

#: Each option of ``convert``: flags, the equivalent keywords, and the name of the output.
ALONE: dict[str, list[tuple[list[str], dict[str, Any], str]]] = {
    "to": [
        (["--to", "cuda:1"], {"map_location": "cuda:1"}, "x.pt"),
        (["--to", "gpu"], {"map_location": "gpu"}, "x.pt"),
    ],
    "maps": [
        (["--map", "cuda:0=cuda:1", "--map", "any=cpu"], {"map_location": {"cuda:0": "cuda:1", "any": "cpu"}}, "x.pt"),
        (["--map", "cuda=xpu"], {"map_location": {"cuda": "xpu"}}, "x.pt"),
    ],
    "map_location": [
        (["--map-location", "mps"], {"map_location": torch.device("mps")}, "x.pt"),
        (["--map-location", "cuda:0=mps"], {"map_location": {"cuda:0": "mps"}}, "x.pt"),
    ],
    "state_dict": [(["--state-dict"], {"state_dict": True}, "x.pt")],
    "select": [(["--select", "ema"], {"select": "ema"}, "x.pt")],
    "drop": [(["--drop", "ema", "--drop", "optimizer/*"], {"drop": ["ema", "optimizer/*"]}, "x.pt")],
    "include": [(["--include", "*.a.*"], {"include": "*.a.*"}, "x.pt")],
    "exclude": [(["--exclude", "*bias", "--exclude", "*/exp_avg"], {"exclude": ["*bias", "*/exp_avg"]}, "x.pt")],
    "unwrap": [(["--unwrap"], {"unwrap": True}, "x.pt")],
    "strip_prefix": [(["--strip-prefix", "module"], {"strip_prefix": "module."}, "x.pt")],
    "rename": [(["--rename", "a", "b", "--rename", "b", "c"], {"rename": [("a", "b"), ("b", "c")]}, "x.pt")],
    "add_prefix": [(["--add-prefix", "x", "--add-prefix", "y"], {"add_prefix": ["x", "y"]}, "x.pt")],
    "regroup": [(["--regroup", _SPLIT], {"regroup": [_SPLIT]}, "x.pt")],
    "rules": [(["--rules", "thirds.rules"], {"rules": "thirds.rules"}, "x.pt")],
    "sizes": [(["--regroup", _SIZED, "--size", "Q=2"], {"regroup": [_SIZED], "sizes": {"Q": 2}}, "x.pt")],
    "reverse": [(["--regroup", _JOINED, "--reverse"], {"regroup": [_JOINED], "reverse": True}, "x.pt")],
    "ranks": [(["--format", "dcp", "--ranks", "2"], {"format": "dcp", "ranks": 2}, "x")],
    "optimizer": [(["--optimizer", "numbers"], {"optimizer": "numbers"}, "x.pt")],
    "optimizer_order": [(["--optimizer-order", "model"], {"optimizer_order": "model"}, "x.pt")],
    "like": [(["--like", "like.pt"], {"like": "like.pt"}, "x.pt")],
    "model": [(["--model", str(ROOT / "fixtures/cuda0.pt")], {"model": ROOT / "fixtures/cuda0.pt"}, "x.pt")],
    "dtype": [
        (["--dtype", "bf16"], {"dtype": torch.bfloat16}, "x.pt"),
        (["--dtype", "bf16", "--dtype", "*.norm.*=fp32"], {"dtype": ["bf16", "*.norm.*=fp32"]}, "x.pt"),
        (["--dtype", "optimizer/*=fp16"], {"dtype": {"optimizer/*": "fp16"}}, "x.pt"),
    ],
    "compact": [(["--compact"], {"compact": True}, "x.pt")],
    "loadable": [(["--loadable"], {"loadable": True}, "x.pt")],
    "loadable_objects": [(["--loadable-objects"], {"loadable_objects": True}, "x.pt")],
    "format": [
        (["--format", format], {"format": format}, name)
        for format, name in (("pt", "x"), ("legacy", "x.pt"), ("pickle", "x.pkl"), ("safetensors", "x"))
    ],
    "copy_tied": [(["--copy-tied"], {"copy_tied": True}, "x.safetensors")],
    "max_shard_size": [(["--max-shard-size", "1KB"], {"max_shard_size": "1KB"}, "x")],
    "copy_others": [(["--copy-others"], {"copy_others": True}, "x")],
    "force": [(["--force"], {"force": True}, "old.pt")],
    "skip_existing": [(["--skip-existing"], {}, "x.pt")],
    "jobs": [(["--jobs", "2"], {"jobs": 2}, "x.pt")],
    "verify": [(["--verify"], {"verify": True}, "x.pt")],
    "allow_unsafe": [(["--allow-unsafe"], {"allow_unsafe": True}, "x.pt")],
    "download": [(["--download"], {"download": True}, "x.pt")],
    "dry_run": [(["--dry-run"], {"dry_run": True}, "x.pt")],
    "as_json": [(["--json"], {}, "x.pt")],
    "quiet": [(["-q"], {}, "x.pt")],
    "verbose": [(["-v"], {}, "x.pt")],
    "debug": [(["--debug"], {}, "x.pt")],
}
#: Options without a separate output. tests/unit/conversion/test_in_place.py tests them.
_IN_PLACE = {"in_place", "no_undo"}
#: Options that do not change the output.
_NO_EDITS = (
    "optimizer_order",
    "model",
    "force",
    "skip_existing",
    "jobs",
    "verify",
    "download",
    "dry_run",
    "as_json",
    "quiet",
    "verbose",
    "debug",
)
#: Fields of a report that differ in each run.
_OF_A_RUN = ("dst", "seconds", "written", "verified")


@pytest.fixture(scope="module")
def training(folder: Path) -> Path:
    """Write a training checkpoint and return its path. It has a wrapped model on several devices, tied weights, several
    dtypes, an average, an optimizer, and a view that leaves most of its storage unused.
    """
    weight = torch.linspace(-3, 3, 40).view(8, 5)
    state = {
        "module.net._orig_mod.a.weight": weight,
        "module.net._orig_mod.a.bias": weight[0],
        "module.net.b.weight": weight,
        "module.norm.weight": torch.ones(3, dtype=torch.float16),
        "module.steps": torch.tensor(7),
        "module.b.rows": torch.zeros(100, 3)[5:9],
    }
    optimizer = {
        "state": {name: {"exp_avg": torch.full(tensor.shape, 0.1)} for name, tensor in state.items()},
        "param_groups": [{"params": list(state)}],
    }
    obj = {"model": state, "ema": _twin(state), "optimizer": optimizer, "rng": torch.get_rng_state(), "epoch": 3}
    zoo.save(obj, folder / "training.pt", ["cuda:0", "cpu", "cuda:1"])
    return folder / "training.pt"


def test_every_option_has_a_law() -> None:
    """Every option of the command and every keyword of the function is in ``ALONE`` or ``_IN_PLACE``."""
    assert ALONE.keys() | _IN_PLACE == {
        param.name for param in convert_command.params if isinstance(param, click.Option)
    }
    keywords = {keyword for each in ALONE.values() for _, named, _ in each for keyword in named}
    assert keywords | _IN_PLACE == inspect.signature(ckptconv.convert).parameters.keys() - {"src", "dst"}


@pytest.mark.parametrize(
    ("option", "flags", "keywords", "name"),
    [(option, *case) for option, cases in ALONE.items() for case in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_is_its_keyword(
    training: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    flags: list[str],
    keywords: dict[str, Any],
    name: str,
) -> None:
    """A flag alone gives the same bytes and the same report as its keyword. If the option is an edit, the bytes differ
    from those of a conversion without it.
    """
    src = training
    if option == "allow_unsafe":
        src = saved_at(tmp_path / "dangerous.pt", {"w": torch.ones(1), "x": Reduced(os.getpid, ())})
    if option.startswith("loadable"):
        src = saved_at(tmp_path / "training.pt", {"w": torch.ones(1), "args": argparse.Namespace(lr=1)})
    if option == "copy_others":
        src = tmp_path / "set"
        ckptconv.convert(training, src, max_shard_size="1KB")
        (src / "config.json").write_text("{}")
    if option in ("regroup", "rules", "sizes", "reverse"):
        monkeypatch.chdir(tmp_path)
        Path("thirds.rules").write_text(_SPLIT)
        src = saved_at(tmp_path / "fused.pt", {"x.qkv.weight": torch.arange(12.0).view(6, 2)})
    if option == "like":
        monkeypatch.chdir(tmp_path)
        obj = torch.load(training, map_location="cpu")
        saved_at(tmp_path / "like.pt", {"model": dict(reversed(obj["model"].items())), "optimizer": obj["optimizer"]})
    by_flag, by_keyword, plain = (tmp_path / folder / name for folder in ("flag", "keyword", "plain"))
    for path in (by_flag, by_keyword, plain):
        path.parent.mkdir()
        if option == "force":
            path.write_bytes(b"old")
    report = ckptconv.convert(src, by_keyword, **keywords)
    command("convert", src, by_flag, *flags)
    assert by_flag.exists() == by_keyword.exists() == (option != "dry_run")
    if option != "dry_run":
        assert content_of(by_flag) == content_of(by_keyword)
    if option == "skip_existing":  # the output exists by now
        return
    again = [] if option == "force" else ["--force"]
    said = command.json("convert", src, by_flag, *flags, *again, "--dry-run")
    done = json.loads(json.dumps(report.as_dict()))
    said["notes"], done["notes"] = len(said["notes"]), len(done["notes"])  # notes mention flags or keywords
    assert {**said, **dict.fromkeys(_OF_A_RUN)} == {**done, **dict.fromkeys(_OF_A_RUN)}
    if option not in ("allow_unsafe", "dry_run"):  # without the flag, one is refused and the other writes an output
        ckptconv.convert(src, plain, force=True)
        assert (content_of(plain) == content_of(by_keyword)) == (option in _NO_EDITS or keywords == {"format": "pt"})


#: One or two flags of each kind, all of which match the training checkpoint. Some exclude each other.
FLAGS = (
    ["--to", "mps"], ["--map", "cuda:0=cuda:1"], ["--map", "cpu=xpu"], ["--map-location", "cuda:1=cpu"],
    ["--state-dict"], ["--select", "model"], ["--select", "ema"], ["--include", "*.a.*"], ["--include", "*weight"],
    ["--drop", "optimizer"], ["--exclude", "*bias"], ["--exclude", "*norm*"], ["--unwrap"],
    ["--strip-prefix", "module"],
    ["--rename", "a", "b"], ["--rename", "$", "_"], ["--add-prefix", "x"], ["--dtype", "bf16"],
    ["--dtype", "*weight=fp64"], ["--compact"], ["--verify"], ["--allow-unsafe"], ["-q"], ["-v"],
)  # a table  # fmt: skip
#: Flags that can be repeated in any order: globs, and rules that apply at the same time.
_AGAIN = ("--map", "--include", "--exclude", "--dtype")
_TARGETS = (("x.pt", []), ("x.pt", ["--format", "legacy"]), ("x.safetensors", []), ("x.safetensors", ["--copy-tied"]))


@FEW
@given(
    st.lists(st.sampled_from(FLAGS), max_size=7, unique_by=lambda flag: tuple(flag if flag[0] in _AGAIN else flag[:1])),
    st.sampled_from(_TARGETS),
    st.data(),
)
def test_flags_in_another_order(
    training: Path, capsys: pytest.CaptureFixture[str], flags: list[list[str]], target: Any, data: st.DataObject
) -> None:
    """The order of flags does not change the output or the error, even if flags are between or after the paths."""
    dst = training.with_name(target[0])
    words = [*flags, target[1], ["path"], ["path"]]
    outcomes = []
    for order in (words, data.draw(st.permutations(words))):
        paths = iter([str(training), str(dst)])
        typed = [next(paths) if word == "path" else word for word in itertools.chain.from_iterable(order)]
        dst.unlink(missing_ok=True)
        status = main(["convert", *typed])
        said = capsys.readouterr().err
        outcomes.append((status, dst.read_bytes() if status == 0 else said))
    assert outcomes[0] == outcomes[1]
