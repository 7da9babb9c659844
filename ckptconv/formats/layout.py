"""What a writer says of itself, and the output files that it lays out: pieces in order, with adjacent ranges joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptconv.byteranges.spans import ByteRange, Literal, OutFile, Piece
from ckptconv.checkpoint.model import Checkpoint, LeftBehind, Storage

__all__ = ["HubName", "Layout", "Writer", "file_of", "joined"]


@dataclass(frozen=True)
class Layout:
    """What a format's writer decided: the files, what of the source they cannot hold, notes, and the ties (name, name
    it is tied to) that a file or its source records as texts.
    """

    files: tuple[OutFile, ...]
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


class HubName(NamedTuple):
    """What the Hub's tools call a whole model in a format: ``model`` + ``.safetensors``."""

    model: str
    suffix: str


@dataclass(frozen=True)
class Writer:
    """A format that can be written: its names, and what it can hold. Everything else asks this, and no format's name.

    Attributes:
        word: What ``--format`` calls it.
        name: What reports call it.
        layout: Lays out a checkpoint as the file at a path; with ``copy_tied`` where `ties` is False.
        suffixes: Those of its files. What the first of several writers with a suffix writes is meant by it.
        new_suffix: That of a file whose own suffix belongs to other formats.
        about: What it is, for who has to choose.
        hub: What the Hub's tools call a model in it, if they read it.
        shards: Whether they read shards of it.
        stays: Whether a file of this format stays one under a suffix that means another format first.
        devices: Whether it stores the device of a tensor.
        objects: Whether it holds whatever a pickle can say; else names and their tensors alone.
        ties: Whether two names can have one tensor; else texts say so.
        views: Whether it holds storages, of which tensors show parts; else what tensors show and no more.
        texts: Whether it holds texts beside tensors.
        records: Whether it holds what else stands in an archive of torch's.
        safe_loader: Whether torch's safe loader reads it, which refuses code that it does not know.
    """

    word: str
    name: str
    layout: Callable[..., Layout]
    suffixes: tuple[str, ...]
    new_suffix: str
    about: str = ""
    hub: HubName | None = None
    shards: bool = False
    stays: bool = False
    devices: bool = True
    objects: bool = True
    ties: bool = True
    views: bool = True
    texts: bool = False
    records: bool = False
    safe_loader: bool = True

    @property
    def shard_suffix(self) -> str:
        """The suffix of its shards, if it has any."""
        assert self.hub is not None
        return self.hub.suffix

    def lay_out(self, checkpoint: Checkpoint, path: Path, *, copy_tied: bool = False) -> Layout:
        """The file that `checkpoint`, edited, becomes at `path`.

        Args:
            checkpoint: It can be changed by this.
            path: Of the file.
            copy_tied: Write tied tensors under each of their names; not where `ties` is True.

        Raises:
            RefusedError: The format cannot hold it.
        """
        return self.layout(checkpoint, path, copy_tied=True) if copy_tied else self.layout(checkpoint, path)


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
