"""Tests of the properties of pieces. The bytes of a part equal a slice of the bytes, for all kinds of pieces."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv import errors
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import (
    Assemble,
    ByteRange,
    Cast,
    ChunkPlacement,
    Concat,
    Deferred,
    Gather,
    Inflate,
    InflateSlice,
    Literal,
    Piece,
    joined,
)
from tests.support.pieces import KINDS, RAW, bytes_of, every_data, numbers_in


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """Yield a file that contains seven bytes, the numbers, and the deflated numbers."""
    with Source(numbers_in(tmp_path_factory.mktemp("elements") / "numbers")) as source:
        yield source


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 96), st.integers(0, 96))
def test_part_equals_slice(source: Source, kind: str, first: int, last: int) -> None:
    """A part from any element to any other has the bytes of the slice, also across the boundaries of a chain. The
    complete part is the data itself.
    """
    data, wanted = every_data(source)[kind]
    width = 8 if kind.startswith("cast") else 4
    start, stop = (width * n for n in sorted((first, last)))
    part = data.slice(start, stop - start)
    assert part.length == stop - start
    if stop > start:
        assert bytes_of(part) == wanted[start:stop]
    assert data.slice(0, data.length) is data


def test_range_of_the_checksum(source: Source) -> None:
    """The checksum belongs to the complete range, also if the range is divided or cast. Inflated data has no such
    range.
    """
    every = every_data(source)
    span = every["span"][0]
    for kind in ("span", "chain", "cast span", "cast chain"):
        assert every[kind][0].stored() == span
    assert every["inflate"][0].stored() is every["cast inflate"][0].stored() is None


def test_data_that_is_inflated_into_a_file(source: Source) -> None:
    """Data that is read at arbitrary positions, or is cast from such data, is inflated into a file first. Data that is
    read from its start is not.
    """
    data = every_data(source)["inflate"][0]
    assert isinstance(data, Inflate)
    part, gather = InflateSlice(data, 4, 8), Gather(data, 4, (2,), (2,), 0, 8)
    pieces: list[tuple[Piece, Any]] = [
        (data, None),
        (Literal(b"x"), None),
        (part, data),
        (gather, data),
        (Cast(part, "float32", "float16", 4), data),
        (Cast(data, "float32", "float16", 240), None),
    ]
    for piece, wanted in pieces:
        assert piece.spooled() is wanted


def test_pieces_that_are_known_before_writing(source: Source) -> None:
    """Literals and ranges are known before anything is written. Casts, inflated data and pieces that need checksums are
    not. A deferred piece becomes a literal when it gets the checksums.
    """
    every = every_data(source)
    late = Deferred(8, lambda sums: bytes(sums))
    ready = {kind for kind, (data, _) in every.items() if data.is_at_hand()}
    assert ready == {"span", "chain"} and Literal(b"").is_at_hand() and not late.is_at_hand()
    assert late.resolved([1, 2]) == Literal(b"\1\2") and all(each.resolved([]) is each for each, _ in every.values())


def test_adjacent_pieces_are_joined(source: Source) -> None:
    """Adjacent literals and adjacent ranges of one source are joined, and a chain is replaced with its parts."""
    first, second = ByteRange(source, 7, 3), ByteRange(source, 10, 5)
    chain = Concat((second, first), None, 8)
    assert joined([Literal(b"a"), Literal(b"b"), first, chain, Literal(b"c")]) == (
        Literal(b"ab"),
        ByteRange(source, 7, 8),
        first,
        Literal(b"c"),
    )
    assert chain.part_at(6) == (first, 1) and first.part_at(1) == (first, 1)
    assert Literal(b"abcd").slice(1, 2) == Literal(b"bc")


def test_damage_is_found_during_a_cast(source: Source) -> None:
    """A range with a checksum is checked while it is cast. A part of such a range cannot be checked."""
    span = ByteRange(source, 7, len(RAW), zlib.crc32(RAW) ^ 1)
    with pytest.raises(errors.MalformedError, match="damaged"):
        bytes_of(Cast(span, "float32", "float16", len(RAW) // 2))
    assert len(bytes_of(Cast(span.slice(4, 40), "float32", "float16", 20))) == 20


def test_gathered_and_deferred_pieces_have_no_parts(source: Source) -> None:
    """A gathered or deferred piece can be requested only as a whole, because no caller needs a part of it."""
    span = ByteRange(source, 7, 16)
    pieces: list[Piece] = [
        Gather(span, 4, (2,), (2,), 0, 8),
        Deferred(8, lambda sums: bytes(8)),
    ]
    for piece in pieces:
        assert piece.slice(0, 8) is piece
        with pytest.raises(NotImplementedError):
            piece.slice(4, 4)


def test_part_of_a_tensor_made_of_chunks(source: Source) -> None:
    """A part of a tensor made of chunks contains the matching rows of each chunk."""
    left = ChunkPlacement(ByteRange(source, 0, 8), (0, 0), (4, 2), (2, 1))
    right = ChunkPlacement(ByteRange(source, 8, 2), (1, 2), (2, 1), (1, 1))
    part = Assemble((left, right), (4, 3), 1, 12).slice(6, 6)
    assert part == Assemble(
        (
            ChunkPlacement(ByteRange(source, 4, 4), (0, 0), (2, 2), (2, 1)),
            ChunkPlacement(ByteRange(source, 9, 1), (0, 2), (1, 1), (1, 1)),
        ),
        (2, 3),
        1,
        6,
    )


def test_ranges_with_checksums(source: Source) -> None:
    """``with_checksums`` returns the ranges whose checksums cover the piece. ``checked_range`` returns a range that is
    checked while it is cast.
    """
    known, unknown = ByteRange(source, 7, 16, 1), ByteRange(source, 23, 16)
    chain, part = Concat((known, unknown), None, 32), Concat((unknown,), known, 16)
    placed = Assemble((ChunkPlacement(known, (0,), (4,), (1,)), ChunkPlacement(unknown, (4,), (4,), (1,))), (8,), 4, 32)
    for piece in (known, chain, part, placed):
        assert piece.with_checksums() == Cast(piece, "float32", "float32", piece.length).with_checksums() == (known,)
        assert piece.checked_range() is None
    assert unknown.with_checksums() == Inflate(known, 32, 5).with_checksums() == Literal(b"x").with_checksums() == ()
    assert Cast(known, "float32", "float32", 16).checked_range() is known
    assert Cast(unknown, "float32", "float32", 16).checked_range() is None
    assert Cast(chain, "float32", "float32", 32).checked_range() is None


def test_known_checksums(source: Source) -> None:
    """A checksum is known for a complete range, for complete ranges after one another, and for inflated data. It is not
    known for parts and casts.
    """
    halves = [ByteRange(source, 7 + at, 240, zlib.crc32(RAW[at : at + 240])) for at in (0, 240)]
    assert Concat(tuple(halves), None, 480).crc32_known() == zlib.crc32(RAW)
    assert Concat((halves[0], ByteRange(source, 247, 240)), None, 480).crc32_known() is None
    assert Concat(tuple(halves), ByteRange(source, 7, 480, 1), 480).crc32_known() is None
    assert [halves[0].crc32_known(), Inflate(halves[0], 480, 5).crc32_known()] == [halves[0].crc32, 5]
    assert Cast(halves[0], "float32", "float16", 120).crc32_known() is None
