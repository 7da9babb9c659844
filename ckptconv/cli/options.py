"""Options that several commands have, and the groups in which ``--help`` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

from ckptconv.cli.completion import complete_prefix

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
        for option in reversed(options):
            command = option(command)
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
