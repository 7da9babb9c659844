"""``ckptconv diff``: whether two checkpoints are the same."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import click

from ckptconv.cli.commands import Command
from ckptconv.cli.json_views import difference_as_dict
from ckptconv.cli.options import PATH, debug_option, edit_options
from ckptconv.cli.render.difference import difference_lines
from ckptconv.cli.terminal import progress_bar, style_of
from ckptconv.edits.options import edits_from
from ckptconv.inspection.comparison.diff import Compared, compare

__all__ = ["diff_command"]


@click.command(
    "diff",
    cls=Command,
    exits="0 the same, 1 different, 2 anything else",
    epilog="Example: ckptconv diff ddp.pt plain.safetensors --strip-prefix module.",
)
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
@click.option(
    "--rtol",
    metavar="X",
    type=float,
    default=0.0,
    help="Let numbers differ by X times that of B, as torch.allclose does.",
)
@click.option("--atol", metavar="X", type=float, default=0.0, help="Let numbers differ by X.")
@click.option("--names-only", is_flag=True, help="Compare the names of tensors and nothing else.")
@click.option("--full", is_flag=True, help="Read what has one checksum in A and B too; else that is taken for equal.")
@edit_options
@click.option("--json", "as_json", is_flag=True, help="Print what differs as JSON, sizes in bytes.")
@click.option("-q", "--quiet", is_flag=True, help="No text; the exit status says it.")
@click.option("-v", "--verbose", is_flag=True, help="List each tensor, those that differ alike too.")
@debug_option
def diff_command(
    a: str,
    b: str,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    debug: bool,  # noqa: ARG001 - main reads it
    **flags: Any,
) -> int:
    """Say whether two checkpoints are the same, and where not.

    Compared are names, dtypes, shapes, devices, values, and what is no tensor, whatever the containers of A and B;
    where one is safetensors, the state dict of the other is taken. NaN equals NaN, and -0.0 equals 0.0. --state-dict,
    --select, --include and --exclude are for both, and where B has nothing such it is compared whole; the edits of
    names are for A. They apply in the order that convert has.
    """
    names_only = flags["names_only"]
    style = style_of(sys.stdout)
    brief = style.width is not None and not (verbose or as_json)
    found = compare(
        a,
        b,
        edits_from(**flags),
        Compared(flags["rtol"], flags["atol"], names_only, flags["full"]),
        brief=brief,
        progress=partial(progress_bar, quiet=quiet),
    )
    if as_json:
        click.echo(json.dumps(difference_as_dict(found)))
    elif not quiet:
        for line in difference_lines(found, style, everything=verbose, names_only=names_only):
            click.echo(line, color=style.colour)
    return 0 if found.same else 1
