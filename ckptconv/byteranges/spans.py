"""Byte ranges and what is computed from them, as data: the pieces of storages and output files.

All kinds have the methods of :class:`Piece`. The modules ``reading`` and ``materialise`` produce the bytes.
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

#: Called with the number of bytes that there will be. Returns a context manager for the function that reports them.
Meter: TypeAlias = "Callable[[int], AbstractContextManager[Progress | None]]"

#: Bytes of a block that filesystems share between files, if both offsets agree modulo this number.
FILESYSTEM_BLOCK = 4096


class ByteSource(Protocol):
    """A source of bytes that are read by position.

    It is :class:`~ckptconv.byteranges.sources.Readable` without its sink for faults, whose module needs byte ranges.
    """

    path: Path
    fd: int
    size: int
    mode: int

    def read(self, offset: int, length: int) -> bytes: ...

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


class Piece:
    """A part of an output file or of a storage: ``length`` bytes, and what is known of them without reading them.

    The methods here are those of most kinds.
    """

    __slots__ = ()

    length: int

    #: Whether the source contains these bytes, stored or deflated: a record, or a part of a stored one.
    is_record: ClassVar[bool] = False

    #: Whether the bytes are in no source, not even deflated, so that torch has to compute them.
    is_computed: ClassVar[bool] = False

    def ranges(self) -> tuple[ByteRange, ...]:
        """Return the ranges that this piece consists of, in order, or none if it does not consist of ranges."""
        return ()

    def read_from(self) -> tuple[ByteRange, ...]:
        """Return the ranges that are read to produce the bytes."""
        return self.ranges()

    def is_at_hand(self) -> bool:
        """Return whether each byte is known, or is stored in a source, before anything is written."""
        return bool(self.ranges())

    def part_at(self, offset: int) -> tuple[Piece, int]:
        """Return the part that contains the byte at `offset`, and the offset in it. Most pieces are their only part."""
        return self, offset

    def resolved(self, sums: Sequence[int]) -> Piece:  # noqa: ARG002
        """Return the piece with the checksums `sums` in it, if it contains checksums."""
        return self

    def stored(self) -> ByteRange | None:
        """Return the range that this is made of if it is stored in one: the range that has the checksum. Else None."""
        return None

    def crc32_known(self) -> int | None:
        """Return the CRC-32 that the source declares for the bytes, or None."""
        return None

    def with_checksums(self) -> tuple[ByteRange, ...]:
        """Return the ranges that this is made of and that have checksums."""
        whole = self.stored()
        return tuple(span for span in ((whole,) if whole else self.ranges()) if span.crc32 is not None)

    def checked_range(self) -> ByteRange | None:
        """Return the range whose checksum is verified while the bytes are computed from it, or None."""
        return None

    def spooled(self) -> Inflate | None:
        """Return the deflated bytes that have to be inflated into a file, to be read at any offset, or None."""
        return None

    def uncast(self) -> Piece:
        """Return what a cast converts, or the piece itself if it is not a cast."""
        return self

    def slice(self, offset: int, length: int) -> Piece:
        """Return the piece of `length` bytes at `offset`; of a cast, these must be whole elements."""
        return self if (offset, length) == (0, self.length) else self._part(offset, length)

    def _part(self, offset: int, length: int) -> Piece:
        raise NotImplementedError  # what is made for one tensor, or for the file, is used completely


@dataclass(slots=True)
class Literal(Piece):
    """Bytes that this program wrote."""

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
    """`length` bytes at `offset` of `source`. ``crc32`` is the checksum that the source declares, or None."""

    source: ByteSource
    offset: int
    length: int
    crc32: int | None = None

    is_record = True

    @property
    def where(self) -> str:
        """The file and the offset, for errors."""
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
    """`length` bytes that are deflated in `of`. ``crc32`` is the checksum of the inflated bytes, or None."""

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
    """`length` bytes at `offset` of the inflated bytes of `of`."""

    of: Inflate
    offset: int
    length: int

    def read_from(self) -> tuple[ByteRange, ...]:
        return self.of.read_from()

    def spooled(self) -> Inflate:
        return self.of


@dataclass(frozen=True)
class Concat(Piece):
    """The bytes of `parts` in order, `length` bytes in all.

    If `whole` is a range, they are parts of it and it has the checksum. If it is None, each part has its own, and
    `verified` has the ranges with checksums of which there are only parts.
    """

    parts: tuple[ByteRange, ...]
    whole: ByteRange | None
    length: int
    verified: tuple[ByteRange, ...] = ()

    @cached_property
    def starts(self) -> list[int]:
        """The offset of each part, and of the end."""
        return [0, *accumulate(part.length for part in self.parts)]

    def ranges(self) -> tuple[ByteRange, ...]:
        return self.parts

    def stored(self) -> ByteRange | None:
        return self.whole

    def with_checksums(self) -> tuple[ByteRange, ...]:
        return (*super().with_checksums(), *self.verified)

    def crc32_known(self) -> int | None:
        """Return the checksum that follows from those of the parts, or None if one is unknown or they are not whole."""
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
        return Concat(tuple(parts), self.whole, length, self.verified)


@dataclass(frozen=True)
class Gather(Piece):
    """The elements of a strided view of `of` in row-major order, `length` bytes in all.

    `shape`, `stride` and `offset` count elements of `itemsize` bytes.
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
    """A rectangular part of a tensor, all of it in `of`.

    Attributes:
        of: The range that contains its elements.
        offsets: Its first index in each dimension of the tensor.
        sizes: The number of its indices in each dimension.
        stride: Its strides in `of`, in elements.
    """

    of: ByteRange
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]

    def rows(self, first: int, stop: int, itemsize: int) -> ChunkPlacement | None:
        """Return the part of it in the rows from `first` to `stop` of the tensor, counted from `first`, or None."""
        start, end = max(self.offsets[0], first), min(self.offsets[0] + self.sizes[0], stop)
        if start >= end:
            return None
        skipped = (start - self.offsets[0]) * self.stride[0] * itemsize
        of = self.of
        if skipped:
            of = ByteRange(of.source, of.offset + skipped, of.length - skipped)
        return ChunkPlacement(of, (start - first, *self.offsets[1:]), (end - start, *self.sizes[1:]), self.stride)


@dataclass(frozen=True)
class Assemble(Piece):
    """The elements of a tensor of `shape` in row-major order, `length` bytes in all, `itemsize` bytes each.

    Each element is in one of `placements`, which are in the order of their first indices. `verified` has the ranges
    with checksums of which there are only parts.
    """

    placements: tuple[ChunkPlacement, ...]
    shape: tuple[int, ...]
    itemsize: int
    length: int
    verified: tuple[ByteRange, ...] = ()

    is_computed = True

    def read_from(self) -> tuple[ByteRange, ...]:
        return tuple(placement.of for placement in self.placements)

    def with_checksums(self) -> tuple[ByteRange, ...]:
        whole = (placement.of for placement in self.placements if placement.of.crc32 is not None)
        return (*whole, *self.verified)

    def _part(self, offset: int, length: int) -> Assemble:
        row = self.length // self.shape[0]
        first, stop = offset // row, (offset + length) // row
        assert (first * row, stop * row) == (offset, offset + length)  # only rows are cut out
        cut = [placement.rows(first, stop, self.itemsize) for placement in self.placements]
        return Assemble(tuple(each for each in cut if each), (stop - first, *self.shape[1:]), self.itemsize, length)


@dataclass(frozen=True)
class Cast(Piece):
    """The elements of `of` cast from the dtype `old` to the dtype `new`, `length` bytes in all.

    Attributes:
        conj: Conjugate each number: torch's lazy bit is resolved.
        neg: Negate each number: torch's lazy bit is resolved.
        swapped_in: In `of`, the bytes of each number are in the reverse order.
        swapped_out: In the result, the bytes of each number are in the reverse order.
        paths: The paths of the tensors that show these elements.
        shown: The elements that these show, as pairs of a first element and the one after the last. Empty: all.
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
class Scaled(Piece):
    """The float32 numbers of a quantized weight, each a code times a scale, `length` bytes in all.

    The weight consists of matrices with rows of whole blocks. `codes` and `scales` are stored in row-major order.

    Attributes:
        codes: The codes.
        scales: The scale of each block.
        second: One number for all scales, or None.
        code_dtype: The dtype of a code, or ``fp4`` for two codes of float4_e2m1 in a byte, the first in the low bits.
        scale_dtype: The dtype of a scale. ``uint8`` is the exponent of a power of two, of which the largest is
            infinite, and ``ldexp`` one that is finite.
        second_dtype: The dtype of `second`.
        matrix: The number of matrices, and the rows and columns of each.
        block: The rows and columns of a block. The last block of a row or column can be smaller.
        start: The first element, of all that the codes are for.
        divides: Divide each scale by `second`. Otherwise it is multiplied.
        transposed: Transpose each matrix.
        label: The name of the layout, for reports.
        verified: The ranges with checksums of which there are only parts.
    """

    codes: Piece
    scales: Piece
    second: Piece | None
    code_dtype: str
    scale_dtype: str
    second_dtype: str
    matrix: tuple[int, int, int]
    block: tuple[int, int]
    start: int
    length: int
    divides: bool = False
    transposed: bool = False
    label: str = ""
    verified: tuple[ByteRange, ...] = ()

    is_computed = True

    def read_from(self) -> tuple[ByteRange, ...]:
        pieces = (self.codes, self.scales, *([self.second] if self.second else []))
        return tuple(span for piece in pieces for span in piece.read_from())

    def with_checksums(self) -> tuple[ByteRange, ...]:
        return self.verified

    def _part(self, offset: int, length: int) -> Scaled:
        return replace(self, start=self.start + offset // 4, length=length, verified=())


@dataclass(frozen=True)
class Deferred(Piece):
    """`length` bytes that contain checksums: `make` returns them for the checksums of :attr:`OutFile.sums`."""

    length: int
    make: Callable[[Sequence[int]], bytes]

    def resolved(self, sums: Sequence[int]) -> Literal:
        return Literal(self.make(sums))


#: The pieces that the bytes of a storage can be.
Data: TypeAlias = "ByteRange | Inflate | Concat | Assemble | Cast | Scaled"


@dataclass(frozen=True)
class OutFile:
    """A file to write.

    Attributes:
        path: Its path.
        pieces: Its bytes, in order.
        size: The number of its bytes.
        sums: Pieces whose CRC-32 is computed while the file is written. It is checked if a range declares one, and
            given to the :class:`Deferred` pieces. A computed piece among them is also one of `pieces`.
        mode: Its permissions if it is new, less the umask.
        direct: What is copied is written around the page cache.
    """

    path: Path
    pieces: tuple[Piece, ...]
    size: int
    sums: tuple[Piece, ...] = ()
    mode: int = 0o666
    direct: bool = False

    @classmethod
    def copy_of(cls, source: ByteSource, path: Path) -> OutFile:
        """Return a plan to copy all of `source` to `path`."""
        pieces = (ByteRange(source, 0, source.size),) if source.size else ()
        return cls(path, pieces, source.size, mode=source.mode)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return `pieces` with adjacent literals joined, and ranges that are adjacent in one source."""
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
