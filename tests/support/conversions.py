"""Short forms for what nearly every test does: read a checkpoint, convert one, load what came out."""

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
    """`path`, at which torch has saved `obj` with these `options` of ``torch.save``."""
    torch.save(obj, path, **options)
    return path


def saved_in_each_format(folder: Path, state: dict[str, torch.Tensor], shard_size: str) -> Path:
    """`folder`, in which `state` is saved in each format, and as a set of shards of at most `shard_size`."""
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "s.safetensors")
    ckptconv.convert(folder / "s.safetensors", folder / "set/", max_shard_size=shard_size)
    return folder


def read(path: Path) -> Checkpoint:
    """The checkpoint in the file at `path`, which is closed again."""
    with Source(path) as source:
        return opening.read(source)


@contextmanager
def ends_in(kind: type[Error], words: str | None, *folders: Path) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Fail unless this context ends in a `kind` of error that says `words`.

    They count nowhere in the names of `folders`, which pytest calls after the test.
    """
    with pytest.raises(kind) as caught:
        yield caught
    said = str(caught.value)
    for folder in folders:
        said = said.replace(str(folder), "FOLDER")
    assert words is None or re.search(words, said), said


def unreadable(path: Path, kind: type[Error], words: str | None = None) -> Error:
    """The error, a `kind` that says `words`, in which reading the file at `path` ends."""
    with ends_in(kind, words, path.parent) as caught:
        read(path)
    return caught.value


def loaded(path: Path, **options: Any) -> Any:
    """What torch, safetensors' own library or pickle, by the suffix, loads from the file at `path`.

    Args:
        path: A `.safetensors` or `.pkl` file; any other is for torch.
        options: Those of `torch.load`.
    """
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".pkl":
        return pickle.loads(path.read_bytes())
    return torch.load(path, **options)


def metadata_of(path: Path) -> dict[str, str]:
    """The texts in the header of the safetensors file at `path`, by the library."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def converted(src: Path, dst: Path, **options: Any) -> Any:
    """Convert `src` to `dst`, in the place of an older one, and load it."""
    ckptconv.convert(src, dst, force=True, **options)
    return loaded(dst)


def refused(kind: type[Error], words: str | None, src: Path, dst: Path, **options: Any) -> Error:
    """The error, a `kind` that says `words`, in which converting `src` to `dst` ends; nothing is written."""
    before = sorted(os.listdir(dst.parent))
    with ends_in(kind, words, src.parent, dst.parent) as caught:
        ckptconv.convert(src, dst, **options)
    assert sorted(os.listdir(dst.parent)) == before
    return caught.value


def refused_in_place(kind: type[Error], words: str | None, path: Path, **options: Any) -> Error:
    """The error, a `kind` that says `words`, in which changing `path` in its place ends; no file there is another."""
    with _unchanged(path.parent), ends_in(kind, words, path.parent) as caught:
        ckptconv.convert(path, in_place=True, **options)
    return caught.value


def not_undone(kind: type[Error], words: str | None, path: Path) -> Error:
    """The error, a `kind` that says `words`, in which undoing the change of `path` ends; no file there is another."""
    with _unchanged(path if path.is_dir() else path.parent), ends_in(kind, words, path.parent) as caught:
        ckptconv.undo(path)
    return caught.value


@contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    """Fail if the files in `folder` are others after this context."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = files()
    yield
    assert files() == before


def run_without_torch(program: str, *arguments: object, **environment: str) -> None:
    """Run the Python `program` in a process of its own, and fail if it ends with an error or has imported torch."""
    code = f"import sys\n{program}\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
