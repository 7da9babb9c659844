"""Numbers cast to other dtypes: torch's ``.to()`` says what is right, bit for bit, and
what overflows is counted one by one.
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
#: float8_e8m0fnu holds scales, and nothing is cast to it.
TARGETS = sorted(FLOATS - {"float8_e8m0fnu"})
#: Bits behind the exponent in which rounding goes different ways, for each of the smaller dtypes: halves of a step, one
#: more and one less, all ones.
_MANTISSAS = {
    "float32": (23, (15, 12, 19, 20, 21, 22)),
    "float64": (52, (28, 44, 41, 48, 49, 50)),
}


#: The largest number, and the step to the one that would come next.
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
    """Every number of a small dtype; of a large one every exponent (in float64 those that the others have, and some)
    with the mantissas that matter, of both signs.
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
    """`numbers` as `new`, so many bytes at once, and how many of those that are `shown` were too large."""
    data = numbers.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = getattr(torch, new)
    of = ByteRange(None, 0, len(data))  # type: ignore[arg-type]
    buffer = CastBuffer(Cast(of, str(numbers.dtype)[6:], new, numbers.numel() * dtype.itemsize, **bits), most)
    out, overflowed = in_chunks(buffer, data, shown)
    return torch.frombuffer(out, dtype=dtype), overflowed


def in_chunks(
    buffer: CastBuffer | RoundingBuffer, data: bytes, shown: Sequence[tuple[int, int]]
) -> tuple[bytearray, int]:
    """Cast `data` in chunks that fill `buffer`. Return it, and how many of the `shown` numbers were too large."""
    out, overflowed = bytearray(), 0
    for at in range(0, len(data), len(buffer.room)):
        chunk = data[at : at + len(buffer.room)]
        buffer.room[: len(chunk)] = chunk
        result, n = buffer.cast(len(chunk), at, shown)
        out += result
        overflowed += n
    return out, overflowed


def by_torch(numbers: torch.Tensor, new: str) -> torch.Tensor:
    """What ``.to()`` gives, where NaNs in bfloat16 are the one that torch's plain code makes."""
    wanted = numbers.to(getattr(torch, new))
    if new == "bfloat16":
        wanted.view(torch.int16)[wanted.isnan()] = 0x7FC0
    return wanted


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    word = WORDS[wanted.itemsize]
    different = (found.view(word) != wanted.view(word)).nonzero().flatten()
    assert not len(different), [(int(i), found[i], wanted[i]) for i in different[:3]]


def too_large(number: float, new: str) -> bool:
    """Whether `number` is finite and nearer to what would come behind the largest number of `new`;
    in the middle, whether the largest is odd. An integer has to be one of `new`.
    """
    if new in INTEGERS:
        info = torch.iinfo(getattr(torch, new))
        return not info.min <= number <= info.max
    if not isfinite(number) or new == "float64":
        return False
    largest, step = _LARGEST[new]
    if new != "float32" and abs(number) < 2.0**127:
        number = struct.unpack("f", struct.pack("f", number))[0]  # as torch does it: first float32
    elif new == "bfloat16":
        number = struct.unpack("f", struct.pack("f", number / 2))[0] * 2
    return abs(number) > largest + step / 2 or (abs(number) == largest + step / 2 and largest / step % 2 == 1)


@pytest.mark.parametrize("new", TARGETS)
@pytest.mark.parametrize("old", sorted(FLOATS))
def test_every_number_is_what_torch_makes_of_it(old: str, new: str) -> None:
    """All numbers of the small dtypes, all exponents of the large ones; and as many overflow
    as a count of one after another finds.
    """
    numbers = patterns(old)
    if old != new:
        found, overflowed = cast(numbers, new)
        assert_bits(found, by_torch(numbers, new))
        assert overflowed == sum(too_large(number, new) for number in numbers.double().tolist() if abs(number) > 200)


@pytest.mark.parametrize("new", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("old", sorted(FLOATS - {"float8_e8m0fnu"}))
@pytest.mark.parametrize("most", [8, 24, 56, 1000])
def test_blocks_do_not_matter(old: str, new: str, most: int) -> None:
    """A number becomes the same wherever it stands in a block or a vector, NaNs with their signs and payloads too."""
    numbers = patterns(old)[-1500:]
    if old != new:
        whole, overflowed = cast(numbers, new)
        parts, overflowed_too = cast(numbers, new, most)
        assert_bits(parts, whole)
        assert overflowed == overflowed_too


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17])
def test_nans_keep_their_payload(n: int) -> None:
    """From float16 to float32, however few there are: torch has two answers, by the number's place in a vector."""
    halves = torch.tensor([0x7C01, -1, 0x7E00, -0x3AB, 0x3C00] * 4).to(torch.int16).view(torch.float16)[:n]
    found, _ = cast(halves, "float32")
    bits = [bits & 0xFFFF for bits in halves.view(torch.int16).tolist()]
    wanted = [((b & 0x8000) << 16) | 0x7FC00000 | ((b & 0x3FF) << 13) if b & 0x3FF else 0x3F800000 for b in bits]
    assert [bits & 0xFFFFFFFF for bits in found.view(torch.int32).tolist()] == wanted


def integers(name: str) -> torch.Tensor:
    """The ends, the middle, and what lies around the ends of the other dtypes."""
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
    """They become what ``.to()`` makes of them: another integer, or Inf or the largest number of a small float; as many
    as have no place in the new dtype are named.
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
def test_bytes_are_turned_round_on_both_sides(old: str, new: str, swapped: bool, swap: bool) -> None:
    """Of what comes in, of what goes out, and of both."""

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8).view(-1, tensor.itemsize).flip(1).reshape(-1).view(tensor.dtype)

    numbers = torch.cat([patterns(old), torch.zeros(3).to(getattr(torch, old))])
    wanted = by_torch(numbers, new)
    found, _ = cast(turned(numbers) if swapped else numbers, new, 1 << 10, swapped_in=swapped, swapped_out=swap)
    assert_bits(found, turned(wanted) if swap else wanted)


@pytest.mark.parametrize("new", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_a_pending_negation_comes_first(new: str) -> None:
    """What torch negates lazily is negated as bits, then rounded."""
    numbers = patterns("float32")
    found, _ = cast(numbers, new, neg=True)
    negated = (numbers.view(torch.int32) ^ torch.iinfo(torch.int32).min).view(torch.float32)
    assert_bits(found, by_torch(negated, new))


def test_every_target_is_among_them() -> None:
    """The tests above miss no dtype that the command line takes."""
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
def test_what_no_tensor_shows_does_not_count(most: int) -> None:
    """Wherever the blocks end, those numbers count that stand in one of the ranges."""
    numbers = torch.arange(100.0) * 1000  # from 66 on they are too large
    assert cast(numbers, "float16", most)[1] == 34
    assert cast(numbers, "float16", most, [(0, 66)])[1] == 0
    assert cast(numbers, "float16", most, [(3, 5), (60, 70), (97, 100)])[1] == 4 + 3
