"""Random pickles that no pickler writes: with odd spellings, truncated, with wrong frames, and with failing opcodes.

Every global has a unique name, so none is mistaken for another.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

__all__ = ["BY_HAND", "made", "mutated"]


#: Pickles written by hand: some that a pickler could write, and some that no pickler writes.
BY_HAND = {
    "rare": (
        b"(I1\nL2L\nF1.5\nS'a'\nVb\nU\x01cT\x01\0\0\0d\x8a\x01\x05\x8b\x01\0\0\0\x05M\1\1J\1\1\1\1tp0\n0(g0\ng0\nlp1\n."
    ),
    "calls": b"\x80\x02cm\nf\n)Rq\0}q\1(K\1K\2ubh\0\x86.",
    "instances": b"\x80\x02(cm\nC\nK\1o(im\nC\ncm\nC\n)\x81cm\nC\n)}\x92\x87\x86.",
    "popped": b"\x80\x02cm\nf\n)R0(cm\ng\n)R1N.",
    "sets": b"\x80\x04\x8f\x94(K\1K\2\x90(K\1\x91h\0\x87.",
    "extensions": b"\x80\x02\x82\1\x83\1\1\x84\1\1\1\0\x87.",
    "order": b"\x80\x02}q\x000ccollections\nOrderedDict\nh\0\x85Rh\0K\2K\2s\x86.",
    "persistent": b"\x80\x02Pid\nK\1Q\x86.",
    "stack_global": b"\x80\x04\x95\x09\0\0\0\0\0\0\0\x8c\1m\x8c\1f\x93)R.",
    "memo": b"\x80\x02]r\xf0\xff\xff\xff2aj\xf0\xff\xff\xff\x86.",
    "dangerous": b"cos\nsystem\n(S'true'\ntR.",
    "cycle": b"\x80\x02]q\0(h\0}q\1h\1K\1h\0se.",
}
_STOP = b"."
#: Spellings of a number in a line, with and without errors.
_SPELLINGS = (
    b"%d", b"%d", b"%d", b"%d", b" %d", b"%d ", b"\t%d\r", b"+%d", b"-%d", b"%d\0", b"%d\0x", b"%d\0\0 1", b"0%d",
    b"1_%d", b"%d_0", b"00%d", b"%dL", b"%d L", b"\0%d", b"0x%d", b"%d.0", b"%d\x0b\x0c", b"%de0", b"", b"'%d'",
)  # a table  # fmt: skip
_LINES = (b"\n", b"\n", b"\n", b"\n", b"\n", b"\n", b"\n", b"\r\n", b"\0\n", b" \n", b"")
_CODES = (b"\x82\x01", b"\x82\x02", b"\x82\x82", b"\x82\xff", b"\x83\x01\x02", b"\x83\xff\xff", b"\x84\x00\x00\x01\x00",
          b"\x84\xff\xff\xff\x7f", b"\x82\x00", b"\x84\xff\xff\xff\xff", b"\x83\x07\x07")  # a table  # fmt: skip
_ATOMS = (b"N", b"\x88", b"]", b"}", b")", b"\x8f", b"K\x01", b"M\x01\x02", b"J\xff\xff\xff\xff", b"G" + bytes(8),
          b"\x8a\x01\x02", b"\x8a\x00", b"\x8b\x01\x00\x00\x00\x07", b"I01\n", b"I00\n", b"C\x01a", b"\x97",
          b"B\x01\x00\x00\x00a", b"\x8e" + struct.pack("<Q", 1) + b"a", b"\x96" + struct.pack("<Q", 1) + b"a",
          b"\x8b\xff\xff\xff\xff", b"T\xff\xff\xff\xff", b"\x96" + struct.pack("<Q", 1 << 40))  # a table  # fmt: skip
_BIG_SLOTS = (255, 256, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 16, (1 << 32) - 1, 1 << 63, 1 << 64)
#: Opcodes without an operand: the number of objects that each takes from the stack, and those that take a MARK.
_TAKE = {
    b"0": 1, b"2": 1, b"\x85": 1, b"\x86": 2, b"\x87": 3, b"R": 2, b"\x81": 2, b"\x92": 3, b"b": 2, b"a": 2, b"s": 3,
    b"Q": 1, b"\x93": 2, b"\x98": 1,
}  # a table  # fmt: skip
_GIVE = {b"0": 0, b"2": 2, b"b": 1, b"a": 1, b"s": 1}
_TAKE_MARK = (b"1", b"t", b"l", b"d", b"\x91", b"e", b"u", b"\x90", b"o")
_BELOW = (b"e", b"u", b"\x90")  # opcodes that change the object below the MARK
_OPERATIONS = (*_TAKE, b"R", b"R", b"\x93", b"\x93", b"b", b"\x86", b"0", b"2")


class _Pickle:
    """A pickle under construction: its pieces, the number of values above each MARK, and the number of memo slots."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.pieces: list[bytes] = []
        self.heights = [0]
        self.slots = 0
        self.names = 0

    def pick(self, choices: tuple[bytes, ...]) -> bytes:
        return choices[int(self.random.random() * len(choices))]

    def name(self) -> bytes:
        """Return a name that no other global has. A few names are not ASCII, or contain a NUL or a dot."""
        self.names += 1
        odd = self.random.random()
        tail = (
            b""
            if odd < 0.9
            else "é".encode()
            if odd < 0.94
            else b"\xe9"
            if odd < 0.96
            else b"\0"
            if odd < 0.98
            else b"."
        )
        return b"n%d" % self.names + tail

    def push(self) -> bytes:
        """Return an opcode that pushes a value, mostly one that leads to a global."""
        what = self.random.random()
        self.heights[-1] += 1
        if what < 0.3:
            return b"c" + self.name() + self.pick(_LINES) + self.name() + self.pick(_LINES)
        if what < 0.45:
            self.heights[-1] += 1
            return self.text() + self.text()
        if what < 0.5:
            return self.text()
        if what < 0.57:
            return self.pick(_CODES)
        if what < 0.62:
            return b"P" + self.name() + self.pick(_LINES)
        if what < 0.74:
            return self.pick((b"I", b"L", b"F")) + self.digits() + b"\n"
        return self.pick(_ATOMS)

    def text(self) -> bytes:
        text = self.name()
        way = int(self.random.random() * 9)
        if way < 4:
            return self.pick((b"\x8c", b"\x8c", b"\x8c", b"U")) + bytes([len(text)]) + text
        if way < 6:
            return self.pick((b"X", b"X", b"T")) + struct.pack("<I", len(text)) + text
        if way < 7:
            return b"\x8d" + struct.pack("<Q", len(text)) + text
        if way < 8:
            return b"V" + text + b"\n"
        return b"S" + self.pick((b"'%b'", b'"%b"', b"'%b' ", b"'%b\\x41'", b"'%b\"")) % text + b"\n"

    def digits(self, number: int | None = None) -> bytes:
        number = int(self.random.random() * 12) if number is None else number
        spelling = self.pick(_SPELLINGS)
        return spelling % number if b"%" in spelling else spelling

    def memo(self) -> bytes:
        """Return a PUT, or a GET of an existing slot."""
        if self.slots and self.random.random() < 0.6:
            self.heights[-1] += 1
            slot = int(self.random.random() * self.slots)
            way = self.random.random()
            return (
                b"h" + bytes([slot]) if way < 0.4 else b"j" + struct.pack("<I", slot) if way < 0.5
                else b"g" + self.digits(slot) + b"\n"
            )  # fmt: skip
        way = self.random.random()
        if way < 0.03:
            slot = _BIG_SLOTS[int(self.random.random() * len(_BIG_SLOTS))]
            return b"p%d\n" % slot if slot >= 1 << 32 else b"r" + struct.pack("<I", slot)
        self.slots = min(self.slots + 1, 200)
        slot = self.slots - 1
        if way < 0.3:
            return b"\x94"
        return b"q" + bytes([slot]) if way < 0.5 else b"p" + self.digits(slot) + b"\n"

    def operation(self) -> bytes:
        """Return an opcode that takes values from the stack, usually only existing ones."""
        if len(self.heights) > 1 and self.random.random() < 0.35:
            code = self.pick(_TAKE_MARK)
            self.heights.pop()
            self.heights[-1] += code not in _BELOW and code != b"1"
            return code
        code = self.pick(_OPERATIONS)
        if self.heights[-1] < _TAKE[code] and self.random.random() < 0.95:
            return self.push()
        self.heights[-1] = max(0, self.heights[-1] - _TAKE[code]) + _GIVE.get(code, 1)
        return code

    def step(self) -> bytes:
        """Return the next opcode."""
        what = self.random.random()
        if what < 0.4:
            return self.push()
        if what < 0.62:
            return self.operation()
        if what < 0.78 and self.heights[-1]:
            return self.memo()
        if what < 0.86:
            self.heights.append(0)
            return b"("
        if what < 0.9:
            return b"(" + self.push() + b"i" + self.name() + self.pick(_LINES) + self.name() + self.pick(_LINES)
        if what < 0.93:
            return b"\x80" + bytes([int(self.random.random() * 6.1)])
        if what < 0.96:
            return b"0" if self.heights[-1] or len(self.heights) > 1 else b")0"
        if what < 0.98:
            return b"\x95" + struct.pack("<Q", self.pick((b"", b"a", b"abcdefgh" * 4, b"x" * 5000)).__len__())
        return bytes([int(self.random.random() * 256)])


def made(random: Random) -> bytes:
    """Return a pickle of a few opcodes. Most of them are partly readable for one of the readers."""
    pickle = _Pickle(random)
    way = random.random()
    if way < 0.6:
        pickle.pieces.append(b"\x80" + bytes([2 + int(way * 6)]))
    for _ in range(2 + int(random.random() * 14)):
        pickle.pieces.append(pickle.step())
    if random.random() < 0.5:
        pickle.pieces.append(_STOP)
    if random.random() < 0.3:
        _frame(pickle.pieces, random)
    data = b"".join(pickle.pieces)
    return _spoiled(data, random) if random.random() < 0.25 else data


def mutated(data: bytes, random: Random, change: Callable[[bytes], bytes] | None = None) -> bytes:
    """Return `data` with a part of another pickle inserted, or damaged."""
    way = random.random()
    if change and way < 0.2:
        return change(data)
    if way < 0.6:
        at = int(random.random() * (len(data) + 1))
        other = made(random)
        return data[:at] + other[int(random.random() * len(other)) :] + data[at:]
    return _spoiled(data, random)


def _frame(pieces: list[bytes], random: Random) -> None:
    """Add a frame around some of `pieces`, with the correct length or another one."""
    start = int(random.random() * len(pieces))
    end = start + int(random.random() * (len(pieces) - start + 1))
    length = sum(map(len, pieces[start:end])) + random.choice((0, 0, 0, 0, 1, -1, 7, 1 << 20, 1 << 62, (1 << 64) - 1))
    pieces.insert(start, b"\x95" + struct.pack("<Q", max(0, min(length, (1 << 64) - 1))))


def _spoiled(data: bytes, random: Random) -> bytes:
    """Return `data` after one to three damages: bytes inserted, removed or changed, or the end cut off."""
    for _ in range(1 + int(random.random() * 3)):
        at = int(random.random() * (len(data) + 1))
        way = random.random()
        if way < 0.25:
            data = data[:at]
        elif way < 0.5:
            data = data[:at] + random.choice((b"\0", b" ", b"\n", b"_", b"0", b"(", b"1", b"L", b"-", b".")) + data[at:]
        elif way < 0.75:
            data = data[:at] + bytes([int(random.random() * 256)]) + data[at + 1 :]
        else:
            data = data[:at] + data[at + 1 + int(random.random() * 3) :]
    return data
