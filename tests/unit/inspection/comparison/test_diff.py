"""``ckptconv diff``: equal checkpoints are the same, each change is found and nothing else, and no more is read than
necessary.
"""

from __future__ import annotations

import copy
import pickle
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.byteranges.kernels.comparing import Comparer, comparable
from ckptconv.byteranges.sources import Source
from ckptconv.cli.main import main
from ckptconv.dtypes import BY_NAME
from ckptconv.edits.options import Edits
from ckptconv.inspection.comparison.diff import compare
from ckptconv.inspection.comparison.differences import (
    Difference,
    OtherDifference,
    TensorDifference,
    TensorFacts,
    ValueDifference,
)
from ckptconv.inspection.values import BLOCK
from ckptconv.limits import LIMITS, Limits
from ckptconv.render.difference import difference_lines
from ckptconv.render.text import Style
from tests.support import zoo
from tests.support.archives import big_endian, rezip, without_crc32
from tests.support.command import Command, in_one_line
from tests.support.hostile_bytes import data_of, flipped
from tests.support.limited import ckptconv_with_small_files
from tests.support.paths import GOLDEN
from tests.support.rank_runs import save_as_ranks
from tests.support.reduced import Reduced
from tests.support.sampled import sampled
from tests.support.writers import scripted

# torch issues warnings about nested, quantized, compressed sparse and complex32 tensors once for each process: they are
# experimental or deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::UserWarning:tests.support.zoo",
    "ignore::UserWarning:tests.unit.inspection.comparison.test_diff",
    "ignore::DeprecationWarning:torch",
)

Change = Callable[[Any], None]


def saved(path: Path, obj: Any, tags: tuple[str, ...] = ("cpu",), **kwargs: Any) -> Path:
    zoo.save(obj, path, tags, **kwargs)
    return path


def bare(path: Path, obj: Any, **kwargs: Any) -> Path:
    """Save `obj` at `path` with zero for every checksum, so that its bytes must be read, and return `path`."""
    with without_crc32():
        return saved(path, obj, **kwargs)


def in_deflated_records(path: Path, obj: Any) -> Path:
    """Save `obj` at `path`, deflate the records of the archive, and return `path`."""
    return rezip(saved(path, obj), path, method=zipfile.ZIP_DEFLATED)


def status(*args: object) -> int:
    return main(["diff", *map(str, args)])


def remarks(found: Difference) -> list[str]:
    """Return the notes of `found` without the note about equal checksums."""
    return [note for note in found.notes if "equal checksums" not in note]


def run() -> dict[str, Any]:
    """Return an object as a training run saves it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "device": torch.device("cuda:1"),
        "classes": ("cat", "dog"),
        "seen": {"b", "a", 3},
        "array": np.arange(4.0),
        "long": "x" * 70_000,
        "data": b"\0\xff" * 40_000,
        "size": torch.Size([2, 3]),
        "weights": torch.arange(6.0),
    }


# Equal checkpoints


@pytest.mark.untraced
@pytest.mark.parametrize("name", sampled(zoo.ZOO))
def test_the_zoo_is_the_same_as_itself_and_its_conversions(name: str, tmp_path: Path) -> None:
    """An object of the zoo is the same as its conversions in every protocol and container that can store it. Both
    orders of the two files are compared, with and without checksums.
    """
    for protocol in (2, 5):
        if protocol < zoo.NEEDS_PROTOCOL.get(name, 2):
            continue
        torch.manual_seed(0)
        obj = zoo.ZOO[name]()
        files = [saved(tmp_path / f"{protocol}.pt", obj, zoo.TAGS, pickle_protocol=protocol)]
        files.append(bare(tmp_path / f"{protocol}-read.pt", obj, tags=zoo.TAGS, pickle_protocol=protocol))
        for format_, suffix in (("pt", "pth"), ("legacy", "legacy"), ("pickle", "pkl"), ("safetensors", "safetensors")):
            out = tmp_path / f"{protocol}.{suffix}"
            try:
                ckptconv.convert(files[0], out, format=format_)
                ckptconv.inspect(out)
            except ckptconv.CkptconvError:
                continue
            files.append(out)
        pairs = [pair for each in files for pair in ((files[0], each), (each, files[1]))]
        for a, b in [*pairs, (files[-1], files[-1])]:
            found = ckptconv.diff(a, b)
            assert found.same, (a.name, b.name, found)


@pytest.mark.parametrize(
    "name",
    [name for name in zoo.ZOO if name not in ("rng", "training", "numpy_objects", "objects", *zoo.NEEDS_PROTOCOL)],
)
def test_protocols_make_no_difference(name: str, tmp_path: Path) -> None:
    """Bytes, sets and bytearrays are the same in protocols 2 and 5, although pickle spells them differently. Objects
    with numpy arrays are not tested, because protocol 5 uses other calls for them.
    """
    torch.manual_seed(0)
    obj = zoo.ZOO[name]()
    files = [saved(tmp_path / f"{protocol}.pt", obj, pickle_protocol=protocol) for protocol in (2, 5)]
    assert ckptconv.diff(*files).same


def test_prefix_and_container_make_no_difference(tmp_path: Path) -> None:
    """A DataParallel checkpoint is the same as the safetensors file with the plain names if the prefix is stripped or
    unwrapped.
    """
    state = run()["model"]
    ddp = saved(tmp_path / "ddp.pt", {f"module.{name}": tensor for name, tensor in state.items()}, ("cuda:1",))
    save_file(state, tmp_path / "plain.safetensors")
    assert status(ddp, tmp_path / "plain.safetensors", "--strip-prefix", "module.", "-q") == 0
    assert status(ddp, tmp_path / "plain.safetensors", "--unwrap", "-q") == 0
    assert status(ddp, tmp_path / "plain.safetensors", "-q") == 1


def test_one_state_dict_is_compared_with_safetensors(tmp_path: Path) -> None:
    """If one file is safetensors, the state dict of the other one is compared with it, on either side. A note lists the
    paths that are not compared.
    """
    save_file(run()["model"], tmp_path / "model.safetensors")
    full = saved(tmp_path / "full.pt", run(), ("cuda:0",))
    for a, b, side in ((full, "model.safetensors", "A"), ("model.safetensors", full, "B")):
        found = ckptconv.diff(tmp_path / a, tmp_path / b)
        assert found.same and found.tensors == 7
        (note,) = found.notes
        assert (
            note.startswith("not compared: ")
            and f" of {side} other than tensors (optimizer, epoch, device, classes, " in note
        )
        (note,) = compare(tmp_path / a, tmp_path / b, Edits(), brief=True).notes
        assert " other than tensors (optimizer, epoch, device and " in note


# Changes


def tensor_of(obj: Any) -> torch.Tensor:
    return obj["model"]["0.weight"]


CHANGES: dict[str, tuple[Change, list[tuple[str, str]]]] = {
    "value": (lambda obj: tensor_of(obj)[0].fill_(7), [("model/0.weight", "values")]),
    "dtype": (
        lambda obj: obj["model"].update({"0.bias": obj["model"]["0.bias"].double()}),
        [("model/0.bias", "dtype")],
    ),
    "shape": (lambda obj: obj.update(weights=obj["weights"].view(2, 3)), [("weights", "shape")]),
    "requires_grad": (lambda obj: obj["weights"].requires_grad_(), [("weights", "requires_grad")]),
    "parameter": (
        lambda obj: obj.update(weights=torch.nn.Parameter(obj["weights"], False)),
        [("weights", "class_name")],
    ),
    "class": (
        lambda obj: obj.update(weights=obj["weights"].as_subclass(zoo.AttributedTensor)),
        [("weights", "class_name")],
    ),
    "kind": (lambda obj: obj.update(weights=obj["weights"].to_sparse()), [("weights", "made_of")]),
    "name gone": (lambda obj: obj["model"].pop("0.bias"), [("model/0.bias", "only_in_a")]),
    "name added": (lambda obj: obj["model"].update(more=torch.ones(2)), [("model/more", "only_in_b")]),
    "number": (lambda obj: obj.update(epoch=4), [("epoch", "3 → 4")]),
    "type of a number": (lambda obj: obj.update(epoch=3.0), [("epoch", "3 → 3.0")]),
    "learning rate": (
        lambda obj: obj["optimizer"]["param_groups"][0].update(lr=0.5),
        [("optimizer/param_groups[0]/lr", "0.001 → 0.5")],
    ),
    "step": (lambda obj: obj["optimizer"]["state"][0]["step"].add_(1), [("optimizer/state[0]/step", "values")]),
    "device": (
        lambda obj: obj.update(device=torch.device("cuda:2")),
        [("device", "torch.device('cuda:1') → torch.device('cuda:2')")],
    ),
    "size": (lambda obj: obj.update(size=torch.Size([3, 2])), [("size", "torch.Size((2, 3)) → torch.Size((3, 2))")]),
    "member": (lambda obj: obj.update(classes=("cat", "cow")), [("classes[1]", "'dog' → 'cow'")]),
    "list": (lambda obj: obj.update(classes=["cat", "dog"]), [("classes", "('cat', 'dog') → ['cat', 'dog']")]),
    "long text": (
        lambda obj: obj.update(long="x" * 69_999 + "y"),
        [("long", "str of 70,000 bytes → str of 70,000 bytes, but not the same")],
    ),
    "long bytes": (lambda obj: obj.update(data=b"\0\xff" * 39_999 + b"\0\0"), [("data", "")]),
    "longer bytes": (lambda obj: obj.update(data=b"\0\xff" * 40_001), [("data", "")]),
    "item": (lambda obj: obj.pop("epoch"), [("epoch", "3 → None")]),
    "metadata": (lambda obj: obj["model"]._metadata["0"].update(version=9), [("model/._metadata/0/version", "1 → 9")]),
    "array": (lambda obj: obj["array"].fill(1), [("array", "")]),
}


@pytest.mark.untraced
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("what", CHANGES)
def test_one_change_is_found_and_nothing_else(what: str, protocol: int, tmp_path: Path) -> None:
    """Each kind of change is the only finding, in both directions and between containers."""
    before = run()
    after = copy.deepcopy(before)
    change, expected = CHANGES[what]
    change(after)
    a = saved(tmp_path / "a.pt", before, pickle_protocol=protocol)
    b = saved(tmp_path / "b.pt", after, pickle_protocol=protocol)
    ckptconv.convert(b, tmp_path / "b.pkl", format="pickle")
    for other in (b, tmp_path / "b.pkl"):
        found = ckptconv.diff(a, other)
        assert not found.same
        (path, kind), (seen, how) = expected[0], *findings(found)
        assert seen == path or seen.startswith(f"{path}/")
        assert how == kind or kind == "" or "but not the same" in kind
        assert len(findings(ckptconv.diff(other, a))) == 1


def findings(found: Difference) -> list[tuple[str, str]]:
    """Return each finding as a path and a word for the difference there."""
    every = [(each.path, "only_in_a") for each in found.only_in_a] + [
        (each.path, "only_in_b") for each in found.only_in_b
    ]
    for each in found.differing:
        kinds = [
            name
            for name in ("dtype", "shape", "device", "requires_grad", "class_name", "made_of")
            if getattr(each, name)
        ]
        kinds += ["values"] if each.values and each.values.differing and each.dtype is None else []
        every += [(each.path, kind) for kind in kinds]
    return every + [(other.path, f"{other.a} → {other.b}") for other in found.others]


def test_keys_that_are_not_strings(tmp_path: Path) -> None:
    """Nested tuples and frozensets are recognized as the same key or member in any order. Keys that are nested too
    deeply are paired by their position.
    """
    keys = [(1, 2), ((1, 2), 3), frozenset([1, (2, b"x")]), 1, 1.5, b"y", None, tuple(range(12)), (float("nan"),)]
    a = saved(tmp_path / "a.pt", {"d": {key: n for n, key in enumerate(keys)}, "s": {*keys[:-1]}, "w": torch.ones(1)})
    reverse = dict(reversed([*zip(keys, range(9), strict=True)]))
    for protocol in (2, 4):
        b = saved(
            tmp_path / "b.pt", {"d": reverse, "s": {*reversed(keys[:-1])}, "w": torch.ones(1)}, pickle_protocol=protocol
        )
        assert ckptconv.diff(a, b).same
    for key in keys:
        saved(b, {"d": {**reverse, key: 99}, "s": {*keys[:-1]}, "w": torch.ones(1)})
        (other,) = ckptconv.diff(a, b).others
        assert (other.a, other.b) == (str(keys.index(key)), "99") and other.path.startswith("d[")
    saved(b, {"d": reverse, "s": {*keys[:-1], ((1, 2), 4)} - {((1, 2), 3)}, "w": torch.ones(1)})
    assert [other.path for other in ckptconv.diff(a, b).others] == ["s"]
    deep: Any = 1
    for _ in range(30):
        deep = (deep,)
    a, b = saved(a, {deep: 1, "w": torch.ones(1)}), saved(b, {deep: 2, "w": torch.ones(1)})
    assert ckptconv.diff(a, a).same
    assert len(ckptconv.diff(a, b).others) == 1
    a, b = saved(a, [torch.ones(1), {deep: 1, (deep,): 2}]), saved(b, [torch.ones(1), {(deep,): 2, deep: 1}])
    assert len(ckptconv.diff(a, b).others) >= 2


def converted(obj: Any, path: Path, **options: Any) -> Path:
    ckptconv.convert(saved(path.with_suffix(".pt"), obj), path, **options)
    return path


def pickled(obj: Any, path: Path) -> Path:
    path.write_bytes(pickle.dumps(obj, 2))
    return path


def in_ranks(obj: Any, path: Path) -> Path:
    save_as_ranks(obj, path)
    return path


#: Checkpoints whose bytes are in several files, or in several byte strings of one file.
IN_PARTS: dict[str, Callable[[Any, Path], Path]] = {
    "shards of safetensors": partial(converted, max_shard_size="4KB", format="safetensors"),
    "shards of torch.save": partial(converted, max_shard_size="4KB", format="pt"),
    "a DCP folder": partial(converted, format="dcp", ranks=3),
    "files of ranks": in_ranks,
    "a pickle of protocol 2": pickled,
}


@pytest.mark.parametrize("how", IN_PARTS)
def test_tensors_at_the_same_place_of_different_files(how: str, tmp_path: Path) -> None:
    """If one of several equal tensors changes, only this tensor is reported, no matter in which file its bytes are."""
    weights = {name: torch.arange(1000.0) for name in "abc"}
    before = IN_PARTS[how](weights, tmp_path / "before")
    assert ckptconv.diff(before, before).same
    for name, tensor in weights.items():
        after = IN_PARTS[how]({**weights, name: tensor + 1}, tmp_path / f"after-{name}")
        for a, b in ((before, after), (after, before)):
            assert findings(ckptconv.diff(a, b)) == [(name, "values")]
        assert ckptconv.diff(after, converted({**weights, name: tensor + 1}, tmp_path / f"{name}.safetensors")).same


def test_devices_count_between_files_of_torch(tmp_path: Path) -> None:
    """A different tag is a difference, but the values of the tensor are reported as equal."""
    a, b = saved(tmp_path / "a.pt", run()["model"]), saved(tmp_path / "b.pt", run()["model"], ("cuda:0",))
    found = ckptconv.diff(a, b)
    assert (found.differing[0].path, found.differing[0].device) == ("0.weight", ("cpu", "cuda:0"))
    assert len(found.differing) == 7 and all(each.values and not each.values.differing for each in found.differing)


def test_differences_contain_the_facts_of_both_sides(tmp_path: Path) -> None:
    """A difference contains the dtype, shape, size and tie of the tensor on both sides. Two names of one object of the
    pickle are also a tie.
    """
    tied = torch.ones(2)
    left = saved(tmp_path / "a.pt", {"a": tied, "b": tied, "x": tied, "y": tied})
    right = saved(tmp_path / "b.pt", {"a": torch.ones(3), "b": torch.ones(2).half()})
    found = ckptconv.diff(left, right)
    assert [each.sides for each in found.differing] == [
        (TensorFacts("a", "float32", (2,), 8, None), TensorFacts("a", "float32", (3,), 12, None)),
        (TensorFacts("b", "float32", (2,), 8, "a"), TensorFacts("b", "float16", (2,), 4, None)),
    ]
    assert [(each.path, each.tied_to) for each in found.only_in_a] == [("x", "a"), ("y", "a")]


def test_sizes_of_differences(tmp_path: Path) -> None:
    """A difference contains the number of changed elements and the largest absolute and relative difference. Tensors of
    different dtypes are compared by value, and views by their elements.
    """
    a = {
        "w": torch.tensor([1.0, 2.0, 4.0, float("nan")]),
        "n": torch.tensor([1, 2]),
        "h": torch.ones(3),
        "t": torch.arange(6.0).view(2, 3).t(),
    }
    b = {
        "w": torch.tensor([1.0, 2.5, 4.0, float("nan")]),
        "n": torch.tensor([1, -(1 << 62)]),
        "h": torch.ones(3).half(),
        "t": torch.arange(6.0).view(2, 3).t().contiguous() + torch.eye(3, 2),
    }
    found = ckptconv.diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))
    assert all(each.sides for each in found.differing)
    assert tuple(replace(each, sides=None) for each in found.differing) == (
        TensorDifference("w", values=ValueDifference(4, 1, 0.5, 0.2, relative_to_max=0.125)),
        TensorDifference("n", values=ValueDifference(2, 1, (1 << 62) + 2, 1.0, relative_to_max=1.0)),
        TensorDifference("h", dtype=("float32", "float16"), values=ValueDifference(3, 0)),
        TensorDifference("t", values=ValueDifference(6, 2, 1.0, 1.0, relative_to_max=0.2)),
    )


def test_tolerances_are_those_of_allclose(tmp_path: Path) -> None:
    """The tolerances are those of torch.allclose. Files that differ only within the tolerance are the same, with a
    note. An invalid tolerance is refused.
    """
    numbers = torch.linspace(1, 2, 50_000)
    a, b = saved(tmp_path / "a.pt", {"w": numbers}), saved(tmp_path / "b.pt", {"w": numbers * 1.001})
    assert torch.allclose(numbers, numbers * 1.001, rtol=2e-3, atol=0)
    assert status(a, b, "-q") == 1
    assert status(a, b, "-q", "--rtol", "2e-3") == status(a, b, "-q", "--atol", "0.0021") == 0
    assert status(a, b, "-q", "--rtol", "1e-4") == 1
    (note,) = ckptconv.diff(a, b, rtol=2e-3).notes
    assert note.startswith("1 tensor differ within the tolerance, by 0.002 at most: w")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ckptconv.UsageError, match="a finite number that is not negative"):
            ckptconv.diff(a, b, atol=wrong)


def test_large_tensors_are_compared_in_all_their_parts(tmp_path: Path) -> None:
    """Changes in the first, in a middle and in the last buffer of a tensor of 40 MB are all counted."""
    numbers = torch.zeros(10_000_001)
    changed = numbers.clone()
    for i in (0, 262_144, 4_194_303, 4_194_304, 9_999_999, 10_000_000):
        changed[i] = i + 1
    a, b = saved(tmp_path / "a.pt", {"w": numbers}), saved(tmp_path / "b.pt", {"w": changed})
    assert ckptconv.diff(a, b).differing[0].values == ValueDifference(
        10_000_001, 6, 10_000_001.0, 1.0, relative_to_max=1.0
    )


@pytest.mark.parametrize("kind", ["quantized", "sparse", "nested", "meta", "subclass", "storages", "user_data"])
def test_tensors_that_are_more_than_a_storage(kind: str, tmp_path: Path) -> None:
    """A changed number in a tensor that consists of several parts is found, with one finding for its name."""
    changed: dict[str, Callable[[], Any]] = {
        "quantized": lambda: {
            **zoo.quantized(),
            "qint8": torch.quantize_per_tensor(torch.arange(6.0).view(2, 3), 0.2, 3, torch.qint8),
        },
        "sparse": lambda: {**zoo.sparse(), "coo": zoo.sparse()["coo"] * 2},
        "nested": lambda: torch.nested.nested_tensor([torch.arange(2.0), torch.ones(3)]),
        "meta": lambda: [*zoo.meta()[:-1], torch.zeros(2)],
        "subclass": lambda: {**zoo.subclass(), "scale": torch.tensor(3.0)},
        "storages": lambda: {**zoo.storages(), "its": torch.ones(4, dtype=torch.uint8).untyped_storage()},
        "user_data": lambda: {**zoo.user_data(), "dtype": torch.float8_e4m3fn},
    }
    a, b = saved(tmp_path / "a.pt", zoo.ZOO[kind]()), saved(tmp_path / "b.pt", changed[kind]())
    found = ckptconv.diff(a, b)
    assert len({path for path, _ in findings(found)}) == 1, found


def test_a_difference_only_in_a_scale_is_found(tmp_path: Path) -> None:
    """A quantized tensor differs if only its scale differs."""
    a, b = (torch._make_per_tensor_quantized_tensor(torch.arange(4).to(torch.int8), scale, 0) for scale in (0.5, 0.25))
    found = ckptconv.diff(saved(tmp_path / "a.pt", {"q": a}), saved(tmp_path / "b.pt", {"q": b}))
    (only,) = found.differing
    assert only.made_of == ("quantized", "quantized, with different parts") and only.values == ValueDifference(4, 0)


def test_numbers_that_share_a_byte(tmp_path: Path) -> None:
    """Tensors of four-bit numbers are compared byte by byte, with all their bytes."""
    scales = torch.ones(2)
    a, b = (
        torch.quantize_per_channel(numbers.view(2, 8), scales, scales, 0, torch.quint4x2)
        for numbers in (torch.arange(16.0) % 8, torch.arange(16.0) % 7)
    )
    found = ckptconv.diff(saved(tmp_path / "a.pt", [a]), bare(tmp_path / "b.pt", [b]))
    values = found.differing[0].values
    assert values and (values.elements, values.differing) == (8 + 4, 5)  # with scales and zero points
    assert ckptconv.diff(tmp_path / "a.pt", bare(tmp_path / "c.pt", [a])).same


def untyped(data: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()


def four_bits(data: bytes, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Reduced:
    """Return a tensor of four-bit numbers on a storage with `data`."""
    storage = torch.storage.TypedStorage(wrap_storage=untyped(data), dtype=torch.quint4x2, _internal=True)
    quantizer = torch.per_tensor_affine, 1.0, 0
    args = storage, offset, shape, stride, quantizer, False, OrderedDict()
    return Reduced(torch._utils._rebuild_qtensor, args)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (((4,), (1,), 1), None),
        (((4,), (1,), 2), None),
        (((3,), (1,)), None),
        (((2, 2), (1, 2)), None),
        (((2, 2), (1, 2)), ((2, 2), (2, 1))),
    ],
)
def test_numbers_that_share_a_byte_with_others(a: Any, b: Any, tmp_path: Path) -> None:
    """Four-bit tensors with an odd offset, an odd size or another order are the same if their storages and views are
    equal. Otherwise they are not compared, and count as different.
    """
    left = saved(tmp_path / "a.pt", [four_bits(b"\x10\x20\x01\x00", *a)])
    for data in (b"\x10\x20\x02\x00", b"\x11\x20\x01\x00", b"\x10\x20\x01\x00\x00"):
        right = saved(tmp_path / "b.pt", [four_bits(data, *(b or a))])
        (only,) = (found := ckptconv.diff(left, right)).differing
        assert replace(only, sides=None) == TensorDifference("[0]")
        lines = list(difference_lines(found))
        assert lines[0] == "different: 1 tensor not compared; 1 tensor in both"
        assert lines[3:5] == ["  values        of 1 tensor not compared: elements share bytes with others", "    [0]"]
    right = bare(tmp_path / "b.pt", [four_bits(b"\x10\x20\x01\x00", *(b or a))])
    assert ckptconv.diff(left, right).same is (b is None)


@pytest.mark.untraced
@pytest.mark.parametrize("name", [name for name in BY_NAME if hasattr(torch, name)])
def test_every_dtype(name: str, tmp_path: Path) -> None:
    """One changed element is counted in every dtype, contiguous or not. Values are compared with another dtype only if
    both can be converted to numbers.
    """
    dtype = BY_NAME[name]
    n = 64 // dtype.itemsize * dtype.packed

    def tensor(data: bytes, shape: tuple[int, ...], stride: tuple[int, ...]) -> Reduced:
        args = untyped(data), 0, shape, stride, False, OrderedDict(), getattr(torch, name)
        return Reduced(torch._utils._rebuild_tensor_v3, args)

    before, after = b"\x01" * 64, b"\x01" * 32 + b"\x00" * dtype.itemsize + b"\x01" * (32 - dtype.itemsize)
    a, b = (saved(tmp_path / f"{i}.pt", {"w": tensor(data, (n,), (1,))}) for i, data in enumerate((before, after)))
    other = saved(
        tmp_path / "other.pt", {"w": torch.ones(n, dtype=torch.float16 if name == "float32" else torch.float32)}
    )
    assert ckptconv.diff(a, saved(tmp_path / "again.pt", {"w": tensor(before, (n,), (1,))})).same
    for pair in ((a, b), (b, a)):
        (only,) = ckptconv.diff(*pair).differing
        assert only.values and only.values.differing == 1
    for pair in ((a, other), (other, a)):
        (only,) = ckptconv.diff(*pair).differing
        assert only.dtype and bool(only.values) is comparable(name, str(only.dtype[pair.index(other)]))
    if dtype.packed == 1:
        a, b = (
            saved(tmp_path / f"{i}.pt", {"w": tensor(data, (2, n // 2), step)})
            for i, (data, step) in enumerate(((before, (1, 2)), (after, (n // 2, 1))))
        )
        (only,) = ckptconv.diff(a, b).differing
        assert only.values and (only.values.elements, only.values.differing) == (n, 1)


def test_torchscript_is_compared_by_its_weights(tmp_path: Path) -> None:
    """A TorchScript archive is the same as its conversion to safetensors. A note reports that the code is not
    compared.
    """
    (tmp_path / "script.pt").write_bytes(scripted(torch.nn.Linear(2, 2)))
    ckptconv.convert(tmp_path / "script.pt", tmp_path / "weights.safetensors")
    found = ckptconv.diff(tmp_path / "script.pt", tmp_path / "weights.safetensors")
    assert found.same and found.tensors == 2 and any("code" in note for note in found.notes)


# Reading


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list to which the file name and the length of each read are added."""
    done: list[tuple[str, int]] = []
    read, read_into = Source.read, Source.read_into

    def count(self: Source, offset: int, length: int) -> bytes:
        done.append((self.path.name, length))
        return read(self, offset, length)

    def count_into(self: Source, offset: int, buffer: memoryview) -> None:
        done.append((self.path.name, len(buffer)))
        read_into(self, offset, buffer)

    monkeypatch.setattr(Source, "read", count)
    monkeypatch.setattr(Source, "read_into", count_into)
    return done


def test_equal_checksums_are_not_read(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    """A storage with equal checksums in both files is not read, except with full=True. If one file has no checksum, the
    storage is read on both sides.
    """
    obj = {"w": torch.zeros(3_000_000, dtype=torch.uint8), "small": torch.zeros(70_000, dtype=torch.uint8)}
    a, b = saved(tmp_path / "a.pt", obj), saved(tmp_path / "b.pt", {**obj, "x": 1})
    found = ckptconv.diff(a, b)
    assert len(found.others) == 1
    assert found.notes == ("2 storages have equal checksums in both files and were not read; full=True reads them",)
    assert sum(length for _, length in reads) < 300_000
    reads.clear()
    assert not ckptconv.diff(a, b, full=True).notes
    for name in ("a.pt", "b.pt"):
        assert sum(length for file, length in reads if file == name) > 3_070_000
    other = bare(tmp_path / "bare.pt", obj)
    reads.clear()
    found = ckptconv.diff(a, other)
    assert found.same and not found.notes
    for name in ("a.pt", "bare.pt"):
        assert 3_070_000 <= sum(length for each, length in reads if each == name) < 3_200_000


def test_a_tie_is_read_once(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    """A tensor with several names, and equal views of one storage, are read once."""
    w = torch.zeros(1000, 1000)
    obj = {"a": w, "b": w, "t": w.t(), "again": w.t()}
    a, b = bare(tmp_path / "a.pt", obj), bare(tmp_path / "b.pt", obj)
    assert ckptconv.diff(a, b).same
    assert sum(length for name, length in reads if name == "a.pt") < 4_200_000


def test_torch_is_not_imported_for_equal_files(tmp_path: Path) -> None:
    """Comparing equal files does not import torch, also for equal views of equal storages. Comparing different bytes
    does.
    """
    obj = {"w": torch.zeros(9), "t": torch.arange(6.0).view(2, 3).t()}
    a, b = bare(tmp_path / "a.pt", obj), bare(tmp_path / "b.pt", obj)
    ckptconv.convert(a, tmp_path / "c.pkl", format="pickle")
    other = saved(tmp_path / "other.pt", {**obj, "w": torch.ones(9)})
    code = "import sys, ckptconv; d = ckptconv.diff(*sys.argv[1:]); print(d.same, 'torch' in sys.modules)"
    for pair, expected in (((a, b), "True False"), ((a, tmp_path / "c.pkl"), "True False"), ((a, other), "False True")):
        done = subprocess.run([sys.executable, "-c", code, *pair], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_deflated_and_big_endian_storages(tmp_path: Path) -> None:
    """Deflated storages and big-endian numbers are the same as their plain versions. Equal bytes in two byte orders are
    different numbers.
    """
    obj = {"w": torch.arange(100_000.0), "t": torch.arange(6.0).view(2, 3).t(), "n": torch.arange(5)}
    plain = saved(tmp_path / "plain.pt", obj)
    deflated = in_deflated_records(tmp_path / "deflated.pt", obj)
    assert ckptconv.diff(bare(tmp_path / "bare.pt", obj), deflated).same
    big = big_endian(plain, tmp_path / "big.pt", {"0": 4, "1": 4, "2": 8})
    assert ckptconv.diff(plain, big).same
    misread = rezip(plain, tmp_path / "misread.pt", {"byteorder": b"big"})
    assert {each.path for each in ckptconv.diff(plain, misread).differing} == {"w", "t", "n"}
    changed = saved(tmp_path / "changed.pt", {**obj, "w": obj["w"] + (obj["w"] == 7), "t": obj["t"] + 1})
    for other in (deflated, big):
        found = ckptconv.diff(other, changed).differing
        assert [(each.path, each.values and each.values.differing) for each in found] == [("w", 1), ("t", 6)]


# Parts, names, suggestions


@pytest.mark.parametrize(
    ("a", "b", "flags"),
    [
        (run(), run()["model"], ["--select", "model"]),
        (run()["model"], run(), ["--select", "model"]),
        (
            {f"module.{name}": tensor for name, tensor in run()["model"].items()},
            dict(run()["model"]),
            ["--strip-prefix", "module."],
        ),
        (
            dict(run()["model"]),
            {f"net.{name}": tensor for name, tensor in run()["model"].items()},
            ["--add-prefix", "net."],
        ),
        (
            {"model": {f"module.{name}": tensor for name, tensor in run()["model"].items()}},
            {"model": dict(run()["model"])},
            ["--strip-prefix", "module."],
        ),
        (
            {"ema": {f"a b.{name}": tensor for name, tensor in run()["model"].items()}},
            dict(run()["model"]),
            ["--select", "ema", "--strip-prefix", "a b."],
        ),
        (
            {name.replace(".", "._orig_mod."): tensor for name, tensor in run()["model"].items()},
            dict(run()["model"]),
            ["--unwrap"],
        ),
    ],
)
def test_names_without_matches_give_a_suggestion(
    a: Any, b: Any, flags: list[str], tmp_path: Path, command: Command
) -> None:
    """If no name matches, ``diff`` prints a command that compares the two files. The command works as printed, and
    finds that all tensors are the same.
    """
    said = command("diff", saved(tmp_path / "a a.pt", a), saved(tmp_path / "b.pt", b), status=1).out
    (line,) = [line for line in said.splitlines() if line.startswith("    ckptconv diff ")]
    words = shlex.split(line)
    assert words[4:] == flags
    found = command.json(*words[1:])
    assert found["tensors"] == 7 and not (found["differing"] or found["only_in_a"] or found["only_in_b"])


def test_unrelated_names_give_no_suggestion(tmp_path: Path) -> None:
    """There is no suggestion if the names of the two files are unrelated."""
    a, b = saved(tmp_path / "a.pt", {"x.w": torch.ones(1)}), saved(tmp_path / "b.pt", {"y": torch.ones(1)})
    assert ckptconv.diff(a, b).suggestion is None


def test_edits_are_those_of_convert(tmp_path: Path) -> None:
    """An edit gives the same findings as ``diff`` between the converted files."""
    a, b = saved(tmp_path / "a.pt", run()), saved(tmp_path / "b.pt", run()["model"])
    edits: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"state_dict": True}, {}),
        ({"select": "model"}, {"exclude": "1.*"}),
        ({"select": "model"}, {"include": ["0.*"]}),
        ({"select": "model", "rename": [("^0", "zero")]}, {}),
        ({"select": "model", "add_prefix": "module"}, {}),
    ]
    for of_a, of_both in edits:
        ckptconv.convert(a, tmp_path / "c.pt", **of_a, **of_both, force=True)
        ckptconv.convert(b, tmp_path / "d.pt", **of_both, force=True)
        direct, through = ckptconv.diff(a, b, **of_a, **of_both), ckptconv.diff(tmp_path / "c.pt", tmp_path / "d.pt")
        assert findings(direct) == findings(through), (of_a, of_both)
    assert ckptconv.diff(a, b, state_dict=True).same


def changed_run(**parts: Any) -> dict[str, Any]:
    """Return a later checkpoint of the training run with other weights, another optimizer state, and the additional
    `parts`.
    """
    later = run()
    later["model"]["1.bias"].add_(1)
    later["optimizer"]["state"][0]["step"].add_(1)
    return {**later, "epoch": 4, **parts}


def test_parts_of_a_conversion(tmp_path: Path) -> None:
    """A selected part of a training checkpoint is the same in its safetensors file, on either side."""
    b = saved(tmp_path / "b.pt", changed_run(more=torch.ones(1)))
    ckptconv.convert(b, tmp_path / "b.safetensors")
    assert findings(ckptconv.diff(b, tmp_path / "b.safetensors", include="1.*")) == []
    assert ckptconv.diff(tmp_path / "b.safetensors", b, include="1.*").tensors == 5


TIED, ONES, OTHERS = torch.arange(4.0), torch.ones(1), torch.ones(2)
TEXTS = ["a", "b"]
SHARED = {"w": torch.ones(2)}
#: 0 and 8 have the same place in a set of eight slots, so each set keeps the order in which they were added.
EIGHTS = {0, 8}, set([8, 0])  # noqa: C405
LATER = changed_run(more=torch.ones(1))
BIAS = [("1.bias", "values")]


def wrapper(device: str, number: float) -> dict[str, torch.Tensor]:
    return {"w": zoo.WrapperTensor(torch.full((2,), number), device)}


#: A, B, the keywords, the findings, and the notes.
PAIRS: dict[str, tuple[Any, Any, dict[str, Any], list[tuple[str, str]], list[str]]] = {
    "the order of keys, and of a set's members, does not count": (
        {"x": ONES, "y": 2, "s": {"a", "b", 1, (2, 3)}},
        {"s": {(2, 3), 1, "b", "a"}, "y": 2, "x": ONES},
        {},
        [],
        [],
    ),
    "nor does it where hashes are one": ([ONES, EIGHTS[0]], [ONES, EIGHTS[1]], {}, [], []),
    "nor in a frozenset": ([ONES, {frozenset((0, 8))}], [ONES, {frozenset((8, 0))}], {}, [], []),
    "another member": (
        {"x": ONES, "s": {"a", (2, 3)}},
        {"x": ONES, "s": {"a", (2, 4)}},
        {},
        [("s", "object of __builtin__.set → object of __builtin__.set, but not the same")],
        [],
    ),
    "what one shares and the other has twice": (
        {"x": TIED, "y": TIED, "one": TEXTS, "two": TEXTS},
        {"x": TIED, "y": TIED.clone(), "one": TEXTS, "two": [*TEXTS]},
        {},
        [],
        ["tied only in A: y = x"],
    ),
    "ties by the names that were edited": (
        {"module.x": TIED, "module.y": TIED},
        {"x": TIED, "y": TIED.clone()},
        {"strip_prefix": "module."},
        [],
        ["tied only in A: y = x"],
    ),
    "ties of the other side, in a part": (
        {"model": {name: torch.ones(2) for name in "xyz"}},
        {"model": {"x": torch.ones(2), "y": OTHERS, "z": OTHERS}},
        {"select": "model"},
        [],
        ["tied only in B: z = y"],
    ),
    "a dict under two names": (
        {"m": SHARED, "ema": SHARED},
        {"m": SHARED, "ema": {"w": torch.full((2,), 3.0)}},
        {},
        [("ema/w", "values")],
        [],
    ),
    "a wrapper's device stands among the arguments that are compared": (
        wrapper("cuda:0", 1.0),
        wrapper("cuda:1", 1.0),
        {},
        [("w", "device")],
        [],
    ),
    "what is wrapped is compared under its own name": (
        wrapper("cuda:0", 1.0),
        wrapper("cuda:0", 2.0),
        {},
        [("w/.inner", "values")],
        [],
    ),
    "names only: no value is read": (
        {"x": torch.ones(2), "y": torch.ones(2), "n": 1},
        {"x": torch.zeros(3).half(), "z": torch.ones(2), "n": 2},
        {"names_only": True},
        [("y", "only_in_a"), ("z", "only_in_b")],
        [],
    ),
    **{
        f"parts are taken of both: {keywords}": (run(), LATER, keywords, expected, [])
        for keywords, expected in (
            ({"select": "model"}, BIAS),
            ({"select": "model", "state_dict": True}, BIAS),
            ({"state_dict": True}, BIAS),
            ({"state_dict": True, "include": "1.*"}, BIAS),
            ({"state_dict": True, "exclude": "1.*"}, []),
            ({"select": "optimizer"}, [("state[0]/step", "values")]),
            ({"select": "model", "exclude": ["1.b*", "0.*"], "rename": [("^1", "1")]}, []),
        )
    },
}


@pytest.mark.parametrize("case", PAIRS)
def test_differences_and_notes(case: str, tmp_path: Path) -> None:
    """``diff`` reports the expected findings and notes for each pair of files and keywords."""
    a, b, keywords, expected, notes = PAIRS[case]
    found = ckptconv.diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b), **keywords)
    assert (findings(found), remarks(found), found.same) == (expected, notes, not expected)


STATE = dict(run()["model"])
BARE = "B has nothing at model, so all of B is compared"
#: A, B, the keywords, the notes, and the numbers of tensors in both, only in A, and only in B.
LACKING: dict[str, tuple[Any, Any, dict[str, Any], list[str], tuple[int, int, int]]] = {
    "nothing at the path": ({"model": STATE}, STATE, {"select": "model"}, [BARE], (7, 0, 0)),
    "nothing at the path, and no state dict is taken": (
        {name: {"w": torch.ones(1)} for name in ("model", "ema", "other")},
        STATE,
        {"select": "ema", "state_dict": True},
        ["B has nothing at ema, so all of B is compared"],
        (0, 1, 7),
    ),
    "no state dict": (
        {"model": STATE},
        [torch.ones(1)],
        {"state_dict": True},
        ["B has no state dict, so all of B is compared"],
        (0, 7, 1),
    ),
    "no such name": (
        STATE,
        {name: {"w": torch.ones(1)} for name in ("model", "ema", "other")},
        {"include": "0.*"},
        ["no name in B matches '0.*', so all of B is compared"],
        (0, 2, 3),
    ),
    "of several globs those count that mean something there": (
        {**STATE, "head.w": torch.ones(1)},
        STATE,
        {"exclude": ["head.*", "0.*"]},
        ["no name in B matches 'head.*'"],
        (5, 0, 0),
    ),
    "what one of them means in A alone is there alone": (
        {**STATE, "head.w": torch.ones(1)},
        STATE,
        {"include": ["head.*", "1.*"]},
        ["no name in B matches 'head.*'"],
        (5, 1, 0),
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_b_without_the_selected_part_is_compared_as_a_whole(case: str, tmp_path: Path) -> None:
    """If B does not have the selected path, a state dict, or a matching name, all of B is compared, and a note reports
    this.
    """
    a, b, keywords, notes, (both, only_in_a, only_in_b) = LACKING[case]
    found = ckptconv.diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b), **keywords)
    assert (remarks(found), found.tensors) == (notes, both)
    assert (len(found.only_in_a), len(found.only_in_b)) == (only_in_a, only_in_b)
    assert found.same == (not only_in_a and not only_in_b)


def test_safetensors_has_nothing_at_a_path(tmp_path: Path) -> None:
    """A safetensors file has no paths to select, so it is compared as a whole."""
    save_file(STATE, tmp_path / "b.safetensors")
    found = ckptconv.diff(saved(tmp_path / "a.pt", {"model": STATE}), tmp_path / "b.safetensors", select="model")
    assert found.same and remarks(found) == [BARE]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--strip-prefix", "module.", "--rtol", "0.5"], "options that change names apply to the first file"),
        (["--rename", "^module[.]", ""], "options that change names apply to the first file"),
        (["--include", "module.0.*"], "only the first file must contain it"),
    ],
)
def test_an_edit_that_only_b_can_have(flags: list[str], hint: str, tmp_path: Path, command: Command) -> None:
    """If an edit applies only to B, the error suggests the command, or in Python the call, with the files in the other
    order. Both work as printed.
    """
    plain = saved(tmp_path / "a plain.pt", run()["model"])
    ddp = saved(tmp_path / "ddp.pt", {f"module.{name}": tensor for name, tensor in run()["model"].items()})
    said = command("diff", plain, ddp, *flags, status=2).err
    before, _, advised = in_one_line(said).strip().partition("ckptconv diff ")
    assert before.endswith(f"; {hint}: ") and before.startswith(f"ckptconv: {plain}: no name ")
    assert shlex.split(advised) == [str(ddp), str(plain), *flags]
    assert status(*shlex.split(advised), "-q") in (0, 1)
    if "module." in flags:
        with pytest.raises(ckptconv.NoMatchError) as caught:
            ckptconv.diff(plain, ddp, strip_prefix="module.")
        before, _, call = str(caught.value.hint).partition(": ")
        assert before == hint and not eval(call).only_in_b


def test_unwrap_without_effect_gives_a_suggestion(tmp_path: Path) -> None:
    """If only the second file is wrapped, ``unwrap`` changes nothing, and the suggested command adds the prefix. The
    command works.
    """
    plain = saved(tmp_path / "plain.pt", run()["model"])
    ddp = saved(tmp_path / "ddp.pt", {f"module.{name}": tensor for name, tensor in run()["model"].items()})
    suggestion = ckptconv.diff(plain, ddp, unwrap=True).suggestion
    assert suggestion and suggestion.endswith(f"plain.pt {ddp} --add-prefix module.")
    assert status(*shlex.split(suggestion)[2:], "-q", "--names-only") == 0


def test_texts_of_safetensors(tmp_path: Path) -> None:
    """The texts in the metadata of two safetensors files are compared, except for a format that only one file
    contains.
    """
    tensors = {"w": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "step": "1"})
    save_file(tensors, tmp_path / "b.safetensors", {"step": "2"})
    found = ckptconv.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.others == (OtherDifference("__metadata__/step", "'1'", "'2'"),)


def test_a_header_whose_length_starts_like_a_pickle(tmp_path: Path) -> None:
    """A safetensors file with a header of 640 bytes starts with 80 02 like a pickle, but is read as safetensors."""
    path = tmp_path / "a.safetensors"
    for n in range(400, 640):
        save_file({"w": torch.ones(2)}, path, {"text": "x" * n})
        if path.read_bytes()[:8] == (640).to_bytes(8, "little"):
            break
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert ckptconv.diff(path, path).same


# Exit status, errors, output


def test_errors_exit_with_status_two(tmp_path: Path, command: Command) -> None:
    """A missing or truncated file, a folder, a pattern without a match, and an invalid option give the exit status 2
    and a message, also with -q.
    """
    good = saved(tmp_path / "good.pt", run())
    cut = tmp_path / "cut.pt"
    cut.write_bytes(good.read_bytes()[:-300])
    for args in (
        [good, tmp_path / "missing.pt"],
        [cut, good],
        [good, cut],
        [good, tmp_path],
        [good, good, "--exclude", "nothing*"],
        [good, good, "--rtol", "x"],
        [good, good, "--rtol", "-1"],
        [good],
        [good, tmp_path / "missing.pt", "--debug"],
    ):
        assert command("diff", *args, "-q", status=2).err


def test_a_crash_is_not_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status 1 always means that the files differ. An unexpected exception gives 2."""
    good = saved(tmp_path / "good.pt", {"w": torch.ones(1)})
    monkeypatch.setattr("ckptconv.cli.diff.compare", lambda *args, **kwargs: 1 / 0)
    assert status(good, good) == 2


def test_a_file_that_changes_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is truncated during the comparison is reported as changed, also if another thread reads it."""
    a, b = (bare(tmp_path / name, {"w": torch.zeros(9_000_000)}) for name in ("a.pt", "b.pt"))
    read_into = Source.read_into

    def cut(self: Source, offset: int, buffer: memoryview) -> None:
        if self.path == b:
            with b.open("r+b") as file:
                file.truncate(1000)
        read_into(self, offset, buffer)

    monkeypatch.setattr(Source, "read_into", cut)
    with pytest.raises(ckptconv.InputChangedError):
        ckptconv.diff(a, b)


def test_a_view_with_too_many_elements(tmp_path: Path) -> None:
    """A view with too many elements is refused if its elements must be read one by one. If the storages are equal, the
    views are the same.
    """
    shape = (1 << 20, 1 << 20)
    a = saved(tmp_path / "a.pt", {"w": torch.ones(1 << 21).as_strided(shape, (1, 1))})
    b = saved(tmp_path / "b.pt", {"w": torch.zeros(1 << 21).as_strided(shape, (1, 1))})
    assert ckptconv.diff(a, a).same
    with pytest.raises(ckptconv.LimitError, match="w has too many elements"):
        ckptconv.diff(a, b)


def test_repeated_values_are_compared_once(tmp_path: Path) -> None:
    """Elements that both sides repeat are compared once, but counted as often as they occur."""
    a = saved(tmp_path / "a.pt", {"w": torch.tensor([[1.0], [2.0]]).expand(2, 1 << 40)})
    b = saved(tmp_path / "b.pt", {"w": torch.tensor([[1.0], [3.0]]).expand(2, 1 << 40)})
    (only,) = ckptconv.diff(a, b).differing
    assert only.values == ValueDifference(1 << 41, 1 << 40, 1.0, 1 / 3, relative_to_max=1 / 3)
    c = bare(tmp_path / "c.pt", {"w": torch.tensor([[1.0], [2.0]]).expand(2, 1 << 40)}, tags=("cuda:0",))
    assert ckptconv.diff(a, c).differing[0].values == ValueDifference(1 << 41, 0)


@pytest.mark.parametrize("deflated", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_many_views_of_one_storage(step: int, deflated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal storages are compared once for all their views, and so are contiguous views that overlap. For other views,
    the number of bytes that may be read is limited.
    """
    numbers, files = torch.arange(3000.0), {}
    for name, changed in (("a", -1), ("same", -1), ("b", 1500)):
        storage = torch.where(torch.arange(3000) == changed, 7.0, numbers)
        obj = {f"w{i}": storage[i : 2000 + i : step] for i in range(100)}
        is_deflated = deflated and name != "same"
        files[name] = (in_deflated_records if is_deflated else bare)(tmp_path / f"{name}.pt", obj)
    found = ckptconv.diff(files["a"], files["b"])
    assert len(found.differing) == (100 if step == 1 else 50)
    assert all(each.values and each.values.differing == 1 for each in found.differing)
    monkeypatch.setattr("ckptconv.inspection.values.LIMITS", replace(LIMITS, gathered_bytes=10_000, gathered_ratio=10))
    assert ckptconv.diff(files["a"], files["same"]).same
    if step == 1 and not deflated:
        assert ckptconv.diff(files["a"], files["b"]).differing == found.differing
        return
    with pytest.raises(ckptconv.LimitError, match="have too many elements for their storages"):
        ckptconv.diff(files["a"], files["b"])


def test_no_room_to_inflate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deflated tensor that must be read at random positions needs temporary space. The error reports missing space,
    or the folder that cannot be written, and the necessary size.
    """
    a = bare(tmp_path / "a.pt", {"t": torch.arange(1_000_000.0).view(1000, 1000)})
    in_deflated_records(tmp_path / "b.pt", {"t": torch.arange(1_000_000.0).view(1000, 1000).t()})
    assert status(a, tmp_path / "b.pt", "-q") == 1
    done = ckptconv_with_small_files(100_000, "diff", a, tmp_path / "b.pt", "-q", TMPDIR=str(tmp_path))
    assert done.returncode == 2
    said = done.stderr
    assert said.startswith(
        f"ckptconv: {tmp_path}: compressed data of {tmp_path}/b.pt cannot be unpacked to a temporary file "
    )
    assert "expected 4,000,000 bytes temporarily, got File too large" in said and "set TMPDIR" in said
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ckptconv.OutputError, match=r"No such file.*set TMPDIR"):
        ckptconv.diff(a, tmp_path / "b.pt")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # a folder without free space
    with pytest.raises(ckptconv.OutputError, match=r"not enough free space .*4,000,000.*got 0 bytes"):
        ckptconv.diff(a, tmp_path / "b.pt")


def test_rings_of_different_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of different lengths are compared once at each pair of positions. A comparison that would take too long is
    refused.
    """

    def ring(n: int) -> list[Any]:
        links: list[list[Any]] = [[] for _ in range(n)]
        for i, link in enumerate(links):
            link.append(links[(i + 1) % n])
        return links[0]

    a, b = (saved(tmp_path / f"{n}.pt", [torch.ones(1), ring(n)]) for n in (61, 67))
    assert ckptconv.diff(a, b).same
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=10_000, work_each=1))
    assert ckptconv.diff(a, a).same
    with pytest.raises(ckptconv.LimitError, match="take too much work"):
        ckptconv.diff(a, b)


def test_a_long_text_at_many_paths_is_read_once(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    """A long string that occurs many times is read once, so a small file cannot cause a large amount of reading."""
    text = "x" * 1_000_000
    a, b = (saved(tmp_path / f"{n}.pt", [torch.ones(1), *[text] * 200]) for n in "ab")
    assert ckptconv.diff(a, b).same
    assert sum(length for name, length in reads if name == "a.pt") < 5_000_000


def test_json_is_json(tmp_path: Path, command: Command) -> None:
    """The JSON output contains the versioned fields, integers for sizes, and no literals that JSON does not have."""
    a = saved(tmp_path / "a.pt", {"w": torch.tensor([1.0, float("nan")]), "x": torch.ones(2), "e": float("nan")})
    b = saved(tmp_path / "b.pt", {"w": torch.tensor([float("inf"), float("nan")]), "y": torch.ones(2), "e": 1})
    found = command.json("diff", a, b, status=1)
    assert (
        found["schema_version"] == 1
        and found["same"] is False
        and found["tensors"] == 1
        and found["nbytes"] == 8
        and found["near"] == 0
    )
    assert found["differing"] == [
        {
            "path": "w",
            "dtype": None,
            "shape": None,
            "device": None,
            "requires_grad": None,
            "class_name": None,
            "made_of": None,
            "values": {
                "elements": 2,
                "differing": 1,
                "not_finite": 1,
                "not_finite_in": [0, 1],
                "largest": 0.0,
                "largest_relative": 0.0,
                "relative_to_max": 0.0,
            },
            "rng_state": False,
        }
    ]
    assert found["only_in_a"] == [{"path": "x", "dtype": "float32", "shape": [2], "nbytes": 8, "tied_to": None}]
    assert found["others"] == [{"path": "e", "a": "nan", "b": "1"}]
    assert command.json("diff", a, b, "-q", status=1) == found
    c, d = saved(tmp_path / "c.pt", {"w": torch.ones(1)}), saved(tmp_path / "d.pt", {"w": torch.zeros(1)})
    (only,) = command.json("diff", c, d, status=1)["differing"]
    assert only["values"]["largest_relative"] == only["values"]["relative_to_max"] == "inf"


@pytest.mark.parametrize("is_compressed", [False, True])
def test_relative_to_the_largest_of_b(tmp_path: Path, is_compressed: bool) -> None:
    """The largest difference is divided by the largest magnitude in all of B, including the parts of B that do not
    differ.
    """
    n = 1 << 19  # in both files, a large buffer is equal before the one that differs
    wave = torch.linspace(-1, 1, n)
    changes: dict[str, tuple[torch.Tensor, int | complex, float]] = {
        "float": (wave, 8, 0.5 / 8),
        "bfloat16": (torch.zeros(n, dtype=torch.bfloat16), -4, 0.5 / 4),
        "infinite": (torch.where(wave == 1, torch.inf, 0.25), 2, 0.5 / 2),
        "complex": (wave * 1j, 3 + 4j, 0.5 / 5),
        "whole": (torch.zeros(n, dtype=torch.int64), -(1 << 62), 1 / (1 << 62)),
        "bytes": (torch.zeros(n, dtype=torch.uint8), 250, 1 / 250),
    }
    a = {}
    b = {}
    for name, (values, largest, _) in changes.items():
        b[name] = values.clone()
        b[name][1] = largest
        a[name] = b[name].clone()
        a[name][n - 5] += 0.5 if values.is_floating_point() or values.is_complex() else 1
    paths = [saved(tmp_path / f"{name}.pt", obj) for name, obj in (("a", a), ("b", b))]
    if is_compressed:
        for path in paths:
            rezip(path, path, method=zipfile.ZIP_DEFLATED)
    found = {each.path: each.values for each in ckptconv.diff(*paths).differing}
    assert found.keys() == changes.keys()
    for name, (_, _, relative) in changes.items():
        assert found[name].differing == 1 and found[name].relative_to_max == pytest.approx(relative, rel=1e-2), name


def test_the_largest_of_overlapping_views_is_looked_for_within_bounds(
    tmp_path: Path, reads: list[tuple[str, int]]
) -> None:
    """If overlapping views of A are compared with one view of B, the search for the largest magnitude stops at a limit.
    The figure is then None, and the comparison continues.
    """
    paths, n = [], 600_000
    for name, last, step in (("a", 2.0, 1), ("b", 1.0, 0)):
        base = torch.full((n + 60,), 2.0)
        base[n - 1 :] = last
        paths.append(saved(tmp_path / f"{name}.pt", {str(i): base[i * step : i * step + n] for i in range(60)}))
    found = ckptconv.diff(*paths).differing
    assert len(found) == 60 and all(each.values and each.values.largest == 1 for each in found)
    said = [each.values.relative_to_max for each in found if each.values]
    assert said[0] == 0.5 and said[-1] is None
    assert sum(length for _, length in reads) < 145 * paths[0].stat().st_size


def example(tmp_path: Path) -> Difference:
    """Return a difference with every kind of finding."""
    state = OrderedDict(
        (f"layers.{i}.{part}", torch.full((2, 2), float(i))) for i in range(12) for part in ("weight", "bias")
    )
    other = OrderedDict((name, tensor + 1e-3) for name, tensor in state.items() if name != "layers.11.bias")
    other["layers.0.bias"] = other["layers.0.bias"].bfloat16()
    other["layers.1.bias"] = torch.zeros(3)
    other["layers.2.weight"][0, 0] = float("nan")
    other["layers.3.weight"].fill_(float("inf"))
    other["layers.9.weight"][1] += 1
    steps, states = torch.tensor(1000), [torch.Generator().manual_seed(seed).get_state() for seed in (0, 1)]
    other["a\x1b[31mname.that.is.longer.than.most." + "self_attn.projection." * 3 + "weight"] = torch.ones(2, 3)
    saved(
        tmp_path / "a.pt",
        {
            "model": state,
            "epoch": 1,
            "args": {"lr": 0.1},
            "tied": [state["layers.0.weight"]],
            "steps": steps,
            "rng_state": states[0],
        },
    )
    saved(
        tmp_path / "b.pt",
        {
            "model": other,
            "epoch": 2,
            "args": [],
            "tied": [other["layers.0.weight"]],
            "steps": steps * 2,
            "rng_state": states[1],
        },
    )
    found = ckptconv.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    return Difference(**{**vars(found), "a": "a.pt", "b": "b.pt"})


@pytest.mark.parametrize(
    ("name", "look"), [("80", Style(width=80)), ("piped", Style()), ("ascii", Style(width=60, unicode=False))]
)
def test_text(name: str, look: Style, tmp_path: Path) -> None:
    """The text begins with the result, followed by one group after the other. On a terminal no line is too wide, and
    all characters are printable.
    """
    lines = list(difference_lines(example(tmp_path), look))
    assert "\n".join([*lines, ""]) == (GOLDEN / f"diff_{name}.txt").read_text()
    assert all(line.isprintable() for line in lines)
    assert look.width is None or max(map(len, lines)) <= look.width


def test_full_finds_what_a_checksum_hides(tmp_path: Path, command: Command) -> None:
    """``--full`` finds damage in a record whose checksum is that of the undamaged record. It cannot be combined with
    ``--names-only``.
    """
    path = saved(tmp_path / "a.pt", {"w": torch.zeros(1000)})
    data = path.read_bytes()
    (tmp_path / "b.pt").write_bytes(flipped(data, data_of(data, "a/data/0") + 100))
    command("diff", path, tmp_path / "b.pt", out="--full reads it\n")
    command("diff", path, tmp_path / "b.pt", "--full", status=1, out="values of 1 tensor")
    command("diff", path, path, "--full", out="the same")
    command("diff", path, path, "--full", "--names-only", status=2, err="--names-only and --full cannot be combined")


def test_text_of_equal_checkpoints(tmp_path: Path, command: Command) -> None:
    """Equal files give one line, and a note about storages that were not read. A pipe and -v list all findings, a
    terminal lists some, and -q lists nothing.
    """
    a, b = (
        saved(tmp_path / "a.pt", {"w": torch.zeros(1000)}),
        saved(tmp_path / "b.pt", {f"w{i}": torch.zeros(1) for i in range(60)}),
    )
    assert command("diff", a, a).out == (
        "the same: 1 tensor, 4 kB\n"
        "  note          1 storage has equal checksums in both files and was not read; --full reads it\n"
    )
    assert command("diff", bare(tmp_path / "c.pt", {"w": torch.zeros(1000)}), a).out == "the same: 1 tensor, 4 kB\n"
    assert command("diff", a, a, "--names-only").out == "the same: 1 name\n"
    piped = command("diff", a, b, status=1).out
    assert len(piped.splitlines()) > 60
    assert command("diff", a, b, "-v", status=1).out == piped
    found = ckptconv.diff(a, b)
    lines = list(difference_lines(found, Style(width=80)))
    assert len(lines) < 20 and "    … 52 more (-v lists all)" in lines
    assert len(list(difference_lines(found, Style(width=80), everything=True))) > 60
    assert command("diff", a, b, "-q", status=1).out == ""


VALUES = {"w": torch.ones(2), "v": torch.ones(2), "n": torch.tensor(1)}
NEAR = torch.full((2,), 1.001)
WITHIN = "different: dtype of 1 tensor; all values within the tolerance; 3 tensors in both"


@pytest.mark.parametrize(
    ("a", "b", "keywords", "answer"),
    [
        ({}, {"w": torch.ones(2).half()}, {}, "different: dtype of 1 tensor; all values equal; 3 tensors in both"),
        ({}, {"w": NEAR.half()}, {"rtol": 0.1}, WITHIN),
        ({"w": NEAR}, {"v": torch.ones(2).double()}, {"rtol": 0.1}, WITHIN),
        ({}, {"epoch": 3}, {}, "different: 1 value that is not a tensor; all values equal; 3 tensors in both"),
        ({}, {"w": torch.zeros(2)}, {}, None),
        ({}, {"w": torch.ones(3)}, {}, None),
        ({}, {"more": torch.ones(1)}, {"names_only": True}, None),
    ],
    ids=["dtype", "near", "one near, one of another dtype", "another thing", "values", "shape", "names only"],
)
def test_the_answer_reports_equal_values(
    a: Any, b: Any, keywords: dict[str, Any], answer: str | None, tmp_path: Path
) -> None:
    """The first line reports that all values are equal, or within the tolerance, if only other things differ. It does
    not if some values were not compared, or with names only.
    """
    files = saved(tmp_path / "a.pt", {**VALUES, **a}), saved(tmp_path / "b.pt", {**VALUES, **b})
    first = next(difference_lines(ckptconv.diff(*files, **keywords), names_only=keywords.get("names_only", False)))
    assert first == answer if answer else "all values" not in first


def test_values_are_listed_by_importance(tmp_path: Path) -> None:
    """Values are listed in this order: NaN on only one side, the largest differences, integers, and the state of a
    random generator, which has no distance.
    """
    rng = torch.get_rng_state()
    ones = {name: torch.ones(2) for name in ("far", "near", "nan")}
    state = {"n": torch.tensor(1), "rng_state": rng, **ones}
    other = {
        "n": torch.tensor(100),
        "rng_state": rng ^ 255,
        "far": torch.full((2,), 9.0),
        "near": torch.full((2,), 1.5),
        "nan": torch.tensor([1.0, float("nan")]),
    }
    found = ckptconv.diff(saved(tmp_path / "a.pt", {"rng": state}), saved(tmp_path / "b.pt", {"rng": other}))
    assert {each.path for each in found.differing if each.rng_state} == {"rng/rng_state"}
    lines = list(difference_lines(found))
    at = next(i for i, line in enumerate(lines) if line.startswith("  values"))
    assert lines[at + 1 :] == [
        "    rng/nan  1 of 2  NaN or infinite in B",
        "    rng/far  2 of 2  8  88.9 %  0.889",
        "    rng/near  2 of 2  0.5  33.3 %  0.333",
        "    rng/n  1 of 1  99  99 %  0.99",
        "    rng/rng_state  state differs",
    ]


def test_keywords_of_a_wrong_type(tmp_path: Path) -> None:
    """Keywords of a wrong type raise TypeError before a file is opened. The errors for Python callers name keywords."""
    with pytest.raises(TypeError, match="names_only"):
        ckptconv.diff("a", "b", names_only="yes")  # type: ignore[arg-type]
    for wrong in ("x", None, True):
        with pytest.raises(TypeError, match="rtol must be a number"):
            ckptconv.diff("a", "b", rtol=wrong)  # type: ignore[arg-type]
    a = saved(tmp_path / "a.pt", {"x": {"w": torch.ones(1)}, "y": {"w": torch.ones(1)}})
    save_file({"w": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ckptconv.RefusedError, match="select='x'"):
        ckptconv.diff(a, tmp_path / "b.safetensors")
    with pytest.raises(
        ckptconv.RefusedError,
        match="say which with select=PATH; if the other file has nothing there, give this one first",
    ):
        ckptconv.diff(tmp_path / "b.safetensors", a)
    assert ckptconv.diff(a, tmp_path / "b.safetensors", select="x").same


def test_programs_without_weights(tmp_path: Path) -> None:
    """A TorchScript archive without tensors is the same as itself. A note reports that nothing else is compared."""
    (tmp_path / "a.pt").write_bytes(scripted(torch.nn.ReLU()))
    found = ckptconv.diff(tmp_path / "a.pt", tmp_path / "a.pt")
    assert found.same
    assert found.notes[0].startswith("neither has a tensor: only the weights of a TorchScript archive are compared")


def test_keys_that_are_equal_zeros(tmp_path: Path) -> None:
    """``0.0`` and ``-0.0`` are the same key, as in Python."""
    a, b = (saved(tmp_path / str(key), {key: torch.ones(2), (key, 1): 2}) for key in (0.0, -0.0))
    assert ckptconv.diff(a, b).same


def test_a_plain_pickle_that_python_wrote(tmp_path: Path) -> None:
    """The tensors and bytes in a pickle that Python wrote are the same as those in a file of torch."""
    obj = {
        "w": torch.arange(5.0),
        "b": b"\0\xff",
        "big": b"\1\xfe" * 50_000,
        "set": {1, "a"},
        "array": bytearray(b"xy"),
    }
    a = saved(tmp_path / "a.pt", obj, pickle_protocol=4)
    for protocol in (2, 4, 5):
        (tmp_path / "b.pkl").write_bytes(pickle.dumps(obj, protocol))
        assert ckptconv.diff(a, tmp_path / "b.pkl").same, protocol


def test_equal_changes_share_one_line(tmp_path: Path, command: Command) -> None:
    """Equal changes of all tensors, or of some, share one line. Other changes have their own lines, and -v lists every
    tensor.
    """
    state = {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(19)}
    a = saved(tmp_path / "a.pt", state)
    ckptconv.convert(a, tmp_path / "gpu.pt", map_location="cuda:0")
    (line,) = [
        line for line in command("diff", a, tmp_path / "gpu.pt", status=1).out.splitlines() if "device  " in line
    ]
    assert line == "  device        cpu → cuda:0 in all 19 tensors, values equal"
    listed = command("diff", a, tmp_path / "gpu.pt", "-v", status=1).out
    assert [f"    {name}  cpu → cuda:0  values equal" in listed for name in state] == [True] * 19
    casts = ["layers.1?.weight=bf16", "layers.3.weight=bf16", "layers.4.weight=fp16"]
    ckptconv.convert(a, tmp_path / "cast.pt", dtype=casts[:1])
    lines = command("diff", a, tmp_path / "cast.pt", status=1).out
    assert "  dtype         float32 → bfloat16 in layers.10.weight and 8 more, values equal\n" in lines
    ckptconv.convert(a, tmp_path / "casts.pt", dtype=casts)
    lines = command("diff", a, tmp_path / "casts.pt", status=1).out
    assert "  dtype         11 tensors\n    layers.3.weight and 9 more  float32 → bfloat16  values equal\n" in lines
    assert "    layers.4.weight  float32 → float16  values equal\n" in lines


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the length of each block that is compared as numbers is added."""
    lengths: list[int] = []
    add = Comparer.add

    def counted(self: Comparer, a: memoryview, b: memoryview) -> None:
        lengths.append(len(a))
        add(self, a, b)

    monkeypatch.setattr(Comparer, "add", counted)
    return lengths


def test_only_blocks_that_differ_are_computed_with(tmp_path: Path, added: list[int]) -> None:
    """If overlapping views differ in one element, only the block that contains it is compared as numbers, and only
    once.
    """
    for name, value in (("a.pt", 0), ("b.pt", 5)):
        storage = torch.zeros(40 * BLOCK, dtype=torch.int8)
        storage[20 * BLOCK] = value
        torch.save({f"w{i}": storage[i : i + 39 * BLOCK] for i in range(8)}, tmp_path / name)
    found = ckptconv.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [(each.values.differing, each.values.largest) for each in found.differing if each.values] == [(1, 5)] * 8
    assert added == [BLOCK]


@pytest.mark.parametrize("rtol", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_overlapping_views_are_computed_with_once(
    dtype: torch.dtype, rtol: float, tmp_path: Path, added: list[int]
) -> None:
    """In overlapping views that differ everywhere, each element is compared as a number once. Each view has the same
    results as in files without overlap.
    """
    torch.manual_seed(0)
    a, b = ((torch.randn(5000, 2) * 9).view(-1)[: 5000 * (1 + dtype.is_complex)] for _ in "ab")
    a, b = (x.view(dtype) if dtype.is_complex else x.to(dtype) for x in (a, b))
    if dtype.is_floating_point:
        a[100], b[200] = torch.nan, torch.inf
    views = [(start, start + size) for start in range(0, 4000, 171) for size in (1, 40, 900)]
    apart, together = [], []
    for name, x in (("a", a), ("b", b)):
        together.append(saved(tmp_path / f"{name}.pt", {str(at): x[slice(*at)] for at in views}))
        apart.append(saved(tmp_path / f"{name}1.pt", {str(at): x[slice(*at)].clone() for at in views}))
    found = {each.path: each.values for each in ckptconv.diff(*together, rtol=rtol, histogram=True).differing}
    assert sum(added) <= a.nbytes and len(found) > 60
    assert found == {each.path: each.values for each in ckptconv.diff(*apart, rtol=rtol, histogram=True).differing}
