"""What an edit of weights does to the parameters of a state dict, as data, for what else has data on each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call


@dataclass(frozen=True)
class Regrouped:
    """Parameters that are split or joined.

    Attributes:
        old: The names before, in the order in which `apply` takes their tensors.
        new: The names after, in the order in which `apply` returns theirs.
        apply: Returns the new tensors for one tensor of each old name. The tensors are calls that make tensors, and
            have the shapes of the weights and any dtype.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    apply: Callable[[Sequence[Call]], list[Call]]


@dataclass(frozen=True)
class ParameterChange:
    """What one edit does to the parameters of one state dict.

    Attributes:
        renamed: The old names that change, with the new ones.
        dropped: The names that are left out.
        regrouped: The parameters that are split or joined.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    regrouped: tuple[Regrouped, ...] = ()
