"""``--compact`` removes only the bytes that no tensor uses. Values, strides, sharing, checksums and containers do not
change.
"""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptconv
from ckptconv.byteranges.sources import BytesSource
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.tensor_info import Storage
from ckptconv.edits.views import new_storage
from tests.support import zoo
from tests.support.archives import flip_bit, records_of, rezip
from tests.support.conversions import refused
from tests.support.hostile_bytes import found_in
from tests.support.judge import assert_same, refusal, tags_of
from tests.support.round_trips import round_trip
from tests.unit.edits.test_dtype_casts import (
    SOURCES,
    TARGETS,
    Program,
    again,
    assert_checksums,
    bits,
    checkpoint,
    extent,
    merged,
    rounded,
)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pt", "legacy", "pickle"])
@pytest.mark.parametrize("source", ["zip", "without checksums", "big-endian", "legacy", "memory"])
@settings(max_examples=min(settings().max_examples // 4, 300))
@given(seed=st.integers(0, 1 << 32))
def test_the_output_equals_that_of_a_simple_program(folder: Path, source: str, target: str, seed: int) -> None:
    """For each pair of containers, a storage is reduced to the extents of its views. Overlapping extents are merged and
    remain in order on the same storage. The report contains the number of removed bytes.
    """
    chance = random.Random(seed)
    write, name, others = SOURCES[source]
    obj = checkpoint(chance, others=others and target == "pt")
    dst = folder / TARGETS[target]
    options: dict[str, Any] = {"compact": True, "format": target, "force": True, "verify": chance.random() < 0.3}
    if write:
        write(obj, folder / name)
        report = ckptconv.convert(folder / name, dst, **options)
    else:
        report = ckptconv.save(obj, dst, **options)
    program = Program(obj, {}, compact=True)
    assert report.changes.compacted[1] == program.saved
    assert bool(report.changes.compacted[0]) == bool(program.saved)
    assert any("compact=True changed nothing" in note for note in report.notes) == (not program.saved)
    if target == "pickle":
        assert_same(pickle.loads(dst.read_bytes()), program.result)
        return
    assert_same(torch.load(dst, weights_only=False), again(program.result, folder / "wanted.pt"))
    if target == "pt":
        assert_checksums(dst, some=source != "without checksums")
    if write:
        assert refusal(dst) is None or refusal(folder / name)


# In each process, torch warns once that nested, quantized, compressed sparse and complex32 tensors are experimental or
# deprecated.
@pytest.mark.untraced
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo(name: str, tmp_path: Path) -> None:
    """Each tensor of each checkpoint in the zoo keeps its values, path, strides, tag and ties. Torch loads the output
    if it loads the input. A second run changes nothing.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    zoo.save(zoo.ZOO[name](), src, pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
    ckptconv.convert(src, dst, compact=True, verify=True)
    loaded = [torch.load(path, map_location="cpu", weights_only=False) for path in (src, dst)]
    assert refusal(dst) is None or refusal(src)
    assert tags_of(src)[1] == tags_of(dst)[1]
    # The storages of these contain more bytes than their tensors use.
    if name not in (
        "views",
        "small",
        "subclass",
        "conj_neg",
        "two_dtypes",
        "sparse",
    ):
        assert_same(*loaded)
    with ckptconv.open(src) as before, ckptconv.open(dst) as after:
        for path, info in before.tensors.items():
            new = after.tensors[path]
            for what in (
                "dtype",
                "kind",
                "shape",
                "stride",
                "device",
                "nbytes",
                "tied_to",
                "requires_grad",
                "conj",
                "neg",
            ):
                assert getattr(new, what) == getattr(info, what), (path, what)
            if info.kind == "strided":
                try:
                    one, two = before.load(path), after.load(path)
                except ckptconv.UnsupportedError:
                    continue
                assert bits(one.detach().resolve_conj().resolve_neg()) == bits(
                    two.detach().resolve_conj().resolve_neg()
                ), path
    report = ckptconv.convert(dst, tmp_path / "again.pt", compact=True)
    assert report.changes.compacted == (0, 0)
    assert (tmp_path / "again.pt").read_bytes() == dst.read_bytes()


def test_report_contains_storages_and_bytes(tmp_path: Path) -> None:
    """The report contains the number of storages that became smaller, and the number of removed bytes. The planned size
    is the size of the file.
    """
    base = torch.arange(1000.0)
    torch.save(
        {"a": base[10:20], "b": base[15:30], "c": base[500:501], "d": torch.ones(4)[1:], "e": torch.ones(2)},
        tmp_path / "src.pt",
    )
    planned = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", compact=True, dry_run=True)
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", compact=True)
    assert report.changes.compacted == planned.changes.compacted == (2, 4 * (1000 - 21) + 4)
    assert report.size == planned.size == (tmp_path / "dst.pt").stat().st_size


def test_two_dtypes_on_one_storage_keep_complete_elements(tmp_path: Path) -> None:
    """If two dtypes share a storage, the remaining ranges consist of complete elements of the wider dtype."""
    base = torch.arange(64, dtype=torch.uint8)
    obj = {"f8": base[3:5].view(torch.float8_e4m3fn), "u8": base[21:23], "u16": base[40:48].view(torch.uint16)[1:3]}
    found, _ = round_trip(tmp_path, obj, compact=True)
    assert [tensor.view(torch.uint8).tolist() for tensor in found.values()] == [[3, 4], [21, 22], [42, 43, 44, 45]]
    assert {tensor.untyped_storage().nbytes() for tensor in found.values()} == {4 + 4 + 4}


def test_a_deflated_storage_remains_complete(tmp_path: Path) -> None:
    """A deflated storage remains complete, because it can be read only from its start."""
    torch.save({"a": torch.arange(50.0)[:2]}, tmp_path / "src.pt")
    rezip(tmp_path / "src.pt", tmp_path / "src.pt", method=zipfile.ZIP_DEFLATED)
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", compact=True)
    assert report.changes.compacted == (0, 0)
    assert torch.load(tmp_path / "dst.pt")["a"].untyped_storage().nbytes() == 200


@pytest.mark.parametrize("used", [lambda t: t._typed_storage(), lambda t: [t._typed_storage(), t]])
def test_a_storage_with_other_references_remains_complete(used: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    """A storage remains complete if an object other than a tensor refers to it."""
    base = torch.arange(50.0)
    found, report = round_trip(tmp_path, {"a": base[:2], "x": used(base)}, compact=True)
    assert report.changes.compacted == (0, 0)
    assert_same(found, torch.load(tmp_path / "src.pt", weights_only=False))


def test_no_effect_on_safetensors(tmp_path: Path) -> None:
    """``compact`` has no effect on safetensors, which contains tensors and no storages. A note reports this."""
    found, report = round_trip(tmp_path, {"a": torch.arange(50.0)[:2]}, "dst.safetensors", compact=True)
    assert report.changes.compacted == (0, 0)
    assert report.notes == ("compact=True has no effect on safetensors, which stores only bytes that tensors use",)
    assert found["a"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["dst.pt", "dst.pkl"])
@pytest.mark.parametrize("where", [0, 41, 20_000, -1])
@pytest.mark.parametrize(
    "edits", [{"compact": True}, {"compact": True, "dtype": "bf16"}, {"compact": True, "dtype": ["bf16", "b=fp16"]}]
)
def test_damage_is_seen(edits: dict[str, Any], where: int, name: str, tmp_path: Path) -> None:
    """Damage is reported also in bytes that would be removed, and no output is written."""
    base = torch.arange(50_000.0)
    torch.save({"a": base[10:30000], "b": base[40000:40010]}, tmp_path / "src.pt")
    src, raw = tmp_path / "src.pt", base.numpy().tobytes()
    flip_bit(src, found_in(src.read_bytes(), raw) + where % len(raw))
    refused(ckptconv.MalformedError, "damaged", tmp_path / "src.pt", tmp_path / name, **edits)
    assert os.listdir(tmp_path) == ["src.pt"]


@pytest.mark.parametrize("dtype", ["bf16", ["bf16", "b=fp16"], {"a": "fp64", "c": "fp16"}])
def test_with_a_cast(dtype: Any, tmp_path: Path) -> None:
    """``compact`` together with a cast gives the same result as the cast followed by ``compact``."""
    base = torch.arange(3000.0)
    state = {"a": base[10:2000].view(-1, 10).t(), "b": base[1990:2010], "c": base[2500:2501], "d": base[2005:2100:7]}
    torch.save(state, tmp_path / "src.pt")
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "at once.pt", dtype=dtype, compact=True, verify=True)
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "cast.pt", dtype=dtype)
    ckptconv.convert(tmp_path / "cast.pt", tmp_path / "cast first.pt", compact=True)
    found = torch.load(tmp_path / "at once.pt")
    assert_same(found, torch.load(tmp_path / "cast first.pt"))
    assert report.size == (tmp_path / "at once.pt").stat().st_size
    for name, tensor in found.items():
        assert torch.equal(tensor, rounded(state[name], tensor.dtype))
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in found.values()}
    for key, tensor in storages.items():
        views = [other for other in found.values() if other.untyped_storage()._cdata == key]
        assert merged(views) == [(0, tensor.untyped_storage().nbytes() // tensor.itemsize)]
        assert min(extent(view)[0] for view in views) == 0


def test_a_reference_counts_in_its_own_elements(tmp_path: Path) -> None:
    """The remaining size of a storage is counted in elements of the class in its reference. Here, uint16 data in a
    storage of doubles is reduced to 8 bytes.
    """
    base = torch.arange(64, dtype=torch.uint8).view(torch.uint16)[1:2]
    torch.save({"a": base}, tmp_path / "src.pt")
    pickled = records_of(tmp_path / "src.pt")["data.pkl"]
    pickled = pickled.replace(b"ctorch.storage\nUntypedStorage\n", b"ctorch\nDoubleStorage\n")
    assert pickled.count(b"DoubleStorage") == 1
    rezip(tmp_path / "src.pt", tmp_path / "src.pt", {"data.pkl": pickled.replace(b"K\x40", b"K\x08", 1)})
    assert torch.load(tmp_path / "src.pt")["a"].tolist() == base.tolist()
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", compact=True)
    assert report.changes.compacted == (1, 56)
    found = torch.load(tmp_path / "dst.pt")["a"]
    assert (found.tolist(), found.untyped_storage().nbytes()) == (base.tolist(), 8)


def test_keys_of_new_storages() -> None:
    """The key of a new storage differs from all existing keys, and no key is tried twice."""

    class Keys(dict[str, int]):
        tried = 0

        def __contains__(self, key: object) -> bool:
            Keys.tried += 1
            return super().__contains__(key)

    keys = Keys({"0": 1, "0.2": 1})
    data = ByteRange(BytesSource(b"", Path()), 0, 0)
    made = [new_storage(Storage("0", "cpu", 0, data), data, keys).key for _ in range(50)]
    assert made[:3] == ["0.1", "0.3", "0.4"] and len({*made}) == 50 and {*made} < {*keys}
    assert Keys.tried == 51
