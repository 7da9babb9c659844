"""The classes of our commands: what is typed wrong is answered with the words that a command has, ``--help`` says what
the exit statuses mean, and a reader that goes away is no failure.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click

from ckptconv.byteranges.sources import check_system
from ckptconv.cli.terminal import style_of
from ckptconv.errors import UsageError, size
from ckptconv.guesses import keyword_for
from ckptconv.hints import Placeholder, option, shell
from ckptconv.light_dataclass import dataclass


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


_DEVICES = ("cpu", "gpu", "cuda:0", "cuda:1", "mps", "xpu:0", "npu:0", "hpu:0")


def complete_device(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    """Devices that begin as `typed`."""
    return [device for device in _DEVICES if device.startswith(typed)]


def complete_rule(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Rules OLD=NEW, of which OLD is on the device of a tensor of the file, or any."""
    old, _equals, new = typed.partition("=")
    if "=" in typed:
        return [f"{old}={device}" for device in _DEVICES if device.startswith(new)]
    return [f"{tag}=" for tag in (*_summary(context).get("devices", ()), "any") if tag.startswith(old)]


def complete_prefix(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Prefixes of names in the state dicts of the file."""
    found = {prefix: None for each in _summary(context).get("state_dicts", ()) for prefix in each["prefixes"]}
    return [prefix for prefix in found if prefix.startswith(typed)]


def _summary(context: click.Context) -> dict[str, Any]:
    """What is in the first file of the command line; nothing where it cannot be read: a completion says no errors."""
    from ckptconv.errors import CkptconvError
    from ckptconv.inspection.summary import inspect

    typed = [*(context.params.get("paths") or ()), context.params.get("a"), *context.args]  # the last before Tab
    first = next(filter(None, typed), None)
    with contextlib.suppress(CkptconvError):
        return inspect(first).as_dict() if first else {}
    return {}


PATH = click.Path(path_type=str)


download_option = click.option(
    "--download", is_flag=True, help="Where the server of a URL sends no ranges, download all of the file first."
)
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def _no_flag_as_replacement(
    context: click.Context, _: click.Parameter, value: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """`value`, unless a replacement was forgotten and what follows was taken for it:
    ``--rename REGEX --dry-run`` would write.
    """
    flags = {flag for option in context.command.params for flag in option.opts}
    for regex, replacement in value:
        if replacement in flags:
            raise click.BadParameter(
                f"{replacement} stands where the replacement for {regex!r} should be ('' takes it out)"
            )
    return value


def group(title: str, example: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`options` that stand together in ``--help``, under `title` and above the arguments of an `example`.

    Options of one title may be given in several groups; the first example counts.
    """

    def decorate(command: Any) -> Any:
        for add in reversed(options):
            command = add(command)
            vars(command.__click_params__[-1])["group"] = title, example  # where click collects them
        return command

    return decorate


def others_of(options: Any, title: str) -> Callable[[Any], Any]:
    """An option for each keyword of this TypedDict for which the decorators below have none, as it is declared there:
    a flag, or a text. They are the last ones under `title`.
    """

    def decorate(command: Any) -> Any:
        params: list[click.Parameter] = command.__click_params__  # where click collects them, the last one first
        there = {each.name for each in params}
        for name, (type_, text) in ((name, get_args(each)) for name, each in options.__annotations__.items()):
            if name in there:
                continue
            made = click.Option([f"--{name.replace('_', '-')}"], is_flag=type_ is bool, help=text.replace("``", ""))
            vars(made)["group"] = title, ""
            params.insert(0, made)
        return command

    return decorate


#: What takes a part of a checkpoint.
take_options = group(
    "What to take",
    "train.pt weights.pt --state-dict",
    click.option(
        "--state-dict",
        is_flag=True,
        help=(
            "Take the state dict alone, wherever it is, also from a model that was pickled whole. Safetensors needs no"
            " such option."
        ),
    ),
    click.option("--select", metavar="PATH", help="Take the part at PATH as the checkpoint, such as ema/model."),
    click.option(
        "--include",
        metavar="GLOB",
        multiple=True,
        help="Keep only tensors whose name matches; * crosses dots, a GLOB with / is for paths.",
    ),
    click.option("--exclude", metavar="GLOB", multiple=True, help="Leave out tensors whose name matches."),
)
#: What edits names.
name_options = group(
    "Names",
    "ddp.pt plain.pt --strip-prefix module.",
    click.option(
        "--strip-prefix",
        metavar="P",
        multiple=True,
        shell_complete=complete_prefix,
        help="Take P off the start of names; a missing last dot is added.",
    ),
    click.option("--add-prefix", metavar="P", multiple=True, help="Put P before the names of the state dict."),
    click.option(
        "--unwrap",
        is_flag=True,
        help="Take out of names what DataParallel, torch.compile, FSDP and other wrappers put in.",
    ),
    click.option(
        "--rename",
        metavar="REGEX REPL",
        nargs=2,
        multiple=True,
        callback=_no_flag_as_replacement,
        help="Replace in names, as re.sub does.",
    ),
)


def page_options(what: str) -> tuple[Callable[[Any], Any], ...]:
    """``--html``, which writes a page that shows `what`, and its options."""
    return (
        click.option("--html", metavar="FILE", help=f"Write a page to look at: {what}. It needs no network."),
        click.option("--open", "opens", is_flag=True, help="Open the page that --html writes."),
        click.option("-f", "--force", is_flag=True, help="Let --html replace an older FILE."),
    )


@dataclass(frozen=True)
class PageFile:
    """Where a page is written, and whether it is opened then, and may replace what is there."""

    path: Path
    opens: bool
    force: bool

    @classmethod
    def asked_for(cls, html: str | None, n: int, *, opens: bool, force: bool) -> PageFile | None:
        """Of so many results; None where no page is asked for.

        Raises UsageError, TargetExistsError and what else :func:`ckptconv.output.files.check_target` raises.
        """
        if html is None:
            if opens:
                raise UsageError(
                    option("open") + " opens the page that " + option("html", Placeholder("FILE")) + " writes"
                )
            return None
        if Path(html).suffix.lower() not in (".html", ".htm"):  # else a checkpoint could be replaced by a page
            raise UsageError(option("html", html) + " is no name of a page", expected="a FILE that ends in .html")
        if n != 1:
            raise UsageError("a page is of one checkpoint, or of two that are compared", got=f"{n}")
        from ckptconv.output.files import check_target  # for pages alone

        check_target(Path(html), replace=force)
        return cls(Path(html), opens, force)

    def write(self, shown: dict[str, Any]) -> None:
        """Write the page of what is `shown`, whole or not at all, say so, and open it."""
        from ckptconv.byteranges.sources import Readable
        from ckptconv.byteranges.spans import Literal, OutFile
        from ckptconv.output.files import write
        from ckptconv.render.page import page_of

        data = page_of(shown).encode()
        write(OutFile(self.path, (Literal(data),), len(data)), Readable(), replace=self.force, verify=False)
        click.echo(f"{style_of(sys.stderr).text(self.path)}: written, {size(len(data))}", err=True)
        if self.opens:
            click.launch(str(self.path.absolute()))
