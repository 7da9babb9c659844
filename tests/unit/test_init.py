"""The package itself: its public names, and the cost of its import."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import ckptconv


def test_each_public_name_exists() -> None:
    """``__all__`` contains the lazy names and the errors, which are imported with the package."""
    assert sorted(ckptconv.__all__) == ckptconv.__all__
    errors = {name for name in ckptconv.__all__ if hasattr(ckptconv.errors, name)}
    assert set(ckptconv._HOME_OF) == set(ckptconv.__all__) - errors
    for name in ckptconv.__all__:
        assert getattr(ckptconv, name) is not None, name
    assert set(ckptconv.__all__) < set(dir(ckptconv))


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="module 'ckptconv' has no attribute 'convrt'"):
        _ = ckptconv.convrt  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [each for each in ckptconv.__all__ if inspect.isfunction(getattr(ckptconv, each))])
def test_docstrings_of_functions(name: str) -> None:
    """The docstring of each public function has the sections of the Google style."""
    text = inspect.getdoc(getattr(ckptconv, name)) or ""
    sections = ["Args", "Returns", "Raises"]
    if name in ("convert_many", "devices"):  # these raise none of our errors
        sections.pop()
    assert [section for section in sections if f"\n{section}:\n" not in text] == []
    assert len(text.splitlines()[0]) <= 100


CLASSES = [name for name in ckptconv.__all__ if inspect.isclass(getattr(ckptconv, name))]


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_of_classes(name: str) -> None:
    """The name of each field is documented. The docstring of a method with parameters describes them and the result."""
    cls = getattr(ckptconv, name)
    text = inspect.getdoc(cls) or ""
    assert len(text.splitlines()[0]) <= 120
    fields = vars(cls).get("__annotations__", {})
    assert [each for each in fields if not re.search(rf"\b{each}\b", text + _comments(cls))] == []
    for method, function in vars(cls).items():
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        said, signature = inspect.getdoc(function) or "", inspect.signature(function)
        assert said
        if len(signature.parameters) > 1:
            assert "\nArgs:\n" in said, method
            assert "\nReturns:\n" in said or "\nYields:\n" in said or signature.return_annotation == "None", method


def _comments(cls: type) -> str:
    """Return the Sphinx comments above the attributes of `cls`."""
    return "\n".join(re.findall(r"(?:^ +#:.*\n)+.*", inspect.getsource(cls), re.MULTILINE))


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has imported after `code`."""
    command = [
        sys.executable,
        "-c",
        f"import sys; before = {{*sys.modules}}; {code}; print(*{{*sys.modules}} - before)",
    ]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_the_package_imports_only_the_errors() -> None:
    """``import ckptconv`` imports the errors and the modules that they need, but nothing else of the package."""
    modules = modules_after("import ckptconv")
    assert {name for name in modules if name.startswith("ckptconv")} == {"ckptconv", "ckptconv.errors"}
    assert not {"typing", "re", "dataclasses", "enum", "torch"} & modules


def test_a_name_imports_what_it_needs() -> None:
    """``strip_prefix`` works on a state dict in memory, so it imports neither torch nor a reader of files."""
    modules = modules_after("import ckptconv; ckptconv.strip_prefix")
    assert "ckptconv.edits.in_memory" in modules
    assert not {"torch", "ckptconv.tensors.files", "ckptconv.formats.opening"} & modules
