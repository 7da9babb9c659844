"""Bytes of a file that are replaced where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.light_dataclass import dataclass

#: What a disk writes whole or not at all, in bytes.
SECTOR = 512


@dataclass(frozen=True)
class Patch:
    """Bytes of a file that are replaced.

    Attributes:
        offset: Where they stand, in bytes from the start of the file.
        old: What stands there before.
        new: What stands there afterwards: as many bytes, but in the last patch of a file that grows.
    """

    offset: int
    old: bytes
    new: bytes

    @property
    def end(self) -> int:
        """Where the longer of both ends."""
        return self.offset + max(len(self.old), len(self.new))


@dataclass(frozen=True)
class Patches:
    """All that changes in one file.

    Attributes:
        way: ``same size``, or ``appended`` where the file grows by a new pickle and a new directory.
        patches: In the order of their offsets; none overlaps another.
        old_size: The size of the file before, in bytes.
        new_size: Its size afterwards.
        poison: Offsets in what changes, and a byte for each that makes every reader refuse the file.
    """

    way: str
    patches: tuple[Patch, ...]
    old_size: int
    new_size: int
    poison: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """How many bytes are new."""
        return sum(len(each.new) for each in self.patches)


def between(offset: int, old: bytes, new: bytes) -> Iterator[Patch]:
    """The sectors in which `old`, which stands at `offset`, and `new`, as long, differ; neighbours as one."""
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
