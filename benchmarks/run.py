"""How long ckptconv takes, in how much memory: whole processes, beside `cp` and torch.

Prints Markdown; README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

GIB = 1 << 30
TENSORS = 300
SMALL = Path(__file__).parent.parent / "fixtures" / "cuda0.pt"
COPY = 'cp "$1" "$2" && sync "$2"'
COPY_FOLDER = 'rm -rf "$2" && cp -r "$1" "$2" && sync -f "$2"'
CLEAR = 'folder="$1"; rm -rf "$folder"; mkdir "$folder"; shift; "$@"; sync -f "$folder"'
PEAK = "\nprint(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
CKPTCONV = "import sys; from ckptconv.cli.main import main; assert main(sys.argv[1:]) == 0"
CKPTCONV_ANY = f"import sys; from ckptconv.cli.main import main; main(sys.argv[1:]){PEAK}"  # diff's status is 1
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
LOAD = """
import sys, ckptconv
ckptconv.load(sys.argv[1], "cpu")
"""
TORCH_LOAD = """
import sys, torch
checkpoint = torch.load(sys.argv[1], "cpu", mmap=sys.argv[2] == "mmap")
checkpoint["module.layers.7.weight"].sum()
"""
TORCH_VALUES = """
import sys, torch
for tensor in torch.load(sys.argv[1], "cpu", mmap=sys.argv[2] == "mmap").values():
    finite = tensor[tensor.isfinite()].double()
    tensor.isnan().sum(), tensor.isinf().sum(), (finite == 0).sum(), finite.aminmax(), finite.mean(), finite.std()
    finite.norm()
"""
LOAD_ONE = """
import sys, ckptconv
with ckptconv.open(sys.argv[1]) as file:
    file.load("module.layers.7.weight").sum()
"""
MADE = f"""
import os, sys, torch, ckptconv
state = {{f"layers.{{i}}.weight": torch.ones(int(sys.argv[2]) // 4 // {TENSORS}) for i in range({TENSORS})}}
"""
SAVE = "ckptconv.save(state, sys.argv[1])"
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
MAKE_RANKS = f"""
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
os.makedirs(sys.argv[1])
rows = int(sys.argv[2]) // 4 // 4 // {TENSORS} // 2048
for rank in range(4):
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    parts = {{f"layers.{{i}}.weight": torch.randn(rows, 2048) for i in range({TENSORS})}}
    state = {{name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}}
    torch.save(state, os.path.join(sys.argv[1], f"model_world_size_4_rank_{{rank}}.pt"))
    dist.destroy_process_group()
"""
MAKE_LEGACY = MAKE.replace("sys.argv[1])", "sys.argv[1], _use_new_zipfile_serialization=False)")
MAKE_SEEDED = MAKE.replace("numel =", "torch.manual_seed(0)\nnumel =")
MAKE_BARE = MAKE_SEEDED.replace("numel =", "torch.serialization.set_crc32_options(False)\nnumel =")
MAKE_MANY = """
import sys, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
parts = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"]
names = [f"layers.{i}.{part}.weight" for i in range(int(sys.argv[2]) // 6) for part in parts]
torch.save({name: torch.rand(4, 4) for name in names}, sys.argv[1])
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


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MiB and 3 runs: whether it works, not how fast")
    parser.add_argument("--runs", type=int, help="runs of each command (default: 9)")
    parser.add_argument("--folder", type=Path, help="a folder on a disk, with 20 GB free (default: a temporary one)")
    parser.add_argument(
        "--only", metavar="TABLE", nargs="+", choices=TABLES, help=f"of the tables: {', '.join(TABLES)}"
    )
    options = parser.parse_args()
    size, runs = (GIB // 16, 3) if options.quick else (2 * GIB, 9)
    runs = options.runs or runs
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what pip installs is compiled
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ckptconv-bench-") as folder:
        print(about(Path(folder), runs), flush=True)
        make(Path(folder) / "src.pt", size)
        for name in options.only or TABLES:
            table, part = TABLES[name]
            table(Path(folder), int(part * size), runs)
    print("\n| first of each table | of | ratio | in half of the rounds |\n| --- | --- | --- | --- |")
    for title, unit, ratio, spread in FIRST:
        print(f"| {title} | {unit} | {ratio:.2f} | {spread} |")


def about(folder: Path, runs: int) -> str:
    """The machine, the file system and the versions, in a line."""
    mount = subprocess.run(["df", "--output=fstype,source", folder], capture_output=True, text=True).stdout.split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    busy = f"{os.getloadavg()[0]:.1f} processes ran before"
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB, Linux"
        f" {platform.release()}, {mount[2]} on {mount[3]}, Python {platform.python_version()}, torch"
        f" {metadata.version('torch')}; {runs} rounds, {busy}"
    )


def convert(folder: Path, size: int, runs: int) -> None:
    """A retag and strip of `size` bytes, beside copying the file and beside what torch does."""
    src, dst = folder / "src.pt", folder / "dst.pt"
    commands = {
        "`ckptconv convert`": ckptconv(
            "convert", "-q", "--force", src, dst, "--to", "cpu", "--strip-prefix", "module."
        ),
        "`cp` + `sync`": copy(src, dst),
        "`cp` + `sync` again: the noise": copy(src, dst),
        "`torch.load` + `torch.save` + `sync`": python(TORCH + PEAK, src, dst, "read"),
        "the same with `mmap=True`": python(TORCH + PEAK, src, dst, "mmap"),
    }
    print_table(f"{size / GIB:g} GiB: cuda:0 → cpu, strip `module.`", commands, runs, unit="`cp` + `sync`")
    dst.unlink()


def to_safetensors(folder: Path, size: int, runs: int) -> None:
    """`size` bytes of weights from torch's format to safetensors, beside copying the file and
    beside what torch and the library do.
    """
    title, rival = (
        f"{size / GIB:g} GiB: `.pt` → `.safetensors`, strip `module.`",
        "`torch.load(mmap=True)` + `save_file` + `sync`",
    )
    beside(
        title, folder / "src.pt", folder / "dst.safetensors", ["--strip-prefix", "module."], rival, TO_SAFETENSORS, runs
    )


def from_safetensors(folder: Path, size: int, runs: int) -> None:
    """The same weights back."""
    src = folder / "src.safetensors"
    subprocess.run(python(TO_SAFETENSORS, folder / "src.pt", src), check=True)
    title, rival = f"{size / GIB:g} GiB: `.safetensors` → `.pt`, add `module.`", "`load_file` + `torch.save` + `sync`"
    beside(title, src, folder / "dst.pt", ["--to", "cuda:0", "--add-prefix", "module."], rival, FROM_SAFETENSORS, runs)
    src.unlink()


def legacy(folder: Path, size: int, runs: int) -> None:
    """`size` bytes in torch's format from before 1.6: retagged there, and to today's format, beside copying the file
    and beside what torch does.
    """
    src, dst = make(folder / "legacy.pt", size, MAKE_LEGACY), folder / "dst.pt"
    edits = ["--to", "cpu", "--strip-prefix", "module."]
    commands = {
        "`ckptconv convert --format legacy`": ckptconv(
            "convert", "-q", "--force", src, dst, "--format", "legacy", *edits
        ),
        "`ckptconv convert` to today's `.pt`": ckptconv("convert", "-q", "--force", src, dst, *edits),
        "`cp` + `sync`": copy(src, dst),
        "`torch.load` + `torch.save` + `sync`": python(TORCH + PEAK, src, dst, "read"),
    }
    print_table(
        f"{size / GIB:g} GiB from before torch 1.6: cuda:0 → cpu, strip `module.`", commands, runs, unit="`cp` + `sync`"
    )
    src.unlink()
    dst.unlink()


def shards(folder: Path, size: int, runs: int) -> None:
    """`size` bytes in 8 shards, retagged as shards, beside copying the folder; the old target is removed by all."""
    src, dst = make(folder / "shards", size, MAKE_SHARDS), folder / "dst"
    edits = ["--to", "cpu", "--strip-prefix", "module."]
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst, *edits),
        "`ckptconv convert -j 2`": ckptconv("convert", "-q", "--force", "-j", "2", src, dst, *edits),
        "`cp -r` + `sync`": ["sh", "-c", COPY_FOLDER, "sh", str(src), str(dst)],
        "`cp -r` + `sync` again: the noise": ["sh", "-c", COPY_FOLDER, "sh", str(src), str(dst)],
    }
    print_table(
        f"{size / GIB:g} GiB in 8 shards: cuda:0 → cpu, strip `module.`", commands, runs, unit="`cp -r` + `sync`"
    )
    shutil.rmtree(src)
    shutil.rmtree(dst)


def distributed(folder: Path, size: int, runs: int) -> None:
    """`size` bytes that two processes saved with torch.distributed.checkpoint, in one file, beside what torch does."""
    src, dst = make(folder / "dcp", size, MAKE_DCP), folder / "dst.pt"
    rival = "`dcp_to_torch_save` + `sync`"
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst),
        rival: python(DCP_TO_TORCH + PEAK, src, dst),
    }
    print_table(f"{size / GIB:g} GiB of two processes (DCP) → `.pt`", commands, runs, unit=rival)
    shutil.rmtree(src)
    dst.unlink()


def ranks(folder: Path, size: int, runs: int) -> None:
    """`size` bytes that four processes saved, each its rows, in one file, beside copying the four files."""
    src, dst = make(folder / "ranks", size, MAKE_RANKS), folder / "dst"
    unit = "`cp` of the four files + `sync`"
    clear = ["sh", "-c", CLEAR, "sh", str(dst)]
    commands = {
        "`ckptconv convert`": [*clear, *ckptconv("convert", "-q", src, dst / "whole.pt")],
        unit: [*clear, "cp", *map(str, src.iterdir()), str(dst)],
        f"{unit} again: the noise": [*clear, "cp", *map(str, src.iterdir()), str(dst)],
    }
    print_table(f"{size / GIB:g} GiB of four ranks (FSDP2) → one `.pt`", commands, runs, unit)
    shutil.rmtree(src)
    shutil.rmtree(dst)


def cast(folder: Path, size: int, runs: int) -> None:
    """`size` bytes of float32 weights in half the bytes, beside what torch does."""
    src, dst = make(folder / "float32.pt", size), folder / "dst.pt"
    rival = "`torch.load(mmap=True)` + `.bfloat16()` + `torch.save` + `sync`"
    commands = {
        "`ckptconv convert --dtype bf16`": ckptconv("convert", "-q", "--force", src, dst, "--dtype", "bf16"),
        rival: python(CAST + PEAK, src, dst),
    }
    print_table(f"{size / GIB:g} GiB: float32 → bfloat16", commands, runs, unit=rival)
    src.unlink()
    dst.unlink()


def gather(folder: Path, size: int, runs: int) -> None:
    """`size` bytes that do not lie in the order of their tensors: transposed weights, and
    thousands of columns that share storages.
    """
    src = make(folder / "views.pt", size, MAKE_VIEWS)
    title, rival = (
        f"{size / GIB:g} GiB of views: `.pt` → `.safetensors`",
        "`torch.load(mmap=True)` + `contiguous()` + `save_file` + `sync`",
    )
    beside(title, src, folder / "views.safetensors", ["--strip-prefix", "module."], rival, TO_SAFETENSORS, runs)
    src.unlink()


def diff(folder: Path, size: int, runs: int) -> None:
    """Two files of `size` bytes that are the same, beside `cmp` of two that are the same byte for byte."""
    zip_, bare, tensors = folder / "src.pt", make(folder / "bare.pt", size, MAKE_BARE), folder / "a.safetensors"
    subprocess.run(python(TO_SAFETENSORS, bare, tensors), check=True)
    copies = {path: path.with_stem(path.stem + "-copy") for path in (zip_, tensors)}
    sums = make(folder / "sums.pt", size, MAKE_SEEDED)
    for path, copied in copies.items():
        shutil.copy(path, copied)
    commands = {
        "`ckptconv diff`, `.pt`, without checksums in one": ckptconv("diff", "-q", sums, bare),
        "`ckptconv diff`, `.safetensors`": ckptconv("diff", "-q", tensors, copies[tensors]),
        "`ckptconv diff`, `.pt`, checksums in both": ckptconv("diff", "-q", zip_, copies[zip_]),
        "`cmp`, `.pt`": ["cmp", str(zip_), str(copies[zip_])],
        "`cmp`, `.safetensors`": ["cmp", str(tensors), str(copies[tensors])],
    }
    print_table(f"2 × {size / GIB:g} GiB that are the same", commands, runs, unit="`cmp`, `.pt`")
    for path in (bare, tensors, sums, *copies.values()):
        path.unlink()


def verify(folder: Path, size: int, runs: int) -> None:
    """Every record of `size` bytes compared with its checksum, beside reading the file."""
    src = folder / "src.pt"
    commands = {
        "`ckptconv verify`, with zlib-ng": ckptconv("verify", src),
        "`ckptconv verify`, with zlib": python(
            "import sys; sys.modules['zlib_ng'] = None\n" + CKPTCONV + PEAK, "verify", src
        ),
        "`sha256sum`": ["sha256sum", str(src)],
        "`cat`": ["sh", "-c", 'cat "$1" > /dev/null', "sh", str(src)],
    }
    print_table(f"{size / GIB:g} GiB, verified, from the page cache", commands, runs, unit="`cat`")


def beside(title: str, src: Path, dst: Path, edits: list[str], rival: str, code: str, runs: int) -> None:
    """A conversion, copying the file, and `code`, which does the same in Python."""
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst, *edits),
        "`cp` + `sync`": copy(src, dst),
        rival: python(code + PEAK, src, dst),
    }
    print_table(title, commands, runs, unit="`cp` + `sync`")
    dst.unlink()


def load(folder: Path, size: int, runs: int) -> None:
    """All tensors of `size` bytes, and one of them, in a fresh process each."""
    src = folder / "src.pt"
    commands = {
        '`ckptconv.load(path, "cpu")`': python(LOAD + PEAK, src),
        '`torch.load(path, "cpu")`': python(TORCH_LOAD + PEAK, src, "read"),
        "one tensor: `ckptconv.open(path)` + `load(name)`": python(LOAD_ONE + PEAK, src),
        "one tensor: `torch.load(path, mmap=True)[name]`": python(TORCH_LOAD + PEAK, src, "mmap"),
    }
    print_table(f"{size / GIB:g} GiB in memory", commands, runs, unit='`torch.load(path, "cpu")`')


def save(folder: Path, size: int, runs: int) -> None:
    """`size` bytes of tensors from memory to disk; making them is in each figure."""
    dst = folder / "saved.pt"
    commands = {
        "`ckptconv.save`": python(MADE + SAVE + PEAK, dst, size),
        "`torch.save` + `sync`": python(MADE + TORCH_SAVE + PEAK, dst, size),
        "making the tensors": python(MADE + PEAK, dst, size),
    }
    print_table(f"{size / GIB:g} GiB from memory", commands, runs, unit="`torch.save` + `sync`")
    dst.unlink()


def start(folder: Path, size: int, runs: int) -> None:  # noqa: ARG001 - it is about what all commands begin with
    """What a person waits for who looks at a small file."""
    commands = {
        "`ckptconv inspect`": ckptconv("inspect", SMALL),
        "`import click, json`": python("import click, json"),
        "`import ckptconv`": python("import ckptconv"),
        "`pass`": python("pass"),
    }
    print_table("start", commands, runs, unit="`import click, json`")


def batch(folder: Path, size: int, runs: int) -> None:  # noqa: ARG001 - the number of files counts
    """A thousand small files, beside the same bytes written and synced by 32 threads."""
    srcs = folder / "small"
    srcs.mkdir()
    for i in range(1000):
        shutil.copy(SMALL, srcs / f"{i}.pt")

    def cleared(command: list[str]) -> list[str]:
        return ["sh", "-c", CLEAR, "sh", str(folder / "many"), *command]

    options = "convert", "-q", srcs, folder / "many", "--to", "cpu"
    commands = {
        "`ckptconv convert`": cleared(ckptconv(*options)),
        "`ckptconv convert -j 2`": cleared(ckptconv(*options, "-j", 2)),
        "32 threads that write and sync": cleared(python(WRITE_SMALL, srcs, folder / "many")),
    }
    print_table("1,000 small files", commands, runs, unit="32 threads that write and sync")
    shutil.rmtree(srcs)
    shutil.rmtree(folder / "many")


def diff_quiet(folder: Path, size: int, runs: int) -> None:
    """Two files that differ early."""
    a, b = (make(folder / f"{name}.pt", size, MAKE_BARE) for name in "ab")
    with b.open("r+b") as file:
        file.seek(size // 1000)
        file.write(b"\0" * 64)
    commands = {
        "`ckptconv diff -q`": python(CKPTCONV_ANY, "diff", "-q", a, b),
        "`ckptconv diff`": python(CKPTCONV_ANY, "diff", a, b),
        "`cmp -s`": ["sh", "-c", '! cmp -s "$1" "$2"', "sh", str(a), str(b)],
    }
    print_table(f"2 × {size / GIB:g} GiB that differ early", commands, runs, unit="`cmp -s`")
    for each in (a, b):
        each.unlink()


def inspect(folder: Path, size: int, runs: int) -> None:
    """`inspect` of a small and a large file, beside the time in which torch is imported."""
    small = make(folder / "small.pt", 1 << 20)
    commands = {
        "`ckptconv inspect`, 1 MiB": ckptconv("inspect", small),
        f"`ckptconv inspect`, {size / GIB:g} GiB": ckptconv("inspect", folder / "src.pt"),
        "`import torch`": python("import torch" + PEAK),
    }
    print_table("inspect", commands, runs, unit="`import torch`")


def values(folder: Path, size: int, runs: int) -> None:
    """The statistics of all tensors, beside reading them alone and beside torch's of what it has loaded."""
    src = make(folder / "a.pt", size)
    commands = {
        "`cat`": ["sh", "-c", 'cat "$1" > /dev/null', "sh", str(src)],
        "`ckptconv inspect --values`": ckptconv("inspect", src, "--values", "--limit", "0"),
        "`ckptconv inspect --histogram`": ckptconv("inspect", src, "--histogram", "--limit", "0"),
        "`torch.load`, the same without the histogram": python(TORCH_VALUES + PEAK, src, ""),
        "`torch.load(mmap=True)`, the same": python(TORCH_VALUES + PEAK, src, "mmap"),
    }
    print_table(f"values of {size / GIB:g} GiB of float32", commands, runs, "`cat`")


def pages(folder: Path, size: int, runs: int) -> None:  # noqa: ARG001 - the number of tensors counts, not their bytes
    """How large a page is, and what making it takes."""
    commands = {}
    for n in (300, 3_000, 60_000):
        src, other = make(folder / f"{n}.pt", n, MAKE_MANY), make(folder / f"{n}_b.pt", n, MAKE_MANY)
        for name, words in (("inspect", [src]), ("diff", [src, other])):
            page = folder / f"{name}_{n}.html"
            command = python(CKPTCONV_ANY, name, *words, "--html", page, "--force")
            subprocess.run(command, check=True, capture_output=True)
            commands[f"`{name} --html`, {n:,} tensors: {page.stat().st_size / 1e3:,.0f} kB"] = command
    print_table("pages", commands, runs, next(iter(commands)))


def many(folder: Path, size: int, runs: int) -> None:  # noqa: ARG001 - the number of tensors counts, not their bytes
    """60,000 small tensors: what each tensor costs."""
    src, dst = make(folder / "many.pt", 60_000, MAKE_MANY), folder / "many_cpu.pt"
    commands = {
        "`ckptconv inspect`": ckptconv("inspect", src),
        "`ckptconv convert --to cpu`": ckptconv("convert", "-q", "--force", src, dst, "--to", "cpu"),
        "`torch.load` + `torch.save`": python(TORCH + PEAK, src, dst, "read"),
    }
    print_table("60,000 tensors", commands, runs, unit="`torch.load` + `torch.save`")
    dst.unlink()


def share_blocks(folder: Path, size: int, runs: int) -> None:  # noqa: ARG001 - once: blocks are counted
    """The blocks that a retag takes where files can share them: on XFS, in a file mounted as a disk."""
    with xfs(folder / "xfs.img", 4 * size) as disk:
        if disk is None:
            print("\nBlocks shared on XFS: skipped, needs root, `mkfs.xfs` and a loop device")
            return
        src = make(disk / "src.pt", size)
        print(f"\n| {size / GIB:g} GiB on XFS: cuda:0 → cpu | new blocks | time |\n| --- | --- | --- |")
        for name, command in {
            "`ckptconv convert`": ckptconv("convert", "-q", src, disk / "retagged.pt", "--to", "cpu"),
            "`cp --reflink=always`": ["cp", "--reflink=always", str(src), str(disk / "copied.pt")],
        }.items():
            before = used(disk)
            seconds, _ = measure(command)
            print(f"| {name} | {(used(disk) - before) / 1024:,.0f} KiB | {seconds:.2f} s |")


@contextmanager
def xfs(image: Path, size: int) -> Iterator[Path | None]:
    """A folder on a fresh XFS filesystem, or None where there cannot be one."""
    disk = image.with_suffix(".mount")
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(max(size, GIB // 2))
    mkfs = shutil.which("mkfs.xfs", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    steps = [[mkfs or "", "-q", str(image)], ["mount", "-o", "loop", str(image), str(disk)]]
    if os.geteuid() or not mkfs or any(subprocess.run(step, capture_output=True).returncode for step in steps):
        yield None
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def used(disk: Path) -> int:
    """The bytes that are in use on `disk`."""
    os.sync()
    space = os.statvfs(disk)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def make(path: Path, size: int, code: str = MAKE) -> Path:
    """A state dict of `size` bytes, saved by DataParallel on cuda:0, as far as the file can tell."""
    subprocess.run(python(code, path, size), check=True)
    return path


def copy(src: Path, dst: Path) -> list[str]:
    return ["sh", "-c", COPY, "sh", str(src), str(dst)]


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def ckptconv(*arguments: object) -> list[str]:
    return python(CKPTCONV + PEAK, *arguments)


def measure(command: list[str]) -> tuple[float, int]:
    """The seconds that `command` takes from start to end, and its peak memory in KiB where it says it
    (its last line).
    """
    os.sync()
    started = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - started
    last = done.stdout.split()[-1:]
    return seconds, int(last[0]) if last and last[0].isdigit() else 0


def print_table(title: str, commands: dict[str, list[str]], runs: int, unit: str) -> None:
    """Run `commands` in turns, `runs` times each, each time in another order, after one run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, int] = {}
    names = list(commands)
    for turn in range(-1, runs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken, kib = measure(commands[name])
            if turn >= 0:
                seconds[name].append(taken)
                peaks[name] = max(kib, peaks.get(name, 0))

    def quartile(name: str) -> float:
        return statistics.quantiles(seconds[name], method="inclusive")[0]

    def spread(name: str) -> str:
        """The quartiles of the ratios within one round."""
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds[unit], strict=True)]
        low, _, high = statistics.quantiles(ratios, method="inclusive")
        return f"{low:.2f}–{high:.2f}"

    FIRST.append((title, unit, quartile(names[0]) / quartile(unit), spread(names[0])))
    print(f"\n| {title} | lower quartile | median | of {unit} | in half of the rounds | peak memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        peak = f"{peaks[name] * 1024 / 1e6:,.0f} MB" if peaks[name] else ""
        print(
            f"| {name} | {quartile(name):.2f} s | {statistics.median(seconds[name]):.2f} s"
            f" | {quartile(name) / quartile(unit):.2f} | {spread(name)} | {peak} |",
            flush=True,
        )


#: Of each table its title, what its first line is compared with, the ratio, and its quartiles within one round.
FIRST: list[tuple[str, str, float, str]] = []
#: Each table by its word, with the part of the size that it takes.
TABLES: dict[str, tuple[Callable[[Path, int, int], None], float]] = {
    "convert": (convert, 1), "to_safetensors": (to_safetensors, 1), "from_safetensors": (from_safetensors, 1),
    "legacy": (legacy, 1), "shards": (shards, 1), "distributed": (distributed, 1), "ranks": (ranks, 4),
    "cast": (cast, 2),
    "gather": (gather, 0.5), "diff": (diff, 1), "verify": (verify, 1), "start": (start, 1), "inspect": (inspect, 1),
    "batch": (batch, 1), "diff_quiet": (diff_quiet, 1), "load": (load, 1),
    "save": (save, 0.5), "values": (values, 1), "pages": (pages, 1), "many": (many, 1),
    "share_blocks": (share_blocks, 0.5),
}  # a table  # fmt: skip

if __name__ == "__main__":
    main()
