"""Outputs whose path is a URL: what writes them, which is imported only for them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from ckptconv.byteranges.sources import list_folder
from ckptconv.errors import MissingInputError, UsageError
from ckptconv.output.far_folders import refuse_existing

__all__ = ["check_object", "far_writer", "is_there"]


def far_writer(path: Path) -> ModuleType:
    """The module that writes to the store of `path`. Raises UsageError where the package for that is not installed."""
    is_s3 = str(path).startswith("s3:")
    try:
        if is_s3:
            from ckptconv.output import s3_upload

            return s3_upload
        from ckptconv.output import fsspec_upload

        return fsspec_upload
    except ImportError as error:
        what = f"writing it needs {'botocore' if is_s3 else 'fsspec'}, which is not installed"
        raise UsageError(what, where=path, hint="pip install 'ckptconv[remote]'") from error


def is_there(path: Path, *, is_folder: bool) -> bool:
    """Whether there is something at `path`: a file, or a folder with something in it."""
    if not is_folder:
        return bool(far_writer(path).exists(path))
    try:
        return any(list_folder(path))
    except MissingInputError:
        return False


def check_object(path: Path, *, replace: bool) -> None:
    """Raise TargetExistsError where a file is at `path`, unless it may be replaced."""
    refuse_existing(path, far_writer(path).exists, replace=replace)
