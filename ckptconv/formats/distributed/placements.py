"""Which elements of a tensor one process has: torch's placements, followed from left to right over a mesh.

Source: ``torch/distributed/tensor/placement_types.py`` and ``_utils.py`` (``_compute_local_shape_and_global_offset``)
of torch 2.13. Each dimension of the mesh cuts one dimension of the tensor as ``torch.chunk`` does, or none.
``_StridedShard`` cuts what there is into ``split`` pieces first, and each of these by the mesh: the process has a strip
of each piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from ckptconv.formats.distributed.chunks import Chunk

__all__ = ["Cut", "Strip", "held_sizes", "strips_of"]


class Cut(NamedTuple):
    """What one dimension of a mesh does to a tensor: the tensor's dimension `dim` is cut into as many `parts` as there
    are processes, of which number `at` is this one's. It is cut into `split` pieces first. `dim` None: nothing is cut.
    """

    parts: int
    at: int
    dim: int | None
    split: int = 1


class Strip(NamedTuple):
    """A `chunk` of the whole tensor, which begins at the index `start` of what the process has."""

    chunk: Chunk
    start: tuple[int, ...]


#: Of one dimension, the stretches that a process has, one behind another: the first index of each, and how many.
_Stretches = list[tuple[int, int]]


def held_sizes(shape: tuple[int, ...], cuts: Sequence[Cut]) -> list[_Stretches]:
    """What the process has of each dimension of a tensor of `shape`."""
    held: list[_Stretches] = [[(0, size)] for size in shape]
    for cut in cuts:
        if cut.dim is None:
            continue
        before, after = held[cut.dim], _Taken()
        total = sum(count for _, count in before)
        for piece in range(cut.split):
            start, count = _share(total, cut.split, piece)
            inner, size = _share(count, cut.parts, cut.at)
            after.take(before, start + inner, size)
        held[cut.dim] = after.stretches
    return held


def strips_of(held: Sequence[_Stretches]) -> Iterator[Strip]:
    """What a process has, where it has these stretches of each dimension, as chunks of the whole."""
    starts = [accumulate((count for _, count in each), initial=0) for each in held]
    for each in product(*(zip(stretches, at, strict=False) for stretches, at in zip(held, starts, strict=True))):
        chunk = Chunk(tuple(first for (first, _), _ in each), tuple(count for (_, count), _ in each))
        yield Strip(chunk, tuple(at for _, at in each))


def _share(total: int, parts: int, at: int) -> tuple[int, int]:
    """What the one `at` of `parts` gets of `total`, as ``torch.chunk`` deals: its first index, and how many."""
    most = -(-total // parts)
    first = min(most * at, total)
    return first, min(most, total - first)


class _Taken:
    """Stretches that are taken one behind another."""

    def __init__(self) -> None:
        self.stretches: _Stretches = []

    def take(self, of: _Stretches, start: int, count: int) -> None:
        """Take `count` indices of the stretches `of`, from the one that is number `start` among all of theirs."""
        for first, size in of:
            if not count:
                return
            taken = min(size - start, count)
            if taken <= 0:  # it begins in a later stretch
                start -= size
                continue
            last = self.stretches[-1] if self.stretches else None
            if last and sum(last) == first + start:  # right behind it: one stretch
                self.stretches[-1] = (last[0], last[1] + taken)
            else:
                self.stretches.append((first + start, taken))
            start, count = 0, count - taken
