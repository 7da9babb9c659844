"""Programs of torch.export. Their weights equal those that torch.export.load returns, and contradictory archives are
refused.
"""

from __future__ import annotations

import json
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptconv
from ckptconv.formats import exported
from ckptconv.inspection.verification import verify
from ckptconv.limits import LIMITS
from tests.support.hostile_bytes import pickle_of, storage, tensor, text, torch_zip_of
from tests.support.reduced import Reduced

package = pytest.importorskip("torch.export.pt2_archive._package", reason="since torch 2.8")
load_pt2, package_pt2 = package.load_pt2, package.package_pt2
pytestmark = pytest.mark.filterwarnings("ignore")


class Convolutions(nn.Module):
    """A model with parameters, buffers, a view, tied weights, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.turned = nn.Parameter(torch.rand(4, 5).half().t())
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.constant = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(self.norm(self.conv(x)).mean((2, 3)))) * self.mask
        return x + self.constant.sum() + self.turned.float().sum() + torch.ones(2)


class Attention(nn.Module):
    """A layer of a transformer with a dynamic batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def saved(path: Path, model: nn.Module, x: torch.Tensor, dynamic: Any = None) -> torch.export.ExportedProgram:
    """Save the program of `model` to `path`, and return the program."""
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return program


def linear(path: Path) -> None:
    saved(path, nn.Linear(3, 2), torch.zeros(1, 3))


@pytest.mark.parametrize("kind", ["convolutions", "attention"])
def test_the_weights_are_those_that_torch_loads(kind: str, tmp_path: Path) -> None:
    """Names, dtypes, shapes and values of the weights equal those of torch, in both formats."""
    if kind == "convolutions":
        saved(tmp_path / "m.pt2", Convolutions(), torch.rand(1, 1, 5, 5))
    else:
        saved(tmp_path / "m.pt2", Attention(), torch.rand(2, 3, 8), ({0: torch.export.Dim("batch")},))
    want = torch.export.load(tmp_path / "m.pt2").state_dict
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "w.pt")
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "w.safetensors", copy_tied=True)
    for found in (torch.load(tmp_path / "w.pt"), load_file(tmp_path / "w.safetensors")):
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    assert torch.load(tmp_path / "w.pt").keys() == want.keys()
    assert verify(tmp_path / "m.pt2").ok


def test_inspect_shows_the_program(tmp_path: Path) -> None:
    """``inspect`` shows devices, constants and sample inputs. It also reports that the program contains code, and that
    torch.load refuses the file.
    """
    saved(tmp_path / "m.pt2", Convolutions(), torch.rand(1, 1, 5, 5))
    summary = ckptconv.inspect(tmp_path / "m.pt2")
    assert (summary.format, summary.safety, summary.weights_only) == ("torch.export program", "needs code", False)
    assert summary.torch_load.answer == "refused" and set(summary.devices) == {"cpu"}
    said = "\n".join(summary.notes)
    assert "2 constants, not in the state dict: " in said and "mask (float32 [2] on cpu)" in said
    assert "sample inputs: float32 [1, 1, 5, 5] on cpu" in said and "devices in the program: cpu ×" in said
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "m.pt2", weights_only=True)


def test_older_archives(tmp_path: Path) -> None:
    """In archives of torch 2.8, the state dict is a file of torch.save."""
    linear(tmp_path / "m.pt2")
    state = {"a": torch.rand(3)}
    torch.save(state, tmp_path / "s.pt")

    def older(name: str, data: bytes) -> tuple[str, bytes] | None:
        if name.endswith("_weights_config.json"):
            return name.replace("_weights_config.json", ".pt"), (tmp_path / "s.pt").read_bytes()
        return None if "/weight_" in name else (name, data)

    changed(tmp_path / "m.pt2", tmp_path / "old.pt2", older)
    ckptconv.convert(tmp_path / "old.pt2", tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["a"], state["a"])


def test_weights_on_another_device(tmp_path: Path) -> None:
    """The weights become a file of torch.save with other tags. A program cannot be changed in place."""
    linear(tmp_path / "m.pt2")
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "w.pt", map_location="cuda")
    assert {*ckptconv.inspect(tmp_path / "w.pt").devices} == {"cuda:0"}
    with pytest.raises(ckptconv.UnsupportedError, match="cannot be changed in place"):
        ckptconv.convert(tmp_path / "m.pt2", in_place=True, map_location="cuda")


def changed(src: Path, dst: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Path:
    """Write the archive `src` to `dst`, with each record as `change` returns it, and return `dst`."""
    with zipfile.ZipFile(src) as old, zipfile.ZipFile(dst, "w") as new:
        for name in old.namelist():
            if each := change(name, old.read(name)):
                new.writestr(*each)
    return dst


def lie(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that sets `key` of an entry to `value`."""

    def change(entry: dict[str, Any]) -> None:
        place = entry if key in entry else entry["tensor_meta"]
        place[key] = value

    return change


def test_a_long_device_of_many_sample_inputs(tmp_path: Path) -> None:
    """Many sample inputs can share the text of one device. The text is not repeated for inputs that the note does not
    list.
    """
    linear(tmp_path / "m.pt2")
    shared = tensor(storage(tag="d").replace(text("d"), b"h\x00"))
    inputs = torch_zip_of(pickle_of(text("d" * 20_000) + b"q\x00", *[shared] * 500))
    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", lambda name, data: (name, inputs if name.endswith(".pt") else data))
    tracemalloc.start()
    try:
        notes = str(ckptconv.inspect(tmp_path / "x.pt2").notes)
        assert tracemalloc.get_traced_memory()[1] < 500 * 20_000
    finally:
        tracemalloc.stop()
    assert "and 495 more" in notes


@pytest.mark.parametrize(
    "change",
    [
        lie("path_name", "weight_9"),
        lie("path_name", "../../models/model.json"),
        lie("use_pickle", 1),
        lie("dtype", 99),
        lie("dtype", [6]),
        lie("sizes", [{"as_int": 9}, {"as_int": 9}]),
        lie("sizes", [{"as_int": -1}]),
        lie("sizes", [{"as_int": 2**70}]),
        lie("strides", [{"as_int": 1}]),
        lie("storage_offset", {"as_int": 100}),
        lie("layout", 1),
        lie("device", {"type": "x" + chr(10), "index": 0}),
        lie("device", None),
        lie("tensor_meta", 3),
    ],
)
def test_false_entries(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    """``inspect`` refuses a contradictory entry, and ``verify`` reports it."""
    linear(tmp_path / "m.pt2")

    def lying(name: str, data: bytes) -> tuple[str, bytes]:
        if name.endswith("weights_config.json"):
            parsed = json.loads(data)
            change(parsed["config"]["weight"])
            data = json.dumps(parsed).encode()
        return name, data

    changed(tmp_path / "m.pt2", tmp_path / "bad.pt2", lying)
    with pytest.raises((ckptconv.MalformedError, ckptconv.LimitError)):
        ckptconv.inspect(tmp_path / "bad.pt2")
    assert not verify(tmp_path / "bad.pt2").ok


@pytest.mark.parametrize("record", ["models/model.json", "data/weights/model_weights_config.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[" * 100_000, b'{"config": []}', b"\xff", b'{"graph_module": 1}'])
def test_records_that_are_not_json(record: str, text: bytes, tmp_path: Path) -> None:
    """A record that is not valid JSON, or does not describe a program, is malformed."""
    linear(tmp_path / "m.pt2")
    changed(tmp_path / "m.pt2", tmp_path / "bad.pt2", lambda name, data: (name, text if record in name else data))
    with pytest.raises(ckptconv.MalformedError):
        ckptconv.inspect(tmp_path / "bad.pt2")


def test_an_unknown_byte_order(tmp_path: Path) -> None:
    """A byte order that is neither little nor big is malformed, and is never read as little."""
    linear(tmp_path / "m.pt2")
    changed(
        tmp_path / "m.pt2",
        tmp_path / "bad.pt2",
        lambda name, data: (name, b"middle" if name.endswith("/byteorder") else data),
    )
    with pytest.raises(ckptconv.MalformedError, match="byte order"):
        ckptconv.inspect(tmp_path / "bad.pt2")


def test_a_dangerous_sample_input(tmp_path: Path) -> None:
    """A dangerous sample input is found, because torch.export.load would run it."""
    linear(tmp_path / "m.pt2")
    torch.save({"x": Reduced(exec, ("1",))}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    changed(tmp_path / "m.pt2", tmp_path / "bad.pt2", lambda name, old: (name, data if "sample_in" in name else old))
    summary = ckptconv.inspect(tmp_path / "bad.pt2")
    assert summary.safety == "dangerous" and summary.dangerous
    for options in ({}, {"map_location": "cuda"}):
        with pytest.raises(ckptconv.DangerousError, match=r"exec at data/sample_inputs/model\.pt"):
            ckptconv.convert(tmp_path / "bad.pt2", tmp_path / "out.pt2", **options)
    ckptconv.convert(tmp_path / "bad.pt2", tmp_path / "w.pt", map_location="cuda")  # the weights do not contain it


@pytest.mark.parametrize(
    "name",
    [
        "extra/x.pkl",
        "data/constants/opaque_obj_0",
        "Data/Constants/Tensor_9",
        "data/sample_inputs/x.pt",
        "data/weights/x",
    ],
)
def test_a_dangerous_record(name: str, tmp_path: Path) -> None:
    """A dangerous pickle in another record is found, and not copied with the program. torch.export.load unpickles
    inputs and constants that are not files of torch.
    """
    linear(tmp_path / "m.pt2")
    changed(tmp_path / "m.pt2", tmp_path / "bad.pt2", lambda each, data: (each, data))
    with zipfile.ZipFile(tmp_path / "bad.pt2", "a") as archive:
        archive.writestr(f"m/{name}", pickle.dumps(Reduced(exec, ("1",))))
    assert ckptconv.inspect(tmp_path / "bad.pt2").safety == "dangerous"
    with pytest.raises((ckptconv.DangerousError, ckptconv.RefusedError), match=name):
        ckptconv.convert(tmp_path / "bad.pt2", tmp_path / "out.pt2", map_location="cuda")


def test_a_program_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the JSON that is parsed is bounded."""
    linear(tmp_path / "m.pt2")
    monkeypatch.setattr(exported, "LIMITS", replace(LIMITS, program_bytes=1000))
    with pytest.raises(ckptconv.LimitError, match="the JSON of a program is too large"):
        ckptconv.inspect(tmp_path / "m.pt2")


def test_another_reader(tmp_path: Path) -> None:
    """An archive that also contains records of torch.save or TorchScript is refused."""
    linear(tmp_path / "m.pt2")
    for name in ("data.pkl", "Constants.pkl", "attributes.pkl"):
        changed(tmp_path / "m.pt2", tmp_path / "two.pt2", lambda each, data: (each, data))
        with zipfile.ZipFile(tmp_path / "two.pt2", "a") as archive:
            archive.writestr(f"m/{name}", b"N.")
        with pytest.raises(ckptconv.UnsupportedError):
            ckptconv.inspect(tmp_path / "two.pt2")


def test_weights_in_the_layouts_of_two_versions(tmp_path: Path) -> None:
    """An archive with weights in two layouts is refused. torch.export.load would use those in the file of torch.save,
    whatever the configuration contains.
    """
    linear(tmp_path / "m.pt2")
    changed(tmp_path / "m.pt2", tmp_path / "two.pt2", lambda name, data: (name, data))
    with zipfile.ZipFile(tmp_path / "two.pt2", "a") as archive:
        torch.save({name: nn.Parameter(torch.ones(2)) for name in ("weight", "bias")}, tmp_path / "w.pt")
        archive.write(tmp_path / "w.pt", "m/data/weights/model.pt")
    assert torch.export.load(tmp_path / "two.pt2").state_dict["bias"].sum() == 2
    with pytest.raises(ckptconv.MalformedError, match=r"there twice \(got data/weights/model\.pt\)"):
        ckptconv.inspect(tmp_path / "two.pt2")


def test_a_weight_that_is_a_pickle(tmp_path: Path) -> None:
    """A weight that is a pickle is not read, so the archive is refused as unsupported and not as malformed."""
    linear(tmp_path / "m.pt2")

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        return name, data.replace(b'"use_pickle": false', b'"use_pickle": true') if "weights_config" in name else data

    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", change)
    with pytest.raises(ckptconv.UnsupportedError, match=r"weight 'weight' is a pickle[^$]*torch\.export\.load"):
        ckptconv.inspect(tmp_path / "x.pt2")


def test_several_programs(tmp_path: Path) -> None:
    """Each of several programs has its own names. One of them can be selected, and all of them can be moved to another
    device.
    """
    models = {"one": nn.Linear(3, 2), "two": nn.Linear(3, 5)}
    programs = {name: torch.export.export(model, (torch.rand(1, 3),)) for name, model in models.items()}
    package_pt2(tmp_path / "m.pt2", exported_programs=programs)
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "w.safetensors", select="two")
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == {"weight", "bias"} and torch.equal(found["weight"], models["two"].weight)
    assert [each.path for each in ckptconv.inspect(tmp_path / "m.pt2").state_dicts] == ["one", "two"]
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "c.pt2", map_location="cuda")
    assert {*ckptconv.inspect(tmp_path / "c.pt2").devices} == {"cuda:0"}
    ckptconv.convert(tmp_path / "c.pt2", tmp_path / "b.pt2", map_location="cpu")
    loaded, x = load_pt2(tmp_path / "b.pt2").exported_programs, torch.rand(1, 3)
    assert all(torch.equal(loaded[name].module()(x), model(x)) for name, model in models.items())


def test_archives_without_a_folder(tmp_path: Path) -> None:
    """Archives of torch before 2.8 contain four records without a folder. The weights are read, but the program cannot
    be written.
    """
    linear(tmp_path / "m.pt2")
    state = {"a": torch.rand(3), "b": torch.rand(2)}
    parts = {"state_dict": state, "constants": {}, "example_inputs": ((torch.rand(1, 3),), {})}
    with zipfile.ZipFile(tmp_path / "m.pt2") as new, zipfile.ZipFile(tmp_path / "old.pt2", "w") as old:
        old.writestr("serialized_exported_program.json", new.read("m/models/model.json"))
        for name, part in parts.items():
            torch.save(part, tmp_path / "part.pt")
            old.writestr(f"serialized_{name}.pt", (tmp_path / "part.pt").read_bytes())
        old.writestr("version", "8.2")
    ckptconv.convert(tmp_path / "old.pt2", tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    assert verify(tmp_path / "old.pt2").ok
    assert "sample inputs: float32 [1, 3] on cpu" in str(ckptconv.inspect(tmp_path / "old.pt2"))
    with pytest.raises(ckptconv.RefusedError, match=r"torch before 2\.8"):
        ckptconv.convert(tmp_path / "old.pt2", tmp_path / "new.pt2", map_location="cuda")
    evil = pickle.dumps(Reduced(exec, ("1",)))
    changed(tmp_path / "old.pt2", tmp_path / "bad.pt2", lambda name, old: (name, evil if "constants" in name else old))
    assert ckptconv.inspect(tmp_path / "bad.pt2").safety == "dangerous"
