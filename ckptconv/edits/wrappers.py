"""The name segments that DataParallel, torch.compile, FSDP and others add, and names without them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ckptconv.edits.names import modules_without

__all__ = ["WRAPPERS", "is_wrapped", "modules_unwrapped", "unwrapped"]

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
