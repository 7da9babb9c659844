"""Rows: the graph is what the machine makes without them, and what a row is made of comes when it is asked for."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Call, Graph, PersistentId, Tuple
from ckptconv.pickles.rows import RowCall, type_of
from tests.support.row_pickles import described, emitted, made, read

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
        if graph and plain:
            tag = random.choice((None, "mps:0", "cpu"))
            met["spliced"] += len(emit(graph, loadable=False, splice=True)) > 1
            written = emitted(graph, data, tag, splice=True)
            assert written == emitted(plain, data, tag, splice=False), (seed, data)
        assert described(graph) == described(plain), (seed, data)
    assert met["rows"] > _COUNT / 2 and met["read"] > _COUNT / 5 and met["refused"] > _COUNT / 10, met
    assert met["spliced"] > _COUNT / 40, met


def test_what_a_row_is_made_of() -> None:
    """It is made once, and then the row is a call like others: what is asked for can be changed."""
    graphs = (read(made(Random(seed)), rows=True)[0] for seed in range(1_500))
    calls = [call for graph in graphs for call in _rows(graph) if call.row]
    assert len(calls) > 20
    for i, call in enumerate(calls):
        assert type_of(call) is Call and type_of(call.reference) is PersistentId
        assert call.row and call.reference.form
        if i % 3 == 0:
            assert isinstance(call.args, Tuple) and call.args is call.args
            assert call.args.items[0] is call.reference and call.reference.form
        elif i % 3 == 1:
            assert isinstance(call.reference.id, Tuple) and call.reference.id is call.reference.id
        else:
            call.args = given = Tuple([])
            assert call.args is given and call.calls()[-1] is call and len(call.calls()) == 2
        assert not call.row
