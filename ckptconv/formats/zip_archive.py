"""A strict zip reader, and the headers that a zip writer needs.

Layout (PKWARE APPNOTE 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), all integers little-endian:

    member*            local header (30 bytes, name, extra), data, and a data descriptor if bit 3 of the flags is set
    central directory  one entry for each member (46 bytes, name, extra, comment)
    [zip64 end (56 bytes), zip64 locator (20 bytes)]
    end                22 bytes and a comment

If a size or offset does not fit 32 bits, the field is all ones and the number is in an extra field (id 1). torch always
writes zip64 ends, writes zeros into local headers, and pads data to 64 bytes with its own extra field (id ``FB``).

This reader is stricter than others, so that no two of them can see different archives. Every byte belongs to exactly
one member or to the directory, local and central headers agree, there is only one end, and no two names are equal, even
if case is ignored (torch ignores it in look-ups). A folder contains no bytes: torch would return uninitialised memory
for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import repeat
from operator import attrgetter, sub
from typing import NamedTuple

from ckptconv.byteranges.fault_sink import UnreadRecord
from ckptconv.byteranges.reading import AHEAD, Window
from ckptconv.byteranges.sources import Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Inflate
from ckptconv.errors import InputError, LimitError, MalformedError, UnsupportedError, count
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.work import seen

LOCAL, CENTRAL, DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END, ZIP64_END, ZIP64_LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_PLAIN = struct.Struct("<4s2xHH4xIIIHH")  # without the version and the time
CENTRAL_FIELDS = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL_CRC32, CENTRAL_CRC32 = 14, 16  # offsets in the local header, and in an entry of the central directory
_DESCRIPTOR, _PADDING = struct.Struct("<4sIII"), struct.Struct("<HH")
END_FIELDS = struct.Struct("<4sHHHHIIH")
ZIP64_END_FIELDS = struct.Struct("<4sQHHIIQQQQ")
ZIP64_LOCATOR_FIELDS = struct.Struct("<4sIQI")
LOCAL_SIZE, CENTRAL_SIZE, END_SIZE = _LOCAL.size, CENTRAL_FIELDS.size, END_FIELDS.size
ZIP64_END_SIZE, ZIP64_LOCATOR_SIZE = ZIP64_END_FIELDS.size, ZIP64_LOCATOR_FIELDS.size
_ZIP64_EXTRA, _UNICODE_NAME_EXTRA, PADDING_EXTRA = 1, 0x7075, int.from_bytes(b"FB", "little")
_ONES16, ONES32 = 0xFFFF, 0xFFFFFFFF
LONGEST_END = END_SIZE + _ONES16  # with a comment
_DESCRIPTORS, _HEADERS = 32, 256  # bytes to read before and after the start of a local header
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
HAS_DESCRIPTOR = 1 << 3
UTF8 = 1 << 11
_KNOWN_FLAGS = HAS_DESCRIPTOR | UTF8 | 1 << 1 | 1 << 2  # the last two are the level of compression
_FOLDER = 0x10  # among the external attributes
STORED, DEFLATED = 0, 8
_ALIKE = 1 << 18  # bytes of a directory read at once


class Member(NamedTuple):
    """A record of the archive `source`. Positions are in bytes from the start of the file.

    Attributes:
        source: The archive.
        name: The name, with its folders.
        flags: The general purpose flags.
        method: ``STORED`` or ``DEFLATED``.
        crc32: The checksum in the headers.
        stored_size: The number of bytes of the data in the file.
        size: The number of bytes of the data after inflating.
        header_offset: The position of the local header.
        entry_offset: The position of the entry in the central directory.
        checked: Whether `crc32` is the checksum of the data. It is not if the archive was written without checksums.
        data_offset: The position of the data, or None if the local header has not been read. :meth:`data_start` reads
            it.
        end: The position after the data and its descriptor, or 0 if the caller does not need it.
    """

    source: Readable
    name: str
    flags: int
    method: int
    crc32: int
    stored_size: int
    size: int
    header_offset: int
    entry_offset: int
    checked: bool = False
    data_offset: int | None = None
    end: int = 0

    def data_start(self) -> int:
        """Return the position of the data.

        If `data_offset` is None, the local header is read. Raises MalformedError if the header is damaged.
        """
        return _placed(Window(self.source), self, self.end) if self.data_offset is None else self.data_offset

    @property
    def where(self) -> str:
        """The name of this record for errors, without the root folder."""
        return f"{self.source.path}: {self.name.partition('/')[2]}"

    def stored(self) -> SliceSource:
        """Return the stored bytes as a source."""
        return SliceSource(self.source, self.data_start(), self.stored_size)

    def data(self) -> ByteRange | Inflate:
        """Return the data of this record: a ByteRange if it is stored, an Inflate if it is deflated.

        No byte is read. The result contains the checksum, if there is one, and reading the result verifies it.
        """
        crc32 = self.crc32 if self.checked else None
        file, offset = (_Unplaced(self), 0) if self.data_offset is None else (self.source, self.data_offset)
        if self.method == STORED:
            return ByteRange(file, offset, self.size, crc32)
        return Inflate(ByteRange(file, offset, self.stored_size), self.size, crc32)


class _Unplaced(Readable):
    """The data of `member` as a source. Its local header is read on each access, to find the position of the data."""

    def __init__(self, member: Member) -> None:
        source = member.source
        self.path, self.size, self.faults = source.path, member.stored_size, source.faults
        self._member = member

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset` of the data. Raises InputError."""
        return self._member.source.read(self._member.data_start() + offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` of the data on. Raises InputError."""
        self._member.source.read_into(self._member.data_start() + offset, buffer)


@dataclass(frozen=True)
class Archive:
    """The members of a zip archive in the order of the file. All are in one folder, `root`.

    Attributes:
        root: The name of the folder.
        members: The members.
        has_checksums: Whether the CRC of any member is not zero.
        broken: Names of members whose data cannot be found, because their local headers are damaged. Empty unless the
            fault sink collects faults.
    """

    root: str
    members: tuple[Member, ...]
    has_checksums: bool
    broken: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> Mapping[str, Member]:
        """The members by their names without the folder `root`."""
        start = len(self.root) + 1
        return {member.name[start:]: member for member in self.members}

    def records(self, folder: str) -> Callable[[str], ByteRange | Inflate | None]:
        """Return a function that returns the data of a member of `folder`, by its name in this folder.

        The function returns None if there is no such member. The name of `folder` ends in a slash.
        """

        def record(name: str) -> ByteRange | Inflate | None:
            member = self.names.get(folder + name)
            return member.data() if member else None

        return record

    def unread(self) -> Iterator[UnreadRecord]:
        """Yield the records whose bytes can be verified: those with a checksum, and the deflated ones.

        Broken members are left out. The records have names without the folder `root`.
        """
        for member in self.members:
            if member.name not in self.broken and (member.checked or member.method != STORED):
                yield UnreadRecord(member.where, member.data())


class EndMissing(MalformedError):
    """Raised if a file that starts like a zip archive has no end record, because it was truncated."""


def read_archive(
    source: Readable,
    refuse: Callable[[list[str]], None] | None = None,
    is_large: Callable[[str], bool] | None = None,
    flat: str = "",
) -> Archive:
    """Return the archive in `source`, which must be a zip from its first byte to its last.

    Args:
        source: The file.
        refuse: A function that is called with all names before the members are checked. It can raise a more helpful
            error for another kind of zip.
        is_large: A function that takes a name without the root folder, and returns whether that member is large. In a
            remote source, the local headers of large members may be left unread until their data is needed.
        flat: The name of a member by which an archive without a folder is recognised. Its members get the folder
            ``archive``.

    Raises:
        MalformedError: The archive is damaged or ambiguous.
        UnsupportedError: The archive is encrypted, split or compressed in an unknown way.
        LimitError: The archive has too many members.
    """
    report = source.faults.found
    count, directory, start = read_end(source)
    window = Window(source)
    entries = _read_directory(window, count, directory, start)
    if refuse:
        refuse([entry.name for entry in entries])
    entries.sort(key=attrgetter("header_offset"))
    ends = [*(entry.header_offset for entry in entries[1:]), start]
    source.prefetch(
        part
        for entry, end in zip(entries, ends, strict=False)
        if not _is_spared(entry, end, is_large)
        for part in ((entry.header_offset, entry.header_offset + LOCAL_SIZE + _HEADERS), (end - _DESCRIPTORS, end))
    )
    has_checksums = any(entry.crc32 for entry in entries)
    members = []
    broken = set()
    at = 0
    places = _plain_places(window, entries, ends, is_large)
    for entry, following, place in zip(seen("members", entries, len(entries)), ends, places, strict=False):
        if entry.header_offset != at:
            what, expected = "zip members overlap or leave a gap", f"{entry.name!r} at {at}"
            report(_bad(source, entry.header_offset, what, expected, entry.header_offset))
        try:
            data_offset = _placed(window, entry, following) if place == 0 else place
            members.append(Member._make((*entry[:9], has_checksums, data_offset, following)))
        except InputError as error:
            report(error)
            members.append(Member._make((*entry[:9], has_checksums, entry.header_offset, entry.header_offset)))
            broken.add(entry.name)
        at = following
    if not members:
        raise _bad(source, 0, "the zip archive is empty")
    if flat and any(member.name == flat for member in members):
        members = [member._replace(name=f"archive/{member.name}") for member in members]
    root = members[0].name.split("/")[0]
    return Archive(root, tuple(_check_names(source, members, root)), has_checksums, frozenset(broken))


def _is_spared(entry: Member, end: int, is_large: Callable[[str], bool] | None) -> bool:
    """Return whether to read the local header and descriptor of `entry` only when its data is needed.

    True if `is_large` returns true for its name and the source would need a request for these bytes. The descriptor
    ends at `end`.
    """
    if not is_large or not is_large(entry.name.partition("/")[2]):
        return False
    places = [(entry.header_offset, LOCAL_SIZE + len(entry.name.encode())), (end - _DESCRIPTORS, _DESCRIPTORS)]
    return any(entry.source.spares(max(at, 0), length, "record header") for at, length in places)


def first_member(source: Readable) -> tuple[str, int, int] | None:
    """Return the name, method and data position of the first member, or None if its header is not valid.

    Only the local header is read, so `source` can be a truncated archive without a directory.
    """
    if source.size < LOCAL_SIZE:
        return None
    signature, _, _, method, *_, n_name, n_extra = _LOCAL.unpack(source.read(0, LOCAL_SIZE))
    data_offset = LOCAL_SIZE + n_name + n_extra
    if signature != LOCAL or data_offset > source.size:
        return None
    try:
        return source.read(LOCAL_SIZE, n_name).decode(), method, data_offset
    except UnicodeDecodeError:
        return None


def _bad(source: Readable, offset: int, what: str, expected: object = None, got: object = None) -> MalformedError:
    """Return a MalformedError with the message `what`, at byte `offset` of `source`."""
    return MalformedError(what, where=f"{source.path} at byte {offset}", expected=expected, got=got)


# The end


def read_end(source: Readable) -> tuple[int, int, int]:
    """Return the number of members, and the size and offset of the central directory, from the end records.

    Raises:
        EndMissing: There is no end record.
        MalformedError: There are bytes after the end, there are two ends, or the end records disagree.
        UnsupportedError: The archive is split into several files.
        LimitError: There are too many members.
    """
    tail_offset = max(0, source.size - LONGEST_END)
    tail = source.read(tail_offset, source.size - tail_offset)
    at = tail.rfind(END)  # as torch does, without regard to the comment's length
    if at < 0 or len(tail) - at < END_SIZE:
        raise EndMissing(
            "a zip archive without its end record",
            where=source.path,
            expected="a central directory",
            hint="the file was truncated: download or copy it again",
        )
    offset = tail_offset + at
    if behind := _behind(tail, at):
        what = f"{count(abs(behind), 'byte')} {'after it' if behind > 0 else 'of its comment missing'}"
        raise _bad(source, offset, f"the file does not end where the zip archive ends: {what}")
    other = tail.find(END)
    while other < at:
        if not _behind(tail, other):
            raise _bad(source, tail_offset + other, "the zip archive has two end records")
        other = tail.find(END, other + 1)
    _, disk, start_disk, on_disk, members, size, start, _ = END_FIELDS.unpack_from(tail, at)
    end = offset
    wide = _read_zip64_end(source, offset)
    if wide:
        end, *numbers = wide
        narrow = (disk, start_disk, on_disk, members, size, start)
        for small, large, ones in zip(narrow, numbers, (_ONES16,) * 4 + (ONES32,) * 2, strict=True):
            if small not in (large, ones):
                raise _bad(source, offset, "the two end records of the zip archive differ", large, small)
        disk, start_disk, on_disk, members, size, start = numbers
    if disk or start_disk or on_disk != members:
        raise UnsupportedError("a zip archive in several parts", where=source.path)
    if members > LIMITS.zip_members:
        raise LimitError(
            "too many zip members", where=source.path, expected=f"at most {LIMITS.zip_members:,}", got=members
        )
    if start + size != end:
        raise _bad(source, offset, "the zip's directory does not end at its end record", end, start + size)
    return members, size, start


def _behind(tail: bytes, at: int) -> int:
    """Return the number of bytes of `tail` after the end record at `at` and its comment, or 0 if they end together.

    A negative number is the number of bytes that are missing from the comment.
    """
    return len(tail) - at - END_SIZE - int.from_bytes(tail[at + END_SIZE - 2 : at + END_SIZE], "little")


def _read_zip64_end(source: Readable, end: int) -> list[int] | None:
    """Return the fields of the zip64 end record before `end`, or None if there is no zip64 locator.

    The fields are the record's offset, the disk numbers, the counts, and the size and offset of the directory. Raises
    MalformedError if the locator or the record is damaged.
    """
    if end < ZIP64_LOCATOR_SIZE:
        return None
    signature, disk, offset, disks = ZIP64_LOCATOR_FIELDS.unpack(
        source.read(end - ZIP64_LOCATOR_SIZE, ZIP64_LOCATOR_SIZE)
    )
    if signature != ZIP64_LOCATOR:
        return None
    if disk or disks != 1 or offset + ZIP64_END_SIZE + ZIP64_LOCATOR_SIZE != end:
        expected = end - ZIP64_LOCATOR_SIZE - ZIP64_END_SIZE
        raise _bad(source, end, "the zip64 locator does not point to a zip64 end record", expected, offset)
    signature, size, _, _, *numbers = ZIP64_END_FIELDS.unpack(source.read(offset, ZIP64_END_SIZE))
    if signature != ZIP64_END or size != ZIP64_END_SIZE - 12:
        raise _bad(source, offset, "the zip64 end record is damaged", ZIP64_END_SIZE - 12, size)
    return [offset, *numbers]


# The central directory


def _read_directory(window: Window[Readable], count: int, size: int, start: int) -> list[Member]:
    """Return the entries of the central directory, which has `count` entries in `size` bytes from `start` on.

    An entry with a defect is reported as a fault and left out. Raises MalformedError if the entries do not fill the
    directory exactly.
    """
    source = window.source
    is_small = count * CENTRAL_SIZE > size
    if is_small or size > count * (CENTRAL_SIZE + 3 * LIMITS.member_name):
        what = f"the zip's directory is too {'small' if is_small else 'large'} for its members"
        raise _bad(source, start, what, f"{count} entries", f"{size} bytes")
    entries: list[Member] = []
    at, end = start, start + size
    alike, left = 1, count
    while left:
        length = CENTRAL_SIZE + len(entries[-1].name.encode()) if entries else 0
        alike = min(2 * alike, left, _ALIKE // max(length, 1))
        if 0 < alike * length <= end - at and (many := _alike(source, window.read(at, alike * length), at, length)):
            entries += many
            at += alike * length
            left -= alike
            continue
        alike = 1
        left -= 1
        if end - at < CENTRAL_SIZE:
            raise _bad(source, at, "the zip's directory ends inside an entry")
        fields = CENTRAL_FIELDS.unpack(window.read(at, CENTRAL_SIZE))
        variable = sum(fields[10:13])
        if fields[0] != CENTRAL or end - at - CENTRAL_SIZE < variable:
            raise _bad(source, at, "not an entry of the zip's directory", CENTRAL, fields[0])
        try:  # report each bad entry and go on
            entries.append(_entry(source, at, fields, window.read(at + CENTRAL_SIZE, variable)))
        except InputError as error:
            source.faults.found(error)
        at += CENTRAL_SIZE + variable
    if at != end:
        raise _bad(source, at, "the zip's directory has bytes after its entries", end, at)
    return entries


@lru_cache(maxsize=16)
def _with_name(fields: str, length: int) -> struct.Struct:
    """Return the format of a header with a name of `length` bytes."""
    return struct.Struct(f"{fields}{length}s")


def _alike(source: Readable, data: bytes, at: int, length: int) -> list[Member]:
    """Return the entries in `data`, if each has `length` bytes and is a stored file with nothing after its name.

    Otherwise return an empty list. `at` is the position of `data` in `source`.
    """
    form = _with_name("<4s4xHH4xIII8s2xII", length - CENTRAL_SIZE)
    columns = [*zip(*form.iter_unpack(data), strict=True)]
    if not columns:
        return []
    signatures, flags, methods, sums, stored, sizes, lengths, attributes, offsets, raw_names = columns
    variable = struct.pack("<HHHH", length - CENTRAL_SIZE, 0, 0, 0)  # no extra field, no comment, the first disk
    if (set(signatures), set(methods), set(lengths)) != ({CENTRAL}, {STORED}, {variable}) or stored != sizes:
        return []
    if any(flag & ~_KNOWN_FLAGS for flag in set(flags)) or any(kind & _FOLDER for kind in set(attributes)):
        return []
    if max(sizes) == ONES32 or max(offsets) == ONES32 or any(name.endswith(b"/") for name in raw_names):
        return []
    try:
        names = [name.decode() for name in raw_names]
    except UnicodeDecodeError:
        return []
    places = range(at, at + len(data), length)
    return [*map(Member, repeat(source), names, flags, methods, sums, stored, sizes, offsets, places)]


def _entry(source: Readable, at: int, fields: tuple[int, ...], variable: bytes) -> Member:
    """Return the member that a directory entry at `at` describes.

    `fields` are the values of the fixed part, and `variable` is the name, extra field and comment. Raises
    MalformedError if the entry is inconsistent, and UnsupportedError if the member is encrypted or its compression or
    flags are unknown.
    """
    flags, method, _, _, crc32, stored_size, size, n_name, n_extra = fields[3:12]
    disk, _, attributes, header_offset = fields[13:]
    raw_name = variable[:n_name]
    try:
        name = raw_name.decode()
    except UnicodeDecodeError as error:
        raise _bad(source, at, "a zip member's name is not UTF-8", got=raw_name[:80]) from error
    if flags & ~_KNOWN_FLAGS or method not in (STORED, DEFLATED):
        where = f"{source.path}: {name}"
        if flags & _ENCRYPTED:
            raise UnsupportedError("the zip archive is encrypted", where=where)
        if flags & ~_KNOWN_FLAGS:
            raise UnsupportedError("a zip member has flags of unknown meaning", where=where, got=f"{flags:#06x}")
        raise UnsupportedError(
            "a zip member is compressed in an unknown way", where=where, expected="0 or 8", got=method
        )
    extra = variable[n_name : n_name + n_extra]
    wide = _extras(source, at, raw_name, extra).get(_ZIP64_EXTRA, b"") if extra else b""
    numbers = _widened((size, stored_size, header_offset), wide)
    if numbers is None or disk:
        raise _bad(source, at, f"{name!r} has too few or too many 64-bit numbers")
    size, stored_size, header_offset = numbers
    if method == STORED and size != stored_size:
        raise _bad(source, at, f"{name!r} is stored but has two sizes", size, stored_size)
    if size and (name.endswith("/") or attributes & _FOLDER):
        raise _bad(source, at, f"the folder {name!r} has bytes of its own", 0, size)
    return Member(source, name, flags, method, crc32, stored_size, size, header_offset, at)


def _widened(numbers: tuple[int, ...], wide: bytes) -> tuple[int, ...] | None:
    """Return `numbers`, in which each value of 32 ones is replaced by the next number of the zip64 field `wide`.

    Return None if `wide` contains more or fewer numbers than are needed.
    """
    ones = numbers.count(ONES32)
    if len(wide) != 8 * ones:
        return None
    if not ones:
        return numbers
    large = iter(struct.unpack(f"<{ones}Q", wide))
    return tuple(next(large) if number == ONES32 else number for number in numbers)


def _extras(source: Readable, at: int, raw_name: bytes, extra: bytes) -> dict[int, bytes]:
    """Return the contents of the extra fields in `extra`, by their ids.

    Raises MalformedError if a field is truncated, occurs twice, or gives the member a name other than `raw_name`.
    """
    fields: dict[int, bytes] = {}
    start = 0
    while start < len(extra):
        kind = int.from_bytes(extra[start : start + 2], "little")
        size = int.from_bytes(extra[start + 2 : start + 4], "little")
        end = start + 4 + size
        if end > len(extra):
            raise _bad(source, at, "an extra field of a zip header is truncated")
        if kind in fields:
            raise _bad(source, at, "a zip header contains an extra field twice", got=kind)
        fields[kind] = extra[start + 4 : end]
        start = end
    if _UNICODE_NAME_EXTRA in fields and fields[_UNICODE_NAME_EXTRA][5:] != raw_name:
        raise _bad(source, at, "a zip member has two different names", raw_name[:80], fields[_UNICODE_NAME_EXTRA][5:85])
    return fields


def _check_names(source: Readable, members: list[Member], root: str) -> list[Member]:
    """Return the `members` with valid names, and report a fault for each of the others.

    A valid name is in the folder `root`, does not lead out of it, and occurs only once, even if case is ignored.
    """
    seen: dict[str, Member] = {}
    inside = f"{root}/"
    names = [member.name for member in members]
    text = "".join(names)
    are_plain = root and all(name.startswith(inside) for name in names) and not any(map(text.count, ("..", "//", "\0")))
    if are_plain and len({*map(str.casefold, names)}) == len(names):
        return members
    for member in members:
        name = member.name
        expected: str | None = None
        leads_out = ".." in name and ".." in name.split("/")  # most names have no dots
        if "/" not in name or name[0] == "/" or "//" in name or "\0" in name or leads_out:
            what, expected = "a zip member is not in the archive's folder", "FOLDER/NAME"
        elif not name.startswith(inside):
            what, expected = "the zip archive has two folders at its root", repr(root)
        elif (other := seen.setdefault(name.casefold(), member)) is not member:
            what, expected = "two zip members have the same name, apart from case", repr(other.name)
        if expected:
            source.faults.found(_bad(source, member.header_offset, what, expected, repr(name)))
    return [*seen.values()]


# Local headers and descriptors


def _plain_places(
    window: Window[Readable], entries: list[Member], ends: list[int], is_large: Callable[[str], bool] | None
) -> Iterator[int | None]:
    """Yield the position of the data of each of `entries`, which end at `ends`.

    Yield 0 if the header is not plain, and None if the caller should leave it unread. Headers of consecutive small
    members are compared at once.
    """
    source = window.source
    at, alike = 0, 8
    while at < len(entries):
        alike = min(alike, len(entries) - at)
        region = ends[at + alike - 1] - entries[at].header_offset
        if source.is_far or region > min(_ALIKE, alike * AHEAD):  # do not read the data of large members
            alike = 1
        if source.skims and _is_spared(entries[at], ends[at], is_large):
            yield None
            at += 1
            continue
        try:
            found = _plain(window, entries[at : at + alike], ends[at : at + alike])
        except InputError:  # perhaps after a damaged header, which the caller reports
            found = []
        if found or alike == 1:
            yield from found or (0,)
            at += alike
        alike = 2 * alike if found else 1


def _plain(window: Window[Readable], entries: list[Member], ends: list[int]) -> list[int]:
    """Return the positions of the data of `entries`, which end at `ends`, if their headers have the usual form.

    That is a local header with the name, padding and, if there is no descriptor, the numbers of the entry. Otherwise
    return an empty list.
    """
    _, names, flags, methods, sums, stored, sizes, offsets, *_ = zip(*entries, strict=True)
    tail = _DESCRIPTOR.size if flags[0] & HAS_DESCRIPTOR else 0
    raw_names = [*map(str.encode, names)]
    start, lengths = offsets[0], [*map(len, raw_names)]
    starts = [at - start for at in offsets]
    paddings = [at + LOCAL_SIZE + length for at, length in zip(starts, lengths, strict=True)]
    tails = [end - start - tail for end in ends]
    places = [*map(sub, tails, stored)]
    extras = [*map(sub, places, paddings)]
    if len({*flags}) > 1 or min(extras) < _PADDING.size or max(*sizes, *stored) >= ONES32:
        return []
    if len(entries) > 1:
        data = window.read(start, ends[-1] - start)
    else:
        data = window.read(start, paddings[0] + _PADDING.size)
        data, tails = data + (window.read(start + tails[0], tail) if tail else b""), [len(data)]

    def is_at(form: struct.Struct, at: list[int], *columns: Iterable[object]) -> bool:
        return [*map(form.unpack_from, repeat(data), at)] == [*zip(*columns, strict=False)]

    numbers = [repeat(0)] * 3 if tail else [sums, stored, sizes]
    if (
        is_at(_PLAIN, starts, repeat(LOCAL), flags, methods, *numbers, lengths, extras)
        and [data[padding - length : padding] for padding, length in zip(paddings, lengths, strict=True)] == raw_names
        and is_at(_PADDING, paddings, repeat(PADDING_EXTRA), [extra - _PADDING.size for extra in extras])
        and (not tail or is_at(_DESCRIPTOR, tails, repeat(DESCRIPTOR), sums, stored, sizes))
    ):
        return [start + place for place in places]
    return []


def _placed(window: Window[Readable], entry: Member, following: int) -> int:
    """Return the position of the data of `entry`, read from its local header.

    The local header and the data descriptor must agree with `entry`, and the member must end at `following`.
    Differences are reported as faults. Raises MalformedError if the position cannot be found.
    """
    source = window.source
    report = source.faults.found
    at = entry.header_offset
    available = following - at
    raw_name = entry.name.encode()
    least = LOCAL_SIZE + len(raw_name)
    if available < least:
        raise _bad(source, at, f"{entry.name!r} has no space for its header", least, available)
    header = window.read(at, least)
    signature, _, flags, method, _, _, crc32, stored_size, size, n_name, n_extra = _LOCAL.unpack_from(header)
    if signature != LOCAL:
        raise _bad(source, at, f"{entry.name!r} has no local header", LOCAL, signature)
    if n_name != len(raw_name) or header[LOCAL_SIZE:] != raw_name:
        error = _bad(source, at, "a zip member has two different names", repr(entry.name), header[LOCAL_SIZE:][:80])
        if n_name != len(raw_name):
            raise error
        report(error)
    if (flags, method) != (entry.flags, entry.method):
        report(
            _bad(source, at, f"the headers of {entry.name!r} disagree", (entry.flags, entry.method), (flags, method))
        )
    data_offset: int = at + least + n_extra
    end_of_data = data_offset + entry.stored_size
    if end_of_data > following:
        raise _bad(source, at, f"{entry.name!r} overlaps the next record", following, end_of_data)
    try:
        extras = _extras(source, at, raw_name, window.read(at + least, n_extra))
        _check_local_numbers(source, entry, (crc32, stored_size, size), extras.get(_ZIP64_EXTRA, b""))
    except MalformedError as error:
        report(error)
    _check_descriptor(source, entry, window.read(end_of_data, min(following - end_of_data, 25)), end_of_data)
    return data_offset


def _check_local_numbers(source: Readable, entry: Member, local: tuple[int, int, int], wide: bytes) -> None:
    """Raise MalformedError if `local`, the checksum and sizes in the local header, disagrees with `entry`.

    `wide` is the zip64 field of the local header. With a data descriptor, the numbers in the header may be 0.
    """
    in_descriptor = entry.flags & HAS_DESCRIPTOR
    if in_descriptor and local == (0, 0, 0):
        return  # no reader uses torch's zip64 field here
    crc32, stored_size, size = local
    if wide != struct.pack("<2Q", size, stored_size):  # zipfile before 3.11 writes small sizes twice
        size, stored_size = _widened((size, stored_size), wide) or (-1, -1)
    local, expected = (crc32, stored_size, size), (entry.crc32, entry.stored_size, entry.size)
    if local != expected and not (in_descriptor and local in ((0, 0, 0), (entry.crc32, 0, 0))):
        raise _bad(source, entry.header_offset, f"the headers of {entry.name!r} disagree", expected, local)


def _check_descriptor(source: Readable, entry: Member, descriptor: bytes, at: int) -> None:
    """Report a fault unless `descriptor`, the bytes between the data and the next header, fits `entry`.

    A member with the flag has a data descriptor, with or without its signature. A member without the flag has no bytes
    there.
    """
    report = source.faults.found
    if not entry.flags & HAS_DESCRIPTOR:
        if descriptor:
            report(_bad(source, at, f"bytes after {entry.name!r} that belong to no member", "none", len(descriptor)))
        return
    body = descriptor.removeprefix(DESCRIPTOR) if len(descriptor) in (16, 24) else descriptor
    form = {12: "<III", 20: "<IQQ"}.get(len(body))
    expected = (entry.crc32, entry.stored_size, entry.size)
    if form is None or struct.unpack(form, body) != expected:
        report(_bad(source, at, f"the data descriptor of {entry.name!r} is damaged", expected, descriptor[:24].hex()))


# Writing


def local_header(name: bytes, crc32: int, size: int, padding: int) -> bytes:
    """Return the local header of a stored member with a UTF-8 name.

    `padding` is the number of bytes of the padding field: 0, or at least 4. A zip64 field is added if `size` does not
    fit 32 bits.
    """
    extra = b"" if size < ONES32 else struct.pack("<HHQQ", _ZIP64_EXTRA, 16, size, size)
    version, shown = 45 if extra else 20, min(size, ONES32)
    if padding:
        extra += _PADDING.pack(PADDING_EXTRA, padding - 4) + b"Z" * (padding - 4)
    return _LOCAL.pack(LOCAL, version, UTF8, STORED, 0, 0, crc32, shown, shown, len(name), len(extra)) + name + extra


def with_crc32(header: bytes, at: int, crc32: int) -> bytes:
    """Return `header` with the checksum `crc32` at the offset `at`, LOCAL_CRC32 or CENTRAL_CRC32."""
    return header[:at] + crc32.to_bytes(4, "little") + header[at + 4 :]


def central_entry(name: bytes, flags: int, crc32: int, size: int, offset: int) -> bytes:
    """Return the entry of a stored member in the central directory. Its local header is at `offset`."""
    wide = b""
    if max(size, offset) >= ONES32:
        wide = b"".join(n.to_bytes(8, "little") for n in (size, size, offset) if n >= ONES32)
    extra = struct.pack("<HH", _ZIP64_EXTRA, len(wide)) + wide if wide else b""
    version, shown = 45 if wide else 20, min(size, ONES32)
    head = (CENTRAL, 0, version, flags, STORED, 0, 0, crc32, shown, shown, len(name), len(extra))
    return CENTRAL_FIELDS.pack(*head, 0, 0, 0, 0, min(offset, ONES32)) + name + extra


def end_records(count: int, size: int, start: int, comment: bytes = b"") -> bytes:
    """Return the end records of an archive, with zip64 records if a number needs them.

    The directory has `count` entries in `size` bytes and begins at `start`.
    """
    out = b""
    if count >= _ONES16 or size >= ONES32 or start >= ONES32:
        out += ZIP64_END_FIELDS.pack(ZIP64_END, ZIP64_END_SIZE - 12, 45, 45, 0, 0, count, count, size, start)
        out += ZIP64_LOCATOR_FIELDS.pack(ZIP64_LOCATOR, 0, start + size, 1)
    shown = min(count, _ONES16), min(count, _ONES16), min(size, ONES32), min(start, ONES32)
    return out + END_FIELDS.pack(END, 0, 0, *shown, len(comment)) + comment
