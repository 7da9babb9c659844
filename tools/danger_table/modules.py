"""Parse the modules of Python and other libraries, and resolve names in them. No module is imported.

A module can bind a name in several ways, for example for each platform. Then the name resolves to all of them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

__all__ = ["Class", "Entity", "External", "Function", "Library", "Module", "plain_attribute", "read_library"]

_DEEPEST = 12  # re-exports in a chain
_BUILTINS = frozenset(dir(builtins))
_PLAIN = frozenset(["builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol"])  # bases without harmful methods
_TABLES = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)

FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


@dataclass(eq=False)
class Module:
    """A module: its name, its source, and the expressions, classes, functions and imports that it binds to names."""

    name: str
    is_package: bool
    source: bytes
    bound: dict[str, list[object]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules from which it imports everything

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False)
class Class:
    """A class: its module and name, its bases as expressions, and the values that its body binds to names."""

    module: Module
    name: str
    bases: list[ast.expr]
    bound: dict[str, list[object]] = field(default_factory=dict)
    kept: dict[str, list[ast.expr]] = field(default_factory=dict)  # values that its methods assign to ``self``

    def __str__(self) -> str:
        return f"{self.module.name}.{self.name}"


@dataclass(eq=False)
class Function:
    """A function or method, and the class of a method. The body of ``node`` is empty, because all bodies take
    gigabytes.
    """

    module: Module
    name: str
    node: FunctionNode
    owner: Class | None = None
    is_static: bool = False

    def __str__(self) -> str:
        return f"{self.module.name}.{self.name}"


@dataclass(frozen=True)
class External:
    """An object without known source: a builtin, a C function or a module that was not read. ``name`` is its
    full name.
    """

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Imported:
    """``from module import name``, or ``import module`` if `name` is None."""

    module: str
    name: str | None


Entity: TypeAlias = "Module | Class | Function | External"


class Library:
    """The modules by name, and the resolution of names in them."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.functions: list[Function] = []
        self.classes: list[Class] = []
        self._by_module: dict[str, list[Function]] = {}
        self._known: dict[tuple[int, str], list[Entity]] = {}

    def add(self, name: str, source: bytes, *, is_package: bool) -> None:
        """Parse the `source` of the module `name`.

        Raises:
            SyntaxError: The source is not valid Python.
            ValueError: The source contains null bytes.
        """
        module = self.modules[name] = Module(name, is_package, source)
        known = len(self.functions)
        self._body(ast.parse(source).body, module, None, "")
        self._by_module[name] = self.functions[known:]
        for function in self.functions[known:]:
            function.node.body = []

    def of_module(self, module: Module) -> list[Function]:
        """Return the functions and methods of `module`, without nested functions."""
        return self._by_module.get(module.name, [])

    def bodies(self, module: Module) -> dict[tuple[int, int], FunctionNode]:
        """Return the functions of `module` with their bodies, by line and column."""
        return {
            (node.lineno, node.col_offset): node
            for node in _bodies(ast.parse(module.source).body)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }

    def _body(self, body: Iterable[ast.stmt], module: Module, owner: Class | None, prefix: str) -> None:
        bound = module.bound if owner is None else owner.bound
        for node in _statements(body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words = {getattr(each, "id", "") for each in node.decorator_list}
                function = Function(module, prefix + node.name, node, owner, "staticmethod" in words)
                self.functions.append(function)
                if owner is not None:
                    _keep(function, owner)
                bound.setdefault(node.name, []).append(function)
            elif isinstance(node, ast.ClassDef):
                inner = Class(module, prefix + node.name, node.bases)
                self.classes.append(inner)
                bound.setdefault(node.name, []).append(inner)
                self._body(node.body, module, inner, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, imported in imports(node, module):
                    if name == "*":
                        module.stars.append(imported.module)
                    else:
                        bound.setdefault(name, []).append(imported)
            else:
                for name, value in _assigned(node):
                    bound.setdefault(name, []).append(value)

    def named(self, module: Module, name: str, depth: int = 0) -> list[Entity]:
        """Return all entities that `name` can be in `module`."""
        key = (id(module), name)
        if key in self._known:
            return self._known[key]
        if depth > _DEEPEST:
            return []
        self._known[key] = []  # in case of circular imports
        found: list[Entity] = []
        for each in module.bound.get(name, ()):
            found += self._meant(each, module, depth + 1)
        submodule = self.modules.get(f"{module.name}.{name}")
        if not found and submodule is not None:
            found.append(submodule)
        elif not found and Imported(module.name, name) in module.bound.get(name, ()):  # ``from torch import _C``
            found.append(External(f"{module.name}.{name}"))
        if name not in module.bound:
            stars = [self.module(star) for star in module.stars]
            for star in stars:
                found += self.attribute(star, name, depth + 1) if isinstance(star, Module) else []
            if not found and name in _BUILTINS:
                found.append(External(f"builtins.{name}"))
            elif not found:
                found += (External(f"{star}.{name}") for star in stars if isinstance(star, External))
        self._known[key] = list(dict.fromkeys(found))
        return self._known[key]

    def exported(self, module: Module, seen: frozenset[str] = frozenset()) -> set[str]:
        """Return the names of `module`: those that it binds, and the public ones of modules from which it imports
        everything.
        """
        found = set(module.bound)
        for star in module.stars:
            of = self.modules.get(star)
            if of is not None and star not in seen:
                found |= {name for name in self.exported(of, seen | {module.name}) if not name.startswith("_")}
        return found

    def _meant(self, bound: object, module: Module, depth: int) -> list[Entity]:
        if isinstance(bound, (Class, Function)):
            return [bound]
        if isinstance(bound, Imported):
            of = self.module(bound.module)
            return [of] if bound.name is None else self.attribute(of, bound.name, depth)
        if isinstance(bound, (ast.Name, ast.Attribute, ast.Call)):
            return self.expression(bound, module, depth)
        return []

    def module(self, name: str) -> Module | External:
        """Return the module `name`. If it was not read, return an external entity."""
        return self.modules.get(name) or External(name)

    def expression(self, node: ast.expr, module: Module, depth: int = 0) -> list[Entity]:
        """Return the entities of a name in `module`, with or without dots, or of a ``getattr`` with a constant name."""
        node = plain_attribute(node)
        if isinstance(node, ast.Name):
            return self.named(module, node.id, depth)
        if isinstance(node, ast.Attribute):
            return [
                found
                for of in self.expression(node.value, module, depth)
                for found in self.attribute(of, node.attr, depth)
            ]
        return []

    def attribute(self, of: Entity, name: str, depth: int = 0) -> list[Entity]:
        """Return the entities of the attribute `name` of `of`."""
        if isinstance(of, External):
            full = f"{of.name}.{name}"
            return [self.modules.get(full) or External(full)]
        if isinstance(of, Module):
            if depth > _DEEPEST:
                return []
            found = self.named(of, name, depth)
            return found or ([External(f"{of.name}.{name}")] if name not in of.bound and not of.stars else [])
        if isinstance(of, Class):
            return self.member(of, name)
        return []

    def member(self, of: Class, name: str, depth: int = 0) -> list[Entity]:
        """Return the entities of the member `name` of the class `of`, or of the first base that has this member."""
        if name in of.bound:
            return [found for each in of.bound[name] for found in self._meant(each, of.module, 0)]
        for base in self.bases(of) if depth < _DEEPEST else ():
            external: list[Entity] = [] if str(base) in _PLAIN else [External(f"{base}.{name}")]
            found = self.member(base, name, depth + 1) if isinstance(base, Class) else external
            if found:
                return found
        return []

    def held(self, of: Class, name: str, depth: int = 0) -> list[Entity]:
        """Return the entities that methods of the class `of`, or of its bases, assign to the attribute `name` of
        ``self``.
        """
        if name in of.kept:
            return [found for each in of.kept[name] for found in self.expression(each, of.module)]
        bases = self.bases(of) if depth < _DEEPEST else []
        return [found for base in bases if isinstance(base, Class) for found in self.held(base, name, depth + 1)]

    def bases(self, of: Class) -> list[Entity]:
        """Return the known bases of the class `of`."""
        return [base for node in of.bases for base in self.expression(node, of.module) if base is not of]


def plain_attribute(node: ast.expr) -> ast.expr:
    """Return ``x.y`` for ``getattr(x, "y")``, and every other expression unchanged."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return ast.Attribute(node.args[0], name.value, ast.Load())
    return node


def _keep(function: Function, owner: Class) -> None:
    """Record the names that `function` assigns to attributes of its first parameter, in the class `owner`."""
    args = function.node.args.args
    for node in _bodies(function.node.body) if args else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == args[0].arg:
                    owner.kept.setdefault(target.attr, []).append(node.value)


def _bodies(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of `body` and all statements nested in them, in no particular order."""
    todo = list(body)
    while todo:
        node = todo.pop()
        yield node
        for part in ("body", "orelse", "finalbody"):
            todo += getattr(node, part, [])
        for handler in getattr(node, "handlers", []):
            todo += handler.body


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of `body`, including those of conditions, loops, ``with`` and ``try``."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
        yield node


def imports(node: ast.Import | ast.ImportFrom, module: Module) -> Iterator[tuple[str, Imported]]:
    """Yield the names that the import `node` in `module` binds, and the imported objects."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            yield name, Imported(alias.name if alias.asname else name, None)
        return
    origin = node.module or ""
    if node.level:
        package = module.name.split(".")
        package = package[: len(package) - node.level + module.is_package]
        origin = ".".join([*package, *([origin] if origin else [])])
    for alias in node.names:
        yield alias.asname or alias.name, Imported(origin, alias.name)


def _assigned(node: ast.stmt) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value


def is_table(bound: object) -> bool:
    """Return whether `bound` is a dict, list or set."""
    if isinstance(bound, ast.Call):
        name = bound.func.attr if isinstance(bound.func, ast.Attribute) else getattr(bound.func, "id", "")
        return name in ("dict", "list", "set", "defaultdict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary")
    return isinstance(bound, _TABLES)


def read_library(library: Library, folder: Path, prefix: str = "", *, without: Iterable[str] = ()) -> None:
    """Read all modules in `folder`, which is the package `prefix`, into `library`.

    Modules in `without`, and modules below them, are left out. So are files that this Python cannot parse.
    """
    left_out = set(without)
    for path in sorted(folder.iterdir()):
        name = f"{prefix}.{path.stem}" if prefix else path.stem
        if name in left_out or not path.stem.isidentifier():
            continue
        if path.is_dir() and path.suffix == "" and path.name != "__pycache__":
            if (path / "__init__.py").is_file():
                _read(library, path / "__init__.py", name)
            if prefix or (path / "__init__.py").is_file():
                read_library(library, path, name, without=left_out)
        elif path.suffix == ".py" and path.stem != "__init__":
            _read(library, path, name)


def _read(library: Library, path: Path, name: str) -> None:
    try:
        library.add(name, path.read_bytes(), is_package=path.stem == "__init__")
    except (SyntaxError, ValueError):
        library.modules.pop(name, None)
