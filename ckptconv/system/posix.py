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

#: Whether the main thread can be interrupted when the process has used so much time.
HAS_TIMER = sys.platform != "emscripten"
#: Whether a file can be changed in place. That needs the owner of a journal.
HAS_OWNERS = True
#: Whether files that are open keep their names, and the folders above them.
OPEN_FILES_KEEP_NAMES = False
#: What ends the name of a folder, and separates names in a path.
SEPARATORS: tuple[str, ...] = ("/",)
#: The signals that end a command, in addition to Ctrl-C.
ENDING = ("SIGTERM", "SIGHUP")

_CLOEXEC, _NONBLOCK, _NOFOLLOW = (getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW"))
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_MOMENT = 0.01  # seconds until an exception that the interpreter dropped is raised again


# Files


def open_to_read(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Open the file at `path`. Without `follow`, a link is an error. Raises OSError."""
    return os.open(path, os.O_RDONLY | _CLOEXEC | _NONBLOCK | (0 if follow else _NOFOLLOW))


def open_to_change(path: str | os.PathLike[str]) -> int:
    """Open the file at `path`, which is no link, for reading and writing. Raises OSError."""
    return os.open(path, os.O_RDWR | _CLOEXEC | _NOFOLLOW | _NONBLOCK)


def create(path: str | os.PathLike[str], mode: int) -> int:
    """Create the file `path`, for reading and writing. Raises FileExistsError if it exists, OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOEXEC, mode)


def open_folder(path: str | os.PathLike[str]) -> int:
    """Open the folder `path`, which is no link. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW | _CLOEXEC)


if hasattr(os, "pread"):

    def pread(fd: int, length: int, offset: int) -> bytes:
        """Return at most `length` bytes at `offset`, and none at the end of the file. Raises OSError."""
        return os.pread(fd, length, offset)

    def pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write the first bytes of `data` at `offset`, and return how many. Raises OSError."""
        return os.pwrite(fd, data, offset)

    def pread_into(fd: int, buffer: memoryview, offset: int) -> int:
        """Read bytes at `offset` into `buffer`, and return how many. Raises OSError."""
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
    """Lock the open file `fd` until it is closed.

    Raises BlockingIOError if another process has locked it, and OSError or ImportError if there are no locks.
    """
    import fcntl

    fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def free_space(folder: str | os.PathLike[str], fd: int = -1) -> int:
    """Return how many bytes can be written in `folder`, or to the filesystem of the open file `fd`. Raises OSError."""
    space = os.statvfs(folder) if fd < 0 else os.fstatvfs(fd)
    return space.f_bavail * space.f_frsize


def open_limits() -> tuple[float, float]:
    """Return how many files this process may have open, and how far it may raise that number."""
    try:
        import resource
    except ImportError:
        return float("inf"), float("inf")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(float("inf") if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]


def raise_open_limit(most: float) -> None:
    """Let this process have `most` files open, if the system permits that."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


# Names


def is_junction(status: os.stat_result) -> bool:  # noqa: ARG001 - Windows has these
    """Return whether `status` is of a folder that leads to another one and is no symbolic link."""
    return False


def can_be_name(name: str) -> bool:  # noqa: ARG001 - every name can be
    """Return whether a file can be called `name`."""
    return True


def is_same_file(a: os.stat_result, b: os.stat_result) -> bool:
    """Return whether both are of one file or folder."""
    return os.path.samestat(a, b)


def publish(temporary: Path, target: Path) -> bool:
    """Give the file `temporary` the name `target` if that is free. The first name may stay.

    Return False if this filesystem cannot do that safely. Raises FileExistsError, OSError.
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
    """Give the folder `old` the name `new`, where at most an empty folder is. Raises OSError."""
    os.rename(old, new)


def link_file(source: Path, path: Path) -> None:
    """Give the file or link `source` the second name `path`. Raises OSError."""
    os.link(source, path, follow_symlinks=False)


def usable(path: Path) -> Path:
    """Return `path` in a form that all system calls take."""
    return path


# Processes and signals


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Hold Ctrl-C back in this thread, and for good in processes that are started inside."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_soon(function: Callable[..., Any]) -> None:
    """Call `function` in the main thread a moment later, as a handler of signals."""
    signal.signal(signal.SIGALRM, function)
    signal.setitimer(signal.ITIMER_REAL, _MOMENT)


def end_main_thread() -> None:
    """Have this process's main thread handle SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def start_worker(
    words: Callable[[int], Sequence[str]], theirs: Connection, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach, with the connection `theirs`.

    `words`: returns the command line for the number of the connection.
    """
    import subprocess

    fd = theirs.fileno()
    with interrupts_blocked():
        return subprocess.Popen(words(fd), stdin=subprocess.DEVNULL, pass_fds=[fd], env=environment)


def end_worker(process: subprocess.Popen[bytes]) -> None:
    """Ask the worker `process` to delete its temporary file and end."""
    process.terminate()


def connected(number: int) -> Connection:
    """Return the connection with this `number`, which :func:`start_worker` has passed to this process."""
    from multiprocessing.connection import Connection

    return Connection(number)


def is_closed_pipe(error: OSError) -> bool:
    """Return whether `error`, of writing, says that nobody reads the pipe any more."""
    return isinstance(error, BrokenPipeError)


# Commands that are printed

#: The quote of Python literals in a word of a command.
QUOTE = '"'
#: What ends a line of a command that goes on in the next line.
CONTINUED = " \\"
MAKE_FOLDERS = ("mkdir", "-p")
RENAME = "mv"


def command_line(words: Sequence[str], *, ascii_only: bool = False) -> str:
    """Return a command of `words`, as it is typed."""
    return " ".join(quoted(word, ascii_only=ascii_only) for word in words)


def quoted(word: str, *, ascii_only: bool = False) -> str:
    """Return `word` for a shell. Characters that cannot be printed are in the shell's own escapes."""
    if printable(word) == word and (word.isascii() or not ascii_only):
        return shlex.quote(word)
    return f"$'{''.join(_escaped(character, ascii_only=ascii_only) for character in word)}'"


def _escaped(character: str, *, ascii_only: bool = False) -> str:
    """Return `character` as it is written between ``$'`` and ``'`` in a shell."""
    if printable(character) == character and character not in "\\'" and (character.isascii() or not ascii_only):
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
