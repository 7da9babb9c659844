"""Tests of the discovery of checkpoints in a folder by the names of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptconv.conversion.discovery import find, find_in
from ckptconv.errors import InputError
from tests.support.paths import fill


def found_in(folder: Path) -> list[tuple[str, str, list[str]]]:
    return [
        (str(each.path.relative_to(folder)), each.kind, [part.name for part in each.parts]) for each in find(folder)
    ]


def kinds(folder: Path) -> dict[str, str]:
    return {path: kind for path, kind, _ in found_in(folder)}


def test_checkpoints_are_told_by_their_suffix(tmp_path: Path) -> None:
    """Files with the suffix of a checkpoint are found at any depth and in any case of letters. All other files are
    'other'.
    """
    files = ["a.pt", "b.PTH", "c.bin", "d/e/f.ckpt", "g.safetensors", "h.th", "i.pth.tar", "j.pkl"]
    others = ["config.json", "k.tar", "pt", ".gitattributes", "d/l.txt"]
    fill(tmp_path, *files, *others)
    assert kinds(tmp_path) == {**dict.fromkeys(files, "file"), **dict.fromkeys(others, "other")}


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    """Shards are found as one set, with or without an index, also if shards are missing or have a variant. A set of
    zero shards does not exist, so its file is found as a single file.
    """
    fill(
        tmp_path,
        "a/model-00001-of-00003.safetensors",
        "a/model-00003-of-00003.safetensors",
        "a/model.safetensors.index.json",
        "a/optimizer.pt",
        "b/pytorch_model-00001-of-00002.bin",
        "b/pytorch_model-00002-of-00002.bin",
        "b/model-00001-of-00002.safetensors",
        "c/model.fp16-00001-of-00001.safetensors",
        "c/model.safetensors.index.fp16.json",
        "d/model.safetensors.index.json",
        "e/model-00000-of-00000.bin",
    )
    assert found_in(tmp_path) == [
        (
            "a/model.safetensors.index.json",
            "shards",
            ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json"],
        ),
        ("a/optimizer.pt", "file", ["optimizer.pt"]),
        ("b", "shards", ["model-00001-of-00002.safetensors"]),
        ("b", "shards", ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]),
        (
            "c/model.safetensors.index.fp16.json",
            "shards",
            ["model.fp16-00001-of-00001.safetensors", "model.safetensors.index.fp16.json"],
        ),
        ("d/model.safetensors.index.json", "shards", ["model.safetensors.index.json"]),
        ("e/model-00000-of-00000.bin", "file", ["model-00000-of-00000.bin"]),
    ]


def test_chunks_are_one_checkpoint(tmp_path: Path) -> None:
    """A DCP folder is found as one checkpoint, also without its metadata or without chunks. Lightning's ``meta.pt`` is
    a file. A file named ``.metadata`` with other content is not a checkpoint.
    """
    fill(
        tmp_path,
        "x.ckpt/.metadata",
        "x.ckpt/__0_0.distcp",
        "x.ckpt/__1_0.distcp",
        "x.ckpt/meta.pt",
        "y/__0_0.distcp",
        "z/.metadata",
        "zz/.metadata",
        "s/shard-00001-model-00001-of-00001.safetensors",
    )
    (tmp_path / "zz" / ".metadata").write_bytes(b"\x80\x02}.")
    assert found_in(tmp_path) == [
        ("s", "dcp", ["shard-00001-model-00001-of-00001.safetensors"]),
        ("x.ckpt", "dcp", [".metadata", "__0_0.distcp", "__1_0.distcp"]),
        ("x.ckpt/meta.pt", "file", ["meta.pt"]),
        ("y", "dcp", ["__0_0.distcp"]),
        ("z/.metadata", "other", [".metadata"]),
        ("zz", "dcp", [".metadata"]),
    ]


def test_hidden_folders_and_links_to_folders_are_not_entered(tmp_path: Path) -> None:
    """Hidden folders and links to folders are listed as unentered if they are not empty. A link to a file is a file,
    whatever its target is. Temporary files of a killed conversion are ignored.
    """
    fill(tmp_path, ".cache/a.pt", ".empty/", "b/c.pt", ".d.pt.ckptconv-0a1b2c.tmp", ".e.ckptconv-0a1b2c.tmp/f.pt")
    os.symlink("b", tmp_path / "link")
    os.symlink("b/c.pt", tmp_path / "link.pt")
    os.symlink("nowhere", tmp_path / "gone.pt")
    os.symlink("round", tmp_path / "round")
    assert kinds(tmp_path) == {
        ".cache": "unentered",
        "b/c.pt": "file",
        "gone.pt": "file",
        "link": "unentered",
        "link.pt": "file",
        "round": "other",
    }


def test_blobs_of_a_hub_cache(tmp_path: Path) -> None:
    """The blobs in a cache of the Hub are not listed, because its snapshots contain links to them. Other folders named
    ``blobs`` are listed.
    """
    fill(tmp_path, "hub/blobs/0a1b", "hub/refs/main", "hub/snapshots/abc/", "other/blobs/x.pt", "other/snapshots/y.pt")
    os.symlink("../../blobs/0a1b", tmp_path / "hub" / "snapshots" / "abc" / "model.safetensors")
    assert kinds(tmp_path) == {
        "hub/refs/main": "other",
        "hub/snapshots/abc/model.safetensors": "file",
        "other/blobs/x.pt": "file",
        "other/snapshots/y.pt": "file",
    }


def test_find_in_does_not_enter_folders(tmp_path: Path) -> None:
    """``find_in`` does not enter subfolders."""
    fill(tmp_path, "a.pt", "b/c.pt")
    assert [each.path.name for each in find_in(tmp_path)] == ["a.pt"]


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    """A folder that cannot be listed raises an InputError."""
    with pytest.raises(InputError, match="cannot be listed"):
        find(tmp_path / "nowhere")


def test_the_order_is_that_of_the_paths(tmp_path: Path) -> None:
    """Checkpoints are found in the order of their paths."""
    fill(tmp_path, *(f"{i % 7}/{i * 37 % 100}.pt" for i in range(100)))
    found = [each.path.parts for each in find(tmp_path)]
    assert len(found) == 100
    assert found == sorted(found)
