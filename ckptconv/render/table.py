"""Format tensors as a table or as a tree, for a terminal or as lines for a program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import count, size
from ckptconv.hints import option
from ckptconv.pickles.paths import key_segment
from ckptconv.render.text import Style, broken, cells, padded, wrapped

if TYPE_CHECKING:
    from ckptconv.inspection.summary import TensorSummary
    from ckptconv.render.folding import Branch

_GAP = "  "
_HEADINGS = ("tensor", "dtype", "shape", "device", "size")
_NARROW = 70  # columns; on a narrower terminal there are no bars
_LEAST_NAME = 16  # columns of a name; other columns are left out to make space for it
_LONGEST_NAME = 300  # characters of a name, so that none fills the screen
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST_TWICE = 12  # columns of a prefix that is repeated for the first and the last block


class Row(NamedTuple):
    """A row of the table or tree.

    Attributes:
        texts: The texts under the headings.
        nbytes: The bytes of its tensors.
        tensors: The number of tensors that the row stands for.
        indent: The indent of the name, in columns.
    """

    texts: tuple[str, ...]
    nbytes: int
    tensors: int
    indent: int = 0


def fields(tensor: TensorSummary, style: Style) -> tuple[str, str, str]:
    """Return the dtype, shape and device of `tensor` as texts."""
    kind = "" if tensor.kind == "strided" else f" ({tensor.kind})"
    shape = "–" if 0 in tensor.shape else "×".join(map(str, tensor.shape)) or "scalar"
    return style.text(tensor.dtype + kind), style.text(shape), style.text(tensor.device or "-")


def table_lines(
    tensors: Sequence[TensorSummary],
    style: Style,
    *,
    limit: int | None = None,
    height: int | None = None,
    fold: bool = True,
    by_size: bool = False,
) -> Iterator[str]:
    """Yield the table of `tensors`: at most `limit` rows, and as many as fit into `height` lines.

    With `fold`, repeated blocks become one row on a terminal. Rows are in the order of the file, or with `by_size` the
    largest first. Tensors of pickled modules have their names in the module's state dict.
    """
    tensors = _as_in_state_dicts(tensors)
    if style.width is None:
        for tensor in tensors[:limit]:
            yield "\t".join((style.text(named(tensor.path, tensor)), *fields(tensor, style), str(tensor.nbytes)))
        n = len(tensors[:limit])
        yield from footer(style, len(tensors), drawn=n, rows=len(tensors), shown=n)
        return
    from ckptconv.render.folding import leaves, tree_of  # only terminals need it

    every = list(leaves(tree_of(tensors, fold=fold)))
    every.sort(key=lambda leaf: leaf[1].first)
    if by_size:
        every.sort(key=lambda leaf: -leaf[1].times * leaf[1].tensor.nbytes if leaf[1].tensor else 0)
    rows = []
    for name, leaf in every[:limit]:
        assert leaf.tensor is not None
        nbytes = leaf.times * leaf.tensor.nbytes
        name = named(name, leaf.tensor) + (f" ×{leaf.times:,}" if leaf.times > 1 else "")
        rows.append(Row((style.text(name), *fields(leaf.tensor, style), size(nbytes)), nbytes, leaf.times))
    yield from drawn(rows, style, len(tensors), every=len(every), height=height)


def _as_in_state_dicts(tensors: Sequence[TensorSummary]) -> Sequence[TensorSummary]:
    """Return `tensors`. Those of pickled modules get the paths that they would have in a state dict."""
    new = {
        tensor.path: ("" if tensor.module == "." else tensor.module) + key_segment(tensor.name, 0)
        for tensor in tensors
        if tensor.module is not None and tensor.name is not None
    }
    if not new:
        return tensors
    return [
        replace(
            tensor,
            path=new.get(tensor.path, tensor.path).removeprefix("/"),
            tied_to=new.get(tensor.tied_to or "", tensor.tied_to),
        )
        for tensor in tensors
    ]


def named(name: str, tensor: TensorSummary) -> str:
    """Return `name`, followed by the path of the tensor that `tensor` is tied to, if it is tied."""
    return f"{name} = {tensor.tied_to}" if tensor.tied_to else name


def footer(style: Style, tensors: int, *, drawn: int, rows: int, shown: int, folded: bool = True) -> Iterator[str]:
    """Yield the line below a table. It tells what is left out, or that rows are folded.

    Yield nothing if neither applies.

    Args:
        style: The style of the output.
        tensors: The number of all tensors.
        drawn: The number of rows that are printed.
        rows: The number of all rows.
        shown: The number of tensors that the printed rows stand for.
        folded: Whether a row can stand for several tensors.
    """
    if rows > drawn:
        left = count(tensors - shown, "more tensor")
        rest = left if rows == tensors else f"{count(rows - drawn, 'more row')}, {left}"
        for line in wrapped(f"{style.text('…')} {rest} ({option('all')} shows them)", style.columns - 2):
            yield style.paint("  " + line, "quiet")
    elif shown > drawn and folded:
        stands = style.text(f"the shape of one ×N, the size of all ({option('all')} unfolds)")
        for line in wrapped(f"{count(drawn, 'row')}, {count(shown, 'tensor')}: {stands}", style.columns - 2):
            yield style.paint("  " + line, "quiet")


# Drawing


def drawn(
    rows: list[Row], style: Style, tensors: int, *, every: int, height: int | None, folded: bool = True
) -> list[str]:
    """Return the lines of the table: headings, `rows` and the footer.

    If `height` is given, there are at most so many lines.

    Args:
        rows: The first rows.
        style: The style of the output.
        tensors: The number of all tensors.
        every: The number of all rows.
        height: The largest number of lines, or None.
        folded: Whether a row can stand for several tensors.
    """
    n = len(rows)
    while True:
        shown = sum(row.tensors for row in rows[:n])
        lines = [*_draw(rows[:n], style), *footer(style, tensors, drawn=n, rows=every, shown=shown, folded=folded)]
        if height is None or len(lines) <= height or n <= 1:
            return lines
        n -= 1


def _draw(rows: list[Row], style: Style) -> Iterator[str]:
    """Yield `rows` under headings, not wider than the terminal.

    A name that is too long is continued on the next line. If the terminal is wide enough, each row has a bar for its
    bytes.
    """
    if not rows:
        return
    table = [row.texts for row in rows]
    widths = [max(map(cells, column)) for column in zip(_HEADINGS, *table, strict=True)]
    widths[0] = max(cells(_cut(row.texts[0])) + row.indent for row in rows)
    widths[0] = max(widths[0], len(_HEADINGS[0]))
    columns, bar = _fit(widths, style.columns, devices={row[3] for row in table} - {"-", ""} != set())
    yield style.paint(_GAP.join(padded(_HEADINGS[i], columns[i], right=i == 4) for i in columns).rstrip(), "title")
    width = sum(columns.values()) + len(_GAP) * (len(columns) - 1) + (bar and bar + len(_GAP))
    yield style.paint(style.text("─") * width, "quiet")
    largest = max(row.nbytes for row in rows)
    for row in rows:
        yield from _drawn(row, columns, _bar(row.nbytes, largest, bar, style) if bar else "", style)


def _fit(widths: list[int], width: int, *, devices: bool) -> tuple[dict[int, int], int]:
    """Return the widths of the columns that fit into `width`, by their index, and the width of the bar (0: no bar).

    `widths` are the widths that the columns need. Without `devices`, the column for devices is left out.
    """
    most = max(12, width // 5)
    columns = {i: min(wanted, most) if 0 < i < 4 else wanted for i, wanted in enumerate(widths)}
    if not devices:
        del columns[3]
    bar = 0 if width < _NARROW else max(8, min(24, 8 + (width - 80) // 8))
    for spare in (1, 3, 2, None):
        room = width - sum(columns.values()) + columns[0] - len(_GAP) * (len(columns) - 1) - (bar and bar + len(_GAP))
        if room >= min(_LEAST_NAME, columns[0]) or spare is None:
            break
        bar = 0
        columns.pop(spare, None)
    columns[0] = min(columns[0], room)
    return columns, bar


def _drawn(row: Row, columns: dict[int, int], bar: str, style: Style) -> Iterator[str]:
    """Yield the lines of `row`. Cells that are too wide are continued on further lines."""
    indent = min(row.indent, columns[0] // 2)
    lines = {i: broken(row.texts[i], width) for i, width in columns.items() if i}
    lines[0] = [" " * indent + line for line in broken(_cut(row.texts[0]), columns[0] - indent, hanging=2)]
    kind = re.match(r"(?P<whole>q?u?int|bool)|(?P<byte>float[48])|(?P<half>b?float16)", row.texts[1])
    styles = {1: kind and kind.lastgroup, 3: "device" if row.texts[3] not in ("cpu", "-") else None}
    for at in range(max(map(len, lines.values()))):
        line = ""
        for i, width in columns.items():
            text = padded(lines[i][at] if at < len(lines[i]) else "", width, right=i == 4)
            line += (_GAP if i else "") + (style.paint(text, styles.get(i)) if text.strip() else text)
        yield (line + (_GAP + style.paint(bar, "quiet") if bar and not at else "")).rstrip()


def _cut(name: str) -> str:
    """Return `name`. If it is longer than 300 characters, its middle is left out."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}...{name[-half:]}"


def _bar(nbytes: int, largest: int, width: int, style: Style) -> str:
    """Return a bar for `nbytes`. It is `width` columns long for `largest`.

    With Unicode its length has steps of an eighth of a column, otherwise of a column.
    """
    if not style.unicode:
        return "#" * round(width * nbytes / max(1, largest))
    full, eighths = divmod(round(8 * width * nbytes / max(1, largest)), 8)
    return (_EIGHTHS[8] * full + _EIGHTHS[eighths]).rstrip()


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
    """Yield the tree of `tensors`: at most `limit` rows and `depth` levels, and as many rows as fit into `height`
    lines.

    On a terminal, repeated blocks become one branch if `fold` is set, and each branch has its share of all bytes.
    Siblings are in the order of the file, or with `by_size` the largest first.
    """
    from ckptconv.render.folding import tree_of

    branches = tree_of(tensors, fold=fold and style.width is not None)
    nbytes = sum(branch.nbytes for branch in branches) if style.width is not None else 0
    rows = list(_rows(branches, style, by_size=by_size, whole=nbytes, depth=depth))
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
    """Yield a row for each of `branches`, and for `depth` levels below them (None: all levels).

    A branch with a single branch below it has one row together with that branch.

    Names are indented by `indent`. Each row has its share of `whole`, the bytes of all tensors, unless `whole` is 0.
    """
    for branch in sorted(branches, key=lambda branch: -branch.nbytes) if by_size else branches:
        name = ""
        while branch.tensor is None and not branch.numbers and len(branch.below) == 1:
            name += branch.segment
            (branch,) = branch.below
        name = _label(name, branch)
        tensor = branch.tensor
        nbytes = branch.times * tensor.nbytes if tensor is not None else branch.nbytes
        text = size(nbytes)
        if whole and not (tensor and tensor.tied_to):
            share = 100 * nbytes / whole
            text += f"{'<1' if 0 < share < 0.5 else f'{share:.0f}':>4}%"
        if tensor is not None:
            yield Row((style.text(named(name, tensor)), *fields(tensor, style), text), nbytes, branch.times, indent)
        else:
            counted = branch.tensors if depth == 1 else 0
            yield Row((style.text(name), "", count(branch.tensors, "tensor"), "", text), nbytes, counted, indent)
        if depth != 1:
            less = depth and depth - 1
            yield from _rows(branch.below, style, by_size=by_size, whole=whole, depth=less, indent=indent + 2)


def _label(prefix: str, branch: Branch) -> str:
    """Return the name of `branch` after the names `prefix` of its parents.

    Several siblings: ``layers.0 … layers.31 ×32``.
    """
    numbers = branch.numbers
    if not numbers:
        return prefix + branch.segment
    times = f" ×{len(numbers):,}"
    if len(numbers) == 2 or numbers[-1] - numbers[0] >= len(numbers) or len(prefix) > _LONGEST_TWICE:
        return prefix + branch.name().rstrip("./") + times
    first, last = (branch.segment.replace(str(numbers[0]), str(n), 1).rstrip("./") for n in (numbers[0], numbers[-1]))
    return f"{prefix}{first} … {prefix}{last}{times}"
