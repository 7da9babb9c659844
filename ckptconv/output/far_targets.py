"""Outputs whose path is a URL: what writes them, which is imported only for them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from ckptconv.errors import UsageError

__all__ = ["s3_upload"]


def s3_upload(path: Path) -> ModuleType:
    """The module that writes to S3. Raises UsageError where the package for that is not installed."""
    try:
        from ckptconv.output import s3_upload as module
    except ImportError as error:
        hint = "pip install 'ckptconv[remote]'"
        raise UsageError("writing it needs botocore, which is not installed", where=path, hint=hint) from error
    return module
