"""The bytes of one tensor as a piece: its elements in row-major order."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ckptconv.byteranges.slicing import part_of
from ckptconv.byteranges.spans import (
    Assemble,
    ByteRange,
    Cast,
    Concat,
    Gather,
    Inflate,
    InflateSlice,
    Piece,
)
from ckptconv.checkpoint.model import TensorInfo
from ckptconv.dtypes import BY_NAME, get_dtype

__all__ = ["piece_of"]


def piece_of(info: TensorInfo, byteorder: str) -> Piece:
    """The elements of INFO, a strided tensor, in row-major order, little-endian; its
    storage's numbers stand in BYTEORDER.
    """
    assert info.storage is not None
    data = info.storage.data
    dtype, cast = get_dtype(info.dtype), data if isinstance(data, Cast) else None
    of = cast.of if cast else data
    old = get_dtype(cast.old) if cast else dtype
    assert isinstance(of, (ByteRange, Inflate, Concat, Assemble))
    elements: ByteRange | Inflate | InflateSlice | Concat | Gather | Assemble
    if info.contiguous:
        part = part_of(of, info.offset * old.itemsize, info.nbytes // dtype.itemsize * old.itemsize)
        assert not isinstance(part, Cast)
        elements = part
    else:
        assert not isinstance(of, Assemble)
        whole, offset = (
            _part_around(of, info.offset * old.itemsize) if isinstance(of, Concat) else (of, info.offset * old.itemsize)
        )
        length = info.nbytes // dtype.itemsize * old.itemsize
        elements = Gather(whole, old.itemsize, info.shape, info.stride, offset // old.itemsize, length)
    swapped = byteorder == "big" and old.itemsize > 1 and old.name in BY_NAME
    if not (cast or swapped or info.conj or info.neg):
        return elements
    return Cast(
        elements, old.name, dtype.name, info.nbytes, info.conj, info.neg, swapped, paths=cast.paths if cast else ()
    )


def _part_around(chain: Concat, offset: int) -> tuple[ByteRange, int]:
    """The part of CHAIN that has the byte at OFFSET, and where in it that is.

    A view lies within one part, because parts are made of what views reach over.
    """
    i = bisect_right(starts := [0, *accumulate(part.length for part in chain.parts)], offset) - 1
    return chain.parts[i], offset - starts[i]
