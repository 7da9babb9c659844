"""Tests of changes in place of names in a DCP folder, which are stored only in ``.metadata``. The result is compared
with torch's reader.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptconv
from ckptconv.byteranges.undo_journal import DONE, HOT, journal_path, read_journal
from ckptconv.output import in_place as writing
from tests.support.conversions import refused_in_place
from tests.support.judge import assert_same
from tests.support.torn_writes import operations_of, torn_states
from tests.support.writers import ALONE, distributed

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")  # torch's warning that there is only one process

STATE = {
    "model": {f"module.layer{i}.weight": torch.arange(6.0).view(2, 3) + i for i in range(12)},
    "optimizer": {"state": {f"module.layer{i}.weight": {"exp_avg": torch.ones(2, 3) * i} for i in range(12)}},
    "history": [torch.ones(2), 5, "module.layer0.weight"],
    "epoch": 3,
}


def by_torch(folder: Path, tmp_path: Path) -> Any:
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    return torch.load(tmp_path / "torch.pt", weights_only=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    "edits",
    [{"strip_prefix": "module."}, {"rename": [("^module", "a.very.long.name")]}, {"unwrap": True}],
    ids=["shorter", "longer", "unwrap"],
)
@pytest.mark.parametrize("undone", ["folder", ".metadata"])
def test_names(tmp_path: Path, edits: dict[str, Any], undone: str) -> None:
    """torch reads the same objects from the changed folder as from a converted copy. Only ``.metadata`` changes."""
    folder = distributed(STATE, tmp_path / "dcp")
    before = contents(folder)
    ckptconv.convert(folder, tmp_path / "converted.pt", **edits)
    report = ckptconv.convert(folder, in_place=True, **edits)
    assert report.in_place.journal == str(journal_path(folder / ".metadata"))
    now = contents(folder)
    assert [name for name in before if now[name] != before[name]] == [".metadata"]
    assert_same(by_torch(folder, tmp_path), torch.load(tmp_path / "converted.pt"))
    assert ckptconv.diff(folder, tmp_path / "converted.pt").same and ckptconv.verify(folder).ok
    names = list(by_torch(folder, tmp_path)["model"])
    target = {"model": {name: torch.zeros(2, 3) for name in names}}
    dcp_of_torch.load(target, checkpoint_id=folder, **ALONE)
    assert_same(list(target["model"].values()), list(STATE["model"].values()))
    ckptconv.undo(folder if undone == "folder" else folder / ".metadata")
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["rows", "mesh", "files"])
def test_of_several_processes(ranks: Path, tmp_path: Path, name: str) -> None:
    """The names of a checkpoint of several processes are changed in ``.metadata``. If an optimizer's list of names is
    in another file, the change is refused.
    """
    folder = shutil.copytree(ranks / name, tmp_path / "dcp")
    before = contents(folder)
    edits: dict[str, Any] = {"rename": [("$", ".new")]}
    ckptconv.convert(folder, tmp_path / "converted.pt", **edits)
    if name == "rows":
        refused_in_place(ckptconv.UnsupportedError, "only the names of tensors", folder, **edits)
        return
    assert ckptconv.convert(folder, in_place=True, **edits).changes.names
    assert_same(by_torch(folder, tmp_path), torch.load(tmp_path / "converted.pt"))
    ckptconv.undo(folder)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("state", "edits", "words"),
    [
        ({"a": {"module.w": torch.ones(1)}}, {"map_location": "cuda"}, "only the names of tensors"),
        (
            {
                "model": {"module.w": torch.ones(1)},
                "optimizer": {
                    "state": {"module.w": {"step": torch.ones(1)}},
                    "param_groups": [{"lr": 0.1, "params": ["module.w"]}],
                },
            },
            {"strip_prefix": "module."},
            "only the names of tensors",
        ),
        ({"a": {"module.b": torch.ones(1)}, "a.b": torch.ones(2)}, {"strip_prefix": "module."}, "two items"),
    ],
    ids=["devices", "names in other files", "two of one name"],
)
def test_changes_of_other_files_are_refused(
    tmp_path: Path, state: dict[str, Any], edits: dict[str, Any], words: str
) -> None:
    folder = distributed(state, tmp_path / "dcp")
    refused_in_place(ckptconv.UnsupportedError, rf"{words}.*ckptconv\.convert\(.*OUT\)", folder, **edits)


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_no_torn_write_is_read_as_complete(tmp_path: Path, back: bool) -> None:
    """Power may fail at any write. torch's reader and ckptconv refuse every file that is neither the old nor the new
    one.
    """
    folder = distributed(STATE, tmp_path / "dcp")
    path = folder / ".metadata"
    old = path.read_bytes()
    ckptconv.convert(folder, in_place=True, rename=[("layer", "LAYER")])
    new = path.read_bytes()
    journal, state = read_journal(path, os.getuid())
    assert state == DONE
    path.write_bytes(new if back else old)
    function = writing.restore if back else writing.apply
    operations = operations_of(lambda fd: function(fd, journal), path)
    torn = set(torn_states(new if back else old, operations, random.Random(1), 8)) - {old, new}
    assert torn
    writing.mark_journal(path, HOT)
    for content in torn:
        path.write_bytes(content)
        with pytest.raises(Exception):  # noqa: B017, PT011 - pickle has several types for it
            FileSystemReader(folder).read_metadata()
        with pytest.raises(ckptconv.InputError, match=r"restore the old bytes: ckptconv\.undo\("):
            ckptconv.inspect(folder)
    ckptconv.undo(folder)
    assert path.read_bytes() == old
