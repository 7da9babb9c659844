"""What the page in the browser calls, in this Python: what it shows and plans is what the command line says."""

from __future__ import annotations

import html.parser
import io
import json
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ckptconv.cli.main import main
from ckptconv.conversion.options import PlanOptions
from ckptconv.errors import CkptconvError, InputError, MissingTorchError
from tests.support.paths import ROOT
from web.bridge import Bridge, DroppedFile, error_text


class Bytes(bytes):
    """What JavaScript's arrays of bytes offer to Python."""

    def to_bytes(self) -> bytes:
        return bytes(self)


class OnDisk:
    """A file of the browser; `fails` says why it cannot be read any more."""

    def __init__(self, path: Path) -> None:
        self.name, self.size, self._data = path.name, path.stat().st_size, path.read_bytes()
        self.fails = ""

    def read(self, offset: int, length: int) -> Any:
        return self.fails or Bytes(self._data[offset : offset + length])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.w": torch.arange(6.0), "module.b": torch.ones(2)}, "ddp.pt")


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
def test_a_plan_is_what_the_command_writes(options: dict[str, Any]) -> None:
    """The command is the one that is shown; what is planned are numbers, texts and bytes."""
    dst = "out.safetensors" if "copy_tied" in options else "out.pt"
    bridge = Bridge()
    bridge.inspect(OnDisk(Path("ddp.pt")))
    plan = bridge.plan(dst, options)
    data = Path("ddp.pt").read_bytes()
    parts = bridge.parts(lambda nbytes: None)
    made = b"".join(part if isinstance(part, bytes) else data[part[0] : sum(part)] for part in parts)
    assert main([*shlex.split(plan["command"])[1:], "-q"]) == 0
    assert made == Path(dst).read_bytes() and plan["size"] == len(made) and plan["report"].startswith(f"{dst}: ")
    json.dumps(plan)


def test_fixes_are_what_the_form_is_filled_with() -> None:
    """And planned with that, they are the command of inspect."""
    torch.save({"module.w": torch.ones(2), "opt": {"v": torch.ones(2)}}, "x.pt")
    assert main(["convert", "x.pt", "x.pt", "--map", "cpu=cuda:70", "-f", "-q"]) == 0
    bridge = Bridge()
    for name in ("x.pt", "ddp.pt"):
        seen = bridge.inspect(OnDisk(Path(name)))
        json.dumps(seen)
        fixes = [each["fix"] for each in seen["findings"] if each["fix"]]
        assert fixes and "<html" in seen["page"]
        for fix in fixes:
            assert bridge.plan(fix["dst"], fix["options"])["command"] == fix["command"]


def test_two_files_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is missing, by headers and checksums."""
    torch.save({"module.w": torch.arange(6.0), "module.b": torch.zeros(2)}, "b.pt")
    files = [OnDisk(Path(name)) for name in ("ddp.pt", "b.pt")]
    assert Bridge().diff(files[0], files[0])["same"]
    found = Bridge().diff(*files)
    assert not found["same"] and found["note"] == "" and found["command"] == "ckptconv diff ddp.pt b.pt"

    def missing(*_: object) -> Any:
        raise MissingTorchError("torch is needed")

    monkeypatch.setattr("ckptconv.inspection.comparison.values.Values.comparer", missing)
    found = Bridge().diff(*files)
    assert not found["same"] and "1 different (module.b), 1 the same, 0 not known" in found["note"]
    assert found["text"].startswith("names: ")


def test_bytes_are_compared_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser gives none: safetensors has no checksums, so what is large is read."""
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({"w": torch.ones(50_000)}, name)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert Bridge().diff(OnDisk(Path("a.safetensors")), OnDisk(Path("b.safetensors")))["same"]


def test_what_needs_torch_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3).t()}, "view.pt")

    def missing(what: str, where: object) -> None:
        raise MissingTorchError(f"torch is needed for {what}", where=where)

    monkeypatch.setattr("ckptconv.conversion.plan.require_torch", missing)
    bridge = Bridge()
    bridge.inspect(OnDisk(Path("view.pt")))
    with pytest.raises(MissingTorchError) as caught:
        bridge.plan("view.safetensors", {})
    assert error_text(caught.value).endswith("does it: ckptconv convert view.pt view.safetensors")


def test_errors_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.pt").write_bytes(Path("ddp.pt").read_bytes()[:-200])
    with pytest.raises(CkptconvError) as caught:
        Bridge().inspect(OnDisk(Path("bad.pt")))
    assert main(["inspect", "bad.pt"]) == 1
    assert error_text(caught.value) == capsys.readouterr().err.strip()
    assert "more memory than a browser gives" in error_text(RecursionError())
    assert error_text(KeyError("x")) == "ckptconv: a fault of this program: KeyError: 'x'"
    gone = OnDisk(Path("ddp.pt"))
    gone.fails = "the file was changed"
    with pytest.raises(InputError, match="the file was changed"):
        Bridge().inspect(gone)


def test_a_dropped_file_is_a_file_object() -> None:
    file = DroppedFile(OnDisk(Path("ddp.pt")))
    data = Path("ddp.pt").read_bytes()
    assert file.seek(-5, io.SEEK_END) == len(data) - 5 and file.read() == data[-5:] and file.read(3) == b""
    assert file.seek(1) == 1 and file.seek(2, io.SEEK_CUR) == file.tell() == 3 and file.read(2) == data[3:5]
    assert file.nread == 7


def test_the_fields_of_the_form_are_options() -> None:
    """Whatever the form has a field for, ``ckptconv.plan`` has a keyword for."""

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
        "map_location", "rename", "dtype", "format", "allow_unsafe"
    }  # fmt: skip
