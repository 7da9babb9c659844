"""``ckptconv convert --in-place`` and ``ckptconv undo``: change checkpoints in their own files, and take that back."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ckptconv.cli.commands import Command
from ckptconv.cli.json_views import report_as_dict
from ckptconv.cli.options import PATH, debug_option
from ckptconv.cli.terminal import show_error, show_report, style_of
from ckptconv.conversion.in_place import change_in_place
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.undo import undo
from ckptconv.edits.options import Edits
from ckptconv.errors import CkptconvError, UsageError, count
from ckptconv.hints import Option, Placeholder, command

__all__ = ["convert_in_place", "undo_command"]


def convert_in_place(
    paths: tuple[str, ...], edits: Edits, output: OutputOptions, *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Change each of `paths` in turn, and say what became of it; the exit status."""
    if not paths:
        raise UsageError("no input given", expected=command("convert", Placeholder("SRC..."), Option("in_place")))
    failed = 0
    for path in paths:
        try:
            report = change_in_place(path, edits, output)
        except UsageError:
            raise
        except CkptconvError as error:
            if len(paths) == 1:
                raise
            show_error(error)
            failed += 1
            continue
        if as_json:
            click.echo(json.dumps(report_as_dict(report)))
        elif not report.written or not quiet:
            show_report(report, style_of(sys.stderr if report.written else sys.stdout), verbose=verbose)
    return 0 if not failed else 1 if failed == len(paths) else 3


@click.command(
    "undo",
    cls=Command,
    exits="0 done, 1 failed, 2 the command makes no sense",
    epilog="Example: ckptconv undo model.pt",
)
@click.argument("paths", metavar="PATH...", type=PATH, nargs=-1, required=True)
@click.option("-q", "--quiet", is_flag=True, help="No report; errors still.")
@debug_option
def undo_command(paths: tuple[str, ...], quiet: bool, **_: Any) -> int:
    """Give a checkpoint the bytes back that it had before convert --in-place, whether that finished or was interrupted.

    Nothing is changed unless every byte in question is one that this program found or wrote.
    """
    failed = 0
    for path in paths:
        try:
            nbytes = undo(path)
        except CkptconvError as error:
            if len(paths) == 1:
                raise
            show_error(error)
            failed += 1
            continue
        if not quiet:
            click.echo(f"{path}: as before, {count(nbytes, 'byte')} written", err=True)
    return 1 if failed else 0
