"""What pieces say of themselves. The bytes of their parts are what slicing gives, whatever they are made of."""

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
    """The numbers, after seven bytes; behind them, deflated."""
    with Source(numbers_in(tmp_path_factory.mktemp("elements") / "numbers")) as source:
        yield source


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 96), st.integers(0, 96))
def test_a_part_is_what_a_slice_is(source: Source, kind: str, first: int, last: int) -> None:
    """From any element to any other, over the seams of a chain too; the whole is the storage's own data."""
    data, wanted = every_data(source)[kind]
    width = 8 if kind.startswith("cast") else 4
    start, stop = (width * n for n in sorted((first, last)))
    part = data.slice(start, stop - start)
    assert part.length == stop - start
    if stop > start:
        assert bytes_of(part) == wanted[start:stop]
    assert data.slice(0, data.length) is data


def test_what_has_the_checksum(source: Source) -> None:
    """The whole range, however it was taken apart and cast; what is deflated has its own."""
    every = every_data(source)
    span = every["span"][0]
    for kind in ("span", "chain", "cast span", "cast chain"):
        assert every[kind][0].stored() == span
    assert every["inflate"][0].stored() is every["cast inflate"][0].stored() is None


def test_what_is_inflated_into_a_file(source: Source) -> None:
    """What is read at any place, alone or as what is cast; what is read from its start is not."""
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


def test_what_is_known_before_anything_is_written(source: Source) -> None:
    """Bytes of our own and ranges; what is computed, inflated or waits for checksums is not. Those make bytes of it."""
    every = every_data(source)
    late = Deferred(8, lambda sums: bytes(sums))
    ready = {kind for kind, (data, _) in every.items() if data.is_at_hand()}
    assert ready == {"span", "chain"} and Literal(b"").is_at_hand() and not late.is_at_hand()
    assert late.resolved([1, 2]) == Literal(b"\1\2") and all(each.resolved([]) is each for each, _ in every.values())


def test_what_lies_side_by_side_is_one(source: Source) -> None:
    """Literals, and ranges of one source; a chain by its parts."""
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


def test_damage_is_seen_in_what_is_cast(source: Source) -> None:
    """A range with a checksum, read while it is cast, is compared with it; a part of one cannot be."""
    span = ByteRange(source, 7, len(RAW), zlib.crc32(RAW) ^ 1)
    with pytest.raises(errors.MalformedError, match="damaged"):
        bytes_of(Cast(span, "float32", "float16", len(RAW) // 2))
    assert len(bytes_of(Cast(span.slice(4, 40), "float32", "float16", 20))) == 20


def test_what_is_made_as_a_whole_has_no_parts(source: Source) -> None:
    """Nobody asks for a part of what is made for one tensor, or for the file; all of it is a piece."""
    span = ByteRange(source, 7, 16)
    pieces: list[Piece] = [
        Gather(span, 4, (2,), (2,), 0, 8),
        Deferred(8, lambda sums: bytes(8)),
    ]
    for piece in pieces:
        assert piece.slice(0, 8) is piece
        with pytest.raises(NotImplementedError):
            piece.slice(4, 4)


def test_rows_of_what_is_put_together(source: Source) -> None:
    """A part of a tensor made of chunks takes the rows of each chunk that are in it."""
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


def test_which_ranges_have_checksums(source: Source) -> None:
    """Those that say whether the piece is what it should be, and the one that is checked as it is cast."""
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


def test_the_checksum_that_is_known(source: Source) -> None:
    """That of records as they are, and of whole records behind one another, but of no parts of any."""
    halves = [ByteRange(source, 7 + at, 240, zlib.crc32(RAW[at : at + 240])) for at in (0, 240)]
    assert Concat(tuple(halves), None, 480).crc32_known() == zlib.crc32(RAW)
    assert Concat((halves[0], ByteRange(source, 247, 240)), None, 480).crc32_known() is None
    assert Concat(tuple(halves), ByteRange(source, 7, 480, 1), 480).crc32_known() is None
    assert [halves[0].crc32_known(), Inflate(halves[0], 480, 5).crc32_known()] == [halves[0].crc32, 5]
    assert Cast(halves[0], "float32", "float16", 120).crc32_known() is None
