"""Gather the elements of a strided view, or assemble a tensor from chunks, in row-major order and bounded memory.

Adjacent elements of a view can be far apart in the storage (in a transposed weight, by a row of the storage). So each
block of the output is filled from tiles. A tile consists of stretches of the storage that are read in one call each,
because reading the bytes between elements is faster than another call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import torch

from ckptconv.byteranges.spans import Assemble, ByteRange, ChunkPlacement, Gather

_BLOCK = 16 << 20  # bytes of output that are in memory at once
_TILE = 16 << 20  # bytes of a storage that are in memory at once: a block of a transposed weight is one tile
_GAP = 4096  # bytes that are read and dropped rather than skipped
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
Region = tuple[tuple[int, ...], tuple[int, ...]]  # the first index and the number of indices in each dimension


def gather(view: Gather, storage: ByteRange) -> Iterator[memoryview]:
    """Yield the elements of `view` on `storage` in row-major order, up to 16 MiB at a time. The buffer is reused."""
    tiles = Tiles()
    for out, block, region in _blocks(view.shape, view.itemsize):
        tiles.fill(block, view, storage, region)
        yield out


def _blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[memoryview, torch.Tensor, Region]]:
    """Yield the regions of `shape` that are filled one after another: the memory as bytes and as a tensor, and the
    region.

    The memory is the same for all regions.
    """
    room = memoryview(bytearray(min(prod(shape) * itemsize, _BLOCK)))
    for region in halved(shape, _BLOCK // itemsize):
        out = room[: prod(region[1]) * itemsize]
        yield out, torch.frombuffer(out, dtype=WORDS[itemsize]).view(region[1]), region


class Tiles:
    """A reader of tiles. Its memory is reused for each tile."""

    def __init__(self) -> None:
        self._room = memoryview(b"")

    def fill(self, block: torch.Tensor, view: Gather, storage: ByteRange, region: Region) -> None:
        """Fill the tensor `block` with the elements of `region` of `view` on `storage`."""
        for starts, sizes in _tiles(region, view.stride, view.itemsize):
            need = _packed(sizes, view.stride, view.itemsize)
            if len(self._room) < need:
                self._room = memoryview(bytearray(need))
            tile = _read_tile(view, storage, (starts, sizes), self._room)
            block[_slices((starts, sizes), region[0])].copy_(tile)


def halved(shape: tuple[int, ...], most: int) -> Iterator[Region]:
    """Yield regions of `shape` with at most `most` elements, in row-major order. The first dimensions are cut first."""
    return _parts(
        ((0,) * len(shape), shape),
        lambda sizes: prod(sizes) <= most,
        lambda sizes: next(d for d, size in enumerate(sizes) if size > 1),
    )


def _parts(
    region: Region, fits: Callable[[tuple[int, ...]], bool], longest: Callable[[tuple[int, ...]], int]
) -> Iterator[Region]:
    """Yield slices of `region` whose sizes fit. A larger region is cut in half along its `longest` dimension."""
    todo = [region]
    while todo:
        starts, sizes = todo.pop()
        if fits(sizes):
            yield starts, sizes
        else:
            todo += _cut(starts, sizes, longest(sizes))[::-1]


def _cut(starts: tuple[int, ...], sizes: tuple[int, ...], dimension: int) -> list[Region]:
    half = sizes[dimension] // 2
    first = (*sizes[:dimension], half, *sizes[dimension + 1 :])
    second = (*sizes[:dimension], sizes[dimension] - half, *sizes[dimension + 1 :])
    return [(starts, first), ((*starts[:dimension], starts[dimension] + half, *starts[dimension + 1 :]), second)]


def _tiles(region: Region, stride: tuple[int, ...], itemsize: int) -> Iterator[Region]:
    """Yield slices of `region` that fit into 16 MiB.

    The dimension with the largest extent in the storage is cut first.
    """
    return _parts(
        region,
        lambda sizes: _packed(sizes, stride, itemsize) <= _TILE,
        lambda sizes: max((d for d, size in enumerate(sizes) if size > 1), key=lambda d: (sizes[d] - 1) * stride[d]),
    )


def _packed(sizes: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Return the number of bytes of all stretches of a tile with these `sizes`."""
    span, apart = _stretch(sizes, stride, itemsize)
    return span * prod(sizes[d] for d in apart) * itemsize


def _stretch(sizes: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> tuple[int, list[int]]:
    """Return the number of storage elements in a stretch, and the dimensions along which there are several stretches.

    The dimension with the smallest stride is first in the result.
    """
    span = 1
    dimensions = sorted((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: stride[d])
    for i, d in enumerate(dimensions):
        if (stride[d] - span) * itemsize > _GAP:
            apart = dimensions[i:]
            whole = span + sum((sizes[d] - 1) * stride[d] for d in apart)
            dense = whole * itemsize <= prod(sizes[d] for d in apart) * _GAP  # for example if dimensions overlap
            return (whole, []) if dense else (span, apart)
        span += (sizes[d] - 1) * stride[d]
    return span, []


def _read_tile(view: Gather, storage: ByteRange, tile: Region, scratch: memoryview) -> torch.Tensor:
    """Read the stretches of `tile` into `scratch`, one after another.

    Return the elements of the tile as a view of `scratch`.
    """
    starts, sizes = tile
    itemsize = view.itemsize
    span, apart = _stretch(sizes, view.stride, itemsize)
    strides = list(view.stride)
    packed = span
    for d in apart:
        strides[d] = packed
        packed *= sizes[d]
    first = view.offset + sum(start * step for start, step in zip(starts, view.stride, strict=True))
    steps = [range(0, sizes[d] * view.stride[d], view.stride[d]) for d in reversed(apart)]
    for i, offsets in enumerate(product(*steps)):
        at = storage.offset + (first + sum(offsets)) * itemsize
        storage.source.read_into(at, scratch[i * span * itemsize : (i + 1) * span * itemsize])
    return torch.frombuffer(scratch, dtype=WORDS[itemsize]).as_strided(sizes, strides)


def assemble(piece: Assemble) -> Iterator[memoryview]:
    """Yield the elements of `piece` in row-major order, up to 16 MiB at a time. The buffer is reused."""
    tiles = Tiles()
    for out, block, region in _blocks(piece.shape, piece.itemsize):
        for placement in piece.placements:
            shared = _shared(region, placement)
            if shared:
                view = Gather(placement.of, piece.itemsize, placement.sizes, placement.stride, 0, placement.of.length)
                tiles.fill(block[_slices(shared, region[0])], view, placement.of, _moved(shared, placement.offsets))
        yield out


def _shared(region: Region, placement: ChunkPlacement) -> Region | None:
    """Return the intersection of `region` and `placement`, or None if it is empty."""
    starts = tuple(map(max, region[0], placement.offsets))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(region[0], region[1], placement.offsets, placement.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _moved(region: Region, origin: tuple[int, ...]) -> Region:
    """Return `region` with indices relative to `origin`."""
    return tuple(start - first for start, first in zip(region[0], origin, strict=True)), region[1]


def _slices(region: Region, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return `region` as an index into a block whose first element is `origin`."""
    starts, sizes = _moved(region, origin)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
