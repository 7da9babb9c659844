"""The changes that edits make, as data, for the report and ``--dry-run``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import NamedTuple

from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.light_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class NameChange:
    """A name in the state dict at `path` that changes from `old` to `new`."""

    path: str
    old: str
    new: str


class CastCount(NamedTuple):
    """The number of tensors that were cast, where tied tensors count once, and the bytes of their storages.

    Attributes:
        tensors: The number of tensors.
        nbytes_before: The bytes before the cast.
        nbytes_after: The bytes after the cast.
    """

    tensors: int
    nbytes_before: int
    nbytes_after: int


class Dropped(NamedTuple):
    """The number of storages that lost bytes, and the number of these bytes."""

    storages: int
    nbytes: int


class MadePlain(NamedTuple):
    """An object that was converted to plain data.

    Attributes:
        path: The path in the source.
        old: The kind of the object.
        new: The kind of the plain data.
        reads: Code that reads the plain data.
    """

    path: str
    old: str
    new: str
    reads: str


@dataclass(frozen=True)
class Regrouping:
    """A group of tensors from which other tensors were built.

    Attributes:
        path: The path of the state dict.
        rule: The rule.
        old: The tensors that were read, each with its shape. A name with ``{e}`` and ``× 8`` is for eight stacked
            tensors.
        new: The tensors that were built, in the same form.
    """

    path: str
    rule: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass
class OptimizerChange:
    """The changes of one optimizer.

    Attributes:
        names: The number of parameter names that changed.
        left_out: The number of parameters that are not in the output.
        keyed_by: ``names`` or ``numbers`` if the keys of its state changed to these, or None.
        names_from: The information by which parameters were matched with names: the optimizer ``itself``, the
            ``shapes``, or the ``order`` of the model, which the user asserts. None if none were matched.
        groups: The number of parameter groups that were copied from another checkpoint, or None.
        regrouped: The number of parameters that were built from others.
    """

    names: int = 0
    left_out: int = 0
    keyed_by: str | None = None
    names_from: str | None = None
    groups: int | None = None
    regrouped: int = 0


@dataclass
class Changes:
    """The changes of one or several checkpoints.

    Attributes:
        devices: The number of tensors and the bytes of their storages, by (old tag, new tag).
        names: The names in state dicts that changed.
        optimizers: The changes of optimizers, by path.
        reordered: The paths of state dicts whose names are in another order.
        unprefixed: The number of names that lack the prefix to be removed.
        left_behind: The data of the source that is not in the output.
        dtypes: The casts, by (old dtype, new dtype).
        dequantized: The number of quantized weights that were dequantized.
        still_quantized: The number of other quantized weights in the same state dicts.
        not_cast: The paths of tensors that keep their dtype, by reason.
        separated: For each storage that was split: the paths of the tensors on each new storage, by dtype.
        compacted: The bytes that were removed from storages.
        rng_states: The paths of states of random generators that stay on the CPU or are moved there.
        made_plain: The objects that were converted to plain data.
        regrouped: The groups of tensors that were split, joined or stacked.
        notes: Other messages for the report.
    """

    devices: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    names: list[NameChange] = field(default_factory=list)
    optimizers: dict[str, OptimizerChange] = field(default_factory=dict)
    reordered: list[str] = field(default_factory=list)
    unprefixed: int = 0
    left_behind: list[LeftBehind] = field(default_factory=list)
    dtypes: dict[tuple[str, str], CastCount] = field(default_factory=dict)
    dequantized: int = 0
    still_quantized: int = 0
    not_cast: dict[str, list[str]] = field(default_factory=dict)
    separated: list[dict[str, list[str]]] = field(default_factory=list)
    compacted: Dropped = field(default_factory=lambda: Dropped(0, 0))
    rng_states: list[str] = field(default_factory=list)
    made_plain: list[MadePlain] = field(default_factory=list)
    regrouped: list[Regrouping] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count_devices(self, old: str, new: str, tensors: int, nbytes: int) -> None:
        """Add a change of tags to ``devices``.

        Args:
            old: The old tag.
            new: The new tag.
            tensors: The number of tensors.
            nbytes: The bytes of their storages.
        """
        before = self.devices.get((old, new), (0, 0))
        self.devices[old, new] = before[0] + tensors, before[1] + nbytes

    def count_casts(self, old: str, new: str, casts: CastCount) -> None:
        """Add casts to ``dtypes``.

        Args:
            old: The old dtype.
            new: The new dtype.
            casts: The number of tensors and bytes.
        """
        before = self.dtypes.get((old, new), CastCount(0, 0, 0))
        self.dtypes[old, new] = CastCount(*map(sum, zip(before, casts, strict=True)))

    def add(self, other: Changes, prefix: str = "") -> None:
        """Add `other`, the changes of another checkpoint, to these.

        Args:
            other: The changes to add.
            prefix: A text to put before the paths and notes of `other`.
        """

        def prefixed(texts: Iterable[str]) -> list[str]:
            return [prefix + text for text in texts]

        for tags, (tensors, nbytes) in other.devices.items():
            self.count_devices(*tags, tensors, nbytes)
        for dtypes, casts in other.dtypes.items():
            self.count_casts(*dtypes, casts)
        for reason, paths in other.not_cast.items():
            self.not_cast.setdefault(reason, []).extend(prefixed(paths))
        self.optimizers |= {prefix + path: change for path, change in other.optimizers.items()}
        self.made_plain += [plain._replace(path=prefix + plain.path) for plain in other.made_plain]
        self.names += [replace(change, path=prefix + change.path) for change in other.names]
        self.regrouped += [replace(group, path=prefix + group.path) for group in other.regrouped]
        self.reordered += prefixed(other.reordered)
        self.unprefixed += other.unprefixed
        self.dequantized += other.dequantized
        self.still_quantized += other.still_quantized
        self.left_behind += [replace(part, path=prefix + part.path) for part in other.left_behind]
        self.separated += [{dtype: prefixed(paths) for dtype, paths in groups.items()} for groups in other.separated]
        self.compacted = Dropped(*map(sum, zip(self.compacted, other.compacted, strict=True)))
        self.rng_states += prefixed(other.rng_states)
        self.notes += prefixed(other.notes)
