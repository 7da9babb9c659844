"""Objects that are pickled as any call."""

from __future__ import annotations

from typing import Any

__all__ = ["Reduced"]


class Reduced:
    """Pickled as what ``__reduce__`` may give: a function, its arguments, and what can follow them."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced
