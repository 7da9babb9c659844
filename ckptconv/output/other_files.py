"""Copy files of a converted folder that are no checkpoints, with their modes; links stay links, and none is followed
out of the folder. Far folders have neither links nor modes.

In place nothing is copied: the new folder gets hard links to the old one's files.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckptconv.byteranges.sources import Readable, Source
from ckptconv.byteranges.spans import OutFile, Progress
from ckptconv.byteranges.undo_journal import target_of
from ckptconv.errors import CkptconvError, InputChangedError, RefusedError
from ckptconv.light_dataclass import dataclass
from ckptconv.output.files import fill, is_own_file
from ckptconv.stores import is_url

if TYPE_CHECKING:
    from ckptconv.stores.paths import FarPath


@dataclass(frozen=True)
class OtherFile:
    """Something that is no checkpoint and is copied from `source` to `path`, with `size` bytes to copy.

    `kind`: ``file``, ``link``, ``folder``; ``kept``: it stays in the folder that is converted in place.
    """

    path: Path
    source: Path
    kind: str
    size: int


def others_in(
    folder: Path, target: Path, taken: Collection[str], *, deep: bool
) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
    """All that is in `folder` and, if that is to go `deep`, below, but for the files `taken`, and where it goes in
    `target`; and what cannot be copied, and why: devices and the like, links that lead out of the folder.
    """
    found: list[OtherFile] = []
    left: list[tuple[Path, CkptconvError]] = []
    if is_url(folder):
        names = {name: each.size for name, each in cast("FarPath", folder).below().items() if deep or "/" not in name}
        own = {name for name in names if is_own_file(name.rpartition("/")[2])}
        chosen = names.keys() - own.union(taken)
        return [OtherFile(target / name, folder / name, "file", names[name]) for name in sorted(chosen)], left
    for name, status in _entries(folder, deep=deep):
        if name in taken:
            continue
        try:
            if stat.S_ISLNK(status.st_mode) and is_url(target):  # where it becomes the file that it leads to
                check_inside(folder / name, folder)
            kind = _kind(folder, name, status)
        except RefusedError as error:
            left.append((folder / name, error))
        else:
            size = os.stat(folder / name).st_size if kind == "file" else 0
            found.append(OtherFile(target / name, folder / name, kind, size))
    return found, left


def open_other(path: Path) -> Readable:
    """The file `path`, here or far. Raises InputError."""
    if not is_url(path):
        return Source(path)
    from ckptconv.stores.remote import FarSource  # which no file here needs

    return FarSource(cast("FarPath", path))


def check_inside(path: Path, folder: Path) -> None:
    """Raise RefusedError where the link `path` leads out of `folder`, and not from a snapshot of the Hub's cache to the
    blobs of this cache: whoever has planted it would get a copy of what only we may read.
    """
    real = Path(os.path.realpath(path))
    here = Path(os.path.realpath(path.parent))
    blobs = [each.parent / "blobs" for each in (here, *here.parents) if each.name == "snapshots"]
    if not any(real.is_relative_to(each) for each in (Path(os.path.realpath(folder)), *blobs)):
        raise RefusedError("a link that leads out of the folder is not followed: left", where=path, got=real)


def rest_of(folder: Path, target: Path, taken: Collection[str]) -> list[OtherFile]:
    """All that is in `folder` and below, but for the files `taken` and their journals, which is to stay as it is.

    `target` is the same folder, under whatever name.
    """
    return [
        OtherFile(target / name, folder / name, "folder" if stat.S_ISDIR(status.st_mode) else "kept", 0)
        for name, status in _entries(folder, deep=True, journals=True)
        if os.path.join(os.path.dirname(name), target_of(os.path.basename(name)) or os.path.basename(name)) not in taken
    ]


def _entries(folder: Path, *, deep: bool, journals: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """What is in `folder` and, if `deep`, below, as paths from there, folders before what they hold.

    Links are not followed, and our own temporaries not seen, nor journals unless these are asked for. Raises OSError.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if is_own_file(entry.name) and not (journals and target_of(entry.name)):
                    continue
                name = os.path.join(below, entry.name)
                yield name, entry.stat(follow_symlinks=False)
                if deep and entry.is_dir(follow_symlinks=False):
                    waiting.append(name)


def _kind(folder: Path, name: str, status: os.stat_result) -> str:
    """How what is called `name` in `folder` is copied: a link by its text if that leads to a place in the folder;
    else as the file that it leads to. Raises RefusedError: not at all.
    """
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    if stat.S_ISLNK(status.st_mode):
        place = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(folder / name)))
        if not os.path.isabs(place) and place.split(os.sep)[0] != "..":
            return "link"
        check_inside(folder / name, folder)
        if os.path.isfile(folder / name):
            return "file"
    raise RefusedError("neither a file nor a folder: left", where=folder / name)


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
        with open_other(other.source) as source:
            if source.size != other.size:
                raise InputChangedError(
                    "the file changed while others were read: size",
                    where=source.path,
                    expected=other.size,
                    got=source.size,
                )
            fill(path, OutFile.copy_of(source, other.path), source, verify=verify, progress=progress)
            source.check_unchanged()
