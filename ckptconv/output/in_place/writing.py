"""Change the bytes of a file under its journal, and restore them, so that no torn state is taken for a whole file.

A change of more than one sector first writes, and syncs, one byte that makes every reader refuse the file (the
*poison*); then the rest, synced; then that byte, synced. Whatever happens in between, the file is the old one, the new
one, or one that nobody takes, and the journal has the old bytes. Of a set the last file, the index, is poisoned before
the first is written, so that nobody takes a set of old and new files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckptconv.byteranges.undo_journal import SECTOR, Journal, Patch
from ckptconv.errors import RefusedError

WRITTEN_ANEW = "the file was written anew since it was changed in place: nothing was restored"


def apply(fd: int, journal: Journal) -> int:
    """Write the new bytes of `journal` to the open file `fd`, and on to the disk; how many bytes were written.

    Raises:
        OSError: The file may be poisoned by then; its journal is hot and has the old bytes.
    """
    return _write(fd, [(each.offset, each.new) for each in journal.patches], journal, journal.new_size)


def restore(fd: int, journal: Journal) -> int:
    """Write the old bytes of `journal` to the open file `fd`, and on to the disk; how many bytes were written.

    Raises:
        OSError: The journal is still there, and this can be done again.
    """
    return _write(fd, [(each.offset, each.old) for each in journal.patches], journal, journal.old_size)


def spoil(fd: int, journal: Journal) -> int:
    """Let every reader refuse the open file `fd` until it is written or restored; how many bytes were written.

    Raises OSError.
    """
    here = os.fstat(fd).st_size
    written = sum(_pwrite(fd, bytes([byte]), offset) for offset, byte in journal.poison if offset < here)
    os.fsync(fd)
    return written


def _write(fd: int, parts: Sequence[tuple[int, bytes]], journal: Journal, size: int) -> int:
    if journal.fits_a_sector:
        start = parts[0][0]
        end = parts[-1][0] + len(parts[-1][1])
        block = bytearray(_pread(fd, end - start, start))
        for offset, data in parts:
            block[offset - start : offset - start + len(data)] = data
        _pwrite(fd, bytes(block), start)
        os.fsync(fd)
        return len(block)
    poison = dict(journal.poison)
    written = spoil(fd, journal)
    held: list[tuple[int, bytes]] = []
    for offset, data in parts:
        poisoned = bytearray(data)
        for at, byte in poison.items():
            if offset <= at < offset + len(data):
                held.append((at, data[at - offset : at - offset + 1]))
                poisoned[at - offset] = byte
        written += _pwrite(fd, bytes(poisoned), offset)
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
    os.fsync(fd)
    for at, data in held:
        written += _pwrite(fd, data, at)
    os.fsync(fd)
    return written


def check_restorable(fd: int, journal: Journal, where: object, *, done: bool) -> None:
    """Raise RefusedError unless the ranges of `journal` are, in the open file `fd`, as this program left them.

    Where the change is `done`, all bytes are the new ones. Where it was interrupted, each sector is the old one, the
    new one, or one of them poisoned; where the new bytes end, the old ones follow until the file is cut; what the file
    has beyond its old size may be anything, because it goes, and what it lacks is written. Somebody may have written
    the file anew since: ``torch.save`` keeps the inode, and often the size.
    """
    info = os.fstat(fd)
    smallest, largest = sorted((journal.old_size, journal.new_size))
    sizes = (journal.new_size, journal.new_size) if done else (smallest, largest)
    if info.st_ino != journal.inode or not sizes[0] <= info.st_size <= sizes[1]:
        raise RefusedError(WRITTEN_ANEW, where=where)
    poison = {} if done else dict(journal.poison)
    for change in journal.patches:
        parts = (change.new,) if done else (change.old, change.new + change.old[len(change.new) :])
        end = min(change.end, info.st_size, journal.new_size if done else journal.old_size)
        wrong = next(
            (at for at, stop in _sectors(change.offset, end) if not _is_ours(fd, change, parts, at, stop, poison)), None
        )
        if wrong is not None:
            raise RefusedError(
                WRITTEN_ANEW,
                where=where,
                expected="the bytes from before or after that change",
                got=f"others at byte {wrong:,}",
            )


def _sectors(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of the range from `start` to `end` that lie in one sector each."""
    while start < end:
        stop = min((start // SECTOR + 1) * SECTOR, end)
        yield start, stop
        start = stop


def _is_ours(fd: int, change: Patch, parts: Sequence[bytes], at: int, stop: int, poison: dict[int, int]) -> bool:
    """Whether the file has, from `at` to `stop`, what one of `parts` of `change` has there, poisoned or not."""
    found = _pread(fd, stop - at, at)
    return any(found in _states(part[at - change.offset : stop - change.offset], at, poison) for part in parts)


def _states(whole: bytes, at: int, poison: dict[int, int]) -> tuple[bytes, bytes]:
    """The bytes `whole`, which stand at `at`, as they are and poisoned."""
    poisoned = bytearray(whole)
    for offset, byte in poison.items():
        if at <= offset < at + len(whole):
            poisoned[offset - at] = byte
    return whole, bytes(poisoned)


def _pread(fd: int, length: int, offset: int) -> bytes:
    parts = []
    while length and (part := os.pread(fd, length, offset)):
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def _pwrite(fd: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        offset += done
        view = view[done:]
    return len(data)
