"""Find the dangerous calls of a pickle, including those through ``getattr``, partial functions and results of calls.

:mod:`ckptconv.checkpoint.dangerous_globals` judges the globals that a pickle names. This module judges the values that
a pickle reaches from them. An attribute of a global is judged like a global of that name. A method of the result of a
call is judged by its name, for every class that the result can have. A class whose constructor does harm is dangerous
if it is called or passed as an argument, but not if an instance is created without the constructor. A call whose
callable cannot be determined is *undecided*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Literal, NamedTuple, TypeAlias

from ckptconv.checkpoint.dangerous_globals import (
    INNARDS,
    is_dangerous,
    is_known_package,
    is_mentioned,
    is_method,
    is_way_out,
    leads_to_danger,
    listed,
    only_looks_up,
)
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.checkpoint.safe_globals import is_torchs
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Global,
    Graph,
    Node,
    Tuple,
    Value,
    args_of,
    children,
    imported_as,
    imported_name,
    walk,
)
from ckptconv.pickles.rows import outline
from ckptconv.work import work

_WITHOUT_INIT = ("NEWOBJ", "NEWOBJ_EX")  # opcodes that make an instance without __init__
_LONGEST_SHOWN = 40  # characters of an attribute's name
_LONGEST_NAME = 1000  # characters of an attribute's name that are read; thousands of calls can share one name
_LONGEST_START = 1000  # characters of a dotted name that are kept if an attribute is fetched from it
_STEPS = 8  # of work for following a node
_DEEPEST = 20  # calls of results of calls that are followed
_MOST_MEANINGS = 10  # of one value; each state of a partial function adds one

_GETATTRS = frozenset(["builtins.getattr", "inspect.getattr_static"])
_GETTERS = frozenset(["operator.attrgetter", "_operator.attrgetter"])
_CALLERS = frozenset(["operator.methodcaller", "_operator.methodcaller"])
#: Functions that look up attributes by name.
_LOOK_UP = _GETATTRS | _GETTERS | _CALLERS
#: Functions that return the global named by their arguments: a module and a name, or only a module.
_BY_NAME = frozenset(
    [*(f"numpy.{core}._ufunc_reconstruct" for core in ("core", "_core")), "cloudpickle.cloudpickle.subimport"]
)
_PARTIALS = frozenset(["functools.partial", "_functools.partial", "functools.partialmethod"])
#: Functions of pickle, NumPy and torch that make an instance of their first argument without calling it.
_MAKERS = frozenset(
    [
        *(f"{module}.{name}" for module in ("copyreg", "copy_reg") for name in (
            "_reconstructor", "__newobj__", "__newobj_ex__",
        )),
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core")),
        "builtins.object.__new__", "torch._utils._rebuild_wrapper_subclass",
    ]
)  # a table  # fmt: skip
#: Functions that pickle calls to make instances, and the classes of these instances.
_MADE_BY = {
    "logging.getLogger": ("logging", "Logger"),
    "re._compile": ("re", "Pattern"),
    "numpy.random._pickle.__randomstate_ctor": ("numpy.random", "RandomState"),
    "numpy.random._pickle.__generator_ctor": ("numpy.random", "Generator"),
    "numpy.random._pickle.__bit_generator_ctor": ("numpy.random", "BitGenerator"),
}
#: The rebuild functions of NumPy. They make an array of a class that opens files without opening one.
_REBUILDERS = frozenset(name for name in _MAKERS if name.endswith("_reconstruct"))
#: Packages whose functions and classes evaluate texts, and those of their classes that only use a text as a name.
_EVALUATORS = frozenset(["sympy"])
_EVALUATING_MODULE = "torch.utils._sympy"  # its classes are derived from sympy's
_MAKES_CLASS = "sympy.core.function._rebuild_undef"
_NAMING = frozenset(["Dummy", "Float", "Symbol", "Wild", "_rebuild_undef"])  # Float reads the digits of a number

#: The methods that opcodes call.
_METHODS_OF = {
    "BUILD": ("__setstate__", "__setattr__"),
    "APPEND": ("append",),
    "APPENDS": ("extend", "append"),
    "SETITEM": ("__setitem__",),
    "SETITEMS": ("__setitem__",),
    "ADDITEMS": ("update", "add"),
}


#: The methods of arguments that Python calls by itself.
_UNNAMED = (
    "__call__", "__contains__", "__del__", "__delitem__", "__enter__", "__eq__", "__exit__", "__fspath__",
    "__getitem__", "__hash__", "__iter__", "__len__", "__next__", "__repr__", "__setitem__", "__str__",
)  # a table  # fmt: skip
_EFFECTS = frozenset(_METHODS_OF)


class _Ref(NamedTuple):
    """A global: its module, and its dotted name in the module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Made(NamedTuple):
    """The result of a call of the global ``by``.

    If ``of_class`` is True, the result is certainly an instance of ``by``.
    """

    by: _Ref
    of_class: bool


class _Method(NamedTuple):
    """The attribute ``name`` of the result of a call. ``of`` is this result, or None if the call cannot be determined.

    ``is_known`` is True if the result comes from a package that the table of dangerous globals covers.
    """

    of: _Made | None
    name: str
    is_known: bool


class _Getter(NamedTuple):
    """An ``attrgetter`` or ``methodcaller``: a function that looks up ``names`` in its argument.

    If ``calls`` is True, the function also calls the attribute that it finds.
    """

    calls: bool  # the first field, so that no _Getter equals a _Made: both are tuples
    names: tuple[str, ...]


class _Other(NamedTuple):
    """Any value. ``is_known`` is True if it comes from a package that the table of dangerous globals covers."""

    is_known: bool


_Meaning: TypeAlias = _Ref | _Made | _Method | _Getter | _Other
_ANYTHING, _STRANGE = (_Other(is_known=True),), (_Other(is_known=False),)


def dangerous_globals(graph: Graph) -> Iterator[str]:
    """Yield the names of the dangerous globals that `graph` names, then descriptions of the dangers that it reaches.

    Each is yielded once. The names are those of the Python version that the protocol of the pickle is for.
    """
    named = (imported_name(node, graph.protocol) for node in graph.globals if is_dangerous(node))
    yield from dict.fromkeys([*named, *(what for what, _, kind in reaches(graph) if kind == "dangerous")])


def reaches(graph: Graph) -> Iterator[tuple[str, Node, Literal["dangerous", "unknown"]]]:
    """Yield the dangers in `graph` other than the dangerous globals that it names.

    Dangerous are: a lookup of an internal attribute or of a computed name, ``getattr`` passed as an argument, a call of
    a class that opens a file, and a change of a global. Unknown is a call whose callable cannot be determined.

    Yields:
        A description, the node, and ``dangerous`` or ``unknown``.
    """
    yield from ((what, node, "dangerous") for what, node in _changed(graph))
    named = [node for node in graph.globals if not is_torchs(node)]
    every = chain(graph.outer_calls, walk(graph.left_out, parts=outline))  # rows call globals
    calls_results = any(isinstance(call, Call) and not isinstance(call.callable, Global) for call in every)
    if not named and not calls_results:
        return
    look_ups = {id(node) for node in named if imported_name(node, 2) in _LOOK_UP}
    classes = {id(node): entry for node in named if (entry := _class_entry(node))}
    if not look_ups and not classes and not any(map(_is_odd, named)) and not calls_results:
        return
    nodes = [
        *walk([graph.root, *graph.discarded, *graph.left_out])
    ]  # all nodes that loading the graph or a merged file creates
    work().charge(_STEPS * len(nodes))
    meanings = _Meanings()
    calls = (node for node in nodes if isinstance(node, Call)) if look_ups or classes else ()
    used = {id(each) for each in walk([child for node in calls for child in children(node)])}
    harm = (_fetched(nodes, look_ups, used, meanings), _used(nodes, meanings))
    for what, node in chain(*harm, _handed_on(nodes, look_ups, classes, used)):
        yield what, node, "dangerous"
    yield from ((what, node, "unknown") for what, node in _undecided(nodes, meanings))


def _undecided(nodes: list[Node], meanings: _Meanings) -> Iterator[tuple[str, Node]]:
    """Yield a description and the node of each call whose callable is not known.

    Only callables that are the results of other calls can be unknown.
    """
    for node in nodes:
        if isinstance(node, Call) and not isinstance(node.callable, Global):
            for meaning in meanings.of(node.callable):
                if isinstance(meaning, _Made) and _is_known(meaning) and not leads_to_danger(*meaning.by):
                    yield f"a call of the result of {meaning.by}", node
                elif isinstance(meaning, _Other) and meaning.is_known:
                    yield "a call of the result of a call", node


def _changed(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield a description and the node of each effect that changes a global of a package in the table.

    Such an effect adds items or members, or sets a state.
    """
    for call in graph.outer_calls:
        if call.kind in _EFFECTS and isinstance(call.callable, Global):
            module, _ = imported_as(call.callable, 2)
            if is_known_package(module):
                yield f"{call.kind} on {imported_name(call.callable, 2)}", call


def _class_entry(node: Global) -> str | None:
    """Return how creating an instance of the class `node` does harm, or None if it does not.

    ``class`` means: if the class is called. ``new`` means: in any way, also without the constructor. ``evaluator``
    means that the class evaluates texts.
    """
    module, name = imported_as(node, 2)
    entry = listed(module, name) or ("class" if listed(module, f"{name}.__post_init__") else None)
    if _evaluates_texts(module) and name not in _NAMING:
        return "evaluator"
    return entry if entry in ("class", "new") else None


def _is_odd(node: Global) -> bool:
    """Return whether calls of `node` must be judged by their arguments or by the effects on their results."""
    module, name = imported_as(node, 2)
    if f"{module}.{name}" in _BY_NAME or _evaluates_texts(module):
        return True
    if not is_mentioned(module, name):
        return False
    made = _Ref(module, name)
    methods = (method for each in _METHODS_OF.values() for method in each)
    return any(_has(made, method) for method in methods) or next(_harm_unnamed(made), None) is not None


class _Meanings:
    """The possible values of nodes, as far as they can be determined without calling anything."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Meaning, ...]] = {}
        self._same: dict[tuple[_Meaning, ...], tuple[_Meaning, ...]] = {_ANYTHING: _ANYTHING, _STRANGE: _STRANGE}
        self._without_text: set[int] = set()

    def has_text(self, args: Value) -> bool:
        """Return whether `args` or containers in it contain a text or a call whose result can be a text.

        A container that an earlier call found to be without text is skipped.
        """
        todo = [args]
        while todo:
            each = todo.pop()
            if isinstance(each, (str, Blob)) or (isinstance(each, Call) and self._may_give_text(each)):
                return True
            if isinstance(each, Node) and not isinstance(each, Call) and id(each) not in self._without_text:
                self._without_text.add(id(each))
                todo += children(each)
        return False

    def _may_give_text(self, call: Call) -> bool:
        """Return whether the result of `call` can be something other than an instance of a class."""
        if call.kind not in ("REDUCE", "OBJ") or (isinstance(call.callable, Global) and is_torchs(call.callable)):
            return False
        called = self.of(call.callable)
        return not called or not all(
            isinstance(each, _Ref) and (_is_class(each.name) or each.name.endswith(".__new__")) for each in called
        )

    def of(self, value: Value, depth: int = 0) -> tuple[_Meaning, ...]:
        """Return all possible meanings of `value`.

        `depth` is the number of calls that are already being followed. At the limit, the result is any value.
        """
        if isinstance(value, Global):
            return (_Ref(*imported_as(value, 2)),)
        if not isinstance(value, Call):
            return _STRANGE
        if depth == _DEEPEST:
            return _ANYTHING
        if id(value) not in self._known:
            by = self.of(value.callable, depth + 1)
            if by is _ANYTHING or by is _STRANGE:
                self._known[id(value)] = by
                return by
            results = (result for called in by for result in self._given(value, called, depth))
            found = tuple(dict.fromkeys(islice(results, _MOST_MEANINGS + 1)))
            found = (*found, *(_Other(True) for _ in islice(results, 1)))
            self._known[id(value)] = self._same.setdefault(found, found)  # most results are equal to others
        return self._known[id(value)]

    def _given(self, call: Call, called: _Meaning, depth: int) -> Iterator[_Meaning]:
        """Yield the possible results of `call` if its callable is `called`."""
        args = args_of(call)
        if isinstance(called, _Ref):
            yield from self._result(call, called, args, depth)
        elif isinstance(called, _Getter):
            for of in self.of(args[0], depth + 1) if args else ():
                for name in called.names:
                    found = _attribute(of, name)
                    yield _Other(_is_known(of)) if called.calls else found
        else:
            yield _Other(_is_known(called))

    def _result(self, call: Call, called: _Ref, args: list[Value], depth: int) -> Iterator[_Meaning]:
        """Yield the possible results of `call` with `args` if its callable is the global `called`.

        `depth` is as in :meth:`of`.
        """
        name = str(called)
        if call.kind not in ("REDUCE", "OBJ"):
            yield _Made(called, of_class=True)
        elif name in _GETATTRS:
            text = _name_in(args[1]) if len(args) > 1 else None
            for of in self.of(args[0], depth + 1) if args else ():
                yield _attribute(of, text) if text is not None else _Other(True)
        elif name in _GETTERS or name in _CALLERS:
            texts = [_name_in(each) for each in (args[:_MOST_MEANINGS] if name in _GETTERS else args[:1])]
            yield _Getter(name in _CALLERS, tuple(text for text in texts if text is not None))
        elif name in _BY_NAME:
            texts = [_name_in(each) for each in args[:_MOST_MEANINGS]]
            module, _, attribute = ".".join(text or "" for text in texts).partition(".")
            yield _Ref(module, attribute) if attribute else _Ref("", module)
        elif name == _MAKES_CLASS:
            yield _Ref("sympy.core.function", "AppliedUndef")
        elif name in _PARTIALS:
            states = [effect.values[0] for effect in call.effects if effect.opcode == "BUILD"]
            for each in [*args[:1], *(state.items[0] for state in states if isinstance(state, Tuple) and state.items)]:
                yield from self.of(each, depth + 1)
        elif name in _MAKERS or called.name.endswith(".__new__"):
            for of in self.of(args[0], depth + 1) if args else ():
                yield _Made(of, of_class=True) if isinstance(of, _Ref) else _Other(_is_known(of))
        else:
            made_by = _MADE_BY.get(name)
            yield _Made(_Ref(*made_by) if made_by else called, made_by is not None or _is_class(called.name))


def _name_in(value: Value) -> str | None:
    """Return the text of `value`, or None if it is not a text or has more than 1,000 characters."""
    text = text_of(value)
    return text if text is not None and len(text) <= _LONGEST_NAME else None


def _is_class(name: str) -> bool:
    """Return whether the last component of the dotted `name` starts with an upper-case letter, as a class does."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _attribute(of: _Meaning, name: str) -> _Meaning:
    """Return the meaning of the attribute `name` of a value with the meaning `of`."""
    if isinstance(of, _Ref):
        start = of.name[:_LONGEST_START]  # each step was judged; limits the cost of long chains
        return _Ref(of.module, f"{start}.{name}" if of.name else name)
    return _Method(of if isinstance(of, _Made) else None, name, _is_known(of))


def _is_known(meaning: _Meaning) -> bool:
    """Return whether a value comes from a package that the table of dangerous globals covers.

    A `_Getter` always does.
    """
    if isinstance(meaning, _Ref):
        return is_known_package(meaning.module)
    if isinstance(meaning, _Made):
        return is_known_package(meaning.by.module)
    return meaning.is_known if isinstance(meaning, (_Method, _Other)) else True


def _fetched(nodes: list[Node], look_ups: set[int], used: set[int], meanings: _Meanings) -> Iterator[tuple[str, Node]]:
    """Yield a description and the node of each call among `nodes` that looks up or returns something dangerous.

    Args:
        nodes: The nodes of the graph.
        look_ups: The ids of the globals that look up attributes by name.
        used: The ids of the nodes that are passed to a call.
        meanings: The possible values of the nodes.
    """
    for node in nodes:
        if isinstance(node, Call):
            dangers = list(_names_or_texts(node, look_ups, meanings, is_used=id(node) in used))
            yield from ((what, node) for what in dangers or _given(node, meanings))


def _used(nodes: list[Node], meanings: _Meanings) -> Iterator[tuple[str, Node]]:
    """Yield a description and the node of each dangerous value that is passed to a call of a package in the table.

    Such values are functions that call a method, and instances with a harmful method that Python calls implicitly, such
    as ``__eq__``. Values inside containers and other instances are found, too. Each is yielded once.
    """
    seen: set[int] = set()
    called: set[int] = set()
    for node in nodes:
        todo: list[Value] = []
        if isinstance(node, Call) and _is_used_by(node, meanings):
            if isinstance(node.callable, Call) and id(node.callable) not in called:
                todo += children(node.callable)
            called.add(id(node.callable))
            todo += [node.args, node.kwargs]
        while todo:
            each = todo.pop()
            if not isinstance(each, Node) or id(each) in seen:
                continue
            seen.add(id(each))
            if not isinstance(each, Call):
                todo += children(each)
            elif _is_used_by(each, meanings, allowed=True):
                yield from ((what, each) for what in _harm_of_use(each, meanings))
                todo += children(each)


def _is_used_by(call: Call, meanings: _Meanings, *, allowed: bool = False) -> bool:
    """Return whether `call` calls something from a package in the table.

    A global that torch's safe loader accepts counts only if `allowed` is True.
    """
    if isinstance(call.callable, Global) and is_torchs(call.callable):
        return allowed
    return any(_is_known(each) for each in meanings.of(call.callable))


def _harm_of_use(call: Call, meanings: _Meanings) -> Iterator[str]:
    """Yield a description of each danger in using the result of `call`. Nothing is yielded if there is none."""
    for meaning in meanings.of(call):
        if isinstance(meaning, _Getter) and meaning.calls:
            has_text = meanings.has_text(Tuple(args_of(call)[1:]))  # some objects evaluate texts
            found = (name for name in meaning.names if has_text or is_method(name))
            yield from (f"a call of {name[:_LONGEST_SHOWN]!r}" for name in found)
        elif isinstance(meaning, _Made):
            yield from _harm_unnamed(meaning.by)


def _names_or_texts(call: Call, look_ups: set[int], meanings: _Meanings, *, is_used: bool) -> Iterator[str]:
    """Yield a description of each dangerous argument of `call`: a name to look up, or a text that is evaluated.

    Args:
        call: The call.
        look_ups: The ids of the globals that look up attributes by name.
        meanings: The possible values of the nodes.
        is_used: Whether the result is passed to another call.
    """
    called = call.callable
    if isinstance(called, Global):
        name = imported_name(called, 2)
        if id(called) in look_ups and call.kind not in _WITHOUT_INIT:
            yield from (f"{name} of {what}" for what in _names_looked_up(call, name, meanings, is_used=is_used))
    for each in meanings.of(called):
        if not isinstance(each, _Ref) or not _evaluates_texts(each.module):
            continue
        is_naming = each.name.removesuffix(".__new__") in _NAMING
        if not is_naming and (not isinstance(call.args, Tuple) or meanings.has_text(call.args)):
            yield f"{each} of a text"


def _evaluates_texts(module: str) -> bool:
    """Return whether functions and classes in `module` evaluate texts (sympy, and torch's classes derived from it)."""
    return module.partition(".")[0] in _EVALUATORS or module.startswith(_EVALUATING_MODULE)


def _given(call: Call, meanings: _Meanings) -> Iterator[str]:
    """Yield a description of each danger in the callable, the result and the effects of `call`.

    A lookup by ``getattr`` that returns an attribute of a global is left out: ``_names_looked_up`` reports it.
    """
    for meaning in meanings.of(call.callable) if not isinstance(call.callable, Global) else ():
        if isinstance(meaning, _Method):
            is_of_class = meaning.of is not None and meaning.of.of_class
            if not meaning.is_known and not is_of_class and is_method(meaning.name):
                yield f"a call of {meaning.name[:_LONGEST_SHOWN]!r}"
        elif isinstance(meaning, _Made) and _has(meaning.by, "__call__"):
            yield f"{meaning.by}.__call__"
        elif isinstance(meaning, _Getter) and meaning.calls and args_of(call):
            found = (_attribute(of, name) for of in meanings.of(args_of(call)[0]) for name in meaning.names)
            yield from (what for each in found if (what := _danger_of(each)) is not None)
    is_judged = isinstance(call.callable, Global) and imported_name(call.callable, 2) in _GETATTRS
    for meaning in meanings.of(call):
        if not (is_judged and isinstance(meaning, _Ref)) and (what := _danger_of(meaning)) is not None:
            yield what
        if isinstance(meaning, _Made):
            called = [_METHODS_OF.get(opcode, ()) for opcode in dict.fromkeys(effect.opcode for effect in call.effects)]
            yield from (f"{meaning.by}.{method}" for method in chain(*called) if _has(meaning.by, method))


@lru_cache(maxsize=4096)
def _danger_of(meaning: _Meaning) -> str | None:
    """Return a description of the danger of fetching a value with this `meaning`, or None if there is none."""
    if isinstance(meaning, _Ref):
        module, name = meaning
        return str(meaning).lstrip(".") if leads_to_danger(module, name) or listed(module, name) == "class" else None
    if not isinstance(meaning, _Method):
        return None
    shown = meaning.name[:_LONGEST_SHOWN]
    if meaning.of and _evaluates_texts(meaning.of.by.module):  # methods evaluate texts too
        return f"the attribute {shown!r} of the result of {meaning.of.by}"
    if not meaning.is_known:
        return None
    if meaning.of is None:
        return f"the attribute {shown!r} of the result of a call" if is_method(meaning.name) else None
    by = meaning.of.by
    if listed(by.module, f"{by.name}.{meaning.name}") or is_method(meaning.name, of_known_class=meaning.of.of_class):
        return f"the attribute {shown!r} of the result of {by}"
    return None


def _harm_unnamed(made: _Ref) -> Iterator[str]:
    """Yield the names of the harmful methods of instances of `made` that Python calls implicitly.

    Methods that only look up attributes are left out.
    """
    for method in _UNNAMED:
        if _has(made, method) and not only_looks_up(made.module, f"{made.name}.{method}"):
            yield f"{made}.{method}"


def _has(ref: _Ref, method: str) -> bool:
    """Return whether `method` of instances of `ref` is dangerous, while `ref` itself is not."""
    return listed(ref.module, f"{ref.name}.{method}") is not None and not leads_to_danger(*ref)


def _names_looked_up(call: Call, function: str, meanings: _Meanings, *, is_used: bool) -> Iterator[str]:
    """Yield the dangerous names that `call` looks up, as literals. Computed names, or too many, are described.

    Args:
        call: A call of a function that looks up attributes by name.
        function: The name of this function.
        meanings: The possible values of the nodes.
        is_used: Whether the result is passed to another call.
    """
    args = args_of(call)
    is_getattr = function in _GETATTRS
    names = args[1:2] if is_getattr else args if function in _GETTERS else args[:1]
    if not names:
        yield "a computed name"
    elif len(names) > _MOST_MEANINGS:
        yield "too many names to check"
    for each in names[: _MOST_MEANINGS + 1]:
        text = _name_in(each)
        words = text.split(".") if text is not None else []
        if text is None:
            yield "a computed name"
            continue
        if not (is_getattr or is_used) and INNARDS.isdisjoint(words):
            continue
        if is_way_out(words) or any(
            isinstance(of, _Ref) and leads_to_danger(of.module, f"{of.name}.{text}")
            for of in (meanings.of(args[0]) if is_getattr else ())
        ):
            yield repr(text[:_LONGEST_SHOWN])


def _handed_on(
    nodes: list[Node], look_ups: set[int], classes: dict[int, str], used: set[int]
) -> Iterator[tuple[str, Node]]:
    """Yield the name and node of each dangerous global that is passed as an argument.

    Args:
        nodes: The nodes of the graph.
        look_ups: The ids of the globals that look up attributes by name. They are dangerous unless they are called.
        classes: How constructors do harm (see `_class_entry`), by the id of the class.
        used: The ids of the nodes that are passed to a call.
    """
    if not look_ups and not classes:
        return
    made = _arguments_of(nodes, _MAKERS | _GETATTRS)
    rebuilt = _arguments_of(nodes, _REBUILDERS)
    for node in nodes:
        called = node.callable if isinstance(node, Call) and node.kind not in _WITHOUT_INIT else None
        for child in children(node):
            if not isinstance(child, Global) or not (isinstance(node, Call) or id(node) in used):
                continue
            if id(child) in look_ups and child is not called:
                yield f"{imported_name(child, 2)}, passed as a value", child
            entry = classes.get(id(child))
            is_call = isinstance(node, Call)
            if (entry == "new" and id(node) not in rebuilt) or (
                id(node) not in made
                and ((entry == "class" and (child is called or not is_call)) or (entry == "evaluator" and not is_call))
            ):
                yield imported_name(child, 2), child


def _arguments_of(nodes: list[Node], names: Iterable[str]) -> set[int]:
    """Return the ids of the tuples of arguments that are used only in calls of the globals `names` among `nodes`."""
    wanted = frozenset(names)
    calls = [
        node
        for node in nodes
        if isinstance(node, Call) and isinstance(node.callable, Global) and imported_name(node.callable, 2) in wanted
    ]
    alone = {id(node) for node in calls}
    found = {id(node.args) for node in calls}
    return found - {id(child) for node in nodes if id(node) not in alone for child in children(node)}
