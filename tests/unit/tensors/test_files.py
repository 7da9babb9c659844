"""Files from Python: ``load`` gives the objects of torch's safe loader, ``open`` gives single tensors, and ``save``
writes what ``torch.save`` would write.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import random
import re
import signal
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptconv
from ckptconv.errors import (
    DeviceUnavailable,
    InputChangedError,
    InputError,
    MalformedError,
    NoMatchError,
    OutputError,
    RefusedError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from ckptconv.pickles.paths import parse_path
from ckptconv.tensors import loading
from tests.support import torch_facts, zoo
from tests.support.archives import flip_bit, records_of, rezip
from tests.support.conversions import Error
from tests.support.judge import assert_same, assert_same_files, tags_of

# torch warns once in each process that nested, quantized, compressed sparse and complex32 tensors are experimental or
# deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo")


def outcome(load: Callable[[], Any]) -> Any:
    """Return the result of `load`, or its exception."""
    try:
        return load()
    except Exception as error:
        return error


def unloadable(path: Path, kind: type[Error], words: str | None, location: Any = None) -> Error:
    """Assert that loading `path` fails with an error of this `kind` that matches `words`. Return the error."""
    with pytest.raises(kind, match=words) as caught:
        ckptconv.load(path, location)
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file."""
    return tmp_path / "a.pt"


def loadable() -> Any:
    """Return a model, an optimizer and numbers, which torch's safe loader accepts."""
    return {key: value for key, value in zoo.training().items() if key not in ("args", "rng")}


@pytest.fixture
def training(fixtures: Path) -> Path:
    """Return the path of a checkpoint with a model, its EMA, an optimizer and generator states, all on GPUs."""
    return fixtures / "training.pt"


# load


@pytest.mark.parametrize("name", zoo.ZOO)
def test_load_gives_the_objects_of_torchs_safe_loader(name: str, path: Path) -> None:
    """Every object of the zoo is loaded as by torch's safe loader. If torch refuses the file, our own error is
    raised.
    """
    zoo.save(zoo.ZOO[name](), path, pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
    wanted = outcome(lambda: torch.load(path, map_location="cpu", weights_only=True))
    found = outcome(lambda: ckptconv.load(path, "cpu"))
    if isinstance(wanted, Exception):
        assert isinstance(found, UnsupportedError), found
    else:
        assert_same(wanted, found)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_load_accepts_each_protocol(protocol: int, path: Path) -> None:
    """Pickles of each protocol are loaded. torch's safe loader refuses protocol 4."""
    torch.save(loadable(), path, pickle_protocol=protocol)
    assert_same(torch.load(path, weights_only=False), ckptconv.load(path))


LOCATIONS: dict[str, Any] = {
    "device": "cpu",
    "torch.device": torch.device("cpu"),
    "meta": "meta",
    "mapping": {"cuda:0": "cpu", "cuda:1": "cpu", "mps": "cpu", "xpu:1": "cpu"},
    "storage and tag": lambda storage, tag: storage,
    "storage and tag, or nothing": lambda storage, tag: None if tag == "cpu" else storage,
    "any arguments": lambda *args: args[0],
}


@pytest.mark.parametrize("kind", LOCATIONS)
def test_every_kind_of_map_location_that_torch_takes(kind: str, tmp_path: Path) -> None:
    """A device, a torch.device, meta, a mapping, and a function of storage and tag give the same object as in torch."""
    for name in ("state_dict", "views", "quantized", "sparse", "conj_neg", "subclass"):
        path = tmp_path / f"{name}.pt"
        zoo.save(zoo.ZOO[name](), path)
        wanted = outcome(lambda path=path: torch.load(path, map_location=LOCATIONS[kind], weights_only=True))
        found = outcome(lambda path=path: ckptconv.load(path, LOCATIONS[kind]))
        if isinstance(wanted, Exception):
            assert isinstance(found, Exception), (name, wanted)
        else:
            assert_same(wanted, found)


@pytest.mark.parametrize(
    "location",
    [{"any": "cpu"}, {"gpu": "cpu"}, {"cuda": "cpu", "mps": "cpu", "xpu": "cpu"}, lambda tag: "cpu", "any=cpu", "auto"],
)
def test_every_kind_of_map_location_that_convert_takes(location: Any, path: Path) -> None:
    """Families, ``any``, a rule as text, a function of the tag, and ``auto`` on a machine without a GPU are accepted,
    as in ``convert``.
    """
    if location == "auto" and torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    zoo.save(loadable(), path)
    assert_same(torch.load(path, map_location="cpu", weights_only=True), ckptconv.load(path, location))


def test_a_function_gets_the_location_tag(path: Path) -> None:
    """A function of one argument is called with the location tag."""
    seen: list[str] = []
    zoo.save([torch.ones(2)], path, tags=["xpu:1"])

    def remember(tag: str) -> str:
        seen.append(tag)
        return "cpu"

    ckptconv.load(path, remember)
    assert seen == ["xpu:1"]


@pytest.mark.parametrize("function", [lambda: "cpu", lambda a, b, c: "cpu"])
def test_a_function_with_other_arguments_is_a_type_error(function: Any, training: Path) -> None:
    """A function that takes neither the tag, nor the storage and the tag, is a TypeError."""
    with pytest.raises(TypeError, match="map_location must be a function"):
        ckptconv.load(training, function)


@pytest.mark.parametrize(
    "location", [None, "cuda:7", "gpu:99", {"cuda:0": "cuda:99"}, lambda tag: "cuda:98", "any=cuda:97", "hpu"]
)
def test_unavailable_devices_are_reported_before_the_load(
    location: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeviceUnavailable contains the missing device and the argument that helps. It is raised before torch loads
    anything.
    """
    zoo.save(zoo.state_dict(), path, tags=["cuda:0", "cuda:111"])
    monkeypatch.setattr(torch, "load", None)
    unloadable(path, DeviceUnavailable, r"(cuda:(7|9[789]|111)|hpu).*map_location='cpu'", location)


@pytest.mark.parametrize("obj", [{"epoch": 3}, {"w": torch.empty(3, device="meta")}], ids=["numbers", "meta"])
def test_no_device_is_needed_without_bytes_of_tensors(obj: Any, path: Path) -> None:
    """An object without tensor data loads for a device that does not exist here, as with torch."""
    torch.save(obj, path)
    assert_same(ckptconv.load(path, "cuda:7"), torch.load(path, map_location="cuda:7"))
    report = ckptconv.convert(path, path, map_location="cuda:7", force=True)
    why = "no tensor has data" if "w" in obj else "there are no tensors"
    assert f"{why}, so map_location='cuda:7' changed nothing" in report.notes


@pytest.mark.parametrize("location", ["cuda:300", "cpu:x", "xla:0", "", {"cuda:0": "meta"}])
def test_invalid_devices_are_usage_errors(location: Any, training: Path) -> None:
    """An invalid device is a UsageError. torch would take ``cuda:300`` for ``cuda:44``."""
    unloadable(training, UsageError, None, location)


def test_parts_load(training: Path, fixtures: Path) -> None:
    """The object at a path, and the state dict without the prefix of its names, can be loaded separately."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        whole = torch.load(training, map_location="cpu", weights_only=True)
    assert_same(whole["optimizer"], ckptconv.load(training, "cpu", select="optimizer"))
    ddp = fixtures / "dataparallel.pt"
    names = torch.load(ddp, map_location="cpu", weights_only=True)
    found = ckptconv.load(ddp, "cpu", state_dict=True, strip_prefix="module")
    assert list(found) == [name.removeprefix("module.") for name in names]
    assert all(torch.equal(a, b) for a, b in zip(names.values(), found.values(), strict=True))


class Config:
    """A class that torch's safe loader does not know."""

    def __init__(self) -> None:
        self.lr = 0.1


def test_parts_without_unknown_classes_load(path: Path) -> None:
    """If a file contains an unknown class, the error names the class and the argument that loads a part without it."""
    model = nn.Linear(2, 3).state_dict()
    torch.save({"config": Config(), "state_dict": model, "best": [torch.ones(3)]}, path)
    unloadable(path, UnsupportedError, r"Config.*at config.*state_dict=True")
    assert_same(model, ckptconv.load(path, state_dict=True))
    assert_same([torch.ones(3)], ckptconv.load(path, select="best"))
    torch.save({"a": Config(), "b": {"c": [1], "d": torch.ones(3)}}, path)
    unloadable(path, UnsupportedError, "select='b'")
    torch.save([Config()], path)
    said = str(unloadable(path, UnsupportedError, "Config"))
    assert "select" not in said and "state_dict=" not in said
    torch.save([[Config(), torch.ones(1)], [Config(), torch.ones(1)]], path)
    unloadable(path, UnsupportedError, r"ckptconv\.open\(path\)\.load")
    with ckptconv.open(path) as file:
        assert [file.load(each).shape for each in file.tensors] == [(1,), (1,)]


def test_the_state_dict_of_a_pickled_model_loads(path: Path) -> None:
    """The error for a pickled model tells how to load its state dict, also if there are two models. Single tensors load
    by their paths.
    """
    net, other = nn.Sequential(nn.Linear(2, 1)), nn.Linear(2, 2)
    torch.save(net, path)
    unloadable(path, UnsupportedError, "; state_dict=True loads a part without it")
    found = ckptconv.load(path, state_dict=True)
    assert list(found) == list(net.state_dict())
    nn.Sequential(nn.Linear(2, 1)).load_state_dict(found, strict=True)
    with ckptconv.open(path) as file:
        assert [file.load(each).shape for each in file.tensors] == [(1, 2), (1,)]
    torch.save({"a": net, "b": other}, path)
    unloadable(path, UnsupportedError, "select='b', state_dict=True loads a part without it")
    assert torch.equal(ckptconv.load(path, select="b", state_dict=True)["weight"], other.weight)


def test_classes_that_the_program_trusts_load(path: Path) -> None:
    """Classes that ``safe_globals`` allows are loaded, also under their names in Python 2. Other classes lead to our
    own error.
    """
    torch.save({"config": Config()}, path)
    with torch.serialization.safe_globals([Config]):
        assert ckptconv.load(path)["config"].lr == 0.1
    with torch.serialization.safe_globals([nn.Linear]):
        unloadable(path, UnsupportedError, "Config")
    torch.save({"r": range(3), "f": frozenset([1])}, path)
    with torch.serialization.safe_globals([range, frozenset]):
        assert ckptconv.load(path) == {"r": range(3), "f": frozenset([1])}
    with torch.serialization.safe_globals([range]):
        unloadable(path, UnsupportedError, "frozenset at f")


def test_safetensors_files_load(tmp_path: Path) -> None:
    """A safetensors file is a dict of tensors, which equal those of the library. Ties that the metadata records are
    restored.
    """
    head = torch.arange(6.0).view(2, 3)
    ckptconv.save({"embed": head, "head": head, "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    found = ckptconv.load(tmp_path / "a.safetensors")
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    wanted = load_file(tmp_path / "a.safetensors")
    assert_same(wanted, {name: found[name] for name in wanted})


@pytest.fixture
def endianness() -> Iterator[Callable[[Any], None]]:
    """Yield torch's function that sets the byte order of files that do not record one. Reset it afterwards."""
    yield torch.serialization.set_default_load_endianness
    torch.serialization.set_default_load_endianness(None)


@pytest.mark.parametrize("order", [None, *torch.serialization.LoadEndianness])
def test_files_without_a_byte_order(path: Path, endianness: Callable[[Any], None], order: Any) -> None:
    """If a file does not record its byte order, the setting of torch is used, also for a part and for single tensors. A
    recorded byte order takes precedence.
    """
    torch.save({"model": {"w": torch.arange(3.0)}}, path)
    endianness(order)
    for said in (b"little", b"big", None):
        rezip(path, path, {"byteorder": said})
        expected = torch.load(path)
        assert_same(ckptconv.load(path), expected)
        assert_same(ckptconv.load(path, select="model"), expected["model"])
        with ckptconv.open(path) as opened:
            assert_same(opened.load("model/w"), expected["model"]["w"])


def test_deflated_files_load(path: Path) -> None:
    """Files whose storages and pickle were compressed by a zip program are loaded."""
    state = {"a": torch.randn(100_000), "b": torch.zeros(1000, 1000), "c": torch.arange(5)}
    torch.save(state, path)
    rezip(path, path, method=zipfile.ZIP_DEFLATED)
    assert_same(state, ckptconv.load(path))
    with ckptconv.open(path) as file:
        assert torch.equal(file.load("b"), state["b"])


def test_a_file_that_changes_meanwhile_is_an_error(fixtures: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file changes during a load, an error is raised, because the object could contain bytes of two versions."""
    fixture = fixtures / "two_gpus.pt"
    path.write_bytes(fixture.read_bytes())
    load = loading.load_checkpoint

    def and_change(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        os.utime(path, (1, 1))
        return loaded

    monkeypatch.setattr(loading, "load_checkpoint", and_change)
    unloadable(path, InputChangedError, None, "cpu")
    path.write_bytes(fixture.read_bytes())
    with ckptconv.open(path) as file, pytest.raises(InputChangedError):
        file.load(next(iter(file.tensors)))


def with_pickle(path: Path, obj: Any, change: Callable[[bytes], bytes]) -> None:
    """Save `obj` to `path`, with its pickle changed by `change`."""
    torch.save(obj, path)
    rezip(path, path, {"data.pkl": change(records_of(path)["data.pkl"])})


def test_errors_of_reading_are_kept(path: Path) -> None:
    """torch only reports that it could not read. If a file became shorter, or a deflate stream is damaged, our own
    error is raised.
    """
    torch.save({str(i): torch.ones(1000) for i in range(100)}, path)
    with ckptconv.open(path) as file:
        os.truncate(path, 5000)
        with pytest.raises(InputChangedError, match="shorter"):
            file.load("99")
    torch.save({"a": torch.randn(100_000)}, path)
    rezip(path, path, method=zipfile.ZIP_DEFLATED)
    flip_bit(path, 200_000)
    unloadable(path, MalformedError, None)


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        (b"ctorch\ndevice\n(X\x05\0\0\0bogustR", UnsupportedError, "refuses it .*knows no device 'bogus'"),
        (b"cbuiltins\ncomplex\n(X\x02\0\0\0zztR", MalformedError, "torch cannot create"),
        (b"}]K\x01s", UnsupportedError, "refuses it .*cannot hash"),
    ],
)
def test_objects_that_torch_cannot_create(word: bytes, error: type[Error], said: str, path: Path) -> None:
    """A device with an unknown name, an invalid number, and a list as a key lead to our own errors. torch and Python
    would raise a dozen kinds of exceptions.
    """
    with_pickle(path, [torch.ones(2)], lambda pickle: pickle[:2] + b"(" + word + pickle[2:-1] + b"t.")
    unloadable(path, error, said)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_errors_of_memory_are_kept(fixtures: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Errors of torch and Python about insufficient memory are not changed, so that a caller can catch them and try
    again with less.
    """
    monkeypatch.setattr(torch, "load", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        ckptconv.load(fixtures / "cpu.pt")


def test_exceptions_of_a_function_are_kept(training: Path, fixtures: Path) -> None:
    """An exception of a ``map_location`` function of the user is not changed."""

    def fail(storage: Any, tag: str) -> Any:
        raise ZeroDivisionError(tag)

    with pytest.raises(ZeroDivisionError, match="cuda:0"):
        ckptconv.load(fixtures / "cuda0.pt", fail)


@pytest.mark.skipif(torch_facts.version() < (2, 7), reason="torch 2.6 has no settings")
def test_torchs_settings_do_not_matter(fixtures: Path) -> None:
    """torch can map files into memory only by their paths. With this setting, ``load`` works, although it gives torch a
    stream.
    """
    from torch.utils.serialization import config

    with config.patch({"load.mmap": True}):
        assert ckptconv.load(fixtures / "cpu.pt")


def test_tags_and_dtypes_that_torch_does_not_have(path: Path, tmp_path: Path) -> None:
    """The tag ``cpu:0`` and the dtype F6_E2M3 are refused, because torch does not have them. A path may be bytes."""
    zoo.save([torch.ones(2)], path, tags=["cpu:0"])
    unloadable(path, DeviceUnavailable, "cpu:0")
    assert ckptconv.load(os.fsencode(path), "cpu")[0].tolist() == [1, 1]  # type: ignore[arg-type]
    ckptconv.save([1], os.fsencode(tmp_path / "b.pt"))  # type: ignore[arg-type]
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"123")
    unloadable(tmp_path / "c.safetensors", UnsupportedError, "F6_E2M3")


@pytest.mark.cuda
def test_auto_is_the_gpu(training: Path) -> None:
    """``auto`` is the GPU if there is one."""
    tensors = ckptconv.load(training, "auto", state_dict=True).values()
    assert {tensor.device.type for tensor in tensors} == {"cuda"}


# open


def at_path(value: Any, path: str) -> Any:
    """Return the tensor at `path`, which may contain only string keys and indices. Otherwise return None."""
    for segment in parse_path(path):
        key: Any = (
            re.sub(r"\\(.)", r"\1", segment[1:])
            if segment.startswith("/")
            else int(segment[1:-1])
            if segment[1:-1].isdecimal()
            else None
        )
        if isinstance(value, dict) or (isinstance(value, (list, tuple)) and isinstance(key, int)):
            if key is None or (isinstance(value, dict) and key not in value):
                return None
            value = value[key]
        else:
            return None
    return value if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("name", zoo.ZOO)
def test_single_tensors_equal_those_of_the_complete_object(name: str, path: Path) -> None:
    """For each object of the zoo, a tensor that is loaded by its path equals the tensor in the complete object. This is
    also true for a second load.
    """
    zoo.save(zoo.ZOO[name](), path, pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
    whole = torch.load(path, map_location="cpu", weights_only=False)
    compared = 0
    with ckptconv.open(path) as file:
        for at, info in file.tensors.items():
            wanted = at_path(whole, at)
            if wanted is None or wanted.is_meta:
                continue
            try:
                found = file.load(at)
            except UnsupportedError:  # its own class, or nested, which torch accepts before 2.15
                is_plain = type(wanted) in (torch.Tensor, nn.Parameter) and not wanted.__dict__
                assert not is_plain or (info.kind == "nested" and torch_facts.version() >= (2, 15))
                continue
            assert_same(wanted, found)
            assert_same(found, file.load(at))
            assert found.dtype == getattr(torch, info.dtype)
            assert info.kind == "nested" or tuple(found.shape) == info.shape
            compared += 1
    tensors = [
        each
        for key, each in (whole.items() if isinstance(whole, dict) else [])
        if isinstance(key, str) and type(each) is torch.Tensor and not each.is_meta
    ]
    assert compared >= len(tensors)


def test_tensors_next_to_shared_attributes_and_discarded_calls(path: Path) -> None:
    """A single tensor loads if its attribute occurs first in an earlier tensor, and if the pickle discards the result
    of a call.
    """
    first, second = torch.ones(2), torch.zeros(3)
    first.info = second.info = {"k": OrderedDict(a=1)}  # type: ignore[attr-defined]
    torch.save([first, second], path)
    with ckptconv.open(path) as file:
        found = file.load("[1]")
    assert torch.equal(found, second) and found.info == second.info  # type: ignore[attr-defined]
    with_pickle(path, [first, second], lambda pickle: pickle[:2] + b"cos\ngetcwd\n)R0" + pickle[2:])
    unloadable(path, UnsupportedError, None)
    with ckptconv.open(path) as file:
        assert torch.equal(file.load("[0]"), first)


def test_only_the_requested_tensor_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of a 40 kB tensor from a file of 40 MB reads less than 50 kB."""
    torch.save({f"w{i}": torch.full((10_000,), float(i)) for i in range(1000)}, path)
    with ckptconv.open(path) as file:
        read: list[int] = []
        preadv = os.preadv
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, at: (read.append(len(buffers[0])), preadv(fd, buffers, at))[1]
        )
        assert file.load("w7")[0] == 7
        assert 40_000 <= sum(read) < 50_000


def test_attributes_of_an_open_file(training: Path, tmp_path: Path) -> None:
    """An open file has its path, its format, its tensors with their facts, and the metadata of safetensors. The mapping
    of tensors cannot be changed.
    """
    with ckptconv.open(training) as file:
        assert (file.path, file.format, dict(file.metadata)) == (training, "torch zip", {})
        summary = ckptconv.inspect(training)
        assert list(file.tensors) == [tensor.path for tensor in summary.tensors]
        first = next(iter(file.tensors.values()))
        row = summary.tensors[0]
        assert (first.path, first.device, first.shape) == (row.path, row.device, row.shape)
        with pytest.raises(TypeError):
            file.tensors["x"] = first  # type: ignore[index]
    ckptconv.convert(training, tmp_path / "a.safetensors", state_dict=True)
    with ckptconv.open(tmp_path / "a.safetensors") as file:
        assert file.metadata["format"] == "pt"
        assert file.format == "safetensors"
        for path in file.tensors:
            assert torch.equal(file.load(path), load_file(tmp_path / "a.safetensors")[path])


def test_errors_of_an_open_file(training: Path, tmp_path: Path) -> None:
    """If a path is almost right, the error contains the right one. A closed file cannot load tensors. No file stays
    open after an error.
    """
    with ckptconv.open(training) as file:
        assert repr(file) == f"<CheckpointFile {str(training)!r}: torch zip, 37 tensors>"
        path = next(iter(file.tensors))
        with pytest.raises(TypeError, match="by its path"):
            file.load(3)  # type: ignore[arg-type]
        with pytest.raises(NoMatchError, match=path.replace(".", r"\.")):
            file.load(path.rpartition("/")[2])
        with pytest.raises(NoMatchError):
            file.load("optimizer")
    with pytest.raises(UsageError, match="closed"):
        file.load(path)
    file.close()
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04 and nothing else")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(InputError):
        ckptconv.open(tmp_path / "a.pt")
    assert before in (0, len(os.listdir("/proc/self/fd")))


def test_threads_load_from_one_file(path: Path) -> None:
    """Threads that load tensors at the same time get the tensors that they ask for."""
    torch.save({f"w{i}": torch.full((1000,), float(i)) for i in range(64)}, path)
    with ckptconv.open(path) as file, ThreadPoolExecutor(4) as threads:
        for i, found in enumerate(threads.map(lambda i: file.load(f"w{i}"), range(64))):
            assert found.unique().tolist() == [i]


# save


@pytest.mark.parametrize("name", zoo.ZOO)
def test_save_and_torch_save_write_the_same_objects(name: str, tmp_path: Path) -> None:
    """For every object of the zoo, ``torch.load`` gives the same object with the same tags from the files of ``save``
    and of ``torch.save``.
    """
    made = zoo.ZOO[name]()
    with zoo.tagging():
        wanted = outcome(lambda: torch.save(made, tmp_path / "torch.pt"))
    with zoo.tagging():
        found = outcome(lambda: ckptconv.save(made, tmp_path / "ours.pt"))
    if isinstance(wanted, Exception):
        assert isinstance(found, type(wanted)), (wanted, found)
        return
    assert isinstance(found, ckptconv.Report), found
    assert_same_files(tmp_path / "torch.pt", tmp_path / "ours.pt", weights_only=False)


@pytest.mark.parametrize(
    "edits",
    [
        {"map_location": "cuda:1"},
        {"strip_prefix": "module.", "add_prefix": ["net."], "map_location": {"cpu": "mps"}},
        {"select": "model", "rename": [("weight$", "w")]},
        {"state_dict": True, "exclude": "*bias", "map_location": lambda tag: "xpu:0"},
    ],
    ids=["devices", "names", "a part", "a state dict"],
)
def test_the_edits_of_convert(tmp_path: Path, edits: dict[str, Any]) -> None:
    """An object saved with edits, and an object saved by torch and converted with these edits, are the same, and so are
    the changes in their reports.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    obj = {"model": nn.DataParallel(model).state_dict(), "rng": torch.get_rng_state(), "epoch": 3}
    torch.save(obj, tmp_path / "torch.pt")
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    saved = ckptconv.save(obj, ours, **edits)
    converted = ckptconv.convert(tmp_path / "torch.pt", theirs, **edits)
    assert_same_files(ours, theirs, weights_only=True)
    assert saved.changes == converted.changes


def test_safetensors_by_the_suffix(tmp_path: Path) -> None:
    """With the suffix of safetensors, the state dict is saved. Views become complete tensors, as the library reads
    them.
    """
    weight = torch.arange(12.0).view(3, 4)
    report = ckptconv.save({"net": {"a": weight.T, "b": weight[1:]}, "epoch": 1}, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert torch.equal(found["a"], weight.T) and torch.equal(found["b"], weight[1:])
    assert report.formats == ("memory", "safetensors")
    assert [left.path for left in report.left_behind] == ["epoch"]


def test_large_storages_and_long_texts(tmp_path: Path) -> None:
    """A storage that takes several buffers, and a text so long that the graph contains only its position, are saved
    correctly.
    """
    obj = {"w": torch.randn(5_000_000), "text": "long " * 50_000, "bytes": b"\x00\xff" * 60_000}
    ckptconv.save(obj, tmp_path / "a.pt", verify=True)
    assert_same(obj, torch.load(tmp_path / "a.pt", weights_only=False))
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


def test_one_storage_under_two_dtypes_is_refused(tmp_path: Path) -> None:
    """A storage that is used with two dtypes is refused, as by torch. The format has only one dtype for each
    storage.
    """
    weight = torch.ones(4)
    for save in (torch.save, ckptconv.save):
        with pytest.raises((RuntimeError, RefusedError), match="view"):
            save({"a": weight, "b": weight.view(torch.int32)}, tmp_path / "a.pt")
    assert ckptconv.save({"a": torch.ones(4, dtype=torch.uint8), "b": torch.from_numpy(np.ones(3))}, tmp_path / "b.pt")


def test_a_file_is_replaced_completely_or_not_at_all(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old file is replaced, unless ``force`` is false. An object that cannot be saved, and a fault during the write,
    leave the old file unchanged.
    """
    ckptconv.save([1], path)
    ckptconv.save([2], path)
    with pytest.raises(TargetExistsError):
        ckptconv.save(lambda: "no pickle takes this", path, force=False)
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        ckptconv.save(lambda: 1, path)
    with pytest.raises(UsageError, match="folder"):
        ckptconv.save([1], tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(OutputError):
            ckptconv.save([4], path)
    assert torch.load(path) == [2]
    assert os.listdir(tmp_path) == ["a.pt"]


def test_objects_with_attributes_and_metadata(tmp_path: Path) -> None:
    """The ``_metadata`` of a state dict is saved, and follows the names."""
    state = nn.DataParallel(nn.BatchNorm1d(3)).state_dict()
    ckptconv.save(state, tmp_path / "a.pt", strip_prefix="module.")
    found = torch.load(tmp_path / "a.pt")
    assert isinstance(found, OrderedDict)
    assert found._metadata == nn.BatchNorm1d(3).state_dict()._metadata  # type: ignore[attr-defined]
    nn.BatchNorm1d(3).load_state_dict(found, strict=True)


@pytest.mark.cuda
def test_tensors_on_the_gpu_are_saved(tmp_path: Path) -> None:
    """Tensors on a GPU are saved with the same values and tags as by torch."""
    state = {"a": torch.randn(3_000_000, device="cuda"), "b": torch.randn(5, 7, device="cuda").T, "c": torch.ones(3)}
    torch.save(state, tmp_path / "torch.pt")
    ckptconv.save(state, tmp_path / "ours.pt", verify=True)
    assert_same(*(torch.load(tmp_path / f"{name}.pt", map_location="cpu") for name in ("torch", "ours")))
    assert tags_of(tmp_path / "torch.pt")[1] == tags_of(tmp_path / "ours.pt")[1]
    ckptconv.save(state, tmp_path / "cpu.pt", map_location="cpu")
    assert tags_of(tmp_path / "cpu.pt")[1] == ["cpu"] * 3


def test_objects_that_the_format_cannot_contain(tmp_path: Path) -> None:
    """Dtypes that only meta tensors have are refused, and so is an object without a state dict for safetensors. A
    module is saved as its state dict.
    """
    with pytest.raises(RefusedError, match="uint4"):
        ckptconv.save(torch.ones(2, dtype=torch.uint8).view(torch.uint4), tmp_path / "a.pt")
    with pytest.raises(RefusedError, match=r"state_dict\(\)"):
        ckptconv.save([1], tmp_path / "a.safetensors")
    net = nn.Linear(1, 1)
    ckptconv.save(net, tmp_path / "a.safetensors")
    nn.Linear(1, 1).load_state_dict(ckptconv.load(tmp_path / "a.safetensors"), strict=True)


# Ctrl-C


class Interrupting(io.BytesIO):
    """A file object that raises `error` once, in call `n` of its read methods."""

    def __init__(self, data: bytes, n: int, error: type[BaseException]) -> None:
        super().__init__(data)
        self.left, self.error = n, error

    def readinto(self, buffer: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().read(size)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_from_a_file_object(error: type[BaseException]) -> None:
    """An interrupt during any read of a file object is raised by ``load``, although torch's reader drops the exceptions
    of its file.
    """
    saved = io.BytesIO()
    torch.save({"a": torch.ones(1000), "b": torch.zeros(1000)}, saved)
    n = 0
    while True:
        n += 1
        file = Interrupting(saved.getvalue(), n, error)
        try:
            ckptconv.load(file)
        except error:
            continue
        assert file.left > 0, n
        break
    assert n > 5


@pytest.mark.untraced  # an exception in coverage's own lock would leave it locked
def test_interrupts_at_any_moment(tmp_path: Path) -> None:
    """The exception of a signal handler ends a load, unless the load has ended before. It is never lost, and the file
    is never reported as malformed.
    """
    torch.save({f"w{i}": torch.ones(100_000) for i in range(200)}, tmp_path / "a.pt")
    ckptconv.load(tmp_path / "a.pt")  # import all modules first: Python loses exceptions in callbacks of imports
    gc.disable()  # Python also loses an exception in a callback of the collector (hypothesis has one)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    moments = random.Random(0)
    interrupted = 0
    try:
        for _ in range(40):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.01, 0.1))
                ckptconv.load(tmp_path / "a.pt")
                assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupted
