"""Read byte ranges a buffer at a time, and inflate those that are deflated."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.spans import ByteRange, Concat, Inflate
from ckptconv.errors import MalformedError

__all__ = ["BUFFER", "inflated", "read", "read_into"]

BUFFER = 4 << 20  # bytes held at once


def read(span: ByteRange) -> Iterator[bytes]:
    """The bytes of SPAN. Raises as :meth:`~ckptconv.byteranges.sources.Readable.read` does."""
    for at in range(0, span.length, BUFFER):
        yield span.source.read(span.offset + at, min(BUFFER, span.length - at))


def read_into(piece: ByteRange | Concat, offset: int, buffer: memoryview) -> None:
    """Fill BUFFER with what PIECE has from OFFSET on."""
    for part in piece.parts if isinstance(piece, Concat) else (piece,):
        if offset < part.length and buffer:
            length = min(part.length - offset, len(buffer))
            part.source.read_into(part.offset + offset, buffer[:length])
            buffer = buffer[length:]
        offset = max(offset - part.length, 0)


def inflated(piece: Inflate) -> Iterator[bytes]:
    """The bytes that PIECE stands for.

    Raises MalformedError where they are not as many, or not those, that the archive promises.
    """
    inflater = zlib.decompressobj(-15)
    length = crc32 = 0
    where = f"{piece.of.source.path} at byte {piece.of.offset}"
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
