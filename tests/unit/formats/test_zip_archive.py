"""The zip reader against good archives of several writers, and against every way to make
one that two readers see differently.
"""

from __future__ import annotations

import io
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
from tests.support.hostile_bytes import central_entry, data_of, end_of, local_header, number, patched, saved, zip_of
from tests.support.judge import assert_same

LOCAL_FIELDS = {
    "flags": (6, "<H"),
    "method": (8, "<H"),
    "crc": (14, "<I"),
    "stored size": (18, "<I"),
    "size": (22, "<I"),
}
CENTRAL_FIELDS = {
    "flags": (8, "<H"),
    "method": (10, "<H"),
    "crc": (16, "<I"),
    "stored size": (20, "<I"),
    "size": (24, "<I"),
}

Read = Callable[[bytes], Archive]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """A function that reads bytes as an archive."""

    def read_bytes(data: bytes) -> Archive:
        path = tmp_path / "m.pt"
        path.write_bytes(data)
        with Source(path) as source:
            return read_archive(source)

    return read_bytes


class Pipe(io.BytesIO):
    """A stream that cannot seek, for which zipfile writes data descriptors."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise OSError("a pipe")


GOOD = {"m/data.pkl": b"N.", "m/data/0": bytes(range(64)), "m/data/1": b"xyz" * 50}


# Good archives


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("comment", [b"", b"made by hand", b"x" * 65535])
def test_archives_of_pythons_writer_are_read(read: Read, method: int, comment: bytes) -> None:
    """Stored or deflated, with or without a comment: names, sizes, checksums and
    places of the data are those of zipfile.
    """
    data = zip_of(GOOD, method, comment=comment)
    archive = read(data)
    assert archive.root == "m"
    assert [member.name for member in archive.members] == list(GOOD)
    for member in archive.members:
        stored = data[member.data_offset : member.data_offset + member.stored_size]
        plain = zlib.decompress(stored, -15) if member.method == DEFLATED else stored
        assert plain == GOOD[member.name]
        assert (member.size, member.crc32) == (len(plain), zlib.crc32(plain))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_streamed_archives_are_read(read: Read, method: int) -> None:
    """Data descriptors with zeros in the local headers."""
    data = zip_of(GOOD, method, Pipe())
    assert b"PK\x07\x08" in data
    assert [member.size for member in read(data).members] == [len(v) for v in GOOD.values()]


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
def test_forced_zip64_is_read(read: Read, stream: type[io.BytesIO]) -> None:
    """All ones in the local header and the sizes in an extra field, streamed with zeros there and
    64-bit descriptors.
    """
    file = stream()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in GOOD.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    assert [member.size for member in read(file.getvalue()).members] == [len(v) for v in GOOD.values()]


@pytest.mark.parametrize("off", [0, 1])
def test_sizes_in_the_header_and_in_its_zip64_field(read: Read, off: int) -> None:
    """As Python's zipfile wrote them before 3.11: read if both places say the same, else refused."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, archive.open("m/data.pkl", "w", force_zip64=True) as member:
        member.write(GOOD["m/data.pkl"])
    data = bytearray(file.getvalue())
    size = len(GOOD["m/data.pkl"])
    data[18:26] = struct.pack("<2I", size, size + off)
    if off:
        with pytest.raises(MalformedError, match="disagree"):
            read(bytes(data))
    else:
        assert [member.size for member in read(bytes(data)).members] == [size]


def test_folders_are_read(read: Read) -> None:
    """Entries for folders are members without bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/", b"")
        archive.writestr("m/data/", b"")
        archive.writestr("m/data.pkl", b"N.")
    assert list(read(file.getvalue()).names()) == ["", "data/", "data.pkl"]


def test_archives_of_torch_are_read(read: Read) -> None:
    """torch's own: flags 0x808, zeros in local headers, descriptors, FB padding, a zip64 end."""
    data = saved({"w": torch.arange(5.0)})
    archive = read(data)
    assert archive.has_checksums
    assert archive.names()["data/0"].data_offset == data_of(data, f"{archive.root}/data/0")
    assert {member.flags for member in archive.members} == {0x808}


def test_what_the_writer_writes_the_reader_reads(read: Read) -> None:
    """``local_header`` and ``central_directory`` make an archive that this reader and zipfile take."""
    entries, out = [], b""
    for i, content in enumerate((b"", b"x" * 100)):
        name = f"m/é{i}".encode()
        entries.append(zip_archive.NewEntry(name, zip_archive.UTF8, zlib.crc32(content), len(content), len(out)))
        out += zip_archive.local_header(name, zlib.crc32(content), len(content), 4 + i) + content
    out += zip_archive.central_directory(entries, len(out))
    assert [(member.name, member.size) for member in read(out).members] == [("m/é0", 0), ("m/é1", 100)]
    assert zipfile.ZipFile(io.BytesIO(out)).testzip() is None


def test_sizes_and_offsets_above_4_gib_are_written_as_zip64(tmp_path: Path) -> None:
    """A record of 5 GiB (a hole on the disk) and one behind it: read back by this reader
    and by zipfile with the same numbers.
    """
    size = 5 << 30
    header = zip_archive.local_header(b"m/a", 0, size, 0)
    second = len(header) + size
    entries = [
        zip_archive.NewEntry(b"m/a", zip_archive.UTF8, 0, size, 0),
        zip_archive.NewEntry(b"m/b", zip_archive.UTF8, 0, 0, second),
    ]
    path = tmp_path / "large.zip"
    with path.open("wb") as file:
        file.write(header)
        file.seek(second)
        tail = zip_archive.local_header(b"m/b", 0, 0, 0)
        file.write(tail + zip_archive.central_directory(entries, second + len(tail)))
    with Source(path) as source:
        members = read_archive(source).members
    assert [(m.size, m.header_offset) for m in members] == [(size, 0), (0, second)]
    with zipfile.ZipFile(path) as archive:
        assert [(m.file_size, m.header_offset) for m in archive.infolist()] == [(size, 0), (0, second)]


# Names


@pytest.mark.parametrize("twin", ["m/data.pkl", "m/DATA.PKL", "m/daTa.pkl"])
@pytest.mark.filterwarnings("ignore:Duplicate name")  # zipfile warns of what is wanted here
def test_one_name_twice_is_malformed(read: Read, twin: str) -> None:
    """Also without regard to case, as torch looks names up."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", b"N.")
        archive.writestr(twin, b"K\x01.")
    with pytest.raises(MalformedError, match="two zip members have one name"):
        read(file.getvalue())


def test_names_equal_after_casefolding_are_malformed(read: Read) -> None:
    """Case-folding, not only lower case: ß is ss."""
    with pytest.raises(MalformedError, match="one name"):
        read(zip_of({"m/straße": b"", "m/STRASSE": b""}))


def test_two_roots_are_malformed(read: Read) -> None:
    """torch takes the first member's folder for the archive's."""
    with pytest.raises(MalformedError, match="two folders at its root"):
        read(zip_of({"m/data.pkl": b"N.", "n/data.pkl": b"K\x01."}))


@pytest.mark.parametrize(
    "name", ["data.pkl", "/data.pkl", "m//data.pkl", "../m/data.pkl", "m/../data.pkl", "m/data/.."]
)
def test_a_member_outside_the_folder_is_malformed(read: Read, name: str) -> None:
    """No folder, an absolute name, an empty segment, a segment that leads out."""
    with pytest.raises(MalformedError, match="not in the archive's folder"):
        read(zip_of({name: b"N."}))


@pytest.mark.parametrize(("byte", "match"), [(b"\0", "not in the archive's folder"), (b"\xff", "not UTF-8")])
def test_a_name_with_bad_bytes_is_malformed(read: Read, byte: bytes, match: str) -> None:
    """NUL ends a name for some readers; what is no UTF-8 each reader decodes in its own way."""
    with pytest.raises(MalformedError, match=match):
        read(zip_of({"m/a?b": b"N."}).replace(b"a?b", b"a" + byte + b"b"))


def test_a_second_name_in_an_extra_field_is_malformed(read: Read) -> None:
    """Info-ZIP's field for a Unicode name: some readers take that one. The same name there is harmless."""
    data = zip_of({"m/data.pkl": b"N."})
    at = central_entry(data, "m/data.pkl")
    for name, good in ((b"m/data.pkl", True), (b"m/evil.pkl", False)):
        extra = struct.pack("<HHBI", 0x7075, 5 + len(name), 1, zlib.crc32(b"m/data.pkl")) + name
        out = patched(data, at + 30, "<H", len(extra))
        out = out[: at + 56] + extra + out[at + 56 :]
        out = patched(out, end_of(out) + 12, "<I", number(out, end_of(out) + 12, "<I") + len(extra))
        if good:
            assert read(out).names()["data.pkl"].size == 2
        else:
            with pytest.raises(MalformedError, match="two names"):
                read(out)


def test_a_folder_with_bytes_is_malformed(read: Read) -> None:
    """torch reads no bytes for it and hands out memory as it finds it."""
    data = zip_of(GOOD)
    with pytest.raises(MalformedError, match="has bytes of its own"):
        read(patched(data, central_entry(data, "m/data/0") + 38, "<I", 0x10))
    with pytest.raises(MalformedError, match="has bytes of its own"):
        read(zip_of({"m/data.pkl": b"N.", "m/data/!": b"1234"}).replace(b"m/data/!", b"m/dataa/"))


# Headers


@pytest.mark.parametrize("side", ["local", "central"])
@pytest.mark.parametrize("field", LOCAL_FIELDS)
def test_local_and_central_must_agree(read: Read, side: str, field: str) -> None:
    """Each number that stands in both headers, changed in one."""
    data = zip_of(GOOD)
    if side == "local":
        at, (offset, form) = local_header(data, "m/data/1"), LOCAL_FIELDS[field]
    else:
        at, (offset, form) = central_entry(data, "m/data/1"), CENTRAL_FIELDS[field]
    value = {"flags": 1 << 11, "method": 8}.get(field, number(data, at + offset, form) - 1)
    with pytest.raises(MalformedError, match=r"disagree|two sizes|belong to nothing|reaches into"):
        read(patched(data, at + offset, form, value))


def test_a_stored_member_of_two_sizes_is_malformed(read: Read) -> None:
    """Both headers agree on a lie."""
    data = zip_of(GOOD)
    for at, fields in (
        (local_header(data, "m/data/1"), LOCAL_FIELDS),
        (central_entry(data, "m/data/1"), CENTRAL_FIELDS),
    ):
        data = patched(data, at + fields["size"][0], "<I", 7)
    with pytest.raises(MalformedError, match="two sizes"):
        read(data)


def test_a_member_on_another_disk_is_malformed(read: Read) -> None:
    """Its offset would mean something else."""
    data = zip_of(GOOD)
    with pytest.raises(MalformedError):
        read(patched(data, central_entry(data, "m/data/1") + 34, "<H", 1))


def test_local_and_central_names_must_agree(read: Read) -> None:
    """The same length, another name; and another length."""
    data = zip_of(GOOD)
    at = local_header(data, "m/data/1")
    with pytest.raises(MalformedError, match="two names"):
        read(patched(data, at + 30 + 7, "<B", ord("7")))
    with pytest.raises(MalformedError, match="two names"):
        read(patched(data, at + 26, "<H", 7))


@pytest.mark.parametrize("bit", [0, 6, 13])
def test_encryption_is_unsupported(read: Read, bit: int) -> None:
    """Each of the three flags that say so."""
    data = zip_of(GOOD)
    data = patched(data, central_entry(data, "m/data/1") + 8, "<H", 1 << bit)
    with pytest.raises(UnsupportedError, match="encrypted"):
        read(patched(data, local_header(data, "m/data/1") + 6, "<H", 1 << bit))


@pytest.mark.parametrize("bit", [4, 5, 7, 15])
def test_unknown_flags_are_unsupported(read: Read, bit: int) -> None:
    """Patched data (bit 5) and whatever comes: other readers refuse or reinterpret it."""
    data = zip_of(GOOD)
    with pytest.raises(UnsupportedError, match="flags of unknown meaning"):
        read(patched(data, central_entry(data, "m/data/1") + 8, "<H", 1 << bit))


@pytest.mark.parametrize("method", [1, 9, 12, 14, 93, 99])
def test_unknown_methods_are_unsupported(read: Read, method: int) -> None:
    """Neither stored nor deflated."""
    data = zip_of(GOOD)
    with pytest.raises(UnsupportedError, match="unknown way"):
        read(patched(data, central_entry(data, "m/data/1") + 10, "<H", method))


@pytest.mark.parametrize("what", ["local", "central"])
def test_a_missing_header_is_malformed(read: Read, what: str) -> None:
    """The signature is damaged."""
    data = zip_of(GOOD)
    at = local_header(data, "m/data/0") if what == "local" else central_entry(data, "m/data/0")
    with pytest.raises(MalformedError, match=r"no local header|no entry"):
        read(patched(data, at, "<B", 0))


def with_extra(extra: bytes, *, local: bool) -> bytes:
    """A one-member archive whose local or central header has EXTRA."""
    data = zip_of({"m/data.pkl": b"N."})
    if local:
        data = data[:40] + extra + data[40:]
        data = patched(data, 28, "<H", len(extra))
        return patched(data, end_of(data) + 16, "<I", number(data, end_of(data) + 16, "<I") + len(extra))
    at = central_entry(data, "m/data.pkl")
    data = patched(data, at + 30, "<H", len(extra))
    data = data[: at + 56] + extra + data[at + 56 :]
    return patched(data, end_of(data) + 12, "<I", number(data, end_of(data) + 12, "<I") + len(extra))


@pytest.mark.parametrize("local", [True, False])
def test_extra_fields_must_be_whole_and_single(read: Read, local: bool) -> None:
    """A good one is skipped; one cut short, one that is too short for a header, and one
    that stands there twice are malformed.
    """
    good = struct.pack("<HH", 0x4246, 3) + b"ZZZ"
    assert read(with_extra(good, local=local)).members[0].size == 2
    for bad, match in ((good[:-1], "cut short"), (good + b"F", "cut short"), (good + good, "twice")):
        with pytest.raises(MalformedError, match=match):
            read(with_extra(bad, local=local))


@pytest.mark.parametrize("local", [True, False])
def test_zip64_numbers_that_nothing_refers_to_are_malformed(read: Read, local: bool) -> None:
    """A reader that prefers the extra field would see other sizes."""
    with pytest.raises(MalformedError, match=r"64-bit numbers|disagree"):
        read(with_extra(struct.pack("<HHQQ", 1, 16, 7, 7), local=local))


@pytest.mark.parametrize("local", [True, False])
def test_all_ones_without_a_zip64_number_is_malformed(read: Read, local: bool) -> None:
    """Nothing says what the size is."""
    data = zip_of({"m/data.pkl": b"N."})
    at = 22 if local else central_entry(data, "m/data.pkl") + 24
    with pytest.raises(MalformedError, match=r"64-bit numbers|disagree"):
        read(patched(data, at, "<I", 0xFFFFFFFF))


@pytest.mark.parametrize("offset", [4, 8, 12])
@pytest.mark.parametrize("with_zip64", [False, True])
def test_a_damaged_descriptor_is_malformed(read: Read, offset: int, with_zip64: bool) -> None:
    """Each of its numbers: checksum, stored size, size."""
    file = Pipe()
    with zipfile.ZipFile(file, "w") as archive, archive.open("m/data.pkl", "w", force_zip64=with_zip64) as member:
        member.write(b"N.")
    data = file.getvalue()
    at = data.index(b"PK\x07\x08") + (offset if not with_zip64 else {4: 4, 8: 8, 12: 16}[offset])
    with pytest.raises(MalformedError, match="data descriptor"):
        read(patched(data, at, "<I", number(data, at, "<I") ^ 1))


def test_a_descriptor_without_its_signature_is_read(read: Read) -> None:
    """The signature is optional; a descriptor of any other length is malformed."""
    data = zip_of({"m/data.pkl": b"N."}, file=Pipe())
    at = data.index(b"PK\x07\x08")
    for cut, good in ((4, True), (3, False), (16, False)):
        out = data[:at] + data[at + cut :]
        out = patched(out, end_of(out) + 16, "<I", number(out, end_of(out) + 16, "<I") - cut)
        if good:
            assert read(out).members[0].size == 2
        else:
            with pytest.raises(MalformedError, match="data descriptor"):
                read(out)


# Places


def test_members_that_overlap_are_malformed(read: Read) -> None:
    """Two entries of the directory with one local header; and a record that reaches into the next."""
    data = zip_of(GOOD)
    with pytest.raises(MalformedError, match="overlap"):
        read(patched(data, central_entry(data, "m/data/1") + 42, "<I", local_header(data, "m/data/0")))
    for at, field in (
        (local_header(data, "m/data/0"), LOCAL_FIELDS),
        (central_entry(data, "m/data/0"), CENTRAL_FIELDS),
    ):
        for what in ("stored size", "size"):
            data = patched(data, at + field[what][0], "<I", 65)
    with pytest.raises(MalformedError, match="reaches into"):
        read(data)


def test_a_gap_before_the_first_member_is_malformed(read: Read) -> None:
    """zipfile itself writes behind what is in a file already."""
    file = io.BytesIO(b"PK\x03\x04")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("m/data.pkl", b"N.")
    assert zipfile.ZipFile(file).testzip() is None
    with pytest.raises(MalformedError, match="gap"):
        read(file.getvalue())


def test_a_gap_between_members_is_malformed(read: Read) -> None:
    """Bytes that no member owns: here, those of a member that the directory does not list."""
    data = zip_of(GOOD)
    at = central_entry(data, "m/data/0")
    end = end_of(data)
    out = data[:at] + data[central_entry(data, "m/data/1") :]
    shorter = len(data) - len(out)
    out = patched(out, end - shorter + 12, "<I", number(data, end + 12, "<I") - shorter)
    out = patched(patched(out, end - shorter + 8, "<H", 2), end - shorter + 10, "<H", 2)
    assert zipfile.ZipFile(io.BytesIO(out)).testzip() is None
    with pytest.raises(MalformedError, match="belong to nothing"):
        read(out)


def test_a_gap_before_the_directory_is_malformed(read: Read) -> None:
    """Bytes behind the last record."""
    data = zip_of(GOOD)
    start = number(data, end_of(data) + 16, "<I")
    out = data[:start] + b"junk" + data[start:]
    with pytest.raises(MalformedError, match="belong to nothing"):
        read(patched(out, end_of(out) + 16, "<I", start + 4))


def test_a_member_beyond_the_end_is_malformed(read: Read) -> None:
    """A header offset and a size that the file does not have, in 32 bits and in 64."""
    data = zip_of(GOOD)
    at = central_entry(data, "m/data/1")
    with pytest.raises(MalformedError):
        read(patched(data, at + 42, "<I", len(data) + 1000))
    for place, fields in ((local_header(data, "m/data/1"), LOCAL_FIELDS), (at, CENTRAL_FIELDS)):
        for what in ("stored size", "size"):
            data = patched(data, place + fields[what][0], "<I", 1 << 31)
    with pytest.raises(MalformedError, match="reaches into"):
        read(data)


def test_an_empty_archive_is_malformed(read: Read) -> None:
    """An end and nothing before it."""
    with pytest.raises(MalformedError, match="empty"):
        read(zip_of({}))


# The end


@pytest.mark.parametrize("field", ["count", "size", "start"])
@pytest.mark.parametrize("change", [-1, 1])
def test_lies_of_the_end_are_malformed(read: Read, field: str, change: int) -> None:
    """Too many or too few members, a directory that is longer, shorter or elsewhere."""
    data = zip_of(GOOD)
    end = end_of(data)
    for offset, form in {"count": ((8, "<H"), (10, "<H")), "size": ((12, "<I"),), "start": ((16, "<I"),)}[field]:
        data = patched(data, end + offset, form, number(data, end + offset, form) + change)
    with pytest.raises(MalformedError):
        read(data)


@pytest.mark.parametrize("offset", [4, 6, 8])
def test_several_disks_are_unsupported(read: Read, offset: int) -> None:
    """This disk's number, the directory's, and the number of entries on it."""
    data = zip_of(GOOD)
    with pytest.raises(UnsupportedError, match="several parts"):
        read(patched(data, end_of(data) + offset, "<H", 1))


def test_a_directory_of_implausible_size_is_malformed(read: Read) -> None:
    """Many members in few bytes, or few in more bytes than their names could take: said before anything is read."""
    data = zip_of(GOOD)
    end = end_of(data)
    many = patched(patched(data, end + 8, "<H", 60000), end + 10, "<H", 60000)
    with pytest.raises(MalformedError, match="too small"):
        read(many)
    none = patched(patched(data, end + 8, "<H", 0), end + 10, "<H", 0)
    with pytest.raises(MalformedError, match="too large"):
        read(none)


@pytest.mark.parametrize(("offset", "form"), [(8, "<H"), (10, "<H"), (12, "<I"), (16, "<I")])
def test_two_ends_that_disagree_are_malformed(read: Read, offset: int, form: str) -> None:
    """The zip64 end is right and the other one lies: readers differ in which they believe."""
    data = saved([torch.zeros(3)])
    at = end_of(data) + offset
    with pytest.raises(MalformedError, match="two ends of the zip archive disagree"):
        read(patched(data, at, form, number(data, at, form) - 1))


def test_bytes_behind_the_entries_of_the_directory_are_malformed(read: Read) -> None:
    """The directory is larger than its entries."""
    data = zip_of(GOOD)
    end = end_of(data)
    out = patched(data, end + 12, "<I", number(data, end + 12, "<I") + 4)
    with pytest.raises(MalformedError, match="bytes behind its entries"):
        read(out[:end] + b"junk" + out[end:])


@pytest.mark.parametrize(
    ("offset", "form"), [(4, "<Q"), (16, "<I"), (20, "<I"), (24, "<Q"), (32, "<Q"), (40, "<Q"), (48, "<Q")]
)
def test_lies_of_the_zip64_end_are_malformed(read: Read, offset: int, form: str) -> None:
    """Its own size, disks, counts, size and offset: each differs from what the other end or the directory says."""
    data = saved([torch.zeros(3)])
    at = data.index(b"PK\x06\x06")
    with pytest.raises((MalformedError, UnsupportedError)):
        read(patched(data, at + offset, form, number(data, at + offset, form) + 1))


@pytest.mark.parametrize(("offset", "form"), [(4, "<I"), (8, "<Q"), (16, "<I")])
def test_lies_of_the_zip64_locator_are_malformed(read: Read, offset: int, form: str) -> None:
    """Disk, offset, number of disks, which is 1: torch reads none of 0."""
    data = saved([torch.zeros(3)])
    at = data.index(b"PK\x06\x07")
    for turned in (1, 3):
        with pytest.raises(MalformedError, match="zip64 locator"):
            read(patched(data, at + offset, form, number(data, at + offset, form) ^ turned))


def test_a_zip64_end_that_only_some_readers_see_is_malformed(read: Read) -> None:
    """Without its locator it is a gap; without itself, the locator points nowhere."""
    data = saved([torch.zeros(3)])
    for signature in (b"PK\x06\x07", b"PK\x06\x06"):
        with pytest.raises(MalformedError):
            read(data.replace(signature, b"PK\x06\x00"))


def test_too_many_members_are_a_limit(read: Read) -> None:
    """A zip64 end may promise 2^64 of them."""
    data = saved([torch.zeros(3)])
    at, end = data.index(b"PK\x06\x06"), end_of(data)
    for offset in (24, 32):
        data = patched(data, at + offset, "<Q", 1_000_001)
    for offset in (8, 10):
        data = patched(data, end + offset, "<H", 0xFFFF)
    with pytest.raises(LimitError, match="too many zip members"):
        read(data)


def test_two_ends_are_malformed(read: Read) -> None:
    """An archive in the comment of an archive: readers that search from the front and from the back see
    different ones.
    """
    one, two = zip_of(GOOD), zip_of({"n/data.pkl": b"K\x01."})
    both = patched(one, end_of(one) + 20, "<H", len(two)) + two
    with pytest.raises(MalformedError, match="two ends"):
        read(both)


def test_an_end_in_the_comment_is_malformed(read: Read) -> None:
    """torch takes the last end without asking whether its comment fits; a strict reader would take the first."""
    data = zip_of(GOOD)
    fake = data[end_of(data) :][:-2] + b"\x09\x00"
    with pytest.raises(MalformedError, match="not the end of the file"):
        read(patched(data, end_of(data) + 20, "<H", len(fake)) + fake)


def test_bytes_behind_the_end_are_malformed(read: Read) -> None:
    """Nothing may follow the comment."""
    with pytest.raises(MalformedError, match="not the end of the file"):
        read(zip_of(GOOD) + b"\0")


# Every truncation, every flip


def test_every_truncation_is_malformed(tmp_path: Path) -> None:
    """A file cut anywhere ends in a typed error, here and in ``convert``; from the fourth byte on it is
    a broken zip.
    """
    path = tmp_path / "m.pt"
    path.write_bytes(saved({"w": torch.arange(3.0)}))
    for size in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(MalformedError if size >= 4 else InputError):
            ckptconv.convert(path, tmp_path / "out.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.pt"]


@pytest.mark.no_cover
@pytest.mark.parametrize("writer", ["torch", "zipfile"])
def test_every_flipped_bit_is_found_or_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """``convert`` refuses, or the output loads like the original; a flip in a storage's bytes goes
    through with the old checksum, which tells.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of small files
    original = {"w": torch.arange(3, dtype=torch.uint8)}
    data = saved(original)
    if writer == "zipfile":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            data = zip_of({name: archive.read(name) for name in archive.namelist() if "/." not in name})
    path, out = tmp_path / "m.pt", tmp_path / "out.pt"
    path.write_bytes(data)
    storage = range(data_of(data, "archive/data/0"), data_of(data, "archive/data/0") + 3)
    harmless: set[bytes] = set()
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for at in range(len(data)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
                try:
                    ckptconv.convert(path, out, force=True)
                except CkptconvError:
                    refused += 1
                    assert at not in storage
                else:
                    written = out.read_bytes()
                    if at in storage:
                        assert torch.load(out)["w"].tolist()[at - storage.start] == at - storage.start ^ 1 << bit
                        assert zipfile.ZipFile(out).testzip() == "archive/data/0"
                    elif written not in harmless:
                        assert_same(torch.load(out), original)
                        assert zipfile.ZipFile(out).testzip() is None
                        harmless.add(written)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert refused > len(data)
