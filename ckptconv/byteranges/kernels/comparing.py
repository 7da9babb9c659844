"""Compare the numbers of two tensors: how many elements differ, and by how much.

Integers are compared exactly, other numbers as float64, complex numbers by their modulus. Tensors of two dtypes are
compared by value. All NaNs are equal. As in torch, complex numbers with a NaN in either component are equal too.
Elements that differ and of which one is NaN or infinite have no distance, and are counted separately.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from math import inf, isfinite
from typing import NamedTuple

import torch

from ckptconv.byteranges.histograms import exponents_of
from ckptconv.byteranges.kernels.numbers import as_complex, as_real, as_whole, is_number
from ckptconv.dtypes import get_dtype

_LOW = 0xFFFFFFFF
_MODEST = 1 << 62


class _Far(NamedTuple):
    """Facts about elements that differ.

    Attributes:
        outside: The number of elements outside the tolerance.
        largest: The largest difference.
        relative: The largest relative difference.
        not_finite: The number of elements without a difference, because one of the two is not finite.
        not_finite_in: How many of these are not finite in `a`, and how many in `b`.
    """

    outside: int
    largest: float | int
    relative: float
    not_finite: int = 0
    not_finite_in: tuple[int, int] = (0, 0)


def comparable(a: str, b: str) -> bool:
    """Return whether elements of the dtypes `a` and `b` can be compared: both are numbers, or the dtypes are equal."""
    return a == b or (is_number(a) and is_number(b))


class Comparer:
    """A comparison of elements by the rule of ``torch.allclose``.

    Attributes:
        differing: The number of elements that differ by more than the tolerance.
        not_finite: How many of these are NaN or infinite on at least one side.
        not_finite_in: How many of these are NaN or infinite in `a`, and how many in `b`.
        largest: The largest difference of finite elements, even if it is within the tolerance. An int for integers,
            None if the elements are not numbers.
        largest_relative: The largest relative difference of finite elements, or None if the elements are not numbers.
        largest_of_b: The largest magnitude of the finite elements of `b`, or None if it is not known.
        exponents: With `histogram`, the number of differences of finite elements by their exponent.
    """

    def __init__(self, a: str, b: str, rtol: float = 0.0, atol: float = 0.0, *, histogram: bool = False) -> None:
        """Compare elements of the dtype `a` with elements of the dtype `b`."""
        numbers = is_number(a) and is_number(b)
        self._dtypes = (getattr(torch, a), getattr(torch, b)) if numbers else None
        self._rtol, self._atol = rtol, atol
        self._width = get_dtype(a).itemsize  # of elements that are compared as bits
        self._unequal = False
        self._histogram = histogram
        self.exponents = Counter[int]()
        self.differing = self.not_finite = 0
        self.not_finite_in = (0, 0)
        are_whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in self._dtypes or ())
        self.largest: float | int | None = (0 if are_whole else 0.0) if numbers else None
        self.largest_relative: float | None = 0.0 if numbers else None
        self.largest_of_b: float | None = 0.0 if numbers else None

    @property
    def is_near(self) -> bool:
        """Whether elements differ, but none by more than the tolerance."""
        return self._unequal and not self.differing

    def __or__(self, other: Comparer) -> Comparer:
        """Return the combined result of both comparisons, which must have the same dtypes."""
        both = copy(self)
        both._unequal |= other._unequal
        both.differing += other.differing
        both.not_finite += other.not_finite
        both.not_finite_in = _sums(self.not_finite_in, other.not_finite_in)
        both.exponents = self.exponents + other.exponents
        both.largest, both.largest_relative, both.largest_of_b = (
            None if x is None or y is None else max(x, y)
            for x, y in (
                (self.largest, other.largest),
                (self.largest_relative, other.largest_relative),
                (self.largest_of_b, other.largest_of_b),
            )
        )
        return both

    def add(self, a: memoryview, b: memoryview) -> None:
        """Compare the elements in `a` with those in `b`. Both have the same number of elements."""
        if self._dtypes is None or self.largest is None or self.largest_relative is None:
            x, y = torch.frombuffer(a, dtype=torch.uint8), torch.frombuffer(b, dtype=torch.uint8)
            self.differing += int((x != y).view(-1, self._width).any(1).sum())
            return
        left, right = (torch.frombuffer(data, dtype=dtype) for data, dtype in zip((a, b), self._dtypes, strict=True))
        numbers = as_complex(right) if right.is_complex() else as_real(right)
        self._see(numbers)
        if left.is_complex() or right.is_complex():
            far = self._complex(as_complex(left), as_complex(numbers))
        elif left.is_floating_point() or right.is_floating_point():
            far = self._real(as_real(left), numbers)
        else:
            far = self._whole(left, right)
        if far:
            self._unequal = True
            self.differing += far.outside
            self.not_finite += far.not_finite
            self.not_finite_in = _sums(self.not_finite_in, far.not_finite_in)
            self.largest = max(self.largest, far.largest)
            self.largest_relative = max(self.largest_relative, far.relative)

    def see(self, b: memoryview) -> None:
        """Update only ``largest_of_b`` with the elements in `b`, which are known to be equal on both sides."""
        if self._dtypes is not None:
            numbers = torch.frombuffer(b, dtype=self._dtypes[1])
            self._see(as_complex(numbers) if numbers.is_complex() else as_real(numbers))

    def _see(self, numbers: torch.Tensor) -> None:
        if self.largest_of_b is None:
            return
        sizes = numbers.abs()
        most = float(sizes.max())
        if not isfinite(most):
            most = float(sizes.nan_to_num_(nan=0.0, posinf=0.0).max())
        self.largest_of_b = max(self.largest_of_b, most)

    def _real(self, a: torch.Tensor, b: torch.Tensor) -> _Far | None:
        apart = (a - b).abs_()
        most = float(apart.max())
        if isfinite(most):  # nearly always: then nothing is NaN, and a difference of 0 means equal
            return self._far(apart, b.abs(), most) if most else None
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        odd = unequal & ~a.isfinite(), unequal & ~b.isfinite()
        finite = unequal & ~(odd[0] | odd[1])
        return self._with_others(unequal, odd, apart[finite], b[finite].abs())

    def _count(self, apart: torch.Tensor) -> None:
        """Count the exponents of the differences `apart`, except for 0. Infinity counts as the largest number."""
        if self._histogram:
            self.exponents.update(exponents_of(apart[apart != 0].clamp_(max=torch.finfo(torch.float64).max), torch))

    def _complex(self, a: torch.Tensor, b: torch.Tensor) -> _Far | None:
        parts_a, parts_b = torch.view_as_real(a), torch.view_as_real(b)
        unequal = (parts_a != parts_b).any(-1) & ~(a.isnan() & b.isnan())
        odd = unequal & ~parts_a.isfinite().all(-1), unequal & ~parts_b.isfinite().all(-1)
        finite = unequal & ~(odd[0] | odd[1])
        apart = (parts_a - parts_b)[finite]
        return self._with_others(unequal, odd, torch.hypot(apart[:, 0], apart[:, 1]), b[finite].abs())

    def _whole(self, a: torch.Tensor, b: torch.Tensor) -> _Far | None:
        """Compare integers. Differences of 64-bit integers need up to 65 bits, so large ones are compared in halves."""
        if _is_modest(a) and _is_modest(b):
            numbers = as_whole(b)
            apart = (as_whole(a) - numbers).abs_()
            most = int(apart.max())
            return self._far(apart.double(), numbers.abs().double(), most) if most else None
        (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
        unequal = (high_a != high_b) | (low_a != low_b)
        if not unequal.any():
            return None
        low = low_a[unequal] - low_b[unequal]
        high = high_a[unequal] - high_b[unequal] + (low >> 32)
        low &= _LOW
        negative = high < 0
        low, borrow = torch.where(negative, -low & _LOW, low), torch.where(negative & (low != 0), 1, 0)
        high = torch.where(negative, -high - borrow, high)
        upper = high.max()
        largest = (int(upper) << 32) + int(low[high == upper].max())
        size = high_b[unequal].double() * 2.0**32 + low_b[unequal].double()
        return self._far(high.double() * 2.0**32 + low.double(), size.abs_(), largest)

    def _with_others(
        self, unequal: torch.Tensor, odd: tuple[torch.Tensor, torch.Tensor], apart: torch.Tensor, size: torch.Tensor
    ) -> _Far | None:
        """Return the facts about elements, of which the mask `unequal` selects those that differ. None if none differs.

        `odd` are the masks of those that are not finite in `a` and in `b`. `apart` contains the differences of the
        finite ones, and `size` their magnitudes in `b`.
        """
        others = int(unequal.sum()) - apart.numel()
        far = self._far(apart, size, float(apart.max())) if apart.numel() else _Far(0, 0.0, 0.0)
        odd_in = int(odd[0].sum()), int(odd[1].sum())
        return _Far(far.outside + others, far.largest, far.relative, others, odd_in) if unequal.any() else None

    def _far(self, apart: torch.Tensor, size: torch.Tensor, most: float | int) -> _Far:
        """Return the facts about finite elements, some of which differ.

        `apart` contains the absolute differences, of which `most` is the largest, and `size` the magnitudes in `b`.
        """
        outside = int(apart.count_nonzero())
        if self._rtol or self._atol:
            within = apart.isfinite() & (apart <= self._atol + self._rtol * size)
            outside = apart.numel() - int(within.sum())
        self._count(apart)
        nan = 0.0 if isfinite(most) else inf  # 0 / 0 is no difference; with infinite differences there are no zeros
        relative = apart.div_(size).nan_to_num_(nan=nan, posinf=inf)
        return _Far(outside, most, float(relative.max()))


def _sums(x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
    """Return the sums of `x` and `y`, item by item."""
    return x[0] + y[0], x[1] + y[1]


def _is_modest(numbers: torch.Tensor) -> bool:
    """Return whether all differences of the integers `numbers` fit into 64 bits."""
    if numbers.dtype.itemsize < 8:
        return True
    low, high = numbers.view(torch.int64).aminmax()
    return int(high) < _MODEST and int(low) > (-1 if numbers.dtype == torch.uint64 else -_MODEST)


def _halves(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper 32 bits of the integers `numbers`, with the sign, and their lower 32 bits."""
    unsigned = numbers.dtype == torch.uint64
    words = as_whole(numbers)
    high = words >> 32
    return (high & _LOW if unsigned else high), words & _LOW
