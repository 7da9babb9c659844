"""Files that torch 2.6 and 2.15 wrote are converted, and the installed torch reads the outputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptconv
from tests.support import torch_facts, written
from tests.support.judge import assert_same
from tests.support.writers import ALONE

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.*", "ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*single process"),
]
VERSIONS = ("2.6", "2.15")


def test_versions_of_the_files() -> None:
    """The tests have files of the oldest and of the newest supported version."""
    assert {path.stem for path in written.FOLDER.iterdir()} == {*VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file(version: str, tmp_path: Path) -> None:
    """A converted file equals one that the installed torch writes, with both loaders. The verdict is that every version
    loads it.
    """
    src, dst, own = written.FOLDER / f"{version}.pt", tmp_path / "dst.pt", tmp_path / "own.pt"
    ckptconv.convert(src, dst, map_location="cpu")
    torch.save(written.state(), own)
    for weights_only in (True, False):
        assert_same(torch.load(own, weights_only=False), torch.load(dst, weights_only=weights_only))
    answers = ckptconv.verify(dst, torch="all").versions
    assert answers and {*answers.values()} == {"loads"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_folder(version: str, tmp_path: Path) -> None:
    """A DCP folder is converted to a file and to a folder that torch reads. torch before 2.15 cannot read the folder of
    2.15 itself.
    """
    src, dst, ours = written.FOLDER / f"{version}.dcp", tmp_path / "dst.pt", tmp_path / "ours"
    wanted = written.distributed_state()
    wanted["model"]["turned"] = wanted["model"]["turned"].contiguous()
    ckptconv.convert(src, dst)
    ckptconv.convert(src, ours, format="dcp")
    dcp_to_torch_save(ours, tmp_path / "theirs.pt")
    assert_same(torch.load(dst), wanted)
    assert_same(torch.load(tmp_path / "theirs.pt"), wanted)
    if version == "2.15" and torch_facts.version() < (2, 15):
        with pytest.raises(dcp.api.CheckpointException, match=r"too many values to unpack|metadata is None"):
            dcp_to_torch_save(src, tmp_path / "refused.pt")
    else:
        dcp_to_torch_save(src, tmp_path / "own.pt")
        assert_same(torch.load(tmp_path / "own.pt"), wanted)


def test_a_folder_of_ckptconv(tmp_path: Path) -> None:
    """torch's command and ``dcp.load`` read a DCP folder that was written for four ranks, without any difference."""
    src, folder, out = tmp_path / "x.pt", tmp_path / "folder", tmp_path / "out.pt"
    wanted = written.distributed_state()
    torch.save(wanted, src)
    ckptconv.convert(src, folder, format="dcp", ranks=4)
    command = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(folder), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    wanted["model"]["turned"] = wanted["model"]["turned"].contiguous()
    assert_same(torch.load(out), wanted)
    filled = {"model": {name: torch.empty_like(each) for name, each in wanted["model"].items()}, "epoch": 0, "name": ""}
    dcp.load(filled, checkpoint_id=folder, **ALONE)
    assert_same(filled, wanted)
