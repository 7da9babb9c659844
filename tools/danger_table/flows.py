"""Follow the arguments of each function: do they reach something harmful, or do they look up a name?

A *label* is a bit for each parameter. A variable has the labels of all values that are assigned to it anywhere in the
function. The result of a call has the labels of its arguments. A function is harmful if one of its parameters reaches
an argument of something harmful, through any number of calls whose targets are known. A method of an object of unknown
class is judged by its name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tools.danger_table.modules import (
    Class,
    Entity,
    External,
    Function,
    FunctionNode,
    Imported,
    Library,
    Module,
    imports,
    plain_attribute,
)

__all__ = ["Flows", "Verdicts", "judge"]

#: Functions whose result reveals almost nothing about their arguments.
_FORGETFUL = frozenset(["bool", "float", "hash", "id", "int", "isinstance", "issubclass", "len", "callable", "hasattr"])
#: Functions that call their first argument with the other arguments, now or later.
_PASSING = frozenset(["functools.partial", "builtins.map", "builtins.filter"])
_ROUNDS = 6  # assignments can depend on other assignments
_NAMELESS = frozenset([ast.Load, ast.Store, ast.Del, ast.Constant])
_COLLECTED = frozenset(
    [
        ast.Call, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension,
        ast.withitem, ast.Return, ast.Yield, ast.YieldFrom, ast.Import, ast.ImportFrom, ast.FunctionDef,
        ast.AsyncFunctionDef, ast.Subscript,
    ]
)  # a table  # fmt: skip


@dataclass(slots=True)
class Called:
    """A call of `what`, or of the method `method` of an object, with the labels of the object, arguments and
    keywords.
    """

    what: list[Entity]
    method: str | None
    of: int
    args: list[int]
    keywords: dict[str | None, int]
    through: bool  # whether a method is called through an instance, which is its first argument
    rest: int = 0  # the labels of ``*args``


@dataclass
class Flows:
    """The parameters and calls of a function, and the indexes of the calls whose result it returns or calls."""

    parameters: list[str]
    positional: int
    vararg: int | None
    kwarg: int | None
    calls: list[Called] = field(default_factory=list)
    results: set[int] = field(default_factory=set)


class _Reader:
    """A pass over the body of one function."""

    def __init__(self, library: Library, function: Function, node: FunctionNode) -> None:
        self.library = library
        self.function = function
        self.owner = function.owner
        self.flows = _parameters(node)
        self.named: dict[int, tuple[str, ...]] = {}
        self.labels = {name: 1 << i for i, name in enumerate(self.flows.parameters)}
        self.own = self.flows.parameters[0] if self.owner and not function.is_static and self.flows.parameters else None
        self.imported: dict[str, list[Imported]] = defaultdict(list)
        self.same: dict[str, list[Entity]] = {}  # local names for functions, classes and modules
        self.made: dict[str, list[Class]] = {}  # the classes of variables that contain an instance
        self.origins: dict[str, set[int]] = defaultdict(set)  # the calls whose results variables contain
        self.inner: dict[str, FunctionNode] = {}
        self.assigned: list[tuple[ast.expr, ast.expr]] = []
        self.called: list[ast.Call] = []
        self.given: list[ast.expr] = []  # returned and yielded values
        self.looked_up: list[ast.Subscript] = []
        for each in _walk(node):
            if type(each) in _COLLECTED:
                self._collect(each, node)

    def read(self) -> Flows:
        numbers = {id(call): i for i, call in enumerate(self.called)}
        self._name_locals()
        for _ in range(_ROUNDS):
            before = dict(self.labels)
            for target, value in self.assigned:
                self._assign(target, self.label(value))
            for call in self.called:
                if isinstance(call.func, ast.Name) and call.func.id in self.inner:
                    self._bind_inner(self.inner[call.func.id], call)
            if before == self.labels:
                break
        for _ in range(2):
            for target, value in self.assigned:
                if isinstance(target, ast.Name):
                    self.origins[target.id] |= self._origins(value, numbers)
        self.flows.calls = [self._call(call) for call in self.called]
        for value in self.given + [call.func for call in self.called]:
            self.flows.results |= self._origins(value, numbers)
        for each in self.looked_up:
            self._table(each)
        return self.flows

    def _collect(self, node: ast.AST, whole: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.called.append(node)
        elif isinstance(node, ast.Assign):
            self.assigned += ((target, node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            if node.value is not None:
                self.assigned.append((node.target, node.value))
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self.assigned.append((node.target, node.iter))
        elif isinstance(node, ast.withitem):
            if node.optional_vars is not None:
                self.assigned.append((node.optional_vars, node.context_expr))
        elif isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            if node.value is not None:
                self.given.append(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, imported in imports(node, self.function.module):
                self.imported[name].append(imported)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node is not whole:
            self.inner[node.name] = node
        elif isinstance(node, ast.Subscript):
            self.looked_up.append(node)

    def _name_locals(self) -> None:
        for target, value in self.assigned:
            if not isinstance(target, ast.Name):
                continue
            if isinstance(value, (ast.Name, ast.Attribute, ast.Call)) and (found := self.entities(value)):
                self.same.setdefault(target.id, []).extend(found)
            if isinstance(value, ast.Call):
                classes = [each for each in self.entities(value.func) if isinstance(each, Class)]
                self.made.setdefault(target.id, []).extend(classes)
        for call in self.called:
            if getattr(call.func, "id", None) == "isinstance" and len(call.args) == 2:
                self._narrow(*call.args)
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "__init__" and self.own:
                own = ast.Name(self.own, ast.Store())  # the arguments of the base's constructor end up in the instance
                self.assigned += ((own, each) for each in [*call.args, *(word.value for word in call.keywords)])
        args = self.function.node.args
        defaulted = [*args.posonlyargs, *args.args][len(args.posonlyargs) + len(args.args) - len(args.defaults) :]
        for name, default in [
            *zip(defaulted, args.defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
        ]:
            if isinstance(default, (ast.Name, ast.Attribute)):
                self.same.setdefault(name.arg, []).extend(self.library.expression(default, self.function.module))

    def _narrow(self, value: ast.expr, classes: ast.expr) -> None:
        """Record that `value`, if it is a variable, is an instance of one of `classes`, because the function tests
        this.
        """
        for each in classes.elts if isinstance(classes, ast.Tuple) else [classes]:
            if isinstance(value, ast.Name):
                found = [entity for entity in self.entities(each) if isinstance(entity, Class)]
                self.made.setdefault(value.id, []).extend(found)

    def _assign(self, target: ast.expr, labels: int) -> None:
        if isinstance(target, ast.Name):
            self.labels[target.id] = self.labels.get(target.id, 0) | labels
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._assign(each, labels)
        elif isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
            self._assign(target.value, labels)

    def _bind_inner(self, node: FunctionNode, call: ast.Call) -> None:
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        for name, value in zip(names, call.args):  # noqa: B905 (of different lengths)
            self.labels[name] = self.labels.get(name, 0) | self.label(value)
        for keyword in call.keywords:
            if keyword.arg:
                self.labels[keyword.arg] = self.labels.get(keyword.arg, 0) | self.label(keyword.value)

    def label(self, node: ast.AST) -> int:
        """Return the labels of the expression `node`."""
        found = 0
        for name in self.names(node):
            found |= self.labels.get(name, 0)
        return found

    def names(self, node: ast.AST) -> tuple[str, ...]:
        """Return the names of the variables in the expression `node` that its value depends on."""
        if isinstance(node, ast.Name):
            return (node.id,)
        if isinstance(node, (ast.Constant, ast.Compare)):
            return ()
        known = self.named.get(id(node))
        if known is None:
            found: list[str] = []
            for child in _parts(node):
                found += self.names(child)
            known = self.named[id(node)] = tuple(dict.fromkeys(found))
        return known

    def _origins(self, node: ast.expr, numbers: dict[int, int]) -> set[int]:
        """Return the numbers of the calls whose result is the value of `node` or a part of it."""
        if isinstance(node, ast.Call):
            return {numbers[id(node)]}
        if isinstance(node, ast.Name):
            return set(self.origins[node.id]) if node.id in self.origins else set()
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.Await)):
            return self._origins(node.value, numbers)
        if isinstance(node, ast.IfExp):
            return self._origins(node.body, numbers) | self._origins(node.orelse, numbers)
        if isinstance(node, (ast.Tuple, ast.List)):
            return set().union(*(self._origins(each, numbers) for each in node.elts))
        if isinstance(node, ast.BoolOp):
            return set().union(*(self._origins(each, numbers) for each in node.values))
        return set()

    def entities(self, node: ast.expr) -> list[Entity]:
        """Return the modules, classes and functions that `node` can be, as far as they are known."""
        node = plain_attribute(node)
        if isinstance(node, ast.Name):
            if node.id in self.imported:
                return [each for imported in self.imported[node.id] for each in self._imported(imported)]
            if node.id in self.same:
                return self.same[node.id]
            return [] if node.id in self.labels else self.library.named(self.function.module, node.id)
        if isinstance(node, ast.Attribute):
            found = [each for of in self.objects(node.value) for each in self.library.attribute(of, node.attr)]
            if isinstance(node.value, ast.Name) and node.value.id == self.own and self.owner:
                found = [*found, *self.library.held(self.owner, node.attr)]
            return found
        return []

    def objects(self, node: ast.expr) -> list[Entity]:
        """Return the entities that `node` can be. For an instance, return its classes."""
        if isinstance(node, ast.Name):
            if node.id == self.own and self.owner:
                return [self.owner]
            if self.made.get(node.id):
                return [*self.made[node.id]]
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super" and self.owner:
                return self.library.bases(self.owner)
            return [each for each in self.entities(node.func) if isinstance(each, (Class, External))]
        return self.entities(node)

    def _imported(self, imported: Imported) -> list[Entity]:
        of = self.library.module(imported.module)
        return [of] if imported.name is None else self.library.attribute(of, imported.name)

    def _call(self, node: ast.Call) -> Called:
        if node.args and any(str(each) in _PASSING for each in self.entities(node.func)):
            passed = ast.Call(node.args[0], node.args[1:], node.keywords)
            if self.entities(node.args[0]):
                return self._call(passed)
        function = node.func
        what, method, of, through = self.entities(function), None, 0, False
        if isinstance(function, ast.Attribute):
            base = function.value
            of, method = self.label(base), function.attr
            through = not any(isinstance(each, (Module, Class)) for each in self.entities(base))
            if isinstance(base, ast.Name) and base.id == self.own:
                through = True
        elif isinstance(function, ast.Name) and not what:
            of = self.labels.get(function.id, 0)
        args = [self.label(each) for each in node.args if not isinstance(each, ast.Starred)]
        rest = 0
        for each in node.args:
            if isinstance(each, ast.Starred):
                rest |= self.label(each)
        keywords: dict[str | None, int] = {}
        for keyword in node.keywords:
            keywords[keyword.arg] = keywords.get(keyword.arg, 0) | self.label(keyword.value)
        return Called(what, method, of, args, keywords, through, rest)

    def _table(self, node: ast.Subscript) -> None:
        """Record a subscript of a table of modules or names as a call of ``getattr``."""
        text = ast.unparse(node.value) if isinstance(node.value, (ast.Attribute, ast.Call, ast.Name)) else ""
        if text in ("sys.modules", "globals()", "locals()") or text.endswith("__dict__") or text.startswith("vars("):
            self.flows.calls.append(
                Called([External("builtins.getattr")], None, 0, [0, self.label(node.slice)], {}, False)
            )
            self.flows.results.add(len(self.flows.calls) - 1)


def _defaults(args: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each parameter that can have a default, and the default or None."""
    positional = [*args.posonlyargs, *args.args]
    for name, default in zip(reversed(positional), reversed(args.defaults), strict=False):
        yield name.arg, default
    for name, keyword in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield name.arg, keyword


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    """Return the nodes that the value of an expression depends on."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FORGETFUL:
        return ()
    if isinstance(node, ast.IfExp):
        return (node.body, node.orelse)
    return _children(node)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of `node`, without nodes that contain no name. This is much faster than
    ``ast.iter_child_nodes``.
    """
    for value in node.__dict__.values():
        if type(value) is list:
            for each in value:
                if isinstance(each, ast.AST):
                    yield each
        elif isinstance(value, ast.AST) and type(value) not in _NAMELESS:
            yield value


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    todo = [node]
    while todo:
        each = todo.pop()
        yield each
        todo.extend(_children(each))


def _parameters(node: FunctionNode) -> Flows:
    args = node.args
    names = [each.arg for each in (*args.posonlyargs, *args.args)]
    flows = Flows(names, len(names), None, None)
    if args.vararg:
        flows.vararg = len(names)
        names.append(args.vararg.arg)
    names += (each.arg for each in args.kwonlyargs)
    if args.kwarg:
        flows.kwarg = len(names)
        names.append(args.kwarg.arg)
    return flows


@dataclass
class Verdicts:
    """The results for all functions.

    Attributes:
        harm: The labels of the parameters that reach something harmful.
        look_up: The labels of the parameters that are looked up as names.
        always: The functions that do harm with any arguments.
    """

    harm: dict[Function, int]
    look_up: dict[Function, int]
    always: set[Function]


def _read(library: Library, module: Module) -> Iterator[tuple[Function, Flows]]:
    """Yield each function of `module` and its flows."""
    functions = library.of_module(module)
    bodies = library.bodies(module) if functions else {}
    for function in functions:
        node = bodies[function.node.lineno, function.node.col_offset]
        yield function, _Reader(library, function, node).read()


class _Judge:
    def __init__(
        self,
        library: Library,
        is_harmful: Callable[[str], bool],
        is_harmless: Callable[[str], bool],
        is_alone: Callable[[str], bool],
        sink_methods: Iterable[str],
    ) -> None:
        self.library = library
        self.is_harmful = is_harmful
        self.is_harmless = is_harmless
        self.alone = {function for function in library.functions if is_alone(str(function))}
        self.methods = frozenset(sink_methods)
        self.flows = {
            function: flows for module in library.modules.values() for function, flows in _read(library, module)
        }
        self.verdicts = Verdicts(defaultdict(int), defaultdict(int), set())

    def run(self, is_always: Callable[[str], bool]) -> Verdicts:
        callers: dict[Function, set[Function]] = defaultdict(set)
        for function, flows in self.flows.items():
            for decorator in function.node.decorator_list:
                named = decorator.func if isinstance(decorator, ast.Call) else decorator
                if any(self.is_harmful(str(each)) for each in self.library.expression(named, function.module)):
                    self.verdicts.harm[function] |= (1 << len(flows.parameters)) - 1
            for call in flows.calls:
                for target, _ in self._targets(call):
                    callers[target].add(function)
                if any(isinstance(each, External) and is_always(each.name) for each in call.what):
                    self.verdicts.always.add(function)
        todo = set(self.flows)
        while todo:
            function = todo.pop()
            if self._judge(function):
                todo |= callers[function]
        return self.verdicts

    def _judge(self, function: Function) -> bool:
        """Judge all calls of `function`. Return whether more was found than before."""
        if self.is_harmless(str(function)):
            return False
        harm, look_up = self.verdicts.harm[function], self.verdicts.look_up[function]
        flows = self.flows[function]
        for i, call in enumerate(flows.calls):
            harm |= self._harm(call)
            if i in flows.results:
                look_up |= self._looked_up(call)
        changed = (harm, look_up) != (self.verdicts.harm[function], self.verdicts.look_up[function])
        self.verdicts.harm[function], self.verdicts.look_up[function] = harm, look_up
        return changed

    def _harm(self, call: Called) -> int:
        given = _any(call)
        if any(self.is_harmful(str(each)) for each in call.what):
            return given
        if call.method in self.methods and not call.what:
            return given | call.of
        found = 0
        for target, through in self._targets(call):
            if target not in self.alone:
                found |= self._bound(call, target, self.verdicts.harm[target], through)
        return found

    def _looked_up(self, call: Called) -> int:
        if any(str(each) == "builtins.getattr" for each in call.what):
            return call.args[1] if len(call.args) > 1 else call.rest
        if call.method in ("get", "__getitem__") and any(str(each).startswith("sys.modules.") for each in call.what):
            return _any(call)
        found = 0
        for target, through in self._targets(call):
            found |= self._bound(call, target, self.verdicts.look_up[target], through)
        return found

    def _targets(self, call: Called) -> list[tuple[Function, bool | None]]:
        """Return the functions that `call` calls.

        Each comes with a flag: whether the object is passed as the first argument, or None if the object is new.
        """
        found: list[tuple[Function, bool | None]] = []
        for each in call.what:
            if isinstance(each, Function):
                found.append((each, call.through and each.owner is not None and not each.is_static))
            elif isinstance(each, Class):
                for name in ("__init__", "__new__"):
                    found += ((made, None) for made in self.library.member(each, name) if isinstance(made, Function))
        return found

    def _bound(self, call: Called, target: Function, harmful: int, through: bool | None) -> int:
        """Return the labels of the arguments of `call` that are bound to the `harmful` parameters of `target`."""
        if not harmful:
            return 0
        flows = self.flows[target]
        args = call.args if through is False else [call.of if through else 0, *call.args]
        if any(getattr(each, "id", "") == "classmethod" for each in target.node.decorator_list) and not through:
            args = [0, *args]
        found = 0
        for i, label in enumerate(args):
            at = i if i < flows.positional else flows.vararg
            if at is not None and harmful >> at & 1:
                found |= label
        after = ((1 << flows.positional) - 1) >> len(args) << len(args) | (
            0 if flows.vararg is None else 1 << flows.vararg
        )
        if harmful & after:
            found |= call.rest
        for name, label in call.keywords.items():
            at = flows.parameters.index(name) if name in flows.parameters else flows.kwarg
            if name is None:
                found |= label if harmful >> len(args) else 0
            elif at is not None and harmful >> at & 1:
                found |= label
        return found


def _any(call: Called) -> int:
    found = call.rest
    for label in (*call.args, *call.keywords.values()):
        found |= label
    return found


def judge(
    library: Library,
    is_harmful: Callable[[str], bool],
    is_always: Callable[[str], bool],
    is_harmless: Callable[[str], bool],
    is_alone: Callable[[str], bool],
    sink_methods: Iterable[str],
) -> Verdicts:
    """Judge all functions of `library`. The predicates get full names.

    Callers of a function for which `is_alone` is true are not judged by it.
    """
    return _Judge(library, is_harmful, is_harmless, is_alone, sink_methods).run(is_always)
