"""The interface between the web page and ckptconv. Its results and plans are those of the command line."""

from __future__ import annotations

import argparse
import html.parser
import itertools
import json
import os
import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ckptconv.cli.main import main
from ckptconv.conversion.options import PlanOptions
from ckptconv.errors import CkptconvError, MissingTorchError
from ckptconv.hints import Option, command
from ckptconv.inspection.summary import summary_of
from tests.support import zoo
from tests.support.paths import ROOT
from web.bridge import Bridge, _fix, _verdict, error_text


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new folder, which stands for the dropped files, and return it."""
    folder = tmp_path / "FOLDER"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def bridge(folder: Path) -> Bridge:
    """Return a bridge for a folder with one file."""
    torch.save({"module.w": torch.arange(6.0), "module.b": torch.ones(2)}, "ddp.pt")
    bridge = Bridge(str(folder))
    assert bridge.checkpoints() == ["ddp.pt"]
    return bridge


def put_together(bridge: Bridge, folder: Path) -> list[bytes]:
    """Return the content of the planned files."""

    def data(part: Any) -> bytes:
        return part if isinstance(part, bytes) else (folder / part[0]).read_bytes()[part[1] : part[1] + part[2]]

    return [b"".join(map(data, bridge.parts(i, lambda nbytes: None))) for i in range(len(bridge.planned))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"map_location": ["cuda:1"]},
        {"map_location": ["mps", "cpu=cuda:0"]},
        {"strip_prefix": ["module."], "add_prefix": ["a.", "b."]},
        {"rename": [["^module", "x y"]], "exclude": ["*.b"]},
        {"unwrap": True, "compact": True, "state_dict": True},
        {"include": ["*.w"], "copy_tied": True},
        {"drop": ["module.b"], "loadable": True},
    ],
)
def test_a_plan_is_what_the_command_writes(options: dict[str, Any], bridge: Bridge, folder: Path) -> None:
    """The planned file equals the output of the shown command. The plan can be encoded as JSON."""
    dst = "out.safetensors" if "copy_tied" in options else "out.pt"
    bridge.inspect("ddp.pt")
    plan = bridge.plan(dst, options)
    (made,) = put_together(bridge, folder)
    assert main([*shlex.split(plan["command"])[1:], "-q"]) == 0
    assert made == Path(dst).read_bytes() and plan["report"].startswith(f"{dst}: ")
    assert plan["files"] == [{"name": dst, "size": len(made), "reads": plan["files"][0]["reads"]}]
    json.dumps(plan)


def test_texts_are_those_of_the_command_line(bridge: Bridge, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports of conversions and comparisons are the texts of the command line, with the names of its options."""
    bridge.inspect("ddp.pt")
    report = bridge.plan("out.pt", {"map_location": ["cpu"]})["report"]
    assert main(["convert", "ddp.pt", "out.pt", "--to", "cpu", "--dry-run"]) == 0
    assert report == capsys.readouterr().out.rstrip() and "so --to cpu changed nothing" in report
    torch.save({"w": torch.ones(1)}, "other.pt")
    assert main(["diff", "ddp.pt", "other.pt"]) == 1
    assert bridge.diff("ddp.pt", "other.pt")["text"] == capsys.readouterr().out.rstrip()


def write_set(folder: Path, suffix: str, *, index: bool = True) -> dict[str, torch.Tensor]:
    """Write a set of three shards with an optional index, and a configuration. Return its tensors."""
    folder.mkdir(exist_ok=True)
    state = {f"module.l{i}.w": torch.full((100,), float(i)) for i in range(3)}
    (folder / "config.json").write_text("{}")
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    names = {name: f"{stem}-{i:05d}-of-00003{suffix}" for i, name in enumerate(state, 1)}
    for name, shard in names.items():
        if suffix == ".bin":
            torch.save({name: state[name]}, folder / shard)
        else:
            safetensors.torch.save_file({name: state[name]}, folder / shard)
    if index:
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return state


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("dst", ["out", "out.pt", "out.safetensors"])
def test_a_set_is_one_checkpoint(dst: str, suffix: str, is_folder: bool, folder: Path) -> None:
    """A set is one checkpoint, given by its folder or its files. It becomes a set or one file, as the command writes
    it.
    """
    write_set(folder / "llama" if is_folder else folder, suffix)
    bridge = Bridge(str(folder))
    (path,) = bridge.checkpoints()
    assert path == "llama" if is_folder else path.startswith("FOLDER/") and path.endswith(".index.json")
    json.dumps(bridge.inspect(path))
    plan = bridge.plan(dst, {"strip_prefix": ["module."]})
    made = put_together(bridge, folder)
    assert main([*shlex.split(plan["command"])[1:], "-q"]) == 0
    there = Path(dst)
    written = {each.name: each.read_bytes() for each in (there.iterdir() if there.is_dir() else [there])}
    assert {each["name"]: data for each, data in zip(plan["files"], made, strict=True)} == written
    assert plan["folder"] == ("out" if dst == "out" else "") and len(made) == (4 if dst == "out" else 1)


def test_progress_is_reported(folder: Path) -> None:
    """The percentage of progress starts at 0, increases and stays below 100. The phases are in order."""
    torch.save({f"l{i}.w": torch.ones(1) for i in range(3000)}, "large.pt")
    safetensors.torch.save_file({f"l{i}.w": torch.ones(1) for i in range(3000)}, "large.safetensors")
    write_set(folder / "set", ".bin")
    for name, least in (("large.pt", 12), ("large.safetensors", 10), ("set", 9)):
        told: list[tuple[str, int]] = []
        Bridge(str(folder)).inspect(name, lambda *said, told=told: told.append(said))
        percents = [percent for _, percent in told]
        assert len(told) >= least and percents[0] == 0 and percents == sorted({*percents}) and percents[-1] < 100
        assert [phase for phase, _ in itertools.groupby(phase for phase, _ in told)] == [
            "Reading",
            "Checking",
            "Drawing",
        ]
        assert any(0 < percent < 50 for percent in percents)


def test_the_fix_of_a_set_is_one(folder: Path) -> None:
    """A set has one fix for all its shards, which is planned into a folder. A set without an index is named by its
    folder.
    """
    write_set(folder, ".safetensors", index=False)
    bridge = Bridge(str(folder))
    assert bridge.checkpoints() == ["FOLDER"]
    (fix,) = {each["fix"]["command"]: each["fix"] for each in bridge.inspect("FOLDER")["findings"]}.values()
    assert bridge.plan(fix["dst"], fix["options"])["command"] == fix["command"] and len(bridge.planned) == 4
    Path("FOLDER/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CkptconvError, match="1 of 3 shards is missing: model-00002-of-00003"):
        bridge.inspect(*bridge.checkpoints())


def test_more_than_two_files_are_refused(folder: Path) -> None:
    for name in "abc":
        torch.save({"w": torch.ones(1)}, f"{name}.pt")
    with pytest.raises(CkptconvError, match=r"got a\.pt, b\.pt, c\.pt.*ckptconv convert FOLDER OUT_FOLDER"):
        Bridge(str(folder)).checkpoints()


def test_a_url_as_output_is_refused(bridge: Bridge) -> None:
    bridge.inspect("ddp.pt")
    with pytest.raises(CkptconvError, match="a browser saves files on this machine"):
        bridge.plan("s3://bucket/x.pt", {})


def test_fixes_fill_the_form(bridge: Bridge) -> None:
    """The options of a fix fill the form. A plan with these options shows the command of the finding."""
    torch.save({"module.w": torch.ones(2), "opt": {"v": torch.ones(2)}}, "x.pt")
    assert main(["convert", "x.pt", "x.pt", "--map", "cpu=cuda:70", "-f", "-q"]) == 0
    for name in bridge.checkpoints():
        seen = bridge.inspect(name)
        json.dumps(seen)
        fixes = [each["fix"] for each in seen["findings"] if each["fix"]]
        assert fixes and "<html" in seen["page"]
        for fix in fixes:
            assert bridge.plan(fix["dst"], fix["options"])["command"] == fix["command"]
    assert _fix(command("convert", "a.pt", "b.pt", Option("rename", (("^a", "b"), ("c", ""))))) == {
        "command": "ckptconv convert a.pt b.pt --rename '^a' b --rename c ''",
        "dst": "b.pt",
        "options": {"rename": [["^a", "b"], ["c", ""]]},
    }


def test_the_verdict(bridge: Bridge) -> None:
    """The verdict says whether torch.load reads the file, and introduces the list of findings if there is one."""
    torch.save({"w": torch.ones(2)}, "plain.pt")
    torch.save({"w": torch.ones(2), "hook": print}, "hook.pt")
    assert bridge.inspect("plain.pt")["verdict"] == "torch.load takes it as it is."
    assert bridge.inspect("ddp.pt")["verdict"] == "torch.load takes it as it is. What was found:"
    assert bridge.inspect("hook.pt")["verdict"] == "torch.load refuses it as it is. What was found:"
    seen = replace(summary_of("ddp.pt"), loads_here=None)
    assert _verdict(seen, True) == "torch.load may refuse it. What was found:"


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_the_fix_of_a_dangerous_file(bridge: Bridge, folder: Path) -> None:
    """The fix of a dangerous file extracts its state dict, if it has one. A plan for the complete file is refused."""
    torch.save({"model": {"w": torch.ones(2), "b": torch.ones(3)}, "v": Harm()}, "x.pt")
    seen = bridge.inspect("x.pt")
    assert "posix.system" in seen["danger"][0] and seen["loads"] is False
    (finding,) = seen["findings"]
    bridge.plan(finding["fix"]["dst"], finding["fix"]["options"])
    Path("copy.pt").write_bytes(*put_together(bridge, folder))
    assert torch.load("copy.pt", weights_only=True).keys() == {"w", "b"}
    with pytest.raises(CkptconvError) as caught:
        bridge.plan("y.pt", {})
    assert "--" not in error_text(caught.value) and "take the state dict" in error_text(caught.value)
    torch.save([Harm()], "y.pt")
    assert bridge.inspect("y.pt")["findings"] == []
    assert bridge.inspect("y.pt")["verdict"] == "torch.load refuses it as it is."  # without an introduction to a list
    assert bridge.inspect("ddp.pt")["danger"] == []
    assert bridge.diff("x.pt", "ddp.pt")["dangers"][0].startswith("A: it contains posix.system")


def on_cuda(bridge: Bridge) -> None:
    assert main(["convert", "ddp.pt", "x.pt", "--to", "cuda:0", "--strip-prefix", "module.", "-q"]) == 0


def wrapped(bridge: Bridge) -> None:
    torch.save(torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2))).state_dict(), "x.pt")


def with_arguments(bridge: Bridge) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=0.1)}, "x.pt")


@pytest.mark.parametrize(("number", "write"), [*enumerate((on_cuda, wrapped, with_arguments))])
def test_the_errors_on_the_page_are_fixed(number: int, write: Any, bridge: Bridge, folder: Path) -> None:
    """torch raises each error that the page lists. The first fix for it makes the file loadable."""
    listed = re.findall("<dt><code>(.*)</code></dt>", (ROOT / "web" / "index.html").read_text("utf-8"))
    assert len(listed) == 3
    if number == 0 and torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def use(path: str) -> None:
        found = torch.load(path)
        if number == 1:
            torch.nn.Sequential(torch.nn.Linear(2, 2)).load_state_dict(found)

    write(bridge)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the texts are what is compared
        use("x.pt")
    for part in listed[number].split(" … "):
        assert part.partition(":")[0] in str(caught.value)
    fix = bridge.inspect("x.pt")["findings"][0]["fix"]
    bridge.plan(fix["dst"], fix["options"])
    Path("copy.pt").write_bytes(*put_together(bridge, folder))
    use("copy.pt")


def test_two_files_are_compared(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files are compared. Without torch, only headers and checksums are compared, and a note lists the limits."""
    torch.save({"module.w": torch.arange(6.0), "module.b": torch.zeros(2)}, "e.pt")
    assert bridge.checkpoints() == ["ddp.pt", "e.pt"]
    assert bridge.diff("ddp.pt", "ddp.pt")["same"]
    found = bridge.diff("ddp.pt", "e.pt")
    assert not found["same"] and found["note"] == "" and found["command"] == "ckptconv diff ddp.pt e.pt"

    def missing(*_: object) -> Any:
        raise MissingTorchError("torch is needed")

    monkeypatch.setattr("ckptconv.inspection.comparison.values.Values.comparer", missing)
    found = bridge.diff("ddp.pt", "e.pt")
    assert not found["same"] and "compared: values of 1 tensor (module.b), 1 the same, 0 not known" in found["note"]
    assert found["text"].startswith("names: ")
    with zoo.tagging(["cuda:0"]):
        torch.save({"module.w": torch.arange(6.0).half(), "module.b": torch.ones(1, 2)}, "e.pt")
    note = bridge.diff("ddp.pt", "e.pt")["note"]
    assert "dtype of 1 tensor (module.w), shape of 1 tensor (module.b), device of 2 tensors" in note


def test_bytes_are_compared_without_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are compared without threads and without ``preadv``, which a browser does not have. safetensors has
    no checksums, so the bytes are read.
    """
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({"w": torch.ones(50_000)}, name)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.delattr(os, "preadv")
    assert Bridge(str(folder)).diff("a.safetensors", "b.safetensors")["same"]


def test_a_plan_that_needs_torch_is_refused(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3).t()}, "view.pt")

    def missing(what: str, where: object) -> None:
        raise MissingTorchError(f"torch is needed for {what}", where=where)

    monkeypatch.setattr("ckptconv.conversion.plan.require_torch", missing)
    bridge.inspect("view.pt")
    with pytest.raises(MissingTorchError) as caught:
        bridge.plan("view.safetensors", {})
    assert error_text(caught.value).endswith("does it: ckptconv convert view.pt view.safetensors")


def test_errors_are_those_of_the_command_line(bridge: Bridge, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.pt").write_bytes(Path("ddp.pt").read_bytes()[:-200])
    with pytest.raises(CkptconvError) as caught:
        bridge.inspect("bad.pt")
    assert main(["inspect", "bad.pt"]) == 1
    assert error_text(caught.value) == capsys.readouterr().err.strip()
    assert "more memory than a browser gives" in error_text(RecursionError())
    assert error_text(KeyError("x")) == "ckptconv: a fault of this program: KeyError: 'x'"


def test_the_fields_of_the_form_are_options() -> None:
    """The fields of the form are keywords of ``ckptconv.plan``, except those that the page treats separately."""

    class Fields(html.parser.HTMLParser):
        names: set[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if name := dict(attrs).get("name"):
                self.names.add(name)

    parser = Fields()
    parser.names = set()
    parser.feed((ROOT / "web" / "index.html").read_text("utf-8").partition("<form")[2])
    others = {"dst", "suffix", "to", "map", "regex", "replacement"}
    assert parser.names - others == {*PlanOptions.__annotations__} - {
        "map_location", "rename", "dtype", "format", "allow_unsafe",
        "like", "model", "optimizer", "optimizer_order", "regroup", "reverse", "rules", "sizes"
    }  # fmt: skip
