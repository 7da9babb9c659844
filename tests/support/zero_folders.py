"""Small checkpoints in the format of DeepSpeed ZeRO, written without DeepSpeed.

The pickles name the same globals as those of DeepSpeed, because modules with these names replace DeepSpeed's while they
are written. ``tests/long/test_zero_runs.py`` compares these folders with DeepSpeed's own.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

TAG = "global_step3"
_ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_MOMENTS = ("exp_avg", "exp_avg_sq")


@contextmanager
def deepspeed_modules() -> Iterator[tuple[Any, Any, Any]]:
    """Yield the classes ``ZeroStageEnum``, ``LossScaler`` and ``fragment_address`` under DeepSpeed's names."""
    values = ("disabled", "optimizer_states", "gradients", "weights")
    stage: Any = enum.Enum("ZeroStageEnum", {name: i for i, name in enumerate(values)})  # type: ignore[misc]
    scaler = type("LossScaler", (), {})
    address: Any = namedtuple("fragment_address", ["numel", "start"])  # type: ignore[name-match]
    modules: dict[str, Any] = {
        "deepspeed.runtime.zero.config": stage,
        "deepspeed.runtime.fp16.loss_scaler": scaler,
        "deepspeed.utils.tensor_fragment": address,
    }
    made: dict[str, Any] = {}
    for name, cls in modules.items():
        cls.__module__ = name
        cls.__qualname__ = cls.__name__
        for i in range(1, name.count(".") + 2):
            above = ".".join(name.split(".")[:i])
            made.setdefault(above, types.ModuleType(above))
        setattr(made[name], cls.__name__, cls)
    with mock.patch.dict(sys.modules, made):
        yield stage, scaler, address


class Saved(NamedTuple):
    """The contents of a run: weights and moments in fp32 by name, the names of each group, buffers, ties, and frozen
    weights.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    groups: list[list[str]]
    buffers: dict[str, torch.Tensor]
    shared: dict[str, str]
    frozen: dict[str, torch.Tensor]


def a_run(*, groups: int = 1, frozen: bool = False) -> Saved:
    """Return a run with weights of odd sizes, which no number of ranks divides evenly."""
    torch.manual_seed(1)
    shapes = {"embed.weight": (11, 5), "up.weight": (7, 5), "up.bias": (7,), "scale": (1,), "down.weight": (5, 7)}
    still = {name: torch.randn(shapes.pop(name)).bfloat16() for name in ("up.weight", "down.weight") if frozen}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {key: {name: torch.rand(shape) for name, shape in shapes.items()} for key in _MOMENTS}
    names = [*weights]
    split = [names] if groups == 1 else [names[1::2], names[::2]]
    buffers = {"mask": torch.arange(5) % 2, "shift": torch.arange(5.0) / 3}
    return Saved(weights, moments, split, buffers, {"head.weight": "embed.weight"}, still)


class Files(NamedTuple):
    """The contents of the files: model states and optimizer states of each rank."""

    models: list[dict[str, Any]]
    optims: list[dict[str, Any]]


def write_zero(  # noqa: PLR0913 - each is a property of a run
    folder: Path,
    run: Saved | None = None,
    *,
    stage: int = 2,
    ranks: int = 2,
    aligned: bool = False,
    elastic: bool = False,
    bf16_optimizer: bool = False,
    round_robin: bool = False,
    sub_group: int = 1 << 30,
    client: dict[str, Any] | None = None,
    tag: str = TAG,
    change: Callable[[Files], None] = lambda files: None,
    **save: Any,
) -> Path:
    """Write a checkpoint of `run` to `folder`, and return `folder`. `change` can change its contents before they are
    saved.
    """
    run = run or a_run()
    with deepspeed_modules() as (stages, scaler, address):
        config = {"zero_optimization": {"stage": stage, "round_robin_gradients": round_robin}}
        order = [_dealt(names, ranks) if round_robin else names for names in run.groups]
        models = [_model(run, order, stage, rank, ranks, config, client or {}) for rank in range(ranks)]
        if stage == 3:
            optims = [_stage_3(run, rank, ranks, sub_group) for rank in range(ranks)]
        else:
            optims = _stage_2(run, order, ranks, 8 if aligned else 1, address, cut=not bf16_optimizer)
        for optim in optims:
            if not bf16_optimizer:
                optim |= {"zero_stage": stages(stage), "loss_scaler": scaler(), "overflow": False}
            if elastic:
                state = optim["base_optimizer_state"]["state"]
                flats = optim["single_partition_of_fp32_groups"]
                optim["base_optimizer_state"] = [
                    {key: value[: flats[i].numel()] if value.dim() else value for key, value in state[i].items()}
                    for i in range(len(flats))
                ]
        files = Files(models, [{"optimizer_state_dict": optim, "ds_version": "0.19.8"} for optim in optims])
        change(files)
        (folder / tag).mkdir(parents=True, exist_ok=True)
        (folder / "latest").write_text(tag)
        for rank, model in enumerate(files.models[: None if stage == 3 else 1]):
            name = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(model, folder / tag / f"{name}mp_rank_00_model_states.pt", **save)
        for rank, optim in enumerate(files.optims):
            torch.save(optim, folder / tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", **save)
    return folder


def _dealt(names: list[str], ranks: int) -> list[str]:
    return [name for rank in range(ranks) for name in names[rank::ranks]]


def _model(
    run: Saved, order: list[list[str]], stage: int, rank: int, ranks: int, config: Any, client: dict[str, Any]
) -> dict[str, Any]:
    """Return the model states of one rank."""
    every = {**run.weights, **run.frozen}
    module = OrderedDict((name, tensor.bfloat16()) for name, tensor in every.items())
    if stage == 3:
        module = OrderedDict((name, torch.zeros(0, dtype=torch.bfloat16)) for name in every)
    module.update(run.buffers)
    module.update((name, module[holder]) for name, holder in run.shared.items())
    module._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    parts = {name: _share(tensor, rank, ranks) if stage == 3 else tensor for name, tensor in run.frozen.items()}
    return {
        "module": module,
        "buffer_names": [*run.buffers],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, run.weights[name].shape) for name in names) for names in order],
        "frozen_param_shapes": OrderedDict((name, each.shape) for name, each in run.frozen.items())
        if stage > 1
        else None,
        "shared_params": run.shared if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(parts) if stage > 1 else None,
        "lr_scheduler": {"last_epoch": 3},
        "skipped_steps": 0,
        "global_steps": 3,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": config,
        "ds_version": "0.19.8",
        **client,
    }


def _share(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of `tensor` that `rank` stores at stage 3, with padding."""
    flat = tensor.reshape(-1)
    each = -(-flat.numel() // ranks)
    return torch.cat([flat, flat.new_zeros(each * ranks - flat.numel())])[rank * each : (rank + 1) * each].clone()


def _optimizer(flats: dict[str, list[torch.Tensor]], groups: list[list[int]]) -> dict[str, Any]:
    """Return the state of torch's AdamW for the flat tensors `flats`."""
    number = len(next(iter(flats.values())))
    return {
        "state": {
            i: {"step": torch.tensor(3.0), **{key: each[i] for key, each in flats.items()}} for i in range(number)
        },
        "param_groups": [{**_ADAMW, "params": numbers} for numbers in groups],
    }


def _stage_3(run: Saved, rank: int, ranks: int, sub_group: int) -> dict[str, Any]:
    """Return the optimizer states of one rank at stage 3."""
    subs: list[list[str]] = []
    groups: list[list[int]] = []
    for names in run.groups:
        groups.append([])
        for name in names:
            if not groups[-1] or sum(-(-run.weights[each].numel() // ranks) for each in subs[-1]) >= sub_group:
                groups[-1].append(len(subs))
                subs.append([])
            subs[-1].append(name)

    def flat(values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([_share(values[name], rank, ranks) for name in names]) for names in subs]

    return {
        "partition_count": ranks,
        "optimizer_state_dict": _optimizer({key: flat(each) for key, each in run.moments.items()}, groups),
        "fp32_flat_groups": flat(run.weights),
    }


def _stage_2(
    run: Saved, order: list[list[str]], ranks: int, alignment: int, address: Any, *, cut: bool
) -> list[dict[str, Any]]:
    """Return the optimizer states of all ranks at stages 1 and 2. If `cut` is true, the fp32 weights have no
    padding.
    """
    gaps = []
    for names in order:
        sizes = [run.weights[name].numel() for name in names]
        gaps.append([-size % alignment for size in sizes[:-1]] + [0])
    parts: list[dict[str, Any]] = [
        {"paddings": [], "fp32": [], **{key: [] for key in run.moments}} for _ in range(ranks)
    ]
    for names, gap in zip(order, gaps, strict=True):
        for key, values in {"fp32": run.weights, **run.moments}.items():
            pieces = [each for n, g in zip(names, gap, strict=True) for each in (values[n].reshape(-1), torch.zeros(g))]
            flat = torch.cat(pieces)
            size = -(-flat.numel() // (2 * ranks)) * 2
            whole = torch.cat([flat, torch.zeros(size * ranks - flat.numel())])
            for rank, part in enumerate(parts):
                padding = min(size, max(0, size * (rank + 1) - flat.numel()))
                end = size - padding if key == "fp32" and cut else size
                part[key].append(whole.narrow(0, rank * size, end))
                if key == "fp32":
                    part["paddings"].append(padding)
    made = []
    for part in parts:
        numbers = [[i] for i in range(len(order))]
        state = {
            "base_optimizer_state": _optimizer({key: part[key] for key in run.moments}, numbers),
            "single_partition_of_fp32_groups": part["fp32"],
            "group_paddings": part["paddings"],
            "partition_count": [ranks] * len(order),
            "param_slice_mappings": [OrderedDict({name: address(1, 0) for name in names}) for names in order],
        }
        made.append(state | ({"param_alignment_paddings": gaps} if cut else {}))
    return made


def quantized(files: Files) -> None:
    """Add a scale for each block of the moments, as 8-bit optimizers do."""
    for optim in files.optims:
        fields = optim["optimizer_state_dict"]
        state = fields.get("base_optimizer_state") or fields["optimizer_state_dict"]
        state["state"][0]["absmax1"] = torch.ones(3)
