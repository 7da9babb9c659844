"""Plain pickles with tensors in them: read without running them, edited, written as pickles again or in another format;
pickle and torch are the judges.
"""

from __future__ import annotations

import io
import os
import pickle
import shlex
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange
from ckptconv.cli.main import main
from ckptconv.errors import (
    CkptconvError,
    DangerousError,
    InputError,
    LimitError,
    MalformedError,
    RefusedError,
    UnsupportedError,
)
from ckptconv.formats import opening, plain_pickle
from ckptconv.formats.torch_legacy import storage_file_head
from ckptconv.limits import Limits
from ckptconv.pickles.graph import Global
from ckptconv.pickles.parser import parse
from tests.support.judge import assert_same, tags_of
from tests.support.legacy_files import legacy_file
from tests.support.zoo import TAGS, ZOO, save, tagging

PROTOCOLS = range(6)
#: What of the zoo has no tensor in it.
WITHOUT_TENSORS = ("numpy_objects", "sets", "set_cycle", "qualified", "atoms")
#: What torch pickles and cannot load again: a storage that counts bytes.
UNTYPED = ("dtypes", "two_dtypes", "storages")
NESTED = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how a nested file starts
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2, dtype=torch.float16)}

Write = Callable[[bytes], Path]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what is deprecated or in beta


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes bytes to a pickle, and gives its path."""

    def write(data: bytes) -> Path:
        (tmp_path / "m.pkl").write_bytes(data)
        return tmp_path / "m.pkl"

    return write


def unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def tags(path: Path) -> list[str]:
    """The location tags in the nested files of the pickle at PATH, in their order."""
    with Source(path) as source:
        return [reference.storage.device for reference in opening.read(source).references]


def error_of(path: Path) -> InputError:
    with pytest.raises(InputError) as caught, Source(path) as source:
        opening.read(source)
    return caught.value


def dumped(name: str, protocol: int) -> bytes:
    """An object of the zoo as a plain pickle."""
    try:
        return pickle.dumps(ZOO[name](), protocol)
    except TypeError as error:  # __slots__ below protocol 2
        pytest.skip(str(error))


def tagged(obj: Any, tag: str = "cuda:0", protocol: int = 4) -> bytes:
    """OBJ as a machine with a GPU pickles it."""
    with tagging([tag]):
        return pickle.dumps(obj, protocol)


class Call:
    """Something that a pickle says as a call of FUNCTION with ARGS."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def storage_of(data: bytes) -> bytes:
    """The pickle of what torch loads from DATA."""
    return pickle.dumps([Call(torch.storage._load_from_bytes, data)], 4)


def nested_file(obj: Any, **kwargs: Any) -> bytes:
    """What ``torch.save`` writes for OBJ, in its older format unless KWARGS say otherwise."""
    stream = io.BytesIO()
    torch.save(obj, stream, **{"_use_new_zipfile_serialization": False, **kwargs})
    return stream.getvalue()


# Everything that people pickle


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", [name for name in ZOO if name not in (*WITHOUT_TENSORS, *UNTYPED)])
def test_what_pickle_loads_is_what_comes_out(write: Write, tmp_path: Path, name: str, protocol: int) -> None:
    """As a ``.pt`` for torch.load and as a pickle for pickle.load: the same object, in every protocol."""
    path = write(dumped(name, protocol))
    wanted = unpickled(path)
    assert ckptconv.convert(path, tmp_path / "dst.pt", allow_unsafe=True).formats == ("pickle", "torch zip")
    assert_same(wanted, torch.load(tmp_path / "dst.pt", weights_only=False))
    assert ckptconv.convert(path, tmp_path / "dst.pkl", allow_unsafe=True).formats == ("pickle", "pickle")
    assert_same(wanted, unpickled(tmp_path / "dst.pkl"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", UNTYPED)
def test_what_torch_cannot_load_again_comes_out_as_pt(write: Write, tmp_path: Path, name: str, protocol: int) -> None:
    """float8 and the like are pickled as storages of bytes, which pickle.load refuses: read, refused as a pickle, and
    as a ``.pt`` what they were.
    """
    path = write(dumped(name, protocol))
    with pytest.raises(AttributeError, match="dtype"):
        unpickled(path)
    with pytest.raises(RefusedError, match=r"a plain pickle that torch can read back cannot hold .*format='pt'"):
        ckptconv.convert(path, tmp_path / "dst.pkl")
    ckptconv.convert(path, tmp_path / "dst.pt")
    if name == "dtypes":
        assert_same(ZOO[name](), torch.load(tmp_path / "dst.pt"))
    else:
        assert torch.load(tmp_path / "dst.pt", weights_only=False).keys() == ZOO[name]().keys()


@pytest.mark.parametrize("name", WITHOUT_TENSORS)
def test_what_has_no_tensor_is_no_checkpoint(write: Write, name: str) -> None:
    """It is said what it is instead."""
    assert "a pickle without tensors" in str(error_of(write(dumped(name, 4))))


@pytest.mark.parametrize(
    # torch sets nested tensors and generators of its older format up before their bytes are there
    (
        "name",
        "older",
    ),
    [
        (name, older)
        for name in ZOO
        for older in (False, True)
        if name not in UNTYPED and not (older and name in ("nested", "generator"))
    ],
)
def test_any_checkpoint_becomes_a_pickle(tmp_path: Path, name: str, older: bool) -> None:
    """``--format pickle`` takes torch's formats too: pickle.load gives what torch.load
    gives, and what shares a storage shares it.
    """
    protocol = 4 if name in ("qualified", "set_cycle") else 2
    src, dst = tmp_path / "m.pt", tmp_path / "m.pkl"
    save(ZOO[name](), src, ["cpu"], pickle_protocol=protocol, _use_new_zipfile_serialization=not older)
    ckptconv.convert(src, dst, format="pickle", allow_unsafe=True)
    wanted = torch.load(src, weights_only=False)
    assert_same(wanted, unpickled(dst))
    if name not in WITHOUT_TENSORS:
        ckptconv.convert(dst, tmp_path / "back.pt", allow_unsafe=True)
        assert_same(wanted, torch.load(tmp_path / "back.pt", weights_only=False))


def test_a_safetensors_file_becomes_a_pickle(tmp_path: Path) -> None:
    """Ties included: one tensor under two names is one storage."""
    ckptconv.save({**WEIGHTS, "tied": WEIGHTS["a.bias"]}, tmp_path / "m.safetensors")
    ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "m.pkl", format="pickle")
    found = unpickled(tmp_path / "m.pkl")
    assert found["tied"].data_ptr() == found["a.bias"].data_ptr()
    assert_same({**WEIGHTS, "tied": WEIGHTS["a.bias"].detach()}, found)


def test_what_a_pickle_has_no_place_for_is_named(tmp_path: Path) -> None:
    """The texts of a safetensors file, the source code in a file of torch's older format."""
    save_file(WEIGHTS, tmp_path / "m.safetensors", {"note": "mine"})
    report = ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "m.pkl", format="pickle")
    assert [left.path for left in report.left_behind] == ["__metadata__/note"]
    torch.save(ZOO["module"](), tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "module.pkl", format="pickle")
    assert "the source code of tests.support.zoo.Net" in [left.path for left in report.left_behind]


def test_checksums_of_a_zip_are_checked_on_the_way(tmp_path: Path) -> None:
    """A pickle has no place for them, so damage has to be seen here."""
    torch.save({"w": torch.full((5000,), 7.25)}, tmp_path / "m.pt")
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[data.index(torch.full((2,), 7.25).numpy().tobytes())] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(MalformedError, match="checksum"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.pkl", format="pickle")
    assert not (tmp_path / "m.pkl").exists()


def test_what_the_source_called_is_no_longer_said(write: Write, tmp_path: Path) -> None:
    """A ``.pt`` of plain tensors needs no code but torch's own."""
    assert ckptconv.convert(write(pickle.dumps(WEIGHTS)), tmp_path / "dst.pt").notes == ()
    assert_same(WEIGHTS, torch.load(tmp_path / "dst.pt", weights_only=True))


def test_an_object_in_memory_becomes_a_pickle(tmp_path: Path) -> None:
    """``save(format='pickle')``."""
    ckptconv.save(WEIGHTS, tmp_path / "m.pkl", format="pickle")
    assert_same(WEIGHTS, unpickled(tmp_path / "m.pkl"))


def test_a_pkl_of_a_zip_is_a_zip(tmp_path: Path) -> None:
    """Only a plain pickle stays one without --format."""
    torch.save(WEIGHTS, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.pkl")
    assert zipfile.is_zipfile(tmp_path / "m.pkl")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_big_endian_numbers_are_turned_round(tmp_path: Path, compression: int) -> None:
    """A nested file is little-endian, whatever the zip was; compressed storages are inflated on the way."""
    big = tmp_path / "big.pt"
    stream = io.BytesIO()
    torch.save(WEIGHTS, stream)
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(big, "w", compression) as new:
        for info in old.infolist():
            data = old.read(info)
            if "/data/" in info.filename:
                width = 4 if info.filename.endswith("/0") else 2
                data = b"".join(data[i : i + width][::-1] for i in range(0, len(data), width))
            if info.filename.endswith("byteorder"):
                data = b"big"
            if "serialization_id" not in info.filename and "format_version" not in info.filename:
                new.writestr(info.filename, data)
    ckptconv.convert(big, tmp_path / "dst.pkl", format="pickle")
    assert_same(WEIGHTS, unpickled(tmp_path / "dst.pkl"))


# Devices


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_was_pickled_on_a_gpu_loads_without_one(write: Write, tmp_path: Path, protocol: int) -> None:
    """The tag stands in the nested file, where no map_location reaches it; ``to cpu`` does."""
    path = write(tagged(WEIGHTS, protocol=protocol))
    assert tags(path) == ["cuda:0", "cuda:0"]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            unpickled(path)
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cpu")
    assert_same(WEIGHTS, unpickled(tmp_path / "dst.pkl"))
    ckptconv.convert(path, tmp_path / "dst.pt", map_location={"cuda:0": "cpu"})
    assert_same(WEIGHTS, torch.load(tmp_path / "dst.pt"))


def test_each_storage_keeps_its_own_tag(write: Write, tmp_path: Path) -> None:
    """Five devices in one pickle; a map changes one of them, in a pickle and in a ``.pt``."""
    with tagging():
        path = write(pickle.dumps([torch.full((3,), float(i)) for i in range(5)]))
    assert tags(path) == [*TAGS]
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location={"mps": "cuda:2"})
    assert tags(tmp_path / "dst.pkl") == [tag if tag != "mps" else "cuda:2" for tag in TAGS]
    ckptconv.convert(path, tmp_path / "dst.pt", map_location={"mps": "cuda:2"})
    assert tags_of(tmp_path / "dst.pt")[1] == tags(tmp_path / "dst.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_there_and_back_is_where_it_was(write: Write, tmp_path: Path, protocol: int) -> None:
    """What ckptconv has written comes back byte for byte."""
    first, there, back = (tmp_path / name for name in ("first.pkl", "there.pkl", "back.pkl"))
    ckptconv.convert(write(pickle.dumps(ZOO["training"](), protocol)), first)
    ckptconv.convert(first, there, map_location="cuda:1")
    assert "cuda:1" in tags(there)
    ckptconv.convert(there, back, map_location="cpu")
    assert back.read_bytes() == first.read_bytes()


def test_the_protocol_stays(write: Write, tmp_path: Path) -> None:
    """Below 3 unpickling renames Python 2's modules, so the header is the source's, or 2."""
    for protocol in PROTOCOLS:
        ckptconv.convert(write(pickle.dumps(WEIGHTS, protocol)), tmp_path / "dst.pkl", force=True)
        assert (tmp_path / "dst.pkl").read_bytes()[:2] == bytes([0x80, max(protocol, 2)])


# Edits


def test_names_parts_and_safetensors(write: Write, tmp_path: Path) -> None:
    """The common mechanism serves: select, filters, prefixes, state dicts."""
    wrapped = {f"module.{name}": tensor for name, tensor in WEIGHTS.items()}
    path = write(tagged({"model": wrapped, "epoch": 3}))
    ckptconv.convert(path, tmp_path / "dst.safetensors", strip_prefix="module.")
    assert_same(WEIGHTS, load_file(tmp_path / "dst.safetensors"))
    ckptconv.convert(path, tmp_path / "dst.pkl", select="model", exclude="*.bias", map_location="cpu")
    assert_same({"module.a.weight": WEIGHTS["a.weight"]}, unpickled(tmp_path / "dst.pkl"))
    assert_same(WEIGHTS, ckptconv.load(path, "cpu", state_dict=True, strip_prefix="module."))
    with ckptconv.open(path) as opened:
        assert opened.format == "pickle"
        assert_same(WEIGHTS["a.weight"], opened.load("model/module.a.weight"))


def test_a_whole_model_of_unknown_classes(write: Write, tmp_path: Path) -> None:
    """Carried over inert: its class comes out again, and its tensors move."""
    model = ZOO["module"]()
    path = write(tagged(model))
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cpu")
    assert_same(model, unpickled(tmp_path / "dst.pkl"))


def test_a_dangerous_pickle_is_refused(write: Write, tmp_path: Path) -> None:
    """Outside of the nested files, as in any other checkpoint."""
    path = write(pickle.dumps([torch.ones(1), Call(os.system, "true")]))
    with pytest.raises(DangerousError, match="system"):
        ckptconv.convert(path, tmp_path / "dst.pkl")
    ckptconv.convert(path, tmp_path / "dst.pkl", allow_unsafe=True)
    assert b"system" in (tmp_path / "dst.pkl").read_bytes()


# Nested files


def test_small_and_large_storages_stay_in_the_file(write: Write) -> None:
    """Every one is a range of it, so memory grows with the pickle alone."""
    path = write(pickle.dumps([torch.ones(20), torch.ones(10_000), torch.ones(100_000)]))
    with Source(path) as source:
        found = [storage.data for storage in opening.read(source).storages.values()]
        assert all(isinstance(data, ByteRange) and data.source is source for data in found)
        assert [data.length for data in found] == [80, 40_000, 400_000]


def test_a_large_tensor_costs_no_memory(tmp_path: Path) -> None:
    """300 MB that no disk holds: a few megabytes to plan, and one range to copy."""
    numel = 75_000_000
    path = tmp_path / "large.pkl"
    head = storage_file_head(Global("torch", "FloatStorage"), "0", "cuda:0", numel)
    with path.open("wb") as file:
        file.write(b"\x80\x03ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n")
        file.write(b"B" + (len(head) + 4 * numel).to_bytes(4, "little") + head)
        file.seek(4 * numel, os.SEEK_CUR)
        file.write(b"\x85RK\0J" + numel.to_bytes(4, "little") + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR.")
    tracemalloc.start()
    try:
        for name in ("dst.pkl", "dst.pt"):
            report = ckptconv.convert(path, tmp_path / name, map_location="cpu", dry_run=True)
            assert report.size > 4 * numel
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000
    with Source(path) as source:
        pieces = plain_pickle.layout(opening.read(source), tmp_path / "dst.pkl").files[0].pieces
    assert [piece.length for piece in pieces if isinstance(piece, ByteRange)] == [4 * numel]


def test_only_what_is_needed_of_a_file_is_read(write: Write) -> None:
    """Behind a storage the reader begins anew with a few kilobytes."""
    path = write(pickle.dumps([torch.zeros(100_000) for _ in range(50)]))
    amount = 0
    with Source(path) as source:
        read = source.read

        def counted(offset: int, length: int) -> bytes:
            nonlocal amount
            amount += length
            return read(offset, length)

        source.read = counted  # type: ignore[method-assign]
        assert len(opening.read(source).tensors) == 50
    assert amount < path.stat().st_size / 10


def test_storages_do_not_count_as_pickle(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small: the bound is for what has to be held."""
    path = write(pickle.dumps([torch.zeros(1000) for _ in range(50)]))
    monkeypatch.setattr("ckptconv.pickles.machine.LIMITS", Limits(pickle_bytes=10_000))
    with Source(path) as source:
        assert len(opening.read(source).tensors) == 50


@pytest.mark.no_cover
def test_thousands_of_nested_files(write: Write, tmp_path: Path) -> None:
    """As many storages as a large model has."""
    path = write(tagged({f"layer.{i}": torch.full((2,), float(i)) for i in range(3000)}))
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cpu")
    assert_same({f"layer.{i}": torch.full((2,), float(i)) for i in range(3000)}, unpickled(tmp_path / "dst.pkl"))


@pytest.mark.no_cover
@pytest.mark.parametrize("step", [1, 2, 1000, 4093])
def test_bytes_that_are_spelled_as_a_text_are_decoded_piece_by_piece(
    write: Write, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 2 has no opcode for bytes: a character of one or two bytes for each, cut anywhere."""
    monkeypatch.setattr(plain_pickle, "_STEP", step)
    numbers = (torch.arange(70_000 if step < 10 else 300_000) * 7 % 256).to(torch.uint8)
    path = write(pickle.dumps({"w": numbers}, 2))
    assert len(path.read_bytes()) > 64 * 1024
    for name in ("dst.pkl", "dst.pt", "dst.safetensors"):
        ckptconv.convert(path, tmp_path / name)
    assert_same({"w": numbers}, unpickled(tmp_path / "dst.pkl"))
    assert_same({"w": numbers}, torch.load(tmp_path / "dst.pt"))
    assert_same({"w": numbers}, load_file(tmp_path / "dst.safetensors"))


@pytest.mark.parametrize("n", [10, 100_000])
def test_characters_that_no_byte_has(write: Write, n: int) -> None:
    """A text that is no bytes is no storage, whether it is held or left in the file."""
    text = "\x80\x02\x8a" + "\u0100" * n
    data = b"\x80\x02ctorch.storage\n_load_from_bytes\nc_codecs\nencode\nX" + len(text.encode()).to_bytes(4, "little")
    error = error_of(write(data + text.encode() + b"X\x06\0\0\0latin1\x86R\x85R."))
    assert isinstance(error, MalformedError)
    assert "characters that no byte has" in str(error)


@pytest.mark.parametrize("n", [3, 50_000])
def test_what_python_2_wrote(write: Write, tmp_path: Path, n: int) -> None:
    """Its ``str`` is the bytes of a storage, and the names of a state dict."""
    numbers = torch.arange(float(n))
    with tagging(["cuda:0"]):
        nested = nested_file(numbers._typed_storage())
    data = b"\x80\x02}U\x01wctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\nT"
    data += len(nested).to_bytes(4, "little") + nested + b"\x85RK\0J" + n.to_bytes(4, "little")
    path = write(data + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs.")
    assert [*ckptconv.open(path).tensors] == ["w"]
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cpu")
    assert_same({"w": numbers}, unpickled(tmp_path / "dst.pkl"))
    ckptconv.convert(path, tmp_path / "dst.pt", map_location="cpu")
    assert_same({"w": numbers}, torch.load(tmp_path / "dst.pt"))


def rezipped(whole: bytes, method: int = zipfile.ZIP_STORED, **records: Callable[[bytes], bytes]) -> bytes:
    """The zip WHOLE with other RECORDS in it, or compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for info in old.infolist():
            change = records.get(Path(info.filename).stem, bytes)
            new.writestr(info.filename, change(old.read(info)))
    return stream.getvalue()


@pytest.mark.parametrize("n", [3, 50_000])
def test_nested_zips(write: Write, tmp_path: Path, n: int) -> None:
    """Some versions of torch nested their zip format: pickle.load takes it, and so does the reader, whose ranges are
    those of the whole file.
    """
    path = write(storage_of(nested_file(torch.arange(float(n))._typed_storage(), _use_new_zipfile_serialization=True)))
    for name in ("dst.pkl", "dst.pt"):
        ckptconv.convert(path, tmp_path / name)
        (storage,) = torch.load(tmp_path / name, weights_only=False) if name == "dst.pt" else unpickled(tmp_path / name)
        assert storage.dtype == torch.float32
        assert_same(torch.arange(float(n)), torch.tensor([]).set_(storage))
    assert [each.dtype for each in unpickled(path)] == [torch.float32]


def test_nested_zips_that_nobody_wrote(write: Write) -> None:
    """Big-endian or compressed ones are refused, whose numbers could not be copied as they stand."""
    whole = nested_file(torch.ones(300)._typed_storage(), _use_new_zipfile_serialization=True)
    assert "big-endian" in str(error_of(write(storage_of(rezipped(whole, byteorder=lambda _: b"big")))))
    assert "compressed" in str(error_of(write(storage_of(rezipped(whole, zipfile.ZIP_DEFLATED)))))


def test_a_nested_zip_in_the_words_of_python_2(write: Write, tmp_path: Path) -> None:
    """Its texts are byte strings, which mean the same."""
    whole = nested_file(torch.ones(3)._typed_storage(), _use_new_zipfile_serialization=True)
    old = rezipped(
        whole, data=lambda said: said.replace(b"X\x01\0\0\x000", b"U\x010").replace(b"X\x03\0\0\0cpu", b"U\x03cpu")
    )
    assert old != rezipped(whole)
    ckptconv.convert(write(storage_of(old)), tmp_path / "dst.pkl")
    assert [each.tolist() for each in unpickled(tmp_path / "dst.pkl")] == [[1.0, 1.0, 1.0]]


def test_one_call_for_several_tensors_is_one_storage(write: Write, tmp_path: Path) -> None:
    """torch never pickles it so, we do: what shares a storage shares it afterwards, here and in a ``.pt``."""
    base = torch.arange(6.0)
    torch.save({"a": base, "b": base[2:]}, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.pkl", format="pickle")
    assert (tmp_path / "m.pkl").read_bytes().count(NESTED) == 1
    assert pickle.dumps({"a": base, "b": base[2:]}).count(NESTED) == 2
    ckptconv.convert(tmp_path / "m.pkl", tmp_path / "back.pt")
    assert_same({"a": base, "b": base[2:]}, torch.load(tmp_path / "back.pt"))


def test_bytes_that_look_like_a_nested_file_are_a_users_own(write: Write, tmp_path: Path) -> None:
    """Only what is called with them says what bytes are."""
    obj = {"w": torch.ones(2), "bytes": nested_file(torch.ones(3)), "short": NESTED}
    ckptconv.convert(write(pickle.dumps(obj)), tmp_path / "dst.pkl")
    assert_same(obj, unpickled(tmp_path / "dst.pkl"))
    ckptconv.convert(write(pickle.dumps(obj)), tmp_path / "dst.pt")
    assert_same(obj, torch.load(tmp_path / "dst.pt", weights_only=False))


# Storages as lists


@pytest.mark.parametrize(
    ("cls", "numbers"),
    [
        ("FloatStorage", [1.0, -2.5, float("inf"), 0.1]),
        ("DoubleStorage", [1.0, 0.1]),
        ("LongStorage", [1, -(1 << 40)]),
        ("ByteStorage", [0, 255]),
        ("FloatStorage", []),
    ],
)
def test_lists_of_numbers(write: Write, tmp_path: Path, cls: str, numbers: list[float]) -> None:
    """Before torch 0.4 a storage was pickled as its numbers, which pickle.load still takes:
    so does the reader, and writes bytes.
    """
    storage = Call(getattr(torch, cls), numbers)
    path = write(pickle.dumps({"w": Call(torch._utils._rebuild_tensor, storage, 0, (len(numbers),), (1,))}, 2))
    wanted = unpickled(path)
    (info,) = ckptconv.open(path).tensors.values()
    assert (info.shape, info.kind, info.device) == ((len(numbers),), "strided", "cpu")
    for name in ("dst.pkl", "dst.pt", "dst.safetensors"):
        assert any("lists of numbers" in note for note in ckptconv.convert(path, tmp_path / name).notes)
    assert_same(wanted, unpickled(tmp_path / "dst.pkl"))
    assert_same(wanted, torch.load(tmp_path / "dst.pt"))
    assert_same(wanted, load_file(tmp_path / "dst.safetensors"))


def test_a_list_of_numbers_on_a_gpu(write: Write, tmp_path: Path) -> None:
    """Its class says where it was, and can be told otherwise."""
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor\n(ctorch.cuda\nFloatStorage\n"
    data += b"](G?\xf0\0\0\0\0\0\0G@\0\0\0\0\0\0\0e\x85R"
    path = write(data + b"K\0K\x02\x85K\x01\x85tR.")
    assert tags(path) == ["cuda:0"]
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cpu")
    assert_same(torch.tensor([1.0, 2.0]), unpickled(tmp_path / "dst.pkl"))


@pytest.mark.parametrize("numbers", [["x"], [1.0, None], [1e300]])
def test_lists_of_what_is_no_number(write: Write, numbers: list[object]) -> None:
    """What the class cannot hold is malformed."""
    storage = Call(torch.FloatStorage, numbers)
    path = write(pickle.dumps(Call(torch._utils._rebuild_tensor, storage, 0, (1,), (1,))))
    assert isinstance(error_of(path), MalformedError)


def test_a_list_that_changes_after_it_was_a_storage(write: Write) -> None:
    """What the storage was made of is no longer in the list: the call stays what it is, and no tensor is made of it."""
    data = b"\x80\x02]q\0ctorch\nFloatStorage\nh\0\x85Rq\x010G?\xf0\0\0\0\0\0\0a0ctorch._utils\n_rebuild_tensor\n"
    path = write(data + b"(h\x01K\0K\0\x85K\x01\x85tR.")
    assert unpickled(path).shape == (0,)
    assert "without tensors" in str(error_of(path))


# Hostile files


def test_a_nested_file_cut_anywhere_is_malformed(write: Write) -> None:
    """Whatever its length, it is said to be damaged."""
    whole = nested_file(torch.arange(4.0)._typed_storage())
    for size in range(len(whole)):
        error = error_of(write(storage_of(whole[:size])))
        assert isinstance(error, MalformedError), size
        assert "storage 0" in str(error)


@pytest.mark.parametrize(
    "obj",
    [
        {"a": torch.ones(2)},
        torch.ones(2),
        [torch.ones(2)._typed_storage(), torch.ones(2)._typed_storage()],
        [],
        Call(torch.storage._load_from_bytes, nested_file(torch.ones(2)._typed_storage())),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_nested_file_that_holds_something_else_is_refused(write: Write, obj: Any, zipped: bool) -> None:
    """Torch nests one storage and nothing else; a nested file in a nested file is something else, at the first."""
    error = error_of(write(storage_of(nested_file(obj, _use_new_zipfile_serialization=zipped))))
    assert isinstance(error, (DangerousError if isinstance(obj, Call) else UnsupportedError))
    said = "_load_from_bytes" if isinstance(obj, Call) else "something else than one storage"
    assert said in str(error)


@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_nested_file_is_named(write: Write, zipped: bool) -> None:
    """Loading it would run that."""
    error = error_of(write(storage_of(nested_file(Call(os.system, "true"), _use_new_zipfile_serialization=zipped))))
    assert "names what no checkpoint needs" in str(error)
    assert error.hint == "do not load it"


def test_code_that_is_thrown_away_in_a_nested_file_is_named(write: Write) -> None:
    """In the object's pickle, before what is the object in the end; and in the pickles around it."""
    whole = nested_file(torch.ones(2)._typed_storage())
    code = b"cposix\nsystem\n(X\x04\0\0\0truetR0"
    for magic in (
        b"\x80\x02(X\x07\0\0\0storage",
        b"\x80\x02]q\0X",
        b"\x80\x02M\xe9\x03.",
        b"\x80\x02}q\0(X\x10\0\0\0protocol",
    ):
        assert whole.count(magic) == 1
        at = whole.index(magic) + 2
        error = error_of(write(storage_of(whole[:at] + code + whole[at:])))
        assert "names what no checkpoint needs" in str(error) or "there is code" in str(error)
    at = whole.index(b"\x80\x02(X\x07") + 2
    error = error_of(write(storage_of(whole[:at] + b"cmymodule\nMyClass\n0" + whole[at:])))
    assert "something else than one storage" in str(error)


def test_keys_that_lie(write: Write) -> None:
    """A key of no storage, and one too many."""
    whole = nested_file(torch.ones(2)._typed_storage())
    at = whole.index(b"\x80\x02]q\0X") + 10
    for keys in (b"X\x01\0\0\0za.", b"a."):
        lie = whole[: at - 5] + keys + whole[-16:]
        assert isinstance(error_of(write(storage_of(lie))), MalformedError)


@pytest.mark.parametrize("data", [b"", b"x", b"\x80", b"hello world" * 9, b"\x80\x04N."])
def test_bytes_that_are_no_file_of_torchs(write: Write, data: bytes) -> None:
    """They are no storage."""
    assert isinstance(error_of(write(storage_of(data))), MalformedError)


def test_a_part_of_a_storage_is_refused(write: Write) -> None:
    """The older format can name one, and only whole storages were ever nested."""
    whole = nested_file(torch.ones(3)._typed_storage())
    part = whole.replace(b"K\x03Ntq\x04Q", b"K\x03X\x01\0\0\0vK\x01K\x01\x87tq\x04Q")
    assert part != whole
    assert "something else than one storage" in str(error_of(write(storage_of(part))))


def test_persistent_ids_are_no_plain_pickles(write: Write) -> None:
    """Of a checkpoint's own pickle the storages are missing, whatever else is in it."""
    stream = io.BytesIO()
    torch.save(
        [torch.ones(1), Call(torch.storage._load_from_bytes, nested_file(torch.ones(2)._typed_storage()))], stream
    )
    with zipfile.ZipFile(stream) as archive:
        error = error_of(write(archive.read("archive/data.pkl")))
    assert "the pickle of a torch checkpoint without the storages" in str(error)


P = b"\x80\x03ctorch.storage\n_load_from_bytes\nq\0"


@pytest.mark.parametrize(
    "data",
    [
        b"(B%s0)tR.",  # no bytes among the arguments
        b"N\x85R.",
        b"B%s\x85R}b.",  # a state on a storage
        b"B%sK\x01\x86R.",  # two arguments
        b"B%sq\x01\x85Rh\0h\x01\x85R\x86.",  # two storages of the same bytes
        b"B%s\x85Rh\0\x86.",  # the function itself, beside a call of it
        b"B%s\x85\x81.",  # another kind of call
    ],
)
def test_calls_that_torch_never_writes(write: Write, data: bytes) -> None:
    """Each is refused: what it would do is not known."""
    nested = nested_file(torch.ones(2)._typed_storage())
    said = data.replace(b"%s", len(nested).to_bytes(4, "little") + nested)
    error = error_of(write(P + said))
    assert isinstance(error, (UnsupportedError, MalformedError))
    assert "without tensors" not in str(error)


def test_bytes_behind_it_are_malformed(write: Write) -> None:
    """Two pickles in one file are two objects."""
    data = pickle.dumps(torch.ones(2))
    assert f"expected {len(data)} bytes" in str(error_of(write(data + data)))


def test_a_size_that_no_machine_has(write: Write) -> None:
    """An element count far beyond the file allocates nothing."""
    head = storage_file_head(Global("torch", "FloatStorage"), "0", "cpu", 1 << 50)
    assert "bytes are missing" in str(error_of(write(storage_of(head))))


@given(st.data())
def test_any_damage_ends_in_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One byte changed, or the file cut: refused in words, or read and written again."""
    whole = bytearray(tagged(WEIGHTS, protocol=data.draw(st.sampled_from([1, 2, 4]))))
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] = data.draw(st.integers(0, 255))
    else:
        del whole[at:]
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "m.pkl").write_bytes(whole)
    said = ""
    try:
        ckptconv.convert(folder / "m.pkl", folder / "dst.pkl", map_location="cpu")
    except CkptconvError as error:
        said = str(error)
    assert (said == "") == (folder / "dst.pkl").exists()


def test_limits_hold(write: Write) -> None:
    """An integer too long for any checkpoint, beside a tensor."""
    data = pickle.dumps([torch.ones(1)], 2)[:-2] + b"\x8b\xff\xff\xff\x00" + bytes(0xFFFFFF) + b"e."
    assert isinstance(error_of(write(data)), LimitError)


# What is said of it


@pytest.mark.parametrize(
    "obj", [WEIGHTS, {"model": WEIGHTS, "args": Call(complex, 1)}, ZOO["module"]()], ids=["weights", "dict", "module"]
)
@pytest.mark.parametrize("tag", ["cpu", "cuda:0"])
def test_the_commands_mend_what_inspect_finds(
    write: Write, tmp_path: Path, obj: Any, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That torch.load does not read it is found; each command is run, and what it is for is gone."""
    monkeypatch.chdir(tmp_path)
    path = write(tagged(obj, tag))
    found = ckptconv.inspect(path)
    assert found["format"] == "pickle"
    blocking = [each["kind"] for each in found["findings"] if each["blocks"]]
    assert "pickle" in blocking and not found["loads_here"]
    for finding in found["findings"]:
        if finding["command"]:
            words = shlex.split(finding["command"])
            assert main(words[1:]) == 0
            left = ckptconv.inspect(words[3])["findings"]
            assert finding["kind"] not in [each["kind"] for each in left]
            assert "pickle" not in [each["kind"] for each in left]


def test_torch_is_not_imported(write: Write, tmp_path: Path) -> None:
    """Neither to look at it nor to move it."""
    import subprocess

    path = write(tagged(WEIGHTS))
    program = (
        "import sys; from ckptconv.cli.main import main; main(sys.argv[1:]); raise SystemExit('torch' in sys.modules)"
    )
    for args in (["inspect", path], ["convert", path, tmp_path / "dst.pkl", "--to", "cpu"]):
        subprocess.run([sys.executable, "-c", program, *map(str, args)], check=True, capture_output=True)


def test_a_pickle_in_the_corpus(corpus: Path, tmp_path: Path) -> None:
    """The tests of torchmd-net expect these tensors: the same from pickle, from a pickle and from a ``.pt``."""
    path = corpus / "torchmd+torchmd-net" / "tests" / "expected.pkl"
    wanted = ckptconv.load(path)
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cuda:0")
    ckptconv.convert(tmp_path / "dst.pkl", tmp_path / "dst.pt", map_location="cpu")
    assert_same(wanted, torch.load(tmp_path / "dst.pt"))
    graph, _ = parse(*(lambda data: (lambda at, n: data[at : at + n], len(data)))(path.read_bytes()), where="expected")
    assert len(ckptconv.inspect(path)["tensors"]) == sum(
        str(c.callable).endswith("_rebuild_tensor_v2") for c in graph.calls
    )


def test_one_value_serves_one_storage(write: Write) -> None:
    """A text, a bytes object or a list that many calls share is refused: torch writes none such,
    and a small file would become a large one.
    """
    whole = nested_file(torch.arange(4.0)._typed_storage())
    text = (
        b"\x80\x02c_codecs\nencode\nq\x000"
        + text_of(whole.decode("latin-1"))
        + b"q\x010"
        + text_of("latin1")
        + b"q\x020]("
    )
    one = b"ctorch.storage\n_load_from_bytes\nh\x00h\x01h\x02\x86R\x85R"
    shared_list = b"\x80\x02(K\x01K\x02lq\x000](" + 2 * b"ctorch\nFloatStorage\nh\x00\x85R" + b"e."
    for data in (text + 2 * one + b"e.", shared_list):
        assert "another storage's as well" in str(error_of(write(data)))
    assert len(tags(write(text + one + b"e."))) == 1


def text_of(text: str) -> bytes:
    """The opcode that says TEXT in protocol 2."""
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


@pytest.mark.no_cover
def test_many_storages_of_protocol_2_take_no_memory(write: Write, tmp_path: Path) -> None:
    """Their bytes stand in texts, which stay in the file, short ones too; one piece of one text is
    decoded at a time.
    """
    made = {f"w{i}": torch.rand(10_000) for i in range(1000)}
    path = write(pickle.dumps(made, 2))
    tracemalloc.start()
    try:
        ckptconv.convert(path, tmp_path / "dst.pt")
        assert tracemalloc.get_traced_memory()[1] < 30_000_000 < path.stat().st_size
    finally:
        tracemalloc.stop()
    assert_same(made, torch.load(tmp_path / "dst.pt", weights_only=True))


def test_texts_of_python_2_are_said_to_need_an_encoding(tmp_path: Path) -> None:
    """torch's loader decodes them as UTF-8, pickle's as ASCII unless it is told."""
    (tmp_path / "src.pt").write_bytes(legacy_file({"name": "Zürich"}, {}, python2=True))
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pkl", format="pickle")
    assert any("encoding='utf-8'" in note for note in report.notes)
    with (tmp_path / "dst.pkl").open("rb") as file:
        assert pickle.load(file, encoding="utf-8") == torch.load(tmp_path / "src.pt", weights_only=False)
