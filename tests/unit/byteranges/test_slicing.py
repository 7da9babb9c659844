"""Parts of storages as pieces: their bytes are what slicing gives, whatever the storage is made of."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv import errors
from ckptconv.byteranges.slicing import length_of, part_of, spooled, stored
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Cast, Gather, Inflate, InflateSlice, Piece
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
    part = part_of(data, start, stop - start)
    assert length_of(part) == stop - start
    if stop > start:
        assert bytes_of(part) == wanted[start:stop]
    assert part_of(data, 0, data.length) is data


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
