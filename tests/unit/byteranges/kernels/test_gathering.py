"""Tests of the output of strided views in row-major order. The result equals that of torch for all sizes of blocks,
tiles and gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.kernels import gathering
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Cast, Gather
from ckptconv.dtypes import BY_NAME
from tests.support.pieces import bytes_of

DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex64")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """Yield a source of 64 KiB of random bytes."""
    path = tmp_path_factory.mktemp("storage") / "bytes"
    path.write_bytes(bytes(torch.randint(0, 256, (1 << 16,), generator=torch.manual_seed(0)).tolist()))
    with Source(path) as source:
        yield source


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the length of each read is added."""
    lengths: list[int] = []
    original = Source.read_into

    def counted(self: Source, offset: int, buffer: memoryview) -> None:
        lengths.append(len(buffer))
        original(self, offset, buffer)

    monkeypatch.setattr(Source, "read_into", counted)
    return lengths


def strided(view: Cast) -> Gather:
    """Return the :class:`Gather` that `view` casts."""
    assert isinstance(view.of, Gather)
    return view.of


def gathered(source: Source, view: Cast) -> bytes:
    return bytes_of(replace(view, of=replace(strided(view), of=ByteRange(source, 3, source.size - 3))))


def by_torch(source: Source, view: Cast) -> bytes:
    """Return the bytes that torch computes for `view` on the bytes of `source` from position 3 on."""
    dtype, of = getattr(torch, view.new), strided(view)
    data = bytearray(source.read(3, source.size - 3))
    whole = torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
    if view.swapped_in:
        parts = whole.view(torch.uint8).view(-1, dtype.itemsize // (2 if dtype.is_complex else 1))
        whole = parts.flip(1).reshape(-1).view(dtype)
    tensor = whole.as_strided(of.shape, of.stride, of.offset)
    tensor = tensor.conj() if view.conj else tensor
    tensor = torch._neg_view(tensor) if view.neg else tensor
    out = torch.empty(of.shape, dtype=dtype).copy_(tensor.resolve_conj().resolve_neg())
    return bytes(out.reshape(-1).view(torch.uint8).tolist())


def numbers_of(data: bytes, dtype: str) -> torch.Tensor:
    """Return the real numbers in `data`."""
    real = torch.float32 if dtype == "complex64" else getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=real)


def view_of(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, **bits: bool) -> Cast:
    length = BY_NAME[dtype].itemsize
    for size in shape:
        length *= size
    of = Gather(ByteRange(None, 0, 0), BY_NAME[dtype].itemsize, shape, stride, offset, length)  # type: ignore[arg-type]
    return Cast(of, dtype, dtype, length, **bits)


@st.composite
def views(draw: st.DrawFn) -> Cast:
    """Return a view of up to 4,000 elements in 64 KiB. Its elements can repeat, overlap or have gaps, and its
    dimensions can have any order.
    """
    dtype = draw(st.sampled_from(DTYPES))
    room = ((1 << 16) - 3) // BY_NAME[dtype].itemsize - 1
    shape: list[int] = []
    stride: list[int] = []
    elements = 1
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(1, min(40, 4000 // elements)))
        step = draw(st.integers(0, room // max(size - 1, 1))) if size > 1 else draw(st.integers(0, 1 << 40))
        if draw(st.booleans()):
            step = min(step, draw(st.integers(0, 9)))
        room -= (size - 1) * step if size > 1 else 0
        elements *= size
        shape.append(size)
        stride.append(step)
    conj = dtype == "complex64" and draw(st.booleans())
    neg = dtype != "uint8" and draw(st.booleans())
    swapped = dtype != "uint8" and draw(st.booleans())
    return view_of(
        dtype, tuple(shape), tuple(stride), draw(st.integers(0, room)), conj=conj, neg=neg, swapped_in=swapped
    )


@given(view=views(), block=st.integers(16, 20000), tile=st.integers(16, 20000), gap=st.integers(0, 5000))
def test_gathered_bytes_equal_those_of_torch(storage: Source, view: Cast, block: int, tile: int, gap: int) -> None:
    """Every view has the same bytes as a copy by torch, for all sizes of blocks, tiles and gaps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_BLOCK", block)
        patch.setattr(gathering, "_TILE", tile)
        patch.setattr(gathering, "_GAP", gap)
        ours, theirs = gathered(storage, view), by_torch(storage, view)
    if view.conj or view.neg:  # torch keeps the payload of a NaN in a vector, and loses it after the last vector
        numbers = numbers_of(theirs, view.new)
        torch.testing.assert_close(numbers_of(ours, view.new), numbers, rtol=0, atol=0, equal_nan=True)
    else:
        assert ours == theirs


def test_negation_keeps_nans(storage: Source) -> None:
    """A negation changes only the sign bit, also of NaNs. A conjugation changes only the sign bit of the imaginary
    part.
    """
    view = view_of("bfloat16", (9,), (1,), 40, neg=True)
    plain = storage.read(3 + 80, 18)
    assert gathered(storage, view) == bytes(b ^ 0x80 * (i % 2) for i, b in enumerate(plain))
    view = view_of("complex64", (5,), (1,), 7, conj=True)
    plain = storage.read(3 + 56, 40)
    assert gathered(storage, view) == bytes(b ^ 0x80 * (i % 8 == 7) for i, b in enumerate(plain))
    both = view_of("complex64", (5,), (1,), 7, conj=True, neg=True)
    assert gathered(storage, both) == bytes(b ^ 0x80 * (i % 8 == 3) for i, b in enumerate(plain))


def test_a_chunk_is_never_larger_than_a_block(
    storage: Source, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are not larger than a block, and reads not larger than a tile. Therefore memory depends neither on the
    size of the view nor on the distance of its elements.
    """
    monkeypatch.setattr(gathering, "_BLOCK", 1024)
    monkeypatch.setattr(gathering, "_TILE", 512)
    view = view_of("float32", (100, 120), (1, 130))
    sizes = [len(chunk) for chunk in gathering.gather(strided(view), ByteRange(storage, 0, storage.size))]
    assert max(sizes) <= 1024 and sum(sizes) == view.length
    assert max(reads) <= 512


def test_small_gaps_are_read_and_large_gaps_are_skipped(storage: Source, reads: list[int]) -> None:
    """A column of a narrow matrix is read at once, and a column of a wide matrix with one read for each element.
    Dimensions that overlap are read once.
    """

    def reads_of(view: Cast) -> list[int]:
        reads.clear()
        assert gathered(storage, view) == by_torch(storage, view)
        return list(reads)

    assert reads_of(view_of("float32", (50,), (100,))) == [(49 * 100 + 1) * 4]
    assert reads_of(view_of("float32", (10,), (1500,))) == [4] * 10
    assert reads_of(view_of("float32", (4, 2, 3), (1, 3000, 4))) == [12 * 4] * 2
    assert reads_of(view_of("uint8", (8, 7), (4900, 4800))) == [7 * 4900 + 6 * 4800 + 1]


def test_overlapping_rows_are_read_a_few_times(
    storage: Source, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two dimensions have the same stride, each block reads little more than the range that it spans."""
    monkeypatch.setattr(gathering, "_BLOCK", 2048)
    monkeypatch.setattr(gathering, "_TILE", 2048)
    monkeypatch.setattr(gathering, "_GAP", 64)
    view = view_of("uint8", (400, 400), (63, 63))
    assert gathered(storage, view) == by_torch(storage, view)
    assert len(reads) < 10_000 and sum(reads) < 400 * 60_000
