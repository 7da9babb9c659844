"""The pieces of a file with as few seams as possible: what continues what stands before it joins it."""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.model import Piece, Span

__all__ = ["joined"]


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
