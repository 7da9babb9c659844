"""Byte ranges and what is computed from them, as data: the pieces of storages and output files.

All kinds answer the questions of :class:`Piece`. How the bytes themselves come is in ``reading`` and ``materialise``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from ckptconv.byteranges.checksums import combined
from ckptconv.dtypes import BY_NAME
from ckptconv.light_dataclass import dataclass

#: How many numbers were too large for their new dtype, by the paths of the tensors on their storage.
Overflow: TypeAlias = Mapping[tuple[str, ...], int]

#: Called with the number of bytes written since the last call.
Progress: TypeAlias = Callable[[int], None]

#: Called with how many bytes there will be, it gives a context manager for what is called as they come.
Meter: TypeAlias = "Callable[[int], AbstractContextManager[Progress | None]]"

#: Bytes of a block that filesystems share between files, where both places agree modulo this.
FILESYSTEM_BLOCK = 4096


class ByteSource(Protocol):
    """Bytes that are read by position: :class:`~ckptconv.byteranges.sources.Readable` without its sink for faults."""

    path: Path
    fd: int
    size: int
    mode: int

    def read(self, offset: int, length: int) -> bytes: ...

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


class Piece:
    """What an output file, or a storage, is made of: ``length`` bytes, and what can be asked of them unread.

    The answers here are those of most kinds.
    """

    __slots__ = ()

    length: int

    #: Whether these are bytes of the source as it has them, stored or deflated: a record, or a part of a stored one.
    is_record: ClassVar[bool] = False

    #: Whether the bytes stand nowhere, not even deflated: torch makes them.
    is_computed: ClassVar[bool] = False

    def ranges(self) -> tuple[ByteRange, ...]:
        """The ranges of the source whose bytes, one behind another, these are; none where they are others."""
        return ()

    def read_from(self) -> tuple[ByteRange, ...]:
        """The ranges that are read to make it."""
        return self.ranges()

    def is_at_hand(self) -> bool:
        """Whether each of its bytes is known, or stands in the source, before anything is written."""
        return bool(self.ranges())

    def part_at(self, offset: int) -> tuple[Piece, int]:
        """The one of several parts that has the byte at `offset`, and where in it that is; else itself."""
        return self, offset

    def resolved(self, sums: Sequence[int]) -> Piece:  # noqa: ARG002
        """With the checksums in it, which are those of `sums`."""
        return self

    def stored(self) -> ByteRange | None:
        """The whole range of the source that this is made of, if it stands there as it is: what has the checksum."""
        return None

    def crc32_known(self) -> int | None:
        """The checksum that the bytes should have, where their source says it."""
        return None

    def with_checksums(self) -> tuple[ByteRange, ...]:
        """The ranges that this is made of whose checksums say whether it is what it should be."""
        whole = self.stored()
        return tuple(span for span in ((whole,) if whole else self.ranges()) if span.crc32 is not None)

    def checked_range(self) -> ByteRange | None:
        """That of these ranges which whoever computes the bytes reads from end to end, and checks beside it."""
        return None

    def spooled(self) -> Inflate | None:
        """What has to be inflated into a file of its own, because it is read at any place."""
        return None

    def uncast(self) -> Piece:
        """What a cast starts from; all others are their own."""
        return self

    def slice(self, offset: int, length: int) -> Piece:
        """A part of the bytes: of a cast, whole elements. All of them are the piece itself."""
        return self if (offset, length) == (0, self.length) else self._part(offset, length)

    def _part(self, offset: int, length: int) -> Piece:
        raise NotImplementedError  # nobody takes a part of what is made for one tensor, or for the file


@dataclass(slots=True)
class Literal(Piece):
    """Bytes of our own."""

    data: bytes
    length: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.length = len(self.data)

    def is_at_hand(self) -> bool:
        return True

    def _part(self, offset: int, length: int) -> Literal:
        return Literal(self.data[offset : offset + length])


@dataclass(unsafe_hash=True, slots=True)  # not frozen: that makes them four times as slow
class ByteRange(Piece):
    """`length` bytes at `offset` of `source`. ``crc32`` is what their checksum should be, where the source says it."""

    source: ByteSource
    offset: int
    length: int
    crc32: int | None = None

    is_record = True

    @property
    def where(self) -> str:
        """The place in words, for errors."""
        return f"{self.source.path} at byte {self.offset}"

    def ranges(self) -> tuple[ByteRange, ...]:
        return (self,)

    def stored(self) -> ByteRange:
        return self

    def crc32_known(self) -> int | None:
        return self.crc32

    def _part(self, offset: int, length: int) -> ByteRange:
        return ByteRange(self.source, self.offset + offset, length)


@dataclass(frozen=True)
class Inflate(Piece):
    """`length` bytes that the deflate stream `of` gives; ``crc32`` is that of the result."""

    of: ByteRange
    length: int
    crc32: int | None

    is_record = True

    def crc32_known(self) -> int | None:
        return self.crc32

    def read_from(self) -> tuple[ByteRange, ...]:
        return (self.of,)

    def _part(self, offset: int, length: int) -> InflateSlice:
        return InflateSlice(self, offset, length)


@dataclass(frozen=True)
class InflateSlice(Piece):
    """`length` bytes at `offset` of what the deflate stream `of` gives."""

    of: Inflate
    offset: int
    length: int

    def read_from(self) -> tuple[ByteRange, ...]:
        return self.of.read_from()

    def spooled(self) -> Inflate:
        return self.of


@dataclass(frozen=True)
class Concat(Piece):
    """`parts` one behind another, `length` bytes in all.

    They are parts of `whole`, whose checksum says whether they are what they should be; where that
    is None, each is whole and has its own.
    """

    parts: tuple[ByteRange, ...]
    whole: ByteRange | None
    length: int

    @cached_property
    def starts(self) -> list[int]:
        """Where each part begins, and where the last one ends."""
        return [0, *accumulate(part.length for part in self.parts)]

    def ranges(self) -> tuple[ByteRange, ...]:
        return self.parts

    def stored(self) -> ByteRange | None:
        return self.whole

    def crc32_known(self) -> int | None:
        """That of whole records, one behind another, follows from theirs."""
        if self.whole is not None:
            return None
        crc32 = 0
        for part in self.parts:
            if part.crc32 is None:
                return None
            crc32 = combined(crc32, part.crc32, part.length)
        return crc32

    def part_at(self, offset: int) -> tuple[ByteRange, int]:
        i = bisect_right(self.starts, offset) - 1
        return self.parts[i], offset - self.starts[i]

    def _part(self, offset: int, length: int) -> Concat:
        parts, left = [], length
        i = bisect_right(self.starts, offset) - 1
        skipped = offset - self.starts[i]
        while left:
            part = self.parts[i]
            done = min(part.length - skipped, left)
            parts.append(ByteRange(part.source, part.offset + skipped, done))
            left, i, skipped = left - done, i + 1, 0
        return Concat(tuple(parts), self.whole, length)


@dataclass(frozen=True)
class Gather(Piece):
    """The elements of a strided view of `of`, in row-major order, `length` bytes in all.

    Shape, stride and offset count elements of `itemsize` bytes.
    """

    of: ByteRange | Inflate
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    length: int

    is_computed = True

    def read_from(self) -> tuple[ByteRange, ...]:
        return self.of.read_from()

    def spooled(self) -> Inflate | None:
        return self.of if isinstance(self.of, Inflate) else None


@dataclass(frozen=True)
class ChunkPlacement:
    """A part of a tensor, whole in `of`: its first index and its number of indices in each dimension
    of the tensor, and its own strides in `of`.
    """

    of: ByteRange
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Assemble(Piece):
    """The elements of a tensor of `shape`, in row-major order, `length` bytes in all: each of `itemsize` bytes, and in
    one of `placements`, which are in the order of their first indices.
    """

    placements: tuple[ChunkPlacement, ...]
    shape: tuple[int, ...]
    itemsize: int
    length: int

    is_computed = True

    def read_from(self) -> tuple[ByteRange, ...]:
        return tuple(placement.of for placement in self.placements)

    def with_checksums(self) -> tuple[ByteRange, ...]:
        return tuple(placement.of for placement in self.placements if placement.of.crc32 is not None)


@dataclass(frozen=True)
class Cast(Piece):
    """Each element of `of`, which are of the dtype `old`, as one of the dtype `new`, `length` bytes in all.

    ``conj`` and ``neg`` are torch's lazy bits, resolved on the way. `swapped_in`: in `of` the bytes of each number
    stand the other way round; `swapped_out`: so they shall stand in the result. ``paths`` are those of the tensors that
    show these elements, and ``shown`` which ones they show, from the first up to the second of each pair; none: all of
    them.
    """

    of: Piece
    old: str
    new: str
    length: int
    conj: bool = False
    neg: bool = False
    swapped_in: bool = False
    swapped_out: bool = False
    paths: tuple[str, ...] = ()
    shown: tuple[tuple[int, int], ...] = ()

    is_computed = True

    def read_from(self) -> tuple[ByteRange, ...]:
        return self.of.read_from()

    def with_checksums(self) -> tuple[ByteRange, ...]:
        return self.of.with_checksums()

    def checked_range(self) -> ByteRange | None:
        return self.of if isinstance(self.of, ByteRange) and self.of.crc32 is not None else None

    def stored(self) -> ByteRange | None:
        return self.of.stored()

    def spooled(self) -> Inflate | None:
        return self.of.spooled()

    def uncast(self) -> Piece:
        return self.of

    def _part(self, offset: int, length: int) -> Cast:
        old, new = BY_NAME[self.old].itemsize, BY_NAME[self.new].itemsize
        inner = self.of.slice(offset // new * old, length // new * old)
        return replace(self, of=inner, length=length, shown=())


@dataclass(frozen=True)
class Deferred(Piece):
    """`length` bytes that hold checksums: `make` gives them, called with those of
    :attr:`OutFile.sums`, in order, when all are known.
    """

    length: int
    make: Callable[[Sequence[int]], bytes]

    def resolved(self, sums: Sequence[int]) -> Literal:
        return Literal(self.make(sums))


#: What a storage's bytes are made of.
Data: TypeAlias = "ByteRange | Inflate | Concat | Assemble | Cast"


@dataclass(frozen=True)
class OutFile:
    """One file to write: its `pieces` in order, and their `size` in bytes. ``mode`` are its permissions where it is
    new, as far as the umask allows them.

    ``sums`` is that whose CRC-32 is computed beside the copy: checked where a range says what it should be, and handed
    to the :class:`Deferred` pieces. What is computed in it is one of `pieces`. `direct`: it is written around the page
    cache, as far as it is copied.
    """

    path: Path
    pieces: tuple[Piece, ...]
    size: int
    sums: tuple[Piece, ...] = ()
    mode: int = 0o666
    direct: bool = False

    @classmethod
    def copy_of(cls, source: ByteSource, path: Path) -> OutFile:
        """All of `source`, as the file `path`."""
        pieces = (ByteRange(source, 0, source.size),) if source.size else ()
        return cls(path, pieces, source.size, mode=source.mode)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """`pieces`, literal bytes joined, and ranges that follow one another in one source."""
    out: list[Piece] = []
    literal = bytearray()
    for piece in pieces:
        if isinstance(piece, Literal):
            literal += piece.data
            continue
        if literal:
            out.append(Literal(bytes(literal)))
            literal.clear()
        spans = piece.ranges()
        if not spans:
            out.append(piece)
        for span in spans:
            last = out[-1] if out else None
            if isinstance(last, ByteRange) and last.source is span.source and last.offset + last.length == span.offset:
                out[-1] = ByteRange(span.source, last.offset, last.length + span.length)
            else:
                out.append(span)
    if literal:
        out.append(Literal(bytes(literal)))
    return tuple(out)
