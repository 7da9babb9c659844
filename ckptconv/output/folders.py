"""Write a folder of planned files, whole or not at all.

Each file is filled and fsynced as any other (:mod:`ckptconv.output.files`). An old folder changes names with the new
one (``renameat2``, RENAME_EXCHANGE), which is one step for everybody who looks; where the system has no such call it is
moved aside, and back if the new one cannot take its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cached_property, partial
from pathlib import Path

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import OutFile, Overflow, Progress
from ckptconv.byteranges.undo_journal import state_of, target_of
from ckptconv.errors import OutputError, RefusedError, TargetExistsError, some
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.output import linux
from ckptconv.output.attributes import take_over
from ckptconv.output.direct_writes import shares_blocks
from ckptconv.output.files import (
    as_output_error,
    check_is_at,
    fill,
    folder_mode,
    is_at,
    mode_at,
    no_space,
    refuse_interrupted,
    sync_name,
    temporary_beside,
)
from ckptconv.output.other_files import OtherFile, copy_into
from ckptconv.output.steps import sync_folder

_ATTEMPTS = 3  # to delete a folder: a signal can end the first
_APPEARED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of rename, where something stands by now


def no_name(name: str) -> bool:  # noqa: ARG001 - as all that say which names may go
    """No file of an old folder may go that the new one has not."""
    return False


def names_in(folder: Path) -> Iterator[str]:
    """The files below `folder`, and its empty folders, as paths from there. Raises OSError."""

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
    """A folder that is to be written.

    Attributes:
        target: Its path.
        files: Planned files, whose paths are below `target`.
        others: What is copied as it is, below `target` too.
        may_go: Which names in an old folder may go, beside those that the new one has.
        like: The folder whose modes, and those of whose folders, new ones get.
    """

    target: Path
    files: Sequence[OutFile]
    others: Sequence[OtherFile] = ()
    may_go: Callable[[str], bool] = no_name
    like: Path | None = None

    @cached_property
    def entries(self) -> list[OutFile | OtherFile]:
        """All that will be in it."""
        return [*self.files, *self.others]

    @cached_property
    def names(self) -> set[str]:
        """The paths of these from `target`."""
        return {str(each.path.relative_to(self.target)) for each in self.entries}


def write_folder(
    new: NewFolder, source: Readable, *, replace: bool, verify: bool, jobs: int = 1, progress: Progress | None = None
) -> Overflow:
    """Write a folder whose files' ranges come from `source`.

    Args:
        new: What it will be.
        source: What must not change meanwhile.
        replace: An old folder may go, with what of it may.
        verify: Read the files back before the folder appears.
        jobs: Threads that write files.
        progress: Called with each number of bytes written.

    Returns:
        What overflowed.

    Raises:
        OutputError, RefusedError, TargetExistsError, InputChangedError, MalformedError: As for
            :func:`ckptconv.output.files.write`; an old folder is then as it was.
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
                except FileExistsError:  # another writer's, by the same random name
                    ours = False
                    raise
                fd = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                _check_space(temporary, new)
                _make_folders(temporary, new)
                overflowed = _fill_all(temporary, new, source, verify=verify, jobs=jobs, progress=progress)
                for path, _, _ in os.walk(temporary, topdown=False):
                    sync_folder(Path(path))
                source.check_unchanged()
                check_is_at(temporary, fd, target)
                _publish(temporary, target, partial(_check_target, new=new, replace=replace))
                check_is_at(target, fd, target, f"the old folder, if there was one, is now {temporary}")
        except BaseException:
            if ours and (fd is None or is_at(temporary, fd)):
                _remove(temporary)
            raise
    try:
        sync_name(target)
    finally:
        is_gone = _remove(temporary)  # the old folder
    if not is_gone:
        raise OutputError("the new folder is in place, but the old one could not be deleted", where=temporary)
    return overflowed


def _check_target(target: Path, new: NewFolder, *, replace: bool) -> None:
    """Raise unless `new` may be put at `target`.

    In the way are what is no folder, a folder that is not empty without `replace`, and, even with it, one in which
    something stands that the new one would not have and that may not go.
    """
    mode = mode_at(target)
    if mode is None:
        return
    if not stat.S_ISDIR(mode):
        raise RefusedError("several files are to be written, and the output is there and is no folder", where=target)
    with as_output_error(target):
        there = sorted(names_in(target))
    if not there:
        return
    if not replace:
        raise TargetExistsError(
            "the output exists, and is not empty", where=target, hint=option("force") + " replaces the folder"
        )
    going = [name for name in there if name not in new.names]
    journals = set()
    for name in going:
        if (of := target_of(os.path.basename(name))) and state_of(path := (target / name).with_name(of)):
            refuse_interrupted(path)
            journals.add(name)
    lost = [name for name in going if name not in journals and not new.may_go(name)]
    if lost:
        raise RefusedError(
            f"the folder has what the new one would not have: {some(lost)}",
            where=target,
            hint="take another folder, or " + option("copy_others") + " if they are the input's",
        )


def _remove(folder: Path) -> bool:
    """Delete `folder`, whatever comes in between; whether it is gone."""
    came: BaseException | None = None
    for _ in range(_ATTEMPTS):
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:  # where Ctrl-C came as it closed a folder, rmtree closes that once more
            came = error.__context__ or error
        except BaseException as error:  # Ctrl-C
            came = error
        if not os.path.lexists(folder):
            break
    if came is not None:
        raise came
    return not os.path.lexists(folder)


def _make_folders(temporary: Path, new: NewFolder) -> None:
    """Make the folders in `new` below `temporary`, with everything that those have that they take the place of, or the
    modes of those that are like them in the source.
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
    """Make the folder at `path` that will be at `place` in `new`, never more open than it will be. Its owner may write.

    Raises OSError, RefusedError.
    """
    old = new.target / place
    if not old.is_dir():
        os.mkdir(path, folder_mode(new.like / place) if new.like else 0o777)
        return
    os.mkdir(path, stat.S_IRWXU)
    take_over(path, old)
    os.chmod(path, folder_mode(path))


def _check_space(temporary: Path, new: NewFolder) -> None:
    """Raise OutputError where what is needed for `new` is more than is free, unless the blocks of its files will be
    shared. Each file's own is reserved when it is written.
    """
    needed = sum(each.size for each in new.entries)
    space = os.statvfs(temporary)
    if space.f_bavail * space.f_frsize >= needed:
        return
    probe = temporary / "probe"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if not shares_blocks(fd, max(new.files, key=lambda file: file.size)):
            raise no_space(space, temporary.parent, needed)
    finally:
        os.close(fd)
        os.unlink(probe)


def _fill_all(
    temporary: Path, new: NewFolder, source: Readable, *, verify: bool, jobs: int, progress: Progress | None
) -> Overflow:
    """Write the files in `new` below `temporary`, so many `jobs` at a time; what overflowed."""
    files = [each for each in new.entries if not _is_folder(each)]
    stopped = threading.Event()
    overflowed: Counter[tuple[str, ...]] = Counter()

    def tick(nbytes: int) -> None:
        if stopped.is_set():
            raise _Stopped
        if progress:
            progress(nbytes)

    def one(file: OutFile | OtherFile) -> Overflow:
        path = temporary / file.path.relative_to(new.target)
        if isinstance(file, OtherFile):
            copy_into(file, path, verify=verify, progress=tick)
            return {}
        return fill(path, file, source, verify=verify, progress=tick)

    if jobs == 1 or len(files) == 1:
        for file in files:
            overflowed.update(one(file))
        return dict(overflowed)
    with ThreadPoolExecutor(jobs, thread_name_prefix="ckptconv-files") as pool:
        try:
            futures = [pool.submit(one, file) for file in files]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((error for each in done if (error := each.exception())), None)
            if failed:
                raise failed
        except BaseException:  # Ctrl-C too: whoever writes finds out at the next tick
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    for each in futures:
        overflowed.update(each.result())
    return dict(overflowed)


class _Stopped(Exception):
    """Another file could not be written, or somebody has had enough."""


def _publish(temporary: Path, target: Path, check: Callable[[Path], None]) -> None:
    """Give the finished folder its name; `check` raises where the old one must not go.

    Raises TargetExistsError where another took the name meanwhile.
    """
    with contextlib.suppress(FileNotFoundError):
        take_over(temporary, target)
        if os.listdir(target):
            check(target)  # again: filling the new one took a while
            _change_names(temporary, target)
            try:
                check(temporary)  # the old one by now, into which nobody can put anything by its name any more
            except BaseException:
                _change_names(temporary, target)
                raise
            return
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in _APPEARED:
            raise
        raise TargetExistsError(
            "the output exists by now", where=target, hint=option("force") + " replaces it"
        ) from error


def _change_names(a: Path, b: Path) -> None:
    """Let the folders `a` and `b` have each other's name: at once, or in steps of which the
    first is taken back where the second fails.
    """
    if linux.exchange(str(a), str(b)):
        return
    aside = a.with_name(f"{a.name}.old")
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except BaseException:
        os.rename(aside, b)
        raise
    os.rename(aside, a)
