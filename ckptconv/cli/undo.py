"""The command ``ckptconv undo``, which reverts a change by ``convert --in-place``."""

from __future__ import annotations

from typing import Any

import click

from ckptconv.cli.commands import PATH, Command, debug_option
from ckptconv.cli.terminal import show_error
from ckptconv.conversion.in_place import take_back
from ckptconv.errors import CkptconvError, count


@click.command(
    "undo",
    cls=Command,
    exits="0 done, 1 failed, 2 wrong usage",
    epilog="Example: ckptconv undo model.pt",
)
@click.argument("paths", metavar="PATH...", type=PATH, nargs=-1, required=True)
@click.option("-q", "--quiet", is_flag=True, help="Only print errors.")
@debug_option
def undo_command(paths: tuple[str, ...], quiet: bool, **_: Any) -> int:
    """Revert what convert --in-place did to a checkpoint.

    The file gets its old bytes back, whether the change was finished or interrupted. The file is not touched if another
    program has changed the bytes in question.
    """
    failed = 0
    for path in paths:
        try:
            nbytes = take_back(path)
        except CkptconvError as error:
            if len(paths) == 1:
                raise
            show_error(error)
            failed += 1
            continue
        if not quiet:
            click.echo(f"{path}: restored, {count(nbytes, 'byte')} written", err=True)
    return 1 if failed else 0
