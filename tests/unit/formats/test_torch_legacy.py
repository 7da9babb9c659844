"""torch's format from before 1.6, read and written: torch is the judge where it can read, its
zip of the same object where it cannot.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import tarfile
import tracemalloc
import zipfile
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
from tests.support.judge import assert_same, tags_of
from tests.support.legacy_files import Old, keys_and_data, legacy, legacy_file, object_pickle, storage_id

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo")

CASES = [
    (name, protocol) for name in zoo.ZOO for protocol in (2, 3, 4, 5) if protocol >= zoo.NEEDS_PROTOCOL.get(name, 2)
]
FLOATS = struct.pack("<6f", *range(6))


def refusal(act: Callable[[], Any]) -> str | None:
    """What ACT raises, in words; None where it does what it should."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def saved(name: str, path: Path, protocol: int) -> Any:
    """The object NAME of the zoo, saved in the older format at PATH; skips where torch itself refuses."""
    made = zoo.ZOO[name]()
    why = refusal(lambda: zoo.save(made, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False))
    if why:
        pytest.skip(f"torch cannot write it: {why}")
    return made


def readable(name: str, path: Path) -> bool:
    """Whether torch reads the object NAME back from PATH: of some it reads values before
    they are there, with whatever memory held.
    """
    return name not in ("nested", "generator") and refusal(lambda: tags_of(path)) is None


def readable_file(name: str, folder: Path) -> Path:
    """The object NAME of the zoo in the older format, in FOLDER; skips where torch cannot write or read it so."""
    path = folder / "src.pt"
    saved(name, path, zoo.NEEDS_PROTOCOL.get(name, 2))
    if not readable(name, path):
        pytest.skip("torch cannot read it back")
    return path


# As torch writes it


@pytest.mark.parametrize(("name", "protocol"), CASES)
def test_the_zoo_to_a_zip_and_back(name: str, protocol: int, tmp_path: Path) -> None:
    """Whatever torch writes in the older format is the same object in a zip, with the same tags; what torch can read in
    the older format is the same there again.
    """
    src, there, back = tmp_path / "src.pt", tmp_path / "there.pt", tmp_path / "back.pt"
    made = saved(name, src, protocol)
    ckptconv.convert(src, there)
    if not readable(name, src):
        zoo.save(made, tmp_path / "zip.pt", pickle_protocol=protocol)
        assert_same(tags_of(tmp_path / "zip.pt")[0], tags_of(there)[0])
        with pytest.raises(RefusedError, match=r"before 1\.6 .*cannot hold"):
            ckptconv.convert(there, back, format="legacy")
        assert "legacy" in {finding["kind"] for finding in ckptconv.inspect(src)["findings"]}
        return
    wanted, tags = tags_of(src)
    found, found_tags = tags_of(there)
    assert_same(wanted, found)
    assert found_tags == tags
    ckptconv.convert(there, back, format="legacy")
    found, found_tags = tags_of(back)
    assert_same(wanted, found)
    assert found_tags == tags


@pytest.mark.parametrize("name", zoo.ZOO)
def test_without_edits_it_is_the_same_file(name: str, tmp_path: Path) -> None:
    """legacy to legacy, nothing asked, gives the same bytes, but for texts of one character, which torch's pickler
    writes as often as they come.
    """
    src, dst = readable_file(name, tmp_path), tmp_path / "dst.pt"
    ckptconv.convert(src, dst, format="legacy")
    if len(src.read_bytes()) == len(dst.read_bytes()):
        assert src.read_bytes() == dst.read_bytes()
    else:
        assert name in OTHERWISE_WRITTEN
    assert_same(*(tags_of(path)[0] for path in (src, dst)))


#: Objects with one-character texts, or that torch's C pickler writes with opcodes for which there is another spelling.
OTHERWISE_WRITTEN = ("numpy_objects", "cycles", "set_cycle", "qualified", "containers")


@pytest.mark.parametrize("name", zoo.ZOO)
def test_retagged(name: str, tmp_path: Path) -> None:
    """``to cpu`` and ``to cuda:1`` in the format itself change the tags, and nothing else."""
    src, dst = readable_file(name, tmp_path), tmp_path / "dst.pt"
    wanted, tags = tags_of(src)
    for device in ("cpu", "cuda:1"):
        ckptconv.convert(src, dst, map_location=device, format="legacy", force=True)
        found, found_tags = tags_of(dst)
        if name not in zoo.RNG:
            assert found_tags == [device] * len(tags)
        if name not in DEVICES_IN_CALLS:
            assert_same(wanted, found)


#: Rebuilt on a device that is an argument of a call: torch would need it.
DEVICES_IN_CALLS = ("allowed", "subclass")


def test_loadable_whatever_its_protocol(tmp_path: Path) -> None:
    """A state dict in protocol 0 to 5 comes out so that torch's safe loader takes it, as a zip and in the format
    itself; of protocol 0 torch itself reads none back.
    """
    state = nn.BatchNorm1d(3).state_dict()
    for protocol in range(6):
        src = tmp_path / f"{protocol}.pt"
        legacy(state, src, pickle_protocol=protocol)
        assert bool(refusal(lambda src=src: torch.load(src, weights_only=False))) == (protocol == 0)
        for format in ("pt", "legacy"):
            ckptconv.convert(src, tmp_path / "dst.pt", format=format, force=True)
            assert_same(state, torch.load(tmp_path / "dst.pt", weights_only=True))


def test_names_and_parts_as_in_any_other(tmp_path: Path) -> None:
    """Prefixes, parts and safetensors work on the older format, and what is left out takes its bytes along."""
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    weights = {"module.a": torch.arange(4.0), "module.b": torch.ones(1000)}
    legacy({"state_dict": weights, "epoch": 3}, src)
    ckptconv.convert(src, dst, strip_prefix="module.", exclude="module.b", format="legacy")
    assert_same({"state_dict": {"a": torch.arange(4.0)}, "epoch": 3}, torch.load(dst, weights_only=True))
    assert dst.stat().st_size < 1000
    ckptconv.convert(src, tmp_path / "dst.safetensors", strip_prefix="module.")
    assert_same({"a": weights["module.a"], "b": weights["module.b"]}, ckptconv.load(tmp_path / "dst.safetensors"))
    assert_same(torch.load(src), ckptconv.load(src))
    ckptconv.convert(tmp_path / "dst.safetensors", tmp_path / "back.pt", format="legacy")
    assert_same(ckptconv.load(tmp_path / "dst.safetensors"), torch.load(tmp_path / "back.pt", weights_only=True))


def test_ties_of_safetensors_are_reported(tmp_path: Path) -> None:
    """A name that the source has as a text alone is a tensor again, tied, which every
    format of torch's says in its report.
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
def test_dtypes_that_torch_cannot_read_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each dtype is read from the older format; where torch could not read it back it is refused by name, and
    ``--format pt`` is the way.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    try:
        tensor = zoo.counted(dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        pytest.skip(str(error))
    legacy({"w": tensor}, src)
    torch.save({"w": tensor}, tmp_path / "zip.pt")
    wanted = torch.load(tmp_path / "zip.pt", weights_only=True)
    ckptconv.convert(src, dst)
    assert_same(wanted, torch.load(dst, weights_only=True))
    summary = ckptconv.inspect(src)
    assert summary["loads_here"] == (refusal(lambda: torch.load(src, weights_only=True)) is None)
    if not summary["loads_here"]:
        assert [finding["kind"] for finding in summary["findings"]] == ["legacy"]
        with pytest.raises(RefusedError, match=r"cannot hold w \(\w+\).*format='pt'"):
            ckptconv.convert(dst, tmp_path / "no.pt", format="legacy")
        assert f"torch.{summary['tensors'][0]['dtype']}" == str(dtype)
    else:
        ckptconv.convert(dst, tmp_path / "again.pt", format="legacy")
        assert_same(wanted, torch.load(tmp_path / "again.pt", weights_only=True))


def test_one_storage_under_two_dtypes_is_refused(tmp_path: Path) -> None:
    """A storage that is named under two dtypes is refused: every format knows one for
    each, and torch refuses to write that too.
    """
    whole = torch.arange(4.0)
    assert "different types" in str(refusal(lambda: legacy([whole, whole.view(torch.int32)], tmp_path / "no.pt")))
    torch.save({"a": torch.ones(4), "b": torch.ones(4, dtype=torch.int32)}, tmp_path / "one.pt")
    with zipfile.ZipFile(tmp_path / "one.pt") as old, zipfile.ZipFile(tmp_path / "src.pt", "w") as new:
        pickled = old.read("one/data.pkl")
        second = re.search(rb"IntStorage\nq.X\x01\x00\x00\x001", pickled)
        assert second
        new.writestr("one/data.pkl", pickled.replace(second[0], second[0][:-1] + b"0"))
        new.writestr("one/data/0", old.read("one/data/0"))
        new.writestr("one/version", "3\n")
    with pytest.raises(MalformedError, match="described in two ways"):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", format="legacy")


def test_only_what_has_a_key_is_offered_to_be_left_out(tmp_path: Path) -> None:
    """The hint names the flags that leave out what cannot be written, where that works: an element of a
    list has none.
    """
    odd = torch.ones(2, dtype=torch.uint16)
    torch.save({"a": odd, "b": [torch.ones(2)]}, tmp_path / "one.pt")
    with pytest.raises(RefusedError, match=r"exclude='\./a'"):
        ckptconv.convert(tmp_path / "one.pt", tmp_path / "dst.pt", format="legacy")
    ckptconv.convert(tmp_path / "one.pt", tmp_path / "dst.pt", format="legacy", exclude="./a")
    torch.save({"a": odd, "b": [odd.clone(), torch.ones(2)]}, tmp_path / "two.pt")
    with pytest.raises(RefusedError, match="cannot hold a ") as caught:
        ckptconv.convert(tmp_path / "two.pt", tmp_path / "other.pt", format="legacy")
    assert "exclude" not in str(caught.value)


def test_a_bare_storage_of_bytes_is_refused(tmp_path: Path) -> None:
    """An untyped storage that no tensor uses is read, and refused by name on the way back; a typed one is written."""
    src, there = tmp_path / "src.pt", tmp_path / "there.pt"
    legacy([torch.ones(3).untyped_storage()], src)
    ckptconv.convert(src, there)
    assert bytes(torch.load(there, weights_only=False)[0]) == bytes(torch.ones(3).untyped_storage())
    with pytest.raises(RefusedError, match="without a dtype"):
        ckptconv.convert(there, tmp_path / "dst.pt", format="legacy")


def test_big_endian_zips_are_turned_round(tmp_path: Path) -> None:
    """The older format is little-endian everywhere: of a big-endian zip each number is turned round."""
    made = {"f": torch.arange(3.0), "i": torch.arange(5), "c": torch.tensor([1 + 2j]), "b": torch.tensor([True])}
    src, big = tmp_path / "src.pt", tmp_path / "big.pt"
    torch.save(made, src)
    with zipfile.ZipFile(src) as old, zipfile.ZipFile(big, "w") as new:
        width = {"data/0": 4, "data/1": 8, "data/2": 4, "data/3": 1}
        for info in old.infolist():
            data, name = old.read(info), info.filename.partition("/")[2]
            if name in width:
                data = b"".join(data[i : i + width[name]][::-1] for i in range(0, len(data), width[name]))
            if not name.startswith("."):
                new.writestr(info.filename, b"big" if name == "byteorder" else data)
    assert_same(made, torch.load(big, weights_only=True))
    ckptconv.convert(big, tmp_path / "dst.pt", format="legacy")
    assert_same(made, torch.load(tmp_path / "dst.pt", weights_only=True))


def quantized(kind: str) -> nn.Module:
    """A module whose weights torch packs when it is loaded."""
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
def test_packed_weights_are_refused(kind: str, tmp_path: Path) -> None:
    """torch packs quantized weights while it reads the pickle, before their bytes are there: refused by name;
    ``inspect`` says so of a file that has them already.
    """
    src, old = tmp_path / "src.pt", tmp_path / "old.pt"
    torch.save(quantized(kind), src)
    with pytest.raises(RefusedError, match="packed weights"):
        ckptconv.convert(src, tmp_path / "dst.pt", format="legacy")
    legacy(quantized(kind), old)
    assert "legacy" in {finding["kind"] for finding in ckptconv.inspect(old)["findings"]}


def test_names_that_only_the_zip_loader_maps(tmp_path: Path) -> None:
    """``torch.tensor._rebuild_from_type_v2``, as torch 1.8 wrote it, is found by torch's zip loader alone; in the older
    format and in plain pickles it has its new name.
    """
    made = torch.ones(2)
    made.note = "x"  # type: ignore[attr-defined]
    torch.save({"w": made}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "src.pt", "w") as old:
        pickled = new.read("new/data.pkl")
        assert b"ctorch._tensor\n_rebuild_from_type_v2" in pickled
        old.writestr("src/data.pkl", pickled.replace(b"ctorch._tensor\n", b"ctorch.tensor\n"))
        old.writestr("src/data/0", new.read("new/data/0"))
        old.writestr("src/version", "3\n")
    wanted = torch.load(tmp_path / "src.pt", weights_only=False)
    for format in ("pt", "legacy"):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", format=format, force=True)
        assert_same(wanted, torch.load(tmp_path / "dst.pt", weights_only=False))
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pkl", format="pickle")
    assert_same(wanted, pickle.loads((tmp_path / "dst.pkl").read_bytes()))


# As torch of long ago and Python 2 wrote it


def both(data: bytes, tmp_path: Path) -> tuple[Path, Path]:
    """DATA as a file, converted to a zip and in the format itself."""
    src = tmp_path / "old.pt"
    src.write_bytes(data)
    ckptconv.convert(src, tmp_path / "new.pt", force=True)
    ckptconv.convert(src, tmp_path / "again.pt", format="legacy", force=True)
    return tmp_path / "new.pt", tmp_path / "again.pt"


def rebuilt(storage: Any, offset: int, *size: int) -> Old:
    """A contiguous tensor as ``_rebuild_tensor`` makes it: no ``requires_grad``, no hooks."""
    stride = tuple(int(torch.tensor(size[i + 1 :]).prod()) for i in range(len(size)))
    return Old(torch._utils._rebuild_tensor, (storage, offset, size, stride))


def test_python_2(tmp_path: Path) -> None:
    """An OrderedDict made of pairs, texts as STRING and SHORT_BINSTRING, ids with such words: read with names, written
    so that the safe loader takes it, named as any other.
    """
    weight = rebuilt(storage_id(torch.FloatStorage, "94057", "cuda:0", 6), 0, 2, 3)
    pairs = [["module.conv.weight", weight], ["module.a name longer than twenty letters", weight]]
    data = legacy_file(Old(OrderedDict, (pairs,)), {"94057": (6, FLOATS)}, python2=True)
    (tmp_path / "src.pt").write_bytes(data)
    wanted = torch.load(tmp_path / "src.pt", map_location="cpu", weights_only=False)
    assert [*wanted] == [name for name, _ in pairs]
    for path in both(data, tmp_path):
        assert_same(wanted, torch.load(path, map_location="cpu", weights_only=True))
    summary = ckptconv.inspect(tmp_path / "src.pt")
    assert [tensor["name"] for tensor in summary["tensors"]] == [*wanted]
    assert summary["state_dicts"][0]["path"] == "."
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.safetensors", strip_prefix="module")
    assert ckptconv.load(tmp_path / "dst.safetensors")["conv.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_pairs_that_somebody_else_has_stay(tmp_path: Path) -> None:
    """The list that an OrderedDict is made of is kept as it is where the checkpoint holds it as well."""
    pairs = [["a", 1], ["b", 2]]
    data = legacy_file([Old(OrderedDict, (pairs,)), pairs, pairs[0]], {})
    for path in both(data, tmp_path):
        found = torch.load(path, weights_only=True)
        assert found == [OrderedDict(pairs), pairs, pairs[0]]
        assert found[1][0] is found[2]


def test_texts_of_python_2_that_are_no_names_stay(tmp_path: Path) -> None:
    """A value that was a ``str`` of Python 2 can be bytes, which only its reader knows: it is decoded by nobody."""
    data = legacy_file({"name": "resnet", "more": ["x"]}, {}, python2=True)
    for path in both(data, tmp_path):
        assert torch.load(path, weights_only=False, encoding="bytes") == {"name": b"resnet", "more": [b"x"]}
        assert torch.load(path, weights_only=True) == {"name": "resnet", "more": ["x"]}


@pytest.mark.parametrize("cls", [torch.FloatTensor, "cuda"])
def test_tensors_as_class_and_state(cls: Any, tmp_path: Path) -> None:
    """``torch.FloatTensor()`` and its state is a tensor; of ``torch.cuda.FloatTensor`` no
    CUDA is needed once it is on the CPU.
    """
    storage = storage_id(torch.FloatStorage, "1", "cuda:0" if cls == "cuda" else "cpu", 6)
    data = legacy_file({"w": Old(torch.FloatTensor, (), (storage, 2, (2, 2), (2, 1)))}, {"1": (6, FLOATS)})
    if cls == "cuda":
        data = data.replace(b"ctorch\nFloatTensor", b"ctorch.cuda\nFloatTensor")
    wanted = {"w": torch.tensor([[2.0, 3.0], [4.0, 5.0]])}
    (tmp_path / "src.pt").write_bytes(data)
    if cls == "cuda":
        assert refusal(lambda: torch.load(tmp_path / "src.pt", map_location="cpu")) or torch.cuda.is_available()
    else:
        assert_same(torch.load(tmp_path / "src.pt", weights_only=True)["w"].tolist(), wanted["w"].tolist())
    for format in ("pt", "legacy"):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", map_location="cpu", format=format, force=True)
        found = torch.load(tmp_path / "dst.pt", weights_only=True)["w"]
        assert found.tolist() == wanted["w"].tolist()
        assert found.storage_offset() == 2
    assert ckptconv.inspect(tmp_path / "src.pt")["tensors"][0]["shape"] == [2, 2]


def test_parameters_with_a_state(tmp_path: Path) -> None:
    """``Parameter(tensor)`` and its state (requires_grad, volatile, hooks) is a
    parameter, frozen or not, as torch reads it.
    """
    made = {}
    for name, grad in (("a", True), ("b", False)):
        tensor = rebuilt(storage_id(torch.FloatStorage, name, "cpu", 6), 0, 6)
        made[name] = Old(nn.Parameter, (tensor,), (grad, False, OrderedDict()))
    data = legacy_file(made, {"a": (6, FLOATS), "b": (6, FLOATS)})
    (tmp_path / "src.pt").write_bytes(data)
    wanted = torch.load(tmp_path / "src.pt", weights_only=True)
    assert [p.requires_grad for p in wanted.values()] == [True, False]
    for path in both(data, tmp_path):
        assert_same(wanted, torch.load(path, weights_only=True))
    assert [t["requires_grad"] for t in ckptconv.inspect(tmp_path / "src.pt")["tensors"]] == [True, False]


def test_parameters_without_a_state(tmp_path: Path) -> None:
    """``Parameter(tensor, requires_grad)``, as torch 0.4 wrote it, is a parameter as well, and so are a module's."""
    tensors = [rebuilt(storage_id(torch.FloatStorage, str(i), "cpu", 6), 0, 6) for i in range(3)]
    made = [
        Old(nn.Parameter, (tensors[0], True)),
        Old(nn.Parameter, (tensors[1], False)),
        Old(nn.Parameter, (tensors[2],)),
    ]
    data = legacy_file(made, {str(i): (6, FLOATS) for i in range(3)})
    (tmp_path / "src.pt").write_bytes(data)
    wanted = torch.load(tmp_path / "src.pt", weights_only=True)
    assert [p.requires_grad for p in wanted] == [True, False, True]
    for path in both(data, tmp_path):
        assert_same(wanted, torch.load(path, weights_only=True))
    assert [t["path"] for t in ckptconv.inspect(tmp_path / "src.pt")["tensors"]] == ["[0]", "[1]", "[2]"]


def test_parts_of_storages(tmp_path: Path) -> None:
    """Tensors on parts of one storage share its bytes as before; torch reads the same values, each at its place."""
    parts = [("v1", 0, 4), ("v2", 2, 4)]
    made = [rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6, part), 1, 3) for part in parts]
    made.append(rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6), 0, 6))
    data = legacy_file(made, {"root": (6, FLOATS)})
    (tmp_path / "src.pt").write_bytes(data)
    wanted = [t.tolist() for t in torch.load(tmp_path / "src.pt", weights_only=True)]
    assert wanted == [[1, 2, 3], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
    for path in both(data, tmp_path):
        found = torch.load(path, weights_only=True)
        assert [t.tolist() for t in found] == wanted
        found[2][3] = 7  # the fourth element, which all three show
        assert [t.tolist() for t in found[:2]] == [[1, 2, 7], [7, 4, 5]]


def test_parts_of_storages_alone(tmp_path: Path) -> None:
    """A part of a storage that is used without a tensor gets bytes of its own, which is said."""
    part = storage_id(torch.FloatStorage, "root", "cpu", 6, ("part", 2, 3))
    whole = rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6), 0, 6)
    data = legacy_file([part, whole], {"root": (6, FLOATS)})
    for path in both(data, tmp_path):
        found = torch.load(path, weights_only=False)
        assert [*found[0]] == [2, 3, 4]
        assert found[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert "share no bytes" in ckptconv.convert(tmp_path / "old.pt", tmp_path / "x.pt").notes[0]


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    """A part that is described in two ways is refused: torch takes the first description for all."""
    made = [
        rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6, part), 0, 2) for part in (("v", 0, 4), ("v", 2, 4))
    ]
    (tmp_path / "src.pt").write_bytes(legacy_file(made, {"root": (6, FLOATS)}))
    with pytest.raises(MalformedError, match="two ways"):
        ckptconv.inspect(tmp_path / "src.pt")


@pytest.mark.parametrize("key", ["root", "other"])
def test_a_part_with_the_key_of_a_storage(key: str, tmp_path: Path) -> None:
    """torch has one table for both, and would take the one for the other."""
    made = [
        rebuilt(storage_id(torch.FloatStorage, "other", "cpu", 6), 0, 6),
        rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6, (key, 2, 3)), 0, 3),
    ]
    (tmp_path / "src.pt").write_bytes(legacy_file(made, {"other": (6, FLOATS), "root": (6, FLOATS)}))
    with pytest.raises(MalformedError, match="of a storage and of a part"):
        ckptconv.inspect(tmp_path / "src.pt")


@pytest.mark.parametrize("part", [("v", 4, 3), ("v", -1, 2), ("v", 0), ("v", 1 << 70, 1), (1, 0, 1)])
def test_parts_outside_of_their_storage(part: Any, tmp_path: Path) -> None:
    """A part that reaches outside of its storage, or is no part at all, is refused."""
    made = rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6, part), 0, 1)
    (tmp_path / "src.pt").write_bytes(legacy_file(made, {"root": (6, FLOATS)}))
    with pytest.raises(MalformedError, match="view of a storage"):
        ckptconv.inspect(tmp_path / "src.pt")


def test_a_tensor_must_stay_in_its_part(tmp_path: Path) -> None:
    """A tensor that reaches outside of its part, though not of the whole storage, is refused, as torch refuses it."""
    made = rebuilt(storage_id(torch.FloatStorage, "root", "cpu", 6, ("v", 0, 2)), 0, 4)
    (tmp_path / "src.pt").write_bytes(legacy_file(made, {"root": (6, FLOATS)}))
    assert refusal(lambda: torch.load(tmp_path / "src.pt", weights_only=True))
    with pytest.raises(MalformedError, match="outside its part"):
        ckptconv.inspect(tmp_path / "src.pt")


class Net(nn.Module):
    """A module whose class the file names with its source text."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.again = nn.Linear(2, 1)


def test_modules_with_their_source(tmp_path: Path) -> None:
    """A whole module keeps the source text of its classes in the format itself; a zip
    has no place for it, which is said.
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


# Hostile


def reason(data: bytes, tmp_path: Path) -> str:
    """Why DATA is refused."""
    path = tmp_path / "bad.pt"
    path.write_bytes(data)
    with pytest.raises(CkptconvError) as caught:
        ckptconv.convert(path, tmp_path / "dst.pt")
    assert not (tmp_path / "dst.pt").exists()
    return str(caught.value)


def parts_of(tensor_count: int = 2) -> tuple[bytes, bytes]:
    """A file of some tensors: all before the list of keys, and the list of keys with the data."""
    made = [rebuilt(storage_id(torch.FloatStorage, str(i), "cpu", 6), 0, 6) for i in range(tensor_count)]
    whole = legacy_file(made, {str(i): (6, FLOATS) for i in range(tensor_count)})
    tail = keys_and_data({str(i): (6, FLOATS) for i in range(tensor_count)})
    assert whole.endswith(tail)
    return whole[: -len(tail)], tail


def test_truncated_anywhere(tmp_path: Path) -> None:
    """Cut short at any byte, the file is said to be, or to be no checkpoint at all."""
    whole = b"".join(parts_of())
    for length in range(len(whole)):
        said = reason(whole[:length], tmp_path)
        if length > 40:
            assert "cut short" in said, length
    assert "1 of" in reason(whole[:-1], tmp_path)


def test_keys_must_be_those_of_the_storages(tmp_path: Path) -> None:
    """An empty list of keys, with which torch hands out whatever memory holds, is refused; so are missing, doubled and
    foreign ones, and what is no list.
    """
    head, _ = parts_of()
    data = {"0": (6, FLOATS), "1": (6, FLOATS)}
    assert "list of keys" in reason(head + pickle.dumps([], 2), tmp_path)
    assert "1 missing" in reason(head + keys_and_data({"0": (6, FLOATS)}), tmp_path)
    assert "1 of nothing" in reason(head + keys_and_data({**data, "2": (6, FLOATS)}), tmp_path)
    doubled = pickle.dumps(["0", "0", "1"], 2) + 3 * (struct.pack("<q", 6) + FLOATS)
    assert "different texts" in reason(head + doubled, tmp_path)
    assert "different texts" in reason(head + pickle.dumps({"0": 1}, 2), tmp_path)
    assert "different texts" in reason(head + pickle.dumps([0, 1], 2), tmp_path)


def test_sizes_must_be_those_of_the_ids(tmp_path: Path) -> None:
    """The number before a storage's bytes must be the id's, whatever it claims;
    nothing is allocated for 2**40 elements.
    """
    head, _ = parts_of(1)
    for numel in (5, 7, -1, 1 << 40, -(1 << 63)):
        assert "another size" in reason(head + keys_and_data({"0": (numel, FLOATS)}), tmp_path)
    huge = legacy_file(rebuilt(storage_id(torch.FloatStorage, "0", "cpu", 1 << 40), 0, 6), {"0": (1 << 40, FLOATS)})
    assert "cut short" in reason(huge, tmp_path)
    assert "wrong types" in reason(
        legacy_file([storage_id(torch.FloatStorage, "0", "cpu", -1)], {"0": (-1, b"")}), tmp_path
    )


def test_bytes_behind_the_end(tmp_path: Path) -> None:
    """Bytes behind the last storage belong to nothing; a second checkpoint behind the first is one such case."""
    whole = b"".join(parts_of())
    assert "behind the last storage" in reason(whole + b"\0", tmp_path)
    assert "several checkpoints" in reason(whole + whole, tmp_path)


def test_code_around_the_object(tmp_path: Path) -> None:
    """The small pickles around the object are unpickled by torch as well: a call in one of
    them is refused, not dropped in silence.
    """
    evil = legacy_file([], {}, sys_info=Old(print, ("pwned",)))
    assert "code in the pickles" in reason(evil, tmp_path)
    head, tail = parts_of(1)
    keys = pickle.dumps([Old(str, (0,))], 2)
    assert "code in the pickles" in reason(head + keys + tail[len(pickle.dumps(["0"], 2)) :], tmp_path)


def test_dangers_are_found(tmp_path: Path) -> None:
    """A call of ``os.system`` in the object is refused as in any other container."""
    import os

    assert "system" in reason(legacy_file([Old(os.system, ("true",))], {}), tmp_path)
    hidden = Old(torch.storage._load_from_bytes, (b"".join(parts_of()),))
    assert "_load_from_bytes" in reason(legacy_file([hidden], {}), tmp_path)


def test_a_saved_part_of_a_storage(tmp_path: Path) -> None:
    """A checkpoint that is a part of a storage and nothing else has the bytes of that part."""
    part = storage_id(torch.FloatStorage, "root", "cpu", 6, ("part", 2, 3))
    for path in both(legacy_file(part, {"root": (6, FLOATS)}), tmp_path):
        assert [*torch.load(path, weights_only=False)] == [2, 3, 4]


def test_ids_that_name_nothing(tmp_path: Path) -> None:
    """Persistent ids with other words, too few parts, unknown classes, or texts are
    refused; a storage cannot be called.
    """
    good = storage_id(torch.FloatStorage, "0", "cpu", 6)
    for parts, said in (
        ((*good.parts[:5],), "neither a storage nor a class"),
        (("module", torch.nn.Linear, None), "neither a storage nor a class"),
        (("storage", torch.nn.Linear, "0", "cpu", 6, None), "no storage class"),
        (("storage", "FloatStorage", "0", "cpu", 6, None), "no storage class"),
        (("storage", torch.FloatStorage, 0, "cpu", 6, None), "wrong types"),
        (("storage", torch.FloatStorage, "0", "cpu", True, None), "wrong types"),
    ):
        other = storage_id(*good.parts[1:])
        other.parts = parts
        assert said in reason(legacy_file([other], {"0": (6, FLOATS)}), tmp_path), parts
    called = object_pickle([good])[:-2] + b")Ra."
    whole = legacy_file([good], {"0": (6, FLOATS)})
    assert "called" in reason(whole.replace(object_pickle([good]), called), tmp_path)


def test_one_storage_of_two_classes(tmp_path: Path) -> None:
    """An id under two classes is refused: torch takes the first for all."""
    made = [storage_id(cls, "0", "cpu", 6) for cls in (torch.FloatStorage, torch.IntStorage)]
    assert "two ways" in reason(legacy_file(made, {"0": (6, FLOATS)}), tmp_path)


def test_numbers_at_the_start(tmp_path: Path) -> None:
    """Another magic number or version is named; a big-endian machine is a note, for torch
    never wrote other than little-endian data.
    """
    whole = b"".join(parts_of())
    assert "version" in reason(whole.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2), 1), tmp_path)
    from tests.support.legacy_files import SYS_INFO

    made = {"w": rebuilt(storage_id(torch.FloatStorage, "0", "cpu", 6), 0, 6)}
    data = legacy_file(made, {"0": (6, FLOATS)}, sys_info={**SYS_INFO, "little_endian": False})
    (tmp_path / "src.pt").write_bytes(data)
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt")
    assert any("big-endian" in note for note in report.notes)
    assert_same(torch.load(tmp_path / "src.pt"), torch.load(tmp_path / "dst.pt"))


def test_a_tar_archive_at_once(tmp_path: Path) -> None:
    """torch looks for a tar archive first: a file that is one and starts with the magic number
    can be read in two ways, and is refused.
    """
    whole = b"".join(parts_of())
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("x")
        tar.addfile(info)
    block = bytearray(whole[:100].ljust(100, b"\0") + stream.getvalue()[100:512])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with tarfile.open(fileobj=io.BytesIO(bytes(block) + bytes(1024))) as tar:
        assert tar.getmembers()
    assert "tar archive" in reason(bytes(block) + bytes(1024), tmp_path)


def test_ids_as_texts(tmp_path: Path) -> None:
    """What protocol 0 makes of a persistent id is read where it names a storage, though
    torch cannot; anything else is refused.
    """
    src = tmp_path / "src.pt"
    legacy([torch.arange(3), torch.ones(2, dtype=torch.uint16)], src, pickle_protocol=0)
    assert refusal(lambda: torch.load(src, weights_only=False))
    ckptconv.convert(src, tmp_path / "dst.pt")
    assert_same(
        [torch.arange(3), torch.ones(2, dtype=torch.uint16)], torch.load(tmp_path / "dst.pt", weights_only=True)
    )
    data = src.read_bytes()
    found = re.search(rb"P\(.*\)\n", data)
    assert found
    for text in (b"P(1)\n", b"Pstorage\n", found[0].replace(b"None", b"exit()"), found[0].replace(b", 3,", b", 3, 3,")):
        path = tmp_path / "bad.pt"
        path.write_bytes(data.replace(found[0], text))
        with pytest.raises((UnsupportedError, MalformedError, LimitError)):
            ckptconv.inspect(path)


def test_long_ids_as_texts_cost_nothing(tmp_path: Path) -> None:
    """A persistent id of megabytes is looked at as a text; nothing is made of it."""
    text = b"('storage', <class 'torch.FloatStorage'>, " + b"1," * 1_000_000 + b")"
    head = b"".join(pickle.dumps(value, 0) for value in (0x1950A86A20F9469CFC6C, 1001, {}))
    (tmp_path / "src.pt").write_bytes(head + b"P" + text + b"\n." + pickle.dumps([], 0))
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match="names no storage"):
            ckptconv.inspect(tmp_path / "src.pt")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
