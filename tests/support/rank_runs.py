"""A run of several processes, each of which saves its state dict with torch.save in folders of FOLDER.

Usage: ``python -m tests.support.rank_runs FOLDER [RANKS]``. The default is four processes. The first process also saves
the complete state dicts.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckptconv
from tests.support.dcp_ranks import MESH, RANKS, ROWS, run_all

WHOLE = "whole.pt"
#: The folders that a run with any number of processes writes for a model.
MODELS = ("fsdp2", "hsdp", "tp", "fsdp1", "fsdp1 of DTensors", "fsdp1 hybrid")
#: Tensors that are distributed over two dimensions of processes. For some tensors, a process has several strips.
WITH_STRIPS: dict[str, tuple[torch.Tensor, tuple[Placement, ...]]] = {
    **MESH,
    "strips": (torch.arange(33.0).reshape(11, 3), (Replicate(), _StridedShard(0, split_factor=3))),
    "strips of columns": (torch.arange(36).reshape(3, 12), (_StridedShard(1, split_factor=2), Shard(0))),
}


class Tiny(nn.Module):
    """A model with uneven sizes, a tied weight and buffers, one of which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.down(self.up(self.embed(x)))))
        return out


def save(state: Any, folder: Path, name: str = "model") -> None:
    """Save the `state` of this rank in `folder`."""
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"{name}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def save_as_ranks(whole: dict[str, Any], folder: Path, name: str = "model", world: int = 2) -> None:
    """Save `whole` as `world` processes of FSDP2 would: each rank file contains rows of each tensor, and all other
    values.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir(exist_ok=True)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (world,))
            state = {
                key: DTensor.from_local(
                    _rows(value, rank, world), mesh, [Shard(0)], shape=value.shape, stride=value.stride()
                )
                if isinstance(value, torch.Tensor) and value.dim()
                else value
                for key, value in whole.items()
            }
            torch.save(state, folder / f"{name}_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def _rows(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the rows of `whole` that `rank` contains, of `world` ranks."""
    each = -(-len(whole) // world)
    return whole[min(rank * each, len(whole)) : (rank + 1) * each].clone()


def save_whole(state: Any, folder: Path) -> None:
    """Save the complete `state` next to `folder`, by the first rank."""
    state = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    if dist.get_rank() == 0:
        torch.save(state, folder.with_name(f"{folder.name}.{WHOLE}"))


def spread(folder: Path, mesh: DeviceMesh) -> None:
    """Save tensors of many sizes, dtypes and placements."""
    line = init_device_mesh("cpu", (RANKS,))
    state: dict[str, Any] = {
        name: distribute_tensor(whole.clone(), line, [Shard(0)], src_data_rank=None) for name, whole in ROWS.items()
    }
    for name, (whole, placements) in WITH_STRIPS.items():
        state[name] = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    state["scalar"] = distribute_tensor(torch.tensor(2.5), line, [Replicate()], src_data_rank=None)
    plain = torch.arange(6.0).reshape(2, 3).t()
    tied = "model.embed.weight"
    save({**state, "tied": state[tied], "plain": plain}, folder / "spread")
    wholes = {**ROWS, **{name: whole for name, (whole, _) in WITH_STRIPS.items()}, "scalar": torch.tensor(2.5)}
    save_whole({**wholes, "tied": ROWS[tied], "plain": plain}, folder / "spread")  # gloo does not gather float8


def fsdp2(folder: Path, mesh: DeviceMesh, name: str) -> None:
    """Save a model and an optimizer of FSDP2.

    The model is sharded over a 1-D `mesh`, over both dimensions (HSDP), or with tensor parallelism (2-D), by `name`.
    """
    model = Tiny()
    if name == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        for inner in (model.up, model.down):
            fully_shard(inner, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    model(torch.arange(10) % 7).sum().backward()
    optimizer.step()
    state = model.state_dict()
    save(state, folder / name)
    save_whole(state, folder / name)
    inner_state = get_optimizer_state_dict(model, optimizer)
    save(inner_state, folder / name, "optim")
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(model, optimizer, options=options), get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(full[0], folder / f"{name}.optim.{WHOLE}")
        torch.save(full[1], folder / f"{name}.full.{WHOLE}")
    extra = {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.full((9,), dist.get_rank(), dtype=torch.uint8)}}
    save(extra, folder / name, "extra_state")


def fsdp1(folder: Path, name: str, mesh: DeviceMesh | None = None) -> None:
    """Save a model of FSDP1 as SHARDED_STATE_DICT.

    With a `mesh`, its tensors are DTensors. Without one, the model is also saved as LOCAL_STATE_DICT, which is flat.
    """
    kinds = {StateDictType.SHARDED_STATE_DICT: name}
    given: dict[str, Any] = {"device_id": torch.device("cpu")}
    if mesh is None:
        kinds[StateDictType.LOCAL_STATE_DICT] = "flat"
    else:
        strategy = ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
        given |= {"device_mesh": mesh, "sharding_strategy": strategy}
    model = FullyShardedDataParallel(Tiny(), use_orig_params=True, **given)
    for kind, each in kinds.items():
        with FullyShardedDataParallel.state_dict_type(model, kind):
            save(model.state_dict(), folder / each)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        save_whole(model.state_dict(), folder / name)


def sharded(folder: Path) -> None:
    """Save ShardedTensors of rows and of columns. The last rank has no part of either."""
    state = {}
    whole = torch.rand(6, 5, generator=torch.Generator().manual_seed(9))
    for dim, name in enumerate(("rows", "columns")):
        spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in range(RANKS)])
        state[name] = sharded_tensor.zeros(spec, 6, 5)
        for shard in state[name].local_shards():
            index = (
                slice(n, n + m) for n, m in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            )
            shard.tensor.copy_(whole[tuple(index)])
    save(state, folder / "sharded")
    save_whole(dict.fromkeys(state, whole), folder / "sharded")


def run(world: int, rank: int, folder: Path) -> None:
    """Save all checkpoints as the process `rank` of `world` processes."""
    warnings.simplefilter("ignore")  # torch warns about its own code
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    line = init_device_mesh("cpu", (world,))
    fsdp2(folder, line, "fsdp2")
    fsdp1(folder, "fsdp1")
    fsdp1(folder, "fsdp1 of DTensors", line)
    inner = 1 if world % 2 else 2
    grid = init_device_mesh("cpu", (inner, world // inner), mesh_dim_names=("ddp", "fsdp"))
    fsdp2(folder, grid, "hsdp")
    fsdp1(folder, "fsdp1 hybrid", grid)
    square = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("dp", "tp"))
    fsdp2(folder, square, "tp")
    if world == RANKS:
        spread(folder, square)
        sharded(folder)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(folder: Path, ranks: int = RANKS) -> Path:
    """Run `ranks` processes that save their files in `folder`, and return `folder`."""
    subprocess.run([sys.executable, "-m", __name__, folder, str(ranks)], check=True, timeout=300)
    return folder


def bits(value: Any) -> Any:
    """Return `value` with tensors as dtype, shape and bytes, because the layouts of their storages can differ."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous().clone()
        return value.dtype, value.shape, bytes(dense.untyped_storage())
    if isinstance(value, dict):
        return [(key, bits(inner)) for key, inner in value.items()]
    return [bits(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def assert_merged(folder: Path, out: Path) -> None:
    """Assert that the rank files of a model in `folder` become the complete state dict, and that the plain model loads
    it.
    """
    ckptconv.convert(folder, out)
    loaded = torch.load(out, weights_only=True)
    for name in (WHOLE, f"full.{WHOLE}"):
        whole = folder.with_name(f"{folder.name}.{name}")
        if whole.exists() or name == WHOLE:
            assert bits(loaded) == bits(torch.load(whole, weights_only=True))
    model = Tiny()
    torch.nn.init.zeros_(model.embed.weight)
    model.load_state_dict(loaded, strict=True)
    assert bits(dict(model.state_dict())) == bits(dict(loaded))
    assert model.head.weight is model.embed.weight


def assert_merged_optimizer(folder: Path, ranks: int, out: Path) -> None:
    """Assert that the rank files of the optimizer in `folder` become the complete state dict of the optimizer."""
    ckptconv.convert(folder / f"optim_world_size_{ranks}_rank_*.pt", out)
    whole = torch.load(folder.with_name(f"{folder.name}.optim.{WHOLE}"), weights_only=True)
    assert bits(torch.load(out, weights_only=True)) == bits(whole)


if __name__ == "__main__":
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else RANKS
    sys.exit(run_all(partial(run, ranks), Path(sys.argv[1]), ranks))
