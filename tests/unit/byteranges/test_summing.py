"""Sums of numbers by NumPy and by torch: torch in float64 is the judge, on random bits of all dtypes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from ckptconv.byteranges.histograms import BINS, bins_of
from ckptconv.byteranges.summing import Statistics, is_number
from tests.support import zoo
from tests.support.pieces import raw

NUMBERS = [dtype for dtype in zoo.DTYPES if is_number(str(dtype).removeprefix("torch."))]


@pytest.fixture(params=["NumPy", "torch"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum by each library in turn."""
    if request.param == "torch":
        monkeypatch.setattr("ckptconv.byteranges.summing.numpy", lambda: None)


def summed(tensor: torch.Tensor, *, cut: int | None = None) -> Statistics:
    """What the kernel says of `tensor`, read as a whole or in two parts."""
    name = str(tensor.dtype).removeprefix("torch.")
    first, second = Statistics(name, histogram=True), Statistics(name, histogram=True)
    first.add(raw(tensor[:cut]))
    if cut is not None:
        second.add(raw(tensor[cut:]))
        first.merge(second)
    return first


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in torch's float64, complex numbers by their magnitude."""
    if tensor.is_complex():
        wide = tensor.to(torch.complex128)
        return torch.where(wide.isnan(), torch.nan, wide.abs())
    return (tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor).double()


def moderate(dtype: torch.dtype, n: int) -> torch.Tensor:
    """`n` elements around 3, as far as `dtype` has such."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(n, generator=generator, dtype=torch.float64) * 2 + 3
    if dtype.is_complex:
        parts = {4: torch.float16, 8: torch.float32, 16: torch.float64}[dtype.itemsize]
        return torch.stack([numbers, -numbers.flip(0)], 1).to(parts).view(dtype).flatten()
    whole = not dtype.is_floating_point
    return (
        (numbers.abs() if whole else numbers)
        .to(torch.float32 if dtype.itemsize == 1 and not whole else dtype)
        .to(dtype)
    )


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("bits", [True, False], ids=["any bits", "moderate"])
def test_as_torch_in_float64(dtype: torch.dtype, *, bits: bool) -> None:
    """Counts and extremes to the last bit; mean, deviation and norm to 12 digits, across blocks and parts."""
    n = 70_001
    tensor = moderate(dtype, n)
    if bits:
        generator = torch.Generator().manual_seed(0)
        most = 2 if dtype == torch.bool else 256
        words = torch.randint(0, most, (n * dtype.itemsize,), generator=generator).to(torch.uint8)
        words[: 3 * dtype.itemsize] = 0
        tensor = words.view(dtype)
    found = summed(tensor, cut=50_003)
    values = as_float64(tensor)
    finite = values[values.isfinite()]
    assert (found.nan, found.inf, found.finite) == (int(values.isnan().sum()), int(values.isinf().sum()), len(finite))
    assert found.zeros == int((finite == 0).sum())
    if dtype in (torch.int64, torch.uint64):
        assert (found.low, found.high) == (min(tensor.tolist()), max(tensor.tolist()))
    else:
        assert (found.low, found.high) == (float(finite.min()), float(finite.max()))
    scale = float(finite.abs().max())
    if scale < 1e150:  # else sums and squares are beyond float64, torch's too
        assert found.mean == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-12 * scale)
        assert found.std == pytest.approx(float(finite.std()), rel=1e-12)
        assert found.norm == pytest.approx(float(finite.norm()), rel=1e-12)


def test_a_large_mean_costs_few_digits() -> None:
    """Numbers that are nearly one, whose squares are 18 digits larger than those of their distances."""
    numbers = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e9
    assert summed(numbers, cut=31).std == pytest.approx(float((numbers - 1e9).std()), rel=1e-8)


def test_numbers_near_the_largest() -> None:
    """The mean stays a number where the sum is none."""
    most = torch.finfo(torch.float64).max
    found = summed(torch.tensor([most, most, -most, most], dtype=torch.float64), cut=2)
    assert found.mean == pytest.approx(most / 2) and found.norm == math.inf and found.low == -most
    assert bins_of(found.exponents)[0][-1] == math.inf


def test_nothing_finite() -> None:
    found = summed(torch.tensor([math.nan, math.inf, -math.inf]))
    assert (found.nan, found.inf, found.finite, found.low, found.std, found.norm) == (1, 2, 0, None, None, 0.0)
    assert sum(bins_of(found.exponents)[1]) == 0


def test_one_number_has_no_deviation() -> None:
    assert summed(torch.tensor([2.5])).std is None


def test_repeated() -> None:
    """An expanded tensor counts each element as often as it shows it."""
    once = torch.tensor([1.0, 0.0, math.nan, 4.0])
    found, whole = summed(once), summed(once.expand(5, 4).reshape(-1))
    found.repeat(5)
    assert (found.nan, found.zeros, found.finite) == (whole.nan, whole.zeros, whole.finite)
    assert found.std == pytest.approx(whole.std) and found.norm == pytest.approx(whole.norm)
    assert bins_of(found.exponents) == bins_of(whole.exponents)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.float8_e5m2], ids=str
)
def test_histogram(dtype: torch.dtype) -> None:
    """Each number is in the bin whose edges are around it; the largest magnitude is in one of the outer two."""
    tensor = torch.cat([moderate(torch.float32, 5000), torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-20])])
    tensor = tensor.to(dtype)
    edges, counts = bins_of(summed(tensor).exponents)
    assert len(counts) == BINS and list(edges) == sorted(edges) and sum(counts) == len(tensor)
    values = as_float64(tensor)
    for (low, high), n in zip(pairwise(edges), counts, strict=True):
        inside = (values >= low) & (values < high) if low >= 0 else (values > low) & (values <= high) & (values < 0)
        assert n == int(inside.sum()), (low, high)
    assert counts[0] or counts[-1]
