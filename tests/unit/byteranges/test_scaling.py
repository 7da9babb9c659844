"""Tests of the product of codes and scales, and of rounding. NumPy and torch compute the same bits, in windows of any
size.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.byteranges import rounding, scaling
from ckptconv.byteranges.kernels.casting import CastBuffer
from ckptconv.byteranges.rounding import RoundingBuffer, needs_torch
from ckptconv.byteranges.spans import ByteRange, Cast, Literal, Piece, Scaled
from tests.unit.byteranges.kernels.test_casting import in_chunks, patterns

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.fixture
def without_numpy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a function after whose call NumPy cannot be imported."""
    yield lambda: (monkeypatch.setattr(rounding, "numpy", lambda: None), scaling._arrays.cache_clear(),
                   monkeypatch.setattr(scaling, "numpy", lambda: None))  # fmt: skip
    scaling._arrays.cache_clear()


def piece(codes: str, scales: str, matrix: tuple[int, int, int], block: tuple[int, int], **more: Any) -> Scaled:
    """Return a weight of random codes and scales."""
    n, rows, columns = matrix
    grid = n * -(-rows // block[0]) * -(-columns // block[1]) * (4 if scales == "float32" else 1)
    if scales in ("bfloat16", "float16"):
        grid *= 2
    data = random.Random(7).randbytes(n * rows * columns // (2 if codes == "fp4" else 1) + grid)
    second = Literal(b"\x9a\x99\x6c\x40") if more.get("divides") else None
    return Scaled(
        Literal(data[grid:]), Literal(data[:grid]), second, codes, scales, "float32" if second else "", matrix, block,
        0, n * rows * columns * 4, **more,
    )  # fmt: skip


PIECES = [
    *(piece(codes, "float32", (1, 300, 200), (128, 128)) for codes in FLOAT8),
    *(piece("float8_e4m3fn", scales, (2, 61, 129), (16, 100)) for scales in ("uint8", "float8_e8m0fnu", "bfloat16")),
    piece("float8_e4m3fn", "float16", (1, 1, 1), (1, 1)),
    piece("float8_e4m3fn", "float32", (1, 65, 77), (1, 77)),
    piece("fp4", "float8_e4m3fn", (1, 33, 48), (1, 16), divides=True),
    piece("fp4", "ldexp", (3, 70, 64), (1, 32), transposed=True),
]


def values(each: Scaled, window: int = 1 << 22) -> bytes:
    """Return the bytes of `each`, which are read `window` at a time."""
    out = bytearray(each.length)
    for at in range(0, each.length, window):
        scaling.read_scaled(each, at, memoryview(out)[at : at + window])
    return bytes(out)


@pytest.mark.parametrize("each", PIECES)
def test_numpy_and_torch_compute_the_same_bits(each: Scaled, without_numpy: Any) -> None:
    """NumPy and torch compute the same bits, including NaNs. The size of the windows does not change the result."""
    found = values(each)
    assert values(each, 404) == values(each, 4096) == found
    assert b"\x00\x00\xc0\x7f" in found or each.length < 100 or each.transposed
    without_numpy()
    assert needs_torch(each)
    assert values(each, 4096) == values(each) == found


@pytest.mark.parametrize("dtype", [*FLOAT8, "float8_e8m0fnu"])
def test_table_contains_all_codes(dtype: str) -> None:
    """The table of a dtype contains the numbers of torch for every code, and one bit pattern for all NaNs."""
    wanted = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float()
    wanted[wanted.isnan()] = torch.nan
    found = torch.frombuffer(scaling._table(dtype), dtype=torch.float32).view(256, 256, 2)
    assert torch.equal(found[0, :, 0].view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(found[:, 0, 1].view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("shown", [(), ((3, 200), (1000, 70_000))])
@pytest.mark.parametrize("most", [8, 1000, 1 << 20])
def test_rounding(most: int, shown: tuple[tuple[int, int], ...]) -> None:
    """Rounding to bfloat16 gives the same bits and the same number of overflows as CastBuffer, for every exponent with
    the mantissas that matter.
    """
    numbers = patterns("float32").numpy().tobytes() * 5  # more than is rounded at once
    numbers = numbers[: len(numbers) if most > 8 else 4000]
    of = ByteRange(None, 0, len(numbers))  # type: ignore[arg-type]
    buffers = RoundingBuffer(most), CastBuffer(Cast(of, "float32", "bfloat16", len(numbers) // 2), most)
    results = [in_chunks(buffer, numbers, shown) for buffer in buffers]
    assert results[0] == results[1]
    assert results[0][1] or most == 8


def test_options_that_need_torch(without_numpy: Any) -> None:
    """With NumPy, scaled weights and a cast of float32 in the usual byte order to bfloat16 do not need torch. Other
    casts do.
    """
    of = Literal(bytes(8))
    usual = Cast(of, "float32", "bfloat16", 4)
    others: list[Piece] = [
        Cast(of, "float32", "float16", 4),
        Cast(of, "float32", "bfloat16", 4, neg=True),
        Cast(of, "float32", "bfloat16", 4, swapped_in=True),
    ]
    scaled = [Cast(each, "float32", "bfloat16", each.length // 2) for each in PIECES]
    assert not any(map(needs_torch, [of, usual, *PIECES, *scaled])) and all(map(needs_torch, others))
    without_numpy()
    assert all(map(needs_torch, [usual, *PIECES, *scaled])) and not needs_torch(of)


def test_some_columns_of_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a read covers only some columns of the rows, the size of the internal windows does not change the result."""
    each = PIECES[-1]
    found = values(each)
    for window in (1, 40, 1000):
        monkeypatch.setattr(scaling, "_WINDOW", window)
        assert values(each, 400) == found


@pytest.mark.parametrize("dtype", [*FLOAT8, "fp4"])
def test_steps(dtype: str) -> None:
    """The step of a number is the distance to the next larger number. The step of the largest number is the distance to
    the one before it.
    """
    byte = range(8) if dtype == "fp4" else range(128)
    numbers, steps = (
        torch.frombuffer(scaling._table(name), dtype=torch.float32).view(-1, 2)[: len(byte), 0]
        for name in (dtype, scaling._STEP + dtype)
    )
    finite = numbers[numbers.isfinite()]
    assert torch.equal(steps[: len(finite) - 1], finite.diff()) and steps[len(finite) - 1] == finite.diff()[-1]
    assert steps[len(finite) :].isnan().all()
