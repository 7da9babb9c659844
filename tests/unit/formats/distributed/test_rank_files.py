"""Rank files that become one: what the processes of a real run saved, and what torch makes of the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from tests.support.rank_runs import WHOLE


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a run of four processes."""
    folder = tmp_path_factory.mktemp("runs")
    subprocess.run([sys.executable, "-m", "tests.support.rank_runs", folder], check=True, timeout=300)
    return folder


def bits(value: Any) -> Any:
    """`value`, its tensors as dtype, shape and bytes: their storages may be laid out in other ways."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous().clone()
        return value.dtype, value.shape, bytes(dense.untyped_storage())
    if isinstance(value, dict):
        return [(key, bits(inner)) for key, inner in value.items()]
    return [bits(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", ["spread", "sharded", "fsdp1", "fsdp2", "hsdp", "tp"])
def test_whole(name: str, runs: Path, tmp_path: Path) -> None:
    """Of all kinds of runs: what comes out is the whole state dict, bit for bit."""
    ckptconv.convert(runs / name, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert bits(loaded) == bits(torch.load(runs / f"{name}.{WHOLE}", weights_only=True))


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "tp"])
def test_optimizer(name: str, runs: Path, tmp_path: Path) -> None:
    """The optimizer's files stand beside the model's, and are asked for by their pattern."""
    ckptconv.convert(runs / name / "optim_world_size_4_rank_*.pt", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert bits(loaded) == bits(torch.load(runs / f"{name}.optim.{WHOLE}", weights_only=True))
