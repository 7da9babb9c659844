"""Multiply the codes of quantized weights by their scales, in float32 and in bounded memory.

The results are the same as those of the programs that define the layouts. A code or a scale becomes float32 exactly. A
second scale is applied to the first scale, and the product to the code. A NaN has the same bits on every machine.

NumPy computes them, or torch if NumPy is not installed: all names of `_arrays()` that this module uses mean the same in
both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from math import inf, ldexp, nan
from typing import Any

from ckptconv.byteranges import reading
from ckptconv.byteranges.rounding import numpy
from ckptconv.byteranges.spans import Piece, Scaled
from ckptconv.dtypes import BY_NAME

_WINDOW = 1 << 20  # bytes of rows that are read at once if only some of their columns are needed
_STRIP = 64  # rows that are transposed at once: one cache line of each fits into the cache
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0)
_STEP = "step of "
#: The bits of the mantissa, the bias of the exponent, and the smallest code without a sign that is not finite.
_FLOAT8 = {
    "float8_e4m3fn": (3, 7, 0x7F),
    "float8_e5m2": (2, 15, 0x7C),
    "float8_e4m3fnuz": (3, 8, 0x80),
    "float8_e5m2fnuz": (2, 16, 0x80),
}


@cache
def _arrays() -> Any:
    """Return the module NumPy, or torch if NumPy cannot be imported. Raises MissingTorchError without both."""
    if numpy():
        return numpy()
    from ckptconv.byteranges import kernels

    return kernels.torch


def _no_warnings() -> AbstractContextManager[object]:
    """Return a context in which NumPy does not warn of overflow and NaN. torch never warns."""
    context: AbstractContextManager[object] = numpy().errstate(all="ignore") if numpy() else nullcontext()
    return context


def read_scaled(piece: Scaled, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes at `offset` of `piece`.

    Offset and length are multiples of 4, the size of float32.
    """
    xp = _arrays()
    out = xp.frombuffer(buffer, dtype=xp.float32)
    start = piece.start + offset // 4
    _, rows, columns = piece.matrix
    with _no_warnings():
        for first, n, column, length in _boxes(start, start + len(out), rows if piece.transposed else columns):
            box, out = out[: n * length].reshape(n, length), out[n * length :]
            if not piece.transposed:
                _fill(box, piece, (first, n), (column, length))
                continue
            for matrix in range(first // columns, -(-(first + n) // columns)):
                top, end = max(first, matrix * columns), min(first + n, (matrix + 1) * columns)
                numbers = xp.empty((length, end - top), dtype=xp.float32)
                _fill(numbers, piece, (matrix * rows + column, length), (top - matrix * columns, end - top))
                for i in range(0, length, _STRIP):
                    box[top - first : end - first, i : i + _STRIP] = numbers[i : i + _STRIP].T


def steps_between(piece: Scaled, offset: int, values: memoryview, others: memoryview, dtype: str) -> float:
    """Return the largest distance between finite numbers in `values` and `others`, in steps of the codes of `piece`.

    `values` are bytes of `piece` from `offset` on, and `others` as many numbers of `dtype`, a float of 16 or 32 bits.
    A step is the distance between a code and the next one, times the scale.
    """
    xp = _arrays()
    steps = bytearray(len(values))
    read_scaled(replace(piece, code_dtype=_STEP + piece.code_dtype), offset, memoryview(steps))
    with _no_warnings():
        a, step = (xp.frombuffer(data, dtype=xp.float32) for data in (values, steps))
        apart = abs(a - _decoded(xp.frombuffer(others, dtype=xp.uint8).reshape(1, -1), dtype)[0]) / abs(step)
    finite = apart[xp.isfinite(apart)]
    return float(finite.max()) if len(finite) else 0.0


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


def _fill(out: Any, piece: Scaled, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """Fill the matrix `out` with the numbers in `rows` and `columns`, each given as a first index and a number.

    Rows are counted through all matrices.
    """
    xp = _arrays()
    _, height, width = piece.matrix
    tall, wide = piece.block
    left, right = columns[0], sum(columns)
    per_byte = 2 if piece.code_dtype.endswith("fp4") else 1
    begin, end = left // per_byte, -(-right // per_byte)
    codes = _region(piece.codes, width // per_byte, rows, (begin, end - begin))
    numbers = _decoded(codes, piece.code_dtype)[:, left - begin * per_byte :][:, : columns[1]]
    every = xp.arange(rows[0], sum(rows))
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
        xp.multiply(numbers[:, :head], scales[:, :1], out=out[:, :head])
    if whole:
        inner = scales[:, bool(head) : bool(head) + whole, None]
        shape = len(out), whole, wide
        xp.multiply(numbers[:, head:tail].reshape(shape), inner, out=out[:, head:tail].reshape(shape))
    if tail < columns[1]:
        xp.multiply(numbers[:, tail:], scales[:, -1:], out=out[:, tail:])
    if not (xp.isfinite(some) & (some != 0)).all():
        out[xp.isnan(out)] = nan


def _scales(piece: Scaled, width: int, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Return the scales in `rows` and `columns` of the grid of scales, as float32. The grid is `width` scales wide."""
    size = 1 if piece.scale_dtype == "ldexp" else BY_NAME[piece.scale_dtype].itemsize
    data = _region(piece.scales, width * size, rows, (columns[0] * size, columns[1] * size))
    scales = _decoded(data, piece.scale_dtype)
    if piece.second is not None:
        size = BY_NAME[piece.second_dtype].itemsize
        second = _decoded(_region(piece.second, size, (0, 1), (0, size)), piece.second_dtype)
        scales = scales / second if piece.divides else scales * second
    scales[_arrays().isnan(scales)] = nan
    return scales


def _region(data: Piece, width: int, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Return the bytes in `rows` and `columns` of `data`, whose rows have `width` bytes."""
    xp = _arrays()
    (first, n), (left, length) = rows, columns
    room = memoryview(bytearray(n * length))
    out = xp.frombuffer(room, dtype=xp.uint8).reshape(n, length)
    if n == 1 or length == width:
        reading.read_into(data, first * width + left, room)
        return out
    step = max(1, _WINDOW // width)
    for top in range(0, n, step):
        some = _region(data, width, (first + top, min(step, n - top)), (0, width) if step > 1 else columns)
        out[top : top + step] = some[:, left : left + length] if step > 1 else some
    return out


def _decoded(data: Any, dtype: str) -> Any:
    """Return the numbers of `dtype` in `data`, a matrix of bytes, as a new matrix of float32."""
    xp = _arrays()
    if dtype == "bfloat16":
        return (xp.asarray(data.view(xp.int16), dtype=xp.int32) << 16).view(xp.float32)
    if dtype in ("float16", "float32"):
        return xp.asarray(data.view(getattr(xp, dtype)), dtype=xp.float32)
    flat, n = data.reshape(-1), data.shape[0] * data.shape[1]
    table = xp.frombuffer(_table(dtype), dtype=xp.int64)
    if dtype.endswith("fp4"):
        return xp.take(table, xp.asarray(flat, dtype=xp.int64)).view(xp.float32).reshape(len(data), -1)
    if n % 2:
        flat = xp.concatenate([flat, flat[:1]])
    pairs = xp.take(table, xp.asarray(flat.view(xp.uint16), dtype=xp.int64))
    return pairs.view(xp.float32)[:n].reshape(data.shape)


@cache
def _table(dtype: str) -> bytearray:
    """Return a table of pairs of float32: for each byte of ``fp4``, or each two bytes of another dtype.

    Looking up two numbers at once is twice as fast. With the prefix :data:`_STEP`, the numbers are the steps.
    """
    name = dtype.removeprefix(_STEP)
    if name == "fp4":
        half = [*_FP4, *(-number for number in _FP4)] if dtype == name else [*_FP4_STEPS, *_FP4_STEPS]
        return bytearray(b"".join(struct.pack("2f", half[byte & 15], half[byte >> 4]) for byte in range(256)))
    if name in _FLOAT8:
        numbers = [_number(code, *_FLOAT8[name])[dtype != name] for code in range(256)]
    else:
        numbers = [ldexp(1, code - (128 if dtype == "ldexp" else 127)) for code in range(256)]
    if dtype in ("uint8", "float8_e8m0fnu"):
        numbers[255] = nan if dtype == "float8_e8m0fnu" else inf  # 2**128 is too large for float32
    packed = [struct.pack("f", number) for number in numbers]
    return bytearray(b"".join(packed[pair & 255] + packed[pair >> 8] for pair in range(65536)))  # little-endian


def _number(code: int, bits: int, bias: int, odd: int) -> tuple[float, float]:
    """Return the number of the float8 `code`, in a dtype of :data:`_FLOAT8`, and the step to the next number."""
    size, sign = code & 127, -1 if code > 127 else 1
    if size >= odd or (odd == 128 == code):
        return (sign * inf if size == odd == 0x7C else nan), nan
    exponent, mantissa = size >> bits, size & (1 << bits) - 1
    step = ldexp(1, max(exponent, 1) - bias - bits)
    return sign * ((mantissa + (bool(exponent) << bits)) * step), step
