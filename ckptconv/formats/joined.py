"""The pieces of a file with as few seams as possible: what continues what stands before it joins it; and the file that they make."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptconv.model import OutFile, Piece, Span, Storage

__all__ = ["file_of", "joined"]


def file_of(path: Path, pieces: list[Piece], storages: Iterable[Storage]) -> OutFile:
    """The file of PIECES, which has no place for checksums: those that STORAGES have are checked beside the copy."""
    sums = [each.data for each in storages if isinstance(each.data, Span) and each.data.crc32 is not None]
    size = sum(len(piece) if isinstance(piece, bytes) else piece.length for piece in pieces)
    return OutFile(path, joined(pieces), size, tuple(sums))


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """PIECES, literal bytes joined, and ranges that follow one another in one source."""
    out: list[Piece] = []
    literal = bytearray()
    for piece in pieces:
        if isinstance(piece, bytes):
            literal += piece
            continue
        if literal:
            out.append(bytes(literal))
            literal.clear()
        last = out[-1] if out else None
        if (
            isinstance(piece, Span)
            and isinstance(last, Span)
            and last.source is piece.source
            and last.offset + last.length == piece.offset
        ):
            out[-1] = Span(piece.source, last.offset, last.length + piece.length)
        else:
            out.append(piece)
    if literal:
        out.append(bytes(literal))
    return tuple(out)
