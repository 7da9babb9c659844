"""Check names that files contain: whether they lead to a file in the same folder on every system."""

from __future__ import annotations

import re
from functools import lru_cache

from ckptconv.lazy_regex import regex

#: Names that are devices on Windows, with any suffix.
_DEVICE = regex(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])\s*(?:\..*)?", re.IGNORECASE)
_MOST_NAMES = 1024  # remembered: thousands of tensors are in one file


@lru_cache(maxsize=_MOST_NAMES)
def stays_inside(path: str, *, folders: bool = False) -> bool:
    """Return whether `path`, which a file contains, leads to a file in that file's own folder on every system.

    These lead elsewhere on Windows: a drive (``C:x``), a stream (``x:y``), a device (``NUL``), a backslash, and a name
    that ends in a dot or a space, which Windows removes. Links in the folder are not checked here.

    Args:
        path: The path, with slashes.
        folders: Whether the path may contain folders.
    """
    names = path.split("/")
    return (folders or len(names) == 1) and all(
        name
        and not name.endswith((".", " "))
        and not any(c in "\\:" or c < " " for c in name)
        and not _DEVICE.fullmatch(name)
        for name in names
    )
