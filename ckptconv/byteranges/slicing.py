"""Slice pieces: a part of the bytes of a storage, whatever the storage is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from ckptconv.byteranges.crc32 import combined
from ckptconv.byteranges.spans import (
    Assemble,
    ByteRange,
    Cast,
    Concat,
    Data,
    Gather,
    Inflate,
    InflateSlice,
    Piece,
)
from ckptconv.dtypes import BY_NAME

__all__ = ["crc32_known", "length_of", "part_of", "spooled", "stored", "with_checksums"]


def length_of(piece: Piece) -> int:
    """The bytes of PIECE."""
    return len(piece) if isinstance(piece, bytes) else piece.length


def stored(data: Piece) -> ByteRange | None:
    """The whole range of the source that DATA is made of, if it stands there as it is: what has the checksum."""
    if isinstance(data, Cast):
        return stored(data.of)
    return data.whole if isinstance(data, Concat) else data if isinstance(data, ByteRange) else None


def crc32_known(data: Piece) -> int | None:
    """The checksum that DATA should have, where its source says it: that of a concatenation
    of whole records follows from theirs.
    """
    if isinstance(data, (ByteRange, Inflate)):
        return data.crc32
    if not isinstance(data, Concat) or data.whole is not None:
        return None
    crc32 = 0
    for part in data.parts:
        if part.crc32 is None:
            return None
        crc32 = combined(crc32, part.crc32, part.length)
    return crc32


def with_checksums(data: Piece) -> tuple[ByteRange, ...]:
    """The ranges that DATA is made of whose checksums say whether it is what it should be."""
    of = data.of if isinstance(data, Cast) else data
    spans: tuple[ByteRange, ...] = ()
    if isinstance(of, ByteRange):
        spans = (of,)
    elif isinstance(of, Concat):
        spans = (of.whole,) if of.whole else of.parts
    elif isinstance(of, Assemble):
        spans = tuple(placement.of for placement in of.placements)
    return tuple(span for span in spans if span.crc32 is not None)


def spooled(piece: Piece) -> Inflate | None:
    """What has to be inflated into a file of its own for PIECE, because it is read at any place."""
    if isinstance(piece, Cast):
        return spooled(piece.of)
    return piece.of if isinstance(piece, (InflateSlice, Gather)) and isinstance(piece.of, Inflate) else None


def part_of(data: Data, offset: int, length: int) -> ByteRange | Inflate | InflateSlice | Concat | Assemble | Cast:
    """LENGTH bytes at OFFSET of DATA, which are whole elements if it is a :class:`Cast`."""
    if (offset, length) == (0, data.length):
        return data
    assert not isinstance(data, Assemble)  # one tensor, which shows all of it
    if isinstance(data, ByteRange):
        return ByteRange(data.source, data.offset + offset, length)
    if isinstance(data, Inflate):
        return InflateSlice(data, offset, length)
    if isinstance(data, Concat):
        return Concat(tuple(_within(data, offset, length)), data.whole, length)
    old, new = BY_NAME[data.old].itemsize, BY_NAME[data.new].itemsize
    assert not isinstance(data.of, (InflateSlice, Gather))
    inner = part_of(data.of, offset // new * old, length // new * old)
    assert not isinstance(inner, Cast)
    return replace(data, of=inner, length=length, shown=())


def _within(chain: Concat, offset: int, length: int) -> Iterator[ByteRange]:
    """LENGTH bytes at OFFSET of CONCAT."""
    starts = [0, *accumulate(part.length for part in chain.parts)]
    i = bisect_right(starts, offset) - 1
    while length:
        part = chain.parts[i]
        skipped = offset - starts[i]
        done = min(part.length - skipped, length)
        yield ByteRange(part.source, part.offset + skipped, done)
        offset, length, i = offset + done, length - done, i + 1
