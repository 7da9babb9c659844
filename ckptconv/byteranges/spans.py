"""Byte ranges and computations on them, as data: the pieces of storages and of output files.

A piece describes bytes without reading them. All kinds have the methods of :class:`Piece`. The modules ``reading`` and
``materialise`` produce the bytes.
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

#: The number of elements that were too large for their new dtype, by the paths of the tensors that share a storage.
Overflow: TypeAlias = Mapping[tuple[str, ...], int]

#: Called with the number of bytes written since the last call.
Progress: TypeAlias = Callable[[int], None]

#: Called with the total number of bytes. Returns a context manager for the function that reports progress.
Meter: TypeAlias = "Callable[[int], AbstractContextManager[Progress | None]]"

#: The size of the blocks that filesystems share between files, if both offsets agree modulo this number.
FILESYSTEM_BLOCK = 4096


class ByteSource(Protocol):
    """The protocol of a source of bytes that are read by position.

    It is :class:`~ckptconv.byteranges.sources.Readable` without the attribute `faults`, whose module imports this one.
    """

    path: Path
    fd: int
    size: int
    mode: int

    def read(self, offset: int, length: int) -> bytes: ...

    def read_ahead(self, offset: int, length: int, most: int) -> bytes: ...

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


class Piece:
    """A slice of an output file or of a storage: ``length`` bytes, and the facts that are known before they are read.

    The methods of this base class are correct for most kinds. Other kinds override them.
    """

    __slots__ = ()

    length: int

    #: Whether the source contains these bytes, stored or deflated: a record, or a part of a stored one.
    is_record: ClassVar[bool] = False

    #: Whether the bytes are in no source, not even deflated, so that torch has to compute them.
    is_computed: ClassVar[bool] = False

    def ranges(self) -> tuple[ByteRange, ...]:
        """Return the ranges that this piece consists of, in order.

        Empty if the bytes are computed or made by this program.
        """
        return ()

    def read_from(self) -> tuple[ByteRange, ...]:
        """Return the ranges of sources that are read to produce the bytes."""
        return self.ranges()

    def is_at_hand(self) -> bool:
        """Return whether all bytes are known, or stored unchanged in a source, before anything is written."""
        return bool(self.ranges())

    def part_at(self, offset: int) -> tuple[Piece, int]:
        """Return the simplest piece that contains the byte at `offset`, and the offset inside that piece.

        Usually `self`.
        """
        return self, offset

    def resolved(self, sums: Sequence[int]) -> Piece:  # noqa: ARG002
        """Return this piece with the checksums `sums` filled in. Only a :class:`Deferred` piece contains checksums."""
        return self

    def stored(self) -> ByteRange | None:
        """Return the range that contains all bytes and has the checksum, if there is one such range.

        Else return None.
        """
        return None

    def crc32_known(self) -> int | None:
        """Return the CRC-32 that the source declares for exactly these bytes, or None."""
        return None

    def with_checksums(self) -> tuple[ByteRange, ...]:
        """Return the ranges with a checksum from which the bytes are taken."""
        whole = self.stored()
        return tuple(span for span in ((whole,) if whole else self.ranges()) if span.crc32 is not None)

    def checked_range(self) -> ByteRange | None:
        """Return the range whose checksum is verified while the bytes are computed from it, or None."""
        return None

    def spooled(self) -> Inflate | None:
        """Return the deflated piece that has to be inflated into a temporary file first, or None.

        Inflated bytes are needed there if they are read at arbitrary offsets.
        """
        return None

    def uncast(self) -> Piece:
        """Return the piece that a cast converts. For all other kinds, return the piece itself."""
        return self

    def slice(self, offset: int, length: int) -> Piece:
        """Return a piece of `length` bytes at `offset` of this one. In a cast, both must be at the borders of elements.

        Raises NotImplementedError for a kind that is always used completely, unless the slice is the complete piece.
        """
        return self if (offset, length) == (0, self.length) else self._part(offset, length)

    def _part(self, offset: int, length: int) -> Piece:
        raise NotImplementedError  # pieces made for one tensor, or for the file, are always used completely


@dataclass(slots=True)
class Literal(Piece):
    """Bytes that this program made."""

    data: bytes
    length: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.length = len(self.data)

    def is_at_hand(self) -> bool:
        return True

    def _part(self, offset: int, length: int) -> Literal:
        return Literal(self.data[offset : offset + length])


@dataclass(unsafe_hash=True, slots=True)  # not frozen, because creating frozen objects takes four times as long
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

    If `whole` is a range, the parts are slices of that range, and only `whole` has a checksum. If it is None, each part
    has its own checksum. `verified` contains ranges with checksums of which only slices are among the parts.
    """

    parts: tuple[ByteRange, ...]
    whole: ByteRange | None
    length: int
    verified: tuple[ByteRange, ...] = ()

    @cached_property
    def starts(self) -> list[int]:
        """The offset of each part, followed by the total length."""
        return [0, *accumulate(part.length for part in self.parts)]

    def ranges(self) -> tuple[ByteRange, ...]:
        return self.parts

    def stored(self) -> ByteRange | None:
        return self.whole

    def with_checksums(self) -> tuple[ByteRange, ...]:
        return (*super().with_checksums(), *self.verified)

    def crc32_known(self) -> int | None:
        """Return the checksum computed from those of the parts.

        None if a part has none, or if the parts are slices of `whole`.
        """
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


@dataclass(unsafe_hash=True, slots=True)  # not frozen, as above
class ChunkPlacement:
    """A rectangular block of a tensor, all of it in the range `of`.

    Attributes:
        of: The range that contains the elements.
        offsets: The first index of the block in each dimension of the tensor.
        sizes: The size of the block in each dimension.
        stride: The strides of the block in `of`, in elements.
    """

    of: ByteRange
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]

    def rows(self, first: int, stop: int, itemsize: int) -> ChunkPlacement | None:
        """Return the intersection of this block with rows `first` to `stop` (exclusive) of the tensor.

        The row offset of the result is relative to `first`. Return None if the intersection is empty.
        """
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

    Each element is in one of `placements`, which are sorted by their offsets. `verified` contains ranges with checksums
    of which only slices are used.
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
        assert (first * row, stop * row) == (offset, offset + length)  # callers cut only complete rows
        cut = [placement.rows(first, stop, self.itemsize) for placement in self.placements]
        return Assemble(tuple(each for each in cut if each), (stop - first, *self.shape[1:]), self.itemsize, length)


@dataclass(frozen=True)
class Cast(Piece):
    """The elements of `of` cast from the dtype `old` to the dtype `new`, `length` bytes in all.

    Attributes:
        conj: Conjugate each number, because torch's lazy conjugate bit is set.
        neg: Negate each number, because torch's lazy negative bit is set.
        swapped_in: The bytes of each number in `of` are in reverse order.
        swapped_out: The bytes of each number in the result are in reverse order.
        paths: The paths of the tensors that use these elements.
        shown: The elements that these tensors use, as pairs of a first element and an exclusive end. Empty: all. Only
            in these elements are overflows counted.
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

    The weight consists of matrices, and these consist of blocks. `codes` and `scales` are stored in row-major order.

    Attributes:
        codes: The codes.
        scales: The scale of each block.
        second: A second factor, one number for all scales, or None.
        code_dtype: The dtype of a code, or ``fp4`` for two codes of float4_e2m1 in a byte, the first in the low bits.
        scale_dtype: The dtype of a scale. ``uint8`` and ``ldexp`` are exponents of a power of two. The largest
            ``uint8`` stands for infinity, the largest ``ldexp`` is finite.
        second_dtype: The dtype of `second`.
        matrix: The number of matrices, and the rows and columns of each.
        block: The rows and columns of a block. The last block of a row or column can be smaller.
        start: The index of the first element of this piece among all elements of the weight.
        divides: Divide each scale by `second` instead of multiplying it.
        transposed: Transpose each matrix.
        label: The name of the layout, for reports.
        verified: Ranges with checksums of which only slices are used.
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
    """`length` bytes that contain checksums of the output.

    `make` computes them from the checksums of :attr:`OutFile.sums`.
    """

    length: int
    make: Callable[[Sequence[int]], bytes]

    def resolved(self, sums: Sequence[int]) -> Literal:
        return Literal(self.make(sums))


#: The kinds of pieces that a storage can consist of.
Data: TypeAlias = "ByteRange | Inflate | Concat | Assemble | Cast | Scaled"


@dataclass(frozen=True)
class OutFile:
    """A file to write.

    Attributes:
        path: Its path.
        pieces: Its bytes, in order.
        size: The number of its bytes.
        sums: Pieces whose CRC-32 is computed while the file is written. It is compared with the checksum of the range,
            if the range declares one, and given to the :class:`Deferred` pieces. A computed piece among them is also
            one of `pieces`.
        mode: The permissions of a new file, before the umask is applied.
        direct: Whether copied bytes are written with direct I/O, without the page cache.
    """

    path: Path
    pieces: tuple[Piece, ...]
    size: int
    sums: tuple[Piece, ...] = ()
    mode: int = 0o666
    direct: bool = False

    @classmethod
    def copy_of(cls, source: ByteSource, path: Path) -> OutFile:
        """Return a plan that copies all bytes and the permissions of `source` to `path`."""
        pieces = (ByteRange(source, 0, source.size),) if source.size else ()
        return cls(path, pieces, source.size, mode=source.mode)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return `pieces` with adjacent literals joined, and adjacent ranges of the same source joined.

    Empty ones are dropped.
    """
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
