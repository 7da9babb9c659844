"""The findings of ``inspect`` and their commands. Each command must remove its finding, and torch must load the
result.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import pickle
import shlex
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptconv.byteranges.sources import Source
from ckptconv.cli.main import main
from ckptconv.formats import opening
from ckptconv.inspection import summary
from ckptconv.inspection.diagnosis.findings import Advice
from ckptconv.inspection.diagnosis.host import Host
from ckptconv.inspection.summary import Summary, inspect
from tests.support import zoo
from tests.support.archives import records_of, rezip
from tests.support.conversions import run_without_torch
from tests.support.hostile_bytes import found_in, torch_zip_of
from tests.support.judge import refusal
from tests.support.sampled import sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo"),
    pytest.mark.usefixtures("here"),  # the folder in which commands run
]
BARE = Host()
TWO = Host(2)


def look(path: Path | str, machine: Host = BARE) -> Summary:
    with Source(path) as source:
        return summary.summarize(opening.read(source), machine)


def diagnosed(
    obj: Any, tags: Sequence[str] = ("cpu",), machine: Host = BARE, *, name: str = "m.pt", **options: Any
) -> Summary:
    """Save `obj` with `tags` under `name`, and return its summary for the `machine`."""
    zoo.save(obj, name, tags, **options)
    return look(name, machine)


def command_of(found: Summary, kind: str) -> str:
    """Return the command of the only finding of this `kind`."""
    command = only(found, kind).command
    assert command is not None
    return command


def loads(path: Path | str) -> bool:
    """Return whether a plain torch.load reads the file at `path`, without regard to the devices of this machine."""
    return refusal(path, map_location=None) is None


def kinds(found: Summary) -> list[str]:
    return [finding.kind for finding in found.findings]


def only(found: Summary, kind: str) -> Advice:
    (finding,) = (finding for finding in found.findings if finding.kind == kind)
    return finding


def run(command: str | None) -> Path:
    """Run `command` in the current folder, and return the file that it wrote."""
    assert command is not None
    program, *words = shlex.split(command)
    assert program == "ckptconv"
    before = set(Path.cwd().iterdir())
    assert main(words) == 0, command
    (made,) = set(Path.cwd().iterdir()) - before
    return made


def mended(path: Path | str, kind: str, machine: Host = BARE) -> Path:
    """Run the command of the last finding of this `kind` for `path`, and return the output. The output no longer has
    the finding.
    """
    made = run([f.command for f in look(path, machine).findings if f.kind == kind][-1])
    assert kind not in kinds(look(made, machine))
    return made


def linear(prefix: str = "", device: str | None = None) -> OrderedDict[str, torch.Tensor]:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    state = net.state_dict()
    renamed = OrderedDict((prefix + name, tensor) for name, tensor in state.items())
    renamed._metadata = state._metadata  # type: ignore[attr-defined]
    return renamed


class Unknown:
    """A class that torch's safe loader does not know."""


class Other(Unknown):
    """Another class that torch's safe loader does not know."""


UNKNOWN = Unknown()


# Devices


def test_a_gpu_that_is_not_here(fixtures: Path) -> None:
    """A checkpoint on a GPU does not load on a machine without one. The output of the suggested command does."""
    found = look(fixtures / "cuda0.pt")
    finding = only(found, "device")
    assert finding.blocks
    assert not found.loads_here
    assert finding.text == "11 tensors are on cuda:0 (first: conv.weight), and this machine has no GPU"
    assert finding.command == f"ckptconv convert {fixtures}/cuda0.pt cuda0-cpu.pt --to cpu"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="Attempting to deserialize object"):
            torch.load(fixtures / "cuda0.pt")
    made = mended(fixtures / "cuda0.pt", "device")
    assert look(made).loads_here
    assert loads(made)
    assert look(fixtures / "cuda0.pt", Host(1)).loads_here


@pytest.mark.parametrize(
    ("tags", "machine", "flags"),
    [
        (["cuda:3"], TWO, "--map cuda:3=cuda:0"),
        (["cuda:1", "cuda:2", "cuda:3"], TWO, "--map cuda:2=cuda:0 --map cuda:3=cuda:0"),
        (["cuda:0", "mps"], TWO, "--map mps=cpu"),
        (["cuda:0", "mps"], BARE, "--to cpu"),
        (["mps"], BARE, "--to cpu"),
        (["cuda:0"], Host(mps=True), "--to cpu"),
        (["cuda:0", "mps"], Host(mps=True), "--map cuda:0=cpu"),
        (["cuda:0", "xpu:1"], BARE, "--map cuda:0=cpu"),
        (["cpu:0", "cpu"], BARE, "--to cpu"),
        (["odd=tag"], TWO, "--to cpu"),
    ],
)
def test_only_what_is_missing_is_moved(tags: list[str], machine: Host, flags: str) -> None:
    """Only tensors on absent devices are moved, to a GPU if there is one and otherwise to the CPU. The command works
    for any tag.
    """
    found = diagnosed({str(i): torch.ones(i + 1) for i in range(len(tags))}, tags, machine).findings
    assert shlex.split(str(found[0].command))[4:] == flags.split()
    made = run(found[0].command)
    assert [f for f in look(made, machine).findings if f.kind == "device" and f.text == found[0].text] == []


def test_devices_whose_presence_is_not_known() -> None:
    """For other accelerators, and for GPUs under WSL, the verdict is 'not known'. The finding names the tags and has a
    command.
    """
    zoo.save({"a": torch.ones(1), "b": torch.ones(2)}, "m.pt", ["xpu:1", "cuda:0"])
    for machine, tags in ((Host(None), "cuda:0, xpu:1"), (Host(1), "xpu:1")):
        found = look("m.pt", machine)
        assert found.loads_here is None
        assert tags in only(found, "device").text
        Path(mended("m.pt", "device", machine)).unlink()


def test_another_version_of_torch_is_here() -> None:
    """With a version of torch whose rules are not known, the verdict is 'not known', and the text names the version
    whose rules apply. Files that no version loads stay refused.
    """
    other = Host(torch="2.99.1+cu126")
    torch.save({"w": torch.ones(2)}, "loads.pt")
    torch.save({"w": torch.ones(2), "c": types.SimpleNamespace()}, "code.pt")
    Path("plain.pkl").write_bytes(pickle.dumps({"w": torch.ones(2)}))
    save_file({"w": torch.ones(2)}, "m.safetensors")
    zoo.save({"w": torch.ones(2)}, "far.pt", ["cuda:3"])
    expected = {"loads.pt": None, "m.safetensors": None, "code.pt": None, "far.pt": False, "plain.pkl": False}
    assert {name: look(name, other).loads_here for name in expected} == expected
    same = {name: look(name, Host(torch="2.13.0+cpu")) for name in expected}
    assert [found.loads_here for found in same.values()] == [True, True, False, False, False]
    here = "loads         not known: ckptconv knows the rules of torch 2.6 to 2.15, and not those of 2.99.1+cu126"
    said = str(look("loads.pt", other))
    assert here in said and "torch 2.15    yes: torch.load(path, weights_only=True), rules of torch 2.15" in said
    said = str(look("code.pt", other))
    assert here in said and "torch 2.15    no: torch.load(weights_only=True) refuses types.SimpleNamespace" in said
    assert "2.99" not in str(same["loads.pt"]) + str(look("far.pt", other))
    assert look("m.safetensors", other).torch_load.needs == "2.13" and look("loads.pt", other).torch_load.needs is None


def test_ties_count_once_and_absurd_tags_are_read() -> None:
    """A tied tensor counts once. A tag with an index of 5,000 digits is not a device."""
    w = torch.ones(1)
    tied = diagnosed({"a": w, "b": w}, ["cuda:0"])
    assert only(tied, "device").text.startswith("1 tensor is on cuda:0 (a),")
    assert not diagnosed({"a": w}, ["cuda:" + "9" * 5000], TWO).loads_here


def test_no_torch_is_needed(fixtures: Path) -> None:
    """``inspect`` reports whether a plain load works on this machine."""
    assert inspect(fixtures / "cuda0.pt").loads_here == torch.cuda.is_available()


# Names


@pytest.mark.parametrize(
    ("prefix", "flags"),
    [
        ("module.", ["--strip-prefix", "module."]),
        ("_orig_mod.", ["--strip-prefix", "_orig_mod."]),
        ("module._orig_mod.", ["--unwrap"]),
        ("_orig_mod.module.", ["--unwrap"]),
        ("_forward_module._fsdp_wrapped_module.", ["--unwrap"]),
        ("layers.0._checkpoint_wrapped_module.", ["--unwrap"]),
        ("module.a._orig_mod._fsdp_wrapped_module.b.", ["--unwrap"]),
    ],
)
@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_wrappers_come_off(prefix: str, flags: list[str], format: str) -> None:
    """Prefixes of wrappers are stripped in the order in which they were added, in both formats. The plain model loads
    the result.
    """
    state = linear(prefix)
    if format == "pt":
        torch.save({"model": state, "epoch": 1}, "m.pt")
    else:
        save_file(state, "m.safetensors")
    found = look(f"m.{format}")
    assert found.loads_here
    assert kinds(found) == ["prefix"]
    assert shlex.split(command_of(found, "prefix"))[4:] == flags
    made = mended(f"m.{format}", "prefix")
    got = torch.load(made)["model"] if format == "pt" else load_file(made)
    plain = "layers.0." if prefix.startswith("layers") else "a.b." if ".a." in prefix else ""
    assert set(got) == set(linear(plain))
    if not plain:
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).load_state_dict(got)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_real_wrappers() -> None:
    """The prefixes of torch's own wrappers are recognized. The counter of AveragedModel is removed."""
    net = nn.Sequential(nn.Linear(2, 2))
    torch.save(nn.DataParallel(torch.compile(net)).state_dict(), "a.pt")
    net.load_state_dict(torch.load(mended("a.pt", "prefix")))
    torch.save(torch.optim.swa_utils.AveragedModel(net).state_dict(), "b.pt")
    net.load_state_dict(torch.load(mended("b.pt", "prefix")))


def test_module_comes_off_once() -> None:
    """Only one of two ``module.`` prefixes is stripped, because a model can have a submodule with this name."""
    finding = only(diagnosed({f"module.module.{i}": torch.ones(1) for i in range(2)}), "prefix")
    assert "may be a name of the model" in finding.text
    assert finding.command == "ckptconv convert m.pt m-plain.pt --strip-prefix module."
    assert list(torch.load(run(finding.command))) == ["module.0", "module.1"]


@pytest.mark.parametrize(
    ("obj", "kind"),
    [
        ({"_orig_mod.a": torch.ones(1), "a": torch.ones(2)}, "prefix"),
        ({"one": {"module.a": torch.ones(1)}, "two": {"module.b": torch.ones(1), "c": torch.ones(1)}}, "prefix"),
        ({"x": {"w": torch.ones(1), "args": UNKNOWN}, "y": [torch.ones(1), UNKNOWN]}, "code"),
    ],
    ids=["two names would become one", "another state dict has a module of that name", "no large part loads"],
)
def test_harmful_commands_are_not_printed(obj: Any, kind: str) -> None:
    """A finding has no command if every possible command would do harm."""
    assert only(diagnosed(obj), kind).command is None


def test_a_wrapped_part_of_a_model(fixtures: Path) -> None:
    """nn.DataParallel around some parts of a model is one finding with one ``--rename`` for all of them. The rename is
    not part of the remedy, because the names may be the model's own.
    """
    found = look(fixtures / "dataparallel_features.pt")
    assert kinds(found) == ["device", "inner-prefix"]
    flags = ["--rename", r"^features\.module\.", "features."]
    assert shlex.split(command_of(found, "inner-prefix"))[-3:] == flags
    assert found.remedy is None
    torch.save({f"{p}.module.0.w": torch.ones(1) for p in ("net.encoder", "head")} | {"b": torch.ones(1)}, "m.pt")
    made = mended("m.pt", "inner-prefix")
    assert list(torch.load(made)) == ["net.encoder.0.w", "head.0.w", "b"]


class Wrapped(nn.Module):
    """A module with a real submodule called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


HEALTHY: dict[str, Any] = {
    "empty": {},
    "tensor": torch.ones(2),
    "linear": nn.Linear(2, 2).state_dict(),
    "list of wrappers": nn.ModuleDict({"hidden": nn.ModuleList([Wrapped(), Wrapped()]), "out": Wrapped()}).state_dict(),
    "a module beside others": nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)}).state_dict(),
    "a name that only looks like it": {
        "my_module.w": torch.ones(1),
        "x_orig_mod.w": torch.ones(1),
        "modules.w": torch.ones(1),
    },
    "a list of deeper wrappers": {f"hidden.{i}.module.attention.weight": torch.ones(1) for i in range(2)},
    "a large view beside more": {"a": torch.ones(400_000)[:10], "b": torch.ones(1_000_000)},
    "a small view": {"a": torch.ones(1000)[:3]},
    "two halves": dict(enumerate(torch.ones(600_000).chunk(2))),
    "training": {
        "model": nn.Linear(2, 2).state_dict(),
        "optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict(),
        "rng": torch.get_rng_state(),
        "device": torch.device("cuda:0"),
        "where": "cuda:0",
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with_healthy_files(name: str) -> None:
    """A healthy file has no finding and no remedy, and torch loads it."""
    found = diagnosed(HEALTHY[name])
    assert (found.findings, found.remedy, found.loads_here) == ((), None, True)
    assert loads("m.pt")


@pytest.mark.parametrize("name", ["cpu.pt", "resnet18.pt"])
def test_nothing_is_wrong_with_healthy_fixtures(fixtures: Path, name: str) -> None:
    assert look(fixtures / name).findings == ()


# Code


def test_code_next_to_a_state_dict(fixtures: Path) -> None:
    """Each class that torch refuses has a finding with its path. The command keeps only the state dict, which loads."""
    obj = {"model": linear(), "args": argparse.Namespace(a=1), "log": [Unknown(), {"deep": Unknown()}], "cls": Unknown}
    found = diagnosed(obj)
    assert [f.text.partition(" refuses ")[2] for f in found.findings] == [
        "argparse.Namespace at args",
        f"{__name__}.Unknown at cls and 2 more places;"
        " only the state dict loads (68 B of 68 B, without args, log, cls)",
    ]
    assert [f.command for f in found.findings] == [None, "ckptconv convert m.pt m-weights.pt --state-dict"]
    assert not loads("m.pt")
    assert loads(mended("m.pt", "code"))
    found = diagnosed({"model": linear(), "log": [Unknown()], "deeper": [[Unknown]]})
    assert "Unknown at log[0] and 1 more place;" in only(found, "code").text


def test_objects_of_data_can_be_made_plain() -> None:
    """Objects that consist only of data can be converted. The first command keeps all of them, and a second one keeps
    only the state dict. The first is not offered if another object is more than data.
    """
    obj = {"state_dict": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1), "epoch": 3}
    found = diagnosed(obj)
    plain = only(found, "code")
    assert (
        plain.command == "ckptconv convert m.pt m-plain.pt --loadable" and "after 1 object is converted" in plain.text
    )
    assert found.remedy is None and not any("--drop" in (each.command or "") for each in found.findings)
    run(plain.command)
    assert torch.load("m-plain.pt", weights_only=True)["args"] == {"lr": 1}
    assert look("m-plain.pt").loads_here
    weights = only(found, "part")
    assert weights.command == "ckptconv convert m.pt m-weights.pt --state-dict" and not weights.blocks
    assert loads(mended("m.pt", "part"))
    found = diagnosed({**obj, "model": Unknown()})
    assert not any("--loadable" in (each.command or "") for each in found.findings)


def test_many_classes_are_three_lines_and_one() -> None:
    """More than three classes give three findings and a fourth with the number of the others. Only the fourth has the
    command.
    """
    found = diagnosed({"state_dict": linear(), "x": [UNKNOWN, Other(), argparse.Namespace(), frozenset(), range(3)]})
    code = [f for f in found.findings if f.kind == "code"]
    assert [f.command is None for f in code] == [True, True, True, False]
    others = "builtins.frozenset, builtins.range"
    assert code[3].text == f"and 2 more like that: {others}; only the state dict loads (68 B of 68 B, without x)"
    assert loads(mended("m.pt", "code"))


def test_the_largest_part_that_loads() -> None:
    """The command keeps the largest state dict that loads. Without a state dict, it keeps the part with most of the
    bytes.
    """
    small, large = {"w": torch.ones(2)}, {"w": torch.ones(200)}
    found = diagnosed({"a": small, "b": large, "args": [UNKNOWN, torch.ones(1)]})
    assert command_of(found, "code").endswith("m-part.pt --select b")
    assert list(torch.load(mended("m.pt", "code"))) == ["w"]
    Path("m-part.pt").unlink()
    found = diagnosed(
        {"data": {"odd name": [torch.ones(9), 1]}, "tensor": torch.ones(1), "args": [torch.ones(1), UNKNOWN]}
    )
    assert "only data loads (36 B of 44 B, without tensor, args)" in only(found, "code").text
    assert loads(mended("m.pt", "code"))
    found = diagnosed({"x": [torch.ones(9), UNKNOWN], "y": torch.ones(1)})
    assert command_of(found, "code").endswith("--select 'x[0]'")


def fresh() -> nn.Module:
    return nn.Sequential(OrderedDict(body=zoo.Net(), norm=nn.BatchNorm1d(2), drop=nn.Dropout()))


def takes(path: Path, prefix: str = "") -> None:
    """Check that torch's safe loader reads `path`, and that the plain model loads the result after `prefix` is
    removed.
    """
    state = torch.load(path, weights_only=True)
    assert all(name.startswith(prefix) for name in state)
    fresh().load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()}, strict=True)


@pytest.mark.parametrize(
    ("hold", "path"),
    [
        (lambda model: model, "."),
        (lambda model: {"model": model, "x": 1}, "model"),
        (lambda model: {"model": None, "ema": model}, "ema"),
        (lambda model: [model, 1], "[0]"),
    ],
    ids=["root", "model", "ema", "list"],
)
def test_a_pickled_module_gives_its_state_dict(hold: Callable[[nn.Module], Any], path: str) -> None:
    """A pickled module is refused because of its class. The last finding has the command that extracts its
    state dict.
    """
    found = diagnosed(hold(fresh()))
    code = [f for f in found.findings if f.kind == "code"]
    assert code[0].text == "torch.load(weights_only=True) refuses torch.nn.modules.container.Sequential" + (
        "" if path == "." else f" at {path}"
    )
    what = "it" if path == "." else path
    assert f"; {what} is a pickled model; only its state dict loads (" in code[-1].text
    assert code[-1].command == "ckptconv convert m.pt m-weights.pt --state-dict"
    assert found.remedy is None
    takes(mended("m.pt", "code"))


def test_a_wrapped_module_on_a_gpu_is_mended_in_one_command() -> None:
    """The remedy for a wrapped module on a GPU is one command that extracts the state dict, strips the prefix and moves
    it to the CPU. Each of the other commands does its part.
    """
    found = diagnosed({"epoch": 1, "model": nn.DataParallel(fresh())}, ["cuda:1"])
    assert found.remedy == "ckptconv convert m.pt m-fixed.pt --state-dict --strip-prefix module. --to cpu"
    takes(run(found.remedy))
    assert command_of(found, "prefix") == "ckptconv convert m.pt m-plain.pt --state-dict --strip-prefix module."
    assert "prefix" not in kinds(look(run(command_of(found, "prefix"))))
    assert not look(run(command_of(found, "device"))).loads_here
    found = diagnosed(torch.compile(fresh()), ["cuda:0"], name="c.pt")
    assert found.remedy == "ckptconv convert c.pt c-fixed.pt --state-dict --strip-prefix _orig_mod. --to cpu"
    takes(run(found.remedy))


def test_a_part_of_a_pickled_model_that_is_wrapped() -> None:
    """If a part of a pickled model is in nn.DataParallel, the command extracts the state dict and renames the part."""
    net = fresh()
    net.body = nn.DataParallel(net.body)
    assert "--state-dict --rename" in command_of(diagnosed(net), "inner-prefix")
    takes(mended("m.pt", "inner-prefix"))


def test_the_largest_of_several_modules_is_selected_by_path() -> None:
    """If there are several modules without a usual name, the command selects the largest one by its path."""
    found = diagnosed({"critic": nn.Linear(2, 2), "actor": fresh()}, ["cuda:0"])
    code = [f for f in found.findings if f.kind == "code"][-1]
    assert code.command == "ckptconv convert m.pt m-weights.pt --select actor --state-dict"
    assert found.remedy == "ckptconv convert m.pt m-fixed.pt --select actor --state-dict --to cpu"
    takes(run(found.remedy))


def test_a_module_whose_tensors_need_code_has_no_command() -> None:
    """A module with a tensor subclass has no command, because the class would remain in the state dict."""
    net = nn.Linear(2, 2)
    net.register_buffer("odd", torch.ones(2).as_subclass(zoo.AttributedTensor))
    assert all(f.command is None for f in diagnosed(net).findings if f.kind == "code")
    advice = "load it where their code is installed, and save its tensors"
    assert only(diagnosed([UNKNOWN]), "code").text.endswith(advice)


def test_a_remedy_contains_only_necessary_options() -> None:
    """A remedy contains only the options that its output needs. There is no remedy if no part loads."""
    found = diagnosed({"model": zoo.module(), "ema": linear("module.")}, ["cuda:0"])
    assert found.remedy == "ckptconv convert m.pt m-fixed.pt --state-dict --to cpu"
    assert loads(run(found.remedy))
    obj = [UNKNOWN, [nn.ReLU(), zoo.Config(weight=torch.ones(1))]]
    assert diagnosed(obj, ["cuda:0", "xpu:1"]).remedy is None


def test_each_command_writes_a_file_of_its_own() -> None:
    """Different commands write to different files."""
    training("cuda:3", rng_state=torch.get_rng_state(), model=linear("module."))
    for machine in (TWO, Host(None), Host(0)):
        commands = {f.command for f in look("m.pt", machine).findings if f.command}
        assert len({command.split()[3] for command in commands}) == len(commands)


@pytest.mark.parametrize(
    ("tag", "words"), [("cpu:0", "without an index"), ("foo:1", "does not know"), ("CUDA:0", "does not know")]
)
def test_tags_that_torch_does_not_restore(tag: str, words: str) -> None:
    """An index on the CPU, and devices that torch does not know, prevent loading on every machine."""
    found = diagnosed({"a": torch.ones(1)}, [tag], TWO)
    assert found.loads_here is False
    assert words in only(found, "device").text
    with pytest.raises(RuntimeError):
        torch.load("m.pt")
    assert torch.load(run(command_of(found, "device")))


def test_deeply_nested_classes_are_traced_once() -> None:
    """5,000 unknown classes that are nested in an argument of a tensor are each traced back once."""
    torch.save([torch.ones(1)], "m.pt")
    hooks, nested = b"ccollections\nOrderedDict\nq\t)Rq\n", b"N" + b"".join(b"cq\nA%d\n\x86" % i for i in range(5_000))
    pickled = records_of(Path("m.pt"))["data.pkl"]
    found_in(pickled, hooks)
    rezip(Path("m.pt"), Path("n.pt"), {"data.pkl": pickled.replace(hooks, nested)})
    texts = [finding.text for finding in look("n.pt").findings]
    assert texts[-1].startswith("and 4,997 more like that")


def test_places_inside_tensors_and_names() -> None:
    """A class in the arguments of a tensor or in a key is reported at the path of the tensor or of the key."""
    found = diagnosed({"w": zoo.subclass()["subclass"], zoo.Frozen(1, "b"): 1})
    texts = [f.text for f in found.findings]
    assert any("zoo.AttributedTensor at w" in text for text in texts)
    assert any("zoo.Frozen at /<1>" in text or "zoo.Frozen at <1>" in text for text in texts), texts


def test_protocol_4_is_written_again() -> None:
    """Opcodes that the safe loader does not know prevent loading, and are rewritten. A newer protocol without such
    opcodes does not.
    """
    state = {"a": linear(), "b": {1, 2}, "c": b"x"}
    assert only(diagnosed(state, name="four.pt", pickle_protocol=4), "opcodes").blocks
    assert not loads("four.pt")
    assert loads(mended("four.pt", "opcodes"))
    assert not only(diagnosed(linear(), name="three.pt", pickle_protocol=3), "opcodes").blocks
    assert loads("three.pt")
    mended("three.pt", "opcodes")
    oldest = diagnosed(linear(), pickle_protocol=1)
    assert only(oldest, "opcodes").text.endswith("which pickle protocol 0 or 1 uses")
    assert kinds(diagnosed({"a": linear(), "b": UNKNOWN}, pickle_protocol=4)) == ["code"]
    assert loads(mended("m.pt", "code"))


def test_a_dangerous_file_has_no_command() -> None:
    """A dangerous file has no command and no remedy, even if it has other findings."""
    Path("m.pt").write_bytes(torch_zip_of(pickle.dumps({"module.a": Unknown, "b": print, "c": eval}, 2), {}))
    found = look("m.pt")
    assert kinds(found) == ["dangerous"]
    assert "builtins.eval" in found.findings[0].text
    assert (found.findings[0].command, found.remedy, found.loads_here) == (None, None, False)


# Storages, optimizers, generators


def test_views_of_large_storages() -> None:
    """The finding contains the number of bytes that no tensor uses, and its command removes them. Deflated storages
    have no command. There is no finding if another object uses the bytes.
    """
    large = torch.zeros(1_000_000)
    found = diagnosed({"model": {"a": large[:10], "b": torch.ones(3)}, "epoch": 1})
    assert "4 MB of 4 MB stored" in only(found, "views").text
    assert mended("m.pt", "views").stat().st_size < 5000
    torch.save({"model": {"b": torch.ones(3)}, "batch": [large[:10]]}, "n.pt")
    assert mended("n.pt", "views").stat().st_size < 5000
    deflated = rezip(Path("n.pt"), Path("d.pt"), method=zipfile.ZIP_DEFLATED)
    assert only(look(deflated), "views").command is None
    for everything in (large, large._typed_storage()):
        assert "views" not in kinds(diagnosed({"model": {"a": large[:10]}, "all": everything}))


def test_ties_that_safetensors_refuses(fixtures: Path) -> None:
    """Ties that the safetensors library refuses are a finding, and its command writes the file. Tensors that share a
    storage but no byte are not tied.
    """
    w, z = torch.ones(4), torch.ones(4, dtype=torch.complex128)
    found = diagnosed({"a": w, "b": w, "c": torch.ones(8)[2:6], "d": w.view(2, 2)[1]})
    assert "(a and b, a and d)" in only(found, "ties").text
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(torch.load("m.pt"), "x.safetensors")
    assert set(load_file(mended("m.pt", "ties"))) == {"a", "c", "d"}
    mended(fixtures / "tied.pt", "ties")
    assert diagnosed(dict(zip("ab", torch.ones(4).chunk(2), strict=True))).findings == ()
    assert diagnosed({"a": z, "b": z}).findings == ()  # safetensors could not store it anyway


def training(tag: str, machine: Host = BARE, **more: Any) -> Summary:
    """Return the summary of a training run on the device `tag`, with the additional objects `more`."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return diagnosed({"model": net.state_dict(), "optimizer": optimizer.state_dict(), **more}, [tag], machine)


def test_an_optimizer_on_one_gpu() -> None:
    """An optimizer on one GPU is a finding, because every process would load it there. On the CPU, or on two GPUs, it
    is not.
    """
    finding = only(training("cuda:0", TWO), "optimizer")
    assert not finding.blocks
    assert "the state of optimizer is on cuda:0" in finding.text
    assert finding.command == "ckptconv convert m.pt m-resume.pt --map cuda:0=cpu"
    mended("m.pt", "optimizer", TWO)
    assert training("cpu").findings == ()
    spread = {"state": {0: torch.ones(1), 1: torch.ones(2)}, "param_groups": []}
    assert diagnosed(spread, ["cuda:0", "cuda:1"], TWO).findings == ()


def test_states_of_generators_on_a_gpu() -> None:
    """States of random generators on a GPU are a finding, because torch.set_rng_state refuses them. The command moves
    them to the CPU.
    """
    found = diagnosed({"rng_state": torch.get_rng_state(), "w": torch.ones(1)}, ["cuda:0"], TWO)
    assert "(rng_state)" in only(found, "rng").text
    torch.set_rng_state(torch.load(mended("m.pt", "rng", TWO))["rng_state"])


# Commands and the remedy


def test_one_remedy_for_several_complaints() -> None:
    """The remedy does in one command what the commands of several findings do. It has no options for objects that it
    drops.
    """
    net = {f"module.{name}": tensor for name, tensor in linear().items()}
    found = training("cuda:0", args=UNKNOWN, state_dict=net, rng_state=torch.get_rng_state())
    assert kinds(found) == ["device", "code", "prefix", "optimizer", "rng"]
    assert found.findings[1].command == "ckptconv convert m.pt m-loadable.pt --drop args"
    assert found.remedy == "ckptconv convert m.pt m-fixed.pt --drop args --strip-prefix module. --to cpu"
    made = run(found.remedy)
    assert look(made).findings == ()
    assert loads(made)
    with_rng = training("cuda:3", TWO, rng_state=torch.get_rng_state())
    assert with_rng.remedy == "ckptconv convert m.pt m-fixed.pt --to cpu"
    assert training("cuda:3", TWO).remedy == "ckptconv convert m.pt m-fixed.pt --map cuda:3=cpu"
    found = diagnosed({"model": linear(), "ema": net, "args": UNKNOWN})
    assert kinds(found) == ["code", "prefix", "ema"]
    made.unlink()
    assert kinds(look(run(found.remedy))) == ["ema"]
    remedy = diagnosed(linear("module."), name="n.pt", pickle_protocol=4).remedy
    assert look(run(remedy)).findings == ()


def pickled(obj: Any, tag: str) -> Summary:
    """Pickle `obj` to a plain pickle with `tag`, and return its summary."""
    with zoo.tagging([tag]), Path("m.pkl").open("wb") as file:
        pickle.dump(obj, file)
    return look("m.pkl")


def test_containers_and_opcodes_need_no_second_command() -> None:
    """Every conversion changes the container and the opcodes, so these findings need no command next to that of another
    finding.

    They have their own command if no other command writes the complete file, or if it is not known whether the other
    one is needed.
    """
    torch.save(linear(), "four.pt", pickle_protocol=4)
    zoo.save(linear(), "four_cuda.pt", ["cuda:0"], pickle_protocol=4)
    zoo.save(
        {"a": torch.ones(2, dtype=torch.float8_e5m2)}, "old_cuda.pt", ["cuda:0"], _use_new_zipfile_serialization=False
    )
    pickled(linear(), "cuda:0")
    for name, kind in (("m.pkl", "pickle"), ("four_cuda.pt", "opcodes"), ("old_cuda.pt", "legacy")):
        found = look(name)
        assert (only(found, kind).blocks, only(found, kind).command, found.remedy) == (True, None, None)
        assert kind not in kinds(look(made := mended(name, "device")))
        assert loads(made)
        assert only(look(name, TWO), kind).command.split()[4:] == []  # type: ignore[union-attr]
    found = pickled(linear("module."), "cpu")
    assert only(found, "pickle").command is None
    assert look(run(found.remedy)).findings == ()
    to_torch = "ckptconv convert m.pkl m-torch.pt"
    assert command_of(pickled(linear(), "xpu:1"), "pickle") == to_torch
    net = fresh()
    net.body = nn.DataParallel(net.body)
    found = pickled(net.state_dict(), "cpu")
    assert kinds(found) == ["pickle", "inner-prefix"]
    assert command_of(found, "pickle") == to_torch
    found = pickled({"model": linear(), "args": UNKNOWN}, "cpu")
    assert command_of(found, "code") == "ckptconv convert m.pkl m-weights.pt --state-dict"
    assert command_of(found, "pickle") == to_torch


def test_one_command_is_its_own_remedy(fixtures: Path) -> None:
    assert look(fixtures / "cuda0.pt").remedy is None


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("m.pth.tar", "m-cpu.pth.tar"),
        ("pytorch_model.bin", "pytorch_model-cpu.bin"),
        ("m", "m-cpu.pt"),
        ("epoch=3.x", "epoch=3.x-cpu.pt"),
        ("M.PT", "M-cpu.PT"),
        ("-m.pt", "./-m-cpu.pt"),
        ("it's a $HOME;.pt", "it's a $HOME;-cpu.pt"),
        ("m.safetensors", "m-cpu.pt"),
        ("~.pt", "~-cpu.pt"),
        ("m-cpu.pt", "m-cpu-cpu.pt"),
    ],
)
def test_commands_run_as_typed(name: str, target: str) -> None:
    """A command works for every file name. The output has its own name and the suffix of the source."""
    zoo.save({"a": torch.ones(1)}, Path(name), ["cuda:0"])
    command = look(f"./{name}" if name.startswith("-") else name).findings[0].command
    assert shlex.split(str(command))[3] == target
    assert run(command).name == Path(target).name


def test_a_name_that_a_terminal_cannot_show_can_be_pasted() -> None:
    """A command with a name that a terminal cannot display is quoted so that bash restores the name."""
    command = command_of(diagnosed({"a": torch.ones(1)}, ["cuda:0"], name="a\nb.pt"), "device")
    assert command.isprintable()
    out = subprocess.run(["bash", "-c", f'printf "%s\\0" {command}'], capture_output=True, text=True, check=True).stdout
    words = out.split("\0")[:-1]
    assert words[:4] == ["ckptconv", "convert", "a\nb.pt", "a\nb-cpu.pt"]
    assert main(words[1:]) == 0


def test_torch_is_not_imported(fixtures: Path) -> None:
    """Diagnosing the file with the most findings does not import torch."""
    path = str(fixtures / "training.pt")
    run_without_torch(f"import ckptconv; assert len(ckptconv.inspect({path!r}).findings) >= 2")


# The zoo and the corpus


def check_every_command(path: Path | str) -> Summary:
    """Run each command for `path`, and check that its finding is gone and that the verdict is that of torch. Return the
    summary.
    """
    found = look(path)
    if not torch.cuda.is_available():
        assert found.loads_here == loads(path), (path, found.findings)
    for finding in found.findings:
        if finding.command:
            made = run(finding.command)
            left = look(made)
            assert finding.kind not in kinds(left), (finding, left.findings)
            if finding.kind == "code" and "device" not in kinds(left):
                assert loads(made), finding
            made.unlink()
    if found.remedy:
        made = run(found.remedy)
        gone = {f.kind for f in found.findings if f.command} - {"inner-prefix", "views", "ties"}
        assert gone.isdisjoint(kinds(look(made))), found.remedy
        made.unlink()
    return found


@pytest.mark.untraced
@pytest.mark.parametrize(("name", "protocol"), sampled(itertools.product(zoo.ZOO, range(2, 6))))
def test_every_command_solves_its_issue(name: str, protocol: int) -> None:
    """The commands work for every object of the zoo, with tags that a machine without a GPU can judge."""
    if protocol < zoo.NEEDS_PROTOCOL.get(name, 2):
        pytest.skip("needs a newer protocol")
    for tags in (["cpu"], ["cpu", "cuda:0", "cuda:1"]):
        zoo.save(zoo.ZOO[name](), "zoo.pt", tags, pickle_protocol=protocol)
        check_every_command("zoo.pt")


@pytest.mark.untraced
def test_every_command_mends_the_corpus(corpus: Path) -> None:
    """For the zip and safetensors files of the corpus, the commands work, their findings disappear, and the verdict is
    that of torch.
    """
    with (corpus / "manifest.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["container"] in ("zip-pt", "safetensors")]
    assert len(rows) > 30
    seen: set[str] = set()
    for row in rows:
        path = corpus / row["path"]
        if row["container"] == "safetensors":
            assert look(path).loads_here
        else:
            seen.update(kinds(check_every_command(path)))
    assert seen == {"device", "code", "part", "prefix", "inner-model", "optimizer", "ties"}


def test_states_of_torchao_name_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer with classes of torchao is not dropped, because torch's safe loader accepts them after torchao is
    imported. The test registers a class in its place.
    """
    module = types.ModuleType("torchao.optim.subclass_8bit")
    state = type("OptimState8bit", (), {"__module__": module.__name__})
    monkeypatch.setattr(module, "OptimState8bit", state, raising=False)
    for name in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    codes = state()
    codes.codes = torch.ones(4, dtype=torch.uint8)
    optimizer = {"state": {0: {"exp_avg": codes}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, "m.pt")
    found = only(look("m.pt"), "import")
    assert found.blocks and found.command is None
    assert "torchao.optim.subclass_8bit.OptimState8bit" in found.text and "only after `import torchao`" in found.text
    assert refusal("m.pt")
    with torch.serialization.safe_globals([state]):
        assert torch.load("m.pt", weights_only=True)["optimizer"]["state"][0]["exp_avg"].codes.sum() == 4


def test_an_invalid_tensor_is_left_out() -> None:
    """A tensor that torch refuses because of its values is dropped, and the file then loads. If it is the only object,
    there is no command.
    """
    invalid = torch.sparse_coo_tensor(torch.tensor([[0, 99]]), torch.ones(2), (3,), check_invariants=False)
    torch.save({"w": torch.ones(2), "s": invalid}, "m.pt")
    found = only(look("m.pt", Host(torch="2.15.0")), "code")
    assert "dimension of size 3 at s; without s, which no option mends, the file loads" in found.text
    assert set(torch.load(run(found.command), weights_only=True)) == {"w"}
    torch.save([invalid], "m.pt")
    found = only(look("m.pt", Host(torch="2.15.0")), "code")
    assert found.text.endswith("load it with a version of torch that takes it") and found.command is None
