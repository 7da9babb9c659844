"""Training runs of DeepSpeed on the CPU, each of which saves a ZeRO checkpoint.

Usage: ``python -m torch.distributed.run --nproc_per_node RANKS tests/support/zero_runs.py FOLDER CASE...``. The program
requires DeepSpeed but no module of this project, so that it can run in a separate environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

_BF16 = {"bf16": {"enabled": True}}
#: The configuration of each case: ``zero_optimization`` as ``zero``, and other keys of DeepSpeed. Keys that are not
#: DeepSpeed's are under ``run``.
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"zero": {"stage": 1}, **_BF16},
    "stage1-fp32": {"zero": {"stage": 1}},
    "stage1-frozen": {"zero": {"stage": 1}, **_BF16, "run": {"frozen": True}},
    "stage2": {"zero": {"stage": 2}, **_BF16},
    "stage2-fp32": {"zero": {"stage": 2}},
    "stage2-frozen": {"zero": {"stage": 2}, **_BF16, "run": {"frozen": True, "groups": 2}},
    "stage2-roundrobin": {"zero": {"stage": 2, "round_robin_gradients": True}, **_BF16, "run": {"groups": 2}},
    "stage2-elastic": {"zero": {"stage": 2, "elastic_checkpoint": True}, **_BF16, "run": {"groups": 2}},
    "stage2-aligned": {"zero": {"stage": 2, "parameter_alignment": True}, **_BF16, "run": {"groups": 2}},
    "stage2-offload": {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **_BF16},
    "stage2-fp32-roundrobin": {"zero": {"stage": 2, "round_robin_gradients": True}, "run": {"groups": 2}},
    "stage2-fp32-elastic": {"zero": {"stage": 2, "elastic_checkpoint": True}, "run": {"groups": 2}},
    "stage3": {"zero": {"stage": 3}, **_BF16},
    "stage3-fp32": {"zero": {"stage": 3}},
    "stage3-subgroups": {"zero": {"stage": 3, "sub_group_size": 40}, **_BF16, "run": {"groups": 2}},
    "stage3-frozen": {"zero": {"stage": 3}, **_BF16, "run": {"frozen": True, "groups": 2}},
    "stage3-offload": {
        "zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        **_BF16,
    },
    "bf16-optimizer": {
        "zero": {"stage": 1},
        **_BF16,
        "data_types": {"grad_accum_dtype": "fp32"},
        "run": {"groups": 2},
    },
    "sgd": {"zero": {"stage": 2}, **_BF16, "run": {"optimizer": "sgd"}},
    "large": {"zero": {"stage": 2}, **_BF16, "run": {"large": True}},
    "large3": {"zero": {"stage": 3}, **_BF16, "run": {"large": True}},
}


class Net(nn.Module):
    """A model with odd sizes, a tie and buffers of two dtypes."""

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(5) % 2)
        self.register_buffer("shift", torch.arange(5.0) / 3)
        self.big = nn.ParameterList(nn.Parameter(torch.zeros(4096, 4099)) for _ in range(16)) if large else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.down(torch.tanh(self.up(x)) * self.scale) + self.shift.to(x.dtype)
        if self.big is not None:
            x = x + sum(each[0, 0] for each in self.big)
        out: torch.Tensor = self.head(x)
        return out


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Return the loss of one step. All processes have the same batch, so the mean over them equals the loss of one
    process.
    """
    tokens = (torch.arange(6) * (step + 3)) % 11
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.float(), (tokens + 1) % 11)


def groups_of(net: Net, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups. With two groups, their order is not the model's."""
    if run.get("frozen"):
        net.up.weight.requires_grad_(False)
        net.down.weight.requires_grad_(False)
    named = [(name, each) for name, each in net.named_parameters() if each.requires_grad]
    if run.get("groups") != 2:
        return [{"params": [each for _, each in named], "lr": 1e-2}]
    second = [each for name, each in named if "bias" in name or name == "scale"]
    first = [each for name, each in named if not ("bias" in name or name == "scale")]
    return [{"params": second, "lr": 3e-2, "weight_decay": 0.0}, {"params": first, "lr": 1e-2}]


def train(case: str, folder: Path) -> None:
    """Train for three steps, save a checkpoint, train for two more steps, and save their losses."""
    import deepspeed  # type: ignore[import-not-found]

    given = dict(CASES[case])
    run = given.pop("run", {})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": given.pop("zero"),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **given,
    }
    net = Net(bool(run.get("large")))
    if run.get("optimizer") == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups_of(net, run), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(groups_of(net, run), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
    engine.save_checkpoint(str(folder / case), client_state={"epoch": 3, "sampler": {"seed": 7}})
    losses = []
    for step in range(3, 5):
        loss = loss_of(engine, step)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    if torch.distributed.get_rank() == 0:
        torch.save(losses, folder / f"{case}.losses.pt")
    engine.destroy()


def main(folder: Path, cases: list[str]) -> None:
    """Save the checkpoints of `cases` in `folder`."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    for case in cases:
        train(case, folder)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            print("saved", case, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [case for case in CASES if not case.startswith("large")])
    os._exit(0)
