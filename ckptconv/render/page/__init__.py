"""Render a checkpoint as one HTML page that needs no network: a treemap, a tree, a table, and commands.

``summary`` and ``difference`` compute the data of a page. :func:`page_of` inserts the data into ``page.html``, with
``page.css`` and ``page.js``. Texts from files occur in the page only as JSON, which the script displays. The content
security policy of a page allows only its own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import json
from bisect import bisect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import chain
from math import prod
from string import Template
from typing import TYPE_CHECKING, Any

from ckptconv.errors import count, printable, size
from ckptconv.hints import Command, Option

if TYPE_CHECKING:
    from ckptconv.inspection.values import Histogram

MOST = 40  # notes and findings
LONGEST = 1000  # characters of a text that is not a name
#: The statistics of a tensor that a page displays, in this order.
NUMBERS = ("nan", "inf", "zeros", "min", "max", "mean", "std", "norm")
_BAD = ("nan", "inf")
_LISTED = 6
_DIGITS = 4  # of each number


def hashes() -> tuple[str, str]:
    """Return the hashes of the script and of the style, for the content security policy of a page that includes such
    pages.
    """
    return _sum(_text("page.js")), _sum(_text("page.css"))


def page_of(data: dict[str, Any]) -> str:
    """Return the HTML page for `data`."""
    script, style = _text("page.js"), _text("page.css")
    return Template(_text("page.html")).substitute(
        policy=f"default-src 'none'; script-src '{_sum(script)}'; style-src '{_sum(style)}'; base-uri 'none';"
        " form-action 'none'",
        title=escape(printable(data["title"])),
        style=style,
        script=script,
        data=json.dumps({**data, "tensors": _packed(data["tensors"])}, separators=(",", ":"), allow_nan=False).replace(
            "<", "\\u003c"
        ),
    )


def _packed(columns: dict[str, Any]) -> dict[str, Any]:
    """Return `columns` with a list of one item in place of each list of equal items, and without storages if each
    tensor has its own.
    """

    def packed(fact: dict[str, Any]) -> dict[str, Any]:
        return {key: shortened(value) if key in ("at", "numbers") else value for key, value in fact.items()}

    def shortened(values: list[Any]) -> list[Any]:
        return values[:1] if values.count(values[0]) == len(values) else values

    if not columns["tied"]:
        return columns
    return {
        **columns,
        "sides": [*map(packed, columns["sides"])],
        "facts": [*map(packed, columns["facts"])],
        "tied": shortened(columns["tied"]),
        "storage": "each" if columns["storage"] == [*range(len(columns["tied"]))] else columns["storage"],
    }


@cache
def _text(name: str) -> str:
    """Return the content of the file `name` without indents, empty lines and comments. No text in it has " // "."""
    lines = files(__package__).joinpath(name).read_text("utf-8").splitlines()
    return "\n".join(filter(None, (f" {line}".partition(" // ")[0].strip() for line in lines))) + "\n"


@cache
def _sum(text: str) -> str:
    """Return the hash of `text` in the form that a content security policy uses."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def largest(tensors: Sequence[Any], most: int | None) -> tuple[Sequence[Any], list[tuple[str, str]]]:
    """Return the `most` largest tensors in their order, and a list with a fact about the tensors that are left out.

    If there are not more than `most`, or it is None, return all and an empty list. Tied tensors count once.
    """
    if most is None or len(tensors) <= most:
        return tensors, []
    by_size = sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes)
    kept, gone = sorted(by_size[:most]), by_size[most:]
    shown = {_home(tensors[i]) for i in kept}
    sizes = {home: tensors[i].nbytes for i in gone if (home := _home(tensors[i])) not in shown}
    left = f"{count(len(gone), 'other tensor')}, {size(sum(sizes.values()))}; a page of its own has all"
    return [tensors[i] for i in kept], [("left out", left)]


def _home(tensor: Any) -> str:
    """Return the path of the tensor that `tensor` is tied to, or its own path."""
    path: str = tensor.tied_to or tensor.path
    return path


def columns(
    tensors: Sequence[Any],
    sides: Iterable[Sequence[Any]],
    facts: Iterable[dict[str, Any] | None],
    *,
    storage: Sequence[int | None] | None = None,
    histograms: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the data of `tensors` in columns. Each tensor has a path, and the path of the tensor that it is tied to.

    Args:
        tensors: The tensors of the page.
        sides: For each file, its tensors, with None for those that it does not have.
        facts: The facts about the tensors. None is left out.
        storage: The number of the storage of each tensor, or None.
        histograms: The results of :func:`bars`.
    """
    numbers = {tensor.path: i for i, tensor in enumerate(tensors)}
    return {
        "paths": _front_coded([tensor.path for tensor in tensors]),
        "sides": [_coded(_counted(side)) for side in sides],
        "tied": [numbers.get(tensor.tied_to, -1) for tensor in tensors],
        "facts": [fact for fact in facts if fact],
        "storage": storage,
        "histograms": histograms,
    }


def _counted(side: Iterable[Any]) -> Iterator[tuple[int, int, int] | None]:
    """Yield the bytes and elements of each tensor, and 1.

    Instead of 1, yield 0 for a tensor that is tied to an earlier one.
    """
    homes: set[str] = set()
    for tensor in side:
        yield tensor and (tensor.nbytes, prod(tensor.shape), int(_home(tensor) not in homes))
        if tensor:
            homes.add(_home(tensor))


def words(
    name: str, values: Iterable[str | None], *, table: bool = True, colour: bool = False, ordered: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Return a fact whose values are texts. Return None if no tensor has a value.

    Args:
        name: The name of the fact.
        values: The text for each tensor, or None.
        table: Whether the table has a column for the fact. Otherwise it is displayed for a selected tensor only.
        colour: Whether tensors can be coloured by the fact.
        ordered: The order of the texts, if they have one.
    """
    values = list(values)
    if not any(values):
        return None
    return {"name": name, **_coded(values, ordered), "table": table, "colour": colour, "ordered": bool(ordered)}


def numbers(name: str, values: Iterable[Any], form: str = "number", *, bad: bool = False) -> dict[str, Any] | None:
    """Return a fact whose values are numbers or pairs of numbers. Return None if no tensor has a value.

    Args:
        name: The name of the fact.
        values: The number for each tensor, or None.
        form: How the page writes the number.
        bad: Whether a number other than 0 is a warning.
    """
    values = list(values)
    if all(value is None for value in values):
        return None
    return {"name": name, "numbers": [_rounded(value) for value in values], "form": form, "table": True, "bad": bad}


def values_numbers(values: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return a fact for each statistic in ``NUMBERS``.

    `values` contains the statistics of each tensor, a pair of them, or None.
    """

    def number_of(value: Any, name: str) -> Any:
        if isinstance(value, tuple):
            return tuple(number_of(each, name) for each in value)
        return getattr(value, name, None)

    return [numbers(name, (number_of(value, name) for value in values), bad=name in _BAD) for name in NUMBERS]


def bars(title: str, histograms: Iterable[Histogram | None]) -> list[dict[str, Any]]:
    """Return the `histograms` of the tensors under a `title`. Return an empty list if all are None."""
    histogram_of_each = list(histograms)
    if not any(histogram_of_each):
        return []
    return [{"title": title, "bars": [each and [_rounded(each.edges[-1]), *each.counts] for each in histogram_of_each]}]


def listed(
    label: str, groups: Sequence[Sequence[int]], says: Sequence[str] = (), *, bad: bool = False
) -> dict[str, Any] | None:
    """Return a list of tensors that the page displays above all others. Return None if `groups` is empty.

    Args:
        label: The heading: a property that these tensors have in common.
        groups: The numbers of tensors. Tensors in the same group are displayed together.
        says: A text for each group.
        bad: Whether the list is a warning.
    """
    if not groups:
        return None
    return {"label": label, "groups": groups[:_LISTED], "of": len(groups), "says": says[:_LISTED], "bad": bad}


def typed(kind: str, label: str, command: Command, keyword: str) -> list[str | None]:
    """Return `kind`, `label`, the words of `command`, the flag of the option `keyword`, and None as its value.

    The page replaces None by the path of the selection (`kind` is ``path``), or by a glob for it (``glob``).
    """
    (flag, _), *_ = Option(keyword, "").words()
    return [kind, label, *chain.from_iterable(command.words()), flag, None]


def shape_words(shape: Sequence[int]) -> str:
    """Return `shape` as text, such as "3×4"."""
    return "×".join(map(str, shape)) or "scalar"


def _coded(values: Iterable[Hashable], ordered: Sequence[Hashable] = ()) -> dict[str, Any]:
    """Return the distinct `values`, beginning with `ordered`, and the index of each value among them (-1 for None)."""
    numbers_of: dict[Hashable, int] = {word: i for i, word in enumerate(ordered)}
    at = [-1 if value is None else numbers_of.setdefault(value, len(numbers_of)) for value in values]
    return {"words": [*numbers_of], "at": at}


def _front_coded(paths: Sequence[str]) -> list[Any]:
    """Return two items for each path: the length of the prefix common with the previous path, and the rest."""
    coded: list[Any] = []
    before = ""
    for path in paths:
        longest = min(len(before), len(path))
        same = bisect(range(1, longest + 1), False, key=lambda n: path[:n] != before[:n])
        coded += [same, path[same:]] if path.isascii() else [0, path]  # JavaScript counts other characters differently
        before = path
    return coded


def _rounded(number: Any) -> Any:
    """Return `number` with four digits. Infinities, and integers that JavaScript would round, become texts."""
    if isinstance(number, tuple):
        return [_rounded(each) for each in number]
    if not isinstance(number, float):
        return number if number is None or abs(number) < 2**53 else str(number)
    short = float(f"{number:.{_DIGITS}g}")
    if abs(short) == float("inf"):
        return str(short)
    return int(short) if short.is_integer() and 0 < abs(short) < 2**53 else short
