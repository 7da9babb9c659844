"""The tables of the benchmark. Each function makes the files of its table and runs its commands in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import programs
from measuring import Bench, measure
from programs import ckptconv, copy, make, python

GIB = 1 << 30
SMALL = Path(__file__).parent.parent / "fixtures" / "cuda0.pt"
COPY_OF_MOVED = "`cp` + `sync` of what is read and written"  # the copied file has half as many bytes


def convert(bench: Bench, size: int) -> None:
    """Compare a retag and strip of `size` bytes with a copy of the file and with torch."""
    src, dst = bench.folder / "src.pt", bench.folder / "dst.pt"
    commands = {
        "`ckptconv convert`": ckptconv(
            "convert", "-q", "--force", src, dst, "--to", "cpu", "--strip-prefix", "module."
        ),
        "`cp` + `sync`": copy(src, dst),
        "`cp` + `sync` again: the noise": copy(src, dst),
        "`torch.load` + `torch.save` + `sync`": python(programs.TORCH + programs.PEAK, src, dst, "read"),
        "the same with `mmap=True`": python(programs.TORCH + programs.PEAK, src, dst, "mmap"),
    }
    bench.table(f"{size / GIB:g} GiB: cuda:0 → cpu, strip `module.`", commands, unit="`cp` + `sync`")
    dst.unlink()


def large(bench: Bench, size: int) -> None:
    """Compare a retag of `size` bytes with a copy of the file.

    The file is four times as large as in `convert`, so many machines cannot keep it and its copy in the page cache.
    """
    src, dst = make(bench.folder / "large.pt", size), bench.folder / "dst.pt"
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst, "--to", "cpu"),
        "`cp` + `sync`": copy(src, dst),
        "`cp` + `sync` again: the noise": copy(src, dst),
    }
    bench.table(f"{size / GIB:g} GiB: cuda:0 → cpu", commands, "`cp` + `sync`")
    src.unlink()
    dst.unlink()


def to_safetensors(bench: Bench, size: int) -> None:
    """Compare the conversion of `size` bytes from torch's format to safetensors with a copy and with the two
    libraries.
    """
    title, rival = (
        f"{size / GIB:g} GiB: `.pt` → `.safetensors`, strip `module.`",
        "`torch.load(mmap=True)` + `save_file` + `sync`",
    )
    beside(
        bench,
        title,
        bench.folder / "src.pt",
        bench.folder / "dst.safetensors",
        ["--strip-prefix", "module."],
        rival,
        programs.TO_SAFETENSORS,
    )


def from_safetensors(bench: Bench, size: int) -> None:
    """Compare the conversion of the same weights from safetensors to torch's format with a copy and with the
    libraries.
    """
    src = bench.folder / "src.safetensors"
    subprocess.run(python(programs.TO_SAFETENSORS, bench.folder / "src.pt", src), check=True)
    title, rival = f"{size / GIB:g} GiB: `.safetensors` → `.pt`, add `module.`", "`load_file` + `torch.save` + `sync`"
    beside(
        bench,
        title,
        src,
        bench.folder / "dst.pt",
        ["--to", "cuda:0", "--add-prefix", "module."],
        rival,
        programs.FROM_SAFETENSORS,
    )
    src.unlink()


def legacy(bench: Bench, size: int) -> None:
    """Compare a retag of `size` bytes in the format from before torch 1.6 with a copy and with torch.

    ckptconv writes both the old format and the current one.
    """
    src, dst = make(bench.folder / "legacy.pt", size, programs.MAKE_LEGACY), bench.folder / "dst.pt"
    edits = ["--to", "cpu", "--strip-prefix", "module."]
    commands = {
        "`ckptconv convert --format legacy`": ckptconv(
            "convert", "-q", "--force", src, dst, "--format", "legacy", *edits
        ),
        "`ckptconv convert` to today's `.pt`": ckptconv("convert", "-q", "--force", src, dst, *edits),
        "`cp` + `sync`": copy(src, dst),
        "`torch.load` + `torch.save` + `sync`": python(programs.TORCH + programs.PEAK, src, dst, "read"),
    }
    bench.table(
        f"{size / GIB:g} GiB from before torch 1.6: cuda:0 → cpu, strip `module.`", commands, unit="`cp` + `sync`"
    )
    src.unlink()
    dst.unlink()


def shards(bench: Bench, size: int) -> None:
    """Compare a retag of `size` bytes in 8 shards with a copy of the folder. All commands remove the old output."""
    src, dst = make(bench.folder / "shards", size, programs.MAKE_SHARDS), bench.folder / "dst"
    edits = ["--to", "cpu", "--strip-prefix", "module."]
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst, *edits),
        "`ckptconv convert -j 2`": ckptconv("convert", "-q", "--force", "-j", "2", src, dst, *edits),
        "`cp -r` + `sync`": ["sh", "-c", programs.COPY_FOLDER, "sh", str(src), str(dst)],
        "`cp -r` + `sync` again: the noise": ["sh", "-c", programs.COPY_FOLDER, "sh", str(src), str(dst)],
    }
    bench.table(f"{size / GIB:g} GiB in 8 shards: cuda:0 → cpu, strip `module.`", commands, unit="`cp -r` + `sync`")
    shutil.rmtree(src)
    shutil.rmtree(dst)


def distributed(bench: Bench, size: int) -> None:
    """Compare the merge of `size` bytes that two processes saved with torch.distributed.checkpoint with torch's own."""
    src, dst = make(bench.folder / "dcp", size, programs.MAKE_DCP), bench.folder / "dst.pt"
    rival = "`dcp_to_torch_save` + `sync`"
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst),
        rival: python(programs.DCP_TO_TORCH + programs.PEAK, src, dst),
    }
    bench.table(f"{size / GIB:g} GiB of two processes (DCP) → `.pt`", commands, unit=rival)
    shutil.rmtree(src)
    dst.unlink()


def to_distributed(bench: Bench, size: int) -> None:
    """Compare a DCP folder of `size` bytes for four processes with a copy of it and with torch's folder of one
    process.
    """
    src = make(bench.folder / "one.pt", size, programs.MAKE_HERE)
    dst, copied = bench.folder / "dcp", bench.folder / "copy"
    ours = ckptconv("convert", "-q", "--force", src, dst, "--format", "dcp", "--ranks", "4")
    subprocess.run(ours, check=True, stdout=subprocess.PIPE)
    commands = {
        "`ckptconv convert --format dcp --ranks 4`": ours,
        "`cp -r` + `sync`": ["sh", "-c", programs.COPY_FOLDER, "sh", str(dst), str(copied)],
        "`torch_save_to_dcp` + `sync`": python(programs.TORCH_TO_DCP + programs.PEAK, src, bench.folder / "torch"),
    }
    bench.table(f"{size / GIB:g} GiB: `.pt` → DCP", commands, "`cp -r` + `sync`")
    for folder in (dst, copied, bench.folder / "torch"):
        shutil.rmtree(folder)
    src.unlink()


def zero_2(bench: Bench, size: int) -> None:
    """Merge `size` bytes of four ranks of DeepSpeed ZeRO at stage 2 into one file."""
    _zero(bench, size, 2)


def zero_3(bench: Bench, size: int) -> None:
    """Merge `size` bytes of four ranks of DeepSpeed ZeRO at stage 3 into one file."""
    _zero(bench, size, 3)


def _zero(bench: Bench, size: int, stage: int) -> None:
    src = bench.folder / "zero"
    subprocess.run(python(programs.MAKE_ZERO, src, size, stage), check=True)
    for name in ("whole.pt", "weights.safetensors"):
        dst = bench.folder / name
        commands = {f"`ckptconv convert`, `{dst.suffix}`": ckptconv("convert", "-q", "--force", src, dst)}
        for command in commands.values():
            subprocess.run(command, check=True, stdout=subprocess.PIPE)
        commands["`cp` + `sync`"] = copy(dst, bench.folder / "copy")
        if dst.suffix == ".safetensors" and find_spec("deepspeed"):
            reference = python(programs.ZERO_TO_FP32 + programs.PEAK, src, bench.folder / "fp32")
            commands["`zero_to_fp32` + `sync`"] = reference
        title = f"{size / GIB:g} GiB of four ranks (ZeRO stage {stage}) → {dst.stat().st_size / GIB:.2f} GiB"
        bench.table(title, commands, "`cp` + `sync`")
        dst.unlink()
    shutil.rmtree(src)


def ranks(bench: Bench, size: int) -> None:
    """Compare the merge of `size` bytes of four FSDP2 rank files into one file with a copy of the four files."""
    src, dst = make(bench.folder / "ranks", size, programs.MAKE_RANKS), bench.folder / "dst"
    unit = "`cp` of the four files + `sync`"
    clear = ["sh", "-c", programs.CLEAR, "sh", str(dst)]
    commands = {
        "`ckptconv convert`": [*clear, *ckptconv("convert", "-q", src, dst / "whole.pt")],
        unit: [*clear, "cp", *map(str, src.iterdir()), str(dst)],
        f"{unit} again: the noise": [*clear, "cp", *map(str, src.iterdir()), str(dst)],
    }
    bench.table(f"{size / GIB:g} GiB of four ranks (FSDP2) → one `.pt`", commands, unit)
    shutil.rmtree(src)
    shutil.rmtree(dst)


def cast(bench: Bench, size: int) -> None:
    """Compare a cast of `size` bytes of float32 to bfloat16 with a copy of equal traffic and with torch."""
    src, dst = make(bench.folder / "float32.pt", size), bench.folder / "dst.pt"
    moved = make(bench.folder / "moved.pt", size * 3 // 4)
    commands = {
        "`ckptconv convert --dtype bf16`": ckptconv("convert", "-q", "--force", src, dst, "--dtype", "bf16"),
        COPY_OF_MOVED: copy(moved, bench.folder / "copy.pt"),
        "`torch.load(mmap=True)` + `.bfloat16()` + `torch.save` + `sync`": python(
            programs.CAST + programs.PEAK, src, dst
        ),
    }
    bench.table(f"{size / GIB:g} GiB: float32 → bfloat16", commands, COPY_OF_MOVED)
    for path in (src, dst, moved, bench.folder / "copy.pt"):
        path.unlink()


def quantized(bench: Bench, size: int) -> None:
    """Compare a cast of `size` bytes of fp8 in blocks of 128×128 to bfloat16 with a copy of equal traffic."""
    src, dst = make(bench.folder / "fp8.safetensors", size, programs.MAKE_FP8), bench.folder / "bf16.safetensors"
    moved = make(bench.folder / "moved.pt", size * 3 // 2)
    commands = {
        "`ckptconv convert --dtype bf16`": ckptconv("convert", "-q", "--force", src, dst, "--dtype", "bf16"),
        COPY_OF_MOVED: copy(moved, bench.folder / "copy.pt"),
        "`import torch`": python("import torch;" + programs.PEAK),
    }
    bench.table(f"{size / GIB:g} GiB: fp8 in blocks → bfloat16", commands, COPY_OF_MOVED)
    for path in (src, dst, moved, bench.folder / "copy.pt"):
        path.unlink()


def gather(bench: Bench, size: int) -> None:
    """Compare the conversion of `size` bytes of non-contiguous views to safetensors with a copy and with the
    libraries.

    The views are transposed weights and thousands of columns that share storages.
    """
    src = make(bench.folder / "views.pt", size, programs.MAKE_VIEWS)
    title, rival = (
        f"{size / GIB:g} GiB of views: `.pt` → `.safetensors`",
        "`torch.load(mmap=True)` + `contiguous()` + `save_file` + `sync`",
    )
    beside(
        bench,
        title,
        src,
        bench.folder / "views.safetensors",
        ["--strip-prefix", "module."],
        rival,
        programs.TO_SAFETENSORS,
    )
    src.unlink()


def diff(bench: Bench, size: int) -> None:
    """Compare `diff` of two equal files of `size` bytes with `cmp` of two identical files."""
    zip_, bare, tensors = (
        bench.folder / "src.pt",
        make(bench.folder / "bare.pt", size, programs.MAKE_BARE),
        bench.folder / "a.safetensors",
    )
    subprocess.run(python(programs.TO_SAFETENSORS, bare, tensors), check=True)
    copies = {path: path.with_stem(path.stem + "-copy") for path in (zip_, tensors)}
    sums = make(bench.folder / "sums.pt", size, programs.MAKE_SEEDED)
    for path, copied in copies.items():
        shutil.copy(path, copied)
    commands = {
        "`ckptconv diff`, `.pt`, without checksums in one": ckptconv("diff", "-q", sums, bare),
        "`ckptconv diff`, `.safetensors`": ckptconv("diff", "-q", tensors, copies[tensors]),
        "`ckptconv diff`, `.pt`, checksums in both": ckptconv("diff", "-q", zip_, copies[zip_]),
        "`cmp`, `.pt`": ["cmp", str(zip_), str(copies[zip_])],
        "`cmp`, `.safetensors`": ["cmp", str(tensors), str(copies[tensors])],
    }
    bench.table(f"2 × {size / GIB:g} GiB that are the same", commands, unit="`cmp`, `.pt`")
    for path in (bare, tensors, sums, *copies.values()):
        path.unlink()


def verify(bench: Bench, size: int) -> None:
    """Compare the verification of every record of `size` bytes with reading the file."""
    src = bench.folder / "src.pt"
    commands = {
        "`ckptconv verify`, with zlib-ng": ckptconv("verify", src),
        "`ckptconv verify`, with zlib": python(
            "import sys; sys.modules['zlib_ng'] = None\n" + programs.CKPTCONV + programs.PEAK, "verify", src
        ),
        "`sha256sum`": ["sha256sum", str(src)],
        "`cat`": ["sh", "-c", 'cat "$1" > /dev/null', "sh", str(src)],
    }
    bench.table(f"{size / GIB:g} GiB, verified, from the page cache", commands, unit="`cat`")


def beside(bench: Bench, title: str, src: Path, dst: Path, edits: list[str], rival: str, code: str) -> None:
    """Compare the conversion of `src` with a copy of the file and with `code`, a Python program that does the same."""
    commands = {
        "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst, *edits),
        "`cp` + `sync`": copy(src, dst),
        rival: python(code + programs.PEAK, src, dst),
    }
    bench.table(title, commands, unit="`cp` + `sync`")
    dst.unlink()


def load(bench: Bench, size: int) -> None:
    """Compare loading all tensors of `size` bytes, or one of them, with torch. Each load runs in a new process."""
    src = bench.folder / "src.pt"
    commands = {
        '`ckptconv.load(path, "cpu")`': python(programs.LOAD + programs.PEAK, src),
        '`torch.load(path, "cpu")`': python(programs.TORCH_LOAD + programs.PEAK, src, "read"),
        "`ckptconv.load`, and all numbers are read": python(programs.LOAD_AND_READ + programs.PEAK, src),
        "`torch.load(mmap=True)`, and all numbers are read": python(programs.TORCH_LOAD_AND_READ + programs.PEAK, src),
        "one tensor: `ckptconv.open(path)` + `load(name)`": python(programs.LOAD_ONE + programs.PEAK, src),
        "one tensor: `torch.load(path, mmap=True)[name]`": python(programs.TORCH_LOAD + programs.PEAK, src, "mmap"),
    }
    bench.table(f"{size / GIB:g} GiB in memory", commands, unit='`torch.load(path, "cpu")`')


def save(bench: Bench, size: int) -> None:
    """Compare saving `size` bytes of tensors with torch. Every figure includes the time to make the tensors."""
    dst = bench.folder / "saved.pt"
    commands = {
        "`ckptconv.save`": python(programs.MADE + programs.SAVE + programs.PEAK, dst, size),
        "`torch.save` + `sync`": python(programs.MADE + programs.TORCH_SAVE + programs.PEAK, dst, size),
        "making the tensors": python(programs.MADE + programs.PEAK, dst, size),
    }
    bench.table(f"{size / GIB:g} GiB from memory", commands, unit="`torch.save` + `sync`")
    dst.unlink()


def start(bench: Bench, size: int) -> None:  # noqa: ARG001 - it is about what all commands begin with
    """Measure the start of the program: `inspect` of a small file, and the imports."""
    commands = {
        "`ckptconv inspect`": ckptconv("inspect", SMALL),
        "`import click, json`": python("import click, json"),
        "`import ckptconv`": python("import ckptconv"),
        "`pass`": python("pass"),
    }
    bench.table("start", commands, unit="`import click, json`")


def batch(bench: Bench, size: int) -> None:  # noqa: ARG001 - the number of files counts
    """Compare the conversion of 1,000 small files with 32 threads that write and sync the same bytes."""
    srcs = bench.folder / "small"
    srcs.mkdir()
    for i in range(1000):
        shutil.copy(SMALL, srcs / f"{i}.pt")

    def cleared(command: list[str]) -> list[str]:
        return ["sh", "-c", programs.CLEAR, "sh", str(bench.folder / "many"), *command]

    options = "convert", "-q", srcs, bench.folder / "many", "--to", "cpu"
    commands = {
        "`ckptconv convert`": cleared(ckptconv(*options)),
        "`ckptconv convert -j 2`": cleared(ckptconv(*options, "-j", 2)),
        "32 threads that write and sync": cleared(python(programs.WRITE_SMALL, srcs, bench.folder / "many")),
    }
    bench.table("1,000 small files", commands, unit="32 threads that write and sync")
    shutil.rmtree(srcs)
    shutil.rmtree(bench.folder / "many")


def diff_quiet(bench: Bench, size: int) -> None:
    """Compare `diff` of two files that differ early with `cmp`."""
    a, b = (make(bench.folder / f"{name}.pt", size, programs.MAKE_BARE) for name in "ab")
    with b.open("r+b") as file:
        file.seek(size // 1000)
        file.write(b"\0" * 64)
    commands = {
        "`ckptconv diff -q`": python(programs.CKPTCONV_DIFF + programs.PEAK, "diff", "-q", a, b),
        "`ckptconv diff`": python(programs.CKPTCONV_DIFF + programs.PEAK, "diff", a, b),
        "`cmp -s`": ["sh", "-c", '! cmp -s "$1" "$2"', "sh", str(a), str(b)],
    }
    bench.table(f"2 × {size / GIB:g} GiB that differ early", commands, unit="`cmp -s`")
    for each in (a, b):
        each.unlink()


def inspect(bench: Bench, size: int) -> None:
    """Compare `inspect` of a small file and of a large file with the import of torch."""
    small = make(bench.folder / "small.pt", 1 << 20)
    commands = {
        "`ckptconv inspect`, 1 MiB": ckptconv("inspect", small),
        f"`ckptconv inspect`, {size / GIB:g} GiB": ckptconv("inspect", bench.folder / "src.pt"),
        "`import torch`": python("import torch" + programs.PEAK),
    }
    bench.table("inspect", commands, unit="`import torch`")


def values(bench: Bench, size: int) -> None:
    """Compare the statistics of all tensors with reading the file and with torch's statistics."""
    src = make(bench.folder / "a.pt", size)
    commands = {
        "`cat`": ["sh", "-c", 'cat "$1" > /dev/null', "sh", str(src)],
        "`ckptconv inspect`, which reads no values": ckptconv("inspect", src, "--limit", "0"),
        "`ckptconv inspect --values`": ckptconv("inspect", src, "--values", "--limit", "0"),
        "`ckptconv inspect --histogram`": ckptconv("inspect", src, "--histogram", "--limit", "0"),
        "`torch.load`, the same without the histogram": python(programs.TORCH_VALUES + programs.PEAK, src, ""),
        "`torch.load(mmap=True)`, the same": python(programs.TORCH_VALUES + programs.PEAK, src, "mmap"),
    }
    bench.table(f"values of {size / GIB:g} GiB of float32", commands, "`cat`")


def pages(bench: Bench, size: int) -> None:  # noqa: ARG001 - the number of tensors counts, not their bytes
    """Measure the size of HTML pages and the cost of writing them."""
    commands = {}
    for n in (300, 3_000, 60_000):
        src, other = (
            make(bench.folder / f"{n}.pt", n, programs.MAKE_MANY),
            make(bench.folder / f"{n}_b.pt", n, programs.MAKE_MANY),
        )
        for name, words in (("inspect", [src]), ("diff", [src, other])):
            page = bench.folder / f"{name}_{n}.html"
            command = python(programs.CKPTCONV_DIFF + programs.PEAK, name, *words, "--html", page, "--force")
            subprocess.run(command, check=True, capture_output=True)
            commands[f"`{name} --html`, {n:,} tensors: {page.stat().st_size / 1e3:,.0f} kB"] = command
    bench.table("pages", commands, next(iter(commands)))


def many(bench: Bench, size: int) -> None:  # noqa: ARG001 - the number of tensors counts, not their bytes
    """Measure the cost of each tensor with 60,000 small tensors."""
    _many(bench, "60,000 tensors", programs.MAKE_MANY)


def parameters(bench: Bench, size: int) -> None:  # noqa: ARG001 - as above
    """Measure 60,000 small parameters, as a module's own ``__dict__`` contains them."""
    _many(bench, "60,000 parameters", programs.MAKE_PARAMETERS)


def training(bench: Bench, size: int) -> None:  # noqa: ARG001 - as above
    """Measure a model and the state of its Adam optimizer: 60,000 small tensors in total."""
    _many(bench, "60,000 tensors of a model and of Adam", programs.MAKE_TRAINING)


def mixed(bench: Bench, size: int) -> None:  # noqa: ARG001 - as above
    """Measure nested containers with tensors of four dtypes, views, ties, parameters and plain values."""
    _many(bench, "60,000 mixed tensors", programs.MAKE_MIXED)


def _many(bench: Bench, title: str, code: str) -> None:
    src, dst = make(bench.folder / "many.pt", 60_000, code), bench.folder / "many_cpu.pt"
    rival = "`torch.load` + `torch.save`"
    commands = {
        "`ckptconv convert --to cpu`": ckptconv("convert", "-q", "--force", src, dst, "--to", "cpu"),
        "`ckptconv inspect`": ckptconv("inspect", src),
        rival: python(programs.TORCH_MANY + programs.PEAK, src, dst),
    }
    bench.table(title, commands, rival)
    for each in (src, dst):
        each.unlink()


def containers(bench: Bench, size: int) -> None:  # noqa: ARG001 - as above
    """Measure conversions of 20,000 small tensors between containers, and `inspect` and `diff` of them."""
    src = make(bench.folder / "many.pt", 20_000, programs.MAKE_MANY)
    ranks = make(bench.folder / "many_ranks", 20_000 * 64, programs.MAKE_RANKS, 2, 20_000, 4)
    other, same = bench.folder / "many.safetensors", bench.folder / "same.pt"
    shards, dcp = bench.folder / "many_shards", bench.folder / "many_dcp"
    for words in ([other], [same], [shards, "--max-shard-size", "300kB"], [dcp, "--format", "dcp", "--ranks", 2]):
        subprocess.run(ckptconv("convert", "-q", src, *words), check=True, capture_output=True)

    def convert_to(name: str, of: Path) -> list[str]:
        return ckptconv("convert", "-q", "--force", of, bench.folder / name)

    commands = {
        "`.safetensors` → `.pt`": convert_to("out.pt", other),
        "`.pt` → `.safetensors`": convert_to("out.safetensors", src),
        "shards → `.pt`": convert_to("out.pt", shards),
        "DCP of 2 ranks → `.pt`": convert_to("out.pt", dcp),
        "`inspect` of `.pt`": ckptconv("inspect", src),
        "`inspect` of `.safetensors`": ckptconv("inspect", other),
        "`inspect` of shards": ckptconv("inspect", shards),
        "`inspect` of DCP of 2 ranks": ckptconv("inspect", dcp),
        "`inspect` of rank files, 2 ranks": ckptconv("inspect", ranks),
        "`diff` of two `.pt`": ckptconv("diff", src, same),
        "`diff` of `.pt` and `.safetensors`": python(programs.CKPTCONV_DIFF + programs.PEAK, "diff", src, other),
    }
    bench.table("20,000 tensors in other containers", commands, "`inspect` of `.pt`")
    for folder in (shards, dcp, ranks):
        shutil.rmtree(folder)
    for name in ("many.pt", "same.pt", "many.safetensors", "out.pt", "out.safetensors"):
        (bench.folder / name).unlink()


def share_blocks(bench: Bench, size: int) -> None:
    """Measure a retag on XFS, where files can share blocks. The number of new blocks is also printed.

    The file system is in a file that is mounted as a disk.
    """
    with xfs(bench.folder / "xfs.img", 4 * size) as disk:
        if disk is None:
            print("\nBlocks shared on XFS: skipped, needs root, `mkfs.xfs` and a loop device")
            return
        src, dst = make(disk / "src.pt", size), disk / "dst.pt"
        commands = {
            "`ckptconv convert`": ckptconv("convert", "-q", "--force", src, dst, "--to", "cpu"),
            "`cp --reflink=always`": ["cp", "--reflink=always", str(src), str(dst)],
            "`import click, json`": python("import click, json"),
        }
        bench.table(f"{size / GIB:g} GiB on XFS: cuda:0 → cpu", commands, "`import click, json`")
        for name in list(commands)[:2]:
            dst.unlink()
            before = used(disk)
            measure(commands[name])
            print(f"\n{name}: {(used(disk) - before) / 1024:,.0f} KiB of new blocks")


@contextmanager
def xfs(image: Path, size: int) -> Iterator[Path | None]:
    """Yield a folder on a new XFS file system, or None if it cannot be made."""
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
    """Return the number of bytes that are used on `disk`."""
    os.sync()
    space = os.statvfs(disk)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


#: For each table: its function, the part of the size that it uses, and the limit of its first row as a multiple of its
#: unit.
TABLES: dict[str, tuple[Callable[[Bench, int], None], float, float | None]] = {
    "convert": (convert, 1, 0.9), "large": (large, 4, 0.7), "to_safetensors": (to_safetensors, 1, 0.9),
    "from_safetensors": (from_safetensors, 1, None), "legacy": (legacy, 1, None), "shards": (shards, 1, None),
    "distributed": (distributed, 1, 0.4), "ranks": (ranks, 4, None), "to_distributed": (to_distributed, 2, 1.1),
    "zero_2": (zero_2, 2, 1.2), "zero_3": (zero_3, 2, 1.2), "cast": (cast, 0.25, 1.2),
    "quantized": (quantized, 1, 1.5),
    "gather": (gather, 0.5, None), "diff": (diff, 1, None), "diff_quiet": (diff_quiet, 1, None),
    "verify": (verify, 1, None), "start": (start, 1, 2), "inspect": (inspect, 1, None), "batch": (batch, 1, 1.5),
    "many": (many, 1, 0.2), "parameters": (parameters, 1, 0.3), "training": (training, 1, 0.3),
    "mixed": (mixed, 1, 0.3), "containers": (containers, 1, None), "load": (load, 1, None),
    "save": (save, 0.5, None), "values": (values, 1, None), "pages": (pages, 1, None),
    "share_blocks": (share_blocks, 0.5, None),
}  # a table  # fmt: skip
