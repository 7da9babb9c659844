"""Tests of ``--dtype``. The output equals the result of a plain torch program, for all containers, views and ties.
Tensors that are not cast are named with the reason.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.edits.dtype_rules import FLOATS, INTEGERS, to_dtypes
from ckptconv.edits.views import Views
from ckptconv.formats import opening
from ckptconv.pickles.graph import Call, Global, List, children, walk
from ckptconv.render.report import report_lines
from ckptconv.render.text import Style
from tests.support import zoo
from tests.support.archives import big_endian, flip_bit, records_of, rezip, without_crc32
from tests.support.conversions import refused, saved_at
from tests.support.hostile_bytes import found_in, local_header, text
from tests.support.judge import assert_same, refusal, tags_of
from tests.support.legacy_files import legacy
from tests.support.reduced import Reduced
from tests.support.round_trips import round_trip
from tests.support.sampled import sampled

COMPLEX = {"complex32", "bcomplex32", "complex64", "complex128"}
#: The dtypes that a glob matches. Strided floats of these dtypes are cast, and other tensors are named in the report.
MEANT = FLOATS | COMPLEX | {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


# The plain program


@dataclass(eq=False)
class Found:
    """A tensor with its path, and with its `name` if it is in a state dict."""

    path: str
    name: str | None
    tensor: torch.Tensor
    in_optimizer: bool


def name_of(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties that are equal if two tensor objects are one tensor."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tensors_in(obj: Any) -> Iterator[Found]:
    """Yield every place of a tensor in `obj`. The contents of a shared container are yielded only for its first
    place.
    """
    seen: set[int] = set()

    def walk(value: Any, path: str, name: str | None, in_optimizer: bool) -> Iterator[Found]:
        if isinstance(value, torch.Tensor):
            yield Found(path.removeprefix("/"), name, value, in_optimizer)
            if id(value) not in seen:
                seen.add(id(value))
                for key, inner in getattr(value, "__dict__", {}).items():
                    yield from walk(inner, f"{path}/.{key}", None, in_optimizer)
        elif isinstance(value, dict) and id(value) not in seen:
            seen.add(id(value))
            optimizer = {"state", "param_groups"} <= value.keys()
            state = not (optimizer or in_optimizer) and is_state_dict(value)
            for key, inner in value.items():
                segment = f"/{key}" if isinstance(key, str) else f"[{key!r}]"
                yield from walk(inner, path + segment, key if state else None, in_optimizer or optimizer)
        elif isinstance(value, (list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            for i, inner in enumerate(value):
                yield from walk(inner, f"{path}[{i}]", None, in_optimizer)

    return walk(obj, "", None, False)


def is_state_dict(value: dict[Any, Any]) -> bool:
    if hasattr(value, "_metadata"):
        return True
    has_tensors = any(isinstance(each, torch.Tensor) for each in value.values())
    return has_tensors and all(isinstance(key, str) and isinstance(each, torch.Tensor) for key, each in value.items())


class Contradiction(Exception):
    """The rules cannot be applied."""


def includes(glob: str, other: str) -> bool:
    """Return whether `glob` matches everything that `other` matches, and more."""
    return fnmatch.fnmatchcase(other, glob) and not fnmatch.fnmatchcase(glob, other)


def choose(found: list[Found], rules: Sequence[str]) -> dict[tuple[Any, ...], tuple[str, bool]]:
    """Return the dtype that `rules` choose for each tensor, and whether the rule has a glob or a path. Raise
    Contradiction if the rules cannot be applied.
    """
    has_weights = any(each.name is not None for each in found)
    offers: dict[tuple[Any, ...], list[tuple[int, str, str]]] = {}
    said: dict[str, str] = {}
    for rule in rules:
        glob, _, word = rule.rpartition("=")
        dtype = to_dtypes(word if word not in INTEGERS else f"x={word}")[0].dtype
        if said.setdefault(glob, dtype) != dtype:
            raise Contradiction(rule)
        useful = not glob
        for each in found:
            old = name_of(each.tensor.dtype)
            known = [each.path, "./" + each.path] if "/" in glob else [each.name] if each.name is not None else []
            if not glob:
                means = int(each.name is not None or not (has_weights or each.in_optimizer))
            elif glob in known:
                means = 3
            else:
                means = 2 * any(fnmatch.fnmatchcase(word, glob) for word in known) * (dtype not in INTEGERS)
            if means == 3 and dtype in INTEGERS and old in FLOATS | COMPLEX:
                raise Contradiction(rule)
            if means == 3 or (means and old in FLOATS | COMPLEX):
                useful = True
                if means == 3 or not (each.in_optimizer and each.path.endswith("/step")):
                    offers.setdefault(identity(each.tensor), []).append((means, glob, dtype))
        if not useful:
            raise Contradiction(f"{rule} matches nothing")
    chosen = {}
    for tie, offered in offers.items():
        rank = max(means for means, _, _ in offered)
        best = {(glob, dtype) for means, glob, dtype in offered if means == rank}
        dtypes = {dtype for glob, dtype in best if not any(includes(glob, other) for other, _ in best)}
        if len(dtypes) > 1:
            raise Contradiction(tie)
        chosen[tie] = dtypes.pop(), rank > 1
    return chosen


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of torch's ``.to()``. NaNs in bfloat16 are those of torch's scalar code, and NaNs from float16
    to float32 are those of its vector code.
    """
    out = torch.cat([numbers.reshape(-1), torch.zeros(64).to(numbers.dtype)]).to(dtype)
    out = out[: numbers.numel()].clone().reshape(numbers.shape)
    if dtype == torch.bfloat16 and numbers.dtype != dtype:
        out.view(torch.int16)[out.isnan()] = 0x7FC0
    return out


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of the elements of `tensor`."""
    found: list[int] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def whole(storage: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and stop of the elements that `tensor` reaches."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset(), tensor.storage_offset() + last + 1


def merged(views: list[torch.Tensor]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(extent(view) for view in views if view.numel()):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
        else:
            ranges.append((start, stop))
    return ranges


class Program:
    """A copy of `obj` whose storages are cast, once for each dtype. With `pack`, a storage that is split contains only
    the ranges of its views. With `compact`, every storage does.
    """

    def __init__(
        self,
        obj: Any,
        chosen: dict[tuple[Any, ...], tuple[str, bool]],
        others: Sequence[Any] = (),
        *,
        pack: bool = True,
        compact: bool = False,
    ) -> None:
        self.pack = pack
        self.compact = compact
        self.memo: dict[int, Any] = {}
        self.kept = obj
        self.separated = 0
        self.saved = 0  # bytes that no view uses
        views: dict[int, list[torch.Tensor]] = {}
        for each in {id(each.tensor): each.tensor for each in tensors_in(obj)}.values():
            views.setdefault(each.untyped_storage()._cdata, []).append(each)
        used = {other._cdata for other in others}
        for storage, group in views.items():
            self.cast(group, chosen if storage not in used and len({t.dtype for t in group}) == 1 else {})
        self.result = self.copied(obj)
        for each in tensors_in(obj):
            self.memo[id(each.tensor)].__dict__.update(self.copied(each.tensor.__dict__))

    def cast(self, views: list[torch.Tensor], chosen: dict[tuple[Any, ...], tuple[str, bool]]) -> None:
        old = views[0].dtype
        stay = {
            identity(view)
            for view in views
            if (view.requires_grad and not isinstance(view, nn.Parameter)) or view.is_neg()
        }
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for view in views:
            word, by_glob = chosen.get(identity(view), (name_of(old), True))
            new = getattr(torch, word)
            if old.is_complex or (str(old).startswith("torch.float8") and not by_glob):
                new = old
            if str(new).startswith("torch.float8") and identity(view) in stay:
                new = old  # torch does not load such a float8
            groups.setdefault(new, []).append(view)
        self.separated += len(groups) > 1
        storage = views[0].untyped_storage()
        for new, group in groups.items():
            all_of_it = whole(storage, old)
            is_packed = self.compact or (len(groups) > 1 and self.pack)
            ranges = merged(group) if is_packed else [(0, all_of_it.numel())]
            data = torch.cat([all_of_it[:0], *(all_of_it[a:b] for a, b in ranges)]) if is_packed else all_of_it
            self.saved += (all_of_it.numel() - data.numel()) * data.itemsize
            if new != old or len(groups) > 1:
                data = rounded(data, new)
            for view in group:
                self.memo[id(view)] = self.view(view, data, ranges)

    def view(self, old: torch.Tensor, data: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """Return a view of `data` that shows the same elements as `old`. `data` contains only `ranges` of the old
        storage.
        """
        offset = min(old.storage_offset(), data.numel())
        if old.numel():
            offset = old.storage_offset()
            offset -= sum(
                a - b
                for (a, _), b in zip(ranges, [0, *(b for _, b in ranges)], strict=False)
                if a <= old.storage_offset()
            )
        new = torch.empty(0, dtype=data.dtype).set_(data.untyped_storage(), offset, old.shape, old.stride())
        new = new.conj() if old.is_conj() else new
        new = torch._neg_view(new) if old.is_neg() else new
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
        elif type(old) is not torch.Tensor:
            new = new.as_subclass(type(old))
        else:
            new.requires_grad_(old.requires_grad)
        return new

    def copied(self, value: Any) -> Any:
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, dict):
            made = self.memo[id(value)] = type(value)((key, self.copied(inner)) for key, inner in value.items())
            if isinstance(value, OrderedDict):
                made.__dict__.update(value.__dict__)
            return made
        if isinstance(value, (list, tuple)):
            made = self.memo[id(value)] = type(value)(self.copied(inner) for inner in value)
            return made
        return value


# Generated checkpoints

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OTHERS = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
#: Views of twelve elements: all of them, parts, steps, transposed, repeated, empty, a scalar, and overlapping.
_VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda base: base,
    lambda base: base[2:7],
    lambda base: base[5:9],
    lambda base: base[8:],
    lambda base: base[::3],
    lambda base: base.view(3, 4).t(),
    lambda base: base.view(3, 4)[1:].t(),
    lambda base: base.view(3, 4)[0],
    lambda base: base.as_strided((2, 3), (1, 2), 4),
    lambda base: base[3:4].expand(2, 3),
    lambda base: base[:0],
    lambda base: base[12:].view(0, 3),
    lambda base: base[7],
    lambda base: base.clone(),
    lambda base: torch._neg_view(base[1:4]) if base.dtype in (*_DTYPES, torch.complex64) else base[1:4],
    lambda base: base.conj()[2:] if base.is_complex() else base[2:],
    lambda base: nn.Parameter(base[:6]) if base.is_floating_point() and base.itemsize > 1 else base[:6],
)
_NAMES = ("a.w", "a.b", "b.w", "b.norm.w", "module.a.w", "c")
_WORDS = ("bf16", "fp16", "fp32", "fp64", "float8_e4m3fn", "F8_E5M2")


def numbers(chance: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Return twelve elements, some of which are too large for other dtypes."""
    if dtype in _DTYPES:
        some = [0.1, -0.0, 1e5, -3e38, 1 / 3, float("nan"), float("-inf"), 448.5, 1e-8, 65519.0, 7.0, -1.5]
        return torch.tensor(chance.sample(some, 12), dtype=torch.float64).to(dtype)
    if dtype == torch.complex64:
        return torch.tensor([complex(i, -i) for i in range(12)])
    return torch.arange(12).add(chance.randrange(40)).to(dtype)


def state_dict(chance: random.Random, bases: list[torch.Tensor]) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(1, len(_NAMES)))
    state = OrderedDict((name, chance.choice(_VIEWS)(chance.choice(bases))) for name in names)
    for name, tensor in state.items():
        if type(tensor) is torch.Tensor and chance.random() < 0.15:
            state[name] = tensor.detach().as_subclass(zoo.AttributedTensor)
            state[name].note, state[name].scale = "weights", chance.choice(bases)[1:3]
    if len(names) > 1 and chance.random() < 0.4:
        state[names[0]] = state[names[1]]
    if chance.random() < 0.5:
        state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        return state
    return dict(state)


def checkpoint(chance: random.Random, *, others: bool) -> Any:
    """Return a state dict, a state dict in another mapping, a training checkpoint, or a checkpoint without a state
    dict.
    """
    dtypes = chance.choices(_DTYPES, k=3) + (chance.choices(_OTHERS, k=1) if others else [torch.int64])
    bases = [numbers(chance, dtype) for dtype in dtypes]
    shape = chance.choice(["root", "nested", "training", "training", "none"])
    state = state_dict(chance, bases)
    if shape == "root":
        return state
    if shape == "nested":
        return {"epoch": 3, "state_dict": state}
    view = chance.choice(_VIEWS)(bases[0])
    if shape == "none":
        return {
            "queue": [view, (bases[1], view)],
            "epoch": 3,
            "optimizer": {"state": {0: {"m": bases[1][:4]}}, "param_groups": []},
        }
    keys: list[Any] = list(state) if chance.random() < 0.5 else list(range(len(state)))
    optimizer = {
        "state": {key: {"m": chance.choice(_VIEWS)(bases[0]), "step": torch.tensor(3.0)} for key in keys},
        "param_groups": [{"params": keys}],
    }
    ema = {name: value if chance.random() < 0.3 else value.clone() for name, value in state.items()}
    return {
        "model": state,
        "ema": ema,
        "optimizer": optimizer,
        "queue": [view],
        "rng": torch.zeros(5056, dtype=torch.uint8),
        "note": "x",
    }


def rules_for(chance: random.Random, found: list[Found]) -> list[str]:
    """Return rules for the tensors in `found`. Some of them match nothing or contradict each other."""
    words = chance.sample(_WORDS, 2)  # few, so that some rules agree
    rules = [chance.choice(words)] if chance.random() < 0.8 else []
    for each in chance.sample(found, min(len(found), chance.randint(0 if rules else 1, 3))):
        globs = [each.path if "/" in each.path else f"./{each.path}", "*/" + each.path.split("/")[-1]]
        globs += [each.name, each.name.split(".")[0] + "*", "*" + each.name[-2:]] if each.name else []
        is_int = name_of(each.tensor.dtype) in INTEGERS
        rules.append(
            f"{globs[0]}=int32"
            if is_int and chance.random() < 0.5
            else f"{chance.choice(globs)}={chance.choice(words)}"
        )
    return list(dict.fromkeys(rules))


# Containers


def turned_round(obj: Any, path: Path) -> None:
    torch.save(obj, path)
    storages: list[Any] = []  # in the order of their keys
    loaded = torch.load(path, map_location=lambda storage, tag: storages.append(storage) or storage, weights_only=False)
    widths = {
        e.tensor.untyped_storage()._cdata: e.tensor.itemsize // (1 + e.tensor.is_complex()) for e in tensors_in(loaded)
    }
    big_endian(path, path, {str(key): widths[storage._cdata] for key, storage in enumerate(storages)})


def unchecked(obj: Any, path: Path) -> None:
    with without_crc32():
        torch.save(obj, path)


def deflated(obj: Any, path: Path) -> None:
    torch.save(obj, path)
    rezip(path, path, method=zipfile.ZIP_DEFLATED)


def pickled(obj: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(obj, 2))


#: For each source: the function that writes it, its file name, and whether it supports all dtypes.
SOURCES: dict[str, tuple[Callable[[Any, Path], None] | None, str, bool]] = {
    "zip": (torch.save, "src.pt", True),
    "deflated": (deflated, "src.pt", True),
    "big-endian": (turned_round, "src.pt", True),
    "without checksums": (unchecked, "src.pt", True),
    "legacy": (legacy, "src.pt", False),
    "pickle": (pickled, "src.pkl", False),
    "safetensors": (save_file, "src.safetensors", True),
    "memory": (None, "", True),
}
TARGETS = {"pt": "dst.pt", "legacy": "dst.pt", "pickle": "dst.pkl", "safetensors": "dst.safetensors"}


def again(obj: Any, path: Path) -> Any:
    """Return `obj` after saving and loading. torch gives every loaded empty tensor its own storage."""
    torch.save(obj, path)
    return torch.load(path, weights_only=False)


def assert_named(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    """Assert that `found` contains the elements of `state`, each cast to its dtype in `new`."""
    ties: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        kept = ties.setdefault(identity(new[name]), name) if tensor.numel() else name
        wanted = rounded(tensor.detach().resolve_conj().resolve_neg().contiguous(), new[name].dtype)
        assert (found[kept].dtype, found[kept].shape) == (wanted.dtype, wanted.shape), name
        if tensor.is_neg():  # torch keeps the sign of a NaN in vector code, and loses it in scalar code
            same = [torch.view_as_real(t) if t.is_complex() else t.double() for t in (found[kept], wanted)]
            assert torch.equal(same[0].nan_to_num(7.5), same[1].nan_to_num(7.5)), name
        else:
            assert bits(found[kept]) == bits(wanted), name


def assert_checksums(path: Path, *, some: bool) -> None:
    """Assert that all records of a zip archive match their checksums. If `some` is false, there must be no
    checksums.
    """
    with zipfile.ZipFile(path) as archive:
        if some:
            assert archive.testzip() is None
        assert all(bool(entry.CRC) == (some and entry.file_size > 0) for entry in archive.infolist())


def flat(obj: Any) -> dict[str, torch.Tensor]:
    """Return the state dict in `obj` that is written as safetensors."""
    return obj.get("model", obj.get("state_dict", obj))


@pytest.mark.parametrize(("source", "target"), sampled(itertools.product(SOURCES, TARGETS)))
@settings(max_examples=min(settings().max_examples // 4, 300))
@given(seed=st.integers(0, 1 << 32))
def test_the_output_equals_that_of_a_simple_program(folder: Path, source: str, target: str, seed: int) -> None:
    """For every pair of containers and for random rules, the output equals the result of a program that casts each
    storage once. Rules that cannot be applied are refused.
    """
    chance = random.Random(seed)
    write, name, others = SOURCES[source]
    old_formats = target in ("legacy", "pickle")
    obj = checkpoint(chance, others=others and not old_formats)
    if source == "safetensors":
        obj = {
            each.name: each.tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
            for each in tensors_in(obj)
            if each.name and not each.path.startswith("ema")
        } or {"a.w": torch.ones(3)}
        write(obj, folder / name)  # type: ignore[misc]
        raw = (folder / name).read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        obj = {key: load_file(folder / name)[key] for key in header if key != "__metadata__"}
    elif source == "pickle":
        write(obj, folder / name)  # type: ignore[misc]
        obj = pickle.loads((folder / name).read_bytes())
    elif write:
        write(obj, folder / name)
    found = list(tensors_in(obj))
    if target == "safetensors":
        state = flat(obj)
        if "optimizer" in state and "queue" in state:
            return  # there is no state dict
        below = next((key + "/" for key in obj if obj[key] is state), "")
        found = [replace(each, path=below + each.path) for each in tensors_in(state)]
    rules = rules_for(chance, found)
    if old_formats:
        rules = [rule.replace("float8_e4m3fn", "bf16").replace("F8_E5M2", "fp16") for rule in rules]
    if not rules:
        return
    dst = folder / TARGETS[target]
    options: dict[str, Any] = {"dtype": rules, "format": target, "force": True, "verify": chance.random() < 0.3}

    def convert() -> ckptconv.Report:
        return ckptconv.convert(folder / name, dst, **options) if write else ckptconv.save(obj, dst, **options)

    try:
        chosen = choose(found, rules)
    except Contradiction:
        with pytest.raises((ckptconv.UsageError, ckptconv.NoMatchError)):
            convert()
        return
    if target == "safetensors":
        new = Program(state, chosen).result
        convert()
        assert_named(load_file(dst), state, new)
        return
    report = convert()
    program = Program(obj, chosen, pack=source != "deflated")  # deflated storages are not split
    assert len(report.changes.separated) == program.separated
    if target == "pickle":
        assert_same(pickle.loads(dst.read_bytes()), program.result)
    else:
        assert_same(torch.load(dst, weights_only=False), again(program.result, folder / "wanted.pt"))
    if target != "pickle" and source not in ("pickle", "memory", "safetensors"):
        assert refusal(dst) is None or refusal(folder / name)
    if target == "pt":
        assert_checksums(dst, some=source != "without checksums")


# Combinations with other edits


def dtypes_of(obj: Any) -> list[str]:
    return [name_of(each.tensor.dtype) for each in tensors_in(obj)]


# torch warns once in each process that nested, quantized, compressed sparse and complex32 tensors are experimental or
# deprecated.
@pytest.mark.untraced
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo(name: str, tmp_path: Path) -> None:
    """In every kind of checkpoint, strided floats become bfloat16 and nothing else changes. Tensors that match but are
    not cast are named, and torch loads the output as before.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    protocol = zoo.NEEDS_PROTOCOL.get(name, 2)
    zoo.save(zoo.ZOO[name](), src, ["cpu"], pickle_protocol=protocol)
    try:
        report = ckptconv.convert(src, dst, dtype={"./*": "bf16"}, verify=True)
    except ckptconv.NoMatchError:
        assert not any(info.dtype in MEANT for info in ckptconv.open(src).tensors.values())
        return
    uncast = set(itertools.chain.from_iterable(report.changes.not_cast.values()))
    torch.load(dst, weights_only=False)
    assert refusal(dst) is None or refusal(src)
    with ckptconv.open(src) as before, ckptconv.open(dst) as after:
        assert [*before.tensors] == [*after.tensors]
        for path, info in before.tensors.items():
            new, meant = after.tensors[path], info.dtype in MEANT
            assert (path in uncast) == (meant and new.dtype != "bfloat16" and info.dtype != "bfloat16"), path
            is_cast = meant and path not in uncast
            assert new.dtype == ("bfloat16" if is_cast else info.dtype), path
            assert (new.shape, new.stride, new.kind, new.tied_to) == (info.shape, info.stride, info.kind, info.tied_to)
            try:
                old = before.load(path)
            except ckptconv.UnsupportedError:
                continue
            if is_cast and info.kind != "meta":
                assert bits(after.load(path)) == bits(rounded(old.detach().resolve_neg(), torch.bfloat16)), path


def training() -> Any:
    weight = torch.linspace(-3, 3, 40).view(8, 5)
    state = {
        "module.a.weight": weight,
        "module.a.row": weight[0],
        "module.b": weight,
        "module.norm.w": torch.ones(3),
        "module.steps": torch.tensor(7),
    }
    optimizer = {"state": {0: {"exp_avg": torch.full((8, 5), 0.1)}}, "param_groups": [{"params": [0]}]}
    return {
        "model": state,
        "ema": {name: value + 1 for name, value in state.items()},
        "optimizer": optimizer,
        "rng": torch.get_rng_state(),
        "epoch": 3,
    }


@pytest.mark.parametrize(
    ("others", "dtype"),
    [
        ({"map_location": "cuda:1"}, ["bf16", "*.norm.*=fp32"]),
        ({"map_location": {"cuda:0": "mps", "any": "cpu"}}, "fp16"),
        ({"strip_prefix": "module"}, ["bf16", "norm.w=fp64"]),
        ({"add_prefix": "x", "strip_prefix": "module"}, {"x.a.*": "bf16"}),
        ({"rename": [("a", "c")]}, {"*.c.*": "fp16"}),
        ({"select": "ema"}, ["bf16", "ema/module.b=fp64"]),
        ({"state_dict": True}, "bf16"),
        ({"exclude": "*.b"}, ["bf16"]),
        ({"include": ["*.a.*", "optimizer/*"]}, ["bf16", "optimizer/*=fp16"]),
        ({"unwrap": True}, ["a.row=bf16"]),
        ({"format": "legacy"}, ["bf16", "*norm*=fp16"]),
        ({"verify": True, "format": "pickle", "map_location": "cpu"}, ["bf16", "*norm*=fp16"]),
    ],
)
def test_with_other_edits(others: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    """A cast with other edits gives the same output as the other edits followed by the cast."""
    zoo.save(training(), tmp_path / "src.pt", ["cuda:0", "cpu", "cuda:1"])
    suffix = "pkl" if others.get("format") == "pickle" else "pt"
    ckptconv.convert(tmp_path / "src.pt", tmp_path / f"at once.{suffix}", dtype=dtype, **others)
    ckptconv.convert(tmp_path / "src.pt", tmp_path / f"first.{suffix}", **others)
    rules = dtype
    if "select" in others:
        rules = [rule.replace("ema/", "./") for rule in dtype]
    ckptconv.convert(tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}", dtype=rules)
    if suffix == "pkl":
        assert_same(*(pickle.loads((tmp_path / f"{name}.pkl").read_bytes()) for name in ("at once", "second")))
        return
    wanted, tags = tags_of(tmp_path / "second.pt")
    found, found_tags = tags_of(tmp_path / "at once.pt")
    assert_same(found, wanted)
    assert found_tags == tags


def test_the_order_of_rules_changes_nothing(tmp_path: Path) -> None:
    """The order of rules does not matter. A rule for one tensor is preferred to a glob, also among globs that
    contradict each other.
    """
    torch.save(training()["model"], tmp_path / "src.pt")
    rules = ["bf16", "*.norm.*=fp64", "*.row=fp16", "module.*row=fp64", "module.a.row=fp32", "./module.steps=int32"]
    for i, turned in enumerate((rules, rules[::-1], sorted(rules))):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / f"{i}.pt", dtype=turned)
    assert len({(tmp_path / f"{i}.pt").read_bytes() for i in range(3)}) == 1
    assert dtypes_of(torch.load(tmp_path / "0.pt")) == ["bfloat16", "float32", "bfloat16", "float64", "int32"]


def trained(*, step: Any = 3.0) -> dict[str, Any]:
    """Return a checkpoint with a weight and an optimizer state."""
    state = {0: {"m": torch.ones(2), "step": torch.tensor(step)}}
    return {"model": {"w": torch.ones(1)}, "optimizer": {"state": state, "param_groups": []}}


WEIGHT = torch.ones(3)
LAYERS = {f"layers.{i}.{part}": torch.ones(1) for i in range(2) for part in ("norm", "w")}
#: The saved object, the rules, the kind of the error and its message.
CONTRADICTIONS: dict[str, tuple[Any, Any, type[ckptconv.CkptconvError], str]] = {
    **{
        case: ({"model": {"a": torch.ones(1), "steps": torch.tensor(1)}, "epoch": 3}, rule, kind, error)
        for case, rule, kind, error in (
            ("a typo", "nothing=bf16", ckptconv.NoMatchError, "no name in a state dict matches 'nothing'"),
            ("what is no tensor", "epoch/*=bf16", ckptconv.NoMatchError, r"no tensor matches 'epoch/\*'"),
            ("integers by a glob", "*steps=bf16", ckptconv.NoMatchError, "matches no floating-point tensor"),
            ("weights as integers", "model/a=int32", ckptconv.UsageError, "which is not cast to integers"),
            ("a path with brackets", "model/[a]=int32", ckptconv.NoMatchError, "no tensor matches"),
        )
    },
    **{
        f"{glob}, where a path is meant": (
            {**trained(), "extra": torch.ones(1)},
            f"{glob}=bf16",
            ckptconv.NoMatchError,
            re.escape(f"a path has a slash: dtype={hint}"),
        )
        for glob, hint in (
            ("extra", "'./extra=bfloat16'"),
            ("optimizer.*", "'optimizer/*=bfloat16'"),
            ("optimizer", "'optimizer/*=bfloat16'"),
        )
    },
    "two globs, neither of which includes the other": (
        {"a.w": WEIGHT, "b.w": WEIGHT, "c": torch.ones(1)},
        ["bf16", "*.w=bf16", "a.*=fp16"],
        ckptconv.UsageError,
        "two rules match a.w",
    ),
    "two names of one tensor": (
        {"a.w": WEIGHT, "b.w": WEIGHT, "c": torch.ones(1)},
        ["bf16", "a.w=bf16", "b.w=fp16"],
        ckptconv.UsageError,
        "two rules match a.w and b.w, which are one tensor",
    ),
    "two globs for what is in layers": (
        LAYERS,
        ["layers.*=fp16", "*.norm=fp64"],
        ckptconv.UsageError,
        r"two rules match layers.0.norm .*layers.0.\* in layers",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_rules_that_cannot_be_applied(case: str, tmp_path: Path) -> None:
    """A rule that matches nothing, or contradicts another rule, is refused, and nothing is written."""
    obj, rules, kind, error = CONTRADICTIONS[case]
    with pytest.raises(kind, match=error):
        round_trip(tmp_path, obj, dtype=rules)
    assert os.listdir(tmp_path) == ["src.pt"]


F8 = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
STORAGE = torch.arange(3.0)
BY_LAYER = ["*=bf16", "layers.*=fp16", "layers.0.*=fp64", "layers.0.w=fp32"]
TIED = {f"{i}.w": torch.ones(2) for i in range(50)}
AVERAGED = {"model": TIED, "ema": dict(TIED), "queue": [TIED["0.w"], torch.ones(3)]}


class Case(NamedTuple):
    """The saved object, the rules, the dtypes of the output in order, and the expected report."""

    obj: Any
    dtype: Any
    dtypes: list[str]
    not_cast: dict[str, list[str]] = {}  # noqa: RUF012 - nobody changes it
    notes: tuple[str, ...] = ()
    others: dict[str, Any] = {}  # noqa: RUF012


CASTS: dict[str, Case] = {
    "a path as it is printed: brackets are an index, integers too": Case(
        trained(step=3),
        ["optimizer/state[0]/m=bf16", "optimizer/state[0]/step=int32"],
        ["float32", "bfloat16", "int32"],
    ),
    "what stays is named, but for what has the dtype already": Case(
        {
            "w": torch.ones(2),
            "f8": F8,
            "z": torch.ones(1, dtype=torch.complex64),
            "s": torch.eye(2).to_sparse(),
            "done": torch.ones(1, dtype=torch.bfloat16),
            "leaf": torch.ones(2, requires_grad=True),
            "meta": torch.ones(1, device="meta"),
        },
        "bf16",
        ["bfloat16", "float8_e4m3fn", "complex64", "float32", "bfloat16", "bfloat16", "float32"],
        {
            "float8_e4m3fn has scales, so only a GLOB casts it": ["f8"],
            "complex": ["z"],
            "sparse": ["s"],
            "meta": ["meta"],
        },
    ),
    "a float8 that requires grad": Case(
        {
            "w": torch.ones(2),
            "leaf": torch.ones(2, requires_grad=True),
            "parameter": nn.Parameter(torch.ones(2)),
        },
        "float8_e5m2",
        ["float8_e5m2", "float32", "float8_e5m2"],
        {"torch cannot load a float8_e5m2 that requires grad and is not a Parameter": ["leaf"]},
    ),
    "a storage under two dtypes": Case(
        {"f8": F8, "bits": F8.view(torch.uint8)},
        "f8=fp16",
        ["float8_e4m3fn", "uint8"],
        {"the storage is shared under two dtypes": ["f8"]},
    ),
    "a storage that something else refers to": Case(
        {"model": {"w": STORAGE, "v": STORAGE[1:]}, "raw": STORAGE._typed_storage()},
        "bf16",
        ["float32", "float32"],
        {"another object refers to the storage": ["model/w", "model/v"]},
    ),
    "a storage that ends within an element": Case(
        {
            "w": torch.ones(2),
            "odd": torch.empty(0, dtype=torch.uint16).set_(torch.UntypedStorage(7).fill_(1), 0, (3,), (1,)),
        },
        "./odd=int32",
        ["float32", "uint16"],
        {"the storage ends within an element": ["odd"]},
    ),
    "ties outside of what a rule names go along, in one note": Case(
        AVERAGED,
        "model/*=bf16",
        ["bfloat16"] * 101 + ["float32"],
        notes=("also cast, because they are tied to cast tensors: ema/0.w, queue[0], ema/1.w and 48 more",),
    ),
    "floating-point tensors beside the weights": Case(
        AVERAGED,
        "bf16",
        ["bfloat16"] * 101 + ["float32"],
        {"not weights; './queue[1]=bfloat16' casts it": ["queue[1]"]},
        ("also cast, because they are tied to cast tensors: queue[0]",),
    ),
    **{
        f"a glob gives way to one that it includes, {i}": Case(
            LAYERS, rules, ["float64", "float32", "float16", "float16"]
        )
        for i, rules in enumerate((BY_LAYER, BY_LAYER[::-1], BY_LAYER[2:] + BY_LAYER[:2]))
    },
    "a glob that two others include": Case(
        {"a.w": torch.ones(1), **LAYERS},
        ["bf16", "layers.*=fp16", "*.norm=fp64", "layers.*.norm=fp32"],
        ["bfloat16", "float32", "float16", "float32", "float16"],
    ),
    "a glob leaves an optimizer's counter alone: bfloat16 has no 301": Case(
        trained(step=301.0),
        "optimizer/*=bf16",
        ["float32", "bfloat16", "float32"],
        {
            "an optimizer's steps, which fewer bits would round: only the full path casts them": [
                "optimizer/state[0]/step"
            ]
        },
    ),
    "the path of a counter does not": Case(
        trained(step=301.0), "optimizer/state[0]/step=fp64", ["float32", "float32", "float64"]
    ),
    **{
        f"{glob}: a path of either file": Case(
            {"state": {"module.a": torch.ones(1), "module.b": torch.ones(1)}},
            f"{glob}=bf16",
            ["bfloat16", "float32"],
            others={"select": "state", "strip_prefix": "module"},
        )
        for glob in ("./a", "state/a", "./state/a", "*/a")
    },
    "all has its dtype already": Case(
        {"w": torch.ones(1)},
        "fp32",
        ["float32"],
        notes=("all selected tensors have this dtype already, so dtype changed nothing",),
    ),
    "there is nothing to cast": Case(
        {"n": torch.arange(3)},
        "fp32",
        ["int64"],
        notes=("there are no floating-point weights, so dtype changed nothing",),
    ),
}


@pytest.mark.parametrize("case", CASTS)
def test_casts(case: str, tmp_path: Path) -> None:
    """The dtypes of the output, the tensors that are not cast, and the notes are those of the table."""
    obj, rules, dtypes, not_cast, notes, others = CASTS[case]
    found, report = round_trip(tmp_path, obj, dtype=rules, **others)
    assert dtypes_of(found) == dtypes
    assert report.changes.not_cast == not_cast
    assert report.notes == notes


def test_overflows_are_counted(tmp_path: Path) -> None:
    """The report counts the numbers that overflow by the paths of their storage, also for integers. Bytes that no view
    uses are not counted, and ``verify`` counts nothing twice.
    """
    large = torch.zeros(100_000)
    large[[1, 50_000, 99_999]] = torch.tensor([1e5, -1e6, float("inf")])
    base = torch.tensor([1e5, 1.0, 2.0, 1e6, 1e7])
    obj = {"large": large, "part": base[:2], "other": base[1:3], "n": torch.tensor([70000, 1])}
    found, report = round_trip(tmp_path, obj, dtype=["fp16", "./n=fp16"], verify=True)
    assert report.overflowed == {("large",): 2, ("part", "other"): 1, ("n",): 1}
    assert [int(t.isinf().sum()) for t in found.values()] == [3, 1, 0, 1]
    assert ckptconv.convert(tmp_path / "src.pt", tmp_path / "dry.pt", dtype="fp16", dry_run=True).overflowed == {}
    _, report = round_trip(tmp_path, obj, "dst.safetensors", dtype="fp16")
    assert report.overflowed == {("large",): 2, ("part", "other"): 1}


def test_a_dry_run_needs_no_torch(tmp_path: Path) -> None:
    """A dry run computes the size of the output without importing torch."""
    torch.save(training(), tmp_path / "src.pt")
    program = (
        "import sys; from ckptconv.cli.main import main; status = main(sys.argv[1:]); assert 'torch' not in"
        " sys.modules; sys.exit(status)"
    )
    words = ["convert", "src.pt", "dst.pt", "--dtype", "bf16", "--dtype", "*.norm.*=fp64", "--compact", "--json"]
    planned = [sys.executable, "-c", program, *words, "-n"]
    said = subprocess.run(planned, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    subprocess.run([sys.executable, "-m", "ckptconv", *words], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "dst.pt").stat().st_size == json.loads(said)["size"]


# Damage


@pytest.mark.parametrize("target", ["dst.pt", "dst.safetensors", "dst.pkl"])
@pytest.mark.parametrize("where", [0, 4097, -1])
@pytest.mark.parametrize("case", ["small", "large", "separated", "view", "unused", "upcast"])
def test_damage_is_seen_while_casting(case: str, where: int, target: str, tmp_path: Path) -> None:
    """A flipped bit in a storage is found during a cast, also in bytes that no view uses. No output or temporary file
    is left.
    """
    base = torch.arange(2000.0 if case == "small" else 60000.0).view(-1, 10)
    state = {
        "small": {"a": base},
        "large": {"a": base},
        "upcast": {"a": base},
        "separated": {"a": base[:3], "b": base[3:9].t()},
        "view": {"a": base.t()},
        "unused": {"a": base[5:9]},
    }[case]
    torch.save(state, tmp_path / "src.pt")
    src, raw = tmp_path / "src.pt", base.numpy().tobytes()
    flip_bit(src, found_in(src.read_bytes(), raw) + where % len(raw))
    rules = ["bf16", "b=fp16"] if case == "separated" else "fp64" if case == "upcast" else "bf16"
    refused(ckptconv.MalformedError, "damaged", tmp_path / "src.pt", tmp_path / target, dtype=rules)
    assert os.listdir(tmp_path) == ["src.pt"]


@pytest.mark.parametrize("write", [deflated, turned_round])
def test_damage_in_other_zips(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """Damage is found in deflated archives and in big-endian archives."""
    write({"a": torch.arange(5000.0)}, tmp_path / "src.pt")
    src = tmp_path / "src.pt"
    flip_bit(src, local_header(src.read_bytes(), "src/data/0") + 500)
    refused(ckptconv.MalformedError, None, tmp_path / "src.pt", tmp_path / "dst.pt", dtype="bf16")
    assert os.listdir(tmp_path) == ["src.pt"]


# Pickles that torch does not write


def hostile(folder: Path, build: Callable[[Any], Any]) -> Path:
    """Save a weight, and the result of `build` for its storage. Return the path."""
    weight = torch.arange(4.0)
    storage = torch.storage.TypedStorage(wrap_storage=weight.untyped_storage(), dtype=torch.float32, _internal=True)
    return saved_at(folder / "src.pt", {"model": {"w": weight}, "x": build(storage)})


REBUILD = torch._utils._rebuild_tensor_v2


def made_of(storage: Any, offset: int = 0) -> tuple[Any, ...]:
    """Return the arguments that make a tensor of two elements of `storage`."""
    return storage, offset, (2,), (1,), False, OrderedDict()


@pytest.mark.parametrize(
    "build",
    [
        lambda storage: [Reduced(REBUILD, (storage,))],
        lambda storage: Reduced(frozenset, ([Reduced(REBUILD, (*made_of(storage), storage))],)),
        lambda storage: Reduced(list, ((Reduced(REBUILD, made_of(storage, 99)),),)),
        lambda storage: Reduced(dict, ([(1, Reduced(REBUILD, (storage, 0, (2,), ("1",), False, OrderedDict())))],)),
        lambda storage: Reduced(REBUILD, (storage, 0, (2,), (1,), False, [storage])),
        lambda storage: Reduced(set, ((storage,),)),
        lambda storage: {"storage": storage},
        lambda storage: (lambda args: [Reduced(REBUILD, args), args])(made_of(storage)),
    ],
)
def test_references_in_odd_places_keep_the_storage(build: Callable[[Any], Any], tmp_path: Path) -> None:
    """If an object other than a tensor refers to a storage, the storage is neither cast nor compacted. If the file
    cannot be converted without edits, it is refused with edits too.
    """
    src = hostile(tmp_path, build)
    try:
        ckptconv.convert(src, tmp_path / "same.pt")
    except ckptconv.MalformedError:
        refused(ckptconv.MalformedError, None, src, tmp_path / "dst.pt", dtype="bf16")
        return
    for edits in ({"dtype": "bf16"}, {"compact": True}):
        report = ckptconv.convert(src, tmp_path / "dst.pt", force=True, **edits)
        why = "another object refers to the storage"
        assert report.changes.not_cast.get(why, []) == (["model/w"] if "dtype" in edits else [])
        assert not report.changes.dtypes
        assert report.changes.compacted == (0, 0)
        ckptconv.convert(tmp_path / "dst.pt", tmp_path / "again.pt", force=True)
        assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "same.pt").read_bytes()


def test_arguments_that_are_shared(tmp_path: Path) -> None:
    """If a tensor and an unknown call share their arguments, the storage keeps its dtype, because the call would see
    the change.
    """
    torch.save({"model": {"w": torch.arange(4.0)}, "x": [1]}, tmp_path / "src.pt")
    with Source(tmp_path / "src.pt") as source:
        checkpoint = opening.read(source)
        (call,) = (node for node in checkpoint.graph.calls if str(node.callable) == "torch._utils._rebuild_tensor_v2")
        assert not Views(checkpoint).used_otherwise
        other = Call("REDUCE", Global("unknown", "function"), call.args)
        (holder,) = (node for node in walk([checkpoint.graph.root]) if isinstance(node, List) and children(node) == [1])
        holder.effects[0].values.append(other)
        checkpoint.changed()
        assert Views(checkpoint).used_otherwise == set(checkpoint.storages.values())


def test_keys_that_are_already_used(tmp_path: Path) -> None:
    """If a storage is split, its parts get keys that the file does not use yet."""
    base = torch.arange(6.0)
    torch.save({"a": base[:3], "b": base[3:], "c": torch.ones(2), "d": torch.ones(1)}, tmp_path / "src.pt")
    records = records_of(tmp_path / "src.pt")
    found_in(records["data.pkl"], text("1"))
    renamed = records["data.pkl"].replace(text("1"), text("0.1"))
    change = {"data.pkl": renamed, "data/0.1": records["data/1"], "data/1": None}
    rezip(tmp_path / "src.pt", tmp_path / "odd.pt", change)
    ckptconv.convert(tmp_path / "odd.pt", tmp_path / "dst.pt", dtype=["bf16", "b=fp16"])
    found = torch.load(tmp_path / "dst.pt")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [0, 1, 2],
        "b": [3, 4, 5],
        "c": [1, 1],
        "d": [1],
    }
    assert dtypes_of(found) == ["bfloat16", "float16", "bfloat16", "bfloat16"]


@pytest.mark.untraced
def test_very_many_views_of_one_storage(tmp_path: Path) -> None:
    """The time for many views of one storage does not grow with the square of their number."""
    base = torch.arange(24_000.0)
    names = [f"{i % 2}.{i}" for i in range(8_000)]
    torch.save({name: base[3 * i : 3 * i + 2] for i, name in enumerate(names)}, tmp_path / "src.pt")
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", dtype=["bf16", "1.*=fp16"], compact=True)
    assert len(report.changes.separated) == 1
    found = torch.load(tmp_path / "dst.pt", mmap=True)
    assert found["1.7999"].tolist() == rounded(base[23997:23999], torch.float16).tolist()
    assert found["1.7999"].untyped_storage().nbytes() == found["0.0"].untyped_storage().nbytes() == 16_000


# The report


LINES = """\
  dtypes        float32 → float16: 3 tensors, 6.42 kB → 3.21 kB
  dtypes        float32 → bfloat16: 1 tensor, 12 B → 6 B
  not cast      not weights; './queue[1]=float16' casts it: queue[1]
  not cast      float8_e4m3fn has scales, so only a GLOB casts it: model/scales
  not cast      complex: model/phases
  overflow      2 numbers too large for the new dtype:
                model/layers.0.attention.weight, queue[0] (2)
  separated     they shared a storage and were cast differently:
                model/layers.0.attention.weight, queue[0] (float16) |
                model/layers.0.attention.bias (bfloat16)
  compacted     removed 2.72 kB that no tensor uses, from 1 storage
  note          also cast, because they are tied to cast tensors: queue[0]"""


def test_report_at_80_columns(tmp_path: Path) -> None:
    """The report prints every kind of line within 80 columns."""
    base = torch.arange(6.0) * 1e5
    f8 = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    obj = {
        "model": {
            "layers.0.attention.weight": base[:3],
            "layers.0.attention.bias": base[3:],
            "layers.0.norm.weight": torch.ones(40, 40)[3:9],
            "scales": f8,
            "phases": torch.ones(1, dtype=torch.complex64),
        },
        "ema": {"layers.0.norm.weight": torch.ones(3)},
        "queue": [base[:3], torch.ones(3)],
    }
    _, report = round_trip(tmp_path, obj, dtype=["fp16", "*.bias=bf16"], compact=True)
    lines = [line.rstrip() for line in report_lines(report, Style(width=80))]
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("  dtypes")) :]
    assert max(map(len, lines)) <= 80
    assert "\n".join(lines) == LINES


# Files that torch does not write


def test_a_reference_that_tensors_share_stays_one(tmp_path: Path) -> None:
    """Tensors that share a persistent id through the memo are cast and compacted correctly, and torch loads the output
    with ``weights_only=True``.
    """
    base = torch.arange(4.0)
    torch.save({"a": base[1:3], "b": base[2:3]}, tmp_path / "src.pt")
    data = records_of(tmp_path / "src.pt")["data.pkl"].replace(b"Q", b"Qq\xf0", 1)
    data, n = re.subn(rb"\(h.h.h.h.K\x04tq.Q", b"h\xf0", data, flags=re.DOTALL)
    assert n == 1
    rezip(tmp_path / "src.pt", tmp_path / "src.pt", {"data.pkl": data})
    assert torch.load(tmp_path / "src.pt", weights_only=True)["b"].tolist() == [2.0]
    for i, edits in enumerate(
        ({"dtype": "bf16"}, {"compact": True}, {"dtype": "a=fp16"}, {"dtype": "fp64", "compact": True})
    ):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / f"{i}.pt", **edits)  # type: ignore[arg-type]
        found = torch.load(tmp_path / f"{i}.pt", weights_only=True)
        assert (found["a"].tolist(), found["b"].tolist()) == ([1.0, 2.0], [2.0])
        shared = found["a"].untyped_storage()._cdata == found["b"].untyped_storage()._cdata
        assert shared == (i != 2)


def test_dtypes_that_torch_reads_in_the_wrong_byte_order(tmp_path: Path) -> None:
    """torch reads uint16 and uint32 with the wrong byte order in a big-endian file, so no tensor of such a file is cast
    to them.
    """
    turned_round({"n": torch.tensor([258, 3], dtype=torch.int32), "w": torch.ones(2)}, tmp_path / "src.pt")
    for name in ("uint16", "uint32"):
        report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", dtype=f"n={name}", force=True)
        assert report.changes.not_cast == {f"torch reads {name} with the wrong byte order in a big-endian file": ["n"]}
        assert torch.load(tmp_path / "dst.pt")["n"].tolist() == [258, 3]
    found = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", dtype=["float8_e5m2", "n=int16"], force=True)
    assert not found.changes.not_cast
    assert [t.float().tolist() for t in torch.load(tmp_path / "dst.pt").values()] == [[258.0, 3.0], [1.0, 1.0]]


def test_tensors_that_torch_cannot_cast(tmp_path: Path) -> None:
    """Tensors that torch cannot cast are named: bits, and a float8 whose elements torch would have to negate."""
    bits = torch.arange(2, dtype=torch.uint8).view(torch.bits8)
    late = torch.ones(2, dtype=torch.complex64).conj().imag
    _, report = round_trip(tmp_path, {"bits": bits, "late": late}, dtype=["bits=fp32", "late=float8_e5m2"])
    assert report.changes.not_cast["bits8"] == ["bits"]
    assert "late" in [path for paths in report.changes.not_cast.values() for path in paths]
    found, report = round_trip(tmp_path, {"late": torch._neg_view(torch.ones(2))}, dtype="float8_e5m2")
    assert report.changes.not_cast == {"torch cannot negate float8_e5m2, which loading this tensor needs": ["late"]}
    assert found["late"].tolist() == [-1.0, -1.0]


@pytest.mark.untraced
def test_one_tensor_under_very_many_names(tmp_path: Path) -> None:
    """The time for one tensor under many names does not grow with the square of their number."""
    weight = torch.ones(2)
    _, report = round_trip(tmp_path, {f"w{i}": weight for i in range(20_000)}, dtype="w0=bf16")
    assert report.changes.dtypes["float32", "bfloat16"].tensors == 1
    assert "and 19,996 more" in report.notes[0]


# Quantized weights


def quantized() -> dict[str, torch.Tensor]:
    """Return weights that are quantized like those of DeepSeek, compressed-tensors, ComfyUI and GPTQ, and others."""
    f8 = torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        "block.weight": f8,
        "block.weight_scale_inv": torch.rand(2),
        "experts.up": f8.clone(),
        "experts.up_scale": torch.rand(2),
        "comfy.weight": f8.clone(),
        "comfy.scale_weight": torch.rand(1),
        "gptq.qweight": torch.ones(2, dtype=torch.int32),
        "gptq.scales": torch.rand(3),
        "elsewhere.weight_scale_inv": torch.rand(2),
        "bare.weight": f8.clone(),
        "norm.weight": torch.rand(3),
        "norm.scale": torch.rand(3),
    }


SCALES = [
    "block.weight_scale_inv",
    "comfy.scale_weight",
    "elsewhere.weight_scale_inv",
    "experts.up_scale",
    "gptq.scales",
]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "*scale*=bf16"])
def test_scales_keep_their_dtype(dtype: str, suffix: str, tmp_path: Path) -> None:
    """A dtype or a glob does not cast the scales of quantized weights, also if the weight is in another file. A tensor
    that is only named like a scale is cast.
    """
    model, dst = quantized(), tmp_path / f"dst{suffix}"
    torch.save(model, tmp_path / "src.pt")
    report = ckptconv.convert(tmp_path / "src.pt", dst, dtype=dtype)
    found = ckptconv.load(dst)
    for name in SCALES:
        assert_same(model[name], found[name])
    assert found["norm.scale"].dtype != torch.float32
    assert sorted(next(paths for why, paths in report.changes.not_cast.items() if why.startswith("scales"))) == SCALES


def test_weights_with_a_scale_and_without(tmp_path: Path) -> None:
    """A bare float8 dtype does not cast float8 weights. The report suggests a glob only for a weight without a
    scale.
    """
    torch.save(quantized(), tmp_path / "src.pt")
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", dtype="float8_e5m2")
    said = {why: sorted(paths) for why, paths in report.changes.not_cast.items() if why.startswith("float8")}
    assert said == {
        "float8_e4m3fn that has a scale, which a cast does not apply": [
            "block.weight",
            "comfy.weight",
            "experts.up",
        ],
        "float8_e4m3fn has scales, so only a GLOB casts it": ["bare.weight"],
    }


def test_a_scale_is_cast_by_its_whole_name(tmp_path: Path) -> None:
    """A rule with the full name of a scale casts it."""
    name = "block.weight_scale_inv"
    found, _ = round_trip(tmp_path, quantized(), dtype=f"{name}=bf16")
    assert_same(quantized()["gptq.qweight"], found["gptq.qweight"])
    assert found[name].dtype == torch.bfloat16 and found["experts.up_scale"].dtype == torch.float32


@pytest.mark.parametrize("name", ["block.weight", "experts.up", "comfy.weight"])
@pytest.mark.parametrize("glob", ["{}", "*{}", "*"])
def test_a_weight_is_not_cast_without_its_scale(glob: str, name: str, tmp_path: Path) -> None:
    """A float8 weight with a scale is not cast to another float8, and the error suggests a dtype that applies the
    scale. A weight without a scale is cast.
    """
    model = {key: value for key, value in quantized().items() if key.split(".")[0] in (name.split(".")[0], "bare")}
    torch.save(model, tmp_path / "src.pt")
    with pytest.raises(ckptconv.RefusedError, match=f"{name} is float8_e4m3fn, and a cast does not.*bf16 do"):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", dtype=f"{glob.format(name)}=float8_e5m2")
    assert not (tmp_path / "dst.pt").exists()
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", dtype="bare.*=bf16")
    assert_same(model["bare.weight"].to(torch.bfloat16), torch.load(tmp_path / "dst.pt")["bare.weight"])


def test_scales_in_another_shard(tmp_path: Path) -> None:
    """A set is one checkpoint, so a scale in another shard is used for the weight, and here it does not fit. If one
    shard is converted, a note states that scales may be in another shard.
    """
    model, shard = quantized(), "model-0000{}-of-00002.safetensors"
    names = {1: ["block.weight"], 2: ["block.weight_scale_inv", "norm.weight"]}
    for i, each in names.items():
        save_file({name: model[name] for name in each}, tmp_path / shard.format(i), {"format": "pt"})
    ckptconv.write_index(tmp_path)
    with pytest.raises(ckptconv.RefusedError, match=r"block\.weight_scale_inv does not fit block\.weight"):
        ckptconv.convert(tmp_path / "model.safetensors.index.json", tmp_path / "dst.pt", dtype="*.weight=bf16")
    report = ckptconv.convert(tmp_path / shard.format(1), tmp_path / "dst.safetensors", dtype="*.weight=bf16")
    assert any("scales in another shard" in note for note in report.notes)


def test_the_version_of_torch_is_reported_if_versions_differ(tmp_path: Path) -> None:
    """torch 2.6 casts numbers that are too large for float8_e4m3fn to NaN, and torch 2.13 to the largest number. The
    report names the version of torch if this happens.
    """
    torch.save({"w": torch.tensor([1.0, 1e6])}, tmp_path / "src.pt")
    torch.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "small.pt")
    said = f"cast with torch {torch.__version__}:"
    for src, dtype, is_said in (("src", "float8_e4m3fn", 1), ("small", "float8_e4m3fn", 0), ("src", "float8_e5m2", 0)):
        report = ckptconv.convert(tmp_path / f"{src}.pt", tmp_path / "dst.pt", dtype=dtype, force=True)
        assert any(said in note for note in report.notes) == bool(is_said)
