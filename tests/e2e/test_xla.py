"""Tensors of XLA devices, which torch saves as copies on the CPU. They are treated as the tensors in the file."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptconv
from tests.support.judge import assert_same, tags_of


class OnXla:
    """An object that is pickled like a tensor on an XLA device: a copy on the CPU, its dtype, the device and
    requires_grad.
    """

    def __init__(self, cpu: torch.Tensor) -> None:
        self.cpu = cpu

    def __reduce__(self) -> Any:
        args = self.cpu.detach(), self.cpu.dtype, "xla:0", self.cpu.requires_grad
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, args


class XlaParameter(OnXla):
    """An object that is pickled like a parameter on an XLA device."""

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_parameter, (OnXla(self.cpu.detach()), True, OrderedDict())


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Return a checkpoint from an XLA device with one tensor on the CPU."""
    model = {
        "w": OnXla(torch.arange(4.0, requires_grad=True)),
        "b": OnXla(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()),
        "p": XlaParameter(torch.ones(3)),
        "n": OnXla(torch.tensor(7)),
    }
    torch.save({"model": model, "cpu": torch.zeros(2)}, tmp_path / "src.pt")
    return tmp_path / "src.pt"


def is_wrapped(path: Path) -> bool:
    """Return whether a tensor in the file at `path` is copied to a device when it is loaded."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return b"_rebuild_device_tensor" in archive.read(name)


def test_inspect_shows_bytes_and_device(src: Path) -> None:
    """The sizes are those of the tensors in the file. The device is the one from which they were saved."""
    shown = ckptconv.inspect(src)
    found = {tensor.path: (tensor.nbytes, tensor.device) for tensor in shown.tensors}
    xla = {"model/w": 16, "model/b": 12, "model/p": 12, "model/n": 8}
    assert found == {**{path: (nbytes, "xla:0") for path, nbytes in xla.items()}, "cpu": (8, "cpu")}
    assert (shown.devices["xla:0"].nbytes, shown.devices["cpu"].nbytes) == (48, 8)


@pytest.mark.parametrize("loadable", [False, True])
def test_to_another_device(src: Path, loadable: bool, tmp_path: Path) -> None:
    """The output contains tensors with the new location tag, and equals the result of ``torch.load`` with
    ``map_location``. ``diff`` reports only different devices.
    """
    dst, wanted = tmp_path / "dst.pt", torch.load(src, map_location="cpu")
    ckptconv.convert(src, dst, map_location="cpu", loadable=loadable)
    assert_same(wanted, torch.load(dst))
    assert not is_wrapped(dst)
    differing = ckptconv.diff(src, dst).differing
    found = {each.path: (each.device, each.values and each.values.differing) for each in differing}
    assert found == {f"model/{name}": (("xla:0", "cpu"), 0) for name in wanted["model"]}
    ckptconv.convert(src, dst, map_location={"xla": "cuda:1"}, force=True)
    loaded, tags = tags_of(dst)
    assert sorted(tags) == ["cpu", *["cuda:1"] * 4]
    assert_same(wanted, loaded)


def test_to_safetensors(src: Path, tmp_path: Path) -> None:
    """A safetensors file contains the tensors."""
    ckptconv.convert(src, tmp_path / "dst.safetensors", select="model")
    wanted = torch.load(src, map_location="cpu")["model"]
    found = load_file(tmp_path / "dst.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same(tensor.detach().contiguous(), found[name])


@pytest.mark.parametrize("map_location", [None, "cpu"])
def test_to_another_dtype(src: Path, map_location: str | None, tmp_path: Path) -> None:
    """A cast changes the values and the recorded dtype. A tensor that stays on its device keeps its call, because torch
    has no location tag for it.
    """
    dst = tmp_path / "dst.pt"
    ckptconv.convert(src, dst, dtype="bf16", map_location=map_location)
    assert is_wrapped(dst) == (map_location is None)
    found = torch.load(dst, map_location="cpu")["model"]
    for name, tensor in torch.load(src, map_location="cpu")["model"].items():
        cast = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert_same(cast.detach(), found[name].detach())
        assert found[name].requires_grad == tensor.requires_grad


def test_two_devices_share_one_tensor(tmp_path: Path) -> None:
    """A tensor that is copied to a device and also used on the CPU keeps its location tag on the CPU."""
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    shared = torch.arange(3.0)
    torch.save({"xla": OnXla(shared), "cpu": shared, "view": shared[1:]}, src)
    ckptconv.convert(src, dst, map_location={"xla": "cuda:1"})
    assert {tensor.path: tensor.device for tensor in ckptconv.inspect(dst).tensors} == {
        "xla": "cuda:1",
        "cpu": "cpu",
        "view": "cpu",
    }
