r"""Rows: what a pickle says of most tensors, with the same opcodes each time, read by one pattern into two nodes.

A row is a call of a global with a persistent id, an integer, two tuples of integers, a flag, and a call without
arguments, all put into the memo one behind another. Rows that differ in nothing but the key in the persistent id, and
the numbers of memo slots, have one :class:`RowForm`, of which the machine itself has read the first. What else a row
is made of becomes nodes when somebody asks for it, and the same ones however often.

Nothing here knows what is called: whatever has this shape is read in this way, and means what it means anyway.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, count, islice, repeat
from operator import is_
from typing import Any, cast

from ckptconv.errors import InputError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import NO_EFFECTS, Call, Global, PersistentId, Tuple, Value
from ckptconv.pickles.machine import Operation, PickleMachine
from ckptconv.pickles.opcodes import CODES

__all__ = ["RowCall", "RowForm", "RowId", "RowItems", "Rows", "type_of"]

# Each number in the shortest opcode, as the emitter writes it.
_INT = rb"(?:K.|M.[^\0]|J..(?!\0\0)..)"
_GET = rb"(?:h.|j.(?!\0\0\0)...)"
_PUT = rb"(r.(?!\0\0\0)...)"  # of four bytes: rows begin behind the first 256 slots
_PERHAPS = rb"((?:r.(?!\0\0\0)...)?)"  # an empty tuple is not put, and neither is a text that the memo has
_INTS = rb"(\)(?!r)|(?:I\x85|II\x86|III\x87|\(I{4,64}t)(?=r))".replace(b"I", _INT)
#: What follows the GET of what is called. All lengths are in it but those of the two texts, which are compared.
_PATTERN = (
    rb"(\(\(" + _GET + _GET + rb")X(....)([0-9]{1,19})" + _PUT
    + rb"(" + _GET + rb"(?!r)|X....[a-z]{2,20}(?::[0-9]{1,3})?(?=r))" + _PERHAPS
    + rb"(" + _INT + rb"t)" + _PUT + rb"(Q" + _INT + rb")" + _INTS + _PERHAPS + _INTS + _PERHAPS
    + rb"([\x88\x89]" + _GET + rb"\)R)" + _PUT + rb"t" + _PUT + rb"R" + _PUT
)  # piece by piece  # fmt: skip
_ROW = regex(_PATTERN, re.DOTALL)
#: An item of a mapping: its key, which is a text of some length or read from the memo, the GET, and the row.
_ITEM = regex(rb"(?:X(....)(.{0,250}?)" + _PUT + rb"|(" + _GET + rb"))(" + _GET + rb")" + _PATTERN, re.DOTALL)
_MOST = 4096  # items at once
_WORTH_IT = 6  # of which fewer take longer than rows one by one: then some rows pass before the next attempt
_TEXT, _AT = CODES["BINUNICODE"], 5  # a text's first byte, and where its characters begin
_LENGTHS = [n.to_bytes(4, "little") for n in range(30)]
_PUTS = [struct.Struct("<" + "xI" * n).unpack for n in range(10)]
_PARTS = ("key", "tag", "id", "shape", "stride", "inside", "args", "call")
_PATIENCE = 64  # attempts that may be in vain, and one more for each that is not


@dataclass(eq=False, slots=True)
class RowForm:
    """What some rows have in common: the nodes and texts that they read from the memo, and their numbers.

    ``word``, ``cls``, ``numel`` stand in the persistent id, around the key and the tag; ``made_by`` is called without
    arguments. ``tag`` is None where each row has a text of its own. ``parts`` are what is put into the memo, in order;
    ``reads`` are the memo slots that are read, of which ``tag_slot`` has the tag and nothing else, and ``values`` is
    what stood there.
    """

    function: Global
    word: str
    cls: Global
    tag: str | None
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flag: bool
    made_by: Global
    parts: list[str]
    opcodes: int
    reads: tuple[int, ...]
    values: tuple[Value, ...]
    tag_slot: int | None

    def is_for(self, memo: Mapping[Any, Value]) -> bool:
        """Whether the same nodes and texts as ever stand in `memo`."""
        return all(map(is_, map(memo.get, self.reads), self.values))


class RowId(PersistentId):
    """The persistent id in a row. ``form`` is None once its ``id`` was asked for: that can be anything then."""

    __slots__ = ("_id", "form", "key", "tag")

    def __init__(self, form: RowForm, key: str, tag: str, order: int) -> None:
        self.form: RowForm | None = form
        self.key = key
        self.tag = tag
        self.order = order

    @property
    def id(self) -> Value:
        """The tuple, made now or before."""
        form = self.form
        if form is not None:
            self.id = Tuple([form.word, form.cls, self.key, self.tag, form.numel])
        return self._id

    @id.setter
    def id(self, value: Value) -> None:
        self._id: Value = value
        self.form = None


class RowCall(Call):
    """The call that is a row. ``form`` is None once its ``args`` were asked for: they can be anything then."""

    __slots__ = ("_args", "_inside", "form", "reference")

    def __init__(self, form: RowForm, reference: RowId, order: int) -> None:
        self.effects = NO_EFFECTS
        self.kind = "REDUCE"
        self.callable = form.function
        self.kwargs = None
        self.order = order
        self.form: RowForm | None = form
        self.reference = reference

    @property
    def args(self) -> Value:
        """The tuple, made now or before."""
        if self.form is not None:
            self._make(self.form)
        return self._args

    @args.setter
    def args(self, value: Value) -> None:
        if self.form is not None:
            self._make(self.form)
        self._args: Value = value

    def _make(self, form: RowForm) -> None:
        assert self.reference.order is not None  # the row's own can be another by now, before anyone met what is in it
        self._inside = Call("REDUCE", form.made_by, Tuple([]), order=self.reference.order + 1)
        sizes = Tuple([*form.shape]), Tuple([*form.stride])
        self._args = Tuple([self.reference, form.offset, *sizes, form.flag, self._inside])
        self.form = None

    @property
    def row(self) -> RowForm | None:
        """The form, while this is what it says: until somebody asked for what it is made of."""
        form = self.form
        is_so = form is not None and self.callable is form.function and self.reference.form is form
        return form if is_so and not self.effects else None

    def calls(self) -> list[Call]:
        """The call inside, as the pickle has it, and this one."""
        if self.form is not None:
            self._make(self.form)
        return [self._inside, self]

    def part(self, name: str) -> Value:
        """What the row puts into the memo under the `name` that its form gives it."""
        if name in ("key", "tag"):
            return self.reference.key if name == "key" else self.reference.tag
        if name in ("id", "call"):
            return self.reference.id if name == "id" else self
        args = self.args
        assert isinstance(args, Tuple)
        return args if name == "args" else args.items[("shape", "stride", "flag", "inside").index(name) + 2]


def type_of(value: Value) -> type:
    """The type of `value`, which for what stands in a row is the one that it would have elsewhere."""
    return Call if isinstance(value, RowCall) else PersistentId if isinstance(value, RowId) else type(value)


# Errors say what kind of node there is, which are these.
RowId.__name__, RowCall.__name__ = PersistentId.__name__, Call.__name__


class RowItems:
    """Items of a mapping that were read at once: what they are, and where the pickle says them.

    `values` are texts and rows in turn, ``keys`` those of the storages. They are `length` bytes at `offset`. Each puts
    its text, and then what its row has, into the memo, from the slot in `starts` on; the last one ends before the last
    of these. The rows call what is in the slot `called`.
    """

    __slots__ = ("called", "keys", "length", "offset", "order", "starts", "values")

    def __init__(self, values: list[Value], starts: list[int], called: int, offset: int, length: int) -> None:
        self.values = values
        self.keys = [row.reference.key for row in self.rows()]
        self.order = self.rows()[0].order or 0
        self.starts = array("Q", starts)
        self.called = called
        self.offset = offset
        self.length = length

    def rows(self) -> list[RowCall]:
        """The rows."""
        return cast("list[RowCall]", self.values[1::2])

    def is_as_read(self) -> bool:
        """Whether the rows still say what they said, but for tags."""
        return all(
            row.row and row.reference.key is key and (row.reference.order, row.order) == (order - 2, order)
            for row, key, order in zip(self.rows(), self.keys, count(self.order, 3), strict=False)
        )


class _Memo(dict[Any, Value]):
    """Takes what is put, and notes what is read of `outer`."""

    def __init__(self, outer: dict[int | str, Value]) -> None:
        self.outer = outer
        self.read: dict[Any, Value] = {}
        self.reads = 0

    def __missing__(self, slot: int | str) -> Value:
        value = self.read[slot] = self.outer[slot]
        self.reads += 1
        return value


class Rows:
    """The rows that `machine` has read; `dispatch` is what it does for each opcode."""

    def __init__(self, machine: PickleMachine, dispatch: Sequence[Operation | None]) -> None:
        self._machine = machine
        self._dispatch = dispatch
        self._forms: dict[tuple[object, ...], RowForm] = {}
        self._starts: list[int] = []  # the first memo slots of the rows, ascending
        self._rows: list[RowCall] = []
        self._parts: list[list[str]] = []
        self._end = 0  # behind the last of these slots
        self._patience = _PATIENCE
        self._pause = self._wait = 0
        self._at_once = 1  # items; twice as many where all could be read, so that nothing is looked at again and again

    def read(self, function: Global, slot: int) -> None:
        """Do what the row says that begins at the next opcode, with `function` on the stack, if there is one; and what
        the items behind it say, if their values are rows of known forms, of this function from the same memo `slot`.
        """
        m = self._machine
        if not self._read_one(function) or slot >> 32:  # GET says a slot in digits, of which there can be any number
            return
        if self._wait:
            self._wait -= 1
            return
        before = len(self._rows)
        # The method of a scanner, which re.Scanner uses, finds one match right behind the other.
        while found := [*islice(iter(cast("Any", _ITEM).scanner(m.window, m.pos).match, None), self._at_once)]:
            if not self._read_items(function, slot, found):
                self._at_once = 1
                break
            self._at_once = min(2 * self._at_once, _MOST)
        self._pause = 0 if len(self._rows) >= before + _WORTH_IT else min(2 * self._pause + 1, _PATIENCE)
        self._wait = self._pause

    def _read_one(self, function: Global) -> bool:
        """Do what the row says; False, and nothing, where there is none."""
        m = self._machine
        if m.frame_end is not None or self._patience < 0:
            return False
        self._patience -= 1
        found = _ROW.match(m.window, m.pos)
        if found is None:
            return False
        head, length, key, p0, tag, p1, numel, p2, offset, shape, p3, stride, p4, rest, p5, p6, p7 = found.groups()
        puts = b"".join((p0, p1, p2, p3, p4, p5, p6, p7))
        n = len(puts) // 5
        slots = _PUTS[n](puts)
        if length != _LENGTHS[len(key)] or not self._are_new(slots):
            return False
        told = function, head, tag, numel, offset, shape, stride, rest
        form = self._forms.get(told)
        if form is None or not form.is_for(m.memo):
            form = self._learn(function, found[0], tag, n)
            if form is None:
                return False
            self._forms[told] = form
        else:
            self._patience += 2
        if not m.count(form.opcodes):
            return False
        m.pos = found.end()
        m.has_rows = True
        text = tag[_AT:].decode() if form.tag is None else form.tag
        reference = RowId(form, key.decode(), text, m.order + 1)
        m.order += 3
        m.stack[-1] = call = RowCall(form, reference, m.order)
        m.references.append(reference)
        m.calls.append(call)
        self._starts.append(slots[0])
        self._rows.append(call)
        self._parts.append(form.parts)
        self._end = slots[0] + n
        return True

    def _read_items(self, function: Global, slot: int, found: list[re.Match[bytes]]) -> bool:
        """Do what the items say that the pattern `found`; False, and nothing, where one is anything but a key and a row
        of a known form, whose `function` comes from the memo `slot`.
        """
        m = self._machine
        get = CODES["BINGET"] + bytes([slot]) if slot < 256 else CODES["LONG_BINGET"] + slot.to_bytes(4, "little")
        columns = zip(*(each.groups(b"") for each in found), strict=True)
        lengths, texts, p0, gets, called, head, key_lengths, keys, p1, tags, p2, numel, p3, *others = columns
        offset, shape, p4, stride, p5, rest, *last = others
        puts = zip(p0, p1, p2, p3, p4, p5, *last, strict=True)
        slots = _slots_of(b"".join(chain.from_iterable(puts)))
        told = zip(repeat(function), head, tags, numel, offset, shape, stride, rest)
        forms = [form for form in map(self._forms.get, told) if form]
        names = self._names(lengths, texts, gets)
        if not len(forms) == len(names) == len(keys) or {*called} != {get} or not self._are_new(slots):
            return False
        if key_lengths != tuple(map(_LENGTHS.__getitem__, map(len, keys))):
            return False
        if not all(form.is_for(m.memo) for form in dict.fromkeys(forms)):
            return False
        if not m.count(sum(form.opcodes for form in forms) + (2 if gets[0] else 3) * len(forms)):
            return False
        for each in {*gets} if gets[0] else (_TEXT, p0[0]):
            m.used[each[0]] = 1
        starts = [*accumulate((len(form.parts) + len(p0[0]) // 5 for form in forms), initial=slots[0])]
        if p0[0]:
            m.memo.update(zip(starts, names, strict=False))
        calls = self._made(forms, keys, tags)
        self._starts += [start + 1 for start in starts[:-1]] if p0[0] else starts[:-1]
        self._end = starts[-1]
        values: list[Value] = [each for item in zip(names, calls, strict=True) for each in item]
        if p0[0]:
            m.items[m.stack[-1]] = RowItems(values, starts, slot, m.tell(), found[-1].end() - m.pos)
        m.stack += values
        m.pos = found[-1].end()
        self._patience += len(calls)
        return True

    def _are_new(self, slots: tuple[int, ...]) -> bool:
        """Whether memo `slots` follow one another, and nothing is in them."""
        own = range(slots[0], slots[0] + len(slots))
        return slots == (*own,) and own.start >= self._end and self._machine.memo.keys().isdisjoint(own)

    def _names(self, lengths: Sequence[bytes], texts: Sequence[bytes], gets: Sequence[bytes]) -> list[str]:
        """The keys of items: texts of these `lengths`, or what the slots of `gets` hold; fewer where one is neither, or
        some are this and some that.
        """
        if all(gets):
            named = (self._machine.memo.get(int.from_bytes(get[1:], "little")) for get in gets)
            return [name for name in named if isinstance(name, str)]
        if any(gets) or lengths != tuple(len(text).to_bytes(4, "little") for text in texts):
            return []
        with suppress(UnicodeDecodeError):
            return [text.decode("utf-8", "surrogatepass") for text in texts if len(text) <= LIMITS.inline_bytes]
        return []

    def _made(self, forms: list[RowForm], keys: Sequence[bytes], tags: Sequence[bytes]) -> list[RowCall]:
        """The calls of rows, one for each of the columns."""
        m = self._machine
        order = m.order
        m.order += 3 * len(forms)
        told = [form.tag or tag[_AT:].decode() for form, tag in zip(forms, tags, strict=True)]
        references = [*map(RowId, forms, b" ".join(keys).decode().split(" "), told, range(order + 1, m.order, 3))]
        calls = [*map(RowCall, forms, references, range(order + 3, m.order + 1, 3))]
        m.references += references
        m.calls += calls
        self._rows += calls
        self._parts += [form.parts for form in forms]
        return calls

    def _learn(self, function: Global, row: bytes, tag: bytes, n: int) -> RowForm | None:
        """The form of `row`, as a machine reads it; None where it is another call, or the machine would not read it."""
        m = self._machine
        is_own = tag.startswith(_TEXT)
        if is_own and tag[1:_AT] != _LENGTHS[len(tag) - _AT]:
            return None
        code = row + CODES["STOP"]
        machine = PickleMachine(lambda offset, length: code[offset : offset + length], len(code), m.where, 0)
        machine.stack.append(function)
        machine.memo = memo = _Memo(m.memo)
        try:
            graph = machine.load(self._dispatch)
        except InputError:
            return None
        (made, call), (reference,) = graph.calls, graph.references
        assert isinstance(call.args, Tuple) and isinstance(reference.id, Tuple)
        word, cls, key, text, size = reference.id.items
        _, offset, shape, stride, flag, _ = call.args.items
        if not isinstance(word, str) or not isinstance(text, str):
            return None
        if not isinstance(cls, Global) or not isinstance(made.callable, Global):
            return None
        if memo.reads != 3 + (not is_own) or len(memo) != n:
            return None
        names = dict(zip(map(id, (key, text, reference.id, shape, stride, made, call.args, call)), _PARTS, strict=True))
        for opcode in graph.used:
            m.used[opcode] = 1
        m.shared |= graph.shared
        return RowForm(
            function,
            word,
            cls,
            None if is_own else text,
            cast("int", size),
            cast("int", offset),
            _numbers(shape),
            _numbers(stride),
            flag is True,
            made.callable,
            [names[id(value)] for value in memo.values()],
            graph.opcodes - 1,
            (*memo.read,),
            (*memo.read.values(),),
            None if is_own or text is word else int.from_bytes(tag[1:], "little"),
        )

    def get(self, slot: int) -> Value:
        """What a row has put into the memo as `slot`; None where none did."""
        i = bisect_right(self._starts, slot) - 1
        if i < 0 or slot - self._starts[i] >= len(parts := self._parts[i]):
            return None
        return self._rows[i].part(parts[slot - self._starts[i]])

    def stop(self) -> None:
        """Put into the memo what rows have put there, and read no more rows."""
        memo = self._machine.memo
        for first, row, parts in zip(self._starts, self._rows, self._parts, strict=True):
            for i, part in enumerate(parts):
                memo.setdefault(first + i, row.part(part))
        self._machine.rows = None


def _slots_of(puts: bytes) -> tuple[int, ...]:
    """The memo slots of any number of `puts`."""
    n = len(puts) // 5
    numbers = bytearray(4 * n)
    for i in range(4):
        numbers[i::4] = puts[i + 1 :: 5]
    return struct.unpack(f"<{n}I", numbers)


def _numbers(value: Value) -> tuple[int, ...]:
    assert isinstance(value, Tuple)
    return cast("tuple[int, ...]", tuple(value.items))
