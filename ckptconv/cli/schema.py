"""The command ``ckptconv schema``, which prints the JSON Schema of the output of another command with ``--json``."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import click

from ckptconv.cli.commands import Command, debug_option


@click.command(
    "schema",
    cls=Command,
    exits="0 done, 1 failed, 2 wrong usage",
    epilog="Example: ckptconv schema inspect > inspect.schema.json",
)
@click.argument("command", metavar="COMMAND", type=click.Choice(["convert", "diff", "inspect", "verify"]))
@debug_option
def schema_command(command: str, **_: Any) -> None:
    """Print the JSON Schema of what a command prints with --json.

    The command is convert, diff, inspect or verify. The schema uses draft 2020-12. It describes one object, which is
    one line of the output.
    """
    click.echo(files("ckptconv.render").joinpath(f"schemas/{command}.json").read_text("utf-8"), nl=False)
