"""Walk and copy Python containers with sharing, cycles, order and types kept.

Containers are dicts, lists, tuples, sets, frozensets and deques, their subclasses (``OrderedDict``, ``defaultdict``,
``Counter``, named tuples ...) with attributes set on them, other mutable mappings (``UserDict``), and instances of
dataclasses. Everything else is a *leaf* and not looked into, but for attributes set on a tensor. Nothing here recurses:
nesting may be as deep as memory allows.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch

from ckptconv.light_dataclass import dataclass

__all__ = ["Contents", "Slot", "attributes_of", "is_wrapper", "set_attributes"]

#: A subclass before its base. Their own methods are called, not those of classes derived from
#: them, which may do more than store.
_BASES = (OrderedDict, defaultdict, dict, list, deque, set, frozenset, tuple)
_ATOMS = (int, float, complex, str, bytes, bool, type(None), type)
_LEAVES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)  # whatever else they are: a module can be a dataclass


@dataclass(frozen=True, eq=False)
class Slot:
    """Where `node` stands first: `key` is its key where `above` is a dict and has it as a value, else None."""

    node: Any
    above: Slot | None
    key: object = None

    def upwards(self) -> Iterator[Slot]:
        """This place and those around it, outwards."""
        at: Slot | None = self
        while at is not None:
            yield at
            at = at.above


class Contents:
    """All that is in `root`, each object once."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.leaves: list[Slot] = []
        self.containers: list[Any] = []  # those inside before those around them, but for cycles
        seen: set[int] = set()
        todo: list[tuple[Slot, bool]] = [(Slot(root, None), False)]
        while todo:
            place, entered = todo.pop()
            node = place.node
            if entered:
                self.containers.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                if _is_container(node):
                    todo.append((place, True))
                    todo += [(Slot(child, place, key), False) for key, child in reversed(list(_keyed(node)))]
                else:
                    self.leaves.append(place)
                    if isinstance(node, torch.Tensor) and not is_wrapper(node):
                        todo += [
                            (Slot(child, place), False) for child in attributes_of(node).values() if not _is_atom(child)
                        ]

    def copied(self, replaced: Callable[[Any], Any]) -> Any:
        """A copy with `replaced`(leaf) for each leaf; a tensor that is replaced by another one gives it its attributes.

        A tuple or frozenset in which nothing was replaced stays itself.
        """
        return _Copy(self, replaced).of(self.root)


class _Copy:
    """Makes what can change empty at first and fills it later, so that cycles find it.

    What cannot is made of what is made already.
    """

    def __init__(self, contents: Contents, replaced: Callable[[Any], Any]) -> None:
        self.made = {id(place.node): replaced(place.node) for place in contents.leaves}
        self.made |= {
            id(node): _empty(node) for node in contents.containers if not isinstance(node, (tuple, frozenset))
        }
        todo = contents.containers
        while todo:  # again for those in a cycle that goes through a tuple
            todo = [node for node in todo if not self.finished(node)]
        for place in contents.leaves:
            new = self.of(place.node)
            if isinstance(new, torch.Tensor) and new is not place.node and not is_wrapper(new):
                set_attributes(new, {name: self.of(value) for name, value in attributes_of(place.node).items()})

    def of(self, node: Any) -> Any:
        return node if _is_atom(node) else self.made[id(node)]

    def has(self, node: Any) -> bool:
        return _is_atom(node) or id(node) in self.made

    def finished(self, node: Any) -> bool:
        """Whether `node`'s copy could be made and filled."""
        if not self.has(node):
            items = list(_items(node))
            if not all(map(self.has, items)):
                return False
            self.made[id(node)] = _remade(node, [self.of(item) for item in items])
        if not all(self.has(child) for _, child in _keyed(node)):
            return False
        new = self.of(node)
        if new is not node:
            _fill(new, node, self.of)
        return True


def _is_atom(node: object) -> bool:
    return isinstance(node, _ATOMS)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether `tensor`'s class says itself what operations on it do. Its attributes may be what it is made of."""
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def _is_container(node: object) -> bool:
    if isinstance(node, _LEAVES):
        return False
    if isinstance(node, _BASES):
        return True
    if isinstance(node, type) or not (is_dataclass(node) or isinstance(node, MutableMapping)):
        return False
    try:
        object.__new__(type(node))
    except TypeError:  # it keeps things where only its own code, in C, reaches them
        return False
    return True


def _base(node: object) -> Any:
    return next((base for base in _BASES if isinstance(node, base)), None)


def _items(node: Any) -> Iterator[Any]:
    """The elements of a tuple, list, deque or set, the keys of a dict."""
    base = _base(node)
    return base.__iter__(node) if base else iter(())


def _keyed(node: Any) -> Iterator[tuple[object, Any]]:
    """All that `node` holds, a dict's values with their keys."""
    if isinstance(node, dict):
        for key, value in _base(node).items(node):
            if not _is_atom(key):
                yield None, key
            if not _is_atom(value):
                yield key, value
    else:
        yield from ((None, item) for item in _items(node) if not _is_atom(item))
    yield from ((None, value) for value in attributes_of(node).values() if not _is_atom(value))


def attributes_of(node: object) -> dict[str, Any]:
    """What is in the ``__dict__`` and the ``__slots__`` of `node`."""
    found = dict(getattr(node, "__dict__", ()))
    for slot in _slots(node):
        try:
            found[slot.__name__] = slot.__get__(node)
        except AttributeError:  # an empty slot
            continue
    return found


def set_attributes(node: object, values: dict[str, Any]) -> None:
    """Set `values` on `node`, whatever its ``__setattr__`` would say: a frozen dataclass refuses."""
    slots = {slot.__name__: slot for slot in _slots(node)}
    for name, value in values.items():
        if name in slots:
            slots[name].__set__(node, value)
        else:
            vars(node)[name] = value


def _slots(node: object) -> Iterator[MemberDescriptorType]:
    for cls in reversed(type(node).__mro__):
        if "__slots__" in vars(cls):  # a class in C has members too, which are no slots
            yield from (slot for slot in vars(cls).values() if isinstance(slot, MemberDescriptorType))


def _empty(node: Any) -> Any:
    base = _base(node)
    if base is None:
        return object.__new__(type(node))
    new = base.__new__(type(node))
    if base is deque:
        deque.__init__(new, maxlen=node.maxlen)
    if base is defaultdict:
        new.default_factory = node.default_factory
    return new


def _remade(node: Any, items: list[Any]) -> Any:
    """The tuple or frozenset `node` with other `items`."""
    if not attributes_of(node) and all(new is old for new, old in zip(items, _items(node), strict=True)):
        return node
    if hasattr(type(node), "n_sequence_fields"):  # a ``torch.return_types``, as Python's own ``os.stat_result``
        return type(node)(items)
    return _base(node).__new__(type(node), items)


def _fill(new: Any, node: Any, of: Callable[[Any], Any]) -> None:
    base = _base(node)
    if isinstance(node, dict):
        for key, value in base.items(node):
            base.__setitem__(new, of(key), of(value))
    elif base in (list, deque):
        base.extend(new, [of(item) for item in _items(node)])
    elif base is set:
        set.update(new, [of(item) for item in _items(node)])
    set_attributes(new, {name: of(value) for name, value in attributes_of(node).items()})
