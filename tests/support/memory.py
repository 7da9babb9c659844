"""A limit on the memory that Python's objects take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["memory_below"]


@contextmanager
def memory_below(nbytes: int) -> Iterator[None]:
    """Fail if Python's objects take `nbytes` or more at any moment in this context."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes
