"""Scan a pickle as leniently as the unpicklers that would run it, for the globals that it reaches.

The parser refuses what can be read in two ways. Whoever hides a call would only have to be refused, for Python
runs what stands before a mistake, and takes for none much that the parser does. So this reader goes on
wherever CPython's may (``Modules/_pickle.c``, ``Lib/pickle.py``), and what it has seen before it cannot go on
counts. It may see more than runs, never less.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Effect,
    Extension,
    Global,
    Graph,
    List,
    Node,
    Object,
    PersistentId,
    Py2String,
    Tuple,
    Value,
)
from ckptconv.pickles.machine import PickleMachine
from ckptconv.pickles.opcodes import CODES
from ckptconv.pickles.parser import OPERATIONS, in_dispatch

__all__ = ["NAMING", "STARTS", "LenientScan", "scan_lenient"]

_HIGHEST_PROTOCOL = 5


class LenientScan(NamedTuple):
    """What was seen, and the offset up to which it was.

    IS_WHOLE: up to STOP; IS_LONG: so many opcodes that the rest was left alone.
    """

    graph: Graph
    end: int
    is_whole: bool
    is_long: bool


def scan_lenient(read: Callable[[int, int], bytes], start: int, end: int, *, most: int) -> LenientScan:
    """What stands from START to END, as READ gives it, as a pickle of at most MOST opcodes.

    Raises nothing but what READ does.
    """
    machine = _Lenient(read, end, "", start)
    is_whole = is_long = False
    try:
        graph = machine.load(_DISPATCH, most)
        is_whole = True
    except LimitError:
        is_long = True
    except (_Broken, MalformedError, UnsupportedError):
        pass
    if not is_whole:
        graph = machine.finish(0)
    return LenientScan(graph, machine.tell(), is_whole, is_long)


class _Broken(Exception):
    """No reader goes on. Most byte strings are no pickles, so this says nothing and costs nothing."""


class _Lenient(PickleMachine):
    """Goes on where :class:`PickleMachine` fails and pickle's own may not."""

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:  # noqa: ARG002
        raise _Broken

    def finish(self, opcodes: int) -> Graph:
        """The graph of all that there is; its root is what lies on top of the stack, all else is thrown away."""
        left = [value for stack in (*self.metastack, self.stack) for value in stack]
        root = left.pop() if left else None
        return Graph(
            root,
            self.protocol,
            opcodes,
            frozenset(),
            self.globals,
            self.calls,
            self.references,
            [*self.popped, *left, *self.calls],
            self.shared,
            self.byte_strings,
            self.extensions,
        )

    def effect(self, opcode: str, values: list[Value], *kinds: type[Node]) -> None:  # noqa: ARG002 - of any kind
        """Note OPCODE where it stands on something that can be noted on; a class that gets a state is
        called, in a way.
        """
        target = self.stack[-1]
        if isinstance(target, Object):
            target.add(Effect(opcode, values, self.next_order()))
        elif opcode == "BUILD" and isinstance(target, (Global, Extension)):
            self.calls.append(Call("REDUCE", target, Tuple(values), order=self.next_order()))

    def call(self, kind: str, callable_: Value, args: Value, kwargs: Value = None) -> None:
        """Push the result of a call that is not made, whatever it is given."""
        if not isinstance(callable_, (Global, Call, Extension, PersistentId)):
            self.fail("what cannot be called stops every reader")
        if not isinstance(args, (Tuple, Call)):
            args = Tuple(list(args.elements()) if isinstance(args, List) else [args])
        call = Call(kind, callable_, args, kwargs, self.next_order())
        self.calls.append(call)
        self.stack.append(call)


def _proto(m: PickleMachine) -> None:
    m.protocol = m.byte()
    if m.protocol > _HIGHEST_PROTOCOL:
        m.fail("no such pickle protocol")


def _frame(m: PickleMachine) -> None:
    m.length(8)


def _number(m: PickleMachine) -> None:
    m.line()
    m.stack.append(0)


def _long_bytes(m: PickleMachine, n: int) -> None:
    if not 0 <= n <= m.size - m.tell():
        m.fail("a length that no reader takes")
    m.skip(n)
    m.stack.append(0)


def _slot(m: PickleMachine) -> int:
    try:
        return int(m.line())
    except ValueError:
        m.fail("no slot of the memo")


def _string(m: PickleMachine) -> None:
    quoted = m.line().strip()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        m.fail("a STRING is not in quotes")
    try:
        m.push_bytes(Py2String(codecs.escape_decode(quoted[1:-1])[0]))
    except ValueError:
        m.fail("a STRING has a bad escape")


def _stack_global(m: PickleMachine) -> None:
    name, module = (_text(value) for value in (m.stack.pop(), m.stack.pop()))
    if module is None or name is None:
        m.fail("STACK_GLOBAL needs two texts")
    m.stack.append(m.find_class(module, name))


def _text(value: Value) -> str | None:
    """VALUE, where it is one or can be: what a call gives is ``__import__`` of something."""
    if isinstance(value, Py2String):
        return value.data.decode("latin-1")
    if isinstance(value, (Call, Blob)):
        return "builtins.__import__"
    return value if isinstance(value, str) else None


def _newobj_ex(m: PickleMachine) -> None:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.call("NEWOBJ_EX", cls, args, kwargs)


_DISPATCH = in_dispatch(
    OPERATIONS
    | {
        "PROTO": _proto,
        "FRAME": _frame,
        "INT": _number,
        "LONG": _number,
        "LONG1": lambda m: _long_bytes(m, m.byte()),
        "LONG4": lambda m: _long_bytes(m, int.from_bytes(m.take(4), "little", signed=True)),
        "FLOAT": _number,
        "STRING": _string,
        "GET": lambda m: m.get(_slot(m)),
        "PUT": lambda m: m.put(_slot(m)),
        "READONLY_BUFFER": lambda m: None,
        "STACK_GLOBAL": _stack_global,
        "NEWOBJ_EX": _newobj_ex,
    }
)
#: Codes that a pickle can start with, which take nothing from the stack or the memo.
STARTS = b"".join(
    CODES[name]
    for name in (
        "PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG",
        "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES",
        "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
        "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_SET", "GLOBAL", "EXT1", "EXT2", "EXT4", "PERSID",
    )
)  # a table  # fmt: skip
#: Codes without which a pickle names nothing.
NAMING = b"".join(CODES[name] for name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"))
