"""Short forms for what nearly every test does: read a checkpoint, convert one, load what came out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import CkptconvError
from ckptconv.formats import opening

__all__ = ["Error", "converted", "loaded", "metadata_of", "read", "refused", "run_without_torch", "unreadable"]

Error = TypeVar("Error", bound=CkptconvError)


def read(path: Path) -> Checkpoint:
    """The checkpoint in the file at `path`, which is closed again."""
    with Source(path) as source:
        return opening.read(source)


def unreadable(path: Path, kind: type[Error], words: str | None = None) -> Error:
    """The error, a `kind` that says `words`, in which reading the file at `path` ends."""
    with pytest.raises(kind, match=words) as caught:
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
    with pytest.raises(kind, match=words) as caught:
        ckptconv.convert(src, dst, **options)
    assert sorted(os.listdir(dst.parent)) == before
    return caught.value


def run_without_torch(program: str, *arguments: object, **environment: str) -> None:
    """Run the Python `program` in a process of its own, and fail if it ends with an error or has imported torch."""
    code = f"import sys\n{program}\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
