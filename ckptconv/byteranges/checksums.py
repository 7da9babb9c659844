"""Compute, combine and check CRC-32 checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, lru_cache

from ckptconv.errors import DOWNLOAD_AGAIN, MalformedError

_WORTH_FASTER = 16 << 10  # bytes: importing the faster function takes as long as summing a megabyte

# A CRC-32 is the remainder of a polynomial. The highest bit of the number is the coefficient of x to the 0.
_POLYNOMIAL = 0xEDB88320  # zip's (APPNOTE 4.4.7), without its highest power
_ONE = 1 << 31


def checksum(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC-32 of `data`, continued from the CRC-32 `before` of preceding bytes."""
    return (crc32_for_much() if len(data) >= _WORTH_FASTER else zlib.crc32)(data, before)


@cache
def crc32_for_much() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """Return the function of zlib-ng, which the extra ``fast`` installs. Without it, return zlib's, which is slower."""
    try:
        from zlib_ng.zlib_ng import crc32
    except ImportError:
        return zlib.crc32
    return crc32


def check_crc32(expected: int | None, found: int, where: str) -> None:
    """Raise MalformedError if the checksum `found` is not `expected`. If `expected` is None, do nothing.

    `where` is the location, for the error.
    """
    if expected is not None and found != expected:
        raise MalformedError(
            "the record is damaged: its checksum is wrong",
            where=where,
            expected=f"{expected:08x}",
            got=f"{found:08x}",
            hint=DOWNLOAD_AGAIN,
        )


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two adjacent parts from the CRC-32 of each.

    Args:
        first: The CRC-32 of the first part.
        second: The CRC-32 of the second part.
        length: The length of the second part, in bytes.
    """
    return _times(first, _power(8 * length)) ^ second if first else second


def _times(a: int, b: int) -> int:
    """Return the product of the polynomials `a` and `b`."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache
def _power(exponent: int) -> int:
    """Return the polynomial x to the power of `exponent`."""
    square, power = _ONE >> 1, _ONE
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power
