"""The names inside a state dict: prefixes, and what becomes of the module paths in its ``_metadata``.

A name is a key: ``module.conv.weight``. Its segments end at dots, and a prefix is one
or more whole segments, such as ``module.``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.hints import Placeholder, option


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
