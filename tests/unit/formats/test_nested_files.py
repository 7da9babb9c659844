"""Checkpoints inside checkpoints. Files of torch.save in byte strings are found, and can be selected by their path."""

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
    """Return an object as skorch pickles it, with a file of weights in an attribute. Its class cannot be imported
    later.
    """
    module = types.ModuleType("skorch_like")
    cls = type("Net", (), {"__module__": module.__name__})
    monkeypatch.setattr(module, "Net", cls, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return cls()


def inner(size: int = 3, **options: Any) -> tuple[dict[str, Any], bytes]:
    """Return an object, and the bytes that torch saves for it."""
    obj = {"module_": torch.nn.Linear(size, 2).state_dict(), "epoch": 3}
    buffer = io.BytesIO()
    torch.save(obj, buffer, **options)
    return obj, buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("suffix", [".pkl", ".pt"])
def test_nested_checkpoint_is_named_and_selected(
    suffix: str, is_zip: bool, size: int, protocol: int, net: Any, tmp_path: Path
) -> None:
    """``inspect`` names the path of a nested checkpoint and the command that selects it. ``--select`` with this path
    writes a checkpoint, which torch loads as the saved object. Other edits can apply in the same step.
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


def test_other_archives_are_not_checkpoints(tmp_path: Path) -> None:
    """An archive without the pickle of a checkpoint is not reported as a checkpoint."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "x")
    torch.save({"doc": buffer.getvalue(), "w": torch.ones(1)}, tmp_path / "src.pt")
    assert not [each for each in ckptconv.inspect(tmp_path / "src.pt").findings if each.kind == "nested"]


def test_dangerous_and_damaged_nested_checkpoints_are_refused(tmp_path: Path) -> None:
    """A nested checkpoint that is dangerous or damaged is refused like any other file, and nothing is written."""
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
