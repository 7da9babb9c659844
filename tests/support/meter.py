"""A progress meter like that of commands on a terminal, which records its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Counted"]


class Counted:
    """A meter that records for each use how many bytes were `promised` and how many were `done`."""

    def __init__(self) -> None:
        self.promised: list[int] = []
        self.done: list[int] = []

    @contextlib.contextmanager
    def __call__(self, size: int) -> Iterator[Callable[[int], None]]:
        self.promised.append(size)
        self.done.append(0)

        def tick(nbytes: int) -> None:
            self.done[-1] += nbytes

        yield tick
