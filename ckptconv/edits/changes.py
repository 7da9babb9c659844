"""What edits changed, as data, for the report and ``--dry-run``."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.light_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class NameChange:
    """One name of the state dict at `path`: the `old` one and the `new` one."""

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

    Attributes:
        devices: By (old tag, new tag), the number of tensors and the bytes of their storages.
        names: Each name of a state dict that changed.
        optimizers: How many names changed with them in each optimizer that is keyed by names, by its path.
        unprefixed: How many names have not the prefix that was to be taken off, and stay.
        left_behind: What is left out.
        dtypes: By (old, new), what was cast so.
        not_cast: By the reason, the paths of tensors that keep their dtype.
        separated: For each storage that was taken apart, the paths of those that go on sharing one, by their dtype.
        compacted: What storages lost.
        rng_states: The paths of states of random generators that stay on, or are brought to, the CPU.
        made_plain: The objects that became plain.
        notes: What else to know.
    """

    devices: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    names: list[NameChange] = field(default_factory=list)
    optimizers: dict[str, int] = field(default_factory=dict)
    unprefixed: int = 0
    left_behind: list[LeftBehind] = field(default_factory=list)
    dtypes: dict[tuple[str, str], CastCount] = field(default_factory=dict)
    not_cast: dict[str, list[str]] = field(default_factory=dict)
    separated: list[dict[str, list[str]]] = field(default_factory=list)
    compacted: Dropped = field(default_factory=lambda: Dropped(0, 0))
    rng_states: list[str] = field(default_factory=list)
    made_plain: list[MadePlain] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
