"""What functions on files return: a frozen object that can say itself as the command line does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class Result(ABC):
    """What a function on files returns: attributes, ``as_dict()``, ``str()`` and a short ``repr()``."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints: plain, versioned, all sizes in bytes."""

    @abstractmethod
    def _lines(self) -> Iterator[str]:
        """What the command prints into a pipe."""

    @abstractmethod
    def _title(self) -> str:
        """What it is, in a few words."""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from ckptconv.render.notebook import text_html  # which only notebooks need

        return text_html(self._title(), self._lines())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"
