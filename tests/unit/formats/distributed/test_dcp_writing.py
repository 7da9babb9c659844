"""DCP folders that ckptconv writes. Torch reads them like the folders that it writes itself."""

from __future__ import annotations

import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptconv
from ckptconv.cli.main import main
from ckptconv.errors import LimitError, MalformedError, RefusedError, TargetExistsError, UsageError
from ckptconv.limits import Limits
from tests.support.archives import flip_bit, rezipped
from tests.support.conversions import refused
from tests.support.judge import assert_same

#: Warnings of torch that there is only one process, and warnings of torch 2.6 about its own code.
pytestmark = pytest.mark.filterwarnings("ignore:.*single process", "ignore:TypedStorage is deprecated")


def training_state() -> dict[str, Any]:
    """Return a training state with a model, an optimizer, numbers, lists, views and dtypes of several sizes."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    large = torch.arange(100.0).view(10, 10)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "text": "é" * 70_000,
        "lists": [[1, 2], [torch.ones(3), {"a": 1}, {}], []],
        "tuple": (torch.arange(2), "x", {"y": torch.ones(1)}),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "nothing": {},
        "none": None,
        "views": {"columns": large[:, 3:5], "turned": large.t(), "whole": large, "repeated": torch.ones(1).expand(6)},
        "dtypes": [torch.randn(5, 3).bfloat16(), torch.randn(4, 4).to(torch.float8_e4m3fn), torch.ones(7).bool()],
        "bits": torch.randn(3, dtype=torch.complex64).conj(),
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "default": defaultdict(list, k=[1]),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "numbers": {0: torch.ones(1), 2.5: "x", None: 1, True: 2},
    }


def by_torch(folder: Path) -> Any:
    """Return the result of torch's own conversion of `folder`."""
    dcp_to_torch_save(folder, folder.with_suffix(".torch"))
    return torch.load(folder.with_suffix(".torch"), weights_only=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains ``state.pt``, and ``theirs``, a DCP folder that torch wrote from the same state."""
    folder = tmp_path_factory.mktemp("dcp_writing")
    torch.manual_seed(1)
    state = training_state()
    torch.save(state, folder / "state.pt")
    dcp_of_torch.save(state, checkpoint_id=folder / "theirs")
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_torch_reads_the_folder_like_its_own(source: Path, tmp_path: Path, ranks: int) -> None:
    ckptconv.convert(source / "state.pt", tmp_path / "ours", format="dcp", ranks=ranks)
    theirs = by_torch(source / "theirs")
    assert_same(by_torch(tmp_path / "ours"), theirs)
    ckptconv.convert(tmp_path / "ours", tmp_path / "back.pt")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=False), theirs)
    files = {path.name for path in (tmp_path / "ours").iterdir()}
    assert files <= {".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))}
    assert ckptconv.verify(tmp_path / "ours").ok


def test_the_metadata_is_that_of_torch(source: Path, tmp_path: Path) -> None:
    """The metadata equals that of torch in names, order, paths, shapes, dtypes and chunks. Torch also records that a
    parameter requires a gradient, and, since 2.15, the strides, which older versions do not read.
    """
    ckptconv.convert(source / "state.pt", tmp_path / "ours", format="dcp")
    ours, theirs = (FileSystemReader(path).read_metadata() for path in (tmp_path / "ours", source / "theirs"))
    theirs.state_dict_metadata["parameter"].properties.requires_grad = False  # type: ignore[union-attr]
    for item in theirs.state_dict_metadata.values():
        if hasattr(getattr(item, "properties", None), "strides"):
            item.properties.strides = None  # type: ignore[union-attr]
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.planner_data.items()) == list(theirs.planner_data.items())
    assert {*ours.storage_data} == {*theirs.storage_data}
    assert ours.version == getattr(theirs, "version", "1.0.0")  # torch 2.6 has no version


def test_torch_loads_the_folder_in_place(tmp_path: Path) -> None:
    """``dcp.load`` fills the tensors of a program, which may need only some of the items."""
    weights = {"model": {"w": torch.randn(7, 3), "b": torch.randn(3)}, "step": 5}
    torch.save(weights, tmp_path / "w.pt")
    ckptconv.convert(tmp_path / "w.pt", tmp_path / "ours", format="dcp", ranks=4)
    wanted: dict[str, Any] = {"model": {"w": torch.zeros(7, 3)}, "step": 0}
    dcp_of_torch.load(wanted, checkpoint_id=tmp_path / "ours")
    assert torch.equal(wanted["model"]["w"], weights["model"]["w"])  # type: ignore[index]
    assert wanted["step"] == 5


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["safetensors", "shards", "deflated", "legacy", "bf16", "no checksums"])
def test_other_sources(tmp_path: Path, kind: str, ranks: int) -> None:
    weights = {f"layers.{i}.weight": torch.randn(5, 4 + i) for i in range(6)}
    src, edits = tmp_path / "w.pt", {}
    torch.serialization.set_crc32_options(kind != "no checksums")
    torch.save(weights, src)
    torch.serialization.set_crc32_options(True)
    if kind == "shards":
        ckptconv.convert(src, tmp_path / "set", format="safetensors", max_shard_size=300)
        src = tmp_path / "set"
    elif kind in ("safetensors", "legacy"):
        ckptconv.convert(src, tmp_path / "src", format=kind)
        src = tmp_path / "src"
    elif kind == "deflated":
        src.write_bytes(rezipped(src.read_bytes(), method=zipfile.ZIP_DEFLATED))
    elif kind == "bf16":
        edits = {"dtype": "bf16"}
    report = ckptconv.convert(src, tmp_path / "ours", format="dcp", ranks=ranks, verify=True, **edits)
    assert report.formats[1] == "DCP"
    wanted = {name: tensor.bfloat16() if edits else tensor for name, tensor in weights.items()}
    assert_same(by_torch(tmp_path / "ours"), wanted)


@pytest.mark.parametrize("name", ["rows", "mesh"])
@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_processes(ranks: Path, tmp_path: Path, name: str, number: int) -> None:
    """Folders of four processes are converted to another number of processes. Some of their tensors are in columns, so
    rows are assembled.
    """
    ckptconv.convert(ranks / name, tmp_path / "ours", format="dcp", ranks=number, verify=True)
    dcp_to_torch_save(ranks / name, tmp_path / "theirs.pt")
    assert_same(by_torch(tmp_path / "ours"), torch.load(tmp_path / "theirs.pt"))


def test_edits(source: Path, tmp_path: Path) -> None:
    """A part of the checkpoint is written with other names. A note reports that DCP stores no devices."""
    report = ckptconv.convert(
        source / "state.pt", tmp_path / "ours", format="dcp", select="model", add_prefix="net.", map_location="cuda:3"
    )
    assert [*by_torch(tmp_path / "ours")] == ["net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"]
    assert any("DCP stores none" in note for note in report.notes)


def test_tensors_in_objects_are_on_the_cpu(tmp_path: Path) -> None:
    torch.save({"pair": (torch.ones(2), 1), "w": torch.ones(3)}, tmp_path / "cpu.pt")
    ckptconv.convert(tmp_path / "cpu.pt", tmp_path / "gpu.pt", map_location="cuda:1")
    ckptconv.convert(tmp_path / "gpu.pt", tmp_path / "ours", format="dcp")
    assert by_torch(tmp_path / "ours")["pair"][0].device.type == "cpu"


def test_losses_are_reported(tmp_path: Path) -> None:
    shared = torch.ones(3)
    torch.save({"a": shared, "b": shared, 7: torch.ones(1), "gone": {}}, tmp_path / "s.pt")
    report = ckptconv.convert(tmp_path / "s.pt", tmp_path / "ours", format="dcp")
    assert [(left.path, left.why) for left in report.left_behind] == [("gone", "DCP stores no empty dict")]
    assert "keys that are not strings become strings: 7" in report.notes
    assert "DCP cannot store ties: 1 tied tensor written again" in report.notes
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "m", format="dcp")
    assert [left.path for left in report.left_behind] == ["._metadata"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_damage_to_the_source_is_found(tmp_path: Path, ranks: int) -> None:
    """Damage in the source is reported, also if each file contains only some rows of the tensor that has the
    checksum.
    """
    torch.save({"w": torch.randn(64, 64)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        place = archive.getinfo("w/data/0").header_offset + 5_000
    flip_bit(tmp_path / "w.pt", place)
    refused(MalformedError, "", tmp_path / "w.pt", tmp_path / "ours", format="dcp", ranks=ranks, verify=True)
    assert not (tmp_path / "ours").exists()
    if ranks == 2:  # checksums of rows have to be computed, so the old ones are compared
        refused(MalformedError, "", tmp_path / "w.pt", tmp_path / "ours", format="dcp", ranks=ranks)


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    """``force`` replaces a folder and removes the files of processes that the new one does not have. A folder with
    other files is refused.
    """
    torch.save({"w": torch.randn(8, 2)}, tmp_path / "w.pt")
    how: dict[str, Any] = {"format": "dcp"}
    ckptconv.convert(tmp_path / "w.pt", tmp_path / "ours", ranks=4, **how)
    refused(TargetExistsError, "", tmp_path / "w.pt", tmp_path / "ours", **how)
    ckptconv.convert(tmp_path / "w.pt", tmp_path / "ours", force=True, **how)
    assert sorted(os.listdir(tmp_path / "ours")) == [".metadata", "__0_0.distcp"]
    (tmp_path / "ours" / "notes.txt").touch()
    refused(RefusedError, "notes.txt", tmp_path / "w.pt", tmp_path / "ours", force=True, **how)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.randn(8, 2)}, tmp_path / "w.pt")
    command = ["convert", str(tmp_path / "w.pt"), str(tmp_path / "ours"), "--format", "dcp", "--ranks", "2"]
    assert main(command) == 0
    assert "DCP, 3 files" in capsys.readouterr().err


def test_a_tree(tmp_path: Path) -> None:
    """Each checkpoint of a tree becomes a separate folder."""
    (tmp_path / "run").mkdir()
    for name in ("a", "b"):
        torch.save({"w": torch.ones(2)}, tmp_path / "run" / f"{name}.pt")
    ckptconv.convert_many(ckptconv.jobs_in(tmp_path / "run", tmp_path / "out", format="dcp"))
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "b"]
    assert_same(by_torch(tmp_path / "out" / "b"), {"w": torch.ones(2)})


def test_folder_with_another_file(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.ones(9) for i in range(4)}
    torch.save(weights, tmp_path / "w.pt")
    ckptconv.convert(tmp_path / "w.pt", tmp_path / "set", format="safetensors", max_shard_size=80)
    (tmp_path / "set" / "config.json").write_text("{}")
    ckptconv.convert(tmp_path / "set", tmp_path / "ours", format="dcp")
    assert_same(by_torch(tmp_path / "ours"), weights)


# Refused conversions


class Mine:
    """A class that only this module defines."""


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([torch.ones(2)], "not a dict"),
        ({}, "nothing to write"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, "'a.b'"),
        ({"a": 1, "b": {1: torch.ones(1), "1": torch.ones(2)}}, "two keys in b"),
        ({(1, 2): torch.ones(1)}, "neither a string nor a number"),
        ({1 << 62: torch.ones(1)}, "nor a number of at most 62 bits"),
        ({"a": {1 << 20_000: torch.ones(1)}}, "nor a number of at most 62 bits"),
        ({"a": torch.ones(2), "s": torch.eye(3).to_sparse()}, "s (sparse)"),
        ({"a": torch.ones(2), "o": Mine()}, "Mine at o"),
        ({"a": torch.ones(2), "o": [1, (Mine(), 2)]}, "Mine at o"),
        ({"a": torch.ones(2), "args": Namespace(lr=1)}, "Namespace at args"),
    ],
)
def test_states_that_dcp_cannot_store(tmp_path: Path, state: Any, words: str) -> None:
    torch.save(state, tmp_path / "s.pt")
    error = refused(RefusedError, "", tmp_path / "s.pt", tmp_path / "ours", format="dcp")
    assert words in str(error)


def test_the_remedies_work(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, tmp_path / "names.pt")
    ckptconv.convert(tmp_path / "names.pt", tmp_path / "part", format="dcp", select="a")
    assert [*by_torch(tmp_path / "part")] == ["b"]
    torch.save({"a": {"b": torch.ones(1)}, (1, 2): torch.ones(2)}, tmp_path / "keys.pt")
    refused(
        RefusedError, "a key in the checkpoint.*select=True takes", tmp_path / "keys.pt", tmp_path / "no", format="dcp"
    )
    ckptconv.convert(tmp_path / "keys.pt", tmp_path / "of_keys", format="dcp", select="a")
    assert [*by_torch(tmp_path / "of_keys")] == ["b"]
    torch.save({"a": torch.ones(2), "args": Namespace(lr=1)}, tmp_path / "s.pt")
    ckptconv.convert(tmp_path / "s.pt", tmp_path / "plain", format="dcp", loadable=True)
    assert by_torch(tmp_path / "plain")["args"] == {"lr": 1}
    ckptconv.convert(tmp_path / "s.pt", tmp_path / "less", format="dcp", drop="args")
    assert [*by_torch(tmp_path / "less")] == ["a"]


@pytest.mark.parametrize(
    ("dst", "options", "words"),
    [
        ("out", {"format": "pt", "ranks": 2}, "ranks=2 needs format='dcp'"),
        ("out", {"format": "dcp", "ranks": 0}, "number of processes"),
        ("out.pt", {"format": "dcp"}, "suffix"),
        ("out", {"format": "dcp", "max_shard_size": "1GB"}, "max_shard_size cannot be combined with"),
        ("out", {"format": "dcp", "copy_others": True}, "copy_others"),
        ("there", {"format": "dcp"}, "folder"),
    ],
)
def test_invalid_options(tmp_path: Path, dst: str, options: dict[str, Any], words: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    (tmp_path / "there").touch()
    with pytest.raises(UsageError) as raised:
        ckptconv.convert(tmp_path / "w.pt", tmp_path / dst, **options)
    assert words in str(raised.value)


def test_a_state_dict_in_memory_needs_a_file_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder"):
        ckptconv.save({"w": torch.ones(2)}, tmp_path / "out", format="dcp")


# Hostile files


def nested(depth: int) -> dict[str, Any]:
    """Return nested dicts with 2 to the power of `depth` paths. Each dict occurs twice in the next one."""
    state: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(depth):
        state = {"a": state, "b": state}
    return state


def itself() -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["again"] = state
    return state


def sharing() -> dict[str, Any]:
    """Return many objects that share one large tuple."""
    common = [*range(2_000)], *(["x"] for _ in range(2_000))
    return {"w": torch.ones(1)} | {f"o{i}": (common, i) for i in range(2_000)}


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("state", [nested(60), itself(), sharing()], ids=["paths", "itself", "objects"])
def test_small_files_that_would_become_large(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "s.pt")
    refused(LimitError, "", tmp_path / "s.pt", tmp_path / "ours", format="dcp")


def test_one_long_text_in_many_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 60_000
    torch.save({"w": torch.ones(1)} | {f"o{i}": (text, i) for i in range(20)}, tmp_path / "s.pt")
    monkeypatch.setattr("ckptconv.formats.distributed.dcp_writing.LIMITS", Limits(pickle_bytes=500_000))
    error = refused(LimitError, "", tmp_path / "s.pt", tmp_path / "ours", format="dcp")
    assert "too large" in str(error)


@pytest.mark.untraced
@pytest.mark.parametrize(
    "items",
    [
        {f"word{i}": i for i in range(1_000)},
        {f"word{i}": [i, i] for i in range(1_000)},
        [{"step": i, "loss": i / 7, "lr": 1e-4} for i in range(400)],
    ],
    ids=["vocabulary", "lists", "log"],
)
def test_each_small_object_becomes_a_file(items: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small object becomes a separate file of torch.save. Many such objects are within the limit of work."""
    torch.save({"items": items}, tmp_path / "s.pt")
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=10_000))
    written = ckptconv.convert(tmp_path / "s.pt", tmp_path / "ours", format="dcp")
    assert ckptconv.load(written.dst)["items"] == items


def test_metadata_contains_only_classes_of_torch(source: Path, tmp_path: Path) -> None:
    """The metadata contains only classes of torch and DCP, so unpickling it runs no other code."""
    ckptconv.convert(source / "state.pt", tmp_path / "ours", format="dcp")
    names = set()

    class Listed(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            return super().find_class(module, name)

    with (tmp_path / "ours" / ".metadata").open("rb") as file:
        Listed(file).load()
    assert {module for module, _ in names} <= {
        "torch",
        "torch.serialization",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
    }
