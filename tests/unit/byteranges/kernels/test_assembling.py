"""Tensors that were saved in chunks are put together as torch would have them, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.kernels import assembling, gathering
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.sources import BytesSource, Readable
from ckptconv.byteranges.spans import Assemble, ByteRange, ChunkPlacement, Concat, OutFile
from ckptconv.checkpoint.new_tensors import row_major
from ckptconv.formats.distributed.chunks import Chunk, assembled, check_cover
from ckptconv.output.virtual_file import VirtualFile

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


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of TENSOR in row-major order."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def cut(chance: Random, chunk: Chunk, times: int) -> list[Chunk]:
    """CHUNK cut in two, and the halves again, up to so many TIMES; halves can be empty."""
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
    """CHUNKS of WHOLE, each somewhere in a file of its own; in row-major order if they are to be PLAIN, else in any."""
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
                ByteRange(BytesSource(data, HERE), before, len(data) - before), chunk.offsets, chunk.sizes, stride
            )
        )
    chance.shuffle(placements)
    return placements


@given(st.integers(0, 10**9), st.booleans())
def test_as_torch_has_it(seed: int, plain: bool) -> None:
    """However a tensor was cut, and whatever the strides of its parts, its bytes come out in
    order; at any size of blocks and tiles.
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
        patch.setattr(assembling, "_BLOCK", chance.choice([16, 64, 1 << 20]))
        patch.setattr(gathering, "_TILE", chance.choice([16, 64, 1 << 20]))
        patch.setattr(gathering, "_GAP", chance.choice([0, 16, 4096]))
        with Pieces([piece]) as pieces:
            assert b"".join(bytes(chunk) for chunk in pieces.chunks(piece)) == bytes_of(whole)
        assert _read_anywhere(chance, piece, piece.length) == bytes_of(whole)


def _read_anywhere(chance: Random, piece: ByteRange | Concat | Assemble, length: int) -> bytes:
    """PIECE through a stream, after having read here and there in it."""
    parts = piece.parts if isinstance(piece, Concat) else (piece,)
    with VirtualFile(OutFile(HERE, (b"before", *parts), 6 + length)) as stream:
        for _ in range(3):
            stream.seek(chance.randrange(6 + length))
            stream.read(chance.randrange(1 + length))
        stream.seek(6)
        return stream.read(length)


@given(st.integers(0, 10**9))
def test_chunks_that_were_cut_cover_and_others_do_not(seed: int) -> None:
    """Whatever cuts make covers the whole; with a chunk less, one more, or one moved it
    is covered only if counting says so.
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


def test_rows_stay_where_they_are() -> None:
    """Parts that stand in the order of the elements are not put together; columns are, and so are parts whose own
    elements are in another order.
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


class _Counted(Readable):
    """A file of zeros; remembers how it is read."""

    def __init__(self) -> None:
        self.path, self.fd, self.size = HERE, -1, 1 << 40
        self.reads: list[int] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.append(len(buffer))


def test_columns_are_read_in_few_large_pieces() -> None:
    """Of each process's columns all rows that are needed are read at once, and memory does not grow with the tensor."""
    source = _Counted()
    rows, columns = 40_000, 1_000
    placements = tuple(
        ChunkPlacement(ByteRange(source, 0, rows * columns * 4), (0, at), (rows, columns), (columns, 1))
        for at in (0, columns)
    )
    piece = Assemble(placements, (rows, 2 * columns), 4, 8 * rows * columns)
    tracemalloc.start()
    assert sum(len(chunk) for chunk in assembling.assemble(piece)) == piece.length
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20 < piece.length
    assert sum(source.reads) == piece.length and len(source.reads) == 2 * 32
