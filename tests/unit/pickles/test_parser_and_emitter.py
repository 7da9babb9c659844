"""The graph of a pickle, parsed and emitted: it keeps every effect in its order, on operands with the same identity.

Hostile pickles are read at low cost and end in typed errors.
"""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from torch import _weights_only_unpickler as safe

import ckptconv.pickles.machine
from ckptconv.checkpoint.safe_globals import ALLOWED
from ckptconv.checkpoint.weights_only.unpickler import can_be_made_loadable, obstacles
from ckptconv.errors import CkptconvError, LimitError, MalformedError, UnsupportedError
from ckptconv.limits import LIMITS, Limits
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Blob, Dict, Global, Graph, imported_name, set_items, walk
from ckptconv.pickles.machine import CODES
from ckptconv.pickles.parser import parse
from tests.support.judge import assert_same
from tests.support.memory import memory_below
from tests.support.reference_machine import trace
from tests.support.sampled import sampled


def graph_of(data: bytes) -> Graph:
    return parse(lambda offset, length: data[offset : offset + length], len(data), where="here")[0]


def written(data: bytes, *, loadable: bool = False) -> bytes:
    """Parse `data`, emit the graph, and return the result."""
    pieces = emit(graph_of(data), loadable=loadable)
    return b"".join(p if isinstance(p, bytes) else data[p.offset : p.offset + p.length] for p in pieces)


P2, P4 = b"\x80\x02", b"\x80\x04"


def test_opcodes_are_those_of_pickletools() -> None:
    """The table contains exactly the opcodes of protocols 0 to 5."""
    assert {name: code.decode("latin-1") for name, code in CODES.items()} == {
        op.name: op.code for op in pickletools.opcodes
    }


# Streams


PUSHES = [
    (b"N", "atom"),
    (b"\x88", "atom"),
    (b"\x89", "atom"),
    (b"I01\n", "atom"),
    (b"I-7\n", "atom"),
    (b"L9L\n", "atom"),
    (b"L-123456789012\n", "atom"),
    (b"J\xff\xff\xff\x80", "atom"),
    (b"K\x05", "atom"),
    (b"M\x05\x01", "atom"),
    (b"\x8a\x00", "atom"),
    (b"\x8a\x02\xff\x00", "atom"),
    (b"\x8b\x01\x00\x00\x00\xff", "atom"),
    (b"F-1.5e3\n", "atom"),
    (b"Fnan\n", "atom"),
    (b"G\x7f\xf0\x00\x00\x00\x00\x00\x01", "atom"),
    (b"G\x80\x00\x00\x00\x00\x00\x00\x00", "atom"),
    (b"S'a\\x00b'\n", "atom"),
    (b"T\x02\x00\x00\x00\xffz", "atom"),
    (b"U\x02zz", "atom"),
    (b"Vab\\u1234\n", "text"),
    (b"\x8c\x02ab", "text"),
    (b"X\x03\x00\x00\x00\xed\xa0\x80", "text"),
    (b"X\x00\x00\x00\x00", "text"),
    (b"\x8d\x02\x00\x00\x00\x00\x00\x00\x00n\n", "text"),
    (b"C\x02bb", "atom"),
    (b"B\x03\x00\x00\x00bbb", "atom"),
    (b"\x8e\x02\x00\x00\x00\x00\x00\x00\x00bb", "atom"),
    (b"\x96\x02\x00\x00\x00\x00\x00\x00\x00bb", "atom"),
    (b"Pid\n", "atom"),
    (b")", "tuple"),
    (b"]", "list"),
    (b"}", "dict"),
    (b"\x8f", "set"),
    (b"]q\x00", "list"),
    (b"}q\x01", "dict"),
    (b"\x8fq\x02", "set"),
    (b"cm\nf\n", "global"),
    (b"ccommands\ngetoutput\n", "global"),
    (b"\x8c\x01m\x8c\x03a.b\x93", "global"),
    (b"\x82\x05", "global"),
    (b"\x83\x00\x01", "global"),
    (b"\x84\x00\x00\x01\x00", "global"),
    (b"cm\nf\n)R", "made"),
    (b"cm\nf\n)Rq\x03", "made"),
    (b"cm\nC\n)\x81q\x03", "made"),
    (b"cm\nf\nN\x85", "global tuple"),
    (b"cm\nf\ncm\ng\n)R", "global made"),
    (b"cm\nf\ncm\ng\n)RR", "made"),
]
SLOTS = (0, 1, 2, 3, 300, (1 << 32) - 16)
KINDS_IN_SLOTS = ("list", "dict", "set", "made")
CALLABLE, ARGUMENTS = ("global", "made"), ("tuple", "made")


def steps(stack: list[list[str]], memo: dict[int, str]) -> Iterator[tuple[bytes, Callable[[], None]]]:
    """Yield the possible next opcodes, each with a function that applies it to the kinds on the `stack`, which has a
    list for each MARK.
    """
    s = stack[-1]
    marked = len(stack) > 1
    below = stack[-2][-1] if marked and stack[-2] else ""

    def put(slot: int) -> Callable[[], None]:
        return lambda: memo.update({slot: s[-1]})

    def take(n: int, kind: str = "") -> Callable[[], None]:
        return lambda: s.__setitem__(slice(len(s) - n, None), [kind] if kind else [])

    def close(kind: str = "") -> Callable[[], None]:
        return lambda: (stack.pop(), stack[-1].extend([kind] if kind else []))[0]  # type: ignore[func-returns-value]

    yield b"(", lambda: stack.append([])
    for slot, kind in memo.items():
        yield (
            (b"h" + bytes([slot]) if slot < 256 else b"j" + slot.to_bytes(4, "little")),
            lambda kind=kind: s.append(kind),
        )  # type: ignore[misc]
        yield b"g%d\n" % slot, lambda kind=kind: s.append(kind)  # type: ignore[misc]
    if s:
        yield b"0", take(1)
        yield b"2", lambda: s.append(s[-1])
        yield b"\x85", take(1, "tuple")
        yield b"Q", take(1, "atom")
        yield b"\x94", put(len(memo))
        for slot in SLOTS:
            yield b"r" + slot.to_bytes(4, "little"), put(slot)
            yield b"p%d\n" % slot, put(slot)
    elif marked:
        yield b"0", close()
    if len(s) > 1:
        yield b"\x86", take(2, "tuple")
        if s[-2] in ("list", "made"):
            yield b"a", take(1)
        if s[-2] == "made":
            yield b"b", take(1)
        if s[-2] in CALLABLE and s[-1] in ARGUMENTS:
            yield b"R", take(2, "made")
            yield b"\x81", take(2, "made")
        if s[-2:] == ["text", "text"]:
            yield b"\x93", take(2, "global")
    if len(s) > 2:
        yield b"\x87", take(3, "tuple")
        if s[-3] in ("dict", "made"):
            yield b"s", take(2)
        if s[-3] in CALLABLE and s[-2] in ARGUMENTS and s[-1] == "dict":
            yield b"\x92", take(3, "made")
    if marked:
        yield b"1", close()
        yield b"t", close("tuple")
        yield b"l", close("list")
        yield b"\x91", close("atom")
        yield b"im\nC\n", close("made")
        if s and s[0] in CALLABLE:
            yield b"o", close("made")
        if len(s) % 2 == 0:
            yield b"d", close("dict")
            if below in ("dict", "made"):
                yield b"u", close()
        if below in ("list", "made"):
            yield b"e", close()
        if below in ("set", "made"):
            yield b"\x90", close()


@st.composite
def programs(draw: Callable[..., Any]) -> bytes:
    """Return a valid pickle of random opcodes."""
    out = bytearray()
    stack: list[list[str]] = [[]]
    memo = dict(enumerate(KINDS_IN_SLOTS))
    out += b"]q\x000}q\x010\x8fq\x020cm\nf\n)Rq\x030"
    for _ in range(draw(st.integers(0, 50))):
        if draw(st.integers(0, 2)) == 0:
            code, kind = draw(st.sampled_from(PUSHES))
            stack[-1] += kind.split()
            if code[-2:-1] == b"q":
                memo[code[-1]] = kind
            out += code
        else:
            code, apply = draw(st.sampled_from(list(steps(stack, memo))))
            apply()
            out += code
    while len(stack) > 1:
        out += b"t"
        stack[-2:] = [[*stack[-2], "tuple"]]
    out += b"N" + b"\x86" * len(stack[0]) + b"."
    protocol = draw(st.integers(0, 5))
    if protocol > 3 and draw(st.booleans()):
        out = b"\x95" + len(out).to_bytes(8, "little") + out
    return (b"\x80" + bytes([protocol]) if protocol > 1 else b"") + bytes(out)


@given(programs())
def test_any_program_does_the_same_things_in_the_same_order(data: bytes) -> None:
    """A random valid program has the same effects in the same order after it is parsed and emitted: calls, BUILD,
    items, members and persistent ids, with the same operands.
    """
    again = written(data)
    assert trace(again) == trace(data)
    assert trace(written(again)) == trace(data)


@pytest.mark.parametrize(
    "data",
    [
        P2 + b"r\xf0\xff\xff\xff".join((b"N", b"j\xf0\xff\xff\xff\x86.")),
        b"I01\n.",
        b"I00\n.",
        b"I5\n.",
        b"L5L\n.",
        b"L5\n.",
        b"F1.5\n.",
        b"S'a\\'b'\n.",
        b'S"a"\n.',
        b"Va\\u1234\n.",
        b"(lp0\n.",
        b"(dp0\n.",
        b"(I1\nI2\nd.",
        b"(I1\nI2\nl.",
        b"(I1\ntp1\n0g1\n.",
        b"(I1\nim\nC\n.",
        b"Pabc\n.",
        P2 + b"T\x2c\x01\x00\x00" + b"s" * 300 + b".",
        P2 + b"(NN1N.",
        P2 + b"(0N.",
        P2 + b"\x8a\x00.",
        P2 + b"\x8b\x00\x00\x00\x00.",
        P4 + b"\x8fq\x00(K\x01\x90.",
        P4 + b"(K\x01\x91.",
        P4 + b"\x8c\x01m\x8c\x03a.b\x93.",
        P4 + b"\x8c\x03m\nn\x8c\x01f\x93.",
        P4 + b"\x8d\x01\x00\x00\x00\x00\x00\x00\x00a.",
        P4 + b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.",
        P4 + b"cm\nC\n)}\x92.",
        P4 + b"\x95\x02\x00\x00\x00\x00\x00\x00\x00N.",
        P4 + b"B\x2c\x01\x00\x00" + b"b" * 300 + b".",
        P4 + b"]\x942h\x00\x87.",
        P4 + b"cm\nC\n)Rq\x000h\x00h\x00\x86.",
    ],
)
def test_rare_opcodes(data: bytes) -> None:
    """Rare opcodes and those of old protocols are emitted with the same effects."""
    assert trace(written(data)) == trace(data)


D, L, F = b"}q\x000", b"]q\x000", b"cm\nf\n"
ORDERS = {
    "a dict read, then changed": D + F + b"h\x00\x85Rh\x00K\x01K\x02s\x86.",
    "a dict changed, then read": D + F + b"h\x00K\x01K\x02s\x85Rh\x00\x86.",
    "a dict changed, read, and changed": D + b"h\x00K\x01K\x02s0" + F + b"h\x00\x85Rh\x00K\x03K\x04s\x86.",
    "a list read, then changed": L + F + b"h\x00\x85Rh\x00K\x01a\x86.",
    "a list changed between two reads": L + F + b"h\x00\x85R0h\x00K\x01a0" + F + b"h\x00\x85R.",
    "state changed after BUILD": D + F + b")Rh\x00bh\x00K\x01K\x02s\x86.",
    "a set read, then changed": b"\x8fq\x000" + F + b"h\x00\x85Rh\x00(K\x01\x90\x86.",
    "a set of an object, then the object's state": F + b")Rq\x000(h\x00\x91h\x00}b\x86.",
    "a persistent id of a list that grows": L + b"h\x00Qh\x00K\x01a\x86.",
    "a frozenset made before its member's state": F + b")Rq\x000(h\x00\x91q\x010h\x00Nbh\x01\x86.",
    "a persistent id used twice": b"NQ2\x86.",
    "a persistent id used again from the memo": b"NQq\x00h\x00\x86.",
    "arguments that a call makes, with state set before and after": F + F + b")Rq\x00Nbq\x00Rh\x00K\x01b\x86.",
    "a dict that gets what a call made of it": D + F + b"h\x00\x85Rq\x01h\x00K\x01h\x01s\x86.",
    "a list that gets what a call made of it": L + F + b"h\x00\x85Rq\x01h\x00h\x01a\x86.",
    "a list changed, read, and changed": L + b"h\x00K\x01a0" + F + b"h\x00\x85Rh\x00K\x02a\x86.",
    "a call whose result is discarded": F + b"(K\x01tR0" + F + b")R.",
    "keyword arguments that grow": D + F + b")h\x00\x92h\x00\x8c\x01aNs\x86.",
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_changes_and_reads_keep_their_order(name: str, protocol: int) -> None:
    """A read between two changes is emitted between them, although writing depth first would apply both changes before
    it.
    """
    data = b"\x80" + bytes([protocol]) + ORDERS[name]
    assert trace(written(data)) == trace(data)


def test_object_that_an_edit_uses_earlier_is_created_once() -> None:
    """An edit can refer to an object before its position in the source. The object is still created only once."""
    called = b"ccollections\nOrderedDict\n)R"
    graph = graph_of(P2 + called + b"0}K\x01K\x01sX\x01\x00\x00\x00a" + called + b"s.")
    assert graph.discarded and isinstance(graph.root, Dict)
    _, (_, value) = graph.root.entries()
    set_items(graph.root, ["b", value])
    loaded = pickle.loads(b"".join(part for part in emit(graph, loadable=False) if isinstance(part, bytes)))
    assert loaded["a"] is loaded["b"]


def test_an_ordereddict_made_of_a_dict_that_grows_afterwards() -> None:
    """A copy keeps one item if its dict gets a second item after the copy."""
    data = b"\x80\x02}q\x00K\x01K\x01s0ccollections\nOrderedDict\nh\x00\x85Rh\x00K\x02K\x02s\x86."
    assert pickle.loads(written(data)) == ({1: 1}, {1: 1, 2: 2}) == pickle.loads(data)


# Bytes


def test_emitting_is_a_fixed_point() -> None:
    """An emitted pickle is emitted again with the same bytes. So is a pickle from the C pickler with protocol 2, which
    torch uses.
    """
    keyed = Plain()
    keyed.state = {1: "y"}  # type: ignore[attr-defined]
    for obj in (
        {"a": [1, "b", (2.5, None)], "c": "b" * 40},
        [keyed] * 3,
        list(range(3000)),
        {str(i): i for i in range(2000)},
    ):
        data = pickle.dumps(obj, 2)
        assert written(data) == data
        newer = written(pickle.dumps(obj, 4))
        assert written(newer) == newer


@pytest.mark.parametrize("bits", [0x7FF8000000000102, 0xFFF8000000000001, 0x7FF0000000000001, 0x8000000000000000])
def test_floats_keep_their_bits(bits: int) -> None:
    """The payloads of NaN, signaling NaN, and the sign of zero are kept."""
    data = P2 + b"G" + bits.to_bytes(8, "big") + b"."
    assert written(data) == data


@pytest.mark.parametrize(
    ("code", "opcode"),
    [
        (1, b"\x82\x01"),
        (255, b"\x82\xff"),
        (256, b"\x83\x00\x01"),
        (65535, b"\x83\xff\xff"),
        (65536, b"\x84\x00\x00\x01\x00"),
        ((1 << 31) - 1, b"\x84\xff\xff\xff\x7f"),
    ],
)
def test_an_extension_keeps_its_number(code: int, opcode: bytes) -> None:
    """An extension code is emitted in the shortest opcode, without a lookup in the registry."""
    assert written(P2 + b"\x84" + code.to_bytes(4, "little") + b".") == P2 + opcode + b"."


class Naming(pickle.Unpickler):
    """An unpickler in C that returns the module and the name of a global instead of importing it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the names."""
        return module, name


@pytest.mark.parametrize(
    ("module", "name"), [("", "x"), ("m", ""), ("", ""), ("m", "x"), ("a\nb", "x"), ("m", "\udc80"), ("m", "x\r")]
)
def test_any_names_of_a_global_are_read_again(module: str, name: str) -> None:
    """C's unpickler reads any emitted global. It reads no GLOBAL with an empty line, and Python's pickler
    writes none.
    """
    texts = [text.encode("utf-8", "surrogatepass") for text in (module, name)]
    data = P4 + b"".join(b"X" + len(text).to_bytes(4, "little") + text for text in texts) + b"\x93."
    assert Naming(io.BytesIO(written(data))).load() == (module, name)
    if "\n" not in module and name.isprintable():
        assert Naming(io.BytesIO(written(b"c%s\n%s\n." % (*texts,)))).load() == (module, name)


def test_long_values_stay_in_the_file() -> None:
    """Texts and bytes longer than the limit are ranges of the source, and are emitted without changes."""
    n = LIMITS.inline_bytes + 1
    for obj, kind in (("é" * n, "str"), (b"\xff" * n, "bytes"), (bytearray(b"z" * n), "bytearray")):
        data = pickle.dumps([obj, obj, 1], 5)
        parts = emit(graph_of(data), loadable=False)
        assert [part.kind for part in parts if isinstance(part, Blob)] == [kind]
        assert pickle.loads(written(data)) == [obj, obj, 1]
    data = P2 + b"T" + n.to_bytes(4, "little") + b"s" * n + b"."
    assert written(data) == P2 + b"T" + n.to_bytes(4, "little") + b"s" * n + b"q\x00."


def test_a_pickle_between_other_bytes() -> None:
    """A pickle can start at an offset and be followed by other bytes. Ranges are positions in the file."""
    text = "a" * (LIMITS.inline_bytes + 1)
    data = pickle.dumps([text, 1], 4)
    file = b"..." + data + b"N."
    graph, end = parse(lambda offset, length: file[offset : offset + length], len(file), where="here", offset=3)
    assert end == 3 + len(data)
    (blob,) = (node for node in walk([graph.root]) if isinstance(node, Blob))
    assert file[blob.offset : blob.offset + blob.length] == text.encode()


# Objects


class Plain:
    """An object with a state."""


class Slots:
    """An object whose state is a pair."""

    __slots__ = ("one", "two")

    def __getstate__(self) -> Any:  # protocols 0 and 1 have no such state
        return None, {name: getattr(self, name) for name in self.__slots__ if hasattr(self, name)}


class Rows(list):  # type: ignore[type-arg]
    """A list with attributes."""


class Table(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


class Members(set):  # type: ignore[type-arg]
    """A set with attributes, which a call makes."""


class Keywords:
    """An object made with keyword arguments."""

    def __getnewargs_ex__(self) -> Any:
        return (1, ["a"]), {"name": "value"}

    def __new__(cls, *args: Any, **kwargs: Any) -> Keywords:
        return super().__new__(cls)


def set_state(obj: Any, state: Any) -> None:
    obj.__dict__.update(state)


class Pair(NamedTuple):
    """A tuple that a call makes."""

    one: Any
    two: Any


class Spread:
    """An object made with a named tuple as its arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return Spread, Pair(*self.args)


class SpreadKeywords:
    """An object made by NEWOBJ_EX, with a named tuple as its arguments."""

    def __getnewargs_ex__(self) -> Any:
        return Pair(*self.args), {"name": "value"}

    def __new__(cls, *args: Any, name: str = "") -> SpreadKeywords:
        made = super().__new__(cls)
        made.args = args
        return made


class Setter:
    """An object whose state is set by a call whose result pickle discards."""

    def __reduce__(self) -> Any:
        return Setter, (), self.__dict__, None, None, set_state


class Numbered:
    """A class with a number in copyreg's registry."""


class Named:
    """An object that is pickled as a global."""

    def __reduce__(self) -> str:
        return "NAMED"


NAMED = Named()
NAMES = st.sampled_from([NAMED, len, Plain, 1j])
CLASSES = (Plain, Slots, Rows, Table, Members, Keywords, Setter, Numbered)
LEAVES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0.0,
            -0.0,
            float("inf"),
            "",
            "a",
            "a\ud800\0",
            "x" * 300,
            b"",
            b"\x00\xff",
            b"b" * 300,
            1 << 3000,
            -(1 << 31),
            1 << 31,
            (),
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.integers(0, (1 << 64) - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0]),
)


@pytest.fixture(scope="module", autouse=True)
def extension() -> Iterator[None]:
    """Add a class to copyreg's registry."""
    copyreg.add_extension(__name__, "Numbered", 70_000)
    yield
    copyreg.remove_extension(__name__, "Numbered", 70_000)


def fill(draw: Callable[..., Any], thing: Any, pool: list[Any]) -> None:
    """Put objects of the `pool`, which contains `thing`, into `thing`."""
    some = draw(st.lists(st.sampled_from(pool), max_size=3))
    hashable = [x for x in some if isinstance(x, (Plain, str, bytes, int, Keywords))]
    if isinstance(thing, list):
        thing.extend(some)
    elif isinstance(thing, dict):
        thing.update((key, draw(st.sampled_from(pool))) for key in hashable)
    elif isinstance(thing, set):
        thing.update(hashable)
    if type(thing) in CLASSES and some:
        thing.one = some[0]
        thing.two = some


@st.composite
def objects(draw: Callable[..., Any], leaves: st.SearchStrategy[Any], classes: tuple[type, ...]) -> Any:
    """Return a random graph of objects with sharing and cycles."""
    pool = draw(st.lists(leaves, min_size=1, max_size=6))
    for make in draw(st.lists(st.sampled_from((list, dict, set, *classes)), max_size=8)):
        pool.append(make())
    for thing in list(pool):
        fill(draw, thing, pool)
    for make in draw(st.lists(st.sampled_from((list, tuple, frozenset, dict)), min_size=1, max_size=4)):
        some = draw(st.lists(st.sampled_from(pool), max_size=5))
        if make is frozenset:
            some = [x for x in some if isinstance(x, (Plain, str, bytes, int))]
        pool.append(dict(enumerate(some)) if make is dict else make(some))
        fill(draw, pool[draw(st.integers(0, len(pool) - 1))], pool)
    return pool[-1]


RING: list[Any] = []
RING.append((RING, frozenset({"a"})))
HOLDER = Plain()
HOLDER.members = {HOLDER}  # type: ignore[attr-defined]


@pytest.mark.untraced
@example(RING[0], 2)
@example(RING, 4)
@example(HOLDER, 2)
@example(HOLDER.members, 4)  # type: ignore[attr-defined]
@given(objects(st.one_of(LEAVES, NAMES), CLASSES), st.integers(0, 5))
def test_any_objects_keep_their_effects(obj: Any, protocol: int) -> None:
    """Objects of any kind, shared and cyclic, have the same effects in the same order in every protocol."""
    try:
        data = pickle.dumps(obj, protocol)
    except RecursionError:  # a cycle through the arguments of a call, which pickle cannot write
        reject()
    assert trace(written(data)) == trace(data)


@pytest.mark.parametrize(
    ("cls", "protocol"), [*((Spread, protocol) for protocol in range(6)), (SpreadKeywords, 4), (SpreadKeywords, 5)]
)
def test_arguments_can_be_what_a_call_makes(cls: type, protocol: int) -> None:
    """A named tuple as the arguments of a call is kept, because pickle accepts it. Its globals are listed."""
    data = pickle.dumps([cls([1], "two")] * 2, protocol)
    again = written(data)
    assert trace(again) == trace(data)
    first, second = pickle.loads(again)
    assert first is second and type(first) is cls and first.args == ([1], "two")
    graph = graph_of(data)
    assert f"{__name__}.Pair" in map(str, graph.globals)
    assert f"{__name__}.Pair" in [str(node) for node in walk([graph.root]) if isinstance(node, Global)]


def test_arguments_that_torch_makes_are_loadable() -> None:
    """torch's unpickler accepts the result of another call as arguments. If that call is not allowed, it is an
    obstacle.
    """
    data = P4 + b"cbuiltins\ncomplex\nctorch\nSize\nK\x01K\x02\x86\x85RR."
    graph = graph_of(data)
    assert can_be_made_loadable(graph_of(pickle.dumps([torch.Size([1])], 4)))
    assert list(obstacles(graph)) == []
    assert safe.load(io.BytesIO(written(data, loadable=True)), encoding="utf-8") == 1 + 2j
    assert [str(node) for _, node in obstacles(graph_of(data.replace(b"ctorch\nSize", b"cposix\nSize")))] == [
        "posix.Size"
    ]


@example([{1, "a"}, {"key": {b"b"}}, bytearray(b"c")], 5)
@given(objects(LEAVES, (collections.OrderedDict,)), st.integers(0, 5))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # torch warns about every protocol except 2
def test_output_without_obstacles_loads_with_weights_only(obj: Any, protocol: int) -> None:
    """A pickle without obstacles is emitted so that torch's ``weights_only`` unpickler reads it, with the result that
    pickle gives for the source.
    """
    data = pickle.dumps(obj, protocol)
    graph = graph_of(data)
    if next(obstacles(graph), None) is not None:
        return
    out = written(data, loadable=can_be_made_loadable(graph))
    if CODES["POP"][0] not in graph_of(out).used:  # a cycle through a tuple needs this opcode
        assert_same(safe.load(io.BytesIO(out), encoding="utf-8"), pickle.loads(data))


def test_no_allowed_name_is_one_of_python_2() -> None:
    """With the header of protocol 2, which loadable pickles get, every allowed name keeps its meaning."""
    for name in ALLOWED:
        assert imported_name(Global(*name.rsplit(".", 1)), 2) == name


# Hostile pickles


MALFORMED = {
    "SETITEM on a list": (P2 + b"]K\x01K\x02s.", "SETITEM on a value that cannot take it"),
    "SETITEMS on a list": (P2 + b"](K\x01K\x02u.", "SETITEMS on a value that cannot take it"),
    "SETITEMS with a key alone": (P2 + b"}(K\x01u.", "a key without a value"),
    "APPEND on a dict": (P2 + b"}K\x01a.", "APPEND on a value that cannot take it"),
    "APPENDS on a tuple": (P2 + b")(K\x01e.", "APPENDS on a value that cannot take it"),
    "ADDITEMS on a list": (P4 + b"](K\x01\x90.", "ADDITEMS on a value that cannot take it"),
    "BUILD on a plain dict": (P2 + b"}}b.", "BUILD on a value that cannot take it"),
    "BUILD on an atom": (P2 + b"N}b.", "BUILD on a value that cannot take it"),
    "REDUCE of an atom": (P2 + b"K\x01)R.", "REDUCE of an object that cannot be called"),
    "REDUCE of a container": (P2 + b"])R.", "REDUCE of an object that cannot be called"),
    "NEWOBJ_EX without a dict": (P4 + b"cm\nf\n)]\x92.", "NEWOBJ_EX needs a dict of keyword arguments"),
    "OBJ without a class": (P2 + b"(o.", "OBJ without a class"),
    "STACK_GLOBAL of what is no text": (P4 + b"K\x01K\x02\x93.", "STACK_GLOBAL needs two texts"),
    "EXT1 of zero": (P2 + b"\x82\x00.", "an extension code must be positive"),
    "EXT4 of a negative code": (P2 + b"\x84\xff\xff\xff\xff.", "an extension code must be positive"),
    "a missing memo slot": (P2 + b"h\x07.", "the memo has no such slot"),
    "a negative slot": (b"Np-1\n.", "a memo slot is negative"),
    "a slot that is not a number": (b"g1x\n.", "not a decimal integer"),
    "no value": (P2 + b".", "the pickle must end with one value on its stack"),
    "two values": (P2 + b"NN.", "the pickle must end with one value on its stack"),
    "an open MARK": (P2 + b"(N.", "the pickle must end with one value on its stack"),
    "no MARK": (P2 + b"Nt.", "no MARK for this opcode"),
    "POP on nothing": (P2 + b"0.", "no MARK for this opcode"),
    "an empty stack": (P2 + b"\x85.", "the stack is empty"),
    "TUPLE3 of two": (P2 + b"NN\x87.", "the stack is empty"),
    "an unknown opcode": (P2 + b"\xff.", "unknown pickle opcode"),
    "PROTO 255": (b"\x80\xff.", "unknown pickle protocol"),
    "PROTO in the middle": (P2 + b"N\x80\x02.", "PROTO in the middle of the pickle"),
    "4 GiB of text": (P2 + b"X\xff\xff\xff\xffab.", "a length in the pickle reaches beyond its end"),
    "2**63 bytes": (P4 + b"\x8e\x00\x00\x00\x00\x00\x00\x00\x80ab.", "a length in the pickle reaches beyond its end"),
    "a negative length": (P2 + b"T\xff\xff\xff\xffab.", "a length in the pickle is negative"),
    "a long string beyond the end": (P2 + b"T\xff\xff\x00\x00ab.", "a length in the pickle reaches beyond its end"),
    "a negative LONG4": (P2 + b"\x8b\xff\xff\xff\xffab.", "a length in the pickle is negative"),
    "a short read": (P2 + b"J\x01.", "the pickle ends too early"),
    "FRAME too long": (P4 + b"\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", "a length in the pickle reaches beyond its end"),
    "FRAME that ends behind STOP": (P4 + b"\x95\x03\x00\x00\x00\x00\x00\x00\x00N.N", "the pickle ends inside a frame"),
    "FRAME straddled": (
        P4 + b"\x95\x02\x00\x00\x00\x00\x00\x00\x00J\x01\x00\x00\x00.",
        "an opcode straddles the end of its frame",
    ),
    "FRAME in a FRAME": (
        P4 + b"\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x95\x01\x00\x00\x00\x00\x00\x00\x00NNN.",
        "a frame inside a frame",
    ),
    "text that is not UTF-8": (P2 + b"X\x01\x00\x00\x00\xff.", "a text is not UTF-8"),
    "long text that is not UTF-8": (P2 + b"X\x01\x00\x02\x00" + b"\xff" * 0x20001 + b".", "a text is not UTF-8"),
    "a global that is not UTF-8": (P2 + b"c\xff\nf\n.", "a global's name is not UTF-8"),
    "LONG of more digits than Python converts": (b"L" + b"1" * 5000 + b"L\n.", "not a decimal integer"),
    "INT of a word": (b"Iabc\n.", "not a decimal integer"),
    "FLOAT of a word": (b"Fabc\n.", "not a number"),
    "STRING without quotes": (b"Sabc\n.", "a STRING is not in quotes"),
    "STRING with a bad escape": (b"S'\\x0'\n.", "a STRING has a bad escape"),
    "UNICODE with a bad escape": (b"V\\u12\n.", "a UNICODE has a bad escape"),
    "a line without an end": (b"Iabc", "a line of the pickle has no end"),
    "nothing": (b"", "the pickle ends too early"),
    # octal for C but an error or decimal for Python, digits in groups, escapes that only cause a warning; two readers
    # read these differently, and no pickler writes them
    **{
        repr(program): (program, "")
        for program in (
            b"I010\n.",
            b"I0x10\n.",
            b"I1_0\n.",
            b"I 1\n.",
            b"L010L\n.",
            b"L0b1L\n.",
            b"L\n.",
            b"LL\n.",
            b"F1_0\n.",
            b"F 1.5\n.",
            b"F\n.",
            b"NpX\n.",
            b"Np0_1\n.",
            b"P\xc3\xa9\n.",
            b"S'\\d'\n.",
            b"S'\\777'\n.",
            b"S'a\\'\n.",
        )
    },
    # atoms, containers, globals and persistent ids cannot be arguments; no pickler writes them, although pickle in
    # Python accepts a list
    **{
        f"{name} of {args!r}": (P4 + call.replace(b"%b", args), ".*needs a tuple of arguments")
        for name, call in {
            "REDUCE": b"cm\nf\n%bR.",
            "NEWOBJ": b"cm\nf\n%b\x81.",
            "NEWOBJ_EX": b"cm\nf\n%b}\x92.",
        }.items()
        for args in (b"N", b"K\x01", b"]", b"}", b"\x8f", b"(\x91", b"cm\nf\n", b"K\x01Q", b"\x8c\x02ab")
    },
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    """A malformed pickle is refused with an error that contains the fault and its position."""
    data, what = MALFORMED[name]
    with pytest.raises(MalformedError, match=f"here at byte [0-9]+: {what}"):
        graph_of(data)


@pytest.mark.parametrize("program", [b"\x97.", b"N\x98."])
def test_buffers_that_are_not_in_the_file_are_unsupported(program: bytes) -> None:
    """The out-of-band buffers of protocol 5 are unsupported."""
    with pytest.raises(UnsupportedError):
        graph_of(b"\x80\x05" + program)


@pytest.mark.parametrize(
    ("limits", "data", "what"),
    [
        (Limits(pickle_opcodes=10), P2 + b"N0" * 500 + b"N.", "too many pickle opcodes"),
        (Limits(pickle_bytes=64), P2 + b"N0" * 500 + b"N.", "the pickle is too large"),
        (Limits(pickle_line=16), b"S'" + b"a" * 100 + b"'\n.", "a line of the pickle is too long"),
    ],
)
def test_limits(limits: Limits, data: bytes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid pickle that exceeds a limit is refused with a LimitError."""
    graph_of(data)
    monkeypatch.setattr(ckptconv.pickles.machine, "LIMITS", limits)
    monkeypatch.setattr(ckptconv.pickles.machine, "_WINDOW", 16)
    with pytest.raises(LimitError, match=what):
        graph_of(data)


def long_integer(n: int) -> bytes:
    """Return a pickle of an integer of `n` bytes."""
    return P2 + b"\x8b" + n.to_bytes(4, "little") + b"1" * n + b"."


def test_an_integer_is_at_most_as_long_as_what_is_held() -> None:
    """An integer longer than the longest text in memory is refused. No checkpoint has such an integer, and it cannot
    stay in the file.
    """
    longest = LIMITS.inline_bytes
    assert graph_of(long_integer(longest)).root == int.from_bytes(b"1" * longest, "little")
    with pytest.raises(LimitError, match="an integer in the pickle is too long"):
        graph_of(long_integer(longest + 1))


@pytest.mark.untraced
@pytest.mark.parametrize("double", [b"2\x86", b"q\x00h\x00\x86"], ids=["DUP", "memo"])
@pytest.mark.parametrize("frame", [b"%b", b"}%bNs", b"\x8f(%b\x90", b"(%b\x91", b"cm\nf\n%b\x85R", b"%bQ"])
def test_doubling_stays_small(frame: bytes, double: bytes) -> None:
    """A tuple that doubles 2,000 times, by DUP or the memo, is parsed and emitted in less than 4 MiB. It may be a
    value, a key, a member or an argument.
    """
    data = b"\x80\x04" + frame.replace(b"%b", b"N" + double * 2000) + b"."
    with memory_below(4 << 20):
        written(data)


@pytest.mark.parametrize(
    "code",
    [
        b"X\xff\xff\xff\xff",
        b"B\xff\xff\xff\xff",
        b"T\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        *(c + b"\xff" * 7 + b"\x7f" for c in (b"\x8d", b"\x8e", b"\x96", b"\x95")),
    ],
)
def test_a_wrong_length_allocates_no_memory(code: bytes) -> None:
    """A length of gigabytes in a file of a few bytes is refused without allocating memory for it."""
    with memory_below(1 << 20), pytest.raises(CkptconvError):
        graph_of(code + b"abc.")


def test_an_absurd_argument_is_never_called() -> None:
    """A call of ``bytearray(2**40)``, which the allowlist permits, is emitted unchanged and is not executed."""
    data = b"\x80\x02cbuiltins\nbytearray\nq\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x85q\x01Rq\x02."
    with memory_below(1 << 20):
        assert written(data) == data


@pytest.mark.parametrize(
    ("code", "unit"),
    [(b"X%b", b"a"), (b"B%b", b"\xff"), (b"T%b", b"\xff"), (b"\x96%b\0\0\0\0", b"\xff")],
    ids=["text", "bytes", "string", "bytearray"],
)
def test_long_values_are_never_held(code: bytes, unit: bytes) -> None:
    """A text, bytes or a byte string of 64 MiB is read in less than 8 MiB."""
    n = 64 << 20
    head, tail = b"](" + code.replace(b"%b", n.to_bytes(4, "little")), b"K\x01e."

    def read(offset: int, length: int) -> bytes:
        before = head[offset : offset + length]
        middle = unit * max(0, min(offset + length, len(head) + n) - max(offset, len(head)))
        after = tail[max(0, offset - len(head) - n) : max(0, offset + length - len(head) - n)]
        return before + middle + after

    size = len(head) + n + len(tail)
    with memory_below(8 << 20):
        graph, end = parse(read, size, where="here")
    assert end == size
    assert [node.length for node in walk([graph.root]) if isinstance(node, Blob)] == [n]


def test_a_long_text_is_checked_across_windows() -> None:
    """A character that crosses the boundary of two windows is valid. An invalid byte, or an incomplete character at the
    end, is refused.
    """
    text = "a" * ((1 << 20) - 1) + "é" + "b" * 100
    data = pickle.dumps(text, 4)
    assert pickle.loads(written(data)) == text
    raw = text.encode()
    for bad in (raw[:-1] + b"\xc3", raw[: 1 << 20] + b"b" + raw[(1 << 20) + 1 :]):
        with pytest.raises(MalformedError):
            graph_of(b"X" + len(bad).to_bytes(4, "little") + bad + b".")


LEVELS = 30_000  # more than C code can recurse on a stack of 8 MB
DEEP = {
    "tuples": b"N" + b"\x85" * LEVELS,
    "pairs": b"N" + b"2\x86" * LEVELS,
    "frozensets": b"(" * LEVELS + b"N" + b"\x91" * LEVELS,
    "lists": b"]" * LEVELS + b"N" + b"a" * LEVELS,
    "persistent ids": b"N" + b"Q" * LEVELS,
    "calls": b"cm\nf\n" * LEVELS + b"N" + b"\x85R" * LEVELS,
}


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("kind", DEEP)
def test_depth_of_any_kind_needs_no_stack(kind: str) -> None:
    """Objects of many levels are parsed, walked and emitted without recursion."""
    graph = graph_of(P4 + DEEP[kind] + b".")
    assert sum(1 for _ in walk([graph.root])) >= LEVELS
    assert len(b"".join(p for p in emit(graph, loadable=False) if isinstance(p, bytes))) > LEVELS


@pytest.mark.untraced
def test_every_flipped_bit_and_every_truncation_raises_a_typed_error() -> None:
    """If a pickle of every kind of object is truncated at any byte, it is malformed. If any bit is flipped, it is
    refused or can be emitted.
    """
    things = [make() for make in CLASSES]
    for thing in things:
        thing.one, thing.two = things, None  # type: ignore[attr-defined]
    for protocol in (0, 5):
        data = pickle.dumps([things, {"a": (1, 2.5, b"b")}], protocol)
        for end in range(len(data)):
            with pytest.raises(MalformedError):
                graph_of(data[:end])
        for bit in sampled(range(8 * len(data)), 5):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                graph = graph_of(bytes(flipped))
            except CkptconvError:
                continue
            emit(graph, loadable=can_be_made_loadable(graph))


def test_inline_limit_is_exact() -> None:
    """A value at the limit is kept in memory. A value above the limit stays in the file."""
    for extra, kind in ((0, str), (1, Blob)):
        assert type(graph_of(pickle.dumps("a" * (LIMITS.inline_bytes + extra), 4)).root) is kind
