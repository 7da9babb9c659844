"""System calls of Linux that Python's ``os`` lacks.

Each says whether it did it; elsewhere than on Linux none ever does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_FICLONERANGE = 0x4020940D  # linux/fs.h; struct file_clone_range {s64 src_fd; u64 src_offset, src_length, dest_offset}
_SYNC_FILE_RANGE_WRITE = 2
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM)

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _done(result: int) -> bool:
    """Whether the call worked; False where the system does not offer it. Raises OSError for every other failure."""
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


def fallocate(fd: int, size: int) -> bool:
    """Reserve `size` bytes. Not ``os.posix_fallocate``: where the filesystem cannot, that writes into every block."""
    if _libc is None:
        return False
    return _done(_libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)))


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing to disk what was copied, so that the fsync at
    the end has little left to wait for.
    """
    if _libc is not None:
        _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def rename_if_absent(old: str, new: str) -> bool:
    """Rename `old` to `new`, which must not exist (FileExistsError)."""
    return _rename(old, new, _RENAME_NOREPLACE)


def exchange(a: str, b: str) -> bool:
    """Let `a` and `b`, which both exist, have each other's name, at once."""
    return _rename(a, b, _RENAME_EXCHANGE)


def _rename(old: str, new: str, flag: int) -> bool:
    if _libc is None or not hasattr(_libc, "renameat2"):
        return False
    return _done(_libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag))


def share_block(src: int, dst: int, block: int) -> bool:
    """Whether the first `block` bytes of `src` could be shared with `dst` instead of copied; they now are."""
    try:
        import fcntl

        fcntl.ioctl(dst, _FICLONERANGE, struct.pack("qQQQ", src, 0, block, 0))
    except (ImportError, OSError):
        return False
    return sys.platform == "linux"
