"""Write planned files, each completely or not at all.

A file is filled under a unique temporary name next to the target (:mod:`ckptconv.output.transfer`), fsynced and
renamed, and then the folder is fsynced. Until the rename, the old target is unchanged. Another user with write
permission for the folder could exchange the temporary file. So it stays open, and is compared with the file that has
the target's name. Several files are built in a temporary folder (:mod:`ckptconv.output.folders`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

from ckptconv.byteranges.sources import Readable, lock_shared
from ckptconv.byteranges.spans import OutFile, Overflow, Progress
from ckptconv.byteranges.undo_journal import HOT, journal_path, state_of, target_of
from ckptconv.errors import CkptconvError, OutputError, RefusedError, TargetExistsError, UsageError
from ckptconv.hints import command, option, shell
from ckptconv.lazy_regex import regex
from ckptconv.output.direct_writes import DirectDestination, FileDestination, shares_blocks
from ckptconv.output.transfer import Transfer
from ckptconv.system import calls, filesystem

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TEMPORARY = regex(r"\..*\.ckptconv-[0-9a-f]{6}\.tmp", re.DOTALL)
_OTHER_FOLDER = "choose a folder that other users cannot write to"


#: A wait until the bytes of an open file, given by its descriptor, or the names that a folder contains now are on the
#: disk.
DiskWait: TypeAlias = "int | Path"
#: Work that yields each of its waits for the disk, so that its caller can do other work meanwhile, and returns a
#: result. An exception that a wait raises is thrown into it.
Steps: TypeAlias = Generator[DiskWait, None, _T]


def sync(wait: DiskWait) -> None:
    """Wait until `wait` is on the disk. Raises OSError."""
    if isinstance(wait, Path):
        calls.sync_folder(wait)
    else:
        calls.sync(wait)


def run_steps(steps: Steps[_T]) -> _T:
    """Run the generator `steps`, with all its waits in this thread. Return its result."""
    try:
        wait = next(steps)
        while True:
            try:
                sync(wait)
            except BaseException as error:
                wait = steps.throw(error)
            else:
                wait = next(steps)
    except StopIteration as end:
        result: _T = end.value
        return result


def waited_for(steps: Callable[_P, Steps[_T]]) -> Callable[_P, _T]:
    """Return a function that runs the generator function `steps`, with all waits in this thread, and returns its
    result.
    """

    @wraps(steps)
    def do(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run_steps(steps(*args, **kwargs))

    return do


def check_target(path: Path, *, replace: bool) -> None:
    """Raise an error unless a file may be written to `path`.

    Raises:
        RefusedError: The path is a folder, a device or the like, or a change in place of the file was interrupted.
        TargetExistsError: The file exists, and `replace` is False.
        UsageError: The folder of `path` does not exist.
        OutputError: The system does not allow to look at `path`.
    """
    mode = mode_at(path)
    if mode is None:
        refuse_interrupted(path)
        return
    if stat.S_ISLNK(mode) and os.path.exists(path):
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        is_stream = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
        hint = "write to a file, then send it with cat" if is_stream else None
        raise RefusedError("the output exists and is not a regular file", where=path, hint=hint)
    if not replace:
        raise TargetExistsError("the output exists", where=path, hint=option("force") + " replaces it")
    refuse_interrupted(path)


def refuse_interrupted(path: Path) -> bool:
    """Return whether the file at `path` has an undo journal.

    Raises RefusedError if a change in place of it was interrupted, because the journal would be lost.
    """
    state = state_of(path)
    if state != HOT:
        return state is not None
    gone = f"the file is gone: put it back, or delete {journal_path(path)}"
    raise RefusedError(
        "a change of it in place was interrupted",
        where=path,
        hint=command("undo", path) if os.path.lexists(path) else gone,
    )


def mode_at(path: Path) -> int | None:
    """Return the mode of the file or folder at `path`, or None if `path` does not exist. A link is not followed.

    Raises OutputError, and UsageError if the folder of `path` does not exist.
    """
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        if path.parent.is_dir():
            return None
        raise UsageError(
            "the output's folder does not exist", where=path.parent, hint=shell(*calls.MAKE_FOLDERS, path.parent)
        ) from None
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error


def writing(
    file: OutFile, source: Readable, *, replace: bool, verify: bool, progress: Progress | None = None
) -> Steps[Overflow]:
    """Write `file`, in steps that wait for the disk. Return the numbers of elements that overflowed in casts.

    Args:
        file: The planned file.
        source: The input, which must not change while `file` is written.
        replace: Whether an old file may be replaced.
        verify: Whether to read everything back and compare it before the file gets the target's name.
        progress: Called with the number of bytes written since the last call.

    Raises:
        OutputError, RefusedError, TargetExistsError, InputChangedError, MalformedError: An old target is unchanged.
    """
    check_target(file.path, replace=replace)
    temporary = temporary_beside(file.path)
    ours = True
    try:
        with as_output_error(file.path), contextlib.ExitStack() as opened:
            try:
                fd = opened.enter_context(_new_file(temporary, file))
            except FileExistsError:  # another writer chose the same random name
                ours = False
                raise
            overflowed = yield from _filling(fd, temporary.parent, file, source, verify=verify, progress=progress)
            source.check_unchanged()
            let_go(source, [file.path])
            with _locked(file.path), _locked(temporary):
                has_journal = refuse_interrupted(file.path)  # again, because filling the new file took a while
                check_is_at(temporary, fd, file.path)
                _publish(temporary, file.path, replace)
                check_is_at(file.path, fd, file.path)
                if has_journal:
                    with contextlib.suppress(OSError):  # a journal of the old file cannot restore anything now
                        os.unlink(journal_path(file.path))
    finally:
        if ours:
            with contextlib.suppress(OSError):  # the file was renamed, or an earlier error is more important
                os.unlink(temporary)
    with _in_place_already(file.path):
        yield file.path.parent
    return overflowed


#: :func:`writing`, with all its waits in this thread.
write = waited_for(writing)


@contextlib.contextmanager
def _new_file(path: Path, file: OutFile) -> Iterator[int]:
    """Create the file `path`, which must not exist, for `file`. Yield its descriptor, and close it after the block.

    Like ``cp``, it takes owner, mode and attributes of the regular file that it will replace. Without one, it gets the
    mode of `file`, with write permission for the owner, less the umask.

    Raises OSError, RefusedError.
    """
    replaces = os.path.isfile(file.path) and not os.path.islink(file.path)
    mode = 0o600 if replaces else (file.mode | stat.S_IWUSR) & 0o777
    fd = calls.create(path, mode)
    try:
        if replaces:
            filesystem.take_over(fd, file.path)
        yield fd
    finally:
        with contextlib.suppress(OSError):  # errors of a close are found by _filling
            os.close(fd)


def _filling(
    fd: int, folder: Path, file: OutFile, source: Readable, *, verify: bool, progress: Progress | None
) -> Steps[Overflow]:
    """Write `file` to the open file `fd` in `folder`, and sync it, in steps.

    Return the numbers of elements that overflowed.

    Raises OSError, and the errors of :func:`writing`.
    """
    transfer = Transfer(file, folder, compared=verify)
    _drop_from_cache(file.path, source)
    _reserve(fd, folder, file, beside=transfer.beside)
    with transfer, _destination(fd, direct=file.direct) as out:
        transfer.fill(out, progress)
        out.settle()
        yield fd
        if verify:
            transfer.compare(out)
    os.close(os.dup(fd))  # some filesystems report faults here
    return transfer.overflowed


def fill(path: Path, file: OutFile, source: Readable, *, verify: bool, progress: Progress | None) -> Overflow:
    """Write `file` to `path`, which must not exist, and sync it. Return the numbers of elements that overflowed.

    Raises OSError, and the errors of :func:`writing`.
    """
    with _new_file(path, file) as fd:
        return run_steps(_filling(fd, path.parent, file, source, verify=verify, progress=progress))


def is_at(path: Path, fd: int) -> bool:
    """Return whether the open file or folder `fd` has the path `path`. A link is not followed."""
    try:
        return calls.is_same_file(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def check_is_at(path: Path, fd: int, where: object, hint: str = _OTHER_FOLDER) -> None:
    """Raise OutputError unless the open file or folder `fd` has the path `path`.

    `where` and `hint` are for the error.
    """
    if not is_at(path, fd):
        raise OutputError("another process replaced the output while it was written", where=where, hint=hint)


def let_go(source: Readable, paths: Iterable[Path]) -> None:
    """Close `source` if it is one of the files at `paths`, on systems that cannot replace open files (Windows)."""
    for path in paths if calls.OPEN_FILES_KEEP_NAMES else ():
        with contextlib.suppress(OSError):
            if source.is_same_file(os.stat(path)):
                source.close()
                return


def _destination(fd: int, *, direct: bool) -> AbstractContextManager[FileDestination]:
    """Return a destination that writes to `fd`. With `direct`, it uses direct I/O, if the system allows that."""
    if direct:
        with contextlib.suppress(OSError):
            return DirectDestination(fd)
    return contextlib.nullcontext(FileDestination(fd))


@contextlib.contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Turn an OSError in this block into an OutputError about `path`."""
    try:
        yield
    except CkptconvError:  # some are OSErrors too
        raise
    except OSError as error:
        code = error.errno and errno.errorcode.get(error.errno)
        raise OutputError(f"could not be written: {error.strerror or error}", where=path, got=code) from error


def temporary_beside(target: Path) -> Path:
    """Return a random path for a temporary file next to `target`. The name has at most 255 bytes."""
    name = target.name
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return target.parent / f".{name}.ckptconv-{os.urandom(3).hex()}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether `name` is the name of a temporary file of a conversion that is running or was killed."""
    return _TEMPORARY.fullmatch(name) is not None


def is_own_file(name: str) -> bool:
    """Return whether `name` is the name of a temporary file or an undo journal of this program.

    Such files are never copied.
    """
    return is_temporary(name) or target_of(name) is not None


def _drop_from_cache(target: Path, source: Readable) -> None:
    """Drop the file at `target` from the page cache, unless it is the `source`.

    The new file needs as much memory. Memory that is free at once is available faster than memory that a virtual
    machine has not used for long.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            fd = calls.open_to_read(target, follow=False)
            try:
                if not source.is_same_file(os.fstat(fd)):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file at `path` against changes in place during this block, if it exists and is readable.

    Nothing is locked on Windows.
    A change in place would write a journal, which would be removed with the journal of the replaced file. Raises
    UnreadableError if the file is being changed.
    """
    try:
        fd = -1 if calls.OPEN_FILES_KEEP_NAMES else calls.open_to_read(path, follow=False)
    except OSError:
        fd = -1
    if fd < 0:
        yield
        return
    try:
        lock_shared(fd, path)
        yield
    finally:
        with contextlib.suppress(OSError):  # it was only read, and the new file may have its name by now
            os.close(fd)


def _reserve(fd: int, folder: Path, file: OutFile, beside: int) -> None:
    """Reserve space for `file` in `folder`, unless the filesystem shares blocks.

    Raises OutputError if there is too little.

    `beside` is the number of bytes that temporary files need in addition.
    """
    if shares_blocks(fd, file):
        return
    needed = file.size + beside
    try:
        if filesystem.fallocate(fd, file.size):
            needed = beside
        if calls.free_space(folder, fd) >= needed:
            return
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    raise no_space(calls.free_space(folder, fd), file.path, needed)


def no_space(free: int, where: Path, needed: int) -> OutputError:
    """Return the error for a file at `where` that needs more bytes than the `free` ones."""
    return OutputError("not enough free space", where=where, expected=f"{needed:,} bytes", got=f"{free:,} bytes")


def _publish(temporary: Path, target: Path, replace: bool) -> None:
    """Rename `temporary` to `target`. Without `replace`, this is done only if the name is still free.

    Raises TargetExistsError if it is not, and RefusedError if the filesystem cannot guarantee that.
    """
    if replace:
        os.replace(temporary, target)
        return
    try:
        if not calls.publish(temporary, target):
            raise RefusedError(
                "this filesystem cannot create the output without the risk of replacing one that appears meanwhile",
                where=target,
                hint=option("force") + " accepts that",
            )
    except FileExistsError as error:
        raise TargetExistsError(
            "the output exists now, created by another process", where=target, hint=option("force") + " replaces it"
        ) from error


def make_folder(folder: Path, like: Path) -> None:
    """Create `folder` and its missing parents, and sync their names.

    `folder` gets the permissions of `like`, its parent those of the parent of `like`, and so on. Raises OutputError.
    """
    if os.path.lexists(folder):
        return
    above = zip_longest((folder, *folder.parents), (like, *like.parents), fillvalue=Path())
    missing = takewhile(lambda pair: not os.path.lexists(pair[0]), above)
    with as_output_error(folder):
        for path, other in reversed([*missing]):
            with contextlib.suppress(FileExistsError):  # made by another conversion meanwhile
                os.mkdir(path, folder_mode(other))
            calls.sync_folder(path.parent)


def folder_mode(like: Path) -> int:
    """Return the permissions of the folder `like`, with all permissions for its owner.

    If it does not exist, return 0o777.
    """
    try:
        return stat.S_IMODE(os.stat(like).st_mode) | stat.S_IRWXU
    except OSError:
        return 0o777


def sync_name(path: Path) -> None:
    """Sync the name of the new file or folder at `path`.

    Raises OutputError with the note that the output is complete.
    """
    with _in_place_already(path):
        calls.sync_folder(path.parent)


@contextlib.contextmanager
def _in_place_already(path: Path) -> Iterator[None]:
    """Turn an OSError in this block into an OutputError which tells that the output at `path` is complete."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the new file is in place, but its folder could not be synced: {error.strerror}", where=path
        ) from error
