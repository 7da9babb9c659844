"""Write planned files, whole or not at all.

A unique temporary beside the target, filled (:mod:`ckptconv.output.transfer`), fsynced, renamed, the folder fsynced:
whatever happens before the rename, the target is as it was; afterwards it is whole. The file stays open meanwhile, and
what stands at the target is compared with it: others who may write in the folder can exchange the temporary. Several
files are built in a temporary folder (:mod:`ckptconv.output.folders`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import takewhile, zip_longest
from pathlib import Path

from ckptconv.byteranges.locks import lock_shared
from ckptconv.byteranges.sources import Readable, check_system
from ckptconv.byteranges.spans import OutFile, Overflow, Progress
from ckptconv.byteranges.undo_journal import HOT, journal_path, state_of, target_of
from ckptconv.errors import CkptconvError, OutputError, RefusedError, TargetExistsError, UsageError
from ckptconv.hints import command, option, shell
from ckptconv.lazy_regex import regex
from ckptconv.output import linux
from ckptconv.output.attributes import take_over
from ckptconv.output.destinations import FileDestination, FileObjectDestination
from ckptconv.output.direct_writes import DirectDestination, shares_blocks
from ckptconv.output.steps import FileSync, FolderSync, Steps, run_steps, sync_folder, waited_for
from ckptconv.output.transfer import Transfer

_TEMPORARY = regex(r"\..*\.ckptconv-[0-9a-f]{6}\.tmp", re.DOTALL)
_ALONE = "choose a folder in which nobody else may write"
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def check_target(path: Path, *, replace: bool) -> None:
    """Raise unless a file may be put at `path`: a folder there, a device, or any file without `replace`
    is in the way.
    """
    mode = mode_at(path)
    if mode is None:
        refuse_interrupted(path)
        return
    if stat.S_ISLNK(mode) and os.path.exists(path):
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        is_stream = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
        hint = "write to a file, then pass it on with cat" if is_stream else None
        raise RefusedError("the output exists and is not a regular file", where=path, hint=hint)
    if not replace:
        raise TargetExistsError("the output exists", where=path, hint=option("force") + " replaces it")
    refuse_interrupted(path)


def refuse_interrupted(path: Path) -> None:
    """Raise RefusedError where a change in place of what is, or was, at `path` was not finished: its journal would go
    with it.
    """
    if state_of(path) != HOT:
        return
    gone = f"the file is gone: put it back, or delete {journal_path(path)}"
    raise RefusedError(
        "a change of it in place was interrupted",
        where=path,
        hint=command("undo", path) if os.path.lexists(path) else gone,
    )


def mode_at(path: Path) -> int | None:
    """The mode of what stands at `path`, links not followed; None where nothing does.

    Raises OutputError, and UsageError where not even the folder is there that it is to stand in.
    """
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        if path.parent.is_dir():
            return None
        raise UsageError(
            "the output's folder does not exist", where=path.parent, hint=shell("mkdir", "-p", path.parent)
        ) from None
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error


def writing(
    file: OutFile, source: Readable, *, replace: bool, verify: bool, progress: Progress | None = None
) -> Steps[Overflow]:
    """The steps of writing `file`, whose ranges come from `source`; what overflowed.

    Raises OutputError, TargetExistsError, InputChangedError, MalformedError.

    `replace`: an old file may go. `verify`: read everything back and compare it before the target appears.
    """
    check_target(file.path, replace=replace)
    temporary = temporary_beside(file.path)
    ours = True
    try:
        with as_output_error(file.path), contextlib.ExitStack() as opened:
            try:
                fd = opened.enter_context(_new_file(temporary, file))
            except FileExistsError:  # another writer's, by the same random name
                ours = False
                raise
            overflowed = yield from _filling(fd, temporary.parent, file, source, verify=verify, progress=progress)
            source.check_unchanged()
            with _kept_from_changes(file.path), _kept_from_changes(temporary):
                refuse_interrupted(file.path)  # again: filling the new one took a while
                check_is_at(temporary, fd, file.path)
                _publish(temporary, file.path, replace)
                check_is_at(file.path, fd, file.path)
                if state_of(file.path):
                    with contextlib.suppress(OSError):  # of the file that was replaced: one that stays restores nothing
                        os.unlink(journal_path(file.path))
    finally:
        if ours:
            with contextlib.suppress(OSError):  # a rename took it away, or what went wrong before matters more
                os.unlink(temporary)
    with _said_to_be_new(file.path):
        yield FolderSync(file.path.parent)
    return overflowed


#: :func:`writing` with all its waits.
write = waited_for(writing)


@contextlib.contextmanager
def _new_file(path: Path, file: OutFile) -> Iterator[int]:
    """The open file at `path`, which must not exist, for `file`. It has the permissions that `cp` would give it:
    everything that the regular file has that it replaces; else its own mode, less the umask, and its owner may write
    it.

    Raises OSError, RefusedError.
    """
    check_system()
    replaces = os.path.isfile(file.path) and not os.path.islink(file.path)
    mode = 0o600 if replaces else (file.mode | stat.S_IWUSR) & 0o777
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        if replaces:
            take_over(fd, file.path)
        yield fd
    finally:
        with contextlib.suppress(OSError):  # what a close can find out is asked before
            os.close(fd)


def _filling(
    fd: int, folder: Path, file: OutFile, source: Readable, *, verify: bool, progress: Progress | None
) -> Steps[Overflow]:
    """The steps of writing `file` to the open file `fd` in `folder`, and on to the disk; what overflowed.

    Raises OSError, and what :func:`write` raises.
    """
    transfer = Transfer(file, folder, compared=verify)
    _forget(file.path, source)
    _reserve(fd, file, beside=transfer.beside)
    with transfer, _destination(fd, direct=file.direct) as out:
        transfer.fill(out, progress)
        out.settle()
        yield FileSync(fd)
        if verify:
            transfer.compare(out)
    os.close(os.dup(fd))  # which some filesystems tell of faults
    return transfer.overflowed


def fill(path: Path, file: OutFile, source: Readable, *, verify: bool, progress: Progress | None) -> Overflow:
    """Write `file` to `path`, which must not exist, and on to the disk; return what overflowed.

    Raises OSError, and what :func:`write` raises.
    """
    with _new_file(path, file) as fd:
        return run_steps(_filling(fd, path.parent, file, source, verify=verify, progress=progress))


def is_at(path: Path, fd: int) -> bool:
    """Return whether the open file or folder `fd` is what stands at `path`, links not followed."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def check_is_at(path: Path, fd: int, where: object, hint: str = _ALONE) -> None:
    """Raise OutputError about `where` unless the open file or folder `fd` is what stands at `path`."""
    if not is_at(path, fd):
        raise OutputError("another process replaced the output while it was written", where=where, hint=hint)


def _destination(fd: int, *, direct: bool) -> AbstractContextManager[FileDestination]:
    """What writes to `fd`, around the page cache if that is still possible."""
    if direct:
        with contextlib.suppress(OSError):
            return DirectDestination(fd)
    return contextlib.nullcontext(FileDestination(fd))


def write_to_object(file: OutFile, out: FileObjectDestination, *, verify: bool) -> Overflow:
    """Write `file` to `out`; what overflowed. Where it fails, what was written until then stays.

    Raises OutputError, and what reading its ranges raises. `verify`: read everything back and compare it.
    """
    transfer = Transfer(file, file.path.parent, compared=verify)
    with as_output_error(file.path), transfer:
        transfer.fill(out, None)
        if verify:
            transfer.compare(out)
        out.finish(file.size)
    return transfer.overflowed


@contextlib.contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Let an OSError inside be an OutputError about `path`."""
    try:
        yield
    except CkptconvError:  # some are OSErrors too
        raise
    except OSError as error:
        code = error.errno and errno.errorcode.get(error.errno)
        raise OutputError(f"could not be written: {error.strerror or error}", where=path, got=code) from error


def temporary_beside(target: Path) -> Path:
    """A name beside `target` that nothing has, in a folder that takes names of 255 bytes."""
    name = target.name
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return target.parent / f".{name}.ckptconv-{os.urandom(3).hex()}.tmp"


def is_temporary(name: str) -> bool:
    """Whether what is called `name` is a temporary of ours, of a conversion that goes on or was killed."""
    return _TEMPORARY.fullmatch(name) is not None


def is_own_file(name: str) -> bool:
    """Whether what is called `name` is a temporary or an undo journal of ours, which no copy takes along."""
    return is_temporary(name) or target_of(name) is not None


def _forget(target: Path, source: Readable) -> None:
    """Give back the memory that caches the file to be replaced, as truncating it would: the new one needs as much.

    Measured in a virtual machine, where memory that no one has used lately is slow to
    get: 2 GiB in 1.4 s instead of 7 s.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not source.is_same_file(os.fstat(fd)):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


@contextlib.contextmanager
def _kept_from_changes(path: Path) -> Iterator[None]:
    """Keep the file at `path`, if one that we can read is there, from being changed in place: whoever does that writes
    a journal, which would go with that of the file that is replaced. Raises InputError where somebody changes it now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield
        return
    try:
        lock_shared(fd, path)
        yield
    finally:
        with contextlib.suppress(OSError):  # it was only read, and the file may have its name by now
            os.close(fd)


def _reserve(fd: int, file: OutFile, beside: int) -> None:
    """Make sure of the space before the first byte, unless blocks will be shared.

    `beside`: what is needed for a while beside the file.
    """
    if shares_blocks(fd, file):
        return
    needed = file.size + beside
    try:
        if linux.fallocate(fd, file.size):
            needed = beside
        space = os.fstatvfs(fd)
        if space.f_bavail * space.f_frsize >= needed:
            return
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    raise no_space(os.fstatvfs(fd), file.path, needed)


def no_space(space: os.statvfs_result, where: Path, needed: int) -> OutputError:
    """The error for a target that is too large for what is free."""
    free = space.f_bavail * space.f_frsize
    return OutputError("too little free space", where=where, expected=f"{needed:,} bytes", got=f"{free:,} bytes")


def _publish(temporary: Path, target: Path, replace: bool) -> None:
    """Give the finished file its name. Without `replace` only if the name is still free."""
    if replace:
        os.replace(temporary, target)
        return
    try:
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            if not linux.rename_if_absent(str(temporary), str(target)):
                raise RefusedError(
                    "this filesystem cannot create the output without the risk of replacing one that appears meanwhile",
                    where=target,
                    hint=option("force") + " accepts that",
                ) from error
    except FileExistsError as error:
        raise TargetExistsError(
            "the output exists by now", where=target, hint=option("force") + " replaces it"
        ) from error


def make_folder(folder: Path, like: Path) -> None:
    """Make `folder`, and those above it, where they are not there, and let their names reach the disk. Each gets the
    permissions of its counterpart: `folder` those of `like`, the one above it those of the one above `like`.

    Raises OutputError.
    """
    if os.path.lexists(folder):
        return
    above = zip_longest((folder, *folder.parents), (like, *like.parents), fillvalue=Path())
    missing = takewhile(lambda pair: not os.path.lexists(pair[0]), above)
    with as_output_error(folder):
        for each, other in reversed([*missing]):
            with contextlib.suppress(FileExistsError):  # made by another conversion meanwhile
                os.mkdir(each, folder_mode(other))
            sync_folder(each.parent)


def folder_mode(like: Path) -> int:
    """The permissions for a new folder that is `like` another one: its own, and its owner may use it."""
    try:
        return stat.S_IMODE(os.stat(like).st_mode) | stat.S_IRWXU
    except OSError:
        return 0o777


def sync_name(path: Path) -> None:
    """Let the name of what was put at `path` reach the disk. Raises OutputError, which says that it is the new one."""
    with _said_to_be_new(path):
        sync_folder(path.parent)


@contextlib.contextmanager
def _said_to_be_new(path: Path) -> Iterator[None]:
    """Let an OSError inside, of syncing the folder, say that what stands at `path` is the new one."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the new file is in place, but its folder could not be synced: {error.strerror}", where=path
        ) from error
