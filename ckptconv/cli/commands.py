"""Code that several commands use: their class, common options, shell completion, and the writing of pages."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from ckptconv.cli.terminal import style_of
from ckptconv.errors import CkptconvError, UsageError, size
from ckptconv.guesses import DOWNLOAD, keyword_for
from ckptconv.hints import FLAGS, Placeholder, option, shell
from ckptconv.light_dataclass import dataclass

PATH = click.Path(path_type=str)


class Command(click.Command):
    """A click command that refuses different values for one option. Click itself would use the last one.

    Attributes:
        exits: The meaning of its exit statuses, as text.
        groups: The headings under which ``--help`` lists its options, each with the arguments of an example and the
            names of the options. All other options are under the heading "Options".
    """

    def __init__(
        self, *args: Any, exits: str, groups: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.exits, self.groups = exits, groups or {}
        order = [name for _, names in self.groups.values() for name in names.split()]
        places = {name: place for place, name in enumerate(order)}
        self.params.sort(  # suggested commands list their options in the order of --help
            key=lambda param: -1 if isinstance(param, click.Argument) else places.get(param.name or "", len(order))
        )
        for param in self.params:
            if isinstance(param, click.Option) and not (param.is_flag or param.multiple):
                param.multiple, param.callback = True, _one_value
                if isinstance(param.default, (int, float)):
                    param.default = (param.default,)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`. Raise UsageError, with the intended or expected arguments, if they are wrong."""
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            from ckptconv.cli.guesses import wrong_option

            group = ctx.parent.command if ctx.parent else self
            raise wrong_option(self.name or "", typed, commands_of(group, ctx)) from None
        except click.UsageError as error:
            raise self._as_ours(error, typed) from None

    def _as_ours(self, error: click.UsageError, typed: list[str]) -> UsageError:
        """Return the click error as a UsageError with the arguments that the command or option expects."""
        flag = getattr(error, "option_name", None)
        option = getattr(error, "param", None) or next((each for each in self.params if flag in each.opts), None)
        ours = UsageError(" ".join(error.format_message().rstrip(".").split()))
        if isinstance(error, click.MissingParameter) or not option:
            usage = self.collect_usage_pieces(click.Context(self))[1:]  # the arguments without the options
            ours.expected = " ".join([f"ckptconv {self.name}", *usage])
        elif option.metavar:
            flag, word = option.opts[-1], _value_of(option, typed)
            ours.expected = f"{flag} {option.metavar}"
            if word and isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType)):
                least = f" of at least {low}" if (low := getattr(option.type, "min", None)) is not None else ""
                kind = "number" if isinstance(option.type, click.types.FloatParamType) else "whole number"
                ours = UsageError(f"{flag} {word!r} is not a {kind}{least}", expected=ours.expected)
            if option.nargs == 2 and (pair := re.fullmatch(r"(.+?)[=:](.+)|s/(.+?)/(.*?)/g?", word)):
                ours.hint = "did you mean: " + shell(flag, *(each for each in pair.groups() if each is not None))
        elif isinstance(option.type, click.Choice) and (word := _value_of(option, typed)):
            plain = word.lower().lstrip(".")
            known = keyword_for(plain, True, (option.name or "",)) or ("", None)
            meant = plain if plain in option.type.choices else known[1]
            ours = UsageError(f"{option.opts[-1]} has no {word}", expected=", ".join(option.type.choices))
            ours.hint = "did you mean: " + shell(option.opts[-1], meant) if isinstance(meant, str) else None
        return ours

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, each group with an example, and the other options last."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx))
        }
        for title, (example, names) in self.groups.items():
            with formatter.section(f"{title} ({ctx.command_path} {example})"):
                formatter.write_dl([records.pop(name) for name in names.split()])
        with formatter.section("Options"):  # --help is always one
            formatter.write_dl([*records.values()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the meaning of the exit statuses, and the epilog."""
        formatter.write_paragraph()
        formatter.write_text(f"Exit status: {self.exits}, 130 Ctrl-C, 141 the reader of a pipe has ended.")
        super().format_epilog(ctx, formatter)


def commands_of(group: click.Command, ctx: click.Context) -> dict[str, click.Command]:
    """Return the commands of `group` by name. If `group` is a single command, return only that."""
    if not isinstance(group, click.Group):
        return {group.name or "": group}
    commands = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    return {name: command for name, command in commands if command}


def _value_of(option: click.Parameter, typed: list[str]) -> str:
    """Return the word after `option` in `typed`, the words of the command line. Return an empty text without one."""
    for flag in option.opts:
        if flag in typed[:-1]:
            return typed[typed.index(flag) + 1]
    long = f"{option.opts[-1]}="
    return next((word.removeprefix(long) for word in typed if word.startswith(long)), "")


def _one_value(_: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Return the single value of `option`. Return None without values. Raise UsageError if values differ."""
    if len(set(values)) > 1:
        raise UsageError(f"{option.opts[-1]} is given twice, with different values", got=" and ".join(map(str, values)))
    return values[0] if values else None


# Completion. Click itself completes commands, flags and paths.

_DEVICES = ("cpu", "gpu", "cuda:0", "cuda:1", "mps", "xpu:0", "npu:0", "hpu:0")


def complete_device(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    """Return the devices that start with `typed`."""
    return [device for device in _DEVICES if device.startswith(typed)]


def complete_rule(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Return completions of a rule OLD=NEW that starts with `typed`. OLD is a device in the first file, or ``any``."""
    old, _equals, new = typed.partition("=")
    if "=" in typed:
        return [f"{old}={device}" for device in _DEVICES if device.startswith(new)]
    return [f"{tag}=" for tag in (*_summary(context).get("devices", ()), "any") if tag.startswith(old)]


def _complete_prefix(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Return the prefixes of names in the first file that start with `typed`."""
    state_dicts = _summary(context).get("state_dicts", ())
    prefixes = dict.fromkeys(prefix for state_dict in state_dicts for prefix in state_dict["prefixes"])
    return [prefix for prefix in prefixes if prefix.startswith(typed)]


def _summary(context: click.Context) -> dict[str, Any]:
    """Return the summary of the first file on the command line as a dict. Return an empty dict if it cannot be read."""
    from ckptconv.inspection.summary import inspect

    # the arguments before the cursor are in args
    typed = [*(context.params.get("paths") or ()), context.params.get("a"), *context.args]
    first = next(filter(None, typed), None)
    with contextlib.suppress(CkptconvError):
        return inspect(first).as_dict() if first else {}
    return {}


# Options


def _no_flag_as_replacement(
    context: click.Context, _: click.Parameter, value: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Return `value`. Raise BadParameter if a replacement is a flag, as in ``--rename REGEX --dry-run``."""
    flags = {flag for option in context.command.params for flag in option.opts}
    for regex, replacement in value:
        if replacement in flags:
            raise click.BadParameter(
                f"expected the replacement for {regex!r}, got the option {replacement} ('' removes the match)"
            )
    return value


#: Additional arguments of ``click.option`` for options of several commands.
_MORE: dict[str, dict[str, Any]] = {
    "rename": {"nargs": 2, "callback": _no_flag_as_replacement},
    "strip_prefix": {"shell_complete": _complete_prefix},
}
download_option = click.option("--download", is_flag=True, help=DOWNLOAD.help)
torch_option = click.option(
    "--torch",
    metavar="VERSION",
    help="Say whether this version of torch loads the file: a version such as 2.9, or all. Default: the installed"
    " version, or else the newest known one.",
)
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def declared(options: Any, **more: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds an option to a command for each key of the TypedDict `options`.

    Args:
        options: A TypedDict whose keys have the annotation ``Annotated[type, Flag(...)]``.
        **more: Additional arguments of ``click.option``, by key.
    """

    def decorate(command: Any) -> Any:
        for name, annotation in options.__annotations__.items():
            type_, flag = get_args(annotation)
            # with an explicit is_flag=False, click would allow an option without its value
            how: dict[str, Any] = {"is_flag": True} if type_ is bool else {}
            if type_ is not bool:  # a type named in quotes is an iterable
                how["multiple"] = hasattr(type_, "__forward_arg__") or "Iterable" in str(type_)
            words = [word for part in get_args(type_) for word in get_args(part) if isinstance(word, str)]
            how |= {"type": click.Choice(words)} if words else {}
            how |= {"help": flag.help, "metavar": flag.metavar, **_MORE.get(name, {}), **more.get(name, {})}
            flags = [*filter(None, [flag.short]), FLAGS.get(name, f"--{name.replace('_', '-')}")]
            command = click.option(*flags, name, **how)(command)
        return command

    return decorate


# Pages


def page_options(content: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the options ``--html``, ``--open`` and ``--force``. `content` describes the page."""

    def decorate(command: Any) -> Any:
        command = click.option("-f", "--force", is_flag=True, help="Replace the FILE of --html if it exists.")(command)
        command = click.option("--open", "opens", is_flag=True, help="Open the page that --html writes.")(command)
        text = f"Write an HTML page with {content}. It needs no network."
        return click.option("--html", metavar="FILE", help=text)(command)

    return decorate


@dataclass(frozen=True)
class PageFile:
    """The file of an HTML page.

    Attributes:
        path: Its path.
        opens: Whether to open it in a browser after it is written.
        force: Whether it may replace an existing file.
    """

    path: Path
    opens: bool
    force: bool

    @classmethod
    def asked_for(cls, html: str | None, n: int, *, opens: bool, force: bool) -> PageFile | None:
        """Return the page file for ``--html``. Return None if the option is not given.

        Args:
            html: The value of ``--html``, or None.
            n: The number of results, which must be 1.
            opens: Whether ``--open`` is given.
            force: Whether ``--force`` is given.

        Raises:
            UsageError: The options contradict each other, or `n` is not 1.
            CkptconvError: One of the errors of :func:`ckptconv.output.files.check_target`.
        """
        if html is None:
            if opens:
                raise UsageError(
                    option("open") + " opens the page that " + option("html", Placeholder("FILE")) + " writes"
                )
            return None
        if Path(html).suffix.lower() not in (".html", ".htm"):  # a page could replace a checkpoint
            raise UsageError(option("html", html) + " is not the name of a page", expected="a FILE that ends in .html")
        if n != 1:
            raise UsageError("a page shows one checkpoint, or compares two", got=f"{n}")
        from ckptconv.output.files import check_target

        check_target(Path(html), replace=force)
        return cls(Path(html), opens, force)

    def write(self, content: dict[str, Any]) -> None:
        """Write a page with `content`, print its path and size, and open it if ``--open`` is given."""
        from ckptconv.byteranges.sources import Readable
        from ckptconv.byteranges.spans import Literal, OutFile
        from ckptconv.output.files import write
        from ckptconv.render.page import page_of

        data = page_of(content).encode()
        write(OutFile(self.path, (Literal(data),), len(data)), Readable(), replace=self.force, verify=False)
        click.echo(f"{style_of(sys.stderr).text(self.path)}: written, {size(len(data))}", err=True)
        if self.opens:
            click.launch(str(self.path.absolute()))
