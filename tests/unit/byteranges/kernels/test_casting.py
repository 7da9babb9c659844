"""Tests of the cast of numbers to other dtypes. The results equal those of torch's ``.to()`` bit for bit, and each
overflow is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from math import isfinite

import pytest
import torch

from ckptconv.byteranges.kernels.casting import CastBuffer
from ckptconv.byteranges.rounding import RoundingBuffer
from ckptconv.byteranges.spans import ByteRange, Cast
from ckptconv.edits.dtype_rules import FLOATS, INTEGERS, to_dtypes

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The dtypes to cast to. float8_e8m0fnu stores scales, and nothing is cast to it.
TARGETS = sorted(FLOATS - {"float8_e8m0fnu"})
#: The number of mantissa bits, and the bits that are half of a step in a smaller dtype. A number with such a bit can be
#: rounded in different directions.
_MANTISSAS = {
    "float32": (23, (15, 12, 19, 20, 21, 22)),
    "float64": (52, (28, 44, 41, 48, 49, 50)),
}


#: The largest number of each dtype, and the distance to the number that would follow.
_LARGEST = {
    "float32": ((2 - 2**-23) * 2.0**127, 2.0**104),
    "bfloat16": ((2 - 2**-7) * 2.0**127, 2.0**120),
    "float16": (65504, 32),
    "float8_e4m3fn": (448, 32),
    "float8_e4m3fnuz": (240, 16),
    "float8_e5m2": (57344, 8192),
    "float8_e5m2fnuz": (57344, 8192),
}


@cache
def patterns(name: str) -> torch.Tensor:
    """Return numbers of the dtype `name`: all numbers of a small dtype, and of a large one the exponents and mantissas
    that matter.

    All exponents of float32 are included. Those of float64 are the exponents of the other dtypes and some more. All
    numbers are included with both signs.
    """
    dtype = getattr(torch, name)
    if dtype.itemsize <= 2:
        return torch.arange(256**dtype.itemsize).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    width, halves = _MANTISSAS[name]
    whole = (1 << width) - 1
    found = {0, 1, whole, whole - 1}
    for bit in halves:
        half = 1 << bit
        tops = (0, half << 1, whole - (half << 1) + 1)  # even, odd, the last before the exponent changes
        found |= {(top + half + little) & whole for top in tops for little in (-1, 0, 1)}
    most = 1 << (8 * dtype.itemsize - 1 - width)
    exponents = (
        torch.tensor(
            [i for i in range(most) if dtype.itemsize == 4 or i % 61 == 0 or abs(i - most // 2) < 160 or i > most - 3]
        )
        << width
    )
    bits = (exponents[:, None] | torch.tensor(sorted(found))[None]).reshape(-1)
    signed = torch.cat([bits, bits | (1 << 31 if dtype.itemsize == 4 else torch.iinfo(torch.int64).min)])
    words = signed.view(torch.int32)[::2] if dtype.itemsize == 4 else signed  # the lower halves
    return words.contiguous().view(dtype)


def cast(
    numbers: torch.Tensor, new: str, most: int = 1 << 22, shown: Sequence[tuple[int, int]] = (), **bits: bool
) -> tuple[torch.Tensor, int]:
    """Cast `numbers` to the dtype `new` in blocks of `most` bytes. Return the result, and how many of the numbers in
    the ranges `shown` were too large.
    """
    data = numbers.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = getattr(torch, new)
    of = ByteRange(None, 0, len(data))  # type: ignore[arg-type]
    buffer = CastBuffer(Cast(of, str(numbers.dtype)[6:], new, numbers.numel() * dtype.itemsize, **bits), most)
    out, overflowed = in_chunks(buffer, data, shown)
    return torch.frombuffer(out, dtype=dtype), overflowed


def in_chunks(
    buffer: CastBuffer | RoundingBuffer, data: bytes, shown: Sequence[tuple[int, int]]
) -> tuple[bytearray, int]:
    """Cast `data` in chunks that fill `buffer`. Return the result, and how many of the `shown` numbers were too
    large.
    """
    out, overflowed = bytearray(), 0
    for at in range(0, len(data), len(buffer.room)):
        chunk = data[at : at + len(buffer.room)]
        buffer.room[: len(chunk)] = chunk
        result, n = buffer.cast(len(chunk), at, shown)
        out += result
        overflowed += n
    return out, overflowed


def by_torch(numbers: torch.Tensor, new: str) -> torch.Tensor:
    """Return the result of ``.to()``. In bfloat16, all NaNs are replaced with the NaN of torch's scalar code."""
    wanted = numbers.to(getattr(torch, new))
    if new == "bfloat16":
        wanted.view(torch.int16)[wanted.isnan()] = 0x7FC0
    return wanted


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    word = WORDS[wanted.itemsize]
    different = (found.view(word) != wanted.view(word)).nonzero().flatten()
    assert not len(different), [(int(i), found[i], wanted[i]) for i in different[:3]]


def too_large(number: float, new: str) -> bool:
    """Return whether `number` does not fit into `new`.

    An integer does not fit if `new` does not contain it. A finite number does not fit if it rounds to a number above
    the largest one of `new`. Ties are rounded to even.
    """
    if new in INTEGERS:
        info = torch.iinfo(getattr(torch, new))
        return not info.min <= number <= info.max
    if not isfinite(number) or new == "float64":
        return False
    largest, step = _LARGEST[new]
    if new != "float32" and abs(number) < 2.0**127:
        number = struct.unpack("f", struct.pack("f", number))[0]  # torch converts to float32 first
    elif new == "bfloat16":
        number = struct.unpack("f", struct.pack("f", number / 2))[0] * 2
    return abs(number) > largest + step / 2 or (abs(number) == largest + step / 2 and largest / step % 2 == 1)


@pytest.mark.parametrize("new", TARGETS)
@pytest.mark.parametrize("old", sorted(FLOATS))
def test_casts_equal_those_of_torch(old: str, new: str) -> None:
    """A cast gives the same bits as torch for all numbers of small dtypes and all exponents of large ones. The number
    of overflows equals a count of single numbers.
    """
    numbers = patterns(old)
    if old != new:
        found, overflowed = cast(numbers, new)
        assert_bits(found, by_torch(numbers, new))
        assert overflowed == sum(too_large(number, new) for number in numbers.double().tolist() if abs(number) > 200)


@pytest.mark.parametrize("new", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("old", sorted(FLOATS - {"float8_e8m0fnu"}))
@pytest.mark.parametrize("most", [8, 24, 56, 1000])
def test_results_do_not_depend_on_blocks(old: str, new: str, most: int) -> None:
    """The result of a cast does not depend on the position of a number in a block or a vector. This includes the signs
    and payloads of NaNs.
    """
    numbers = patterns(old)[-1500:]
    if old != new:
        whole, overflowed = cast(numbers, new)
        parts, overflowed_too = cast(numbers, new, most)
        assert_bits(parts, whole)
        assert overflowed == overflowed_too


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17])
def test_nans_keep_their_payload(n: int) -> None:
    """A cast from float16 to float32 keeps the payloads of NaNs, also in short tensors. torch gives one of two results,
    depending on the position of a number in a vector.
    """
    halves = torch.tensor([0x7C01, -1, 0x7E00, -0x3AB, 0x3C00] * 4).to(torch.int16).view(torch.float16)[:n]
    found, _ = cast(halves, "float32")
    bits = [bits & 0xFFFF for bits in halves.view(torch.int16).tolist()]
    wanted = [((b & 0x8000) << 16) | 0x7FC00000 | ((b & 0x3FF) << 13) if b & 0x3FF else 0x3F800000 for b in bits]
    assert [bits & 0xFFFFFFFF for bits in found.view(torch.int32).tolist()] == wanted


def integers(name: str) -> torch.Tensor:
    """Return the limits of the dtype `name`, numbers around zero, and numbers near the limits of other dtypes."""
    info = torch.iinfo(getattr(torch, name))
    near = {
        sign * (1 << bits) + little
        for bits in (0, 7, 8, 15, 16, 31, 32, 63, 64)
        for sign in (1, -1)
        for little in (-1, 0, 1)
    }
    near |= {447, 448, 463, 464, 465, 57344, 61439, 61440, 65504, 65519, 65520, 65536}
    inside = sorted(n for n in near | {info.min, info.max} if info.min <= n <= info.max)
    data = b"".join(n.to_bytes(info.bits // 8, "little", signed=info.min < 0) for n in inside)
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, name))


@pytest.mark.parametrize("new", [*sorted(INTEGERS), *TARGETS])
@pytest.mark.parametrize("old", [*sorted(INTEGERS), "bool"])
def test_integers_that_do_not_fit_are_counted(old: str, new: str) -> None:
    """An integer that does not fit becomes the same value as with ``.to()``: another integer, or Inf or the largest
    number of a small float. The number of such integers is returned.
    """
    numbers = torch.tensor([True, False]) if old == "bool" else integers(old)
    found, overflowed = cast(numbers, new)
    assert_bits(found, by_torch(numbers, new))
    assert overflowed == sum(too_large(n, new) for n in numbers.tolist())


@pytest.mark.parametrize(("swapped", "swap"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float32", "bfloat16"),
        ("float64", "float16"),
        ("bfloat16", "float64"),
        ("float16", "float8_e5m2"),
        ("float8_e4m3fn", "float32"),
    ],
)
def test_byte_order_is_swapped_on_input_and_output(old: str, new: str, swapped: bool, swap: bool) -> None:
    """A cast can swap the byte order of its input, of its output, or of both."""

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8).view(-1, tensor.itemsize).flip(1).reshape(-1).view(tensor.dtype)

    numbers = torch.cat([patterns(old), torch.zeros(3).to(getattr(torch, old))])
    wanted = by_torch(numbers, new)
    found, _ = cast(turned(numbers) if swapped else numbers, new, 1 << 10, swapped_in=swapped, swapped_out=swap)
    assert_bits(found, turned(wanted) if swap else wanted)


@pytest.mark.parametrize("new", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_lazy_negation_is_applied_before_rounding(new: str) -> None:
    """A lazy negation flips the sign bit before the number is rounded."""
    numbers = patterns("float32")
    found, _ = cast(numbers, new, neg=True)
    negated = (numbers.view(torch.int32) ^ torch.iinfo(torch.int32).min).view(torch.float32)
    assert_bits(found, by_torch(negated, new))


def test_all_target_dtypes_are_tested() -> None:
    """The command line accepts every target dtype of these tests. FLOATS contains every floating-point dtype of torch,
    except aliases and float4_e2m1fn_x2.
    """
    assert {to_dtypes(name)[0].dtype for name in TARGETS} == set(TARGETS)
    assert {to_dtypes(f"x={name}")[0].dtype for name in INTEGERS} == INTEGERS
    assert {
        name
        for name in dir(torch)
        if isinstance(getattr(torch, name), torch.dtype) and getattr(torch, name).is_floating_point
    } <= {
        *FLOATS,
        "double",
        "float",
        "half",
        "float4_e2m1fn_x2",
    }


@pytest.mark.parametrize("most", [4, 40, 1 << 22])
def test_only_overflows_in_given_ranges_are_counted(most: int) -> None:
    """Only overflows of numbers in the given ranges are counted, for all sizes of blocks."""
    numbers = torch.arange(100.0) * 1000  # numbers from index 66 on are too large
    assert cast(numbers, "float16", most)[1] == 34
    assert cast(numbers, "float16", most, [(0, 66)])[1] == 0
    assert cast(numbers, "float16", most, [(3, 5), (60, 70), (97, 100)])[1] == 4 + 3
