"""Tests of ``verify=True``, which compares the checksums of the input before anything is written. The report counts the
compared records.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.conversion.plan import Verified
from tests.support.archives import rezipped
from tests.support.command import Command
from tests.support.conversions import refused
from tests.support.hostile_bytes import data_of, flipped

STATE = {"module.a": torch.arange(1000.0), "module.b": torch.ones(500)}
DEVICES = {"map_location": "cuda"}


def damaged(path: Path, record: str) -> None:
    """Flip a bit of the record `record` in the file at `path`, without a change of its checksum."""
    data = path.read_bytes()
    path.write_bytes(flipped(data, data_of(data, record) + 100))


def sharded(folder: Path) -> Path:
    """Write `STATE` to `folder` as a set of two shards. Return the path of the first shard."""
    torch.save(STATE, folder / "m.pt")
    ckptconv.convert(folder / "m.pt", folder / "set", max_shard_size="5kB")
    return next(folder.glob("set/*00001*"))


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_damaged_input_is_refused(tmp_path: Path, dry_run: bool) -> None:
    """``verify=True`` refuses a damaged input. Without it, the damage is copied with the checksum. A dry run does not
    compare checksums.
    """
    src, dst = tmp_path / "m.pt", tmp_path / "o.pt"
    torch.save(STATE, src)
    damaged(src, "m/data/0")
    if dry_run:
        assert ckptconv.convert(src, dst, verify=True, dry_run=True).verified is None
        return
    refused(ckptconv.MalformedError, r"data/0: the record is damaged", src, dst, verify=True, **DEVICES)
    assert ckptconv.convert(src, dst, **DEVICES).verified is None
    assert not ckptconv.verify(dst).ok


@pytest.mark.parametrize("dst", ["out.pt", "new"])
def test_each_shard_is_compared(tmp_path: Path, dst: str) -> None:
    """The checksums of every shard are compared, whether the output is one file or a set."""
    shard = sharded(tmp_path)
    found = ckptconv.convert(tmp_path / "set", tmp_path / f"good-{dst}", verify=True, **DEVICES).verified
    assert found and found.records > 2 and found.nbytes > 6000
    damaged(shard, f"{shard.stem}/data/0")
    refused(ckptconv.MalformedError, "damaged", tmp_path / "set", tmp_path / dst, verify=True, **DEVICES)


def test_in_place(tmp_path: Path) -> None:
    """In place, the checksums of all shards are compared before the first shard changes. The output is not read
    back.
    """
    shard = sharded(tmp_path)
    options: dict[str, Any] = {"in_place": True, "verify": True, **DEVICES}
    found = ckptconv.convert(tmp_path / "set", **options).verified
    assert found and found.records > 2 and not found.output
    assert ckptconv.undo(tmp_path / "set") > 0
    damaged(shard, f"{shard.stem}/data/0")
    before = {each: each.read_bytes() for each in shard.parent.iterdir()}
    with pytest.raises(ckptconv.MalformedError, match="damaged"):
        ckptconv.convert(tmp_path / "set", **options)
    assert {each: each.read_bytes() for each in shard.parent.iterdir()} == before


def test_the_report_counts_the_compared_records(tmp_path: Path, command: Command) -> None:
    """The report counts the compared records, or states that the input has no checksums."""
    torch.save(STATE, tmp_path / "m.pt")
    save_file(STATE, tmp_path / "m.safetensors")
    (tmp_path / "deflated.pt").write_bytes(rezipped((tmp_path / "m.pt").read_bytes(), method=zipfile.ZIP_DEFLATED))
    said = command("convert", tmp_path / "m.pt", tmp_path / "a.pt", "--verify").err
    assert "verified      8 records of the input (6.29 kB)" in said
    assert "compared with their checksums, the output read back" in said
    command("convert", tmp_path / "m.safetensors", tmp_path / "b.pt", "--verify", err="the input has no checksums")
    assert ckptconv.save(STATE, tmp_path / "c.pt", verify=True).verified == Verified(0, 0, output=True)
    found = ckptconv.convert(tmp_path / "deflated.pt", tmp_path / "d.pt", verify=True).verified
    assert found and found.records > 2
