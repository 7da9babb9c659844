"""Repeated items: items of a dict with the same opcodes as an earlier item, read by one regular expression.

The machine reads the first item of each form, opcode by opcode. Further items of the form may differ in the key, if it
is a text, in the numbers of memo slots, and in the values of a few attributes. Their values are those of the first
item, or :class:`Like` nodes. So the graph describes equal values, but objects that were apart can be the same node.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import suppress
from operator import is_
from typing import NamedTuple

from ckptconv.errors import InputError
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Node, Tuple, Value
from ckptconv.pickles.machine import CODES, PickleMachine
from ckptconv.pickles.rows import GET, INT, LONG, SHORT, RowMachine

#: An opcode of an item with its operand. Of a text, this is only the length.
_OPCODE = regex(
    rb"(?P<text>X....|\x8c.)|(?P<int>K.|M..|J....)|(?P<get>h.|j....)|(?P<put>r....|\x94)|[]})(atub\x81\x85-\x89NR]",
    re.DOTALL,
)
_LONGEST = 8192  # bytes of an item
_MOST = 1 << 16  # characters of all patterns, because compiling them takes time
#: Steps that the pickle pays for with each byte, and before its first byte. Attempts to read an item take a step for
#: each character of the pattern, and learning one takes more for each byte of the item.
_STEPS, _SPARE, _LEARNING = 32, 1 << 21, 256
_MOST_FOUND = 1000  # spellings of forms of a pattern that are remembered


class Like(Node):
    """An object that equals the call `like` except for the values of its attributes in `changed`."""

    __slots__ = ("changed", "like")

    def __init__(self, like: Value, changed: dict[str, Value]) -> None:
        self.like = like
        self.changed = changed


class RepeatedError(Exception):
    """The pickle reads from the memo what is not the same in all items of a form."""


class _Form(NamedTuple):
    """What all items of a form have.

    Attributes:
        pair: The key and the value.
        owners: For each free attribute of the pattern, 0 if the key has it and 1 if the value has it.
        parts: The values that an item puts into the memo, after a text at its start. None for those that differ.
    """

    pair: list[Value]
    owners: list[int]
    parts: list[Value]


class _Pattern(NamedTuple):
    """The opcodes of an item, and the forms of items with these opcodes.

    Attributes:
        spelled: The regular expression for the item, without a text at its start. Each operand is a group.
        text: The opcode of the text at the start, or empty.
        free: The name of each free attribute, and the number of the group with its value. The name is empty for a key
            that is read from the memo.
        match: Matches `spelled`. None until the pattern is compiled.
        fixed: The numbers of the groups of other integers and of other reads from the memo.
        puts: The numbers of the groups of puts with a slot.
        memoized: MEMOIZE for each other put.
        opcodes: The number of opcodes.
        forms: The forms, by the values of the groups `fixed`.
        found: Forms by the bytes of these groups, with the memo slots in the bytes, and their values in the memo.
    """

    spelled: bytes
    text: bytes
    free: tuple[tuple[str, int], ...]
    match: Callable[..., re.Match[bytes] | None] | None
    fixed: list[int]
    puts: list[int]
    memoized: bytes
    opcodes: int
    forms: dict[tuple[Value, ...], _Form]
    found: dict[tuple[bytes, ...], tuple[_Form, tuple[int, ...], tuple[Value, ...]]]


class RepeatMachine(RowMachine):
    """A machine that reads repeated items in one step. `free` contains the names of attributes that may differ.

    :meth:`load` also raises RepeatedError.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], size: int, where: str, offset: int, free: Collection[str]
    ) -> None:
        super().__init__(read, size, where, offset)
        self._free = free
        self._patterns: list[_Pattern] = []  # the last used one comes first
        self._items: list[_Form] = []  # for each element of _starts
        self._steps = 0
        #: By the number of marks: the stack after the last item, its length, and the position.
        self._before: dict[int, tuple[list[Value], int, int]] = {}

    def effect(self, opcode: str, values: list[Value], *kinds: type[Node]) -> None:
        super().effect(opcode, values, *kinds)
        stack, outer = self.stack, self.metastack[-1:]
        if opcode != "BUILD" or len(stack) % 2 or not any(outer) or not isinstance(outer[0][-1], Dict):
            return
        depth = len(self.metastack)
        of, length, start = self._before.get(depth, (None, 0, 0))
        if stack is of and len(stack) == length + 2 and start >= self.base and self._may_try():
            self._learn_item(self.window[start - self.base : self.pos])
        while self._may_try() and any(map(self._read_item, self._patterns)):
            pass
        self._before[depth] = stack, len(stack), self.tell()

    def _may_try(self) -> bool:
        """Return whether attempts to read items have not taken too long for the bytes that were read."""
        return self._steps <= _SPARE + _STEPS * (self.tell() - self.start)

    def _read_rows(self) -> None:
        """Do nothing, because the items are not tensors."""

    def _read_item(self, pattern: _Pattern) -> bool:
        """Read the next item. Return False, without executing anything, if it has no known form of `pattern`."""
        self._steps += len(pattern.spelled)
        start = pos = self.pos
        if pattern.text:
            start += (LONG if pattern.text == LONG.text else SHORT).at
            pos = start + int.from_bytes(self.window[self.pos + 1 : start], "little")
            if self.window[self.pos : self.pos + 1] != pattern.text or pos - start > LIMITS.inline_bytes:
                return False
        match = pattern.match(self.window, pos, self._room()) if pattern.match else None
        if match is None:
            return False
        try:
            text = self.window[start:pos].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return False
        groups = match.groups()
        form = self._form(pattern, tuple([groups[i] for i in pattern.fixed]))
        values = [self._operand(groups[i]) for _, i in pattern.free]
        puts = pattern.memoized or b"".join([groups[i] for i in pattern.puts])
        slots = self._new_slots(SHORT if pattern.memoized else LONG, puts)
        if form is None or not slots or not all(isinstance(value, (int, str)) for value in values):
            return False
        if not self.count(pattern.opcodes):
            return False
        pair = [*form.pair]
        if pattern.text:
            pair[0] = self.memo[slots.start] = text
        for (name, _), owner, value in zip(pattern.free, form.owners, values, strict=True):
            if not name:
                pair[0] = value
                continue
            like = pair[owner]
            if not isinstance(like, Like):
                pair[owner] = like = Like(like, {})
            like.changed[name] = value
        self.stack += pair
        self._starts.append(slots.stop - len(form.parts))
        self._items.append(form)
        self._slots += len(form.parts)
        self._end, self.pos = slots.stop, match.end()
        if pattern is not self._patterns[0]:
            self._patterns.remove(pattern)
            self._patterns.insert(0, pattern)
        return True

    def _form(self, pattern: _Pattern, operands: tuple[bytes, ...]) -> _Form | None:
        """Return the form of an item of `pattern` with the `operands` of the groups ``fixed``, or None."""
        form, slots, values = pattern.found.get(operands, (None, (), ()))
        if form and all(map(is_, map(self.memo.get, slots), values)):
            return form
        form = pattern.forms.get(tuple(map(self._operand, operands)))
        if form and len(pattern.found) < _MOST_FOUND:
            slots = tuple(int.from_bytes(code[1:], "little") for code in operands if code[:1] in b"hj")
            pattern.found[operands] = form, slots, tuple(map(self.memo.get, slots))
        return form

    def _operand(self, code: bytes) -> Value:
        """Return the integer of `code`, or the node or text that it reads from the memo. Otherwise return None."""
        number = int.from_bytes(code[1:], "little", signed=code[:1] == b"J")
        if code[:1] not in b"hj":
            return number
        value = self.memo.get(number)
        value = self._in_row(number) if value is None else value
        return value if isinstance(value, (Node, str)) else None

    def _learn_item(self, code: bytes) -> None:
        """Record the form of the item whose opcodes are `code`, which was just read. Do nothing if it cannot repeat."""
        opcodes: list[tuple[str, bytes, Value]] = []
        at = 0
        while at < len(code) <= _LONGEST:
            found = _OPCODE.match(code, at)
            if found is None or (found.lastgroup == "text" and at):
                return
            start, kind, at = at, found.lastgroup or "", found.end()
            if kind == "text":
                at += int.from_bytes(found[0][1:], "little")
            value = self._operand(found[0]) if kind in ("int", "get") else None
            if kind == "get" and value is None:
                return
            opcodes.append((kind, code[start:at], value))
        kinds = [kind for kind, _, _ in opcodes]
        if "put" not in kinds or (kinds[0] == "text" and kinds[1] != "put"):
            return
        self._steps += _LEARNING * len(code)
        item = _Item(opcodes, self._free)
        machine = PickleMachine(lambda at, n: item.program[at : at + n], len(item.program), self.where, 0)
        machine.memo = item.memo
        with suppress(InputError):
            form = item.form(machine.load(self.dispatch).root)
            pattern = next((each for each in self._patterns if each[:3] == item.pattern[:3]), None)
            if pattern is None and sum(len(each.spelled) for each in (*self._patterns, item.pattern)) <= _MOST:
                pattern = item.pattern._replace(match=re.compile(item.pattern.spelled, re.DOTALL).match)
                self._patterns.append(pattern)
            if form and pattern:
                pattern.forms[tuple(item.values)] = form

    def _in_row(self, slot: int) -> Value:
        i = bisect_right(self._starts, slot) - 1
        if i < 0 or slot - self._starts[i] >= len(parts := self._items[i].parts):
            return None
        if parts[slot - self._starts[i]] is None:
            raise RepeatedError
        return parts[slot - self._starts[i]]

    def _stop(self) -> None:
        raise RepeatedError


class _Item:
    """The opcodes of one item, as a pattern, and as a program that builds it with a mark in place of each free value.

    In the program, the slots of puts are counted from 0, and values from the memo are in the slots after them.

    Args:
        opcodes: For each opcode its kind, its code, and the value of an integer or of a read from the memo.
        names: The names of attributes that may differ.
    """

    def __init__(self, opcodes: list[tuple[str, bytes, Value]], names: Collection[str]) -> None:
        self.program, self.memo = b"", dict[int | str, Value]()
        self.values, self.marks = list[Value](), list[Node]()
        self.puts = 0
        slot = sum(kind == "put" for kind, _, _ in opcodes)
        text = opcodes[0][1][:1] if opcodes[0][0] == "text" else b""
        spelled, memoized, groups = b"", b"", 0
        free, fixed, slots = list[tuple[str, int]](), list[int](), list[int]()
        for i, (kind, code, value) in enumerate(opcodes):
            name = _free_name(opcodes, i, names)
            if kind == "put":
                is_short = code == CODES["MEMOIZE"]
                spelled += code if is_short else b"(r....)"
                memoized += code if is_short else b""
                slots += [] if is_short else [groups]
                groups += not is_short
                code = CODES["LONG_BINPUT"] + self.puts.to_bytes(4, "little")
                self.puts += 1
            elif kind in ("int", "get"):
                spelled += b"(" + (INT if kind == "int" else GET) + b")"
                if name is None:
                    fixed.append(groups)
                    self.values.append(value)
                else:
                    free.append((name, groups))
                    value = Node()
                    self.marks.append(value)
                groups += 1
                if isinstance(value, (Node, str)):
                    self.memo[slot] = value
                    code = CODES["LONG_BINGET"] + slot.to_bytes(4, "little")
                    slot += 1
            elif kind != "text":
                spelled += re.escape(code)
            self.program += code
        self.program += CODES["TUPLE2"] + CODES["STOP"]
        self.pattern = _Pattern(spelled, text, (*free,), None, fixed, slots, memoized, len(opcodes), {}, {})

    def form(self, root: Value) -> _Form | None:
        """Return the form of the item. None if a free value is not that of an attribute, or not the key.

        `root` is the tuple of key and value that the program builds.
        """
        assert isinstance(root, Tuple)
        pair, owners, changed = root.items, list[int](), set[int]()
        if self.pattern.text and not isinstance(pair[0], str):
            return None
        states = [[*node.states()] if isinstance(node, Call) else [] for node in pair]
        for (name, _), mark in zip(self.pattern.free, self.marks, strict=True):
            found = [
                i
                for i, each in enumerate(states)
                for state in each
                if isinstance(state, Dict) and any(key == name and value is mark for key, value in state.entries())
            ]
            if not name and pair[0] is mark:
                found = [0]
            if len(found) != 1:
                return None
            owners += found
            changed |= {id(pair[found[0]]), *map(id, states[found[0]])}
        parts = [self.memo[i] for i in range(self.puts)][bool(self.pattern.text) :]
        return _Form(pair, owners, [None if id(part) in changed else part for part in parts])


def _free_name(opcodes: list[tuple[str, bytes, Value]], i: int, names: Collection[str]) -> str | None:
    """Return the name of the attribute in `names` whose value opcode `i` pushes. Empty for a key, None for others."""
    kind, _, value = opcodes[i]
    if i == 0:
        return "" if isinstance(value, str) else None
    before, is_put = opcodes[i - 1][2], [each[0] for each in opcodes[i + 1 : i + 2]] == ["put"]
    is_free = isinstance(before, str) and before in names and not is_put and (kind == "int" or isinstance(value, str))
    return before if is_free and isinstance(before, str) else None
