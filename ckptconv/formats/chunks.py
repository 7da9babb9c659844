"""Tensors that were saved in chunks, put together again: what a run of several processes leaves, whatever container the chunks are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptconv.errors import LimitError, MalformedError
from ckptconv.model import Assemble, Box, Chain, Span
from ckptconv.sources import Held
from ckptconv.tensor_calls import row_major

__all__ = ["Chunk", "assembled", "check_cover"]

_CORNERS = 1 << 22  # of all chunks of a tensor: more than a million processes have, spread over two dimensions
_INCOMPLETE = "the files of some ranks may be missing: save again, or copy the whole folder"


class Chunk(NamedTuple):
    """A part of a tensor: the first index and the number of indices in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def check_cover(where: object, name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Raise MalformedError unless each element of the tensor NAME is in exactly one of CHUNKS, all of which lie inside SHAPE.

    A chunk says of each element whether it is in it. The sum of what all say is what the whole would say exactly where their differences are the same, and those are
    1 or -1 at the corners of each chunk, and 0 elsewhere. So corners are counted: no chunk is compared with another.
    """
    chunks = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if (len(chunks) == 1 and chunks[0].sizes == shape) or (not chunks and 0 in shape):
        return
    whole, saved = prod(shape), sum(prod(chunk.sizes) for chunk in chunks)
    cut = [d for d in range(len(shape)) if any(chunk.sizes[d] != shape[d] for chunk in chunks)]
    if saved == whole and len(chunks) << len(cut) > _CORNERS:
        raise LimitError(f"{name!r} was saved in too many chunks", where=where, got=f"{len(chunks):,}, cut along {len(cut)} dimensions")  # fmt: skip
    if saved != whole or any(_corners(shape, chunks, cut).values()):
        what = "leave holes in it" if saved < whole else "overlap"
        raise MalformedError(
            f"the chunks of {name!r} {what}", where=where, expected=f"{whole:,} elements of shape {shape}",
            got=f"{saved:,} in {len(chunks):,} chunks", hint=_INCOMPLETE if saved < whole else None,
        )  # fmt: skip


def _corners(shape: tuple[int, ...], chunks: Iterable[Chunk], cut: list[int]) -> Counter[tuple[int, ...]]:
    """How often each corner is one of CHUNKS, less how often it is one of the whole SHAPE, with signs; in the dimensions CUT alone, because in all others every chunk reaches from end to end."""
    found: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in [*((1, *chunk) for chunk in chunks), (-1, (0,) * len(shape), shape)]:
        ends = [((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in cut]
        for corner in product(*ends):
            found[tuple(at for at, _ in corner)] += sign * prod(each for _, each in corner)
    return found


def assembled(shape: tuple[int, ...], itemsize: int, boxes: Iterable[Box], path: Path) -> Span | Chain | Assemble:
    """The bytes of a tensor of SHAPE, which BOXES cover: their own where they stand in the order of its elements. PATH is for messages."""
    length = prod(shape) * itemsize
    if not length:
        return Span(Held(b"", path), 0, 0)
    filled = sorted((box for box in boxes if box.of.length), key=lambda box: box.offsets)
    cut = [d for d in range(len(shape)) if any(box.sizes[d] != shape[d] for box in filled)]
    if all(box.stride == row_major(box.sizes) for box in filled) and (not cut or prod(shape[: cut[-1]]) == 1):
        parts = tuple(box.of for box in filled)
        return parts[0] if len(parts) == 1 else Chain(parts, None, length)
    return Assemble(tuple(filled), shape, itemsize, length)
