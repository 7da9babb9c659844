"""Conversions to safetensors and back, and the choice of the state dict. Torch and the safetensors library load the
results.
"""

from __future__ import annotations

import json
import os
import random
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _SIZE, load_file, load_model, save_file, save_model
from torch import nn

import ckptconv
from ckptconv.byteranges.kernels import gathering
from ckptconv.cli.main import main
from ckptconv.edits import selection
from ckptconv.errors import CollisionError, MalformedError, NoMatchError, RefusedError, UsageError
from tests.support import zoo
from tests.support.archives import big_endian, flip_bit, records_of, rezip, without_crc32
from tests.support.conversions import converted, metadata_of, refused, run_without_torch, unreadable
from tests.support.hostile_bytes import in_headers
from tests.support.judge import assert_same, tags_of
from tests.support.reduced import Reduced
from tests.support.writers import calculated_offsets

# In each process, torch warns once that nested, quantized, compressed sparse and complex32 tensors are experimental or
# deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::UserWarning:tests.support.zoo",
    "ignore::UserWarning:tests.unit.formats.test_safetensors",
)

#: Objects of the zoo in which the choice of a state dict is clear, and functions that return this state dict.
STATE_DICTS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    **dict.fromkeys(["views", "conj_neg", "two_dtypes", "subclass", "state_dict", "wide"], lambda made: made),
    "ties": lambda made: made["nested"],
    "parameters": lambda made: made[2].note,
    "objects": lambda made: made[14].keywords,
    "training": lambda made: made["model"],
    "allowed": lambda made: made["ordered"],
}
#: Objects of the zoo with a state dict of tensors that the format cannot store.
UNHOLDABLE = ("dtypes", "sparse", "quantized")


def odd() -> dict[str, torch.Tensor]:
    """Return tensors with names and shapes that are difficult for a converter, and with numbers that a copy must not
    change.
    """
    names = [key for key in zoo.ZOO["keys"]() if isinstance(key, str) and key != "\ud800"]
    small = {f"small.{i}": tensor for i, tensor in enumerate(zoo.small())}
    base = torch.arange(10.0)
    views = {"head": base[:4], "tail": base[4:], "overlap": base[2:6], "whole": base}
    expanded = {"scalar": torch.tensor(1).expand(3, 2), "empty": torch.empty(0, 3).t(), "none": base[10:].expand(4, 0)}
    special = {"special": zoo.special_values()["tensor"], "half": zoo.counted(torch.float16, 200)}
    return {**{name: torch.full((2,), i) for i, name in enumerate(names)}, **small, **views, **expanded, **special}


def every_dtype() -> dict[str, torch.Tensor]:
    """Return tensors of each dtype that torch and safetensors have in common. Each dtype is stored completely, with
    every second element, and transposed. The narrow dtypes come first.
    """
    kinds = [dtype for dtype in set(_SIZE) if dtype != torch.bool]
    found = {"bool": torch.tensor([True, False, True])}
    for dtype in sorted(kinds, key=lambda dtype: (dtype.itemsize, str(dtype))):
        name, matrix = str(dtype).removeprefix("torch."), zoo.counted(dtype, 6).reshape(2, 3)
        found |= {name: zoo.counted(dtype, 3), f"{name}.t": matrix.t(), f"{name}.step": zoo.counted(dtype, 6)[1::2]}
    return found


def saved(name: str, path: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Save the object that contains the state dict `name` to `path`, and return this state dict as torch loads it."""
    made = OURS[name]() if name in OURS else zoo.ZOO[name]()
    zoo.save(made, path, **kwargs)
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    return loaded if name in OURS else STATE_DICTS[name](loaded)


OURS = {"odd": odd, "every_dtype": every_dtype}
CONTIGUOUS = {name: tensor.contiguous() for name, tensor in every_dtype().items()}
NAMES = [*OURS, *STATE_DICTS]


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in row-major order, with a pending conjugation or negation applied."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties that two tied tensors have in common."""
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def ties_of(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of `state` whose tensor has an earlier name, with the earlier name."""
    first: dict[tuple[Any, ...], str] = {}
    kept = {
        name: first.setdefault(identity(tensor), name) if tensor.numel() else name for name, tensor in state.items()
    }
    return {name: other for name, other in kept.items() if name != other}


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of the file at `path`, and the offset of the data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header, 8 + length


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that `found` contains the names and values of `wanted`, bit for bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def assert_holds(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Check that the file at `path` contains the values, the order of names and the ties of `wanted`, and that its data
    are sorted by item size and aligned.
    """
    ties = ties_of(wanted)
    header, start = header_of(path)
    assert header.pop("__metadata__") == {"format": "pt", **ties}
    assert list(header) == [name for name in wanted if name not in ties]
    found = load_file(path)
    assert_equal({name: found[ties.get(name, name)] for name in wanted}, wanted)
    filled = [name for name in header if found[name].numel()]
    sizes = [found[name].itemsize for name in sorted(filled, key=lambda name: header[name]["data_offsets"])]
    assert sizes == sorted(sizes, reverse=True)
    assert all((start + header[name]["data_offsets"][0]) % found[name].itemsize == 0 for name in filled)


def follow_hint(error: RefusedError, src: Path, dst: Path) -> dict[str, torch.Tensor]:
    """Convert `src` to `dst` with the keywords in the hint of `error`, and return the contents of `dst`."""
    assert error.hint is not None
    keywords = eval(f"dict({error.hint[error.hint.index(': ') + 2 :]})")
    found: dict[str, torch.Tensor] = converted(src, dst, **keywords)
    return found


def of_ones_and_metadata(items: dict[Any, int]) -> OrderedDict[Any, Any]:
    """Return a state dict in which each key has a tensor with the given number of ones. ``_metadata`` makes it a state
    dict, whatever the keys are.
    """
    state = OrderedDict[Any, Any]({key: torch.ones(n) for key, n in items.items()})
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return state


# To safetensors


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_output_contains_the_state_dict(name: str, protocol: int, src: Path, safe: Path) -> None:
    """Each tensor of the state dict is written, bit for bit and in order. Ties are recorded under the first name, and
    the data are sorted and aligned.
    """
    state = saved(name, src, pickle_protocol=protocol)
    ckptconv.convert(src, safe, verify=True)
    assert_holds(safe, state)


def test_every_dtype_of_the_library_is_tested() -> None:
    """``every_dtype`` contains each dtype that safetensors reads into torch."""
    assert {tensor.dtype for tensor in every_dtype().values()} == set(_SIZE)


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in (*STATE_DICTS, *UNHOLDABLE, "module")])
def test_objects_without_a_state_dict_are_refused(name: str, src: Path, safe: Path) -> None:
    """An object without a clear state dict is refused, and nothing is written."""
    zoo.save(zoo.ZOO[name](), src, pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
    refused(RefusedError, "no state dict", src, safe)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["odd", "views", "conj_neg", "two_dtypes", "state_dict"])
def test_from_a_zip_of_another_tool(name: str, method: int, src: Path, safe: Path) -> None:
    """Complete storages, parts of storages and views are converted from a zip file of another tool, in which the
    storages are at any offset or deflated. No temporary file remains or stays open.
    """
    state = saved(name, src)
    rezip(src, src, method=method)
    before = len(os.listdir("/dev/fd"))
    ckptconv.convert(src, safe, verify=True)
    assert_holds(safe, state)
    assert len(os.listdir("/dev/fd")) == before
    assert len(os.listdir(src.parent)) == 2


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["every_dtype", "odd", "views", "conj_neg", "state_dict"])
def test_from_a_big_endian_machine(name: str, method: int, src: Path, safe: Path) -> None:
    """The file that a big-endian machine would write gives the same tensors."""
    state = saved(name, src)
    storages: list[Any] = []  # in the order of their keys
    tensors = torch.load(src, map_location=lambda storage, tag: storages.append(storage) or storage).values()
    widths = {t.untyped_storage()._cdata: t.itemsize // (2 if t.is_complex() else 1) for t in tensors}
    big_endian(src, src, {str(key): widths[each._cdata] for key, each in enumerate(storages)}, method=method)
    ckptconv.convert(src, safe, verify=True)
    assert_holds(safe, state)


def test_random_views(src: Path, safe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random views of random storages are converted correctly, whatever the sizes of the blocks are in which they are
    read and written.
    """
    chance = random.Random(5)
    for _ in range(12):
        monkeypatch.setattr(gathering, "_BLOCK", chance.choice([64, 1024, gathering._BLOCK]))
        monkeypatch.setattr(gathering, "_TILE", chance.choice([64, 512, gathering._TILE]))
        monkeypatch.setattr(gathering, "_GAP", chance.choice([0, 16, gathering._GAP]))
        state = {f"{i}.{name}": view for i in range(10) for name, view in some_views(chance).items()}
        torch.save(state, src)
        ckptconv.convert(src, safe, force=True)
        assert_holds(safe, state)


def some_views(chance: random.Random) -> dict[str, torch.Tensor]:
    """Return random views of one storage."""
    dtype = chance.choice([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.float64])
    base = zoo.counted(dtype, 300)
    if dtype == torch.complex64:
        base = (torch.arange(1, 301) * (1 + 2j)).to(dtype).conj()  # no zeros, whose sign torch loses in vector code
    found = {}
    for i in range(6):
        rank = chance.randrange(5)
        shape = [chance.choice([0, 1, 1, 2, 3, 4, 5]) for _ in range(rank)]
        stride = [chance.choice([0, 1, 1, 2, 3, 5, 8, 16]) for _ in range(rank)]
        end = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if prod(shape) else 1
        view = base.as_strided(shape, stride, chance.randrange(301 - end))
        found[str(i)] = torch._neg_view(view) if dtype == torch.complex64 and chance.random() < 0.3 else view
    return found


def test_the_same_bytes_every_time(src: Path, safe: Path) -> None:
    """The output has the same bytes for every hash seed."""
    saved("state_dict", src)
    ckptconv.convert(src, safe)
    for seed in ("1", "2"):
        again = src.with_name(f"{seed}.safetensors")
        program = "from ckptconv.cli.main import main; main(sys.argv[1:])"
        run_without_torch(program, "convert", src, again, PYTHONHASHSEED=seed)
        assert again.read_bytes() == safe.read_bytes()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_of_the_output(umask: int, src: Path, safe: Path) -> None:
    """The output has the mode of the source without the bits of the umask. The writer of the library leaves 0600."""
    saved("state_dict", src)
    src.chmod(0o664)
    before = os.umask(umask)
    try:
        ckptconv.convert(src, safe)
    finally:
        os.umask(before)
    assert safe.stat().st_mode & 0o777 == 0o664 & ~umask


def test_notes_on_devices_and_gradients(src: Path, safe: Path) -> None:
    """Notes report that safetensors stores no devices and no ``requires_grad``."""
    zoo.save({"a": nn.Parameter(torch.ones(1)), "b": torch.ones(2)}, src, ("cuda:1", "mps"))
    report = ckptconv.convert(src, safe)
    assert any("cuda:1, mps" in note for note in report.notes)
    assert any("requires_grad, which 1 parameter had" in note for note in report.notes)
    zoo.save({"a": torch.ones(1)}, src, ("cpu",))
    assert ckptconv.convert(src, safe, force=True).notes == ()


# From safetensors


@pytest.mark.parametrize("device", [None, "cuda:1", "mps"])
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str, device: str | None, src: Path, safe: Path, dst: Path) -> None:
    """After a conversion back to torch's format, the safe loader returns the tensors of the library, with the requested
    tag and with the ties. Each way of loading gives the same result, and the checksums are correct.
    """
    state = saved(name, src)
    ckptconv.convert(src, safe)
    ckptconv.convert(safe, dst, map_location=device, verify=True)
    found, tags = tags_of(dst, weights_only=True)
    ties = ties_of(state)
    assert type(found) is dict
    assert list(found) == [*(name for name in state if name not in ties), *ties]
    library = load_file(safe)
    assert_equal(found, {name: library[ties.get(name, name)] for name in found})
    assert ties_of(found) == ties
    assert len(tags) == len(library)
    assert set(tags) == {device or "cpu"}
    with zipfile.ZipFile(dst) as archive:
        assert archive.testzip() is None
        assert all(entry.CRC or not entry.file_size for entry in archive.infolist())
    assert_same(found, tags_of(dst, mmap=True)[0])
    with calculated_offsets():
        assert_same(found, tags_of(dst)[0])
    reader = torch._C.PyTorchFileReader(str(dst))
    assert not [key for key in reader.get_all_records() if key[:5] == "data/" and reader.get_record_offset(key) % 64]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_conversion_gives_the_same_bytes(name: str, src: Path, safe: Path, dst: Path) -> None:
    """A safetensors file has the same bytes after a conversion to torch's format and back, or to safetensors."""
    saved(name, src)
    ckptconv.convert(src, safe)
    ckptconv.convert(safe, dst)
    for each in (dst, safe):
        again = each.with_name("again.safetensors")
        ckptconv.convert(each, again, force=True)
        assert again.read_bytes() == safe.read_bytes(), each


def test_offset_of_the_data_with_longer_names(src: Path, safe: Path, tmp_path: Path) -> None:
    """If the names in a safetensors file become longer, the offset of the data changes by a multiple of 4096."""
    saved("state_dict", src)
    ckptconv.convert(src, safe)
    longer = tmp_path / "longer.safetensors"
    found = converted(safe, longer, add_prefix="module")
    a, b = header_of(safe)[1], header_of(longer)[1]
    assert b > a
    assert (b - a) % 4096 == 0
    assert_equal(found, {f"module.{name}": tensor for name, tensor in load_file(safe).items()})


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (CONTIGUOUS, None),
        (CONTIGUOUS, {}),
        (CONTIGUOUS, {"format": "pt"}),
        (CONTIGUOUS, {"format": "tf", "note": 'ä\n"', "": "empty", "b": "none"}),
        ({}, None),
        ({}, {"note": "empty"}),
    ],
    ids=["no metadata", "empty metadata", "the format", "texts", "no tensors", "texts alone"],
)
def test_files_of_the_library(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, tmp_path: Path, safe: Path, dst: Path
) -> None:
    """A file of the library is converted with equal tensors and metadata, and nothing is added. In torch's format, the
    metadata is left behind, and the report names it.
    """
    theirs = tmp_path / "a.safetensors"
    save_file(tensors, theirs, metadata)
    assert_equal(converted(theirs, safe), tensors)
    assert metadata_of(safe) == (metadata or {})
    report = ckptconv.convert(theirs, dst)
    assert_equal(torch.load(dst), tensors)
    wanted = {f"__metadata__/{key}": len(text.encode()) for key, text in (metadata or {}).items() if key != "format"}
    assert {left.path: left.nbytes for left in report.left_behind} == wanted


# Ties


def test_copies_of_tied_tensors(src: Path, safe: Path, dst: Path, tmp_path: Path) -> None:
    """With ``copy_tied``, each name has its own bytes, and no tie is recorded, even if the source records one."""
    state = saved("state_dict", src)
    assert ties_of(state) == {"tail.weight": "head.weight"}
    ckptconv.convert(src, tmp_path / "tied.safetensors")
    for path in (src, tmp_path / "tied.safetensors"):
        assert_equal(converted(path, safe, copy_tied=True), state)
        assert metadata_of(safe) == {"format": "pt"}
    assert ties_of(converted(safe, dst)) == {}
    refused(UsageError, "copy_tied", safe, tmp_path / "c.pt", copy_tied=True)


def test_ties_for_and_from_the_library(src: Path, safe: Path, dst: Path) -> None:
    """``load_model`` loads an output with ties, and the ties in a file of ``save_model`` are restored."""
    module = zoo.module()
    torch.save(module.state_dict(), src)
    ckptconv.convert(src, safe)
    other = zoo.Net()
    assert load_model(other, safe) == (set(), [])
    assert_equal(other.state_dict(), module.state_dict())
    save_model(module, str(safe))
    found = converted(safe, dst)
    assert_equal(found, module.state_dict())
    assert found["head.weight"].data_ptr() == found["tail.weight"].data_ptr()


class Layers(nn.Module):
    """Two layers, which can be the same layer."""

    def __init__(self, *, tied: bool, second: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        if second:
            self.b = self.a if tied else nn.Linear(3, 3)


@pytest.mark.parametrize("saved_by", ["save_model", "convert"])
@pytest.mark.parametrize("tied", [True, False])
def test_load_returns_tied_names_for_all_models(tied: bool, saved_by: str, src: Path, safe: Path) -> None:
    """``load`` returns all names of tied tensors, so a model with tied layers and a model with separate layers load the
    result strictly. The result of ``load_file`` lacks names for both. In a model that has only one of the names, the
    other one is unexpected, as after ``torch.load``.
    """
    model, other = Layers(tied=True), Layers(tied=tied)
    torch.save(model.state_dict(), src)
    if saved_by == "save_model":
        save_model(model, str(safe))
    else:
        ckptconv.convert(src, safe)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(load_file(safe))
    other.load_state_dict(ckptconv.load(safe))
    assert_equal(other.state_dict(), model.state_dict())
    one = Layers(tied=False, second=False)
    for state in (ckptconv.load(safe), torch.load(src)):
        assert sorted(one.load_state_dict(state, strict=False).unexpected_keys) == ["b.bias", "b.weight"]


@pytest.mark.parametrize("names", [("a", "format", "b"), ("format", "a", "b")])
def test_a_tie_named_format(names: tuple[str, ...], src: Path, safe: Path, dst: Path) -> None:
    """In the metadata, ``format`` names the library that wrote the file. A tensor with this name is therefore stored
    completely. Other tensors can be tied to it.
    """
    weight = torch.arange(3.0)
    torch.save(dict.fromkeys(names, weight), src)
    first = names[0]
    tied = {name: first for name in names[1:] if name != "format"}
    assert set(converted(src, safe)) == {first, "format"}
    assert metadata_of(safe) == {"format": "pt", **tied}
    found = converted(safe, dst)
    assert_equal(found, dict.fromkeys(names, weight))
    assert {name: other for name, other in ties_of(found).items() if other == first} == tied


def test_metadata_that_only_looks_like_a_tie(tmp_path: Path, safe: Path, dst: Path) -> None:
    """A text in the metadata is a tie only if its key is not the name of a tensor and not ``format``, and its value is
    the name of a tensor.
    """
    state = {"a": torch.arange(3.0), "b": torch.arange(4.0)}
    metadata = {"a": "b", "format": "a", "note": "c", "tied": "b"}
    theirs = tmp_path / "a.safetensors"
    save_file(state, theirs, metadata)
    assert_equal(converted(theirs, dst), {**state, "tied": state["b"]})
    assert_equal(converted(theirs, safe), state)
    assert metadata_of(safe) == metadata


def test_a_name_that_the_metadata_uses_already(tmp_path: Path, safe: Path) -> None:
    """A tie is written as a tensor if its name becomes an existing key of the metadata. The metadata is kept."""
    theirs = tmp_path / "a.safetensors"
    state = {"a": torch.arange(3.0), "b": torch.ones(2)}
    save_file(state, theirs, {"tied": "a", "note": "hello"})
    assert_equal(converted(theirs, safe, rename=[("^tied$", "note")]), {**state, "note": torch.arange(3.0)})
    assert metadata_of(safe) == {"note": "hello"}


def test_ties_follow_edits_of_names(src: Path, safe: Path, tmp_path: Path) -> None:
    """Both names of a recorded tie are renamed. If the name with the bytes is left out, the other name gets them."""
    state = saved("state_dict", src)
    ckptconv.convert(src, safe)
    edited = tmp_path / "edited.safetensors"
    ckptconv.convert(safe, edited, add_prefix="m")
    assert metadata_of(edited) == {"format": "pt", "m.tail.weight": "m.head.weight"}
    found = converted(safe, edited, exclude="head.*")
    assert metadata_of(edited) == {"format": "pt"}
    assert_equal(found, {name: tensor for name, tensor in state.items() if name != "head.weight"})


def test_views_that_share_bytes_are_written_completely(src: Path, safe: Path) -> None:
    """Views of the same bytes with another offset, shape or order are not tied, and each of them is written completely.
    (Views of another dtype are in ``two_dtypes`` of the zoo.)
    """
    base = torch.arange(6.0).reshape(2, 3)
    state = {"base": base, "t": base.t(), "flat": base.reshape(-1), "row": base[1], "more": base[:, :2]}
    zoo.save({**state, "again": base}, src)
    assert_equal(converted(src, safe), state)
    assert metadata_of(safe) == {"format": "pt", "again": "base"}


# Tensors that cannot be stored


def unholdable() -> OrderedDict[Any, Any]:
    """Return a state dict of tensors and names that safetensors cannot store, and of three that it can store."""
    state = of_ones_and_metadata({})
    state |= {
        "fine": torch.arange(3.0),
        "sparse": torch.eye(2).to_sparse(),
        "a.csr": torch.eye(2).to_sparse_csr(),
        "quantized[0]": torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.qint8),
        "double*": torch.ones(1, dtype=torch.complex128),
        "a/half": torch.ones(1, dtype=torch.complex32),
        "me\\ta": torch.empty(3, device="meta"),
        "": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        "__metadata__": torch.ones(1),
        "half \ud800": torch.ones(1),
        "-n it's": torch._neg_view(torch.arange(3)),
        "double": torch.ones(2),
        "quantized0": torch.ones(3),
        "wrapper": zoo.WrapperTensor(torch.ones(2), "cpu"),
    }
    return state


@pytest.mark.parametrize("at", ["root", "nested"])
def test_all_tensors_that_cannot_be_stored_are_named(at: str, src: Path, safe: Path) -> None:
    """The error names all tensors that cannot be stored, with path and reason. The options in the hint leave out
    exactly these tensors.
    """
    state = unholdable()
    zoo.save(state if at == "root" else {"model": state, "epoch": 3}, src, ("cpu",))
    fine = ("fine", "double", "quantized0")
    error = refused(RefusedError, "cannot store", src, safe)
    paths = {name: name.replace("/", "\\/").replace("[", "\\[") for name in state}
    paths |= {"me\\ta": "me\\\\ta", "": "\\e"}
    prefix = "" if at == "root" else "model/"
    for name in state:
        assert (f" {prefix}{paths[name]} (" in error.what) == (name not in fine), name
    reasons = {
        reason: error.what.count(f"({reason})") for reason in ("sparse", "quantized", "complex128", "meta", "nested")
    }
    assert reasons == {"sparse": 2, "quantized": 1, "complex128": 1, "meta": 1, "nested": 1}
    assert error.what.count("(") == len(state) - len(fine)
    assert_equal(follow_hint(error, src, safe), {name: state[name] for name in fine})


def test_hint_does_not_exclude_valid_tensors(src: Path, safe: Path) -> None:
    """A name that cannot be typed needs a glob, which can match other names. The error contains no hint if the glob
    would match a valid tensor.
    """
    torch.save({"\ud800": torch.ones(1), "a": torch.ones(2)}, src)
    assert refused(RefusedError, "cannot store", src, safe).hint is None
    torch.save({"\ud800": torch.ones(1), "ab": torch.ones(2)}, src)
    assert_equal(follow_hint(refused(RefusedError, "cannot store", src, safe), src, safe), {"ab": torch.ones(2)})


def test_keys_that_are_not_strings_can_be_left_out(src: Path, safe: Path) -> None:
    """The error names each key that is not a string, and the hint leaves out these keys."""
    torch.save(of_ones_and_metadata({"a": 2, 3: 1, (1, "b"): 1}), src)
    said = r"\[3\] \(its key is not a string\), \[\(1, 'b'\)\] \(its key is not a string\)"
    error = refused(RefusedError, said, src, safe)
    assert_equal(follow_hint(error, src, safe), {"a": torch.ones(2)})


@pytest.mark.parametrize("name", UNHOLDABLE)
def test_objects_of_the_zoo_that_cannot_be_stored(name: str, src: Path, safe: Path) -> None:
    """The error names each tensor that is not strided, or whose dtype the library does not know. The hint keeps the
    others.
    """
    made = zoo.ZOO[name]()
    zoo.save(made, src)
    known = set(_SIZE)
    fine = {key: t for key, t in made.items() if t.dtype in known and t.layout == torch.strided and not t.is_quantized}
    error = refused(RefusedError, "cannot store", src, safe)
    for key in made:
        assert (f" {key} (" in str(error.what)) == (key not in fine), key
    if fine:
        assert_equal(follow_hint(error, src, safe), fine)
    else:
        assert error.hint is None


def test_dtypes_that_torch_does_not_have_are_named(tmp_path: Path, dst: Path) -> None:
    """Torch has no 6-bit dtypes, and no 4-bit dtypes with odd rows. The error names all tensors with such dtypes. A
    conversion to safetensors copies them.
    """
    tensors_ = {
        "six": ("F6_E2M3", [4], 3),
        "one": ("F32", [1], 4),
        "odd": ("F4", [2, 3], 3),
        "other six": ("F6_E3M2", [2, 4], 6),
        "even": ("F4", [3, 2], 3),
    }
    header, at = {}, 0
    for name, (word, shape, nbytes) in tensors_.items():
        header[name] = {"dtype": word, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    src, copy_ = tmp_path / "src.safetensors", tmp_path / "copy.safetensors"
    src.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(at)))
    error = refused(RefusedError, None, src, dst)
    assert "six (F6_E2M3), odd (F4), other six (F6_E3M2)" in error.what
    found = follow_hint(error, src, dst)
    assert {name: (tensor.dtype, list(tensor.shape), list(bits(tensor))) for name, tensor in found.items()} == {
        "one": (torch.float32, [1], [3, 4, 5, 6]),
        "even": (torch.float4_e2m1fn_x2, [3, 1], [16, 17, 18]),
    }
    ckptconv.convert(src, copy_)
    written, start = header_of(copy_)
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in written.items() if name != "__metadata__"} == {
        name: (word, shape) for name, (word, shape, _) in tensors_.items()
    }
    data = copy_.read_bytes()[start:]
    for name, entry in header.items():
        (old, old_end), (new, new_end) = entry["data_offsets"], written[name]["data_offsets"]
        assert data[new:new_end] == bytes(range(old, old_end)), name


def test_names_that_become_one(src: Path, safe: Path) -> None:
    """The error for two names that would become one contains both, and nothing is written. An edit to the name
    ``__metadata__`` is refused too.
    """
    torch.save({"module.a": torch.ones(1), "a": torch.ones(1), "b": torch.ones(2)}, src)
    refused(CollisionError, r"become 'a' .*'module.a' and 'a'", src, safe, strip_prefix="module")
    refused(CollisionError, None, src, safe, rename=[("^.*$", "x")])
    refused(RefusedError, "reserved", src, safe, rename=[("^b$", "__metadata__")])


def test_a_name_that_is_set_twice(src: Path, safe: Path) -> None:
    """A name that is set twice is refused, because either value can be meant. If the first value is excluded, the
    result is that of torch, which loads the last value.
    """
    items = [("a", torch.ones(1)), ("w", torch.ones(2)), ("w", torch.zeros(3))]
    torch.save({"model": Reduced(dict, (), None, None, iter(items))}, src)
    refused(RefusedError, "a second value with that name", src, safe)
    assert_equal(converted(src, safe, exclude="model/w"), torch.load(src, weights_only=False)["model"])


def test_a_huge_view_is_refused(src: Path, safe: Path) -> None:
    """An expanded scalar of terabytes is refused by name before anything is written."""
    torch.save({"a": torch.ones(1), "huge": torch.ones(1).expand(1 << 20, 1 << 20)}, src)
    refused(RefusedError, r" huge \(its 4,398,046,511,104 bytes", src, safe)


# Choice of the state dict


WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2)}


def averaged() -> dict[str, torch.Tensor]:
    """Return other tensors with the names of ``WEIGHTS``."""
    return {name: tensor / 2 for name, tensor in WEIGHTS.items()}


@pytest.mark.parametrize(
    "name", ["state_dict", "model", "model_state_dict", "module", "net", "network", "params", "weights", "model_state"]
)
def test_state_dict_under_a_usual_name_is_chosen(name: str, src: Path, safe: Path) -> None:
    """A state dict under a usual name is chosen, although there is another one."""
    torch.save({"ema": averaged(), name: WEIGHTS, "epoch": 3}, src)
    assert_equal(converted(src, safe), WEIGHTS)


#: Paths of the only state dict, and objects that contain it at these paths.
PLACES: dict[str, dict[str, Any]] = {
    "teacher": {"teacher": WEIGHTS},
    "a/b/c": {"a": {"b": {"c": WEIGHTS}}},
    "list[1]": {"list": [1, WEIGHTS]},
    "odd\\/name": {"odd/name": WEIGHTS},
}


@pytest.mark.parametrize("path", PLACES)
def test_the_only_state_dict_is_chosen(path: str, src: Path, safe: Path) -> None:
    """The only state dict is chosen at any path. The tensors of an optimizer are not a state dict."""
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    torch.save({**PLACES[path], "optimizer": optimizer}, src)
    report = ckptconv.convert(src, safe)
    assert_equal(load_file(safe), WEIGHTS)
    assert ("optimizer", 12, f"outside {path}") in {(left.path, left.nbytes, left.why) for left in report.left_behind}


@pytest.mark.parametrize("names", [("student", "teacher"), ("model", "state_dict"), ("it's [odd]", "b")])
def test_several_state_dicts_are_listed(names: tuple[str, str], src: Path, safe: Path) -> None:
    """If the choice is not clear, the error lists each state dict with its size, and the hint selects the first one.
    Any of them can be selected.
    """
    torch.save({names[0]: WEIGHTS, names[1]: averaged()}, src)
    error = refused(RefusedError, None, src, safe)
    paths = [name.replace("[", "\\[") for name in names]
    assert error.what.endswith(f"{paths[0]} (32 bytes), {paths[1]} (32 bytes)")
    assert_equal(follow_hint(error, src, safe), WEIGHTS)
    report = ckptconv.convert(src, safe, select=paths[1], force=True)
    assert_equal(load_file(safe), averaged())
    assert [(left.path, left.nbytes) for left in report.left_behind] == [(paths[0], 32)]


def test_invalid_selections(src: Path, safe: Path) -> None:
    """If a selection does not exist, the error lists the state dicts. A selected object that is not a state dict is
    refused.
    """
    torch.save({"model": WEIGHTS, "epoch": 3, "list": [torch.ones(1)]}, src)
    refused(NoMatchError, r"there is nothing at modle .*model \(32 bytes\)", src, safe, select="modle")
    for path in ("list", "model/layer.bias"):
        refused(RefusedError, "no state dict", src, safe, select=path)


def shared_training() -> dict[str, Any]:
    """Return a training checkpoint in which other parts share storages with the model and with one another."""
    buffer, kept = torch.full((5,), 7.0), nn.Parameter(WEIGHTS["layer.weight"])
    state = OrderedDict(
        {"layer.weight": kept, "tied": kept, "view": kept.detach().t(), "bias": torch.ones(2), "none": None}
    )
    state._metadata = OrderedDict({"": {"version": 1}, "layer": {"version": 2}})  # type: ignore[attr-defined]
    marker = torch.full((64,), 0x4D41524B, dtype=torch.int32)
    return {
        "optimizer": {
            "state": {0: {"exp_avg": marker, "same": marker, "of the model": kept.detach()}},
            "param_groups": [{"params": [0]}],
        },
        "model": state,
        "epoch": 3,
        "buffers": [buffer, buffer[1:], kept.detach()],
        "again": buffer,
        "best": 0.5,
    }


LEFT = {"optimizer": 256, "epoch": 0, "buffers": 20, "again": 0, "best": 0}


def test_parts_that_are_left_behind(src: Path, safe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report and ``--json`` list each part that is left behind, with its size. A storage counts once, and not at
    all if the model uses it too.
    """
    zoo.save(shared_training(), src)
    in_report = [vars(left) for left in ckptconv.convert(src, safe).left_behind]
    assert main(["convert", str(src), str(safe), "--json", "-f"]) == 0
    in_json = json.loads(capsys.readouterr().out)["left_behind"]
    for listed in (in_report, in_json):
        assert {left["path"]: left["nbytes"] for left in listed} == {**LEFT, "model/none": 0, "model/._metadata": 0}
        whys = {left["why"] for left in listed}
        assert whys == {"outside model", "no tensor with a name", "module version numbers"}
    state = shared_training()["model"]
    assert_equal(load_file(safe), {name: state[name] for name in ("layer.weight", "view", "bias")})
    assert metadata_of(safe) == {"format": "pt", "tied": "layer.weight"}


@pytest.mark.parametrize("method", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_state_dict_is_written_in_torchs_format(method: int | None, src: Path, dst: Path) -> None:
    """``--state-dict`` keeps the complete state dict and nothing else. The records are numbered from 0."""
    zoo.save(shared_training(), src)
    assert b"KRAM" in src.read_bytes()
    whole, tags = tags_of(src)
    if method is not None:
        rezip(src, src, method=method)
    report = ckptconv.convert(src, dst, state_dict=True)
    assert {left.path: left.nbytes for left in report.left_behind} == LEFT
    found, found_tags = tags_of(dst, weights_only=True)
    assert_same(whole["model"], found)
    assert type(found["layer.weight"]) is nn.Parameter
    assert found["layer.weight"] is found["tied"]
    assert found._metadata["layer"] == {"version": 2}
    assert found_tags == [tags[1], tags[2]]
    assert_same(found, tags_of(dst, mmap=True)[0])
    with zipfile.ZipFile(dst) as archive:
        assert archive.testzip() is None
    assert [name for name in records_of(dst) if name.startswith("data/")] == ["data/0", "data/1"]
    for text in (b"KRAM", b"exp_avg"):
        assert text not in dst.read_bytes()


@pytest.mark.parametrize(
    "flags", [{"state_dict": True}, {"select": "model"}, {"exclude": "ema/*"}, {"exclude": "first"}]
)
def test_tensor_that_is_also_in_a_part_that_is_left_behind(flags: dict[str, Any], src: Path, dst: Path) -> None:
    """The safe loader loads the output, even if a part that was left behind contained the same tensor first."""
    weight = torch.ones(2)
    made = {"ema": {"w": weight}, "model": {"a": torch.zeros(1), "w": weight}}
    if flags == {"exclude": "first"}:
        made = {"first": weight, "a": torch.zeros(1), "w": weight}  # type: ignore[dict-item]
    torch.save(made, src)
    torch.load(src, weights_only=True)
    ckptconv.convert(src, dst, **flags)
    torch.load(dst, weights_only=False)
    torch.load(dst, weights_only=True)


@pytest.mark.parametrize("path", ["buffers", "optimizer", "model/view", "buffers[1]", "."])
def test_any_part_is_written_alone_in_torchs_format(path: str, src: Path, dst: Path) -> None:
    """``--select`` extracts a list, an optimizer, a tensor, or the complete object."""
    zoo.save(shared_training(), src, ("cpu",))
    whole = torch.load(src)
    parts = {"model/view": whole["model"]["view"], "buffers[1]": whole["buffers"][1], ".": whole, **whole}
    assert_same(parts[path], converted(src, dst, select=path))


# Filters


def partial() -> dict[str, Any]:
    """Return two state dicts and a list, with tensors that share storages."""
    base, lone = torch.arange(8.0), torch.full((4,), 0x4C4F4E45, dtype=torch.int32)
    tied = torch.ones(2)
    state = {"enc.w": base[:4], "enc.b": base[4:], "dec.w": tied, "dec.t": tied, "lone": lone}
    return {"model": state, "ema": {"enc.w": base[:4] + 1, "enc.b": base[4:]}, "list": [lone[:0], torch.ones(3)]}


@pytest.mark.parametrize(
    ("flags", "model", "ema"),
    [
        ({"exclude": "lone"}, ["enc.w", "enc.b", "dec.w", "dec.t"], ["enc.w", "enc.b"]),
        ({"include": "enc.*"}, ["enc.w", "enc.b"], ["enc.w", "enc.b"]),
        ({"include": "*.w", "exclude": "dec.*"}, ["enc.w"], ["enc.w"]),
        ({"exclude": "model/dec.w"}, ["enc.w", "enc.b", "dec.t", "lone"], ["enc.w", "enc.b"]),
        ({"exclude": ["ema/*", "*.b"]}, ["enc.w", "dec.w", "dec.t", "lone"], []),
        ({"exclude": "e?a/enc.[wx]"}, ["enc.w", "enc.b", "dec.w", "dec.t", "lone"], ["enc.b"]),
        ({"exclude": "dec.?"}, ["enc.w", "enc.b", "lone"], ["enc.w", "enc.b"]),
    ],
)
def test_filters(flags: dict[str, Any], model: list[str], ema: list[str], src: Path, dst: Path) -> None:
    """A glob matches names in every state dict, or paths if it contains a slash. The remaining tensors keep their
    order, ties and storages, and the bytes of the others are removed.
    """
    made = partial()
    made["list"] = made["list"][1:]  # the first item would keep a storage
    zoo.save(made, src)
    whole = torch.load(src, map_location="cpu")
    report = ckptconv.convert(src, dst, **flags)
    wanted = {
        "model": {name: whole["model"][name] for name in model},
        "ema": {name: whole["ema"][name] for name in ema},
        "list": whole["list"],
    }
    assert_same(wanted, torch.load(dst, map_location="cpu", weights_only=True))
    gone = {f"model/{name}" for name in whole["model"] if name not in model}
    gone |= {f"ema/{name}" for name in whole["ema"] if name not in ema}
    assert {left.path for left in report.left_behind} == gone
    every, kept = storages_of(whole), storages_of(wanted)
    assert sum(left.nbytes for left in report.left_behind) == sum(every.values()) - sum(kept.values())
    assert (b"ENOL" in dst.read_bytes()) == ("lone" in model)
    reader = torch._C.PyTorchFileReader(str(dst))
    keys = [name for name in reader.get_all_records() if name.startswith("data/")]
    assert sorted(keys) == [f"data/{i}" for i in range(len(kept))]


def storages_of(loaded: dict[str, Any]) -> dict[int, int]:
    """Return the storages in `loaded`, with their sizes."""
    found = [*loaded["model"].values(), *loaded["ema"].values(), *loaded["list"]]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in found}


def test_filters_to_safetensors(src: Path, safe: Path) -> None:
    """The state dict is chosen before the filters apply, and globs match the names of the source. If the first name of
    a tie is left out, the next name gets the bytes.
    """
    torch.save(partial(), src)
    state = partial()["model"]
    found = converted(src, safe, exclude=["dec.w", "lone"], add_prefix="m")
    assert_equal(found, {f"m.{name}": state[name] for name in ("enc.w", "enc.b", "dec.t")})
    assert metadata_of(safe) == {"format": "pt"}
    assert_equal(converted(src, safe, include="dec.*"), {"dec.w": torch.ones(2)})
    assert metadata_of(safe) == {"format": "pt", "dec.t": "dec.w"}
    refused(NoMatchError, "other", src, safe, exclude="other/*", force=True)
    assert_equal(load_file(safe), {"dec.w": torch.ones(2)})


def test_tensors_outside_state_dicts_need_a_slash(src: Path, dst: Path) -> None:
    """``include`` without a slash keeps tensors outside state dicts. With a slash, such a tensor is kept only if a glob
    matches its path. An element without a name cannot be left out.
    """
    torch.save({"model": WEIGHTS, "other": {"mean": torch.ones(1), "n": 3}, "epoch": 1}, src)
    assert converted(src, dst, include="*.bias")["other"] == {"mean": torch.ones(1), "n": 3}
    found = converted(src, dst, include="model/*")
    assert found["other"] == {"n": 3}
    assert list(found["model"]) == list(WEIGHTS)
    assert converted(src, dst, include="*/mean")["model"] == {}
    torch.save({"model": WEIGHTS, "a": {"list": [torch.ones(1)]}}, src)
    refused(RefusedError, r"a/list\[0\]", src, dst, exclude="a/*", force=True)


@pytest.mark.parametrize("flag", ["include", "exclude"])
@pytest.mark.parametrize("glob", ["encoder.*", "model/nothing", "ENC.*", "enc", "mean"])
def test_a_glob_that_matches_nothing_is_a_typo(flag: str, glob: str, src: Path, dst: Path, safe: Path) -> None:
    """A glob that matches nothing is refused, even if another one matches, and nothing is written."""
    torch.save({"model": partial()["model"], "other": {"mean": torch.ones(1), "n": 3}}, src)
    flags: dict[str, Any] = {"include": ["enc.*"], "exclude": ["lone"]}
    flags[flag].append(glob)
    for path in (dst, safe):
        refused(NoMatchError, r"no (tensor|name in a state dict) matches", src, path, **flags)


# Damage


@pytest.mark.parametrize("method", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("kind", ["whole", "head", "tail", "transposed", "view beside"])
def test_damage_is_found(kind: str, method: int | None, src: Path, safe: Path) -> None:
    """A flipped bit in a storage is reported even if the view does not contain it, and nothing is written."""
    base = torch.arange(3000, dtype=torch.int32)
    views = {
        "whole": base,
        "head": base[:10],
        "tail": base[2990:],
        "transposed": base.view(30, 100).t(),
        "view beside": base[5::7],
    }
    torch.save({"other": torch.ones(9000), "x": views[kind]}, src)
    if method is not None:
        rezip(src, src, method=method)
    damage(src, base, deflated=method == zipfile.ZIP_DEFLATED)
    for flags in ({}, {"verify": True}, {"include": "x"}):
        refused(MalformedError, "damaged|checksum", src, safe, **flags)
    ckptconv.convert(src, safe, exclude="x")  # the damaged storage is not used


def damage(path: Path, tensor: torch.Tensor, *, deflated: bool = False) -> None:
    """Flip a bit in the middle of `tensor` in the archive at `path`, or a bit of its checksum if it is `deflated`."""
    data, raw = path.read_bytes(), tensor.numpy().tobytes()
    if deflated:
        name = next(name for name in zipfile.ZipFile(path).namelist() if name.endswith("data/1"))
        path.write_bytes(in_headers(data, name, {"crc": zlib.crc32(raw) ^ 1}))
    else:
        flip_bit(path, data.index(raw) + len(raw) // 2)


def test_a_file_without_checksums_is_converted(src: Path, safe: Path) -> None:
    """A file without checksums is converted, and a note reports that they are missing."""
    with without_crc32():
        state = saved("views", src)
    with zipfile.ZipFile(src) as archive:
        assert {entry.CRC for entry in archive.infolist()} == {0}
    report = ckptconv.convert(src, safe)
    assert any("checksums" in note for note in report.notes)
    assert_holds(safe, state)


def test_an_error_leaves_the_old_output(src: Path, safe: Path) -> None:
    """An error keeps the old output, even if the copy has begun."""
    base = torch.arange(3000, dtype=torch.int32)
    torch.save({"x": base}, src)
    damage(src, base)
    safe.write_bytes(b"old")
    refused(MalformedError, None, src, safe, force=True)
    assert safe.read_bytes() == b"old"


def test_rename_does_not_make_a_tie_of_metadata(tmp_path: Path) -> None:
    """A text is left behind if it would be read as a tie after a rename, and the report names the text."""
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, a, {"note": "c", "other": "d"})
    report = ckptconv.convert(a, b, rename=[("^a$", "c")])
    assert [left.path for left in report.left_behind] == ["__metadata__/note"]
    assert metadata_of(b) == {"other": "d"}
    assert sorted(converted(b, c)) == ["b", "c"]


def test_no_hint_for_a_key_with_two_values(src: Path, safe: Path) -> None:
    """If a key is set twice, the last value counts in Python. Leaving out this value would keep the other one, so there
    is no hint.
    """
    items = [("w", torch.ones(2)), ("w", torch.zeros(2))]
    torch.save(Reduced(OrderedDict, (), {"_metadata": {}}, None, iter(items)), src)
    assert refused(RefusedError, "second value with that name", src, safe).hint is None


def test_a_safetensors_file_is_always_a_state_dict(tmp_path: Path, safe: Path, dst: Path) -> None:
    """A safetensors file is a state dict, even if its tensors look like the states of random generators."""
    theirs = tmp_path / "src.safetensors"
    save_file({"random": torch.zeros(16, dtype=torch.uint8), "seed": torch.zeros(5056, dtype=torch.uint8)}, theirs)
    assert list(converted(theirs, safe, add_prefix="module", exclude="seed")) == ["module.random"]
    found = converted(theirs, dst, state_dict=True, add_prefix="module")
    assert list(found) == ["module.random", "module.seed"]


def test_conjugated_tensor_is_not_tied_to_the_original(src: Path) -> None:
    """A conjugated tensor has the bytes of the original and other values, so the two are not tied."""
    z = torch.randn(3, dtype=torch.complex64)
    torch.save({"z": z, "c": z.conj(), "again": z}, src)
    assert ckptconv.inspect(src).ties == (("z", "again"),)


def test_a_filter_that_leaves_nothing(src: Path, dst: Path) -> None:
    """A filter that leaves no tensor is refused."""
    torch.save({"a": torch.ones(1)}, src)
    refused(NoMatchError, "no tensor would be left", src, dst, exclude="*")


def test_ties_and_devices_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that become texts in the metadata are reported, in both directions. A device that the format does not store
    is not reported as changed.
    """
    w = torch.ones(2)
    zoo.save({"module.w": w, "module.head": w}, tmp_path / "a.pt", ("cuda:1",))
    st, back = str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt")
    assert main(["convert", str(tmp_path / "a.pt"), st]) == 0
    said = capsys.readouterr().err
    assert "1 name stored only in the metadata: module.head → module.w" in said
    assert "--strip-prefix module. removes it" in said
    assert "stores no device (cuda:1 here)" in said
    assert main(["convert", str(tmp_path / "a.pt"), st, "-f", "--to", "cuda:0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ties"] == [["module.head", "module.w"]]
    assert report["devices"] == [] and any("no device was changed" in note for note in report["notes"])
    assert report["formats"] == ["torch zip", "safetensors"]
    assert main(["convert", st, back, "--to", "cuda:0"]) == 0
    said = capsys.readouterr().err
    assert "none stored → cuda:0" in said and "module.head → module.w" in said
    summary = ckptconv.inspect(st)
    assert summary.devices == {} and {tensor.device for tensor in summary.tensors} == {None}
    assert main(["inspect", st]) == 0
    assert "cpu" not in capsys.readouterr().out


def test_a_selected_mapping_need_not_be_a_state_dict(src: Path, safe: Path) -> None:
    """The error for tensors next to other values suggests a selection. Only the tensors of the selected mapping are
    written, and the report names the other values.
    """
    torch.save({"a": torch.ones(2), "epoch": 3, "part": {"b": torch.zeros(1), "lr": 0.1}}, src)
    refused(RefusedError, r"no state dict in it.*select='\.' extracts its 1 tensor", src, safe)
    for path, wanted, left_behind in (
        (".", {"a": torch.ones(2)}, ["epoch", "part"]),
        ("part", {"b": torch.zeros(1)}, ["a", "epoch", "part/lr"]),
    ):
        report = ckptconv.convert(src, safe, select=path, force=True)
        assert_equal(load_file(safe), wanted)
        assert [left.path for left in report.left_behind] == left_behind


@pytest.mark.parametrize(
    "wrong",
    [
        {"rename": ("ab", "cd")},
        {"rename": "a"},
        {"rename": [("a", 3)]},
        {"strip_prefix": [3]},
        {"include": 3},
        {"exclude": b"x"},
        {"state_dict": "model"},
        {"copy_tied": "no"},
    ],
)
def test_arguments_of_wrong_types(wrong: dict[str, Any], tmp_path: Path) -> None:
    """An argument of a wrong type raises a TypeError that names the argument. A string is neither a list of its letters
    nor true.
    """
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match=next(iter(wrong))):
        ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", **wrong)
    assert not (tmp_path / "b.pt").exists()


def test_a_command_in_an_error_is_never_cut(src: Path, safe: Path) -> None:
    """If a command in an error would be too long, the error contains an example of it. All names are in the error."""
    torch.save({f"layer_{i:03}.weight": torch.eye(2).to_sparse() for i in range(100)} | {"w": torch.ones(1)}, src)
    said = str(refused(RefusedError, None, src, safe))
    assert all(f"layer_{i:03}.weight (sparse)" in said for i in range(100))
    assert said.endswith("such as exclude='layer_000.weight'")


def left_of(made: Any, folder: Path, suffix: str = "pt", **edits: Any) -> list[str]:
    """Convert `made`, and return the paths of the parts that are left behind."""
    torch.save(made, folder / "made.pt")
    report = ckptconv.convert(folder / "made.pt", folder / f"out.{suffix}", force=True, **edits)
    return [left.path for left in report.left_behind]


def test_edits_apply_only_to_the_selected_part(tmp_path: Path) -> None:
    """Names and globs do not apply outside the selected part, even if an object outside is the same."""
    a, b = torch.ones(2), torch.zeros(3)
    assert left_of({"a": {"x": a}, "b": {"x": a, "y": b}}, tmp_path, select="b", exclude="a/*") == ["a"]
    assert list(torch.load(tmp_path / "out.pt")) == ["x", "y"]
    inner = {"module.q": b}
    outer: OrderedDict[str, Any] = OrderedDict({"w": a, "m._extra_state": inner})
    outer._metadata = {"": {}}  # type: ignore[attr-defined]
    made = {"x": {"E": inner, "n": 1}, "D": outer}
    with pytest.raises(NoMatchError, match=r"no name starts with 'module\.'"):
        left_of(made, tmp_path, select="D", strip_prefix="module")
    assert left_of(made, tmp_path, "safetensors", select="D") == ["x", "D/m._extra_state", "D/._metadata"]
    ema = {"ema": {"model": {"w": a}, "shadow": {"w": b}}}
    assert left_of(ema, tmp_path, "safetensors", select="ema") == ["ema/shadow"]


def parts() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return checkpoints, each with options that extract a part of it. The objects of the part occur earlier in the
    checkpoint, in another order.
    """
    a, b = torch.ones(2), torch.zeros(3)
    model, ema, one, two = {"w": a}, {"w": b}, {"lr": 1}, {"lr": 2}
    z = [torch.randn(2, dtype=torch.complex64).conj() for _ in range(2)]
    first, second = OrderedDict(w=a), OrderedDict(w=b)
    first._metadata = second._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {
        "all": ({"model": model, "ema": ema, "part": {"ema": ema, "model": model}}, {"select": "part"}),
        "plain": ({"x": {"a": one, "b": two}, "part": {"b": two, "a": one, "t": a}}, {"select": "part"}),
        "conj": ({"opt": [z[0]], "model": {"b": z[1], "a": z[0]}}, {"state_dict": True}),
        "exclude": ({"x": {"a": z[0], "b": z[1]}, "y": {"c": z[0]}}, {"exclude": "x/a"}),
        "metadata": ({"a": first, "b": second}, {"select": "b"}),
        "device": ({"a": [torch.device("cpu")] * 2, "b": {"w": a, "d": torch.device("cpu")}}, {"select": "b"}),
    }


@pytest.mark.parametrize("name", parts())
def test_safe_loader_loads_a_part(name: str, src: Path, dst: Path) -> None:
    """The safe loader of torch loads the part, in whatever order it contains its objects, and returns the same objects
    as from the complete checkpoint.
    """
    made, edits = parts()[name]
    torch.save(made, src)
    expected = torch.load(src)
    if name == "exclude":
        del expected["x"]["a"]
    else:
        expected = expected[edits.get("select", "model")]
    assert_same(converted(src, dst, **edits), expected)


def test_attributes_of_tensors_are_named(src: Path, safe: Path) -> None:
    """Attributes of tensors are left behind, and the report names them with their sizes."""
    x = torch.ones(4)
    x.scale, x.k = torch.ones(100), 5  # type: ignore[attr-defined]
    torch.save({"x": x}, src)
    left = ckptconv.convert(src, safe).left_behind
    assert [(each.path, each.nbytes) for each in left] == [("x/.scale", 400), ("x/.k", 0)]


def test_a_mapping_at_two_paths_loses_its_items_at_both(tmp_path: Path) -> None:
    """If a mapping is at two paths, an excluded item is removed at both, and the report contains both."""
    state = {"w": torch.ones(1), "v": torch.ones(2)}
    assert left_of({"model": state, "ema": state}, tmp_path, exclude="model/w") == ["model/w", "ema/w"]


def test_hints_contain_the_names_of_the_source(src: Path, safe: Path) -> None:
    """Globs match the names before other edits, so the hint contains these names. A tensor at the root has a path with
    a slash too.
    """
    torch.save({"module.bad": torch.ones(2, dtype=torch.complex128), "module.ok": torch.ones(1)}, src)
    error = refused(RefusedError, None, src, safe, strip_prefix="module")
    assert str(error.hint).endswith("exclude='module.bad'")
    mixed = {"epoch": 1, "w": torch.ones(1), "model": {"w": torch.ones(2)}}
    assert left_of(mixed, src.parent, exclude="./w") == ["w"]


def test_elements_without_a_key_cannot_be_excluded(src: Path, dst: Path) -> None:
    """An element without a key cannot be left out, so a glob that matches its path is refused."""
    torch.save({"m": {"l": [torch.ones(1)]}, "w": {"a": torch.ones(1)}}, src)
    refused(RefusedError, "only what has a key", src, dst, exclude="m/l*")


@pytest.mark.parametrize("name", ["..pt", "...pt", "a\\b.pt"])
def test_names_of_records_stay_inside_the_folder(name: str, tmp_path: Path) -> None:
    """Whatever the name of the output is, the names of the records in its archive stay inside the folder when they are
    unpacked.
    """
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    assert_equal(converted(tmp_path / "a.safetensors", tmp_path / name), {"a": torch.ones(1)})
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert all(not {"..", ".", ""} & set(entry.split("/")) and "\\" not in entry for entry in archive.namelist())


def test_a_pickle_cannot_contain_dtypes_that_torch_does_not_have(src: Path) -> None:
    """The 6-bit dtypes of safetensors cannot occur in a pickle."""
    torch.save({"a": torch.ones(3)}, src)
    said = records_of(src)["data.pkl"].replace(b"rebuild_tensor_v2", b"rebuild_tensor_v3")
    at = said.rindex(b"t")  # the tuple of arguments
    rezip(src, src, {"data.pkl": said[:at] + b"csafetensors\nF6_E2M3\n" + said[at:]})
    unreadable(src, MalformedError, "a tensor has no dtype")


def test_a_mapping_is_searched_once_for_all_excluded_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping is searched once for all items that are left out. A search for each of 30,000 items would take too
    long.
    """
    calls: list[Any] = []
    original = selection.item_segments
    monkeypatch.setattr(selection, "item_segments", lambda mapping: (calls.append(mapping), original(mapping))[1])
    state = {f"layer.{i}": torch.zeros(1) for i in range(40)}
    assert len(left_of(state, tmp_path, exclude="layer.1*")) == 11
    assert len(calls) <= 2


def test_no_order_of_effects_is_computed_for_a_format_that_has_none(
    src: Path, safe: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of effects is computed once for torch's format, and not at all for safetensors."""
    calls: list[object] = []
    monkeypatch.setattr(selection, "drop_effect_order", calls.append)
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "epoch": 1}, src)
    ckptconv.convert(src, safe, exclude="b")
    assert not calls
    ckptconv.convert(src, dst, state_dict=True, exclude="b")
    assert len(calls) == 1
