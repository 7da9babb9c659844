"""Sizes of functions: they fit a screen, have few parameters, and their docstrings name the parameters as in
the code.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import ckptconv

pytestmark = pytest.mark.untraced
LINES, PARAMETERS = 60, 8
#: Functions whose keywords are options for users, declared in ``conversion.options``.
PUBLIC = {"convert", "diff", "jobs_in", "plan", "save"}


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return each function of the package, and its position."""
    return [
        (f"{path}:{node.lineno} {node.name}", node)
        for path in sorted(Path(ckptconv.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_functions_fit_a_screen() -> None:
    """A function has at most 60 lines, from its `def` to its last line."""
    assert [where for where, node in functions() if (node.end_lineno or 0) - node.lineno >= LINES] == []


def test_functions_have_few_parameters() -> None:
    """A function has at most eight parameters, without ``self`` and ``cls``. Only some public functions have more."""
    for where, node in functions():
        every = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        every += [each.arg for each in (node.args.vararg, node.args.kwarg) if each]
        assert len({*every} - {"self", "cls"}) <= PARAMETERS or node.name in PUBLIC, where
    public = {name: getattr(ckptconv, name) for name in ckptconv.__all__}
    many = {
        name
        for name, each in public.items()
        if inspect.isfunction(each) and len(inspect.signature(each).parameters) > PARAMETERS
    }
    assert many == PUBLIC


def test_docstrings_do_not_name_parameters_in_capitals() -> None:
    """A docstring does not name a parameter in capitals. Text in double backquotes, such as ``OLD=NEW``, and the word
    URL are allowed.
    """
    found = []
    for where, node in functions():
        text = re.sub(r"``.*?``", "", ast.get_docstring(node) or "", flags=re.DOTALL)
        names = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} - {"url"}
        found += [(where, name) for name in names if len(name) > 1 and re.search(rf"\b{name.upper()}\b", text)]
    assert found == []
