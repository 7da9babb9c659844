"""Storages that are sent elsewhere: what the checkpoint says afterwards."""

from __future__ import annotations

from pathlib import Path

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
    assert report.notes[-1] == "devices that are data, and stay: device = cuda, run/on = cuda:1, run/name = cuda"
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
