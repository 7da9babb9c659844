"""What a pickle would call: followed through ``getattr`` and its like, partial functions and the results of calls.

A pickle names most of what it calls, and :mod:`ckptconv.checkpoint.dangerous_globals` judges the name. What a pickle
fetches is judged here: an attribute of something named as if it were named itself; a method of what a call gives by its
name, for every class that the result can be of. A class whose constructor does harm is dangerous where it is called, or
handed on to be; an instance that is made without the constructor is not. What nobody can follow is *undecided*.
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

_WITHOUT_INIT = ("NEWOBJ", "NEWOBJ_EX")  # opcodes that make an instance by __new__ alone
_LONGEST_SHOWN = 40  # characters of an attribute's name
_LONGEST_NAME = 1000  # characters of names of attributes that are looked at; a call can have the same ones as thousands
_LONGEST_START = 1000  # characters of a dotted name that are kept where an attribute is fetched from it
_DEEPEST = 20  # results of calls of results of calls
_MOST_MEANINGS = 10  # of one value: a partial function has one more with each state that it gets

_GETATTRS = frozenset(["builtins.getattr", "inspect.getattr_static"])
_GETTERS = frozenset(["operator.attrgetter", "_operator.attrgetter"])
_CALLERS = frozenset(["operator.methodcaller", "_operator.methodcaller"])
#: What looks attributes up by names that it is given.
_LOOK_UP = _GETATTRS | _GETTERS | _CALLERS
#: What gives a global by the texts that it is called with: module and name, or a module alone.
_BY_NAME = frozenset(
    [*(f"numpy.{core}._ufunc_reconstruct" for core in ("core", "_core")), "cloudpickle.cloudpickle.subimport"]
)
_PARTIALS = frozenset(["functools.partial", "_functools.partial", "functools.partialmethod"])
#: What makes an instance of its first argument without calling that: pickle's own ways, numpy's and torch's.
_MAKERS = frozenset(
    [
        *(f"{module}.{name}" for module in ("copyreg", "copy_reg") for name in (
            "_reconstructor", "__newobj__", "__newobj_ex__",
        )),
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core")),
        "builtins.object.__new__", "torch._utils._rebuild_wrapper_subclass",
    ]
)  # a table  # fmt: skip
#: Functions that pickle calls to make instances again, and of what.
_MADE_BY = {
    "logging.getLogger": ("logging", "Logger"),
    "re._compile": ("re", "Pattern"),
    "numpy.random._pickle.__randomstate_ctor": ("numpy.random", "RandomState"),
    "numpy.random._pickle.__generator_ctor": ("numpy.random", "Generator"),
    "numpy.random._pickle.__bit_generator_ctor": ("numpy.random", "BitGenerator"),
}
#: The rebuild functions of numpy, after which an array of a class that opens files has opened none.
_REBUILDERS = frozenset(name for name in _MAKERS if name.endswith("_reconstruct"))
#: Packages whose functions and classes evaluate the texts that they are called with, and what only names something.
_EVALUATORS = frozenset(["sympy"])
_EVALUATING_MODULE = "torch.utils._sympy"  # its classes are sympy's
_MAKES_CLASS = "sympy.core.function._rebuild_undef"
_NAMING = frozenset(["Dummy", "Float", "Symbol", "Wild", "_rebuild_undef"])  # the digits of a number, too

#: The methods that pickle calls by its opcodes.
_METHODS_OF = {
    "BUILD": ("__setstate__", "__setattr__"),
    "APPEND": ("append",),
    "APPENDS": ("extend", "append"),
    "SETITEM": ("__setitem__",),
    "SETITEMS": ("__setitem__",),
    "ADDITEMS": ("update", "add"),
}


#: The methods by which Python uses what a function is given, without naming them.
_UNNAMED = (
    "__call__", "__contains__", "__del__", "__delitem__", "__enter__", "__eq__", "__exit__", "__fspath__",
    "__getitem__", "__hash__", "__iter__", "__len__", "__next__", "__repr__", "__setitem__", "__str__",
)  # a table  # fmt: skip
_EFFECTS = frozenset(_METHODS_OF)


class _Ref(NamedTuple):
    """Something with a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Made(NamedTuple):
    """What calling ``by`` gives. ``of_class``: an instance of it for sure."""

    by: _Ref
    of_class: bool


class _Method(NamedTuple):
    """The attribute ``name`` of what a call gave: of ``of``, where that is known."""

    of: _Made | None
    name: str
    is_known: bool


class _Getter(NamedTuple):
    """What looks ``names`` up in what it is called with; and calls it."""

    calls: bool  # first: meanings are tuples, and no getter may equal what a call of a function gives
    names: tuple[str, ...]


class _Other(NamedTuple):
    """Anything; ``is_known``: it comes from the packages of which the table tells."""

    is_known: bool


_Meaning: TypeAlias = _Ref | _Made | _Method | _Getter | _Other
_ANYTHING, _STRANGE = (_Other(is_known=True),), (_Other(is_known=False),)


def dangerous_globals(graph: Graph) -> Iterator[str]:
    """The dangerous globals that `graph` names, each once, as the reading Python would look them up."""
    named = (imported_name(node, graph.protocol) for node in graph.globals if is_dangerous(node))
    yield from dict.fromkeys([*named, *(what for what, _, kind in reaches(graph) if kind == "dangerous")])


def reaches(graph: Graph) -> Iterator[tuple[str, Node, Literal["dangerous", "unknown"]]]:
    """What `graph` does that no checkpoint needs with what it does not name itself, and where: looks innards up, or
    names that are computed; hands ``getattr`` itself on; calls a class that opens a file. What it calls of which nobody
    can tell what it is, is ``unknown``.
    """
    yield from ((what, node, "dangerous") for what, node in _changed(graph))
    named = [node for node in graph.globals if not is_torchs(node)]
    calls_results = bool(graph.left_out) or any(not isinstance(call.callable, Global) for call in graph.outer_calls)
    if not named and not calls_results:
        return
    look_ups = {id(node) for node in named if imported_name(node, 2) in _LOOK_UP}
    classes = {id(node): entry for node in named if (entry := _class_entry(node))}
    if not look_ups and not classes and not any(map(_is_odd, named)) and not calls_results:
        return
    nodes = [*walk([graph.root, *graph.discarded, *graph.left_out])]  # what loading it, or its parts, makes
    meanings = _Meanings()
    calls = (node for node in nodes if isinstance(node, Call)) if look_ups or classes else ()
    used = {id(each) for each in walk([child for node in calls for child in children(node)])}
    harm = (_fetched(nodes, look_ups, used, meanings), _used(nodes, meanings))
    for what, node in chain(*harm, _handed_on(nodes, look_ups, classes, used)):
        yield what, node, "dangerous"
    yield from ((what, node, "unknown") for what, node in _undecided(nodes, meanings))


def _undecided(nodes: list[Node], meanings: _Meanings) -> Iterator[tuple[str, Node]]:
    """What is called among `nodes` of which nobody can tell what it is."""
    for node in nodes:
        if isinstance(node, Call) and not isinstance(node.callable, Global):
            for meaning in meanings.of(node.callable):
                if isinstance(meaning, _Made) and _is_known(meaning) and not leads_to_danger(*meaning.by):
                    yield f"a call of what {meaning.by} gives", node
                elif isinstance(meaning, _Other) and meaning.is_known:
                    yield "a call of what a call gives", node


def _changed(graph: Graph) -> Iterator[tuple[str, Node]]:
    """What `graph`, read leniently, changes without a call: items, members or states of globals of known packages."""
    for call in graph.outer_calls:
        if call.kind in _EFFECTS and isinstance(call.callable, Global):
            module, _ = imported_as(call.callable, 2)
            if is_known_package(module):
                yield f"{call.kind} on {imported_name(call.callable, 2)}", call


def _class_entry(node: Global) -> str | None:
    """Whether `node` is a class whose constructor does harm: ``class`` in what calls it, ``new`` in what makes one; or
    of a package that evaluates texts.
    """
    module, name = imported_as(node, 2)
    entry = listed(module, name) or ("class" if listed(module, f"{name}.__post_init__") else None)
    if _evaluates_texts(module) and name not in _NAMING:
        return "evaluator"
    return entry if entry in ("class", "new") else None


def _is_odd(node: Global) -> bool:
    """Whether what `node` is called with, or what is done to what it gives, has to be looked at."""
    module, name = imported_as(node, 2)
    if f"{module}.{name}" in _BY_NAME or _evaluates_texts(module):
        return True
    if not is_mentioned(module, name):
        return False
    made = _Ref(module, name)
    methods = (method for each in _METHODS_OF.values() for method in each)
    return any(_has(made, method) for method in methods) or next(_harm_unnamed(made), None) is not None


class _Meanings:
    """What values are, as far as that can be told without calling anything."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Meaning, ...]] = {}
        self._same: dict[tuple[_Meaning, ...], tuple[_Meaning, ...]] = {_ANYTHING: _ANYTHING, _STRANGE: _STRANGE}
        self._without_text: set[int] = set()

    def has_text(self, args: Value) -> bool:
        """Whether a text stands in `args` or in containers there, or may: a function can give one, a class does not.

        What was looked through once is not again: thousands of calls can have it.
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
        """Whether `call` gives something else than an instance of a class, which is no text."""
        if call.kind not in ("REDUCE", "OBJ") or (isinstance(call.callable, Global) and is_torchs(call.callable)):
            return False
        called = self.of(call.callable)
        return not called or not all(
            isinstance(each, _Ref) and (_is_class(each.name) or each.name.endswith(".__new__")) for each in called
        )

    def of(self, value: Value, depth: int = 0) -> tuple[_Meaning, ...]:
        """All that `value` can be."""
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
            self._known[id(value)] = self._same.setdefault(found, found)  # most are like others
        return self._known[id(value)]

    def _given(self, call: Call, called: _Meaning, depth: int) -> Iterator[_Meaning]:
        """What `call` gives, if its callable is `called`."""
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
    """The text that `value` is, if it can be the name of an attribute."""
    text = text_of(value)
    return text if text is not None and len(text) <= _LONGEST_NAME else None


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _attribute(of: _Meaning, name: str) -> _Meaning:
    if isinstance(of, _Ref):
        start = of.name[:_LONGEST_START]  # each step was judged by itself; a chain of them must not cost its square
        return _Ref(of.module, f"{start}.{name}" if of.name else name)
    return _Method(of if isinstance(of, _Made) else None, name, _is_known(of))


def _is_known(meaning: _Meaning) -> bool:
    if isinstance(meaning, _Ref):
        return is_known_package(meaning.module)
    if isinstance(meaning, _Made):
        return is_known_package(meaning.by.module)
    return meaning.is_known if isinstance(meaning, (_Method, _Other)) else True


def _fetched(nodes: list[Node], look_ups: set[int], used: set[int], meanings: _Meanings) -> Iterator[tuple[str, Node]]:
    """What the calls among `nodes` fetch or give that is dangerous. `look_ups` are the globals that look names up,
    `used` is what a call is given.
    """
    for node in nodes:
        if isinstance(node, Call):
            said = list(_names_or_texts(node, look_ups, meanings, is_used=id(node) in used))
            yield from ((what, node) for what in said or _given(node, meanings))


def _used(nodes: list[Node], meanings: _Meanings) -> Iterator[tuple[str, Node]]:
    """What calls of known packages among `nodes` are given that does harm when it is used: what calls a method, and
    instances with a method that Python calls by itself. It may stand in containers and in other instances.
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
    """Whether `call` is one of a known package; `allowed`: of what torch's safe loader calls too."""
    if isinstance(call.callable, Global) and is_torchs(call.callable):
        return allowed
    return any(_is_known(each) for each in meanings.of(call.callable))


def _harm_of_use(call: Call, meanings: _Meanings) -> Iterator[str]:
    """What using the result of `call` does."""
    for meaning in meanings.of(call):
        if isinstance(meaning, _Getter) and meaning.calls:
            has_text = meanings.has_text(Tuple(args_of(call)[1:]))  # which some objects evaluate
            found = (name for name in meaning.names if has_text or is_method(name))
            yield from (f"a call of {name[:_LONGEST_SHOWN]!r}" for name in found)
        elif isinstance(meaning, _Made):
            yield from _harm_unnamed(meaning.by)


def _names_or_texts(call: Call, look_ups: set[int], meanings: _Meanings, *, is_used: bool) -> Iterator[str]:
    """What is dangerous about the arguments of `call`, of a global that looks names up, or evaluates texts."""
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
    return module.partition(".")[0] in _EVALUATORS or module.startswith(_EVALUATING_MODULE)


def _given(call: Call, meanings: _Meanings) -> Iterator[str]:
    """What is dangerous about what `call` calls and gives, but for attributes of what is named, which were judged."""
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
    """What is dangerous about what was fetched, if anything is."""
    if isinstance(meaning, _Ref):
        module, name = meaning
        return str(meaning).lstrip(".") if leads_to_danger(module, name) or listed(module, name) == "class" else None
    if not isinstance(meaning, _Method):
        return None
    shown = meaning.name[:_LONGEST_SHOWN]
    if meaning.of and _evaluates_texts(meaning.of.by.module):  # its methods evaluate texts too
        return f"the attribute {shown!r} of what {meaning.of.by} gives"
    if not meaning.is_known:
        return None
    if meaning.of is None:
        return f"the attribute {shown!r} of what a call gives" if is_method(meaning.name) else None
    by = meaning.of.by
    if listed(by.module, f"{by.name}.{meaning.name}") or is_method(meaning.name, of_known_class=meaning.of.of_class):
        return f"the attribute {shown!r} of what {by} gives"
    return None


def _harm_unnamed(made: _Ref) -> Iterator[str]:
    """The methods of what `made` makes that do harm and that nobody names: what only looks names up does none."""
    for method in _UNNAMED:
        if _has(made, method) and not only_looks_up(made.module, f"{made.name}.{method}"):
            yield f"{made}.{method}"


def _has(ref: _Ref, method: str) -> bool:
    """Whether `method` of what `ref` makes does harm, where naming `ref` does not."""
    return listed(ref.module, f"{ref.name}.{method}") is not None and not leads_to_danger(*ref)


def _names_looked_up(call: Call, function: str, meanings: _Meanings, *, is_used: bool) -> Iterator[str]:
    """Names that `call` of `function` looks up and no checkpoint needs.

    `is_used`: something is called with what it gives.
    """
    args = args_of(call)
    is_getattr = function in _GETATTRS
    names = args[1:2] if is_getattr else args if function in _GETTERS else args[:1]
    if not names:
        yield "what is computed"
    elif len(names) > _MOST_MEANINGS:
        yield "more names than are looked at"
    for each in names[: _MOST_MEANINGS + 1]:
        text = _name_in(each)
        words = text.split(".") if text is not None else []
        if text is None:
            yield "what is computed"
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
    """Where one of `nodes` hands on what looks names up, or a class whose constructor does harm."""
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
                yield f"{imported_name(child, 2)}, not called", child
            entry = classes.get(id(child))
            is_call = isinstance(node, Call)
            if (entry == "new" and id(node) not in rebuilt) or (
                id(node) not in made
                and ((entry == "class" and (child is called or not is_call)) or (entry == "evaluator" and not is_call))
            ):
                yield imported_name(child, 2), child


def _arguments_of(nodes: list[Node], names: Iterable[str]) -> set[int]:
    """The ids of the tuples of arguments of the calls among `nodes` of the globals `names`, that nothing else has."""
    wanted = frozenset(names)
    calls = [
        node
        for node in nodes
        if isinstance(node, Call) and isinstance(node.callable, Global) and imported_name(node.callable, 2) in wanted
    ]
    alone = {id(node) for node in calls}
    found = {id(node.args) for node in calls}
    return found - {id(child) for node in nodes if id(node) not in alone for child in children(node)}
