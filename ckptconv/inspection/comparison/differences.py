"""The result of a comparison, as data."""

from __future__ import annotations

from ckptconv.inspection.values import Histogram, TensorValues
from ckptconv.light_dataclass import dataclass
from ckptconv.result import Result


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The description of a tensor in the checkpoint of one side.

    Attributes:
        path: Its path.
        dtype: Its dtype, in torch's spelling.
        shape: Its shape.
        nbytes: The bytes of its elements.
        tied_to: The path of an earlier tensor with the same data, or None.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied_to: str | None


@dataclass(frozen=True, slots=True)
class OnlyIn(TensorFacts):
    """A tensor whose name exists only on one side."""


@dataclass(frozen=True)
class ValueDifference:
    """The difference between the values of two tensors of the same shape.

    NaN equals NaN, an infinity equals itself, and -0.0 equals 0.0. Integers are compared exactly.

    Attributes:
        elements: The number of elements.
        differing: The number of elements that differ by more than the tolerance.
        largest: The largest ``|a - b|`` of the elements that are finite on both sides. None for dtypes whose bits torch
            does not read as numbers.
        largest_relative: The largest ``|a - b| / |b|`` of the same elements, inf if b is 0 and a is not. None for the
            same dtypes as `largest`.
        not_finite: The number of differing elements that are NaN or infinite on at least one side.
        not_finite_in: How many of these are NaN or infinite in A, and how many in B.
        histogram: The distribution of ``|a - b|`` over the finite elements that are not equal, including those within
            the tolerance. None if it was not requested.
        relative_to_max: ``largest`` divided by the largest ``|b|`` of all finite elements, including equal ones. It is
            inf if the divisor is 0, and None if it is not known.
    """

    elements: int
    differing: int
    largest: float | int | None = 0
    largest_relative: float | None = 0.0
    not_finite: int = 0
    histogram: Histogram | None = None
    relative_to_max: float | None = 0.0
    not_finite_in: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The differences between two tensors of the same name. An attribute is a pair of the values in A and in B if they
    differ, and None if they are the same.

    Attributes:
        path: The path in both.
        dtype: Their dtypes.
        shape: Their shapes.
        device: Their devices.
        requires_grad: Whether they require gradients.
        class_name: ``Tensor``, ``Parameter``, or the name of a subclass.
        made_of: Their kinds (strided, sparse, ...), or a description of other differences in the calls that make them.
        values: The difference of the values. None if they were not compared, because shapes or kinds differ. If nothing
            else differs, None means that the elements are smaller than a byte and their storages are not equal.
        rng_state: Whether the tensor is the state of a random generator.
        statistics: Statistics of the elements on each side, if they were requested. None for a side whose elements are
            not numbers.
        sides: The descriptions of the tensor in A and in B.
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
    """Two objects that differ, of which at least one is not a tensor.

    Attributes:
        path: The path of both.
        a: A description of the object in A, or None if A does not have the path.
        b: The same for B.
    """

    path: str
    a: str | None
    b: str | None


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """The differences between two checkpoints.

    Attributes:
        a: The first checkpoint.
        b: The second checkpoint.
        formats: The format of each.
        tensors: The number of tensor names that both have.
        nbytes: The bytes of those tensors in `a`. Tied ones count once.
        only_in_a: The tensors whose name exists only in `a`.
        only_in_b: The tensors whose name exists only in `b`.
        differing: The tensors of both that differ. Empty if only names were compared.
        others: The differences between objects that are not tensors. Empty if only names were compared.
        notes: Objects that were not compared, and further remarks.
        suggestion: A command, or None. If only the grouping of tensors differs, it converts `a` to the grouping of `b`.
            If no name is common, it compares the tensors under other paths or prefixes.
        near: The number of tensors whose numbers differ, but only within the tolerance.
        dangers: Dangerous calls in `a` and `b`, in the words of ``inspect``. Each text begins with the side.
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
        """Whether no difference was found."""
        return not (self.only_in_a or self.only_in_b or self.differing or self.others)
