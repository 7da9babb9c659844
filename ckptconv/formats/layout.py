"""The output files that writers lay out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptconv.byteranges.spans import Inflate, OutFile, Piece, joined
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind, Storage
from ckptconv.errors import LimitError, size
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS


@dataclass(frozen=True)
class Layout:
    """The result of a format's writer.

    Attributes:
        files: The files to write.
        left_behind: The parts of the source that the files cannot contain.
        notes: Notes for the report.
        ties: Pairs of a name and the name that it is tied to, if a file or its source records them as texts.
    """

    files: tuple[OutFile, ...]
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


def file_of(path: Path, pieces: list[Piece], storages: Iterable[Storage]) -> OutFile:
    """Return the file at `path` that consists of `pieces`, in a format without checksums.

    Checksums that `storages` have are verified during the copy.
    """
    # ranges that the copy reads completely
    read_anyway = {id(piece.checked_range()) for piece in pieces}
    spans = {id(span): span for each in storages for span in each.data.with_checksums()}
    sums = [span for key, span in spans.items() if key not in read_anyway]
    return OutFile(path, joined(pieces), sum(piece.length for piece in pieces), tuple(sums))


def check_growth(files: Iterable[OutFile], checkpoint: Checkpoint, hint: str) -> None:
    """Raise LimitError with this `hint` if `files` are too large for what they are made of: views of one storage, each
    of which is written out, can make terabytes of a small file.
    """
    files = list(files)
    written, held = sum(file.size for file in files), checkpoint.source.size
    if written > LIMITS.written(held):
        held = max(held, _read_once(piece for file in files for piece in file.pieces))
    if written > LIMITS.written(held):
        raise LimitError(
            "the tensors repeat the same bytes, and the output would be too large",
            where=checkpoint.source.path,
            expected=f"at most {size(LIMITS.written(held))}",
            got=f"{size(written)} of {size(held)}",
            hint=hint,
        )


def _read_once(pieces: Iterable[Piece]) -> int:
    """Return how many bytes `pieces` are made of, inflated, each byte of a source counted once."""
    spans: set[tuple[int, int, int]] = set()
    inflated: dict[tuple[int, int], int] = {}
    for piece in pieces:
        of = piece.uncast()
        deflated = of if isinstance(of, Inflate) else of.spooled()
        if deflated:
            inflated[id(deflated.of.source), deflated.of.offset] = deflated.length
        else:
            spans.update((id(span.source), span.offset, span.offset + span.length) for span in piece.read_from())
    read, end = sum(inflated.values()), (0, 0)
    for source, start, stop in sorted(spans):
        after = max(start, end[1]) if source == end[0] else start
        read += max(0, stop - after)
        end = source, max(stop, after)
    return read
