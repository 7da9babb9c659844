"""Python on Linux without the names that Python on macOS lacks. Each process imports this module if its folder is in
PYTHONPATH.

The names that typeshed lists are removed from ``os`` and other modules, except ``sched_getaffinity``, which mypy calls
on Linux. Renames and flushes use the calls of macOS, which replacements implement with those of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

LACKS = {
    os: """
        EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE GRND_NONBLOCK GRND_RANDOM MFD_ALLOW_SEALING MFD_CLOEXEC MFD_HUGETLB
        O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE POSIX_FADV_DONTNEED POSIX_FADV_NOREUSE
        POSIX_FADV_NORMAL POSIX_FADV_RANDOM POSIX_FADV_SEQUENTIAL POSIX_FADV_WILLNEED P_PIDFD RTLD_DEEPBIND RWF_APPEND
        RWF_DSYNC RWF_HIPRI RWF_NOWAIT RWF_SYNC SCHED_BATCH SCHED_IDLE SCHED_RESET_ON_FORK SPLICE_F_MORE SPLICE_F_MOVE
        SPLICE_F_NONBLOCK ST_APPEND ST_MANDLOCK ST_NOATIME ST_NODEV ST_NODIRATIME ST_NOEXEC ST_RELATIME ST_SYNCHRONOUS
        ST_WRITE XATTR_CREATE XATTR_REPLACE XATTR_SIZE_MAX copy_file_range eventfd eventfd_read eventfd_write fdatasync
        getrandom getresgid getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate
        removexattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
        sched_setparam sched_setscheduler setresgid setresuid setxattr splice waitid waitid_result""",
    signal: """
        SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo struct_siginfo""",
    fcntl: """
        F_ADD_SEALS F_GETPIPE_SZ F_GETSIG F_GET_SEALS F_NOTIFY F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ
        F_SETSIG""",
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING RUSAGE_THREAD prlimit",
    select: "POLLRDHUP epoll",
}
_EXCL, _SWAP = 4, 2  # sys/stdio.h of macOS
_FLAGS = {_EXCL: 1, _SWAP: 2}  # linux/fs.h
_HERE = -100  # AT_FDCWD


def _renamex_np(old: bytes, new: bytes, flag: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).renameat2(_HERE, old, _HERE, new, _FLAGS[flag]))


def _of_macos(module: ModuleType) -> None:
    module.sys = SimpleNamespace(platform="darwin")  # type: ignore[attr-defined]


def _filesystem(module: ModuleType) -> None:
    _of_macos(module)
    module._libc = SimpleNamespace(renamex_np=_renamex_np)  # type: ignore[attr-defined]


def _context(module: Any) -> None:
    module._default_context._default_context = module._concrete_contexts["spawn"]


#: Functions that change a module after its import.
AFTER = {
    "ckptconv.system.posix": _of_macos,
    "ckptconv.system.filesystem": _filesystem,
    "multiprocessing.context": _context,
}


class _Finder:
    """A finder that changes the modules of :data:`AFTER` when they are imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in AFTER else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            AFTER[name](module)

        loader.exec_module = exec_module
        return spec


for _module, _names in LACKS.items():
    for _name in _names.split():
        if hasattr(_module, _name):
            delattr(_module, _name)
errno.EOPNOTSUPP = 102  # type: ignore[misc]  # filesystems of macOS report ENOTSUP, which is another number
fcntl.F_FULLFSYNC = 51  # type: ignore[attr-defined]  # Linux does not support it, like some filesystems of macOS
sys.meta_path.insert(0, _Finder)
