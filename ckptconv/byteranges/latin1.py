"""Read the bytes that a long text says: its characters are below 256, each is a byte, and the file has it as UTF-8.

So pickles of protocol 2 hold bytes objects, the data of numpy arrays among them.
"""

from __future__ import annotations

from bisect import bisect_right

from ckptconv.byteranges.sources import ComputedSource
from ckptconv.byteranges.spans import ByteRange
from ckptconv.errors import MalformedError
from ckptconv.light_dataclass import dataclass

_STEP = 1 << 20  # bytes of the file that are decoded at once


def no_bytes(where: str) -> MalformedError:
    """The error for a text at `where` that says none."""
    return MalformedError("a text that stands for bytes has characters that no byte has", where=where)


@dataclass
class Step:
    """What was decoded last: step `index` of the text at `offset`."""

    offset: int = -1
    index: int = -1
    data: bytes = b""


class Latin1Text(ComputedSource):
    """The bytes that the UTF-8 text `of` says, read by position without being held. ``fd`` is -1.

    `where` is for messages. Texts that are read in turn can share the step decoded `last`, and the memory that it
    takes. Raises MalformedError where the text has a character above 255, or is no UTF-8.
    """

    def __init__(self, of: ByteRange, where: str = "", last: Step | None = None) -> None:
        self.path, self.fd = of.source.path, -1
        self._of, self._where, self._last = of, where or str(of.source.path), last or Step()
        self._starts = [0]  # which byte of the result each step of the file begins with
        for i in range(-(-of.length // _STEP)):
            self._starts.append(self._starts[-1] + len(self._step(i)))
        self.size = self._starts.pop()

    def _step(self, i: int) -> bytes:
        """The bytes of the characters that begin in step `i` of the text."""
        of, last = self._of, self._last
        if (last.offset, last.index) != (of.offset, i):
            start, end = i * _STEP, min((i + 1) * _STEP, of.length)
            # one byte more: a character has at most two, of which the last begins with the bits 10
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
        """Fill `buffer` with what stands at `offset`. Raises as :meth:`read` does."""
        while buffer:
            i = bisect_right(self._starts, offset) - 1
            part = self._step(i)[offset - self._starts[i] :][: len(buffer)]
            buffer[: len(part)] = part
            buffer, offset = buffer[len(part) :], offset + len(part)


def _continues(byte: int) -> bool:
    """Whether `byte` is the second one of a character."""
    return byte & 0xC0 == 0x80
