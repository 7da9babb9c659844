"""The base class of the results that public functions return."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ckptconv.hints import python_words


class Result:
    """A result as plain data, with ``as_dict()``, ``str()``, a short ``repr()``, and HTML for notebooks.

    The renderers import the classes of results. So a result imports its renderer only when it is printed.
    """

    #: The module of ``ckptconv.render`` that prints the result. Its function has the same name and ``_lines``.
    _drawn_by: str

    def as_dict(self) -> dict[str, Any]:
        """Return the data that ``--json`` prints: a versioned dict of plain values, with all sizes in bytes."""
        found: dict[str, Any] = import_module("ckptconv.render.json_views").as_dict(self)
        return found

    def _lines(self) -> Iterator[str]:
        """Return the lines that the command prints if its output is a pipe."""
        draw = getattr(import_module(f"ckptconv.render.{self._drawn_by}"), f"{self._drawn_by}_lines")
        lines: Iterator[str] = draw(self)
        return lines

    def _title(self) -> str:
        """Return the most important line."""
        return next(self._lines())

    def __str__(self) -> str:
        with python_words():
            return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        with python_words():
            html: str = import_module("ckptconv.render.notebook").html(self, self._title(), self._lines())
            return html

    def __repr__(self) -> str:
        with python_words():
            return f"<{type(self).__name__}: {self._title()}>"
