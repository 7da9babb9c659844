"""The flags of the command line and the keywords of the functions are the same, but for what is named here."""

# No annotations from __future__: what stands in Annotated is read.

import inspect
import re
from typing import Annotated, Any

import click

import ckptconv
from ckptconv.cli.commands import Command, declared
from ckptconv.cli.convert import convert_command
from ckptconv.cli.diff import diff_command
from ckptconv.conversion.options import ConvertOptions
from ckptconv.guesses import Flag
from ckptconv.hints import FLAGS
from ckptconv.inspection.comparison.options import DiffOptions

#: Flags for what ``map_location`` says too.
DEVICES = {"to", "maps"}
#: What is about one command line: a function has no output but what it returns, and no batch.
SHOWN = {"as_json", "quiet", "verbose", "debug"}
PAGE = {"html", "opens", "force"}
BATCH = {"skip_existing"}


def test_convert_has_a_flag_for_each_keyword() -> None:
    """And a keyword for each flag, spelled alike."""
    flags = {each.name: each for each in convert_command.params if isinstance(each, click.Option)}
    assert flags.keys() - DEVICES - SHOWN - BATCH == ConvertOptions.__annotations__.keys()
    for name in ConvertOptions.__annotations__:
        assert FLAGS.get(name, f"--{name.replace('_', '-')}") in flags[name].opts


def test_an_option_is_made_of_its_declaration() -> None:
    """A flag or a text, in the group that names it, or among those without a group."""

    class Declared(ConvertOptions, total=False):
        swap: Annotated[bool, Flag("Swap a and b.", short="-s")]
        label: Annotated[str | None, Flag("Say this.", "Not shown.", "TEXT")]

    @click.command("convert", cls=Command, exits="0", groups={"Output": ("a b", "compact swap")})
    @declared(Declared)
    def convert(**flags: Any) -> None:
        """Nothing."""

    assert {"swap": True, "label": "x"}.items() <= convert.make_context("c", ["-s", "--label", "x"]).params.items()
    assert re.search(
        r"(?s)Output.*--compact.*-s, --swap +Swap a and b\..*Options.*--label TEXT +Say this\.",
        convert.get_help(click.Context(convert)),
    )


def test_diff_has_a_flag_for_each_keyword() -> None:
    """And a keyword for each flag."""
    flags = {each.name for each in diff_command.params if isinstance(each, click.Option)}
    assert flags - SHOWN - PAGE == DiffOptions.__annotations__.keys()


def test_defaults_agree() -> None:
    """A flag that nobody gives is a keyword that nobody gives; what can be repeated is an empty tuple."""
    given = convert_command.make_context("convert", ["a.pt", "b.pt"]).params
    parameters = inspect.signature(ckptconv.convert).parameters
    for name in ConvertOptions.__annotations__:
        assert (given[name] or None) == (parameters[name].default or None), name
