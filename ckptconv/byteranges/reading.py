"""Read pieces in buffers, inflate deflated bytes, decode texts that contain bytes, compare two streams."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.sources import Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, ByteSource, Inflate, Literal, Piece
from ckptconv.errors import MalformedError
from ckptconv.light_dataclass import dataclass

_S = TypeVar("_S", bound=ByteSource)

BUFFER = 4 << 20  # bytes in memory at the same time
AHEAD = 4096  # bytes read at once for short reads: small records are close to each other
_STEP = 1 << 20  # bytes of a text that are decoded at once


def announce(pieces: Iterable[Piece], *, keep: Path | None = None) -> int:
    """Announce to the remote sources of `pieces` which ranges will be read, in this order.

    `keep` is the folder in which the ranges are kept if they are read more than once. Return the number of bytes that
    will be kept, 0 without `keep`.
    """
    remote: dict[int, tuple[Readable, list[tuple[int, int]]]] = {}
    for span in (span for piece in pieces for span in piece.read_from()):
        source, offset = located(span)
        if isinstance(source, Readable) and source.is_far:
            remote.setdefault(id(source), (source, []))[1].append((offset, offset + span.length))
    for source, ranges in remote.values():
        source.announce(ranges, keep=keep)
    return sum(stop - start for _, ranges in remote.values() for start, stop in ranges) if keep else 0


def located(span: ByteRange) -> tuple[ByteSource, int]:
    """Return the source that contains the bytes of `span`, and the offset in it. Slices of sources are resolved."""
    source: ByteSource = span.source
    offset = span.offset
    while isinstance(source, SliceSource):
        offset += source.offset
        source = source.of
    return source, offset


def shared_source(span: ByteRange) -> Readable | None:
    """Return the source of `span` if threads can read it at the same time: a local file, or a remote one. Else None."""
    source, _ = located(span)
    return source if isinstance(source, Readable) and source.is_concurrent else None


class Window(Generic[_S]):
    """A buffer over a source, so that many short reads at increasing offsets take few system calls.

    Attributes:
        source: The source.
    """

    def __init__(self, source: _S) -> None:
        self.source = source
        self._offset = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`, from the buffer if it contains them. Raises what the source raises."""
        start = offset - self._offset
        if start < 0 or start + length > len(self._data):
            self._data, self._offset, start = self.source.read_ahead(offset, length, AHEAD), offset, 0
        return self._data[start : start + length]


def read(piece: Piece) -> Iterator[bytes]:
    """Yield the bytes of a piece that is a literal, is deflated, or consists of ranges. Yield nothing for other pieces.

    Raises:
        InputChangedError: A file became shorter.
        UnreadableError: The system could not read a file.
        MalformedError: The inflated bytes do not have the length or the checksum that the archive declares.
    """
    if isinstance(piece, Literal):
        yield piece.data
    elif isinstance(piece, Inflate):
        yield from inflated(piece)
    for span in piece.ranges():
        for at in range(0, span.length, BUFFER):
            yield span.source.read(span.offset + at, min(BUFFER, span.length - at))


def read_into(piece: Piece, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes at `offset` of `piece`, which is a literal or consists of ranges."""
    if isinstance(piece, Literal):
        buffer[:] = piece.data[offset : offset + len(buffer)]
    for part in piece.ranges():
        if offset < part.length and buffer:
            length = min(part.length - offset, len(buffer))
            part.source.read_into(part.offset + offset, buffer[:length])
            buffer = buffer[length:]
        offset = max(offset - part.length, 0)


def crc32_of(piece: ByteRange | Literal, start: int = 0) -> int:
    """Return the CRC-32 of the bytes of `piece`, continued from the CRC-32 `start` of preceding bytes."""
    for chunk in read(piece):
        start = checksum(chunk, start)
    return start


def inflated(piece: Inflate) -> Iterator[bytes]:
    """Yield the inflated bytes of `piece`.

    Raises MalformedError if the stream is damaged, or has another length or checksum than the archive declares.
    """
    inflater = zlib.decompressobj(-15)
    length = crc32 = 0
    where = piece.of.where
    wrong_size = MalformedError(
        "a compressed record has another size than declared", where=where, expected=piece.length
    )
    for chunk in read(piece.of):
        while True:  # the inflater can still contain output after it has consumed the chunk
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


def same_streams(a: Iterator[bytes | memoryview], b: Iterator[bytes | memoryview]) -> bool:
    """Return whether `a` and `b` yield the same bytes. The sizes of their buffers may differ."""
    left = right = memoryview(b"")
    while True:
        left, right = left or _next(a), right or _next(b)
        n = min(len(left), len(right))
        if not n:
            return not (left or right)
        if bytes(left[:n]) != bytes(right[:n]):
            return False
        left, right = left[n:], right[n:]


def _next(stream: Iterator[bytes | memoryview]) -> memoryview:
    """Return the next buffer that is not empty. At the end, return an empty one."""
    return next((memoryview(chunk) for chunk in stream if chunk), memoryview(b""))


def no_bytes(where: str) -> MalformedError:
    """Return the error for a text that should contain bytes and has characters above 255. `where` is its location."""
    return MalformedError("a text that encodes bytes has characters above U+00FF", where=where)


@dataclass
class Step:
    """The last decoded bytes: those of block `index` of the text at `offset`."""

    offset: int = -1
    index: int = -1
    data: bytes = b""


class Latin1Text(Readable):
    """The bytes that a long text stands for: each is a character below 256, which the file stores as UTF-8.

    Pickles of protocol 2 store bytes objects in this way, among them the data of numpy arrays.
    """

    def __init__(self, of: ByteRange, where: str = "", last: Step | None = None) -> None:
        """Decode the text `of` once, to find out the number of its bytes.

        Args:
            of: The range of the text.
            where: The location, for messages.
            last: A cache of the last decoded block. Texts that are read in turn can share one.

        Raises:
            MalformedError: The text contains a character above 255, or is not UTF-8.
        """
        self.path = of.source.path
        self._of, self._where, self._last = of, where or str(of.source.path), last or Step()
        self._starts = [0]  # the offset in the result of the first byte of each block
        for i in range(-(-of.length // _STEP)):
            self._starts.append(self._starts[-1] + len(self._step(i)))
        self.size = self._starts.pop()

    def _step(self, i: int) -> bytes:
        """Return the bytes of the characters that begin in block `i` of the text. Raises MalformedError."""
        of, last = self._of, self._last
        if (last.offset, last.index) != (of.offset, i):
            start, end = i * _STEP, min((i + 1) * _STEP, of.length)
            # one byte more, because a character has at most two, the second of which begins with the bits 10
            utf8 = of.source.read(of.offset + start, min(end + 1, of.length) - start)
            first = start and _continues(utf8[0])
            stop = len(utf8) if end == of.length or _continues(utf8[-1]) else len(utf8) - 1
            try:
                last.data = utf8[first:stop].decode().encode("latin-1")
            except UnicodeError:
                last.offset = -1
                raise no_bytes(self._where) from None
            last.offset, last.index = of.offset, i
        return last.data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset`. Raises MalformedError, and the errors of reading the file."""
        while buffer:
            i = bisect_right(self._starts, offset) - 1
            part = self._step(i)[offset - self._starts[i] :][: len(buffer)]
            buffer[: len(part)] = part
            buffer, offset = buffer[len(part) :], offset + len(part)


def _continues(byte: int) -> bool:
    """Return whether `byte` is the second byte of a UTF-8 character."""
    return byte & 0xC0 == 0x80
