"""Slices of distributed tensors: check that chunks cover a tensor exactly once, and cut tensors as torch does.

The elements that a process has follow from torch's placements, which are applied from left to right to a mesh of
processes. Each dimension of the mesh cuts one dimension of the tensor as ``torch.chunk`` does, or none.
``_StridedShard`` first cuts into ``split`` pieces. Then the mesh cuts each piece, so a process has a strip of each
piece. Source: ``torch/distributed/tensor/placement_types.py`` and ``_utils.py``
(``_compute_local_shape_and_global_offset``) of torch 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, product
from math import prod
from typing import NamedTuple

from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import MalformedError

_PRIME = (1 << 127) - 1


class Chunk(NamedTuple):
    """A rectangular slice of a tensor: its first index and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def check_cover(where: object, name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Raise MalformedError unless each element of a tensor is in exactly one of `chunks`.

    Each chunk is regarded as a function of the elements: 1 inside the chunk, 0 elsewhere. The chunks cover the tensor
    exactly once if and only if the sum of these functions is the function of the complete tensor. The differences of
    such a function along all dimensions are 1 or -1 at the corners of the chunk, and 0 elsewhere. They are the
    coefficients of a polynomial, which has a variable for each index of a corner in each dimension. The polynomials are
    compared at one random point, where two different ones are equal with a probability of at most 2^-120. So no chunk
    is compared with another.

    Args:
        where: The name of the file in errors.
        name: The name of the tensor in errors.
        shape: The shape of the tensor.
        chunks: The chunks, each of which must lie inside `shape`.
    """
    chunks = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if (len(chunks) == 1 and chunks[0].sizes == shape) or (not chunks and 0 in shape):
        return
    wanted, saved = prod(shape), sum(prod(chunk.sizes) for chunk in chunks)
    if saved != wanted or not _adds_up(shape, chunks):
        raise MalformedError(
            f"the chunks of {name!r} {'leave holes in it' if saved < wanted else 'overlap'}",
            where=where,
            expected=f"{wanted:,} elements of shape {shape}",
            got=f"{saved:,} in {len(chunks):,} chunks",
            hint="the files of some ranks may be missing: save it again, or copy the whole folder"
            if saved < wanted
            else None,
        )


def _adds_up(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Return whether the polynomials of `chunks` add up to that of a tensor of `shape`. See :func:`check_cover`."""
    values = [1] * (len(chunks) + 1)  # of the complete tensor, then of each chunk
    for d, size in enumerate(shape):
        ends = [(0, size), *((chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]) for chunk in chunks)]
        if len(set(ends)) == 1:  # every chunk reaches from end to end
            continue
        # nobody can know these numbers and choose chunks for them
        point = {end: int.from_bytes(os.urandom(16), "little") for end in {*chain.from_iterable(ends)}}
        values = [
            value * (point[stop] - point[start]) % _PRIME for value, (start, stop) in zip(values, ends, strict=True)
        ]
    return (sum(values[1:]) - values[0]) % _PRIME == 0


def rows_of_ranks(shape: tuple[int, ...], ranks: int) -> dict[int, Chunk]:
    """Return the rows of a tensor of `shape` for each of `ranks` processes, as ``torch.chunk`` divides them.

    A process without rows is not in the result. A tensor without dimensions or elements is given to process 0.
    """
    complete = Chunk((0,) * len(shape), shape)
    if ranks == 1 or 0 in (shape or (0,)):
        return {0: complete}
    shares = ((rank, *_share(shape[0], ranks, rank)) for rank in range(min(ranks, shape[0])))
    return {rank: Chunk((first, *complete.offsets[1:]), (size, *shape[1:])) for rank, first, size in shares if size > 0}


def is_apart(info: TensorInfo) -> bool:
    """Return whether all elements of the tensor `info` have different bytes.

    If elements shared bytes, a small file could become a large output.
    """
    end = 1
    for step, size in sorted((step, size) for size, step in zip(info.shape, info.stride, strict=True) if size > 1):
        if step < end:
            return False
        end += step * (size - 1)
    return True


class Cut(NamedTuple):
    """A cut of dimension `dim` of a tensor by one dimension of a mesh.

    The dimension is first cut into `split` pieces. Each piece is cut into `parts`, of which this process has number
    `at`.
    """

    parts: int
    at: int
    dim: int
    split: int = 1


class Strip(NamedTuple):
    """A `chunk` of the complete tensor. In the local tensor of the process, it begins at the index `start`."""

    chunk: Chunk
    start: tuple[int, ...]


#: The stretches of one dimension that a process has, in their order: the first index of each, and how many.
_Stretches = list[tuple[int, int]]


def held_sizes(shape: tuple[int, ...], cuts: Sequence[Cut]) -> list[_Stretches]:
    """Return for each dimension of a tensor of `shape` the stretches of indices that the process has after `cuts`.

    It takes at most :func:`steps_of` steps.
    """
    held: list[_Stretches] = [[(0, size)] for size in shape]
    for cut in cuts:
        total = sum(count for _, count in held[cut.dim])
        held[cut.dim] = _taken(held[cut.dim], _shares(total, cut))
    return held


def steps_of(cuts: Sequence[Cut]) -> int:
    """Return a bound on the steps that :func:`held_sizes` takes for `cuts`.

    Each cut reads all stretches that earlier cuts made, and each piece adds one.
    """
    return len(cuts) * (1 + sum(cut.split for cut in cuts))


def strips_of(held: Sequence[_Stretches]) -> Iterator[Strip]:
    """Yield the strips of a process that has the stretches `held` in each dimension: all their combinations."""
    starts = [accumulate((count for _, count in stretches), initial=0) for stretches in held]
    for strip in product(*(zip(stretches, at, strict=False) for stretches, at in zip(held, starts, strict=True))):
        chunk = Chunk(tuple(first for (first, _), _ in strip), tuple(count for (_, count), _ in strip))
        yield Strip(chunk, tuple(at for _, at in strip))


def _share(total: int, parts: int, at: int) -> tuple[int, int]:
    """Return the first index and the number of indices of share `at`, if ``torch.chunk`` cuts `total` into `parts`."""
    most = -(-total // parts)
    first = min(most * at, total)
    return first, min(most, total - first)


def _shares(total: int, cut: Cut) -> Iterator[tuple[int, int]]:
    """Yield the stretch of indices that this process gets of each piece, if `cut` cuts `total` indices.

    A stretch is the first index and the number of indices. They ascend.
    """
    for piece in range(min(cut.split, total)):  # the pieces after these are empty
        start, count = _share(total, cut.split, piece)
        inner, size = _share(count, cut.parts, cut.at)
        yield start + inner, size


def _taken(stretches: _Stretches, shares: Iterable[tuple[int, int]]) -> _Stretches:
    """Return the stretches of the indices of `of` whose numbers, counted along all stretches, are in `shares`."""
    taken: _Stretches = []
    rest = iter(stretches)
    first, size, before = 0, 0, 0  # a stretch, and the number of indices in earlier ones
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
