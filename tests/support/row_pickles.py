"""Pickles with rows that are made and changed at random, and the graphs that a machine builds of them with and without
rows.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

from ckptconv.checkpoint.storage_ids import change_id
from ckptconv.errors import CkptconvError
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Call, Effect, Graph, Node, PersistentId, Tuple
from ckptconv.pickles.machine import CODES, PickleMachine
from ckptconv.pickles.parser import DISPATCH
from ckptconv.pickles.rows import RowId, RowMachine

__all__ = ["described", "edit", "emitted", "made", "mapping", "read"]

_SHAPES = ((), (4,), (4, 4), (300, 2), (70_000, 1, 1), (2, 2, 2, 2), (-1, 2))
_TAGS = (b"cpu", b"cuda:0", b"cudar", b"privateuseone:1", b"x")


def read(data: bytes, *, rows: bool, most: int | None = None, ahead: int = 4096) -> tuple[Graph | None, str]:
    """Return the graph of `data` and the state of the machine, or None and the error message. The machine stops after
    `most` opcodes, and first reads `ahead` bytes.
    """
    machine = (RowMachine if rows else PickleMachine)(
        lambda offset, length: data[offset : offset + length], len(data), "here", 0
    )
    machine.ahead = ahead
    try:
        return machine.load(DISPATCH, most), str(machine.tell())
    except CkptconvError as error:
        return None, f"{type(error).__name__}: {error}"


def described(graph: Graph | None) -> object:
    """Return everything that `graph` contains, with a number for each node and text, so that shared objects are
    visible.
    """
    if graph is None:
        return None
    numbers: dict[int, int] = {}
    said: list[object] = []
    todo: list[Any] = []

    def name(value: Any) -> object:
        if isinstance(value, list):
            return [name(each) for each in value]
        if not isinstance(value, (Node, Effect, str, bytes)):
            return type(value).__name__, repr(value)
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            todo.append(value)
        return numbers[id(value)]

    lists = "discarded", "calls", "references", "globals", "byte_strings", "extensions", "changed"
    said += [name(graph.root), graph.protocol, graph.opcodes, graph.used]
    said += [name([*getattr(graph, each)]) for each in lists]
    while todo:
        value = todo.pop()
        if isinstance(value, (str, bytes)):
            said.append(value)
            continue
        cls = next((each for each in (Call, PersistentId) if isinstance(value, each)), type(value))
        fields = [each for base in cls.__mro__ for each in getattr(base, "__slots__", ())]
        said.append((cls.__name__, [(each, name(getattr(value, each))) for each in sorted(fields)]))
    return said, sorted(numbers[id(node)] for node in graph.shared if id(node) in numbers), len(graph.shared)


class _Maker:
    """A maker of one random pickle."""

    def __init__(self, random: Random) -> None:
        self.random = random
        protocol = random.choice((2, 2, 2, 2, 3, 3, 4, 4, 5))
        self.short = protocol > 3  # use the opcodes for texts and puts that pickle writes from protocol 4 on
        self.slot = 0 if self.short else random.choice((0, 0, 256, 300, 1 << 20))
        self.out = CODES["PROTO"] + bytes([protocol])
        self.slots: list[int] = []
        self.keys: tuple[int, ...] = (7, 12, 345)  # a text of one character is always the same object
        self.calm = random.choice((1, 40) if self.slot else (40, 400))  # the larger, the fewer irregularities
        self.given_keys: list[int] = []  # the slots of texts that are storage keys of rows
        self.views = random.choice((0, 0, 0.2, 0.6))  # the share of rows that read their storage key from these slots
        self.again = 0 if self.short else random.choice((0, 0, 0, 1 << 22))  # a second slot of the function

    def one_in(self, n: int) -> bool:
        return self.random.randrange(n * self.calm) == 0

    def put(self) -> bytes:
        if self.one_in(60):
            earlier = self.long_put(max(self.slot - 3, 0))
            return self.random.choice((b"", CODES["MEMOIZE"], CODES["BINPUT"] + b"\7", earlier))
        self.slots.append(self.slot)
        self.slot += 1 + (not self.short and self.one_in(60))
        return CODES["MEMOIZE"] if self.short else self.long_put(self.slots[-1])

    def long_put(self, slot: int) -> bytes:
        return CODES["LONG_BINPUT"] + struct.pack("<I", slot) if slot > 255 else CODES["BINPUT"] + bytes([slot])

    def get(self, slot: int | None = None) -> bytes:
        if slot is None or self.one_in(100):
            slot = self.random.choice(self.slots)
        if slot < 256:
            return CODES["BINGET"] + bytes([slot])
        return CODES["LONG_BINGET"] + struct.pack("<I", slot)

    def head(self) -> bytes:
        """Return opcodes for the globals and texts that rows use, whose slots are the first in `slots`.

        Further texts fill the memo, because rows begin after 256 slots.
        """
        self.slots = []
        names = (b"torch._utils\n_rebuild_tensor_v2", b"torch\nFloatStorage", b"collections\nOrderedDict")
        out = b""
        for name in names:
            again = self.long_put(self.again) if self.again and not self.slots else b""
            out += CODES["GLOBAL"] + name + b"\n" + self.put() + again
        out += b"".join(self.text(text) + self.put() for text in (b"storage", b"cpu")) + b"N"
        out += CODES["GLOBAL"] + b"torch._utils\n_rebuild_parameter\n" + self.put()
        while self.slot < 256 and not self.short:
            out += self.text(f"{self.slot:03}".encode()) + self.put()
        self.slots[0] = self.again or self.slots[0]
        return out

    def text(self, text: bytes) -> bytes:
        length = len(text) + (self.one_in(80) and 5)
        if self.short and not self.one_in(80):
            return CODES["SHORT_BINUNICODE"] + bytes([length]) + text
        return CODES["BINUNICODE"] + struct.pack("<I", length) + text

    def number(self, number: int) -> bytes:
        if 0 <= number < 256:
            return CODES["BININT1"] + bytes([number])
        if 0 <= number < 65536 and not self.one_in(9):
            return CODES["BININT2"] + struct.pack("<H", number)
        return CODES["BININT"] + struct.pack("<i", number)

    def numbers(self, numbers: tuple[int, ...]) -> bytes:
        items = b"".join(map(self.number, numbers))
        if not numbers:
            return CODES["EMPTY_TUPLE"]
        if len(numbers) > 3:
            return CODES["MARK"] + items + CODES["TUPLE"] + self.put()
        return items + CODES[f"TUPLE{len(numbers)}"] + self.put()

    def row(self, words: list[int], shape: tuple[int, ...], tag: bytes | None, *, wrapped: bool) -> bytes:
        """Return a row as torch writes it, with irregularities that `put`, `get` and `text` add at random.

        If `wrapped` is true, the tensor is wrapped in a parameter. The pieces are in the order of the memo.
        """
        function, word, cls, cpu, made_by, parameter = words
        key = str(self.random.choice(self.keys)).encode()
        pieces = [self.get(parameter)] if wrapped else []
        pieces += [self.get(function), b"((", self.get(word), self.get(cls), *self.storage_key(key)]
        given = self.slots[-1] if self.one_in(30) else cpu
        pieces += [self.get(given)] if tag is None else [self.text(tag), self.put()]
        pieces += [self.number(16), b"t", self.put(), b"Q", self.number(0), self.numbers(shape), self.numbers(shape)]
        pieces += [*self.flag_and_call(made_by), b"t", self.put(), b"R", self.put()]
        if wrapped != self.one_in(20):
            pieces += [*self.flag_and_call(made_by), b"\x87", self.put(), b"R", self.put()]
        return b"".join(pieces)

    def storage_key(self, key: bytes) -> list[bytes]:
        """Return opcodes that push the storage key: `key` as a new text, or a get of an earlier storage key. In rare
        cases, the get reads the next slot.
        """
        if self.given_keys and self.random.random() < self.views:
            return [self.get(self.random.choice(self.given_keys) + self.one_in(30))]
        self.given_keys.append(self.slot)
        return [self.text(key), self.put()]

    def flag_and_call(self, made_by: int) -> list[bytes]:
        """Return the last items of the arguments of a tensor or a parameter: a flag and a call of `made_by`."""
        flag = CODES["NEWTRUE"] if self.one_in(3) else CODES["NEWFALSE"]
        return [flag, self.get(made_by), b")R", self.put()]

    def between(self) -> bytes:
        """Return opcodes between two rows: a value, a get, an effect, or a new object in a slot that rows use."""
        if self.short and self.one_in(4):
            self.slots.append(self.slot)
            self.slot += 1
            return b"N\x94"
        ways = (b"", b"", b"N", self.get(), b"}b", b"0N", b"\x94", b"K\1", b"2", self.text(b"layer") + self.put())
        if self.one_in(10):
            return self.text(b"cpu") + self.long_put(self.random.choice(self.slots[:5])) + b"0"
        if self.one_in(20) and not self.short:
            self.slot -= self.random.choice((8, 9, 20))
        if self.one_in(20):
            return b"K\1" + self.long_put(self.slot + 3)
        return self.random.choice(ways)

    def key(self, keys: list[int]) -> bytes:
        """Return opcodes that push the key of an item: a new text, which can look like opcodes, or a get of one of
        `keys`.
        """
        if keys and self.one_in(4):
            return self.get(self.random.choice(keys))
        text = self.random.choice((b"wb"[self.one_in(9) :], b"layers.1.weight", b"r\1\2\0\0h\2((", b"\xc3\xa9!"))
        text += b"\xff" if self.one_in(60) else b""
        keys.append(self.slot)
        return self.text(text) + self.put()


def emitted(graph: Graph, data: bytes, tag: str | None = None, *, splice: bool) -> bytes:
    """Return the pickle of `graph`, which was read from `data`. If `tag` is given, it replaces the tag of all
    references.
    """
    for reference in graph.references if tag else ():
        if isinstance(reference, RowId) and reference.form:
            reference.tag = tag or ""
        elif isinstance(reference.id, Tuple) and len(reference.id.items) == 5:
            reference.id = Tuple([*reference.id.items[:3], tag, reference.id.items[4]])
    pieces = emit(graph, loadable=False, splice=splice)
    return b"".join(each if isinstance(each, bytes) else data[each.offset :][: each.length] for each in pieces)


def made(random: Random) -> bytes:
    """Return a random pickle with some rows in a list or a mapping. Most of the rows are regular."""
    maker = _Maker(random)
    is_list, keys, wrapped = random.random() < 0.5, list[int](), random.choice((0, 0, 0.5, 1))
    out = maker.out + (b"]" if is_list else b"}") + (maker.put() if maker.slot == 0 else b"") + b"("
    out += maker.head()
    if len(maker.slots) < 6:
        return out
    function, cls, made_by, word, cpu, parameter = maker.slots[:6]
    shapes = random.choices(_SHAPES, k=2)
    tags = random.choices((*[None] * 9, *_TAGS), k=2)
    for _ in range(random.randrange(1, 9) if is_list else random.randrange(1, 30)):
        words = [function, word, cls, cpu, made_by, parameter]
        if maker.one_in(20 if is_list else 60):
            random.shuffle(words)
        out += b"" if is_list else maker.key(keys)
        is_wrapped = random.random() < wrapped
        out += maker.row(words, random.choice(shapes), random.choice(tags), wrapped=is_wrapped)
        out += maker.between() if is_list or maker.one_in(30) else b""
    out += (b"e" if is_list else b"u") + b"".join(maker.get() for _ in range(3)) + b"\x87\x86."
    if random.random() < (0.3 if maker.short else 0.1):
        out = _framed(out, random)
    if random.random() < 0.3:
        changed = bytearray(out)
        for _ in range(random.choice((1, 1, 2))):
            changed[random.randrange(len(changed))] = random.choice((random.randrange(256), *b"rhjXK)tRQ("))
        out = bytes(changed)
    return out


def _framed(data: bytes, random: Random) -> bytes:
    """Return the pickle `data` with random parts in frames. Most frames contain complete opcodes."""
    ends: Sequence[int] = range(2, len(data) + 1)
    with suppress(ValueError):
        ends = [at for _, _, at in pickletools.genops(data) if at is not None and at > 1] + [len(data)]
    if random.random() < 0.1:
        ends = range(2, len(data) + 1)
    cuts = sorted({2, len(data), *random.choices(ends, k=random.randrange(5))})
    pieces = [data[a:b] for a, b in pairwise(cuts)]
    framed = [CODES["FRAME"] + struct.pack("<Q", len(each)) + each for each in pieces]
    return data[:2] + b"".join(map(random.choice, zip(framed, framed, framed, pieces, strict=True)))


def mapping(
    keys: Sequence[int], tag: int = 4, again: int = 0, wrapped: Sequence[bool] = (False,), *, views: bool = False
) -> bytes:
    """Return a regular pickle of a tuple: the globals and texts of rows, a row, and the items of a mapping.

    `keys` are the storage keys of the rows. `tag` is the index of the location tag in the slots of the head. `again` is
    the second slot of the function. `wrapped` determines in turn which rows are wrapped in parameters. If `views` is
    true, all rows except the first read their storage key from the text of the first.
    """
    maker = _Maker(Random(5))
    maker.slot, maker.calm, maker.again, maker.short, maker.views = 0, 1 << 40, again, False, views
    out = CODES["PROTO"] + b"\2(" + maker.head()
    function, cls, made_by, word, _, parameter = maker.slots[:6]
    for i, key in enumerate(keys):
        maker.keys = (key,)
        out += maker.key([]) if i else b""
        words = [function, word, cls, maker.slots[tag], made_by, parameter]
        out += maker.row(words, (4,), None, wrapped=wrapped[i % len(wrapped)])
    return out + b"t."


def edit(graph: Graph, random: Random) -> None:
    """Apply a random edit to the `graph` of a pickle of :func:`mapping`. Equal states of `random` lead to equal
    edits.
    """
    assert isinstance(graph.root, Tuple)
    values = graph.root.items
    way, at, other = random.randrange(7), random.randrange(-24, 0), random.randrange(-12, 0)
    row, reference = values[2 * other + 1], graph.references[other]
    if way == 0:
        graph.shared.add(reference)
    elif way == 1:  # swaps two texts or two rows
        at = 2 * other + at % 2
        values[at], values[-2 + at % 2] = values[-2 + at % 2], values[at]
    elif way == 2:
        values[at] = Tuple([values[at], 5])
    elif way == 3:
        values[at] = values[other]
    elif way == 4:
        del values[at]
    elif way == 5 and isinstance(row, Call):
        row.order = random.choice((None, 1000))
    elif way == 6:
        change_id(reference, key="98")
