"""Rows: the graph is the same as without them, and the nodes inside a row are created when they are first needed."""

from __future__ import annotations

import os
from collections import Counter
from math import prod
from random import Random
from typing import cast

import pytest

from ckptconv.checkpoint.merging import TensorCalls, empty_graph
from ckptconv.checkpoint.storage_ids import change_id
from ckptconv.dtypes import BY_NAME
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Call, Dict, Graph, PersistentId, Tuple, Value, args_of, set_items, type_of
from ckptconv.pickles.rows import RowCall
from tests.support.row_pickles import described, edit, emitted, made, mapping, read

_COUNT = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 1_500
_KEYS = (12,) * 17  # of 17 rows: after the first row, 1, 2, 4, 8 and 1 rows are read at once


def _rows(graph: Graph | None) -> list[RowCall]:
    return [call for call in graph.outer_calls if isinstance(call, RowCall)] if graph else []


@pytest.mark.untraced
def test_random_pickles_have_the_same_graph_with_and_without_rows() -> None:
    """Random pickles give the same graph, shared nodes, errors and positions with and without rows, and the same
    output. The bytes that are read at once and the limit of opcodes vary.
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
        met["views"] += sum(bool(call.form and not call.form.puts_key) for call in _rows(graph))
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
    assert met["spliced"] > _COUNT / 80 and met["views"] > _COUNT / 20, met


@pytest.mark.untraced
def test_nodes_inside_a_row_are_created_once() -> None:
    """The nodes inside a row are created once, when they are first needed. After that the row is an ordinary call, and
    its arguments can be replaced.
    """
    graphs = (read(made(Random(seed)), rows=True)[0] for seed in range(1_500))
    calls = [call for graph in graphs for call in _rows(graph) if call.row]
    assert len(calls) > 20
    for i, call in enumerate(calls):
        assert type_of(call) is Call and type_of(call.reference) is PersistentId
        assert call.row and call.reference.form
        if i % 3 == 0:
            assert isinstance(call.args, Tuple) and call.args is call.args
            inner = call.args.items[0]
            assert call.reference in (inner, *(args_of(inner)[:1] if isinstance(inner, Call) else ()))
            assert call.reference.form
        elif i % 3 == 1:
            assert isinstance(call.reference.id, Tuple) and call.reference.id is call.reference.id
        else:
            call.args = given = Tuple([])
            assert call.args is given and call.calls()[-1] is call and len(call.calls()) in (2, 4)
        assert not call.row


def _both(data: bytes) -> tuple[Graph, Graph]:
    """Return the graphs of `data` with rows and without."""
    graph, plain = read(data, rows=True)[0], read(data, rows=False)[0]
    assert graph and plain and any(call.next_items for call in _rows(graph))
    return graph, plain


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("wrapped", [(False,), (True,), (True, True, False)])
@pytest.mark.parametrize("again", [0, 1 << 22])
def test_edited_items(again: int, wrapped: tuple[bool, ...]) -> None:
    """An edited graph gives the same output with and without rows, also if unchanged items are copied from the
    source.
    """
    data, met = mapping(_KEYS, again=again, wrapped=wrapped), set[bool]()
    for seed in range(200):
        graph, plain = _both(data)
        edit(graph, Random(seed))
        edit(plain, Random(seed))
        written = emitted(graph, data, splice=True)
        met.add(len(emit(graph, loadable=False, splice=True)) > 1)
        assert written == emitted(plain, data, splice=False), seed
    assert met == ({True, False} if not again else {False})


def test_a_tag_that_is_read_from_the_slot_of_the_word() -> None:
    """The rows of this pickle read their tag from the memo slot of the word ``storage``. After the word is moved and
    the tag is replaced, the output is the same with and without rows.
    """
    data = mapping(_KEYS, tag=3)
    written = []
    for graph, splice in zip(_both(data), (True, False), strict=True):
        assert isinstance(graph.root, Tuple)
        items = graph.root.items
        items[3], items[6] = items[6], items[3]
        written.append(emitted(graph, data, str(items[3]), splice=splice))
    assert written[0] == written[1]


def test_keys_of_one_character() -> None:
    """Storage keys of one character give the same output with and without rows. Python has only one object for such a
    string, so its second occurrence is read from the memo.
    """
    data = mapping((*_KEYS[:9], 7, 7, *_KEYS[11:]))
    graph, plain = _both(data)
    assert emitted(graph, data, splice=True) == emitted(plain, data, splice=False)


def test_views_of_a_storage_with_another_key() -> None:
    """Views read the key of their storage from the memo. After the row that puts this key into the memo gets another
    key, the output is the same with and without rows.
    """
    data = mapping(_KEYS, views=True)
    graphs = [read(data, rows=rows)[0] for rows in (True, False)]
    assert all(graphs) and sum(call.form is not None and not call.form.puts_key for call in _rows(graphs[0])) == 16
    assert described(graphs[0]) == described(graphs[1])
    written = []
    for rows in (True, False):
        graph, _ = read(data, rows=rows)
        assert graph
        change_id(graph.references[0], key="98")
        written.append(emitted(graph, data, splice=rows))
    assert written[0] == written[1]


@pytest.mark.parametrize("slot", [2**32 - 1, 2**32, 2**60, 2**70])
def test_a_function_from_a_slot_of_many_digits(slot: int) -> None:
    """A function that is read from a memo slot with a large number gives the same graph with and without rows. The
    opcodes of a row have at most four bytes for a slot.
    """
    data = mapping(_KEYS).replace(b"q\0", b"q\0p%d\n" % slot).replace(b"h\0((", b"g%d\n((" % slot, 4)
    graph, plain = _both(data)
    assert described(graph) == described(plain)


def test_calls_for_other_tensors_are_rows() -> None:
    """Calls for tensors of other containers are created as rows. Their output is the same as that of calls whose inner
    nodes were all created.
    """
    pickles = []
    keys = [*map(str, range(100))]
    for entered in (False, True):
        graph = empty_graph()
        calls = TensorCalls(graph)
        items: list[Value] = []
        for i in range(200):
            dtype, shape = (BY_NAME["float32"], (i % 3, 2)) if i % 7 else (BY_NAME["uint16"], (i % 3,))
            call = calls.tensor(dtype, shape, keys[i // 2], dtype.itemsize * prod(shape))
            items += (f"w{i}", call)
            assert isinstance(call, RowCall) == bool(i % 7)
            assert not entered or isinstance(call.args, Tuple)
        set_items(cast("Dict", graph.root), items)
        for reference in graph.references[::5]:
            change_id(reference, tag="cuda:0")
        pickles.append(emit(graph, loadable=True))
        rows = [each for each in items if isinstance(each, RowCall) and each.row]
        assert len(rows) == 0 if entered else len(rows) > 100
    assert pickles[0] == pickles[1]
