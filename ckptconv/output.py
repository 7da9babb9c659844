"""Write a planned file, whole or not at all: the only writer.

A unique temporary beside the target, filled (:mod:`ckptconv.transfer`), fsynced, renamed, the folder fsynced: whatever happens before the rename, the target is as it was;
afterwards it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptconv import linux
from ckptconv.errors import OutputError, RefusedError, TargetExistsError, UsageError
from ckptconv.model import BLOCK, OutFile, Overflow, Progress
from ckptconv.sources import Readable
from ckptconv.transfer import Transfer

__all__ = ["check_target", "write"]

_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def check_target(path: Path, *, replace: bool) -> None:
    """Raise unless a file may be put at PATH: a folder there, a device, or any file without REPLACE is in the way."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(
                "the output's folder does not exist", where=path.parent, hint=f"mkdir -p {path.parent}"
            ) from None
        return
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error
    if stat.S_ISLNK(mode) and os.path.exists(path):
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise RefusedError("the output is there and is no regular file", where=path)
    if not replace:
        raise TargetExistsError("the output exists", where=path, hint="--force replaces it")


def write(
    file: OutFile, source: Readable, *, replace: bool, verify: bool, progress: Progress | None = None
) -> Overflow:
    """Write FILE, whose ranges come from SOURCE; what overflowed. Raises OutputError, TargetExistsError, InputChangedError, MalformedError.

    REPLACE: an old file may go. VERIFY: read everything back and compare it before the target appears.
    """
    check_target(file.path, replace=replace)
    folder = file.path.parent
    temporary = folder / f".{_short(file.path.name)}.ckptconv-{os.urandom(3).hex()}.tmp"
    transfer = Transfer(file)
    ours = True
    try:
        with _as_output_error(file.path):
            try:
                fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:  # another writer's, by the same random name
                ours = False
                raise
            try:
                _keep_mode(fd, file.path)
                _forget(file.path, source)
                _reserve(fd, file, source, beside=transfer.pieces.spooled_bytes)
                with transfer:
                    transfer.fill(fd, progress)
                    os.fsync(fd)
                    if verify:
                        transfer.compare(fd)
            finally:
                os.close(fd)
            source.check_unchanged()
            _publish(temporary, file.path, replace)
    finally:
        if ours:
            with contextlib.suppress(OSError):  # a rename took it away, or what went wrong before matters more
                os.unlink(temporary)
    _sync_folder(folder, file.path)
    return transfer.overflowed


@contextlib.contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"could not be written: {error.strerror}", where=path, got=error.errno and errno.errorcode.get(error.errno)
        ) from error


def _short(name: str) -> str:
    """As much of NAME as leaves room for what makes it a temporary's, in a folder that takes names of 255 bytes."""
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return name


def _keep_mode(fd: int, target: Path) -> None:
    """Give the new file the mode of the regular file that it replaces; a fresh one follows the umask."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(target).st_mode
        if stat.S_ISREG(mode):
            os.fchmod(fd, stat.S_IMODE(mode))


def _forget(target: Path, source: Readable) -> None:
    """Give back the memory that caches the file to be replaced, as truncating it would: the new one needs as much.

    Measured in a virtual machine, where memory that no one has used lately is slow to get: 2 GiB in 1.4 s instead of 7 s.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not source.is_same_file(os.fstat(fd)):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _reserve(fd: int, file: OutFile, source: Readable, beside: int) -> None:
    """Make sure of the space before the first byte, unless blocks will be shared. BESIDE: what is needed for a while beside the file."""
    if min(source.size, file.size) >= BLOCK and linux.share_block(source.fd, fd, BLOCK):
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
    space = os.fstatvfs(fd)
    raise OutputError(
        "too little free space",
        where=file.path,
        expected=f"{needed:,} bytes",
        got=f"{space.f_bavail * space.f_frsize:,} bytes",
    )


def _publish(temporary: Path, target: Path, replace: bool) -> None:
    """Give the finished file its name. Without REPLACE only if the name is still free."""
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
                    where=target, hint="--force accepts that",
                ) from error  # fmt: skip
    except FileExistsError as error:
        raise TargetExistsError("the output exists by now", where=target, hint="--force replaces it") from error


def _sync_folder(folder: Path, target: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OutputError(
            f"the new file is in place, but its folder could not be synced: {error.strerror}", where=target
        ) from error
