"""All options and commands that the messages of the package suggest, found in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

import ckptconv
from ckptconv.cli.main import cli
from ckptconv.conversion.options import ConvertOptions, JobOptions
from ckptconv.inspection.comparison.options import DiffOptions

_PACKAGE = Path(ckptconv.__file__).parent
CONTEXT = click.Context(cli, **cli.context_settings)
#: The commands by their names, and the flags of each command.
COMMANDS = {name: command for name in cli.list_commands(CONTEXT) if (command := cli.get_command(CONTEXT, name))}
FLAGS = {
    name: {flag for each in command.params for flag in each.opts if flag.startswith("-")}
    for name, command in COMMANDS.items()
}
#: The keywords of the functions of the package.
KEYWORDS = {
    *ConvertOptions.__annotations__,
    *JobOptions.__annotations__,
    *DiffOptions.__annotations__,
    *("rtol", "atol", "names_only", "full", "values", "expect_sha256", "torch"),
}

_LONG = "|".join(re.escape(flag) for flag in set().union(*FLAGS.values()) if flag.startswith("--"))
#: A flag of ckptconv, or ``{option(`` in a text that should be an f-string.
_OURS = re.compile(rf"(?<![\w-])(?:{_LONG})(?![\w-])|{{option\(")
_MAKERS = ("option", "Option", "command", "command_line")
_COMPOSED = (ast.BinOp, ast.JoinedStr, ast.FormattedValue)


class Suggestion(NamedTuple):
    """A suggested option or command: its name, the command around an option, the module and line, and the message."""

    name: str
    command: str | None
    module: str
    line: int
    message: str


def suggestions() -> list[Suggestion]:
    """Return all suggestions whose name is a constant in the source."""
    return [each for module, tree in _modules() for each in _suggestions_in(module, tree)]


def flags_in_texts() -> list[str]:
    """Return the flags of the program in texts that are neither docstrings nor part of a declaration for click, each
    with its module.
    """
    found = []
    for module, tree in _modules():
        declared = {
            id(node)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("click.option", "click.command", "Flag")
            for node in ast.walk(call)
        }
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in declared | docs:
                found += [f"{module}: {flag}" for flag in _OURS.findall(node.value)]
    return found


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the tree of each module, except for the module that creates flags."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path != _PACKAGE / "hints.py":
            yield str(path.relative_to(_PACKAGE)), ast.parse(path.read_text())


def _suggestions_in(module: str, tree: ast.Module) -> Iterator[Suggestion]:
    above = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (name := _made_by(call)):
            message: ast.AST = call
            command = None
            while isinstance(above[id(message)], _COMPOSED) or _made_by(above[id(message)]):
                message = above[id(message)]
                command = _made_by(message) or command
            yield Suggestion(name, command, module, call.lineno, ast.unparse(message))


def _made_by(call: ast.AST) -> str | None:
    """Return the name of the option or command that `call` creates, or None."""
    if isinstance(call, ast.Call) and ast.unparse(call.func) in _MAKERS and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return None
