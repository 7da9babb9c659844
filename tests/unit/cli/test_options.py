"""Comparison of the flags of the command line with the keywords of the functions. They are the same, except those that
are listed here.
"""

# No annotations from __future__, because the content of Annotated is read.

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

#: Flags whose values are part of ``map_location``.
DEVICES = {"to", "maps"}
#: Flags that only the command line needs: a function prints nothing and converts no batch.
SHOWN = {"as_json", "quiet", "verbose", "debug"}
PAGE = {"html", "opens", "force"}
BATCH = {"skip_existing"}


def test_convert_has_a_flag_for_each_keyword() -> None:
    """`convert` has a flag for each keyword and a keyword for each flag, with the same spelling."""
    flags = {each.name: each for each in convert_command.params if isinstance(each, click.Option)}
    assert flags.keys() - DEVICES - SHOWN - BATCH == ConvertOptions.__annotations__.keys()
    for name in ConvertOptions.__annotations__:
        assert FLAGS.get(name, f"--{name.replace('_', '-')}") in flags[name].opts


def test_an_option_is_created_from_its_declaration() -> None:
    """The declaration of a keyword creates a flag or an option with a value. It is listed in its group, or among the
    options without a group.
    """

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
    """`diff` has a flag for each keyword and a keyword for each flag."""
    flags = {each.name for each in diff_command.params if isinstance(each, click.Option)}
    assert flags - SHOWN - PAGE == DiffOptions.__annotations__.keys()


def test_defaults_agree() -> None:
    """The defaults of the command line equal those of the function. An empty tuple counts as no value."""
    given = convert_command.make_context("convert", ["a.pt", "b.pt"]).params
    parameters = inspect.signature(ckptconv.convert).parameters
    for name in ConvertOptions.__annotations__:
        assert (given[name] or None) == (parameters[name].default or None), name
