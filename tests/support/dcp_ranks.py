"""A run of four processes that save distributed tensors with torch.distributed.checkpoint into folders of FOLDER.

Usage: ``python dcp_ranks.py FOLDER``. The processes are forks of a process that has imported torch, because four
separate imports would take longer than everything else.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

RANKS = 4
#: Whether this torch can write the folders "own" and "hf". Older versions cannot.
HAS_OWN = "use_collectives" in inspect.signature(dcp.save).parameters
_HuggingFace: Any = getattr(dcp, "HuggingFaceStorageWriter", None)
HAS_HF = _HuggingFace is not None and "save_distributed" in inspect.signature(_HuggingFace).parameters
_GENERATOR = torch.Generator().manual_seed(7)


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=_GENERATOR)
    return numbers.to(torch.complex64).mul(1 + 2j) if dtype.is_complex else numbers.to(dtype)


#: Tensors that are distributed by rows. Ten rows over four processes are uneven. With two rows or one row, some
#: processes have none.
ROWS = {
    "model.embed.weight": _random(10, 6),
    "model.norm.weight": _random(10),
    "model.two.weight": _random(2, 3),
    "model.one.bias": _random(1),
    "model.half.weight": _random(9, 5, dtype=torch.bfloat16),
    "model.tiny.weight": _random(8, 2, dtype=torch.float8_e4m3fn),
    "model.waves": _random(5, 3, dtype=torch.complex64),
    "model.steps": torch.arange(7),
    "model.mask": torch.arange(11) % 3 == 0,
    "model.none": torch.empty(0, 4),
    "model.kernel": _random(6, 4, 3, 2).contiguous(memory_format=torch.channels_last),
}
#: Tensors that are distributed over a mesh of two by two processes, and their placements.
MESH: dict[str, tuple[torch.Tensor, tuple[Placement, Placement]]] = {
    "rows and columns": (_random(7, 9), (Shard(0), Shard(1))),
    "columns and rows": (_random(7, 9, dtype=torch.bfloat16), (Shard(1), Shard(0))),
    "columns": (_random(5, 8), (Replicate(), Shard(1))),
    "columns twice": (_random(3, 10), (Shard(1), Shard(1))),
    "rows twice": (_random(10, 3), (Shard(0), Shard(0))),
    "last of three": (_random(3, 4, 6, dtype=torch.float16), (Shard(2), Replicate())),
    "first and last of four": (_random(4, 2, 3, 5), (Shard(0), Shard(3))),
    "complex columns": (_random(4, 6, dtype=torch.complex64), (Replicate(), Shard(1))),
    "a column for one": (_random(6, 1), (Shard(0), Shard(1))),
    "everywhere": (_random(3, 3), (Replicate(), Replicate())),
    "transposed": (_random(8, 6).t(), (Shard(1), Shard(0))),
}
#: Tensors whose elements are not stored in row-major order. The safetensors library refuses to write them.
OUT_OF_ORDER = ("transposed", "model.kernel")
WHOLE = {
    "plain": _random(4, 3),
    "transposed": _random(5, 4).t(),
    "scalar": torch.tensor(2.5),
    "step": torch.tensor(3.0),
}
OTHERS: dict[str, Any] = {
    "epoch": 3,
    "name": "run 7",
    "lr": 1e-3,
    "nothing": None,
    "flags": [True, 2, "three"],
    "pair": (1, torch.arange(3)),
    "empty": [],
    "nested": {"deep": {"er": 1, "tensor": torch.ones(2)}},
    "list": [torch.zeros(2), {"a": torch.ones(1), "b": "text"}, 7],
    "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
}


def _spread(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Return `whole`, which every process has, distributed over `mesh` without communication."""
    replicated = DTensor.from_local(whole.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)


def rows(mesh: DeviceMesh) -> dict[str, Any]:
    """Return a checkpoint like those of FSDP: tensors distributed by rows, an optimizer, and values that are not
    tensors.
    """
    spread = {name: _spread(whole, mesh, (Shard(0),)) for name, whole in ROWS.items()}
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(RANKS)])
    old = sharded_tensor.zeros(spec, 6, 2)
    for shard in old.local_shards():
        shard.tensor.fill_(shard.metadata.shard_offsets[0] + 1)
    state = {name: {"step": torch.tensor(5.0), "exp_avg": tensor} for name, tensor in spread.items()}
    return {
        "state_dict": spread,
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(spread)}]},
        "old": old,
        **WHOLE,
        **OTHERS,
    }


def over_mesh(mesh: DeviceMesh) -> dict[str, DTensor]:
    """Return tensors that are distributed over both dimensions of `mesh`."""
    return {name: _spread(whole, mesh, placements) for name, (whole, placements) in MESH.items()}


def run(rank: int, folder: Path) -> None:
    """Save the checkpoints as the process `rank`."""
    warnings.simplefilter("ignore")  # torch warns about its own code
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    line = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dcp.save(rows(line), checkpoint_id=folder / "rows")
    dcp.save(over_mesh(square), checkpoint_id=folder / "mesh")
    dcp.save(over_mesh(square), storage_writer=FileSystemWriter(folder / "files", single_file_per_rank=False))
    dcp.save(rows(line), storage_writer=FileSystemWriter(folder / "threads", thread_count=2))
    if HAS_OWN:
        dcp.save(rows(line)["state_dict"], checkpoint_id=folder / "own", use_collectives=False)
    in_order = {**over_mesh(square), **rows(line)["state_dict"]}
    plain = {name: in_order[name] for name in in_order if name not in OUT_OF_ORDER}
    if HAS_HF:
        dcp.save(plain, storage_writer=_HuggingFace(str(folder / "hf"), save_distributed=True))
    dist.barrier()
    dist.destroy_process_group()


def run_all(run: Callable[[int, Path], object], folder: Path, ranks: int = RANKS) -> int:
    """Call `run` in `ranks` processes, each with its rank and `folder`. Return the number of processes that fail."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            status = 1
            try:
                run(rank, folder)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(run_all(run, Path(sys.argv[1])))
