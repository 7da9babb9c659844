"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Return as soon as `is_so`; fail if it is not so in time."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)
