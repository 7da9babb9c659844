"""Laws of the package's own source."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PACKAGE = ROOT / "ckptconv"


def test_nothing_runs_a_pickle() -> None:
    """No module of the package loads a pickle or imports a module that a file names. Imports by name are limited to
    modules of the package.
    """
    for path in PACKAGE.rglob("*.py"):
        text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not re.search(
            r"\bpickle\.loads?\(|weights_only=False|__import__\(|\beval\(|\bexec\("
            r'|\bimport_module\((?!f?"(\{__name__\}|ckptconv\.(cli|formats|render|stores))\.)',
            text,
        ), path


def test_only_two_packages_import_torch() -> None:
    """Only modules in ``kernels`` and ``tensors`` import torch, apart from imports for type checking."""
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        code = path.read_text().replace("if TYPE_CHECKING:\n    import torch\n", "")
        if re.search(r"^ *(import|from) torch\b", code, re.MULTILINE):
            importing.add(path.parent.name)
    assert importing == {"kernels", "tensors"}


def test_only_the_package_lists_its_names() -> None:
    """Only ``ckptconv/__init__.py`` has an ``__all__``. Other modules mark private names with an underscore."""
    assert [path for path in PACKAGE.rglob("*.py") if "\n__all__ = " in path.read_text()] == [PACKAGE / "__init__.py"]


def test_every_module_has_a_docstring() -> None:
    """Each file of the package begins with a docstring."""
    for path in PACKAGE.rglob("*.py"):
        assert path.read_text().startswith(('"""', 'r"""')), path
