"""Parts of storages and the elements of tensors as pieces: their bytes are what slicing
gives, whatever the storage is made of.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv import errors
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.slicing import length_of, part_of, spooled, stored
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Cast, Concat, Data, Gather, Inflate, InflateSlice, Piece
from ckptconv.checkpoint.model import Storage, TensorInfo
from ckptconv.checkpoint.tensor_bytes import piece_of

NUMBERS = torch.arange(-60.0, 60).to(torch.float32)
RAW = NUMBERS.numpy().tobytes()
#: Parts of the numbers: each extent of some view.
RANGES = [(0, 40), (60, 61), (64, 100), (101, 120)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """The numbers, after seven bytes; behind them, deflated."""
    path = tmp_path_factory.mktemp("elements") / "numbers"
    deflater = zlib.compressobj(wbits=-15)
    path.write_bytes(bytes(7) + RAW + deflater.compress(RAW) + deflater.flush())
    with Source(path) as source:
        yield source


def bytes_of(piece: Any) -> bytes:
    with Pieces([piece]) as pieces:
        data = b"".join(bytes(chunk) for chunk in pieces.chunks(piece))
    assert len(data) == length_of(piece)
    return data


def every_data(source: Source) -> dict[str, tuple[Data, bytes]]:
    """Everything that a storage can be made of, and the bytes that it stands for."""
    span = ByteRange(source, 7, len(RAW), zlib.crc32(RAW))
    at = 7 + len(RAW)
    inflate = Inflate(ByteRange(source, at, source.size - at), len(RAW), zlib.crc32(RAW))
    parts = tuple(ByteRange(source, 7 + 4 * a, 4 * (b - a)) for a, b in RANGES)
    chain = Concat(parts, span, sum(part.length for part in parts))
    chained = b"".join(RAW[4 * a : 4 * b] for a, b in RANGES)
    found: dict[str, tuple[Data, bytes]] = {"span": (span, RAW), "inflate": (inflate, RAW), "chain": (chain, chained)}
    for name, (data, raw) in [*found.items()]:
        assert not isinstance(data, Cast)
        wanted = torch.frombuffer(bytearray(raw), dtype=torch.float32).to(torch.float64).numpy().tobytes()
        found[f"cast {name}"] = Cast(data, "float32", "float64", 2 * len(raw)), wanted
    return found


KINDS = ["span", "inflate", "chain", "cast span", "cast inflate", "cast chain"]


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 96), st.integers(0, 96))
def test_a_part_is_what_a_slice_is(source: Source, kind: str, first: int, last: int) -> None:
    """From any element to any other, over the seams of a chain too; the whole is the storage's own data."""
    data, wanted = every_data(source)[kind]
    width = 8 if kind.startswith("cast") else 4
    start, stop = (width * n for n in sorted((first, last)))
    part = part_of(data, start, stop - start)
    assert length_of(part) == stop - start
    if stop > start:
        assert bytes_of(part) == wanted[start:stop]
    assert part_of(data, 0, data.length) is data


def info_of(
    data: Data, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, **bits: bool
) -> TensorInfo:
    nbytes = torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
    contiguous = torch.empty(200, device="meta").as_strided(shape, stride).is_contiguous()
    return TensorInfo(
        "",
        None,
        "strided",
        dtype,
        shape,
        stride,
        offset,
        "cpu",
        nbytes,
        Storage("0", "cpu", data.length, data),
        False,
        False,
        contiguous,
        None,
        **bits,
    )


@pytest.mark.parametrize("neg", [False, True])
@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((4, 5), (5, 1), 41),
        ((5, 4), (1, 5), 42),
        ((3,), (0,), 40),
        ((), (), 77),
        ((3, 3), (1, 2), 44),
        ((30,), (1,), 43),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_elements_in_row_major_order(
    source: Source, kind: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, neg: bool
) -> None:
    """As torch writes them out; a view of a chain lies within one of its parts."""
    data, raw = every_data(source)[kind]
    dtype = "float64" if kind.startswith("cast") else "float32"
    info = info_of(data, dtype, shape, stride, offset, neg=neg)
    wanted = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).as_strided(shape, stride, offset)
    piece = piece_of(info, "little")
    assert bytes_of(piece) == (-wanted if neg else wanted).contiguous().numpy().tobytes()


@pytest.mark.parametrize("kind", ["span", "cast span"])
def test_numbers_of_a_big_endian_machine(source: Source, kind: str) -> None:
    """Are turned round before they are cast, and written as little ones."""
    data, _ = every_data(source)[kind]
    dtype = "float64" if kind.startswith("cast") else "float32"
    turned = torch.frombuffer(
        bytearray(b"".join(RAW[i : i + 4][::-1] for i in range(0, len(RAW), 4))), dtype=torch.float32
    )
    wanted = turned.to(getattr(torch, dtype)).as_strided((5, 2), (2, 3), 9).contiguous()
    piece = piece_of(info_of(data, dtype, (5, 2), (2, 3), 9), "big")
    assert bytes_of(piece) == wanted.numpy().tobytes()


def test_what_has_the_checksum(source: Source) -> None:
    """The whole range, however it was taken apart and cast; what is deflated has its own."""
    every = every_data(source)
    span = every["span"][0]
    for kind in ("span", "chain", "cast span", "cast chain"):
        assert stored(every[kind][0]) is span or stored(every[kind][0]) == span
    assert stored(every["inflate"][0]) is stored(every["cast inflate"][0]) is None


def test_what_is_inflated_into_a_file(source: Source) -> None:
    """What is read at any place, alone or as what is cast; what is read from its start is not."""
    data = every_data(source)["inflate"][0]
    assert isinstance(data, Inflate)
    part, gather = InflateSlice(data, 4, 8), Gather(data, 4, (2,), (2,), 0, 8)
    pieces: list[tuple[Piece, Any]] = [
        (data, None),
        (b"x", None),
        (part, data),
        (gather, data),
        (Cast(part, "float32", "float16", 4), data),
        (Cast(data, "float32", "float16", 240), None),
    ]
    for piece, wanted in pieces:
        assert spooled(piece) is wanted


def test_damage_is_seen_in_what_is_cast(source: Source) -> None:
    """A range with a checksum, read while it is cast, is compared with it; a part of one cannot be."""
    span = ByteRange(source, 7, len(RAW), zlib.crc32(RAW) ^ 1)
    with pytest.raises(errors.MalformedError, match="damaged"):
        bytes_of(Cast(span, "float32", "float16", len(RAW) // 2))
    assert len(bytes_of(Cast(part_of(span, 4, 40), "float32", "float16", 20))) == 20  # type: ignore[arg-type]
