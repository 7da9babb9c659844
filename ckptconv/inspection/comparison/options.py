"""The keywords of ``diff``, each declared once, and the same options as data."""

# No annotations from __future__: the texts in Annotated are read when the package is imported.

from dataclasses import fields
from math import isfinite
from numbers import Real
from typing import Annotated, TypedDict

from ckptconv.edits.options import NameOptions, PartOptions, check_flags
from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.guesses import DOWNLOAD, Flag
from ckptconv.hints import Option, option
from ckptconv.light_dataclass import dataclass


class _ComparisonOptions(TypedDict, total=False):
    """The options that choose the facts to compare, and the tolerances."""

    rtol: Annotated[
        float,
        Flag(
            "Relative tolerance: numbers may differ by X times the number in B, as in torch.allclose.",
            "Numbers are the same if ``|a - b| <= atol + rtol * |b|``, as for ``torch.allclose``.",
            "X",
        ),
    ]
    atol: Annotated[float, Flag("Absolute tolerance: numbers may differ by X.", "See `rtol`.", "X")]
    names_only: Annotated[bool, Flag("Only compare the names of tensors.")]
    values: Annotated[
        bool,
        Flag(
            "Show NaN, min, max, mean, std and norm of tensors that differ.",
            "Describe the elements of each tensor that differs, in both checkpoints, as :func:`ckptconv.inspect` does.",
        ),
    ]
    histogram: Annotated[
        bool,
        Flag(
            "Like --values, with histograms of the elements in A and B, and of their distance.",
            "Do the same, with histograms of the elements in both, and of ``|a - b|``.",
        ),
    ]
    full: Annotated[bool, Flag("Also read data with equal checksums. By default they count as equal.")]
    download: Annotated[bool, DOWNLOAD]


class DiffOptions(_ComparisonOptions, PartOptions, NameOptions, total=False):
    """The keywords of :func:`ckptconv.diff`. Those that edit are the same as in :func:`ckptconv.convert`."""


@dataclass(frozen=True)
class Compared:
    """The facts to compare, and the tolerances: keywords of :func:`ckptconv.diff`, with their defaults."""

    rtol: float = 0.0
    atol: float = 0.0
    names_only: bool = False
    full: bool = False
    values: bool = False
    histogram: bool = False
    download: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentTypeError for a value of a wrong type, and UsageError for an invalid value or combination."""
        check_flags(self)
        for name, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            if not isinstance(tolerance, Real) or isinstance(tolerance, bool):
                raise ArgumentTypeError(f"{name} must be a number, such as 1e-5, not {tolerance!r}")
            if not (isfinite(tolerance) and tolerance >= 0):
                raise UsageError(
                    option(name, tolerance) + " is not a tolerance", expected="a finite number that is not negative"
                )
        if self.names_only and self.full:
            raise UsageError(option("names_only") + " and " + option("full") + " cannot be combined")
        for name in ("values", "histogram"):
            if self.names_only and getattr(self, name):
                raise UsageError(option("names_only") + " and " + option(name) + " cannot be combined")

    def options(self) -> list[Option]:
        """Return the options that differ from their defaults, for a suggested command."""
        options = (Option(each.name, getattr(self, each.name)) for each in fields(self))
        return [each for each in options if each.value]


#: Everything is compared exactly, except for data with the same checksum on both sides, which counts as equal.
ALL = Compared()
