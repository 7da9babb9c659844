"""Round float32 to bfloat16 with NumPy, to the same bits as :mod:`ckptconv.byteranges.kernels.casting` with torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ckptconv.byteranges.spans import Cast, Piece, Scaled

_INFINITY, _NAN = 0x7F800000, 0x7FC0  # of float32, of bfloat16
_TOO_LARGE = 0x7F7F8000  # the smallest float32 that rounds to infinity
_SIGN = 0x80000000
#: Bytes that are rounded at once: so many that threads of Python rarely wait for each other, and so few that the
#: intermediate numbers stay in a processor's cache.
_BLOCK = 1 << 20


@cache
def numpy() -> Any:
    """Return the module NumPy, or None if it cannot be imported."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np


def needs_torch(piece: Piece) -> bool:
    """Return whether the bytes of `piece` are computed, and NumPy is not installed or cannot compute them."""
    if isinstance(piece, Cast):
        is_usual = (piece.old, piece.new) == ("float32", "bfloat16")
        is_plain = not (piece.conj or piece.neg or piece.swapped_in or piece.swapped_out)
        return needs_torch(piece.of) or not (is_usual and is_plain and numpy())
    return piece.is_computed and not (isinstance(piece, Scaled) and numpy())


class RoundingBuffer:
    """Memory for numbers and for their rounded values, used by one thread at a time.

    Attributes:
        room: The memory to fill with numbers.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate memory for `nbytes` bytes of numbers, rounded down to complete numbers."""
        self.room, self._out = memoryview(bytearray(nbytes // 4 * 4)), memoryview(bytearray(nbytes // 4 * 2))
        self._sums = numpy().empty(_BLOCK // 4, numpy().uint32)

    def cast(self, filled: int, at: int, shown: Sequence[tuple[int, int]]) -> tuple[memoryview, int]:
        """Round the first `filled` bytes of the room. Return the result, and how many finite numbers were too large.

        The parameters are the same as in :meth:`ckptconv.byteranges.kernels.casting.CastBuffer.cast`. The result is
        valid until the next call.
        """
        overflowed, out = 0, self._out[: filled // 2]
        for start in range(0, filled, _BLOCK):
            block = self.room[start : min(start + _BLOCK, filled)]
            overflowed += self._round(block, out[start // 2 :][: len(block) // 2], (at + start) // 4, shown)
        return out, overflowed

    def _round(self, block: memoryview, out: memoryview, first: int, shown: Sequence[tuple[int, int]]) -> int:
        """Round the numbers in `block` to `out`. Return how many of those in `shown` were too large.

        `first` is the index of the first number.
        """
        np = numpy()
        bits, halves = np.frombuffer(block, np.uint32), np.frombuffer(out, np.uint16)
        sums = np.right_shift(bits, 16, out=self._sums[: len(bits)])
        sums &= 1
        sums += bits
        sums += 0x7FFF  # now the upper half is rounded, and ties are even
        sums >>= 16
        halves[:] = sums
        if bits.view(np.int32).max() < _TOO_LARGE and bits.max() < _SIGN | _TOO_LARGE:
            return 0
        magnitudes = bits & ~np.uint32(_SIGN)
        halves[magnitudes > _INFINITY] = _NAN
        return count_shown((magnitudes >= _TOO_LARGE) & (magnitudes < _INFINITY), first, shown)


def count_shown(mask: Any, first: int, shown: Sequence[tuple[int, int]]) -> int:
    """Return how many elements of `mask` are True and among those in `shown`, or among all if `shown` is empty.

    `first` is the index of the first element.
    """
    last = first + len(mask)
    inside = [(max(start - first, 0), stop - first) for start, stop in shown if start < last and stop > first]
    return sum(int(mask[start:stop].sum()) for start, stop in (inside if shown else [(0, len(mask))]))
