"""Outputs whose path is a URL: the module that writes to their store, imported only for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ckptconv.byteranges.spans import OutFile
from ckptconv.errors import MissingInputError, OutputError, UsageError
from ckptconv.output.far_folders import refuse_existing
from ckptconv.output.folders import OtherFile, open_other
from ckptconv.stores import is_url, list_folder


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


@contextlib.contextmanager
def others_uploaded(others: Iterable[OtherFile], *, replace: bool, **how: Any) -> Iterator[None]:
    """Upload `others` to their store, one after another, before the body of the ``with``. If either fails, those that
    replaced nothing are deleted again, unless somebody has replaced them meanwhile.

    Stores have neither folders nor links: a link to a file is uploaded as that file. A link to a folder is left out,
    because the files in that folder are among the others. `how` is as for ``upload``, whose errors it raises.
    """
    done: list[tuple[Path, object]] = []
    try:
        for each in others:
            if each.kind != "folder" and (is_url(each.source) or each.source.is_file()):
                with open_other(each.source) as source:
                    file = OutFile.copy_of(source, each.path)
                    far_writer(each.path).upload([file], source, replace=replace, **how)
                if not replace:
                    done.append((each.path, far_writer(each.path).version(each.path)))
        yield
    except BaseException:
        for path, version in done:
            with contextlib.suppress(OutputError):  # what went wrong first matters more
                if far_writer(path).version(path) == version:
                    far_writer(path).delete(path)
        raise


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
