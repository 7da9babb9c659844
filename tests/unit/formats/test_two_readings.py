"""Files that another reader would take for another format: how each is recognized, and which files are accepted."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

import ckptconv
from ckptconv.byteranges.sources import BytesSource
from ckptconv.errors import MalformedError
from ckptconv.formats import plain_pickle, safetensors, torch_legacy, torch_zip, two_readings
from ckptconv.formats.two_readings import refuse_two_readings
from ckptconv.limits import Limits
from tests.support.hostile_bytes import saved, zip_of
from tests.support.polyglots import checksummed, ordinary_safetensors, pickle_in_safetensors, tar_of, zip_of_pickle

legacy = partial(saved, _use_new_zipfile_serialization=False, pickle_protocol=4)

HEADER = b'\x40\0\0\0\0\0\0\0{"__metadata__":{"x":"' + b"y" * 39 + b'"}}'
NAMES = (torch_zip.NAME, torch_legacy.NAME, safetensors.NAME, plain_pickle.NAME)


def other_reading(data: bytes, name: str = safetensors.NAME) -> str:
    """Return the second reading of `data`, a file of the format `name`. Return an empty string if it has none."""
    try:
        refuse_two_readings(BytesSource(data, Path("m")), name)
    except MalformedError as error:
        return error.what.rpartition(f"as a {name} file, and as ")[2]
    return ""


# Tar


def opens(data: bytes) -> bool:
    """Return whether tarfile opens `data` in the way in which torch.load opens it."""
    try:
        tarfile.open(fileobj=io.BytesIO(data), mode="r:", format=tarfile.PAX_FORMAT).close()
    except tarfile.TarError:
        return False
    return True


SPELLED = (b"%06o\0 ", b"%o\0junk", b" %o\0", b"+%o\0", b"0o%o\0", b"0_%o\0", b"%o\n", b"%08o"[:5])


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("signed", [True, False])
def test_every_spelling_of_a_checksum(spelled: bytes, signed: bool) -> None:
    """A file whose checksum tarfile accepts in any spelling, signed or unsigned, is reported as a tar archive, because
    torch.load would read it as one. A file with a wrong checksum is not.
    """
    block = b"caf\xe9" + tar_of({"name": b""})[4:]
    data = checksummed(block, spelled, signed=signed)
    assert opens(data)
    for name in NAMES:
        assert other_reading(data, name) == "a tar archive, which torch.load checks for first"
    data = b"d" + data[1:]
    assert not opens(data) and not other_reading(data)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
def test_headers_whose_bodies_are_not_read(kind: bytes) -> None:
    """A PAX, long name or sparse header is reported as a tar archive. The gigabytes that the header announces are not
    read.
    """
    block = tar_of({"name": b""})[:512]
    block = checksummed(block[:124] + b"77777777777\0" + block[136:156] + kind + block[157:])
    source = BytesSource(block, Path("m"))
    reads: list[int] = []
    source.read = lambda offset, length: reads.append(length) or block[offset : offset + length]  # type: ignore[assignment,func-returns-value]
    with pytest.raises(MalformedError, match="tar archive"):
        refuse_two_readings(source, safetensors.NAME)
    assert sum(reads) == 512


@pytest.mark.parametrize("data", [b"", b"\0" * 512, b"\0" * 511, tar_of({"name": b""})[:511]])
def test_short_files_and_zeros_are_not_tar_archives(data: bytes) -> None:
    """A file that is shorter than a header, or that consists of zeros, is not reported. torch.load takes zeros for an
    empty archive.
    """
    assert not other_reading(data, torch_legacy.NAME)


# Zip


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("behind", [0, 100, 65_000])
def test_an_archive_after_another_format(absolute: bool, behind: int) -> None:
    """A zip archive after another format is found, also with other bytes before or after it."""
    archive = zip_of_pickle(b"N.")
    if absolute:
        stream = io.BytesIO(HEADER)
        stream.seek(len(HEADER))
        with zipfile.ZipFile(stream, "a") as file:
            file.writestr("a/data.pkl", b"N.")
        archive = stream.getvalue()[len(HEADER) :]
    for data in (HEADER + archive + b"x" * behind, HEADER + b"x" * behind + archive):
        assert "zip archive" in other_reading(data)


def test_the_first_entries_of_a_directory() -> None:
    """A directory entry that points nowhere does not hide the next one. A directory of only such entries is ignored,
    unless it is long.
    """
    archive = bytearray(zip_of_pickle(b"N."))
    first, second = archive.find(b"PK\1\2"), archive.rfind(b"PK\1\2")
    archive[first + 42 : first + 46] = struct.pack("<I", 9)
    assert "zip archive" in other_reading(HEADER + archive)
    archive[second + 42 : second + 46] = struct.pack("<I", 9)
    assert not other_reading(HEADER + archive)
    many = zip_of({f"a/{i}": b"" for i in range(20)}).replace(b"PK\3\4", b"PK\3\5")
    assert "zip archive" in other_reading(HEADER + many)


def test_an_archive_in_a_byte_string() -> None:
    """A byte string of a pickle may be a complete archive. If it contains other bytes before or after a checkpoint
    archive, the archive is reported.
    """
    archive = saved({"v": torch.ones(3)})
    for dump in (lambda value: pickle.dumps(value, 4), legacy):
        assert not other_reading(dump({"w": torch.ones(2), "x": archive}), plain_pickle.NAME)
        assert "zip archive" in other_reading(dump({"w": torch.ones(2), "x": b"#!" + archive}), plain_pickle.NAME)
        assert "zip archive" in other_reading(dump({"w": torch.ones(2), "x": archive + b"!"}), plain_pickle.NAME)
        assert not other_reading(dump({"w": torch.ones(2), "x": zip_of({"weights.npy": b"x"})}), plain_pickle.NAME)


def test_a_plain_pickle_with_an_archive_inside(tmp_path: Path) -> None:
    """A plain pickle with an archive in a byte string is read, and the dangerous globals of the archive are
    reported.
    """
    path = tmp_path / "m.pkl"
    path.write_bytes(pickle.dumps({"w": torch.ones(2), "x": zip_of_pickle(b"cos\nsystem\n)R.")}, 4))
    assert ckptconv.inspect(path).dangerous == ("os.system",)


# Pickle


NAMED = {
    b"cm\nf\n.": "m.f",
    b"\x80\x04\x8c\x01m\x8c\x01f\x93": "m.f",
    b"im\nf\n": "m.f",
    b"N.cm\nf\n": "m.f",
    b".cm\nf\n": "",  # an empty stack stops every reader
    b"N.N.N.N.N.cm\nf\n": "",  # no reader loads a sixth pickle
    b"N.N.N.cm\nf\n": "m.f",
    b'cm"\nf\n.': "",
    b"cm{\nf\n.": "",
    b"c\0m\nf\n.": "",
    b"\x82\x01.": "extension code 1",
    b"\x83\x01\x01)R": "extension code 257",
    b"\x84\x01\0\0\0Nb": "extension code 1",
    b"\x82\x01\xff": "",
    b"Pid\n": "a persistent id",
    b"U\x02idQ": "a persistent id",
    b"C\x02idQ": "a persistent id",
    b"N\x85Q": "a persistent id",
    b"P{\n.": "",
    b")Q.": "",
    b"NQ.": "",
    b"K\x01Q.": "",
    b"]Q.": "",
}


@pytest.mark.parametrize("opcodes", NAMED)
def test_names_in_a_pickle_at_the_first_byte(opcodes: bytes) -> None:
    """A pickle at the first byte is reported if it names a possible module, uses an extension code, or has a plausible
    persistent id. Bytes that a header contains by chance are not reported.
    """
    data = pickle_in_safetensors(opcodes)
    assert other_reading(data) == (f"a pickle that contains {NAMED[opcodes]}" if NAMED[opcodes] else "")
    for name in NAMES:
        if name != safetensors.NAME:  # these are read as pickles, or start with an opcode that stops every unpickler
            assert not other_reading(data, name)


def header_of(length: int, behind: bytes = b"") -> bytes:
    """Return a valid file whose header has `length` bytes, with the bytes `behind` as its data."""
    text = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(behind), len(behind))
    return length.to_bytes(8, "little") + text.ljust(length) + behind


@pytest.mark.parametrize("code", range(256))
def test_every_opcode_as_the_first_byte(code: int) -> None:
    """A header of any length is not a second reading, whatever data follows it. This includes PERSID and a line of
    zeros.
    """
    for more in (1, 2, 40):
        for behind in (bytes(range(32)), b"\n.\n.", b"Q.", b"\n0Q.", bytes(100), b"a" * 300):
            assert not other_reading(header_of(code + 256 * more, behind))


def test_number_of_bytes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle with more opcodes, or with longer lines, than could occur by chance is refused. A header whose length is
    PERSID is accepted, because every reader of plain pickles stops at this opcode.
    """
    monkeypatch.setattr(two_readings, "LIMITS", Limits(second_reading_opcodes=100, second_reading_bytes=5000))
    too_long = "a pickle: a pickle that is too long to check"
    assert other_reading(pickle_in_safetensors(b"N0" * 200)) == too_long
    assert not other_reading(pickle_in_safetensors(b"N0" * 20))
    assert other_reading(pickle_in_safetensors(b"V" + b"x" * 10_000)) == too_long
    assert not other_reading(header_of(0x150, bytes(10_000)))
    assert other_reading(header_of(0x156, bytes(10_000))) == too_long


# HDF5 and ordinary files


@pytest.mark.parametrize("at", [512, 1024, 1 << 20])
def test_an_hdf5_file_after_the_start(at: int) -> None:
    """An HDF5 signature at a position where h5py looks for one is reported."""
    data = HEADER.ljust(at) + b"\x89HDF\r\n\x1a\n" + bytes(100)
    assert other_reading(data) == f"an HDF5 file from byte {at} on, which h5py reads"
    assert not other_reading(b" " + data) and not other_reading(data[: at + 7])


def test_ordinary_files_have_one_reading() -> None:
    """Ordinary safetensors files have only one reading. ``tests/long`` checks a hundred thousand of them."""
    random = Random(0)
    refused = [other_reading(ordinary_safetensors(random)) for _ in range(500)]
    assert not any(refused)


@pytest.mark.parametrize("save", [saved, legacy, lambda value: pickle.dumps(value)])
def test_ordinary_files_of_torch_have_one_reading(save: Callable[[object], bytes], tmp_path: Path) -> None:
    """Ordinary files of torch have only one reading, also with byte strings and weights that contain zip signatures."""
    random = Random(1)
    for i in range(30):
        stray = b"PK\5\6" + random.randbytes(random.randrange(60)) + b"PK\1\2" + bytes(random.randrange(60))
        weights = torch.frombuffer(bytearray(stray + random.randbytes(200)), dtype=torch.uint8)
        path = tmp_path / f"{i}.pt"
        path.write_bytes(save({"w": weights, "x": stray, "s": "PK\3\4", "n": list(range(i))}))
        ckptconv.inspect(path)
