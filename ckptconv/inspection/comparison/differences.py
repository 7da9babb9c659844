"""The result of a comparison, as data."""

from __future__ import annotations

from ckptconv.inspection.values import Histogram, TensorValues
from ckptconv.light_dataclass import dataclass
from ckptconv.result import Result


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the header of one side says about a tensor.

    Attributes:
        path: Its path.
        dtype: Its dtype, as torch calls it.
        shape: Its shape.
        nbytes: The bytes of its elements.
        tied_to: The path of an earlier tensor that is the same, or None.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied_to: str | None


@dataclass(frozen=True, slots=True)
class OnlyIn(TensorFacts):
    """A tensor whose name the other side does not have."""


@dataclass(frozen=True)
class ValueDifference:
    """How far two tensors of one shape are apart.

    NaN equals NaN, an infinity equals itself, and -0.0 equals 0.0. Integers are compared exactly.

    Attributes:
        elements: The number of elements.
        differing: How many of them differ.
        largest: The largest ``|a - b|`` of the elements that are finite on both sides. None for dtypes whose bits torch
            does not read as numbers.
        largest_relative: The largest ``|a - b| / |b|`` of the same elements, inf if b is 0 and a is not. None as above.
        not_finite: How many of the differing elements are NaN or an infinity on at least one side.
        histogram: The distribution of ``|a - b|`` over the finite elements that are not equal, also those within the
            tolerance. None if it was not asked for.
        relative_to_max: ``largest`` divided by the largest ``|b|`` of all finite elements, also of equal ones. It is
            inf if that is 0, and None if it is not known.
    """

    elements: int
    differing: int
    largest: float | int | None = 0
    largest_relative: float | None = 0.0
    not_finite: int = 0
    histogram: Histogram | None = None
    relative_to_max: float | None = 0.0


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Two tensors of one name, and what differs. A fact that differs is a pair, of A and of B; otherwise it is None.

    Attributes:
        path: The path in both.
        dtype: Their dtypes.
        shape: Their shapes.
        device: Their devices.
        requires_grad: Whether they require gradients.
        class_name: ``Tensor``, ``Parameter``, or the name of their own class.
        made_of: Their kinds (strided, sparse) in words, or what else the calls that make them contain.
        values: How far the values are apart. None if they were not compared, because shapes or kinds differ. If nothing
            else differs, None means that the elements share bytes with other data and the storages are not equal.
        rng_state: Whether it is the state of a random generator.
        statistics: What the elements are on each side, if that was asked for; None for a side whose elements are not
            numbers.
        sides: What the headers of A and B say.
    """

    path: str
    dtype: tuple[str, str] | None = None
    shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    device: tuple[str, str] | None = None
    requires_grad: tuple[bool, bool] | None = None
    class_name: tuple[str, str] | None = None
    made_of: tuple[str, str] | None = None
    values: ValueDifference | None = None
    rng_state: bool = False
    statistics: tuple[TensorValues | None, TensorValues | None] | None = None
    sides: tuple[TensorFacts, TensorFacts] | None = None


@dataclass(frozen=True)
class OtherDifference:
    """What is at `path` in `a` and in `b`, in words, if it is not a tensor in both. None: nothing is there."""

    path: str
    a: str | None
    b: str | None


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """What two checkpoints do not have in common.

    Attributes:
        a: The first checkpoint.
        b: The second checkpoint.
        formats: The format of each.
        tensors: The number of names that both have.
        nbytes: The bytes of those tensors in `a`; tied ones count once.
        only_in_a: Tensors whose name `b` does not have.
        only_in_b: Tensors whose name `a` does not have.
        differing: Tensors of both in which anything differs. Empty if only names were compared.
        others: What differs and is not a tensor. Empty if only names were compared.
        notes: What was not compared, and what else to know.
        suggestion: The command that regroups the tensors of `a` as in `b`, if only that differs by names and shapes;
            else, if no name is in both, the one that compares the tensors under their other paths or prefixes. None if
            there is no such command.
        near: The number of tensors in which numbers differ, all within the tolerance.
        dangers: What attacks use and no checkpoint needs, in the words of ``inspect``, each after its side.
    """

    a: str
    b: str
    formats: tuple[str, str]
    tensors: int
    nbytes: int
    only_in_a: tuple[OnlyIn, ...]
    only_in_b: tuple[OnlyIn, ...]
    differing: tuple[TensorDifference, ...]
    others: tuple[OtherDifference, ...]
    notes: tuple[str, ...]
    suggestion: str | None = None
    near: int = 0
    dangers: tuple[str, ...] = ()
    _drawn_by = "difference"

    @property
    def same(self) -> bool:
        """Whether everything that was compared is the same."""
        return not (self.only_in_a or self.only_in_b or self.differing or self.others)
