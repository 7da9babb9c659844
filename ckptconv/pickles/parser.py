"""Parse a pickle into its graph: a stack machine that builds nodes where pickle's own builds objects.

Stricter than pickle's own, which runs whatever does not crash it: operands must have the type that the opcode is for, frames
must hold whole opcodes, the stack must be empty at the end. Reads through a small window, so that a text or bytes object
above ``LIMITS.inline_bytes`` never enters memory: it becomes a :class:`~ckptconv.graph.Blob`.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from typing import NoReturn

from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
    Effect,
    Extension,
    FrozenSet,
    Global,
    Graph,
    List,
    Node,
    Object,
    PersistentId,
    Py2String,
    Set,
    Tuple,
    Value,
    walk,
)
from ckptconv.limits import LIMITS
from ckptconv.pickles.opcodes import CODES

__all__ = ["parse"]

_WINDOW = 1 << 20  # bytes read at a time
_HIGHEST_PROTOCOL = 5

# What pickle's own writers write: CPython's readers in C and in Python understand more, and not the same (010 is 8 or an error).
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(rb"-?(?:inf|nan|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")
_ESCAPE = re.compile(rb"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7]))")


def parse(read: Callable[[int, int], bytes], size: int, *, where: str, offset: int = 0) -> tuple[Graph, int]:
    """The graph of the pickle at OFFSET, and the offset of the first byte behind it.

    READ gives LENGTH bytes at an offset, of SIZE bytes in all; WHERE names the pickle in errors.
    Raises MalformedError, LimitError, UnsupportedError.
    """
    machine = _Machine(read, size, where, offset)
    graph = machine.run()
    return graph, machine.base + machine.pos


class _Machine:
    """pickle's stack machine. ``stack`` holds what came after the newest MARK, ``marked`` what came before each MARK."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, where: str, offset: int) -> None:
        self.read = read
        self.size = size
        self.where = where
        self.start = offset
        self.base = offset  # where the window stands in the file
        self.window = b""
        self.pos = 0  # the next byte, in the window
        self.budget = LIMITS.pickle_bytes
        self.frame_end: int | None = None
        self.protocol = 0
        self.stack: list[Value] = []
        self.marked: list[list[Value]] = []
        self.memo: dict[int, Value] = {}
        self.shared: set[Node] = set()
        self.globals: list[Global] = []
        self.calls: list[Call] = []
        self.references: list[PersistentId] = []
        self.popped: list[Value] = []
        self.order = 0
        self.used = bytearray(256)

    def run(self) -> Graph:
        """Execute opcodes up to STOP."""
        dispatch = _DISPATCH
        stop = CODES["STOP"][0]
        for opcodes in range(LIMITS.pickle_opcodes):
            if self.pos >= len(self.window):
                self.refill(1)
            code = self.window[self.pos]
            self.pos += 1
            self.used[code] = 1
            if code == stop:
                return self.finish(opcodes + 1)
            operation = dispatch[code]
            if operation is None:
                self.pos -= 1
                self.fail("no such pickle opcode", got=f"0x{code:02x}")
            try:
                operation(self)
            except IndexError:
                self.fail(f"the stack is empty before opcode 0x{code:02x}")
            if self.frame_end is not None:
                self.check_frame()
        raise LimitError("too many pickle opcodes", where=self.where, expected=f"at most {LIMITS.pickle_opcodes:,}")

    def finish(self, opcodes: int) -> Graph:
        """The graph, once STOP came."""
        if self.frame_end is not None:
            self.check_frame()
            if self.frame_end is not None:
                self.fail("the pickle ends inside a frame")
        if self.marked or len(self.stack) != 1:
            left = len(self.stack) + sum(map(len, self.marked))
            self.fail("the pickle must end with one value on its stack", got=f"{left} and {len(self.marked)} marks")
        root = self.stack[0]
        discarded = _lost(root, self.popped) if self.popped else []
        used = frozenset(code for code in range(256) if self.used[code])
        return Graph(
            root, self.protocol, opcodes, used, self.globals, self.calls, self.references, discarded, self.shared
        )

    # Bytes

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:
        raise MalformedError(what, where=f"{self.where} at byte {self.base + self.pos}", expected=expected, got=got)

    def refill(self, need: int) -> None:
        """Move the window so that NEED bytes from ``pos`` on are in it."""
        self.base += self.pos
        self.budget -= self.pos
        self.pos = 0
        if need > self.size - self.base:
            self.fail("the pickle ends too early", expected=f"{need} more bytes", got=self.size - self.base)
        if need > self.budget:
            raise LimitError(
                "the pickle is too large", where=self.where, expected=f"at most {LIMITS.pickle_bytes:,} bytes"
            )
        self.window = self.read(self.base, min(max(need, _WINDOW), self.size - self.base))
        if len(self.window) < need:
            self.fail("the file became shorter while it was read")

    def take(self, n: int) -> bytes:
        start = self.pos
        if start + n > len(self.window):
            self.refill(n)
            start = 0
        self.pos = start + n
        return self.window[start : start + n]

    def byte(self) -> int:
        if self.pos >= len(self.window):
            self.refill(1)
        self.pos += 1
        return self.window[self.pos - 1]

    def line(self) -> bytes:
        """The bytes up to a newline, which is taken as well."""
        need = 1
        while (end := self.window.find(b"\n", self.pos)) < 0:
            have = len(self.window) - self.pos
            if have >= LIMITS.pickle_line:
                raise LimitError(
                    "a line of the pickle is too long", where=f"{self.where} at byte {self.base + self.pos}"
                )
            if self.base + len(self.window) >= self.size:
                self.fail("a line of the pickle has no end")
            need = max(2 * have, _WINDOW)
            self.refill(min(need, self.size - self.base - self.pos))
        line = self.window[self.pos : end]
        self.pos = end + 1
        return line

    def length(self, width: int) -> int:
        """A length of WIDTH bytes that the file can hold."""
        n = int.from_bytes(self.take(width), "little")
        if n > self.size - self.base - self.pos:
            self.fail(
                "a length in the pickle reaches beyond its end",
                expected=f"at most {self.size - self.base - self.pos}",
                got=n,
            )
        return n

    def skip(self, n: int) -> int:
        """Step over N bytes without holding them; their offset."""
        offset = self.base + self.pos
        self.base = offset + n
        self.budget -= self.pos
        self.window = b""
        self.pos = 0
        return offset

    def check_frame(self) -> None:
        assert self.frame_end is not None
        here = self.base + self.pos
        if here > self.frame_end:
            self.fail("an opcode straddles the end of its frame", expected=f"an end at {self.frame_end}")
        if here == self.frame_end:
            self.frame_end = None

    # Stack, memo and effects

    def next_order(self) -> int:
        self.order += 1
        return self.order

    def to_mark(self) -> list[Value]:
        """Take what came after the newest MARK, and the MARK."""
        if not self.marked:
            self.fail("no MARK for this opcode")
        values = self.stack
        self.stack = self.marked.pop()
        return values

    def get(self, slot: int) -> None:
        try:
            value = self.memo[slot]
        except KeyError:
            self.fail("the memo has no such slot", got=slot)
        if isinstance(value, Node):
            self.shared.add(value)
        self.stack.append(value)

    def put(self, slot: int) -> None:
        if slot < 0:
            self.fail("a memo slot is negative", got=slot)
        self.memo[slot] = self.stack[-1]

    def effect(self, opcode: str, values: list[Value], *kinds: type[Node]) -> None:
        """Do OPCODE to the object on top of the stack, which must be one of KINDS or a call's result."""
        target = self.stack[-1]
        if not isinstance(target, (*kinds, Call)) or not isinstance(target, Object):
            self.fail(f"{opcode} on a value that cannot take it", got=_kind(target))
        target.add(Effect(opcode, values, self.next_order()))

    def call(self, kind: str, callable_: Value, args: Value, kwargs: Value = None) -> None:
        """Push the result of a call that is not made."""
        if not isinstance(callable_, (Global, Call, Extension)):
            self.fail(f"{kind} of what cannot be called", got=_kind(callable_))
        if not isinstance(args, Tuple):
            self.fail(f"{kind} needs a tuple of arguments", got=_kind(args))
        call = Call(kind, callable_, args, kwargs, self.next_order())
        self.calls.append(call)
        self.stack.append(call)

    def refer(self, id_: Value) -> None:
        """Push what a persistent id stands for."""
        reference = PersistentId(id_, self.next_order())
        self.references.append(reference)
        self.stack.append(reference)

    def name(self, module: str, name: str) -> Global:
        """A global; nothing looks it up."""
        found = Global(module, name)
        self.globals.append(found)
        return found

    def text(self, data: bytes) -> str:
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            self.fail("a text is not UTF-8", got=error.reason)

    def decimal(self, digits: bytes) -> int:
        if not _INTEGER.fullmatch(digits):
            self.fail("not a decimal integer", got=digits[:40])
        try:
            return int(digits)
        except ValueError as error:  # more digits than Python converts
            self.fail("not a decimal integer", got=str(error))


def _kind(value: Value) -> str:
    return type(value).__name__.lower()


def _lost(root: Value, popped: list[Value]) -> list[Value]:
    """Those of POPPED that had effects and that ROOT does not lead to."""
    seen: set[int] = set()
    for _ in walk([root], seen):
        pass
    return [v for v in popped if any(isinstance(node, (Call, PersistentId)) for node in list(walk([v], seen)))]


# Opcodes. Each takes its operands from the machine and leaves its result there.

_INT_TEXT = {b"00": False, b"01": True}


def _proto(m: _Machine) -> None:
    protocol = m.byte()
    if m.base + m.pos != m.start + 2:
        m.fail("PROTO in the middle of the pickle")
    if protocol > _HIGHEST_PROTOCOL:
        m.fail("no such pickle protocol", expected=f"0 to {_HIGHEST_PROTOCOL}", got=protocol)
    m.protocol = protocol


def _frame(m: _Machine) -> None:
    if m.frame_end is not None:
        m.fail("a frame inside a frame")
    n = m.length(8)
    m.frame_end = m.base + m.pos + n


def _mark(m: _Machine) -> None:
    m.marked.append(m.stack)
    m.stack = []


def _pop(m: _Machine) -> None:
    if m.stack:
        m.popped.append(m.stack.pop())
    else:
        m.popped += m.to_mark()  # pickle's own: POP also takes a MARK


def _pop_mark(m: _Machine) -> None:
    m.popped += m.to_mark()


def _dup(m: _Machine) -> None:
    value = m.stack[-1]
    if isinstance(value, Node):
        m.shared.add(value)
    m.stack.append(value)


def _int(m: _Machine) -> None:
    digits = m.line()
    m.stack.append(_INT_TEXT[digits] if digits in _INT_TEXT else m.decimal(digits))


def _long(m: _Machine) -> None:
    digits = m.line()
    m.stack.append(m.decimal(digits[:-1] if digits[-1:] == b"L" else digits))


def _long_bytes(m: _Machine, n: int) -> None:
    if n > LIMITS.inline_bytes:
        raise LimitError("an integer in the pickle is too long", where=m.where, got=f"{n:,} bytes")
    m.stack.append(int.from_bytes(m.take(n), "little", signed=True))


def _signed_length(m: _Machine) -> int:
    n: int = struct.unpack("<i", m.take(4))[0]
    if n < 0:
        m.fail("a length in the pickle is negative", got=n)
    return n


def _float(m: _Machine) -> None:
    digits = m.line()
    if not _FLOAT.fullmatch(digits):
        m.fail("not a number", got=digits[:40])
    m.stack.append(float(digits))


def _string(m: _Machine) -> None:
    quoted = m.line()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        m.fail("a STRING is not in quotes", got=quoted[:40])
    if b"\\" in _ESCAPE.sub(b"", quoted[1:-1]):
        m.fail("a STRING has a bad escape", got=quoted[:40])
    m.stack.append(Py2String(codecs.escape_decode(quoted[1:-1])[0]))


def _unicode(m: _Machine) -> None:
    try:
        m.stack.append(m.line().decode("raw-unicode-escape"))
    except UnicodeDecodeError as error:
        m.fail("a UNICODE has a bad escape", got=error.reason)


def _text(width: int) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        n = m.length(width)
        if n <= LIMITS.inline_bytes:
            m.stack.append(m.text(m.take(n)))
            return
        offset = m.skip(n)
        decode = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode
        try:
            for at in range(0, n, _WINDOW):
                decode(m.read(offset + at, min(_WINDOW, n - at)), final=at + _WINDOW >= n)
        except UnicodeDecodeError as error:
            m.fail("a text is not UTF-8", got=error.reason)
        m.stack.append(Blob("str", offset, n))

    return operation


def _bytes(kind: str, make: Callable[[bytes], Value], length: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        n = length(m)
        if n > m.size - m.base - m.pos:
            m.fail("a length in the pickle reaches beyond its end", got=n)
        m.stack.append(make(m.take(n)) if n <= LIMITS.inline_bytes else Blob(kind, m.skip(n), n))

    return operation


def _names(m: _Machine) -> Global:
    lines = m.line(), m.line()
    try:
        return m.name(lines[0].decode(), lines[1].decode())
    except UnicodeDecodeError as error:
        m.fail("a global's name is not UTF-8", got=error.reason)


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        m.fail("STACK_GLOBAL needs two texts", got=f"{_kind(module)}, {_kind(name)}")
    m.stack.append(m.name(module, name))


def _extension(width: int) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        code = int.from_bytes(m.take(width), "little", signed=width == 4)
        if code <= 0:
            m.fail("an extension code must be positive", got=code)
        m.stack.append(Extension(code))

    return operation


def _reduce(m: _Machine) -> None:
    args, callable_ = m.stack.pop(), m.stack.pop()
    m.call("REDUCE", callable_, args)


def _newobj(m: _Machine) -> None:
    args, cls = m.stack.pop(), m.stack.pop()
    m.call("NEWOBJ", cls, args)


def _newobj_ex(m: _Machine) -> None:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    if not isinstance(kwargs, Dict):
        m.fail("NEWOBJ_EX needs a dict of keyword arguments", got=_kind(kwargs))
    m.call("NEWOBJ_EX", cls, args, kwargs)


def _obj(m: _Machine) -> None:
    values = m.to_mark()
    if not values:
        m.fail("OBJ without a class")
    m.call("OBJ", values[0], Tuple(values[1:]))


def _inst(m: _Machine) -> None:
    cls = _names(m)
    m.call("OBJ", cls, Tuple(m.to_mark()))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    m.effect("BUILD", [state])


def _filled(make: type[Object], opcode: str) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        values = m.to_mark()
        m.stack.append(make())
        if values:
            _even(m, opcode, values)
            m.effect(opcode, values, make)

    return operation


def _even(m: _Machine, opcode: str, values: list[Value]) -> None:
    if opcode == "SETITEMS" and len(values) % 2:
        m.fail("a key without a value")


def _append(m: _Machine) -> None:
    item = m.stack.pop()
    m.effect("APPEND", [item], List)


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.effect("SETITEM", [key, value], Dict)


def _many(opcode: str, kind: type[Object]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        values = m.to_mark()
        _even(m, opcode, values)
        m.effect(opcode, values, kind)

    return operation


def _tuple(n: int) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        items = m.stack[-n:]
        if len(items) < n:
            raise IndexError
        m.stack[-n:] = [Tuple(items)]

    return operation


def _push(make: Callable[[_Machine], Value]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        value = make(m)  # first: it may take a MARK, and the stack is another one then
        m.stack.append(value)

    return operation


def _persid(m: _Machine) -> None:
    try:
        m.refer(m.line().decode("ascii"))
    except UnicodeDecodeError as error:
        m.fail("a persistent id of protocol 0 is not ASCII", got=error.reason)


def _buffer(m: _Machine) -> None:
    raise UnsupportedError("the pickle needs out-of-band buffers, which a file does not hold", where=m.where)


_OPERATIONS: dict[str, Callable[[_Machine], None]] = {
    "PROTO": _proto,
    "FRAME": _frame,
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _dup,
    "NONE": lambda m: m.stack.append(None),
    "NEWTRUE": lambda m: m.stack.append(True),
    "NEWFALSE": lambda m: m.stack.append(False),
    "INT": _int,
    "BININT": _push(lambda m: int.from_bytes(m.take(4), "little", signed=True)),
    "BININT1": _push(lambda m: m.byte()),
    "BININT2": _push(lambda m: int.from_bytes(m.take(2), "little")),
    "LONG": _long,
    "LONG1": lambda m: _long_bytes(m, m.byte()),
    "LONG4": lambda m: _long_bytes(m, _signed_length(m)),
    "FLOAT": _float,
    "BINFLOAT": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    "STRING": _string,
    "BINSTRING": _bytes("py2", Py2String, _signed_length),
    "SHORT_BINSTRING": _push(lambda m: Py2String(m.take(m.byte()))),
    "UNICODE": _unicode,
    "SHORT_BINUNICODE": _push(lambda m: m.text(m.take(m.byte()))),
    "BINUNICODE": _text(4),
    "BINUNICODE8": _text(8),
    "SHORT_BINBYTES": _push(lambda m: m.take(m.byte())),
    "BINBYTES": _bytes("bytes", bytes, lambda m: m.length(4)),
    "BINBYTES8": _bytes("bytes", bytes, lambda m: m.length(8)),
    "BYTEARRAY8": _bytes("bytearray", ByteArray, lambda m: m.length(8)),
    "NEXT_BUFFER": _buffer,
    "READONLY_BUFFER": _buffer,
    "EMPTY_LIST": lambda m: m.stack.append(List()),
    "EMPTY_TUPLE": lambda m: m.stack.append(Tuple([])),
    "EMPTY_DICT": lambda m: m.stack.append(Dict()),
    "EMPTY_SET": lambda m: m.stack.append(Set()),
    "LIST": _filled(List, "APPENDS"),
    "DICT": _filled(Dict, "SETITEMS"),
    "TUPLE": _push(lambda m: Tuple(m.to_mark())),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "FROZENSET": _push(lambda m: FrozenSet(m.to_mark(), m.next_order())),
    "APPEND": _append,
    "APPENDS": _many("APPENDS", List),
    "SETITEM": _setitem,
    "SETITEMS": _many("SETITEMS", Dict),
    "ADDITEMS": _many("ADDITEMS", Set),
    "GET": lambda m: m.get(m.decimal(m.line())),
    "BINGET": lambda m: m.get(m.byte()),
    "LONG_BINGET": lambda m: m.get(int.from_bytes(m.take(4), "little")),
    "PUT": lambda m: m.put(m.decimal(m.line())),
    "BINPUT": lambda m: m.put(m.byte()),
    "LONG_BINPUT": lambda m: m.put(int.from_bytes(m.take(4), "little")),
    "MEMOIZE": lambda m: m.put(len(m.memo)),
    "EXT1": _extension(1),
    "EXT2": _extension(2),
    "EXT4": _extension(4),
    "GLOBAL": _push(_names),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _newobj,
    "NEWOBJ_EX": _newobj_ex,
    "OBJ": _obj,
    "INST": _inst,
    "BUILD": _build,
    "PERSID": _persid,
    "BINPERSID": lambda m: m.refer(m.stack.pop()),
}

_DISPATCH: list[Callable[[_Machine], None] | None] = [None] * 256
for _name, _operation in _OPERATIONS.items():
    _DISPATCH[CODES[_name][0]] = _operation
