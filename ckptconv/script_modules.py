"""Modules in TorchScript archives: which of a script module's attributes its ``state_dict()`` would have. The classes say it, and those stand in the archive's code
(:mod:`ckptconv.formats.torchscript`)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptconv.errors import LimitError
from ckptconv.graph import Call, Dict, Global, Node, Value
from ckptconv.limits import LIMITS

__all__ = ["ScriptClasses", "script_tensors"]

#: The classes of modules by name, as a pickle names them: the attributes that are parameters, those that are buffers.
ScriptClasses: TypeAlias = "dict[str, tuple[list[str], list[str]]]"

_TIMES = 100  # that a module can stand in others, on an average; no real one comes near


@dataclass(frozen=True)
class _Module:
    """The tensors that a module's own state has, and the modules in it, by attribute."""

    tensors: dict[str, Node]
    modules: dict[str, Value]

    def __len__(self) -> int:
        return 1 + len(self.tensors) + len(self.modules)

    @property
    def characters(self) -> int:
        """Of its attributes' names."""
        return sum(map(len, self.tensors)) + sum(map(len, self.modules))


def script_tensors(
    root: Value, classes: Mapping[str, tuple[list[str], list[str]]], tensors: Container[int], where: object = None
) -> dict[str, Node]:
    """The tensors that the script module ROOT has in its state dict, by name, in its order: a module's parameters, its buffers, then the modules in it.

    CLASSES are those of modules, TENSORS the ids of the nodes that are tensors, WHERE is for errors. A module that stands in two places has its names in both. Nothing where ROOT is of no such class. Raises LimitError.
    """
    known = _modules(root, classes, tensors)
    different = {id(module): module for module in known.values()}
    visits, characters = _TIMES * (len(known) + sum(map(len, different.values()))), LIMITS.path_characters
    found: dict[str, Node] = {}
    todo = [("", known[id(root)], 0)] if id(root) in known else []
    while todo:
        prefix, module, depth = todo.pop()
        visits -= len(module)
        characters -= len(prefix) * len(module) + module.characters
        if visits < 0 or characters < 0 or depth > LIMITS.nesting:
            raise LimitError("modules stand in one another too often or too deeply", where=where)
        found |= {prefix + name: tensor for name, tensor in module.tensors.items()}
        inside = [(f"{prefix}{name}.", known[id(child)], depth + 1) for name, child in module.modules.items()]
        todo += reversed(inside)
    return found


def _modules(
    root: Value, classes: Mapping[str, tuple[list[str], list[str]]], tensors: Container[int]
) -> dict[int, _Module]:
    """ROOT and every module in it, by the id of its node. Those of one class with one state are one: any number of objects can share it."""
    names: dict[str, tuple[frozenset[str], ...]] = {}
    read: dict[tuple[str, int], _Module] = {}
    found: dict[int, _Module] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        cls = _class(node)
        if not isinstance(node, Call) or cls not in classes or id(node) in found:
            continue
        state = next((effect.values[0] for effect in reversed(node.effects) if effect.opcode == "BUILD"), None)
        if (cls, id(state)) not in read:
            if cls not in names:
                names[cls] = tuple(map(frozenset, classes[cls]))
            attributes = dict(_attributes(state))
            own: dict[str, Node] = {}
            for listed in names[cls]:
                for name, value in attributes.items():
                    if isinstance(value, Node) and id(value) in tensors and name in listed:
                        own[name] = value
            modules = {name: value for name, value in attributes.items() if _class(value) in classes}
            read[cls, id(state)] = _Module(own, modules)
            todo += modules.values()
        found[id(node)] = read[cls, id(state)]
    return found


def _class(node: Value) -> str:
    """The name of the class of which NODE is an object, if it is one."""
    return str(node.callable) if isinstance(node, Call) and isinstance(node.callable, Global) else ""


def _attributes(state: Value) -> Iterator[tuple[str, Value]]:
    for items, i in state.pairs() if isinstance(state, Dict) else ():
        key = items.values[i]
        if isinstance(key, str):
            yield key, items.values[i + 1]
