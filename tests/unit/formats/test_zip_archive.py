"""The zip reader: valid archives of several writers, and archives that two readers would read differently."""

from __future__ import annotations

import io
import itertools
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.errors import CkptconvError, InputError, LimitError, MalformedError, UnsupportedError
from ckptconv.formats import zip_archive
from ckptconv.formats.zip_archive import DEFLATED, Archive, read_archive
from tests.support.hostile_bytes import (
    FIELDS,
    added,
    central_entry,
    data_of,
    end_of,
    in_header,
    in_headers,
    local_header,
    number,
    patched,
    saved,
    zip_of,
)
from tests.support.judge import assert_same
from tests.support.sampled import sampled

Read = Callable[[bytes], Archive]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads bytes as an archive."""

    def read_bytes(data: bytes) -> Archive:
        path = tmp_path / "m.pt"
        path.write_bytes(data)
        with Source(path) as source:
            return read_archive(source)

    return read_bytes


class Pipe(io.BytesIO):
    """A stream that cannot seek, so that zipfile writes data descriptors."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise OSError("a pipe")


MEMBERS = {"m/data.pkl": b"N.", "m/data/0": bytes(range(64)), "m/data/1": b"xyz" * 50}
THREE = zip_of(MEMBERS)
ONE = zip_of({"m/data.pkl": b"N."})
#: An archive whose entries are read together, because their names have the same length.
MANY = zip_of({f"m/data/{i}": b"xyz" for i in range(9)})
#: An archive with a zip64 end.
OF_TORCH = saved([torch.zeros(3)])


def zip64_of(members: dict[str, bytes], stream: io.BytesIO | None = None) -> bytes:
    """Return the archive of `members` with all their sizes in zip64 fields, written to `stream`."""
    stream = stream or io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    return stream.getvalue()


def in_end(data: bytes, offset: int, form: str, by: int) -> bytes:
    """Add `by` to the number in `data` that is `offset` bytes after the start of the archive's end record."""
    return added(data, end_of(data) + offset, form, by)


def disagreeing(side: str, field: str) -> bytes:
    """Return THREE with one `field` in one header of its last member changed. The `side` is local or central."""
    _, offset, form = FIELDS[field]
    before = number(THREE, central_entry(THREE, "m/data/1") + offset, form)
    return in_header(THREE, side, "m/data/1", field, {"flags": 1 << 11, "method": 8}.get(field, before - 1))


def with_extra(extra: bytes, side: str) -> bytes:
    """Return ONE with `extra` in the local or in the central header of its member."""
    if side == "local":
        data = patched(ONE[:40] + extra + ONE[40:], 28, "<H", len(extra))
        return in_end(data, 16, "<I", len(extra))
    at = central_entry(ONE, "m/data.pkl")
    data = patched(ONE[: at + 56] + extra + ONE[at + 56 :], at + 30, "<H", len(extra))
    return in_end(data, 12, "<I", len(extra))


def unicode_name(name: bytes) -> bytes:
    """Return Info-ZIP's extra field for the Unicode `name`, which some readers prefer."""
    return struct.pack("<HHBI", 0x7075, 5 + len(name), 1, zlib.crc32(b"m/data.pkl")) + name


def sizes_in_both_places(off: int) -> bytes:
    """Return an archive with sizes both in the header and in its zip64 field, as Python's zipfile wrote them before
    3.11. The two sizes differ by `off`.
    """
    data = bytearray(zip64_of({"m/data.pkl": b"N."}))
    data[18:26] = struct.pack("<2I", 2 + off, 2 + off)
    return bytes(data)


def without_descriptors_start(length: int) -> bytes:
    """Return a streamed archive without the first `length` bytes of its data descriptor. The first four are an optional
    signature.
    """
    data = zip_of({"m/data.pkl": b"N."}, file=Pipe())
    at = data.index(b"PK\x07\x08")
    return in_end(data[:at] + data[at + length :], 16, "<I", -length)


def with_damaged_descriptor(data: bytes, offset: int) -> bytes:
    """Return `data` with one flipped bit in its first data descriptor, `offset` bytes after its start."""
    at = data.index(b"PK\x07\x08") + offset
    return patched(data, at, "<I", number(data, at, "<I") ^ 1)


def behind_a_header() -> bytes:
    """Return an archive with a gap before the first member. zipfile makes one when it appends to a file."""
    file = io.BytesIO(b"PK\x03\x04")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("m/data.pkl", b"N.")
    assert zipfile.ZipFile(file).testzip() is None
    return file.getvalue()


def with_a_member_that_is_not_listed() -> bytes:
    """Return THREE without the second member's entry in the directory."""
    at = central_entry(THREE, "m/data/0")
    behind = central_entry(THREE, "m/data/1")
    out = in_end(THREE[:at] + THREE[behind:], 12, "<I", at - behind)
    out = with_count(out, 2)
    assert zipfile.ZipFile(io.BytesIO(out)).testzip() is None
    return out


def with_count(data: bytes, count: int) -> bytes:
    """Return `data` with `count` as the number of members in its end record."""
    return patched(patched(data, end_of(data) + 8, "<H", count), end_of(data) + 10, "<H", count)


def with_more_members_than_the_limit() -> bytes:
    """Return an archive whose zip64 end record declares more members than the limit. The field allows 2^64."""
    at = OF_TORCH.index(b"PK\x06\x06")
    data = patched(patched(OF_TORCH, at + 24, "<Q", 1_000_001), at + 32, "<Q", 1_000_001)
    return with_count(data, 0xFFFF)


def inserted(data: bytes, at: int, more: bytes) -> bytes:
    return data[:at] + more + data[at:]


# Valid archives


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("comment", [b"", b"made by hand", b"x" * 65535])
def test_archives_of_pythons_writer_are_read(read: Read, method: int, comment: bytes) -> None:
    """An archive that Python's zipfile wrote, stored or deflated and with or without a comment, is read. The names,
    sizes, checksums and positions of the data are right.
    """
    data = zip_of(MEMBERS, method, comment=comment)
    archive = read(data)
    assert archive.root == "m"
    assert [member.name for member in archive.members] == list(MEMBERS)
    for member in archive.members:
        stored = data[member.data_offset : member.data_offset + member.stored_size]
        plain = zlib.decompress(stored, -15) if member.method == DEFLATED else stored
        assert plain == MEMBERS[member.name]
        assert (member.size, member.crc32) == (len(plain), zlib.crc32(plain))


#: Valid archives, and the sizes of their members.
GOOD = {
    # data descriptors, with zeros in the local headers
    "streamed": (zip_of(MEMBERS, file=Pipe()), [2, 64, 150]),
    "streamed and deflated": (zip_of(MEMBERS, zipfile.ZIP_DEFLATED, Pipe()), [2, 64, 150]),
    # local headers with all bits set and sizes in an extra field, and local headers of zeros with 64-bit descriptors
    "zip64": (zip64_of(MEMBERS), [2, 64, 150]),
    "zip64, streamed": (zip64_of(MEMBERS, Pipe()), [2, 64, 150]),
    "sizes in the header and in its zip64 field": (sizes_in_both_places(0), [2]),
    "a descriptor without its signature": (without_descriptors_start(4), [2]),
    "the same name in an extra field": (with_extra(unicode_name(b"m/data.pkl"), "central"), [2]),
    "an unknown extra field in the local header": (with_extra(b"FB\3\0ZZZ", "local"), [2]),
    "an unknown extra field in the central header": (with_extra(b"FB\3\0ZZZ", "central"), [2]),
}


@pytest.mark.parametrize("kind", GOOD)
def test_sound_archives_are_read(read: Read, kind: str) -> None:
    """An archive is read, no matter how it stores its sizes."""
    data, sizes = GOOD[kind]
    assert [member.size for member in read(data).members] == sizes
    assert (b"PK\x07\x08" in data) == ("streamed" in kind)


def test_folders_are_read(read: Read) -> None:
    """Entries of folders are read as members without bytes."""
    data = zip_of({"m/": b"", "m/data/": b"", "m/data.pkl": b"N."})
    assert list(read(data).names) == ["", "data/", "data.pkl"]


def test_archives_of_torch_are_read(read: Read) -> None:
    """An archive that torch wrote is read. It has the flags 0x808, zeros in the local headers, descriptors, FB padding,
    and a zip64 end.
    """
    data = saved({"w": torch.arange(5.0)})
    archive = read(data)
    assert archive.has_checksums
    assert archive.names["data/0"].data_offset == data_of(data, f"{archive.root}/data/0")
    assert {member.flags for member in archive.members} == {0x808}


@pytest.mark.parametrize("count", [2, 100, 2_000, 3_000, 6_000])
def test_directories_of_all_sizes_are_read(read: Read, count: int) -> None:
    """Directories of 2 to 6,000 entries are read. Entries are read in blocks as long as their names have one length."""
    names = [f"m/data/{i}" for i in range(count)]
    assert [member.name for member in read(zip_of(dict.fromkeys(names, b"x"))).members] == names


def entry_of(name: str, crc32: int, size: int, offset: int) -> bytes:
    """Return the central directory entry of a stored member with the flag UTF8."""
    return zip_archive.central_entry(name.encode(), zip_archive.UTF8, crc32, size, offset)


def directory_of(entries: list[bytes], start: int) -> bytes:
    """Return the central directory of `entries` with its end records."""
    listed = b"".join(entries)
    return listed + zip_archive.end_records(len(entries), len(listed), start)


def test_the_reader_reads_written_archives(read: Read) -> None:
    """``local_header``, ``central_entry`` and ``end_records`` write an archive that this reader and zipfile read."""
    entries, out = [], b""
    for i, content in enumerate((b"", b"x" * 100)):
        name = f"m/é{i}".encode()
        entries.append(entry_of(name.decode(), zlib.crc32(content), len(content), len(out)))
        out += zip_archive.local_header(name, zlib.crc32(content), len(content), 4 + i) + content
    out += directory_of(entries, len(out))
    assert [(member.name, member.size) for member in read(out).members] == [("m/é0", 0), ("m/é1", 100)]
    assert zipfile.ZipFile(io.BytesIO(out)).testzip() is None


def test_sizes_and_offsets_above_4_gib_are_written_as_zip64(src: Path) -> None:
    """A record of 5 GiB, which is a hole in the file, and a record after it are read back with the same sizes and
    offsets, by this reader and by zipfile.
    """
    size = 5 << 30
    header = zip_archive.local_header(b"m/a", 0, size, 0)
    second = len(header) + size
    entries = [
        entry_of("m/a", 0, size, 0),
        entry_of("m/b", 0, 0, second),
    ]
    with src.open("wb") as file:
        file.write(header)
        file.seek(second)
        tail = zip_archive.local_header(b"m/b", 0, 0, 0)
        file.write(tail + directory_of(entries, second + len(tail)))
    with Source(src) as source:
        members = read_archive(source).members
    assert [(m.size, m.header_offset) for m in members] == [(size, 0), (0, second)]
    with zipfile.ZipFile(src) as archive:
        assert [(m.file_size, m.header_offset) for m in archive.infolist()] == [(size, 0), (0, second)]


# Invalid archives

#: Archives that two readers could read differently, and a part of the error.
MALFORMED: dict[str, tuple[bytes, str]] = {
    # names
    "names equal after casefolding": (zip_of({"m/straße": b"", "m/STRASSE": b""}), "the same name"),
    "two roots": (zip_of({"m/data.pkl": b"N.", "n/data.pkl": b"K\x01."}), "two folders at its root"),
    **{
        f"a member at {name}": (zip_of({name: b"N."}), "not in the archive's folder")
        for name in ("data.pkl", "/data.pkl", "m//data.pkl", "../m/data.pkl", "m/../data.pkl", "m/data/..")
    },
    # Some readers end a name at NUL. A name that is not UTF-8 is decoded differently by each reader.
    "a name with NUL": (zip_of({"m/a?b": b"N."}).replace(b"a?b", b"a\0b"), "not in the archive's folder"),
    "a name that is not UTF-8": (zip_of({"m/a?b": b"N."}).replace(b"a?b", b"a\xffb"), "not UTF-8"),
    "a second name in an extra field": (with_extra(unicode_name(b"m/evil.pkl"), "central"), "two different names"),
    # torch reads no bytes for a folder, and returns uninitialized memory
    "a folder with bytes, by its attributes": (
        patched(THREE, central_entry(THREE, "m/data/0") + 38, "<I", 0x10),
        "has bytes of its own",
    ),
    "a folder with bytes, among many alike": (
        patched(MANY, central_entry(MANY, "m/data/5") + 38, "<I", 0x10),
        "has bytes of its own",
    ),
    "sizes that stand nowhere, among many alike": (
        in_headers(MANY, "m/data/5", {"size": 0xFFFFFFFF, "stored size": 0xFFFFFFFF}),
        "64-bit numbers",
    ),
    "a checksum in the header that is not the descriptor's": (
        in_header(OF_TORCH, "local", "archive/data/0", "crc", 1),
        "disagree",
    ),
    "a folder with bytes, by its name": (
        zip_of({"m/data.pkl": b"N.", "m/data/!": b"1234"}).replace(b"m/data/!", b"m/dataa/"),
        "has bytes of its own",
    ),
    # headers
    **{f"another {field} in the local header": (disagreeing("local", field), "disagree") for field in FIELDS},
    **{
        f"another {field} in the central header": (disagreeing("central", field), what)
        for field, what in zip(FIELDS, ["disagree"] * 3 + ["two sizes"] * 2, strict=True)
    },
    "a stored member of two sizes, in both headers": (in_headers(THREE, "m/data/1", {"size": 7}), "two sizes"),
    # its offset would have another meaning
    "a member on another disk": (patched(THREE, central_entry(THREE, "m/data/1") + 34, "<H", 1), "64-bit numbers"),
    "another name in the local header": (
        patched(THREE, local_header(THREE, "m/data/1") + 30 + 7, "<B", ord("7")),
        "two different names",
    ),
    "a shorter name in the local header": (
        patched(THREE, local_header(THREE, "m/data/1") + 26, "<H", 7),
        "two different names",
    ),
    "no local header": (patched(THREE, local_header(THREE, "m/data/0"), "<B", 0), "no local header"),
    "no central header": (patched(THREE, central_entry(THREE, "m/data/0"), "<B", 0), "not an entry"),
    **{
        f"{kind} in the {side} header": (with_extra(extra, side), what)
        for side in ("local", "central")
        for kind, extra, what in (
            ("an extra field truncated", b"FB\3\0ZZ", "truncated"),
            ("a byte behind the extra field", b"FB\3\0ZZZF", "truncated"),
            ("an extra field twice", b"FB\3\0ZZZ" * 2, "twice"),
        )
    },
    # a reader that prefers the extra field would see other sizes
    "64-bit numbers that nothing refers to in the local header": (
        with_extra(struct.pack("<HHQQ", 1, 16, 7, 7), "local"),
        "disagree",
    ),
    "64-bit numbers that nothing refers to in the central header": (
        with_extra(struct.pack("<HHQQ", 1, 16, 7, 7), "central"),
        "64-bit numbers",
    ),
    # the size is stored nowhere
    "all ones without a 64-bit number in the local header": (patched(ONE, 22, "<I", 0xFFFFFFFF), "disagree"),
    "all ones without a 64-bit number in the central header": (
        patched(ONE, central_entry(ONE, "m/data.pkl") + 24, "<I", 0xFFFFFFFF),
        "64-bit numbers",
    ),
    "sizes in the header and in its zip64 field that differ": (sizes_in_both_places(1), "disagree"),
    **{
        f"a wrong {field} in the descriptor": (
            with_damaged_descriptor(zip_of({"m/data.pkl": b"N."}, file=Pipe()), offset),
            "data descriptor",
        )
        for field, offset in (("checksum", 4), ("stored size", 8), ("size", 12))
    },
    **{
        f"a wrong {field} in the 64-bit descriptor": (
            with_damaged_descriptor(zip64_of({"m/data.pkl": b"N."}, Pipe()), offset),
            "data descriptor",
        )
        for field, offset in (("checksum", 4), ("stored size", 8), ("size", 16))
    },
    "a descriptor with a part of its signature": (without_descriptors_start(3), "data descriptor"),
    "a descriptor that is not there": (without_descriptors_start(16), "data descriptor"),
    # positions
    "two entries with one local header": (
        patched(THREE, central_entry(THREE, "m/data/1") + 42, "<I", local_header(THREE, "m/data/0")),
        "has no space for its header",
    ),
    "a record that reaches into the next": (
        in_headers(THREE, "m/data/0", {"stored size": 65, "size": 65}),
        "overlaps the next record",
    ),
    "a gap before the first member": (behind_a_header(), "gap"),
    "a gap between members": (with_a_member_that_is_not_listed(), "belong to no member"),
    "a gap before the directory": (
        in_end(inserted(THREE, number(THREE, end_of(THREE) + 16, "<I"), b"junk"), 16, "<I", 4),
        "belong to no member",
    ),
    "a member beyond the end": (
        patched(THREE, central_entry(THREE, "m/data/1") + 42, "<I", len(THREE) + 1000),
        "belong to no member",
    ),
    "a size beyond the end": (
        in_headers(THREE, "m/data/1", {"stored size": 1 << 31, "size": 1 << 31}),
        "overlaps the next record",
    ),
    "nothing before the end": (zip_of({}), "empty"),
    # the end
    "one member less": (with_count(THREE, 2), "bytes after its entries"),
    "one member more": (with_count(THREE, 4), "too small"),
    "a shorter directory": (in_end(THREE, 12, "<I", -1), "does not end at its end record"),
    "a longer directory": (in_end(THREE, 12, "<I", 1), "does not end at its end record"),
    "a directory further in front": (in_end(THREE, 16, "<I", -1), "does not end at its end record"),
    "a directory further behind": (in_end(THREE, 16, "<I", 1), "does not end at its end record"),
    # more members than the size allows, or no members, are reported before anything is read
    "many members in few bytes": (with_count(THREE, 60_000), "too small"),
    "no members in many bytes": (with_count(THREE, 0), "too large"),
    # the zip64 end is right and the other one is wrong; readers differ in which one they use
    **{
        f"two ends that disagree at byte {offset}": (
            in_end(OF_TORCH, offset, form, -1),
            "two end records of the zip archive differ",
        )
        for offset, form in ((8, "<H"), (10, "<H"), (12, "<I"), (16, "<I"))
    },
    "bytes behind the entries of the directory": (
        in_end(inserted(THREE, end_of(THREE), b"junk"), 12, "<I", 4),
        "bytes after its entries",
    ),
    # its own size, disks, counts, size and offset; each differs from the other end record or from the directory
    **{
        f"another number in the zip64 end at byte {offset}": (
            added(OF_TORCH, OF_TORCH.index(b"PK\x06\x06") + offset, form, 1),
            "the zip64 end record is damaged" if offset == 4 else "two end records of the zip archive differ",
        )
        for offset, form in (
            (4, "<Q"),
            (16, "<I"),
            (20, "<I"),
            (24, "<Q"),
            (32, "<Q"),
            (40, "<Q"),
            (48, "<Q"),
        )
    },
    # disk, offset, and number of disks, which is 1; torch refuses 0
    **{
        f"another number in the zip64 locator at byte {offset}, by {turned}": (
            patched(
                OF_TORCH,
                OF_TORCH.index(b"PK\x06\x07") + offset,
                form,
                number(OF_TORCH, OF_TORCH.index(b"PK\x06\x07") + offset, form) ^ turned,
            ),
            "zip64 locator",
        )
        for offset, form in ((4, "<I"), (8, "<Q"), (16, "<I"))
        for turned in (1, 3)
    },
    # only some readers see it; without its locator it is a gap, and without the end record the locator points nowhere
    "a zip64 end without its locator": (OF_TORCH.replace(b"PK\x06\x07", b"PK\x06\x00"), "does not end at its end"),
    "a zip64 locator without its end": (OF_TORCH.replace(b"PK\x06\x06", b"PK\x06\x00"), "zip64 end record is damaged"),
    # readers that search from the front and readers that search from the back see different archives
    "an archive in the comment of an archive": (
        patched(THREE, end_of(THREE) + 20, "<H", len(ONE)) + ONE,
        "two end records",
    ),
    # torch uses the last end record without checking the length of its comment; a strict reader would use the first
    "an end in the comment": (
        patched(THREE, end_of(THREE) + 20, "<H", 22) + THREE[end_of(THREE) : -2] + b"\x09\x00",
        "does not end where the zip archive ends",
    ),
    "bytes after the end": (THREE + b"\0", "does not end where the zip archive ends"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_archives(read: Read, kind: str) -> None:
    """A malformed archive is refused with an error that describes the fault."""
    data, what = MALFORMED[kind]
    with pytest.raises(MalformedError, match=what):
        read(data)


@pytest.mark.parametrize("twin", ["m/data.pkl", "m/DATA.PKL", "m/daTa.pkl"])
@pytest.mark.filterwarnings("ignore:Duplicate name")  # zipfile warns about the duplicate that this test needs
def test_one_name_twice_is_malformed(read: Read, twin: str) -> None:
    """Two members with the same name are refused. Case is ignored, as when torch looks up names."""
    file = io.BytesIO(ONE)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(twin, b"K\x01.")
    with pytest.raises(MalformedError, match="two zip members have the same name"):
        read(file.getvalue())


UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    **{
        f"encrypted, by bit {bit}": (in_headers(THREE, "m/data/1", {"flags": 1 << bit}), "encrypted")
        for bit in (0, 6, 13)
    },
    # patched data (bit 5) and reserved bits; other readers refuse or reinterpret them
    **{
        f"bit {bit}": (in_header(THREE, "central", "m/data/1", "flags", 1 << bit), "flags of unknown meaning")
        for bit in (4, 5, 7, 15)
    },
    **{
        f"method {method}": (in_header(THREE, "central", "m/data/1", "method", method), "unknown way")
        for method in (1, 9, 12, 14, 93, 99)
    },
    # the number of this disk, the disk of the directory, and the number of entries on this disk
    **{
        f"several disks, by byte {offset} of the end": (
            patched(THREE, end_of(THREE) + offset, "<H", 1),
            "several parts",
        )
        for offset in (4, 6, 8)
    },
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_archives(read: Read, kind: str) -> None:
    """An archive with a feature that other readers may support is reported as unsupported."""
    data, what = UNSUPPORTED[kind]
    with pytest.raises(UnsupportedError, match=what):
        read(data)


def test_too_many_members_are_a_limit(read: Read) -> None:
    """An archive that declares too many members is refused before the members are read."""
    with pytest.raises(LimitError, match="too many zip members"):
        read(with_more_members_than_the_limit())


# Every truncation and every flipped bit


@pytest.mark.untraced
def test_every_truncation_is_malformed(src: Path, dst: Path) -> None:
    """A file that is truncated at any byte is refused, and no output appears. From four bytes on, it is malformed."""
    src.write_bytes(saved({"w": torch.arange(3.0)}))
    for size in range(src.stat().st_size - 1, -1, -1):
        os.truncate(src, size)
        with pytest.raises(MalformedError if size >= 4 else InputError):
            ckptconv.convert(src, dst)
    assert os.listdir(src.parent) == ["src.pt"]


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("writer", ["torch", "zipfile"])
def test_every_flipped_bit_is_found_or_harmless(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """After any bit is flipped, ``convert`` refuses the file, or its output loads like the original. A flipped bit in a
    storage is copied together with the old checksum, which shows the damage.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of small files are written
    original = {"w": torch.arange(3, dtype=torch.uint8)}
    data = saved(original)
    if writer == "zipfile":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            data = zip_of({name: archive.read(name) for name in archive.namelist() if "/." not in name})
    src.write_bytes(data)
    storage = range(data_of(data, "archive/data/0"), data_of(data, "archive/data/0") + 3)
    harmless: set[bytes] = set()
    refused = 0
    with src.open("r+b", buffering=0) as file:
        flips = sampled(itertools.product(range(len(data)), range(8)), 7)
        for at, bit in flips:
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
            try:
                ckptconv.convert(src, dst, force=True)
            except CkptconvError:
                refused += 1
                assert at not in storage
            else:
                written = dst.read_bytes()
                if at in storage:
                    assert torch.load(dst)["w"].tolist()[at - storage.start] == at - storage.start ^ 1 << bit
                    assert zipfile.ZipFile(dst).testzip() == "archive/data/0"
                elif written not in harmless:
                    assert_same(torch.load(dst), original)
                    assert zipfile.ZipFile(dst).testzip() is None
                    harmless.add(written)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert refused > len(flips) / 8
