"""Blocks: rectangular slices of a tensor with their bytes, from which other tensors are assembled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from operator import attrgetter, mul
from pathlib import Path

from ckptconv.byteranges.sources import BytesSource
from ckptconv.byteranges.spans import Assemble, ByteRange, ChunkPlacement, Concat
from ckptconv.checkpoint.tensor_info import TensorInfo, row_major
from ckptconv.dtypes import get_dtype

_Shape = tuple[int, ...]


def assembled(
    shape: _Shape,
    itemsize: int,
    placements: Iterable[ChunkPlacement],
    path: Path,
    verified: tuple[ByteRange, ...] = (),
) -> ByteRange | Concat | Assemble:
    """Return the bytes of a tensor of `shape` that consists of blocks.

    If the elements of each block are consecutive in the tensor, the bytes of the blocks are used one after another.

    Args:
        shape: The shape of the tensor.
        itemsize: The number of bytes of an element.
        placements: Blocks that cover the tensor exactly once.
        path: The file or folder, for messages.
        verified: Ranges with checksums that contain the bytes of the blocks.
    """
    length = prod(shape) * itemsize
    if not length:
        return ByteRange(BytesSource(b"", path), 0, 0)
    filled = sorted([each for each in placements if each.of.length], key=attrgetter("offsets"))
    if all(_is_run(each.sizes, each.stride, shape) for each in filled):
        parts = tuple(placement.of for placement in filled)
        return parts[0] if len(parts) == 1 and not verified else Concat(parts, None, length, verified)
    return Assemble(tuple(filled), shape, itemsize, length, verified)


@lru_cache(maxsize=64)  # many tensors are divided in the same way
def _is_run(sizes: _Shape, stride: _Shape, shape: _Shape) -> bool:
    """Return whether the elements of a block are consecutive, both in the file and in a tensor of `shape`."""
    if stride != row_major(sizes):
        return False
    cut = [d for d in range(len(shape)) if sizes[d] != shape[d]]
    return not cut or prod(sizes[: cut[-1]]) == 1


def blocks_of(info: TensorInfo, shape: _Shape, stride: _Shape) -> list[ChunkPlacement] | None:
    """Return blocks that cover a strided tensor, or None if its bytes cannot be taken apart.

    The list is empty if the tensor has no elements.

    Args:
        info: The tensor.
        shape: The shape of the tensor, or another shape with the elements in the same order.
        stride: The strides for `shape`.
    """
    data, itemsize = info.storage.data if info.storage else None, get_dtype(info.dtype).itemsize
    if 0 in shape:
        return []
    origin = (0,) * len(shape)
    if isinstance(data, ByteRange):
        whole = ChunkPlacement(data, origin, shape, stride)
        return [sliced(whole, info.offset, shape, itemsize)]
    if isinstance(data, Concat) and info.contiguous:
        blocks, at = [], 0
        first, end = info.offset * itemsize, info.offset * itemsize + info.nbytes
        for span in data.parts:
            start, stop = max(first, at), min(end, at + span.length)
            if start < stop and not ((start - first) % itemsize or (stop - first) % itemsize):
                for offsets, sizes in _boxes(shape, (start - first) // itemsize, (stop - first) // itemsize):
                    before = sum(map(mul, offsets, row_major(shape))) * itemsize + first - at
                    of = span.slice(before, prod(sizes) * itemsize)
                    assert isinstance(of, ByteRange)
                    blocks.append(ChunkPlacement(of, offsets, sizes, row_major(sizes)))
            elif start < stop:
                return None  # a part ends within an element
            at += span.length
        return blocks
    if isinstance(data, Assemble) and data.shape == shape and not info.offset and info.contiguous:
        return [*data.placements]
    return None


def _boxes(shape: _Shape, start: int, stop: int) -> Iterator[tuple[_Shape, _Shape]]:
    """Yield offsets and sizes of the boxes that consist of the elements `start` to `stop`, in row-major order."""
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    while start < stop:
        i, inside = divmod(start, row)
        n = (stop - start) // row if not inside else 0
        if n:  # complete rows
            yield (i, *(0 for _ in shape[1:])), (n, *shape[1:])
            start += n * row
            continue
        end = min(stop - i * row, row)
        for offsets, sizes in _boxes(shape[1:], inside, end):
            yield (i, *offsets), (1, *sizes)
        start = i * row + end


def cut(block: ChunkPlacement, offsets: _Shape, sizes: _Shape, itemsize: int) -> ChunkPlacement | None:
    """Return the part of `block` in the box at `offsets` with `sizes`, or None. Its indices count from `offsets`."""
    starts = tuple(map(max, block.offsets, offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(block.offsets, block.sizes, offsets, sizes, strict=True))
    shared = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if any(size <= 0 for size in shared):
        return None
    first = sum((start - own) * step for start, own, step in zip(starts, block.offsets, block.stride, strict=True))
    moved = tuple(start - origin for start, origin in zip(starts, offsets, strict=True))
    return sliced(replace(block, offsets=moved), first, shared, itemsize)


def sliced(block: ChunkPlacement, first: int, sizes: _Shape, itemsize: int) -> ChunkPlacement:
    """Return `block` with `sizes`, from the element `first` of its range on. Strides that do not matter are usual."""
    last = first + sum((size - 1) * step for size, step in zip(sizes, block.stride, strict=True))
    of = block.of.slice(first * itemsize, (last - first + 1) * itemsize)
    assert isinstance(of, ByteRange)
    usual = row_major(sizes)
    stride = tuple(own if size == 1 else step for size, step, own in zip(sizes, block.stride, usual, strict=True))
    return ChunkPlacement(of, block.offsets, sizes, stride)
