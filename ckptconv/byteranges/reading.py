"""Read what stands somewhere a buffer at a time, and inflate what is deflated."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.spans import Inflate, Literal, Piece
from ckptconv.errors import MalformedError

__all__ = ["BUFFER", "inflated", "read", "read_into"]

BUFFER = 4 << 20  # bytes held at once


def read(piece: Piece) -> Iterator[bytes]:
    """The bytes of a piece that is a literal, deflated, or made of ranges.

    Raises:
        InputChangedError: A file became shorter.
        MalformedError: What is deflated is not what the archive promises.
    """
    if isinstance(piece, Literal):
        yield piece.data
    elif isinstance(piece, Inflate):
        yield from inflated(piece)
    for span in piece.ranges():
        for at in range(0, span.length, BUFFER):
            yield span.source.read(span.offset + at, min(BUFFER, span.length - at))


def read_into(piece: Piece, offset: int, buffer: memoryview) -> None:
    """Fill a buffer from a place in a piece that is a literal or made of ranges."""
    if isinstance(piece, Literal):
        buffer[:] = piece.data[offset : offset + len(buffer)]
    for part in piece.ranges():
        if offset < part.length and buffer:
            length = min(part.length - offset, len(buffer))
            part.source.read_into(part.offset + offset, buffer[:length])
            buffer = buffer[length:]
        offset = max(offset - part.length, 0)


def inflated(piece: Inflate) -> Iterator[bytes]:
    """The bytes that `piece` stands for.

    Raises MalformedError where they are not as many, or not those, that the archive promises.
    """
    inflater = zlib.decompressobj(-15)
    length = crc32 = 0
    where = piece.of.where
    wrong_size = MalformedError("a deflated record has another size than promised", where=where, expected=piece.length)
    for chunk in read(piece.of):
        while True:  # bytes can wait inside the inflater when it has taken the whole chunk
            try:
                data = inflater.decompress(chunk, BUFFER)
            except zlib.error as error:
                raise MalformedError("a deflated record is damaged", where=where, got=error) from error
            chunk = inflater.unconsumed_tail
            length += len(data)
            crc32 = checksum(data, crc32)
            if length > piece.length or inflater.unused_data:
                raise wrong_size
            if data:
                yield data
            elif not chunk:
                break
    if length != piece.length or not inflater.eof:
        raise wrong_size
    check_crc32(piece.crc32, crc32, where)
