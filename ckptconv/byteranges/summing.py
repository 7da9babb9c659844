"""Compute statistics of numbers: counts of NaN, infinities and zeros, extremes, moments, and a histogram.

Counts and extremes are exact. Mean and squares are computed in float64, a block at a time, and blocks are combined by
Chan's formulas. A mean that is not small is subtracted before squaring. So neither many elements nor a mean far from 0
loses more than a few digits. Complex numbers count by their magnitude.

NumPy sums most dtypes, if it is installed. torch sums the others, and is not imported for those of NumPy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf, isfinite, sqrt
from typing import Any

from ckptconv.byteranges.histograms import exponents_of
from ckptconv.byteranges.rounding import numpy

_BY_NUMPY = {
    "bool",
    *("float64", "float32", "float16", "bfloat16"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
}
_BITS = {"bfloat16": "uint16", "bool": "uint8"}  # dtypes that NumPy does not have, or not for all bytes
_BLOCK = 1 << 18  # elements that NumPy sums in one step: so many that threads of Python rarely wait for each other
_SMALL_BLOCK = 1 << 15  # elements that torch sums with one thread, and that fit into a cache
_DOT = 1 << 13  # elements of a dot product: so few that no library uses threads for it


def is_number(name: str) -> bool:
    """Return whether elements of the dtype `name` are numbers (or bool), one in each item, and can be summed here.

    Raises MissingTorchError if only torch can sum them, and torch is not installed.
    """
    if name in _BY_NUMPY and numpy():
        return True
    from ckptconv.byteranges.kernels.numbers import is_number as is_known

    return is_known(name)


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
        self._name = name
        self._histogram = histogram
        self.nan = self.inf = self.zeros = self.finite = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.mean = self.squares = 0.0
        self.exponents = Counter[int]()

    def add(self, data: memoryview) -> None:
        """Add the elements in `data`, whose bytes may be changed."""
        if self._name in _BY_NUMPY and (np := numpy()):
            numbers = np.frombuffer(data, _BITS.get(self._name, self._name))
            room = np.empty(min(len(numbers), _BLOCK))  # for all blocks, because new memory takes the kernel's time
            with np.errstate(all="ignore"):  # overflow and NaN
                for at in range(0, len(numbers), _BLOCK):
                    block = self._decoded(np, numbers[at : at + _BLOCK])
                    values = room[: len(block)]
                    values[:] = block
                    self._add(np, values, block, _extremes)
            return
        from ckptconv.byteranges.kernels import numbers as kernel
        from ckptconv.byteranges.kernels import torch

        elements = torch.frombuffer(data, dtype=getattr(torch, self._name))
        for at in range(0, len(elements), _SMALL_BLOCK):
            block = elements[at : at + _SMALL_BLOCK]
            values = kernel.magnitudes(kernel.as_complex(block)) if block.is_complex() else kernel.as_real(block)
            is_exact = block.is_floating_point() or block.is_complex()
            self._add(torch, values, values if is_exact else block, kernel.extremes)

    def _decoded(self, np: Any, numbers: Any) -> Any:
        """Return `numbers`, an array of NumPy that may contain bits, as numbers that NumPy computes with quickly."""
        if self._name == "bfloat16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        if self._name == "bool":
            return (numbers != 0).view(np.uint8)
        return numbers.astype(np.float32) if self._name == "float16" else numbers

    def _add(self, xp: Any, values: Any, numbers: Any, extremes: Callable[[Any], tuple[float | int, ...]]) -> None:
        """Add `numbers`, which are `values` in float64. Both are arrays of `xp`, which is NumPy or torch.

        `extremes` returns the smallest and the largest number of an array. `values` is changed.
        """
        total = float(values.sum())
        if not isfinite(total):  # this is rare
            values = numbers = self._finite(xp, values)
            total = float(values.sum())
        n = len(values)
        if not n:
            return
        for at in range(0, n, _SMALL_BLOCK) if self._histogram else ():
            self.exponents.update(exponents_of(values[at : at + _SMALL_BLOCK], xp))
        self.zeros += n - int(xp.count_nonzero(numbers != 0))
        low, high = extremes(numbers)
        mean = total / n if isfinite(total) else min(max(float((values / n).sum()), low), high)
        squares = _squares(values)
        if squares < inf and mean * total <= squares / 100:  # so the difference has as many digits
            squares -= mean * total
        else:
            values -= mean
            squares = _squares(values)
        self._put(n, low, high, mean, squares)

    def _finite(self, xp: Any, values: Any) -> Any:
        """Count the values that are not finite. Return the finite ones."""
        is_finite = xp.isfinite(values)
        nan = int(xp.isnan(values).sum())
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


def _extremes(numbers: Any) -> tuple[float | int, ...]:
    """Return the smallest and the largest of `numbers`, an array of NumPy."""
    return numbers.min().item() + 0, numbers.max().item() + 0  # -0.0 is 0.0


def _squares(values: Any) -> float:
    """Return the sum of the squares of `values`, an array of float64."""
    end = len(values) // _DOT * _DOT
    rows, rest = values[:end].reshape(-1, 1, _DOT), values[end:]
    return float((rows @ rows.reshape(-1, _DOT, 1)).sum() + rest.dot(rest))
