"""Short forms of the steps of nearly every test: read a checkpoint, convert it, and load the output."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import CkptconvError
from ckptconv.formats import opening

__all__ = [
    "Error",
    "converted",
    "ends_in",
    "loaded",
    "metadata_of",
    "not_undone",
    "read",
    "refused",
    "refused_in_place",
    "run_without_torch",
    "saved_at",
    "unreadable",
]

Error = TypeVar("Error", bound=CkptconvError)


def saved_at(path: Path, obj: object, **options: Any) -> Path:
    """Save `obj` at `path` with ``torch.save`` and its `options`. Return `path`."""
    torch.save(obj, path, **options)
    return path


def saved_in_each_format(folder: Path, state: dict[str, torch.Tensor], shard_size: str) -> Path:
    """Save `state` in each format in `folder`, and as a set of shards of at most `shard_size`. Return `folder`."""
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "s.safetensors")
    ckptconv.convert(folder / "s.safetensors", folder / "set/", max_shard_size=shard_size)
    return folder


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in the file at `path`, and close the file."""
    with Source(path) as source:
        return opening.read(source)


@contextmanager
def ends_in(kind: type[Error], words: str | None, *folders: Path) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Fail unless this context raises an error of `kind` whose message matches `words`.

    The names of `folders` in the message are ignored, because pytest names them after the test.
    """
    with pytest.raises(kind) as caught:
        yield caught
    said = str(caught.value)
    for folder in folders:
        said = said.replace(str(folder), "FOLDER")
    assert words is None or re.search(words, said), said


def unreadable(path: Path, kind: type[Error], words: str | None = None) -> Error:
    """Return the error that reading `path` raises. Fail unless it is a `kind` whose message matches `words`."""
    with ends_in(kind, words, path.parent) as caught:
        read(path)
    return caught.value


def loaded(path: Path, **options: Any) -> Any:
    """Return the object that torch, safetensors or pickle loads from the file at `path`.

    Args:
        path: A `.safetensors` or `.pkl` file. Any other file is loaded with torch.
        options: The options of `torch.load`.
    """
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".pkl":
        return pickle.loads(path.read_bytes())
    return torch.load(path, **options)


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata in the header of the safetensors file at `path`, read with the safetensors library."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def converted(src: Path, dst: Path, **options: Any) -> Any:
    """Convert `src` to `dst`, which may exist, and load the output."""
    ckptconv.convert(src, dst, force=True, **options)
    return loaded(dst)


def refused(kind: type[Error], words: str | None, src: Path, dst: Path, **options: Any) -> Error:
    """Return the error that converting `src` to `dst` raises. The error must be of `kind`, and its message must match
    `words`. The folder of `dst` must contain the same files as before.
    """
    before = sorted(os.listdir(dst.parent))
    with ends_in(kind, words, src.parent, dst.parent) as caught:
        ckptconv.convert(src, dst, **options)
    assert sorted(os.listdir(dst.parent)) == before
    return caught.value


def refused_in_place(kind: type[Error], words: str | None, path: Path, **options: Any) -> Error:
    """Return the error that converting `path` in place raises. The error must be of `kind`, and its message must match
    `words`. No file in the folder of `path` may change.
    """
    with _unchanged(path.parent), ends_in(kind, words, path.parent) as caught:
        ckptconv.convert(path, in_place=True, **options)
    return caught.value


def not_undone(kind: type[Error], words: str | None, path: Path) -> Error:
    """Return the error that undoing the change of `path` raises. The error must be of `kind`, and its message must
    match `words`. No file in the folder may change.
    """
    with _unchanged(path if path.is_dir() else path.parent), ends_in(kind, words, path.parent) as caught:
        ckptconv.undo(path)
    return caught.value


@contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    """Fail if this context changes, adds or removes a file in or below `folder`."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = files()
    yield
    assert files() == before


def run_without_torch(program: str, *arguments: object, **environment: str) -> None:
    """Run the Python `program` in a new process. Fail if it ends with an error or has imported torch."""
    code = f"import sys\n{program}\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
