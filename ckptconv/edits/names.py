"""The names inside a state dict: prefixes, what wrappers add, and the module paths in ``_metadata``.

A name is a key: ``module.conv.weight``. Its segments end at dots, and a prefix is one
or more whole segments, such as ``module.``
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.hints import Placeholder, option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

#: What wrappers put before names, and who does it. All but the first are words that no
#: model uses for a module of its own.
WRAPPERS = {
    "module.": "nn.DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning's Fabric or DeepSpeed",
}
_MODULE, *_UNMISTAKABLE = WRAPPERS
_WORDS = frozenset(word[:-1] for word in _UNMISTAKABLE)
_LEADING = regex(rf"(?:{'|'.join(map(re.escape, WRAPPERS))})*")
#: ``features.module.0.weight``: an attribute that is no number (an element of a list was hardly wrapped by itself), and
#: more than a parameter inside.
_INNER = regex(r"((?:[A-Za-z_]\w*\.)+?)module\.\w+\.")
_MOST_PARENTS = 20


def normal_prefix(prefix: str) -> str:
    """`prefix` with the dot that ends its last segment: ``module`` means ``module.``."""
    dotted = prefix if prefix.endswith(".") else prefix + "."
    if not prefix or any(not segment for segment in dotted[:-1].split(".")):
        raise UsageError(
            f"{prefix!r} is no prefix of names",
            expected="segments that end at a dot, like module.",
            hint="for anything else: " + option("rename", ((Placeholder("REGEX"), Placeholder("REPLACEMENT")),)),
        )
    return dotted


def strings(name: str, words: str | Iterable[str]) -> tuple[str, ...]:
    """`words`, the argument `name`, which may be one string. Raises TypeError for anything else."""
    found = (words,) if isinstance(words, str) else tuple(words) if isinstance(words, Iterable) else (words,)
    if not all(isinstance(word, str) for word in found):
        raise ArgumentTypeError(f"{name} must be a string or strings, not {words!r}")
    return found


def prefixes_of(names: Iterable[str]) -> Counter[str]:
    """The first segments that `names` have, with their dots, and how many have each."""
    return Counter(name.split(".")[0] + "." for name in names if "." in name)


# The keys of _metadata are module paths: the names' without their last segments, '' for the outermost module.


def modules_without(prefix: str, modules: Collection[object], *, keep_ancestors: bool) -> Callable[[str], str | None]:
    """What a module path, one of `modules`, becomes without `prefix`; None: it goes.

    The wrapper's own entries go, because its place is taken by what it wrapped.

    `keep_ancestors`: names without the prefix stay beside it, and so do the modules around it but for the outermost.
    """
    wrapped = prefix[:-1]
    gone = set() if wrapped not in modules else {""} if keep_ancestors else ancestors(wrapped)
    return lambda path: None if path in gone else "" if path == wrapped else path.removeprefix(prefix)


def ancestors(path: str) -> set[str]:
    """The module paths above `path`, the outermost being ''."""
    segments = path.split(".")
    return {".".join(segments[:n]) for n in range(len(segments))}


@dataclass(frozen=True)
class WrappedParts:
    """Submodules whose names all go through an inner ``module.``.

    Attributes:
        parents: The prefixes of the submodules, such as ``encoder.``
        rename: The pattern and the replacement that remove the inner ``module.``.
        is_safe: Whether names that are different stay different after the rename.
    """

    parents: list[str]
    rename: tuple[str, str]
    is_safe: bool


def wrapped_parts(every: Sequence[Collection[str]]) -> WrappedParts | None:
    """Return the submodules that only nn.DataParallel or a module called ``module`` explains, or None.

    Args:
        every: The names of each state dict.
    """
    matches = (match for names in every for name in names if (match := _inner(name)))
    parents = sorted({match[1] for match in matches})
    if len(parents) > _MOST_PARENTS:
        return None
    below = {parent: [name for names in every for name in names if name.startswith(parent)] for parent in parents}
    parents = [each for each in parents if all(name.startswith(each + _MODULE) for name in below[each])]
    if not parents:
        return None
    pattern = "|".join(re.escape(parent[:-1]) for parent in parents)
    is_one = len(parents) == 1
    rename = (rf"^{pattern}\.module\.", parents[0]) if is_one else (rf"^({pattern})\.module\.", r"\1.")
    after = [[re.sub(*rename, name) for name in names] for names in every]
    is_safe = all(keeps_apart(old, new) for old, new in zip(every, after, strict=True))
    return WrappedParts(parents, rename, is_safe)


def keeps_apart(old: Collection[str], new: Collection[str]) -> bool:
    """Return whether different names stay different, and none becomes empty."""
    return len(set(new)) == len(set(old)) and "" not in new


def unwrapped(names: Collection[str], followers: Collection[str] = ()) -> dict[str, str]:
    """Each of `names`, those of one state dict, without wrappers: the unmistakable ones at any depth, and ``module.``,
    once, if it then starts every name. An inner ``module`` stays.

    `followers`, an optimizer's names, lose what `names` lose, whether or not they are among them.
    """
    inside = {name: _without_words(name) for name in (*names, *followers)}
    if not is_wrapped(names):
        return inside
    return {old: new.removeprefix(_MODULE) for old, new in inside.items()}


def modules_unwrapped(names: Collection[str], modules: Collection[str]) -> Callable[[str], str | None]:
    """What a module path, one of `modules`, becomes where `names` are unwrapped.

    None: it goes, because its place is taken by what it wrapped.
    """
    around = {path.rpartition(".")[0] for path in modules if path.rpartition(".")[2] in _WORDS}
    inside = {path: _without_words(f"{path}.")[:-1] for path in modules if path not in around}
    without = modules_without(_MODULE, set(inside.values()), keep_ancestors=False) if is_wrapped(names) else str
    return lambda path: without(inside[path]) if path in inside else None


def is_wrapped(names: Collection[str]) -> bool:
    """Whether ``module.`` starts all of `names`, of which there are some, without the unmistakable wrappers."""
    return bool(names) and all(_without_words(name).startswith(_MODULE) for name in names)


def _without_words(name: str) -> str:
    """`name` without unmistakable words among the modules that it goes through."""
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module not in _WORDS), last])


def _inner(name: str) -> re.Match[str] | None:
    """Return the match of the segments before an inner ``module.`` of `name`, or None."""
    if ".module." not in name:
        return None
    leading = _LEADING.match(name)
    match = _INNER.match(name)
    return match if match and leading and not leading.end() else None
