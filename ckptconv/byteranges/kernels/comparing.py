"""Compare the numbers of two tensors: how many elements differ, and by how much.

Whole numbers are compared exactly, whatever their width; all others as float64, complex numbers by their modulus.
Tensors of two dtypes are compared by value. All NaNs are the same, whatever their bits, and so are, as for torch, all
complex numbers with one in either part. What is NaN or infinite on one side, and not the same on the other, is no
distance, and counted apart.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from math import inf, isfinite
from typing import NamedTuple

import torch

from ckptconv.byteranges.kernels.summing import as_complex, as_real, exponents_of, is_number
from ckptconv.dtypes import get_dtype

_LOW = 0xFFFFFFFF
_MODEST = 1 << 62


class _Far(NamedTuple):
    """Of the elements that differ at all: how many are out of tolerance, the largest differences, and how many have
    none because one of the two is no finite number.
    """

    outside: int
    largest: float | int
    relative: float
    not_finite: int = 0


def comparable(a: str, b: str) -> bool:
    """Whether values of the dtypes `a` and `b` can be compared: both are numbers, or both are the same bits."""
    return a == b or (is_number(a) and is_number(b))


class Comparer:
    """Compares elements of the dtype `a` with elements of the dtype `b` by ``torch.allclose``'s rule.

    ``differing`` are so many of them, ``not_finite`` those of them that are NaN or infinite on at least one side.
    ``largest`` and ``largest_relative`` are the largest differences of all others, those within the tolerance too: of
    whole numbers an int, None where bits mean no number. ``largest_of_b`` is the largest magnitude of the finite
    elements of `b` that were seen. ``exponents``, if `histogram`: how many of those that are finite and not equal are
    apart by a number with which exponent.
    """

    def __init__(self, a: str, b: str, rtol: float = 0.0, atol: float = 0.0, *, histogram: bool = False) -> None:
        numbers = is_number(a) and is_number(b)
        self._dtypes = (getattr(torch, a), getattr(torch, b)) if numbers else None
        self._rtol, self._atol = rtol, atol
        self._width = get_dtype(a).itemsize  # of what is compared as bits
        self._unequal = False
        self._histogram = histogram
        self.exponents = Counter[int]()
        self.differing = self.not_finite = 0
        are_whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in self._dtypes or ())
        self.largest: float | int | None = (0 if are_whole else 0.0) if numbers else None
        self.largest_relative: float | None = 0.0 if numbers else None
        self.largest_of_b: float | None = 0.0 if numbers else None

    @property
    def is_near(self) -> bool:
        """Whether elements differ, and all of them within the tolerance."""
        return self._unequal and not self.differing

    def __or__(self, other: Comparer) -> Comparer:
        """Return what both together have found, in elements of the same two dtypes."""
        both = copy(self)
        both._unequal |= other._unequal
        both.differing += other.differing
        both.not_finite += other.not_finite
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
        """Compare the elements in `a` with those in `b`; what both buffers hold is taken as it is."""
        if self._dtypes is None or self.largest is None or self.largest_relative is None:
            x, y = torch.frombuffer(a, dtype=torch.uint8), torch.frombuffer(b, dtype=torch.uint8)
            self.differing += int((x != y).view(-1, self._width).any(1).sum())
            return
        left, right = (torch.frombuffer(data, dtype=dtype) for data, dtype in zip((a, b), self._dtypes, strict=True))
        if left.is_complex() or right.is_complex():
            far = self._complex(as_complex(left), as_complex(right))
        elif left.is_floating_point() or right.is_floating_point():
            far = self._real(as_real(left), as_real(right))
        else:
            far = self._whole(left, right)
        self.see(b)
        if far:
            self._unequal = True
            self.differing += far.outside
            self.not_finite += far.not_finite
            self.largest = max(self.largest, far.largest)
            self.largest_relative = max(self.largest_relative, far.relative)

    def see(self, b: memoryview) -> None:
        """Count the elements in `b` for ``largest_of_b`` alone: they are equal on both sides, or compared already."""
        if self._dtypes is None or self.largest_of_b is None:
            return
        numbers = torch.frombuffer(b, dtype=self._dtypes[1])
        sizes = as_complex(numbers).abs() if numbers.is_complex() else as_real(numbers).abs_()
        most = float(sizes.max())
        if not isfinite(most):
            most = float(sizes.nan_to_num_(nan=0.0, posinf=0.0).max())
        self.largest_of_b = max(self.largest_of_b, most)

    def _real(self, a: torch.Tensor, b: torch.Tensor) -> _Far | None:
        apart = (a - b).abs_()
        most = float(apart.max())
        if isfinite(most):  # as nearly always: then nothing is NaN, and equal is what is 0 apart
            return self._finite(apart, b.abs(), most) if most else None
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        finite = unequal & a.isfinite() & b.isfinite()
        return self._with_others(unequal, apart[finite], b[finite].abs())

    def _finite(self, apart: torch.Tensor, size: torch.Tensor, most: float | int) -> _Far:
        """Of numbers, of which some differ: `apart` by so much, at `most` so much, where `b`'s are of this `size`."""
        outside = (
            int((apart > self._atol + self._rtol * size).sum()) if self._rtol or self._atol else apart.count_nonzero()
        )
        self._count(apart)
        relative = apart.div_(size).nan_to_num_(nan=0.0, posinf=inf)  # 0 / 0 is no difference
        return _Far(int(outside), most, float(relative.max()))

    def _count(self, apart: torch.Tensor) -> None:
        """Count the numbers that are `apart` at all; what float64 has no number for is its largest."""
        if self._histogram:
            self.exponents.update(exponents_of(apart[apart != 0].clamp_(max=torch.finfo(torch.float64).max)))

    def _complex(self, a: torch.Tensor, b: torch.Tensor) -> _Far | None:
        parts_a, parts_b = torch.view_as_real(a), torch.view_as_real(b)
        unequal = (parts_a != parts_b).any(-1) & ~(a.isnan() & b.isnan())
        finite = unequal & parts_a.isfinite().all(-1) & parts_b.isfinite().all(-1)
        apart = (parts_a - parts_b)[finite]
        return self._with_others(unequal, torch.hypot(apart[:, 0], apart[:, 1]), b[finite].abs())

    def _whole(self, a: torch.Tensor, b: torch.Tensor) -> _Far | None:
        """Numbers of up to 64 bits differ by up to 65: those are compared in halves, the upper with its sign."""
        if _is_modest(a) and _is_modest(b):
            numbers = _as_whole(b)
            apart = (_as_whole(a) - numbers).abs_()
            most = int(apart.max())
            return self._finite(apart.double(), numbers.abs().double(), most) if most else None
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
        far = self._far(high.double() * 2.0**32 + low.double(), size.abs_())
        return far._replace(largest=largest)

    def _with_others(self, unequal: torch.Tensor, apart: torch.Tensor, size: torch.Tensor) -> _Far | None:
        """Of numbers that are `unequal`, of which those that are finite on both sides are `apart`
        by so much, where `b`'s are of this `size`.
        """
        others = int(unequal.sum()) - apart.numel()
        far = self._far(apart, size) if apart.numel() else _Far(0, 0.0, 0.0)
        return far._replace(outside=far.outside + others, not_finite=others) if unequal.any() else None

    def _far(self, apart: torch.Tensor, size: torch.Tensor) -> _Far:
        """Of finite numbers that differ: `apart` by so much, where `b`'s are of this `size`."""
        outside = apart.numel()
        if self._rtol or self._atol:
            within = apart.isfinite() & (apart <= self._atol + self._rtol * size)
            outside -= int(within.sum())
        self._count(apart)
        relative = (apart / size).nan_to_num_(nan=inf, posinf=inf)
        return _Far(outside, float(apart.max()), float(relative.max()))


def _is_modest(numbers: torch.Tensor) -> bool:
    """Whether the differences of whole `numbers` fit 64 bits."""
    if numbers.dtype.itemsize < 8:
        return True
    low, high = numbers.view(torch.int64).aminmax()
    return int(high) < _MODEST and int(low) > (-1 if numbers.dtype == torch.uint64 else -_MODEST)


def _as_whole(numbers: torch.Tensor) -> torch.Tensor:
    if numbers.dtype == torch.uint64:
        return numbers.view(torch.int64)
    return (numbers.view(torch.uint8) != 0 if numbers.dtype == torch.bool else numbers).to(torch.int64)


def _halves(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper 32 bits of whole `numbers`, with the sign, and the lower ones."""
    unsigned = numbers.dtype == torch.uint64
    words = numbers.view(torch.int64) if unsigned else _as_whole(numbers)
    high = words >> 32
    return (high & _LOW if unsigned else high), words & _LOW
