"""The part of a long list of cases that the gate runs. ``.ci/long`` runs all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["sampled"]

_T = TypeVar("_T")


def sampled(cases: Iterable[_T], step: int = 3) -> list[_T]:
    """Return each `step`-th of `cases`, or all under the long profile.

    For pairs and triples, `step` has no divisor in common with the number of values of the last, so that the sample has
    each value of each.
    """
    return list(cases)[:: 1 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else step]
