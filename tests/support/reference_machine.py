"""A trace of the effects of a pickle, made by Python's own unpickler and independent of the project's parser.

The unpickler works on stand-ins, which record each operation and do nothing.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from ckptconv.pickles.graph import Global, imported_name
from ckptconv.pickles.machine import CODES

__all__ = ["trace"]


class Stand:
    """A stand-in for any object that a pickle creates or finds: a list, dict or set, a global, or the result of
    a call.
    """

    def __init__(self, kind: str, log: list[Any]) -> None:
        self.kind = kind
        self.log = log

    def note(self, verb: str, *operands: Any) -> Stand:
        self.log.append((verb, self, operands))
        return self

    def extend(self, values: list[Any]) -> None:
        self.note("append", *values)

    def append(self, value: Any) -> None:
        self.note("append", value)

    def add(self, value: Any) -> None:
        self.note("add", value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.note("set", key, value)

    def __setstate__(self, state: Any) -> None:
        self.note("build", state)


class ReferenceMachine(pickle._Unpickler):
    """An unpickler that runs a pickle on stand-ins, without its effects."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    proto: int
    stack: list[Any]
    append: Callable[[Any], None]

    if TYPE_CHECKING:  # typeshed does not declare this method

        def pop_mark(self) -> list[Any]: ...

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.log: list[Any] = []
        self.found: dict[str, Stand] = {}

    def make(self, kind: str) -> Stand:
        return Stand(kind, self.log)

    def find_class(self, module: str, name: str) -> Stand:
        return self.once(f"{module} {name} {imported_name(Global(module, name), self.proto)} {self.proto > 3}")

    def get_extension(self, code: int) -> None:
        self.append(self.once(f"extension {code}"))

    def once(self, name: str) -> Stand:
        return self.found.setdefault(name, self.make(name))

    def persistent_load(self, pid: Any) -> Stand:
        return self.make("made").note("persistent id", pid)

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.append(self.make("made").note("instance", klass, *args))

    def _decode_string(self, value: bytes) -> Any:
        return bytearray(b"py2 " + value)


def operation(name: str) -> Callable[[Callable[[ReferenceMachine], None]], None]:
    return lambda function: ReferenceMachine.dispatch.update({CODES[name][0]: function})


def container(name: str, kind: str, verb: str) -> None:
    """Define the opcode `name`, which pushes an empty container of `kind`, or one with the items after the MARK."""

    @operation(name)
    def push(m: ReferenceMachine) -> None:
        items = [] if name.startswith("EMPTY") else m.pop_mark()
        m.append(made := m.make(kind))
        for i in range(0, len(items), 2) if verb == "set" else []:
            made.note(verb, *items[i : i + 2])
        if verb == "frozen" or (verb == "append" and items):
            made.note(verb, *items)


for row in (
    ("EMPTY_LIST", "list", ""),
    ("EMPTY_DICT", "dict", ""),
    ("EMPTY_SET", "set", ""),
    ("LIST", "list", "append"),
    ("DICT", "dict", "set"),
    ("FROZENSET", "frozenset", "frozen"),
):
    container(*row)


def call(name: str, operands: int) -> None:
    @operation(name)
    def push(m: ReferenceMachine) -> None:
        callable_, args, *kwargs = [m.stack.pop() for _ in range(operands)][::-1]
        parts = args if isinstance(args, tuple) else ("*", args)  # otherwise another call has made the arguments
        m.append(m.make("made").note(name, callable_, *parts, *kwargs))


call("REDUCE", 2)
call("NEWOBJ", 2)
call("NEWOBJ_EX", 3)


def trace(data: bytes) -> list[Any]:
    """Return the effects of the pickle `data` in order, with their operands.

    Objects with an identity are numbered in the order of their first appearance. Effects on a plain container that is
    not visible in the result are omitted.
    """
    machine = ReferenceMachine(data)
    root = machine.load()
    seen = visible(machine.log, root)
    numbers: dict[int, int] = {}
    effects = [(verb, (target, *operands)) for verb, target, operands in machine.log if id(target) in seen]
    return [(verb, *(label(part, numbers) for part in parts)) for verb, parts in [*effects, ("root", (root,))]]


def visible(log: list[Any], root: Any) -> set[int]:
    """Return the ids of all objects that can be reached from the root, or from a call, persistent id or object."""
    inside: dict[int, list[Any]] = collections.defaultdict(list)
    todo = [root]
    for _, target, operands in log:
        inside[id(target)] += operands
        if target.kind == "made":
            todo.append(target)
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) not in seen and isinstance(value, (Stand, tuple)):
            seen.add(id(value))
            todo += value if isinstance(value, tuple) else inside[id(value)]
    return seen


def label(value: Any, numbers: dict[int, int]) -> Any:
    kind = value.kind if isinstance(value, Stand) else type(value).__name__
    if isinstance(value, float):
        return struct.pack(">d", value)
    number = None
    if isinstance(value, (Stand, bytearray)) or (
        isinstance(value, (str, bytes, tuple)) and len(value) > (0 if isinstance(value, tuple) else 1)
    ):
        if id(value) in numbers:
            return "number", numbers[id(value)]
        number = numbers[id(value)] = len(numbers)
    if isinstance(value, tuple):
        return number, kind, *(label(part, numbers) for part in value)
    return number, kind, None if isinstance(value, Stand) else bytes(value) if isinstance(value, bytearray) else value
