"""Tests of the assembly of tensors that were saved in chunks. The result equals torch's tensor, and memory is
bounded.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.kernels import gathering
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Assemble, ByteRange, ChunkPlacement, Concat, Literal, OutFile
from ckptconv.checkpoint.blocks import assembled
from ckptconv.formats.distributed.chunks import Chunk, check_cover
from ckptconv.output.transfer import VirtualFile
from tests.support.chunks import bytes_of, cut, placements_of
from tests.support.memory import memory_below

HERE = Path("here")
DTYPES = [
    torch.uint8,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@given(st.integers(0, 10**9), st.booleans())
def test_chunks_are_assembled_in_order(seed: int, plain: bool) -> None:
    """The bytes of a tensor are assembled in order for all ways to cut it, all strides of its parts, and all sizes of
    blocks and tiles.
    """
    chance = Random(seed)
    shape = tuple(chance.randrange(1, 9) for _ in range(chance.randrange(5)))
    dtype = chance.choice(DTYPES)
    whole = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    chunks = cut(chance, Chunk((0,) * len(shape), shape), chance.randrange(5))
    check_cover(HERE, "w", shape, chunks)
    piece = assembled(shape, dtype.itemsize, placements_of(chance, whole, chunks, plain=plain), HERE)
    assert piece.length == len(bytes_of(whole))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_BLOCK", chance.choice([16, 64, 1 << 20]))
        patch.setattr(gathering, "_TILE", chance.choice([16, 64, 1 << 20]))
        patch.setattr(gathering, "_GAP", chance.choice([0, 16, 4096]))
        with Pieces([piece]) as pieces:
            assert b"".join(bytes(chunk) for chunk in pieces.chunks(piece)) == bytes_of(whole)
        assert _read_anywhere(chance, piece, piece.length) == bytes_of(whole)


def _read_anywhere(chance: Random, piece: ByteRange | Concat | Assemble, length: int) -> bytes:
    """Return `piece`, read with a stream after reads at random positions."""
    parts = piece.ranges() or (piece,)
    with VirtualFile(OutFile(HERE, (Literal(b"before"), *parts), 6 + length)) as stream:
        for _ in range(3):
            stream.seek(chance.randrange(6 + length))
            stream.read(chance.randrange(1 + length))
        stream.seek(6)
        return stream.read(length)


class _Counted(Readable):
    """A file of zeros that records the sizes of its reads."""

    def __init__(self) -> None:
        self.path, self.fd, self.size = HERE, -1, 1 << 40
        self.reads: list[int] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.append(len(buffer))


def test_columns_are_read_in_few_large_pieces() -> None:
    """The columns of each process are read in few large pieces, each with many rows, and memory does not grow with the
    tensor.
    """
    source = _Counted()
    rows, columns = 40_000, 1_000
    placements = tuple(
        ChunkPlacement(ByteRange(source, 0, rows * columns * 4), (0, at), (rows, columns), (columns, 1))
        for at in (0, columns)
    )
    piece = Assemble(placements, (rows, 2 * columns), 4, 8 * rows * columns)
    assert piece.length > 40 << 20
    with memory_below(40 << 20):
        assert sum(len(chunk) for chunk in gathering.assemble(piece)) == piece.length
    assert sum(source.reads) == piece.length and len(source.reads) == 2 * 32
