"""Laws that the source of the package itself holds."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PACKAGE = ROOT / "ckptconv"


def test_nothing_runs_a_pickle() -> None:
    """No module of the package loads a pickle or imports what a file names; it imports by name only its own modules."""
    for path in PACKAGE.rglob("*.py"):
        text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not re.search(
            r"\bpickle\.loads?\(|weights_only=False|__import__\(|\beval\(|\bexec\("
            r'|\bimport_module\((?!f?"(\{__name__\}|ckptconv\.(cli|formats|render|stores))\.)',
            text,
        ), path


def test_only_two_packages_import_torch() -> None:
    """No module outside of them names torch in an import."""
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        code = path.read_text().replace("if TYPE_CHECKING:\n    import torch\n", "")
        if re.search(r"^ *(import|from) torch\b", code, re.MULTILINE):
            importing.add(path.parent.name)
    assert importing == {"kernels", "tensors"}


def test_only_the_package_lists_its_names() -> None:
    """An underscore says the same elsewhere, in one place."""
    assert [path for path in PACKAGE.rglob("*.py") if "\n__all__ = " in path.read_text()] == [PACKAGE / "__init__.py"]


def test_every_module_says_what_it_is() -> None:
    """The first line of each file of the package is a docstring."""
    for path in PACKAGE.rglob("*.py"):
        assert path.read_text().startswith(('"""', 'r"""')), path
