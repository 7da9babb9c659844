"""Write the undo journal of a file, and what it says of how far the change is."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from ckptconv.byteranges.undo_journal import MAGIC, Journal, journal_path
from ckptconv.output.files import is_at, temporary_beside
from ckptconv.output.steps import sync_folder


def write(target: Path, journal: Journal) -> None:
    """Let `journal`, hot, stand beside the file `target`, on the disk before this returns.

    Raises:
        OSError: It cannot be written; then there is none.
    """
    path = journal_path(target)
    temporary = temporary_beside(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        data = memoryview(journal.packed())
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
        os.replace(temporary, path)
        if not is_at(path, fd):
            raise OSError(errno.ESTALE, "another process put something else in its place")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    sync_folder(path.parent)


def mark(target: Path, state: bytes) -> None:
    """Let the journal of `target` say `state`, on the disk before this returns.

    Raises OSError, also where something else took its place: nothing else is written to.
    """
    fd = os.open(journal_path(target), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise OSError(errno.ESTALE, "another file took the place of the undo journal")
        os.pwrite(fd, state, len(MAGIC))
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(*targets: Path) -> None:
    """Remove the journals of `targets`, which stand in one folder, if they have any. Raises OSError."""
    gone = []
    for path in map(journal_path, targets):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            gone.append(path)
    if gone:
        sync_folder(gone[0].parent)
