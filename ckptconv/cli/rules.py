"""The command ``ckptconv rules``, which lists the built-in rules of ``convert --rules``."""

from __future__ import annotations

from typing import Any

import click

from ckptconv.cli.commands import Command, debug_option
from ckptconv.edits.regroup_files import shipped_rules


@click.command(
    "rules",
    cls=Command,
    exits="0 done, 1 failed, 2 wrong usage",
    epilog="Example: ckptconv convert model/ stacked/ --rules qwen2-moe",
)
@debug_option
def rules_command(**_: Any) -> int:
    """List the built-in rules for convert --rules.

    Each is shown with the models that it is for (model_type in config.json). All can be applied in both directions
    (--reverse).
    """
    for name, text in shipped_rules().items():
        about, models, *rules = text.splitlines()
        click.echo(f"{name}: {about.removeprefix('// ')}")
        for line in (models.removeprefix("// "), *rules):
            click.echo(f"    {line}")
    return 0
