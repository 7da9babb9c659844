"""Owner, permissions and attributes of files, and system calls of Linux and macOS that Python's ``os`` lacks.

The functions for system calls return whether the call was made. They return False on systems without it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any

from ckptconv.errors import RefusedError

_FICLONERANGE = 0x4020940D  # linux/fs.h; struct file_clone_range {s64 src_fd; u64 src_offset, src_length, dest_offset}
_SYNC_FILE_RANGE_WRITE = 2
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED = (
    *(errno.ENOTSUP, errno.EOPNOTSUPP),  # two numbers on macOS
    *(errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM),
)

_ACCESS_LIST = "system.posix_acl_access"
#: The attributes to keep: access control lists, attributes of users, SELinux's label. Others belong to the system; for
#: example, each file of Lustre has its own.
_KEPT = ("system.", "user.", "security.selinux")

_RENAME_EXCL, _RENAME_SWAP = 4, 2  # the same of macOS: sys/stdio.h

_HAS_LIBC = sys.platform in ("linux", "darwin")
_libc: Any = ctypes.CDLL(None, use_errno=True) if _HAS_LIBC else None


def _done(result: int) -> bool:
    """Return True if `result`, returned by a C function, means success, and False if the call is not supported.

    Raises OSError for other failures.
    """
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


def fallocate(fd: int, size: int) -> bool:
    """Reserve `size` bytes on the disk for the open file `fd`. Return False if that is not supported.

    ``os.posix_fallocate`` is not used, because it would write into each block if the filesystem cannot reserve space.
    """
    if not hasattr(_libc, "fallocate"):
        return False
    return _done(_libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)))


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing `length` bytes at `offset` of the open file `fd` to the disk.

    The final fsync then has less to wait for.
    """
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def rename_if_absent(old: str, new: str) -> bool:
    """Rename `old` to `new`. Return False if that is not supported. Raises FileExistsError if `new` exists."""
    return _rename(old, new, _RENAME_NOREPLACE, _RENAME_EXCL)


def exchange(a: str, b: str) -> bool:
    """Exchange the names of `a` and `b`, which both exist, in one step. Return False if that is not supported."""
    return _rename(a, b, _RENAME_EXCHANGE, _RENAME_SWAP)


def _rename(old: str, new: str, flag: int, flag_of_macos: int) -> bool:
    if hasattr(_libc, "renameat2"):
        return _done(_libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag))
    if hasattr(_libc, "renamex_np"):
        return _done(_libc.renamex_np(os.fsencode(old), os.fsencode(new), flag_of_macos))
    return False


def share_block(src: int, dst: int, block: int) -> bool:
    """Make the file `dst` share the first `block` bytes of the file `src`, without a copy.

    Return False if that fails.
    """
    try:
        import fcntl

        fcntl.ioctl(dst, _FICLONERANGE, struct.pack("qQQQ", src, 0, block, 0))
    except (ImportError, OSError):
        return False
    return sys.platform == "linux"


def take_over(new: int | Path, old: Path) -> None:
    """Give `new`, an open file or a folder, the owner, group, permissions and extended attributes of `old`.

    If the group cannot be kept, the group of `new` gets only the permissions that everybody has. An access control list
    cannot be kept in that case, because it contains permissions of the group.

    Raises:
        RefusedError: An attribute, such as an access control list, cannot be kept. `new` is not more open than `old`.
        OSError: A system call fails.
    """
    if not hasattr(os, "getuid"):  # Windows, where the folder gives permissions
        return
    info = os.stat(old)
    mode = _give_away(new, info)
    before, after = _attributes(old), _attributes(new)
    if _ACCESS_LIST in before and os.stat(new).st_gid != info.st_gid:
        raise _not_kept(_ACCESS_LIST, old, PermissionError(errno.EPERM, "its group cannot be kept"))
    for name in before.keys() | after.keys():
        try:
            if name not in before:  # inherited from the folder
                os.removexattr(new, name)
            elif before[name] != after.get(name):
                os.setxattr(new, name, before[name])
        except OSError as error:
            raise _not_kept(name, old, error) from error
    os.chmod(new, mode)


def _give_away(new: int | Path, info: os.stat_result) -> int:
    """Give `new` the owner and group in `info`, as far as allowed. Return the permissions that it may have."""
    mine, mode = os.stat(new), stat.S_IMODE(info.st_mode)
    if (mine.st_uid, mine.st_gid) == (info.st_uid, info.st_gid):
        return mode
    for owner in (info.st_uid, -1):
        try:
            os.chown(new, owner, info.st_gid)
        except OSError:
            mode &= ~stat.S_ISUID
        else:
            return mode
    others = mode & stat.S_IRWXO
    return mode & ~(stat.S_ISGID | stat.S_IRWXG) | mode & others << 3


def _attributes(path: int | Path) -> dict[str, bytes]:
    """Return the extended attributes of `path` that a new version of the file keeps. Raises RefusedError."""
    values: dict[str, bytes] = {}
    try:
        names = os.listxattr(path) if hasattr(os, "listxattr") else []
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return values
        raise
    for name in names:
        try:
            if name.startswith(_KEPT):
                values[name] = os.getxattr(path, name)
        except OSError as error:
            raise _not_kept(name, path, error) from error
    return values


def _not_kept(name: str, path: int | Path, error: OSError) -> RefusedError:
    what = "access control list" if "acl" in name else f"attribute {name}"
    return RefusedError(
        f"the {what} of the old output cannot be kept: {error.strerror}",
        where=path,
        hint="convert to another name, or delete the old output first",
    )
