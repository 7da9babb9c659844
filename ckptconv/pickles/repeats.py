"""Repeated items: items of a dict with the same opcodes as an earlier item, read in columns by regular expressions.

The machine reads the first item of each form, opcode by opcode. Further items of the form may differ in the key, if it
is a text, in the numbers of memo slots, and in the values of a few attributes. Their values are those of the first
item, or :class:`Like` nodes. So the graph describes equal values, but objects that were apart can be the same node.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain, islice, repeat
from typing import NamedTuple

from ckptconv.errors import InputError
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Node, Tuple, Value
from ckptconv.pickles.machine import CODES, PickleMachine
from ckptconv.pickles.rows import GET, INT, INTS, LONG, SHORT, RowMachine

#: An opcode of an item with its operand, or those of a tuple of numbers. Of a text, this is only the length.
_OPCODE = regex(
    rb"(?P<text>X....|\x8c.)|(?P<ints>%b)|(?P<int>K.|M..|J....)|(?P<get>h.|j....)|(?P<put>r....|\x94)"
    rb"|[]})(aetub\x81\x85-\x89NR]" % INTS,
    re.DOTALL,
)
_LONGEST = 8192  # bytes of an item
_MOST = 1 << 16  # characters of all patterns, because compiling them takes time
_AT_ONCE = 4096  # items
#: Steps that the pickle pays for with each byte, and before its first byte. Attempts to read an item take steps for
#: each of its opcodes, and learning one takes more for each byte of the item.
_STEPS, _SPARE, _OF_OPCODE, _LEARNING = 32, 1 << 21, 4, 256


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
        key: The index of the key among the free values of the pattern, or None if all items have the same key.
        changed: For the key and for the value, the names of free attributes, and their indices among the free values.
        parts: The values that an item puts into the memo. None for those that differ.
    """

    pair: list[Value]
    key: int | None
    changed: list[list[tuple[str, int]]]
    parts: list[Value]


class _Pattern(NamedTuple):
    """The opcodes of an item, and the forms of items with these opcodes.

    Attributes:
        spelled: The regular expressions for the opcodes before the first free text, between free texts, and after the
            last one. Each operand is a group. All but the last end with the length of the text.
        free: For each free attribute its name, and the number of the group with its value. For a text, it is the number
            of the text, counted from ``-len(spelled) + 1``. The name is empty for the key.
        fixed: The numbers of the groups of other integers and of other reads from the memo.
        puts: The numbers of the groups of puts with a slot.
        texts: For each free text, the index of its put, or None.
        memoized: MEMOIZE for each other put.
        opcodes: The number of opcodes.
        matches: Match ``spelled``, with the number of bytes of the length after it. Empty until compiled.
        forms: The forms, by the groups `fixed`: the bytes of integers, and the values that are read from the memo.
    """

    spelled: tuple[bytes, ...]
    free: tuple[tuple[str, int], ...]
    fixed: list[int]
    puts: list[int]
    texts: list[int | None]
    memoized: bytes
    opcodes: int
    matches: list[tuple[Callable[..., re.Match[bytes] | None], int]]
    forms: dict[tuple[Value, ...], _Form]


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
        while self._may_try() and any(map(self._read_next, self._patterns)):
            pass
        self._before[depth] = stack, len(stack), self.tell()

    def _may_try(self) -> bool:
        """Return whether attempts to read items have not taken too long for the bytes that were read."""
        return self._steps <= _SPARE + _STEPS * (self.tell() - self.start)

    def _read_rows(self) -> None:
        """Do nothing, because the items are not tensors."""

    def _read_next(self, pattern: _Pattern) -> bool:
        """Read the next items. Return False, without executing anything, if the first has no known form of `pattern`.

        All items are read as columns. If one of them cannot be read, those before it are.
        """
        found, ends = self._match(pattern)
        if not ends:
            return False
        columns = [*zip(*found, strict=True)]
        spelled = [*zip(*map(columns.__getitem__, pattern.fixed), strict=True)] or [()] * len(ends)
        forms = {each: pattern.forms.get(tuple(map(self._fixed, each))) for each in {*spelled}}
        free = [map(_text if i < 0 else self._atom, columns[i]) for _, i in pattern.free]
        items: list[tuple[_Form, tuple[Value, ...]]] = []
        values_of = zip(*free, strict=True) if free else repeat(())
        for form, values in zip(map(forms.__getitem__, spelled), values_of, strict=False):
            if form is None or None in values:
                break
            items.append((form, values))
        n = len(items)
        puts = b"".join(chain.from_iterable(islice(zip(*map(columns.__getitem__, pattern.puts), strict=True), n)))
        slots = self._new_slots(SHORT if pattern.memoized else LONG, pattern.memoized * n or puts) if n else None
        self._at_once = min(2 * self._at_once, _AT_ONCE) if slots and n == len(ends) else 1
        if not slots or not self.count(n * pattern.opcodes):
            return False
        for form, values in items:
            for node, names in zip(form.pair, form.changed, strict=True):
                self.stack.append(Like(node, {name: values[i] for name, i in names}) if names else node)
            if form.key is not None:
                self.stack[-2] = values[form.key]
        size = len(slots) // n
        for (_, i), values in zip(pattern.free, zip(*(values for _, values in items), strict=True), strict=True):
            if i < 0 and (put := pattern.texts[i]) is not None:
                self.memo.update(zip(slots[put::size], values, strict=True))
                self._slots -= n
        self._starts += slots[::size]
        self._items += [form for form, _ in items]
        self._slots += len(slots)
        self._end, self.pos = slots.stop, ends[n - 1]
        if pattern is not self._patterns[0]:
            self._patterns.remove(pattern)
            self._patterns.insert(0, pattern)
        return True

    def _match(self, pattern: _Pattern) -> tuple[list[tuple[bytes, ...]], list[int]]:
        """Return the groups of the next items that match `pattern`, each followed by its texts, and where they end."""
        found, ends = list[tuple[bytes, ...]](), list[int]()
        window, room, at, matches = self.window, self._room(), self.pos, pattern.matches
        while matches and len(ends) < self._at_once:
            groups, texts = list[bytes](), list[bytes]()
            for match, width in matches:
                part = match(window, at, room)
                if part is None:
                    break
                groups += part.groups()
                at = part.end()
                if width:
                    start, at = at, at + int.from_bytes(window[at - width : at], "little")
                    texts.append(window[start:at])
            if part is None:
                break
            found.append((*groups, *texts))
            ends.append(at)
        self._steps += _OF_OPCODE * pattern.opcodes * (len(ends) + 1)
        return found, ends

    def _fixed(self, code: bytes) -> Value:
        """Return the node or text that `code` reads from the memo, or None. If it reads nothing, return `code`."""
        return self._value(code) if code[:1] in b"hj" else code

    def _atom(self, code: bytes) -> Value:
        """Return the integer of `code`, or the text that it reads from the memo. Otherwise return None."""
        if code[:1] not in b"hj":
            return int.from_bytes(code[1:], "little", signed=code[:1] == b"J")
        value = self._value(code)
        return None if isinstance(value, Node) else value

    def _value(self, code: bytes) -> Value:
        """Return the node or text that `code` reads from the memo. Otherwise return None."""
        slot = int.from_bytes(code[1:], "little")
        value = self.memo.get(slot)
        value = self._in_row(slot) if value is None else value
        return value if isinstance(value, (Node, str)) else None

    def _learn_item(self, code: bytes) -> None:
        """Record the form of the item whose opcodes are `code`, which was just read. Do nothing if it cannot repeat."""
        opcodes: list[tuple[str, bytes, Value]] = []
        at = 0
        while at < len(code) <= _LONGEST:
            found = _OPCODE.match(code, at)
            if found is None:
                return
            start, kind, at = at, found.lastgroup or "", found.end()
            if kind == "text" and opcodes and opcodes[-1][2] not in self._free:
                return
            if kind == "text":
                at += int.from_bytes(found[0][1:], "little")
            value = self._value(found[0]) if kind == "get" else None
            if kind == "get" and value is None:
                return
            opcodes.append((kind, code[start:at], value))
        if all(kind != "put" for kind, _, _ in opcodes):
            return
        self._steps += _LEARNING * len(code)
        item = _Item(opcodes, self._free)
        machine = PickleMachine(lambda at, n: item.program[at : at + n], len(item.program), self.where, 0)
        machine.memo = item.memo
        with suppress(InputError):
            form = item.form(machine.load(self.dispatch).root)
            pattern = next((each for each in self._patterns if each[:2] == item.pattern[:2]), None)
            spelled = chain.from_iterable(each.spelled for each in (*self._patterns, item.pattern))
            if form and pattern is None and sum(map(len, spelled)) <= _MOST:
                pattern = item.pattern
                widths = [4 if each.endswith(b"X....") else 1 for each in pattern.spelled[:-1]] + [0]
                matches = (re.compile(each, re.DOTALL).match for each in pattern.spelled)
                pattern.matches.extend(zip(matches, widths, strict=True))
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
        opcodes: For each opcode its kind, its code, and the value of a read from the memo.
        names: The names of attributes that may differ.
    """

    def __init__(self, opcodes: list[tuple[str, bytes, Value]], names: Collection[str]) -> None:
        self.program, self.memo = b"", dict[int | str, Value]()
        self.values, self.marks = list[Value](), list[Node]()
        self.puts = 0
        slot = sum(kind == "put" for kind, _, _ in opcodes)
        spelled, memoized, groups = [b""], b"", 0
        free, fixed, slots, texts = list[tuple[str, int]](), list[int](), list[int](), list[int | None]()
        count = sum(kind == "text" for kind, _, _ in opcodes)
        for i, (kind, code, value) in enumerate(opcodes):
            name = _free_name(opcodes, i, names)
            if name is not None:
                free.append((name, len(texts) - count if kind == "text" else groups))
                value = Node()
                self.marks.append(value)
            if kind == "put":
                is_short = code == CODES["MEMOIZE"]
                spelled[-1] += code if is_short else b"(r....)"
                memoized += code if is_short else b""
                slots += [] if is_short else [groups]
                groups += not is_short
                code = CODES["LONG_BINPUT"] + self.puts.to_bytes(4, "little")
                self.puts += 1
            elif kind == "text":
                spelled[-1] += b"X...." if code.startswith(b"X") else b"\x8c."
                spelled.append(b"")
                texts.append(self.puts if opcodes[i + 1 : i + 2] and opcodes[i + 1][0] == "put" else None)
            elif kind in ("int", "ints", "get"):
                spelled[-1] += b"(" + {"int": INT, "ints": INTS, "get": GET}[kind] + b")"
                if name is None:
                    fixed.append(groups)
                    self.values.append(value if kind == "get" else code)
                groups += 1
            else:
                spelled[-1] += re.escape(code)
            if isinstance(value, (Node, str)):
                self.memo[slot] = value
                code = CODES["LONG_BINGET"] + slot.to_bytes(4, "little")
                slot += 1
            self.program += code
        self.program += CODES["TUPLE2"] + CODES["STOP"]
        self.pattern = _Pattern((*spelled,), (*free,), fixed, slots, texts, memoized, len(opcodes), [], {})

    def form(self, root: Value) -> _Form | None:
        """Return the form of the item. None if a free value is not that of an attribute, or not the key.

        `root` is the tuple of key and value that the program builds.
        """
        assert isinstance(root, Tuple)
        pair, key, changed = root.items, None, set(map(id, self.marks))
        names = list[list[tuple[str, int]]]([[], []])
        states = [[*node.states()] if isinstance(node, Call) else [] for node in pair]
        for i, ((name, _), mark) in enumerate(zip(self.pattern.free, self.marks, strict=True)):
            if not name and pair[0] is mark:
                key = i
                continue
            found = [
                owner
                for owner, each in enumerate(states)
                for state in each
                if isinstance(state, Dict) and any(key == name and value is mark for key, value in state.entries())
            ]
            if len(found) != 1:
                return None
            names[found[0]].append((name, i))
            changed |= {id(pair[found[0]]), *map(id, states[found[0]])}
        parts = [self.memo[i] for i in range(self.puts)]
        return _Form(pair, key, names, [None if id(part) in changed else part for part in parts])


def _text(data: bytes) -> str | None:
    """Return the text `data`. Return None if it is not UTF-8, or too long."""
    with suppress(UnicodeDecodeError):
        return data.decode("utf-8", "surrogatepass") if len(data) <= LIMITS.inline_bytes else None
    return None


def _free_name(opcodes: list[tuple[str, bytes, Value]], i: int, names: Collection[str]) -> str | None:
    """Return the name of the attribute in `names` whose value opcode `i` pushes. Empty for a key, None for others."""
    kind, _, value = opcodes[i]
    if i == 0:
        return "" if kind == "text" or isinstance(value, str) else None
    before, is_put = opcodes[i - 1][2], [each[0] for each in opcodes[i + 1 : i + 2]] == ["put"]
    is_free = kind == "text" or (not is_put and (kind == "int" or isinstance(value, str)))
    return before if is_free and isinstance(before, str) and before in names else None
