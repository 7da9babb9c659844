"""A file of numbers, plain and deflated, and every kind of piece that can be made from it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Cast, Concat, Data, Inflate

__all__ = ["KINDS", "RANGES", "RAW", "bytes_of", "every_data", "numbers_in", "raw"]

NUMBERS = torch.arange(-60.0, 60).to(torch.float32)


RAW = NUMBERS.numpy().tobytes()


#: Ranges of the numbers. Each one is the extent of a view.
RANGES = [(0, 40), (60, 61), (64, 100), (101, 120)]


def bytes_of(piece: Any) -> bytes:
    """Return all bytes of `piece`."""
    with Pieces([piece]) as pieces:
        data = b"".join(bytes(chunk) for chunk in pieces.chunks(piece))
    assert len(data) == piece.length
    return data


def every_data(source: Source) -> dict[str, tuple[Data, bytes]]:
    """Return every kind of data that a storage can consist of, and the bytes that each one represents."""
    span = ByteRange(source, 7, len(RAW), zlib.crc32(RAW))
    at = 7 + len(RAW)
    inflate = Inflate(ByteRange(source, at, source.size - at), len(RAW), zlib.crc32(RAW))
    parts = tuple(ByteRange(source, 7 + 4 * a, 4 * (b - a)) for a, b in RANGES)
    chain = Concat(parts, span, sum(part.length for part in parts))
    chained = b"".join(RAW[4 * a : 4 * b] for a, b in RANGES)
    found: dict[str, tuple[Data, bytes]] = {"span": (span, RAW), "inflate": (inflate, RAW), "chain": (chain, chained)}
    for name, (data, raw) in [*found.items()]:
        assert not isinstance(data, Cast)
        wanted = torch.frombuffer(bytearray(raw), dtype=torch.float32).to(torch.float64).numpy().tobytes()
        found[f"cast {name}"] = Cast(data, "float32", "float64", 2 * len(raw)), wanted
    return found


KINDS = ["span", "inflate", "chain", "cast span", "cast inflate", "cast chain"]


def numbers_in(path: Path) -> Path:
    """Write seven zero bytes, the numbers, and the deflated numbers to `path`. Return `path`."""
    deflater = zlib.compressobj(wbits=-15)
    path.write_bytes(bytes(7) + RAW + deflater.compress(RAW) + deflater.flush())
    return path


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of `tensor`."""
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))
