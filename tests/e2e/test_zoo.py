"""All kinds of saved objects, converted and compared by torch: the objects of ``zoo``, in every protocol, with several
edits.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
import sys
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ckptconv
from ckptconv import dtypes
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import Literal
from ckptconv.edits.apply import apply
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits
from ckptconv.formats import opening, torch_zip
from tests.support import torch_facts, zoo
from tests.support.archives import without_crc32
from tests.support.conversions import read
from tests.support.judge import assert_same, tags_of
from tests.support.writers import calculated_offsets

# torch warns once for each process that nested, quantized, compressed sparse and complex32 tensors are experimental or
# deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo"),
    pytest.mark.untraced,
]


VERSION = torch_facts.version()
SINCE_3_13 = sys.version_info >= (3, 13)
Rule = Callable[[str, bool], str]
#: The `map_location` of a conversion, and a function that returns the expected location tag. Its arguments are the tag
#: before, and whether the storage contains the state of a random generator.
EDITS: dict[str, tuple[Any, Rule]] = {
    "nothing": (None, lambda tag, rng: tag),
    "cpu": ("cpu", lambda tag, rng: "cpu"),
    "gpu": ("gpu", lambda tag, rng: "cpu" if rng else "cuda:0"),
    "cuda:1": ("cuda:1", lambda tag, rng: "cpu" if rng else "cuda:1"),
    "one": ({"cuda:0": "cuda:1"}, lambda tag, rng: {"cuda:0": "cuda:1"}.get(tag, tag)),
    "swap": (
        {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "mps"},
        lambda tag, rng: (
            tag if rng and tag == "cpu" else {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "mps"}.get(tag, tag)
        ),
    ),
    "family": (
        {"cuda": "xpu", "xpu": "hpu:3"},
        lambda tag, rng: "hpu:3" if tag == "xpu:1" else tag.replace("cuda", "xpu"),
    ),
    "function": (lambda tag: tag.replace("mps", "cpu"), lambda tag, rng: tag.replace("mps", "cpu")),
}
CASES = [(name, protocol) for name in zoo.ZOO for protocol in (2, 4, 5) if protocol >= zoo.NEEDS_PROTOCOL.get(name, 2)]


def load_with(path: Path, rule: Rule, rng: bool) -> tuple[Any, list[str]]:
    """Return the object at `path`, and the location tags of its storages, changed by `rule`.

    If `rng` is true, some of the storages are generator states.
    """
    tags: list[str] = []

    def keep(storage: Any, tag: str) -> Any:
        tags.append(rule(tag, rng and storage.nbytes() in zoo.RNG_SIZES))
        return storage

    return torch.load(path, map_location=keep, weights_only=False), tags


def record(path: Path, name: str = "data.pkl") -> bytes:
    """Return the record `name` of the checkpoint at `path`."""
    return torch._C.PyTorchFileReader(str(path)).get_record(name)


def outcome(load: Callable[[], Any]) -> Any:
    """Return the result of `load`, or the type of its exception. torch cannot load all objects in all ways."""
    try:
        return load()
    except Exception as error:
        return type(error)


def fake(path: Path) -> Any:
    """Return the object at `path` with fake tensors, or the type of the exception."""
    with FakeTensorMode():
        return outcome(lambda: torch.load(path, weights_only=False))


@pytest.mark.parametrize(("name", "protocol"), CASES)
def test_only_location_tags_change(name: str, protocol: int, tmp_path: Path) -> None:
    """With every device mapping, torch loads an equal object with the mapped location tags. Generator states stay on
    the CPU.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    zoo.save(zoo.ZOO[name](), src, pickle_protocol=protocol)
    for map_location, rule in EDITS.values() if protocol == 2 else [EDITS["swap"]]:
        ckptconv.convert(src, dst, map_location=map_location, force=True)
        wanted, tags = load_with(src, rule, name in zoo.RNG)
        found, found_tags = tags_of(dst)
        assert_same(wanted, found)
        assert found_tags == tags, map_location


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_way_of_loading_agrees(name: str, tmp_path: Path) -> None:
    """The output loads in every way in which the source loads, with equal results: mapped into memory, with calculated
    offsets, on the meta device and as fake tensors.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    made, protocol = zoo.ZOO[name](), zoo.NEEDS_PROTOCOL.get(name, 2)
    zoo.save(made, src, pickle_protocol=protocol)
    ckptconv.convert(src, dst, map_location="cpu")
    plain = torch.load(dst, weights_only=False)
    assert_same(torch.load(src, map_location="cpu", weights_only=False), plain)
    assert_same(plain, torch.load(dst, weights_only=False, mmap=True))
    with calculated_offsets():
        assert_same(plain, torch.load(dst, weights_only=False, mmap=True))
        assert_same(plain, torch.load(dst, weights_only=False))
    assert_same(*(outcome(lambda p=p: torch.load(p, map_location="meta", weights_only=False)) for p in (src, dst)))
    # a bare fake storage keeps its location tag as an attribute, whatever map_location is
    zoo.save(made, src, ("cpu",), pickle_protocol=protocol)
    if (name, VERSION) != ("generator", (2, 8)):  # torch loads no fake generators, and 2.8 crashes (SIGSEGV)
        assert_same(fake(src), fake(dst))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_safe_loader(name: str, tmp_path: Path) -> None:
    """If torch's safe loader reads the protocol 2 file, it also reads the outputs of protocols 2, 4 and 5."""
    taken = False
    for protocol in (2, 4, 5):
        src, dst = tmp_path / f"src{protocol}.pt", tmp_path / f"dst{protocol}.pt"
        if protocol < zoo.NEEDS_PROTOCOL.get(name, 2):
            continue
        zoo.save(zoo.ZOO[name](), src, pickle_protocol=protocol)
        ckptconv.convert(src, dst, map_location="cpu")
        if protocol != 2 and taken:
            with pytest.raises(pickle.UnpicklingError):
                torch.load(src, map_location="cpu", weights_only=True)
        elif protocol == 2:
            taken = not isinstance(outcome(partial(torch.load, src, map_location="cpu", weights_only=True)), type)
        if taken:
            assert_same(torch.load(src, map_location="cpu", weights_only=False), torch.load(dst, weights_only=True))
            assert record(dst)[:2] == b"\x80\x02"  # the loader warns about other protocols
    assert (
        taken or name not in SAFE or (name == "nested" and VERSION >= (2, 15)) or (name == "meta" and VERSION < (2, 7))
    )


#: Objects that torch's safe loader reads. Without this list, the test above could pass if the loader refused all
#: objects.
SAFE = [
    "dtypes", "special_values", "views", "ties", "small", "sparse", "quantized", "meta", "conj_neg", "nested",
    "two_dtypes", "state_dict", "user_data", "allowed", "wide",
]  # a table  # fmt: skip


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_empty_bytes_for_the_safe_loader(protocol: int, tmp_path: Path) -> None:
    """The output contains ``b''`` in a form that the safe loader reads if the source has a later protocol than 2. In
    protocol 2, ``b''`` is a call of ``bytes``, which the loader refuses.
    """
    empty = {"bytes": b"", "weight": torch.ones(2)}
    zoo.save(empty, tmp_path / "src.pt", pickle_protocol=protocol)
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", map_location="cpu")
    assert_same(empty, torch.load(tmp_path / "dst.pt", weights_only=True))


#: Objects whose pickle has other bytes. CPython has one object for each one-character string that it reads, so two
#: strings ``'a'`` cannot be distinguished from one that occurs twice. pickle writes the items of a recursive tuple
#: twice, and ckptconv writes such a tuple differently. Since Python 3.13, pickle does not store a class in the memo if
#: it calls ``__new__`` with keywords, and ckptconv does.
OTHER_BYTES = ["parameters", "numpy_objects", "containers", "cycles", "module"] + ["objects"] * SINCE_3_13


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in (*OTHER_BYTES, *zoo.NEEDS_PROTOCOL)])
def test_without_edits_the_pickle_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    """A conversion without edits writes the pickle of ``torch.save`` with the same bytes."""
    zoo.save(zoo.ZOO[name](), tmp_path / "src.pt")
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt")
    assert record(tmp_path / "src.pt") == record(tmp_path / "dst.pt")


def test_the_zoo_contains_what_tests_rely_on(tmp_path: Path) -> None:
    """The zoo contains what other tests rely on: one storage with two classes, alternating location tags, and
    protocols.
    """
    path = tmp_path / "src.pt"
    zoo.save(zoo.two_dtypes(), path)
    names = [arg for _, arg, _ in pickletools.genops(record(path)) if isinstance(arg, str)]
    assert {"torch.storage UntypedStorage", "torch ByteStorage"} <= set(names)
    assert tags_of(path)[1] == ["cpu"]
    zoo.save(zoo.wide(), path, pickle_protocol=4)
    assert tags_of(path)[1] == list(zoo.TAGS) * 20
    assert record(path)[:2] == b"\x80\x04"
    zoo.save(zoo.rng(), path, ("cuda:0",))
    assert tags_of(path)[1] == ["cuda:0"] * 3


ONES = torch.ones(2)
NAN = struct.unpack("<dd", bytes.fromhex("010000000000f87f020000000000f87f"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (NAN[0], NAN[1]),
        (0.0, -0.0),
        (1, True),
        (1j, complex(-0.0, 1)),
        ({"aa": 1, "bb": 2}, {"bb": 2, "aa": 1}),
        ([ONES, ONES], [ONES, ONES.clone()]),
        ([ONES, ONES.view(2)], [ONES, ONES.clone()]),
        (ONES, ONES.double()),
        (ONES, ONES.clone().requires_grad_()),
        (ONES, torch.nn.Parameter(ONES, False)),
        (ONES, torch.ones(3)[:2]),
        (torch.ones(2, 2), torch.ones(2, 2).t().clone().t()[:, :1].expand(2, 2)),
        (torch.ones(1) * 1j, (torch.ones(1) * -1j).conj()),
        (torch.tensor(NAN[0]), torch.tensor(-NAN[0])),
        (torch.zeros(1), -torch.zeros(1)),
        (deque([1], 2), deque([1], 3)),
        (partial(int, "1"), partial(int, "2")),
        (bytearray(b"a"), bytearray(b"b")),
        (torch.device("cuda:0"), torch.device("cuda:1")),
        (zoo.Config(device="cpu"), zoo.Config()),
        (defaultdict(list), defaultdict(dict)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        ({frozenset({1.0})}, {frozenset({1})}),
        (torch.float16, torch.bfloat16),
    ],
)
def test_the_comparison_finds_differences(left: Any, right: Any) -> None:
    """The comparison of objects finds every small difference, and no difference between an object and itself."""
    assert_same(left, left)
    with pytest.raises(AssertionError):
        assert_same(left, right)


def test_table_of_dtypes_is_that_of_torch() -> None:
    """The table of dtypes contains every dtype of torch with its storage class and size. It also contains those of
    other versions.
    """
    classes = {str(dtype)[6:]: name for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
    without = {str(dtype)[6:] for dtype in torch.storage._new_dtypes()}
    assert not without & classes.keys()
    every = {fact[6:] for found in torch_facts.table().values() for fact in found if fact.startswith("dtype ")}
    assert {str(dtype)[6:] for dtype in zoo.DTYPES} <= every == dtypes.BY_NAME.keys()
    for dtype in zoo.DTYPES:
        known = dtypes.BY_NAME[str(dtype)[6:]]
        assert (known.storage_class, known.itemsize) == (classes.get(known.name), dtype.itemsize), dtype
        assert known.storage_class or known.name in without or zoo.SUB_BYTE.fullmatch(str(dtype)), dtype
    assert dtypes.BY_STORAGE_CLASS.keys() == {*classes.values(), "UntypedStorage"}


@pytest.mark.parametrize("name", ["dtypes", "quantized", "meta", "views", "two_dtypes", "parameters"])
def test_properties_of_tensors_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """Dtype, shape, stride, offset, requires_grad and contiguity of each tensor are those of torch."""
    zoo.save(zoo.ZOO[name](), tmp_path / "src.pt")
    loaded = torch.load(tmp_path / "src.pt", map_location="cpu", weights_only=False)
    tensors = read(tmp_path / "src.pt").tensors
    items = loaded.items() if isinstance(loaded, dict) else ((f"[{i}]", tensor) for i, tensor in enumerate(loaded))
    checked = 0
    for key, tensor in items:
        if isinstance(tensor, torch.Tensor):
            info = tensors[key.replace("/", "\\/")]
            found = (info.dtype, info.shape, info.stride, info.offset, info.requires_grad, info.contiguous)
            start, grad = tensor.storage_offset(), tensor.requires_grad
            assert found == (
                str(tensor.dtype)[6:],
                tuple(tensor.shape),
                tensor.stride(),
                start,
                grad,
                tensor.is_contiguous(),
            ), key
            assert info.is_parameter == isinstance(tensor, torch.nn.Parameter)
            checked += 1
    assert checked > 2


# Devices that are not location tags


def wrapped(device: str) -> Any:
    """Return a wrapper subclass, tensors that are rebuilt on a device, and user data with devices, which must not
    change.
    """
    device_object = torch.device(device)
    return {
        "wrapper": zoo.WrapperTensor(torch.arange(3.0), device),
        "data": device_object,
        "name": device,
        "cpu_tensor": zoo.Rebuilt("_rebuild_device_tensor_from_cpu_tensor", torch.ones(2), device),
        "numpy": zoo.Rebuilt("_rebuild_device_tensor_from_numpy", torch.ones(3).numpy(), device),
        "object": zoo.Rebuilt("_rebuild_device_tensor_from_cpu_tensor", torch.ones(4), device_object),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("device", ["xpu:1", "mps:0", "cuda:0"])
def test_rebuild_devices_to_the_cpu(device: str, protocol: int, tmp_path: Path) -> None:
    """A string and a dict as map_location give the results of torch. In torch's dict, devices of wrappers must be
    objects.
    """
    src, dst, mapped = tmp_path / "src.pt", tmp_path / "dst.pt", tmp_path / "mapped.pt"
    tag = "mps" if device == "mps:0" else device
    zoo.save(wrapped(device), src, (tag,), pickle_protocol=protocol)
    ckptconv.convert(src, dst, map_location="cpu")
    ckptconv.convert(src, mapped, map_location={device: "cpu"})
    by_string = torch.load(src, map_location="cpu", weights_only=False)
    by_dict = torch.load(
        src, map_location=dict.fromkeys((device, tag, torch.device(device)), "cpu"), weights_only=False
    )
    for path in (dst, mapped):
        found = torch.load(path, weights_only=False)
        assert_same(by_string, found)
        assert_same(by_dict, found)
        assert found["data"] == torch.device(device) and found["name"] == device
        on_meta = [torch.load(p, map_location="meta", weights_only=False) for p in (src, path)]
        assert_same(*on_meta)


def test_rebuild_devices_to_another_device(tmp_path: Path) -> None:
    """The devices of a wrapper and its inner tensor are mapped, also to devices that do not exist here. A wrapper on
    the CPU is mapped too.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    wrapper = zoo.WrapperTensor(torch.arange(3.0), "xpu:1")
    zoo.save([wrapper, zoo.WrapperTensor(torch.ones(1), "cpu")], src, ("cpu", "xpu:1"))
    for map_location, devices, tags in [
        ({"xpu:1": "cuda:2"}, ["cuda:2", "cpu"], ["cpu", "cuda:2"]),
        ({"xpu": "cuda", "cpu": "cuda:3"}, ["cuda:1", "cuda:3"], ["cuda:3", "cuda:1"]),
        ("cuda:1", ["cuda:1", "cuda:1"], ["cuda:1", "cuda:1"]),
    ]:
        ckptconv.convert(src, dst, map_location=map_location, force=True)
        with mock.patch("torch._utils._get_restore_location", lambda device: device):
            found, found_tags = tags_of(dst)
        assert [str(tensor.device) for tensor in found] == devices
        assert found_tags == tags
        assert torch.equal(found[0].inner, torch.arange(3.0))


# Classes, checksums and containers


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", ["objects", "module", "cycles", "subclass", "keys"])
def test_classes_need_not_exist(name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects whose classes cannot be imported are converted. torch cannot load the source and the output without the
    module.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    zoo.save(zoo.ZOO[name](), src, pickle_protocol=protocol)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tests.support.zoo", None)
        ckptconv.convert(src, dst, map_location="cuda:1")
        for path in (src, dst):
            with pytest.raises(ImportError):
                tags_of(path)
    assert_same(tags_of(src)[0], tags_of(dst)[0])


@pytest.mark.parametrize("some", [False, True])
def test_checksums(tmp_path: Path, some: bool) -> None:
    """If the source has no checksums, the output has none either, and a note reports it. Otherwise, zipfile verifies
    every record.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    with nullcontext() if some else without_crc32():
        zoo.save(zoo.training() if some else zoo.views(), src)
    report = ckptconv.convert(src, dst, map_location="cpu")
    with zipfile.ZipFile(dst) as archive:
        assert {bool(info.CRC) for info in archive.infolist()} == {some}
        assert archive.testzip() is None or not some
    assert any("checksum" in note for note in report.notes) != some
    assert_same(tags_of(src)[0], tags_of(dst)[0])


def data_offsets(path: Path) -> dict[str, int]:
    """Return the offset of the data of each record."""
    offsets = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            offsets[info.filename.split("/", 1)[1]] = info.header_offset + 30 + name + extra
    return offsets


@pytest.mark.parametrize("name", ["views", "training", "module", "long_values", "two_dtypes"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_another_tool(name: str, method: int, tmp_path: Path) -> None:
    """A checkpoint that another tool rewrote is converted to stored and aligned records with equal tensors.

    The records of the source are stored or deflated, in another order, and not aligned.
    """
    src, zipped, dst = tmp_path / "src.pt", tmp_path / "zipped.pt", tmp_path / "dst.pt"
    zoo.save(zoo.ZOO[name](), src)
    with zipfile.ZipFile(src) as old, zipfile.ZipFile(zipped, "w", method) as new:
        for entry in sorted(old.namelist(), reverse=True):
            new.writestr(entry, old.read(entry))
    assert any(offset % 64 for key, offset in data_offsets(zipped).items() if key.startswith("data/"))
    ckptconv.convert(zipped, dst, map_location={"cuda:0": "cuda:1"})
    assert all(offset % 64 == 0 for key, offset in data_offsets(dst).items() if key.startswith("data/"))
    wanted, tags = load_with(src, EDITS["one"][1], False)
    ways = [tags_of(dst), tags_of(dst, mmap=True)]
    with calculated_offsets():
        ways += [tags_of(dst), tags_of(dst, mmap=True)]
    for found, found_tags in ways:
        assert_same(wanted, found)
        assert found_tags == tags


@pytest.mark.parametrize("orphan", [False, True])
def test_a_record_over_four_gigabytes(orphan: bool, tmp_path: Path) -> None:
    """A file with a storage of more than 4 GiB is planned with zip64. zipfile and torch read it, although only the ends
    of each piece are written.

    With an unused record, the large record moves and gets a new header.
    """
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    size = (1 << 32) + 64
    last = torch.arange(5)
    big = {"first": torch.ones(3), "big": torch.empty(size, dtype=torch.uint8), "last": last}
    with torch.serialization.skip_data():  # a sparse file: nothing of that size is held or written
        zoo.save(big, src, ("cuda:0",))
    pickled = record(src)
    writer = torch._C.PyTorchFileWriter(str(src))
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("data/0", b"first 3 = 12", 12)
    if orphan:
        writer.write_record("data/orphan", b"left behind", 11)
    writer.write_record_metadata("data/1", size)
    writer.write_record("data/2", last.numpy().tobytes(), 40)
    writer.write_end_of_file()
    with Source(src) as source, dst.open("wb") as file:
        checkpoint = opening.read(source)
        apply(checkpoint, Edits(to_devices("cpu")))
        plan = torch_zip.layout(checkpoint, dst).files[0]
        at = 0
        for piece in plan.pieces:
            for start in {0, max(0, piece.length - 4096)}:
                file.seek(at + start)
                n = min(4096, piece.length - start)
                file.write(
                    piece.data[start : start + n]
                    if isinstance(piece, Literal)
                    else source.read(piece.offset + start, n)
                )
            at += piece.length
        assert at == plan.size > size
    assert [left.path for left in checkpoint.unused] == ["data/orphan"] * orphan
    with zipfile.ZipFile(dst) as archive:
        assert [info.file_size for info in archive.infolist() if "/data/" in info.filename] == [12, size, 40]
        assert archive.read("src/data.pkl") == record(dst)
    assert all(offset % 64 == 0 for key, offset in data_offsets(dst).items() if key.startswith("data/"))
    assert read(dst).storages["1"].nbytes == size  # this reader is stricter than both
    found, tags = tags_of(dst, mmap=True)
    assert tags == ["cpu"] * 3
    assert found["big"].shape == (size,)
    assert found["last"].tolist() == [0, 1, 2, 3, 4]
