"""Write a folder of planned files, completely or not at all.

The new folder is filled under a temporary name, and each file is fsynced (:mod:`ckptconv.output.files`). Then the old
folder and the new one exchange their names in one step (``renameat2`` with RENAME_EXCHANGE). On a system without this
call, the old folder is renamed first, and renamed back if the new one cannot take its name.

Files of a converted folder that are not checkpoints are copied with their modes. Links stay links. A link that leads
out of the folder is not followed. Remote folders have neither links nor modes. For a conversion in place nothing is
copied: the new folder gets hard links to the old folder's files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from ckptconv.byteranges.sources import Readable, Source
from ckptconv.byteranges.spans import OutFile, Overflow, Progress
from ckptconv.byteranges.threads import Threads
from ckptconv.byteranges.undo_journal import target_of
from ckptconv.errors import CkptconvError, InputChangedError, OutputError, RefusedError, TargetExistsError, some
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.output.direct_writes import shares_blocks
from ckptconv.output.files import (
    as_output_error,
    check_is_at,
    fill,
    folder_mode,
    is_at,
    is_own_file,
    let_go,
    mode_at,
    no_space,
    refuse_interrupted,
    sync_name,
    temporary_beside,
)
from ckptconv.system import calls, filesystem

_ATTEMPTS = 3  # attempts to delete a folder, because a signal can end the first
_APPEARED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # errors of rename if the name is taken now


@dataclass(frozen=True)
class OtherFile:
    """A file, link or folder that is not a checkpoint and is copied.

    Attributes:
        path: Its path in the output.
        source: Its path in the input.
        kind: ``file``, ``link``, ``folder``, or ``kept`` for a file of a folder that is converted in place.
        size: The number of bytes to copy. 0 unless it is a ``file``.
        open: Opens `source`.
    """

    path: Path
    source: Path
    kind: str
    size: int
    open: Callable[[Path], Readable] = Source


def no_name(name: str) -> bool:  # noqa: ARG001 - the signature of `NewFolder.may_go`
    """Return False for any `name`.

    As `NewFolder.may_go`, it forbids to remove files that the new folder does not have.
    """
    return False


def names_in(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files, links and empty folders below `folder`. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    for path, folders, files in os.walk(folder, onerror=fail):
        below = Path(path).relative_to(folder)
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        for name in (*files, *links):
            yield str(below / name)
        if not files and not folders and path != str(folder):
            yield str(below)


@dataclass(frozen=True)
class NewFolder:
    """A folder to write, or a single file.

    Attributes:
        target: Its path.
        files: The planned files. Their paths are below `target`.
        others: The files, links and folders to copy. Their paths are below `target`.
        may_go: Returns whether a file of an old folder may be deleted although the new folder does not have it. The
            argument is its relative path.
        like: A folder. New folders get its mode and the modes of its subfolders. None: the usual modes.
        is_folder: False for a single file, whose path is `target`.
    """

    target: Path
    files: Sequence[OutFile]
    others: Sequence[OtherFile] = ()
    may_go: Callable[[str], bool] = no_name
    like: Path | None = None
    is_folder: bool = True

    @cached_property
    def entries(self) -> list[OutFile | OtherFile]:
        """All files, links and folders of the new folder."""
        return [*self.files, *self.others]

    @cached_property
    def names(self) -> set[str]:
        """The paths of all entries, relative to `target`."""
        return {str(each.path.relative_to(self.target)) for each in self.entries}


def write_folder(
    new: NewFolder, source: Readable, *, replace: bool, verify: bool, jobs: int = 1, progress: Progress | None = None
) -> Overflow:
    """Write the folder `new`, and return the numbers of elements that overflowed in casts.

    Args:
        new: The folder.
        source: The input, which must not change while the files are written.
        replace: Whether an old folder may be replaced.
        verify: Whether to read the files back before the folder gets its name.
        jobs: The number of threads that write files.
        progress: Called with the number of bytes written since the last call.

    Raises:
        OutputError, RefusedError, TargetExistsError, InputChangedError, MalformedError: As for
            :func:`ckptconv.output.files.writing`. An old folder is then unchanged. One exception: OutputError is also
            raised if the new folder is complete but the old one could not be deleted.
    """
    target = new.target
    _check_target(target, new, replace=replace)
    temporary = temporary_beside(target)
    with contextlib.ExitStack() as opened:
        fd = None
        ours = True
        try:
            with as_output_error(target):
                try:
                    _make_folder(temporary, Path(), new)
                except FileExistsError:  # another writer chose the same random name
                    ours = False
                    raise
                fd = calls.open_folder(temporary)
                opened.callback(_close_folder, fd)
                _check_space(temporary, new)
                _make_folders(temporary, new)
                overflowed = _fill_all(temporary, new, source, verify=verify, jobs=jobs, progress=progress)
                for path, _, _ in os.walk(temporary, topdown=False):
                    calls.sync_folder(Path(path))
                source.check_unchanged()
                let_go(source, map(target.joinpath, names_in(target) if target.is_dir() else ()))
                check_is_at(temporary, fd, target)
                _publish(temporary, target, partial(_check_target, new=new, replace=replace))
                check_is_at(target, fd, target, f"the old folder, if there was one, is now {temporary}")
            sync_name(target)
        except BaseException:
            # Not a folder that another user has put there: the new one, or the old one after they were exchanged.
            if ours and (fd is None or is_at(temporary, fd) or is_at(target, fd)):
                _remove(temporary)
            raise
        is_gone = _remove(temporary)  # the old folder
    if not is_gone:
        raise OutputError("the new folder is in place, but the old one could not be deleted", where=temporary)
    return overflowed


def _close_folder(fd: int) -> None:
    """Close the open folder `fd`. A failure is ignored: nothing was written through it."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _check_target(target: Path, new: NewFolder, *, replace: bool) -> None:
    """Raise an error unless `new` may take the path `target`. An empty folder may always be replaced.

    Raises:
        RefusedError: The target is not a folder, or contains files that would be deleted and must not be.
        TargetExistsError: The target is a folder that is not empty, and `replace` is False.
    """
    mode = mode_at(target)
    if mode is None:
        return
    if not stat.S_ISDIR(mode):
        raise RefusedError("several files are to be written, but the output exists and is not a folder", where=target)
    with as_output_error(target):
        existing = sorted(names_in(target))
    if not existing:
        return
    if not replace:
        raise TargetExistsError(
            "the output exists, and is not empty", where=target, hint=option("force") + " replaces the folder"
        )
    going = [name for name in existing if name not in new.names]
    journals = set()
    for name in going:
        changed = target_of(os.path.basename(name))  # if it is a journal
        if changed and refuse_interrupted((target / name).with_name(changed)):
            journals.add(name)
    lost = [name for name in going if name not in journals and not new.may_go(name)]
    if lost:
        raise RefusedError(
            f"the folder contains files that would be deleted: {some(lost)}",
            where=target,
            hint="choose another folder, or " + option("copy_others") + " if they are the input's",
        )


def _remove(folder: Path) -> bool:
    """Delete `folder`, and return whether it is gone.

    A signal that arrives meanwhile raises its exception afterwards.
    """
    came: BaseException | None = None
    for _ in range(_ATTEMPTS):
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:  # if Ctrl-C arrives while rmtree closes a folder, it closes the folder again
            came = error.__context__ or error
        except BaseException as error:  # Ctrl-C
            came = error
        if not os.path.lexists(folder):
            break
    if came is not None:
        raise came
    return not os.path.lexists(folder)


def _make_folders(temporary: Path, new: NewFolder) -> None:
    """Create the subfolders of `new` below `temporary`, outer ones first.

    A subfolder gets all attributes of the old folder of the same name, or else the mode of the source's folder.
    """
    needed: set[Path] = set()
    for each in new.entries:
        place = each.path.relative_to(new.target)
        needed.update([place, *place.parents] if _is_folder(each) else place.parents)
    for place in sorted(needed - {Path()}, key=lambda each: each.parts):
        _make_folder(temporary / place, place, new)


def _is_folder(entry: OutFile | OtherFile) -> bool:
    return isinstance(entry, OtherFile) and entry.kind == "folder"


def _make_folder(path: Path, place: Path, new: NewFolder) -> None:
    """Create the folder `path`, which will have the relative path `place` in `new`.

    It gets the attributes of the old folder at that place, or else the mode of the one in ``new.like``. It never has
    more permissions than the old one, and its owner may always write. Raises OSError, RefusedError.
    """
    old = new.target / place
    if not old.is_dir():
        os.mkdir(path, folder_mode(new.like / place) if new.like else 0o777)
        return
    os.mkdir(path, stat.S_IRWXU if calls.HAS_OWNERS else 0o777)  # Windows reads 0o700 as a list with one user
    filesystem.take_over(path, old)
    os.chmod(path, folder_mode(path))


def _check_space(temporary: Path, new: NewFolder) -> None:
    """Raise OutputError if `new` needs more space than is free.

    It is not raised if the filesystem shares blocks with the source. The space of each file is reserved when it is
    written.
    """
    needed = sum(each.size for each in new.entries)
    space = calls.free_space(temporary)
    if space >= needed:
        return
    probe = temporary / "probe"
    fd = calls.create(probe, 0o600)
    try:
        if not shares_blocks(fd, max(new.files, key=lambda file: file.size)):
            raise no_space(space, temporary.parent, needed)
    finally:
        os.close(fd)
        os.unlink(probe)


def _fill_all(
    temporary: Path, new: NewFolder, source: Readable, *, verify: bool, jobs: int, progress: Progress | None
) -> Overflow:
    """Write the files of `new` below `temporary` with `jobs` threads. Return the numbers of elements that overflowed.

    After an error or Ctrl-C, the other threads end at their next report of progress, and the first error is raised.
    """
    files = [entry for entry in new.entries if not _is_folder(entry)]
    failures: list[BaseException] = []
    overflowed: Counter[tuple[str, ...]] = Counter()

    def tick(nbytes: int) -> None:
        if failures:
            raise _Stopped
        if progress:
            progress(nbytes)

    def write_one(file: OutFile | OtherFile) -> Overflow:
        path = temporary / file.path.relative_to(new.target)
        try:
            if failures:
                raise _Stopped
            if isinstance(file, OtherFile):
                copy_into(file, path, verify=verify, progress=tick)
                return {}
            return fill(path, file, source, verify=verify, progress=tick)
        except BaseException as error:
            failures.append(error)
            raise

    with Threads(jobs if min(jobs, len(files)) > 1 else 0, "ckptconv-files") as threads:
        try:
            for task in [threads.submit(write_one, file) for file in files]:
                overflowed.update(task.result())
        except _Stopped:
            raise failures[0] from None
        except BaseException as error:
            failures.append(error)
            raise
    return dict(overflowed)


class _Stopped(Exception):
    """Another file could not be written, or Ctrl-C was pressed."""


def _publish(temporary: Path, target: Path, check: Callable[[Path], None]) -> None:
    """Rename the complete folder `temporary` to `target`, and exchange it with an old folder.

    `check` raises an error if the old folder must not be removed. It is called before the exchange and after it; in the
    latter case the exchange is undone. Raises TargetExistsError if something else got the name `target` meanwhile.
    """
    with contextlib.suppress(FileNotFoundError):
        filesystem.take_over(temporary, target)
        if os.listdir(target):
            check(target)  # again, because filling the new folder took a while
            _change_names(temporary, target)
            try:
                check(temporary)  # now the old folder: other programs no longer reach it by its name
            except BaseException:
                _change_names(temporary, target)
                raise
            return
    try:
        calls.rename_folder(temporary, target)
    except OSError as error:
        if error.errno not in _APPEARED:
            raise
        raise TargetExistsError(
            "the output exists now, created by another process", where=target, hint=option("force") + " replaces it"
        ) from error


def _change_names(a: Path, b: Path) -> None:
    """Exchange the names of the folders `a` and `b`, in one step or in three.

    If the second of the three steps fails, the first is undone.
    """
    if filesystem.exchange(str(a), str(b)):
        return
    aside = a.with_name(f"{a.name}.old")
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except BaseException:
        os.rename(aside, b)
        raise
    os.rename(aside, a)


def others_in(
    folder: Path, target: Path, taken: Collection[str], *, deep: bool, has_links: bool
) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
    """Return the entries of `folder` to copy to `target`, and the paths that cannot be copied, each with its error.

    Args:
        folder: The folder.
        target: The new folder.
        taken: The relative paths of files that are not copied, because they belong to checkpoints.
        deep: Whether to include everything in subfolders.
        has_links: Whether `target` can contain links. If not, a link is copied as the file that it leads to.
    """
    found: list[OtherFile] = []
    left: list[tuple[Path, CkptconvError]] = []
    for name, status in _entries(folder, deep=deep):
        if name in taken:
            continue
        try:
            if stat.S_ISLNK(status.st_mode) and not has_links:  # the link becomes a file in the target
                check_inside(folder / name, folder)
            kind = _kind(folder, name, status)
        except RefusedError as error:
            left.append((folder / name, error))
        else:
            size = os.stat(folder / name).st_size if kind == "file" else 0
            found.append(OtherFile(target / name, folder / name, kind, size))
    return found, left


def check_inside(path: Path, folder: Path) -> None:
    """Raise RefusedError if the link `path` leads out of `folder`.

    A link planted by another user could otherwise copy files that only we may read. A link from a snapshot in the Hub's
    cache to the blobs of that cache is allowed.
    """
    real = Path(os.path.realpath(path))
    here = Path(os.path.realpath(path.parent))
    blobs = [each.parent / "blobs" for each in (here, *here.parents) if each.name == "snapshots"]
    if not any(real.is_relative_to(each) for each in (Path(os.path.realpath(folder)), *blobs)):
        raise RefusedError("a link that leads out of the folder is not followed: left", where=path, got=real)


def rest_of(folder: Path, target: Path, taken: Collection[str]) -> list[OtherFile]:
    """Return the entries in and below `folder` that stay unchanged: all except the files `taken` and their undo
    journals.

    `target` is the same folder, perhaps under another name.
    """
    return [
        OtherFile(target / name, folder / name, "folder" if _is_real_folder(status) else "kept", 0)
        for name, status in _entries(folder, deep=True, journals=True)
        if os.path.join(os.path.dirname(name), target_of(os.path.basename(name)) or os.path.basename(name)) not in taken
    ]


def _entries(folder: Path, *, deep: bool, journals: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and status of everything in `folder` and, with `deep`, in its subfolders.

    A folder is yielded before its contents. Links are not followed. Temporary files of this program are left out, and
    so are its undo journals unless `journals` is set. Raises OSError.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if is_own_file(entry.name) and not (journals and target_of(entry.name)):
                    continue
                name = os.path.join(below, entry.name)
                status = entry.stat(follow_symlinks=False)
                yield name, status
                if deep and _is_real_folder(status):
                    waiting.append(name)


def _is_real_folder(status: os.stat_result) -> bool:
    """Return whether `status` is that of a folder, and not of a link or junction."""
    return stat.S_ISDIR(status.st_mode) and not calls.is_junction(status)


def _kind(folder: Path, name: str, status: os.stat_result) -> str:
    """Return how to copy `name` in `folder`: ``file``, ``folder`` or ``link``.

    A link with a relative text that stays inside the folder is copied as a link. Any other link is copied as the file
    that it leads to. Raises RefusedError if it leads out of the folder, and for special files.
    """
    if stat.S_ISREG(status.st_mode):
        return "file"
    if _is_real_folder(status):
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
    """Copy `other` to `path`. A ``kept`` file becomes a hard link, if the filesystem and its owner allow that.

    Raises OSError, InputChangedError, and the errors of :func:`ckptconv.output.files.fill`.
    """
    if other.kind == "link":
        os.symlink(os.readlink(other.source), path)
    elif other.kind == "kept":
        try:
            calls.link_file(other.source, path)
        except OSError:  # the filesystem has no hard links, or the file belongs to another user
            shutil.copy2(other.source, path, follow_symlinks=False)
    else:
        with other.open(other.source) as source:
            if source.size != other.size:
                raise InputChangedError(
                    "the file changed while others were read: size",
                    where=source.path,
                    expected=other.size,
                    got=source.size,
                )
            fill(path, OutFile.copy_of(source, other.path), source, verify=verify, progress=progress)
            source.check_unchanged()
