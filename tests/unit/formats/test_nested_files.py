"""Checkpoints inside checkpoints: files of torch.save in byte strings are named, and taken out by their path."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from tests.support.judge import assert_same
from tests.support.reduced import Reduced


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object as skorch pickles one, whose weights are a file in an attribute; its class cannot be imported later."""
    module = types.ModuleType("skorch_like")
    cls = type("Net", (), {"__module__": module.__name__})
    monkeypatch.setattr(module, "Net", cls, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return cls()


def inner(size: int = 3, **options: Any) -> tuple[dict[str, Any], bytes]:
    """What torch saves, and the bytes."""
    obj = {"module_": torch.nn.Linear(size, 2).state_dict(), "epoch": 3}
    buffer = io.BytesIO()
    torch.save(obj, buffer, **options)
    return obj, buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("suffix", [".pkl", ".pt"])
def test_it_is_named_and_taken_out(
    suffix: str, is_zip: bool, size: int, protocol: int, net: Any, tmp_path: Path
) -> None:
    """``inspect`` names its path and the command; ``--select`` with that path makes a checkpoint of it, which torch
    loads as what was saved, and takes a part of it in the same step.
    """
    src, dst = tmp_path / f"src{suffix}", tmp_path / "dst.pt"
    obj, net.weights = inner(size, _use_new_zipfile_serialization=is_zip)
    net.note, path = b"no file", ".weights" if suffix == ".pkl" else "net/.weights"
    if suffix == ".pkl":
        src.write_bytes(pickle.dumps(net, protocol))
    else:
        torch.save({"net": net, "w": torch.ones(1)}, src, pickle_protocol=protocol)
    found = [each for each in ckptconv.inspect(src).findings if each.kind == "nested"]
    assert [each.text.split(" contains a checkpoint")[0] for each in found] == [path]
    assert found[0].command and found[0].command.endswith(f"--select {path}")
    report = ckptconv.convert(src, dst, select=path)
    assert any(f"the byte string at {path}" in note for note in report.notes)
    assert_same(obj, torch.load(dst))
    assert_same(obj, ckptconv.load(src, select=path))
    ckptconv.convert(src, dst, select=path, state_dict=True, map_location="cuda:1", force=True)
    assert_same(obj["module_"], torch.load(dst, map_location="cpu"))


def test_other_archives_are_none(tmp_path: Path) -> None:
    """An archive without a checkpoint's pickle is not called one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "x")
    torch.save({"doc": buffer.getvalue(), "w": torch.ones(1)}, tmp_path / "src.pt")
    assert not [each for each in ckptconv.inspect(tmp_path / "src.pt").findings if each.kind == "nested"]


def test_what_is_dangerous_inside_is_refused(tmp_path: Path) -> None:
    """Taken out it would be loaded, so it is judged as any file; so is one that is damaged. Nothing is written."""
    buffer = io.BytesIO()
    torch.save({"a": Reduced(os.mkdir, (str(tmp_path / "marker"),)), "w": torch.ones(1)}, buffer)
    damaged = inner()[1]
    torch.save(
        {"bad": buffer.getvalue(), "cut": damaged[:200] + damaged[300:], "w": torch.ones(1)}, tmp_path / "src.pt"
    )
    for path, error in (("bad", ckptconv.DangerousError), ("cut", ckptconv.InputError)):
        with pytest.raises(error):
            ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.pt", select=path, allow_unsafe=path == "cut")
    assert [each.name for each in tmp_path.iterdir()] == ["src.pt"]
