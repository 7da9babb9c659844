"""System calls on Linux, macOS and WebAssembly. :mod:`ckptconv.system.windows` has the same functions.

Functions of ``os`` are looked up when they are called, because tests replace them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import printable

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection
    from pathlib import Path

#: Whether a timer of CPU time can interrupt the main thread.
HAS_TIMER = sys.platform != "emscripten"
#: Whether files have owners. In-place changes need the owner of a journal.
HAS_OWNERS = True
#: Whether open files, and the folders that contain them, cannot be renamed.
OPEN_FILES_KEEP_NAMES = False
#: The separators of names in a path.
SEPARATORS: tuple[str, ...] = ("/",)
#: The signals that end a command, in addition to Ctrl-C.
ENDING = ("SIGTERM", "SIGHUP")

_CLOEXEC, _NONBLOCK, _NOFOLLOW = (getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW"))
_CANNOT_LINK = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_MOMENT = 0.01  # seconds to wait before an exception that the interpreter dropped is raised again


# Files


def open_to_read(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Open the file at `path` for reading, and return the descriptor.

    Raises OSError, also if `follow` is False and the path is a link.
    """
    return os.open(path, os.O_RDONLY | _CLOEXEC | _NONBLOCK | (0 if follow else _NOFOLLOW))


def open_to_change(path: str | os.PathLike[str]) -> int:
    """Open the file at `path` for reading and writing, without following a link, and return the descriptor.

    Raises OSError.
    """
    return os.open(path, os.O_RDWR | _CLOEXEC | _NOFOLLOW | _NONBLOCK)


def create(path: str | os.PathLike[str], mode: int) -> int:
    """Create the file `path` with permissions `mode` for reading and writing, and return the descriptor.

    Raises FileExistsError if the file exists, and OSError.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOEXEC, mode)


def open_folder(path: str | os.PathLike[str]) -> int:
    """Open the folder `path`, without following a link, and return the descriptor. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW | _CLOEXEC)


if hasattr(os, "pread"):

    def pread(fd: int, length: int, offset: int) -> bytes:
        """Return at most `length` bytes at `offset`. Return no bytes at the end of the file. Raises OSError."""
        return os.pread(fd, length, offset)

    def pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write `data`, or its first bytes, at `offset`. Return the number of bytes written. Raises OSError."""
        return os.pwrite(fd, data, offset)

    def pread_into(fd: int, buffer: memoryview, offset: int) -> int:
        """Read bytes at `offset` into `buffer`. Return the number of bytes read, 0 at the end of the file.

        Raises OSError.
        """
        if hasattr(os, "preadv"):
            return os.preadv(fd, [buffer], offset)
        data = os.pread(fd, min(len(buffer), 1 << 24), offset)  # WebAssembly has no preadv
        buffer[: len(data)] = data
        return len(data)

else:
    from ckptconv.system.seeking import pread as pread
    from ckptconv.system.seeking import pread_into as pread_into
    from ckptconv.system.seeking import pwrite as pwrite


def sync(fd: int) -> None:
    """Wait until the bytes of the open file or folder `fd` are on the disk. Raises OSError."""
    if sys.platform == "darwin":  # there, fsync leaves them in the disk's own cache
        import fcntl

        with contextlib.suppress(OSError):  # a filesystem without it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Wait until the names in `folder` are on the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | _CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def lock(fd: int, *, exclusive: bool) -> None:
    """Lock the open file `fd`, shared or `exclusive`, until it is closed. Does not wait.

    Raises BlockingIOError if another process has a conflicting lock, and OSError or ImportError if locks are not
    supported.
    """
    import fcntl

    fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def free_space(folder: str | os.PathLike[str], fd: int = -1) -> int:
    """Return the number of bytes that can be written in `folder`. With `fd`, ask the filesystem of that open file.

    Raises OSError.
    """
    space = os.statvfs(folder) if fd < 0 else os.fstatvfs(fd)
    return space.f_bavail * space.f_frsize


def open_limits() -> tuple[float, float]:
    """Return the number of files that this process may have open, and the greatest number to which it may raise that.

    Both are infinite if there is no limit.
    """
    try:
        import resource
    except ImportError:
        return float("inf"), float("inf")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(float("inf") if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]


def raise_open_limit(most: float) -> None:
    """Allow this process to have `most` files open. Ignored if the system refuses."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


# Names


def is_junction(status: os.stat_result) -> bool:  # noqa: ARG001 - Windows has these
    """Return False: only Windows has junctions."""
    return False


def can_be_name(name: str) -> bool:  # noqa: ARG001 - every name can be
    """Return whether a file can be called `name`, which is always true here."""
    return True


def is_same_file(a: os.stat_result, b: os.stat_result) -> bool:
    """Return whether `a` and `b` are of the same file or folder."""
    return os.path.samestat(a, b)


def publish(temporary: Path, target: Path) -> bool:
    """Give the file `temporary` the name `target` if that name is free. The old name may stay.

    Return False if the filesystem cannot do this without risking to replace a file. Raises FileExistsError, OSError.
    """
    from ckptconv.system.filesystem import rename_if_absent

    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return rename_if_absent(str(temporary), str(target))
    return True


def rename_folder(old: Path, new: Path) -> None:
    """Rename the folder `old` to `new`. An empty folder at `new` is replaced. Raises OSError."""
    os.rename(old, new)


def link_file(source: Path, path: Path) -> None:
    """Create a hard link `path` to the file or symbolic link `source`. Raises OSError."""
    os.link(source, path, follow_symlinks=False)


def usable(path: Path) -> Path:
    """Return `path` in a form that all system calls accept, which is `path` itself here."""
    return path


# Processes and signals


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C in this thread until the ``with`` block ends.

    Processes that are started in the block never receive it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_soon(function: Callable[..., Any]) -> None:
    """Call `function` in the main thread a moment later, as a signal handler."""
    signal.signal(signal.SIGALRM, function)
    signal.setitimer(signal.ITIMER_REAL, _MOMENT)


def end_main_thread() -> None:
    """Deliver SIGTERM to this process. Its main thread runs the handler."""
    os.kill(os.getpid(), signal.SIGTERM)


def start_worker(
    words: Callable[[int], Sequence[str]], theirs: Connection, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach. It inherits the connection `theirs`.

    `words` returns the command line for the descriptor of the connection. `environment` has the process's variables.
    """
    import subprocess

    fd = theirs.fileno()
    with interrupts_blocked():
        return subprocess.Popen(words(fd), stdin=subprocess.DEVNULL, pass_fds=[fd], env=environment)


def end_worker(process: subprocess.Popen[bytes]) -> None:
    """Ask the worker `process` to delete its temporary file and end."""
    process.terminate()


def connected(number: int) -> Connection:
    """Return the connection with the descriptor `number`, which :func:`start_worker` passed to this process."""
    from multiprocessing.connection import Connection

    return Connection(number)


def is_closed_pipe(error: OSError) -> bool:
    """Return whether `error`, raised while writing, means that the reader of the pipe has closed it."""
    return isinstance(error, BrokenPipeError)


# Commands that are printed

#: The quote of Python literals in a word of a command.
QUOTE = '"'
#: The end of a line of a command that continues on the next line.
CONTINUED = " \\"
MAKE_FOLDERS = ("mkdir", "-p")
RENAME = "mv"


def command_line(words: Sequence[str], *, ascii_only: bool = False) -> str:
    """Return `words` as a command that can be typed. With `ascii_only`, other characters are escaped."""
    return " ".join(quoted(word, ascii_only=ascii_only) for word in words)


def quoted(word: str, *, ascii_only: bool = False) -> str:
    """Return `word` quoted for a shell.

    Characters that cannot be printed are escaped, and with `ascii_only` all non-ASCII characters.
    """
    if printable(word) == word and (word.isascii() or not ascii_only):
        return shlex.quote(word)
    return f"$'{''.join(_escaped(character, ascii_only=ascii_only) for character in word)}'"


def _escaped(character: str, *, ascii_only: bool = False) -> str:
    """Return `character` as it is written between ``$'`` and ``'`` in a shell.

    `ascii_only` is as for :func:`quoted`.
    """
    if printable(character) == character and character not in "\\'" and (character.isascii() or not ascii_only):
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
