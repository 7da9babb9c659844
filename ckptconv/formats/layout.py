"""Lay out an output file: its pieces in order, with adjacent ranges joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ckptconv.byteranges.slicing import length_of, with_checksums
from ckptconv.byteranges.spans import ByteRange, Cast, Concat, OutFile, Piece
from ckptconv.checkpoint.model import LeftBehind, Storage

__all__ = ["Layout", "file_of", "joined"]


@dataclass(frozen=True)
class Layout:
    """What a format's writer decided: the files, what of the source they cannot hold, notes, and the ties (name, name
    it is tied to) that a file or its source records as texts.
    """

    files: tuple[OutFile, ...]
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


def file_of(path: Path, pieces: list[Piece], storages: Iterable[Storage]) -> OutFile:
    """The file of PIECES, which has no place for checksums: those that STORAGES have are checked beside the copy."""
    # the bytes of these are read anyway, if the piece has all of them
    read_anyway = {id(piece.of) for piece in pieces if isinstance(piece, Cast)}
    spans = {id(span): span for each in storages for span in with_checksums(each.data)}
    sums = [span for key, span in spans.items() if key not in read_anyway]
    return OutFile(path, joined(pieces), sum(map(length_of, pieces)), tuple(sums))


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """PIECES, literal bytes joined, and ranges that follow one another in one source."""
    out: list[Piece] = []
    literal = bytearray()
    for piece in chain.from_iterable(piece.parts if isinstance(piece, Concat) else (piece,) for piece in pieces):
        if isinstance(piece, bytes):
            literal += piece
            continue
        if literal:
            out.append(bytes(literal))
            literal.clear()
        last = out[-1] if out else None
        if (
            isinstance(piece, ByteRange)
            and isinstance(last, ByteRange)
            and last.source is piece.source
            and last.offset + last.length == piece.offset
        ):
            out[-1] = ByteRange(piece.source, last.offset, last.length + piece.length)
        else:
            out.append(piece)
    if literal:
        out.append(bytes(literal))
    return tuple(out)
