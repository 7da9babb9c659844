"""The table of values: its columns on a terminal and in a pipe, and the bars of histograms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.inspection.summary import TensorSummary
from ckptconv.inspection.values import Histogram
from ckptconv.render.text import Style, cells
from ckptconv.render.values import bars, short_number, values_fact, values_lines

NAME = "encoder.layers.11.attention.self.query.weight"


@pytest.fixture
def tensors(tmp_path: Path) -> tuple[TensorSummary, ...]:
    """Return the rows of tensors: one with a long name, one that is not finite, one without values, one without
    elements, and one with a large integer.
    """
    state = {
        NAME: torch.tensor([-2.0, 1.0, 1.5, 0.0]),
        "bad": torch.tensor([float("nan"), float("-inf"), 7e6]),
        "bits": torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
        "none": torch.ones(0),
        "count": torch.tensor([12_345_678]),
    }
    torch.save(state, tmp_path / "m.pt")
    return ckptconv.inspect(tmp_path / "m.pt", histogram=True).tensors


def test_on_a_wide_terminal(tensors: tuple[TensorSummary, ...]) -> None:
    """A wide terminal shows all columns. Numbers are aligned to the right below their headings, and a dash stands for a
    missing number.
    """
    title, line, first, bad, bits, none, whole, *_ = values_lines(tensors, Style(200))
    assert title.split() == [
        "tensor", "dtype", "nan", "inf", "zeros", "min", "max", "mean", "std", "norm", "histogram",
    ]  # a table  # fmt: skip
    assert set(line) == {"─"} and first.index("-2") + 2 == title.index("min") + 3
    assert first.split()[:10] == [NAME, "float32", "0", "0", "1", "-2", "1.5", "0.125", "1.55", "2.69"]
    assert first.endswith("█") and bad.split()[:6] == ["bad", "float32", "1", "1", "0", "7e+06"]
    assert bits.split() == ["bits", "bits8", *8 * ["-"]] and none.split()[5:] == [*4 * ["-"], "0"]
    assert whole.split()[5:9] == ["1.23e+07", "1.23e+07", "1.23e+07", "-"]


@pytest.mark.parametrize(("width", "columns"), [(40, 3), (60, 5), (80, 8), (100, 8)])
def test_on_a_narrow_terminal(width: int, columns: int, tensors: tuple[TensorSummary, ...]) -> None:
    """A narrow terminal shows fewer columns, and a long name continues in the next line."""
    lines = [*values_lines(tensors, Style(width))]
    headings = lines[0].split()
    assert max(map(cells, lines)) <= width and headings[0] == "tensor" and "nan" in headings
    assert len(headings) == columns and "dtype" not in headings
    assert NAME.startswith(lines[2].split()[0]) and lines[3].startswith("bad") == (width == 100)


def test_without_histograms(tensors: tuple[TensorSummary, ...]) -> None:
    plain = [replace(each, values=each.values and replace(each.values, histogram=None)) for each in tensors]
    assert "histogram" not in next(values_lines(plain, Style(200)))


def test_colours(tensors: tuple[TensorSummary, ...]) -> None:
    """Only values that are not finite are red."""
    lines = [*values_lines(tensors, Style(200, colour=True))]
    assert ["\x1b[31" in line for line in lines[2:7]] == [False, True, False, False, False]
    (fact,) = values_fact(tensors, Style(200, colour=True))
    assert "\x1b[31" in fact and "NaN or inf in 1 of 4 tensors: bad (1 NaN, 1 inf)" in fact


def test_limits_of_rows_and_lines(tensors: tuple[TensorSummary, ...]) -> None:
    """The table has at most `limit` rows or `height` lines. Its last line contains the number of tensors that are left
    out.
    """
    assert [*values_lines(tensors, Style(200), limit=2)][-1].strip().startswith("… 3 more tensors")
    assert len([*values_lines(tensors, Style(200), height=5)]) == 5
    assert next(values_lines(tensors, Style(200), limit=0)).strip().startswith("… 5 more tensors")
    heading, row, *_ = (line.split("\t") for line in values_lines(tensors, Style(), limit=1))
    assert row[0] == NAME and len(row) == len(heading)
    assert " ".join(heading) == "tensor dtype shape device nbytes nan inf zeros min max mean std norm histogram"


def test_bars() -> None:
    """Bars have a negative half only if a value is negative. Without Unicode they are counts."""
    edges = tuple(map(float, range(-16, 17)))
    positive = Histogram(edges, (*16 * [0], 1, 8, *14 * [0]))
    assert bars(positive, Style(80)) == "▁█" + 14 * " " and bars(None, Style(80)) == ""
    assert bars(positive, Style(80, unicode=False)).split() == ["1", "8", *14 * ["0"]]
    assert len(bars(Histogram(edges, (1, *31 * [0])), Style(80))) == 32
    assert [short_number(number) for number in (None, 5, 10**6, 0.12345)] == ["-", "5", "1e+06", "0.123"]
