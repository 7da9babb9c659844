"""The bytes of one tensor: which of its storage, and as a piece, its elements in row-major order."""

from __future__ import annotations

from ckptconv.byteranges.spans import (
    ByteRange,
    Cast,
    Gather,
    Inflate,
    Piece,
)
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.dtypes import BY_NAME, get_dtype


def extent(info: TensorInfo) -> tuple[int, int]:
    """The bytes of its storage that `info` reaches over."""
    if 0 in info.shape:
        return 0, 0
    dtype = get_dtype(info.dtype)
    last = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
    return dtype.bytes_of(1) * info.offset, dtype.bytes_of(1) * (info.offset + last + 1)


def piece_of(info: TensorInfo, byteorder: str) -> Piece:
    """The elements of `info`, a strided tensor, in row-major order, little-endian.

    Its storage's numbers stand in `byteorder`.
    """
    assert info.storage is not None
    data = info.storage.data
    dtype, cast = get_dtype(info.dtype), data if isinstance(data, Cast) else None
    old = get_dtype(cast.old) if cast else dtype
    of, offset = data.uncast(), info.offset * old.itemsize
    length = info.nbytes // dtype.itemsize * old.itemsize
    if info.contiguous:
        elements = of.slice(offset, length)
    else:
        of, offset = of.part_at(offset)  # a view lies within one, because parts are made of what views reach over
        assert isinstance(of, (ByteRange, Inflate))
        elements = Gather(of, old.itemsize, info.shape, info.stride, offset // old.itemsize, length)
    swapped = byteorder == "big" and old.itemsize > 1 and old.name in BY_NAME
    if not (cast or swapped or info.conj or info.neg):
        return elements
    return Cast(
        elements, old.name, dtype.name, info.nbytes, info.conj, info.neg, swapped, paths=cast.paths if cast else ()
    )
