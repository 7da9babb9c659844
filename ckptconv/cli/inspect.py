"""``ckptconv inspect``: show what is in a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

import click

from ckptconv.checkpoint.globs import matches
from ckptconv.cli.commands import Command
from ckptconv.cli.options import PATH, debug_option
from ckptconv.cli.render.facts import facts
from ckptconv.cli.render.table import table_lines
from ckptconv.cli.render.text import Style, cells, natural
from ckptconv.cli.render.tree import tree_lines
from ckptconv.cli.terminal import screen_size, show_error, style_of
from ckptconv.errors import CkptconvError, NoMatchError
from ckptconv.inspection.summary import Summary, TensorSummary, summary_of

__all__ = ["inspect_command"]
_ROWS = 40  # of the tensor table on a terminal, at most


@click.command(
    "inspect",
    cls=Command,
    exits="0 all could be read, 1 one could not, 2 the command makes no sense",
    epilog="Example: ckptconv inspect model.pt --sort size --limit 10",
)
@click.argument("paths", metavar="PATH...", type=PATH, nargs=-1, required=True)
@click.option("--tree", is_flag=True, help="Draw the tensors as a tree of paths and modules.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, sizes in bytes.")
@click.option(
    "--include",
    metavar="GLOB",
    multiple=True,
    help="Show only tensors whose name matches; * crosses dots, a GLOB with / is for paths.",
)
@click.option("--exclude", metavar="GLOB", multiple=True, help="Show no tensors whose name matches.")
@click.option("--sort", type=click.Choice(["name", "size"]), help="Sort the table; else it is in the file's order.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Show N rows of the table, or lines of the tree (on a terminal: what fits the screen, at most {_ROWS}).",
)
@click.option("--all", "everything", is_flag=True, help="Show every tensor in a row of its own.")
@debug_option
def inspect_command(paths: tuple[str, ...], as_json: bool, debug: bool, **view: Any) -> int:
    """Show what is in a checkpoint, without loading it."""
    status = 0
    for i, path in enumerate(paths):
        try:
            summary = summary_of(path)
            selected = _selected(summary, view["include"], view["exclude"], view["sort"])
        except CkptconvError as error:
            if debug:
                raise
            show_error(error)
            status = 1
            continue
        if as_json:
            click.echo(json.dumps({**summary, "tensors": selected}))
        else:
            if i:
                click.echo()
            _show(
                summary,
                selected,
                tree=view["tree"],
                limit=view["limit"],
                everything=view["everything"],
                by_size=view["sort"] == "size",
            )
    return status


def _selected(
    summary: Summary, include: tuple[str, ...], exclude: tuple[str, ...], sort: str | None
) -> list[TensorSummary]:
    """The tensors to show. A glob that matches nothing is a typo."""
    tensors = summary["tensors"]
    if include or exclude:
        tensors = _filtered(summary, include, exclude)
    if sort == "size":
        return sorted(tensors, key=lambda tensor: -tensor["nbytes"])
    return sorted(tensors, key=lambda tensor: natural(tensor["path"])) if sort else tensors


def _filtered(summary: Summary, include: tuple[str, ...], exclude: tuple[str, ...]) -> list[TensorSummary]:
    """The tensors that the globs leave, each under the first of its names that they leave: what
    stands in a module that has two names has two.
    """
    names: dict[str, list[str]] = {}
    for named in chain.from_iterable(module["tensors"] for module in summary["modules"]):
        if named["path"] is not None:
            names.setdefault(named["path"], []).append(named["name"])
    called: list[tuple[TensorSummary, Sequence[str | None]]] = [
        (tensor, names.get(tensor["path"]) or [tensor["name"]]) for tensor in summary["tensors"]
    ]
    for glob in (*include, *exclude):
        if not any(matches(glob, tensor["path"], name) for tensor, each in called for name in each):
            raise NoMatchError(f"no tensor matches {glob!r}", where=summary["path"])

    def is_left(path: str, name: str | None) -> bool:
        taken = not include or any(matches(glob, path, name) for glob in include)
        return taken and not any(matches(glob, path, name) for glob in exclude)

    left = [(tensor, [name for name in each if is_left(tensor["path"], name)]) for tensor, each in called]
    return [{**tensor, "name": each[0]} for tensor, each in left if each]


def _show(
    summary: Summary, tensors: list[TensorSummary], *, tree: bool, limit: int | None, everything: bool, by_size: bool
) -> None:
    style = style_of(sys.stdout)
    lines = list(facts(summary, style, shown=len(tensors)))
    if tensors and limit != 0:
        lines.append("")
    height = None
    if everything:
        limit = None
    elif limit is None and style.width is not None:
        limit, height = _ROWS, screen_size().lines - _rows_of(lines, style) - 1  # which the prompt needs
    draw = tree_lines if tree else table_lines
    table = draw(tensors, style, limit=limit, height=height, fold=not everything, by_size=by_size)
    for line in chain(lines, table):
        click.echo(line, color=style.colour)


def _rows_of(lines: list[str], style: Style) -> int:
    """How much of the screen `lines` take: the terminal breaks what is too long for it."""
    return sum(max(1, -(-cells(click.unstyle(line)) // style.columns)) for line in lines)
