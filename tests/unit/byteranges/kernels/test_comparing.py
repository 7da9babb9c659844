"""Tests of the comparison of tensors. torch computes the expected differences, for generated pairs of all dtypes."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.kernels.comparing import Comparer, comparable
from ckptconv.inspection.comparison.differences import ValueDifference
from tests.support.pieces import raw

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compared(
    a: torch.Tensor, b: torch.Tensor, *, at_once: int = 1 << 15, rtol: float = 0.0, atol: float = 0.0
) -> ValueDifference:
    """Return the result of a comparer for `a` and `b`, which get `at_once` elements at a time."""
    comparer = Comparer(name(a.dtype), name(b.dtype), rtol, atol)
    for start in range(0, a.numel(), at_once):
        comparer.add(raw(a[start : start + at_once]), raw(b[start : start + at_once]))
    return result(comparer, a.numel())


def result(comparer: Comparer, elements: int) -> ValueDifference:
    return ValueDifference(
        elements,
        comparer.differing,
        comparer.largest,
        comparer.largest_relative,
        comparer.not_finite,
        not_finite_in=comparer.not_finite_in,
    )


def bits(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    """Return seven elements of random bits, often with special numbers (NaN, infinities, zeros, extremes)."""
    width = dtype.itemsize
    word = st.one_of(st.binary(min_size=width, max_size=width), st.sampled_from(odd(dtype)))
    return st.lists(word, min_size=7, max_size=7).map(
        lambda words: torch.frombuffer(bytearray(b"".join(words)), dtype=dtype)
    )


def odd(dtype: torch.dtype) -> list[bytes]:
    if dtype.is_complex:
        parts = [torch.tensor(float(x)) for x in ("nan", "inf", "-inf", "0", "-0.0", "1")]
        part = {4: torch.float16, 8: torch.float32, 16: torch.float64}[dtype.itemsize]
        return [raw(torch.stack([x, y]).to(part)).tobytes() for x in parts for y in parts]
    if dtype.is_floating_point:
        return [raw(torch.tensor([float(x)]).to(dtype)).tobytes() for x in ("nan", "inf", "-inf", "0", "-0.0", "1")]
    info = torch.iinfo(dtype)
    return [number.to_bytes(dtype.itemsize, "little", signed=number < 0) for number in (info.min, info.max, 0, 1)]


def by_torch(a: torch.Tensor, b: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> ValueDifference:
    """Return the expected result for real numbers, computed in float64: the number of differing elements, the number of
    those that are not finite, and the largest absolute and relative difference of the others.
    """
    x, y = (t.float().double() if t.dtype.itemsize == 1 else t.double() for t in (a, b))
    differing = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    unequal = ~torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)
    finite = unequal & x.isfinite() & y.isfinite()
    apart = (x - y).abs()[finite]
    relative = (apart / y.abs()[finite]).nan_to_num(nan=inf, posinf=inf)
    most = [max(numbers.tolist(), default=0.0) for numbers in (apart, relative)]
    odd_in = tuple(int((unequal & ~side.isfinite()).sum()) for side in (x, y))
    return ValueDifference(a.numel(), int(differing.sum()), *most, int((unequal & ~finite).sum()), not_finite_in=odd_in)


@given(st.data())
def test_real_numbers_compare_as_in_torch(data: st.DataObject) -> None:
    """The counts and largest differences equal those of torch for all pairs of floating-point dtypes, with and without
    a tolerance, and for all sizes of blocks.
    """
    a, b = (data.draw(st.sampled_from(FLOATS + FLOAT8).flatmap(bits)) for _ in "ab")
    if data.draw(st.booleans()):
        b = torch.where(torch.tensor([True, False, True, True, False, True, True]), a.double(), b.double()).to(a.dtype)
    rtol, atol = data.draw(st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 1.0), (0.5, 3.0)]))
    assert compared(a, b, at_once=data.draw(st.integers(1, 9)), rtol=rtol, atol=atol) == by_torch(a, b, rtol, atol)


@pytest.mark.untraced
@given(st.data())
def test_whole_numbers_are_exact(data: st.DataObject) -> None:
    """Integers of all pairs of widths and signs are compared exactly, without overflow. Python's integers are the
    reference.
    """
    a, b = (data.draw(st.sampled_from(WHOLE).flatmap(bits)) for _ in "ab")
    found = compared(a, b)
    apart = [(abs(x - y), abs(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True) if x != y]
    relative = max((inf if not y else float(Fraction(d, y)) for d, y in apart), default=0.0)
    assert (found.differing, found.largest) == (len(apart), max((d for d, _ in apart), default=0))
    assert type(found.largest) is int
    assert found.largest_relative == pytest.approx(relative, rel=1e-12)


def test_difference_can_exceed_int64() -> None:
    """A difference that exceeds the range of int64 is exact."""
    found = compared(torch.tensor([(1 << 63) - 1]), torch.tensor([1 - (1 << 62)]))
    assert found.largest == (1 << 63) - 1 + (1 << 62) - 1


@given(st.data())
def test_complex_numbers_are_compared_by_modulus(data: st.DataObject) -> None:
    """Complex numbers are equal if torch says so, with NaN equal to NaN. The difference of finite numbers is the
    modulus that torch computes.
    """
    a, b = (data.draw(st.sampled_from(COMPLEX).flatmap(bits)) for _ in "ab")
    found = compared(a, b)
    halves = {4: torch.float16, 8: torch.float32, 16: torch.float64}
    x, y = (t.view(halves[t.dtype.itemsize]).double().view(-1, 2) for t in (a, b))
    unequal = ~torch.isclose(*map(torch.view_as_complex, (x, y)), rtol=0, atol=0, equal_nan=True)
    finite = unequal & (x.isfinite() & y.isfinite()).all(1)
    apart = torch.view_as_complex(x - y).abs()[finite]
    assert (found.differing, found.not_finite) == (int(unequal.sum()), int((unequal & ~finite).sum()))
    assert found.not_finite_in == tuple(int((unequal & ~part.isfinite().all(1)).sum()) for part in (x, y))
    assert found.largest == pytest.approx(max(apart.tolist(), default=0.0), rel=1e-12)


@given(st.data())
def test_tensor_equals_itself(data: st.DataObject) -> None:
    """A tensor of any dtype and with any bits equals itself."""
    a = data.draw(st.sampled_from(FLOATS + FLOAT8 + WHOLE + COMPLEX).flatmap(bits))
    assert compared(a, a) == ValueDifference(7, 0, 0, 0.0)


NAN = float("nan")
#: Two NaNs with different bits. The second one is signaling.
NANS = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
TRUTH = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        # NaN equals NaN with any payload, and -0.0 equals 0.0. An infinity equals only itself.
        (NANS, torch.full((2,), NAN), ValueDifference(2, 0, 0, 0.0)),
        (torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]), ValueDifference(2, 0, 0, 0.0)),
        (torch.tensor([inf, -inf]), torch.tensor([inf, -inf]), ValueDifference(2, 0, 0, 0.0)),
        # A number that is not finite on one side is counted, and has no difference.
        (torch.tensor([inf]), torch.tensor([1.0]), ValueDifference(1, 1, 0.0, 0.0, 1, not_finite_in=(1, 0))),
        (torch.tensor([inf]), torch.tensor([-inf]), ValueDifference(1, 1, 0.0, 0.0, 1, not_finite_in=(1, 1))),
        (torch.tensor([inf]), torch.tensor([NAN]), ValueDifference(1, 1, 0.0, 0.0, 1, not_finite_in=(1, 1))),
        (
            torch.tensor([inf, 1.0, NAN, 2.0]),
            torch.tensor([1.0, 1.5, 0.0, 2.0]),
            ValueDifference(4, 3, 0.5, 0.5 / 1.5, 2, not_finite_in=(2, 0)),
        ),
        # A bool is 0 or 1. Dtypes of two kinds are compared by value.
        (TRUTH, torch.tensor([True, True, True]), ValueDifference(3, 1, 1, 1.0)),
        (TRUTH, torch.tensor([1, 0, 2]), ValueDifference(3, 1, 1, 0.5)),
        (TRUTH, torch.tensor([1.0, 0.5, 1.0]), ValueDifference(3, 1, 0.5, 1.0)),
        (torch.tensor([3, 4]), torch.tensor([3 + 0j, 4 + 3j]), ValueDifference(2, 1, 3.0, 0.6)),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0]), ValueDifference(1, 0, 0, 0.0)),
    ],
)
def test_special_numbers_and_mixed_dtypes(a: torch.Tensor, b: torch.Tensor, wanted: ValueDifference) -> None:
    """Special numbers and numbers of two dtypes are compared by value, with the same result for one block or many."""
    assert compared(a, b) == compared(a, b, at_once=1) == wanted


@pytest.mark.parametrize("other", [1.0, -inf, NAN])
def test_infinity_differs_despite_tolerance(other: float) -> None:
    """An infinity differs from a finite number, from the other infinity and from NaN, even with a tolerance."""
    assert compared(torch.tensor([other]), torch.tensor([inf]), rtol=0.5, atol=1.0).differing == 1


def test_dtypes_without_numbers() -> None:
    """Differing bytes of dtypes without numbers are counted, but have no difference in value. Such dtypes are compared
    only with themselves.
    """
    comparer = Comparer("bits8", "bits8")
    comparer.add(memoryview(bytearray(b"abc")), memoryview(bytearray(b"abd")))
    assert result(comparer, 3) == ValueDifference(3, 1, None, None)
    assert not comparable("bits8", "float32")
    assert not comparable("F4", "F6_E2M3")
    assert comparable("F4", "F4") and comparable("float32", "int64")


def test_difference_within_tolerance() -> None:
    """Numbers within the tolerance do not differ, and the comparer reports that they would differ without it."""
    comparer = Comparer("float32", "float32", 0.0, 0.5)
    comparer.add(raw(torch.tensor([1.0, 2.0])), raw(torch.tensor([1.0, 2.25])))
    assert comparer.is_near and result(comparer, 2) == ValueDifference(2, 0, 0.25, 0.25 / 2.25)
