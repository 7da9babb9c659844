"""The programs of the benchmarks: ckptconv, and programs that do the same with torch, safetensors or the shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TENSORS = 300
COPY = 'cp "$1" "$2" && sync "$2"'
COPY_FOLDER = 'rm -rf "$2" && cp -r "$1" "$2" && sync -f "$2"'
CLEAR = 'folder="$1"; rm -rf "$folder"; mkdir "$folder"; shift; "$@" && sync -f "$folder"'
PEAK = "\nprint(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
CKPTCONV = """
try:
    import ckptconv.__main__  # the command line, of old versions too
except SystemExit as ended:
    assert ended.code in (None, 0), ended.code
"""
CKPTCONV_DIFF = CKPTCONV.replace("(None, 0)", "(0, 1)")  # exit status 1 means that the files differ
WRITE_SMALL = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
def write(name):
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        data = file.read()
    path = os.path.join(sys.argv[2], name)
    with open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)
with ThreadPoolExecutor(32) as pool:
    list(pool.map(write, os.listdir(sys.argv[1])))
"""
TORCH = """
import os, sys, torch
checkpoint = torch.load(sys.argv[1], map_location="cpu", mmap=sys.argv[3] == "mmap")
torch.save({name.removeprefix("module."): tensor for name, tensor in checkpoint.items()}, sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
TORCH_MANY = """
import os, sys, torch
torch.save(torch.load(sys.argv[1], map_location="cpu"), sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
TO_SAFETENSORS = """
import os, sys, torch
from safetensors.torch import save_file
checkpoint = torch.load(sys.argv[1], map_location="cpu", mmap=True)
save_file({name.removeprefix("module."): tensor.contiguous() for name, tensor in checkpoint.items()}, sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
FROM_SAFETENSORS = """
import os, sys, torch
from safetensors.torch import load_file
torch.save({f"module.{name}": tensor for name, tensor in load_file(sys.argv[1]).items()}, sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
CAST = """
import os, sys, torch
checkpoint = torch.load(sys.argv[1], map_location="cpu", mmap=True)
torch.save({name: tensor.bfloat16() for name, tensor in checkpoint.items()}, sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
DCP_TO_TORCH = """
import os, sys, warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
TORCH_TO_DCP = """
import os, sys, warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
torch_save_to_dcp(sys.argv[1], sys.argv[2])
os.system(f"sync -f {sys.argv[2]}")
"""
ZERO_TO_FP32 = """
import os, sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], max_shard_size=None, safe_serialization=True)
os.system(f"sync -f {sys.argv[2]}")
"""
LOAD = """
import sys
import ckptconv
ckptconv.load(sys.argv[1], "cpu")
"""
LOAD_AND_READ = """
import sys
import ckptconv
for tensor in ckptconv.load(sys.argv[1], "cpu").values():
    tensor.sum()
"""
TORCH_LOAD = """
import sys, torch
checkpoint = torch.load(sys.argv[1], "cpu", mmap=sys.argv[2] == "mmap")
checkpoint["module.layers.7.weight"].sum()
"""
TORCH_LOAD_AND_READ = """
import sys, torch
for tensor in torch.load(sys.argv[1], "cpu", mmap=True).values():
    tensor.sum()
"""
TORCH_VALUES = """
import sys, torch
for tensor in torch.load(sys.argv[1], "cpu", mmap=sys.argv[2] == "mmap").values():
    finite = tensor[tensor.isfinite()].double()
    tensor.isnan().sum(), tensor.isinf().sum(), (finite == 0).sum(), finite.aminmax(), finite.mean(), finite.std()
    finite.norm()
"""
LOAD_ONE = """
import sys
import ckptconv
with ckptconv.open(sys.argv[1]) as file:
    file.load("module.layers.7.weight").sum()
"""
MADE = f"""
import os, sys, torch
state = {{f"layers.{{i}}.weight": torch.ones(int(sys.argv[2]) // 4 // {TENSORS}) for i in range({TENSORS})}}
"""
SAVE = "import ckptconv; ckptconv.save(state, sys.argv[1])"
TORCH_SAVE = "torch.save(state, sys.argv[1]); os.fsync(os.open(sys.argv[1], os.O_RDONLY))"
MAKE = f"""
import sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
numel = int(sys.argv[2]) // 4 // {TENSORS}
torch.save({{f"module.layers.{{i}}.weight": torch.randn(numel) for i in range({TENSORS})}}, sys.argv[1])
"""
MAKE_SHARDS = """
import json, os, sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
os.makedirs(sys.argv[1])
shards = [f"pytorch_model-{i:05d}-of-00008.bin" for i in range(1, 9)]
weight_map = {}
for i, shard in enumerate(shards):
    tensors = {f"module.layers.{i}.{j}.weight": torch.randn(int(sys.argv[2]) >> 10, 4) for j in range(8)}
    torch.save(tensors, os.path.join(sys.argv[1], shard))
    weight_map |= dict.fromkeys(tensors, shard)
index = {"metadata": {"total_size": int(sys.argv[2])}, "weight_map": weight_map}
with open(os.path.join(sys.argv[1], "pytorch_model.bin.index.json"), "w") as file:
    json.dump(index, file)
"""
MAKE_DCP = f"""
import os, sys, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
child = os.fork()
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + ".store", 2), rank=int(not child), world_size=2)
mesh, rows = init_device_mesh("cpu", (2,)), int(sys.argv[2]) // 4 // {TENSORS} // 2048
state = {{}}
for i in range({TENSORS}):
    by_columns = i % 2
    part = torch.randn(rows, 1024) if by_columns else torch.randn(rows // 2, 2048)
    state[f"layers.{{i}}.weight"] = DTensor.from_local(part, mesh, [Shard(by_columns)])
dcp.save(state, checkpoint_id=sys.argv[1])
dist.barrier()
dist.destroy_process_group()
if child:
    os.waitpid(child, 0)
"""
MAKE_ZERO = f"""
import os, sys, torch
stage, ranks, columns, path = int(sys.argv[3]), 4, 1024, sys.argv[1] + "/step/"
shape = torch.Size([int(sys.argv[2]) // 12 // {TENSORS} // columns, columns])
shapes = {{f"layers.{{i}}.weight": shape for i in range({TENSORS})}}
of_rank = sum(shape.numel() for shape in shapes.values()) // ranks
os.makedirs(path)
print("step", end="", file=open(sys.argv[1] + "/latest", "w"))
common = {{"ds_config": {{}}, "ds_version": "0.19.8", "dp_world_size": ranks, "mp_world_size": 1}}
for rank in range(ranks):
    flat, first, second = (torch.randn(of_rank) for _ in range(3))
    state = {{"state": {{0: {{"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}}}}}}
    state["param_groups"] = [{{"lr": 1e-3, "params": [0]}}]
    optim = {{"zero_stage": stage, "partition_count": ranks, "fp32_flat_groups": [flat], "optimizer_state_dict": state}}
    if stage < 3:
        optim = {{"zero_stage": stage, "partition_count": [ranks], "single_partition_of_fp32_groups": [flat]}}
        optim |= {{"base_optimizer_state": state, "group_paddings": [0]}}
    name = f"zero_pp_rank_{{rank}}_mp_rank_00"
    torch.save({{"optimizer_state_dict": optim, **common}}, path + name + "_optim_states.pt")
    if stage == 3 or rank == 0:
        module = {{key: torch.zeros(0 if stage == 3 else shape, dtype=torch.bfloat16) for key, shape in shapes.items()}}
        model = {{"module": module, "buffer_names": [], "param_shapes": [shapes], "shared_params": {{}}, **common}}
        model |= {{"frozen_param_shapes": None, "frozen_param_fragments": None}}
        torch.save(model, path + (name if stage == 3 else "mp_rank_00") + "_model_states.pt")
"""
MAKE_RANKS = f"""
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
os.makedirs(sys.argv[1])
ranks, tensors, columns = map(int, sys.argv[3:]) if sys.argv[3:] else (4, {TENSORS}, 2048)
rows = int(sys.argv[2]) // 4 // ranks // tensors // columns
for rank in range(ranks):
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    parts = {{f"layers.{{i}}.weight": torch.randn(rows, columns) for i in range(tensors)}}
    state = {{name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}}
    torch.save(state, os.path.join(sys.argv[1], f"model_world_size_{{ranks}}_rank_{{rank}}.pt"))
    dist.destroy_process_group()
"""
MAKE_LEGACY = MAKE.replace("sys.argv[1])", "sys.argv[1], _use_new_zipfile_serialization=False)")
MAKE_HERE = MAKE.replace('torch.serialization.location_tag = lambda storage: "cuda:0"\n', "")
MAKE_SEEDED = MAKE.replace("numel =", "torch.manual_seed(0)\nnumel =")
MAKE_BARE = MAKE_SEEDED.replace("numel =", "torch.serialization.set_crc32_options(False)\nnumel =")
MAKE_MANY = """
import sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
parts = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"]
names = [f"layers.{i}.{part}.weight" for i in range(int(sys.argv[2]) // 6) for part in parts]
torch.save({name: torch.rand(4, 4) for name in names}, sys.argv[1])
"""
MAKE_PARAMETERS = MAKE_MANY.replace("torch.rand(4, 4)", "torch.nn.Parameter(torch.rand(4, 4))")
MAKE_TRAINING = """
import sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
tensors = {f"layers.{i}.weight": torch.nn.Parameter(torch.rand(4, 4)) for i in range(int(sys.argv[2]) // 4)}
adam = torch.optim.Adam(tensors.values(), foreach=False)
for each in tensors.values():
    each.grad = torch.ones_like(each)
adam.step()
model = {name: each.detach() for name, each in tensors.items()}
torch.save({"model": model, "optimizer": adam.state_dict(), "epoch": 3}, sys.argv[1])
"""
MAKE_MIXED = """
import sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
dtypes = torch.float32, torch.float16, torch.bfloat16, torch.int64
blocks = []
for i in range(int(sys.argv[2]) // 6):
    weight = torch.ones(4, 4, dtype=dtypes[i % 4])
    block = {"weight": weight, "tied": weight, "column": weight[:, 1], "scale": torch.tensor(0.5), "name": f"block {i}"}
    block["bias"] = torch.nn.Parameter(torch.rand(4))
    block["buffers"] = [torch.zeros(2, dtype=torch.bool), {"steps": i, "rate": 1e-3}]
    blocks.append(block)
torch.save({"blocks": blocks, "hyper_parameters": {"lr": 0.1, "betas": (0.9, 0.999)}}, sys.argv[1])
"""
MAKE_VIEWS = """
import sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
rows = int(sys.argv[2]) >> 17
checkpoint = {}
for i in range(9):
    dtype = torch.float32 if i < 3 else torch.bfloat16
    checkpoint[f"module.layers.{i}.weight"] = torch.randn(rows, 4096, dtype=dtype).t()
for i in range(256):
    for j, columns in enumerate(torch.randn(rows // 16, 512).split(32, dim=1)):
        checkpoint[f"module.tables.{i}.{j}"] = columns
torch.save(checkpoint, sys.argv[1])
"""


MAKE_FP8 = """
import sys, torch
from safetensors.torch import save_file
weights = {}
for i in range(max(1, int(sys.argv[2]) >> 25)):
    codes = torch.randint(0, 127, (8192, 4096), dtype=torch.uint8)
    weights |= {f"l{i}.weight": codes.view(torch.float8_e4m3fn), f"l{i}.weight_scale_inv": torch.rand(64, 32)}
save_file(weights, sys.argv[1])
"""


def make(path: Path, size: int, code: str = MAKE, *more: object) -> Path:
    """Run `code`, which writes a checkpoint of `size` to `path`. Return `path`.

    The default is a state dict of `size` bytes with the names of DataParallel and the location tag cuda:0.
    """
    subprocess.run(python(code, path, size, *more), check=True)
    return path


def copy(src: Path, dst: Path) -> list[str]:
    return ["sh", "-c", COPY, "sh", str(src), str(dst)]


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def ckptconv(*arguments: object) -> list[str]:
    return python(CKPTCONV + PEAK, *arguments)
