"""The pickle virtual machine on nodes: input, stack, memo, frames and the record of effects.

:mod:`ckptconv.pickles.parser` defines the operation of each opcode. This machine is stricter than pickle's own:
operands must have the type that the opcode needs, frames must contain complete opcodes, and exactly one value must
be left at the end. It reads through a small window, so skipped bytes are never in memory.
"""

from __future__ import annotations

import codecs
import struct
import sys
from collections.abc import Callable, Sequence
from itertools import compress, islice, repeat
from operator import length_hint
from typing import NoReturn, TypeAlias

from ckptconv.errors import LimitError, MalformedError
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Effect,
    Extension,
    Global,
    Graph,
    Node,
    Object,
    PersistentId,
    Tuple,
    Value,
    kind_of,
    walk,
)
from ckptconv.work import tell, work

#: The opcodes of pickle protocols 0 to 5 by name. A test compares them with ``pickletools``.
CODES: dict[str, bytes] = {
    "INT": b"I", "BININT": b"J", "BININT1": b"K", "BININT2": b"M", "LONG": b"L", "LONG1": b"\x8a", "LONG4": b"\x8b",
    "STRING": b"S", "BINSTRING": b"T", "SHORT_BINSTRING": b"U", "BINBYTES": b"B", "SHORT_BINBYTES": b"C",
    "BINBYTES8": b"\x8e", "BYTEARRAY8": b"\x96", "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"\x98", "NONE": b"N",
    "NEWTRUE": b"\x88", "NEWFALSE": b"\x89", "UNICODE": b"V", "SHORT_BINUNICODE": b"\x8c", "BINUNICODE": b"X",
    "BINUNICODE8": b"\x8d", "FLOAT": b"F", "BINFLOAT": b"G", "EMPTY_LIST": b"]", "APPEND": b"a", "APPENDS": b"e",
    "LIST": b"l", "EMPTY_TUPLE": b")", "TUPLE": b"t", "TUPLE1": b"\x85", "TUPLE2": b"\x86", "TUPLE3": b"\x87",
    "EMPTY_DICT": b"}", "DICT": b"d", "SETITEM": b"s", "SETITEMS": b"u", "EMPTY_SET": b"\x8f", "ADDITEMS": b"\x90",
    "FROZENSET": b"\x91", "POP": b"0", "DUP": b"2", "MARK": b"(", "POP_MARK": b"1", "GET": b"g", "BINGET": b"h",
    "LONG_BINGET": b"j", "PUT": b"p", "BINPUT": b"q", "LONG_BINPUT": b"r", "MEMOIZE": b"\x94", "EXT1": b"\x82",
    "EXT2": b"\x83", "EXT4": b"\x84", "GLOBAL": b"c", "STACK_GLOBAL": b"\x93", "REDUCE": b"R", "BUILD": b"b",
    "INST": b"i", "OBJ": b"o", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92", "PROTO": b"\x80", "STOP": b".",
    "FRAME": b"\x95", "PERSID": b"P", "BINPERSID": b"Q",
}  # a table  # fmt: skip

_STEPS = 6  # of work for a call, which takes two hundred bytes
_WINDOW = 1 << 20  # bytes read at a time, at most
_UINT32 = struct.Struct("<I").unpack_from
_FIRST = 4096  # bytes read at first and after skipped bytes: the next skip may be near
#: Slots from here on are stored as texts. Python's hash of an integer is its remainder by 2^61 - 1, so a pickle could
#: name many larger slots with the same hash.
HASHED_AS_IT_IS = 1 << 60


class PickleMachine:
    """The state of a machine that reads one pickle.

    As in ``pickle.py``, ``stack`` contains the values after the newest MARK, and ``metastack`` the stacks before
    each MARK.

    Args:
        read: A function ``read(offset, length)`` that returns the bytes at an offset.
        size: The number of bytes that `read` can return.
        where: The name of the pickle in errors.
        offset: The offset of the pickle's first byte.
        leave: Prefixes. Byte strings and texts that start with a prefix become blobs, even if they are short.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], size: int, where: str, offset: int, leave: tuple[bytes, ...] = ()
    ) -> None:
        self.read = read
        self.size = size
        self.where = where
        self.start = offset
        self.leave = leave
        self.ahead = _FIRST
        self.base = offset  # offset of the window in the source
        self.window = b""
        self.pos = 0  # position of the next byte in the window
        self.budget = LIMITS.pickle_bytes
        self.granted = sys.maxsize  # the most opcodes, and the most bytes for which work is granted
        self.frame_end: int | None = None
        self.protocol = 0
        self.stack: list[Value] = []
        self.metastack: list[list[Value]] = []
        self.memo: dict[int | str, Value] = {}
        self.shared: set[Node] = set()
        self.named: dict[tuple[str, str], Global] = {}
        self.named_characters = 0
        self.codes: dict[int, Extension] = {}
        self.calls: list[Call] = []
        self.references: list[PersistentId] = []
        self.byte_strings: list[Value] = []
        self.changed: list[Object] = []
        self.popped: list[Value] = []
        self.order = 0
        self.used = bytearray(256)

    def load(self, dispatch: Sequence[Operation | None], most: int | None = None) -> Graph:
        """Execute opcodes up to STOP and return the graph.

        `dispatch` contains the operation of each opcode by its code. At most `most` opcodes are executed, or
        ``LIMITS.pickle_opcodes`` if this is less. Raises MalformedError, LimitError, and the errors of operations.
        """
        stop, used, self.dispatch = CODES["STOP"][0], self.used, dispatch
        most = min(LIMITS.pickle_opcodes if most is None else min(most, LIMITS.pickle_opcodes), self.granted)
        self.steps = steps = repeat(None, most)
        for _ in steps:
            pos = self.pos
            try:
                code = self.window[pos]
            except IndexError:
                self.refill(1)
                pos = 0
                code = self.window[0]
            self.pos = pos + 1
            used[code] = 1
            operation = dispatch[code]
            if operation is None:
                if code == stop:
                    return self.finish(most - length_hint(steps))
                self.pos -= 1
                self.fail("unknown pickle opcode", got=f"0x{code:02x}")
            try:
                operation(self)
            except IndexError:
                self.fail(f"the stack is empty before opcode 0x{code:02x}")
            if self.frame_end is not None:
                self.check_frame()
        expected = f"at most {most:,}" + (" in a deflated pickle" if most == self.granted else "")
        raise LimitError("too many pickle opcodes", where=self.where, expected=expected)

    def finish(self, opcodes: int) -> Graph:
        """Return the graph after STOP. Raise MalformedError unless exactly one value is left on the stack.

        `opcodes` is the number of opcodes that were executed.
        """
        if self.frame_end is not None:
            self.check_frame()
            if self.frame_end is not None:
                self.fail("the pickle ends inside a frame")
        if self.metastack or len(self.stack) != 1:
            left = len(self.stack) + sum(map(len, self.metastack))
            self.fail("the pickle must end with one value on its stack", got=f"{left} and {len(self.metastack)} marks")
        budget = work()
        budget.grant(min(self.tell() - self.start, self.granted), self.where)
        budget.charge(_STEPS * len(self.calls))
        root = self.stack[0]
        return self.graph(root, opcodes, _lost(root, self.popped) if self.popped else [])

    def graph(self, root: Value, opcodes: int, discarded: list[Value]) -> Graph:
        """Return the graph of everything that was read so far, with this `root` and these `discarded` values."""
        return Graph(
            root,
            self.protocol,
            opcodes,
            frozenset(compress(range(256), self.used)),
            [*self.named.values()],
            self.calls,
            self.references,
            discarded,
            self.shared,
            self.byte_strings,
            [*self.codes.values()],
            self.changed,
        )

    def count(self, opcodes: int) -> bool:
        """Count `opcodes` that are executed in one step.

        Return False if there are more than the limit; then nothing follows.
        """
        return next(islice(self.steps, opcodes - 1, None), self) is None

    # Bytes

    def tell(self) -> int:
        """Return the offset of the next byte in the source."""
        return self.base + self.pos

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:
        """Raise MalformedError with the offset of the next byte."""
        raise MalformedError(what, where=f"{self.where} at byte {self.tell()}", expected=expected, got=got)

    def refill(self, need: int) -> None:
        """Move the window so that it starts at the next byte and contains at least `need` bytes.

        Raises MalformedError if the pickle has fewer bytes, and LimitError if it is too large.
        """
        self.base += self.pos
        self.budget -= self.pos
        self.pos = 0
        if need > self.size - self.base:
            self.fail("the pickle ends too early", expected=f"{need} more bytes", got=self.size - self.base)
        if need > self.budget:
            raise LimitError(
                "the pickle is too large", where=self.where, expected=f"at most {LIMITS.pickle_bytes:,} bytes"
            )
        if self.base > self.start:
            tell("pickle", self.base - self.start, self.size - self.start)
        ahead = max(need, min(self.ahead, _WINDOW))
        self.window = self.read(self.base, min(ahead, self.size - self.base, self.budget))
        self.ahead = min(4 * self.ahead, _WINDOW)
        if len(self.window) < need:
            self.fail("the file became shorter while it was read")

    def take(self, n: int) -> bytes:
        """Read `n` bytes."""
        start = self.pos
        if start + n > len(self.window):
            self.refill(n)
            start = 0
        self.pos = start + n
        return self.window[start : start + n]

    def byte(self) -> int:
        """Read one byte, as a number."""
        pos = self.pos
        if pos >= len(self.window):
            self.refill(1)
            pos = 0
        self.pos = pos + 1
        return self.window[pos]

    def number(self) -> int:
        """Read an unsigned integer of four bytes."""
        pos = self.pos
        end = pos + 4
        if end > len(self.window):
            return int.from_bytes(self.take(4), "little")
        self.pos = end
        number: int = _UINT32(self.window, pos)[0]  # does not copy the bytes
        return number

    def line(self) -> bytes:
        """Read up to a newline and return the bytes before the newline.

        Raises MalformedError if there is none, and LimitError if the line is too long.
        """
        while (end := self.window.find(b"\n", self.pos, self.pos + LIMITS.pickle_line + 1)) < 0:
            have = len(self.window) - self.pos
            if have > LIMITS.pickle_line:
                raise LimitError("a line of the pickle is too long", where=f"{self.where} at byte {self.tell()}")
            if self.base + len(self.window) >= self.size:
                self.fail("a line of the pickle has no end")
            room = max(have + 1, self.budget - self.pos)
            self.refill(min(max(2 * have, _WINDOW), LIMITS.pickle_line + 1, self.size - self.tell(), room))
        line = self.window[self.pos : end]
        self.pos = end + 1
        return line

    def length(self, width: int) -> int:
        """Read a length that is stored in `width` bytes. Raise MalformedError if the source has fewer bytes left."""
        n = self.number() if width == 4 else int.from_bytes(self.take(width), "little")
        left = self.size - self.base - self.pos
        if n > left:
            self.fail("a length in the pickle reaches beyond its end", expected=f"at most {left}", got=n)
        return n

    def skip(self, n: int) -> int:
        """Skip `n` bytes without reading them. Return their offset in the source."""
        offset = self.tell()
        if self.pos + n <= len(self.window):
            self.pos += n
            self.budget += n
            return offset
        self.base = offset + n
        self.budget -= self.pos
        self.window = b""
        self.pos = 0
        self.ahead = _FIRST
        return offset

    def is_left(self, n: int) -> bool:
        """Return whether the next `n` bytes start with a prefix in ``leave``, so that they become a blob."""
        longest = min(max(map(len, self.leave)), n)
        if self.pos + longest > len(self.window):
            self.refill(longest)
        return self.window.startswith(self.leave, self.pos, self.pos + n)

    def skip_text(self, n: int) -> int:
        """Skip `n` bytes of UTF-8, which are checked one window at a time. Return their offset in the source."""
        offset = self.skip(n)
        decode = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode
        try:
            for at in range(0, n, _WINDOW):
                decode(self.read(offset + at, min(_WINDOW, n - at)), final=at + _WINDOW >= n)
        except UnicodeDecodeError as error:
            self.fail("a text is not UTF-8", got=error.reason)
        return offset

    def start_frame(self) -> None:
        """Read the length of a frame and start the frame. Raise MalformedError if another frame has not ended."""
        if self.frame_end is not None:
            self.fail("a frame inside a frame")
        length = self.length(8)
        self.frame_end = self.tell() + length

    def check_frame(self) -> None:
        """End the frame if the next byte is after it. Raise MalformedError if an opcode crosses its end."""
        assert self.frame_end is not None
        here = self.tell()
        if here > self.frame_end:
            self.fail("an opcode straddles the end of its frame", expected=f"an end at {self.frame_end}")
        if here == self.frame_end:
            self.frame_end = None

    # Stack, memo and effects

    def next_order(self) -> int:
        """Return the order of a new effect."""
        self.order += 1
        return self.order

    def pop_mark(self) -> list[Value]:
        """Remove the newest MARK. Remove and return the values after it."""
        if not self.metastack:
            self.fail("no MARK for this opcode")
        values = self.stack
        self.stack = self.metastack.pop()
        return values

    def get(self, slot: int) -> None:
        """Push the value of the memo slot `slot`."""
        try:
            value = self.memo[slot if slot < HASHED_AS_IT_IS else hex(slot)]
        except KeyError:
            value = self.not_in_memo(slot)
        if isinstance(value, Node):
            self.shared.add(value)
        self.stack.append(value)

    def not_in_memo(self, slot: int) -> Value:
        """Return the value of a slot that ``memo`` does not contain.

        Here this raises MalformedError; a subclass may have values.
        """
        self.fail("the memo has no such slot", got=slot)

    def put(self, slot: int) -> None:
        """Store the value on top of the stack in the memo slot `slot`."""
        if slot < 0:
            self.fail("a memo slot is negative", got=slot)
        self.memo[slot if slot < HASHED_AS_IT_IS else hex(slot)] = self.stack[-1]

    def memoize(self) -> None:
        """Store the value on top of the stack in the memo slot whose number is the number of slots in use."""
        self.put(len(self.memo))

    def effect(self, opcode: str, values: list[Value], *kinds: type[Node]) -> None:
        """Add the effect `opcode` with the operands `values` to the object on top of the stack.

        Raises MalformedError if the object is neither one of `kinds` nor the result of a call.
        """
        target = self.stack[-1]
        if not isinstance(target, Object) or not (type(target) in kinds or isinstance(target, Call)):
            self.fail(f"{opcode} on a value that cannot take it", got=kind_of(target))
        if not target.effects:
            self.changed.append(target)
        target.add(Effect(opcode, values, self.next_order()))

    def call(self, kind: str, callable_: Value, args: Value, kwargs: Value = None) -> None:
        """Push a node for the result of a call, which is not executed."""
        # Torch's older format refers to the classes of modules by persistent ids.
        if not isinstance(callable_, (Global, Call, Extension, PersistentId)):
            self.fail(f"{kind} of an object that cannot be called", got=kind_of(callable_))
        if not isinstance(args, (Tuple, Call)):  # a call can return a tuple: torch.Size, a named tuple
            self.fail(f"{kind} needs a tuple of arguments", got=kind_of(args))
        self.order = order = self.order + 1
        call = Call(kind, callable_, args, kwargs, order)
        self.calls.append(call)
        self.stack.append(call)

    def persistent_load(self, pid: Value) -> None:
        """Push a reference with the persistent id `pid`."""
        self.order = order = self.order + 1
        reference = PersistentId(pid, order)
        self.references.append(reference)
        self.stack.append(reference)

    def push_bytes(self, value: Value) -> None:
        """Push a byte string, which may be a Blob."""
        self.byte_strings.append(value)
        self.stack.append(value)

    def find_class(self, module: str, name: str) -> Global:
        """Return the node of the global ``module.name``, without importing it. One name always has the same node."""
        node = self.named.get((module, name))
        if node is None:
            self.check_name(len(module) + len(name))
            self.named_characters += len(module) + len(name)
            node = self.named[module, name] = Global(module, name)
            self.check_named()
        else:
            self.shared.add(node)
        return node

    def extension(self, code: int) -> Extension:
        """Return the node of the extension `code`. One code always has the same node."""
        node = self.codes.get(code)
        if node is None:
            node = self.codes[code] = Extension(code)
            self.check_named()
        else:
            self.shared.add(node)
        return node

    def check_name(self, length: int) -> None:
        """Raise LimitError if a global has a name of too many characters."""
        if length > LIMITS.global_name:
            raise LimitError(
                "the name of a class or function is too long",
                where=f"{self.where} at byte {self.tell()}",
                expected=f"at most {LIMITS.global_name:,} characters",
                got=f"{length:,}",
            )

    def check_named(self) -> None:
        """Raise LimitError if the pickle names too many globals and extensions."""
        if len(self.named) + len(self.codes) > LIMITS.globals or self.named_characters > LIMITS.global_characters:
            raise LimitError(
                "the pickle names too many classes and functions",
                where=f"{self.where} at byte {self.tell()}",
                expected=f"at most {LIMITS.globals:,}, of {LIMITS.global_characters:,} characters in all",
            )


#: The operation of one opcode. It takes its operands from the machine and leaves its result there.
Operation: TypeAlias = Callable[[PickleMachine], None]


def _lost(root: Value, popped: list[Value]) -> list[Value]:
    """Return the values of `popped` that contain a call or persistent id and cannot be reached from `root`."""
    seen: set[int] = set()
    for _ in walk([root], seen):
        pass
    return [v for v in popped if any(isinstance(node, (Call, PersistentId)) for node in list(walk([v], seen)))]
