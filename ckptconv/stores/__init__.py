"""Access to files on this machine, in memory and behind URLs.

:func:`locate` turns a path or a URL into a path. A remote path (:class:`ckptconv.stores.remote.FarPath`) contains its
URL with the secrets, and the listing of its folder. The modules for remote files are imported for the first URL, and
the libraries for transport for the first request.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckptconv.byteranges.sources import Source, list_local
from ckptconv.errors import InputError
from ckptconv.lazy_regex import regex
from ckptconv.stores.posix import store_of as store_of
from ckptconv.system import calls

if TYPE_CHECKING:
    from ckptconv.stores.remote import FarPath

_URL = regex(r"(?:[a-z][a-z0-9+.-]+::)*[a-z][a-z0-9+.-]+:/+[^/]", re.IGNORECASE)


def is_url(given: object) -> bool:
    """Return whether `given` is a URL.

    pathlib merges the two slashes of a URL into one. Such a text is a URL only if no local file has that name.
    """
    if not isinstance(given, (str, os.PathLike)):
        return False
    text = os.fsdecode(given)
    text = text if isinstance(given, str) else text.replace(os.sep, "/")  # which pathlib turns around on Windows
    return bool(_URL.match(text)) and ("://" in text or not os.path.lexists(text))


def locate(given: str | os.PathLike[str]) -> Path:
    """Return the path of `given`: a local path, or a remote path if it is a URL. A ``file`` URL gives a local path.

    Raises UsageError if a URL is malformed.
    """
    if not is_url(given):
        return calls.usable(Path(os.fsdecode(given)))
    from ckptconv.stores.remote import far_path
    from ckptconv.stores.urls import local_path

    path = far_path(given)
    return local_path(path.url) or path


def is_folder(given: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder at `given`, a path or a URL."""
    return locate(given).is_dir() if is_url(given) else os.path.isdir(given)


def list_folder(folder: Path) -> tuple[dict[str, bool], list[str]]:
    """Return the names of the subfolders of `folder`, with whether each is a link, and the sorted other names.

    Raises InputError if the folder cannot be listed.
    """
    return cast("FarPath", folder).listed() if is_url(folder) else list_local(folder)


def place_below(path: Path, folder: Path, target: Path) -> Path:
    """Return `path` relative to `folder`, to be appended to the folder `target`.

    Raises RefusedError if a remote name would lead out of a local `target` on some system.
    """
    return cast("FarPath", path).place_below(folder, target) if is_url(path) else path.relative_to(folder)


def first_bytes(path: Path, most: int) -> bytes:
    """Return the first bytes of the file at `path`, at most `most`. Return no bytes if the file cannot be read.

    Raises InputError if a remote file exists but the request fails.
    """
    if is_url(path):
        return cast("FarPath", path).first_bytes(most)
    try:
        with Source(path) as source:
            return source.read(0, min(most, source.size))
    except InputError:
        return b""
