"""Checkpoints of every kind that can be changed in place, and the conditions that must hold for them at any moment."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.byteranges.undo_journal import HOT, state_of, target_of
from ckptconv.output.files import is_own_file
from tests.support.archives import without_crc32
from tests.support.torn_writes import loads
from tests.support.writers import distributed

#: The contents of the files of a checkpoint, by their names.
Contents = dict[str, bytes]
KINDS = ("zip", "legacy", "pickle", "safetensors", "shards", "dcp")
#: A prefix that is longer than any name. Names with this prefix do not fit in the place of the old names.
LONG = "a.name.that.is.much.longer.than.it.was."


def make(folder: Path, kind: str, tensors: int) -> Path:
    """Make a checkpoint with `tensors` tensors in `folder`, and return the path of its file or folder.

    A zip is saved without checksums, so no checksum can reveal a torn file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"layer{i}.weight": torch.arange(4.0) + i for i in range(tensors)}
    path = folder / {"pickle": "model.pkl", "safetensors": "model.safetensors"}.get(kind, "model.pt")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(state, 4))
    elif kind == "safetensors":
        save_file(state, path)
    elif kind == "dcp":
        path = distributed(state, folder / "run")
    else:
        with without_crc32():
            torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
    if kind == "shards":
        ckptconv.convert(path, folder / "set", max_shard_size=16 * tensors // 3 + 16, format="pt")
        path.unlink()
        path = folder / "set"
    return path


def contents(path: Path) -> Contents:
    """Return the contents of the checkpoint's own files, without journals and temporary files."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files if not is_own_file(file.name)}


def files_of(path: Path) -> list[Path]:
    """Return the paths of the checkpoint's own files."""
    return [path] if path.is_file() else [path / name for name in contents(path)]


def torn(path: Path, *wholes: Contents) -> str | None:
    """Return what is wrong with the checkpoint at `path` if it equals none of `wholes`. Return None if nothing is
    wrong.

    A mixture must have a hot journal. A file that is torn must not load, and at least one file must not load.
    """
    found = contents(path)
    if found in wholes:
        return None
    if not any(state_of(file) == HOT for file in files_of(path)):
        return "a mixture without a hot journal"
    for file in files_of(path):
        if all(found[file.name] != whole[file.name] for whole in wholes) and loads(file):
            return f"{file.name} is torn and loads"
    return "a mixture of which every file loads" if all(map(loads, files_of(path))) else None


def not_undone(path: Path, *olds: Contents) -> str | None:
    """Run ``undo`` if a journal is hot, and return what is wrong afterward. Return None if nothing is wrong.

    ``undo`` must restore one of `olds` and remove all journals.
    """
    hot = next((file for file in files_of(path) if state_of(file) == HOT), None)
    if hot is None:
        return None
    undone = subprocess.run([sys.executable, "-m", "ckptconv", "undo", "-q", str(hot)], capture_output=True)
    if undone.returncode:
        return f"undo failed: {undone.stderr.decode()[-200:]}"
    if contents(path) not in olds:
        return "undo gave back what was not there"
    return "undo left a journal" if journals(path) else None


def journals(path: Path) -> list[str]:
    """Return the names of the journals next to the checkpoint's files."""
    return [name for name in os.listdir(path.parent if path.is_file() else path) if target_of(name)]
