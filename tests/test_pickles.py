"""What the graph keeps of a pickle: every effect in its order, on operands of the same identity; and what reading a hostile one costs."""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st
from torch import _weights_only_unpickler as safe

from ckptconv.errors import CkptconvError, MalformedError
from ckptconv.graph import Blob, Global, Graph, walk
from ckptconv.limits import LIMITS
from ckptconv.pickles import emit, parse
from ckptconv.pickles.imports import imported_name
from ckptconv.pickles.opcodes import CODES
from ckptconv.safe_loader import ALLOWED, can_be_made_loadable, obstacles
from tests.judge import assert_same


def graph_of(data: bytes) -> Graph:
    return parse(lambda offset, length: data[offset : offset + length], len(data), where="here")[0]


def written(data: bytes, *, loadable: bool = False) -> bytes:
    """DATA parsed and emitted."""
    pieces = emit(graph_of(data), loadable=loadable)
    return b"".join(p if isinstance(p, bytes) else data[p.offset : p.offset + p.length] for p in pieces)


# The reference: pickle's own machine in Python, on stand-ins that note what is done to them and do nothing


class Stand:
    """Stands for whatever a pickle makes or finds: a list, dict or set, a global, the result of a call."""

    def __init__(self, kind: str, log: list[Any]) -> None:
        self.kind = kind
        self.log = log

    def note(self, verb: str, *operands: Any) -> Stand:
        self.log.append((verb, self, operands))
        return self

    def extend(self, values: list[Any]) -> None:
        self.note("append", *values)

    def append(self, value: Any) -> None:
        self.note("append", value)

    def add(self, value: Any) -> None:
        self.note("add", value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.note("set", key, value)

    def __setstate__(self, state: Any) -> None:
        self.note("build", state)


class Machine(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Runs a pickle without doing what it says."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.log: list[Any] = []
        self.found: dict[str, Stand] = {}

    def make(self, kind: str) -> Stand:
        return Stand(kind, self.log)

    def find_class(self, module: str, name: str) -> Stand:
        return self.once(f"{module} {name} {imported_name(Global(module, name), self.proto)} {self.proto > 3}")

    def get_extension(self, code: int) -> None:
        self.append(self.once(f"extension {code}"))

    def once(self, name: str) -> Stand:
        return self.found.setdefault(name, self.make(name))

    def persistent_load(self, pid: Any) -> Stand:
        return self.make("made").note("persistent id", pid)

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.append(self.make("made").note("instance", klass, *args))

    def _decode_string(self, value: bytes) -> Any:
        return bytearray(b"py2 " + value)


def operation(name: str) -> Callable[[Callable[[Machine], None]], None]:
    return lambda function: Machine.dispatch.update({CODES[name][0]: function})


def container(name: str, kind: str, verb: str) -> None:
    """NAME pushes a container of KIND: an empty one, or of what came after the MARK."""

    @operation(name)
    def push(m: Machine) -> None:
        items = [] if name.startswith("EMPTY") else m.pop_mark()
        m.append(made := m.make(kind))
        for i in range(0, len(items), 2) if verb == "set" else []:
            made.note(verb, *items[i : i + 2])
        if verb == "frozen" or (verb == "append" and items):
            made.note(verb, *items)


for row in (
    ("EMPTY_LIST", "list", ""), ("EMPTY_DICT", "dict", ""), ("EMPTY_SET", "set", ""),
    ("LIST", "list", "append"), ("DICT", "dict", "set"), ("FROZENSET", "frozenset", "frozen"),
):  # fmt: skip
    container(*row)


def call(name: str, operands: int) -> None:
    @operation(name)
    def push(m: Machine) -> None:
        callable_, args, *kwargs = [m.stack.pop() for _ in range(operands)][::-1]
        m.append(m.make("made").note(name, callable_, *args, *kwargs))


call("REDUCE", 2)
call("NEWOBJ", 2)
call("NEWOBJ_EX", 3)


def trace(data: bytes) -> list[Any]:
    """What the pickle does, in order, to what: everything that has an identity by the order of its first appearance.

    What is done to a plain container that nothing can see afterwards is left out.
    """
    machine = Machine(data)
    root = machine.load()
    seen = visible(machine.log, root)
    numbers: dict[int, int] = {}
    effects = [(verb, (target, *operands)) for verb, target, operands in machine.log if id(target) in seen]
    return [(verb, *(label(part, numbers) for part in parts)) for verb, parts in [*effects, ("root", (root,))]]


def visible(log: list[Any], root: Any) -> set[int]:
    """The ids of what the root or a call, persistent id or object leads to."""
    inside: dict[int, list[Any]] = collections.defaultdict(list)
    todo = [root]
    for _, target, operands in log:
        inside[id(target)] += operands
        if target.kind == "made":
            todo.append(target)
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) not in seen and isinstance(value, (Stand, tuple)):
            seen.add(id(value))
            todo += value if isinstance(value, tuple) else inside[id(value)]
    return seen


def label(value: Any, numbers: dict[int, int]) -> Any:
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, (str, bytes, tuple)) and len(value) < 2):
        return (value,) if not isinstance(value, tuple) else ("tuple", *(label(part, numbers) for part in value))
    if isinstance(value, float):
        return struct.pack(">d", value)
    if id(value) in numbers:
        return "number", numbers[id(value)]
    numbers[id(value)] = number = len(numbers)
    if isinstance(value, tuple):
        return number, "tuple", *(label(part, numbers) for part in value)
    return number, value.kind if isinstance(value, Stand) else (
        type(value).__name__,
        bytes(value) if isinstance(value, bytearray) else value,
    )


# Streams


PUSHES = [
    (b"N", "atom"), (b"\x88", "atom"), (b"\x89", "atom"), (b"I01\n", "atom"), (b"I-7\n", "atom"), (b"L9L\n", "atom"), (b"L-123456789012\n", "atom"),
    (b"J\xff\xff\xff\x80", "atom"), (b"K\x05", "atom"), (b"M\x05\x01", "atom"), (b"\x8a\x00", "atom"), (b"\x8a\x02\xff\x00", "atom"), (b"\x8b\x01\x00\x00\x00\xff", "atom"),
    (b"F-1.5e3\n", "atom"), (b"Fnan\n", "atom"), (b"G\x7f\xf0\x00\x00\x00\x00\x00\x01", "atom"), (b"G\x80\x00\x00\x00\x00\x00\x00\x00", "atom"),
    (b"S'a\\x00b'\n", "atom"), (b"T\x02\x00\x00\x00\xffz", "atom"), (b"U\x02zz", "atom"), (b"Vab\\u1234\n", "text"), (b"\x8c\x02ab", "text"),
    (b"X\x03\x00\x00\x00\xed\xa0\x80", "text"), (b"X\x00\x00\x00\x00", "text"), (b"\x8d\x02\x00\x00\x00\x00\x00\x00\x00n\n", "text"),
    (b"C\x02bb", "atom"), (b"B\x03\x00\x00\x00bbb", "atom"), (b"\x8e\x02\x00\x00\x00\x00\x00\x00\x00bb", "atom"), (b"\x96\x02\x00\x00\x00\x00\x00\x00\x00bb", "atom"),
    (b"Pid\n", "atom"), (b")", "tuple"), (b"]", "list"), (b"}", "dict"), (b"\x8f", "set"), (b"]q\x00", "list"), (b"}q\x01", "dict"), (b"\x8fq\x02", "set"),
    (b"cm\nf\n", "global"), (b"ccommands\ngetoutput\n", "global"), (b"\x8c\x01m\x8c\x03a.b\x93", "global"), (b"\x82\x05", "global"), (b"\x83\x00\x01", "global"), (b"\x84\x00\x00\x01\x00", "global"),
    (b"cm\nf\n)R", "made"), (b"cm\nf\n)Rq\x03", "made"), (b"cm\nC\n)\x81q\x03", "made"), (b"cm\nf\nN\x85", "globaltuple"),
]  # fmt: skip
SLOTS = (0, 1, 2, 3, 300, (1 << 32) - 16)
KINDS_IN_SLOTS = ("list", "dict", "set", "made")
CALLABLE = ("global", "made")


def steps(stack: list[list[str]], memo: dict[int, str]) -> Iterator[tuple[bytes, Callable[[], None]]]:
    """The opcodes that are possible now, and what each does to the kinds on the STACK, a list for each MARK."""
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
        if s[-2] in CALLABLE and s[-1] == "tuple":
            yield b"R", take(2, "made")
            yield b"\x81", take(2, "made")
        if s[-2:] == ["text", "text"]:
            yield b"\x93", take(2, "global")
    if len(s) > 2:
        yield b"\x87", take(3, "tuple")
        if s[-3] in ("dict", "made"):
            yield b"s", take(2)
        if s[-3] in CALLABLE and s[-2:] == ["tuple", "dict"]:
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
    """A valid pickle of any opcodes."""
    out = bytearray()
    stack: list[list[str]] = [[]]
    memo = dict(enumerate(KINDS_IN_SLOTS))
    out += b"]q\x000}q\x010\x8fq\x020cm\nf\n)Rq\x030"
    for _ in range(draw(st.integers(0, 50))):
        if draw(st.integers(0, 2)) == 0:
            code, kind = draw(st.sampled_from(PUSHES))
            stack[-1] += ["global", "tuple"] if kind == "globaltuple" else [kind]
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
    """Every call, BUILD, append, set item, added member and persistent id of a random valid program, on the same operands."""
    again = written(data)
    assert trace(again) == trace(data)
    assert trace(written(again)) == trace(data)


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
    "keyword arguments that grow": D + F + b")h\x00\x92h\x00\x8c\x01aNs\x86.",
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_changes_and_reads_keep_their_order(name: str, protocol: int) -> None:
    """What is read between two changes is read between them, though writing depth first would change it before."""
    data = b"\x80" + bytes([protocol]) + ORDERS[name]
    assert trace(written(data)) == trace(data)


def test_an_ordereddict_made_of_a_dict_that_grows_afterwards() -> None:
    """The order seen from the outside: the copy has one item, the dict has two."""
    data = b"\x80\x02}q\x00K\x01K\x01s0ccollections\nOrderedDict\nh\x00\x85Rh\x00K\x02K\x02s\x86."
    assert pickle.loads(written(data)) == ({1: 1}, {1: 1, 2: 2}) == pickle.loads(data)


# Objects


class Plain:
    """An object with a state."""


class Slots:
    """Its state is a pair."""

    __slots__ = ("one", "two")

    def __getstate__(self) -> Any:  # for protocols 0 and 1, which have no such state of their own
        return None, {name: getattr(self, name) for name in self.__slots__ if hasattr(self, name)}


class Rows(list):  # type: ignore[type-arg]
    """A list with attributes."""


class Table(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


class Members(set):  # type: ignore[type-arg]
    """Made by a call."""


class Keywords:
    """Made with keyword arguments."""

    def __getnewargs_ex__(self) -> Any:
        return (1, ["a"]), {"name": "value"}

    def __new__(cls, *args: Any, **kwargs: Any) -> Keywords:
        return super().__new__(cls)


def set_state(obj: Any, state: Any) -> None:
    obj.__dict__.update(state)


class Setter:
    """Its state is set by a call whose result pickle throws away."""

    def __reduce__(self) -> Any:
        return Setter, (), self.__dict__, None, None, set_state


class Numbered:
    """Its class is a number in copyreg's registry."""


class Named:
    """Pickled as a global."""

    def __reduce__(self) -> str:
        return "NAMED"


NAMED = Named()
NAMES = st.sampled_from([NAMED, len, Plain, 1j])
CLASSES = (Plain, Slots, Rows, Table, Members, Keywords, Setter, Numbered)
LEAVES = st.one_of(
    st.sampled_from([None, True, False, 0.0, -0.0, float("inf"), "", "a", "a\ud800\0", "x" * 300, b"", b"\x00\xff", b"b" * 300, 1 << 3000, -(1 << 31), 1 << 31, ()]),
    st.integers(), st.floats(), st.text(), st.binary(), st.binary().map(bytearray), st.integers(0, (1 << 64) - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0]),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def extension() -> Iterator[None]:
    """A class in copyreg's registry."""
    copyreg.add_extension(__name__, "Numbered", 70_000)
    yield
    copyreg.remove_extension(__name__, "Numbered", 70_000)


def fill(draw: Callable[..., Any], thing: Any, pool: list[Any]) -> None:
    """Put things of the POOL into THING, itself among them."""
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
    """A graph of objects with sharing and cycles."""
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


@example(RING[0], 2)
@example(RING, 4)
@given(objects(st.one_of(LEAVES, NAMES), CLASSES), st.integers(0, 5))
def test_what_pickle_writes_of_any_objects(obj: Any, protocol: int) -> None:
    """Shared and cyclic, of every kind of reduce, in every protocol: the same effects in the same order."""
    try:
        data = pickle.dumps(obj, protocol)
    except RecursionError:  # a cycle through the arguments of a call: pickle itself gives up
        reject()
    assert trace(written(data)) == trace(data)


@example([{1, "a"}, {"key": {b"b"}}, bytearray(b"c")], 5)
@given(objects(LEAVES, (collections.OrderedDict,)), st.integers(0, 5))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # torch, of every protocol but 2
def test_what_nothing_is_in_the_way_of_loads_safely(obj: Any, protocol: int) -> None:
    """Where no obstacle is found, torch's ``weights_only`` unpickler takes what is written, and gives what pickle gives of the source."""
    data = pickle.dumps(obj, protocol)
    graph = graph_of(data)
    if next(obstacles(graph), None) is not None:
        return
    out = written(data, loadable=can_be_made_loadable(graph))
    if CODES["POP"][0] not in graph_of(out).used:  # a cycle through a tuple cannot be said without it
        assert_same(safe.load(io.BytesIO(out), encoding="utf-8"), pickle.loads(data))


def test_no_allowed_name_is_one_of_python_2() -> None:
    """Under the header of protocol 2, which loadable pickles get, every allowed name means itself."""
    for name in ALLOWED:
        assert imported_name(Global(*name.rsplit(".", 1)), 2) == name


# Hostile pickles


@pytest.mark.parametrize(
    "program",
    [
        b"I010\n.", b"I0x10\n.", b"I1_0\n.", b"I 1\n.", b"L010L\n.", b"L0b1L\n.", b"L\n.", b"LL\n.", b"F1_0\n.", b"F 1.5\n.", b"F\n.", b"NpX\n.", b"Np0_1\n.",
        b"P\xc3\xa9\n.", b"S'\\d'\n.", b"S'\\777'\n.", b"S'a\\'\n.",
    ],
)  # fmt: skip
def test_text_that_pickles_two_machines_read_differently_is_malformed(program: bytes) -> None:
    """Octal for C and an error or a decimal for Python, digits in groups, escapes that only warn: no pickler writes them."""
    with pytest.raises(MalformedError):
        graph_of(program)


def peak(function: Callable[[], object]) -> int:
    """The most memory that FUNCTION took."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("frame", [b"%b", b"}%bNs", b"\x8f(%b\x90", b"(%b\x91", b"cm\nf\n%b\x85R", b"%bQ"])
def test_doubling_stays_small(frame: bytes) -> None:
    """A tuple that stands for 2 to the 2,000, by DUP or the memo, as value, key, member, argument: under 4 MB."""
    for double in (b"2\x86", b"q\x00h\x00\x86"):
        data = b"\x80\x04" + frame.replace(b"%b", b"N" + double * 2000) + b"."
        assert peak(lambda data=data: written(data)) < 4 << 20  # type: ignore[misc]


@pytest.mark.parametrize(
    "code", [b"X\xff\xff\xff\xff", b"B\xff\xff\xff\xff", b"T\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", *(c + b"\xff" * 7 + b"\x7f" for c in (b"\x8d", b"\x8e", b"\x96", b"\x95"))]
)  # fmt: skip
def test_a_length_that_lies_costs_nothing(code: bytes) -> None:
    """A length of gigabytes or more in a file of a few bytes: a typed error, and nothing is allocated for it."""
    with pytest.raises(CkptconvError):
        graph_of(code + b"abc.")

    def attempt() -> None:
        with pytest.raises(CkptconvError):
            graph_of(code + b"abc.")

    assert peak(attempt) < 1 << 20


def test_an_absurd_argument_is_never_called() -> None:
    """``bytearray(2**40)``, which the allowlist permits: kept as it is, at no cost."""
    data = b"\x80\x02cbuiltins\nbytearray\nq\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x85q\x01Rq\x02."
    assert peak(lambda: written(data)) < 1 << 20
    assert written(data) == data


def test_long_values_are_never_held() -> None:
    """Reading 64 MiB in one text, bytes or byte string takes a few MB, wherever it stands."""
    n = 64 << 20
    for code, unit in ((b"X%b", b"a"), (b"B%b", b"\xff"), (b"T%b", b"\xff"), (b"\x96%b\0\0\0\0", b"\xff")):
        head, tail = b"](" + code.replace(b"%b", n.to_bytes(4, "little")), b"K\x01e."

        def read(offset: int, length: int, head: bytes = head, unit: bytes = unit, tail: bytes = tail) -> bytes:
            before = head[offset : offset + length]
            middle = unit * max(0, min(offset + length, len(head) + n) - max(offset, len(head)))
            after = tail[max(0, offset - len(head) - n) : max(0, offset + length - len(head) - n)]
            return before + middle + after

        size = len(head) + n + len(tail)
        found: list[Any] = []
        assert peak(lambda read=read, size=size, found=found: found.extend(parse(read, size, where="here"))) < 8 << 20  # type: ignore[misc]
        graph, end = found
        assert end == size
        assert [node.length for node in walk([graph.root]) if isinstance(node, Blob)] == [n]


def test_a_long_text_is_checked_across_windows() -> None:
    """A character cut by the edge of a window is one; a byte that is none, anywhere, or a character cut by the text's end, is an error."""
    text = "a" * ((1 << 20) - 1) + "é" + "b" * 100
    data = pickle.dumps(text, 4)
    assert pickle.loads(written(data)) == text
    raw = text.encode()
    for bad in (raw[:-1] + b"\xc3", raw[: 1 << 20] + b"b" + raw[(1 << 20) + 1 :]):
        with pytest.raises(MalformedError):
            graph_of(b"X" + len(bad).to_bytes(4, "little") + bad + b".")


@pytest.mark.parametrize(
    "code", [b"\x85", b"\x91(", b"2\x86", b"Q", b"cm\nf\n"]
)  # fmt: skip
def test_depth_of_any_kind_needs_no_stack(code: bytes) -> None:
    """100,000 levels of tuples, frozensets, pairs, persistent ids or calls: parsed, walked, written and freed without recursion."""
    n = 100_000
    body = {
        b"\x91(": b"(" * n + b"N" + b"\x91" * n,
        b"cm\nf\n": b"cm\nf\n" * n + b"N" + b"\x85R" * n,
    }.get(code, b"N" + code * n)
    graph = graph_of(b"\x80\x04" + body + b".")
    assert sum(1 for _ in walk([graph.root])) >= n
    assert len(b"".join(p for p in emit(graph, loadable=False) if isinstance(p, bytes))) > n


def test_every_flipped_bit_and_every_cut_end_in_our_errors() -> None:
    """A good pickle of every kind of object, with any bit turned or cut anywhere: an error of ours, or what can be written again."""
    things = [make() for make in CLASSES]
    for thing in things:
        thing.one, thing.two = things, None  # type: ignore[attr-defined]
    for protocol in (0, 5):
        data = pickle.dumps([things, {"a": (1, 2.5, b"b")}], protocol)
        for end in range(len(data)):
            with pytest.raises(MalformedError):
                graph_of(data[:end])
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                graph = graph_of(bytes(flipped))
            except CkptconvError:
                continue
            emit(graph, loadable=can_be_made_loadable(graph))


def test_inline_limit_is_exact() -> None:
    """At the limit a value is held, one above it stays in the file."""
    for extra, kind in ((0, str), (1, Blob)):
        assert type(graph_of(pickle.dumps("a" * (LIMITS.inline_bytes + extra), 4)).root) is kind
