"""A run of two processes that save distributed tensors, retag the files and load them again.

Usage: ``python -m tests.support.two_ranks RANK FOLDER``, once for each rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptconv
from tests.support.judge import assert_same

#: A tensor with five rows: three are on rank 0, and two are on rank 1.
WHOLE = torch.arange(15.0).reshape(5, 3)


def dtensors(mesh: DeviceMesh) -> dict[str, Any]:
    """Return a checkpoint like those of FSDP2 on each rank."""
    sharded = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
    return {
        "model": {
            "net.weight": sharded,
            "net.bias": distribute_tensor(torch.arange(3.0), mesh, [Replicate()]),
            "net.head": nn.Parameter(distribute_tensor(WHOLE * 2, mesh, [Shard(0)])),
            "steps": torch.ones(2),
        },
        "optimizer": {"state": {0: {"exp_avg": sharded * 3}}, "param_groups": [{"params": [0]}]},
    }


def parts(loaded: Any) -> Any:
    """Return `loaded` with each distributed tensor replaced by its parts, which can be compared."""
    if isinstance(loaded, dict):
        return {key: parts(value) for key, value in loaded.items()}
    if isinstance(loaded, sharded_tensor.ShardedTensor):
        return [loaded.size(), [(shard.tensor, shard.metadata) for shard in loaded.local_shards()], loaded.metadata()]
    if hasattr(loaded, "to_local"):
        return [type(loaded), loaded.shape, loaded.placements, loaded.device_mesh.device_type, loaded.to_local()]
    return loaded


def there_and_back(path: Path) -> tuple[Any, Any]:
    """Load the file at `path` with torch, and again after it was retagged to a GPU and back. Assert that both objects
    are equal, and return them.
    """
    away, back = path.with_suffix(".gpu.pt"), path.with_suffix(".back.pt")
    ckptconv.convert(path, away, map_location="cuda:1")
    ckptconv.convert(away, back, map_location="cpu")
    original = torch.load(path, weights_only=False)
    for loaded in (torch.load(away, weights_only=False, map_location="cpu"), torch.load(back, weights_only=False)):
        assert_same(parts(loaded), parts(original))
    return original, loaded


def main(rank: int, folder: Path) -> None:
    """Save, convert and load the files of `rank` in `folder`."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    checkpoint = dtensors(mesh)
    mesh._device_type = "cuda"  # as in a run on GPUs
    torch.save(checkpoint, folder / f"dtensor{rank}.pt")
    module = nn.Linear(3, 5, bias=False)
    module.weight = checkpoint["model"]["net.head"]
    torch.save(nn.Sequential(module), folder / f"module{rank}.pt")
    mesh._device_type = "cpu"
    _, loaded = there_and_back(folder / f"dtensor{rank}.pt")
    assert torch.equal(loaded["model"]["net.weight"].full_tensor(), WHOLE)
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"].full_tensor(), WHOLE * 3)
    assert loaded["model"]["net.weight"].to_local().shape == (3 - rank, 3)

    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    torch.save({"weight": sharded_tensor.rand(spec, 5, 3)}, folder / f"sharded{rank}.pt")
    _, loaded = there_and_back(folder / f"sharded{rank}.pt")
    assert isinstance(loaded["weight"], sharded_tensor.ShardedTensor)
    whole = torch.full((5, 3), -1.0) if rank == 0 else None
    loaded["weight"].gather(0, whole)
    assert whole is None or (whole >= 0).all()
    dist.barrier()  # no process ends while the other one still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # gloo's threads would abort an interpreter that shuts down if some still run
