"""Paths as they are given: URLs among them, which know who is to be asked."""

from __future__ import annotations

import os
from pathlib import Path

from ckptconv.byteranges.sources import is_url

__all__ = ["is_folder", "path_at"]


def path_at(given: str | os.PathLike[str]) -> Path:
    """The path `given`: a URL as one that knows it, and one of the scheme ``file`` as the path here.

    Raises UsageError for what is no URL.
    """
    if not is_url(given):
        return Path(os.fsdecode(given))
    from ckptconv.byteranges.far.paths import far_path  # which no file here needs
    from ckptconv.byteranges.far.urls import local_path

    path = far_path(given)
    return local_path(path.url) or path


def is_folder(given: str | os.PathLike[str]) -> bool:
    """Whether there is a folder at `given`, here or far."""
    return path_at(given).is_dir() if is_url(given) else os.path.isdir(given)
