"""The undo journal: the bytes of a file that a change in place replaces, before and after the change.

The journal of a file is next to the file, as ``.NAME.ckptconv-undo``, before the first byte changes. Its state is *hot*
from the start of the change to its end, and *done* afterwards. A file is restored from its journal only if the user
requests that.

Layout, integers little-endian:

    magic     16 bytes
    state     4 bytes: b"hot " or b"done"; the only bytes that change later, within one sector
    length    4 bytes: the length of the header
    header    JSON: version, inode, old_size, new_size, patches [[offset, old length, new length], ...],
              poison [[offset, byte], ...], leader, members, rest
    bytes     for each patch the old bytes, then the new ones
    sum       32 bytes: SHA-256 of everything except the state

A journal is hostile input: any user who can write to the folder can plant one. It is trusted only if no user except the
owner of the file and the current user can have written it (:func:`read_journal`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptconv.byteranges.sources import Readable, kind_of
from ckptconv.errors import InputError, LimitError, MalformedError, RefusedError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.system import calls

MAGIC = b"ckptconv undo 1\n"
HOT, DONE = b"hot ", b"done"
_LENGTH = struct.Struct("<I")
_HEAD = len(MAGIC) + len(HOT) + _LENGTH.size
_SUM = 32  # bytes of a SHA-256
NO_JOURNAL = "there is no undo journal, so there is no in-place change to revert"
_LOOK = "look at it, and remove it if the file next to it is complete"
_POISON = 2  # the most bytes of poison in a change
_NAME = regex(r"\.(.+)\.ckptconv-undo", re.DOTALL)
#: The number of bytes that a disk writes completely or not at all.
SECTOR = 512


@dataclass(frozen=True)
class Patch:
    """A range of a file whose bytes are replaced.

    Attributes:
        offset: The offset of the range in the file.
        old: The bytes before the change.
        new: The bytes after the change. They have the same length, except in the last patch of a file that changes its
            size.
    """

    offset: int
    old: bytes
    new: bytes

    @property
    def end(self) -> int:
        """The end of the range, for the longer of the old and new bytes."""
        return self.offset + max(len(self.old), len(self.new))


@dataclass(frozen=True)
class Patches:
    """All changes of one file.

    Attributes:
        way: ``same size``, or ``appended`` if the file grows by a new pickle and a new directory.
        patches: The changes in the order of their offsets. They do not overlap.
        old_size: The size of the file before, in bytes.
        new_size: The size of the file afterwards, in bytes.
        poison: Pairs of an offset in a patch and a byte that makes every reader refuse the file.
    """

    way: str
    patches: tuple[Patch, ...]
    old_size: int
    new_size: int
    poison: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """The total number of new bytes."""
        return sum(len(patch.new) for patch in self.patches)


def between(offset: int, old: bytes, new: bytes) -> Iterator[Patch]:
    """Yield patches that replace `old`, the bytes at `offset`, by `new`. Both have the same length.

    Patches consist of complete sectors. Adjacent sectors that differ are in one patch.
    """
    start: int | None = None
    at = 0
    while at < len(old):
        stop = min(at + SECTOR - (offset + at) % SECTOR, len(old))
        differs = old[at:stop] != new[at:stop]
        if differs and start is None:
            start = at
        if not differs and start is not None:
            yield Patch(offset + start, old[start:at], new[start:at])
            start = None
        at = stop
    if start is not None:
        yield Patch(offset + start, old[start:], new[start:])


@dataclass(frozen=True)
class Journal:
    """A change in place of one file.

    Attributes:
        inode: The inode of the file. The device is not recorded, because its number can change at a reboot.
        old_size: The size of the file before the change, in bytes.
        new_size: The size of the file after the change, in bytes.
        patches: The changes in the order of their offsets. They do not overlap.
        poison: Pairs of an offset and a byte. While the change is in progress, these bytes are in the file, so that
            every reader refuses the file.
        leader: The name of the file whose journal tells whether the change of the complete set is done. None: this
            file.
        members: In the leader's journal, the names of all files of the set.
        rest: The SHA-256, in hex, of all bytes of the old file except tensors. None if the patches contain all of them.
    """

    inode: int
    old_size: int
    new_size: int
    patches: tuple[Patch, ...]
    poison: tuple[tuple[int, int], ...] = ()
    leader: str | None = None
    members: tuple[str, ...] = ()
    rest: str | None = None

    @property
    def fits_a_sector(self) -> bool:
        """Whether all changes are within one sector.

        The disk writes a sector in one step, so no reader sees half of the change.
        """
        first, last = self.patches[0].offset, self.patches[-1].end - 1
        return self.old_size == self.new_size and first // SECTOR == last // SECTOR

    def packed(self) -> bytes:
        """Return the bytes of the journal with the state hot."""
        header = {
            "version": 1,
            "inode": self.inode,
            "old_size": self.old_size,
            "new_size": self.new_size,
            "patches": [[patch.offset, len(patch.old), len(patch.new)] for patch in self.patches],
            "poison": [list(pair) for pair in self.poison],
            "leader": self.leader,
            "members": list(self.members),
            "rest": self.rest,
        }
        text = json.dumps(header).encode()
        rest = _LENGTH.pack(len(text)) + text + b"".join(patch.old + patch.new for patch in self.patches)
        import hashlib

        return MAGIC + HOT + rest + hashlib.sha256(MAGIC + rest).digest()


def journal_path(target: Path) -> Path:
    """Return the path of the journal of the file `target`."""
    return target.parent / f".{target.name}.ckptconv-undo"


def target_of(name: str) -> str | None:
    """Return the name of the file whose journal has the name `name`.

    Return None if `name` is not the name of a journal.
    """
    match = _NAME.fullmatch(name)
    return match and match[1]


def journals_at(source: Readable) -> list[tuple[Path, bytes]]:
    """Return the files of `source` that have a journal, as :func:`journals_of` does. Remote files have none."""
    return journals_of(source.folder if source.is_folder else source.path) if source.is_stored else []


def journals_of(path: Path, *, follow: bool = True) -> list[tuple[Path, bytes]]:
    """Return the files that have a journal, each with the state that the journal claims.

    Args:
        path: A file, or a folder of files. A folder that cannot be listed has no journals.
        follow: If `path` is a link to a file, look next to the target of the link.
    """
    targets = [Path(os.path.realpath(path)) if follow and path.is_symlink() else path]
    if path.is_dir():
        targets = []
        with contextlib.suppress(OSError):
            targets = [path / target for name in sorted(os.listdir(path)) if (target := target_of(name))]
    return [(target, state) for target in targets if (state := state_of(target))]


def state_of(target: Path) -> bytes | None:
    """Return the state that the journal of `target` claims, or None without a journal. The claim is not verified.

    A journal with unexpected bytes counts as hot, so that the user looks at it. A link, a FIFO or a folder does not
    count as a journal, because this program never creates one.
    """
    path = journal_path(target)
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
    except OSError:  # also if the name of a journal would be too long
        return None
    try:
        with _opened(path) as fd:
            return DONE if calls.pread(fd, 20, 0) == MAGIC + DONE else HOT
    except FileNotFoundError:
        return None
    except OSError:
        return HOT


def refuse_no_journal(target: Path) -> None:
    """Raise RefusedError if the name of the journal of `target` is taken by something that is not a regular file."""
    path = journal_path(target)
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise RefusedError(
                f"{kind_of(mode)} has the name of the undo journal, and was not made by ckptconv",
                where=path,
                hint="look at it, then remove or rename it",
            )


def read_journal(target: Path, owner: int) -> tuple[Journal, bytes]:
    """Return the journal of `target`, and its state.

    Args:
        target: The file that was changed.
        owner: The user id of the owner of that file.

    Raises:
        InputError: There is no journal, or it cannot be read.
        RefusedError: Another user may have written it.
        MalformedError: It is damaged.
        LimitError: It is too large.
    """
    refuse_no_journal(target)
    path = journal_path(target)
    try:
        with _opened(path) as fd:
            info = os.fstat(fd)
            _check_owner(path, info, owner)
            _check_size(path, "the undo journal", info.st_size, LIMITS.undo_journal)
            data = read_bytes(fd, info.st_size, 0)
    except FileNotFoundError as error:
        raise InputError(NO_JOURNAL, where=target) from error
    except OSError as error:
        raise InputError(f"the undo journal cannot be read: {error.strerror}", where=path) from error
    return _parsed(path, data), data[len(MAGIC) : len(MAGIC) + len(HOT)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = calls.open_to_read(path, follow=False)
    try:
        yield fd
    finally:
        os.close(fd)


def read_bytes(fd: int, length: int, offset: int) -> bytes:
    """Return `length` bytes at `offset` of the open file `fd`. Return fewer if the file ends earlier.

    Raises OSError.
    """
    parts = []
    while length and (part := calls.pread(fd, length, offset)):
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def _check_owner(path: Path, info: os.stat_result, owner: int) -> None:
    """Raise RefusedError if a user other than `owner` and the current user can have written the file with the status
    `info`.
    """
    problem = None
    if not stat.S_ISREG(info.st_mode):
        problem = "it is not a regular file"
    elif info.st_nlink != 1:
        problem = "it has hard links"
    elif info.st_uid not in (owner, os.geteuid()):
        problem = "its owner is not the owner of the file"
    elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "other users can write to it"
    if problem:
        raise RefusedError(f"the undo journal is not trusted: {problem}", where=path, hint=_LOOK)


def _check_size(path: Path, what: str, size: int, most: int) -> None:
    if size > most:
        expected = f"at most {most:,} bytes"
        raise LimitError(f"{what} is too large", where=path, expected=expected, got=size, hint=_LOOK)


def _parsed(path: Path, data: bytes) -> Journal:
    import hashlib

    damaged = MalformedError("the undo journal is damaged, or not from ckptconv", where=path, hint=_LOOK)
    if len(data) < _HEAD + _SUM or not data.startswith(MAGIC) or data[16:20] not in (HOT, DONE):
        raise damaged
    body = memoryview(data)[len(MAGIC) + len(HOT) : -_SUM]  # no copy: it may be large
    summed = hashlib.sha256(MAGIC)
    summed.update(body)
    if summed.digest() != data[-_SUM:]:
        raise damaged
    (length,) = _LENGTH.unpack_from(body)
    _check_size(path, "the header of the undo journal", length, LIMITS.undo_header)
    try:
        header = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
        journal = _from_header(header, body[_LENGTH.size + length :])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged from error
    if not _is_sound(journal):
        raise damaged
    return journal


def _from_header(header: dict[str, Any], data: memoryview) -> Journal:
    patches = []
    at = 0
    for offset, n_old, n_new in header["patches"]:
        middle, end = at + n_old, at + n_old + n_new
        if min(n_old, n_new) < 0 or at == end:  # an empty patch would hide the next one
            raise ValueError
        patches.append(Patch(offset, bytes(data[at:middle]), bytes(data[middle:end])))
        at = end
    if at != len(data) or header["version"] != 1:
        raise ValueError
    for name in (*header["members"], header["leader"] or ""):
        os.fsencode(name)  # raises UnicodeEncodeError, or TypeError
    return Journal(
        header["inode"],
        header["old_size"],
        header["new_size"],
        tuple(patches),
        tuple((offset, byte) for offset, byte in header["poison"]),
        header["leader"],
        tuple(header["members"]),
        header["rest"],
    )


def _is_sound(journal: Journal) -> bool:
    """Return whether the values in `journal` have the right types and are consistent.

    They may be any values of JSON.
    """
    numbers = [journal.inode, journal.old_size, journal.new_size]
    numbers += [number for offset, byte in journal.poison for number in (offset, byte)]
    numbers += [patch.offset for patch in journal.patches]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or not journal.patches:
        return False
    names = [*journal.members, *([] if journal.leader is None else [journal.leader])]
    if not all(type(name) is str and "/" not in name and "\0" not in name and name.strip(".") for name in names):
        return False
    if len(journal.poison) > _POISON:
        return False
    at = 0
    for patch in journal.patches:
        old_end, new_end = patch.offset + len(patch.old), patch.offset + len(patch.new)
        to_the_end = patch is journal.patches[-1] and (old_end, new_end) == (journal.old_size, journal.new_size)
        if patch.offset < at or not (old_end == new_end or to_the_end):
            return False
        at = patch.end
    grows = journal.old_size != journal.new_size
    within = at <= max(journal.old_size, journal.new_size) and grows == (
        len(journal.patches[-1].old) != len(journal.patches[-1].new)
    )
    return within and all(
        byte < 256 and any(patch.offset <= offset < patch.end for patch in journal.patches)
        for offset, byte in journal.poison
    )
