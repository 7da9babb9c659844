"""``strip_prefix`` and ``add_prefix`` for a state dict in memory and its ``_metadata``.

They do what :func:`ckptconv.convert` does to a file, and do not need torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from ckptconv.edits.names import modules_with, modules_without, normal_prefix, prefixes_of, strings
from ckptconv.errors import ArgumentTypeError, CollisionError, NoMatchError
from ckptconv.hints import for_python

#: A state dict, which may have an attribute ``_metadata`` (module path → {'version': n}).
StateDictT = TypeVar("StateDictT", bound=MutableMapping[str, Any])


@for_python
def strip_prefix(state_dict: StateDictT, prefix: str | Iterable[str]) -> StateDictT:
    """Return a copy of `state_dict` without `prefix`, such as ``module.``, at the start of its names.

    Args:
        state_dict: The state dict. Names without the prefix stay.
        prefix: One prefix, or several that are removed one after another. ``module`` means ``module.``.

    Returns:
        A mapping of the same type, in the same order, with ``_metadata``. Tensors are not copied.

    Raises:
        NoMatchError: No name has the prefix.
        CollisionError: Two names would become one.
        UsageError: The prefix is empty or has an empty segment.
        ArgumentTypeError: `state_dict` is not a mutable mapping, or `prefix` is not made of strings.
    """
    for one in map(normal_prefix, strings("prefix", prefix)):
        state_dict = _stripped(state_dict, one)
    return state_dict


def _stripped(state_dict: StateDictT, prefix: str) -> StateDictT:
    check_type(state_dict)
    names = [name for name in state_dict if isinstance(name, str)]
    having = [name for name in names if name.startswith(prefix)]
    if not having:
        inside = [
            str(key)
            for key, value in state_dict.items()
            if isinstance(value, Mapping) and any(str(name).startswith(prefix) for name in value)
        ]
        prefixes = ", ".join(prefixes_of(names))
        raise NoMatchError(
            f"no name starts with {prefix!r}",
            got=f"prefixes {prefixes}" if prefixes else "no name with a prefix",
            hint=f"pass the state dict: [{inside[0]!r}]" if inside else None,
        )
    renamed = _renamed(state_dict, lambda name: name.removeprefix(prefix))
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        module = modules_without(prefix, metadata, keep_ancestors=len(having) < len(names))
        set_metadata(renamed, metadata, {}, module)
    return renamed


@for_python
def add_prefix(state_dict: StateDictT, prefix: str | Iterable[str]) -> StateDictT:
    """Return a copy of `state_dict` with `prefix`, such as ``module.``, before each of its names.

    Args:
        state_dict: The state dict.
        prefix: One prefix, or several that are added one after another.

    Returns:
        A mapping of the same type. ``_metadata`` gets the entries that the wrapper's own ``state_dict()`` writes.
        Tensors are not copied.

    Raises:
        CollisionError: Two names would become one.
        UsageError: The prefix is empty or has an empty segment.
        ArgumentTypeError: `state_dict` is not a mutable mapping, or `prefix` is not made of strings.
    """
    for one in map(normal_prefix, strings("prefix", prefix)):
        state_dict = _prefixed(state_dict, one)
    return state_dict


def _prefixed(state_dict: StateDictT, prefix: str) -> StateDictT:
    check_type(state_dict)
    renamed = _renamed(state_dict, lambda name: prefix + name)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        added, module = modules_with(prefix, metadata)
        set_metadata(renamed, metadata, {path: {"version": 1} for path in added}, module)
    return renamed


def check_type(state_dict: object) -> None:
    """Raise ArgumentTypeError if `state_dict` is not a mutable mapping."""
    if not isinstance(state_dict, MutableMapping):
        raise ArgumentTypeError(
            f"a state dict is needed, not {type(state_dict).__name__}; a module returns one: state_dict()"
        )


def _renamed(state_dict: StateDictT, new: Callable[[str], str]) -> StateDictT:
    """Return a copy of `state_dict`, of the same type, with each string key replaced by the result of `new`.

    Raise CollisionError if two names become equal.
    """
    items: dict[Any, tuple[Any, Any]] = {}
    for key, value in state_dict.items():
        name = new(key) if isinstance(key, str) else key
        if name in items:
            raise CollisionError(f"two names would become {name!r}", got=f"{items[name][0]!r} and {key!r}")
        items[name] = key, value
    return copied(state_dict, ((name, value) for name, (_, value) in items.items()))


def copied(state_dict: StateDictT, items: Iterable[tuple[Any, Any]]) -> StateDictT:
    """Return a copy of `state_dict`, of the same type and with its attributes, that contains only `items`."""
    copy_of = copy.copy(state_dict)
    copy_of.clear()
    copy_of.update(items)
    return copy_of


def set_metadata(
    state_dict: MutableMapping[str, Any],
    metadata: Mapping[str, Any],
    above: Mapping[str, Any],
    module: Callable[[str], str | None],
) -> None:
    """Set ``_metadata`` of `state_dict` to the entries of `metadata` under new module paths.

    If two entries get the same path, the first one stays.

    Args:
        state_dict: The state dict.
        metadata: The old ``_metadata``.
        above: Entries to add before the others.
        module: Returns the new module path for an old one, or None to remove the entry.
    """
    entries = dict(above)
    for path, entry in metadata.items():
        name = module(path)
        if name is not None:
            entries.setdefault(name, entry)
    renamed = copy.copy(metadata)
    renamed.clear()  # type: ignore[attr-defined]  # torch's is an OrderedDict
    renamed.update(entries)  # type: ignore[attr-defined]
    state_dict._metadata = renamed  # type: ignore[attr-defined]
