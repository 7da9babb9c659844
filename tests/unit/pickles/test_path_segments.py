"""Path segments: a path is parsed back into its segments, and different keys have different segments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.pickles.graph import Dict, Tuple
from ckptconv.pickles.paths import escape_segment, key_segment, parse_path

texts = st.text(max_size=8) | st.text(st.sampled_from("ab.\\/[](){}<>'\"2e\n"), max_size=6)
atoms = texts | st.integers() | st.floats() | st.binary(max_size=6) | st.booleans() | st.none()
keys = atoms | st.lists(atoms, max_size=3).map(Tuple)
arguments = st.sampled_from(["/(0)", "/(call)", "/{3}", "/<0>", "/.__state__"]) | texts.map(
    lambda t: "/." + escape_segment(t)
)
segments = st.builds(key_segment, keys, st.integers(0, 9)) | arguments
numbered = st.builds(lambda segment, again: segment + again, segments, st.sampled_from(["", "\\2", "\\10"]))


@pytest.mark.parametrize(
    ("key", "segment"),
    [
        ("module.conv.weight", "/module.conv.weight"),
        ("a/b", "/a\\/b"),
        ("a[0]", "/a\\[0]"),
        ("a\\b", "/a\\\\b"),
        ("", "/\\e"),
        (".", "/\\."),
        (".grad", "/\\.grad"),
        ("(0)", "/\\(0)"),
        ("{0}", "/\\{0}"),
        ("<0>", "/\\<0>"),
        ("[0]", "/\\[0]"),
        ("\\e", "/\\\\e"),
        ("0", "/0"),
        (0, "[0]"),
        (-1, "[-1]"),
        (True, "[True]"),
        (None, "[None]"),
        (1.5, "[1.5]"),
        (float("nan"), "[nan]"),
        (b"a]'", '[b"a]\'"]'),
        (Tuple([1, "a"]), "[(1, 'a')]"),
        (Tuple(["]"]), "[(']',)]"),
        (Tuple([]), "[()]"),
        (Tuple([Tuple([])]), "[<7>]"),
        (Tuple([1] * 9), "[<7>]"),
        (Tuple(["x" * 81]), "[<7>]"),
        (Dict(), "[<7>]"),
        (b"x" * 81, "[<7>]"),
        (1 << 200, "[<7>]"),
    ],
)
def test_segments_of_keys(key: Any, segment: str) -> None:
    """The segment of a string key begins with a slash. Other keys have their literal in brackets, or their position if
    they have no short literal. All segments are parsed back.
    """
    assert key_segment(key, 7) == segment
    assert parse_path("a" + segment) == ["/a", segment]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (".", []),
        ("a", ["/a"]),
        ("[0]", ["[0]"]),
        ("optimizer/state[0]/exp_avg", ["/optimizer", "/state", "[0]", "/exp_avg"]),
        ("state_dict/module.conv.weight", ["/state_dict", "/module.conv.weight"]),
        (".training", ["/.training"]),
        (".__state__[1]", ["/.__state__", "[1]"]),
        ("x/(0)/{2}/<1>[0]", ["/x", "/(0)", "/{2}", "/<1>", "[0]"]),
        ("a\\2/b", ["/a\\2", "/b"]),
        ("[0]\\2[1]", ["[0]\\2", "[1]"]),
        ("a\\/b/c", ["/a\\/b", "/c"]),
        ("\\./\\e", ["/\\.", "/\\e"]),
        ("x[(1, ']', 'it\\'s')]/y", ["/x", "[(1, ']', 'it\\'s')]", "/y"]),
        ("x[b'\\\\']/y", ["/x", "[b'\\\\']", "/y"]),
    ],
)
def test_paths_fall_into_segments(path: str, expected: list[str]) -> None:
    """``parse_path`` returns the segments of a path in order from the root."""
    assert parse_path(path) == expected


def test_an_unclosed_quote_is_not_a_path() -> None:
    """``parse_path`` returns for a quote that is never closed. Its segments do not add up to the path."""
    path = "[" + "'" + "\\a" * 200
    assert "".join(parse_path(path)) != path


@given(st.lists(numbered, min_size=1, max_size=5))
def test_joined_segments_are_parsed_back(made: list[str]) -> None:
    """The segments of any keys, joined to a path, are parsed back into the same segments. So two different positions
    never have the same path.
    """
    path = "".join(made).removeprefix("/")
    assert path != "."
    assert parse_path(path) == made


@given(st.lists(keys, min_size=2, max_size=6))
def test_different_keys_have_different_segments(some: list[Any]) -> None:
    """Keys of different types or values have different segments. A key without a short literal has its position as its
    segment.
    """
    by_segment: dict[str, Any] = {}
    for position, key in enumerate(some):
        plain = tuple(key.items) if isinstance(key, Tuple) else key
        assert repr(by_segment.setdefault(key_segment(key, position), plain)) == repr(plain)
