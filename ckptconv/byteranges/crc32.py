"""The arithmetic of CRC-32: the checksum of a whole from those of its parts."""

from __future__ import annotations

from functools import lru_cache

# CRC-32 is the remainder of a polynomial; the highest bit of the number is the coefficient of x to the 0.

_POLYNOMIAL = 0xEDB88320  # zip's (APPNOTE 4.4.7), without its highest power
_ONE = 1 << 31


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two parts, one behind the other, from that of each; ``length`` is that of the second, in bytes."""
    return _times(first, _power(8 * length)) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache
def _power(exponent: int) -> int:
    """X to this power."""
    square, power = _ONE >> 1, _ONE
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power
