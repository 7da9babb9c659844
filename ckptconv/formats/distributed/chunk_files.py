"""Read thousands of small ``torch.save`` files that differ only in their bytes by parsing only one of them.

A run has many tensors of the same shape. torch's files of such tensors differ only in the bytes of the storage, in its
checksum, and in the serialization id. All other bytes are compared with those of the file that was parsed.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

from ckptconv.byteranges.fault_sink import UnreadRecord
from ckptconv.byteranges.sources import SliceSource
from ckptconv.byteranges.spans import ByteRange, Data, Inflate
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.safe_globals import is_allowed
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import DangerousError, UnsupportedError, some
from ckptconv.formats import torch_zip
from ckptconv.formats.zip_archive import (
    CENTRAL,
    CENTRAL_CRC32,
    CENTRAL_SIZE,
    DESCRIPTOR,
    HAS_DESCRIPTOR,
    LOCAL_CRC32,
    Archive,
)
from ckptconv.light_dataclass import dataclass

_ID = ".data/serialization_id"
_LENGTHS_IN_ENTRY = struct.Struct("<28x3H")
_MOST = 16  # files of one size that are remembered


class ChunkFile(NamedTuple):
    """The content of a file: its tensor if it has one, the bytes of the tensor's storage, and its byte order.

    The bytes are a range of the larger source that contains the file.
    """

    info: TensorInfo | None
    data: Data | None
    is_little_endian: bool


@dataclass(frozen=True)
class _Known:
    """A file that was parsed, with which other files are compared.

    Attributes:
        rest: The bytes before and after its storage, with zeros at `blanks`.
        records: The offset and the length of each record that may differ, the storage first.
        checksums: For each of these records, the two offsets of its checksum in `rest`. The two must be equal.
        blanks: The slices of `rest` that may differ.
        file: The content of the file.
    """

    rest: bytes
    records: tuple[tuple[int, int], ...]
    checksums: tuple[tuple[int, int], ...]
    blanks: tuple[slice, ...]
    file: ChunkFile

    def records_of(self, window: SliceSource) -> list[ByteRange] | None:
        """Return the ranges of the records in `window`, a file of the same size, with their checksums.

        Return None if `window` differs from the known file in other bytes.
        """
        rest = _without(window, *self.records[0])
        numbers = [(rest[a : a + 4], rest[b : b + 4]) for a, b in self.checksums]
        if any(a != b for a, b in numbers) or _blanked(rest, self.blanks) != self.rest:
            return None
        return [
            ByteRange(window.of, window.offset + at, length, int.from_bytes(number, "little"))
            for (at, length), (number, _) in zip(self.records, numbers, strict=True)
        ]


class ChunkFiles:
    """A reader of such files, which remembers those that it has parsed."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}  # by the size of the file

    def read(self, window: SliceSource) -> ChunkFile:
        """Return the content of the file in `window`.

        Raises the errors of reading a file of torch, and UnsupportedError or DangerousError if the file refers to
        classes that no tensor needs. Such references would not be visible in the checkpoint into which the tensor is
        merged.
        """
        known = self._known.setdefault(window.size, [])
        for like in known:
            records = like.records_of(window)
            if records is not None:
                window.faults.unread(UnreadRecord(f"{window.path} at byte {span.offset:,}", span) for span in records)
                return like.file._replace(data=records[0])
        checkpoint = torch_zip.read_inner(window)
        graph = checkpoint.graph
        unknown = [node for node in graph.globals if not is_allowed(node)]
        if unknown or graph.extensions:
            kind = DangerousError if any(map(is_dangerous, unknown)) else UnsupportedError
            raise kind(
                "the file of a chunk contains classes that no tensor needs",
                where=f"{window.path} at byte {window.offset:,}",
                got=some([str(node) for node in unknown] or ["an extension code"]),
                hint="do not load it unless you trust who made it",
            )
        info = checkpoint.tensor_nodes.get(id(graph.root))
        data = in_file(info.storage.data, window) if info and info.storage else None
        file = ChunkFile(info, data, checkpoint.byteorder == "little")
        if len(known) < _MOST and (new := _remembered(checkpoint, file, window)):
            known.append(new)
        return file


def in_file(data: Data, window: SliceSource) -> Data:
    """Return `data`, a range of `window`, as a range of the file that contains the window.

    The kernel can copy from that.
    """
    if isinstance(data, ByteRange) and data.source is window:
        return replace(data, source=window.of, offset=window.offset + data.offset)
    if isinstance(data, Inflate) and data.of.source is window:
        return replace(data, of=replace(data.of, source=window.of, offset=window.offset + data.of.offset))
    return data


def _remembered(checkpoint: Checkpoint, file: ChunkFile, window: SliceSource) -> _Known | None:
    """Return the bytes of `file`, which was read as `checkpoint`, with which other files can be compared.

    Return None if torch does not write such a file.
    """
    archive = checkpoint.container
    if not isinstance(archive, Archive) or not isinstance(file.data, ByteRange) or file.data.crc32 is None:
        return None
    start, length = file.data.offset - window.offset, file.data.length
    members = archive.names()
    storage = next((member for member in members.values() if member.data_start(window) == start and member.size), None)
    entries = _entries(archive, window)
    records, checksums, blanks = [], [], []
    for member in filter(None, [storage, members.get(_ID)]):
        at = member.header_offset + LOCAL_CRC32
        if member.flags & HAS_DESCRIPTOR:
            at = member.data_start(window) + member.stored_size + len(DESCRIPTOR)
            if window.read(at - len(DESCRIPTOR), len(DESCRIPTOR)) != DESCRIPTOR:
                return None
        # Members that are so damaged that the archive was read without them can be in between.
        if member.name not in entries:
            return None
        places = [each if each < start else each - length for each in (at, entries[member.name] + CENTRAL_CRC32)]
        checksums.append((places[0], places[1]))
        blanks += [slice(place, place + 4) for place in places]
        records.append((member.data_start(window), member.size))
        if member is not storage:
            place = records[-1][0] - (length if records[-1][0] > start else 0)
            blanks.append(slice(place, place + member.size))
    if storage is None:
        return None
    rest = _blanked(_without(window, start, length), tuple(blanks))
    return _Known(rest, tuple(records), tuple(checksums), tuple(blanks), file)


def _without(window: SliceSource, start: int, length: int) -> bytes:
    """Return the bytes of `window` before and after the `length` bytes at `start`."""
    end = start + length
    return window.read(0, start) + window.read(end, window.size - end)


def _entries(archive: Archive, window: SliceSource) -> dict[str, int]:
    """Return the offset of each member's entry in the central directory, by the member's name."""
    entries = {}
    at = max(member.end for member in archive.members)
    while at + CENTRAL_SIZE <= window.size and window.read(at, len(CENTRAL)) == CENTRAL:
        name, extra, comment = _LENGTHS_IN_ENTRY.unpack(window.read(at, _LENGTHS_IN_ENTRY.size))
        if at + CENTRAL_SIZE + name > window.size:
            break
        entries[window.read(at + CENTRAL_SIZE, name).decode("utf-8", "replace")] = at
        at += CENTRAL_SIZE + name + extra + comment
    return entries


def _blanked(data: bytes, blanks: tuple[slice, ...]) -> bytes:
    """Return `data` with zeros at `blanks`."""
    out = bytearray(data)
    for blank in blanks:
        out[blank] = bytes(blank.stop - blank.start)
    return bytes(out)
