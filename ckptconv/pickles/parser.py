"""Parse a pickle into its graph, with one operation for each opcode.

A text or byte string longer than ``LIMITS.inline_bytes`` never enters memory. It becomes a
:class:`~ckptconv.pickles.graph.Blob`.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from ckptconv.errors import InputError, LimitError, UnsupportedError
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Dict,
    FrozenSet,
    Global,
    Graph,
    List,
    Node,
    Object,
    Py2String,
    Set,
    Tuple,
    Value,
    kind_of,
)
from ckptconv.pickles.machine import CODES, Operation, PickleMachine
from ckptconv.pickles.rows import RowMachine

_HIGHEST_PROTOCOL = 5

# Numbers as pickle's own writers write them. CPython's readers in C and in Python accept more, and differ in what they
# accept (010 is 8 or an error).
_INTEGER = regex(rb"-?(?:0|[1-9][0-9]*)")
_FLOAT = regex(rb"-?(?:inf|nan|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")
_ESCAPE = regex(rb"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7]))")


def parse(
    read: Callable[[int, int], bytes],
    size: int,
    *,
    where: str,
    offset: int = 0,
    leave: tuple[bytes, ...] = (),
    free: Collection[str] = (),
    granted: int | None = None,
) -> tuple[Graph, int]:
    """Return the graph of the pickle at `offset` and the offset after its last byte.

    Args:
        read: A function ``read(offset, length)`` that returns the bytes at an offset.
        size: The number of bytes that `read` can return.
        where: The name of the pickle in errors.
        offset: The offset of the pickle's first byte.
        leave: Prefixes. Byte strings and texts that start with a prefix become blobs, even if they are short.
        free: Names of attributes. If there are any, repeated items are read at once, and these attributes may differ
            (:mod:`ckptconv.pickles.repeats`).
        granted: The most opcodes, and the most bytes for which work is granted, of a pickle that was inflated.

    Raises:
        MalformedError: The pickle is not valid.
        LimitError: The pickle exceeds a limit of ``LIMITS``.
        UnsupportedError: The pickle needs out-of-band buffers.
    """
    if free:
        from ckptconv.pickles.repeats import RepeatedError, RepeatMachine  # lazily, for start-up

        with suppress(RepeatedError, InputError):  # an error may be about a Like; the next machine has its own
            repeats = RepeatMachine(read, size, where, offset, free)
            return repeats.load(DISPATCH), repeats.tell()
    machine = PickleMachine(read, size, where, offset, leave) if leave else RowMachine(read, size, where, offset)
    if granted is not None:
        machine.granted = granted
    return machine.load(DISPATCH), machine.tell()


# Opcodes: the function of an opcode takes its operands from the machine, and leaves its result there

#: The items of all empty tuples. The list is shared to save memory, because one byte of a pickle makes a tuple. It is
#: never changed in place.
_NO_ITEMS: list[Value] = []
_INT_TEXT = {b"00": False, b"01": True}


def _proto(m: PickleMachine) -> None:
    protocol = m.byte()
    if m.tell() != m.start + 2:
        m.fail("PROTO in the middle of the pickle")
    if protocol > _HIGHEST_PROTOCOL:
        m.fail("unknown pickle protocol", expected=f"0 to {_HIGHEST_PROTOCOL}", got=protocol)
    m.protocol = protocol


def _mark(m: PickleMachine) -> None:
    m.metastack.append(m.stack)
    m.stack = []


def _pop(m: PickleMachine) -> None:
    if m.stack:
        m.popped.append(m.stack.pop())
    else:
        m.popped += m.pop_mark()  # as in pickle's own machine, POP also removes a MARK


def _pop_mark(m: PickleMachine) -> None:
    m.popped += m.pop_mark()


def _dup(m: PickleMachine) -> None:
    value = m.stack[-1]
    if isinstance(value, Node):
        m.shared.add(value)
    m.stack.append(value)


def _decimal(m: PickleMachine, digits: bytes) -> int:
    """Return `digits` as an integer. Raise MalformedError unless pickle's own writers could have written them."""
    if not _INTEGER.fullmatch(digits):
        m.fail("not a decimal integer", got=digits[:40])
    try:
        return int(digits)
    except ValueError as error:  # too many digits for Python
        m.fail("not a decimal integer", got=str(error))


def _int(m: PickleMachine) -> None:
    digits = m.line()
    m.stack.append(_INT_TEXT[digits] if digits in _INT_TEXT else _decimal(m, digits))


def _long(m: PickleMachine) -> None:
    digits = m.line()
    m.stack.append(_decimal(m, digits[:-1] if digits[-1:] == b"L" else digits))


def _long_bytes(m: PickleMachine, n: int) -> None:
    if n > LIMITS.inline_bytes:
        raise LimitError("an integer in the pickle is too long", where=m.where, got=f"{n:,} bytes")
    m.stack.append(int.from_bytes(m.take(n), "little", signed=True))


def _signed_length(m: PickleMachine) -> int:
    n: int = struct.unpack("<i", m.take(4))[0]
    if n < 0:
        m.fail("a length in the pickle is negative", got=n)
    return n


def _float(m: PickleMachine) -> None:
    digits = m.line()
    if not _FLOAT.fullmatch(digits):
        m.fail("not a number", got=digits[:40])
    m.stack.append(float(digits))


def _string(m: PickleMachine) -> None:
    quoted = m.line()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        m.fail("a STRING is not in quotes", got=quoted[:40])
    if b"\\" in _ESCAPE.sub(b"", quoted[1:-1]):
        m.fail("a STRING has a bad escape", got=quoted[:40])
    m.push_bytes(Py2String(codecs.escape_decode(quoted[1:-1])[0]))


def _unicode(m: PickleMachine) -> None:
    try:
        m.stack.append(m.line().decode("raw-unicode-escape"))
    except UnicodeDecodeError as error:
        m.fail("a UNICODE has a bad escape", got=error.reason)


def _utf8(m: PickleMachine, data: bytes) -> str:
    """Return `data` decoded. Raise MalformedError if it is not UTF-8."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        m.fail("a text is not UTF-8", got=error.reason)


def _text(width: int) -> Operation:
    """Return the operation that reads a text whose length has `width` bytes."""

    def operation(m: PickleMachine) -> None:
        n = m.length(width)
        stays = n > LIMITS.inline_bytes or (m.leave and m.is_left(n))
        m.stack.append(Blob("str", m.skip_text(n), n) if stays else _utf8(m, m.take(n)))

    return operation


def _bytes(kind: str, make: Callable[[bytes], Value], length: Callable[[PickleMachine], int]) -> Operation:
    """Return the operation that reads a byte string.

    Args:
        kind: The kind of a blob, for a long byte string.
        make: Returns the value from the bytes of a short byte string.
        length: Reads the length.
    """

    def operation(m: PickleMachine) -> None:
        n = length(m)
        if n > m.size - m.tell():
            m.fail("a length in the pickle reaches beyond its end", got=n)
        stays = n > LIMITS.inline_bytes or (m.leave and m.is_left(n))
        m.push_bytes(Blob(kind, m.skip(n), n) if stays else make(m.take(n)))

    return operation


def _names(m: PickleMachine) -> Global:
    """Read two lines, the module and name of a global, and return the global."""
    lines = m.line(), m.line()
    try:
        return m.find_class(lines[0].decode(), lines[1].decode())
    except UnicodeDecodeError as error:
        m.fail("a global's name is not UTF-8", got=error.reason)


def _stack_global(m: PickleMachine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        m.fail("STACK_GLOBAL needs two texts", got=f"{kind_of(module)}, {kind_of(name)}")
    m.stack.append(m.find_class(module, name))


def _extension(width: int) -> Operation:
    """Return the operation that reads an extension code of `width` bytes."""

    def operation(m: PickleMachine) -> None:
        code = int.from_bytes(m.take(width), "little", signed=width == 4)
        if code <= 0:
            m.fail("an extension code must be positive", got=code)
        m.stack.append(m.extension(code))

    return operation


def _binput(m: PickleMachine) -> None:
    m.memo[m.byte()] = m.stack[-1]


def _long_binput(m: PickleMachine) -> None:  # without put(), for speed: the most frequent opcode of a large pickle
    m.memo[m.number()] = m.stack[-1]


def _call(kind: str) -> Operation:
    """Return the operation of an opcode that calls the callable on the stack with the arguments on the stack."""

    def operation(m: PickleMachine) -> None:
        args, callable_ = m.stack.pop(), m.stack.pop()
        m.call(kind, callable_, args)

    return operation


def _newobj_ex(m: PickleMachine) -> None:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    if not isinstance(kwargs, Dict):
        m.fail("NEWOBJ_EX needs a dict of keyword arguments", got=kind_of(kwargs))
    m.call("NEWOBJ_EX", cls, args, kwargs)


def _obj(m: PickleMachine) -> None:
    values = m.pop_mark()
    if not values:
        m.fail("OBJ without a class")
    m.call("OBJ", values[0], Tuple(values[1:]))


def _inst(m: PickleMachine) -> None:
    cls = _names(m)
    m.call("OBJ", cls, Tuple(m.pop_mark()))


def _build(m: PickleMachine) -> None:
    state = m.stack.pop()
    m.effect("BUILD", [state])


def _many(opcode: str, kind: type[Object], *, is_new: bool = False) -> Operation:
    """Return the operation that adds the values after MARK to the object before it.

    If `is_new` is True, the object is a new one of this `kind`.
    """

    def operation(m: PickleMachine) -> None:
        values = m.pop_mark()
        if is_new:
            m.stack.append(kind())
        if opcode == "SETITEMS" and len(values) % 2:
            m.fail("a key without a value")
        if values or not is_new:
            m.effect(opcode, values, kind)

    return operation


def _append(m: PickleMachine) -> None:
    item = m.stack.pop()
    m.effect("APPEND", [item], List)


def _setitem(m: PickleMachine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.effect("SETITEM", [key, value], Dict)


def _tuple(n: int) -> Operation:
    """Return the operation that makes a tuple of the top `n` values."""

    def operation(m: PickleMachine) -> None:
        stack = m.stack
        items = stack[-n:]
        if len(items) < n:
            raise IndexError
        del stack[1 - n or len(stack) :]
        stack[-1] = Tuple(items)

    return operation


def _marked_tuple(m: PickleMachine) -> None:
    items = m.pop_mark()  # first, because it replaces m.stack
    m.stack.append(Tuple(items))


def _push(make: Callable[[PickleMachine], Value]) -> Operation:
    """Return an operation that pushes the value that `make` returns."""

    def operation(m: PickleMachine) -> None:
        value = make(m)  # first, because it may replace m.stack
        m.stack.append(value)

    return operation


def _persid(m: PickleMachine) -> None:
    try:
        m.persistent_load(m.line().decode("ascii"))
    except UnicodeDecodeError as error:
        m.fail("a persistent id of protocol 0 is not ASCII", got=error.reason)


def _buffer(m: PickleMachine) -> None:
    raise UnsupportedError("the pickle needs out-of-band buffers, which a file does not contain", where=m.where)


#: The operation of each opcode, by the opcode's name.
OPERATIONS: dict[str, Operation] = {
    "PROTO": _proto,
    "FRAME": lambda m: m.start_frame(),
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _dup,
    "NONE": lambda m: m.stack.append(None),
    "NEWTRUE": lambda m: m.stack.append(True),
    "NEWFALSE": lambda m: m.stack.append(False),
    "INT": _int,
    "BININT": _push(lambda m: int.from_bytes(m.take(4), "little", signed=True)),
    "BININT1": lambda m: m.stack.append(m.byte()),
    "BININT2": _push(lambda m: int.from_bytes(m.take(2), "little")),
    "LONG": _long,
    "LONG1": lambda m: _long_bytes(m, m.byte()),
    "LONG4": lambda m: _long_bytes(m, _signed_length(m)),
    "FLOAT": _float,
    "BINFLOAT": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    "STRING": _string,
    "BINSTRING": _bytes("py2", Py2String, _signed_length),
    "SHORT_BINSTRING": _bytes("py2", Py2String, lambda m: m.byte()),
    "UNICODE": _unicode,
    "SHORT_BINUNICODE": _push(lambda m: _utf8(m, m.take(m.byte()))),
    "BINUNICODE": _text(4),
    "BINUNICODE8": _text(8),
    "SHORT_BINBYTES": _bytes("bytes", bytes, lambda m: m.byte()),
    "BINBYTES": _bytes("bytes", bytes, lambda m: m.length(4)),
    "BINBYTES8": _bytes("bytes", bytes, lambda m: m.length(8)),
    "BYTEARRAY8": _bytes("bytearray", ByteArray, lambda m: m.length(8)),
    "NEXT_BUFFER": _buffer,
    "READONLY_BUFFER": _buffer,
    "EMPTY_LIST": lambda m: m.stack.append(List()),
    "EMPTY_TUPLE": lambda m: m.stack.append(Tuple(_NO_ITEMS)),
    "EMPTY_DICT": lambda m: m.stack.append(Dict()),
    "EMPTY_SET": lambda m: m.stack.append(Set()),
    "LIST": _many("APPENDS", List, is_new=True),
    "DICT": _many("SETITEMS", Dict, is_new=True),
    "TUPLE": _marked_tuple,
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "FROZENSET": _push(lambda m: FrozenSet(m.pop_mark(), m.next_order())),
    "APPEND": _append,
    "APPENDS": _many("APPENDS", List),
    "SETITEM": _setitem,
    "SETITEMS": _many("SETITEMS", Dict),
    "ADDITEMS": _many("ADDITEMS", Set),
    "GET": lambda m: m.get(_decimal(m, m.line())),
    "BINGET": lambda m: m.get(m.byte()),
    "LONG_BINGET": lambda m: m.get(m.number()),
    "PUT": lambda m: m.put(_decimal(m, m.line())),
    "BINPUT": _binput,
    "LONG_BINPUT": _long_binput,
    "MEMOIZE": lambda m: m.memoize(),
    "EXT1": _extension(1),
    "EXT2": _extension(2),
    "EXT4": _extension(4),
    "GLOBAL": _push(_names),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call("REDUCE"),
    "NEWOBJ": _call("NEWOBJ"),
    "NEWOBJ_EX": _newobj_ex,
    "OBJ": _obj,
    "INST": _inst,
    "BUILD": _build,
    "PERSID": _persid,
    "BINPERSID": lambda m: m.persistent_load(m.stack.pop()),
}


def in_dispatch(operations: Mapping[str, Operation]) -> list[Operation | None]:
    """Return `operations`, a dict by the names of opcodes, as a list by the codes of opcodes. Other codes have None."""
    dispatch: list[Operation | None] = [None] * 256
    for name, operation in operations.items():
        dispatch[CODES[name][0]] = operation
    return dispatch


#: The operations as a list by the codes of opcodes, with None if there is none.
DISPATCH = in_dispatch(OPERATIONS)
