"""Tests of changing the devices of torch.export programs. Every mention of a device changes, and an uncertain mention
is refused with its name.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.passes import move_to_device_pass

import ckptconv
from ckptconv.byteranges import reading
from ckptconv.conversion.programs import _Program, plan_program
from ckptconv.edits.devices import Devices, Rule, Target
from ckptconv.edits.options import Edits
from ckptconv.formats import opening
from tests.unit.formats.test_exported import Attention, Convolutions, changed, linear, saved

pytestmark = pytest.mark.filterwarnings("ignore")


class Regions(nn.Module):
    """A module with devices in arguments of nodes, in nested graphs and as a text, a buffer that changes, and a
    constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, metadata: torch.Tensor) -> torch.Tensor:
        x, plus = metadata, torch.arange(4, device=metadata.device) + torch.zeros(4, device="cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        y = torch.cond(x.sum() > 0, lambda a: a + torch.ones(4, device="cpu"), lambda a: a - 1, (y.float(),))
        self.seen.add_(1)
        return (y + plus.to("cpu")).to(device="cpu", dtype=torch.float64) + torch.tensor([1.0, 2, 3, 4])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "convolutions": (Convolutions, (1, 1, 5, 5), None),
    "attention": (Attention, (2, 3, 8), ({0: torch.export.Dim("batch")},)),
    "regions": (Regions, (2, 4), None),
}


def records(path: Path) -> dict[str, bytes]:
    """Return the records of an archive, without its serialization id."""
    with zipfile.ZipFile(path) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {name: data for name, data in found.items() if name != ".data/serialization_id"}


@pytest.fixture(params=[*MODELS])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.export.ExportedProgram, torch.Tensor]:
    """Save a program as ``m.pt2``. Return the program and an input."""
    torch.manual_seed(1)
    make, shape, dynamic = MODELS[request.param]
    x = torch.rand(shape)
    return saved(tmp_path / "m.pt2", make(), x, dynamic), x


def test_there_and_back(model: tuple[torch.export.ExportedProgram, torch.Tensor], tmp_path: Path) -> None:
    """A moved program contains no mention of the CPU. Moved back, its records are the same as before, and torch
    computes the same result.
    """
    report = ckptconv.convert(tmp_path / "m.pt2", tmp_path / "c.pt2", map_location="cuda:1", verify=True)
    assert report.formats == ("torch.export program",) * 2 and not report.left_behind
    assert [*report.changes.devices] == [("cpu", "cuda:1")] and "mentions of devices changed" in str(report)
    for name, data in records(tmp_path / "c.pt2").items():
        if name.endswith(".json"):
            left = [each for each in texts(json.loads(data)) if each == "cpu"]
            assert not left, name
    assert {*ckptconv.inspect(tmp_path / "c.pt2").devices} == {"cuda:1"}
    ckptconv.convert(tmp_path / "c.pt2", tmp_path / "b.pt2", map_location={"cuda": "cpu"})
    old, new = records(tmp_path / "m.pt2"), records(tmp_path / "b.pt2")
    assert old.keys() == new.keys()
    assert {name for name in old if old[name] != new[name]} <= {"data/sample_inputs/model.pt"}
    program, x = model
    again = torch.export.load(tmp_path / "b.pt2")
    assert torch.equal(again.module()(x), program.module()(x))
    assert torch.equal(again.example_inputs[0][0], x)


def texts(value: Any) -> list[str]:
    """Return all strings in a JSON value, without the metadata that torch does not read."""
    if isinstance(value, dict):
        return [text for key, each in value.items() if key != "metadata" or "val" in each for text in texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    return [value] if isinstance(value, str) else []


def test_comparison_with_torchs_pass(model: tuple[torch.export.ExportedProgram, torch.Tensor], tmp_path: Path) -> None:
    """The devices and shapes of a program that is moved to meta equal those of torch's own pass. meta is the only other
    device without a GPU.
    """
    with opening.open_input(tmp_path / "m.pt2") as source:
        checkpoint = opening.read(source)
        layout, _ = plan_program(
            checkpoint, tmp_path / "x.pt2", Edits(devices=Devices((Rule("any", 0, Target("meta", 0)),)))
        )
        pieces = layout.files[0].pieces
        (tmp_path / "x.pt2").write_bytes(b"".join(chunk for piece in pieces for chunk in reading.read(piece)))
    with zipfile.ZipFile(tmp_path / "x.pt2") as archive:
        name = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        ours = json.loads(archive.read(name))["graph_module"]["graph"]
    moved = move_to_device_pass(model[0], "meta")
    torch.export.save(moved, tmp_path / "t.pt2")
    with zipfile.ZipFile(tmp_path / "t.pt2") as archive:
        theirs = json.loads(archive.read("t/models/model.json"))["graph_module"]["graph"]
    assert ours["tensor_values"].keys() == theirs["tensor_values"].keys()
    for each, want in theirs["tensor_values"].items():
        got = ours["tensor_values"][each]
        assert got["device"]["type"] == want["device"]["type"] == "meta" and got["sizes"] == want["sizes"]
    for node, wanted in zip(ours["nodes"], theirs["nodes"], strict=True):
        assert node["target"] == wanted["target"]
        for got, want in zip(node["inputs"], wanted["inputs"], strict=True):
            if "as_device" in got["arg"] and "_assert_tensor_metadata" not in node["target"]:
                assert got["arg"]["as_device"]["type"] == "meta"
                assert want["arg"].get("as_string") == "meta" or want["arg"]["as_device"]["type"] == "meta"


def test_devices_as_texts(tmp_path: Path) -> None:
    """torch's own pass writes devices of nodes as texts. Such a program can be moved to the CPU."""
    program, x = saved(tmp_path / "m.pt2", Regions(), torch.rand(2, 4)), torch.rand(2, 4)
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "c.pt2", map_location="cuda")

    def as_text(name: str, data: bytes) -> tuple[str, bytes]:
        old, new = b'{"as_device": {"type": "cuda", "index": 0}}', b'{"as_string": "cuda:0"}'
        assert "/models/" not in name or old in data
        return name, data.replace(old, new)

    changed(tmp_path / "c.pt2", tmp_path / "t.pt2", as_text)
    ckptconv.convert(tmp_path / "t.pt2", tmp_path / "b.pt2", map_location="cpu")
    assert torch.equal(torch.export.load(tmp_path / "b.pt2").module()(x), program.module()(x))


def change_program(change: Callable[[dict[str, Any]], None]) -> Callable[[str, bytes], tuple[str, bytes]]:
    """Return a function that applies `change` to the JSON of the program."""

    def changing(name: str, data: bytes) -> tuple[str, bytes]:
        if "/models/" in name:
            program = json.loads(data)
            change(program)
            data = json.dumps(program).encode()
        return name, data

    return changing


def node(target: str, *values: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds a node to a program."""
    inputs = [{"name": "", "arg": value, "kind": 1} for value in values]

    def change(program: dict[str, Any]) -> None:
        program["graph_module"]["graph"]["nodes"].append({"target": target, "inputs": inputs, "outputs": []})

    return change


CPU = {"as_device": {"type": "cpu", "index": None}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (node("torch.ops.mine.op.default", CPU), r"torch\.ops\.mine\.op\.default"),
        (node("torch.ops.mine.op.default", {"as_string": "on cuda:0"}), r"torch\.ops\.mine\.op\.default"),
        (node("torch.ops.aten.op.default", {"as_strings": ["a", "cpu"]}), r"torch\.ops\.aten\.op\.default"),
        (node("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"), "flash_attention_for_cpu"),
        (node("torch.ops.mkldnn._linear_pointwise.default"), "mkldnn"),
        (node("torch.ops.higher_order.triton_kernel_wrapper_functional"), "triton_kernel_wrapper"),
        (node("torch.ops.cpu.line\n"), "cpu"),  # a pattern with $ would try this name at each word
        (lambda program: program["guards_code"].append("L['x'].device.type == 'cpu'"), "models/model.json"),
        (lambda program: program.update(future={"where": "cuda:0"}), "models/model.json"),
    ],
)
def test_a_mention_that_is_not_certain(change: Callable[[dict[str, Any]], None], named: str, tmp_path: Path) -> None:
    """An uncertain mention of a device is refused with its node or record. Without a change of devices, the program is
    copied.
    """
    linear(tmp_path / "m.pt2")
    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", change_program(change))
    with pytest.raises(ckptconv.RefusedError, match=named):
        ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")
    ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2")
    assert records(tmp_path / "x.pt2") == records(tmp_path / "y.pt2")


def test_an_unknown_operator_without_a_device(tmp_path: Path) -> None:
    """A node with an unknown operator is accepted if it mentions no device. Names of tensors are not mentions of
    devices.
    """
    linear(tmp_path / "m.pt2")
    change = node("torch.ops.mine.op.default", {"as_tensor": {"name": "cuda"}}, {"as_string": "a_cpu"})
    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", change_program(change))
    ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")


def test_a_list_in_place_of_a_program(tmp_path: Path) -> None:
    """A JSON record that is a list, which torch does not read, is not checked for devices."""
    linear(tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2", "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/models/a/b.json", '["the cpu"]')
    ckptconv.convert(tmp_path / "m.pt2", tmp_path / "y.pt2", map_location="cuda")


def test_families_are_read_once() -> None:
    """The families of devices are computed once, also for a program with many nodes."""

    class Tags(Counter[str]):
        times = 0

        def __iter__(self) -> Iterator[str]:
            Tags.times += 1
            return super().__iter__()

    devices = Devices((Rule("any", 0, Target("cuda", 0)),))
    program = _Program(devices, "", Tags(["cpu", "cpu:1"]), has_nulls=False)
    assert [program._family("cpu") for _ in range(9)] == ["cuda"] * 9
    assert Tags.times == 1


def test_an_autocast_of_two_devices(tmp_path: Path) -> None:
    """An autocast is refused if only some of the devices of its family are moved."""
    linear(tmp_path / "m.pt2")
    values = [{"as_device": {"type": "cuda", "index": i}} for i in (0, 1)]
    autocast = node("torch.ops.higher_order.wrap_with_autocast", {"as_string": "cuda"})
    both = [node("torch.ops.aten.to.device", *values), autocast]
    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", change_program(lambda program: [each(program) for each in both]))
    with pytest.raises(ckptconv.RefusedError, match=r"wrap_with_autocast[^$]*cpu or cuda"):
        ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location={"cuda:1": "cpu"})
    ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location={"cuda": "cpu"})


@pytest.mark.parametrize(
    "name", ["data/aotinductor/model/model.so", "data/constants/other.pt", "data/executorch/m.pte"]
)
def test_records_of_unknown_content(name: str, tmp_path: Path) -> None:
    """Compiled code, or a pickle that cannot be read, is refused with its name."""
    linear(tmp_path / "m.pt2")
    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", lambda each, data: (each, data))
    with zipfile.ZipFile(tmp_path / "x.pt2", "a") as archive:
        archive.writestr(f"m/{name}", b"x")
    with pytest.raises(ckptconv.RefusedError, match=name):
        ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")


def test_a_constant_that_is_a_pickle(tmp_path: Path) -> None:
    """A pickled constant is refused, because its class is not known."""
    linear(tmp_path / "m.pt2")
    entry = {"config": {"c": {"path_name": "custom_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}}

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        return name, json.dumps(entry).encode() if "constants_config" in name else data

    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", change)
    with pytest.raises(ckptconv.RefusedError, match=r"constants_config\.json[^$]*custom_obj_0"):
        ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")


def test_a_device_among_the_sample_inputs(tmp_path: Path) -> None:
    """A device object or device text among the sample inputs is refused."""
    linear(tmp_path / "m.pt2")
    for value in (torch.device("cpu"), "cpu"):
        torch.save(((torch.rand(1, 3),), {"on": value}), tmp_path / "s.pt")
        data = (tmp_path / "s.pt").read_bytes()
        changed(tmp_path / "m.pt2", tmp_path / "x.pt2", lambda name, old, data=data: (name, data if "sample" in name else old))  # fmt: skip  # noqa: E501
        with pytest.raises(ckptconv.RefusedError, match="bound to a device"):
            ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")


def test_json_that_torch_did_not_write(tmp_path: Path) -> None:
    """A JSON record with duplicate keys is refused, because one of them would be lost."""
    linear(tmp_path / "m.pt2")

    def twice(name: str, data: bytes) -> tuple[str, bytes]:
        return name, b'{"schema_version": 1, ' + data[1:] if "/models/" in name else data

    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", twice)
    with pytest.raises(ckptconv.RefusedError, match="not written as torch writes it"):
        ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")


@pytest.mark.parametrize("index", ["x", -1, [0], {}])
def test_invalid_devices_of_constants(index: Any, tmp_path: Path) -> None:
    """An invalid device of a constant is reported as malformed."""
    saved(tmp_path / "m.pt2", Convolutions(), torch.rand(1, 1, 5, 5))

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        if "constants_config" in name:
            parsed = json.loads(data)
            parsed["config"]["constant"]["tensor_meta"]["device"]["index"] = index
            data = json.dumps(parsed).encode()
        return name, data

    changed(tmp_path / "m.pt2", tmp_path / "x.pt2", change)
    with pytest.raises(ckptconv.MalformedError, match="a device is not valid"):
        ckptconv.convert(tmp_path / "x.pt2", tmp_path / "y.pt2", map_location="cuda")


@pytest.mark.parametrize(
    "options",
    [{"strip_prefix": "a."}, {"add_prefix": "a."}, {"dtype": "bf16"}, {"include": "w*"}, {"format": "safetensors"}],
)
def test_other_edits(options: dict[str, Any], tmp_path: Path) -> None:
    """Edits other than devices are refused for a program."""
    linear(tmp_path / "m.pt2")
    with pytest.raises(ckptconv.RefusedError, match="only the devices of a program"):
        ckptconv.convert(tmp_path / "m.pt2", tmp_path / "y.pt2", map_location="cuda", **options)


def test_archives_of_torch_2_8(tmp_path: Path) -> None:
    """In archives of torch 2.8, the weights and constants are files of torch.save. Their location tags change too."""
    linear(tmp_path / "m.pt2")
    for kind in ("weights", "constants"):
        torch.save({kind: torch.rand(3)}, tmp_path / f"{kind}.pt")

    def older(name: str, data: bytes) -> tuple[str, bytes] | None:
        if name.endswith("_config.json"):
            kind = name.split("/")[2]
            return name.replace(f"_{kind}_config.json", ".pt"), (tmp_path / f"{kind}.pt").read_bytes()
        if "/models/" in name:
            data = json.dumps(without_nulls(json.loads(data))).encode()
        return None if "/weight_" in name else (name, data)

    def without_nulls(value: Any) -> Any:
        if isinstance(value, list):
            return [without_nulls(each) for each in value]
        if isinstance(value, dict):
            return {key: without_nulls(each) for key, each in value.items() if each is not None}
        return value

    changed(tmp_path / "m.pt2", tmp_path / "old.pt2", older)
    ckptconv.convert(tmp_path / "old.pt2", tmp_path / "new.pt2", map_location="cuda")
    ckptconv.convert(tmp_path / "new.pt2", tmp_path / "back.pt2", map_location="cpu")
    assert records(tmp_path / "back.pt2")["models/model.json"] == records(tmp_path / "old.pt2")["models/model.json"]
    assert "devices in the program: cpu ×" in str(ckptconv.inspect(tmp_path / "old.pt2"))
    for name, data in records(tmp_path / "new.pt2").items():
        if name.endswith(".pt"):
            (tmp_path / "inner.pt").write_bytes(data)
            assert {*ckptconv.inspect(tmp_path / "inner.pt").devices} == {"cuda:0"}, name
    assert {*ckptconv.inspect(tmp_path / "new.pt2").devices} == {"cuda:0"}


ODD = [None, "cuda", -1, [], {}, {"type": "cuda", "index": 3}, {"type": [], "index": 0}]


def mutant(value: Any, random: Random) -> None:
    """Change one random place of a JSON value."""
    while isinstance(value, (dict, list)) and value:
        key = random.choice([*value]) if isinstance(value, dict) else random.randrange(len(value))
        if not isinstance(value[key], (dict, list)) or random.random() < 0.1:
            value[key] = random.choice(ODD)
            return
        value = value[key]


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(2))
def test_mutants(seed: int, tmp_path: Path) -> None:
    """A program with one changed value is moved completely, or refused with a CkptconvError."""
    saved(tmp_path / "m.pt2", Regions(), torch.rand(2, 4))
    random, moved = Random(seed), 0
    for i in range(40):
        record = random.choice(["/models/", "weights_config", "constants_config"])

        def change(name: str, data: bytes, record: str = record) -> tuple[str, bytes]:
            if record in name:
                parsed = json.loads(data)
                mutant(parsed, random)
                data = json.dumps(parsed).encode()
            return name, data

        path = changed(tmp_path / "m.pt2", tmp_path / f"{i}.pt2", change)
        try:
            ckptconv.convert(path, tmp_path / "c.pt2", map_location={"cpu": "cuda:3"}, force=True)
            ckptconv.convert(tmp_path / "c.pt2", tmp_path / "b.pt2", map_location={"cuda:3": "cpu"}, force=True)
        except ckptconv.CkptconvError:
            continue
        moved += 1
        found = [text for name, data in records(tmp_path / "c.pt2").items() if name.endswith(".json") for text in texts(json.loads(data))]  # fmt: skip  # noqa: E501
        assert "cpu" not in found
    assert 0 < moved < 40
