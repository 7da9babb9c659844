"""Render tensors as a tree of paths and modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import count, size
from ckptconv.render.table import Row, drawn, fields, footer, named
from ckptconv.render.text import Style

if TYPE_CHECKING:
    from ckptconv.inspection.summary import TensorSummary
    from ckptconv.render.folding import Branch

_LONGEST_TWICE = 12  # columns of a prefix that is said for the first and for the last block


def tree_lines(
    tensors: Sequence[TensorSummary],
    style: Style,
    *,
    limit: int | None = None,
    height: int | None = None,
    fold: bool = True,
    by_size: bool = False,
    depth: int | None = None,
) -> Iterator[str]:
    """The tree of `tensors`, `limit` rows of it and no more than fit `height` lines, siblings in their order or
    `by_size`; `depth` levels of it. A terminal sees the share of each in all bytes.
    """
    from ckptconv.render.folding import tree_of

    branches = tree_of(tensors, fold=fold and style.width is not None)
    whole = sum(branch.nbytes for branch in branches) if style.width is not None else 0
    rows = list(_rows(branches, style, by_size=by_size, whole=whole, depth=depth))
    shown = rows[:limit]
    if style.width is not None:
        yield from drawn(shown, style, len(tensors), every=len(rows), height=height, folded=depth is None)
        return
    for row in shown:
        name, *rest = row.texts
        between = " " if row.texts[1] else ", "
        yield f"{' ' * row.indent}{name}  {between.join(text for text in rest if text)}"
    yield from footer(
        style,
        len(tensors),
        drawn=len(shown),
        rows=len(rows),
        shown=sum(row.tensors for row in shown),
        folded=depth is None,
    )


def _rows(
    branches: list[Branch], style: Style, *, by_size: bool, whole: int, depth: int | None, indent: int = 0
) -> Iterator[Row]:
    """A row for each of `branches`, and of `depth` levels below them; sizes with their share in the `whole`, if any."""
    for branch in sorted(branches, key=lambda branch: -branch.nbytes) if by_size else branches:
        name = ""
        while branch.tensor is None and not branch.numbers and len(branch.below) == 1:
            name += branch.segment
            (branch,) = branch.below
        name = _label(name, branch)
        tensor = branch.tensor
        nbytes = branch.times * tensor.nbytes if tensor is not None else branch.nbytes
        said = size(nbytes) + (_share(nbytes, whole) if whole and not (tensor and tensor.tied_to) else "")
        if tensor is not None:
            yield Row((style.text(named(name, tensor)), *fields(tensor, style), said), nbytes, branch.times, indent)
        else:
            counted = branch.tensors if depth == 1 else 0
            yield Row((style.text(name), "", count(branch.tensors, "tensor"), "", said), nbytes, counted, indent)
        if depth != 1:
            less = depth and depth - 1
            yield from _rows(branch.below, style, by_size=by_size, whole=whole, depth=less, indent=indent + 2)


def _share(nbytes: int, whole: int) -> str:
    """What part of the `whole` these bytes are, in per cent."""
    share = 100 * nbytes / whole
    return f"{'<1' if 0 < share < 0.5 else f'{share:.0f}':>4}%"


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
