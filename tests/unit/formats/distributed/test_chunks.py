"""Chunks of distributed tensors: whether they cover a tensor, and the pieces that they become."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.sources import BytesSource
from ckptconv.byteranges.spans import Assemble, ByteRange, ChunkPlacement, Concat
from ckptconv.checkpoint.blocks import assembled
from ckptconv.errors import MalformedError
from ckptconv.formats.distributed.chunks import Chunk, check_cover
from tests.support.chunks import cut, placements_of

HERE = Path("here")


@given(st.integers(0, 10**9))
def test_coverage_of_random_chunks(seed: int) -> None:
    """Chunks that are cut from a tensor cover it. If a chunk is removed, repeated or moved, they are accepted only if
    they contain each element exactly once.
    """
    chance = Random(seed)
    shape = tuple(chance.randrange(1, 6) for _ in range(1 + chance.randrange(3)))
    chunks = cut(chance, Chunk((0,) * len(shape), shape), 4)
    check_cover(HERE, "w", shape, chunks)
    i = chance.randrange(len(chunks))
    kind = chance.randrange(3)
    if kind == 0:
        del chunks[i]
    elif kind == 1:
        chunks.append(chunks[i])
    else:
        offsets = tuple(chance.randrange(whole - size + 1) for whole, size in zip(shape, chunks[i].sizes, strict=True))
        chunks[i] = Chunk(offsets, chunks[i].sizes)
    times = torch.zeros(shape)
    for chunk in chunks:
        times[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    if bool((times == 1).all()):
        check_cover(HERE, "w", shape, chunks)
    else:
        with pytest.raises(Exception, match="the chunks of 'w'"):
            check_cover(HERE, "w", shape, chunks)


def test_far_offsets_take_no_longer() -> None:
    """The work for a chunk does not depend on its offset. An offset of 62 bits needs only a few bytes of a pickle."""

    def seconds(unit: int) -> float:
        chunks = [Chunk((i * unit + unit // 3,) * 20, (unit,) * 20) for i in range(1000)]
        start = time.process_time()
        with pytest.raises(MalformedError, match="overlap"):
            check_cover(HERE, "w", (10 * unit,) * 3 + (unit,) * 17, chunks)
        return time.process_time() - start

    assert min(seconds(1 << 50) for _ in range(3)) < 3.5 * min(seconds(1) for _ in range(3))


def test_rows_are_concatenated() -> None:
    """Chunks in the order of the elements are concatenated. Columns are assembled, and so are chunks whose own elements
    are in another order.
    """
    whole, chance = torch.arange(24.0).view(4, 6), Random(1)
    rows, columns = [Chunk((0, 0), (3, 6)), Chunk((3, 0), (1, 6))], [Chunk((0, 0), (4, 1)), Chunk((0, 1), (4, 5))]
    piece = assembled((4, 6), 4, placements_of(chance, whole, rows, plain=True), HERE)
    assert isinstance(piece, Concat) and piece.whole is None and [part.length for part in piece.parts] == [72, 24]
    assert isinstance(assembled((4, 6), 4, placements_of(chance, whole, columns, plain=True), HERE), Assemble)
    assert isinstance(
        assembled(
            (1, 24),
            4,
            placements_of(chance, whole.view(1, 24), [Chunk((0, 0), (1, 9)), Chunk((0, 9), (1, 15))], plain=True),
            HERE,
        ),
        Concat,
    )
    turned = ChunkPlacement(ByteRange(BytesSource(bytes(96), HERE), 0, 96), (0, 0), (4, 6), (1, 4))
    assert isinstance(assembled((4, 6), 4, [turned], HERE), Assemble)
    assert assembled((0, 6), 4, [], HERE).length == 0
