"""Where things stand: every place in a graph has a path of its own, which parses back."""

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
    """An object whose state BUILD sets."""

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
        # keyword arguments: by their names, escaped; one that is called like a position comes second
        (Named(), 4, [".", "(0)", "(a\\/b)", "(call)", "(0)\\2"]),
        # a thing stands at each of its paths; what is in it is listed at the first
        ([SHARED, SHARED], 2, [".", "[0]", "[0]/x", "[1]"]),
        (CYCLE, 2, [".", "[0]"]),
    ],
)
def test_the_forms_of_paths(obj: Any, protocol: int, paths: list[str]) -> None:
    """Each form of the table in ``names``, from pickles that Python writes."""
    assert paths_of(obj, protocol) == paths


@pytest.mark.parametrize(("key", "path"), [(b"k", "[b'k']"), ((b"k", 1), "[(b'k', 1)]")])
def test_keys_that_a_call_makes(key: object, path: str) -> None:
    """Protocol 2 has no opcode for bytes."""
    assert paths_of({key: 1}, 2)[-1] == path


def test_the_result_of_a_call_that_is_called() -> None:
    """Protocol 2 writes keyword arguments as a call of ``functools.partial(...)``; it has a place too."""
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
def test_what_is_set_twice(data: bytes, paths: list[str]) -> None:
    """The second of one segment in one place is numbered, so paths stay unique."""
    assert [place.path for place in places_of(data)] == paths


def test_keys_of_mappings_and_attributes_are_kept() -> None:
    """``key`` is the unescaped string; a position has none."""
    places = places_of(pickle.dumps({"a/b": [1], "t": Thing(rng=2)}, 2))
    assert [(place.path, place.key) for place in places] == [
        (".", None),
        ("a\\/b", "a/b"),
        ("a\\/b[0]", None),
        ("t", "t"),
        ("t/.rng", "rng"),
    ]


def test_doubling_costs_nothing() -> None:
    """A graph with 2**60 paths has 121 places."""
    node: list[Any] = []
    for _ in range(60):
        node = [node, node]
    assert len(paths_of(node)) == 121


def test_arguments_that_calls_share_stand_in_the_first() -> None:
    """A thousand calls with one tuple of a thousand arguments have two thousand places below them, not a million."""
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
def test_what_objects_share_stands_in_the_first(first: bytes, each: bytes, path: str) -> None:
    """A thousand objects with one state of a thousand attributes, or with one dict of keywords."""
    shared = b"}q\1(" + b"".join(b"\x8c\4a%03dN" % i for i in range(1000)) + b"u"
    cls = b"cm\nf\n" + first
    places = places_of(b"\x80\x04](" + cls + shared + each.removeprefix(b"h\1") + (cls + each) * 999 + b"e.")
    assert len(places) == 1 + 1000 + 1000
    assert places[2].path == path


def test_a_state_and_what_stands_elsewhere_too() -> None:
    """The state of an object that stands in the checkpoint itself, as ``vars(args)`` beside ``args``, is listed in both
    places.
    """
    assert [place.path for place in places_of(b"\x80\x02](cm\nf\n)\x81}q\1\x8c\1aNsbh\1e.")] == [
        ".",
        "[0]",
        "[0]/.a",
        "[1]",
        "[1]/a",
    ]


def test_one_key_many_times_is_limited() -> None:
    """A mapping with one long key, said once and read again and again, is refused before there are paths."""
    assert len(places_of(b"\x80\x02}(" + b"X\xe8\3\0\0" + b"a" * 1000 + b"q\1N" + b"h\1N" * 1000 + b"u.")) == 1002
    long = b"X" + (1 << 16).to_bytes(4, "little") + b"a" * (1 << 16)
    with pytest.raises(LimitError, match="paths in the checkpoint are too long"):
        places_of(b"\x80\x02}(" + long + b"q\1N" + b"h\1N" * 1000 + b"u.")


def test_nesting_is_limited() -> None:
    """As deep as the limit goes and no deeper, without recursion."""

    def nested(levels: int) -> bytes:
        return b"]" * levels + b"a" * (levels - 1) + b"."

    assert len(places_of(nested(LIMITS.nesting))) == LIMITS.nesting
    with pytest.raises(LimitError, match="nested too deeply"):
        places_of(nested(LIMITS.nesting + 1))


def test_leaves_are_reported_and_not_entered() -> None:
    """But for the attributes that they hand back; a leaf stands wherever it is used."""
    graph = graph_of(pickle.dumps([Reduced(Thing, (1, ["x"])), {"k": 1}, Thing(a=1)], 2))

    def leaf(node: Node) -> list[Any] | None:
        if type(node).__name__ != "Call":
            return None
        return [state for effect in node.effects for state in effect.values]  # type: ignore[attr-defined]

    paths = [place.path for place in find_places(graph.root, leaf, "here")]
    assert paths == [".", "[0]", "[1]", "[1]/k", "[2]", "[2]/.a"]


def test_paths_of_a_long_key_are_bounded() -> None:
    """A key that the pickle names once stands in the path of everything below it: the
    paths together are bounded, not the file.
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
    """For any object and protocol: no two places have one path, and a path's segments are those of the
    places above it.
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
