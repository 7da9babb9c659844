"""Count numbers by their exponents, and turn the counts into the bins of a histogram."""

from __future__ import annotations

from collections import Counter
from typing import Any

BINS = 32
_EXPONENT = 52  # the first bit of the exponent of a float64, which has 11 bits and is followed by the sign
_SIGN = 1 << 11
_BIAS = 1023


def exponents_of(values: Any, xp: Any) -> Counter[int]:
    """Return the counts of `values` by sign and exponent (the upper 12 bits).

    `values` is an array of finite float64 of `xp`, which is NumPy or torch.
    """
    words = (values.view(xp.int64) >> _EXPONENT) & (2 * _SIGN - 1)
    counts = xp.bincount(words, minlength=1)
    used = xp.arange(len(counts))[counts > 0]
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
