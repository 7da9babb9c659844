"""Packages that are not there, for tests that run where there are none: whoever needs one is skipped."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from types import ModuleType
from typing import Any

import pytest

__all__ = ["Absent"]


class _Needed(type):
    """What a package that is not there has: it can be named anywhere, in tables of tests too, and used nowhere."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(f"{cls.__name__}.{name}")

    def __call__(cls, *_: object, **__: object) -> Any:
        pytest.skip(f"needs {cls.__name__}", allow_module_level=True)


def _named(name: str) -> Any:
    return _Needed(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(f"{self.__name__}.{name}")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package `name`, and what is in it, as modules in which nothing can be used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the package, None for others."""
        if name.partition(".")[0] != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module of `spec`."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""
