"""Make ``ckptconv/checkpoint/dangerous_globals.txt``: the harmful globals of Python, torch and their dependencies.

    python -m tools.danger_table.make                     add the installed Python, torch and numpy to the table
    python -m tools.danger_table.make --stdlib FOLDER     also add the standard library of another version
    python -m tools.danger_table.make --check             write nothing; fail if the table lacks an entry

The modules are parsed, but never imported or run. Only one module's syntax trees are in memory at a time.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ckptconv.checkpoint.dangerous_globals import is_on_lists
from tools.danger_table import flows, primitives
from tools.danger_table.modules import Class, Entity, External, Function, Library, Module, is_table, read_library

__all__ = ["PACKAGES", "PYTHON", "STDLIB", "Table", "entries", "main", "read_table", "walked"]

TABLE = Path(__file__).resolve().parents[2] / "ckptconv" / "checkpoint" / "dangerous_globals.txt"
STDLIB = Path(os.__file__).parent
PYTHON = platform.python_version()  # the standard library changes between patch releases

#: torch, its dependencies, and those of the command line.
PACKAGES = (
    "torch", "numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing_extensions",
    "setuptools", "pkg_resources", "_distutils_hack", "pip", "safetensors", "click", "rich",
)  # a table  # fmt: skip

#: Packages that the list in ckptconv covers completely, and modules that nobody imports.
_WITHOUT = (
    "antigravity", "distutils.tests", "idlelib.idle_test", "lib2to3.tests", "site-packages", "test", "this",
    "ctypes.test", "sqlite3.test", "tkinter.test", "unittest.test", "turtledemo",
    "torch.testing._internal", "torch._inductor", "torch._vendor", "pip", "setuptools", "pkg_resources",
    "_distutils_hack",
    "sympy",  # evaluates every text that it is called with; one rule covers the package
)  # a table  # fmt: skip

_NO_METHOD = frozenset("=<()[]?")
#: Internals of compilers and build tools. No function returns their objects.
_INNER = ("torch._dynamo", "torch._export", "numpy.distutils", "torch.onnx", "torch.jit")
#: Methods that dicts, strings and tensors also have. ``replace`` is not one of them, because paths have it, too.
_EVERYDAY = frozenset([*dir(dict), *dir(list), *dir(set), *dir(str), "backward", "type"]) - {"replace"}

_HEAD = """\
# Made by tools/danger_table/make.py, which says how; do not edit. A line for each module: what it has that does harm.
# name: a function, or a method of a class (with "?": it only looks something up); Class(): a class whose __init__ does
# it, Class(new): whose __new__ does; table[]: a dict, list or set of the module's own; name=other: the same as another;
# Class<Base: has its methods.
# The lines with a colon: the packages that were read; the Pythons whose library was, as a whole; methods of objects of
# unknown classes; methods written in C, of any object; names under which modules stand in others.
"""


def walked(stdlib: Path, packages: Iterable[str]) -> Library:
    """Read the modules of Python in the folder `stdlib`, and of the installed ones of `packages`."""
    library = Library()
    read_library(library, stdlib, without=[*_WITHOUT, *_tests(stdlib)])
    for name in packages:
        spec = find_spec(name)
        if spec is None or spec.origin is None or name in _WITHOUT:
            continue
        path = Path(spec.origin)
        library.add(name, path.read_bytes(), is_package=path.stem == "__init__")
        if path.stem == "__init__":
            read_library(library, path.parent, name, without=[*_WITHOUT, *_tests(path.parent, name)])
    return library


def _tests(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield the names of the test packages below `folder`, which is the package `prefix`."""
    for path in folder.rglob("tests"):
        yield ".".join([*([prefix] if prefix else []), *path.relative_to(folder).parts])


def entries(library: Library, known: Mapping[str, Container[str]] = MappingProxyType({})) -> dict[str, set[str]]:
    """Return the harmful entries of each module of `library`, in the notation of the table.

    `known` contains the entries of the table for other versions. A module that exports one of these functions gets an
    entry, too.
    """
    verdicts = flows.judge(
        library,
        primitives.is_harmful,
        primitives.is_always,
        primitives.is_harmless,
        primitives.is_alone,
        primitives.METHODS,
    )
    return _Entries(library, verdicts, known).all()


class _Entries:
    def __init__(self, library: Library, verdicts: flows.Verdicts, known: Mapping[str, Container[str]]) -> None:
        self.library = library
        self.verdicts = verdicts
        self.known = known
        self.found: dict[str, set[str]] = defaultdict(set)
        self.classes: set[Class] = set()

    def all(self) -> dict[str, set[str]]:
        for function in self.library.functions:
            if self.is_harmful(function):
                only_looks = not self.verdicts.harm[function] and function not in self.verdicts.always
                mark = "?" if only_looks and function.owner is not None else ""
                self.found[function.module.name].add(function.name + mark)
                if function.owner is not None:
                    self.classes.add(function.owner)
        for each in self.library.classes:
            made = self.made_harmful(each)
            if made is not None:
                self.found[each.module.name].add(each.name + made)
                self.classes.add(each)
        self.inherit()
        for module in self.library.modules.values():
            self.lent(module)
        for name in primitives.HARMFUL:
            if not name.endswith("."):
                self.in_c(name)
        return self.found

    def in_c(self, full: str) -> None:
        """Add an entry for the C function with the name `full`. For a method, the name of the class is part of the
        entry.
        """
        module, _, name = full.rpartition(".")
        if module.rpartition(".")[2][:1].isupper():
            module, _, owner = module.rpartition(".")
            name = f"{owner}.{name}"
        self.found[module].add(name)

    def is_harmful(self, function: Function) -> bool:
        found = self.verdicts
        if primitives.is_harmful(str(function)):
            return True
        return bool(found.harm[function] or found.look_up[function] or function in found.always)

    def made_harmful(self, made: Class) -> str | None:
        """Return the mark of the class `made` if its instances do harm, or None.

        The mark is empty for a finalizer. Otherwise it names the constructor whose argument is harmful.
        """
        finalizers = self.library.member(made, "__del__")
        if any(isinstance(each, Function) and self.is_harmful(each) for each in finalizers):
            return ""
        if any(isinstance(base, External) and primitives.is_harmful(base.name) for base in self.library.bases(made)):
            return "(new)"
        for name, mark in (("__new__", "(new)"), ("__init__", "()")):
            for function in self.library.member(made, name):
                harm = self.verdicts.harm[function] if isinstance(function, Function) else 0
                if harm >> 1 or (isinstance(function, Function) and function in self.verdicts.always):
                    return mark
        return None

    def inherit(self) -> None:
        """Add the classes that inherit harmful methods."""
        before = -1
        while before != len(self.classes):
            before = len(self.classes)
            for each in self.library.classes:
                bases = [base for base in self.library.bases(each) if isinstance(base, Class) and base in self.classes]
                if bases:
                    self.classes.add(each)
                    self.found[each.module.name] |= {f"{each.name}<{base}" for base in bases}

    def lent(self, module: Module) -> None:
        """Add the harmful functions and classes that `module` imports, and its own mutable tables."""
        found = self.found[module.name]
        for full in primitives.HARMFUL:  # the only known names of a C module that is imported with *
            of, _, name = full.rpartition(".")
            if name and of in module.stars and of not in self.library.modules and not name.startswith("_"):
                found.add(name)
        for name in self.library.exported(module):
            for entity in self.library.named(module, name):
                found |= self.lent_as(name, entity, module)
        for name, bound in module.bound.items():
            if any(is_table(each) for each in bound) and not name.startswith("__"):
                found.add(f"{name}[]")
            for each in bound:  # an instance of a known class, created at import time
                if isinstance(each, ast.Call):
                    found |= {
                        f"{name}={of}"
                        for of in self.library.expression(each.func, module)
                        if isinstance(of, Class) and of in self.classes
                    }

    def lent_as(self, name: str, entity: Entity, module: Module) -> set[str]:
        own = f"{module.name}.{name}" == str(entity)
        if isinstance(entity, Function):
            known = entity.name in self.known.get(entity.module.name, ())
            return {name} if known or self.is_harmful(entity) else set()
        if isinstance(entity, Class) and entity in self.classes and not own:
            return {f"{name}={entity}"}
        if isinstance(entity, External) and primitives.is_harmful(entity.name):
            return {name}
        return set()


def methods(found: dict[str, set[str]]) -> set[str]:
    """Return the names of harmful methods whose instances a pickle can get without a dangerous global.

    A method of an object of unknown class is judged by these names.
    """
    found_names = set()
    for module, words in found.items():
        for word in words:
            owner, _, name = word.rpartition(".")
            if not owner or not _NO_METHOD.isdisjoint(word) or name.startswith("__") or name in _EVERYDAY:
                continue
            is_made = {f"{owner}()", f"{owner}(new)", owner}.isdisjoint(words)
            if is_made and not module.startswith(_INNER) and not is_on_lists(module, owner):
                found_names.add(name)
    return found_names


def aliases(library: Library) -> dict[str, set[str]]:
    """Return the names under which modules import other modules, if these differ from the names of the modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in library.modules.values():
        for name in module.bound:
            for entity in library.named(module, name):
                is_module = isinstance(entity, Module) or str(entity) in sys.stdlib_module_names
                if is_module and str(entity) != name:
                    found[name].add(str(entity))
    return found


@dataclass
class Table:
    """The content of the table.

    Attributes:
        packages: The packages that were read.
        pythons: The versions of Python whose complete standard library was read.
        names: The modules for each name under which they are imported elsewhere.
        found: The entries of each module.
    """

    packages: set[str] = field(default_factory=set)
    pythons: set[str] = field(default_factory=set)
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    found: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, library: Library) -> list[str]:
        """Add the entries of the modules of `library`. Return the new ones."""
        new = []
        for module, words in entries(library, self.found).items():
            new += [f"{module} {word}" for word in sorted(words - self.found[module])]
            self.found[module] |= words
        for name, modules in aliases(library).items():
            self.names[name] |= modules
        return new

    def text(self) -> str:
        """Return the text of the file."""
        heads = {
            "packages": self.packages,
            "pythons": self.pythons,
            "methods": methods(self.found) | primitives.METHODS,
            "in-c": set(primitives.IN_C),
            **dict(sorted(self.names.items())),
        }
        lines = [f"{head}: {' '.join(sorted(words))}" for head, words in heads.items()]
        lines += (f"{module} {' '.join(sorted(words))}" for module, words in sorted(self.found.items()) if words)
        return _HEAD + "\n".join(lines) + "\n"


def read_table(path: Path = TABLE) -> Table:
    """Return the table in the file `path`. Without a file, return an empty table."""
    table = Table()
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        head, *words = line.split()
        if head in ("packages:", "pythons:"):
            (table.packages if head == "packages:" else table.pythons).update(words)
        elif head.endswith(":") and head not in ("methods:", "in-c:"):
            table.names[head[:-1]].update(words)
        elif not head.endswith(":") and head != "#":
            table.found[head].update(words)
    return table


def main(argv: list[str] | None = None) -> int:
    """Update the table, or check it. Return the exit status."""
    gc.disable()  # no syntax tree becomes garbage
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stdlib", action="append", default=[], type=Path, help="the folder of another version")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is not in the table")
    args = parser.parse_args(argv)
    table = read_table()
    table.packages |= {*sys.stdlib_module_names, *PACKAGES}
    table.pythons.add(PYTHON)
    new = table.add(walked(STDLIB, PACKAGES))
    for stdlib in args.stdlib:
        new += table.add(walked(stdlib, ()))
    if args.check:
        print(*new, sep="\n")
        return 1 if new else 0
    TABLE.write_text(table.text(), "utf-8")
    print(f"{len(new)} new, {sum(map(len, table.found.values()))} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
