"""What edits changed, as data, for the report and ``--dry-run``."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from ckptconv.checkpoint.model import LeftBehind
from ckptconv.light_dataclass import dataclass

__all__ = ["CastCount", "Changes", "Dropped", "MadePlain", "NameChange"]


@dataclass(frozen=True, slots=True)
class NameChange:
    """One name of the state dict at `path`."""

    path: str
    old: str
    new: str


class CastCount(NamedTuple):
    """How many tensors were cast, ties once, and the bytes of their storages before and after."""

    tensors: int
    nbytes_before: int
    nbytes_after: int


class Dropped(NamedTuple):
    """How many storages lost bytes, and the bytes that they lost."""

    storages: int
    nbytes: int


class MadePlain(NamedTuple):
    """An object at `path` of the source that became plain: what it was, what it is, and how code reads it now."""

    path: str
    old: str
    new: str
    reads: str


@dataclass
class Changes:
    """What the edits change, for ``--dry-run`` and the report.

    ``devices`` maps (old tag, new tag) to the number of tensors and the bytes of storage; ``dtypes`` maps (old, new) to
    what was cast so; ``not_cast`` maps why tensors keep their dtype to their paths; ``separated`` has for each storage
    that was taken apart the paths of those that go on sharing one, by their dtype. ``compacted`` is what storages lost.
    ``rng_states`` are the paths of those that were kept on or brought to the CPU, ``made_plain`` the objects that
    became plain.
    """

    devices: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    names: list[NameChange] = field(default_factory=list)
    unprefixed: int = 0
    left_behind: list[LeftBehind] = field(default_factory=list)
    dtypes: dict[tuple[str, str], CastCount] = field(default_factory=dict)
    not_cast: dict[str, list[str]] = field(default_factory=dict)
    separated: list[dict[str, list[str]]] = field(default_factory=list)
    compacted: Dropped = field(default_factory=lambda: Dropped(0, 0))
    rng_states: list[str] = field(default_factory=list)
    made_plain: list[MadePlain] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
