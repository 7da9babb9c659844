"""Change the bytes of a file under its undo journal, and restore them, so that no reader accepts a half-changed file.

A change of more than one sector has three steps, each followed by a sync: write one byte that makes every reader refuse
the file (the *poison*), write all other bytes, replace the poison by the right byte. After an interruption, the file is
the old one, the new one, or one that every reader refuses, and the journal contains the old bytes. In a set, the last
file (the index) is poisoned before the first file is changed, so that no reader accepts a mixture of old and new files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptconv.byteranges.undo_journal import MAGIC, SECTOR, Journal, journal_path, read_bytes
from ckptconv.errors import RefusedError
from ckptconv.output.direct_writes import FileDestination
from ckptconv.output.files import is_at, temporary_beside
from ckptconv.system import calls

WRITTEN_ANEW = "the file was written again after it was changed in place, so nothing was restored"


def write_journal(target: Path, journal: Journal) -> None:
    """Write `journal` next to the file `target`, with the state hot, and sync it.

    Raises:
        OSError: It cannot be written. There is no journal then.
    """
    path = journal_path(target)
    temporary = temporary_beside(path)
    fd = calls.create(temporary, 0o600)
    try:
        data = memoryview(journal.packed())
        while data:
            data = data[os.write(fd, data) :]
        calls.sync(fd)
        os.replace(temporary, path)
        if not is_at(path, fd):
            raise OSError(errno.ESTALE, "another process has replaced it")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    calls.sync_folder(path.parent)


def mark_journal(target: Path, state: bytes) -> None:
    """Write `state` into the journal of `target`, and sync it.

    Raises OSError, also if another file has replaced the journal. That file is not changed.
    """
    fd = calls.open_to_change(journal_path(target))
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or calls.pread(fd, len(MAGIC), 0) != MAGIC:
            raise OSError(errno.ESTALE, "another file has replaced the undo journal")
        calls.pwrite(fd, state, len(MAGIC))
        calls.sync(fd)
    finally:
        os.close(fd)


def discard_journals(*targets: Path) -> None:
    """Remove the journals of `targets`, which are in one folder. A missing journal is not an error. Raises OSError."""
    removed = []
    for path in map(journal_path, targets):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            removed.append(path)
    if removed:
        calls.sync_folder(removed[0].parent)


def apply(fd: int, journal: Journal) -> int:
    """Write the new bytes of `journal` to the open file `fd`, and sync them. Return how many bytes were written.

    Raises:
        OSError: The file may be poisoned. Its journal is hot and contains the old bytes.
    """
    return _write(fd, [(patch.offset, patch.new) for patch in journal.patches], journal, journal.new_size)


def restore(fd: int, journal: Journal) -> int:
    """Write the old bytes of `journal` to the open file `fd`, and sync them. Return how many bytes were written.

    Raises:
        OSError: The journal still exists, and the call can be repeated.
    """
    return _write(fd, [(patch.offset, patch.old) for patch in journal.patches], journal, journal.old_size)


def spoil(fd: int, journal: Journal) -> int:
    """Write the poison of `journal` to the open file `fd`, and sync it. Return how many bytes were written.

    :func:`apply` and :func:`restore` remove the poison. Raises OSError.
    """
    size = os.fstat(fd).st_size
    written = sum(_pwrite(fd, bytes([byte]), offset) for offset, byte in journal.poison if offset < size)
    calls.sync(fd)
    return written


def _write(fd: int, parts: Sequence[tuple[int, bytes]], journal: Journal, size: int) -> int:
    """Write `parts`, pairs of an offset and bytes, to the open file `fd`, and set its size to `size`, under the poison.

    If all changes are in one sector, they are written in one step without poison. Return how many bytes were written.
    """
    if journal.fits_a_sector:
        start = parts[0][0]
        end = parts[-1][0] + len(parts[-1][1])
        block = bytearray(read_bytes(fd, end - start, start))
        for offset, data in parts:
            block[offset - start : offset - start + len(data)] = data
        _pwrite(fd, bytes(block), start)
        calls.sync(fd)
        return len(block)
    poison = dict(journal.poison)
    written = spoil(fd, journal)
    held: list[tuple[int, bytes]] = []
    for offset, data in parts:
        held += [(at, data[at - offset : at - offset + 1]) for at in poison if offset <= at < offset + len(data)]
        written += _pwrite(fd, _poisoned(data, offset, poison), offset)
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
    calls.sync(fd)
    for at, data in held:
        written += _pwrite(fd, data, at)
    calls.sync(fd)
    return written


def _poisoned(data: bytes, at: int, poison: dict[int, int]) -> bytes:
    """Return `data`, the bytes at the offset `at`, with the bytes of `poison` inserted at their offsets."""
    poisoned = bytearray(data)
    for offset, byte in poison.items():
        if at <= offset < at + len(data):
            poisoned[offset - at] = byte
    return bytes(poisoned)


def _pwrite(fd: int, data: bytes, offset: int) -> int:
    """Write all of `data` at `offset`. Return its length."""
    FileDestination(fd).write(offset, data)
    return len(data)


def check_restorable(fd: int, journal: Journal, where: object, *, done: bool) -> None:
    """Raise RefusedError unless the patched ranges of the open file `fd` contain the bytes that this program wrote.

    Another program may have written the file since: ``torch.save`` keeps the inode, and often the size. If the change
    is `done`, all bytes must be the new ones. If it was interrupted, each sector must be the old one, the new one, or
    one of the two with poison. After the end of the new bytes, the old ones follow until the file is truncated. Bytes
    after the old size may be anything, because restoring removes them. Missing bytes are allowed, because restoring
    writes them.
    """
    info = os.fstat(fd)
    smallest, largest = sorted((journal.new_size if done else journal.old_size, journal.new_size))
    if info.st_ino != journal.inode or not smallest <= info.st_size <= largest:
        raise RefusedError(WRITTEN_ANEW, where=where)
    poison = {} if done else dict(journal.poison)
    for patch in journal.patches:
        states = (patch.new,) if done else (patch.old, patch.new + patch.old[len(patch.new) :])
        end = min(patch.end, info.st_size, journal.new_size if done else journal.old_size)
        for at, stop in _sectors(patch.offset, end):
            parts = [state[at - patch.offset : stop - patch.offset] for state in states]
            if read_bytes(fd, stop - at, at) not in (*parts, *(_poisoned(part, at, poison) for part in parts)):
                raise RefusedError(
                    WRITTEN_ANEW,
                    where=where,
                    expected="the bytes from before or after that change",
                    got=f"others at byte {at:,}",
                )


def _sectors(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part of a range that is in one sector."""
    while start < end:
        stop = min((start // SECTOR + 1) * SECTOR, end)
        yield start, stop
        start = stop
