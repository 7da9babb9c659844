"""The output files that writers lay out: pieces in order, with adjacent ranges joined."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptconv.byteranges.spans import ByteRange, Literal, OutFile, Piece
from ckptconv.checkpoint.model import LeftBehind, Storage
from ckptconv.light_dataclass import dataclass

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
    """The file of `pieces`, which has no place for checksums: those that `storages` have are checked
    beside the copy.
    """
    # the bytes of these are read anyway, if the piece has all of them
    read_anyway = {id(piece.checked_range()) for piece in pieces}
    spans = {id(span): span for each in storages for span in each.data.with_checksums()}
    sums = [span for key, span in spans.items() if key not in read_anyway]
    return OutFile(path, joined(pieces), sum(piece.length for piece in pieces), tuple(sums))


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """`pieces`, literal bytes joined, and ranges that follow one another in one source."""
    out: list[Piece] = []
    literal = bytearray()
    for piece in pieces:
        if isinstance(piece, Literal):
            literal += piece.data
            continue
        if literal:
            out.append(Literal(bytes(literal)))
            literal.clear()
        spans = piece.ranges()
        if not spans:
            out.append(piece)
        for span in spans:
            last = out[-1] if out else None
            if isinstance(last, ByteRange) and last.source is span.source and last.offset + last.length == span.offset:
                out[-1] = ByteRange(span.source, last.offset, last.length + span.length)
            else:
                out.append(span)
    if literal:
        out.append(Literal(bytes(literal)))
    return tuple(out)
