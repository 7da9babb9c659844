"""Every place in the package that says what to type, and which of them a run comes by."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import ckptconv

__all__ = ["Site", "come_by", "sites"]

_PACKAGE = Path(ckptconv.__file__).parent
_MAKERS = ("option", "Option", "command", "command_line", "shell", "python_command", "saved_by_torch", "Issue")
#: Code in a text that no maker made: programs of a shell, and calls of torch and of ours.
_CODE = re.compile(
    r"pip install|`import|^import $|\b(?:bzip2|xz|zstd|lz4) -dc|7z x|unrar x|\bclone\(\)"
    r"|\b(?:torch|ckptconv|averaged|tensor)\.[a-z_.]+\((?!weights_only)"
)

Site = str  # module:function:what


@cache
def sites() -> dict[Site, list[tuple[str, int, int]]]:
    """Where something to type is said: the module's file and the lines, by module, function and what it is.

    What is an argument of another belongs to that; docstrings and what click declares are none.
    """
    found: dict[Site, list[tuple[str, int, int]]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = str(path.relative_to(_PACKAGE))
        if name != "hints.py":
            for function, what, node in _said_in(ast.parse(path.read_text()), "", inside=False):
                place = (str(path), node.lineno, node.end_lineno or node.lineno)
                found.setdefault(f"{name}:{function}:{what}", []).append(place)
    return found


def _said_in(node: ast.AST, function: str, *, inside: bool) -> Iterator[tuple[str, str, ast.expr]]:
    """The function, the word and the expression of each; of nested ones the outermost."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Call):
        maker = ast.unparse(node.func)
        if maker in ("Flag", "click.option", "click.command", "click.argument", "click.group", "re.compile"):
            return
        if maker in _MAKERS and not inside and not (maker == "Option" and not isinstance(node.args[0], ast.Constant)):
            yield function, _word(maker, node), node
            inside = maker != "Issue"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and not inside and _CODE.search(node.value):
        yield function, "text", node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
    for child in ast.iter_child_nodes(node):
        yield from _said_in(child, function, inside=inside)


def _word(maker: str, call: ast.Call) -> str:
    if maker == "python_command":
        return "python"
    first = call.args[0]
    word = str(first.value) if isinstance(first, ast.Constant) else "*"
    return word if maker in ("shell", "saved_by_torch") else f"{maker.lower().removesuffix('_line')} {word}"


@contextmanager
def come_by() -> Iterator[set[Site]]:
    """What of :func:`sites` the lines run in this context have said."""
    lines: dict[str, dict[int, set[Site]]] = {}
    for site, places in sites().items():
        for path, first, last in places:
            for line in range(first, last + 1):
                lines.setdefault(path, {}).setdefault(line, set()).add(site)
    said: set[Site] = set()

    def in_lines(frame: FrameType, event: str, _: Any) -> Any:
        said.update(lines[frame.f_code.co_filename].get(frame.f_lineno, ()))
        return in_lines

    def in_calls(frame: FrameType, event: str, _: Any) -> Any:
        return in_lines(frame, event, None) if frame.f_code.co_filename in lines else None

    before = sys.gettrace()
    sys.settrace(in_calls)
    try:
        yield said
    finally:
        sys.settrace(before)
