"""Which elements of a tensor one process has: torch's placements, followed from left to right over a mesh.

Source: ``torch/distributed/tensor/placement_types.py`` and ``_utils.py`` (``_compute_local_shape_and_global_offset``)
of torch 2.13. Each dimension of the mesh cuts one dimension of the tensor as ``torch.chunk`` does, or none.
``_StridedShard`` cuts what there is into ``split`` pieces first, and each of these by the mesh: the process has a strip
of each piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from ckptconv.formats.distributed.chunks import Chunk


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
    """Return the stretches that the process has of each dimension of a tensor of `shape`.

    This takes at most :func:`steps_of` steps for these cuts.
    """
    held: list[_Stretches] = [[(0, size)] for size in shape]
    for cut in cuts:
        if cut.dim is not None and cut.parts > 1:
            total = sum(count for _, count in held[cut.dim])
            held[cut.dim] = _taken(held[cut.dim], _shares(total, cut))
    return held


def steps_of(cuts: Sequence[Cut]) -> int:
    """Return a bound on the steps that :func:`held_sizes` takes: each cut looks at all stretches that earlier ones
    made, and each piece makes one more.
    """
    splits = [cut.split for cut in cuts if cut.dim is not None and cut.parts > 1]
    return len(splits) * (1 + sum(splits))


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


def _shares(total: int, cut: Cut) -> Iterator[tuple[int, int]]:
    """Yield the share of this process in each piece that `cut` makes of `total` indices. They ascend."""
    for piece in range(min(cut.split, total)):  # the pieces after these are empty
        start, count = _share(total, cut.split, piece)
        inner, size = _share(count, cut.parts, cut.at)
        yield start + inner, size


def _taken(of: _Stretches, shares: Iterable[tuple[int, int]]) -> _Stretches:
    """Return the stretches of those indices of `of`, counted from its first one, that are in `shares`."""
    taken: _Stretches = []
    rest = iter(of)
    first, size, before = 0, 0, 0  # a stretch, and how many indices stand in earlier ones
    for start, count in shares:
        while count:
            while before + size <= start:
                before += size
                first, size = next(rest)
            here = min(before + size - start, count)
            at = first + start - before
            if taken and sum(taken[-1]) == at:  # it continues the last one
                taken[-1] = taken[-1][0], taken[-1][1] + here
            else:
                taken.append((at, here))
            start, count = start + here, count - here
    return taken
