"""Read the bytes that a long text says: its characters are below 256, each is a byte, and the file has it as UTF-8.

So pickles of protocol 2 hold bytes objects, the data of numpy arrays among them.
"""

from __future__ import annotations

from bisect import bisect_right

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange

__all__ = ["Latin1Text"]

_STEP = 1 << 20  # bytes of the file between two places that are known


class Latin1Text(Readable):
    """The bytes that the UTF-8 text `of` says, read by position without being held. ``fd`` is -1.

    Raises ValueError where the text has a character above 255, or is no UTF-8.
    """

    def __init__(self, of: ByteRange) -> None:
        self.path, self.fd = of.source.path, -1
        self._of = of
        self._starts = [0]  # which byte of the result each step of the file begins with
        for at in range(0, of.length, _STEP):
            self._starts.append(self._starts[-1] + len(self._step(at)))
        self.size = self._starts[-1]

    def _step(self, at: int) -> bytes:
        """What the characters say that begin in the step of the file that begins `at`."""
        # one byte more: a character has at most two, of which the last begins with the bits 10
        data = self._of.source.read(self._of.offset + at, min(_STEP + 1, self._of.length - at))
        start = 1 if at and _continues(data[0]) else 0
        end = len(data) if len(data) <= _STEP or _continues(data[-1]) else _STEP
        return data[start:end].decode().encode("latin-1")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises InputChangedError where the file has become shorter."""
        parts = []
        i = bisect_right(self._starts, offset) - 1
        while length:
            part = self._step(i * _STEP)[offset - self._starts[i] :][:length]
            parts.append(part)
            offset, length, i = offset + len(part), length - len(part), i + 1
        return b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`. Raises as :meth:`read` does."""
        buffer[:] = self.read(offset, len(buffer))


def _continues(byte: int) -> bool:
    """Whether `byte` is the second one of a character."""
    return byte & 0xC0 == 0x80
