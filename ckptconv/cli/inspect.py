"""The command ``ckptconv inspect``, which shows the contents of checkpoints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import click

from ckptconv.checkpoint.tensor_info import matches
from ckptconv.checkpoint.torch_versions import asked_version
from ckptconv.cli.commands import PATH, Command, PageFile, debug_option, download_option, page_options, torch_option
from ckptconv.cli.terminal import progress_bar, show_error, style_of, warn_of_flaws
from ckptconv.errors import CkptconvError, InputError, NoMatchError, UsageError
from ckptconv.hints import option
from ckptconv.inspection.summary import Summary, TensorSummary, summary_of
from ckptconv.render.json_views import unread_as_dict
from ckptconv.render.listing import Line, line_of, listing_lines, unread_line
from ckptconv.render.summary import summary_lines
from ckptconv.render.text import Style, natural
from ckptconv.render.values import not_finite
from ckptconv.stores import is_folder, locate


@click.command(
    "inspect",
    cls=Command,
    exits="0 all could be read, 1 one could not or --fail-on found something, 2 wrong usage",
    epilog="Example: ckptconv inspect model.pt --sort size --limit 10",
)
@click.argument("paths", metavar="PATH...", type=PATH, nargs=-1, required=True)
@click.option("--tree", is_flag=True, help="Draw the tensors as a tree of paths and modules.")
@click.option("--depth", metavar="N", type=click.IntRange(min=1), help="Draw N levels of the tree.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with sizes in bytes.")
@click.option(
    "--include",
    metavar="GLOB",
    multiple=True,
    help="Only show tensors whose name matches. * also matches dots. A GLOB with / is matched against paths.",
)
@click.option("--exclude", metavar="GLOB", multiple=True, help="Do not show tensors whose name matches.")
@click.option("--sort", type=click.Choice(["name", "size"]), help="Sort the table. Default: the order of the file.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    help="Show at most N rows of the table or lines of the tree. Default on a terminal: as many as fit in 24 lines.",
)
@click.option("--all", "everything", is_flag=True, help="Show every tensor, one per row.")
@page_options("a map and a table of the tensors")
@click.option(
    "--values", is_flag=True, help="Read all tensors, and show NaN, inf, zeros, min, max, mean, std and norm of each."
)
@click.option("--histogram", is_flag=True, help="Like --values, with a histogram of 32 bins for each tensor.")
@click.option(
    "--fail-on",
    metavar="nan,inf",
    help="Exit with status 1 if a tensor contains NaN (nan), an infinity (inf), or either (nan,inf). Reads the values.",
)
@torch_option
@download_option
@debug_option
def inspect_command(
    paths: tuple[str, ...],
    as_json: bool,
    html: str | None,
    opens: bool,
    force: bool,
    debug: bool,
    **view: Any,
) -> int:
    """Show what is in checkpoints, without loading them.

    For a folder, or for more than two files, it prints a table with one line for each checkpoint. A set of shards, and
    a folder of torch.distributed.checkpoint or of DeepSpeed ZeRO, count as one checkpoint.
    """
    style = style_of(sys.stdout)
    every = list(chain.from_iterable(map(_checkpoints, paths)))
    page = PageFile.asked_for(html, len(every), opens=opens, force=force)
    kinds = _kinds_of(view["fail_on"])
    wanted = None
    if view["values"] or view["histogram"] or kinds:
        wanted = partial(_selected, include=view["include"], exclude=view["exclude"], sort=None)
    how = {name: view[name] for name in ("histogram", "download", "torch")}
    asked_version(view["torch"])
    about_tensors = as_json or view["tree"] or view["include"] or view["exclude"] or wanted
    lines: list[Line] | None = [] if len(every) > min(2, len(paths)) and not about_tensors else None
    status = 0
    for i, path in enumerate(every):
        try:
            summary = summary_of(path, wanted, **how, progress=partial(progress_bar, quiet=as_json))
            if lines is not None:
                lines.append(line_of(summary))
                continue
            selected = _selected(summary, view["include"], view["exclude"], view["sort"])
        except CkptconvError as error:
            if debug:
                raise
            show_error(error)
            status = 1
            if as_json:
                click.echo(json.dumps(unread_as_dict(path, error)))
            if lines is not None:
                lines.append(unread_line(path, os.path.getsize(path) if os.path.isfile(path) else None))
            continue
        status = max(status, bool(kinds and not_finite(selected, kinds)))
        if page:
            from ckptconv.render.page.summary import summary_data  # for pages alone

            page.write(summary_data(replace(summary, tensors=tuple(selected))))
        elif as_json:
            click.echo(json.dumps(replace(summary, tensors=tuple(selected)).as_dict()))
        else:
            if i:
                click.echo()
            shown = {name: view[name] for name in ("tree", "depth", "limit", "everything")}
            _show(summary_lines(summary, style, tensors=selected, by_size=view["sort"] == "size", **shown), style)
    if lines is not None:
        _show_listing(lines, view, style)
    if not as_json:
        warn_of_flaws(view["torch"])
    return status


def _show_listing(lines: list[Line], view: dict[str, Any], style: Style) -> None:
    """Print a table with a line for each checkpoint."""
    if view["sort"]:
        lines.sort(key=lambda line: (-(line.nbytes or 0),) if view["sort"] == "size" else natural(line.path))
    _show(listing_lines(lines, style, limit=view["limit"], everything=view["everything"]), style)


def _kinds_of(fail_on: str | None) -> list[str]:
    """Return the words in the value of ``--fail-on``. Raises UsageError for any other word than nan and inf."""
    kinds = [] if fail_on is None else fail_on.lower().split(",")
    if not {"nan", "inf"}.issuperset(kinds):
        raise UsageError(option("fail_on", fail_on) + " is not valid", expected="nan, inf, or nan,inf")
    return kinds


def _checkpoints(path: str) -> list[str]:
    """Return the checkpoints at `path`: the path itself, or the checkpoints in the folder.

    A set of shards in its own folder, and the rank files of DeepSpeed, are named by the folder. Other rank files are
    named by their pattern. A path that cannot be listed is returned unchanged.
    """
    try:
        folder = locate(path)
        if not (path and is_folder(folder)):
            return [path]
        from ckptconv.conversion.discovery import find_in  # not needed for a single file
        from ckptconv.formats.distributed import zero_names
        from ckptconv.inspection.verification import checkpoints_in

        if zero_names.files_of(folder) and all(each.kind in ("file", "other") for each in find_in(folder)):
            return [path]
        found = checkpoints_in(folder)
    except (InputError, UsageError):  # inspecting the path raises this error again
        return [path]
    return [path] if len(found) == 1 and found[0].endswith(".json") else found


def _show(lines: Iterable[str], style: Style) -> None:
    lines = iter(lines)
    while some := list(islice(lines, 1000)):  # one call for each line would take longer than making the line
        click.echo("\n".join(some), color=style.colour)


def _selected(
    summary: Summary, include: tuple[str, ...], exclude: tuple[str, ...], sort: str | None
) -> Sequence[TensorSummary]:
    """Return the tensors to print, in the order of `sort`. Raise NoMatchError if a glob matches nothing."""
    tensors: Sequence[TensorSummary] = summary.tensors
    if include or exclude:
        tensors = _filtered(summary, include, exclude)
    if sort == "size":
        return sorted(tensors, key=lambda tensor: -tensor.nbytes)
    return sorted(tensors, key=lambda tensor: natural(tensor.path)) if sort else tensors


def _filtered(summary: Summary, include: tuple[str, ...], exclude: tuple[str, ...]) -> Sequence[TensorSummary]:
    """Return the tensors that match the globs. Raise NoMatchError if a glob matches nothing.

    A tensor that occurs twice in a module has two names. It is returned with the first name that matches.
    """
    names: dict[str, list[str]] = {}
    for named in chain.from_iterable(module.tensors for module in summary.modules):
        if named.path is not None:
            names.setdefault(named.path, []).append(named.name)
    called: list[tuple[TensorSummary, Sequence[str | None]]] = [
        (tensor, names.get(tensor.path) or [tensor.name]) for tensor in summary.tensors
    ]
    for glob in (*include, *exclude):
        if not any(matches(glob, tensor.path, name) for tensor, each in called for name in each):
            raise NoMatchError(f"no tensor matches {glob!r}", where=summary.path)

    def is_left(path: str, name: str | None) -> bool:
        taken = not include or any(matches(glob, path, name) for glob in include)
        return taken and not any(matches(glob, path, name) for glob in exclude)

    left = [(tensor, [name for name in each if is_left(tensor.path, name)]) for tensor, each in called]
    return [replace(tensor, name=each[0]) for tensor, each in left if each]
