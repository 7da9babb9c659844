"""Multiply the codes of quantized weights by their scales, in float32 and in bounded memory.

The results are the same as those of the programs that define the layouts. A code or a scale becomes float32 exactly. A
second scale is applied to the first scale, and the product to the code. A NaN has the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from ckptconv.byteranges import reading
from ckptconv.byteranges.kernels.gathering import Tiles
from ckptconv.byteranges.spans import ByteRange, Gather, Piece, Scaled
from ckptconv.dtypes import BY_NAME

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_scaled(piece: Scaled, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes at `offset` of `piece`.

    Offset and length are multiples of 4, the size of float32.
    """
    out = torch.frombuffer(buffer, dtype=torch.float32)
    start = piece.start + offset // 4
    _, rows, columns = piece.matrix
    for first, n, column, length in _boxes(start, start + len(out), rows if piece.transposed else columns):
        box, out = out[: n * length].view(n, length), out[n * length :]
        if not piece.transposed:
            box.copy_(_numbers(piece, (first, n), (column, length)))
            continue
        for matrix in range(first // columns, -(-(first + n) // columns)):
            top, end = max(first, matrix * columns), min(first + n, (matrix + 1) * columns)
            numbers = _numbers(piece, (matrix * rows + column, length), (top - matrix * columns, end - top))
            box[top - first : end - first].copy_(numbers.T)


def _boxes(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield boxes that together contain the elements `start` to `stop` (exclusive) of a matrix with `width` columns.

    A box is (first row, number of rows, first column, number of columns).
    """
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if not column else 0
        length = width if rows else min(width - column, stop - start)
        rows = rows or 1
        yield row, rows, column, length
        start += rows * length


def _numbers(piece: Scaled, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """Return the dequantized numbers in `rows` and `columns`, each given as a first index and a number.

    Rows are counted through all matrices.
    """
    _, height, width = piece.matrix
    tall, wide = piece.block
    left, right = columns[0], sum(columns)
    per_byte = 2 if piece.code_dtype == "fp4" else 1
    begin, end = left // per_byte, -(-right // per_byte)
    codes = _region(piece.codes, width // per_byte, rows, (begin, end - begin))
    numbers = _decoded(codes, piece.code_dtype)[:, left - begin * per_byte :][:, : columns[1]]
    every = torch.arange(rows[0], sum(rows))
    lines = every // height * -(-height // tall) + every % height // tall
    if piece.scale_dtype == "ldexp":
        numbers *= 2  # the scales are halved, because float32 has no 2**128
    across = left // wide, -(-right // wide) - left // wide
    some = _scales(piece, -(-width // wide), (int(lines[0]), int(lines[-1]) + 1 - int(lines[0])), across)
    scales = some[lines - lines[0]]
    head = min(-left % wide, columns[1])  # of a block that begins before
    whole = (columns[1] - head) // wide
    tail = head + whole * wide
    if head:
        numbers[:, :head].mul_(scales[:, :1])
    if whole:
        inner = scales[:, bool(head) : bool(head) + whole, None]
        numbers[:, head:tail].view(len(numbers), whole, wide).mul_(inner)
    if tail < columns[1]:
        numbers[:, tail:].mul_(scales[:, -1:])
    if not (some.isfinite() & (some != 0)).all():
        numbers.masked_fill_(numbers.isnan(), torch.nan)
    return numbers


def _scales(piece: Scaled, width: int, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """Return the scales in `rows` and `columns` of the grid of scales, as float32. The grid is `width` scales wide."""
    size = 1 if piece.scale_dtype == "ldexp" else BY_NAME[piece.scale_dtype].itemsize
    data = _region(piece.scales, width * size, rows, (columns[0] * size, columns[1] * size))
    if size == 1:
        scales = _decoded(data, piece.scale_dtype)
    else:
        scales = data.view(getattr(torch, piece.scale_dtype)).to(torch.float32)
        scales.masked_fill_(scales.isnan(), torch.nan)
    if piece.second is None:
        return scales
    dtype = getattr(torch, piece.second_dtype)
    room = memoryview(bytearray(dtype.itemsize))
    reading.read_into(piece.second, 0, room)
    second = torch.frombuffer(room, dtype=dtype).to(torch.float32)
    scales = scales / second if piece.divides else scales * second
    return scales.masked_fill_(scales.isnan(), torch.nan)


def _region(data: Piece, width: int, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """Return the bytes in `rows` and `columns` of `data`, whose rows have `width` bytes."""
    room = memoryview(bytearray(rows[1] * columns[1]))
    out = torch.frombuffer(room, dtype=torch.uint8).view(rows[1], columns[1])
    if rows[1] == 1 or columns[1] == width:
        reading.read_into(data, rows[0] * width + columns[0], room)
        return out
    assert isinstance(data, ByteRange)  # others are not transposed
    view = Gather(data, 1, (rows[0] + rows[1], width), (width, 1), 0, 0)
    Tiles().fill(out, view, data, ((rows[0], columns[0]), (rows[1], columns[1])))
    return out


def _decoded(codes: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the numbers of `codes`, a matrix of bytes, as float32.

    Torch casts float8 one element at a time. A table with the numbers of each two bytes is ten times as fast.
    """
    flat, n = codes.view(-1), codes.numel()
    if dtype == "fp4":
        pairs = torch.index_select(_table(dtype), 0, flat.to(torch.int32))
        return pairs.view(torch.float32).view(len(codes), -1)
    even = n - n % 2
    pairs = torch.index_select(_table(dtype), 0, flat[:even].view(torch.uint16).to(torch.int32))
    numbers = pairs.view(torch.float32)
    if n % 2:
        numbers = torch.cat([numbers, _table(dtype).view(torch.float32).view(-1, 2)[int(flat[-1]), :1]])
    return numbers.view(codes.shape)


@cache
def _table(dtype: str) -> torch.Tensor:
    """Return a table of pairs of float32, stored as int64: for each byte of ``fp4``, or each two bytes of another
    dtype.
    """
    if dtype == "fp4":
        half = torch.tensor([*_FP4, *(-number for number in _FP4)])
        byte = torch.arange(256)
        return torch.stack([half[byte & 15], half[byte >> 4]], 1).view(torch.int64).flatten()
    one = torch.arange(256, dtype=torch.uint8)
    if dtype == "ldexp":
        numbers = torch.exp2(one.to(torch.float64) - 128).to(torch.float32)
    elif dtype in ("uint8", "float8_e8m0fnu"):
        numbers = torch.exp2(one.to(torch.float64) - 127).to(torch.float32)  # the last one is too large
        numbers[255] = torch.nan if dtype == "float8_e8m0fnu" else torch.inf
    else:
        numbers = one.view(getattr(torch, dtype)).to(torch.float32)
    numbers.masked_fill_(numbers.isnan(), torch.nan)
    pair = torch.arange(65536)  # little-endian: the first byte is the low one
    return torch.stack([numbers[pair & 255], numbers[pair >> 8]], 1).view(torch.int64).flatten()
