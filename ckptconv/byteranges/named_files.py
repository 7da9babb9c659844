"""Names that checkpoints give to other files of theirs, as those of shards: the same ones are taken on every system."""

from __future__ import annotations

from functools import lru_cache

from ckptconv.lazy_regex import regex

__all__ = ["stays_inside"]

#: Names that are devices on Windows, whatever stands behind a dot.
_DEVICE = regex(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])\s*(?:\..*)?", 2)  # re.IGNORECASE
_MOST_NAMES = 1024  # remembered: thousands of tensors are in one file


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
