"""Runs of several processes with FSDP2 load the output: DCP folders, and optimizers by names."""

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
    """FSDP2 loads a DCP folder with a model and its optimizer by names. The number of written ranks differs from the
    number of processes.
    """
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


_TAKE = """
import sys, torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
whole = StateDictOptions(full_state_dict=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
saved = torch.load(sys.argv[1], weights_only=True)
set_model_state_dict(model, saved["model"], options=whole)
set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=whole)
state = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
if dist.get_rank() == 0:
    assert state.keys() == saved["optimizer"]["state"].keys()
    for name, moments in saved["optimizer"]["state"].items():
        for key, value in moments.items():
            assert torch.equal(state[name][key], value), (name, key)
assert optimizer.param_groups[0]["lr"] == 0.01
losses = []
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.full((3, 4), step + 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.testing.assert_close(losses, torch.load(sys.argv[2]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("regrouped", [False, True])
def test_fsdp2_takes_an_optimizer_by_names(tmp_path: Path, regrouped: bool) -> None:
    """``set_optimizer_state_dict`` of two processes accepts the converted optimizer, and the next losses equal those of
    an uninterrupted single process. The input optimizer is keyed by numbers, and one of the models stores a weight in
    parts.
    """

    class Parted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 3) for _ in range(2 if regrouped else 0))
            self.first = torch.nn.Linear(4, 6) if not regrouped else None
            self.last = torch.nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x) if self.first else torch.cat([part(x) for part in self.parts], -1)
            return self.last(torch.tanh(first))  # type: ignore[no-any-return]

    torch.manual_seed(3)
    model = Parted()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def steps() -> list[float]:
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((3, 4), step + 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    steps()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
    torch.save(steps(), tmp_path / "losses.pt")
    ckptconv.convert(
        tmp_path / "train.pt",
        tmp_path / "names.pt",
        regroup="parts.0.*:1, parts.1.*:1 = 0.*" if regrouped else (),
        rename=() if regrouped else [("^first", "0"), ("^last", "2")],
        optimizer="names",
        optimizer_order="model",
    )
    if regrouped:
        ckptconv.convert(tmp_path / "names.pt", tmp_path / "names.pt", rename=[("^last", "2")], force=True)
    (tmp_path / "run.py").write_text(_TAKE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, str(tmp_path / "run.py"), str(tmp_path / "names.pt"), str(tmp_path / "losses.pt")]
    run = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
