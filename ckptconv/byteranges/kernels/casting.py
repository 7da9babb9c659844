"""Cast numbers as torch does, resolve conjugate and negative bits, and swap byte order.

In some cases torch's result depends on the processor, or on the position of a number in a vector. Then one of its
results is chosen: NaNs become bfloat16 as in its scalar code (vector instructions lose sign and payload in several
ways), and float32 from float16 as in its vector code (the scalar code loses both).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ckptconv.byteranges.rounding import count_shown
from ckptconv.byteranges.spans import Cast

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INT64 = torch.iinfo(torch.int64)
_NAN = 0x7FC0  # of bfloat16: c10/util/BFloat16.h, round_to_nearest_even
_QUIET = 0x7FC00000  # the bits that every NaN from arithmetic has in float32
_PAYLOAD = 0x007FE000  # the bits of a NaN's payload in float32 that float16 has too
_HALF = 0x7FFF  # all bits of float16 except the sign


class CastBuffer:
    """Memory for numbers and for the results of their cast, used by one thread at a time.

    Attributes:
        room: The memory to fill with numbers.
    """

    def __init__(self, piece: Cast, nbytes: int) -> None:
        """Allocate memory for `nbytes` bytes of numbers. The dtypes, lazy bits and byte orders are those of `piece`."""
        self._piece = piece
        self._old: torch.dtype = getattr(torch, piece.old)
        self._new: torch.dtype = getattr(torch, piece.new)
        elements = nbytes // self._old.itemsize
        self.room = memoryview(bytearray(elements * self._old.itemsize))
        self._out = self.room if self._old == self._new else memoryview(bytearray(elements * self._new.itemsize))

    def cast(self, filled: int, at: int, shown: Sequence[tuple[int, int]]) -> tuple[memoryview, int]:
        """Cast the first `filled` bytes of the room. Return the result, and how many finite numbers were too large.

        The result is valid until the next call.

        Args:
            filled: The number of bytes, a multiple of the item size.
            at: The offset of these bytes in the source piece.
            shown: Pairs of a first element and an exclusive end, as in :class:`~ckptconv.byteranges.spans.Cast`. Only
                numbers among these elements are counted as too large. Empty: all.
        """
        data, out = self.room[:filled], self._out[: filled // self._old.itemsize * self._new.itemsize]
        piece, overflowed = self._piece, 0
        if piece.swapped_in:
            _reverse_bytes(data, self._old)
        if piece.conj or piece.neg:
            _flip_signs(data, self._old, conj=piece.conj, neg=piece.neg)
        if self._old != self._new:
            numbers = torch.frombuffer(data, dtype=self._old)
            rounded = torch.frombuffer(out, dtype=self._new)
            rounded.copy_(numbers)
            too_large = _mend(numbers, rounded)
            if too_large is not None:
                overflowed = count_shown(too_large, at // self._old.itemsize, shown)
        if piece.swapped_out:
            _reverse_bytes(out, self._new)
        return out, overflowed


def _mend(numbers: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of the finite `numbers` that were too large for the dtype of `rounded`. None if there are none.

    The NaNs in `rounded` are changed so that they are the same on all machines.
    """
    if not rounded.is_floating_point():
        return _outside(numbers, torch.iinfo(rounded.dtype))
    if rounded.dtype == torch.float64:
        return None
    if (numbers.dtype, rounded.dtype) == (torch.float16, torch.float32):
        _keep_nans(numbers, rounded)
        return None
    finite = None
    if numbers.dtype == torch.float64 and rounded.dtype != torch.float32:
        finite = numbers.isfinite()  # torch rounds twice, by way of float32
    if finite is not None or numbers.dtype.itemsize == 1 or not numbers.is_floating_point():
        numbers = numbers.float()  # torch cannot compare float8 and some integers
    low, high = torch.aminmax(numbers)  # both are NaN if there is a NaN
    largest = torch.finfo(rounded.dtype).max
    if low >= -largest and high <= largest:
        return None
    if rounded.dtype == torch.bfloat16:
        rounded.view(torch.int16)[numbers.isnan()] = _NAN
    elif rounded.dtype == torch.float16:
        _shorten_nans(numbers.float(), rounded)
    most = _most(rounded.dtype)
    too_large = numbers.abs() > most if rounded.dtype == torch.float8_e4m3fn else numbers.abs() >= most
    return too_large & (numbers.isfinite() if finite is None else finite)


def _keep_nans(halves: torch.Tensor, floats: torch.Tensor) -> None:
    """Give the NaNs in `floats` the sign and payload of the same elements of `halves`."""
    if floats.aminmax().min.isnan():  # this is faster than checking each number
        is_nan = halves.isnan()
        bits = halves.view(torch.int16)[is_nan].to(torch.int32)
        sign = torch.iinfo(torch.int32).min
        floats.view(torch.int32)[is_nan] = (bits & sign) | _QUIET | (bits << 13 & _PAYLOAD)


def _shorten_nans(floats: torch.Tensor, halves: torch.Tensor) -> None:
    """Give the NaNs in `halves` the sign of the same elements of `floats`, and as much of the payload as fits.

    At the end of a tensor, the scalar code of torch 2.6 writes other bits than its vector code.
    """
    is_nan = floats.isnan()
    bits = floats.view(torch.int32)[is_nan]
    sign = (bits < 0).to(torch.int32) << 15
    halves.view(torch.int16)[is_nan] = (sign | (_QUIET | (bits & _PAYLOAD)) >> 13 & _HALF).to(torch.int16)


def _outside(numbers: torch.Tensor, info: torch.iinfo) -> torch.Tensor | None:
    """Return a mask of the integers in `numbers` that are outside the range of `info`. None if all are inside."""
    if numbers.dtype == torch.uint64:
        wide = numbers.view(torch.int64)  # in which the upper half is negative
        return None if info.max > _INT64.max else (wide < 0) | (wide > info.max)
    wide = numbers.to(torch.int64)
    return (wide < info.min) | (wide > min(info.max, _INT64.max))


@cache
def _most(dtype: torch.dtype) -> float:
    """Return the middle between the largest number of `dtype` and the number that would follow it.

    Larger numbers overflow when they are rounded. The middle itself overflows too, except in float8_e4m3fn, whose
    largest number has an even mantissa.
    """
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    before = (largest.view(_WORDS[dtype.itemsize]) - 1).view(dtype)
    return float(largest.double() + (largest.double() - before.double()) / 2)


def _reverse_bytes(data: memoryview, dtype: torch.dtype) -> None:
    """Reverse the bytes of each number in `data`."""
    numbers = torch.frombuffer(data, dtype=torch.uint8).view(-1, _width(dtype))
    numbers.copy_(numbers.flip(1))


def _flip_signs(data: memoryview, dtype: torch.dtype, *, conj: bool, neg: bool) -> None:
    """Resolve torch's lazy bits by inverting sign bits.

    Arithmetic would change NaNs at some positions of a vector and not at others.
    """
    words = torch.frombuffer(data, dtype=_WORDS[_width(dtype)])
    sign = torch.iinfo(words.dtype).min
    if neg:
        words ^= sign
    if conj:
        words[1::2] ^= sign


def _width(dtype: torch.dtype) -> int:
    """Return the number of bytes of one real number of `dtype`."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)
