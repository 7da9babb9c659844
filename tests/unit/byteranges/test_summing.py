"""Tests of the statistics of tensors by NumPy and by torch. torch in float64 computes the expected results, for random
bits of all dtypes.
"""

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
    """Compute the statistics with each library in turn."""
    if request.param == "torch":
        monkeypatch.setattr("ckptconv.byteranges.summing.numpy", lambda: None)


def summed(tensor: torch.Tensor, *, cut: int | None = None) -> Statistics:
    """Return the statistics of `tensor`, read completely or in two parts that meet at `cut`."""
    name = str(tensor.dtype).removeprefix("torch.")
    first, second = Statistics(name, histogram=True), Statistics(name, histogram=True)
    first.add(raw(tensor[:cut]))
    if cut is not None:
        second.add(raw(tensor[cut:]))
        first.merge(second)
    return first


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in float64, with the magnitude in place of each complex number."""
    if tensor.is_complex():
        wide = tensor.to(torch.complex128)
        return torch.where(wide.isnan(), torch.nan, wide.abs())
    return (tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor).double()


def moderate(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Return `n` elements around 3, as far as `dtype` allows."""
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
def test_statistics_equal_those_of_torch(dtype: torch.dtype, *, bits: bool) -> None:
    """Counts and extremes are exact. Mean, deviation and norm equal those of torch to 12 digits, across blocks and
    parts.
    """
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
    if scale < 1e150:  # otherwise sums and squares exceed the range of float64, also in torch
        assert found.mean == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-12 * scale)
        assert found.std == pytest.approx(float(finite.std()), rel=1e-12)
        assert found.norm == pytest.approx(float(finite.norm()), rel=1e-12)


def test_a_large_mean_costs_few_digits() -> None:
    """The deviation is exact to 8 digits for numbers around 1e9, whose squares are 18 digits larger than their
    variance.
    """
    numbers = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e9
    assert summed(numbers, cut=31).std == pytest.approx(float((numbers - 1e9).std()), rel=1e-8)


def test_mean_is_finite_if_the_sum_is_not() -> None:
    """The mean is finite even if the sum and the norm are not."""
    most = torch.finfo(torch.float64).max
    found = summed(torch.tensor([most, most, -most, most], dtype=torch.float64), cut=2)
    assert found.mean == pytest.approx(most / 2) and found.norm == math.inf and found.low == -most
    assert bins_of(found.exponents)[0][-1] == math.inf


def test_tensor_without_finite_numbers() -> None:
    found = summed(torch.tensor([math.nan, math.inf, -math.inf]))
    assert (found.nan, found.inf, found.finite, found.low, found.std, found.norm) == (1, 2, 0, None, None, 0.0)
    assert sum(bins_of(found.exponents)[1]) == 0


def test_one_number_has_no_deviation() -> None:
    assert summed(torch.tensor([2.5])).std is None


def test_expanded_tensor() -> None:
    """After ``repeat``, the statistics equal those of an expanded tensor, which repeats each element."""
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
    """Each number is counted in the bin that contains it, and the largest magnitude is in the first or the last bin."""
    tensor = torch.cat([moderate(torch.float32, 5000), torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-20])])
    tensor = tensor.to(dtype)
    edges, counts = bins_of(summed(tensor).exponents)
    assert len(counts) == BINS and list(edges) == sorted(edges) and sum(counts) == len(tensor)
    values = as_float64(tensor)
    for (low, high), n in zip(pairwise(edges), counts, strict=True):
        inside = (values >= low) & (values < high) if low >= 0 else (values > low) & (values <= high) & (values < 0)
        assert n == int(inside.sum()), (low, high)
    assert counts[0] or counts[-1]
