"""Texts of sizes, and line breaks."""

from __future__ import annotations

import pytest

from ckptconv.errors import size
from ckptconv.render import text
from ckptconv.render.text import Style, broken, cells, fitting, wrapped


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2_147_483_648, "2.15 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_sizes_are_decimal(nbytes: int, text: str) -> None:
    """Sizes have three digits and decimal units, like those of disks and of the Hub."""
    assert size(nbytes) == text


@pytest.mark.parametrize("word", ["é" * 20_000, "ab.é/" * 4000, "e\u0301" * 10_000, "\u0301" * 5000 + "a b" * 5000])
def test_long_names_are_measured_once(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to break, wrap and cut a name grows with its length. Each character is measured only a few times."""
    measured = 0

    def counted(what: str) -> int:
        nonlocal measured
        measured += len(what)
        return cells(what)

    monkeypatch.setattr(text, "cells", counted)
    for lines in (broken(word, 30, hanging=2), wrapped(word, 30), wrapped(word.replace(" ", "\N{NO-BREAK SPACE}"), 30)):
        assert all(cells(line) <= 30 for line in lines)
        assert len(lines) > 100
    assert cells(fitting(word, 30, Style())) == cells(fitting(word, 30, Style(), end=True)) == 30
    assert measured < 30 * len(word)
