"""Storages that are sent elsewhere: what the checkpoint says afterwards."""

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


def test_devices_that_are_data_stay_and_are_named(tmp_path: Path) -> None:
    """Those that the edit would have changed in a tensor; whoever asks for the device of a tensor gets no note."""
    obj = {"w": torch.ones(1), "device": torch.device("cuda"), "run": {"on": "cuda:1", "name": "cuda", "and": "cpu"}}
    torch.save(obj, tmp_path / "x.pt")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", map_location={"gpu": "cpu"})
    assert (
        report.notes[-1]
        == "devices in user data, which are not changed: device = cuda, run/on = cuda:1, run/name = cuda"
    )
    assert torch.load(tmp_path / "y.pt")["device"] == torch.device("cuda")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "z.pt", map_location={"mps": "cpu"})
    assert not any("are data" in note for note in report.notes)


def test_graph_storages_and_tensors_agree_on_where_they_are(tmp_path: Path) -> None:
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
    """``cpu:1`` is the CPU: tensors go there, and a report says ``cpu``."""
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", map_location="cpu:1")
    assert report.notes[-1] == "every tensor is on cpu already, so map_location='cpu' changed nothing"
    ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", map_location={"cpu": "cuda:3"}, force=True)
    ckptconv.convert(tmp_path / "y.pt", tmp_path / "z.pt", map_location="cpu:1")
    assert ckptconv.inspect(tmp_path / "z.pt").tensors[0].device == "cpu"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_backend_of_ones_own(suffix: str, tmp_path: Path) -> None:
    """A renamed backend is a target if the file has its tag, or if everything goes there; else it may be a typo, also
    where the output has no devices. A word that is like a device is one in every file.
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
