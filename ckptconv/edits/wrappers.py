"""The name segments that DataParallel, torch.compile, FSDP and others add, and names without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from ckptconv.edits.names import modules_without
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
