"""Format the difference of two checkpoints: the answer first, then a group for each kind of difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import isinf
from typing import TYPE_CHECKING

from ckptconv.errors import count, size, some
from ckptconv.hints import command_in, option
from ckptconv.render.text import PLAIN, Style, broken, cells, command_lines, fact, padded, wrapped
from ckptconv.render.values import bars, short_number

if TYPE_CHECKING:
    from ckptconv.inspection.comparison.differences import (
        Difference,
        TensorDifference,
        ValueDifference,
    )
    from ckptconv.inspection.values import TensorValues

_SHOWN = 8  # lines of a group, unless all are requested
_INDENT = "    "
_GAP = "  "
#: Facts about tensors: the attribute and its label.
FACTS = (
    ("dtype", "dtype"),
    ("shape", "shape"),
    ("device", "device"),
    ("requires_grad", "requires_grad"),
    ("class_name", "class"),
    ("made_of", "kind"),
)


def difference_lines(
    difference: Difference, style: Style = PLAIN, *, everything: bool = False, names_only: bool = False
) -> Iterator[str]:
    """Yield the answer and the differences.

    Unless `everything` is set, tensors with the same change of a fact are on one line. On a terminal, the number of
    lines in a group is limited too. `names_only` tells that only names were compared.
    """
    what = count(difference.tensors, "name" if names_only else "tensor")
    if difference.same:
        same = f"the same: {what}" + ("" if names_only else f", {size(difference.nbytes)}")
        yield style.paint(style.text(same), "title")
    else:
        values = "" if names_only else _all_values(difference)
        answer = style.text(f"different: {', '.join(_counts(difference))}; {values}{what} in both")
        lines = wrapped(answer, style.columns) if style.width else [answer]
        yield from (style.paint(row, "title") for row in lines)
        if suggestion := command_in(difference.suggestion):
            about = "A and B have no name in common; this compares what they share:"
            if suggestion.name == "convert":
                about = "only the grouping of the tensors differs, by names and shapes; this regroups A like B:"
            yield from fact(style, "note", about)
            yield from command_lines(style, suggestion)
        for label, path, format_ in zip("AB", (difference.a, difference.b), difference.formats, strict=True):
            yield from fact(style, label, f"{path} ({format_})")
    for text in difference.dangers:
        yield from fact(style, "DANGEROUS", text, paint=partial(style.paint, style="bad"))
    most = None if everything or style.width is None else _SHOWN
    rows: list[list[str]]
    for label, missing in (("only in A", difference.only_in_a), ("only in B", difference.only_in_b)):
        rows = [
            [each.path, f"{each.dtype} {list(each.shape)}", f"tied to {each.tied_to}" if each.tied_to else ""]
            for each in missing
        ]
        yield from _group(style, label, count(len(missing), "name"), rows, most)
    for attribute, label in FACTS:
        pairs = [(each, pair) for each in difference.differing if (pair := getattr(each, attribute)) is not None]
        rows = [[each.path, f"{_said(pair[0])} → {_said(pair[1])}", _about_values(each)] for each, pair in pairs]
        alike = rows if everything else _alike(rows)
        if len(alike) == 1 < len(rows):
            where = f"all {count(len(rows), 'tensor')}" if len(rows) == difference.tensors else alike[0][0]
            yield from fact(style, label, ", ".join(filter(None, (f"{alike[0][1]} in {where}", alike[0][2]))))
        else:
            yield from _group(style, label, count(len(pairs), "tensor"), alike, most)
    yield from _value_lines(style, difference, most)
    others = [[each.path, f"{each.a or '(nothing)'} → {each.b or '(nothing)'}"] for each in difference.others]
    yield from _group(
        style,
        "other",
        _not_tensors(len(others)),
        others,
        most,
    )
    for note in difference.notes:
        yield from fact(style, "note", note)


def _alike(rows: list[list[str]]) -> list[list[str]]:
    """Return `rows` with those combined that differ only in the first cell, the name."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells_after in rows:
        names.setdefault(tuple(cells_after), []).append(name)
    return [[some(each, 1), *cells_after] for cells_after, each in names.items()]


def _counts(difference: Difference) -> Iterator[str]:
    """Yield short texts with the numbers of differences."""
    for missing, side in ((difference.only_in_a, "A"), (difference.only_in_b, "B")):
        if missing:
            yield f"{count(len(missing), 'name')} only in {side}"
    for attribute, label in FACTS:
        n = sum(getattr(each, attribute) is not None for each in difference.differing)
        if n:
            yield f"{label} of {count(n, 'tensor')}"
    n = len(_apart(difference))
    if n:
        yield f"values of {count(n, 'tensor')}"
    n = len(_unknown(difference))
    if n:
        yield f"{count(n, 'tensor')} not compared"
    if difference.others:
        yield _not_tensors(len(difference.others))


def _not_tensors(number: int) -> str:
    """Return the number of values that differ and are not tensors, as text."""
    return f"{count(number, 'value')} that {'is not a tensor' if number == 1 else 'are not tensors'}"


def _apart(difference: Difference) -> list[tuple[TensorDifference, ValueDifference]]:
    """Return the tensors whose values differ, each with the difference of its values."""
    return [(each, each.values) for each in difference.differing if each.values and each.values.differing]


def _unknown(difference: Difference) -> list[TensorDifference]:
    """Return the tensors whose values could not be compared and that have no other difference."""
    return [
        each
        for each in difference.differing
        if each.values is None and not any(getattr(each, name) for name, _ in FACTS)
    ]


def _all_values(difference: Difference) -> str:
    """Return a text if all values are equal or within the tolerance although other facts differ.

    Otherwise return "".
    """
    values = [each.values for each in difference.differing]
    if not difference.tensors or any(
        value_difference is None or value_difference.differing for value_difference in values
    ):
        return ""
    return f"all values {'within the tolerance' if difference.near else 'equal'}; "


def _value_lines(style: Style, difference: Difference, most: int | None) -> Iterator[str]:
    """Yield the tensors whose values differ, their statistics if requested, and those that could not be compared."""
    apart = sorted(_apart(difference), key=_rank)
    rows = [[each.path, *_how_far(each, values), bars(values.histogram, style)] for each, values in apart]
    what = f"{count(len(apart), 'tensor')}: elements that differ, max |A - B|, that in % of max |B|, max |A - B| / |B|"
    yield from _group(style, "values", what, rows, most)
    both = [(each.path, *each.statistics) for each in difference.differing if each.statistics]
    statistics = [[path, *_statistics(a, b)] for path, a, b in both if a and b]
    yield from _group(style, "numbers", count(len(statistics), "tensor") + ": A → B", statistics, most)
    unknown = _unknown(difference)
    what = f"of {count(len(unknown), 'tensor')} not compared: elements share bytes with others"
    yield from _group(style, "values", what, [[each.path] for each in unknown], most)


def _rank(pair: tuple[TensorDifference, ValueDifference]) -> tuple[int, bool, float]:
    """Return a sort key: floats, then integers, bits, and states of random generators. The largest come first."""
    difference, values = pair
    kind = 0 if isinstance(values.largest, float) else 1 if values.largest is not None else 2
    return 3 if difference.rng_state else kind, not values.not_finite, -(values.largest or 0)


def _how_far(difference: TensorDifference, values: ValueDifference) -> list[str]:
    """Return the cells of a row: the share of elements that differ, and the size of the differences."""
    if difference.rng_state:
        return ["state differs", "", "", "", ""]
    share = f"{values.differing:,} of {values.elements:,}"
    if values.largest is None or values.largest_relative is None:
        return [share, "bits", "", "", ""]
    sides = " and ".join(side for side, n in zip("AB", values.not_finite_in, strict=True) if n)
    if values.not_finite == values.differing:
        return [share, "", "", "", f"NaN or infinite in {sides}"]
    more = f"{values.not_finite:,} of them NaN or infinite in {sides}" if values.not_finite else ""
    of_max = "–" if values.relative_to_max is None else f"{100 * values.relative_to_max:.3g} %"
    return [share, _number(values.largest), of_max, _number(values.largest_relative), more]


def _statistics(a: TensorValues, b: TensorValues) -> list[str]:
    """Return the cells of a row: statistics of both sides, with counts of NaN and infinities unless these are 0."""
    words = {"nan": "NaN", "inf": "inf"}
    bad = [f"{word} {x:,} → {y:,}" for name, word in words.items() if (x := getattr(a, name)) | (y := getattr(b, name))]
    numbers = [(name, getattr(a, name), getattr(b, name)) for name in ("min", "max", "mean", "std", "norm")]
    return [", ".join(bad), *(f"{name} {short_number(x)} → {short_number(y)}" for name, x, y in numbers)]


def _about_values(difference: TensorDifference) -> str:
    """Return a text about the values of a tensor, for the line of another difference."""
    if difference.values is None:
        return "" if difference.shape else "values not compared"
    if difference.values.differing:
        return "values differ"
    return "values within the tolerance" if difference.values.largest else "values equal"


def _said(value: object) -> str:
    """Return `value` as text. A shape is written as a list."""
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _number(value: float) -> str:
    """Return `value` with few digits."""
    if isinstance(value, int) and abs(value) < 1_000_000:
        return f"{value:,}"
    return "inf" if isinf(value) else f"{float(value):.3g}"


def _group(style: Style, label: str, what: str, rows: Sequence[list[str]], most: int | None) -> Iterator[str]:
    """Yield a group: a fact with `label` and `what`, then a line for each of `rows`, in columns, but at most `most`
    lines.
    """
    if not rows:
        return
    yield from fact(style, label, what)
    shown = rows if most is None or len(rows) <= most + 1 else rows[:most]
    texts = [[style.text(cell) for cell in row] for row in shown]
    widths = [max(cells(row[i]) for row in texts) for i in range(len(texts[0]))]
    for row in texts:
        yield from _row(style, row, widths)
    if len(rows) > len(shown):
        yield style.paint(
            style.text(f"{_INDENT}… {len(rows) - len(shown):,} more (" + option("verbose") + " lists all)"), "quiet"
        )


def _row(style: Style, row: list[str], widths: list[int]) -> Iterator[str]:
    """Yield `row` on one line if it fits the terminal.

    Otherwise yield the name and the other cells on separate lines.
    """
    name, *rest = row
    wide = _GAP.join(padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
    close = _GAP.join(cell for cell in row if cell)
    for line in (wide, close) if style.width is not None else (close,):
        if style.width is None or cells(_INDENT + line) <= style.columns:
            yield _INDENT + line
            return
    for part in broken(name, style.columns - len(_INDENT), hanging=2):
        yield _INDENT + part
    for part in wrapped(_GAP.join(cell for cell in rest if cell), style.columns - 2 * len(_INDENT)):
        yield 2 * _INDENT + part
