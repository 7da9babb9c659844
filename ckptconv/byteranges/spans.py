"""Byte ranges and what is computed from them, as data: the pieces of storages and output files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

__all__ = [
    "FILESYSTEM_BLOCK",
    "Assemble",
    "ByteRange",
    "ByteSource",
    "Cast",
    "ChunkPlacement",
    "Concat",
    "Data",
    "Deferred",
    "Gather",
    "Inflate",
    "InflateSlice",
    "OutFile",
    "Overflow",
    "Piece",
    "Progress",
]

#: How many numbers were too large for their new dtype, by the paths of the tensors on their storage.
Overflow: TypeAlias = Mapping[tuple[str, ...], int]

#: Called with the number of bytes written since the last call.
Progress: TypeAlias = Callable[[int], None]

#: Bytes of a block that filesystems share between files, where both places agree modulo this.
FILESYSTEM_BLOCK = 4096


class ByteSource(Protocol):
    """Bytes that are read by position: :class:`~ckptconv.byteranges.sources.Readable` without its sink for faults."""

    path: Path
    fd: int
    size: int

    def read(self, offset: int, length: int) -> bytes: ...

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


@dataclass(frozen=True)
class ByteRange:
    """LENGTH bytes at OFFSET of SOURCE. ``crc32`` is what their checksum should be, where the source says it."""

    source: ByteSource
    offset: int
    length: int
    crc32: int | None = None


@dataclass(frozen=True)
class Inflate:
    """LENGTH bytes that the deflate stream OF gives; ``crc32`` is that of the result."""

    of: ByteRange
    length: int
    crc32: int | None


@dataclass(frozen=True)
class InflateSlice:
    """LENGTH bytes at OFFSET of what the deflate stream OF gives."""

    of: Inflate
    offset: int
    length: int


@dataclass(frozen=True)
class Concat:
    """PARTS one behind another, LENGTH bytes in all.

    They are parts of WHOLE, whose checksum says whether they are what they should be; where that
    is None, each is whole and has its own.
    """

    parts: tuple[ByteRange, ...]
    whole: ByteRange | None
    length: int


@dataclass(frozen=True)
class Gather:
    """The elements of a strided view of OF, in row-major order, LENGTH bytes in all.

    Shape, stride and offset count elements of ITEMSIZE bytes.
    """

    of: ByteRange | Inflate
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkPlacement:
    """A part of a tensor, whole in OF: its first index and its number of indices in each dimension
    of the tensor, and its own strides in OF.
    """

    of: ByteRange
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Assemble:
    """The elements of a tensor of SHAPE, in row-major order, LENGTH bytes in all: each of ITEMSIZE bytes, and in one of
    PLACEMENTS, which are in the order of their first indices.
    """

    placements: tuple[ChunkPlacement, ...]
    shape: tuple[int, ...]
    itemsize: int
    length: int


@dataclass(frozen=True)
class Cast:
    """Each element of OF, which are of the dtype OLD, as one of the dtype NEW, LENGTH bytes in all.

    ``conj`` and ``neg`` are torch's lazy bits, resolved on the way. SWAPPED_IN: in OF the bytes of each number stand
    the other way round; SWAPPED_OUT: so they shall stand in the result. ``paths`` are those of the tensors that show
    these elements, and ``shown`` which ones they show, from the first up to the second of each pair; none: all of them.
    """

    of: ByteRange | Inflate | InflateSlice | Concat | Gather | Assemble
    old: str
    new: str
    length: int
    conj: bool = False
    neg: bool = False
    swapped_in: bool = False
    swapped_out: bool = False
    paths: tuple[str, ...] = ()
    shown: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Deferred:
    """LENGTH bytes that hold checksums: MAKE gives them, called with those of
    :attr:`OutFile.sums`, in order, when all are known.
    """

    length: int
    make: Callable[[Sequence[int]], bytes]


#: What a storage's bytes are made of.
Data: TypeAlias = "ByteRange | Inflate | Concat | Assemble | Cast"


#: What an output file is made of, in order.
Piece: TypeAlias = "bytes | ByteRange | Inflate | InflateSlice | Concat | Gather | Assemble | Cast | Deferred"


@dataclass(frozen=True)
class OutFile:
    """One file to write: its PIECES in order, and their SIZE in bytes.

    ``sums`` is that whose CRC-32 is computed beside the copy: checked where a range says what it should be, and handed
    to the :class:`Deferred` pieces. A :class:`Cast` or :class:`Assemble` in it is one of PIECES.
    """

    path: Path
    pieces: tuple[Piece, ...]
    size: int
    sums: tuple[ByteRange | Concat | Assemble | Cast, ...] = ()
