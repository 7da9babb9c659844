"""Render what ``inspect`` says of one checkpoint: the facts, then its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckptconv.render.facts import facts
from ckptconv.render.table import table_lines
from ckptconv.render.text import IN_PYTHON, Style, rows_of
from ckptconv.render.tree import tree_lines
from ckptconv.render.values import values_lines

if TYPE_CHECKING:
    from ckptconv.inspection.summary import Summary, TensorSummary

_LINES = 23  # on a terminal, which has 24 and shows a prompt
_LEAST = 9  # of them for the table: its heading, some rows, and what is missing


def summary_lines(
    summary: Summary,
    style: Style = IN_PYTHON,
    *,
    tensors: Sequence[TensorSummary] | None = None,
    tree: bool = False,
    depth: int | None = None,
    limit: int | None = None,
    everything: bool = False,
    by_size: bool = False,
) -> Iterator[str]:
    """`summary` and its `tensors`, if only those are to be shown.

    On a terminal all that takes 24 lines, the prompt among them, unless `limit` rows or `everything` is asked for.
    """
    shown = summary.tensors if tensors is None else tensors
    in_brief = style.width is not None and limit is None and not everything
    draw: Callable[..., Iterator[str]] = partial(table_lines, shown, style, fold=not everything, by_size=by_size)
    if tree or depth:
        draw = partial(tree_lines, shown, style, fold=not everything, by_size=by_size, depth=depth)
    elif summary.has_values:
        draw = partial(values_lines, shown, style)
    said = [*facts(summary, style, shown=len(shown))]
    if not in_brief:
        yield from said
        if shown and limit != 0:
            yield ""
        yield from draw(limit=None if everything else limit)
        return
    least = 0
    if rows_of(said, style) > _LINES - 1 - _LEAST:
        least = min(_LEAST, len([*draw(limit=_LINES)]))
        said = [*facts(summary, style, shown=len(shown), most=_LINES - bool(shown) - least)]
    yield from said
    if shown:
        yield ""
        yield from draw(limit=_LINES, height=_LINES - 1 - rows_of(said, style))
