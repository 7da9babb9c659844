"""Put the chunks of a distributed tensor together, and check that they cover it exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, product
from math import prod
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple

from ckptconv.byteranges.sources import BytesSource
from ckptconv.byteranges.spans import Assemble, ByteRange, ChunkPlacement, Concat
from ckptconv.checkpoint.tensor_info import row_major
from ckptconv.errors import MalformedError

_PRIME = (1 << 127) - 1
_INCOMPLETE = "the files of some ranks may be missing: save again, or copy the whole folder"


class Chunk(NamedTuple):
    """A part of a tensor: the first index and the number of indices in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def check_cover(where: object, name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Raise MalformedError unless each element of the tensor `name` is in exactly one of
    `chunks`, all of which lie inside `shape`.

    Each chunk is a function of the elements: 1 inside of it, 0 elsewhere. The chunks cover the tensor exactly once if
    and only if the sum of these functions is that of a chunk which is the whole tensor. The differences of such a
    function along all dimensions are 1 or -1 at the corners of the chunk, and 0 elsewhere. They are taken as the
    coefficients of a polynomial, whose exponents are the indices of the corners. The polynomials are compared at one
    random point, where two different ones are equal once in 2^58 times. So no chunk is compared with another.
    """
    chunks = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if (len(chunks) == 1 and chunks[0].sizes == shape) or (not chunks and 0 in shape):
        return
    whole, saved = prod(shape), sum(prod(chunk.sizes) for chunk in chunks)
    if saved != whole or not _adds_up(shape, chunks):
        what = "leave holes in it" if saved < whole else "overlap"
        raise MalformedError(
            f"the chunks of {name!r} {what}",
            where=where,
            expected=f"{whole:,} elements of shape {shape}",
            got=f"{saved:,} in {len(chunks):,} chunks",
            hint=_INCOMPLETE if saved < whole else None,
        )


def _adds_up(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether the polynomials of `chunks` add up to that of a chunk that is all of `shape`."""
    chance = SystemRandom()  # nobody can know the point and choose chunks for it
    left = [1] * (len(chunks) + 1)
    for d, size in enumerate(shape):
        ends = [(0, size), *((chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]) for chunk in chunks)]
        if len(set(ends)) == 1:  # every chunk reaches from end to end
            continue
        at = chance.randrange(2, _PRIME)
        powers = {end: pow(at, end, _PRIME) for end in set(chain.from_iterable(ends))}
        left = [
            factor * (powers[stop] - powers[start]) % _PRIME for factor, (start, stop) in zip(left, ends, strict=True)
        ]
    return (sum(left[1:]) - left[0]) % _PRIME == 0


def assembled(
    shape: tuple[int, ...], itemsize: int, placements: Iterable[ChunkPlacement], path: Path
) -> ByteRange | Concat | Assemble:
    """The bytes of a tensor of `shape`, which `placements` cover: their own where they stand in the order of its
    elements.

    `path` is for messages.
    """
    length = prod(shape) * itemsize
    if not length:
        return ByteRange(BytesSource(b"", path), 0, 0)
    filled = sorted(
        (placement for placement in placements if placement.of.length), key=lambda placement: placement.offsets
    )
    cut = [d for d in range(len(shape)) if any(placement.sizes[d] != shape[d] for placement in filled)]
    if all(placement.stride == row_major(placement.sizes) for placement in filled) and (
        not cut or prod(shape[: cut[-1]]) == 1
    ):
        parts = tuple(placement.of for placement in filled)
        return parts[0] if len(parts) == 1 else Concat(parts, None, length)
    return Assemble(tuple(filled), shape, itemsize, length)


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
