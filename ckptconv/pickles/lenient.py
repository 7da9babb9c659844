"""Scan a pickle as leniently as the unpicklers that could run it, and list the globals that it reaches.

The parser refuses what different readers read differently. An attacker could use this to hide a call: Python runs
everything before a fault, and accepts much that the parser refuses. So this scan accepts what either of CPython's two
unpicklers accepts (``Modules/_pickle.c``, ``Lib/pickle.py``), and everything before its end counts. It may find more
than Python runs, never less. ``tests/fuzz/unpicklers.py`` compares the scan with both unpicklers.

At least one of them accepts the following, and the parser does not (apart from values of wrong types):

    NUL, spaces, a sign, underscores in the line of a GET or PUT    in C the line ends at NUL
    a last line without its end                                     Python accepts it without its last byte
    an empty line as a module or name                               Python looks it up
    INST without a MARK                                             Python looks the class up first
    FRAME anywhere, a frame that is longer than the pickle          Python reads the bytes that exist
    PROTO in the middle, or none; marks and values left over; anything after STOP
    NEXT_BUFFER                                                     the loader may supply buffers
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from operator import length_hint
from typing import NamedTuple, NoReturn

from ckptconv.errors import LimitError, MalformedError, UnsupportedError
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
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
from ckptconv.pickles.machine import CODES, PickleMachine
from ckptconv.pickles.parser import OPERATIONS, in_dispatch
from ckptconv.work import work

_HIGHEST_PROTOCOL = 5
_DIGITS = regex(rb"\+?[0-9]+(?:_[0-9]+)*")
_AT_ONCE = 4000  # digits that Python converts at once
#: If an opcode needs more bytes than its frame has left, C's unpickler drops the rest of the frame, unless the file
#: object has ``peek``. Python's unpickler never does. So such a pickle is two programs. No writer makes such frames.
_CUT = "a pickle whose frames cut its opcodes in two"


class LenientScan(NamedTuple):
    """The result of a scan.

    Attributes:
        graph: The graph of everything before `end`.
        end: The offset after the last opcode that was read.
        is_whole: Whether the scan reached STOP.
        doubt: The reason why an unpickler may read something else, or None if all unpicklers read the same up to
            the first fault.
    """

    graph: Graph
    end: int
    is_whole: bool
    doubt: str | None


def scan_lenient(
    read: Callable[[int, int], bytes],
    start: int,
    end: int,
    *,
    most: int,
    nbytes: int | None = None,
    leave: tuple[bytes, ...] = (),
) -> LenientScan:
    """Scan the pickle from `start` to `end`. Return the result, also for a pickle with a fault.

    Args:
        read: A function ``read(offset, length)`` that returns the bytes at an offset.
        start: The offset of the pickle's first byte.
        end: The offset at which the bytes end.
        most: The maximum number of opcodes to execute.
        nbytes: The maximum number of bytes to read, or None for the limit on pickles.
        leave: Prefixes of values that are not read, as in :func:`~ckptconv.pickles.parser.parse`.

    Raises:
        Exception: Only exceptions of `read`.
    """
    machine = _Lenient(read, end, "", start, leave)
    if nbytes is not None:
        machine.budget = min(nbytes, machine.budget)
    is_whole = False
    try:
        graph = machine.load(_DISPATCH, most)
        is_whole = True
    except LimitError:
        machine.doubt = "a pickle that is too long to check"
    except (_Broken, MalformedError, UnsupportedError):
        pass
    work().charge(most - length_hint(machine.steps))
    if not is_whole:
        graph = machine.finish(0)
    return LenientScan(graph, machine.tell(), is_whole, machine.doubt)


class _Broken(Exception):
    """Raised if no unpickler continues. It has no message, because most byte strings are not pickles and raise it."""


class _Lenient(PickleMachine):
    """A machine that continues after faults of a pickle after which an unpickler of Python may continue, too."""

    doubt: str | None = None

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:  # noqa: ARG002
        """Stop the scan."""
        raise _Broken

    def start_frame(self) -> None:
        """Start a frame of any length, or continue the current one."""
        end = int.from_bytes(self.take(8), "little") + self.tell()
        if self.frame_end is not None:
            self.check_frame()
        if self.frame_end is None:
            self.frame_end = end
        elif self.frame_end < end:
            self.doubt = _CUT

    def check_frame(self) -> None:
        """End the frame if the next byte is after it. Set ``doubt`` if an opcode crosses its end."""
        assert self.frame_end is not None
        if self.tell() > self.frame_end:
            self.doubt = _CUT
        if self.tell() >= self.frame_end:
            self.frame_end = None

    def check_name(self, length: int) -> None:
        """Accept names of any length: the bytes may be no pickle, but the header of a safetensors file."""

    def finish(self, opcodes: int) -> Graph:
        """Return the graph of everything that was read.

        Its root is the value on top of the stack, or None. All other values count as discarded. `opcodes` is 0 if
        the scan did not reach STOP.
        """
        if self.frame_end is not None:
            self.check_frame()
        if opcodes and self.frame_end is not None and self.frame_end <= self.size:
            self.doubt = _CUT  # the next pickle may start after STOP or after the frame
        if opcodes and not self.stack:
            self.fail("STOP with an empty stack")
        left = [value for stack in (*self.metastack, self.stack) for value in stack]
        root = left.pop() if left else None
        return self.graph(root, opcodes, [*self.popped, *left, *self.calls])

    def line(self) -> bytes:
        """Read a line as Python's unpickler does. If the end of the line is missing, the last byte is dropped."""
        try:
            return super().line()
        except _Broken:
            return self.take(self.size - self.tell())[:-1]

    def effect(self, opcode: str, values: list[Value], *kinds: type[Node]) -> None:  # noqa: ARG002 - any kind is accepted
        """Add an effect with `opcode` and `values` to the object on top of the stack. Other values are ignored.

        A global on top of the stack counts as called: ``os.environ``, for example, runs a method for an effect.
        """
        target = self.stack[-1]
        if isinstance(target, Object):
            target.add(Effect(opcode, values, self.next_order()))
        elif isinstance(target, (Global, Extension)):
            self.calls.append(Call(opcode, target, Tuple(values), order=self.next_order()))

    def call(self, kind: str, callable_: Value, args: Value, kwargs: Value = None) -> None:
        """Push a node for the result of a call, which is not executed. Arguments of any type are accepted."""
        if not isinstance(callable_, (Global, Call, Extension, PersistentId)):
            self.fail("a call of an object that is not callable")
        if not isinstance(args, (Tuple, Call)):
            args = Tuple(list(args.elements()) if isinstance(args, List) else [args])
        call = Call(kind, callable_, args, kwargs, self.next_order())
        self.calls.append(call)
        self.stack.append(call)


def _proto(m: PickleMachine) -> None:
    m.protocol = m.byte()
    if m.protocol > _HIGHEST_PROTOCOL:
        m.fail("unknown pickle protocol")


def _number(m: PickleMachine) -> None:
    """Read a line and push 0. The value of the number does not matter."""
    m.line()
    m.stack.append(0)


def _long_bytes(m: PickleMachine, n: int) -> None:
    """Skip an integer of `n` bytes and push 0."""
    if not 0 <= n <= m.size - m.tell():
        m.fail("a length that is not valid")
    m.skip(n)
    m.stack.append(0)


def _slot(m: PickleMachine) -> int:
    """Read a line and return the number of a memo slot. In C's unpickler the line ends at a NUL."""
    digits = m.line().split(b"\0", 1)[0]
    try:
        return int(digits)
    except ValueError:
        pass
    if not _DIGITS.fullmatch(digits.strip()):
        m.fail("not a slot of the memo")
    slot = 0  # Python before 3.11 converts any number of digits
    digits = digits.strip().replace(b"_", b"").lstrip(b"+")
    for at in range(0, len(digits), _AT_ONCE):
        part = digits[at : at + _AT_ONCE]
        slot = slot * 10 ** len(part) + int(part)
    return slot


def _string(m: PickleMachine) -> None:
    quoted = m.line().strip()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        m.fail("a STRING is not in quotes")
    try:
        m.push_bytes(Py2String(codecs.escape_decode(quoted[1:-1])[0]))
    except ValueError:
        m.fail("a STRING has a bad escape")


def _stack_global(m: PickleMachine) -> None:
    names, modules = (_texts(value) for value in (m.stack.pop(), m.stack.pop()))
    globals_ = [m.find_class(module, name) for module in modules for name in names]
    if not globals_:
        m.fail("STACK_GLOBAL needs two texts")
    m.stack.append(globals_[0])


def _texts(value: Value) -> list[str]:
    """Return the texts that `value` can be. The list is empty if it cannot be a text.

    A Python 2 string can have one of two encodings. The value of a call, a global, a blob, an extension or a
    persistent id is not known, so it counts as ``builtins.__import__``.
    """
    if isinstance(value, Py2String):
        latin_1 = value.data.decode("latin-1")
        try:
            return list({value.data.decode(): None, latin_1: None})
        except UnicodeDecodeError:
            return [latin_1]
    if isinstance(value, (Call, Blob, Global, Extension, PersistentId)):
        return ["builtins.__import__"]
    return [value] if isinstance(value, str) else []


def _items(m: PickleMachine, values: list[Value]) -> None:
    """Set items as Python's unpickler does: all items before a key without a value, where it fails."""
    even = len(values) - len(values) % 2
    m.effect("SETITEMS", values[:even])
    if values[even:]:
        m.fail("a key without a value")


def _dict(m: PickleMachine) -> None:
    values = m.pop_mark()
    m.stack.append(Dict())
    _items(m, values)


def _newobj_ex(m: PickleMachine) -> None:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.call("NEWOBJ_EX", cls, args, kwargs)


_DISPATCH = in_dispatch(
    OPERATIONS
    | {
        "PROTO": _proto,
        "INT": _number,
        "LONG": _number,
        "LONG1": lambda m: _long_bytes(m, m.byte()),
        "LONG4": lambda m: _long_bytes(m, int.from_bytes(m.take(4), "little", signed=True)),
        "FLOAT": _number,
        "STRING": _string,
        "GET": lambda m: m.get(_slot(m)),
        "PUT": lambda m: m.put(_slot(m)),
        "NEXT_BUFFER": lambda m: m.stack.append(ByteArray(b"")),
        "READONLY_BUFFER": lambda m: None,
        "STACK_GLOBAL": _stack_global,
        "DICT": _dict,
        "SETITEMS": lambda m: _items(m, m.pop_mark()),
        "NEWOBJ_EX": _newobj_ex,
    }
)
#: Codes that a pickle can start with: opcodes that need nothing on the stack or in the memo.
STARTS = b"".join(
    CODES[name]
    for name in (
        "PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG",
        "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES",
        "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
        "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_SET", "GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID",
        "NEXT_BUFFER",
    )
)  # a table  # fmt: skip
#: Codes of the opcodes that name globals. A pickle without them names none.
NAMING = b"".join(CODES[name] for name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"))
