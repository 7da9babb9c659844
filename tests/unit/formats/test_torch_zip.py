"""torch's zip format, read and written: what real and hostile archives become, and where
every byte of the output comes from.
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Literal
from ckptconv.checkpoint.model import Checkpoint, TensorInfo
from ckptconv.conversion.plan import make_plan
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits
from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.formats import opening
from tests.support.hostile_bytes import integer, pickle_of, storage, tensor, text, torch_zip_of
from tests.support.judge import assert_same, tags_of

LAYOUT_RECORDS = {".format_version", ".storage_alignment", ".data/serialization_id"}
OBJECT = {"a": torch.arange(5.0), "b": torch.arange(7, dtype=torch.uint8), "note": "x"}

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that writes an archive of a pickle and records, by Python's own writer."""

    def write(pickle: bytes, records: dict[str, bytes] | None = None, *, deflate: bool = False) -> Path:
        path = tmp_path / "made.pt"
        path.write_bytes(torch_zip_of(pickle, records, zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED))
        return path

    return write


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of torch's own."""
    path = tmp_path / "saved.pt"
    torch.save(OBJECT, path)
    return path


def read(path: Path) -> Checkpoint:
    with Source(path) as source:
        return opening.read(source)


def infos(path: Path) -> list[TensorInfo]:
    return list(read(path).tensors.values())


def records_of(path: Path) -> dict[str, bytes]:
    """The records below the root."""
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def rezipped(path: Path, change: dict[str, bytes | None], *, method: int = zipfile.ZIP_STORED) -> Path:
    """PATH written again by Python's zipfile, some records changed, added or (None) left out."""
    out = path.with_name("rezipped.pt")
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in {**records_of(path), **change}.items():
            if data is not None:
                archive.writestr(f"{path.stem}/{name}", data)
    return out


def convert(path: Path, **kwargs: object) -> Path:
    out = path.with_name("out.pt")
    ckptconv.convert(path, out, force=True, **kwargs)  # type: ignore[arg-type]
    return out


def assert_sound(path: Path) -> None:
    """Checksums right, storages aligned as torch finds them, no layout record, and every way to load agrees."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    reader = torch._C.PyTorchFileReader(str(path))
    names = reader.get_all_records()
    assert not LAYOUT_RECORDS.intersection(names)
    assert [name for name in names if name.startswith("data/") and reader.get_record_offset(name) % 64] == []
    plain = torch.load(path, map_location="cpu")
    assert_same(torch.load(path, map_location="cpu", mmap=True), plain)
    with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": True}):
        assert_same(torch.load(path, map_location="cpu"), plain)


# Real files


def test_a_real_file_is_read_and_retagged(saved: Path) -> None:
    """torch 2.13's own: tensors as they were, tags as asked."""
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
    """Spaces, dots, other letters: the folder in the output is that of the source, whatever the output's name."""
    path = tmp_path / f"{stem}.pt"
    torch.save(OBJECT, path)
    out = convert(path)
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(out) as after:
        roots = [{name.split("/")[0] for name in archive.namelist()} for archive in (before, after)]
    assert roots[0] == roots[1]
    assert len(roots[0]) == 1
    assert_sound(out)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_another_zip_tool_wrote_comes_out_aligned(saved: Path, method: int) -> None:
    """Unaligned or deflated, without descriptors: stored and aligned to 64 bytes in the output."""
    source = rezipped(saved, {}, method=method)
    out = convert(source, map_location="mps")
    assert_sound(out)
    assert_same(tags_of(out)[0], OBJECT)
    assert {n: d for n, d in records_of(out).items() if n not in ("data.pkl", *LAYOUT_RECORDS)} == {
        n: d for n, d in records_of(saved).items() if n not in ("data.pkl", *LAYOUT_RECORDS)
    }


def test_layout_records_are_left_out_and_others_passed_through(saved: Path) -> None:
    """What describes torch's layout goes; a record that nobody knows stays, byte for byte, without being looked at."""
    assert set(records_of(saved)) >= LAYOUT_RECORDS
    unknown = {"extra/readme.txt": b"hello", "code/x.py": b"\0\xff" * 99, "empty": b""}
    out = convert(rezipped(saved, {**unknown}))  # type: ignore[arg-type]
    after = records_of(out)
    assert LAYOUT_RECORDS.isdisjoint(after)
    assert {name: after[name] for name in unknown} == unknown


# Where the bytes come from


@pytest.mark.parametrize("devices", ["cuda:1", "cpu", "privateuseone:7"])
def test_the_tail_is_one_range_shifted_by_whole_blocks(tmp_path: Path, devices: str) -> None:
    """Header and pickle, one range of the source up to the last record that stays, and the directory: nothing else."""
    path = tmp_path / "m.pt"
    torch.save({f"w{i}": torch.full((100 * i,), float(i)) for i in range(30)}, path)
    with Source(path) as source:
        file = make_plan(opening.read(source), tmp_path / "out.pt", Edits(devices=to_devices(devices))).files[0]
    head, tail, directory = file.pieces
    assert isinstance(head, Literal) and isinstance(tail, ByteRange) and isinstance(directory, Literal)
    assert (head.length - tail.offset) % 4096 == 0
    assert file.size == head.length + tail.length + directory.length
    last = zipfile.ZipFile(path).getinfo("m/.data/serialization_id").header_offset
    assert tail.offset + tail.length == last


def test_the_output_depends_on_the_input_alone(saved: Path) -> None:
    """Two runs in processes with other hash seeds, and one here, write the same bytes; none of them needs torch."""
    program = (
        "import sys, ckptconv; ckptconv.convert(*sys.argv[1:], map_location='cuda:1'); "
        "raise SystemExit('torch' in sys.modules)"
    )
    outs = [saved.with_name(f"{seed}.pt") for seed in (0, 4711)]
    for seed, out in zip((0, 4711), outs, strict=True):
        command = [sys.executable, "-c", program, str(saved), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})
    here = convert(saved, map_location="cuda:1").read_bytes()
    assert [out.read_bytes() for out in outs] == [here, here]


# Checksums


def without_checksums(path: Path) -> Path:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(OBJECT, path)
    finally:
        torch.serialization.set_crc32_options(before)
    return path


def test_a_file_without_checksums_stays_without(tmp_path: Path) -> None:
    """torch can be told to leave them out: read with a note, and written with zeros everywhere, the pickle's too."""
    path = without_checksums(tmp_path / "m.pt")
    assert any("no checksums" in note for note in read(path).notes)
    out = convert(path, map_location="cuda:0")
    with zipfile.ZipFile(out) as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
    assert_same(tags_of(out)[0], OBJECT)


def with_crc(path: Path, name: str, crc: int) -> Path:
    """PATH, made by zipfile, with another checksum for the record NAME in both headers."""
    data = bytearray(path.read_bytes())
    local = zipfile.ZipFile(io.BytesIO(data)).getinfo(name).header_offset
    central = data.rindex(b"PK\x01\x02", 0, data.rindex(name.encode()))
    struct.pack_into("<I", data, local + 14, crc)
    struct.pack_into("<I", data, central + 16, crc)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("crc", [0, 1])
@pytest.mark.parametrize("name", ["data.pkl", "byteorder", "version"])
@pytest.mark.parametrize("deflate", [False, True])
def test_a_wrong_checksum_of_what_is_read_is_malformed(make: Make, crc: int, name: str, deflate: bool) -> None:
    """A zero among others is wrong as well."""
    path = make(pickle_of(tensor(storage())), {"data/0": bytes(16), "byteorder": b"little"}, deflate=deflate)
    assert len(infos(path)) == 1
    with pytest.raises(MalformedError, match=r"checksum"):
        read(with_crc(path, f"made/{name}", crc))


def test_deflated_records_without_checksums_are_read(make: Make) -> None:
    """All zero: nothing to check against."""
    path = make(pickle_of(tensor(storage())), deflate=True)
    for name in ("data.pkl", "version", "data/0"):
        with_crc(path, f"made/{name}", 0)
    assert_same(torch.load(convert(path)), torch.load(path))


def test_a_wrong_checksum_of_a_storage_is_carried_over(make: Make) -> None:
    """Its bytes are not read: the fault is as visible in the output as it was in the source."""
    out = convert(with_crc(make(pickle_of(tensor(storage()))), "made/data/0", 1))
    assert zipfile.ZipFile(out).testzip() == "made/data/0"


# Deflate


def test_a_pickle_that_inflates_more_than_a_hundredfold_is_a_limit(make: Make) -> None:
    """A bomb: said from the directory alone."""
    path = make(pickle_of(text("a" * 20_000_000)), deflate=True)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="too large"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_zeros_in_a_storage_may_deflate_a_thousandfold(tmp_path: Path) -> None:
    """Deflate's own ratio is no attack where the size is the declared one."""
    path = tmp_path / "m.pt"
    torch.save(torch.zeros(1 << 20), path)
    loaded = torch.load(convert(rezipped(path, {}, method=zipfile.ZIP_DEFLATED)))
    assert loaded.shape == (1 << 20,)
    assert not loaded.any()


@pytest.mark.parametrize("size", [0, 15, 17, 1 << 20])
def test_a_storage_that_inflates_to_another_size_is_malformed(make: Make, size: int) -> None:
    """The headers promise 16 bytes, as the pickle does; the stream holds fewer or more."""
    path = make(pickle_of(tensor(storage())), {"data/0": b"\1" * size + b"\2"}, deflate=True)
    data = bytearray(path.read_bytes())
    local = zipfile.ZipFile(path).getinfo("made/data/0").header_offset
    struct.pack_into("<I", data, local + 22, 16)
    struct.pack_into("<I", data, data.rindex(b"PK\x01\x02", 0, data.rindex(b"made/data/0")) + 24, 16)
    path.write_bytes(data)
    if size == 15:
        assert torch.load(convert(path))[0].shape == (4,)
        return
    with pytest.raises(MalformedError, match="another size"):
        convert(path)
    assert not path.with_name("out.pt").exists()


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_a_deflate_stream_without_its_end_is_malformed(make: Make, name: str) -> None:
    """All the bytes are there, but the stream says that more come."""
    records = {"data.pkl": pickle_of(tensor(storage())), "data/0": bytes(range(16))}
    plain = records[name]
    deflater = zlib.compressobj(wbits=-15)
    records[name] = deflater.compress(plain) + deflater.flush(zlib.Z_SYNC_FLUSH)
    path = make(records["data.pkl"], {"data/0": records["data/0"]})
    data = bytearray(path.read_bytes())
    local = zipfile.ZipFile(path).getinfo(f"made/{name}").header_offset
    central = data.rindex(b"PK\x01\x02", 0, data.rindex(f"made/{name}".encode()))
    for at in (local + 8, central + 10):
        struct.pack_into("<H4xIII", data, at, 8, zlib.crc32(plain), len(records[name]), len(plain))
    path.write_bytes(data)
    with pytest.raises(MalformedError, match="deflated record"):
        convert(path)


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_a_damaged_deflate_stream_is_malformed(make: Make, name: str) -> None:
    """Of the pickle and of a storage."""
    path = make(pickle_of(tensor(storage())), {"data/0": bytes(range(16))}, deflate=True)
    data = bytearray(path.read_bytes())
    data[zipfile.ZipFile(path).getinfo(f"made/{name}").header_offset + 30 + len(f"made/{name}")] |= 0b111
    path.write_bytes(data)
    with pytest.raises(MalformedError, match="deflated record"):
        convert(path)


# Byte order


def test_big_endian_is_kept(saved: Path) -> None:
    """The record goes through, so torch swaps in the output what it swaps in the source."""
    source = rezipped(saved, {"byteorder": b"big"})
    out = convert(source, map_location="cpu")
    assert records_of(out)["byteorder"] == b"big"
    assert_same(torch.load(out), torch.load(source))
    assert not torch.equal(torch.load(out)["a"], OBJECT["a"])  # type: ignore[arg-type]


def test_no_byte_order_is_little(saved: Path) -> None:
    """Files from before torch wrote it."""
    out = convert(rezipped(saved, {"byteorder": None}))
    assert "byteorder" not in records_of(out)
    assert_same(torch.load(out), OBJECT)


@pytest.mark.parametrize("order", [b"", b"Little", b"little\n", b"middle"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_unknown_byte_order_is_malformed(saved: Path, order: bytes, method: int) -> None:
    """Neither of the two, letter by letter."""
    with pytest.raises(MalformedError, match="byte order is unknown"):
        read(rezipped(saved, {"byteorder": order}, method=method))


@pytest.mark.parametrize("name", ["byteorder", "version"])
def test_a_long_record_where_a_word_is_expected_is_malformed(saved: Path, name: str) -> None:
    """It is not even read."""
    with pytest.raises(MalformedError, match="too long"):
        read(rezipped(saved, {name: b"3" * 65}))


# Records and keys


def test_a_storage_that_nothing_uses_is_left_out_and_named(make: Make) -> None:
    """The others get keys from 0 on, in the order of first use, in the pickle and in the archive."""
    records = {f"data/{key}": bytes([n]) * 16 for n, key in enumerate(("7", "x", "3", "zz"))}
    path = make(pickle_of(tensor(storage("3")), tensor(storage("7", tag="cuda:0")), tensor(storage("3"))), records)
    out = path.with_name("out.pt")
    report = ckptconv.convert(path, out)
    assert [(left.path, left.nbytes) for left in report.left_behind] == [("data/x", 16), ("data/zz", 16)]
    after = records_of(out)
    assert [name for name in after if name.startswith("data/")] == ["data/1", "data/0"]
    assert (after["data/0"], after["data/1"]) == (records["data/3"], records["data/7"])
    assert list(read(out).storages) == ["0", "1"]
    assert_sound(out)
    assert_same(*(torch.load(p, map_location="cpu") for p in (path, out)))
    assert tags_of(out)[1] == ["cpu", "cuda:0"]


def test_keys_stay_where_every_storage_is_used(make: Make) -> None:
    """No renumbering for its own sake."""
    out = convert(make(pickle_of(tensor(storage("model w.1"))), {"data/model w.1": bytes(16)}))
    assert "data/model w.1" in records_of(out)


def test_planning_twice_gives_the_same_pieces(make: Make) -> None:
    """The renumbering edits the graph; doing it again changes nothing."""
    path = make(pickle_of(tensor(storage("5"))), {"data/5": bytes(16), "data/6": b""})
    with Source(path) as source:
        checkpoint = opening.read(source)
        first, second = (opening.torch_zip.layout(checkpoint, path).files[0] for _ in range(2))
        fresh = opening.torch_zip.layout(opening.read(source), path).files[0]
    assert first == second == fresh


@pytest.mark.parametrize(
    "name", ["DATA.pkl", "Byteorder", "VERSION", "Data/0", "DATA/9", ".Format_Version", ".data/SERIALIZATION_ID"]
)
def test_a_name_that_is_torchs_but_for_case_is_malformed(make: Make, name: str) -> None:
    """torch would read it as its own; here it would be an unknown record, passed through."""
    records = {} if name == "Data/0" else {"data/0": bytes(16)}
    path = make(pickle_of(tensor(storage())), {**records, name: b"1"})
    with pytest.raises(MalformedError, match=r"case"):
        read(path)


@pytest.mark.parametrize("key", ["1", "00", "", "../0", "../../etc", "../data.pkl", "./0", "data/0", "0\0", "\udc80"])
def test_a_key_without_a_record_is_malformed(make: Make, key: str) -> None:
    """Nothing is normalised, and nothing outside ``data/`` can be named."""
    with pytest.raises(MalformedError, match="no such storage"):
        read(make(pickle_of(tensor(storage(key)))))


def test_a_key_of_more_than_64_kib_is_malformed(make: Make) -> None:
    """No zip member can have such a name."""
    with pytest.raises(MalformedError, match="persistent id has parts of wrong types"):
        read(make(pickle_of(tensor(storage("ä" * 40_000)))))


def test_a_key_that_nearly_matches_is_malformed(make: Make) -> None:
    """torch finds the record of another case."""
    path = make(pickle_of(tensor(storage("Weight"))), {"data/weight": bytes(16)})
    assert torch.load(path)[0].shape == (4,)
    with pytest.raises(MalformedError, match="no such storage"):
        read(path)


@pytest.mark.parametrize("size", [0, 15, 17, 1000])
def test_a_record_of_another_size_is_malformed(make: Make, size: int) -> None:
    """Shorter or longer than the elements that the pickle claims."""
    with pytest.raises(MalformedError, match="another size"):
        read(make(pickle_of(tensor(storage())), {"data/0": bytes(size)}))


@pytest.mark.parametrize("other", [{"numel": integer(3)}, {"tag": "cuda:0"}, {"cls": "DoubleStorage"}])
def test_one_key_described_in_two_ways_is_malformed(make: Make, other: dict[str, object]) -> None:
    """Two sizes in bytes, or two tags."""
    with pytest.raises(MalformedError, match="described in two ways"):
        read(make(pickle_of(storage(), storage(**other))))  # type: ignore[arg-type]


def test_one_key_under_two_classes_is_malformed(make: Make) -> None:
    """torch writes no such file, and reads the second reference as the first one's class: two readings."""
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="different types"):
        torch.save([x, x.view(torch.int32)], io.BytesIO())
    path = make(pickle_of(tensor(storage()), tensor(storage(cls="IntStorage"))))
    assert {each.dtype for each in torch.load(path, weights_only=True)} == {torch.float32}
    with pytest.raises(MalformedError, match=r"described in two ways .*FloatStorage, got IntStorage"):
        read(path)


@pytest.mark.parametrize(
    "numel",
    [integer(-1), b"G" + struct.pack(">d", 4.0), b"\x88", integer(1 << 62), integer(1 << 64), b"N", text("4")],
    ids=["negative", "float", "bool", "2^62", "2^64", "None", "text"],
)
def test_a_number_of_elements_that_is_no_count_is_malformed(make: Make, numel: bytes) -> None:
    """Nothing is converted and nothing allocated."""
    with pytest.raises(MalformedError, match="wrong types"):
        read(make(pickle_of(storage(numel=numel))))


@pytest.mark.parametrize(
    "id_",
    [text("0"), b"N", b")", text("storage") + b"\x85", storage()[:-2] + b"NtQ"[:-1], storage(cls="Nothing")[:-1]],
    ids=["text", "None", "empty", "one part", "six parts", "unknown class"],
)
def test_a_persistent_id_of_another_form_is_malformed(make: Make, id_: bytes) -> None:
    """Not five parts, or no storage class."""
    with pytest.raises(MalformedError, match="persistent id"):
        read(make(pickle_of(id_ + b"Q")))


# Tensors on storages


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
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
    ],
)
def test_a_tensor_outside_its_storage_is_malformed(
    make: Make, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    """Sizes, strides and offsets that reach beyond the four elements, are negative, or overflow 64 bits."""
    with pytest.raises(MalformedError, match=r"at \[0\]: a tensor"):
        read(make(pickle_of(tensor(storage(), shape, stride, offset))))


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((4,), (1,), 0), ((2, 2), (2, 1), 0), ((), (), 3), ((0, 9), (9, 1), 0), ((2, 9), (3, 0), 0)],
)
def test_a_tensor_within_its_storage_is_read(
    make: Make, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    """Up to the last element, none, or one element many times; torch agrees."""
    path = make(pickle_of(tensor(storage(), shape, stride, offset)))
    (info,) = infos(path)
    loaded = torch.load(path)[0]
    assert (info.shape, info.stride, info.offset) == (tuple(loaded.shape), loaded.stride(), loaded.storage_offset())


@pytest.mark.parametrize("rank", [64, 65, 10_000])
def test_more_than_64_dimensions_are_a_limit(make: Make, rank: int) -> None:
    """torch's own bound."""
    path = make(pickle_of(tensor(storage(), (1,) * rank, (1,) * rank)))
    if rank == 64:
        assert len(infos(path)[0].shape) == 64
        return
    with pytest.raises(LimitError, match="too many dimensions"):
        read(path)


def test_a_huge_view_of_a_small_storage_is_shown(make: Make) -> None:
    """4 TiB of stride 0 on 16 bytes: described and converted, never made."""
    path = make(pickle_of(tensor(storage(), (1 << 20, 1 << 20), (0, 0))))
    tracemalloc.start()
    try:
        (info,) = infos(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert info.nbytes == 4 << 40
    assert info.storage is not None and info.storage.nbytes == 16
    assert convert(path, map_location="cuda:0").stat().st_size < 10_000


# What is no checkpoint


@pytest.mark.parametrize(
    ("record", "match"),
    [("attributes.pkl", "TorchScript"), ("archive_format", r"\.pt2")],
)
def test_programs_are_refused_in_plain_words(make: Make, record: str, match: str) -> None:
    """What it is, and what loads it."""
    with pytest.raises(UnsupportedError, match=match) as caught:
        read(make(pickle_of(), {record: b"N."}))
    assert "torch." in str(caught.value.hint)


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    """No pickle of torch's in it."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<x/>")
    with pytest.raises(UnsupportedError, match=r"none of torch's: word/document\.xml .*FOLDER/data\.pkl"):
        read(path)


@pytest.mark.parametrize(
    ("head", "what", "hint"),
    [
        (b"", "the file is empty", "download or copy it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer", "lfs pull"),
        (b"<!doctype HTML><html>", "an HTML page", "download the file itself"),
        (b"\n  <html>", "an HTML page", "download the file itself"),
        (b"GGUF\x03\0\0\0", "a GGUF file", "gguf"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "h5py"),
        (b"\x00\x01\xfe\xff", "no checkpoint that this version reads", ""),
    ],
)
def test_other_files_are_named_in_plain_words(tmp_path: Path, head: bytes, what: str, hint: str) -> None:
    """What it is instead, and the next step."""
    path = tmp_path / "x.pt"
    path.write_bytes(head)
    with pytest.raises(UnsupportedError, match=what) as caught:
        read(path)
    assert hint in (caught.value.hint or "")
    assert "\n" not in str(caught.value)


def test_bytes_behind_the_pickle_are_malformed(make: Make) -> None:
    """torch ignores what follows STOP."""
    for tail, deflate in itertools.product((b"x", pickle_of()), (False, True)):
        with pytest.raises(MalformedError, match="behind the end of the pickle"):
            read(make(pickle_of() + tail, deflate=deflate))
