"""Read thousands of small ``torch.save`` files that differ only in their bytes by parsing only one of them.

A run has many tensors of the same shape. torch's files of such tensors differ only in the bytes of the storage, in its
checksum, and in the serialization id. All other bytes are compared with those of the file that was parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from struct import Struct
from typing import NamedTuple, TypeAlias

from ckptconv.byteranges.fault_sink import UnreadRecord
from ckptconv.byteranges.sources import Readable, SliceSource
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


#: Returns the values of some of the fields into which a file was split.
_Pick: TypeAlias = "Callable[[tuple[bytes, ...]], object]"


class _Record(NamedTuple):
    """A record that may differ: its position in the file, and the field with its checksum."""

    offset: int
    length: int
    field: int


class _Known(NamedTuple):
    """A file that was parsed, with which other files are compared.

    Attributes:
        fields: Splits the bytes of a file into fields, and skips the storage.
        around: The same for the bytes before and after the storage.
        equal: Returns the fields that do not differ. The others are checksums, and the serialization id.
        expected: The values of these fields.
        sums: Returns the checksums of the records that may differ, as stored next to the records.
        again: Returns the same checksums, as stored in the directory.
        records: The records that may differ, the storage first.
        file: The content of the file.
    """

    fields: Struct
    around: Struct
    equal: _Pick
    expected: object
    sums: _Pick
    again: _Pick
    records: list[_Record]
    file: ChunkFile


class ChunkFiles:
    """A reader of such files, which remembers those that it has parsed."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}  # by the size of the file
        self._ahead: dict[Readable, tuple[int, bytes]] = {}  # for each source: bytes after the last file, and where

    def read(self, window: SliceSource) -> ChunkFile:
        """Return the content of the file in `window`.

        Raises the errors of reading a file of torch, and UnsupportedError or DangerousError if the file refers to
        classes that no tensor needs. Such references would not be visible in the checkpoint into which the tensor is
        merged.
        """
        known = self._known.setdefault(window.size, [])
        held, at = self._read_ahead(window) if known else (None, 0)
        for like in known:
            if held is None:
                fields = like.around.unpack(_without(window, *like.records[0][:2]))
            else:
                fields = like.fields.unpack_from(held, at)
            if like.equal(fields) == like.expected and like.sums(fields) == like.again(fields):
                window.faults.unread(_unread(window, like, fields))
                return ChunkFile(like.file.info, _range_of(window, like.records[0], fields), like.file.is_little_endian)
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

    def _read_ahead(self, window: SliceSource) -> tuple[bytes | None, int]:
        """Return bytes that contain `window`, and its position in them, if it is small. Otherwise return None and 0.

        The files after it are read, too.
        """
        source, start = window.of, window.offset
        if window.size > _AHEAD // 8 or source.is_far:
            return None, 0
        first, held = self._ahead.get(source, (0, b""))
        if not first <= start <= first + len(held) - window.size:
            first = start
            try:
                held = source.read(start, min(_AHEAD, source.size - start))
            except InputError:  # perhaps only a later file is unreadable
                return None, 0
            self._ahead[source] = first, held
        return held, start - first


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
    if storage is None:
        return None
    cuts = {start: length}  # all that can differ
    sums: list[tuple[int, int, int, int]] = []
    for member in filter(None, [storage, members.get(_ID)]):
        at, offset = member.header_offset + LOCAL_CRC32, member.data_start()
        if member.flags & HAS_DESCRIPTOR:
            at = offset + member.stored_size + len(DESCRIPTOR)
            if window.read(at - len(DESCRIPTOR), len(DESCRIPTOR)) != DESCRIPTOR:
                return None
        sums.append((offset, member.size, at, member.entry_offset + CENTRAL_CRC32))
        cuts |= {offset: member.size, at: 4, member.entry_offset + CENTRAL_CRC32: 4}
    layout, equal, number, n, end = "=", list[int](), dict[int, int](), 0, 0
    for at in [*sorted(cuts), window.size]:
        if at < end:
            return None
        layout += f"{at - end}s"
        equal.append(n)
        number[at] = n + 1
        n += 1 if at == start else 2
        layout += f"{cuts.get(at, 0)}{'x' if at == start else 's'}"
        end = at + cuts.get(at, 0)
    around, pick = Struct(layout.replace(f"s{length}x", "s")), itemgetter(*equal)
    records = [_Record(offset, size, number[a]) for offset, size, a, _ in sums]
    own, again = (itemgetter(*(number[each[i]] for each in sums)) for i in (2, 3))
    expected = pick(around.unpack(_without(window, start, length)))
    return _Known(Struct(layout), around, pick, expected, own, again, records, file)


def _unread(window: SliceSource, like: _Known, fields: tuple[bytes, ...]) -> Iterator[UnreadRecord]:
    """Yield the records of the file `window`, which is like the known file `like` and has these `fields`."""
    for record in like.records:
        span = _range_of(window, record, fields)
        yield UnreadRecord(f"{window.path} at byte {span.offset:,}", span)


def _range_of(window: SliceSource, record: _Record, fields: tuple[bytes, ...]) -> ByteRange:
    """Return the range of `record` in the file `window` with these `fields`, with its checksum."""
    crc32 = int.from_bytes(fields[record.field], "little")
    return ByteRange(window.of, window.offset + record.offset, record.length, crc32)


def _without(window: SliceSource, start: int, length: int) -> bytes:
    """Return the bytes of `window` before and after the `length` bytes at `start`."""
    end = start + length
    return window.read(0, start) + window.read(end, window.size - end)
