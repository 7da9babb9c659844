"""A read-only, seekable view of a planned file.

torch's loader takes it in place of a path.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Generator, Iterator
from itertools import accumulate

from ckptconv.byteranges import reading
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.spans import OutFile, Piece


class VirtualFile(io.RawIOBase):
    """`file`, whatever its pieces are; checksums that only writing can tell are zero in it.
    Reading raises what reading its sources raises.
    """

    def __init__(self, file: OutFile) -> None:
        super().__init__()
        self._size = file.size
        unsummed = [0] * len(file.sums)
        self._pieces = [piece.resolved(unsummed) for piece in file.pieces]
        self._lengths = [piece.length for piece in file.pieces]
        reading.announce(self._pieces)
        self._starts = [0, *accumulate(self._lengths)][:-1]
        self._at = 0
        self._streaming: tuple[Piece | None, int, bytes | memoryview, Iterator[bytes | memoryview]] = (
            None,
            0,
            b"",
            iter(()),
        )
        #: What reading raised, for a reader that forgets why it failed: torch's does, also of Ctrl-C.
        self.failure: BaseException | None = None
        reader = self._reader()
        next(reader)
        self.readinto = reader.send  # type: ignore[method-assign, assignment]

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
        """Go on reading `offset` bytes from the start, from here, or from the end."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def close(self) -> None:
        """Read no more."""
        super().close()
        self.readinto = self._refuse  # type: ignore[method-assign]

    def _reader(self) -> Generator[int, memoryview, None]:
        """Fill each buffer that is sent as far as the file goes, and yield the number of bytes: the method readinto.

        A generator that has begun is inside ``try`` when a signal is handled at its first instruction. A function is
        not, and torch drops what ``readinto`` raises: it asks for ``read`` instead.
        """
        try:
            length = 0
            while True:
                length = self._fill((yield length))
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                self.failure = error
            self.readinto = self._refuse  # type: ignore[method-assign]
            raise

    def _refuse(self, *_: object) -> int:
        raise self.failure or ValueError("the file is closed")

    def _fill(self, buffer: memoryview) -> int:
        left = memoryview(buffer).cast("B")
        length = min(len(left), max(self._size - self._at, 0))
        left = left[:length]
        i = bisect_right(self._starts, self._at) - 1
        while left:
            while self._at >= self._starts[i] + self._lengths[i]:
                i += 1
            done = self._read_piece(self._pieces[i], self._at - self._starts[i], left)
            self._at += done
            left = left[done:]
        return length

    def _read_piece(self, piece: Piece, offset: int, buffer: memoryview) -> int:
        """What `piece` has from `offset` on, as much as `buffer` takes."""
        if not piece.is_at_hand():
            return self._read_stream(piece, offset, buffer)
        length = min(piece.length - offset, len(buffer))
        reading.read_into(piece, offset, buffer[:length])
        return length

    def _read_stream(self, piece: Piece, offset: int, buffer: memoryview) -> int:
        """Some bytes of what `piece` gives, from `offset` on.

        Storages are read from end to end, so the stream goes on where it was; it begins anew for whoever goes back.
        """
        current, start, chunk, chunks = self._streaming
        if current is not piece or offset < start:
            start, chunk, chunks = 0, b"", Pieces([piece]).chunks(piece)
        while offset >= start + len(chunk):
            start += len(chunk)
            chunk = next(chunks)
        self._streaming = piece, start, chunk, chunks
        data = chunk[offset - start : offset - start + len(buffer)]
        buffer[: len(data)] = data
        if start + len(chunk) == piece.length:
            next(chunks, None)  # which checks what has been inflated
        return len(data)
