"""A planned file as a stream: readable at every place without being written. What torch's loader takes instead of a path."""

from __future__ import annotations

import io
from bisect import bisect_right
from itertools import accumulate

from ckptconv import ranges
from ckptconv.model import Inflate, OutFile, Piece, Span

__all__ = ["Unwritten"]


class Unwritten(io.RawIOBase):
    """FILE, whose pieces are literals and ranges, deflated or not. Reading raises what reading its sources raises."""

    def __init__(self, file: OutFile) -> None:
        super().__init__()
        self._size = file.size
        self._pieces = file.pieces
        lengths = [len(piece) if isinstance(piece, bytes) else piece.length for piece in file.pieces]
        self._starts = [0, *accumulate(lengths)][:-1]
        self._at = 0
        self._inflated: tuple[Piece | None, bytes] = (None, b"")  # the last one: a storage is read from end to end

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where reading goes on."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go on reading OFFSET bytes from the start, from here, or from the end."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's WriteableBuffer has no name at run time
        """Fill BUFFER as far as the file goes; the number of bytes."""
        left = memoryview(buffer).cast("B")
        length = min(len(left), max(self._size - self._at, 0))
        left = left[:length]
        i = bisect_right(self._starts, self._at) - 1
        while left:
            done = self._read_piece(self._pieces[i], self._at - self._starts[i], left)
            self._at += done
            left = left[done:]
            i += 1
        return length

    def _read_piece(self, piece: Piece, offset: int, buffer: memoryview) -> int:
        """What PIECE has from OFFSET on, as much as BUFFER takes."""
        if isinstance(piece, Span):
            length = min(piece.length - offset, len(buffer))
            piece.source.read_into(piece.offset + offset, buffer[:length])
            return length
        if isinstance(piece, Inflate):
            if self._inflated[0] is not piece:
                self._inflated = piece, b"".join(ranges.inflated(piece))
            piece = self._inflated[1]
        assert isinstance(piece, bytes)
        data = piece[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)
