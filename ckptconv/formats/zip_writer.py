"""Plan an archive of torch: the positions of its records. Records of the source keep their positions modulo a block."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from ckptconv.byteranges.reading import crc32_of
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import (
    FILESYSTEM_BLOCK,
    ByteRange,
    Data,
    Deferred,
    Inflate,
    Literal,
    OutFile,
    Piece,
    joined,
)
from ckptconv.formats.zip_archive import (
    STORED,
    UTF8,
    Member,
    NewEntry,
    central_directory,
    local_header,
)

_ALIGNMENT = 64  # torch's storages start at multiples of this: _get_storage_alignment in torch.serialization


class ZipWriter:
    """A plan that places records after each other, in the folder `root` of the archive.

    `checked` is whether the records have checksums.
    """

    def __init__(self, root: str, *, checked: bool) -> None:
        self.root = root
        self.checked = checked
        self.pieces: list[Piece] = []
        self.entries: list[NewEntry] = []
        self.sums: list[Piece] = []
        self.checked_parts: set[int] = set()  # ids of ranges to verify, of which only parts are written
        self.awaited: dict[int, int] = {}  # index of an entry → index in `sums`, for checksums to be computed
        self.at = 0

    def add(self, piece: Piece) -> None:
        """Append `piece`."""
        self.pieces.append(piece)
        self.at += piece.length

    def header(self, name: str, crc32: int | Piece, size: int, padding: int) -> None:
        """Append the header of the record `name`.

        Args:
            name: The name in the folder.
            crc32: The checksum, or the piece whose checksum is computed during the copy.
            size: The number of bytes of the record.
            padding: The number of bytes between the header and the record.
        """
        raw_name = f"{self.root}/{name}".encode()
        known = crc32 if isinstance(crc32, int) else 0
        header = local_header(raw_name, known, size, padding)
        self.entries.append(NewEntry(raw_name, UTF8, known, size, self.at))
        if not isinstance(crc32, int):
            place = self.awaited[len(self.entries) - 1] = len(self.sums)
            self.sums.append(crc32)
            self.add(Deferred(len(header), lambda sums: local_header(raw_name, sums[place], size, padding)))
        else:
            self.add(Literal(header))

    def bare_header(self, name: str, size: int) -> int:
        """Return the number of bytes of a record's header without padding."""
        return len(local_header(f"{self.root}/{name}".encode(), 0, size, 0))

    def pickle(self, name: str, pieces: list[Literal | ByteRange], *, like: int) -> None:
        """Append the pickle `pieces` as the record `name`, padded so that its end is at `like` modulo a block."""
        size = sum(piece.length for piece in pieces)
        crc32 = 0
        if self.checked:
            for piece in pieces:
                crc32 = crc32_of(piece, crc32)
        end = self.at + self.bare_header(name, size) + size
        self.header(name, crc32, size, _padding(end, like, FILESYSTEM_BLOCK))
        for piece in pieces:
            self.add(piece)

    def record(self, name: str, data: bytes) -> None:
        """Append a small record with the content `data`."""
        self.header(name, zlib.crc32(data) if self.checked else 0, len(data), 0)
        self.add(Literal(data))

    def storage(self, name: str, data: Data, *, summed: bool = True) -> None:
        """Append a storage whose bytes come from another container or were changed.

        If `summed` is set, it gets a checksum, provided that the archive has checksums.
        """
        known = data.crc32_known()
        crc32: int | Piece = 0
        if self.checked and summed and data.length:
            assert known is not None or not isinstance(data, Inflate)  # only zips have deflated data
            crc32 = data if known is None else known
        if known is None:
            for span in data.with_checksums():
                if span is not data.checked_range() and id(span) not in self.checked_parts:
                    self.checked_parts.add(id(span))
                    self.sums.append(span)
        self.header(name, crc32, data.length, _padding(self.at + self.bare_header(name, data.length), 0, _ALIGNMENT))
        if data.length:
            self.add(data)

    def member(self, name: str, member: Member, source: Readable, *, checked: bool) -> None:
        """Append the record `member` of `source` as `name`.

        Its header is copied too if it can stay the same. `checked` is whether the record has a checksum.
        """
        aligned = member.data_offset % _ALIGNMENT == 0 or not name.startswith("data/")
        same = member.name == f"{self.root}/{name}" and member.method == STORED
        if same and aligned and (self.at - member.header_offset) % FILESYSTEM_BLOCK == 0:
            self.entries.append(NewEntry(member.name.encode(), member.flags, member.crc32, member.size, self.at))
            self.add(ByteRange(source, member.header_offset, member.end - member.header_offset))
            return
        data = member.data(source, checked=checked)
        start = self.at + self.bare_header(name, member.size)
        keep_place = member.method == STORED and member.data_offset % _ALIGNMENT == 0
        padding = (
            _padding(start, member.data_offset, FILESYSTEM_BLOCK) if keep_place else _padding(start, 0, _ALIGNMENT)
        )
        self.header(name, member.crc32, member.size, padding)
        if member.size:
            self.add(data)

    def finish(self, path: Path) -> OutFile:
        """Append the central directory. Return the archive as a file to be written to `path`."""
        start, entries, awaited = self.at, self.entries, self.awaited
        directory = central_directory(entries, start)
        if awaited:
            self.add(
                Deferred(len(directory), lambda sums: central_directory(_with_sums(entries, awaited, sums), start))
            )
        else:
            self.add(Literal(directory))
        return OutFile(path, joined(self.pieces), self.at, tuple(self.sums))


def _with_sums(entries: list[NewEntry], awaited: dict[int, int], sums: Sequence[int]) -> list[NewEntry]:
    """Return `entries` with the computed checksums `sums`.

    `awaited` maps the index of an entry to the index of its checksum.
    """
    return [entry._replace(crc32=sums[awaited[i]]) if i in awaited else entry for i, entry in enumerate(entries)]


def _padding(at: int, wanted: int, modulus: int) -> int:
    """Return the number of bytes from `at` to the next position that is `wanted` modulo `modulus`.

    It is 0 or at least 4, because an extra field has at least 4 bytes.
    """
    padding = (wanted - at) % modulus
    return padding + modulus if 0 < padding < 4 else padding
