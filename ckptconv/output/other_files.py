"""Copy files of a converted folder that are no checkpoints, with their modes; links stay links.

In place nothing is copied: the new folder gets hard links to the old one's files.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import OutFile, Progress
from ckptconv.errors import InputChangedError
from ckptconv.output.files import fill, is_own_file

__all__ = ["OtherFile", "copy_into", "others_in", "rest_of"]


@dataclass(frozen=True)
class OtherFile:
    """Something that is no checkpoint and comes along from `source` to `path`, with `size` bytes to copy.

    `kind`: ``file``, ``link``, ``folder``; ``kept``: it stays in the folder that is converted in place.
    """

    path: Path
    source: Path
    kind: str
    size: int


def others_in(folder: Path, target: Path, taken: Collection[str], *, deep: bool) -> tuple[list[OtherFile], list[str]]:
    """All that is in `folder` and, if that is to go `deep`, below, but for the files `taken`, and where it goes in
    `target`; and the names of what cannot come along: devices and the like, links that lead out of the folder.
    """
    found: list[OtherFile] = []
    left: list[str] = []
    for name, status in _entries(folder, deep=deep):
        kind = _kind(folder, name, status)
        if name in taken:
            continue
        if kind is None:
            left.append(name)
        else:
            size = os.stat(folder / name).st_size if kind == "file" else 0
            found.append(OtherFile(target / name, folder / name, kind, size))
    return found, left


def rest_of(folder: Path, target: Path, taken: Collection[str]) -> list[OtherFile]:
    """All that is in `folder` and below, but for the files `taken`, which is to stay as it is.

    `target` is the same folder, under whatever name.
    """
    return [
        OtherFile(target / name, folder / name, "folder" if stat.S_ISDIR(status.st_mode) else "kept", 0)
        for name, status in _entries(folder, deep=True)
        if name not in taken
    ]


def _entries(folder: Path, *, deep: bool) -> Iterator[tuple[str, os.stat_result]]:
    """What is in `folder` and, if `deep`, below, as paths from there, folders before what they hold.

    Links are not followed, and our own temporaries and journals not seen. Raises OSError.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if is_own_file(entry.name):
                    continue
                name = os.path.join(below, entry.name)
                yield name, entry.stat(follow_symlinks=False)
                if deep and entry.is_dir(follow_symlinks=False):
                    waiting.append(name)


def _kind(folder: Path, name: str, status: os.stat_result) -> str | None:
    """How what is called `name` in `folder` comes along: a link by its text if that leads to a place in the folder, or
    is absolute; else as the file that it leads to. None: not at all.
    """
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    if not stat.S_ISLNK(status.st_mode):
        return None
    text = os.readlink(folder / name)
    inside = not os.path.normpath(os.path.join(os.path.dirname(name), text)).startswith("..")
    if not os.path.isabs(text) and inside:
        return "link"
    if os.path.isfile(folder / name):
        return "file"
    return "link" if os.path.isabs(text) else None


def copy_into(other: OtherFile, path: Path, *, verify: bool, progress: Progress | None) -> None:
    """Let `other` stand at `path` too. Raises OSError, and what :func:`ckptconv.output.files.fill` raises."""
    if other.kind == "link":
        os.symlink(os.readlink(other.source), path)
    elif other.kind == "kept":
        try:
            os.link(other.source, path, follow_symlinks=False)
        except OSError:  # there are filesystems without, and files of other people
            shutil.copy2(other.source, path, follow_symlinks=False)
    else:
        with Source(other.source) as source:
            if source.size != other.size:
                raise InputChangedError(
                    "the file changed while others were read: size",
                    where=source.path,
                    expected=other.size,
                    got=source.size,
                )
            mode = stat.S_IMODE(os.stat(other.source).st_mode)
            fill(path, OutFile.copy_of(source, other.path), source, verify=verify, progress=progress, mode=mode)
            source.check_unchanged()
