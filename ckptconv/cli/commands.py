"""The classes of our commands: what is typed wrong is answered with the words that a command has, ``--help`` says what
the exit statuses mean, and a reader that goes away is no failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ckptconv.byteranges.sources import check_system
from ckptconv.errors import UsageError
from ckptconv.guesses import keyword_for
from ckptconv.hints import shell


class Command(click.Command):
    """A command whose options of one value say one thing: click would take the last, and drop the others in silence.

    `exits` says what its exit statuses mean.
    """

    def __init__(self, *args: Any, exits: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exits = exits
        for each in self.params:
            if isinstance(each, click.Option) and not (each.is_flag or each.multiple):
                each.multiple, each.callback = True, _one_value
                if isinstance(each.default, (int, float)):
                    each.default = (each.default,)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`. Raises UsageError for what this command does not take, with what is meant or expected."""
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            from ckptconv.cli.guesses import wrong_option  # which only a mistake needs

            assert self.name is not None
            raise wrong_option(
                self.name, typed, _commands_of(ctx.parent.command if ctx.parent else self, ctx)
            ) from None
        except click.UsageError as error:
            raise self._as_ours(error, typed) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises UnsupportedError where no command can."""
        check_system()
        return super().invoke(ctx)

    def _as_ours(self, error: click.UsageError, typed: list[str]) -> UsageError:
        """`error` in one line, with the arguments that the command or the option expects."""
        flag = getattr(error, "option_name", None)
        option = getattr(error, "param", None) or next((each for each in self.params if flag in each.opts), None)
        ours = UsageError(error.format_message().rstrip("."))
        if isinstance(error, click.MissingParameter):
            ours.expected = self._usage()
        elif option and option.metavar:
            flag, word = option.opts[-1], _value_of(option, typed)
            ours.expected = f"{flag} {option.metavar}"
            if word and isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType)):
                least = f" of at least {low}" if (low := getattr(option.type, "min", None)) is not None else ""
                kind = "number" if isinstance(option.type, click.types.FloatParamType) else "whole number"
                ours = UsageError(f"{flag} {word!r} is not a {kind}{least}", expected=ours.expected)
            if option.nargs == 2 and (pair := re.fullmatch(r"(.+?)[=:](.+)|s/(.+?)/(.*?)/g?", word)):
                ours.hint = "is this meant: " + shell(flag, *(each for each in pair.groups() if each is not None))
        elif option and isinstance(option.type, click.Choice) and (word := _value_of(option, typed)):
            plain = word.lower().lstrip(".")
            known = keyword_for(plain, True, (option.name or "",)) or ("", None)
            meant = plain if plain in option.type.choices else known[1]
            ours = UsageError(f"{option.opts[-1]} has no {word}", expected=", ".join(option.type.choices))
            ours.hint = "is this meant: " + shell(option.opts[-1], meant) if isinstance(meant, str) else None
        elif not option:
            ours.expected = self._usage()
        return ours

    def _usage(self) -> str:
        """Return the command with its arguments and without its options."""
        return " ".join([f"ckptconv {self.name}", *self.collect_usage_pieces(click.Context(self))[1:]])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by their groups, each with an example; those in none last."""
        groups: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        for each in self.get_params(ctx):
            title, example = vars(each).get("group", ("Options", ""))
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
                groups.setdefault(title, (example, []))[1].append(record)
        groups["Options"] = groups.pop("Options")  # --help is one in any case
        for title, (example, records) in groups.items():
            with formatter.section(f"{title} ({ctx.command_path} {example})" if example else title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the exit statuses mean, and the epilog."""
        formatter.write_paragraph()
        formatter.write_text(f"Exit status: {self.exits}, 130 Ctrl-C, 141 nobody reads on.")
        super().format_epilog(ctx, formatter)


class ClosedPipeError(Exception):
    """Whoever read our output reads no more. It is no OSError, for which click would exit with 1."""


@contextmanager
def _names_closed_pipes() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ClosedPipeError from None


class Group(click.Group):
    """A group whose commands are meant by other words too. Raises ClosedPipeError."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """The context, which can print the help."""
        with _names_closed_pipes():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _names_closed_pipes():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`. Raises UsageError where the command is missing in front of its options."""
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            from ckptconv.cli.guesses import wrong_command

            raise wrong_command(typed[0], typed[1:], _commands_of(self, ctx)) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begin with, and what is left of them. Raises UsageError for one that is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from ckptconv.cli.guesses import wrong_command

            raise wrong_command(args[0], args[1:], _commands_of(self, ctx)) from None


def _commands_of(group: click.Command, ctx: click.Context) -> dict[str, click.Command]:
    """The commands of `group` by name; a command by itself stands alone."""
    if not isinstance(group, click.Group):
        return {group.name or "": group}
    found = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    return {name: command for name, command in found if command}


def _value_of(option: click.Parameter, typed: list[str]) -> str:
    """What stands behind `option` in the words `typed`."""
    for flag in option.opts:
        if flag in typed[:-1]:
            return typed[typed.index(flag) + 1]
    long = f"{option.opts[-1]}="
    return next((word.removeprefix(long) for word in typed if word.startswith(long)), "")


def _one_value(_: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> Any:
    """The one value of `option`, which may say it again."""
    if len(set(values)) > 1:
        raise UsageError(f"{option.opts[-1]} is given twice", got=" and ".join(map(str, values)))
    return values[0] if values else None
