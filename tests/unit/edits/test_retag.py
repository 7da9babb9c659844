"""Storages that are moved to another device, and the devices that the checkpoint contains afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.edits.apply import apply
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits
from ckptconv.formats import opening


def test_devices_in_user_data_do_not_change(tmp_path: Path) -> None:
    """Devices in user data do not change. A note names those that the mapping would change in a tensor."""
    obj = {"w": torch.ones(1), "device": torch.device("cuda"), "run": {"on": "cuda:1", "name": "cuda", "and": "cpu"}}
    torch.save(obj, tmp_path / "x.pt")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", map_location={"gpu": "cpu"})
    assert (
        report.notes[-1]
        == "devices in user data, which are not changed: device = cuda, run/on = cuda:1, run/name = cuda"
    )
    assert torch.load(tmp_path / "y.pt")["device"] == torch.device("cuda")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "z.pt", map_location={"mps": "cpu"})
    assert not any("user data" in note for note in report.notes)


def test_graph_storages_and_tensors_have_the_same_device(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    obj = {"w": shared, "rest": shared[2:], "tied": shared, "meta": torch.empty(2, device="meta")}
    torch.save(obj, tmp_path / "x.pt")
    with Source(tmp_path / "x.pt") as source:
        checkpoint = opening.read(source)
        apply(checkpoint, Edits(devices=to_devices("cuda:1")))
    assert {storage_id(each.node).tag for each in checkpoint.references} == {"cuda:1"}
    assert {storage.device for storage in checkpoint.storages.values()} == {"cuda:1"}
    devices = {info.name: info.device for info in checkpoint.tensors.values()}
    assert devices == {"w": "cuda:1", "rest": "cuda:1", "tied": "cuda:1", "meta": "meta"}


def test_the_cpu_has_no_index(tmp_path: Path) -> None:
    """``cpu:1`` means the CPU. Tensors move there, and the report contains ``cpu``."""
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", map_location="cpu:1")
    assert report.notes[-1] == "every tensor is on cpu already, so map_location='cpu' changed nothing"
    ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", map_location={"cpu": "cuda:3"}, force=True)
    ckptconv.convert(tmp_path / "y.pt", tmp_path / "z.pt", map_location="cpu:1")
    assert ckptconv.inspect(tmp_path / "z.pt").tensors[0].device == "cpu"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_renamed_backends(suffix: str, tmp_path: Path) -> None:
    """A renamed backend is a valid target if the file contains one of its tags, or if ``any`` is mapped to it.
    Otherwise it is refused as a possible typo, also for a format without devices. A misspelled device is refused even
    for ``any``.
    """
    torch.save({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "x.pt")
    for wish in ("foo:0", {"cpu": "foo:0"}):
        with pytest.raises(ckptconv.UsageError, match="'foo:0' is not a device, and no tensor has such a tag"):
            ckptconv.convert(tmp_path / "x.pt", tmp_path / f"y{suffix}", map_location=wish)
    for wish in ("cdua:0", {"any": "cdua:0"}, "foo", "foo:200"):
        with pytest.raises(ckptconv.UsageError, match="is not a device"):
            ckptconv.convert(tmp_path / "x.pt", tmp_path / f"y{suffix}", map_location=wish)
    ckptconv.convert(tmp_path / "x.pt", tmp_path / "foo.pt", map_location={"any": "foo:0"})
    ckptconv.convert(tmp_path / "foo.pt", tmp_path / f"y{suffix}", map_location="foo:1")
    if suffix == ".pt":
        assert {each.device for each in ckptconv.inspect(tmp_path / "y.pt").tensors} == {"foo:1"}
