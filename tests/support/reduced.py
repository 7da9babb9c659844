"""Objects that are pickled as an arbitrary call."""

from __future__ import annotations

from typing import Any

__all__ = ["Reduced"]


class Reduced:
    """An object that is pickled as a given result of ``__reduce__``: a function, its arguments, and optional further
    items.
    """

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced
