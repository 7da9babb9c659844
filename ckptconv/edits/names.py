"""The names in a state dict: prefixes, the segments that wrappers add, and the module paths in ``_metadata``.

A name is a key: ``module.conv.weight``. Its segments end at dots, and a prefix is one or more complete segments, such
as ``module.``. The keys of ``_metadata`` are module paths: names without their last segments, and ``''`` for the
outermost module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.hints import Placeholder, option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

#: The segments that wrappers add to names, and the wrappers. No model uses one of them, except for the first, as the
#: name of its own module.
WRAPPERS = {
    "module.": "nn.DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning's Fabric or DeepSpeed",
}
_MODULE, *_UNMISTAKABLE = WRAPPERS
_WORDS = frozenset(word[:-1] for word in _UNMISTAKABLE)
#: ``features.module.0.weight``: the inner ``module.`` follows an attribute (an element of a list is hardly wrapped by
#: itself) and contains more than one parameter.
_INNER = regex(r"((?:[A-Za-z_]\w*\.)+?)module\.\w+\.")
_MOST_PARENTS = 20


def normal_prefix(prefix: str) -> str:
    """Return `prefix` with a dot at its end: ``module.`` for ``module``.

    Raise UsageError if it is empty or has an empty segment.
    """
    dotted = prefix if prefix.endswith(".") else prefix + "."
    if not prefix or any(not segment for segment in dotted[:-1].split(".")):
        raise UsageError(
            f"{prefix!r} is not a prefix of names",
            expected="text that ends with a dot, like module.",
            hint="for anything else: " + option("rename", ((Placeholder("REGEX"), Placeholder("REPLACEMENT")),)),
        )
    return dotted


def strings(name: str, words: str | Iterable[str]) -> tuple[str, ...]:
    """Return `words` as a tuple of strings. A single string becomes a tuple of one.

    Raises ArgumentTypeError if another value is in it. `name` is the name of the argument in the error.
    """
    found = (words,) if isinstance(words, str) else tuple(words) if isinstance(words, Iterable) else (words,)
    if not all(isinstance(word, str) for word in found):
        raise ArgumentTypeError(f"{name} must be a string or strings, not {words!r}")
    return found


def prefixes_of(names: Iterable[str]) -> Counter[str]:
    """Return the number of names by their first segment, with its dot. Names of one segment do not count."""
    return Counter(name.split(".")[0] + "." for name in names if "." in name)


def modules_without(prefix: str, modules: Collection[object], *, keep_ancestors: bool) -> Callable[[str], str | None]:
    """Return a function that removes `prefix` from a module path. It returns None for paths of the wrapper itself.

    Args:
        prefix: The prefix.
        modules: All module paths.
        keep_ancestors: Whether some names do not start with the prefix. If so, the paths above the wrapped module stay,
            except for the outermost.
    """
    wrapped = prefix[:-1]
    gone = set() if wrapped not in modules else {""} if keep_ancestors else _ancestors(wrapped)
    return lambda path: None if path in gone else "" if path == wrapped else path.removeprefix(prefix)


def modules_with(prefix: str, modules: Collection[object]) -> tuple[list[str], Callable[[str], str]]:
    """Return the module paths that a wrapper adds to `modules`, and a function that adds `prefix` to a module path.

    No paths are added if `modules` does not contain the outermost module.
    """
    if "" not in modules:
        return [], lambda path: prefix + path
    wrapped = prefix[:-1]
    return sorted(_ancestors(wrapped)), lambda path: prefix + path if path else wrapped


def _ancestors(path: str) -> set[str]:
    """Return the module paths above `path`, including ``''`` for the outermost module."""
    segments = path.split(".")
    return {".".join(segments[:n]) for n in range(len(segments))}


@dataclass(frozen=True)
class WrappedParts:
    """Submodules in which all names start with an inner ``module.``.

    Attributes:
        parents: The prefixes of the submodules, such as ``encoder.``
        rename: The pattern and the replacement that remove the inner ``module.``.
        is_safe: Whether no two names become equal and no name becomes empty.
    """

    parents: list[str]
    rename: tuple[str, str]
    is_safe: bool


def wrapped_parts(every: Sequence[Collection[str]]) -> WrappedParts | None:
    """Return the submodules in which all names start with an inner ``module.``, as nn.DataParallel adds it.

    Return None if there are none or too many.

    Args:
        every: The names of each state dict.
    """
    wrappers = tuple(WRAPPERS)
    matches = (
        match
        for names in every
        for name in names
        if ".module." in name and not name.startswith(wrappers) and (match := _INNER.match(name))
    )
    parents = sorted({match[1] for match in matches})
    if len(parents) > _MOST_PARENTS:
        return None
    below = {parent: [name for names in every for name in names if name.startswith(parent)] for parent in parents}
    parents = [parent for parent in parents if all(name.startswith(parent + _MODULE) for name in below[parent])]
    if not parents:
        return None
    pattern = "|".join(re.escape(parent[:-1]) for parent in parents)
    is_one = len(parents) == 1
    rename = (rf"^{pattern}\.module\.", parents[0]) if is_one else (rf"^({pattern})\.module\.", r"\1.")
    after = [[re.sub(*rename, name) for name in names] for names in every]
    is_safe = all(keeps_apart(old, new) for old, new in zip(every, after, strict=True))
    return WrappedParts(parents, rename, is_safe)


def keeps_apart(old: Collection[str], new: Collection[str]) -> bool:
    """Return whether the names `new` have as many different elements as `old`, and none is empty."""
    return len(set(new)) == len(set(old)) and "" not in new


def unwrapped(names: Collection[str], followers: Collection[str] = ()) -> dict[str, str]:
    """Return a dict from each name to the name without the segments of wrappers.

    Segments that only wrappers use are removed everywhere. ``module.`` is removed once at the start, if then all
    names start with it. An inner ``module.`` stays.

    Args:
        names: The names of one state dict.
        followers: The names of its optimizer, from which the same segments are removed.
    """
    inside = {name: _without_words(name) for name in (*names, *followers)}
    if not is_wrapped(names):
        return inside
    return {old: new.removeprefix(_MODULE) for old, new in inside.items()}


def modules_unwrapped(names: Collection[str], modules: Collection[str]) -> Callable[[str], str | None]:
    """Return a function that changes a module path of `modules` as :func:`unwrapped` changes names.

    The function returns None for paths of wrappers themselves. `names` are the names of the state dict.
    """
    around = {path.rpartition(".")[0] for path in modules if path.rpartition(".")[2] in _WORDS}
    inside = {path: _without_words(f"{path}.")[:-1] for path in modules if path not in around}
    without = modules_without(_MODULE, set(inside.values()), keep_ancestors=False) if is_wrapped(names) else str
    return lambda path: without(inside[path]) if path in inside else None


def is_wrapped(names: Collection[str]) -> bool:
    """Return whether all of `names` start with ``module.``, after other wrappers are removed.

    Return False if there are no names.
    """
    return bool(names) and all(_without_words(name).startswith(_MODULE) for name in names)


def _without_words(name: str) -> str:
    """Return `name` without the segments that only wrappers use. Its last segment always stays."""
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module not in _WORDS), last])
