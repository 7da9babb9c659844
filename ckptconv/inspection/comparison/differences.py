"""The result of a comparison, as data."""

from __future__ import annotations

from ckptconv.inspection.values import Histogram, TensorValues
from ckptconv.light_dataclass import dataclass
from ckptconv.result import Result


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the header of one side says of a tensor.

    ``dtype`` and ``shape`` are torch's, ``nbytes`` are those of its elements, ``tied_to`` is the path of an earlier
    tensor that is the same.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied_to: str | None


@dataclass(frozen=True, slots=True)
class OnlyIn(TensorFacts):
    """A tensor whose name the other side has not."""


@dataclass(frozen=True)
class ValueDifference:
    """How far two tensors of one shape are apart: of so many `elements`, ``differing`` ones differ.

    ``not_finite`` of those that differ are NaN or an infinity on at least one side. ``largest`` is ``|a - b|`` and
    ``largest_relative`` ``|a - b| / |b|``, each the largest of all other elements; the second is inf where b is 0 and
    a is not. Both are None for dtypes whose bits mean no number to torch. NaN equals NaN, an infinity itself, and -0.0
    equals 0.0. Whole numbers are exact. ``histogram``, where it was asked for: how many of the finite elements that
    are not equal have which ``|a - b|``; those within the tolerance count too. ``relative_to_max`` is
    ``largest`` divided by the largest ``|b|`` of all finite elements, equal ones among them. It is inf if that is 0,
    and None if it is not known.
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
    """Two tensors of one name, at `path` in both. What differs is a pair, of A and of B, else None.

    These are ``dtype``, ``shape``, ``device``, ``requires_grad``, ``class_name`` and ``made_of``. ``class_name``:
    ``Tensor``, ``Parameter``, or the class of their own that they have. ``made_of`` says in words what else they are
    made of: their kinds (strided, sparse), or what the calls hold that make them. ``values`` is None where values were
    not compared, because shapes or kinds differ; if nothing else differs, because elements share bytes with what is not
    theirs, and the storages are not equal. ``rng_state``: it is the state of a random generator. ``statistics``: what
    the elements of each are, where that was asked for; None for a side whose are no numbers. ``sides``: what the
    headers of A and of B say.
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
    """What stands at `path` in `a` and in `b`, and is no tensor in one of them.

    In words; None where there is nothing.
    """

    path: str
    a: str | None
    b: str | None


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """What two checkpoints do not have in common.

    Attributes:
        a: The first checkpoint.
        b: The second one.
        formats: The format of each.
        tensors: The number of names that both have.
        nbytes: The bytes that those tensors have in `a`; tied ones count once.
        only_in_a: Tensors whose name `b` has not.
        only_in_b: Tensors whose name `a` has not.
        differing: Tensors of both in which anything differs; none where names alone were compared.
        others: What differs and is no tensor; nothing where names alone were compared.
        notes: What was not compared, and what else to know.
        suggestion: Where no name is in both because they stand at other paths, or have something before them, the
            command that compares those tensors.
        near: The number of tensors in which numbers differ within the tolerance, and none beyond it.
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
    _drawn_by = "difference"

    @property
    def same(self) -> bool:
        """Whether they have everything in common that was compared."""
        return not (self.only_in_a or self.only_in_b or self.differing or self.others)
