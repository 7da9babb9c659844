"""The public names: all exported, documented, typed as users write them, and nothing else."""

from __future__ import annotations

import gc
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ckptconv
from ckptconv import errors
from ckptconv.pickles import graph
from tests.support.paths import SUPPORT

SNIPPETS = sorted((SUPPORT / "snippets").glob("*.py"))


def test_every_name_is_exported_and_nothing_else() -> None:
    """``__all__`` is sorted, each name in it is there, and what is there beside it is a module or private."""
    assert ckptconv.__all__ == sorted(ckptconv.__all__, key=lambda name: (not name[0].isupper(), name))
    for name in ckptconv.__all__:
        assert getattr(ckptconv, name) is not None
    others = {name for name in dir(ckptconv) if not name.startswith("_")} - set(ckptconv.__all__)
    assert {name for name in others if not isinstance(getattr(ckptconv, name), ModuleType)} <= {"TYPE_CHECKING", "Any"}
    with pytest.raises(AttributeError, match="nothing"):
        ckptconv.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_public() -> None:
    """Who catches one need not know a module."""
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = {name for name in classes if not name.startswith("_")}
    assert classes <= set(ckptconv.__all__)


def test_every_public_name_is_documented() -> None:
    """Each function and class has a docstring; each parameter of a function stands in it."""
    for name in ckptconv.__all__:
        value = getattr(ckptconv, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        text = inspect.getdoc(value)
        assert text, name
        if inspect.isfunction(value):
            for parameter in inspect.signature(value).parameters.keys() - {"path", "obj"}:
                assert parameter.upper() in text or re.search(rf"\n    (\*\*)?{parameter}: ", text), (name, parameter)
            assert "Raises" in text or name in ("convert_many", "devices"), name
        for method, function in inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else ():
            if not method.startswith("_"):
                assert inspect.getdoc(function), (name, method)


@pytest.mark.slow
def test_importing_it_does_not_import_torch() -> None:
    """Nor do the functions that need none; the names that need it are there."""
    code = """
import sys, ckptconv
assert "torch" not in sys.modules
ckptconv.strip_prefix({"module.a": 1}, "module.")
assert "torch" not in sys.modules
assert callable(ckptconv.remap) and "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.stem)
def test_snippets_run(snippet: Path, fixtures: Path, here: Path) -> None:
    """As they stand, on files of the kind that they name."""
    for name, fixture in (("ddp", "dataparallel"), ("two_gpus", "two_gpus"), ("training", "training")):
        shutil.copy(fixtures / f"{fixture}.pt", here / f"{name}.pt")
    runpy.run_path(str(snippet))


def test_a_program_that_reads_many_files_does_not_grow(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected, although each call moves all objects to the oldest generation."""
    monkeypatch.setattr(graph, "_MOST_MOVED", 3000)
    ckptconv.inspect(fixtures / "tied.pt")
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        ckptconv.inspect(fixtures / "tied.pt")
    assert len(gc.get_objects()) - before < 3000
