"""Parts of an upload: they are within the limits of S3, and contain all of a planned file once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.spans import ByteRange, Literal, OutFile, Piece
from ckptconv.stores.uploads import LEAST, Part, parts_of

GIB = 1 << 30
MOST_PARTS, LARGEST = 10_000, 5 * GIB  # limits of S3


@dataclass
class Nothing:
    """A source of any size whose bytes nobody reads. `inside` tells whether it is in the store."""

    size: int
    inside: bool
    path: Path = Path("nothing")
    fd: int = -1
    mode: int = 0o644

    def read(self, offset: int, length: int) -> bytes:
        raise AssertionError("nobody reads it")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        raise AssertionError("nobody reads it")


def is_inside(source: object) -> bool:
    assert isinstance(source, Nothing)
    return source.inside


def atoms(pieces: list[Piece]) -> list[tuple[object, int, int]]:
    """Return the bytes and the ranges in `pieces`. Adjacent ranges of one source are joined."""
    found: list[tuple[object, int, int]] = []
    for piece in pieces:
        if isinstance(piece, Literal):
            found += [(bytes([byte]), 0, 1) for byte in piece.data]
        elif isinstance(piece, ByteRange):
            last = found[-1] if found else None
            if last and last[0] is piece.source and last[1] + last[2] == piece.offset:
                found[-1] = (last[0], last[1], last[2] + piece.length)
            else:
                found.append((piece.source, piece.offset, piece.length))
    return found


def check(parts: list[Part], file: OutFile) -> None:
    """Assert that `parts` are within the limits, and have the bytes of `file` in the same order."""
    assert len(parts) <= MOST_PARTS
    assert all(LEAST <= part.length <= LARGEST for part in parts[:-1])
    assert all(part.length == sum(piece.length for piece in part.pieces) for part in parts)
    assert atoms([piece for part in parts for piece in part.pieces]) == atoms([*file.pieces])
    assert all(len(part.pieces) == 1 for part in parts if part.copied)


_SIZES = st.one_of(st.integers(1, 100), st.integers(LEAST - 2, LEAST + 2), st.integers(1, 600 * GIB))


@given(st.lists(st.one_of(st.binary(max_size=9), st.tuples(_SIZES, st.booleans())), max_size=7))
def test_any_file(pieces: list[bytes | tuple[int, bool]]) -> None:
    """Literals and ranges of any length, in the store or not, are divided into valid parts. A file has up to several
    terabytes.
    """
    made: list[Piece] = []
    for piece in pieces:
        made.append(Literal(piece) if isinstance(piece, bytes) else ByteRange(Nothing(piece[0], piece[1]), 0, piece[0]))
    file = OutFile(Path("out.pt"), tuple(made), sum(piece.length for piece in made))
    check(parts_of(file, is_inside), file)


def test_a_changed_pickle_sends_five_mebibytes() -> None:
    """If only the pickle at the start changes, the upload sends the first 5 MiB and the end of the file. The store
    copies the rest itself, several hundred megabytes at once.
    """
    old = Nothing(GIB, True)
    file = OutFile(Path("a.pt"), (Literal(bytes(1000)), ByteRange(old, 900, GIB - 900), Literal(b"end")), GIB + 103)
    parts = parts_of(file, is_inside)
    check(parts, file)
    assert [part.length for part in parts if not part.copied] == [LEAST, 3]
    assert [part.copied for part in parts] == [False, True, True, True, True, False]


def test_a_file_from_outside_the_store_is_sent_completely() -> None:
    """Without a source in the store, all bytes are sent, in parts of at most 16 MiB. Several of these are in memory at
    the same time.
    """
    file = OutFile(Path("a.pt"), (ByteRange(Nothing(GIB, False), 0, GIB),), GIB)
    parts = parts_of(file, is_inside)
    check(parts, file)
    assert not any(part.copied for part in parts)
    assert max(part.length for part in parts) <= 16 << 20
