"""Limits on the size of an output, in which views that share bytes are written separately."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptconv
from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS
from tests.support.conversions import converted, refused, saved_at

ELEMENTS = 1 << 20


def test_views_that_repeat(tmp_path: Path) -> None:
    """Views that are small enough alone are refused if there are too many of them. Torch's format stores them as views,
    and a part of them can be converted.
    """
    one = torch.ones(4)
    src = saved_at(tmp_path / "a.pt", {f"w{i}": one.expand((1 << 26) - i, 4) for i in range(20)})
    out = tmp_path / "out.safetensors"
    error = refused(LimitError, "the tensors repeat the same bytes", src, out, dry_run=True)
    assert "format='pt'" in str(error.hint) and "include=GLOB" in str(error.hint)
    assert ckptconv.convert(src, out, include="w7", dry_run=True).size > 1 << 29
    assert converted(src, tmp_path / "out.pt", format="pt", map_location="cpu")["w3"].stride() == (0, 1)


def test_views_that_overlap(tmp_path: Path) -> None:
    """Plain views are counted by the bytes that they share. Many overlapping views are refused, and a few are
    converted.
    """
    storage = torch.zeros(ELEMENTS + 300)
    views = {f"w{i}": storage[i : i + ELEMENTS] for i in range(300)}
    src = saved_at(tmp_path / "a.pt", views)
    refused(LimitError, "the tensors repeat the same bytes", src, tmp_path / "out.safetensors", dry_run=True)
    ckptconv.convert(src, tmp_path / "few.safetensors", include="w1?", dry_run=True)


@pytest.mark.filterwarnings("ignore")  # warnings of torch about its own code
def test_parts_that_overlap(tmp_path: Path) -> None:
    """The parts of different tensors in a rank file can overlap in one storage. Many such tensors are refused in
    torch's format too, and a few are converted.
    """
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh, storage = init_device_mesh("cpu", (2,)), torch.zeros(ELEMENTS + 200)
            spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size((2 * ELEMENTS,)), (1,), torch.float32))
            state = {f"w{i}": DTensor(storage[:ELEMENTS], spec, requires_grad=False) for i in range(200)}
            for i, tensor in enumerate(state.values()):
                tensor._local_tensor = storage[i : i + ELEMENTS]
            torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    refused(LimitError, "the tensors repeat the same bytes", tmp_path, tmp_path.with_name("out.pt"), dry_run=True)
    ckptconv.convert(tmp_path, tmp_path.with_name("out.pt"), include="w1?", dry_run=True)


def test_expected_growth_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deflated storages count with their inflated size. A cast to a wider dtype is not refused."""
    monkeypatch.setattr("ckptconv.formats.layout.LIMITS", dataclasses.replace(LIMITS, gathered_bytes=1000))
    src = saved_at(tmp_path / "a.pt", {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)})
    with zipfile.ZipFile(src) as whole, zipfile.ZipFile(tmp_path / "d.pt", "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in whole.namelist():
            deflated.writestr(name, whole.read(name))
    assert 100 * (tmp_path / "d.pt").stat().st_size < src.stat().st_size
    for name in ("a.pt", "d.pt"):
        out = tmp_path / "out.safetensors"
        assert converted(tmp_path / name, out)["w"].shape == (1 << 20,)
        assert converted(tmp_path / name, out, dtype="float64")["w"].dtype == torch.float64
