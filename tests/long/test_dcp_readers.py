"""Runs of several processes load the DCP folders that are written here: FSDP2, whatever the number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckptconv

_RUN = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.load(state, checkpoint_id=sys.argv[1])
set_model_state_dict(model, state["model"])
set_optimizer_state_dict(model, optimizer, state["optimizer"])
saved = torch.load(sys.argv[2], weights_only=True)
for name, tensor in get_model_state_dict(model).items():
    assert torch.equal(tensor.full_tensor(), saved["model"][name]), name
for name, moments in get_optimizer_state_dict(model, optimizer)["state"].items():
    for key, value in saved["optimizer"]["state"][name].items():
        mine = moments[key]
        assert torch.equal(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, value), (name, key)
assert optimizer.param_groups[0]["lr"] == saved["optimizer"]["param_groups"][0]["lr"] == 1e-3
dist.destroy_process_group()
"""


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_fsdp2_loads_it(tmp_path: Path, processes: int, ranks: int) -> None:
    """A model and its optimizer by names, each tensor in parts of other sizes than those that the run has."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.save(state, tmp_path / "train.pt")
    ckptconv.convert(tmp_path / "train.pt", tmp_path / "dcp", format="dcp", ranks=ranks)
    (tmp_path / "run.py").write_text(_RUN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launch, str(tmp_path / "run.py"), str(tmp_path / "dcp"), str(tmp_path / "train.pt")]
    run = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
