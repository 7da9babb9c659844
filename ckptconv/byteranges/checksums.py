"""CRC-32 checksums of byte ranges, computed in threads beside other work."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, lru_cache

from ckptconv.errors import DOWNLOAD_AGAIN, MalformedError

_WORTH_FASTER = 16 << 10  # bytes: what is faster costs as much to import as summing a megabyte


def checksum(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """The CRC-32 of `data` behind what has the one `before`."""
    return (crc32_for_much() if len(data) >= _WORTH_FASTER else zlib.crc32)(data, before)


@cache
def crc32_for_much() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """The fastest function: that of the extra ``fast``, several times as fast as zlib's, where it is installed."""
    try:
        from zlib_ng.zlib_ng import crc32
    except ImportError:
        return zlib.crc32
    return crc32


def check_crc32(expected: int | None, found: int, where: str) -> None:
    """Raise MalformedError unless a checksum is what it should be, where that is known."""
    if expected is not None and found != expected:
        raise MalformedError(
            "the record is damaged: its checksum is wrong",
            where=where,
            expected=f"{expected:08x}",
            got=f"{found:08x}",
            hint=DOWNLOAD_AGAIN,
        )


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
