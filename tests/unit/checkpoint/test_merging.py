"""Several checkpoints as one graph, and one as several: nothing is mixed up, moved or lost on the way."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv import convert
from ckptconv.errors import CkptconvError
from tests.support.judge import assert_same

LONG = 200_000  # characters: long enough to stay in the file


def write_set(folder: Path, shards: list[Any], **options: Any) -> Path:
    """SHARDS as files of torch.save, without an index."""
    folder.mkdir()
    for i, shard in enumerate(shards, 1):
        torch.save(shard, folder / f"pytorch_model-{i:05d}-of-{len(shards):05d}.bin", **options)
    return folder


def deflate(path: Path) -> None:
    """Write the archive anew, deflated."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in records.items():
            new.writestr(name, data)


def shards_with_texts() -> list[dict[str, Any]]:
    """Three shards, each with texts and bytes that are too long to be held, and a tensor."""
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
    """Texts that stay in the files are read from the right one, also where a shard
    is deflated and its pickle in memory.
    """
    folder = write_set(tmp_path / "in", shards_with_texts())
    for i in deflated:
        deflate(sorted(folder.iterdir())[i])
    expected = {name: value for shard in shards_with_texts() for name, value in shard.items()}
    convert(folder, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=False), expected)
    convert(folder, tmp_path / "out")
    again = {}
    for path in sorted((tmp_path / "out").glob("*.bin")):
        again |= torch.load(path, weights_only=False)
    assert_same(again, expected)


def test_a_shard_in_which_nothing_changes_keeps_its_pickle(tmp_path: Path) -> None:
    """Shards that stay apart are written as each alone would be: their pickles have the bytes that torch wrote."""
    shards = [
        OrderedDict(
            (f"{i}.{j}", torch.nn.Parameter(torch.arange(4.0)) if j else torch.arange(6.0).view(2, 3).t())
            for j in range(3)
        )
        for i in range(3)
    ]
    folder = write_set(tmp_path / "in", shards)
    convert(folder, tmp_path / "out")
    for path in sorted(folder.iterdir()):
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "out" / path.name) as new:
            pickles = [file.read(f"{path.stem}/data.pkl") for file in (old, new)]
            assert pickles[0] == pickles[1]
            assert {name for name in new.namelist() if "/data/" in name} == {
                name for name in old.namelist() if "/data/" in name
            }


def test_storages_of_one_key_in_several_shards(tmp_path: Path) -> None:
    """Each shard calls its first storage 0; merged, each tensor keeps its own, and views keep sharing."""
    base = [torch.arange(10.0) + 100 * i for i in range(4)]
    folder = write_set(tmp_path / "in", [{f"{i}.all": each, f"{i}.part": each[2:5]} for i, each in enumerate(base)])
    convert(folder, tmp_path / "out.pt", map_location="cpu")
    loaded = torch.load(tmp_path / "out.pt")
    for i, each in enumerate(base):
        assert torch.equal(loaded[f"{i}.all"], each)
        loaded[f"{i}.all"][3] = -1
        assert loaded[f"{i}.part"][1] == -1


def test_torch_before_1_6(tmp_path: Path) -> None:
    """Shards in torch's older format are merged like others, and stay shards in today's."""
    shards = [{f"{i}.w": torch.arange(6.0).view(2, 3) + i} for i in range(2)]
    folder = write_set(tmp_path / "in", shards, _use_new_zipfile_serialization=False)
    convert(folder, tmp_path / "out.safetensors")
    assert_same(ckptconv.load(tmp_path / "out.safetensors"), shards[0] | shards[1])
    convert(folder, tmp_path / "out", map_location="cpu")
    assert_same(torch.load(tmp_path / "out" / "pytorch_model-00002-of-00002.bin"), shards[1])


def test_numbers_in_two_byte_orders_are_refused(tmp_path: Path) -> None:
    """One file can have one order of bytes: shards in two are not merged."""
    folder = write_set(tmp_path / "in", [{f"{i}": torch.arange(3.0)} for i in range(2)])
    path = folder / "pytorch_model-00002-of-00002.bin"
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            new.writestr(name, b"big" if name.endswith("byteorder") else data)
    with pytest.raises(CkptconvError, match="byte orders"):
        convert(folder, tmp_path / "out.pt")


def test_damage_in_one_shard_is_found(tmp_path: Path) -> None:
    """The checksum of each shard's record is carried over, or checked where the target has no place for it."""
    folder = write_set(tmp_path / "in", [{f"{i}": torch.arange(5000.0) + i} for i in range(2)])
    path = folder / "pytorch_model-00002-of-00002.bin"
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(5000.0).add(1).numpy().tobytes()[400:440])
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CkptconvError, match=r"00002.*checksum is wrong"):
        convert(folder, tmp_path / "out.safetensors")
    convert(folder, tmp_path / "out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() == "out/data/1"


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """A set of more shards than the soft limit of open files is read, as far as the hard limit goes."""
    import subprocess
    import sys

    folder = write_set(tmp_path / "in", [{f"{i:03}": torch.arange(2.0) + i} for i in range(150)])
    program = (
        "import resource, sys, ckptconv\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "ckptconv.convert(sys.argv[1], sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(folder), str(tmp_path / "out.pt")], check=True)
    assert [*torch.load(tmp_path / "out.pt")] == [f"{i:03}" for i in range(150)]


def test_one_more_conversion_gives_the_same_bytes(tmp_path: Path) -> None:
    """The same set and flags give the same bytes, merged, dealt anew and as it was."""
    folder = write_set(tmp_path / "in", [{f"{i}.{j}": torch.randn(20) for j in range(4)} for i in range(3)])
    for options in (
        {"dst": "m.pt"},
        {"dst": "m.safetensors"},
        {"dst": "same"},
        {"dst": "dealt", "max_shard_size": 200},
    ):
        options = dict(options)
        dst = str(options.pop("dst"))
        found = []
        for run in ("1", "2"):
            (tmp_path / run).mkdir(exist_ok=True)
            convert(folder, tmp_path / run / dst, map_location="cpu", **options)  # type: ignore[arg-type]
            out = tmp_path / run / dst
            found.append({p.name: p.read_bytes() for p in ([out] if out.is_file() else sorted(out.iterdir()))})
        assert found[0] == found[1]
    assert json.loads((tmp_path / "1" / "dealt" / "pytorch_model.bin.index.json").read_text())["metadata"]
