"""Lazy regular expressions, which behave like compiled ones."""

from __future__ import annotations

import re
from unittest import mock

import pytest

from ckptconv.lazy_regex import regex

PATTERN = r"(?P<name>a+)b"


def test_compilation_at_the_first_use() -> None:
    """A lazy expression is compiled once, at its first use."""
    lazy = regex(PATTERN, re.IGNORECASE)
    with mock.patch.object(re, "compile", wraps=re.compile) as compiled:
        assert not compiled.called
        assert [bool(lazy.fullmatch(text)) for text in ("AAB", "ab", "b")] == [True, True, False]
    compiled.assert_called_once_with(PATTERN, re.IGNORECASE)


@pytest.mark.parametrize("name", [name for name in dir(re.Pattern) if not name.startswith("_") and name != "scanner"])
def test_attributes_of_patterns(name: str) -> None:
    """A lazy expression has every public attribute of a pattern in this version of Python, with the same value or
    results.
    """
    lazy, compiled = getattr(regex(PATTERN), name), getattr(re.compile(PATTERN), name)
    if not callable(compiled):
        assert lazy == compiled
        return
    arguments = ("X", "aab ab") if name in ("sub", "subn") else ("aab ab",)
    results = [call(*arguments) for call in (lazy, compiled)]
    assert len({repr([*each] if hasattr(each, "__next__") else each) for each in results}) == 1
