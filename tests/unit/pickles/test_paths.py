"""Paths of the nodes in a graph: each position has a unique path, which is parsed back into its segments."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Graph, Node
from ckptconv.pickles.parser import parse
from ckptconv.pickles.paths import Place, find_places, parse_path
from tests.support.reduced import Reduced


def graph_of(data: bytes) -> Graph:
    return parse(lambda offset, length: data[offset : offset + length], len(data), where="here")[0]


def places_of(data: bytes) -> list[Place]:
    return list(find_places(graph_of(data).root, lambda node: None, "here"))


def paths_of(obj: object, protocol: int = 2) -> list[str]:
    return [place.path for place in places_of(pickle.dumps(obj, protocol))]


class Thing:
    """An object whose attributes are the state of a BUILD opcode."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Stated(Thing):
    def __getstate__(self) -> Any:
        return self.__dict__["state"]

    def __setstate__(self, state: Any) -> None:
        pass


class Named(Thing):
    def __getnewargs_ex__(self) -> Any:
        return ((5,), {"a/b": 1, "call": 2, "0": 3})


SHARED = {"x": 1}
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("obj", "protocol", "paths"),
    [
        ({"a": {"b": 1}, "m.w": 2}, 2, [".", "a", "a/b", "m.w"]),
        ([1, [2]], 2, [".", "[0]", "[1]", "[1][0]"]),
        ((1, 2), 2, [".", "[0]", "[1]"]),
        ({None: 1, 0: 2, b"k": 3}, 3, [".", "[None]", "[0]", "[b'k']"]),
        ({"": 1, ".": 2, "a/b[": 3}, 2, [".", "\\e", "\\.", "a\\/b\\["]),
        (Thing(lr=1, inner=Thing(x=2)), 2, [".", ".lr", ".inner", ".inner/.x"]),
        (Thing(**{"": 1, "a/b": 2}), 2, [".", ".\\e", ".a\\/b"]),
        (Stated(state=[7]), 2, [".", ".__state__", ".__state__[0]"]),
        ({"c": Reduced(Thing, (1, ["x"]))}, 2, [".", "c", "c/(0)", "c/(1)", "c/(1)[0]"]),
        ({7}, 4, [".", "{0}"]),
        (frozenset([7]), 4, [".", "{0}"]),
        ({(1, "a"): 5}, 2, [".", "<0>", "<0>[0]", "<0>[1]", "[(1, 'a')]"]),
        ({(1, (2,)): 5}, 2, [".", "<0>", "<0>[0]", "<0>[1]", "<0>[1][0]", "[<0>]"]),
        # keyword arguments have their escaped names as segments; a name that equals a position gets a number
        (Named(), 4, [".", "(0)", "(a\\/b)", "(call)", "(0)\\2"]),
        # an object is listed at each of its paths, but its contents only at the first
        ([SHARED, SHARED], 2, [".", "[0]", "[0]/x", "[1]"]),
        (CYCLE, 2, [".", "[0]"]),
    ],
)
def test_the_forms_of_paths(obj: Any, protocol: int, paths: list[str]) -> None:
    """The paths of pickles that Python writes have the forms in the docstring of ``ckptconv.pickles.paths``."""
    assert paths_of(obj, protocol) == paths


@pytest.mark.parametrize(("key", "path"), [(b"k", "[b'k']"), ((b"k", 1), "[(b'k', 1)]")])
def test_keys_that_are_made_by_a_call(key: object, path: str) -> None:
    """A key that contains bytes is a literal in the path under protocol 2, too. This protocol has no opcode for bytes,
    so the pickle calls a function.
    """
    assert paths_of({key: 1}, 2)[-1] == path


def test_the_result_of_a_call_that_is_called() -> None:
    """A call whose result is called has the path ``(call)``. Protocol 2 writes keyword arguments as a call of
    ``functools.partial(...)``.
    """
    assert paths_of(Named(), 2)[:3] == [".", "(call)", "(call)/(0)"]


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        (b"}(X\1\0\0\0aK\1X\1\0\0\0aK\2X\1\0\0\0aK\3u.", [".", "a", "a\\2", "a\\3"]),
        (b"}(K\0K\1K\0K\2u.", [".", "[0]", "[0]\\2"]),
        (b"cx\ny\n)R}X\1\0\0\0aK\1sb}X\1\0\0\0aK\2sb.", [".", ".a", ".a\\2"]),
        (b"cx\ny\n)RK\1bK\2b.", [".", ".__state__", ".__state__\\2"]),
        (b"cx\ny\n)R}X\x09\0\0\0__state__K\1sbK\2b.", [".", ".__state__", ".__state__\\2"]),
        (b"cx\ny\n)R(K\7eK\0K\x08s.", [".", "[0]", "[0]\\2"]),
    ],
    ids=["key", "index", "attribute", "state", "attribute and state", "element and key"],
)
def test_repeated_segments_are_numbered(data: bytes, paths: list[str]) -> None:
    """If a segment occurs again below the same parent, it gets a number. So paths are unique."""
    assert [place.path for place in places_of(data)] == paths


def test_keys_of_mappings_and_attributes_are_kept() -> None:
    """The ``key`` of a place is the unescaped string of a mapping key or an attribute name. It is None for list
    items.
    """
    places = places_of(pickle.dumps({"a/b": [1], "t": Thing(rng=2)}, 2))
    assert [(place.path, place.key) for place in places] == [
        (".", None),
        ("a\\/b", "a/b"),
        ("a\\/b[0]", None),
        ("t", "t"),
        ("t/.rng", "rng"),
    ]


def test_doubling_costs_nothing() -> None:
    """A graph with 2**60 paths has only 121 places, because each shared node is entered once."""
    node: list[Any] = []
    for _ in range(60):
        node = [node, node]
    assert len(paths_of(node)) == 121


def test_shared_arguments_are_listed_below_the_first_call() -> None:
    """Arguments that calls share are listed only below the first call. A thousand calls with the same thousand
    arguments have two thousand places below the list, not a million.
    """
    arguments = b"(" + b"K\1" * 1000 + b"tq\1"
    calls = b"](" + b"cm\nf\n" + arguments + b"R" + b"cm\nf\nh\1R" * 999 + b"e."
    places = places_of(b"\x80\x02" + calls)
    assert len(places) == 1 + 1000 + 1000
    assert [place.path for place in places[1:4]] == ["[0]", "[0]/(0)", "[0]/(1)"]


@pytest.mark.parametrize(
    ("first", "each", "path"),
    [
        (b")\x81", b"h\1b", "[0]/.a000"),
        (b")", b"h\1\x92", "[0]/(a000)"),
    ],
    ids=["state", "keywords"],
)
def test_shared_states_and_keywords_are_listed_below_the_first_object(first: bytes, each: bytes, path: str) -> None:
    """A state, or a dict of keyword arguments, that a thousand objects share is listed only below the first object."""
    shared = b"}q\1(" + b"".join(b"\x8c\4a%03dN" % i for i in range(1000)) + b"u"
    cls = b"cm\nf\n" + first
    places = places_of(b"\x80\x04](" + cls + shared + each.removeprefix(b"h\1") + (cls + each) * 999 + b"e.")
    assert len(places) == 1 + 1000 + 1000
    assert places[2].path == path


def test_a_state_that_is_also_an_item_is_listed_twice() -> None:
    """The state of an object that is also an item of the checkpoint is listed at both positions. An example is
    ``vars(args)`` next to ``args``.
    """
    assert [place.path for place in places_of(b"\x80\x02](cm\nf\n)\x81}q\1\x8c\1aNsbh\1e.")] == [
        ".",
        "[0]",
        "[0]/.a",
        "[1]",
        "[1]/a",
    ]


def test_one_key_many_times_is_limited() -> None:
    """A mapping that reads one key of 65,536 bytes from the memo a thousand times is refused, because its paths are too
    long. A key of 1,000 bytes is accepted.
    """
    assert len(places_of(b"\x80\x02}(" + b"X\xe8\3\0\0" + b"a" * 1000 + b"q\1N" + b"h\1N" * 1000 + b"u.")) == 1002
    long = b"X" + (1 << 16).to_bytes(4, "little") + b"a" * (1 << 16)
    with pytest.raises(LimitError, match="paths in the checkpoint are too long"):
        places_of(b"\x80\x02}(" + long + b"q\1N" + b"h\1N" * 1000 + b"u.")


def test_nesting_is_limited() -> None:
    """A graph that is nested as deeply as the limit allows is accepted. One level more is refused."""

    def nested(levels: int) -> bytes:
        return b"]" * levels + b"a" * (levels - 1) + b"."

    assert len(places_of(nested(LIMITS.nesting))) == LIMITS.nesting
    with pytest.raises(LimitError, match="nested too deeply"):
        places_of(nested(LIMITS.nesting + 1))


def test_leaves_are_reported_and_not_entered() -> None:
    """A node for which the `leaf` function returns a list is reported, but its arguments are not. Only the values in
    the list are entered, here the states.
    """
    graph = graph_of(pickle.dumps([Reduced(Thing, (1, ["x"])), {"k": 1}, Thing(a=1)], 2))

    def leaf(node: Node) -> list[Any] | None:
        if type(node).__name__ != "Call":
            return None
        return [state for effect in node.effects for state in effect.values]  # type: ignore[attr-defined]

    paths = [place.path for place in find_places(graph.root, leaf, "here")]
    assert paths == [".", "[0]", "[1]", "[1]/k", "[2]", "[2]/.a"]


def test_paths_of_a_long_key_are_bounded() -> None:
    """The total length of all paths is limited. A key that the pickle contains once occurs in the path of every node
    below it.
    """
    key = "k" * 1000

    def nested(depth: int) -> Any:
        obj: Any = [{} for _ in range(2000)]
        for _ in range(depth):
            obj = {key: obj}
        return obj

    assert len(places_of(pickle.dumps(nested(20), 2))) == 2021
    with pytest.raises(LimitError, match="paths"):
        places_of(pickle.dumps(nested(200), 2))


texts = st.text(max_size=4) | st.text(st.sampled_from("a.\\/[](){}<>2e"), max_size=4)
atoms = texts | st.integers(-3, 3) | st.floats() | st.booleans() | st.none() | st.binary(max_size=3)
objects = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(atoms | st.tuples(atoms, atoms), inner, max_size=5)
        | st.dictionaries(texts, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(texts, inner, max_size=3).map(lambda state: Thing(**state))
        | st.builds(lambda state: Stated(state=state), inner)
        | st.frozensets(atoms, max_size=3)
        | st.sets(atoms, max_size=3)
    ),
    max_leaves=12,
)


@given(objects, st.integers(0, 5))
def test_paths_are_unique_and_parse_back(obj: Any, protocol: int) -> None:
    """For any object and protocol, no two places have the same path. Each path is parsed back into the segments of the
    place and its parents.
    """
    places = places_of(pickle.dumps(obj, protocol))
    paths = [place.path for place in places]
    assert len(set(paths)) == len(paths)
    for place in places:
        chain: list[str] = []
        at = place
        while at.parent is not None:
            chain.insert(0, at.segment)
            at = at.parent
        assert parse_path(place.path) == chain
        assert "".join(chain).removeprefix("/") == ("" if place.path == "." else place.path)
