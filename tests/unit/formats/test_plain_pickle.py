"""Plain pickles with tensors, which are read without running them, edited, and written as pickles or in another format.
The pickle module and torch load the results.
"""

from __future__ import annotations

import os
import pickle
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptconv
from ckptconv.byteranges import reading
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
from tests.support.archives import big_endian, flip_bit, records_of, rezipped
from tests.support.conversions import converted, loaded, read, refused, run_without_torch, unreadable
from tests.support.hostile_bytes import saved, text
from tests.support.judge import assert_same, tags_of
from tests.support.legacy_files import legacy_file
from tests.support.memory import memory_below
from tests.support.reduced import Reduced
from tests.support.zoo import TAGS, ZOO, save, tagging

PROTOCOLS = range(6)
#: Objects of the zoo without a tensor.
WITHOUT_TENSORS = ("numpy_objects", "sets", "set_cycle", "qualified", "atoms")
#: Objects that torch pickles as storages of bytes and cannot load again.
UNTYPED = ("dtypes", "two_dtypes", "storages")
NESTED = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the beginning of a nested file
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2, dtype=torch.float16)}

Write = Callable[[bytes], Path]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of torch about deprecated and beta features


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes bytes to a pickle file and returns its path."""

    def write(data: bytes) -> Path:
        (tmp_path / "m.pkl").write_bytes(data)
        return tmp_path / "m.pkl"

    return write


def tags(path: Path) -> list[str]:
    """Return the location tags in the nested files of the pickle at `path`, in order."""
    return [reference.storage.device for reference in read(path).references]


def dumped(name: str, protocol: int) -> bytes:
    """Return the object `name` of the zoo as a plain pickle."""
    try:
        return pickle.dumps(ZOO[name](), protocol)
    except TypeError as error:  # __slots__ need protocol 2
        pytest.skip(str(error))


def tagged(obj: Any, tag: str = "cuda:0", protocol: int = 4) -> bytes:
    """Return `obj` as a machine with a GPU pickles it, with the location tag `tag`."""
    with tagging([tag]):
        return pickle.dumps(obj, protocol)


def storage_of(data: bytes) -> bytes:
    """Return the pickle of the object that torch loads from `data`."""
    return pickle.dumps([Reduced(torch.storage._load_from_bytes, (data,))], 4)


def nested_storage(numbers: torch.Tensor, *, zipped: bool = False) -> bytes:
    """Return the bytes that ``torch.save`` writes for the storage of `numbers`."""
    return saved(numbers._typed_storage(), _use_new_zipfile_serialization=zipped)


# Objects of the zoo


@pytest.mark.untraced
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", [name for name in ZOO if name not in (*WITHOUT_TENSORS, *UNTYPED)])
def test_output_contains_the_same_object(write: Write, tmp_path: Path, name: str, protocol: int) -> None:
    """The output contains the same object as the pickle, as a ``.pt`` for torch.load and as a pickle for pickle.load,
    in every protocol.
    """
    path = write(dumped(name, protocol))
    wanted = loaded(path)
    for dst, format in (("dst.pt", "torch zip"), ("dst.pkl", "pickle")):
        report = ckptconv.convert(path, tmp_path / dst, allow_unsafe=True)
        assert report.formats == ("pickle", format)
        assert_same(wanted, loaded(tmp_path / dst, weights_only=False))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", UNTYPED)
def test_pickles_that_torch_cannot_load_become_pt(write: Write, tmp_path: Path, name: str, protocol: int) -> None:
    """Torch pickles some dtypes, for example float8, as storages of bytes, which pickle.load refuses. Such pickles are
    read, cannot be written as pickles, and can be converted to ``.pt``.
    """
    path, dst = write(dumped(name, protocol)), tmp_path / "dst.pt"
    with pytest.raises(AttributeError, match="dtype"):
        loaded(path)
    said = r"a plain pickle that torch can read back cannot store .*format='pt'"
    refused(RefusedError, said, path, tmp_path / "dst.pkl")
    ckptconv.convert(path, dst)
    if name == "dtypes":
        assert_same(ZOO[name](), torch.load(dst))
    else:
        assert torch.load(dst, weights_only=False).keys() == ZOO[name]().keys()


@pytest.mark.parametrize("name", WITHOUT_TENSORS)
def test_pickles_without_tensors_are_refused(write: Write, name: str) -> None:
    """A pickle without tensors is refused with a description of it."""
    unreadable(write(dumped(name, 4)), InputError, "a pickle without tensors")


@pytest.mark.untraced
@pytest.mark.parametrize(
    # In its older format, torch creates nested tensors and generators before it reads their bytes.
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
def test_any_checkpoint_becomes_a_pickle(src: Path, dst: Path, name: str, older: bool) -> None:
    """With ``--format pickle``, files in torch's formats become pickles. pickle.load returns the same object as
    torch.load, with the same shared storages.
    """
    protocol = 4 if name in ("qualified", "set_cycle") else 2
    there = src.with_name("there.pkl")
    save(ZOO[name](), src, ["cpu"], pickle_protocol=protocol, _use_new_zipfile_serialization=not older)
    wanted = torch.load(src, weights_only=False)
    assert_same(wanted, converted(src, there, format="pickle", allow_unsafe=True))
    if name not in WITHOUT_TENSORS:
        ckptconv.convert(there, dst, allow_unsafe=True)
        assert_same(wanted, torch.load(dst, weights_only=False))


def test_a_safetensors_file_becomes_a_pickle(tmp_path: Path) -> None:
    """A safetensors file becomes a pickle, in which tied tensors share one storage."""
    ckptconv.save({**WEIGHTS, "tied": WEIGHTS["a.bias"]}, tmp_path / "m.safetensors")
    found = converted(tmp_path / "m.safetensors", tmp_path / "m.pkl", format="pickle")
    assert found["tied"].data_ptr() == found["a.bias"].data_ptr()
    assert_same({**WEIGHTS, "tied": WEIGHTS["a.bias"].detach()}, found)


def test_parts_that_a_pickle_cannot_contain_are_named(tmp_path: Path) -> None:
    """A pickle cannot contain the texts of a safetensors file, or the source code in a file of torch's older format.
    The report names both.
    """
    save_file(WEIGHTS, tmp_path / "m.safetensors", {"note": "mine"})
    report = ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "m.pkl", format="pickle")
    assert [left.path for left in report.left_behind] == ["__metadata__/note"]
    torch.save(ZOO["module"](), tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "module.pkl", format="pickle")
    assert "the source code of tests.support.zoo.Net" in [left.path for left in report.left_behind]


def test_checksums_of_a_zip_are_checked(src: Path, tmp_path: Path) -> None:
    """A pickle contains no checksums, so damage is reported during the conversion to a pickle."""
    torch.save({"w": torch.full((5000,), 7.25)}, src)
    flip_bit(src, src.read_bytes().index(torch.full((2,), 7.25).numpy().tobytes()))
    refused(MalformedError, "checksum", src, tmp_path / "m.pkl", format="pickle")


def test_pt_of_plain_tensors_needs_no_code(write: Write, tmp_path: Path) -> None:
    """A ``.pt`` file of plain tensors loads with ``weights_only=True``, and the report contains no notes."""
    assert ckptconv.convert(write(pickle.dumps(WEIGHTS)), tmp_path / "dst.pt").notes == ()
    assert_same(WEIGHTS, torch.load(tmp_path / "dst.pt", weights_only=True))


def test_an_object_in_memory_becomes_a_pickle(tmp_path: Path) -> None:
    """``save`` with ``format='pickle'`` writes a pickle."""
    ckptconv.save(WEIGHTS, tmp_path / "m.pkl", format="pickle")
    assert_same(WEIGHTS, loaded(tmp_path / "m.pkl"))


def test_suffix_of_a_pickle_does_not_change_the_format(tmp_path: Path) -> None:
    """Without ``--format``, a zip file is written as a zip file, although the suffix is that of a pickle."""
    torch.save(WEIGHTS, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.pkl")
    assert zipfile.is_zipfile(tmp_path / "m.pkl")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_big_endian_numbers_are_swapped(tmp_path: Path, method: int) -> None:
    """The numbers of a big-endian zip file are swapped, because a nested file is little-endian. Compressed storages are
    inflated.
    """
    torch.save(WEIGHTS, tmp_path / "m.pt")
    big = big_endian(tmp_path / "m.pt", tmp_path / "big.pt", {"0": 4, "1": 2}, method=method)
    assert_same(WEIGHTS, converted(big, tmp_path / "dst.pkl", format="pickle"))


# Devices


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_from_a_gpu_loads_without_one(write: Write, tmp_path: Path, protocol: int) -> None:
    """The tags of a pickle are in its nested files, where pickle.load cannot change them. A conversion to the CPU
    changes them, in a pickle and in a ``.pt``.
    """
    path = write(tagged(WEIGHTS, protocol=protocol))
    assert tags(path) == ["cuda:0", "cuda:0"]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            loaded(path)
    assert_same(WEIGHTS, converted(path, tmp_path / "dst.pkl", map_location="cpu"))
    assert_same(WEIGHTS, converted(path, tmp_path / "dst.pt", map_location={"cuda:0": "cpu"}))


def test_each_storage_keeps_its_own_tag(write: Write, tmp_path: Path) -> None:
    """Each storage keeps its own tag. A mapping changes one of five devices, in a pickle and in a ``.pt``."""
    with tagging():
        path = write(pickle.dumps([torch.full((3,), float(i)) for i in range(5)]))
    assert tags(path) == [*TAGS]
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location={"mps": "cuda:2"})
    assert tags(tmp_path / "dst.pkl") == [tag if tag != "mps" else "cuda:2" for tag in TAGS]
    ckptconv.convert(path, tmp_path / "dst.pt", map_location={"mps": "cuda:2"})
    assert tags_of(tmp_path / "dst.pt")[1] == tags(tmp_path / "dst.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_moving_there_and_back_restores_the_bytes(write: Write, tmp_path: Path, protocol: int) -> None:
    """A pickle that ckptconv has written has the same bytes after it is moved to another device and back."""
    first, there, back = (tmp_path / name for name in ("first.pkl", "there.pkl", "back.pkl"))
    ckptconv.convert(write(pickle.dumps(ZOO["training"](), protocol)), first)
    ckptconv.convert(first, there, map_location="cuda:1")
    assert "cuda:1" in tags(there)
    ckptconv.convert(there, back, map_location="cpu")
    assert back.read_bytes() == first.read_bytes()


def test_the_protocol_stays(write: Write, tmp_path: Path) -> None:
    """The output has the protocol of the source, or 2 if that is lower. The protocol is kept because unpickling renames
    the modules of Python 2 below protocol 3.
    """
    for protocol in PROTOCOLS:
        ckptconv.convert(write(pickle.dumps(WEIGHTS, protocol)), tmp_path / "dst.pkl", force=True)
        assert (tmp_path / "dst.pkl").read_bytes()[:2] == bytes([0x80, max(protocol, 2)])


# Edits


def test_other_edits(write: Write, tmp_path: Path) -> None:
    """Selections, filters, prefixes and the extraction of state dicts work for pickles as for other formats."""
    wrapped = {f"module.{name}": tensor for name, tensor in WEIGHTS.items()}
    path = write(tagged({"model": wrapped, "epoch": 3}))
    assert_same(WEIGHTS, converted(path, tmp_path / "dst.safetensors", strip_prefix="module."))
    part = converted(path, tmp_path / "dst.pkl", select="model", exclude="*.bias", map_location="cpu")
    assert_same({"module.a.weight": WEIGHTS["a.weight"]}, part)
    assert_same(WEIGHTS, ckptconv.load(path, "cpu", state_dict=True, strip_prefix="module."))
    with ckptconv.open(path) as opened:
        assert opened.format == "pickle"
        assert_same(WEIGHTS["a.weight"], opened.load("model/module.a.weight"))


def test_a_whole_model_of_unknown_classes(write: Write, tmp_path: Path) -> None:
    """A model of an unknown class is copied without importing the class, and its tensors are moved."""
    model = ZOO["module"]()
    assert_same(model, converted(write(tagged(model)), tmp_path / "dst.pkl", map_location="cpu"))


def test_a_dangerous_pickle_is_refused(write: Write, tmp_path: Path) -> None:
    """A dangerous call outside the nested files is refused, as in any other checkpoint. If it is allowed, it is
    copied.
    """
    path, dst = write(pickle.dumps([torch.ones(1), Reduced(os.system, ("true",))])), tmp_path / "dst.pkl"
    refused(DangerousError, "system", path, dst)
    ckptconv.convert(path, dst, allow_unsafe=True)
    assert b"system" in dst.read_bytes()


# Nested files


def test_small_and_large_storages_stay_in_the_file(write: Write) -> None:
    """The data of each storage is a range of the file, so memory grows only with the size of the pickle itself."""
    path = write(pickle.dumps([torch.ones(20), torch.ones(10_000), torch.ones(100_000)]))
    with Source(path) as source:
        found = [storage.data for storage in opening.read(source).storages.values()]
        assert all(isinstance(data, ByteRange) and data.source is source for data in found)
        assert [data.length for data in found] == [80, 40_000, 400_000]


def test_a_large_tensor_costs_no_memory(tmp_path: Path) -> None:
    """A conversion of a tensor of 300 MB needs a few megabytes to plan, and copies one range."""
    numel = 75_000_000
    path = tmp_path / "large.pkl"
    head = storage_file_head(Global("torch", "FloatStorage"), "0", "cuda:0", numel)
    with path.open("wb") as file:
        file.write(b"\x80\x03ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n")
        file.write(b"B" + (len(head) + 4 * numel).to_bytes(4, "little") + head)
        file.seek(4 * numel, os.SEEK_CUR)
        file.write(b"\x85RK\0J" + numel.to_bytes(4, "little") + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR.")
    with memory_below(8_000_000):
        for name in ("dst.pkl", "dst.pt"):
            report = ckptconv.convert(path, tmp_path / name, map_location="cpu", dry_run=True)
            assert report.size > 4 * numel
    with Source(path) as source:
        pieces = plain_pickle.layout(opening.read(source), tmp_path / "dst.pkl").files[0].pieces
    assert [piece.length for piece in pieces if isinstance(piece, ByteRange)] == [4 * numel]


def test_only_what_is_needed_of_a_file_is_read(write: Write) -> None:
    """The reader does not read the data of storages, and continues after each of them with a small read."""
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
    """The bound for the size of a pickle does not count the data of storages, even if the storages are small."""
    path = write(pickle.dumps([torch.zeros(1000) for _ in range(50)]))
    monkeypatch.setattr("ckptconv.pickles.machine.LIMITS", Limits(pickle_bytes=10_000))
    assert len(read(path).tensors) == 50


@pytest.mark.untraced
def test_thousands_of_nested_files(write: Write, tmp_path: Path) -> None:
    """A pickle can contain as many storages as a large model."""
    layers = {f"layer.{i}": torch.full((2,), float(i)) for i in range(3000)}
    assert_same(layers, converted(write(tagged(layers)), tmp_path / "dst.pkl", map_location="cpu"))


@pytest.mark.untraced
@pytest.mark.parametrize("step", [1, 2, 1000, 4093])
def test_bytes_in_a_text_are_decoded_piece_by_piece(
    write: Write, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 2 has no opcode for bytes. It stores each byte as a character of one or two bytes, which is decoded
    correctly at the boundary of two pieces.
    """
    monkeypatch.setattr(reading, "_STEP", step)
    numbers = (torch.arange(70_000 if step < 10 else 300_000) * 7 % 256).to(torch.uint8)
    path = write(pickle.dumps({"w": numbers}, 2))
    assert len(path.read_bytes()) > 64 * 1024
    for name in ("dst.pkl", "dst.pt", "dst.safetensors"):
        assert_same({"w": numbers}, converted(path, tmp_path / name))


@pytest.mark.parametrize("n", [3, 50_000])
def test_pickles_of_python_2(write: Write, tmp_path: Path, n: int) -> None:
    """In a pickle of Python 2, the data of a storage and the names of a state dict are of type ``str``."""
    numbers = torch.arange(float(n))
    with tagging(["cuda:0"]):
        nested = nested_storage(numbers)
    data = b"\x80\x02}U\x01wctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\nT"
    data += len(nested).to_bytes(4, "little") + nested + b"\x85RK\0J" + n.to_bytes(4, "little")
    path = write(data + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs.")
    assert [*ckptconv.open(path).tensors] == ["w"]
    for name in ("dst.pkl", "dst.pt"):
        assert_same({"w": numbers}, converted(path, tmp_path / name, map_location="cpu"))


@pytest.mark.parametrize("n", [3, 50_000])
def test_nested_zips(write: Write, tmp_path: Path, n: int) -> None:
    """Some versions of torch nested files in the zip format, which pickle.load and ckptconv read."""
    numbers = torch.arange(float(n))
    path = write(storage_of(nested_storage(numbers, zipped=True)))
    for name in ("dst.pkl", "dst.pt"):
        ckptconv.convert(path, tmp_path / name)
        (storage,) = loaded(tmp_path / name, weights_only=False)
        assert storage.dtype == torch.float32
        assert_same(numbers, torch.tensor([]).set_(storage))
    assert [each.dtype for each in loaded(path)] == [torch.float32]


def test_a_nested_zip_of_python_2(write: Write, tmp_path: Path) -> None:
    """A nested zip file of Python 2 contains byte strings in the place of texts."""
    whole = nested_storage(torch.ones(3), zipped=True)
    said = records_of(whole)["data.pkl"]
    old = said.replace(b"X\x01\0\0\x000", b"U\x010").replace(b"X\x03\0\0\0cpu", b"U\x03cpu")
    assert old != said
    path = write(storage_of(rezipped(whole, {"data.pkl": old})))
    assert [each.tolist() for each in converted(path, tmp_path / "dst.pkl")] == [[1.0, 1.0, 1.0]]


def test_one_call_for_several_tensors_is_one_storage(write: Write, tmp_path: Path) -> None:
    """Tensors that share a storage are written with one call and still share it after they are read again. Torch itself
    writes one call for each tensor.
    """
    base = torch.arange(6.0)
    views = {"a": base, "b": base[2:]}
    torch.save(views, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.pkl", format="pickle")
    assert (tmp_path / "m.pkl").read_bytes().count(NESTED) == 1
    assert pickle.dumps(views).count(NESTED) == 2
    assert_same(views, converted(tmp_path / "m.pkl", tmp_path / "back.pt"))


def test_bytes_that_look_like_a_nested_file_are_user_data(write: Write, tmp_path: Path) -> None:
    """Bytes that look like a nested file are user data if no call loads them."""
    obj = {"w": torch.ones(2), "bytes": saved(torch.ones(3), _use_new_zipfile_serialization=False), "short": NESTED}
    path = write(pickle.dumps(obj))
    for name in ("dst.pkl", "dst.pt"):
        ckptconv.convert(path, tmp_path / name)
        assert_same(obj, loaded(tmp_path / name, weights_only=False))


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
    """Before torch 0.4, a storage was pickled as a list of numbers, which pickle.load still reads. The list is read,
    and the output contains bytes.
    """
    storage = Reduced(getattr(torch, cls), (numbers,))
    path = write(pickle.dumps({"w": Reduced(torch._utils._rebuild_tensor, (storage, 0, (len(numbers),), (1,)))}, 2))
    wanted = loaded(path)
    (info,) = ckptconv.open(path).tensors.values()
    assert (info.shape, info.kind, info.device) == ((len(numbers),), "strided", "cpu")
    for name in ("dst.pkl", "dst.pt", "dst.safetensors"):
        assert any("a list of numbers" in note for note in ckptconv.convert(path, tmp_path / name).notes)
        assert_same(wanted, loaded(tmp_path / name))


def test_a_list_of_numbers_on_a_gpu(write: Write, tmp_path: Path) -> None:
    """The class of the storage contains the device, which ``map_location`` changes."""
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor\n(ctorch.cuda\nFloatStorage\n"
    data += b"](G?\xf0\0\0\0\0\0\0G@\0\0\0\0\0\0\0e\x85R"
    path = write(data + b"K\0K\x02\x85K\x01\x85tR.")
    assert tags(path) == ["cuda:0"]
    assert_same(torch.tensor([1.0, 2.0]), converted(path, tmp_path / "dst.pkl", map_location="cpu"))


def test_a_list_that_changes_after_a_storage_was_created_from_it(write: Write) -> None:
    """If a list changes after a storage was created from it, the list no longer contains the data of the storage. The
    call is kept, and no tensor is created from it.
    """
    data = b"\x80\x02]q\0ctorch\nFloatStorage\nh\0\x85Rq\x010G?\xf0\0\0\0\0\0\0a0ctorch._utils\n_rebuild_tensor\n"
    path = write(data + b"(h\x01K\0K\0\x85K\x01\x85tR.")
    assert loaded(path).shape == (0,)
    unreadable(path, InputError, "without tensors")


# Hostile files


def test_a_nested_file_cut_anywhere_is_malformed(write: Write) -> None:
    """A nested file that is cut at any position is reported as malformed."""
    whole = nested_storage(torch.arange(4.0))
    for size in range(len(whole)):
        unreadable(write(storage_of(whole[:size])), MalformedError, "storage 0")


TWO = nested_storage(torch.ones(2))
THREE = nested_storage(torch.ones(3))
ZIPPED = nested_storage(torch.ones(300), zipped=True)
CODE = b"cposix\nsystem\n(X\x04\0\0\0truetR0"
#: The beginnings of the pickles in TWO. Code is inserted after the two bytes of PROTO.
PICKLES = {
    "object's": b"\x80\x02(X\x07\0\0\0storage",
    "keys'": b"\x80\x02]q\0X",
    "version's": b"\x80\x02M\xe9\x03.",
    "system information's": b"\x80\x02}q\0(X\x10\0\0\0protocol",
}


def with_code(start: bytes, code: bytes) -> bytes:
    """Return ``TWO`` with `code`, whose result is discarded, in the pickle that begins with `start`."""
    assert TWO.count(start) == 1
    at = TWO.index(start) + 2
    return TWO[:at] + code + TWO[at:]


def with_keys(keys: bytes) -> bytes:
    """Return ``TWO`` with `keys` after its own keys."""
    at = TWO.index(b"\x80\x02]q\0X") + 5
    return TWO[:at] + keys + TWO[-16:]


def with_a_part() -> bytes:
    """Return a nested file with a part of a storage. The older format allows this, but torch nests only complete
    storages.
    """
    made = THREE.replace(b"K\x03Ntq\x04Q", b"K\x03X\x01\0\0\0vK\x01K\x01\x87tq\x04Q")
    assert made != THREE
    return made


def with_wrong_characters(n: int) -> bytes:
    """Return a pickle with a storage whose text contains `n` characters that are not bytes."""
    head = b"\x80\x02ctorch.storage\n_load_from_bytes\nc_codecs\nencode\n"
    return head + text("\x80\x02\x8a" + "\u0100" * n) + text("latin1") + b"\x86R\x85R."


def of_a_checkpoint() -> bytes:
    """Return the pickle of a checkpoint that also contains a nested file, without the storages."""
    return records_of(saved([torch.ones(1), Reduced(torch.storage._load_from_bytes, (TWO,))]))["data.pkl"]


def called(how: bytes) -> bytes:
    """Return a pickle in which the opcodes `how` use the function that loads ``TWO``."""
    function = b"\x80\x03ctorch.storage\n_load_from_bytes\nq\0"
    return function + how.replace(b"%s", len(TWO).to_bytes(4, "little") + TWO)


#: A text with the bytes of a storage, and the opcodes that create the storage.
SHARED_TEXT = (
    b"\x80\x02c_codecs\nencode\nq\x000" + text(TWO.decode("latin-1")) + b"q\x010" + text("latin1") + b"q\x020]("
)
STORAGE_OF_IT = b"ctorch.storage\n_load_from_bytes\nh\x00h\x01h\x02\x86R\x85R"
SHARED_LIST = b"\x80\x02(K\x01K\x02lq\x000]("

SOMETHING_ELSE = "does not contain exactly one storage"
#: Objects that torch does not nest. A nested file of torch contains exactly one storage.
OTHER_OBJECTS = {
    "a dict": {"a": torch.ones(2)},
    "a tensor": torch.ones(2),
    "two storages": [torch.ones(2)._typed_storage(), torch.ones(2)._typed_storage()],
    "nothing": [],
}
#: Pickles that are refused, with the type of the error and a part of it.
REFUSED: dict[str, tuple[bytes, type[InputError], str]] = {
    **{
        f"{n} characters above U": (with_wrong_characters(n), MalformedError, "characters above U")
        for n in (10, 100_000)
    },
    # The numbers in these files cannot be copied without a change.
    "a big-endian zip": (storage_of(rezipped(ZIPPED, {"byteorder": b"big"})), UnsupportedError, "big-endian"),
    "a compressed zip": (storage_of(rezipped(ZIPPED, method=zipfile.ZIP_DEFLATED)), UnsupportedError, "compressed"),
    **{
        f"a storage of {numbers}": (
            pickle.dumps(
                Reduced(torch._utils._rebuild_tensor, (Reduced(torch.FloatStorage, (numbers,)), 0, (1,), (1,)))
            ),
            MalformedError,
            "a list contains an item that torch.FloatStorage cannot store",
        )
        for numbers in (["x"], [1.0, None], [1e300])
    },
    **{
        f"{what} in a nested file{', zipped' * zipped}": (
            storage_of(saved(obj, _use_new_zipfile_serialization=zipped)),
            UnsupportedError,
            SOMETHING_ELSE,
        )
        for what, obj in OTHER_OBJECTS.items()
        for zipped in (False, True)
    },
    **{
        f"a nested file in a nested file{', zipped' * zipped}": (
            storage_of(saved(Reduced(torch.storage._load_from_bytes, (TWO,)), _use_new_zipfile_serialization=zipped)),
            DangerousError,
            "_load_from_bytes",
        )
        for zipped in (False, True)
    },
    # Loading runs this code, although its result is discarded.
    **{
        f"code in the {whose} pickle": (
            storage_of(with_code(start, CODE)),
            DangerousError if whose == "object's" else MalformedError,
            "functions that no checkpoint needs" if whose == "object's" else "contain code",
        )
        for whose, start in PICKLES.items()
    },
    "an unknown class in the object's pickle": (
        storage_of(with_code(PICKLES["object's"], b"cmymodule\nMyClass\n0")),
        UnsupportedError,
        SOMETHING_ELSE,
    ),
    "a key of no storage": (storage_of(with_keys(b"X\x01\0\0\0za.")), MalformedError, "the list of keys"),
    "no key to add": (storage_of(with_keys(b"a.")), MalformedError, "the stack is empty"),
    **{
        f"{data!r} for a file": (storage_of(data), MalformedError, "truncated, or damaged")
        for data in (b"", b"x", b"\x80", b"hello world" * 9, b"\x80\x04N.")
    },
    "a part of a storage": (storage_of(with_a_part()), UnsupportedError, SOMETHING_ELSE),
    "a checkpoint's pickle": (
        of_a_checkpoint(),
        UnsupportedError,
        "the pickle of a torch checkpoint without its storages",
    ),
    # The effect of calls that torch never writes is not known.
    "no bytes among the arguments": (called(b"(B%s0)tR."), UnsupportedError, "not bytes"),
    "no bytes": (called(b"N\x85R."), UnsupportedError, "not bytes"),
    "a state on a storage": (called(b"B%s\x85R}b."), UnsupportedError, "changed in a way that torch does not use"),
    "two arguments": (called(b"B%sK\x01\x86R."), UnsupportedError, "changed in a way that torch does not use"),
    "two storages of the same bytes": (
        called(b"B%sq\x01\x85Rh\0h\x01\x85R\x86."),
        UnsupportedError,
        "another storage has the same bytes",
    ),
    "the function itself, beside a call of it": (
        called(b"B%s\x85Rh\0\x86."),
        UnsupportedError,
        "used for something other",
    ),
    "another kind of call": (called(b"B%s\x85\x81."), UnsupportedError, "changed in a way that torch does not use"),
    "two pickles": (
        2 * pickle.dumps(torch.ones(2)),
        MalformedError,
        f"expected {len(pickle.dumps(torch.ones(2)))} bytes",
    ),
    # A number of elements far beyond the file allocates no memory.
    "a size that no machine has": (
        storage_of(storage_file_head(Global("torch", "FloatStorage"), "0", "cpu", 1 << 50)),
        MalformedError,
        "bytes missing",
    ),
    "an integer too long for any checkpoint": (
        pickle.dumps([torch.ones(1)], 2)[:-2] + b"\x8b\x00\x00\x10\x00" + bytes(1 << 20) + b"e.",
        LimitError,
        "an integer in the pickle is too long",
    ),
    # Torch writes no such pickles, and a small file would become a large one.
    "one text for two storages": (
        SHARED_TEXT + 2 * STORAGE_OF_IT + b"e.",
        UnsupportedError,
        "another storage has the same bytes",
    ),
    "one list for two storages": (
        SHARED_LIST + 2 * b"ctorch\nFloatStorage\nh\x00\x85R" + b"e.",
        UnsupportedError,
        "another storage has the same bytes",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_pickles_are_refused(write: Write, kind: str) -> None:
    """A bad pickle is refused with the reason."""
    data, error, said = REFUSED[kind]
    unreadable(write(data), error, said)


def test_a_text_for_one_storage_is_read(write: Write) -> None:
    """A text that could be shared is read if only one storage uses it."""
    assert len(tags(write(SHARED_TEXT + STORAGE_OF_IT + b"e."))) == 1


@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_nested_file_is_named(write: Write, zipped: bool) -> None:
    """Code in a nested file is reported, because loading the file would run it."""
    path = write(storage_of(saved(Reduced(os.system, ("true",)), _use_new_zipfile_serialization=zipped)))
    assert unreadable(path, InputError, "functions that no checkpoint needs").hint == "do not load it"


@given(st.data())
def test_any_damage_ends_in_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A pickle in which one byte is changed, or that is cut, is converted or refused. If it is refused, nothing is
    written.
    """
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


# Findings, imports and notes


@pytest.mark.parametrize(
    "obj",
    [WEIGHTS, {"model": WEIGHTS, "args": Reduced(complex, (1,))}, ZOO["module"]()],
    ids=["weights", "dict", "module"],
)
@pytest.mark.parametrize("tag", ["cpu", "cuda:0"])
def test_the_commands_resolve_the_findings(write: Write, here: Path, obj: Any, tag: str) -> None:
    """``inspect`` reports that torch.load does not read a pickle. Each suggested command succeeds, and its output does
    not have the finding.
    """
    path = write(tagged(obj, tag))
    found = ckptconv.inspect(path)
    assert found.format == "pickle"
    blocking = [each.kind for each in found.findings if each.blocks]
    assert "pickle" in blocking and not found.loads_here
    for finding in found.findings:
        if finding.command:
            words = shlex.split(finding.command)
            assert main(words[1:]) == 0
            left = ckptconv.inspect(words[3]).findings
            assert finding.kind not in [each.kind for each in left]
            assert "pickle" not in [each.kind for each in left]


def test_torch_is_not_imported(write: Write, tmp_path: Path) -> None:
    """``inspect``, and a conversion to another device, do not import torch."""
    path = write(tagged(WEIGHTS))
    for args in (["inspect", path], ["convert", path, tmp_path / "dst.pkl", "--to", "cpu"]):
        run_without_torch("from ckptconv.cli.main import main; main(sys.argv[1:])", *args)


def test_a_pickle_in_the_corpus(corpus: Path, tmp_path: Path) -> None:
    """A pickle from the tests of torchmd-net contains the same tensors after a conversion to a pickle and then to a
    ``.pt``.
    """
    path = corpus / "torchmd+torchmd-net" / "tests" / "expected.pkl"
    wanted = ckptconv.load(path)
    ckptconv.convert(path, tmp_path / "dst.pkl", map_location="cuda:0")
    assert_same(wanted, converted(tmp_path / "dst.pkl", tmp_path / "dst.pt", map_location="cpu"))
    data = path.read_bytes()
    graph, _ = parse(lambda at, n: data[at : at + n], len(data), where="expected")
    rebuilt = [call for call in graph.calls if str(call.callable).endswith("_rebuild_tensor_v2")]
    assert len(ckptconv.inspect(path).tensors) == len(rebuilt)


@pytest.mark.untraced
def test_many_storages_of_protocol_2_take_no_memory(write: Write, tmp_path: Path) -> None:
    """In protocol 2, the data of storages are texts, which remain in the file even if they are short. Only one piece of
    one text is decoded at a time.
    """
    made = {f"w{i}": torch.rand(10_000) for i in range(1000)}
    path = write(pickle.dumps(made, 2))
    assert path.stat().st_size > 30_000_000
    with memory_below(30_000_000):
        ckptconv.convert(path, tmp_path / "dst.pt")
    assert_same(made, torch.load(tmp_path / "dst.pt", weights_only=True))


def test_texts_of_python_2_need_an_encoding(src: Path) -> None:
    """A note reports that texts of Python 2 need an encoding. Torch decodes them as UTF-8, and pickle decodes them as
    ASCII by default.
    """
    dst = src.with_suffix(".pkl")
    src.write_bytes(legacy_file({"name": "Zürich"}, {}, python2=True))
    report = ckptconv.convert(src, dst, format="pickle")
    assert any("encoding='utf-8'" in note for note in report.notes)
    found = pickle.loads(dst.read_bytes(), encoding="utf-8")
    assert found == torch.load(src, weights_only=False)
