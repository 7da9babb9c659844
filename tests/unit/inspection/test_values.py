"""Statistics of the values of tensors in files, compared with those that torch computes."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.inspection import values
from ckptconv.inspection.summary import TensorSummary
from ckptconv.limits import LIMITS
from tests.support import zoo
from tests.support.archives import big_endian, rezip
from tests.support.command import Command
from tests.support.conversions import saved_at


def found_in(path: Path) -> dict[str, TensorSummary]:
    return {tensor.path: tensor for tensor in ckptconv.inspect(path, values=True).tensors}


def agrees(found: TensorSummary, tensor: torch.Tensor) -> None:
    """Check that the statistics in `found` are those that torch computes for `tensor`."""
    values = found.values
    assert values is not None
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor.resolve_conj()
    finite = (wide.to(torch.complex128).abs() if wide.is_complex() else wide.double()).flatten()
    assert (values.nan, values.inf) == (int(finite.isnan().sum()), int(finite.isinf().sum()))
    finite = finite[finite.isfinite()]
    assert values.zeros == int((finite == 0).sum())
    if not len(finite):
        assert (values.min, values.max, values.mean, values.norm) == (None, None, None, 0.0)
        return
    assert (values.min, values.max) == (float(finite.min()), float(finite.max()))
    assert values.mean == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-300)
    assert values.norm == pytest.approx(float(finite.norm()), rel=1e-12)
    assert values.std is None if len(finite) == 1 else values.std == pytest.approx(float(finite.std()), rel=1e-11)


WITH_NUMBERS = ("special_values", "views", "ties", "small", "conj_neg", "two_dtypes", "state_dict", "wide")


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("how", ["zip", "legacy", "deflated"])
def test_the_zoo(name: str, how: str, tmp_path: Path) -> None:
    """The statistics are right for views, ties, lazy bits and unusual shapes, in zips, legacy files and
    deflated zips.
    """
    if (name, how) == ("two_dtypes", "legacy"):
        pytest.skip("torch's older format has no float8")
    path = saved_at(tmp_path / "m.pt", {"root": zoo.ZOO[name]()}, _use_new_zipfile_serialization=how != "legacy")
    if how == "deflated":
        rezip(path, path, method=zipfile.ZIP_DEFLATED)
    found = found_in(path)
    root = torch.load(path, weights_only=False)["root"]
    items: list[tuple[str, Any]] = (
        [(f"root[{i}]", value) for i, value in enumerate(root)]
        if isinstance(root, list)
        else [(f"root/{key}", value) for key, value in root.items()]
    )
    tensors = [(path, value.detach()) for path, value in items if isinstance(value, torch.Tensor)]
    assert tensors
    for at, tensor in tensors:
        agrees(found[at], tensor)


def test_all_dtypes(tmp_path: Path) -> None:
    """Dtypes that torch cannot convert to numbers have no statistics. bcomplex32 has none either, because torch 2.15
    has few operations for it.
    """
    torch.save(zoo.dtypes(), tmp_path / "m.pt")
    for path, tensor in found_in(tmp_path / "m.pt").items():
        has_none = "bits" in path or "x2" in path or "bcomplex" in path
        assert (tensor.values is None) == has_none, path


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:.*Sparse:UserWarning")
def test_quantized_and_sparse(tmp_path: Path) -> None:
    """The statistics of a quantized tensor are those of its stored integers. Four-bit, sparse and meta tensors have no
    statistics.
    """
    torch.save({**zoo.quantized(), **zoo.sparse(), "meta": zoo.meta()}, tmp_path / "m.pt")
    found = found_in(tmp_path / "m.pt")
    agrees(found["qint32"], zoo.quantized()["qint32"].int_repr())
    agrees(found["per_channel"], zoo.quantized()["per_channel"].int_repr())
    assert found["quint4x2"].values is None and found["coo"].values is None and found["meta[3]"].values is None


def test_big_endian_numbers(tmp_path: Path) -> None:
    numbers = torch.tensor([1.5, -2.0, 0.0])
    torch.save({"w": numbers}, tmp_path / "m.pt")
    agrees(found_in(big_endian(tmp_path / "m.pt", tmp_path / "big.pt", {"0": 4}))["w"], numbers)


def test_segments_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics are right for tensors that several threads read, and for threads that read several tensors."""
    monkeypatch.setattr(values, "_SEGMENT", 4096)
    monkeypatch.setattr(values, "_ROOM", 1024)
    numbers = {f"{i}": torch.randn(n) for i, n in enumerate([1, 5000, 0, 3, 70_000, 1024, 2])}
    save_file(numbers, tmp_path / "m.safetensors")
    for path, tensor in found_in(tmp_path / "m.safetensors").items():
        agrees(tensor, numbers[path])


def test_one_view_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is read once, even if it has many names."""
    weight = torch.randn(100)
    torch.save({f"{i}": weight for i in range(50)}, tmp_path / "m.pt")
    read: list[tuple[int, int]] = []
    batches = values.batches
    monkeypatch.setattr(values, "batches", lambda lengths: batches(read.append(each) or each for each in lengths))
    assert len(found_in(tmp_path / "m.pt")) == 50 and read == [(0, 400)]


def test_views_that_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements with stride 0 are read once. The size of overlapping windows is limited."""
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "expanded.pt")
    found = found_in(tmp_path / "expanded.pt")["w"].values
    assert found and found.norm == 2.0**20 and found.mean == 1.0
    torch.save({"w": torch.arange(3000.0).unfold(0, 1000, 1)}, tmp_path / "windows.pt")
    monkeypatch.setattr("ckptconv.inspection.values.LIMITS", replace(LIMITS, gathered_bytes=1000, gathered_ratio=2))
    with pytest.raises(ckptconv.LimitError, match="w has too many elements"):
        found_in(tmp_path / "windows.pt")


def test_a_damaged_file_that_became_shorter(tmp_path: Path) -> None:
    """Statistics and histograms are computed for an open file. If the file is truncated, an error is raised."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    path = tmp_path / "m.pt"
    checkpoint = path.read_bytes()
    with path.open("rb") as file:
        summary = ckptconv.inspect(file, histogram=True)
    assert summary.tensors[0].values and summary.tensors[0].values.histogram
    path.write_bytes(checkpoint[:-100])
    with pytest.raises(ckptconv.InputError):
        ckptconv.inspect(path, values=True)


# The command


@pytest.fixture
def diverged(here: Path) -> None:
    """Write a file in which two tensors have values that are not finite."""
    state = {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([float("-inf"), 2.0, 0.0]), "c": torch.ones(3)}
    torch.save(state, here / "m.pt")


@pytest.mark.usefixtures("diverged")
def test_in_text(command: Command) -> None:
    """The text begins with the result, followed by a column for each statistic."""
    said = command("inspect", "m.pt", "--values", out="NaN or inf in 2 of 3 tensors: a (1 NaN), b (1 inf)")
    assert "\nc\tfloat32\t3\tcpu\t12\t0\t0\t0\t1.0\t1.0\t1.0\t0.0\t1.7320508075688772\n" in said.out
    command("inspect", "m.pt", "--values", "--include", "c", out="all finite in 1 tensor")


@pytest.mark.usefixtures("diverged")
def test_in_json(command: Command) -> None:
    found = command.json("inspect", "m.pt", "--histogram")["tensors"]
    histogram = found[1]["values"].pop("histogram")
    assert found[1]["values"] == {
        "nan": 0, "inf": 1, "zeros": 1, "min": 0.0, "max": 2.0, "mean": 1.0, "std": 2**0.5, "norm": 2.0,
    }  # a table  # fmt: skip
    assert len(histogram["edges"]) == 33 and sum(histogram["counts"]) == 2
    assert "values" not in command.json("inspect", "m.pt")["tensors"][0]


@pytest.mark.usefixtures("diverged")
def test_fail_on(command: Command) -> None:
    """``--fail-on`` considers only the tensors that are shown. An unknown word is refused."""
    command("inspect", "m.pt", "--fail-on", "nan", status=1)
    command("inspect", "m.pt", "--fail-on", "NaN,inf", "--include", "b", status=1)
    command("inspect", "m.pt", "--fail-on", "nan", "--include", "b")
    command("inspect", "m.pt", "--fail-on", "inf", "--json", status=1)
    command("inspect", "m.pt", "--fail-on", "zero", status=2, err="--fail-on zero is not valid (expected nan, inf")


def test_fail_on_only_a_tie(here: Path, command: Command) -> None:
    """``--fail-on`` finds NaN in a tied tensor even if the tensor that it is tied to is not shown."""
    w = torch.tensor([float("nan")])
    torch.save({"a": w, "tied": w}, here / "ties.pt")
    command("inspect", "ties.pt", "--fail-on", "nan", "--include", "tied", status=1)
    assert command("inspect", "ties.pt", "--values").out.count("1 of 1 tensor") == 1


def test_in_a_difference(here: Path, command: Command) -> None:
    """A difference contains the statistics of both sides for each differing tensor, as ``inspect`` reports them, and
    for no other tensor.
    """
    torch.save({"w": torch.tensor([1.0, 3.0]), "same": torch.ones(2), "s": torch.ones(2)}, here / "a.pt")
    torch.save({"w": torch.tensor([float("nan"), 5.0]), "same": torch.ones(2), "s": torch.ones(3)}, here / "b.pt")
    found = {each.path: each.statistics for each in ckptconv.diff("a.pt", "b.pt", values=True).differing}
    sides = found_in(Path("a.pt")), found_in(Path("b.pt"))
    assert found == {path: (sides[0][path].values, sides[1][path].values) for path in ("w", "s")}
    command("diff", "a.pt", "b.pt", "--values", status=1, out="NaN 0 → 1")
    rows = {each["path"]: each for each in command.json("diff", "a.pt", "b.pt", "--values", status=1)["differing"]}
    assert [side["mean"] for side in rows["w"]["statistics"]] == [2.0, 5.0]
    assert "statistics" not in command.json("diff", "a.pt", "b.pt", status=1)["differing"][0]
    command("diff", "a.pt", "b.pt", "--values", "--names-only", status=2, err="--names-only and --values cannot")


A_AND_B: dict[str, tuple[Any, Any]] = {
    "float32": (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, -3.0, 4.001])),
    "not finite": (torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([float("inf"), 1.0, 3.25])),
    "bfloat16 and float16": (torch.arange(9.0).bfloat16(), (torch.arange(9.0) ** 2).half()),
    "whole": (torch.tensor([1, 2, 1 << 62]), torch.tensor([1, -7, -(1 << 62)])),
    "bool": (torch.tensor([True, False]), torch.tensor([True, True])),
    "complex": (torch.tensor([1 + 1j, 2j, 0j]), torch.tensor([1 + 1j, 2.0 + 2j, 3e-9j])),
    "large": (torch.tensor([1e308], dtype=torch.float64), torch.tensor([-1.7e308], dtype=torch.float64)),
    "small": (torch.tensor([1e-310, 1.0], dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64)),
    "repeated": (torch.ones(2, 1).expand(2, 50), torch.tensor([[1.0], [3.0]]).expand(2, 50)),
    "transposed": (torch.arange(6.0).view(2, 3).t(), torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", A_AND_B)
@pytest.mark.parametrize("rtol", [0.0, 0.01])
def test_histogram_of_distances(name: str, rtol: float, tmp_path: Path) -> None:
    """Each finite element that differs, also within the tolerance, is in the bin of its distance."""
    a, b = A_AND_B[name]
    for tensor, file in ((a, "a.pt"), (b, "b.pt")):
        torch.save({"w": tensor, "beside": torch.tensor([float(file == "a.pt")])}, tmp_path / file)
    found = ckptconv.diff(tmp_path / "a.pt", tmp_path / "b.pt", histogram=True, rtol=rtol).differing[0]
    assert found.path == "w" and found.values and found.values.histogram and found.statistics
    edges, counts = found.values.histogram.edges, found.values.histogram.counts
    left, right = ([complex(x) for x in tensor.flatten().tolist()] for tensor in (a, b))
    apart = [abs(x - y) for x, y in zip(left, right, strict=True) if isfinite(abs(x)) and isfinite(abs(y)) and x != y]
    apart = [min(x, 1.7e308) for x in apart]
    assert counts == tuple(sum(low <= x < high for x in apart) for low, high in pairwise(edges))
    assert sum(counts) == len(apart) and not any(counts[:16])
    assert all(side and side.histogram for side in found.statistics)
    assert ckptconv.diff(tmp_path / "a.pt", tmp_path / "b.pt").differing[0].values.histogram is None  # type: ignore[union-attr]


def test_histogram_of_a_difference_in_each_output(here: Path, command: Command) -> None:
    """The distances are shown as bars next to the tensor, and as counts in JSON. Dtypes that are not numbers
    have none.
    """
    torch.save({"w": torch.zeros(4), "bits": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, here / "a.pt")
    b = {"w": torch.tensor([1.0, 2.0, 2.0, 0.0]), "bits": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}
    torch.save(b, here / "b.pt")
    said = command("diff", "a.pt", "b.pt", "--histogram", status=1, out="3 of 4")
    assert "▄█" in said.out
    w, bits = command.json("diff", "a.pt", "b.pt", "--histogram", status=1)["differing"]
    assert sum(w["values"]["histogram"]["counts"]) == 3 and "histogram" not in bits["values"]
    assert "histogram" in w["statistics"][0]
    command("diff", "a.pt", "b.pt", "--histogram", "--names-only", status=2, err="--names-only and --histogram cannot")
    command("diff", "a.pt", "b.pt", "--histogram", "--html", "d.html", status=1)
    page = Path("d.html").read_text("utf-8")
    assert '"title":"|A \\u2212 B|, of elements that differ","bars":[[4,' in page
