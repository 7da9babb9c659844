"""The public names: they are exported and documented, and examples run. No other names are public."""

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
    """``__all__`` is sorted, and each of its names exists. The package has no other public names, except modules."""
    assert ckptconv.__all__ == sorted(ckptconv.__all__, key=lambda name: (not name[0].isupper(), name))
    for name in ckptconv.__all__:
        assert getattr(ckptconv, name) is not None
    others = {name for name in dir(ckptconv) if not name.startswith("_")} - set(ckptconv.__all__)
    assert {name for name in others if not isinstance(getattr(ckptconv, name), ModuleType)} <= {"TYPE_CHECKING", "Any"}
    with pytest.raises(AttributeError, match="nothing"):
        ckptconv.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_public() -> None:
    """All exceptions can be caught without the import of a submodule."""
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = {name for name in classes if not name.startswith("_")}
    assert classes <= set(ckptconv.__all__)


def test_every_public_name_is_documented() -> None:
    """Each public function and class has a docstring. The docstring of a function describes its parameters."""
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
def test_import_does_not_import_torch() -> None:
    """The import of ckptconv does not import torch. Names that need torch import it on first use."""
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
    """Each snippet runs unchanged on files with the names in it."""
    for name, fixture in (("ddp", "dataparallel"), ("two_gpus", "two_gpus"), ("training", "training")):
        shutil.copy(fixtures / f"{fixture}.pt", here / f"{name}.pt")
    runpy.run_path(str(snippet))


def test_a_program_that_reads_many_files_does_not_grow(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls do not accumulate objects, although each call moves all objects to the oldest generation."""
    monkeypatch.setattr(graph, "_MOST_MOVED", 3000)
    ckptconv.inspect(fixtures / "tied.pt")
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        ckptconv.inspect(fixtures / "tied.pt")
    assert len(gc.get_objects()) - before < 3000
