"""Paths as users give them, URLs among them, which know who is to be asked; and as files name other files."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from ckptconv.byteranges.sources import is_url
from ckptconv.lazy_regex import regex

#: Names that are devices on Windows, whatever stands behind a dot.
_DEVICE = regex(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])\s*(?:\..*)?", 2)  # re.IGNORECASE
_MOST_NAMES = 1024  # remembered: thousands of tensors are in one file


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


@lru_cache(maxsize=_MOST_NAMES)
def stays_inside(path: str, *, folders: bool = False) -> bool:
    """Return whether `path`, which a file names, can only lead to a file below its own folder, on any system.

    A drive (``C:x``), a stream (``x:y``), a device (``NUL``), a backslash, and what Windows cuts off a name (dots and
    spaces at its end) lead elsewhere there. Links in that folder are its owner's.

    Args:
        path: The path, with slashes.
        folders: Whether it may lead through folders.
    """
    names = path.split("/")
    return (folders or len(names) == 1) and all(map(_is_name, names))


def _is_name(name: str) -> bool:
    is_whole = bool(name) and not name.endswith((".", " ")) and not any(c in "\\:" or c < " " for c in name)
    return is_whole and not _DEVICE.fullmatch(name)
