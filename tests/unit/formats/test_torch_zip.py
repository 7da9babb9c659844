"""Reading and writing torch's zip format: real and hostile archives, and the source of every byte of the output."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Literal
from ckptconv.conversion.plan import make_plan
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits
from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.formats import opening
from tests.support.archives import records_of, rezip, rezipped, without_crc32
from tests.support.command import Command
from tests.support.conversions import loaded, read, refused, run_without_torch, saved_at, unreadable
from tests.support.hostile_bytes import (
    data_of,
    in_headers,
    integer,
    patched,
    pickle_of,
    storage,
    tensor,
    text,
    torch_zip_of,
)
from tests.support.hostile_bytes import saved as saved_bytes
from tests.support.judge import assert_same, tags_of
from tests.support.memory import memory_below
from tests.support.writers import calculated_offsets

METHODS = {"stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED}
LAYOUT_RECORDS = {".format_version", ".storage_alignment", ".data/serialization_id"}
OBJECT = {"a": torch.arange(5.0), "b": torch.arange(7, dtype=torch.uint8), "note": "x"}
#: The pickle of a checkpoint with one tensor of four numbers.
FOUR_FLOATS = pickle_of(tensor(storage()))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return the path for the archives that tests write."""
    return tmp_path / "made.pt"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a file that torch has saved."""
    return saved_at(tmp_path / "saved.pt", OBJECT)


def convert(path: Path, **options: object) -> Path:
    out = path.with_name("out.pt")
    ckptconv.convert(path, out, force=True, **options)  # type: ignore[arg-type]
    return out


def assert_sound(path: Path) -> None:
    """Check the output at `path`: its checksums, the alignment of its storages, and that all ways to load it agree."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    reader = torch._C.PyTorchFileReader(str(path))
    names = reader.get_all_records()
    assert not LAYOUT_RECORDS.intersection(names)
    assert [name for name in names if name.startswith("data/") and reader.get_record_offset(name) % 64] == []
    plain = torch.load(path, map_location="cpu")
    assert_same(torch.load(path, map_location="cpu", mmap=True), plain)
    with calculated_offsets():
        assert_same(torch.load(path, map_location="cpu"), plain)


def with_crc(data: bytes, crc: int, *names: str) -> bytes:
    """Return `data` with the checksum `crc` for the records `names`."""
    for name in names:
        data = in_headers(data, f"made/{name}", {"crc": crc})
    return data


# Real files


def test_a_real_file_is_read_and_retagged(saved: Path) -> None:
    """A file saved by torch is read with its tensors, without notes. The output has the requested tags."""
    checkpoint = read(saved)
    assert [(info.path, info.dtype, info.shape) for info in checkpoint.tensors.values()] == [
        ("a", "float32", (5,)),
        ("b", "uint8", (7,)),
    ]
    assert checkpoint.notes == []
    out = convert(saved, map_location="cuda:1")
    assert_sound(out)
    loaded, tags = tags_of(out)
    assert_same(loaded, OBJECT)
    assert tags == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize("stem", ["my model", "epoch=3.val=0.1", "ünï", "a" * 200])
def test_the_roots_name_is_kept(tmp_path: Path, stem: str) -> None:
    """The name of the archive's root folder is kept, also with spaces, dots and non-ASCII letters. The name of the
    output file does not matter.
    """
    path = saved_at(tmp_path / f"{stem}.pt", OBJECT)
    out = convert(path)
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(out) as after:
        roots = [{name.split("/")[0] for name in archive.namelist()} for archive in (before, after)]
    assert roots[0] == roots[1]
    assert len(roots[0]) == 1
    assert_sound(out)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_records_of_other_zip_tools_are_aligned(saved: Path, method: int) -> None:
    """Records that another zip tool wrote, unaligned or deflated, are stored and aligned to 64 bytes in the output. The
    records that describe torch's layout are removed. Unknown records are copied byte for byte.
    """
    before = records_of(saved)
    assert set(before) >= LAYOUT_RECORDS
    unknown = {"extra/readme.txt": b"hello", "code/x.py": b"\0\xff" * 99, "empty": b""}
    out = convert(rezip(saved, saved, unknown, method=method), map_location="mps")
    assert_sound(out)
    assert_same(tags_of(out)[0], OBJECT)
    after = records_of(out)
    assert after.pop("data.pkl") != before.pop("data.pkl")
    assert after == {name: data for name, data in before.items() if name not in LAYOUT_RECORDS} | unknown


# The source of the bytes


@pytest.mark.parametrize("devices", ["cuda:1", "cpu", "privateuseone:7"])
def test_the_tail_is_one_range_shifted_by_whole_blocks(made: Path, devices: str) -> None:
    """The output consists of a new header and pickle, one range of the source up to the last record that is kept, and a
    new directory. The range is shifted by a multiple of 4096 bytes.
    """
    torch.save({f"w{i}": torch.full((100 * i,), float(i)) for i in range(30)}, made)
    with Source(made) as source:
        file = make_plan(opening.read(source), made.with_name("out.pt"), Edits(devices=to_devices(devices))).files[0]
    head, tail, directory = file.pieces
    assert isinstance(head, Literal) and isinstance(tail, ByteRange) and isinstance(directory, Literal)
    assert (head.length - tail.offset) % 4096 == 0
    assert file.size == head.length + tail.length + directory.length
    last = zipfile.ZipFile(made).getinfo("made/.data/serialization_id").header_offset
    assert tail.offset + tail.length == last


def test_the_output_depends_only_on_the_input(saved: Path) -> None:
    """Processes with other hash seeds, and without torch, write the same bytes."""
    here = convert(saved, map_location="cuda:1").read_bytes()
    for seed in ("0", "4711"):
        out = saved.with_name(f"{seed}.pt")
        program = "import ckptconv; ckptconv.convert(*sys.argv[1:], map_location='cuda:1')"
        run_without_torch(program, saved, out, PYTHONHASHSEED=seed)
        assert out.read_bytes() == here


# Checksums


def test_a_file_without_checksums_stays_without(made: Path) -> None:
    """A file that torch wrote without checksums is read with a note. Every checksum of the output is zero, also that of
    the new pickle.
    """
    with without_crc32():
        torch.save(OBJECT, made)
    assert any("no checksums" in note for note in read(made).notes)
    out = convert(made, map_location="cuda:0")
    with zipfile.ZipFile(out) as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
    assert_same(tags_of(out)[0], OBJECT)


def test_deflated_records_without_checksums_are_read(made: Path) -> None:
    """Deflated records whose checksums are all zero are read without a check."""
    deflated = torch_zip_of(FOUR_FLOATS, method=zipfile.ZIP_DEFLATED)
    made.write_bytes(with_crc(deflated, 0, "data.pkl", "version", "data/0"))
    assert_same(torch.load(convert(made)), torch.load(made))


def test_a_wrong_checksum_of_a_storage_is_carried_over(made: Path) -> None:
    """The bytes of a storage are not read, so its wrong checksum is copied. The output shows the fault as the source
    does.
    """
    made.write_bytes(with_crc(torch_zip_of(FOUR_FLOATS), 1, "data/0"))
    assert zipfile.ZipFile(convert(made)).testzip() == "made/data/0"


# Deflate


def test_a_pickle_that_inflates_more_than_a_hundredfold_is_a_limit(made: Path) -> None:
    """A pickle that inflates more than a hundredfold is refused without inflating it."""
    made.write_bytes(torch_zip_of(pickle_of(text("a" * 20_000_000)), method=zipfile.ZIP_DEFLATED))
    with memory_below(1 << 20):
        unreadable(made, LimitError, "too large")


def test_zeros_in_a_storage_may_deflate_a_thousandfold(made: Path) -> None:
    """A storage of zeros may inflate a thousandfold, because its size is the declared one."""
    made.write_bytes(rezipped(saved_bytes(torch.zeros(1 << 20)), method=zipfile.ZIP_DEFLATED))
    loaded = torch.load(convert(made))
    assert loaded.shape == (1 << 20,)
    assert not loaded.any()


def test_a_storage_that_inflates_to_the_size_that_its_headers_promise_is_sound(made: Path) -> None:
    """A storage is valid if it inflates to the size in its headers and in the pickle."""
    made.write_bytes(deflated_storage(16))
    assert torch.load(convert(made))[0].shape == (4,)


def deflated_storage(size: int) -> bytes:
    """Return a checkpoint whose storage inflates to `size` bytes. Its headers and its pickle declare 16 bytes."""
    data = torch_zip_of(FOUR_FLOATS, {"data/0": b"\1" * (size - 1) + b"\2"}, method=zipfile.ZIP_DEFLATED)
    return in_headers(data, "made/data/0", {"size": 16})


def without_an_end(name: str) -> bytes:
    """Return a checkpoint in which the deflate stream of the record `name` contains all bytes but no last block."""
    records = {"data.pkl": FOUR_FLOATS, "data/0": bytes(range(16))}
    plain = records[name]
    deflater = zlib.compressobj(wbits=-15)
    stream = deflater.compress(plain) + deflater.flush(zlib.Z_SYNC_FLUSH)
    records[name] = stream
    data = torch_zip_of(records["data.pkl"], {"data/0": records["data/0"]})
    values = {"method": 8, "crc": zlib.crc32(plain), "stored size": len(stream), "size": len(plain)}
    return in_headers(data, f"made/{name}", values)


def with_damaged_stream(name: str) -> bytes:
    """Return a checkpoint in which the deflate stream of the record `name` begins with a block of an invalid type."""
    data = torch_zip_of(FOUR_FLOATS, method=zipfile.ZIP_DEFLATED)
    at = data_of(data, f"made/{name}")
    return patched(data, at, "<B", data[at] | 0b111)


#: Archives that are refused before an output appears, and a part of the error.
BAD_STREAMS = {
    **{f"a storage of {size} bytes for 16": (deflated_storage(size), "another size") for size in (1, 18, 1 << 20)},
    **{f"{name} without its end": (without_an_end(name), "compressed record") for name in ("data.pkl", "data/0")},
    **{f"{name} is damaged": (with_damaged_stream(name), "deflated record") for name in ("data.pkl", "data/0")},
}


@pytest.mark.parametrize("kind", BAD_STREAMS)
def test_bad_deflate_streams(made: Path, kind: str) -> None:
    """An invalid deflate stream of the pickle or of a storage is refused before an output appears."""
    data, what = BAD_STREAMS[kind]
    made.write_bytes(data)
    refused(MalformedError, what, made, made.with_name("out.pt"))


# Byte order


def test_big_endian_is_kept(saved: Path) -> None:
    """The ``byteorder`` record is copied, so torch swaps the bytes of the output as it swaps those of the source."""
    rezip(saved, saved, {"byteorder": b"big"})
    out = convert(saved, map_location="cpu")
    assert records_of(out)["byteorder"] == b"big"
    assert_same(torch.load(out), torch.load(saved))
    assert not torch.equal(torch.load(out)["a"], OBJECT["a"])  # type: ignore[arg-type]


def test_no_byte_order_is_little(saved: Path) -> None:
    """A file without a ``byteorder`` record, as older versions of torch wrote it, is read as little-endian."""
    out = convert(rezip(saved, saved, {"byteorder": None}))
    assert "byteorder" not in records_of(out)
    assert_same(torch.load(out), OBJECT)


@pytest.mark.parametrize(
    "options", [{"verify": True}, {"format": "safetensors"}, {"format": "legacy"}, {"dtype": "bf16"}], ids=str
)
def test_storages_without_bytes_are_reported(tmp_path: Path, options: Any, command: Command) -> None:
    """A file that ``skip_data`` wrote without the bytes of its storages is reported by ``convert``, ``diff``,
    ``verify`` and ``load``. It is not an error.
    """
    path, out = tmp_path / "in.pt", tmp_path / "out"
    with torch.serialization.skip_data():
        torch.save({"a": torch.arange(3.0)}, path)
    said = "no storage has a checksum: torch.serialization.skip_data"
    assert any(said in note for note in ckptconv.convert(path, out, **options).notes)
    if "dtype" not in options:
        with pytest.warns(UserWarning, match=said) if "verify" in options else nullcontext():
            assert ckptconv.load(out)["a"].tolist() == [0, 0, 0]
        assert any(said in note for note in ckptconv.diff(path, out).notes)
    command("verify", path, out="warning: ")
    with pytest.warns(UserWarning, match=said):
        ckptconv.load(path)


@pytest.mark.parametrize("options", [{}, {"format": "safetensors"}, {"format": "legacy"}, {"dtype": "bf16"}], ids=str)
def test_assumed_little_endian_is_reported(tmp_path: Path, options: Any) -> None:
    """A note reports that little-endian is assumed if the conversion reads the numbers or the output format has a fixed
    byte order. A plain copy leaves the byte order open, without a note.
    """
    torch.save({"a": torch.arange(3.0)}, tmp_path / "in.pt")
    for said in (b"little", None):
        rezip(tmp_path / "in.pt", tmp_path / "in.pt", {"byteorder": said})
        report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "out", force=True, **options)
        noted = any("does not record its byte order" in note for note in report.notes)
        assert noted == (said is None and bool(options))


# Records and keys


def test_a_storage_that_nothing_uses_is_left_out_and_named(made: Path) -> None:
    """A storage that nothing uses is left behind and named in the report. The other storages get the keys 0, 1, ... in
    the order of their first use, in the pickle and in the archive.
    """
    records = {f"data/{key}": bytes([n]) * 16 for n, key in enumerate(("7", "x", "3", "zz"))}
    used = tensor(storage("3")), tensor(storage("7", tag="cuda:0")), tensor(storage("3"))
    made.write_bytes(torch_zip_of(pickle_of(*used), records))
    out = made.with_name("out.pt")
    report = ckptconv.convert(made, out)
    assert [(left.path, left.nbytes) for left in report.left_behind] == [("data/x", 16), ("data/zz", 16)]
    after = records_of(out)
    assert [name for name in after if name.startswith("data/")] == ["data/1", "data/0"]
    assert (after["data/0"], after["data/1"]) == (records["data/3"], records["data/7"])
    assert list(read(out).storages) == ["0", "1"]
    assert_sound(out)
    assert_same(*(torch.load(p, map_location="cpu") for p in (made, out)))
    assert tags_of(out)[1] == ["cpu", "cuda:0"]


def test_keys_stay_where_every_storage_is_used(made: Path) -> None:
    """The keys of storages are not changed if every storage is used."""
    made.write_bytes(torch_zip_of(pickle_of(tensor(storage("model w.1"))), {"data/model w.1": bytes(16)}))
    assert "data/model w.1" in records_of(convert(made))


def test_planning_twice_gives_the_same_pieces(made: Path) -> None:
    """Planning the same checkpoint twice gives the same pieces, although the first plan renumbers the keys in the
    graph.
    """
    made.write_bytes(torch_zip_of(pickle_of(tensor(storage("5"))), {"data/5": bytes(16), "data/6": b""}))
    with Source(made) as source:
        checkpoint = opening.read(source)
        first, second = (opening.torch_zip.layout(checkpoint, made).files[0] for _ in range(2))
        fresh = opening.torch_zip.layout(opening.read(source), made).files[0]
    assert first == second == fresh


def of_torch(change: dict[str, bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file saved by torch with the records in `change` replaced."""
    return rezipped(saved_bytes(OBJECT), change, method=method)


def torch_zip(*values: bytes) -> bytes:
    """Return a checkpoint of `values` with a record for the storage 0."""
    return torch_zip_of(pickle_of(*values))


#: Archives that are refused, and a part of the error.
MALFORMED: dict[str, tuple[bytes, str]] = {
    # for records that are read; a zero is also wrong if other checksums are not zero
    **{
        f"the checksum of {name} is {crc}, {how}": (
            with_crc(
                torch_zip_of(FOUR_FLOATS, {"data/0": bytes(16), "byteorder": b"little"}, method=method), crc, name
            ),
            "checksum",
        )
        for how, method in METHODS.items()
        for name in ("data.pkl", "byteorder", "version")
        for crc in (0, 1)
    },
    # must be exactly one of the two words
    **{
        f"the byte order {order!r}, {how}": (of_torch({"byteorder": order}, method), "byte order is unknown")
        for how, method in METHODS.items()
        for order in (b"", b"Little", b"little\n", b"middle")
    },
    # refused before it is read
    **{f"a long {name}": (of_torch({name: b"3" * 65}), "too long") for name in ("byteorder", "version")},
    # torch would read these as its own records, while ckptconv would copy them as unknown ones
    **{
        f"a record named {name}": (
            torch_zip_of(FOUR_FLOATS, {name: b"1"} if name == "Data/0" else {"data/0": bytes(16), name: b"1"}),
            "case",
        )
        for name in (
            "DATA.pkl",
            "Byteorder",
            "VERSION",
            "Data/0",
            "DATA/9",
            ".Format_Version",
            ".data/SERIALIZATION_ID",
        )
    },
    # keys are not normalized, and no key can name a record outside ``data/``
    **{
        f"no record for the key {key!r}": (torch_zip(tensor(storage(key))), "no such storage")
        for key in ("1", "00", "", "../0", "../../etc", "../data.pkl", "./0", "data/0", "0\0", "\udc80")
    },
    # no zip member can have such a name
    "a key of more than 64 KiB": (
        torch_zip(tensor(storage("ä" * 40_000))),
        "persistent id has parts of wrong types",
    ),
    # shorter or longer than the elements in the pickle need
    **{
        f"a record of {size} bytes for 16": (torch_zip_of(FOUR_FLOATS, {"data/0": bytes(size)}), "a different size")
        for size in (0, 15, 17, 1000)
    },
    "one key of two sizes": (torch_zip(storage(), storage(numel=integer(3))), "described in two ways"),
    "one key with two tags": (torch_zip(storage(), storage(tag="cuda:0")), "described in two ways"),
    "one key under two classes": (torch_zip(storage(), storage(cls="DoubleStorage")), "described in two ways"),
    # nothing is converted, and nothing is allocated
    **{
        f"so many elements: {kind}": (torch_zip(storage(numel=numel)), "wrong types")
        for kind, numel in {
            "negative": integer(-1),
            "float": b"G" + struct.pack(">d", 4.0),
            "bool": b"\x88",
            "2^62": integer(1 << 62),
            "2^64": integer(1 << 64),
            "None": b"N",
            "text": text("4"),
        }.items()
    },
    # not five parts, or not a storage class
    **{
        f"a persistent id: {kind}": (torch_zip(id_ + b"Q"), "persistent id")
        for kind, id_ in {
            "text": text("0"),
            "None": b"N",
            "empty": b")",
            "one part": text("storage") + b"\x85",
            "unknown class": storage(cls="Nothing")[:-1],
        }.items()
    },
    # sizes, strides and offsets that exceed the four elements, are negative, or overflow 64 bits
    **{
        f"a tensor of {shape}, {stride}, {offset}": (
            torch_zip(tensor(storage(), shape, stride, offset)),
            r"at \[0\]: a tensor",
        )
        for shape, stride, offset in (
            ((5,), (1,), 0),
            ((4,), (1,), 1),
            ((2,), (4,), 0),
            ((2, 2), (2, 2), 0),
            ((-1,), (1,), 0),
            ((4,), (-1,), 3),
            ((4,), (1,), -1),
            ((1 << 61,), (8,), 0),
            ((1 << 70,), (1,), 0),
            ((2,), (1 << 63,), 0),
            ((2, 2), (1,), 0),
            ((), (), 4),
        )
    },
    # torch ignores everything after STOP
    **{
        f"{tail!r} behind the pickle, {how}": (
            torch_zip_of(pickle_of() + tail, method=method),
            "after the end of the pickle",
        )
        for how, method in METHODS.items()
        for tail in (b"x", pickle_of())
    },
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_checkpoints(made: Path, kind: str) -> None:
    """A malformed checkpoint is refused with a MalformedError that describes the fault."""
    data, what = MALFORMED[kind]
    made.write_bytes(data)
    unreadable(made, MalformedError, what)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_bases_of_malformed_checkpoints_are_valid(made: Path, method: int) -> None:
    """The archives from which the malformed checkpoints are made are valid before they are changed."""
    records = {"data/0": bytes(16), "byteorder": b"little"}
    made.write_bytes(torch_zip_of(FOUR_FLOATS, records, method=method))
    assert len(read(made).tensors) == 1


def test_a_key_that_nearly_matches_is_malformed(made: Path) -> None:
    """A key that differs from its record only in case is refused, although torch finds the record."""
    made.write_bytes(torch_zip_of(pickle_of(tensor(storage("Weight"))), {"data/weight": bytes(16)}))
    assert torch.load(made)[0].shape == (4,)
    unreadable(made, MalformedError, "no such storage")


def test_one_key_under_two_classes_is_malformed(made: Path) -> None:
    """A storage that is used with two classes is refused. torch does not write such a file. Before 2.15 it reads both
    references with the class of the first, so the file has two readings.
    """
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="different types"):
        torch.save([x, x.view(torch.int32)], io.BytesIO())
    made.write_bytes(torch_zip(tensor(storage()), tensor(storage(cls="IntStorage"))))
    assert {each.dtype for each in torch.load(made, weights_only=True)} - {torch.int32} == {torch.float32}
    unreadable(made, MalformedError, r"described in two ways .*FloatStorage, got IntStorage")


# Tensors on storages


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((4,), (1,), 0),
        ((2, 2), (2, 1), 0),
        ((), (), 3),
        ((0, 9), (9, 1), 0),
        ((2, 9), (3, 0), 0),
        ((1,) * 64, (1,) * 64, 0),
    ],
)
def test_a_tensor_within_its_storage_is_read(
    made: Path, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    """A tensor that fits into its storage is read with the shape, stride and offset that torch finds. It may end at the
    last element, be empty, repeat elements, or have 64 dimensions.
    """
    made.write_bytes(torch_zip(tensor(storage(), shape, stride, offset)))
    (info,) = read(made).tensors.values()
    (theirs,) = loaded(made)
    assert (info.shape, info.stride, info.offset) == (tuple(theirs.shape), theirs.stride(), theirs.storage_offset())


@pytest.mark.parametrize("rank", [65, 10_000])
def test_more_than_64_dimensions_are_a_limit(made: Path, rank: int) -> None:
    """A tensor with more than 64 dimensions is refused, because torch has the same limit."""
    made.write_bytes(torch_zip(tensor(storage(), (1,) * rank, (1,) * rank)))
    unreadable(made, LimitError, "too many dimensions")


def test_a_huge_view_of_a_small_storage_is_shown(made: Path) -> None:
    """A tensor of 4 TiB with stride 0 on a storage of 16 bytes is described and converted without allocating its
    elements.
    """
    made.write_bytes(torch_zip(tensor(storage(), (1 << 20, 1 << 20), (0, 0))))
    with memory_below(4 << 20):
        (info,) = read(made).tensors.values()
    assert info.nbytes == 4 << 40
    assert info.storage is not None and info.storage.nbytes == 16
    assert convert(made, map_location="cuda:0").stat().st_size < 10_000


# Archives that are not checkpoints


@pytest.mark.parametrize(
    ("record", "match"),
    [("attributes.pkl", "TorchScript"), ("archive_format", r"\.pt2")],
)
def test_programs_are_refused_in_plain_words(made: Path, record: str, match: str) -> None:
    """A program archive is refused. The error names its kind, and the hint names the function that loads it."""
    made.write_bytes(torch_zip_of(pickle_of(), {record: b"N."}))
    assert "torch." in str(unreadable(made, UnsupportedError, match).hint)
