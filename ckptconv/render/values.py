"""Format the statistics of tensors (NaN, infinities, extremes, means) as a table, or as lines for a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import count
from ckptconv.render.table import fields, footer, named
from ckptconv.render.text import Style, broken, cells, fact, first_of, padded

if TYPE_CHECKING:
    from ckptconv.inspection.summary import TensorSummary
    from ckptconv.inspection.values import Histogram, TensorValues

_GAP = "  "
_NUMBERS = ("nan", "inf", "zeros", "min", "max", "mean", "std", "norm")
_HEADINGS = ("tensor", "dtype", *_NUMBERS, "histogram")
_LAST_TO_STAY = (0, 2, 5, 6, 7, 8, 3, 4, 10, 9, 1)  # columns; the last one is the first to be left out
_LEAST_NAME = 24  # columns
_SHOWN = 3
_BARS = "▁▂▃▄▅▆▇█"


def not_finite(tensors: Sequence[TensorSummary], kinds: Sequence[str] = ("nan", "inf")) -> list[TensorSummary]:
    """Return the `tensors` that contain elements of any of `kinds`. Tied tensors count once."""
    return [each for each in _untied(tensors) if each.values and any(getattr(each.values, kind) for kind in kinds)]


def _untied(tensors: Sequence[TensorSummary]) -> list[TensorSummary]:
    """Return `tensors` without those that are tied to an earlier one in the list."""
    first: dict[str, TensorSummary] = {}
    for tensor in tensors:
        first.setdefault(tensor.tied_to or tensor.path, tensor)
    return [*first.values()]


def values_fact(tensors: Sequence[TensorSummary], style: Style) -> Iterator[str]:
    """Yield a fact with the number of `tensors` that contain NaN or infinities, and the first of them."""
    bad = not_finite(tensors)
    read = sum(tensor.values is not None for tensor in _untied(tensors))
    if not bad:
        yield from fact(style, "numbers", f"all finite in {count(read, 'tensor')}")
        return
    says = [f"{tensor.path} ({counted_words(tensor.values)})" for tensor in bad if tensor.values]
    text = f"NaN or inf in {len(bad):,} of {count(read, 'tensor')}: {', '.join(first_of(says, _SHOWN))}"
    yield from fact(style, "numbers", text, paint=lambda line: style.paint(line, "bad"))


def counted_words(values: TensorValues) -> str:
    """Return the counts of NaN and infinities as text, without those that are 0."""
    return ", ".join(f"{n:,} {word}" for n, word in ((values.nan, "NaN"), (values.inf, "inf")) if n)


def values_lines(
    tensors: Sequence[TensorSummary], style: Style, *, limit: int | None = None, height: int | None = None
) -> Iterator[str]:
    """Yield the table of `tensors` with their statistics: at most `limit` rows, and as many as fit `height` lines."""
    if style.width is None:
        has_histogram = any(map(_histogram, tensors))
        if tensors[:limit]:
            last = _HEADINGS[-1:] if has_histogram else ()
            yield "\t".join(("tensor", "dtype", "shape", "device", "nbytes", *_NUMBERS, *last))
        for tensor in tensors[:limit]:
            exact = (getattr(tensor.values, name, None) for name in _NUMBERS)
            numbers = ["-" if number is None else str(number) for number in exact]
            words = (style.text(named(tensor.path, tensor)), *fields(tensor, style), str(tensor.nbytes), *numbers)
            yield "\t".join((*words, *([bars(_histogram(tensor), style)] if has_histogram else ())))
        n = len(tensors[:limit])
        yield from footer(style, len(tensors), drawn=n, rows=len(tensors), shown=n)
        return
    rows = [
        (
            style.text(named(tensor.path, tensor)),
            fields(tensor, style)[0],
            *(short_number(getattr(tensor.values, name, None)) for name in _NUMBERS),
            bars(_histogram(tensor), style),
        )
        for tensor in tensors[:limit]
    ]
    columns = _fit(rows, style, histogram=any(map(_histogram, tensors)))
    lines = [*_drawn(rows, columns, tensors, style)]
    n = len(rows)
    while height is not None and n > 1 and sum(map(len, lines[:n])) + 3 > height:
        n -= 1
    if rows:
        yield style.paint(_GAP.join(padded(_HEADINGS[i], w, right=i > 1) for i, w in columns.items()).rstrip(), "title")
        yield style.paint(style.text("─") * (sum(columns.values()) + len(_GAP) * (len(columns) - 1)), "quiet")
    for row in lines[:n]:
        yield from row
    yield from footer(style, len(tensors), drawn=n, rows=len(tensors), shown=n)


def _histogram(tensor: TensorSummary) -> Histogram | None:
    """Return the histogram of `tensor`, or None if it was not computed."""
    return tensor.values.histogram if tensor.values else None


def _fit(rows: Sequence[tuple[str, ...]], style: Style, *, histogram: bool) -> dict[int, int]:
    """Return the widths of the columns that fit the terminal, by their index. Less important columns are left out."""
    widths = {i: max(map(cells, column)) for i, column in enumerate(zip(_HEADINGS, *rows, strict=True))}
    if not histogram:
        del widths[len(_HEADINGS) - 1]
    for spare in reversed(_LAST_TO_STAY):
        room = style.columns - sum(widths[i] + len(_GAP) for i in widths if i)
        if room >= min(_LEAST_NAME, widths[0]) or len(widths) <= 2:
            break
        widths.pop(spare, None)
    widths[0] = max(min(widths[0], room), len(_HEADINGS[0]))
    return widths


def _drawn(
    rows: Sequence[tuple[str, ...]], columns: dict[int, int], tensors: Sequence[TensorSummary], style: Style
) -> Iterator[list[str]]:
    """Yield the lines of each row. A name that is too long is continued on the next line."""
    for row, tensor in zip(rows, tensors, strict=False):
        names = broken(row[0], columns[0], hanging=2)
        rest = "".join(_GAP + padded(row[i], width, right=i > 1) for i, width in columns.items() if i)
        first = (padded(names[0], columns[0]) + rest).rstrip()
        yield [style.paint(first, "bad" if not_finite([tensor]) else None), *names[1:]]


def short_number(number: float | int | None) -> str:
    """Return `number` as text with three digits. Small integers are exact. Return ``-`` for None."""
    if number is None:
        return "-"
    return f"{number:.3g}" if isinstance(number, float) or abs(number) >= 10**6 else str(number)


def bars(histogram: Histogram | None, style: Style) -> str:
    """Return `histogram` as a line of bars, from the most negative numbers to the largest. Return "" for None.

    The half for negative numbers is left out if it is empty. Without Unicode, the line contains the counts as numbers.
    """
    if histogram is None:
        return ""
    counts = histogram.counts
    half = len(counts) // 2
    shown = counts if any(counts[:half]) else counts[half:]
    most = max(*shown, 1)
    if not style.unicode:
        return " ".join(map(str, shown))
    return "".join(" " if not n else _BARS[n * (len(_BARS) - 1) // most] for n in shown)
