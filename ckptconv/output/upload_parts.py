"""Cut a planned file into the parts of a multipart upload: those that the store copies itself, and those that we send.

Rules of S3: at most 10,000 parts, each but the last of 5 MiB to 5 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptconv.byteranges.spans import ByteRange, ByteSource, OutFile, Piece, joined
from ckptconv.light_dataclass import dataclass

MIB = 1 << 20
LEAST = 5 * MIB
_SENT = 8 * MIB  # bytes of a part that is sent; all that are sent at once are in memory
_COPIED = 256 * MIB  # bytes of a part that the store copies; several are copied at once
_MOST = 9_000  # parts of a very large file, whose parts are larger: below 10,000, because some are cut in addition


@dataclass(frozen=True)
class Part:
    """`length` bytes of a file: `pieces`, one behind another; if `copied`, one range that the store itself copies."""

    pieces: tuple[Piece, ...]
    length: int
    copied: bool


def is_streamed(file: OutFile) -> bool:
    """Whether all bytes of `file` are known, or stand in sources, before any is written."""
    return all(piece.is_at_hand() for piece in file.pieces)


def parts_of(file: OutFile, copies: Callable[[ByteSource], bool]) -> list[Part]:
    """The parts of `file`, which is streamed.

    Ranges of sources that the store `copies` are not sent, except the bytes that make the part before them long enough.
    """
    sent = max(_SENT, -(-file.size // _MOST))
    copied = max(_COPIED, -(-file.size // _MOST))
    parts: list[Part] = []
    waiting: list[Piece] = []  # to be sent

    def send() -> None:
        length = _length(waiting)
        number = max(1, length // sent)
        for piece in _cut(waiting, -(-length // number)) if length else ():
            parts.append(Part(tuple(piece), _length(piece), copied=False))
        waiting.clear()

    for piece in joined(file.pieces):
        lacking = max(0, LEAST - _length(waiting)) if waiting else 0
        if not (isinstance(piece, ByteRange) and copies(piece.source) and piece.length - lacking >= LEAST):
            waiting.append(piece)
            continue
        if lacking:
            waiting.append(piece.slice(0, lacking))
        rest = piece.length - lacking
        send()
        step = -(-rest // -(-rest // copied))
        for at in range(0, rest, step):
            length = min(step, rest - at)
            parts.append(Part((piece.slice(lacking + at, length),), length, copied=True))
    send()
    return parts


def _cut(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """`pieces`, in groups of `most` bytes; the last may have fewer."""
    group: list[Piece] = []
    room = most
    for piece in pieces:
        at = 0
        while at < piece.length:
            length = min(piece.length - at, room)
            group.append(piece.slice(at, length))
            at, room = at + length, room - length
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _length(pieces: Sequence[Piece]) -> int:
    return sum(piece.length for piece in pieces)
