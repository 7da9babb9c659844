"""Tests of checkpoint sets: reading several shards as one graph, and writing one graph as several shards."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv import convert
from ckptconv.checkpoint.merging import are_below
from ckptconv.errors import CkptconvError
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.inspection.diagnosis.host import this_host
from ckptconv.inspection.summary import summarize
from ckptconv.pickles.machine import PickleMachine
from ckptconv.pickles.rows import RowCall, RowMachine
from tests.support.archives import flip_bit, records_of, rezip
from tests.support.hostile_bytes import found_in
from tests.support.injection import content_of
from tests.support.judge import assert_same
from tests.support.writers import sharded

LONG = 200_000  # characters: such a text is not read into memory but stays in the file


def shards_with_texts() -> list[dict[str, Any]]:
    """Return three shards. Each contains a tensor, and a text and bytes that are too long to be kept in memory."""
    return [
        {
            f"w{i}": torch.arange(5.0) * i,
            f"text{i}": Random(i).randbytes(LONG // 2).hex(),
            f"bytes{i}": Random(-i).randbytes(LONG),
        }
        for i in range(3)
    ]


@pytest.mark.parametrize("deflated", [(), (1,), (0, 1, 2)])
def test_long_texts_come_from_their_own_shard(tmp_path: Path, deflated: tuple[int, ...]) -> None:
    """Long texts and bytes are read from the correct shard, also if the shard is deflated and its pickle is in
    memory.
    """
    folder = sharded(tmp_path / "in", *shards_with_texts())
    for i in deflated:
        shard = sorted(folder.iterdir())[i]
        rezip(shard, shard, method=zipfile.ZIP_DEFLATED)
    expected = {name: value for shard in shards_with_texts() for name, value in shard.items()}
    convert(folder, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=False), expected)
    convert(folder, tmp_path / "out")
    again = {}
    for path in sorted((tmp_path / "out").glob("*.bin")):
        again |= torch.load(path, weights_only=False)
    assert_same(again, expected)


def test_a_shard_in_which_nothing_changes_keeps_its_pickle(tmp_path: Path) -> None:
    """If a set is converted to a set with the same shards, the pickle of each shard keeps its bytes."""
    shards = [
        OrderedDict(
            (f"{i}.{j}", torch.nn.Parameter(torch.arange(4.0)) if j else torch.arange(6.0).view(2, 3).t())
            for j in range(3)
        )
        for i in range(3)
    ]
    folder = sharded(tmp_path / "in", *shards)
    convert(folder, tmp_path / "out")
    for path in sorted(folder.iterdir()):
        old, new = records_of(path), records_of(tmp_path / "out" / path.name)
        assert old["data.pkl"] == new["data.pkl"]
        assert {name for name in new if name.startswith("data/")} == {name for name in old if name.startswith("data/")}


def test_equal_storage_keys_in_several_shards(tmp_path: Path) -> None:
    """Each shard names its first storage '0'. In the merged file, each tensor has its own data, and views still share
    memory with their base.
    """
    base = [torch.arange(10.0) + 100 * i for i in range(4)]
    folder = sharded(tmp_path / "in", *({f"{i}.all": each, f"{i}.part": each[2:5]} for i, each in enumerate(base)))
    convert(folder, tmp_path / "out.pt", map_location="cpu")
    loaded = torch.load(tmp_path / "out.pt")
    for i, each in enumerate(base):
        assert torch.equal(loaded[f"{i}.all"], each)
        loaded[f"{i}.all"][3] = -1
        assert loaded[f"{i}.part"][1] == -1


def test_torch_before_1_6(tmp_path: Path) -> None:
    """Shards in the format before torch 1.6 are merged into one file, or written as shards in the current format."""
    shards = [{f"{i}.w": torch.arange(6.0).view(2, 3) + i} for i in range(2)]
    folder = sharded(tmp_path / "in", *shards, _use_new_zipfile_serialization=False)
    convert(folder, tmp_path / "out.safetensors")
    assert_same(ckptconv.load(tmp_path / "out.safetensors"), shards[0] | shards[1])
    convert(folder, tmp_path / "out", map_location="cpu")
    assert_same(torch.load(tmp_path / "out" / "pytorch_model-00002-of-00002.bin"), shards[1])


def test_shards_in_two_byte_orders_are_refused(tmp_path: Path) -> None:
    """Shards in different byte orders are not merged, because a file has only one byte order."""
    folder = sharded(tmp_path / "in", *({f"{i}": torch.arange(3.0)} for i in range(2)))
    path = folder / "pytorch_model-00002-of-00002.bin"
    rezip(path, path, {"byteorder": b"big"})
    with pytest.raises(CkptconvError, match="byte orders"):
        convert(folder, tmp_path / "out.pt")


def test_damage_in_one_shard_is_found(tmp_path: Path) -> None:
    """A damaged shard is found. A PyTorch target keeps the wrong checksum of the record. A safetensors target cannot
    store checksums, so the conversion fails.
    """
    folder = sharded(tmp_path / "in", *({f"{i}": torch.arange(5000.0) + i} for i in range(2)))
    path = folder / "pytorch_model-00002-of-00002.bin"
    flip_bit(path, found_in(path.read_bytes(), torch.arange(5000.0).add(1).numpy().tobytes()[400:440]))
    with pytest.raises(CkptconvError, match=r"00002.*checksum is wrong"):
        convert(folder, tmp_path / "out.safetensors")
    convert(folder, tmp_path / "out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() == "out/data/1"


def test_more_shards_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    """A set with more shards than the soft limit of open files is read, and changed in place, because ckptconv raises
    the soft limit.
    """
    folder = sharded(tmp_path / "in", *({f"{i:03}": torch.arange(2.0) + i} for i in range(150)))
    program = (
        "import resource, sys, ckptconv\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "ckptconv.convert(sys.argv[1], sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "ckptconv.convert(sys.argv[1], in_place=True, add_prefix='x')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(folder), str(tmp_path / "out.pt")], check=True)
    assert [*torch.load(tmp_path / "out.pt")] == [f"{i:03}" for i in range(150)]


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit"), [("bin", 40), ("safetensors", 75)])
def test_more_shards_than_files_can_be_open(kind: str, limit: int, tmp_path: Path) -> None:
    """`convert`, `inspect`, `verify`, `diff` and several threads read a set with more shards than the hard limit of
    open files, with the same results as below the limit. A conversion in place fails.
    """
    shards = [{f"m.{i:03}": torch.arange(9000.0) + i, f"m.b{i:03}": torch.ones(1)} for i in range(70)]
    folder = tmp_path / "in"
    if kind == "bin":
        sharded(folder, *shards)
    else:
        folder.mkdir()
        for i, shard in enumerate(shards, 1):
            save_file(shard, folder / f"model-{i:05}-of-00070.safetensors")
    for name in ("below", "above"):
        (tmp_path / name).mkdir()
    program = f"""
import resource, sys, ckptconv
from concurrent.futures import ThreadPoolExecutor
from ckptconv.cli.main import main

def convert(out):
    for target, *flags in (["m.pt"], ["set"], ["half.safetensors", "--dtype", "bf16"]):
        assert not main(["convert", "in", f"{{out}}/{{target}}", "--verify", *flags])

convert("below")
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
assert not main(["inspect", "in"]) and not main(["verify", "in"])
convert("above")
assert not main(["diff", "--full", "in", "above/set"])
with ckptconv.open("in") as file, ThreadPoolExecutor(4) as pool:
    loaded = dict(zip(file.tensors, pool.map(file.load, file.tensors)))
whole = ckptconv.load("in")
for i in range(70):
    assert loaded[f"m.{{i:03}}"].tolist() == whole[f"m.{{i:03}}"].tolist() == [float(n + i) for n in range(9000)]
assert main(["convert", "in", "--in-place", "--to", "cpu", "--add-prefix", "x"]) == 1
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Too many open files\n  ulimit -n shows how many" in done.stderr
    for target in ("m.pt", "set", "half.safetensors"):
        assert content_of(tmp_path / "below" / target) == content_of(tmp_path / "above" / target)


@pytest.mark.untraced
def test_rows_stay_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards whose tensors are parsed as rows give the same summary and the same output as shards that are parsed
    without rows. Reading the summary expands only a few rows.
    """
    shards = [
        OrderedDict((f"{i}.{j}", torch.nn.Parameter(torch.rand(4)) if j % 5 else torch.rand(4)) for j in range(80))
        for i in range(3)
    ]
    shards[1]["tied"] = shards[1]["1.3"]
    folder, results = sharded(tmp_path / "in", *shards), []
    for machine in (RowMachine, PickleMachine):
        monkeypatch.setattr("ckptconv.pickles.parser.RowMachine", machine)
        with open_input(folder) as source:
            checkpoint = opening.read(source)
            said = summarize(checkpoint, this_host()).as_dict()
            rows = [node for node in checkpoint.graph.outer_calls if isinstance(node, RowCall) and node.row]
            assert len(rows) > 100 if machine is RowMachine else not rows
            assert len(checkpoint.graph.calls) == 1 + 3 * 16 * 2 + 3 * 64 * 4
        out = tmp_path / machine.__name__
        out.mkdir()
        for target, size, tag in (("same", None, None), ("one.pt", None, "cpu"), ("dealt", 900, "cpu")):
            convert(folder, out / target, max_shard_size=size, map_location=tag)
        written = {str(path.relative_to(out)): content_of(path) for path in out.rglob("*") if path.is_file()}
        results.append((said, written))
    assert results[0] == results[1]


def test_one_more_conversion_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two conversions of the same set with the same options write the same bytes."""
    folder = sharded(tmp_path / "in", *({f"{i}.{j}": torch.randn(20) for j in range(4)} for i in range(3)))
    runs = tmp_path / "1", tmp_path / "2"
    for run in runs:
        run.mkdir()
    for dst, size in (("m.pt", None), ("m.safetensors", None), ("same", None), ("dealt", 200)):
        for run in runs:
            convert(folder, run / dst, map_location="cpu", max_shard_size=size)
        first, second = (content_of(run / dst) for run in runs)
        assert first == second
    assert json.loads((tmp_path / "1" / "dealt" / "pytorch_model.bin.index.json").read_text())["metadata"]


def test_are_below() -> None:
    """`are_below` reports whether every path is at or below one of the other paths. Each path is compared with only one
    of them.
    """

    class Read(str):
        times = 0

        def __format__(self, spec: str) -> str:
            Read.times += 1
            return str(self)

        def startswith(self, *args: Any) -> bool:
            Read.times += 1
            return super().startswith(*args)

    tops = ["a", "a/b", "a-b", "c/d", "", "e."]
    assert are_below(["a", "a/b/c", "a/x", "a-b", "c/d/e", "", "e."], tops)
    assert not any(are_below([path], tops) for path in ("ab", "a.b", "c", "c/de", "e", "b"))
    assert are_below([], []) and not are_below(["a"], [])
    many = [f"layers.{i}" for i in range(300)]
    assert are_below(map(Read, many), many) and Read.times == 300
