"""Declare the keywords of ``diff``, each once, and make them data."""

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
    """The options that say what is compared, and how exactly."""

    rtol: Annotated[
        float,
        Flag(
            "Let numbers differ by X times that of B, as torch.allclose does.",
            "Numbers are the same if ``|a - b| <= atol + rtol * |b|``, as for ``torch.allclose``.",
            "X",
        ),
    ]
    atol: Annotated[float, Flag("Let numbers differ by X.", "See `rtol`.", "X")]
    names_only: Annotated[bool, Flag("Compare the names of tensors and nothing else.")]
    values: Annotated[
        bool,
        Flag(
            "Say what tensors that differ are: NaN, min, max, mean, std, norm.",
            "Describe the elements of each tensor that differs, in both checkpoints, as :func:`ckptconv.inspect` does.",
        ),
    ]
    histogram: Annotated[
        bool,
        Flag(
            "The same, with histograms of both and of how far they are apart.",
            "Do the same, with histograms of the elements in both, and of ``|a - b|``.",
        ),
    ]
    full: Annotated[bool, Flag("Read data with equal checksums too. Without it, they count as equal.")]
    download: Annotated[bool, DOWNLOAD]


class DiffOptions(_ComparisonOptions, PartOptions, NameOptions, total=False):
    """The keywords of :func:`ckptconv.diff`; those that edit are as in :func:`ckptconv.convert`."""


@dataclass(frozen=True)
class Compared:
    """What is compared, and how exactly: keywords of :func:`ckptconv.diff`, with their defaults."""

    rtol: float = 0.0
    atol: float = 0.0
    names_only: bool = False
    full: bool = False
    values: bool = False
    histogram: bool = False
    download: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentTypeError for a value of a wrong type, and UsageError for one that makes no sense."""
        check_flags(self)
        for name, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            if not isinstance(tolerance, Real) or isinstance(tolerance, bool):
                raise ArgumentTypeError(f"{name} must be a number, such as 1e-5, not {tolerance!r}")
            if not (isfinite(tolerance) and tolerance >= 0):
                raise UsageError(
                    option(name, tolerance) + " is no tolerance", expected="a finite number that is not negative"
                )
        if self.names_only and self.full:
            raise UsageError(option("names_only") + " reads no tensor, and " + option("full") + " reads all")
        for name in ("values", "histogram"):
            if self.names_only and getattr(self, name):
                raise UsageError(option("names_only") + " reads no tensor, and " + option(name) + " reads those")

    def options(self) -> list[Option]:
        """Return the options that are not at their defaults, for a command that is to be typed."""
        options = (Option(each.name, getattr(self, each.name)) for each in fields(self))
        return [each for each in options if each.value]


#: Everything is compared, to the last bit, except for data that has the same checksum on both sides.
ALL = Compared()
