"""A sample of a long list of cases for the gate. ``.ci/long`` runs all cases."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["sampled"]

_T = TypeVar("_T")


def sampled(cases: Iterable[_T], step: int = 3) -> list[_T]:
    """Return each `step`-th of `cases`, or all cases under the long profile.

    For pairs and triples, `step` and the number of values of the last element must have no common divisor, so that the
    sample contains each value of each element.
    """
    return list(cases)[:: 1 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else step]
