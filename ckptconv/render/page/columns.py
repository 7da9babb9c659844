"""Pack the tensors of a page in columns. Repeated texts become numbers, so that a page of thousands of tensors is
small.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, TypeVar

from ckptconv.errors import count, size
from ckptconv.hints import Command, Option

if TYPE_CHECKING:
    from ckptconv.inspection.values import Histogram

_T = TypeVar("_T")

MOST = 40  # notes and findings
LONGEST = 1000  # characters of a text that is no name
#: What of values a page shows, in this order.
NUMBERS = ("nan", "inf", "zeros", "min", "max", "mean", "std", "norm")
_BAD = ("nan", "inf")
_LISTED = 12
_DIGITS = 4  # of the numbers that a page shows

#: The shape and the bytes of a tensor in one file, and its path, or that of the tensor it is tied to there; None where
#: that file has none.
Extent = tuple[tuple[int, ...], int, str] | None


def largest(
    things: Sequence[_T], nbytes: Callable[[_T], int], home: Callable[[_T], str], most: int | None
) -> tuple[Sequence[_T], list[tuple[str, str]]]:
    """Return the `most` things with the most bytes in their order, or all, and a fact that says what was left out.

    `nbytes` returns the bytes of a thing, and `home` its path, or that of the tensor that it is tied to. Tied things
    count once.
    """
    if most is None or len(things) <= most:
        return things, []
    by_size = sorted(range(len(things)), key=lambda i: -nbytes(things[i]))
    kept, gone = sorted(by_size[:most]), by_size[most:]
    shown = {home(things[i]) for i in kept}
    sizes = {home(things[i]): nbytes(things[i]) for i in gone if home(things[i]) not in shown}
    left = f"{count(len(gone), 'other tensor')}, {size(sum(sizes.values()))}; a page of its own has all"
    return [things[i] for i in kept], [("left out", left)]


def columns(
    paths: Sequence[str],
    sides: Iterable[Sequence[Extent]],
    tied: Sequence[int],
    facts: Iterable[dict[str, Any] | None],
    *,
    storage: Sequence[int | None] | None = None,
    histograms: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the data of tensors at `paths`, in one file or in each of two.

    Args:
        paths: The path of each tensor.
        sides: For each file the extent of each tensor, or None if the file does not have it.
        tied: For each tensor the number of the tensor that it is tied to, or -1.
        facts: What is known of the tensors; None is left out.
        storage: For each tensor the number of its storage, or None.
        histograms: What :func:`bars` returns.
    """
    return {
        "paths": _front_coded(paths),
        "sides": [_coded(_counted(side)) for side in sides],
        "tied": tied,
        "facts": [fact for fact in facts if fact],
        "storage": storage,
        "histograms": histograms,
    }


def _counted(side: Iterable[Extent]) -> Iterator[tuple[int, int, int] | None]:
    """Yield the bytes and elements of each tensor, and 0 if it is tied to an earlier tensor of the page, else 1."""
    homes: set[str] = set()
    for extent in side:
        yield extent and (extent[1], prod(extent[0]), int(extent[2] not in homes))
        if extent:
            homes.add(extent[2])


def words(
    name: str, values: Iterable[str | None], *, table: bool = True, colour: bool = False, ordered: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Return a fact in words, or None if no tensor has one.

    Args:
        name: The name of the fact.
        values: For each tensor the words, or None.
        table: Whether the table has a column for it. Otherwise it is shown for a selected tensor.
        colour: Whether the page can colour by it.
        ordered: The order of the words, if they have one.
    """
    values = list(values)
    if not any(values):
        return None
    return {"name": name, **_coded(values, ordered), "table": table, "colour": colour, "ordered": bool(ordered)}


def numbers(name: str, values: Iterable[Any], form: str = "number", *, bad: bool = False) -> dict[str, Any] | None:
    """Return a fact that is a number or a pair of numbers, or None if no tensor has one.

    Args:
        name: The name of the fact.
        values: For each tensor the number, or None.
        form: How the page writes the number.
        bad: Whether a number other than 0 is a warning.
    """
    values = list(values)
    if all(value is None for value in values):
        return None
    return {"name": name, "numbers": [_rounded(value) for value in values], "form": form, "table": True, "bad": bad}


def values_numbers(values: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return a fact for each number in `values`, which has the values of each tensor, a pair of such, or None."""

    def of(value: Any, name: str) -> Any:
        if isinstance(value, tuple):
            return tuple(of(each, name) for each in value)
        return getattr(value, name, None)

    return [numbers(name, (of(value, name) for value in values), bad=name in _BAD) for name in NUMBERS]


def bars(title: str, histograms: Iterable[Histogram | None]) -> list[dict[str, Any]]:
    """Return the `histograms` of the tensors under a `title`, or an empty list if there are none."""
    found = list(histograms)
    if not any(found):
        return []
    return [{"title": title, "bars": [each and [_rounded(each.edges[-1]), *each.counts] for each in found]}]


def listed(
    label: str, groups: Sequence[Sequence[int]], says: Sequence[str] = (), *, bad: bool = False
) -> dict[str, Any] | None:
    """Return tensors to show above all others, or None if there are none.

    Args:
        label: What they have in common.
        groups: The numbers of tensors, those of a group together.
        says: A text for each group.
        bad: Whether the list is a warning.
    """
    if not groups:
        return None
    return {"label": label, "groups": groups[:_LISTED], "of": len(groups), "says": says[:_LISTED], "bad": bad}


def typed(kind: str, label: str, command: Command, keyword: str) -> list[str | None]:
    """Return the words of `command` with the option `keyword`, and None as its value.

    The page replaces None by the path of what is selected, or by a glob that matches it; `kind` says which.
    """
    (flag, _), *_ = Option(keyword, "").words()
    return [kind, label, *chain.from_iterable(command.words()), flag, None]


def shape_words(shape: Sequence[int]) -> str:
    """Return `shape` as text."""
    return "×".join(map(str, shape)) or "scalar"


def _coded(values: Iterable[Hashable], ordered: Sequence[Hashable] = ()) -> dict[str, Any]:
    """Return the different `values`, those of `ordered` first, and for each value its number, which is -1 for None."""
    of: dict[Hashable, int] = {word: i for i, word in enumerate(ordered)}
    at = [-1 if value is None else of.setdefault(value, len(of)) for value in values]
    return {"words": [*of], "at": at}


def _front_coded(paths: Sequence[str]) -> list[Any]:
    """Return for each path how many characters it shares with the beginning of the path before it, and the rest."""
    found: list[Any] = []
    before = ""
    for path in paths:
        shared = commonprefix([before, path])  # noqa: RUF071 - of texts, not of paths
        same = len(shared) if shared.isascii() else 0  # the page counts other characters otherwise
        found += [same, path[same:]]
        before = path
    return found


def _rounded(number: Any) -> Any:
    """Return `number` with few digits. Infinities, and integers that JavaScript would round, are texts."""
    if isinstance(number, tuple):
        return [_rounded(each) for each in number]
    if not isinstance(number, float):
        return number if number is None or abs(number) < 2**53 else str(number)
    short = float(f"{number:.{_DIGITS}g}")
    return short if abs(short) != float("inf") else str(short)
