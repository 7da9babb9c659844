"""Functions fit a screen, and take what belongs together as one thing."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptconv

pytestmark = pytest.mark.untraced
LINES, PARAMETERS = 60, 8
#: Their keywords are what a user can ask for, declared in ``conversion.options``.
PUBLIC = {"convert", "diff", "jobs_in", "plan", "save"}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function of the package, and where it stands."""
    for path in sorted(Path(ckptconv.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path}:{node.lineno} {node.name}", node


def test_functions_fit_a_screen() -> None:
    """From the line with `def` to the last."""
    assert [where for where, node in functions() if (node.end_lineno or 0) - node.lineno >= LINES] == []


def test_functions_take_few_things() -> None:
    """Not counted are `self` and `cls`; what users can ask of a function may be much."""
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
