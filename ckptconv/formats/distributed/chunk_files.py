"""Read thousands of small ``torch.save`` files that differ only in their bytes by parsing only one of them.

A run has many tensors of the same shape. torch's files of such tensors differ only in the bytes of the storage, in its
checksum, and in the serialization id. All other bytes are compared with those of the file that was parsed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckptconv.byteranges.fault_sink import UnreadRecord
from ckptconv.byteranges.sources import BytesSource, Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Data, Inflate
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.safe_globals import is_allowed
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import DangerousError, InputError, UnsupportedError, some
from ckptconv.formats import torch_zip
from ckptconv.formats.zip_archive import (
    CENTRAL_CRC32,
    DESCRIPTOR,
    HAS_DESCRIPTOR,
    LOCAL_CRC32,
    Archive,
)
from ckptconv.light_dataclass import dataclass

_ID = ".data/serialization_id"
_MOST = 16  # files of one size that are remembered
_AHEAD = 1 << 16  # bytes that are read at once


class ChunkFile(NamedTuple):
    """The content of a file: its tensor if it has one, the bytes of the tensor's storage, and its byte order.

    The bytes are a range of the larger source that contains the file.
    """

    info: TensorInfo | None
    data: Data | None
    is_little_endian: bool


class _Record(NamedTuple):
    """A record that may differ: its position in the file, and the two positions of its checksum in ``_Known.rest``."""

    offset: int
    length: int
    in_header: int
    in_entry: int


@dataclass(frozen=True)
class _Known:
    """A file that was parsed, with which other files are compared.

    Attributes:
        rest: The bytes before and after its storage, with zeros at `blanks`.
        records: The records that may differ, the storage first.
        blanks: The slices of `rest` that may differ.
        file: The content of the file.
    """

    rest: bytes
    records: list[_Record]
    blanks: list[slice]
    file: ChunkFile

    def records_of(self, window: SliceSource, reader: SliceSource) -> list[ByteRange] | None:
        """Return the ranges of the records in `window`, a file of the same size, with their checksums.

        Return None if the two checksums of a record differ, or if `window` differs from the known file in other bytes.
        The bytes are read through `reader`.
        """
        rest = _without(reader, *self.records[0][:2])
        if any(rest[a : a + 4] != rest[b : b + 4] for _, _, a, b in self.records):
            return None
        if _blanked(rest, self.blanks) != self.rest:
            return None
        return [
            ByteRange(window.of, window.offset + at, length, int.from_bytes(rest[a : a + 4], "little"))
            for at, length, a, _ in self.records
        ]


class ChunkFiles:
    """A reader of such files, which remembers those that it has parsed."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}  # by the size of the file
        self._ahead: dict[Readable, tuple[int, Readable]] = {}  # for each source: bytes after the last file, and where

    def read(self, window: SliceSource) -> ChunkFile:
        """Return the content of the file in `window`.

        Raises the errors of reading a file of torch, and UnsupportedError or DangerousError if the file refers to
        classes that no tensor needs. Such references would not be visible in the checkpoint into which the tensor is
        merged.
        """
        known = self._known.setdefault(window.size, [])
        for like in known:
            records = like.records_of(window, self._read_ahead(window))
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
                where=where_of(window),
                got=some([str(node) for node in unknown] or ["an extension code"]),
                hint="do not load it unless you trust who made it",
            )
        info = checkpoint.tensor_nodes.get(id(graph.root))
        data = in_file(info.storage.data, window) if info and info.storage else None
        file = ChunkFile(info, data, checkpoint.byteorder == "little")
        if len(known) < _MOST and (new := _remembered(checkpoint, file, window)):
            known.append(new)
        return file

    def _read_ahead(self, window: SliceSource) -> SliceSource:
        """Return the bytes of `window` in memory if it is small. The files after it are read, too."""
        source = window.of
        if window.size > _AHEAD // 8 or source.is_far:
            return window
        start, held = self._ahead.get(source, (0, source))
        if held is source or not start <= window.offset <= start + held.size - window.size:
            start = window.offset
            try:
                held = BytesSource(source.read(start, min(_AHEAD, source.size - start)), source.path)
            except InputError:  # perhaps only a later file is unreadable
                return window
            self._ahead[source] = start, held
        return SliceSource(held, window.offset - start, window.size)


def where_of(window: SliceSource) -> str:
    """Return the name and the position of `window` for errors."""
    return f"{window.path} at byte {window.offset:,}"


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
    members = archive.names
    storage = next((member for member in members.values() if member.data_start() == start and member.size), None)
    records: list[_Record] = []
    blanks: list[slice] = []

    def in_rest(at: int) -> int:
        """Return the position `at` of the file, which is not in the storage, in the bytes around the storage."""
        return at if at < start else at - length

    for member in filter(None, [storage, members.get(_ID)]):
        at, offset = member.header_offset + LOCAL_CRC32, member.data_start()
        if member.flags & HAS_DESCRIPTOR:
            at = offset + member.stored_size + len(DESCRIPTOR)
            if window.read(at - len(DESCRIPTOR), len(DESCRIPTOR)) != DESCRIPTOR:
                return None
        records.append(_Record(offset, member.size, in_rest(at), in_rest(member.entry_offset + CENTRAL_CRC32)))
        blanks += [slice(place, place + 4) for place in records[-1][2:]]
        if member is not storage:
            blanks.append(slice(in_rest(offset), in_rest(offset) + member.size))
    if storage is None:
        return None
    return _Known(_blanked(_without(window, start, length), blanks), records, blanks, file)


def _without(window: SliceSource, start: int, length: int) -> bytes:
    """Return the bytes of `window` before and after the `length` bytes at `start`."""
    end = start + length
    return window.read(0, start) + window.read(end, window.size - end)


def _blanked(data: bytes, blanks: list[slice]) -> bytes:
    """Return `data` with zeros at `blanks`."""
    out = bytearray(data)
    for blank in blanks:
        out[blank] = bytes(blank.stop - blank.start)
    return bytes(out)
