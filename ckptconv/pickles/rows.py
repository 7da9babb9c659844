"""Rows: the opcodes that pickles repeat for most tensors, read by one regular expression into two nodes.

A row is a call of a global with a persistent id, an integer, two tuples of integers, a flag, and a call without
arguments. All of these are put into consecutive memo slots. A row can be the argument of a call of another global,
followed by a flag and one more call without arguments: this is a parameter. Rows that differ only in the key of the
persistent id and in the numbers of memo slots have the same :class:`RowForm`. The machine itself reads the first row of
each form, opcode by opcode. The nodes inside other rows are copies of its nodes. They are created when they are first
needed, and the same copies are returned each time. Calls for tensors from other containers are created as rows, too.

This module does not know which functions are called. Any call of this shape is read in this way, with the same meaning.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, islice, repeat
from operator import is_, itemgetter, not_
from typing import Any, TypeAlias, cast

from ckptconv.errors import InputError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import NO_EFFECTS, Call, Global, Graph, PersistentId, Tuple, Value, children, walk
from ckptconv.pickles.machine import CODES, PickleMachine

# Each number has the shortest opcode, as in the emitter's output.
INT = rb"(?:K.|M.[^\0]|J..(?!\0\0)..)"
GET = rb"(?:h.|j.(?!\0\0\0)...)"
INTS = rb"(?:%b\x85|%b%b\x86|%b%b%b\x87|\((?:%b){4,64}t)" % ((INT,) * 7)  # a tuple
_LONG_PUT = rb"r.(?!\0\0\0)..."  # of four bytes: the first 256 slots have shorter puts
_MOST = 4096  # items read at once
_WORTH_IT = 6  # items: if fewer were read at once, some rows pass before the next attempt, which would be slow
# Groups in the pattern of a row: the opcodes after it in a parameter, all puts, and the groups that identify a form.
_AROUND = 18
_puts_in = itemgetter(3, 6, 8, 11, 13, 15, 16, 17)
_form_groups = itemgetter(0, 5, 7, 9, 10, 12, 14, _AROUND)
_EACH_GET = regex(GET, re.DOTALL)
_PUTS = [struct.Struct("<" + "xI" * n).unpack for n in range(13)]  # by the number of puts in a row
_PATIENCE = 64  # failed attempts to read a row; each success allows one more
_Path: TypeAlias = tuple[int, ...]  # the index of a part of a call, the index of a part of that part, and so on
_Functions: TypeAlias = tuple[Global, ...]  # the functions that a row calls, the outermost first


class _Spelling:
    """The regular expressions for rows and items under one protocol.

    Args:
        text: The opcode of a text.
        width: The number of bytes of a text's length.
        put: The pattern of a put into the memo.
    """

    def __init__(self, text: bytes, width: int, put: bytes) -> None:
        self.text, self.at = text, 1 + width  # the opcode of a text, and the position of its characters
        self.lengths = [n.to_bytes(width, "little") for n in range(30)]
        self.width, self.put = width, 5 if put.startswith(b"r") else 1
        first, length = put[:1], b"." * width
        parts = {
            b"GET": GET,
            b"PUT": b"(" + put + b")",
            b"SLOT": put,
            b"PERHAPS": b"((?:" + put + b")?)",  # an empty tuple is not put, nor is a text from the memo
            b"INTS": rb"(\)(?!%b)|%b(?=%b))" % (first, INTS, first),
            b"INT": INT,
            b"TEXT": text,
            b"LENGTH": b"(" + length + b")",
            b"TAG": b"(GET(?!%b)|%b%b[a-z]{2,20}(?::[0-9]{1,3})?(?=%b))" % (first, text, length, first),
        }

        def spelled(pattern: bytes) -> re.Pattern[bytes]:
            for name in (b"TAG", b"INTS", *parts):
                pattern = pattern.replace(name, parts[name])
            return regex(pattern, re.DOTALL)

        # The opcodes after the GETs of the functions. All lengths are fixed, except for two texts, which are compared.
        row = (
            rb"(\(\(GETGET)(?:TEXTLENGTH([0-9]{1,19})PUT|(GET))TAGPERHAPS(INTt)PUT(QINT)INTSPERHAPSINTSPERHAPS"
            rb"([\x88\x89]GET\)R)PUTtPUTRPUT((?:[\x88\x89]GET\)RSLOT\x87SLOTRSLOT)?)"
        )
        self.row = spelled(row)
        #: An item of a mapping: its key, which is a text or read from the memo, the GETs of the functions, and the row.
        self.item = spelled(rb"(?:TEXTLENGTH(.{0,250}?)PUT|(GET))(GET(?:GET)?)" + row)

    def split(self, around: bytes) -> tuple[bytes, bytes]:
        """Split `around`, the opcodes after a row in a parameter.

        Return the opcodes before the first put, and the three puts.
        """
        n = self.put
        puts = around[-3 * n - 2 :]
        return around[: -3 * n - 2], puts[:n] + puts[n + 1 : -n - 1] + puts[-n:]


LONG = _Spelling(CODES["BINUNICODE"], 4, _LONG_PUT)
SHORT = _Spelling(CODES["SHORT_BINUNICODE"], 1, CODES["MEMOIZE"])  # from protocol 4 on
_PUT_OPCODES = [CODES[name][0] for name in ("PUT", "BINPUT", "LONG_BINPUT")]


@dataclass(eq=False, slots=True)
class RowForm:
    """The common content of rows that differ only in the key of the storage.

    Attributes:
        functions: The functions that are called, the outermost first.
        call: The outermost call of the first row, as read by the machine.
        reference: The persistent id of the first row.
        word: The first item of the persistent id (``storage``).
        cls: The second item of the persistent id: the storage class.
        tag: The fourth item of the persistent id: the location tag. None if each row contains the tag as a text.
        numel: The fifth item of the persistent id: the number of elements.
        parts: The paths of the values that a row puts into the memo, in order.
        calls: The paths of the inner calls.
        orders: The number of orders that a row takes: one for each call and one for the reference.
        opcodes: The number of opcodes of a row after the reads of its functions.
        puts_key: Whether a row contains the key as a text, which it puts into the memo first. Otherwise it reads
            the key from the memo.
        reads: The memo slots that a row reads, except for the slot of the key.
        values: The values of these slots.
        tag_slot: The slot in ``reads`` that contains the tag and nothing else, or None.
    """

    functions: _Functions
    call: Call
    reference: PersistentId
    word: str
    cls: Global
    tag: str | None
    numel: int
    parts: list[_Path]
    calls: list[_Path]
    orders: int
    opcodes: int
    puts_key: bool
    reads: tuple[int, ...]
    values: tuple[Value, ...]
    tag_slot: int | None

    @classmethod
    def of(cls, call: Call, reference: PersistentId) -> RowForm:
        """Return the form of new calls that differ from `call` only in the key of its storage `reference`."""
        assert isinstance(call.callable, Global) and isinstance(reference.id, Tuple)
        word, storage_class, _, tag, numel = reference.id.items
        inner = [(each, path) for each, path in _paths(call) if isinstance(each, Call) and each is not call]
        values = (word, storage_class, tag, *(each.callable for each, _ in inner))
        return cls(
            (call.callable,),
            call,
            reference,
            cast("str", word),
            cast("Global", storage_class),
            cast("str", tag),
            cast("int", numel),
            parts=[],
            calls=[path for _, path in inner],
            orders=0,
            opcodes=0,
            puts_key=True,
            reads=(),
            values=values,
            tag_slot=None,
        )

    def is_for(self, memo: Mapping[Any, Value]) -> bool:
        """Return whether the slots ``reads`` of `memo` contain the same objects as when the first row was read."""
        return all(map(is_, map(memo.get, self.reads), self.values))

    def arguments(self, reference: PersistentId, order: int | None) -> Tuple:
        """Return the arguments of a call of this form for the storage `reference`.

        Tuples and calls are new nodes. `order` is the order of the reference; the orders of inner calls follow from
        it. If it is None, inner calls have no order.
        """

        def copy(value: Value) -> Value:
            if isinstance(value, Tuple):
                return Tuple([*map(copy, value.items)])
            if isinstance(value, Call):
                number = None if order is None else order + (value.order or 0) - (self.reference.order or 0)
                return Call("REDUCE", value.callable, copy(value.args), order=number)
            return reference if value is self.reference else value

        return cast("Tuple", copy(self.call.args))


class RowId(PersistentId):
    """The persistent id of a row.

    ``form`` is None after the first access to ``id``, because the caller may then change the tuple.
    """

    __slots__ = ("_id", "form", "key", "tag")

    def __init__(self, form: RowForm, key: str, tag: str, order: int | None = None) -> None:
        self.form: RowForm | None = form
        self.key = key
        self.tag = tag
        self.order = order

    @property
    def id(self) -> Value:
        """The tuple of the persistent id. It is created at the first access."""
        form = self.form
        if form is not None:
            self.id = Tuple([form.word, form.cls, self.key, self.tag, form.numel])
        return self._id

    @id.setter
    def id(self, value: Value) -> None:
        self._id: Value = value
        self.form = None


class RowCall(Call):
    """The outermost call of a row.

    ``form`` is None after the first access to ``args``, because the caller may change them. ``next_items`` are the
    items that follow the row in its mapping, if they were read at once.
    """

    __slots__ = ("_args", "_inside", "form", "next_items", "reference")

    def __init__(self, form: RowForm, reference: RowId, order: int | None = None) -> None:
        self.effects = NO_EFFECTS
        self.kind = "REDUCE"
        self.callable = form.functions[0]
        self.kwargs = None
        self.order = order
        self.form: RowForm | None = form
        self.reference = reference
        self.next_items: RowItems | None = None

    @property
    def args(self) -> Value:
        """The tuple of arguments. It is created at the first access."""
        if self.form is not None:
            self._make(self.form)
        return self._args

    @args.setter
    def args(self, value: Value) -> None:
        if self.form is not None:
            self._make(self.form)
        self._args: Value = value

    def _make(self, form: RowForm) -> None:
        # an edit may have changed the order of the row since it was read
        self._args = form.arguments(self.reference, self.reference.order)
        self.form = None
        self._inside = [cast("Call", self.part(path)) for path in form.calls]

    @property
    def row(self) -> RowForm | None:
        """The form of this row, or None if its content was accessed or changed since it was read."""
        form = self.form
        is_unchanged = form is not None and self.callable is form.functions[0] and self.reference.form is form
        return form if is_unchanged and not self.effects else None

    def calls(self) -> list[Call]:
        """Return the inner calls and this call, in the order of the pickle."""
        if self.form is not None:
            self._make(self.form)
        return [*self._inside, self]

    def part(self, path: _Path) -> Value:
        """Return the value at `path` in this call."""
        value: Value = self
        for i in path:
            value = _parts(value)[i]
        return value


def outline(node: Value) -> list[Value]:
    """Return the children of `node` without creating the nodes inside a row.

    Instead of these nodes, a row has its globals and its persistent id.
    """
    if isinstance(node, RowCall) and (form := node.row):
        return [*form.functions, node.reference, *form.values]
    if isinstance(node, RowId) and node.form:
        return [node.form.cls]
    return children(node)


def subgraph(graph: Graph, root: Value) -> Graph:
    """Return the graph of the nodes that can be reached from `root`. The nodes are the same objects as in `graph`."""
    reached = list(walk([root], parts=outline))
    return replace(
        graph,
        root=root,
        globals=[node for node in reached if isinstance(node, Global)],
        outer_calls=[node for node in reached if isinstance(node, Call)],
        has_inner_calls=True,
        references=[node for node in reached if isinstance(node, PersistentId)],
        discarded=[],
        left_out=[],
    )


def _parts(value: Value) -> list[Value]:
    """Return the values that a node of a row consists of, except for globals."""
    if isinstance(value, Call):
        return [value.args]
    return [value.id] if isinstance(value, PersistentId) else value.items if isinstance(value, Tuple) else []


def _paths(value: Value, path: _Path = ()) -> Iterator[tuple[Value, _Path]]:
    """Yield each value inside `value` and its path, and then `value` itself."""
    for i, part in enumerate(_parts(value)):
        yield from _paths(part, (*path, i))
    yield value, path


class RowItems:
    """Items of a mapping that were read at once, and their position in the source.

    Attributes:
        values: Keys and rows in turn.
        keys: The keys of the storages.
        order: The order of the first reference.
        starts: The first memo slot of each item, and the slot after the last item. An item puts its key first, and then
            the parts of its row.
        called: The functions that the rows call, with their memo slots.
        offset: Offset of the items in the source.
        length: Number of bytes of the items.
    """

    __slots__ = ("called", "keys", "length", "offset", "order", "starts", "values")

    def __init__(
        self, values: list[Value], starts: list[int], called: dict[Global, int], offset: int, length: int
    ) -> None:
        self.values = values
        self.keys = [row.reference.key for row in self.rows()]
        self.order = self.rows()[0].reference.order or 0
        self.starts = array("Q", starts)
        self.called = called
        self.offset = offset
        self.length = length

    def rows(self) -> list[RowCall]:
        """Return the rows."""
        return cast("list[RowCall]", self.values[1::2])

    def is_as_read(self) -> bool:
        """Return whether the rows are unchanged, apart from tags."""
        order = self.order
        for row, key in zip(self.rows(), self.keys, strict=True):
            form, reference = row.row, row.reference
            if form is None or reference.key is not key or reference.order != order:
                return False
            order += form.orders
            if row.order != order - 1:
                return False
        return True


class RowMemo(dict[Any, Value]):
    """The memo of a machine that reads a single row.

    Slots that it does not contain are looked up in `outer`. The slots that were looked up are recorded in ``reads``.

    Args:
        outer: The memo of the machine that reads the complete pickle.
        start: The slot of the first value for which the pickle gives no slot.
        key_slot: The slot from which the row reads the key of the storage, or None.
        key: The value of `key_slot`.
    """

    def __init__(self, outer: dict[int | str, Value], start: int, key_slot: int | None, key: str) -> None:
        self.outer = outer
        self.start = start
        self.key_slot, self.key = key_slot, key
        self.reads: list[Any] = []

    def __len__(self) -> int:
        return self.start + super().__len__()

    def __missing__(self, slot: int | str) -> Value:
        value = self.key if slot == self.key_slot else self.outer[slot]
        self.reads.append(slot)
        return value


class RowMachine(PickleMachine):
    """A machine that reads each row, and the items of a mapping after it, in one step."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, where: str, offset: int) -> None:
        super().__init__(read, size, where, offset)
        self._forms: dict[tuple[object, ...], RowForm] = {}
        self._starts: list[int] = []  # the first memo slots of the rows, ascending
        self._rows: list[RowCall] = []
        self._forms_read: list[RowForm] = []
        self._end = 0  # the slot after the last of them
        self._slots = 0  # the number of slots of rows, which are not in the memo
        self._patience = _PATIENCE
        self._pause = self._wait = 0
        self._at_once = 1  # items to read; doubled after each success, so that few items are matched twice

    def get(self, slot: int) -> None:
        super().get(slot)
        if type(self.stack[-1]) is Global and self.window.startswith(b"((", self.pos):
            self._read_rows()

    def not_in_memo(self, slot: int) -> Value:
        value = self._in_row(slot)
        return super().not_in_memo(slot) if value is None else value

    def memoize(self) -> None:
        if self._slots and self._has_puts():
            self._stop()
        self.put(len(self.memo) + self._slots)

    def finish(self, opcodes: int) -> Graph:
        graph = super().finish(opcodes)
        graph.has_inner_calls = bool(self._rows)
        return graph

    def _read_rows(self) -> None:
        """Read the row that starts at the next opcode, and the items after it. Do nothing if there is no row.

        Only items whose values have known forms are read. The functions of the row are on the stack.
        """
        spelling = SHORT if self.protocol >= 4 else LONG
        if spelling is LONG and not self.used[_PUT_OPCODES[-1]]:
            return  # compile no pattern for a small file
        if not self._read_one(spelling):
            return
        if self._wait:
            self._wait -= 1
            return
        before = len(self._rows)
        # The match method of a scanner finds consecutive matches; re.Scanner uses it too.
        scan = cast("Any", spelling.item).scanner
        while found := [*islice(iter(scan(self.window, self.pos, self._room()).match, None), self._at_once)]:
            if not self._read_items(spelling, found):
                self._at_once = 1
                break
            self._at_once = min(2 * self._at_once, _MOST)
        self._pause = 0 if len(self._rows) >= before + _WORTH_IT else min(2 * self._pause + 1, _PATIENCE)
        self._wait = self._pause

    def _room(self) -> int:
        """Return the end of the bytes that a row may use, as a position in the window: the end of the frame or
        window.
        """
        return len(self.window) if self.frame_end is None else min(len(self.window), self.frame_end - self.base)

    def _read_one(self, spelling: _Spelling) -> bool:
        """Read one row.

        Return False, without executing anything, if the next opcodes are not a row that can be read at once.
        """
        if self._patience < 0:
            return False
        self._patience -= 1
        match = spelling.row.match(self.window, self.pos, self._room())
        if match is None:
            return False
        groups = match.groups(b"")
        _, length, digits, _, get, tag, *_ = groups
        end, functions = match.end(), tuple(self.stack[-2:]) if groups[_AROUND] else (self.stack[-1],)
        puts = b"".join(_puts_in(groups))
        if len(functions) == 2 and type(functions[0]) is Global:
            around, last = spelling.split(groups[_AROUND])
            groups, puts = (*groups[:_AROUND], around), puts + last
        elif groups[_AROUND]:  # the row is not an argument of such a call
            groups, end, functions = (*groups[:_AROUND], b""), match.start(_AROUND + 1), functions[-1:]
        slots, key = self._new_slots(spelling, puts), self._key(spelling, length, digits, get)
        if key is None or not slots:
            return False
        form_key = functions, not get, *_form_groups(groups)
        form = self._forms.get(form_key)
        if form is None or not form.is_for(self.memo):
            row = self.window[self.pos : end]
            form = self._learn(spelling, cast("_Functions", functions), row, tag, slots, (get, key))
            if form is None:
                return False
            self._forms[form_key] = form
        else:
            self._patience += 2
        if not self.count(form.opcodes):
            return False
        self.pos = end
        if get:
            self.used[get[0]] = 1
        text = tag[spelling.at :].decode() if form.tag is None else form.tag
        reference = RowId(form, key, text, self.order + 1)
        self.order += form.orders
        call = RowCall(form, reference, self.order)
        self.stack[-len(functions) :] = (call,)
        self.references.append(reference)
        self.calls.append(call)
        self._starts.append(slots.start)
        self._rows.append(call)
        self._forms_read.append(form)
        self._slots += len(slots)
        self._end = slots.stop
        return True

    def _read_items(self, spelling: _Spelling, found: list[re.Match[bytes]]) -> bool:
        """Read the items that the pattern has `found`.

        Return False, without executing anything, unless each item is a key and a row of a known form.
        """
        lengths, texts, p0, gets, called, *columns = zip(*(match.groups(b"") for match in found), strict=True)
        _, key_lengths, digits, _, key_gets, tags, *_ = columns
        puts = p0, *_puts_in(columns)
        if any(columns[_AROUND]):
            columns[_AROUND], last = zip(*map(spelling.split, columns[_AROUND]), strict=True)
            puts = *puts, last
        slots = self._new_slots(spelling, b"".join(chain.from_iterable(zip(*puts, strict=True))))
        functions, slot_of = self._called({*called})
        form_keys = zip(map(functions.get, called), map(not_, key_gets), *_form_groups(columns), strict=True)
        forms = [form for form in map(self._forms.get, form_keys) if form]
        names = self._names(spelling, lengths, texts, gets)
        keys = self._keys(spelling, key_lengths, digits, key_gets)
        if not len(forms) == len(names) == len(keys) == len(found) or not slots:
            return False
        is_put = bool(p0[0])
        opcodes = sum(len(form.functions) + form.opcodes for form in forms) + (1 + is_put) * len(forms)
        if not all(form.is_for(self.memo) for form in {*forms}) or not self.count(opcodes):
            return False
        used = _EACH_GET.findall(b"".join({*called, *gets, *key_gets}))
        for opcode in (*used, spelling.text, p0[0]) if is_put else used:
            self.used[opcode[0]] = 1
        self.shared |= slot_of.keys()
        starts = [*accumulate((len(form.parts) + is_put for form in forms), initial=slots.start)]
        if is_put:
            self.memo.update(zip(starts, names, strict=False))
        row, calls = self._rows[-1], self._made(spelling, forms, keys, tags, [start + is_put for start in starts[:-1]])
        self._end = slots.stop
        values: list[Value] = [value for item in zip(names, calls, strict=True) for value in item]
        if is_put and spelling is LONG and not any(key_gets):
            row.next_items = RowItems(values, starts, slot_of, self.tell(), found[-1].end() - self.pos)
        self.stack += values
        self.pos = found[-1].end()
        self._patience += len(calls)
        return True

    def _new_slots(self, spelling: _Spelling, puts: bytes) -> range | None:
        """Return the memo slots of `puts`.

        Return None unless they are consecutive, empty and after the slots of earlier rows.

        For puts without numbers (MEMOIZE), return None if the pickle also contains puts with numbers.
        """
        if spelling is SHORT:
            if self._has_puts():
                return None
            first = len(self.memo) + self._slots
            return range(first, first + len(puts))
        slots = slots_of(puts)
        own = range(slots[0], slots[0] + len(slots))
        return own if own.start >= self._end and slots == (*own,) and self.memo.keys().isdisjoint(own) else None

    def _has_puts(self) -> bool:
        """Return whether the pickle contains puts with the number of a slot, which can overwrite a slot."""
        return any(map(self.used.__getitem__, _PUT_OPCODES))

    def _called(self, called: set[bytes]) -> tuple[dict[bytes, _Functions], dict[Global, int]]:
        """Return the globals that each sequence of GETs in `called` reads, and the slot of each global.

        Return two empty dictionaries if a value is not a global or occurs in two slots.
        """
        functions: dict[bytes, _Functions] = {}
        pairs: set[tuple[Global, int]] = set()
        for gets in called:
            slots = [int.from_bytes(get[1:], "little") for get in _EACH_GET.findall(gets)]
            globals_ = tuple(map(self.memo.get, slots))
            if not all(isinstance(value, Global) for value in globals_):
                return {}, {}
            functions[gets] = cast("_Functions", globals_)
            pairs.update(zip(functions[gets], slots, strict=True))
        slot_of = dict(pairs)
        return (functions, slot_of) if len(slot_of) == len(pairs) else ({}, {})

    def _names(
        self, spelling: _Spelling, lengths: Sequence[bytes], texts: Sequence[bytes], gets: Sequence[bytes]
    ) -> list[str]:
        """Return the keys of items. The list is shorter than `texts` if a key cannot be read.

        A key is a text of `texts` whose length in `lengths` is right, or the text in the memo slot of its GET in
        `gets`. If only some items have a GET, the list is empty.
        """
        if all(gets):
            named = (self.memo.get(int.from_bytes(get[1:], "little")) for get in gets)
            return [name for name in named if isinstance(name, str)]
        if any(gets) or lengths != tuple(len(text).to_bytes(spelling.width, "little") for text in texts):
            return []
        with suppress(UnicodeDecodeError):
            return [text.decode("utf-8", "surrogatepass") for text in texts if len(text) <= LIMITS.inline_bytes]
        return []

    def _key(self, spelling: _Spelling, length: bytes, digits: bytes, get: bytes) -> str | None:
        """Return the key of a storage, or None if it is not the decimal number that a row can have.

        The key is `digits`, whose length must be `length`, or the value of the memo slot in `get` if `get` is not
        empty.
        """
        if not get:
            return digits.decode() if length == spelling.lengths[len(digits)] else None
        slot, memo = int.from_bytes(get[1:], "little"), self.memo
        key = memo[slot] if slot in memo else self._in_row(slot)
        return key if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else None

    def _keys(
        self, spelling: _Spelling, lengths: Sequence[bytes], digits: Sequence[bytes], gets: Sequence[bytes]
    ) -> list[str]:
        """Return the keys of the storages of many rows. The list is shorter than `digits` if a key is not valid."""
        if any(gets):
            keys = map(self._key, repeat(spelling), lengths, digits, gets)
            return [key for key in keys if key is not None]
        are_exact = lengths == tuple(map(spelling.lengths.__getitem__, map(len, digits)))
        return b" ".join(digits).decode().split(" ") if are_exact else []

    def _made(
        self,
        spelling: _Spelling,
        forms: list[RowForm],
        keys: Sequence[str],
        tags: Sequence[bytes],
        starts: Sequence[int],
    ) -> list[RowCall]:
        """Create the calls of rows, one for each element of the sequences, and record them.

        `starts` are the first memo slots of the rows.
        """
        ends = [*accumulate([form.orders for form in forms], initial=self.order)]
        self.order = ends[-1]
        tag_texts = [
            tag[spelling.at :].decode() if form.tag is None else form.tag for form, tag in zip(forms, tags, strict=True)
        ]
        orders = [end + 1 for end in ends[:-1]]
        references = [*map(RowId, forms, keys, tag_texts, orders)]
        calls = [*map(RowCall, forms, references, ends[1:])]
        self.references += references
        self.calls += calls
        self._starts += starts
        self._rows += calls
        self._forms_read += forms
        self._slots += sum([len(form.parts) for form in forms])
        return calls

    def _learn(
        self,
        spelling: _Spelling,
        functions: _Functions,
        row: bytes,
        tag: bytes,
        slots: range,
        key_read: tuple[bytes, str],
    ) -> RowForm | None:
        """Return the form of `row`, or None if it is not a row or the machine refuses it.

        The row calls `functions`, which are on the stack. `tag` contains the opcodes of the location tag, `slots` the
        memo slots of the row, and `key_read` the GET of the key (empty if the row contains the key) and the key.
        """
        is_own = tag.startswith(spelling.text)
        if is_own and tag[1 : spelling.at] != spelling.lengths[len(tag) - spelling.at]:
            return None
        code = row + CODES["STOP"]
        machine = PickleMachine(lambda offset, length: code[offset : offset + length], len(code), self.where, 0)
        machine.stack += functions
        key_slot = int.from_bytes(key_read[0][1:], "little") if key_read[0] else None
        machine.memo = memo = RowMemo(self.memo, slots.start, key_slot, key_read[1])
        try:
            graph = machine.load(self.dispatch)
        except InputError:
            return None
        (reference,), call = graph.references, graph.calls[-1]
        assert isinstance(reference.id, Tuple)
        word, cls, key, text, size = reference.id.items
        if not isinstance(word, str) or not isinstance(text, str) or not isinstance(cls, Global):
            return None
        if not all(isinstance(each.callable, Global) for each in graph.calls):
            return None
        if len(memo.reads) != 2 + len(functions) + (not is_own) + (key_slot is not None) or len(memo) != slots.stop:
            return None
        if memo.reads.count(key_slot) != (key_slot is not None):  # other rows of this form have other keys
            return None
        reads = tuple(dict.fromkeys(slot for slot in memo.reads if slot != key_slot))
        paths = {id(value): path for value, path in _paths(call)}
        paths[id(key)] = (*paths[id(reference.id)], 2)  # also if the tag of this row is the same object
        for opcode in graph.used:
            self.used[opcode] = 1
        self.shared |= graph.shared
        return RowForm(
            functions,
            call,
            reference,
            word,
            cls,
            None if is_own else text,
            cast("int", size),
            [paths[id(value)] for value in memo.values()],
            [paths[id(each)] for each in graph.calls[:-1]],
            1 + len(graph.calls),
            graph.opcodes - 1,
            key_slot is None,
            reads,
            tuple(map(self.memo.__getitem__, reads)),
            None if is_own or text is word else int.from_bytes(tag[1:], "little"),
        )

    def _in_row(self, slot: int) -> Value:
        """Return the value that a row has put into the memo slot `slot`, or None if no row uses the slot."""
        i = bisect_right(self._starts, slot) - 1
        if i < 0 or slot - self._starts[i] >= len((form := self._forms_read[i]).parts):
            return None
        if slot == self._starts[i] and form.puts_key:
            return self._rows[i].reference.key  # without making nodes
        return self._rows[i].part(form.parts[slot - self._starts[i]])

    def _stop(self) -> None:
        """Put the values of all rows into the memo, and read no more rows."""
        memo = self.memo
        for first, row, form in zip(self._starts, self._rows, self._forms_read, strict=True):
            for i, part in enumerate(form.parts):
                memo.setdefault(first + i, row.part(part))
        self._slots, self._patience = 0, -1


def slots_of(puts: bytes) -> tuple[int, ...]:
    """Return the memo slots in `puts`, which are LONG_BINPUT opcodes of five bytes."""
    n = len(puts) // 5
    if n < len(_PUTS):
        return _PUTS[n](puts)
    numbers = bytearray(4 * n)
    for i in range(4):
        numbers[i::4] = puts[i + 1 :: 5]
    return struct.unpack(f"<{n}I", numbers)
