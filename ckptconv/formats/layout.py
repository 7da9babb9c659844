"""The output files that writers lay out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptconv.byteranges.spans import OutFile, Piece, joined
from ckptconv.checkpoint.model import LeftBehind, Storage
from ckptconv.light_dataclass import dataclass

__all__ = ["Layout", "file_of"]


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
