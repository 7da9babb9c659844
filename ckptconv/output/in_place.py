"""Change the bytes of a file under its undo journal, and restore them, so that no reader takes a torn file for a whole.

A change of more than one sector first writes, and syncs, one byte that makes every reader refuse the file (the
*poison*); then the rest, synced; then that byte, synced. After an interruption, the file is the old one, the new one,
or one that every reader refuses, and the journal has the old bytes. In a set, the last file, the index, is poisoned
before the first file is written, so that no reader takes a set of old and new files.
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
from ckptconv.output.files import is_at, temporary_beside
from ckptconv.system import calls

WRITTEN_ANEW = "the file was written again after it was changed in place, so nothing was restored"


def write_journal(target: Path, journal: Journal) -> None:
    """Write `journal`, in the state hot, next to the file `target`, and sync it.

    Raises:
        OSError: It cannot be written. Then there is no journal.
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

    Raises OSError, also if something else took the journal's place, which is left as it is.
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
    """Remove the journals of `targets`, files of one folder, if they have any. Raises OSError."""
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
        OSError: The file may be poisoned. Its journal is hot and has the old bytes.
    """
    return _write(fd, [(patch.offset, patch.new) for patch in journal.patches], journal, journal.new_size)


def restore(fd: int, journal: Journal) -> int:
    """Write the old bytes of `journal` to the open file `fd`, and sync them. Return how many bytes were written.

    Raises:
        OSError: The journal is still there, and the call can be repeated.
    """
    return _write(fd, [(patch.offset, patch.old) for patch in journal.patches], journal, journal.old_size)


def spoil(fd: int, journal: Journal) -> int:
    """Poison the open file `fd`, until it is written or restored. Return how many bytes were written.

    Raises OSError.
    """
    size = os.fstat(fd).st_size
    written = sum(_pwrite(fd, bytes([byte]), offset) for offset, byte in journal.poison if offset < size)
    calls.sync(fd)
    return written


def _write(fd: int, parts: Sequence[tuple[int, bytes]], journal: Journal, size: int) -> int:
    """Write `parts`, pairs of an offset and bytes, to the open file `fd`, and give it the `size`. Sync each step."""
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
    """Return `data`, the bytes at the offset `at`, with the bytes of `poison` in it."""
    poisoned = bytearray(data)
    for offset, byte in poison.items():
        if at <= offset < at + len(data):
            poisoned[offset - at] = byte
    return bytes(poisoned)


def _pwrite(fd: int, data: bytes, offset: int) -> int:
    """Write all of `data` at `offset`, and return its length."""
    view = memoryview(data)
    while view:
        done = calls.pwrite(fd, view, offset)
        offset += done
        view = view[done:]
    return len(data)


def check_restorable(fd: int, journal: Journal, where: object, *, done: bool) -> None:
    """Raise RefusedError unless the ranges of `journal` are, in the open file `fd`, as this program left them.

    Another program may have written the file since: ``torch.save`` keeps the inode, and often the size. If the change
    is `done`, all bytes must be the new ones. If it was interrupted, each sector must be the old one, the new one, or
    one of the two with poison in it. After the end of the new bytes, the old ones follow until the file is truncated.
    Bytes beyond the old size may be anything, because restoring removes them, and missing bytes will be written.
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
    """Yield the first and last offsets of the parts of a range that are in one sector each."""
    while start < end:
        stop = min((start // SECTOR + 1) * SECTOR, end)
        yield start, stop
        start = stop
