"""A function that waits for another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Return as soon as `is_so` returns true. Fail if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)
