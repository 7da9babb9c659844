"""Compute statistics of numbers: counts of NaN, infinities and zeros, extremes, moments, and a histogram.

Counts and extremes are exact. Mean and squares are computed in float64, in two passes over each block, and blocks are
combined by Chan's formulas. So neither many elements nor a mean far from 0 loses more than a few digits. Complex
numbers count by their magnitude.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite, sqrt

import torch

_NUMBERS = {
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
    "complex64",
    "complex128",
}
BINS = 32
_EXPONENT = 52  # the first bit of the exponent of a float64, which has 11 bits and is followed by the sign
_SIGN = 1 << 11
_BIAS = 1023
_BLOCK = 1 << 15  # elements summed in one step: few enough that torch uses one thread and they fit into a cache


def is_number(name: str) -> bool:
    """Return whether elements of the dtype `name` are numbers (or bool), one in each item, and torch has this dtype."""
    return name in _NUMBERS and isinstance(getattr(torch, name, None), torch.dtype)


def as_real(numbers: torch.Tensor) -> torch.Tensor:
    """Return the real `numbers` as float64."""
    if numbers.dtype == torch.bool:
        return as_whole(numbers).double()
    return (numbers.float() if numbers.dtype.itemsize == 1 else numbers).double()


def as_whole(numbers: torch.Tensor) -> torch.Tensor:
    """Return the integers or bools `numbers` as int64. The upper half of uint64 becomes negative."""
    if numbers.dtype == torch.uint64:
        return numbers.view(torch.int64)
    return (numbers.view(torch.uint8) != 0 if numbers.dtype == torch.bool else numbers).to(torch.int64)


def as_complex(numbers: torch.Tensor) -> torch.Tensor:
    """Return `numbers` as complex128."""
    if numbers.dtype == torch.complex32:
        return torch.view_as_complex(numbers.view(torch.float16).double().view(-1, 2))
    return (
        numbers.to(torch.complex128)
        if numbers.is_complex()
        else torch.complex(as_real(numbers), torch.zeros(()).double().expand(len(numbers)))
    )


def exponents_of(values: torch.Tensor) -> Counter[int]:
    """Return the counts of `values`, finite float64, by sign and exponent (the upper 12 bits)."""
    words = (values.view(torch.int64) >> _EXPONENT) & (2 * _SIGN - 1)
    counts = torch.bincount(words, minlength=1)
    used = counts.nonzero().view(-1)
    return Counter(dict(zip(used.tolist(), counts[used].tolist(), strict=True)))


def bins_of(exponents: Counter[int]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the edges of the bins of a histogram, and the number of elements in each bin.

    `exponents` is a result of :func:`exponents_of`. Half of the bins are for negative numbers. Starting at the largest
    magnitude, each bin is half as wide as the previous one, except for the two around 0, which contain the rest. A bin
    includes its edge on the side of 0. Zeros and float64's subnormal numbers count as positive.
    """
    half = BINS // 2
    lowest = half - _BIAS  # so that numbers with the exponent of subnormal ones are in a bin around 0
    powers = {word: (word & (_SIGN - 1)) - _BIAS for word in exponents}
    top = max([lowest, *powers.values()]) if powers else 0
    edges = [0.0, *(2.0 ** (top - half + 1 + i) for i in range(1, half)), 2.0**top * 2]
    counts = [0] * BINS
    for word, n in exponents.items():
        i = max(powers[word] - top + half - 1, 0)
        counts[half + i if word <= _SIGN else half - 1 - i] += n
    return (*(-edge for edge in reversed(edges[1:])), *edges), tuple(counts)


class Statistics:
    """Statistics of numbers.

    Attributes:
        finite: The number of finite numbers.
        nan: The number of NaNs.
        inf: The number of infinities.
        zeros: The number of zeros.
        low: The smallest finite number, or None.
        high: The largest finite number, or None.
        mean: The mean of the finite numbers.
        squares: The sum of the squares of their distances from the mean.
        exponents: With `histogram`, the counts of the finite numbers by sign and exponent.
    """

    def __init__(self, name: str, *, histogram: bool = False) -> None:
        """Create empty statistics for numbers of the dtype `name`."""
        self._dtype: torch.dtype = getattr(torch, name)
        self._histogram = histogram
        self.nan = self.inf = self.zeros = self.finite = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.mean = self.squares = 0.0
        self.exponents = Counter[int]()

    def add(self, data: memoryview) -> None:
        """Add the elements in `data`."""
        numbers = torch.frombuffer(data, dtype=self._dtype)
        for at in range(0, len(numbers), _BLOCK):
            self._add(numbers[at : at + _BLOCK])

    def _add(self, numbers: torch.Tensor) -> None:
        values = _magnitudes(as_complex(numbers)) if numbers.is_complex() else as_real(numbers)
        total = float(values.sum())
        if not isfinite(total):  # this is rare
            values = self._finite(values)
            total = float(values.sum())
        n = len(values)
        if not n:
            return
        self.zeros += n - int(values.count_nonzero())
        if self._histogram:
            self.exponents.update(exponents_of(values))
        low, high = _extremes(values if numbers.is_floating_point() or numbers.is_complex() else numbers)
        mean = total / n if isfinite(total) else min(max(float((values / n).sum()), low), high)
        values = values - mean
        self._put(n, low, high, mean, float(torch.dot(values, values)))

    def _finite(self, values: torch.Tensor) -> torch.Tensor:
        """Count the values that are not finite. Return the finite ones."""
        is_finite = values.isfinite()
        nan = int(values.isnan().sum())
        self.nan += nan
        self.inf += len(values) - int(is_finite.sum()) - nan
        return values[is_finite]

    def _put(self, n: int, low: float | int, high: float | int, mean: float, squares: float) -> None:
        """Add `n` finite numbers with these extremes, this mean, and this sum of squared distances."""
        before, self.finite = self.finite, self.finite + n
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        apart = mean - self.mean
        if isfinite(apart):
            self.mean += apart * (n / self.finite)
        else:  # the numbers are near the largest float64
            self.mean = self.mean * (before / self.finite) + mean * (n / self.finite)
        self.squares += squares + (apart * apart * (before / self.finite) * n if before else 0.0)

    def merge(self, other: Statistics) -> None:
        """Add the statistics `other`."""
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros
        self.exponents.update(other.exponents)
        if other.low is not None and other.high is not None:
            self._put(other.finite, other.low, other.high, other.mean, other.squares)

    def repeat(self, times: int) -> None:
        """Multiply all counts by `times`, for elements that a view repeats."""
        self.nan *= times
        self.inf *= times
        self.zeros *= times
        self.finite *= times
        self.squares *= times
        self.exponents = Counter({word: n * times for word, n in self.exponents.items()})

    @property
    def std(self) -> float | None:
        """The standard deviation, as torch computes it, or None for fewer than two numbers."""
        return sqrt(self.squares / (self.finite - 1)) if self.finite > 1 else None

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares of all finite numbers."""
        return sqrt(self.squares + self.finite * (self.mean * self.mean))


def _magnitudes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of complex `numbers`. A number with a NaN component has the magnitude NaN."""
    values = numbers.abs()
    values[numbers.isnan()] = torch.nan
    return values


def _extremes(numbers: torch.Tensor) -> tuple[float | int, float | int]:
    """Return the smallest and the largest of `numbers`, exactly. There must be at least one."""
    if numbers.is_floating_point():
        low, high = numbers.aminmax()
        return float(low) + 0.0, float(high) + 0.0  # -0.0 is 0.0
    words = as_whole(numbers)
    if numbers.dtype == torch.uint64:  # torch cannot compare it
        low, high = (words ^ torch.iinfo(torch.int64).min).aminmax()
        return int(low) + (1 << 63), int(high) + (1 << 63)
    low, high = words.aminmax()
    return int(low), int(high)
