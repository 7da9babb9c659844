"""Advisory locks (``flock``) between those that read a file and the one that changes it in place. None ever waits."""

from __future__ import annotations

import os

from ckptconv.errors import RefusedError, UnreadableError


def lock_exclusive(fd: int, where: object) -> None:
    """Lock the open file `fd` for a change, until it is closed.

    Raises:
        RefusedError: Somebody reads or changes it, or the filesystem has no locks.
    """
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RefusedError(
            "another process reads or changes the file", where=where, hint="try again when it has ended"
        ) from error
    except OSError as error:
        raise RefusedError(
            f"the file cannot be locked ({os.strerror(error.errno or 0)}), so it is not changed in place",
            where=where,
            hint="convert it to another file",
        ) from error


def lock_shared(fd: int, where: object) -> None:
    """Lock the open file `fd` for reading, until it is closed; where there are no locks, do nothing.

    Raises:
        UnreadableError: Somebody changes it.
    """
    try:
        import fcntl
    except ImportError:  # not on Unix, where nothing is changed in place
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UnreadableError(
            "another process changes the file in place", where=where, hint="try again when it has ended"
        ) from error
    except OSError:
        pass
