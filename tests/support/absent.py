"""Stand-ins for packages that are not installed. A test that uses one is skipped."""

from __future__ import annotations

import copyreg
import importlib.abc
import importlib.machinery
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

__all__ = ["Absent", "uses"]


uses: list[str] = []
"""The names of the missing members that were used while tests were collected."""


def _used(cls: Any, *_: object, **__: object) -> Any:
    """Skip the running test. While tests are collected, return a stand-in, so that tables can be made."""
    if "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip(f"needs {cls.__name__}")
    uses.append(cls.__name__)
    return _named(f"{cls.__name__}(…)")


class _Needed(type):
    """A member of a missing package. It can be named anywhere, but a test that uses it is skipped."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return _named(f"{cls.__name__}.{name}")

    def __repr__(cls) -> str:
        return f"_Needed {cls.__name__}"

    def __iter__(cls) -> Iterator[Any]:
        return iter([_used(cls)])

    def __int__(cls) -> int:
        return len(repr(_used(cls)))

    def __float__(cls) -> float:
        return float(int(cls))

    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __matmul__ = __truediv__ = _used
    __pow__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _used


def _pickled(cls: Any) -> tuple[Any, ...]:
    return str, (_used(cls).__name__,)


copyreg.pickle(_Needed, _pickled)


def _named(name: str) -> Any:
    return _Needed(name, (Exception,), {})  # so that ``except`` accepts it


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return _named(f"{self.__name__}.{name}")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find the package `name` and its modules as modules whose members cannot be used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the package, or None for other modules."""
        if name.partition(".")[0] != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of `spec`."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""
