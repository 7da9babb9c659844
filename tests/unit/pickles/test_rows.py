"""Rows: the graph is what the machine makes without them, and what a row is made of comes when it is asked for."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

from ckptconv.pickles.graph import Graph
from ckptconv.pickles.rows import RowCall
from tests.support.row_pickles import described, made, read

_COUNT = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 1_500


def _rows(graph: Graph | None) -> list[RowCall]:
    return [call for call in graph.outer_calls if isinstance(call, RowCall)] if graph else []


def test_the_graph_is_the_machines() -> None:
    """The same nodes, what is shared among them, orders, opcodes, errors and where they are; however little is read at
    once, and however few opcodes there may be.
    """
    met: Counter[str] = Counter()
    for seed in range(_COUNT):
        random = Random(seed)
        data = made(random)
        bounds = {
            "most": random.choice((None, None, random.randrange(1, 300))),
            "ahead": random.choice((16, 100, 4096)),
        }
        graph, said = read(data, rows=True, **bounds)
        plain, expected = read(data, rows=False, **bounds)
        met["rows"] += len(_rows(graph))
        met["read"] += graph is not None
        met["refused"] += graph is None
        assert said == expected, (seed, data)
        assert described(graph) == described(plain), (seed, data)
    assert met["rows"] > _COUNT / 2 and met["read"] > _COUNT / 5 and met["refused"] > _COUNT / 10, met
