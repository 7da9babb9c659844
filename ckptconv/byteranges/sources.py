"""Inputs, read by position: files, opened once, folders of them, and what is in memory.

Never mapped into memory: a mapped file that is truncated by somebody else ends the reader with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.errors import (
    InputChangedError,
    InputError,
    MissingInputError,
    RefusedError,
    UnreadableError,
    UnsupportedError,
)


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


_R = TypeVar("_R", bound="Readable")

_HELD = 1 << 15  # bytes of a file that is read at once: a small one is asked for some twenty parts

_SPARE = 64  # open files that the rest of the process may need
_LEAST_SPARE = 8  # without which no module can be imported, and no output written

#: The hint if too many files are open.
MORE_FILES = "ulimit -n shows how many files may be open, and can raise that limit"

STEP = 1 << 24  # bytes that are asked at once of what fills no buffer by itself

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}


def check_system() -> None:
    """Raise UnsupportedError where Python cannot read and write files by position, as on Windows."""
    if not hasattr(os, "pread"):
        raise UnsupportedError(
            "this system has no reading and writing of files by position, which ckptconv needs",
            expected="Linux or macOS",
            hint="on Windows, install and run it in WSL",
        )


class Readable:
    """An open file, read by position. A context manager.

    ``path`` is for messages; only where it `is_stored` does that file stand there, so that a command can name it and
    others can stand beside it. ``fd`` is -1 where the kernel has no file for it, ``size`` in bytes. ``mode`` has the
    permissions that a copy of it may have. ``faults`` takes what readers find wrong with it. Where it `is_far`, each
    read can cost a request to a server.
    """

    path: Path
    fd: int
    size: int
    mode: int = 0o666
    faults: FaultSink = RAISED
    is_stored: bool = False
    is_far: bool = False

    def __enter__(self: _R) -> _R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is open; twice is harmless."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises InputChangedError where the file has become shorter."""
        parts = []
        while length:
            try:
                part = os.pread(self.fd, length, offset)
            except OSError as error:
                raise self._unreadable(error, offset) from error
            if not part:
                raise self._too_short(offset + length)
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`. Raises as :meth:`read` does."""
        while buffer:
            try:
                done = _read_into(self.fd, buffer, offset)
            except OSError as error:
                raise self._unreadable(error, offset) from error
            if not done:
                raise self._too_short(offset + len(buffer))
            offset += done
            buffer = buffer[done:]

    def is_same_file(self, other: os.stat_result) -> bool:  # noqa: ARG002 - what is in memory alone is no file
        """Whether `other` is this very file, under whatever name."""
        return False

    def check_unchanged(self) -> None:
        """Raise InputChangedError if it is not what it was when it was opened."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """`ranges`, from a start to an end, are about to be read: what is far is asked for them all at once."""

    def announce(self, ranges: Iterable[tuple[int, int]], *, keep: Path | None = None) -> None:
        """`ranges`, from a start to an end, are about to be read in this order: what is far comes ahead of who reads.
        More than once only where there is a folder to `keep` them in.
        """

    def spares(self, offset: int, length: int, what: str) -> bool:  # noqa: ARG002 - what is near is read
        """Whether bytes that only prove the file sound are not to be read; then it says itself that `what` was not."""
        return False

    def about(self) -> list[str]:
        """What else to say of it, when it has been read."""
        return []

    def _unreadable(self, error: OSError, offset: int) -> InputError:
        what = f"cannot be read: {error.strerror or error}"
        found = UnreadableError(what, where=f"{self.path} at byte {offset}")
        self.faults.unreachable(found)
        return found

    def _too_short(self, expected: int) -> InputChangedError:
        return InputChangedError(
            "the file became shorter while it was read", where=self.path, expected=f"{expected} bytes"
        )


class BytesSource(Readable):
    """`data`, in memory. `path` is for messages."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path, self.fd, self.size = path, -1, len(data)
        self._data = data

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`."""
        return self._data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`."""
        buffer[:] = self._data[offset : offset + len(buffer)]


class SliceSource(Readable):
    """`length` bytes at `offset` of `of`, as if they were a file of their own."""

    def __init__(self, of: Readable, offset: int, length: int) -> None:
        self.path, self.fd, self.size, self.faults = of.path, -1, length, of.faults
        self.of, self.offset = of, offset

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises InputChangedError where the file has become shorter."""
        return self.of.read(self.offset + offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`. Raises as :meth:`read` does."""
        self.of.read_into(self.offset + offset, buffer)


class ComputedSource(Readable):
    """What is not read by the kernel, in pieces that :meth:`read_into` alone gives."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises InputChangedError where the file has become shorter."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)


class Source(Readable):
    """A regular file, open for reading."""

    is_stored = True

    def __init__(self, path: str | os.PathLike[str], faults: FaultSink = RAISED, *, locked: bool = False) -> None:
        """Open `path`; `locked` keeps it from being changed in place until it is closed.

        Raises InputError where it cannot be read, is no regular file, or is being changed in place.
        """
        check_system()
        self.faults = faults
        if not os.fspath(path):  # pathlib takes it for the folder that we are in
            raise InputError("no path given: it is empty")
        self.path = path if isinstance(path, Path) else Path(os.fsdecode(path))
        try:
            mode = os.stat(self.path).st_mode  # before open: a FIFO waits for a writer, a device may do anything
            if not stat.S_ISREG(mode):
                raise _no_file(self.path, mode)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise _too_many(self.path) from error
            kind = MissingInputError if isinstance(error, FileNotFoundError) else UnreadableError
            raise kind(f"cannot be read: {error.strerror}", where=self.path) from error
        except ValueError as error:  # a NUL in the path
            raise InputError("no such path can exist", where=self.path) from error
        if not leave_spare(self.fd):
            self.close()
            raise _too_many(self.path)
        if locked:  # before its size is asked for: who changes it in place may be ending just now
            try:
                lock_shared(self.fd, self.path)
            except InputError:
                self.close()
                raise
        self._stat = os.fstat(self.fd)
        if not stat.S_ISREG(self._stat.st_mode):  # another took its place in between
            self.close()
            raise _no_file(self.path, self._stat.st_mode)
        self.size, self.mode = self._stat.st_size, self._stat.st_mode & 0o777
        self._held: bytes | None = b"" if self.size > _HELD else None  # what was read at once: all of it, or nothing

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`, of a small file as it was when its first byte was read.

        Raises InputChangedError where the file has become shorter.
        """
        if self._held is None:
            try:
                self._held = os.pread(self.fd, self.size, 0)
            except OSError:  # a part of it may still be readable
                self._held = b""
        held = self._held[offset : offset + length]
        return held if len(held) == length else super().read(offset, length)

    def close(self) -> None:
        """Let the file go."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # of what was only read nothing is lost
                os.close(self.fd)
            self.fd = -1

    def is_same_file(self, other: os.stat_result) -> bool:
        """Whether `other` is this very file, under whatever name."""
        return (self._stat.st_dev, self._stat.st_ino) == (other.st_dev, other.st_ino)

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the file is not what it was when it was opened."""
        self._check_same(os.fstat(self.fd))

    def _check_same(self, now: os.stat_result) -> None:
        for what in ("st_size", "st_mtime_ns", "st_ino", "st_dev"):
            before, after = getattr(self._stat, what), getattr(now, what)
            if before != after:
                raise InputChangedError(
                    f"the file changed while it was read: {what[3:]}", where=self.path, expected=before, got=after
                )


class PartSource(Source):
    """One of the files of a checkpoint, locked.

    Where the process has nearly as many files open as it may, it is open, and locked, only while it is read, by a
    descriptor of that read's own; ``fd`` is -1 then. Each time it must be the file that it was.
    """

    def __init__(self, path: str | os.PathLike[str], faults: FaultSink = RAISED) -> None:
        """Raises InputError as :class:`Source` does."""
        super().__init__(path, faults, locked=True)
        self._place: str | None = None  # which another current folder does not change
        if _are_few_left(self.fd):
            self._place = os.path.abspath(self.path)
            super().close()

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises UnreadableError, also where it is another file by now."""
        if (place := self._place) is None:
            return super().read(offset, length)
        with self._reopened(place) as file:
            return file.read(offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`. Raises as :meth:`read` does."""
        if (place := self._place) is None:
            return super().read_into(offset, buffer)
        with self._reopened(place) as file:
            return file.read_into(offset, buffer)

    def check_unchanged(self) -> None:
        """Raise UnreadableError if the file is not what it was when it was opened."""
        if (place := self._place) is None:
            return super().check_unchanged()
        return self._reopened(place).close()

    def _reopened(self, place: str) -> Source:
        try:
            file = Source(place, self.faults, locked=True)
            file.path = self.path
            try:
                self._check_same(file._stat)
            except InputError:
                file.close()
                raise
        except InputError as error:
            error.where = self.path
            if not isinstance(error, UnreadableError):  # it is gone, or no file
                error = InputChangedError("the file changed while it was read", where=self.path, got=error.what)
            self.faults.unreachable(error)
            raise error from None
        return file

    def close(self) -> None:
        """Let the file go."""
        super().close()
        self._place = None


class SourceFolder(Readable):
    """Files that are one checkpoint: `path` is the folder that they stand in, or the index that names them.

    Its bytes are those of its parts, one behind another; its ``mode`` is what all of them allow.

    It has no descriptor of its own: ranges for the kernel to copy are those of its parts.
    """

    is_stored = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        faults: FaultSink = RAISED,
        open_file: Callable[[Path, FaultSink], Readable] = Source,
    ) -> None:
        """`open_file` opens each part; its errors may say more than a source can."""
        self.path = path if isinstance(path, Path) else Path(os.fsdecode(path))  # one that is far stays so
        self.faults = faults
        self._open_file = open_file
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.fd = -1
        self.size, self.mode = 0, 0o777
        self.parts: list[Readable] = []
        self._starts: list[int] = []
        self._start_of: dict[int, int] = {}  # by the id of the part
        self._open: dict[str, Readable] = {}

    def open(self, name: str) -> Readable:
        """The file `name` in the folder, which is closed with it; the same one for the same name. Raises InputError."""
        if name not in self._open:
            self._open[name] = self._open_file(self.folder / name, self.faults)
            self.add(self._open[name])
        return self._open[name]

    @property
    def is_whole(self) -> bool:
        """Whether it was given as a folder, and not by an index or a pattern."""
        return self.path == self.folder

    def missing(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that are not there. A link to nowhere is not: nobody has fetched it."""
        return {name for name in names if not os.path.exists(self.folder / name)}

    def peek(self, name: str) -> Readable:
        """The file `name` by itself, which does not become a part. Raises InputError."""
        return self._open_file(self.folder / name, RAISED)

    def names(self) -> list[str]:
        """What is in the folder, folders too: one with the name of a shard is said to be one. Raises InputError."""
        folders, files = list_local(self.folder)
        return [*folders, *files]

    def add(self, part: Readable) -> int:
        """Make `part` one of the parts; where its bytes begin."""
        self.parts.append(part)
        self._start_of[id(part)] = self.size
        self._starts.append(self.size)
        self.size += part.size
        self.mode &= part.mode
        return self._starts[-1]

    def start_of(self, part: Readable) -> int:
        """Where the bytes of `part` begin; it becomes a part unless it is one."""
        if id(part) not in self._start_of:
            self.add(part)
        return self._start_of[id(part)]

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`, of one part.

        Raises InputChangedError where its file has become shorter.
        """
        part, start = self._part_at(offset)
        return part.read(offset - start, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset` of one part. Raises as :meth:`read` does."""
        part, start = self._part_at(offset)
        part.read_into(offset - start, buffer)

    def _part_at(self, offset: int) -> tuple[Readable, int]:
        i = bisect_right(self._starts, offset) - 1
        return self.parts[i], self._starts[i]

    def is_same_file(self, other: os.stat_result) -> bool:
        """Whether `other` is one of the files."""
        return any(part.is_same_file(other) for part in self.parts)

    def check_unchanged(self) -> None:
        """Raise InputChangedError if one of the files is not what it was when it was opened."""
        for part in self.parts:
            part.check_unchanged()

    def about(self) -> list[str]:
        """What else to say of the files, once where it is said of several."""
        return [*dict.fromkeys(note for part in self.parts for note in part.about())]

    def close(self) -> None:
        """Let the files go."""
        for source in self._open.values():
            source.close()


def _read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """How many bytes were read into `buffer`."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = os.pread(fd, min(len(buffer), STEP), offset)  # WebAssembly has no other
    buffer[: len(data)] = data
    return len(data)


def list_local(folder: Path) -> tuple[dict[str, bool], list[str]]:
    """The names in `folder`: of folders, with whether they are links, and of all else. Raises InputError."""
    folders: dict[str, bool] = {}
    files = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_folder(entry):
                    folders[entry.name] = entry.is_symlink()
                else:
                    files.append(entry.name)
    except OSError as error:
        raise InputError(f"a folder that cannot be listed: {error.strerror}", where=folder) from error
    return folders, sorted(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def leave_spare(fd: int) -> bool:
    """Let the process have more files open, as far as the system's hard limit goes, once `fd` shows that it has nearly
    as many as it may: a set can have more shards than the usual 1,024. Return whether some are left.
    """
    try:
        import resource  # which is of Unix alone
    except ImportError:
        return True
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft != hard and fd + _SPARE >= soft:
        more = 2 * soft + _SPARE
        with contextlib.suppress(OSError, ValueError):  # then opening will say so
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard)
            )
    return hard == resource.RLIM_INFINITY or not hard - _LEAST_SPARE <= fd < hard or hard < _SPARE


def _are_few_left(fd: int) -> bool:
    """Return whether `fd` shows that the process, whose limit has been raised as far as that goes, may have few more
    files open.
    """
    try:
        import resource
    except ImportError:
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and fd >= soft - min(_SPARE, soft // 2)


def _too_many(path: Path) -> UnreadableError:
    return UnreadableError(
        f"cannot be read: {os.strerror(errno.EMFILE)}",
        where=path,
        hint=MORE_FILES,
    )


def kind_of(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _no_file(path: Path, mode: int) -> InputError:
    """Return the error for a `path` that is something else than a regular file."""
    is_stream = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
    hint = "save it to a file first: streams are not read" if is_stream else None
    return InputError(f"{kind_of(mode)} and not a file", where=path, hint=hint)
