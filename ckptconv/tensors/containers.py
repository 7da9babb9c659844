"""Walk and copy Python containers, keeping sharing, cycles, order and types.

Containers are dicts, lists, tuples, sets, frozensets and deques, their subclasses (``OrderedDict``, ``defaultdict``,
``Counter``, named tuples ...) with their attributes, other mutable mappings (``UserDict``), and instances of
dataclasses. Every other object is a *leaf*. The content of a leaf is not visited, except for the attributes of a
tensor. Nothing here recurses, so nesting may be as deep as memory allows.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch

from ckptconv.light_dataclass import dataclass

#: Each subclass comes before its base. The methods of these classes are called directly, because methods of derived
#: classes may do more than store.
_BASES = (OrderedDict, defaultdict, dict, list, deque, set, frozenset, tuple)
_ATOMS = (int, float, complex, str, bytes, bool, type(None), type)
_LEAVES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)  # always leaves, although a module can be a dataclass


@dataclass(frozen=True, eq=False)
class Slot:
    """The first position of `node` in the containers.

    Attributes:
        node: An object.
        parent: The slot of the container that contains `node`, or None for the root.
        key: The key of `node` if it is a value of a dict, otherwise None.
    """

    node: Any
    parent: Slot | None
    key: object = None

    def upwards(self) -> Iterator[Slot]:
        """Yield this slot, its parent, and so on up to the root."""
        at: Slot | None = self
        while at is not None:
            yield at
            at = at.parent


class Contents:
    """All objects that can be reached from `root`, without atoms and without repetitions."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.leaves: list[Slot] = []
        self.containers: list[Any] = []  # contents before their containers, except in cycles
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
        """Return a copy of the root in which each leaf is replaced by the result of `replaced`.

        A tensor that replaces another tensor gets its attributes. A tuple or frozenset is copied only if one of its
        items is replaced.
        """
        return _Copy(self, replaced).of(self.root)


class _Copy:
    """A copy of all containers.

    Mutable containers are created empty and filled later, so that cycles can refer to them. Tuples and frozensets are
    created after their items.
    """

    def __init__(self, contents: Contents, replaced: Callable[[Any], Any]) -> None:
        self.made = {id(place.node): replaced(place.node) for place in contents.leaves}
        self.made |= {
            id(node): _empty(node) for node in contents.containers if not isinstance(node, (tuple, frozenset))
        }
        todo = contents.containers
        while todo:  # repeated for cycles through a tuple
            todo = [node for node in todo if not self.finished(node)]
        for place in contents.leaves:
            new = self.of(place.node)
            if isinstance(new, torch.Tensor) and new is not place.node and not is_wrapper(new):
                set_attributes(new, {name: self.of(value) for name, value in attributes_of(place.node).items()})

    def of(self, node: Any) -> Any:
        """Return the copy of `node`, which must exist already. An atom is its own copy."""
        return node if _is_atom(node) else self.made[id(node)]

    def has(self, node: Any) -> bool:
        """Return whether the copy of `node` exists."""
        return _is_atom(node) or id(node) in self.made

    def finished(self, node: Any) -> bool:
        """Create and fill the copy of `node`, if the copies of its contents exist.

        Return whether the copy is complete now.
        """
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
    """Return whether the class of `tensor` has its own ``__torch_dispatch__``.

    The attributes of such a tensor may be the tensors that it consists of.
    """
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def _is_container(node: object) -> bool:
    """Return whether `node` is a container.

    A dataclass or mapping is one only if ``object.__new__`` can create an empty instance.
    """
    if isinstance(node, _LEAVES):
        return False
    if isinstance(node, _BASES):
        return True
    if isinstance(node, type) or not (is_dataclass(node) or isinstance(node, MutableMapping)):
        return False
    try:
        object.__new__(type(node))
    except TypeError:  # a class in C, whose data only its own code can reach
        return False
    return True


def _base(node: object) -> Any:
    """Return the first built-in container class of which `node` is an instance, or None."""
    return next((base for base in _BASES if isinstance(node, base)), None)


def _items(node: Any) -> Iterator[Any]:
    """Return an iterator over the elements of a tuple, list, deque or set, or over the keys of a dict.

    It is empty for other objects.
    """
    base = _base(node)
    return base.__iter__(node) if base else iter(())


def _keyed(node: Any) -> Iterator[tuple[object, Any]]:
    """Yield the contents and attributes of `node`, except for atoms, as pairs of a key and a value.

    The key is set only for the values of a dict. It is None for elements, keys and attributes.
    """
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
    """Return the attributes of `node` in its ``__dict__`` and its ``__slots__``, by name."""
    found = dict(getattr(node, "__dict__", ()))
    for slot in _slots(node):
        try:
            found[slot.__name__] = slot.__get__(node)
        except AttributeError:  # an empty slot
            continue
    return found


def set_attributes(node: object, values: dict[str, Any]) -> None:
    """Set the attributes `values` on `node`.

    Its ``__setattr__`` is not called, because a frozen dataclass would raise an error.
    """
    slots = {slot.__name__: slot for slot in _slots(node)}
    for name, value in values.items():
        if name in slots:
            slots[name].__set__(node, value)
        else:
            vars(node)[name] = value


def _slots(node: object) -> Iterator[MemberDescriptorType]:
    """Yield the descriptors of the ``__slots__`` of the class of `node` and its bases."""
    for cls in reversed(type(node).__mro__):
        if "__slots__" in vars(cls):  # classes in C have members that are not slots
            yield from (slot for slot in vars(cls).values() if isinstance(slot, MemberDescriptorType))


def _empty(node: Any) -> Any:
    """Return an empty container of the type of `node`, with its ``maxlen`` or ``default_factory``."""
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
    """Return a tuple or frozenset like `node` with `items`.

    Return `node` itself if all items are the same objects and it has no attributes.
    """
    if not attributes_of(node) and all(new is old for new, old in zip(items, _items(node), strict=True)):
        return node
    if hasattr(type(node), "n_sequence_fields"):  # a ``torch.return_types``, made like an ``os.stat_result``
        return type(node)(items)
    return _base(node).__new__(type(node), items)


def _fill(new: Any, node: Any, of: Callable[[Any], Any]) -> None:
    """Add copies of the contents and attributes of `node` to the empty container `new`.

    `of` returns the copy of an object.
    """
    base = _base(node)
    if isinstance(node, dict):
        for key, value in base.items(node):
            base.__setitem__(new, of(key), of(value))
    elif base in (list, deque):
        base.extend(new, [of(item) for item in _items(node)])
    elif base is set:
        set.update(new, [of(item) for item in _items(node)])
    set_attributes(new, {name: of(value) for name, value in attributes_of(node).items()})
