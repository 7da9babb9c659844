"""Reading and writing the format that torch used before version 1.6.

The results are compared with those of torch. If torch cannot read the file, they are compared with torch's zip of the
same object.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn import quantized as nq

import ckptconv
from ckptconv.errors import CkptconvError, LimitError, MalformedError, RefusedError, UnsupportedError
from tests.support import zoo
from tests.support.archives import big_endian, records_of, rezip
from tests.support.conversions import converted, loaded, refused, unreadable
from tests.support.judge import assert_same, tags_of
from tests.support.legacy_files import (
    MAGIC,
    SYS_INFO,
    keys_and_data,
    legacy,
    legacy_file,
    object_pickle,
    storage_id,
)
from tests.support.memory import memory_below
from tests.support.reduced import Reduced
from tests.support.sampled import sampled

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::UserWarning:tests.support.zoo",
    "ignore:TypedStorage is deprecated",  # issued once for each process, at the first access
)

CASES = [
    (name, protocol) for name in zoo.ZOO for protocol in (2, 3, 4, 5) if protocol >= zoo.NEEDS_PROTOCOL.get(name, 2)
]
FLOATS = struct.pack("<6f", *range(6))


def refusal(act: Callable[[], Any]) -> str | None:
    """Return the error that `act` raises, as text. Return None if it succeeds."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def saved(name: str, path: Path, protocol: int) -> Any:
    """Save the object `name` of the zoo in the legacy format at `path`, and return it. Skip the test if torch
    refuses.
    """
    made = zoo.ZOO[name]()
    why = refusal(lambda: zoo.save(made, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False))
    if why:
        pytest.skip(f"torch cannot write it: {why}")
    return made


def readable(name: str, path: Path) -> bool:
    """Return whether torch can read the object `name` back from `path`. For two objects, torch uses values before it
    has loaded them, so it returns arbitrary memory.
    """
    return name not in ("nested", "generator") and refusal(lambda: tags_of(path)) is None


@pytest.fixture
def readable_file(name: str, src: Path) -> Path:
    """Return a file with the object `name` of the zoo in the legacy format. Skip the test if torch cannot write or read
    it.
    """
    saved(name, src, zoo.NEEDS_PROTOCOL.get(name, 2))
    if not readable(name, src):
        pytest.skip("torch cannot read it back")
    return src


# Files as torch writes them


@pytest.mark.parametrize(("name", "protocol"), sampled(CASES))
def test_the_zoo_to_a_zip_and_back(name: str, protocol: int, tmp_path: Path) -> None:
    """An object in the legacy format is the same object in a zip, with the same tags. The zip can be converted back if
    torch can read the legacy file. Otherwise the conversion back is refused.
    """
    src, there, back = tmp_path / "src.pt", tmp_path / "there.pt", tmp_path / "back.pt"
    made = saved(name, src, protocol)
    ckptconv.convert(src, there)
    if not readable(name, src):
        zoo.save(made, tmp_path / "zip.pt", pickle_protocol=protocol)
        assert_same(tags_of(tmp_path / "zip.pt")[0], tags_of(there)[0])
        refused(RefusedError, r"before 1\.6 .*cannot store", there, back, format="legacy")
        assert "legacy" in {finding.kind for finding in ckptconv.inspect(src).findings}
        return
    ckptconv.convert(there, back, format="legacy")
    wanted, tags = tags_of(src)
    for path in (there, back):
        found, found_tags = tags_of(path)
        assert_same(wanted, found)
        assert found_tags == tags


@pytest.mark.parametrize("name", zoo.ZOO)
def test_without_edits_it_is_the_same_file(name: str, readable_file: Path, dst: Path) -> None:
    """A conversion from legacy to legacy without options gives the same bytes. Exceptions are pickles with more than
    one spelling, for example with repeated texts of one character.
    """
    ckptconv.convert(readable_file, dst, format="legacy")
    if len(readable_file.read_bytes()) == len(dst.read_bytes()):
        assert readable_file.read_bytes() == dst.read_bytes()
    else:
        assert name in OTHERWISE_WRITTEN
    assert_same(*(tags_of(path)[0] for path in (readable_file, dst)))


#: Objects with texts of one character, or with opcodes of torch's C pickler that have another spelling.
OTHERWISE_WRITTEN = ["numpy_objects", "cycles", "set_cycle", "qualified", "containers"]
OTHERWISE_WRITTEN += ["objects"] * (sys.version_info >= (3, 13))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_retagged(name: str, readable_file: Path, dst: Path) -> None:
    """Conversions to ``cpu`` and ``cuda:1`` within the legacy format change the tags, and nothing else."""
    wanted, tags = tags_of(readable_file)
    for device in ("cpu", "cuda:1"):
        ckptconv.convert(readable_file, dst, map_location=device, format="legacy", force=True)
        found, found_tags = tags_of(dst)
        if name not in zoo.RNG:
            assert found_tags == [device] * len(tags)
        if name not in DEVICES_IN_CALLS:
            assert_same(wanted, found)


#: Objects with a device as the argument of a call. torch would need the device to load them.
DEVICES_IN_CALLS = ("allowed", "subclass")


def test_loadable_whatever_its_protocol(tmp_path: Path) -> None:
    """A state dict in any protocol from 0 to 5 is written so that torch's safe loader reads it, in a zip and in the
    legacy format. torch itself cannot read protocol 0.
    """
    state = nn.BatchNorm1d(3).state_dict()
    for protocol in range(6):
        src = tmp_path / f"{protocol}.pt"
        legacy(state, src, pickle_protocol=protocol)
        assert bool(refusal(lambda src=src: torch.load(src, weights_only=False))) == (protocol == 0)
        for format in ("pt", "legacy"):
            ckptconv.convert(src, tmp_path / "dst.pt", format=format, force=True)
            assert_same(state, torch.load(tmp_path / "dst.pt", weights_only=True))


def test_names_and_parts_as_in_any_other(src: Path, dst: Path, safe: Path) -> None:
    """Prefixes, exclusions and safetensors work with the legacy format. An excluded tensor takes no space in the
    output.
    """
    weights = {"module.a": torch.arange(4.0), "module.b": torch.ones(1000)}
    legacy({"state_dict": weights, "epoch": 3}, src)
    found = converted(src, dst, strip_prefix="module.", exclude="module.b", format="legacy")
    assert_same({"state_dict": {"a": torch.arange(4.0)}, "epoch": 3}, found)
    assert dst.stat().st_size < 1000
    ckptconv.convert(src, safe, strip_prefix="module.")
    assert_same({"a": weights["module.a"], "b": weights["module.b"]}, ckptconv.load(safe))
    assert_same(torch.load(src), ckptconv.load(src))
    assert_same(ckptconv.load(safe), converted(safe, dst, format="legacy"))


def test_ties_of_safetensors_are_reported(tmp_path: Path) -> None:
    """A name that the source contains only as the text of a tie becomes a tied tensor, and the report of every torch
    format lists it.
    """
    tied = torch.ones(2)
    ckptconv.save({"a": tied, "b": tied}, tmp_path / "src.safetensors")
    for format, suffix in (("pt", "pt"), ("legacy", "pth"), ("pickle", "pkl")):
        dst = tmp_path / f"dst.{suffix}"
        report = ckptconv.convert(tmp_path / "src.safetensors", dst, format=format)  # type: ignore[arg-type]
        assert report.ties == (("b", "a"),)
    found = torch.load(tmp_path / "dst.pth", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize(
    "dtype",
    [d for d in zoo.DTYPES if not zoo.SUB_BYTE.fullmatch(str(d)) and not re.match(r"torch\.qu?int", str(d))],
    ids=str,
)
def test_dtypes_that_torch_cannot_read_back(dtype: torch.dtype, src: Path, dst: Path) -> None:
    """Every dtype is read from the legacy format. A dtype that torch could not read back is not written in the legacy
    format. The error names the tensor and suggests the format ``pt``.
    """
    try:
        tensor = zoo.counted(dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        pytest.skip(str(error))
    legacy({"w": tensor}, src)
    torch.save({"w": tensor}, dst)
    wanted = torch.load(dst, weights_only=True)
    assert_same(wanted, converted(src, dst))
    summary = ckptconv.inspect(src)
    assert summary.loads_here == (refusal(lambda: torch.load(src, weights_only=True)) is None)
    if not summary.loads_here:
        assert [finding.kind for finding in summary.findings] == ["legacy"]
        refused(
            RefusedError,
            r"cannot store w \(\w+\).*format='pt'",
            dst,
            src.with_name("again.pt"),
            format="legacy",
        )
        assert f"torch.{summary.tensors[0].dtype}" == str(dtype)
    else:
        assert_same(wanted, converted(dst, src.with_name("again.pt"), format="legacy"))


def test_one_storage_under_two_dtypes_is_refused(src: Path, dst: Path) -> None:
    """A storage that is used with two dtypes is refused, because every format has one dtype for each storage. torch
    refuses to write such an object too.
    """
    whole = torch.arange(4.0)
    assert "different types" in str(refusal(lambda: legacy([whole, whole.view(torch.int32)], src)))
    torch.save({"a": torch.ones(4), "b": torch.ones(4, dtype=torch.int32)}, src)
    pickled = records_of(src)["data.pkl"]
    second = re.search(rb"IntStorage\nq.X\x01\x00\x00\x001", pickled)
    assert second
    rezip(src, src, {"data.pkl": pickled.replace(second[0], second[0][:-1] + b"0")})
    refused(MalformedError, "described in two ways", src, dst, format="legacy")


def test_hints_name_only_tensors_with_keys(src: Path, dst: Path) -> None:
    """The hint names the options that exclude the tensors that cannot be written. There is no hint if one of them is an
    element of a list, which cannot be excluded.
    """
    odd = torch.ones(2, dtype=torch.uint16)
    torch.save({"a": odd, "b": [torch.ones(2)]}, src)
    refused(RefusedError, r"exclude='\./a'", src, dst, format="legacy")
    ckptconv.convert(src, dst, format="legacy", exclude="./a")
    torch.save({"a": odd, "b": [odd.clone(), torch.ones(2)]}, src)
    error = refused(RefusedError, "cannot store a ", src, dst.with_name("other.pt"), format="legacy")
    assert "exclude" not in str(error)


def test_a_bare_storage_of_bytes_is_refused(src: Path, dst: Path) -> None:
    """An untyped storage that no tensor uses is read from the legacy format. Writing it in the legacy format is
    refused.
    """
    legacy([torch.ones(3).untyped_storage()], src)
    ckptconv.convert(src, dst)
    assert bytes(torch.load(dst, weights_only=False)[0]) == bytes(torch.ones(3).untyped_storage())
    refused(RefusedError, "without a dtype", dst, dst.with_name("again.pt"), format="legacy")


def test_big_endian_zips_are_turned_round(src: Path, dst: Path) -> None:
    """The legacy format is always little-endian, so the bytes of every number of a big-endian zip are swapped."""
    made = {"f": torch.arange(3.0), "i": torch.arange(5), "c": torch.tensor([1 + 2j]), "b": torch.tensor([True])}
    torch.save(made, src)
    big_endian(src, src, {"0": 4, "1": 8, "2": 4, "3": 1})
    assert_same(made, torch.load(src, weights_only=True))
    assert_same(made, converted(src, dst, format="legacy"))


def quantized(kind: str) -> nn.Module:
    """Return a module of this `kind` whose weights torch packs when it loads the module."""
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in torch.backends.quantized.supported_engines else "qnnpack"
    made: nn.Module = {
        "linear": lambda: nq.Linear(4, 3),
        "conv": lambda: nq.Conv2d(2, 2, 3),
        "embedding": lambda: nq.Embedding(4, 4),
    }.get(
        kind,
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear}, dtype=torch.qint8),
    )()
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "conv", "embedding", "dynamic"])
def test_packed_weights_are_refused(kind: str, src: Path, dst: Path) -> None:
    """Writing packed weights in the legacy format is refused, because torch would pack them before it reads their
    bytes. ``inspect`` reports a file that already contains them.
    """
    torch.save(quantized(kind), src)
    refused(RefusedError, "packed weights", src, dst, format="legacy")
    legacy(quantized(kind), src)
    assert "legacy" in {finding.kind for finding in ckptconv.inspect(src).findings}


def test_names_that_only_the_zip_loader_maps(src: Path, tmp_path: Path) -> None:
    """``torch.tensor._rebuild_from_type_v2``, as torch 1.8 wrote it, is known only to torch's zip loader. Legacy files
    and plain pickles contain its new name.
    """
    made = torch.ones(2)
    made.note = "x"  # type: ignore[attr-defined]
    torch.save({"w": made}, src)
    pickled = records_of(src)["data.pkl"]
    assert b"ctorch._tensor\n_rebuild_from_type_v2" in pickled
    rezip(src, src, {"data.pkl": pickled.replace(b"ctorch._tensor\n", b"ctorch.tensor\n")})
    wanted = torch.load(src, weights_only=False)
    for name, format in (("dst.pt", "pt"), ("dst.pt", "legacy"), ("dst.pkl", "pickle")):
        ckptconv.convert(src, tmp_path / name, format=format, force=True)  # type: ignore[arg-type]
        assert_same(wanted, loaded(tmp_path / name, weights_only=False))


# Files as old versions of torch and Python 2 wrote them


def both(data: bytes, tmp_path: Path, **options: Any) -> list[Any]:
    """Return what torch loads, with `options`, after `data` is converted to a zip and to the legacy format.

    The file ``old.pt`` contains `data`.
    """
    src, new, again = tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "again.pt"
    src.write_bytes(data)
    ckptconv.convert(src, new, force=True)
    ckptconv.convert(src, again, format="legacy", force=True)
    return [torch.load(path, **options) for path in (new, again)]


def storage(key: str = "0", tag: str = "cpu", part: Any = None) -> Any:
    """Return a reference to a storage of six numbers, or to a `part` of it."""
    return storage_id(torch.FloatStorage, key, tag, 6, part)


def with_storages(obj: Any, *keys: str, **options: Any) -> bytes:
    """Return a file with `obj` and, for each of `keys`, a storage of six numbers."""
    return legacy_file(obj, dict.fromkeys(keys, (6, FLOATS)), **options)


def rebuilt(storage: Any, offset: int, *size: int) -> Reduced:
    """Return a contiguous tensor in the form of ``_rebuild_tensor``: without ``requires_grad`` and without hooks."""
    stride = tuple(int(torch.tensor(size[i + 1 :]).prod()) for i in range(len(size)))
    return Reduced(torch._utils._rebuild_tensor, (storage, offset, size, stride))


def test_python_2(tmp_path: Path) -> None:
    """A file from Python 2, with an OrderedDict made of pairs and with texts as STRING and SHORT_BINSTRING, is read
    with its names. The safe loader reads the output, and its tensors can be renamed.
    """
    weight = rebuilt(storage("94057", "cuda:0"), 0, 2, 3)
    pairs = [["module.conv.weight", weight], ["module.a name longer than twenty letters", weight]]
    data = with_storages(Reduced(OrderedDict, (pairs,)), "94057", python2=True)
    kept = both(data, tmp_path, map_location="cpu")
    src = tmp_path / "old.pt"
    wanted = torch.load(src, map_location="cpu", weights_only=False)
    assert [*wanted] == [name for name, _ in pairs]
    for found in kept:
        assert_same(wanted, found)
    summary = ckptconv.inspect(src)
    assert [tensor.name for tensor in summary.tensors] == [*wanted]
    assert summary.state_dicts[0].path == "."
    found = converted(src, tmp_path / "dst.safetensors", strip_prefix="module")
    assert found["conv.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_shared_pairs_are_kept(tmp_path: Path) -> None:
    """The list of pairs that an OrderedDict is made of is kept unchanged if the checkpoint also refers to it
    elsewhere.
    """
    pairs = [["a", 1], ["b", 2]]
    for found in both(legacy_file([Reduced(OrderedDict, (pairs,)), pairs, pairs[0]], {}), tmp_path):
        assert found == [OrderedDict(pairs), pairs, pairs[0]]
        assert found[1][0] is found[2]


def test_values_of_python_2_are_not_decoded(tmp_path: Path) -> None:
    """A ``str`` of Python 2 is not decoded if it is a value. It may be bytes, and only the program that loads it can
    decide.
    """
    data = legacy_file({"name": "resnet", "more": ["x"]}, {}, python2=True)
    as_bytes = {"name": b"resnet", "more": [b"x"]}
    assert both(data, tmp_path, weights_only=False, encoding="bytes") == [as_bytes, as_bytes]
    as_texts = {"name": "resnet", "more": ["x"]}
    assert [torch.load(tmp_path / name) for name in ("new.pt", "again.pt")] == [as_texts, as_texts]


@pytest.mark.parametrize("cls", [torch.FloatTensor, "cuda"])
def test_tensors_as_class_and_state(cls: Any, src: Path, dst: Path) -> None:
    """A call of ``torch.FloatTensor()`` with a state is read as a tensor. A ``torch.cuda.FloatTensor`` needs no CUDA
    after it is moved to the CPU.
    """
    state = storage("1", "cuda:0" if cls == "cuda" else "cpu"), 2, (2, 2), (2, 1)
    data = with_storages({"w": Reduced(torch.FloatTensor, (), state)}, "1")
    if cls == "cuda":
        data = data.replace(b"ctorch\nFloatTensor", b"ctorch.cuda\nFloatTensor")
    src.write_bytes(data)
    wanted = [[2.0, 3.0], [4.0, 5.0]]
    if cls == "cuda":
        assert refusal(lambda: torch.load(src, map_location="cpu")) or torch.cuda.is_available()
    else:
        assert torch.load(src)["w"].tolist() == wanted
    for format in ("pt", "legacy"):
        found = converted(src, dst, map_location="cpu", format=format)["w"]
        assert found.tolist() == wanted
        assert found.storage_offset() == 2
    assert ckptconv.inspect(src).tensors[0].shape == (2, 2)


def old_parameters(style: str) -> dict[str, Any]:
    """Return parameters as old versions of torch wrote them.

    The `style` "state" is a state of (requires_grad, volatile, hooks). The `style` "arguments" is ``Parameter(tensor,
    requires_grad)``, as torch 0.4 wrote it.
    """
    tensors = {name: rebuilt(storage(name), 0, 6) for name in ("grad", "frozen", "default")}
    if style == "state":
        grads = {"grad": True, "frozen": False}
        return {
            name: Reduced(nn.Parameter, (tensors[name],), (grad, False, OrderedDict())) for name, grad in grads.items()
        }
    arguments = {
        "grad": (tensors["grad"], True),
        "frozen": (tensors["frozen"], False),
        "default": (tensors["default"],),
    }
    return {name: Reduced(nn.Parameter, each) for name, each in arguments.items()}


@pytest.mark.parametrize("style", ["state", "arguments"])
def test_old_parameters(style: str, tmp_path: Path) -> None:
    """Old parameters are read as parameters, frozen or not, as torch reads them."""
    made = old_parameters(style)
    kept = both(with_storages(made, *made), tmp_path)
    wanted = torch.load(tmp_path / "old.pt")
    grads = {name: name != "frozen" for name in made}
    assert {name: parameter.requires_grad for name, parameter in wanted.items()} == grads
    for found in kept:
        assert_same(wanted, found)
    tensors = ckptconv.inspect(tmp_path / "old.pt").tensors
    assert {tensor.path: tensor.requires_grad for tensor in tensors} == grads


def test_parts_of_storages(tmp_path: Path) -> None:
    """Tensors on parts of one storage still share its bytes after the conversion. Their values are those that torch
    reads.
    """
    made = [rebuilt(storage("root", part=part), 1, 3) for part in (("v1", 0, 4), ("v2", 2, 4))]
    kept = both(with_storages([*made, rebuilt(storage("root"), 0, 6)], "root"), tmp_path)
    wanted = [[1, 2, 3], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
    for found in (torch.load(tmp_path / "old.pt"), *kept):
        assert [t.tolist() for t in found] == wanted
    for found in kept:
        found[2][3] = 7  # the fourth element, which all three tensors contain
        assert [t.tolist() for t in found[:2]] == [[1, 2, 7], [7, 4, 5]]


def test_only_parts_of_storages(tmp_path: Path) -> None:
    """A part of a storage that no tensor uses becomes a storage of its own. If the complete storage is also used, a
    note reports this.
    """
    part = storage("root", part=("part", 2, 3))
    for found in both(with_storages(part, "root"), tmp_path, weights_only=False):
        assert [*found] == [2, 3, 4]
    for found in both(with_storages([part, rebuilt(storage("root"), 0, 6)], "root"), tmp_path, weights_only=False):
        assert [*found[0]] == [2, 3, 4]
        assert found[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert "are read as separate storages" in ckptconv.convert(tmp_path / "old.pt", tmp_path / "x.pt").notes[0]


def test_parts_of_storages_share_no_bytes_after_selection(src: Path, dst: Path) -> None:
    """``load``, ``diff`` and ``verify`` report that parts of storages without tensors no longer share bytes with the
    complete storage. Parts that tensors use lose nothing, and nothing is reported.
    """
    part = storage("root", part=("part", 2, 3))
    src.write_bytes(with_storages([part, rebuilt(storage("root"), 0, 6)], "root"))
    ours = torch.load(src, weights_only=False)
    ours[0][0] = 7
    assert ours[1][2] == 7
    said = "parts of storages (torch before 0.4) are read as separate storages: 1"
    with pytest.warns(UserWarning, match=re.escape(f"{src.name}: {said}")):
        found = ckptconv.load(src)
    found[0][0] = 7
    assert found[1][2] != 7
    ckptconv.convert(src, dst)
    for side, pair in (("A", (src, dst)), ("B", (dst, src))):
        assert any(note.startswith(f"{side}: {said}") for note in ckptconv.diff(*pair).notes)
    assert [finding.level for finding in ckptconv.verify(src).findings if said in finding.what] == ["warning"]
    src.write_bytes(with_storages([rebuilt(part, 0, 3), rebuilt(storage("root"), 0, 6)], "root"))
    ckptconv.load(src)
    assert not ckptconv.diff(src, src).notes


def test_a_tensor_must_stay_in_its_part(src: Path) -> None:
    """A tensor that exceeds its part of a storage is refused, even if it fits into the complete storage. torch refuses
    it too.
    """
    src.write_bytes(with_storages(rebuilt(storage("root", part=("v", 0, 2)), 0, 4), "root"))
    assert refusal(lambda: torch.load(src, weights_only=True))
    unreadable(src, MalformedError, "outside its part")


class Net(nn.Module):
    """A module whose class the file names, together with the source text of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.again = nn.Linear(2, 1)


def test_modules_with_their_source(tmp_path: Path) -> None:
    """A module keeps the source text of its classes in the legacy format. A zip has no place for it, so the report
    lists it as left behind.
    """
    src, there, back = tmp_path / "src.pt", tmp_path / "there.pt", tmp_path / "back.pt"
    model = Net()
    legacy(model, src)
    text = b"A module whose class the file names"
    assert text in src.read_bytes()
    report = ckptconv.convert(src, there)
    left = {left.path: left.nbytes for left in report.left_behind}
    assert left.keys() == {f"the source code of {cls.__module__}.{cls.__qualname__}" for cls in (Net, nn.Linear)}
    assert min(left.values()) > 100
    assert text not in there.read_bytes()
    ckptconv.convert(src, back, format="legacy", map_location="cpu")
    assert back.read_bytes() == src.read_bytes()
    for path in (there, back):
        found = torch.load(path, weights_only=False)
        assert type(found) is Net
        assert_same(model.state_dict(), found.state_dict())


# Hostile files


def parts_of(tensor_count: int = 2) -> tuple[bytes, bytes]:
    """Return a file with `tensor_count` tensors in two pieces: the bytes before the list of keys, and the rest."""
    keys = [str(i) for i in range(tensor_count)]
    whole = with_storages([rebuilt(storage(key), 0, 6) for key in keys], *keys)
    tail = keys_and_data(dict.fromkeys(keys, (6, FLOATS)))
    assert whole.endswith(tail)
    return whole[: -len(tail)], tail


def with_id(*parts: Any) -> bytes:
    """Return a file with one storage whose persistent id has these `parts`."""
    other = storage()
    other.parts = parts
    return with_storages([other], "0")


def as_a_tar_archive(data: bytes) -> bytes:
    """Return a tar archive that begins like `data`. torch checks for a tar archive first, so the file can be read in
    two ways.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    block = bytearray(data[:100].ljust(100, b"\0") + stream.getvalue()[100:512])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    made = bytes(block) + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        assert tar.getmembers()
    return made


HEAD, TAIL = parts_of()
WHOLE = HEAD + TAIL
ONE, ONE_TAIL = parts_of(1)
STORAGES = {"0": (6, FLOATS), "1": (6, FLOATS)}
FOREIGN = {**STORAGES, "2": (6, FLOATS)}
HUGE = {"0": (1 << 40, FLOATS)}
DATA = struct.pack("<q", 6) + FLOATS

#: Files that are refused, and the reason in the error.
BAD: dict[str, tuple[bytes, str]] = {
    "the last byte is missing": (WHOLE[:-1], "1 of"),
    # with an empty list of keys, torch returns arbitrary memory
    "no keys": (HEAD + pickle.dumps([], 2), "list of keys"),
    "a missing key": (HEAD + keys_and_data({"0": (6, FLOATS)}), "1 missing"),
    "a key of nothing": (HEAD + keys_and_data(FOREIGN), "1 unused"),
    "a key twice": (HEAD + pickle.dumps(["0", "0", "1"], 2) + 3 * DATA, "distinct strings"),
    "keys that are not a list": (HEAD + pickle.dumps({"0": 1}, 2), "distinct strings"),
    "keys that are no texts": (HEAD + pickle.dumps([0, 1], 2), "distinct strings"),
    # The number before the bytes of a storage must be that of the persistent id. Nothing is allocated for 2**40
    # elements.
    **{
        f"{numel} elements in the data": (ONE + keys_and_data({"0": (numel, FLOATS)}), "different size")
        for numel in (5, 7, -1, 1 << 40, -(1 << 63))
    },
    "2**40 elements": (
        legacy_file(rebuilt(storage_id(torch.FloatStorage, "0", "cpu", 1 << 40), 0, 6), HUGE),
        "truncated",
    ),
    "-1 elements": (legacy_file([storage_id(torch.FloatStorage, "0", "cpu", -1)], {"0": (-1, b"")}), "wrong types"),
    "a byte behind the end": (WHOLE + b"\0", "after the last storage"),
    "a checkpoint behind the end": (WHOLE + WHOLE, "several checkpoints"),
    # torch also unpickles the small pickles before and after the object, so a call in them is not ignored
    "a call in the system's information": (
        legacy_file([], {}, sys_info=Reduced(print, ("pwned",))),
        "contain code",
    ),
    "a call in the keys": (
        ONE + pickle.dumps([Reduced(str, (0,))], 2) + ONE_TAIL[len(pickle.dumps(["0"], 2)) :],
        "contain code",
    ),
    "a dangerous call": (legacy_file([Reduced(os.system, ("true",))], {}), "system"),
    "a nested file": (legacy_file([Reduced(torch.storage._load_from_bytes, (WHOLE,))], {}), "_load_from_bytes"),
    "an id without a view": (
        with_id("storage", torch.FloatStorage, "0", "cpu", 6),
        "neither a storage nor a class",
    ),
    "an id of a class that is none": (with_id("module", torch.nn.Linear, None), "neither a storage nor a class"),
    "an id of another class": (
        with_id("storage", torch.nn.Linear, "0", "cpu", 6, None),
        "does not name a storage class",
    ),
    "an id with a text for its class": (
        with_id("storage", "FloatStorage", "0", "cpu", 6, None),
        "does not name a storage class",
    ),
    "an id with a number for its key": (with_id("storage", torch.FloatStorage, 0, "cpu", 6, None), "wrong types"),
    "an id with a bool for its number": (with_id("storage", torch.FloatStorage, "0", "cpu", True, None), "wrong types"),
    "a storage that is called": (
        with_storages([storage()], "0").replace(object_pickle([storage()]), object_pickle([storage()])[:-2] + b")Ra."),
        "called",
    ),
    # torch uses the first class for all references
    "a storage of two classes": (
        with_storages([storage_id(cls, "0", "cpu", 6) for cls in (torch.FloatStorage, torch.IntStorage)], "0"),
        "two ways",
    ),
    "a part that is described in two ways": (
        with_storages([rebuilt(storage("root", part=("v", at, 4)), 0, 2) for at in (0, 2)], "root"),
        "two ways",
    ),
    # torch keeps storages and parts in one table, and would confuse the two
    **{
        f"a part with the key of {whose} storage": (
            with_storages(
                [rebuilt(storage("other"), 0, 6), rebuilt(storage("root", part=(key, 2, 3)), 0, 3)], "other", "root"
            ),
            "of both a storage and a part",
        )
        for whose, key in (("its", "root"), ("another", "other"))
    },
    **{
        f"the part {part}": (with_storages(rebuilt(storage("root", part=part), 0, 1), "root"), "view of a storage")
        for part in (("v", 4, 3), ("v", -1, 2), ("v", 0), ("v", 1 << 70, 1), (1, 0, 1))
    },
    "another version": (WHOLE.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2), 1), "version"),
    "a tar archive at once": (as_a_tar_archive(WHOLE), "tar archive"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused(kind: str, src: Path, dst: Path) -> None:
    """An invalid or dangerous file is refused with the reason."""
    data, said = BAD[kind]
    src.write_bytes(data)
    refused(CkptconvError, said, src, dst)


def test_truncated_anywhere(src: Path, dst: Path) -> None:
    """A file that is truncated at any byte is refused. After the first 40 bytes, the error says that it is
    truncated.
    """
    for length in range(len(WHOLE)):
        src.write_bytes(WHOLE[:length])
        refused(CkptconvError, "truncated" if length > 40 else None, src, dst)


def test_a_big_endian_machine_is_a_note(src: Path, dst: Path) -> None:
    """A file that claims to be from a big-endian machine is converted with a note. torch only ever wrote little-endian
    data.
    """
    made = {"w": rebuilt(storage(), 0, 6)}
    src.write_bytes(with_storages(made, "0", sys_info={**SYS_INFO, "little_endian": False}))
    report = ckptconv.convert(src, dst)
    assert any("big-endian" in note for note in report.notes)
    assert_same(torch.load(src), torch.load(dst))


def test_ids_as_texts(src: Path, dst: Path) -> None:
    """A persistent id that protocol 0 stores as text is read if it describes a storage, although torch cannot read it.
    Any other text is refused.
    """
    made = [torch.arange(3), torch.ones(2, dtype=torch.uint16)]
    legacy(made, src, pickle_protocol=0)
    assert refusal(lambda: torch.load(src, weights_only=False))
    assert_same(made, converted(src, dst))
    data = src.read_bytes()
    found = re.search(rb"P\(.*\)\n", data)
    assert found
    for text in (b"P(1)\n", b"Pstorage\n", found[0].replace(b"None", b"exit()"), found[0].replace(b", 3,", b", 3, 3,")):
        src.write_bytes(data.replace(found[0], text))
        with pytest.raises((UnsupportedError, MalformedError, LimitError)):
            ckptconv.inspect(src)


def test_long_ids_as_texts_cost_nothing(src: Path) -> None:
    """A persistent id of several megabytes of text is refused without building objects from it."""
    text = b"('storage', <class 'torch.FloatStorage'>, " + b"1," * 1_000_000 + b")"
    head = b"".join(pickle.dumps(value, 0) for value in (MAGIC, 1001, {}))
    src.write_bytes(head + b"P" + text + b"\n." + pickle.dumps([], 0))
    with memory_below(20_000_000):
        unreadable(src, UnsupportedError, "does not name a storage")
