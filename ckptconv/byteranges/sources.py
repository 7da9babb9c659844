"""Inputs that are read by position: files, which are opened once, folders of files, and bytes in memory.

Files are never mapped into memory: if another process truncates a mapped file, the reader ends with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.errors import InputChangedError, InputError, MissingInputError, RefusedError, UnreadableError
from ckptconv.system import calls

_R = TypeVar("_R", bound="Readable")

_HELD = 1 << 15  # the largest file, in bytes, that is read in one call: readers need some twenty slices of it

_SPARE = 64  # open files that the rest of the process may need
_LEAST_SPARE = 8  # open files that imports and outputs need

#: The hint if too many files are open.
MORE_FILES = "ulimit -n shows how many files may be open, and can raise that limit"

STEP = 1 << 24  # bytes that are read in one call if the system cannot read into a buffer

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}


class Readable:
    """An input that is read by position, and the base class of all sources. A context manager.

    Subclasses define :meth:`read` or :meth:`read_into`, or both: each calls the other here.

    Attributes:
        path: The path, for messages.
        fd: The file descriptor, or -1 if the kernel cannot read the source as one file.
        size: The number of bytes.
        mode: The permissions that a copy may have.
        faults: The sink to which readers pass violations of the format.
        is_stored: Whether a file exists at `path`, so that commands can name it and other files can be next to it.
        is_far: Whether the source is remote, so that a read can cost a request to a server.
        skims: Whether :meth:`spares` may allow readers to skip bytes that only verify the file.
        is_folder: Whether the source consists of the files of a folder.
        is_concurrent: Whether threads that read at the same time do not wait for each other.
    """

    path: Path
    fd: int = -1
    size: int
    mode: int = 0o666
    faults: FaultSink = RAISED
    is_stored: bool = False
    is_far: bool = False
    is_concurrent: bool = False
    skims: bool = False
    is_folder: bool = False

    @cached_property
    def folder(self) -> Path:
        """The folder that contains the file, or the files."""
        return self.path.parent

    def __enter__(self: _R) -> _R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. A second call does nothing."""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`.

        Raises InputChangedError if the file has become shorter, and UnreadableError if the system cannot read it.
        """
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_ahead(self, offset: int, length: int, most: int) -> bytes:
        """Return `length` bytes at `offset`, and perhaps more, up to `most`. Raises what :meth:`read` raises.

        A remote source reads no more, because it keeps the bytes of its last request.
        """
        return self.read(offset, length if self.is_far else max(length, min(most, self.size - offset)))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset`. Raises what :meth:`read` raises."""
        buffer[:] = self.read(offset, len(buffer))

    def is_same_file(self, other: os.stat_result) -> bool:  # noqa: ARG002 - bytes in memory are not a file
        """Return whether the file with the status `other` is this file, perhaps under another name.

        Here: always False.
        """
        return False

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the file has changed since it was opened. Here: do nothing."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce that `ranges`, pairs of start and end, will be read. A remote source requests them together."""

    def announce(self, ranges: Iterable[tuple[int, int]], *, keep: Path | None = None) -> None:
        """Announce that `ranges`, pairs of start and end, will be read in this order. A remote source fetches ahead.

        `keep` is the folder in which they are kept if they are read more than once.
        """

    def spares(self, offset: int, length: int, what: str) -> bool:  # noqa: ARG002 - local bytes are read
        """Return whether to skip the integrity check `what`, for which only these bytes would be read.

        Local sources: False.

        A skipped check is reported by :meth:`about`.
        """
        return False

    def about(self) -> list[str]:
        """Return notes about how the source was read, such as skipped checks."""
        return []

    def _too_short(self, expected: int) -> InputChangedError:
        return InputChangedError(
            "the file became shorter while it was read", where=self.path, expected=f"{expected} bytes"
        )


class BytesSource(Readable):
    """The bytes `data` in memory. `path` is only for messages."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path, self.size, self._data = path, len(data), data

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`."""
        return self._data[offset : offset + length]


class SliceSource(Readable):
    """A source that consists of `length` bytes at `offset` of the source `of`."""

    def __init__(self, of: Readable, offset: int, length: int) -> None:
        self.path, self.size, self.faults = of.path, length, of.faults
        self.of, self.offset = of, offset

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset` of the slice. Raises what the source `of` raises."""
        return self.of.read(self.offset + offset, length)

    def read_ahead(self, offset: int, length: int, most: int) -> bytes:
        """Return `length` bytes at `offset` of the slice, and perhaps more, up to `most`."""
        return self.of.read_ahead(self.offset + offset, length, min(most, self.size - offset))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset` of the slice. Raises what the source `of` raises."""
        self.of.read_into(self.offset + offset, buffer)


class OpenFile(Readable):
    """The open file `fd` with `size` bytes. `path` is only for messages."""

    is_concurrent = True

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd, self.path, self.size = fd, path, size

    def read_ahead(self, offset: int, length: int, most: int) -> bytes:
        """Return `length` bytes at `offset`, and perhaps more, up to `most`. Raises what :meth:`read` raises."""
        with contextlib.suppress(OSError):  # the bytes that cannot be read may be those that are not needed
            data = calls.pread(self.fd, max(length, most), offset)
            if len(data) >= length:
                return data
        return self.read(offset, length)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`.

        Raises InputChangedError if the file has become shorter, and UnreadableError if the system cannot read it.
        """
        parts = []
        while length:
            try:
                part = calls.pread(self.fd, length, offset)
            except OSError as error:
                raise self._unreadable(error, offset) from error
            if not part:
                raise self._too_short(offset + length)
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)  # the part itself, if there is only one

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset`. Raises what :meth:`read` raises."""
        while buffer:
            try:
                done = calls.pread_into(self.fd, buffer, offset)
            except OSError as error:
                raise self._unreadable(error, offset) from error
            if not done:
                raise self._too_short(offset + len(buffer))
            offset += done
            buffer = buffer[done:]

    def _unreadable(self, error: OSError, offset: int) -> InputError:
        what = f"cannot be read: {error.strerror or error}"
        unreadable = UnreadableError(what, where=f"{self.path} at byte {offset}")
        self.faults.unreachable(unreadable)
        return unreadable


class Source(OpenFile):
    """A regular file, open for reading."""

    is_stored = True

    def __init__(self, path: str | os.PathLike[str], faults: FaultSink = RAISED, *, locked: bool = False) -> None:
        """Open `path`. With `locked`, the file cannot be changed in place until it is closed.

        Raises MissingInputError if it does not exist, UnreadableError if it cannot be read or is being changed in
        place, and InputError if it is not a regular file.
        """
        self.faults = faults
        if not os.fspath(path):  # pathlib takes it for the current folder
            raise InputError("no path given: it is empty")
        self.path = path if isinstance(path, Path) else Path(os.fsdecode(path))
        try:
            mode = os.stat(self.path).st_mode  # before open: a FIFO waits for a writer, a device may do anything
            if not stat.S_ISREG(mode):
                raise _no_file(self.path, mode)
            self.fd = calls.open_to_read(self.path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise _too_many(self.path) from error
            kind = MissingInputError if isinstance(error, FileNotFoundError) else UnreadableError
            raise kind(f"cannot be read: {error.strerror}", where=self.path) from error
        except ValueError as error:  # a NUL in the path
            raise InputError("this path cannot exist", where=self.path) from error
        if not leave_spare(self.fd):
            self.close()
            raise _too_many(self.path)
        if locked:  # before its size is read: a change in place may be ending
            try:
                lock_shared(self.fd, self.path)
            except InputError:
                self.close()
                raise
        self._stat = os.fstat(self.fd)
        if not stat.S_ISREG(self._stat.st_mode):  # the path was replaced between stat and open
            self.close()
            raise _no_file(self.path, self._stat.st_mode)
        self.size, self.mode = self._stat.st_size, self._stat.st_mode & 0o777
        # the content of a small file; None: not read yet; empty: the file is large, or could not be read
        self._held: bytes | None = b"" if self.size > _HELD else None

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`. A small file is read completely by the first call.

        Raises InputChangedError if the file has become shorter, UnreadableError.
        """
        if self._held is None:
            try:
                self._held = calls.pread(self.fd, self.size, 0)
            except OSError:  # a slice of it may still be readable
                self._held = b""
        held = self._held[offset : offset + length]
        return held if len(held) == length else super().read(offset, length)

    def read_ahead(self, offset: int, length: int, most: int) -> bytes:
        """Return `length` bytes at `offset`, and perhaps more, up to `most`. A small file is in memory already."""
        return self.read(offset, length) if self.size <= _HELD else super().read_ahead(offset, length, most)

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # it was only read
                os.close(self.fd)
            self.fd = -1

    def is_same_file(self, other: os.stat_result) -> bool:
        """Return whether the file with the status `other` is this file, perhaps under another name."""
        return (self._stat.st_dev, self._stat.st_ino) == (other.st_dev, other.st_ino)

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the file has changed since it was opened."""
        self.check_same(os.fstat(self.fd))

    def check_same(self, now: os.stat_result) -> None:
        """Raise InputChangedError if `now` is not the status that the file had when it was opened."""
        for what in ("st_size", "st_mtime_ns", "st_ino", "st_dev"):
            before, after = getattr(self._stat, what), getattr(now, what)
            if before != after:
                raise InputChangedError(
                    f"the file changed while it was read: {what[3:]}", where=self.path, expected=before, got=after
                )


def open_part(path: str | os.PathLike[str], faults: FaultSink = RAISED) -> Readable:
    """Open and lock `path`, one of several files of a checkpoint. Raises what :class:`Source` raises."""
    source = Source(path, faults, locked=True)
    return ReopenedSource(source) if _are_few_left(source.fd) else source


class ReopenedSource(Readable):
    """The file of `first`, which is closed. Each read opens, locks and closes the file again.

    It is used if the process is near its limit of open files. An error is raised if the file has changed meanwhile.
    """

    is_stored = is_concurrent = True

    def __init__(self, first: Source) -> None:
        self.path, self.size, self.mode, self.faults = first.path, first.size, first.mode, first.faults
        self._place = os.path.abspath(first.path)  # the current folder can change
        self._first = first
        first.close()

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`. Raises UnreadableError if the file cannot be read or was replaced."""
        with self._reopened() as file:
            return file.read(offset, length)

    def is_same_file(self, other: os.stat_result) -> bool:
        """Return whether the file with the status `other` is this file, perhaps under another name."""
        return self._first.is_same_file(other)

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the file has changed since it was opened, and UnreadableError if it is gone."""
        self._reopened().close()

    def close(self) -> None:
        """Let no read open the file again."""
        self._place = ""

    def _reopened(self) -> Source:
        try:
            file = Source(self._place, self.faults, locked=True)
            file.path = self.path
            try:
                self._first.check_same(os.fstat(file.fd))
            except InputError:
                file.close()
                raise
        except InputError as error:
            error.where = self.path
            if not isinstance(error, UnreadableError):  # the file is missing, or is not a regular file
                error = InputChangedError("the file changed while it was read", where=self.path, got=error.what)
            self.faults.unreachable(error)
            raise error from None
        return file


class SourceFolder(Readable):
    """The files of one checkpoint, as one source. `path` is their folder, or the index that names them.

    The bytes of the source are those of its parts, one after the other. ``mode`` contains the permissions that all
    parts have. ``fd`` is always -1, and the kernel copies from the parts.
    """

    is_stored = is_concurrent = is_folder = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        faults: FaultSink = RAISED,
        open_file: Callable[..., Readable] = Source,
    ) -> None:
        """Make a source without parts. No file is opened yet.

        `open_file` opens a part. Its errors may be more specific than those of :class:`Source`.
        """
        self.path = path if isinstance(path, Path) else Path(os.fsdecode(path))  # a remote path keeps its class
        self.faults = faults
        self._open_file = open_file
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.size, self.mode = 0, 0o777
        self.parts: list[Readable] = []
        self._starts: list[int] = []
        self._start_of: dict[int, int] = {}  # by the id of the part
        self._open: dict[str, Readable] = {}

    def open(self, name: str) -> Readable:
        """Return the file `name` of the folder, opened by the first call and added to the parts. Raises InputError."""
        if name not in self._open:
            self._open[name] = self._open_file(self.folder / name, self.faults)
            self.add(self._open[name])
        return self._open[name]

    @property
    def is_whole(self) -> bool:
        """Whether `path` is the folder itself, and not an index or a pattern."""
        return self.path == self.folder

    def missing(self, names: Iterable[str]) -> set[str]:
        """Return the names among `names` that do not exist in the folder.

        A link whose target is missing does not exist.
        """
        return {name for name in names if not os.path.exists(self.folder / name)}

    def peek(self, name: str) -> Readable:
        """Open the file `name` without adding it to the parts. The caller closes it. Raises InputError."""
        return self._open_file(self.folder / name, RAISED)

    def names(self) -> list[str]:
        """Return the names of all files and folders in the folder. Raises InputError if it cannot be listed."""
        folders, files = list_local(self.folder)
        return [*folders, *files]

    def add(self, part: Readable) -> int:
        """Add `part` to the parts. Return the offset of its first byte in this source."""
        self.parts.append(part)
        self._start_of[id(part)] = self.size
        self._starts.append(self.size)
        self.size += part.size
        self.mode &= part.mode
        return self._starts[-1]

    def start_of(self, part: Readable) -> int:
        """Return the offset of the first byte of `part` in this source. A source that is not a part yet is added."""
        if id(part) not in self._start_of:
            self.add(part)
        return self._start_of[id(part)]

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`. The range must be inside one part. Raises what the part raises."""
        part, start = self._part_at(offset)
        return part.read(offset - start, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset`. The range must be inside one part. Raises what the part raises."""
        part, start = self._part_at(offset)
        part.read_into(offset - start, buffer)

    def _part_at(self, offset: int) -> tuple[Readable, int]:
        i = bisect_right(self._starts, offset) - 1
        return self.parts[i], self._starts[i]

    def is_same_file(self, other: os.stat_result) -> bool:
        """Return whether one of the parts is the file with the status `other`."""
        return any(part.is_same_file(other) for part in self.parts)

    def check_unchanged(self) -> None:
        """Raise the error of the first part that has changed since it was opened."""
        for part in self.parts:
            part.check_unchanged()

    def about(self) -> list[str]:
        """Return the notes of all parts, without repetitions."""
        return [*dict.fromkeys(note for part in self.parts for note in part.about())]

    def close(self) -> None:
        """Close the files."""
        for source in (*self._open.values(), *self.parts):
            source.close()


def list_local(folder: Path) -> tuple[dict[str, bool], list[str]]:
    """Return a dict of the subfolders of `folder` and the sorted names of its other entries.

    The dict tells for each subfolder whether it is a link or junction. Raises InputError if the folder cannot be
    listed.
    """
    folders: dict[str, bool] = {}
    files = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_folder(entry):
                    folders[entry.name] = entry.is_symlink() or calls.is_junction(entry.stat(follow_symlinks=False))
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
    """Raise the limit of open files, up to the hard limit, if `fd` is near it. Return False if hardly any are left.

    A sharded set can have more files than the usual limit of 1,024.
    """
    soft, hard = calls.open_limits()
    if soft != hard and fd + _SPARE >= soft:
        calls.raise_open_limit(min(2 * soft + _SPARE, hard))  # or opening the next file fails
    return not hard - _LEAST_SPARE <= fd < hard or hard < _SPARE


def _are_few_left(fd: int) -> bool:
    """Return whether `fd` is near the limit of open files, after :func:`leave_spare` has raised it."""
    soft, _ = calls.open_limits()
    return fd >= soft - min(_SPARE, soft // 2)


def _too_many(path: Path) -> UnreadableError:
    return UnreadableError(f"cannot be read: {os.strerror(errno.EMFILE)}", where=path, hint=MORE_FILES)


def kind_of(mode: int) -> str:
    """Return the name for `mode`, the mode of something that is not a regular file, such as "a folder"."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _no_file(path: Path, mode: int) -> InputError:
    """Return the error for `path`, whose `mode` is not that of a regular file.

    Its hint is about streams, if it is one.
    """
    is_stream = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
    hint = "save it to a file first: streams cannot be read" if is_stream else None
    return InputError(f"{kind_of(mode)} and not a file", where=path, hint=hint)


def lock_exclusive(fd: int, where: object) -> None:
    """Lock the open file `fd` for writing, until it is closed. `where` is the path, for errors.

    Raises:
        RefusedError: Another process reads or changes the file, or the filesystem has no locks.
    """
    try:
        calls.lock(fd, exclusive=True)
    except BlockingIOError as error:
        raise RefusedError(
            "another process is using the file", where=where, hint="try again after it has ended"
        ) from error
    except OSError as error:
        raise RefusedError(
            f"the file cannot be locked ({os.strerror(error.errno or 0)}), so it is not changed in place",
            where=where,
            hint="convert it to another file",
        ) from error


def lock_shared(fd: int, where: object) -> None:
    """Lock the open file `fd` for reading, until it is closed. `where` is the path, for errors.

    Without an error, the file stays unlocked if the filesystem has no locks.

    Raises:
        UnreadableError: Another process changes the file.
    """
    try:
        calls.lock(fd, exclusive=False)
    except BlockingIOError as error:
        raise UnreadableError(
            "another process is changing the file in place", where=where, hint="try again after it has ended"
        ) from error
    except (OSError, ImportError):
        pass
