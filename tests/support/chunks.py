"""Tensors that are cut into random chunks."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

from ckptconv.byteranges.sources import BytesSource
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.tensor_info import row_major
from ckptconv.formats.distributed.chunks import Chunk

__all__ = ["bytes_of", "cut", "placements_of"]

_HERE = Path("here")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of `tensor` in row-major order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # its stride is 1, even for a single element
    return bytes(flat.copy_(tensor.reshape(-1)).view(torch.uint8).numpy())


def cut(chance: Random, chunk: Chunk, times: int) -> list[Chunk]:
    """Cut `chunk` in two, and the halves again, up to `times` times, and return the chunks. Halves can be empty."""
    wide = [d for d, size in enumerate(chunk.sizes) if size > 1]
    if not times or not wide:
        return [chunk]
    d = chance.choice(wide)
    at = chance.randrange(chunk.sizes[d] + 1)
    sizes, offsets = list(chunk.sizes), list(chunk.offsets)
    sizes[d], rest = at, chunk.sizes[d] - at
    offsets[d] += at
    second = Chunk(tuple(offsets), (*chunk.sizes[:d], rest, *chunk.sizes[d + 1 :]))
    halves = [Chunk(chunk.offsets, tuple(sizes)), second]
    return [each for half in halves for each in cut(chance, half, times - 1)]


def placements_of(chance: Random, whole: torch.Tensor, chunks: list[Chunk], *, plain: bool) -> list[ChunkPlacement]:
    """Return `chunks` of `whole`, each at a random position in its own file. The elements of a chunk are in row-major
    order if `plain` is true, and otherwise with permuted dimensions.
    """
    placements = []
    for chunk in chunks:
        part = whole[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        order = list(range(whole.dim()))
        if not plain:
            chance.shuffle(order)
        stored = part.permute(order).contiguous()
        stride = (
            row_major(chunk.sizes)
            if order == sorted(order)
            else stored.permute([order.index(d) for d in range(whole.dim())]).stride()
        )
        before = chance.randrange(5)
        data = bytes(before) + bytes_of(stored)
        placements.append(
            ChunkPlacement(
                ByteRange(BytesSource(data, _HERE), before, len(data) - before), chunk.offsets, chunk.sizes, stride
            )
        )
    chance.shuffle(placements)
    return placements
