"""A counter of the walks of a command over the complete graph of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptconv.pickles import graph, paths

__all__ = ["Walks"]


class Walks:
    """A counter of the nodes that ``walk`` yields and the places that ``find_places`` yields, from its creation on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: For each walk: the name of the function, and the number of items.
        self.lengths: list[tuple[str, int]] = []
        for function in (graph.walk, paths.find_places):
            counted = self._counted(function)
            for module in [each for name, each in sys.modules.items() if name.startswith("ckptconv.")]:
                if vars(module).get(function.__name__) is function:
                    monkeypatch.setattr(module, function.__name__, counted)

    def _counted(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
            length = 0
            try:
                for each in function(*args, **kwargs):
                    length += 1
                    yield each
            finally:
                self.lengths.append((function.__name__, length))

        return counted

    def of(self, name: str, whole: int) -> float:
        """Return how many items the function `name` yielded in total, as a multiple of `whole`, the size of the
        graph.
        """
        return sum(length for each, length in self.lengths if each == name) / whole
