"""Render tensors as a tree of paths and modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.render.table import Row, drawn, fields, footer, named
from ckptconv.render.text import Style, count, size

if TYPE_CHECKING:
    from ckptconv.inspection.summary import TensorSummary
    from ckptconv.render.folding import Branch

__all__ = ["tree_lines"]

_LONGEST_TWICE = 12  # columns of a prefix that is said for the first and for the last block


def tree_lines(
    tensors: Sequence[TensorSummary],
    style: Style,
    *,
    limit: int | None = None,
    height: int | None = None,
    fold: bool = True,
    by_size: bool = False,
) -> Iterator[str]:
    """The tree of `tensors`, `limit` rows of it and no more than fit `height` lines, siblings in their order or
    `by_size`.
    """
    from ckptconv.render.folding import tree_of

    rows = list(_rows(tree_of(tensors, fold=fold and style.width is not None), style, by_size=by_size))
    shown = rows[:limit]
    if style.width is not None:
        yield from drawn(shown, style, len(tensors), every=len(rows), height=height)
        return
    for row in shown:
        name, *rest = row.texts
        between = " " if row.tensors else ", "
        yield f"{' ' * row.indent}{name}  {between.join(text for text in rest if text)}"
    yield from footer(style, len(tensors), drawn=len(shown), rows=len(rows), shown=sum(row.tensors for row in shown))


def _rows(branches: list[Branch], style: Style, *, by_size: bool, indent: int = 0) -> Iterator[Row]:
    for branch in sorted(branches, key=lambda branch: -branch.nbytes) if by_size else branches:
        name = ""
        while branch.tensor is None and not branch.numbers and len(branch.below) == 1:
            name += branch.segment
            (branch,) = branch.below
        name = _label(name, branch)
        if branch.tensor is not None:
            nbytes = branch.times * branch.tensor.nbytes
            texts = (style.text(named(name, branch.tensor)), *fields(branch.tensor, style), size(nbytes))
            yield Row(texts, nbytes, branch.times, indent)
        else:
            texts = (style.text(name), "", count(branch.tensors, "tensor"), "", size(branch.nbytes))
            yield Row(texts, branch.nbytes, 0, indent)
        yield from _rows(branch.below, style, by_size=by_size, indent=indent + 2)


def _label(prefix: str, branch: Branch) -> str:
    """The branch's name behind what its single parents are called; ``layers.0 … layers.31 ×32`` for many."""
    numbers = branch.numbers
    if not numbers:
        return prefix + branch.segment
    times = f" ×{len(numbers):,}"
    if len(numbers) == 2 or numbers[-1] - numbers[0] >= len(numbers) or len(prefix) > _LONGEST_TWICE:
        return prefix + branch.name().rstrip("./") + times
    first, last = (branch.segment.replace(str(numbers[0]), str(n), 1).rstrip("./") for n in (numbers[0], numbers[-1]))
    return f"{prefix}{first} … {prefix}{last}{times}"
