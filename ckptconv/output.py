"""Write a planned file: the only writer, the only place where bytes move.

A unique temporary beside the target, filled, fsynced, renamed, the folder fsynced: whatever happens before the rename, the target is as it was;
afterwards it is whole. The measure is ``cp``: space is reserved in one piece, the kernel copies from file to file in large pieces, and writing to disk
begins while copying goes on. Where the filesystem can share blocks, ``copy_file_range`` does, if both offsets agree modulo a block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from ckptconv import linux
from ckptconv.errors import MalformedError, OutputError, RefusedError, TargetExistsError, UsageError
from ckptconv.model import Inflate, OutFile, Piece, Progress, Span
from ckptconv.sources import Source

__all__ = ["check_target", "write"]

_COPY = 64 << 20  # bytes for each copy_file_range: large enough to be fast, small enough for progress and Ctrl-C
_BUFFER = 4 << 20  # bytes held where the kernel cannot copy
_BLOCK = 4096
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def check_target(path: Path, *, replace: bool) -> None:
    """Raise unless a file may be put at PATH: a folder there, a device, or any file without REPLACE is in the way."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError("the output's folder does not exist", where=path.parent) from None
        return
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error
    if stat.S_ISLNK(mode) and os.path.exists(path):
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise RefusedError("the output is there and is no regular file", where=path)
    if not replace:
        raise TargetExistsError("the output exists", where=path, hint="--force replaces it")


def write(file: OutFile, source: Source, *, replace: bool, verify: bool, progress: Progress | None = None) -> None:
    """Write FILE, whose ranges come from SOURCE. Raises OutputError, TargetExistsError, InputChangedError, MalformedError.

    REPLACE: an old file may go. VERIFY: read everything back and compare it before the target appears.
    """
    check_target(file.path, replace=replace)
    folder = file.path.parent
    temporary = folder / f".{_short(file.path.name)}.ckptconv-{os.urandom(3).hex()}.tmp"
    try:
        with _as_output_error(file.path):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _keep_mode(fd, file.path)
                _forget(file.path, source)
                _reserve(fd, file, source)
                _fill(fd, file, progress)
                os.fsync(fd)
                if verify:
                    _compare(fd, file)
            finally:
                os.close(fd)
            source.check_unchanged()
            _publish(temporary, file.path, replace)
    finally:
        with contextlib.suppress(OSError):  # a rename took it away, or what went wrong before matters more
            os.unlink(temporary)
    _sync_folder(folder, file.path)


@contextlib.contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"could not be written: {error.strerror}", where=path, got=error.errno and errno.errorcode.get(error.errno)
        ) from error


def _short(name: str) -> str:
    """As much of NAME as leaves room for what makes it a temporary's, in a folder that takes names of 255 bytes."""
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return name


def _keep_mode(fd: int, target: Path) -> None:
    """Give the new file the mode of the regular file that it replaces; a fresh one follows the umask."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(target).st_mode
        if stat.S_ISREG(mode):
            os.fchmod(fd, stat.S_IMODE(mode))


def _forget(target: Path, source: Source) -> None:
    """Give back the memory that caches the file to be replaced, as truncating it would: the new one needs as much.

    Measured in a virtual machine, where memory that no one has used lately is slow to get: 2 GiB in 1.4 s instead of 7 s.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not source.is_same_file(os.fstat(fd)):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _reserve(fd: int, file: OutFile, source: Source) -> None:
    """Make sure of the space before the first byte, unless blocks will be shared."""
    if min(source.size, file.size) >= _BLOCK and linux.share_block(source.fd, fd, _BLOCK):
        return
    try:
        if linux.fallocate(fd, file.size):
            return
        space = os.fstatvfs(fd)
        if space.f_bavail * space.f_frsize >= file.size:
            return
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    space = os.fstatvfs(fd)
    raise OutputError(
        "too little free space",
        where=file.path,
        expected=f"{file.size:,} bytes",
        got=f"{space.f_bavail * space.f_frsize:,} bytes",
    )


def _publish(temporary: Path, target: Path, replace: bool) -> None:
    """Give the finished file its name. Without REPLACE only if the name is still free."""
    if replace:
        os.replace(temporary, target)
        return
    try:
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            if not linux.rename_if_absent(str(temporary), str(target)):
                raise RefusedError(
                    "this filesystem cannot create the output without the risk of replacing one that appears meanwhile",
                    where=target, hint="--force accepts that",
                ) from error  # fmt: skip
    except FileExistsError as error:
        raise TargetExistsError("the output exists by now", where=target, hint="--force replaces it") from error


def _sync_folder(folder: Path, target: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OutputError(
            f"the new file is in place, but its folder could not be synced: {error.strerror}", where=target
        ) from error


# Moving bytes


def _fill(fd: int, file: OutFile, progress: Progress | None) -> None:
    at = 0
    for piece in file.pieces:
        for length in _move(fd, at, piece):
            linux.start_writeback(fd, at, length)
            at += length
            if progress:
                progress(length)
    if at != file.size:
        raise OutputError(
            "the plan and the file disagree: a bug in ckptconv", where=file.path, expected=file.size, got=at
        )


def _move(fd: int, at: int, piece: Piece) -> Iterator[int]:
    """Write PIECE at AT; the lengths written, one after another."""
    if isinstance(piece, Span):
        yield from _copy(fd, at, piece)
        return
    for chunk in _chunks(piece):
        _write_all(fd, at, chunk)
        at += len(chunk)
        yield len(chunk)


def _copy(fd: int, at: int, span: Span) -> Iterator[int]:
    """Let the kernel copy SPAN to AT: up to the next block, then whole blocks, which it may share, then the rest."""
    offset, left = span.offset, span.length
    by_kernel = hasattr(os, "copy_file_range")
    while left:
        until_block = -offset % _BLOCK
        length = min(left, until_block or _COPY)
        if length > _BLOCK:
            length -= length % _BLOCK
        if by_kernel:
            try:
                done = os.copy_file_range(span.source.fd, fd, length, offset, at)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
                done = 0
            if not done:  # or the file became shorter, which reading it will tell
                by_kernel = False
                continue
        else:
            done = min(length, _BUFFER)
            _write_all(fd, at, span.source.read(offset, done))
        offset, at, left = offset + done, at + done, left - done
        yield done


def _chunks(piece: Piece) -> Iterator[bytes]:
    """The bytes of PIECE, a buffer at a time."""
    if isinstance(piece, bytes):
        yield piece
    elif isinstance(piece, Span):
        for at in range(0, piece.length, _BUFFER):
            yield piece.source.read(piece.offset + at, min(_BUFFER, piece.length - at))
    else:
        yield from _inflate(piece)


def _inflate(piece: Inflate) -> Iterator[bytes]:
    """The inflated bytes, checked against the length and the checksum that the archive promises."""
    inflater = zlib.decompressobj(-15)
    length = crc32 = 0
    where = f"{piece.of.source.path} at byte {piece.of.offset}"
    wrong_size = MalformedError("a deflated record has another size than promised", where=where, expected=piece.length)
    for chunk in _chunks(piece.of):
        while True:  # bytes can wait inside the inflater when it has taken the whole chunk
            try:
                data = inflater.decompress(chunk, _BUFFER)
            except zlib.error as error:
                raise MalformedError("a deflated record is damaged", where=where, got=error) from error
            chunk = inflater.unconsumed_tail
            length += len(data)
            crc32 = zlib.crc32(data, crc32)
            if length > piece.length or inflater.unused_data:
                raise wrong_size
            if data:
                yield data
            elif not chunk:
                break
    if length != piece.length or not inflater.eof:
        raise wrong_size
    if piece.crc32 is not None and crc32 != piece.crc32:
        raise MalformedError(
            "the record is damaged: its checksum is wrong",
            where=where,
            expected=f"{piece.crc32:08x}",
            got=f"{crc32:08x}",
        )


def _write_all(fd: int, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        at += done
        view = view[done:]


def _compare(fd: int, file: OutFile) -> None:
    """Read the file back, from the disk where the kernel can be asked to forget it, and compare it with what it was to be."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    at = 0
    for piece in file.pieces:
        for chunk in _chunks(piece):
            back = os.pread(fd, len(chunk), at)
            if back != chunk:
                raise OutputError(
                    "what was written reads back differently",
                    where=f"{file.path} at byte {at}",
                    hint="the disk may be failing",
                )
            at += len(chunk)
