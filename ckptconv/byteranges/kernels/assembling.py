"""Assemble a tensor from rectangular chunks, in row-major order, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from ckptconv.byteranges.kernels.gathering import WORDS, Region, Tiles, halved
from ckptconv.byteranges.spans import Assemble, ChunkPlacement, Gather

_BLOCK = 16 << 20  # bytes of output that are held at once


def assemble(piece: Assemble) -> Iterator[memoryview]:
    """The elements of `piece`, up to 16 MiB at a time, in a buffer that the next ones take over."""
    room = memoryview(bytearray(min(piece.length, _BLOCK)))
    tiles = Tiles()
    for region in halved(piece.shape, _BLOCK // piece.itemsize):
        out = room[: prod(region[1]) * piece.itemsize]
        block = torch.frombuffer(out, dtype=WORDS[piece.itemsize]).view(region[1])
        for placement in piece.placements:
            shared = _shared(region, placement)
            if shared:
                view = Gather(placement.of, piece.itemsize, placement.sizes, placement.stride, 0, placement.of.length)
                tiles.fill(block[_slices(shared, region[0])], view, placement.of, _moved(shared, placement.offsets))
        yield out


def _shared(region: Region, placement: ChunkPlacement) -> Region | None:
    """What of `region` is in `placement`."""
    starts = tuple(map(max, region[0], placement.offsets))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(region[0], region[1], placement.offsets, placement.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _moved(region: Region, origin: tuple[int, ...]) -> Region:
    """`region`, counted from `origin`."""
    return tuple(start - first for start, first in zip(region[0], origin, strict=True)), region[1]


def _slices(region: Region, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """`region` as an index into what begins at `origin`."""
    starts, sizes = _moved(region, origin)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
