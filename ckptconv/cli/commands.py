"""The class of all commands: it answers what is typed wrong with the words that this command has."""

from __future__ import annotations

from typing import Any

import click

from ckptconv.errors import UsageError

__all__ = ["Command"]


class Command(click.Command):
    """A command whose options of one value say one thing: click would take the last, and drop the others in silence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for each in self.params:
            if isinstance(each, click.Option) and not (each.is_flag or each.multiple):
                each.multiple, each.callback = True, _one_value
                if isinstance(each.default, (int, float)):
                    each.default = (each.default,)


def _one_value(_: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> Any:
    """The one value of `option`, which may say it again."""
    if len(set(values)) > 1:
        raise UsageError(f"{option.opts[-1]} is given twice", got=" and ".join(map(str, values)))
    return values[0] if values else None
