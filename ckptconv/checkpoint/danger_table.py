"""The table of harmful functions in Python, torch and what they need: ``dangerous_globals.txt`` beside this module.

``tests/danger_table/make.py`` in the repository makes it, by reading their source. It is read here when the first
global is looked up that torch's safe loader does not take, and each module's line when something of that module is.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

_TABLE = Path(__file__).with_name("dangerous_globals.txt")
_MOST_WORDS = 20  # attributes of attributes
_LONGEST_NAME = 6  # words of a method of a class in a class
_MOST_OTHERS = 100  # names that are the same as another, bases of bases

#: What it is: dangerous wherever it is named; a class that is so where it is called, or where one is made in any way; a
#: table that others rely on.
Entry: TypeAlias = Literal["name", "class", "new", "table"]

_WORST: tuple[Entry, ...] = ("name", "table", "new", "class")


class _Table(NamedTuple):
    packages: frozenset[str]
    modules: dict[str, tuple[str, ...]]  # names under which modules stand in others
    lines: dict[str, str]
    methods: frozenset[str]
    methods_in_c: frozenset[str]


@lru_cache(maxsize=1)
def _table() -> _Table:
    packages: frozenset[str] = frozenset()
    modules: dict[str, tuple[str, ...]] = {}
    lines: dict[str, str] = {}
    methods = in_c = frozenset[str]()
    loader: Any = __spec__.loader
    for line in loader.get_data(str(_TABLE)).decode().splitlines():  # the package can be in an archive
        head, _, rest = line.partition(" ")
        if head == "packages:":
            packages = frozenset(rest.split())
        elif head == "methods:":
            methods = frozenset(rest.split())
        elif head == "in-c:":
            in_c = frozenset(rest.split())
        elif head.endswith(":") and head != "pythons:":
            modules[head[:-1]] = tuple(rest.split())
        elif head != "#":
            lines[head] = rest
    return _Table(packages, modules, lines, methods, in_c)


@lru_cache(maxsize=1024)
def _names(module: str) -> dict[str, Entry | tuple[str, ...]]:
    """What `module` has: an entry, or the names of what else it is."""
    found: dict[str, Entry | tuple[str, ...]] = {}
    others: dict[str, list[str]] = {}
    for word in _table().lines.get(module, "").split():
        if word.endswith(("()", "(new)")):
            found[word.partition("(")[0] + "()"] = "new" if word.endswith("(new)") else "class"
        elif word.endswith("[]"):
            found[word[:-2]] = "table"
        elif "=" in word or "<" in word:
            name, _, other = word.replace("<", "=").partition("=")
            others.setdefault(f"={name}" if "=" in word else f"<{name}", []).append(other)
        else:
            found[word] = found[word.rstrip("?")] = "name"
    return found | {name: tuple(each) for name, each in others.items()}


def is_known_package(module: str) -> bool:
    """Whether `module` is of Python, torch or what they need, so that the table says all that is known of it."""
    return module.partition(".")[0] in _table().packages


def is_method(name: str, *, of_known_class: bool = False) -> bool:
    """Whether a method called `name` does harm in some class there. `of_known_class`: only those written in C, which
    the table has for no class.
    """
    table = _table()
    return name in table.methods_in_c or (not of_known_class and name in table.methods)


def modules_called(word: str) -> tuple[str, ...]:
    """The modules that others there have under the name `word`."""
    return _table().modules.get(word, ())


@lru_cache(maxsize=1024)
def _mentioned(module: str) -> frozenset[str]:
    return frozenset(key.lstrip("=<").partition(".")[0].partition("(")[0] for key in _names(module))


def is_mentioned(module: str, name: str) -> bool:
    """Whether the table can have anything of `name` in `module`, its methods too. Cheaper than asking for each."""
    return "." in name or name in _mentioned(module)


def only_looks_up(module: str, name: str) -> bool:
    """Whether the method `name` in `module` only looks up what it is given the name of."""
    return listed(module, f"{name}?") is not None


@lru_cache(maxsize=4096)
def listed(module: str, name: str) -> Entry | None:
    """What `name` in `module` is, with the attributes that its dots lead through, by all that each of them could be."""
    words = name.split(".")
    if len(words) > _MOST_WORDS:
        return "name"
    starts = [(module, 0)]
    for i, word in enumerate(words[:-1]):
        starts += ((of, i + 1) for of in (*modules_called(word), word))
        starts.append((f"{module}.{'.'.join(words[: i + 1])}", i + 1))
    found = [_in_module(of, words[at:]) for of, at in starts]
    return next((entry for entry in _WORST if entry in found), None)


def _in_module(module: str, words: list[str]) -> Entry | None:
    """What `words` are, of which the first are a name of `module`, or a class and its attributes."""
    if module not in _table().lines:
        return None
    for end in range(1, min(len(words), _LONGEST_NAME) + 1):
        for of, name, is_base in _others(module, ".".join(words[:end])):
            names = _names(of)
            known = names.get(name)
            if not is_base and (known == "name" or known == "table"):
                return known
            if end < len(words) and names.get(f"{name}.{words[end]}") == "name":
                return "name"
            made = names.get(name + "()")
            if end == len(words) and not is_base and made in ("class", "new"):
                return "new" if made == "new" else "class"
    return None


@lru_cache(maxsize=4096)
def _others(module: str, name: str) -> tuple[tuple[str, str, bool], ...]:
    """What `name` of `module` is: itself, what is the same, and if it is a class its bases, with whether it is one."""
    found = {(module, name, False): None}
    todo = [*found]
    while todo and len(found) < _MOST_OTHERS:
        of, what, is_base = todo.pop()
        names = _names(of)
        for mark in "=<":
            others = names.get(mark + what)
            for other in others if isinstance(others, tuple) else ():
                each = (*_module_of(other), is_base or mark == "<")
                if each not in found:
                    found[each] = None
                    todo.append(each)
    return tuple(found)


def _module_of(full: str) -> tuple[str, str]:
    """The module and the name in it of the class called `full`."""
    parts = full.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in _table().lines:
            return module, ".".join(parts[end:])
    return "", full
