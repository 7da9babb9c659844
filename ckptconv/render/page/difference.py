"""Compute the data of the page of a difference: maps of the tensors that differ, and the size of the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isinf
from typing import TYPE_CHECKING, Any

from ckptconv.errors import count, size
from ckptconv.hints import Command, command_in
from ckptconv.render.difference import FACTS, difference_lines
from ckptconv.render.page import (
    LONGEST,
    MOST,
    bars,
    columns,
    largest,
    listed,
    numbers,
    shape_words,
    typed,
    values_numbers,
    words,
)

if TYPE_CHECKING:
    from ckptconv.inspection.comparison.differences import Difference, OnlyIn, TensorDifference, TensorFacts

_ONLY = ("only in A", "only in B")
#: Words for the largest difference in a tensor. The map can be coloured by them.
_APART = (
    *((1.0, "1 or more"), (0.1, "0.1 to 1"), (1e-2, "0.01 to 0.1"), (1e-3, "0.001 to 0.01")),
    *((1e-4, "0.0001 to 0.001"), (0.0, "less than 0.0001")),
)
_NOT_FINITE, _NO_NUMBER = "NaN or inf", "not known"


def difference_data(difference: Difference, command: Command | None = None, most: int | None = None) -> dict[str, Any]:
    """Return the data of the page of `difference`, with the `most` largest tensors (None: all).

    `command` is the command that found the difference. If it is not None, the page offers it for a selection of
    tensors.
    """
    rows, left_out = largest([*_rows(difference)], most)
    paths = f"{difference.a} ↔ {difference.b}"
    suggestion = difference.suggestion
    return {
        "title": paths,
        "named": False,
        "verdict": {
            "good": difference.same or None,
            "text": next(difference_lines(difference)),
            "danger": difference.dangers,
            "findings": [],
            "remedy": None if command_in(suggestion) is None else str(suggestion),
        },
        "facts": [*_facts(difference), *left_out],
        "lists": [each for each in _lists(rows) if each],
        "maps": ["A and B"] if _alike(rows) else ["A", "B"],
        "commands": [typed("glob", "Compare only this", command, "include")] if command else [],
        "tensors": _columns(rows),
    }


def _alike(rows: Sequence[_Row]) -> bool:
    """Return whether all rows have the same shape and dtype on both sides, so that one map is enough."""
    return all(row.found and not row.found.shape and not row.found.dtype for row in rows)


class _Row:
    """A tensor that differs or that only one side has, and its facts on both sides.

    ``tied_to`` is set only if the tensor is tied to the same path on all sides that have it.
    """

    def __init__(self, a: TensorFacts | None, b: TensorFacts | None, found: TensorDifference | None) -> None:
        self.sides = a, b
        self.found = found
        self.there = [each for each in self.sides if each]
        self.path = self.there[0].path
        self.nbytes = max(side.nbytes for side in self.there)
        homes = {side.tied_to for side in self.there}
        self.tied_to = homes.pop() if len(homes) == 1 else None
        self.values = found.values if found else None

    @property
    def what(self) -> str:
        """The kinds of differences, in words."""
        if self.found is None:
            return _ONLY[self.sides[0] is None]
        differing = [label for name, label in FACTS if getattr(self.found, name) is not None]
        if self.values and self.values.differing:
            differing.append("values")
        return ", ".join(differing) or "not compared"

    @property
    def apart(self) -> str | None:
        """The size of the difference of the values, in words. None if they are equal or were not compared."""
        values = self.values
        if values is None or not values.differing:
            return None
        if values.largest is None:
            return _NO_NUMBER
        if values.not_finite == values.differing:
            return _NOT_FINITE
        return next(word for least, word in _APART if values.largest >= least)

    def pair(self, says: Any) -> str:
        """Return the results of `says` for both sides, joined by an arrow. Equal results are written once."""
        return " → ".join(dict.fromkeys(says(each) for each in self.there))


def _rows(difference: Difference) -> Iterator[_Row]:
    """Yield the rows of `difference`: tensors that differ, then those that only one side has."""
    missing: list[tuple[OnlyIn | None, OnlyIn | None]]
    missing = [*((each, None) for each in difference.only_in_a), *((None, each) for each in difference.only_in_b)]
    for difference_of_tensor in difference.differing:
        if difference_of_tensor.sides:
            yield _Row(*difference_of_tensor.sides, difference_of_tensor)
    for a, b in missing:
        yield _Row(a, b, None)


def _facts(difference: Difference) -> list[tuple[str, str]]:
    """Return the labelled facts of the page."""
    files = zip("AB", (difference.a, difference.b), difference.formats, strict=True)
    same = difference.tensors - len(difference.differing)
    facts = [(label, f"{path} ({format_})") for label, path, format_ in files]
    facts.append(("compared", f"{count(difference.tensors, 'tensor')} of both, {size(difference.nbytes)}"))
    facts.append(("not shown", f"{count(same, 'tensor')} in which nothing differs" if same else ""))
    facts += [("other", f"{o.path}: {o.a or '(nothing)'} → {o.b or '(nothing)'}") for o in difference.others[:MOST]]
    if len(difference.others) > MOST:
        facts.append(("other", f"… {len(difference.others) - MOST:,} more that are not tensors"))
    facts += [("note", note) for note in difference.notes[:MOST]]
    return [(label, text[:LONGEST]) for label, text in facts if text]


def _lists(rows: Sequence[_Row]) -> Iterator[dict[str, Any] | None]:
    """Yield lists of tensors: the largest differences, those with NaN, and those of one side only.

    An empty list is None.
    """
    far = [(row.values.largest, i) for i, row in enumerate(rows) if row.values and row.values.largest]
    far.sort(key=lambda each: (-each[0], each[1]))
    words_of = ["inf" if isinf(number) else f"{number:.3g}" for number, _ in far]
    yield listed("largest max |A − B|", [[i] for _, i in far], words_of)
    for side, word in enumerate("AB"):
        odd = [(i, row.values.not_finite_in[side]) for i, row in enumerate(rows) if row.values]
        yield listed(f"NaN or inf in {word}", [[i] for i, n in odd if n], [f"{n:,}" for _, n in odd if n], bad=True)
    for word in _ONLY:
        yield listed(word, [[i] for i, row in enumerate(rows) if row.what == word])


def _columns(rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the data of the tensors of the page in columns."""
    values = [row.values for row in rows]
    statistics = [row.found.statistics if row.found else None for row in rows]
    has_statistics = any(statistics)
    facts = [
        words("differs", (row.what for row in rows), colour=True),
        words("dtype", (row.pair(lambda each: each.dtype) for row in rows), colour=True),
        words("shape", (row.pair(lambda each: shape_words(each.shape)) for row in rows)),
        words(
            "largest difference",
            (row.apart for row in rows),
            table=False,
            colour=True,
            ordered=[*(word for _, word in _APART), _NOT_FINITE, _NO_NUMBER],
        ),
        *(
            words(label, (_changed(row.found, name) for row in rows), table=False)
            for name, label in FACTS
            if name not in ("dtype", "shape")
        ),
        numbers("differing", (found and found.differing for found in values)),
        numbers("share", (found and 100 * found.differing / max(found.elements, 1) for found in values), "percent"),
        numbers("max |A − B|", (found and found.largest for found in values)),
        numbers("max |A − B| / max |B|", (found and found.relative_to_max for found in values)),
        numbers("max |A − B| / |B|", (found and found.largest_relative for found in values)),
        numbers("not finite", (each.not_finite_in if each and each.not_finite else None for each in values), bad=True),
        *(values_numbers(statistics) if has_statistics else []),
    ]
    return columns(
        rows,
        list(zip(*(row.sides for row in rows), strict=True)) or [(), ()],
        facts,
        histograms=[
            *bars("|A − B|, of elements that differ", (found.histogram if found else None for found in values)),
            *bars("A", (pair[0].histogram if pair and pair[0] else None for pair in statistics)),
            *bars("B", (pair[1].histogram if pair and pair[1] else None for pair in statistics)),
        ],
    )


def _changed(found: TensorDifference | None, name: str) -> str | None:
    """Return the values of the attribute `name` on both sides as text. None if they do not differ."""
    pair = getattr(found, name, None)
    return pair and f"{pair[0]} → {pair[1]}"
