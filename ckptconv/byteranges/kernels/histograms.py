"""How many numbers have which magnitude: counts of signs and exponents, and bins made of them."""

from __future__ import annotations

from collections import Counter

import torch

BINS = 32
_EXPONENT = 52  # the bit of a float64 at which its exponent begins, which 11 bits and the sign are
_SIGN = 1 << 11
_BIAS = 1023


def exponents_of(values: torch.Tensor) -> Counter[int]:
    """How many of `values`, finite float64, have which sign and exponent."""
    words = (values.view(torch.int64) >> _EXPONENT) & (2 * _SIGN - 1)
    counts = torch.bincount(words, minlength=1)
    used = counts.nonzero().view(-1)
    return Counter(dict(zip(used.tolist(), counts[used].tolist(), strict=True)))


def bins_of(exponents: Counter[int]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The edges of the bins, and how many numbers each has.

    Half of the bins are for negative numbers. From the largest magnitude down each is half as wide as the one
    before it, but for the two around 0, which have the rest. A bin has its edge on the side of 0; zeros of both
    signs, and float64's subnormal numbers, are on the positive side.
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
