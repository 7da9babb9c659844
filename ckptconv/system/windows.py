"""System calls on Windows. :mod:`ckptconv.system.posix` has the same functions, and describes what they do.

Files are opened with CreateFile instead of ``os.open``. As on Linux, other processes may then read, write, rename and
delete them, no byte is translated, and no child process inherits them.
"""

from __future__ import annotations

import _thread
import _winapi
import contextlib
import errno
import msvcrt
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import printable
from ckptconv.lazy_regex import regex
from ckptconv.system.names import stays_inside
from ckptconv.system.seeking import pread as pread
from ckptconv.system.seeking import pread_into as pread_into
from ckptconv.system.seeking import pwrite as pwrite

assert sys.platform == "win32"  # mypy reads the rest for that system only

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import PipeConnection
    from pathlib import Path

HAS_TIMER = False
HAS_OWNERS = False  # the owner of a file is a SID, which `os.stat` does not give
OPEN_FILES_KEEP_NAMES = True
SEPARATORS: tuple[str, ...] = ("\\", "/")
ENDING = ("SIGTERM", "SIGBREAK")

_READ, _WRITE, _ATTRIBUTES = 0x8000_0000, 0x4000_0000, 0x80
_SHARED = 1 | 2 | 4  # to read, write and delete
_NEW, _EXISTING = 1, 3
_NORMAL, _FOLDER, _NO_FOLLOW = 0x80, 0x0200_0000, 0x0020_0000
_MOST_OPEN = 8192  # of the C library
_LONGEST = 150  # characters of a path, so that longer names in it stay below the limits of calls: 259, for folders 247
_MOMENT = 0.01  # seconds to wait before an exception that the interpreter dropped is raised again
#: Words that cmd and PowerShell read alike: without quotes, and between double quotes.
_PLAIN = regex(r"[\w./\\:+=-]+")
_SAME_IN_QUOTES = regex(r'[^"%$`\x00-\x1f\x7f“”„]*')


# Files


def _opened(path: str | os.PathLike[str], access: int, how: int, flags: int) -> int:
    handle = _winapi.CreateFile(os.fspath(path), access, _SHARED, 0, how, flags, 0)
    try:
        return msvcrt.open_osfhandle(handle, os.O_NOINHERIT | (0 if access & _WRITE else os.O_RDONLY))
    except BaseException:
        _winapi.CloseHandle(handle)
        raise


def open_to_read(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Open the file at `path` for reading, and return the descriptor.

    Raises OSError, also if `follow` is False and the path is a link.
    """
    fd = _opened(path, _READ, _EXISTING, _NORMAL if follow else _NORMAL | _NO_FOLLOW)
    if not follow and os.fstat(fd).st_file_attributes & stat.FILE_ATTRIBUTE_REPARSE_POINT:
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return fd


def open_to_change(path: str | os.PathLike[str]) -> int:
    """Raise OSError: in-place changes are not supported on Windows."""
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)


def create(path: str | os.PathLike[str], mode: int) -> int:  # noqa: ARG001 - permissions come from the folder
    """Create the file `path` for reading and writing, and return the descriptor. `mode` is ignored.

    Raises FileExistsError if the file exists, and OSError.
    """
    return _opened(path, _READ | _WRITE, _NEW, _NORMAL | _NO_FOLLOW)  # a link to nothing is a file that exists


def open_folder(path: str | os.PathLike[str]) -> int:
    """Open the folder `path`, without following a link, and return the descriptor. Raises OSError."""
    return _opened(path, _ATTRIBUTES, _EXISTING, _FOLDER | _NO_FOLLOW)


def sync(fd: int) -> None:
    """Wait until the bytes of the open file `fd` are on the disk. Raises OSError."""
    os.fsync(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Ask the system to write the names in `folder` to the disk.

    Errors are ignored: not every filesystem can do this.
    """
    with contextlib.suppress(OSError):
        fd = _opened(folder, _WRITE, _EXISTING, _FOLDER)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def lock(fd: int, *, exclusive: bool) -> None:
    """Do nothing: locks only protect from in-place changes, which are not supported on Windows."""


def free_space(folder: str | os.PathLike[str], fd: int = -1) -> int:  # noqa: ARG001 - of a filesystem by a path
    """Return the number of bytes that can be written in `folder`. `fd` is ignored. Raises OSError."""
    return shutil.disk_usage(folder).free


def open_limits() -> tuple[float, float]:
    """Return the number of files that this process may have open, and the same number as its upper limit."""
    return _MOST_OPEN, _MOST_OPEN


def raise_open_limit(most: float) -> None:
    """Do nothing: the C library sets the limit."""


# Names


def is_junction(status: os.stat_result) -> bool:
    """Return whether `status` is that of a junction, a folder that leads to another one.

    Every user may create junctions.
    """
    return status.st_reparse_tag == stat.IO_REPARSE_TAG_MOUNT_POINT


def can_be_name(name: str) -> bool:
    """Return whether a file can be called `name`. Names of streams and devices are not allowed."""
    return stays_inside(name)


def is_same_file(a: os.stat_result, b: os.stat_result) -> bool:
    """Return whether `a` and `b` are of the same file or folder.

    Wine gives device 0 for an open file that was renamed, so 0 matches every device.
    """
    return a.st_ino == b.st_ino and (a.st_dev == b.st_dev or not a.st_dev or not b.st_dev)


def publish(temporary: Path, target: Path) -> bool:
    """Rename the file `temporary` to `target` if that name is free, and return True.

    Raises FileExistsError, OSError.
    """
    os.rename(temporary, target)  # which never replaces a file here
    return True


def rename_folder(old: Path, new: Path) -> None:
    """Rename the folder `old` to `new`. An empty folder at `new` is replaced. Raises OSError."""
    with contextlib.suppress(OSError):
        os.rmdir(new)
    os.rename(old, new)


def link_file(source: Path, path: Path) -> None:
    """Create a hard link `path` to the file `source`. Raises OSError."""
    os.link(source, path)


def usable(path: Path) -> Path:
    """Return `path` in a form that all system calls accept. A long path gets a prefix that lifts their limit."""
    text = os.path.abspath(path)
    if len(text) < _LONGEST or text.startswith("\\\\?\\"):
        return path
    return type(path)("\\\\?\\UNC" + text[1:] if text.startswith("\\\\") else "\\\\?\\" + text)


# Processes and signals


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Do nothing: processes that are started inside are in groups of their own, which Ctrl-C does not reach."""
    yield


def call_soon(function: Callable[..., Any]) -> None:
    """Call `function` in the main thread a moment later, as the handler of Ctrl-C."""
    signal.signal(signal.SIGINT, function)
    threading.Timer(_MOMENT, _thread.interrupt_main).start()


def end_main_thread() -> None:
    """Deliver SIGTERM to the main thread of this process."""
    _thread.interrupt_main(signal.SIGTERM)


def start_worker(
    words: Callable[[int], Sequence[str]], theirs: PipeConnection, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach. It inherits only the connection `theirs`.

    `words` returns the command line for the handle of the connection. `environment` has the process's variables.
    """
    import subprocess

    handle = theirs.fileno()
    os.set_handle_inheritable(handle, True)
    return subprocess.Popen(
        words(handle),
        stdin=subprocess.DEVNULL,
        env=environment,
        startupinfo=subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]}),
        creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
    )


def end_worker(process: subprocess.Popen[bytes]) -> None:
    """Ask the worker `process` to delete its temporary file and end. Without a console, terminate it."""
    try:
        process.send_signal(signal.CTRL_BREAK_EVENT)
    except OSError:
        process.terminate()


def connected(number: int) -> PipeConnection:
    """Return the connection with the handle `number`, which :func:`start_worker` passed to this process."""
    from multiprocessing.connection import PipeConnection

    return PipeConnection(number)


def is_closed_pipe(error: OSError) -> bool:
    """Return whether `error`, raised while writing, means that the reader of the pipe has closed it."""
    is_of_stream = error.errno == errno.EINVAL and error.winerror is None and error.filename is None
    return isinstance(error, BrokenPipeError) or is_of_stream


# Commands that are printed

QUOTE = "'"
CONTINUED = ""
MAKE_FOLDERS = ("mkdir",)
RENAME = "move"


def command_line(words: Sequence[str], *, ascii_only: bool = False) -> str:
    """Return `words` as a command that can be typed.

    If only PowerShell accepts the command, it begins with "in PowerShell: ". With `ascii_only`, other characters are
    escaped.
    """
    typed = [quoted(word, ascii_only=ascii_only) for word in words]
    needs_powershell = any("`" in word or "%" in word for word in typed)
    return "in PowerShell: " * needs_powershell + " ".join(typed)


def quoted(word: str, *, ascii_only: bool = False) -> str:
    """Return `word` quoted for both cmd and PowerShell, or for PowerShell only if there is no common form.

    In the second case, characters that cannot be printed are escaped, and with `ascii_only` all non-ASCII characters.
    """
    shown = printable(word) == word and (word.isascii() or not ascii_only)
    if shown and _PLAIN.fullmatch(word):
        return word
    if word.endswith("\\"):  # which would escape the quote after it
        word = word[:-1] + "/"
    if shown and _SAME_IN_QUOTES.fullmatch(word):
        return f'"{word}"'
    return '"' + "".join(_escaped(character, ascii_only=ascii_only) for character in word) + '"'


def _escaped(character: str, *, ascii_only: bool) -> str:
    """Return `character` as it is written between double quotes in PowerShell.

    The result never ends the quotes, not even in cmd, which would run the text after them.
    """
    if character == '"' or printable(character) != character or (ascii_only and not character.isascii()):
        return f"`u{{{ord(character):x}}}"
    return f"`{character}" if character in "$`“”„" else character
