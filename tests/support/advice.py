"""The places in the package that make a command or code for the user to type, and which of them a run reaches."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import ckptconv
from ckptconv import hints

__all__ = ["Place", "come_by", "places"]

_PACKAGE = Path(ckptconv.__file__).parent
_MAKERS = ("option", "Option", "command", "command_line", "shell", "python_command", "saved_by_torch", "Issue")
#: Code in a text that no function of ``_MAKERS`` returned: shell commands, and calls of torch and ckptconv.
_CODE = re.compile(
    r"pip install|`import|^import $|\b(?:bzip2|xz|zstd|lz4) -dc|7z x|unrar x|\bclone\(\)"
    r"|\b(?:torch|ckptconv|averaged|tensor)\.[a-z_.]+\((?!weights_only)"
)


@dataclass(frozen=True)
class Place:
    """An expression of the package that makes a command or code to type.

    Attributes:
        file: The file, relative to the package's folder.
        what: The kind of result: ``option NAME``, ``command NAME``, ``issue KIND``, the first word of another program,
            or ``text``. A star stands for a name that is not a constant.
        code: The code in a ``text``.
        first: Its first line.
        last: Its last line.
        in_function: Whether it is made when a function runs, and not when its module is imported.
    """

    file: str
    what: str
    code: str
    first: int
    last: int
    in_function: bool

    @property
    def name(self) -> str:
        """Return the name of the place in a table. It contains no function name and no line number, so that both may
        change.
        """
        return f"{self.file}:{self.what}"

    def is_in(self, typed: str) -> bool:
        """Return whether `typed` contains the result of this place. A name that is not a constant, and an issue, always
        count as contained.
        """
        kind, _, name = self.what.partition(" ")
        if kind == "text":
            return self.code.strip("`(") in typed
        if name == "*" or kind in ("*", "issue"):
            return True
        if kind == "option":
            flags = {words[0] for words in hints.Option(name, "x").words()}
            if name == "map_location":
                flags = {"--to", "--map"}
            return any(word in typed for word in (*flags, name))
        return (name.removesuffix("_many") if kind == "command" else kind) in typed


@cache
def places() -> list[Place]:
    """Return all places, in order. An argument of another place belongs to that place. Docstrings and declarations of
    click are not places.
    """
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = str(path.relative_to(_PACKAGE))
        if name != "hints.py":
            for what, code, node, in_function in _said_in(ast.parse(path.read_text()), inside=False):
                found.append(Place(name, what, code, node.lineno, node.end_lineno or node.lineno, in_function))
    return found


def _said_in(node: ast.AST, *, inside: bool, in_function: bool = False) -> Iterator[tuple[str, str, ast.expr, bool]]:
    """Yield the word, the code and the expression of each place below `node`, and whether a function makes it. Only the
    outermost of nested places is yielded.
    """
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Call):
        maker = ast.unparse(node.func)
        if maker in ("Flag", "click.option", "click.command", "click.argument", "click.group", "re.compile"):
            return
        if maker in _MAKERS and not inside and not (maker == "Option" and not isinstance(node.args[0], ast.Constant)):
            yield _word(maker, node), "", node, in_function
            inside = maker != "Issue"
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and not inside
        and (code := _CODE.search(node.value))
    ):
        yield "text", code[0], node, in_function
    in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _said_in(child, inside=inside, in_function=in_function)


def _word(maker: str, call: ast.Call) -> str:
    if maker == "python_command":
        return "python"
    first = call.args[0]
    word = str(first.value) if isinstance(first, ast.Constant) else "*"
    return word if maker in ("shell", "saved_by_torch") else f"{maker.lower().removesuffix('_line')} {word}"


@contextmanager
def come_by() -> Iterator[set[Place]]:
    """Yield a set that collects the places whose lines run in this context. Places outside of functions are added if
    any function of their file runs.
    """
    lines: dict[str, dict[int, set[Place]]] = {}
    tables: dict[str, set[Place]] = {}
    for place in places():
        path = str(_PACKAGE / place.file)
        of_file = lines.setdefault(path, {})
        if not place.in_function:
            tables.setdefault(path, set()).add(place)
        for line in range(place.first, place.last + 1) if place.in_function else ():
            of_file.setdefault(line, set()).add(place)
    run: set[Place] = set()

    def in_lines(frame: FrameType, event: str, _: Any) -> Any:
        run.update(lines[frame.f_code.co_filename].get(frame.f_lineno, ()))
        return in_lines

    def in_calls(frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in lines or frame.f_code.co_name == "<module>":
            return None
        run.update(tables.get(path, ()))
        return in_lines(frame, event, None)

    before = sys.gettrace()
    sys.settrace(in_calls)
    try:
        yield run
    finally:
        sys.settrace(before)
