"""The pickle graph says what the pickle says: pickle's own machine is the judge, by the trace of what it does and to what."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptconv.pickles.parser
from ckptconv.errors import CkptconvError, LimitError, MalformedError, UnsupportedError
from ckptconv.graph import Blob, Graph
from ckptconv.limits import LIMITS
from ckptconv.pickles import emit, parse
from ckptconv.pickles.opcodes import CODES


def graph_of(data: bytes) -> Graph:
    graph, end = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    assert end == len(data)
    return graph


def again(data: bytes) -> bytes:
    return b"".join(
        part if isinstance(part, bytes) else data[part.offset : part.offset + part.length]
        for part in emit(graph_of(data), loadable=False)
    )


class Tracer(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """pickle's own machine in Python, which makes recorders where a pickle calls something and logs every effect."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.log: list[Any] = []
        self.names: dict[int, int] = {}
        self.kept: list[Any] = []

    def label(self, value: Any) -> Any:
        """What VALUE is: atoms by value, everything mutable or made by a call by the order in which it was first seen."""
        if isinstance(value, tuple):
            return ("tuple", *map(self.label, value))
        if isinstance(value, (list, dict, set, frozenset, bytearray, Recorder)):
            self.kept.append(value)
            return (type(value).__name__, self.names.setdefault(id(value), len(self.names)))
        return (type(value).__name__, repr(value))

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Recorder,), {"tracer": self, "target": f"{module}.{name}", "__slots__": ()})

    def persistent_load(self, pid: Any) -> Any:
        made = Recorder()
        self.log.append(("pid", self.label(pid), self.label(made)))
        return made

    def result(self) -> Any:
        root = self.load()
        return self.log, self.content(root)

    def content(self, root: Any) -> Any:
        """What stands in everything that the root leads to, in the order of a walk."""
        said, todo, seen = [], [root], set()
        while todo:
            value = todo.pop()
            said.append(self.label(value))
            if isinstance(value, (list, tuple, dict, bytearray)) and id(value) not in seen:
                seen.add(id(value))
                inside = [part for item in value.items() for part in item] if isinstance(value, dict) else list(value)
                said.append(len(inside))
                todo += reversed(inside)
        return said


class Recorder:
    """Stands for whatever a call gives; takes every effect and logs it."""

    __slots__ = ()
    tracer: Tracer
    target = "?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Recorder:
        made = object.__new__(
            Recorder if cls is Recorder else type("Made", (Recorder,), {"tracer": getattr(cls, "tracer", None)})
        )
        if cls is not Recorder:
            cls.tracer.log.append(("call", cls.target, cls.tracer.label(args), sorted(kwargs), cls.tracer.label(made)))
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.tracer.log.append(("build", self.tracer.label(self), self.tracer.label(state)))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.log.append(("set", self.tracer.label(self), self.tracer.label(key), self.tracer.label(value)))

    def append(self, value: Any) -> None:
        self.tracer.log.append(("append", self.tracer.label(self), self.tracer.label(value)))


def trace(data: bytes) -> Any:
    return Tracer(data).result()


class Thing:
    """An object with state."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 3000), 1 << 3000), st.floats(allow_nan=False),
    st.text(max_size=5), st.binary(max_size=300), st.just("x" * 300), st.just(bytearray(b"ab")),
)  # fmt: skip
keys = st.one_of(st.text(max_size=3), st.integers(-5, 5), st.none())
objects = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        inner.map(lambda value: Thing(value=value, same=value)),
        inner.map(lambda value: [value, value, (value,)]),
    ),
    max_leaves=20,
)


@given(objects, st.integers(0, 5))
def test_what_pickle_writes(obj: object, protocol: int) -> None:
    """pickle.dumps of any object, in every protocol: the same effects in the same order, on the same things."""
    data = pickle.dumps(obj, protocol)
    assert trace(again(data)) == trace(data)


def test_cycles_and_what_was_popped() -> None:
    """A list in itself, a dict in itself, a tuple in itself through a list, a set that holds its holder, a call whose result is thrown away."""
    ring: list[Any] = []
    ring.append((ring, {"ring": ring}))
    table: dict[str, Any] = {}
    table["self"] = table
    holder = Thing()
    holder.members = {holder}
    for obj in (ring, table, ring[0], holder, holder.members, [Thing(a=ring), ring]):
        for protocol in range(6):
            data = pickle.dumps(obj, protocol)
            assert trace(again(data)) == trace(data)
    popped = b"\x80\x02cm\nf\n(K\x01tR0cm\ng\n)R."
    assert trace(again(popped)) == trace(popped)
    assert len(trace(popped)[0]) == 2


@pytest.mark.parametrize(
    "program",
    [
        b"}q\x00cm\nOrderedDict\nh\x00\x85RX\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bK\x01s0\x87.",
        b"}q\x00(X\x01\x00\x00\x00aK\x01ucm\nOrderedDict\nh\x00\x85R\x86.",
        b"}q\x00cm\nf\nh\x00\x85Rq\x01h\x00K\x01h\x01s000h\x01h\x00\x86.",
        b"]q\x00cm\nf\nh\x00\x85Rq\x01h\x00h\x01a000h\x01h\x00\x86.",
        b"]q\x00K\x01acm\nf\nh\x00\x85Rq\x01h\x00K\x02a000h\x01h\x00\x86.",
    ],
)
def test_order_between_a_change_and_a_call_is_kept(program: bytes) -> None:
    """A dict or list that is changed before and after a call that reads it: depth-first writing would move the call."""
    data = b"\x80\x02" + program
    assert trace(again(data)) == trace(data)


def random_program(seed: int) -> bytes:
    """A valid program over most opcodes: values on the stack, effects on them, memo games, POP and DUP."""
    rng = random.Random(seed)
    out, stack, memo = bytearray(b"\x80" + bytes([rng.choice((2, 4, 5))])), [], []

    def push(code: bytes, kind: str) -> None:
        out.extend(code)
        stack.append(kind)

    def operand() -> None:
        if memo and rng.random() < 0.5:
            slot = rng.randrange(len(memo))
            push(b"h" + bytes([slot]), memo[slot])
        else:
            push(
                *rng.choice(
                    [
                        (b"K\x01", "atom"),
                        (b"N", "atom"),
                        (b"]", "list"),
                        (b"}", "dict"),
                        (b"X\x01\x00\x00\x00a", "atom"),
                        (b"U\x01z", "atom"),
                        (b"cm\nC\n)R", "made"),
                        (b"K\x05Q", "atom"),
                        (b"cm\nC\n)\x81", "made"),
                        (b"(cm\nC\no", "made"),
                    ]
                )
            )

    for _ in range(rng.randrange(5, 40)):
        operand()
        top = stack[-1]
        if rng.random() < 0.5 and len(memo) < 200:
            out.extend(b"q" + bytes([len(memo)]))
            memo.append(top)
        choice = rng.random()
        if top in ("list", "made") and choice < 0.4:
            operand()
            stack.pop()
            out.extend(b"a")
        elif top in ("dict", "made") and choice < 0.8:
            push(b"K" + bytes([rng.randrange(4)]), "atom")
            operand()
            del stack[-2:]
            out.extend(b"s")
        elif top == "made" and choice < 0.95:
            operand()
            stack.pop()
            out.extend(b"b")
        elif choice > 0.9:
            out.extend(b"0")
            stack.pop()
        elif choice > 0.85:
            push(b"2", top)
        elif choice > 0.6 and len(stack) > 1:
            out.extend(b"\x86")
            stack[-2:] = ["atom"]
        elif choice > 0.5:
            out.extend(b"cm\nf\n")
            operand()
            stack.pop()
            out.extend(b"\x85R0")
    while len(stack) > 1:
        out.extend(b"\x86")
        stack[-2:] = ["atom"]
    return bytes(out) + (b"" if stack else b"N") + b"."


@given(st.integers(0, 1 << 40))
def test_any_program(seed: int) -> None:
    """Programs that no pickler writes: what is emitted does the same things in the same order."""
    data = random_program(seed)
    assert trace(again(data)) == trace(data)


def test_emitting_is_a_fixed_point() -> None:
    """What was emitted is emitted again byte for byte; so is what torch's pickler, the C one at protocol 2, writes."""
    for obj in (
        {"a": [1, "b", (2.5, None)], "c": "b" * 40},
        [Thing(x={1: "y"})] * 3,
        list(range(3000)),
        {str(i): i for i in range(2000)},
    ):
        data = pickle.dumps(obj, 2)
        assert again(data) == data
        newer = again(pickle.dumps(obj, 4))
        assert again(newer) == newer


def test_opcodes_are_those_of_pickletools() -> None:
    """The table has every opcode of protocols 0 to 5 and no other."""
    assert {name: code.decode("latin-1") for name, code in CODES.items()} == {
        op.name: op.code for op in pickletools.opcodes
    }


P2, P4 = b"\x80\x02", b"\x80\x04"
HOSTILE = {
    "SETITEM on a list": P2 + b"]K\x01K\x02s.",
    "SETITEMS on a list": P2 + b"](K\x01K\x02u.",
    "SETITEMS with a key alone": P2 + b"}(K\x01u.",
    "APPEND on a dict": P2 + b"}K\x01a.",
    "APPENDS on a tuple": P2 + b")(K\x01e.",
    "ADDITEMS on a list": P4 + b"](K\x01\x90.",
    "BUILD on a plain dict": P2 + b"}}b.",
    "BUILD on an atom": P2 + b"N}b.",
    "REDUCE of an atom": P2 + b"K\x01)R.",
    "REDUCE of a container": P2 + b"])R.",
    "REDUCE with a list": P2 + b"cm\nf\n]R.",
    "NEWOBJ_EX without a dict": P4 + b"cm\nf\n)]\x92.",
    "OBJ without a class": P2 + b"(o.",
    "STACK_GLOBAL of what is no text": P4 + b"K\x01K\x02\x93.",
    "EXT1 of zero": P2 + b"\x82\x00.",
    "EXT4 of a negative code": P2 + b"\x84\xff\xff\xff\xff.",
    "a missing memo slot": P2 + b"h\x07.",
    "a negative slot": b"Np-1\n.",
    "a slot that is no number": b"g1x\n.",
    "no value": P2 + b".",
    "two values": P2 + b"NN.",
    "an open MARK": P2 + b"(N.",
    "no MARK": P2 + b"Nt.",
    "POP on nothing": P2 + b"0.",
    "an empty stack": P2 + b"\x85.",
    "TUPLE3 of two": P2 + b"NN\x87.",
    "an unknown opcode": P2 + b"\xff.",
    "PROTO 255": b"\x80\xff.",
    "PROTO in the middle": P2 + b"N\x80\x02.",
    "4 GiB of text": P2 + b"X\xff\xff\xff\xffab.",
    "2**63 bytes": P4 + b"\x8e\x00\x00\x00\x00\x00\x00\x00\x80ab.",
    "a negative length": P2 + b"T\xff\xff\xff\xffab.",
    "a long string beyond the end": P2 + b"T\xff\xff\x00\x00ab.",
    "a negative LONG4": P2 + b"\x8b\xff\xff\xff\xffab.",
    "a short read": P2 + b"J\x01.",
    "FRAME too long": P4 + b"\x95\xff\x00\x00\x00\x00\x00\x00\x00N.",
    "FRAME that ends behind STOP": P4 + b"\x95\x03\x00\x00\x00\x00\x00\x00\x00N.N",
    "FRAME straddled": P4 + b"\x95\x02\x00\x00\x00\x00\x00\x00\x00J\x01\x00\x00\x00.",
    "FRAME in a FRAME": P4 + b"\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x95\x01\x00\x00\x00\x00\x00\x00\x00NNN.",
    "text that is not UTF-8": P2 + b"X\x01\x00\x00\x00\xff.",
    "long text that is not UTF-8": P2 + b"X\x01\x00\x02\x00" + b"\xff" * 0x20001 + b".",
    "a global that is not UTF-8": P2 + b"c\xff\nf\n.",
    "INT of a word": b"Iabc\n.",
    "FLOAT of a word": b"Fabc\n.",
    "STRING without quotes": b"Sabc\n.",
    "STRING with a bad escape": b"S'\\x0'\n.",
    "UNICODE with a bad escape": b"V\\u12\n.",
    "a line without an end": b"Iabc",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed(name: str) -> None:
    """Each ends in one typed error that says where."""
    with pytest.raises(MalformedError, match="here at byte"):
        again(HOSTILE[name])


def test_refused_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out-of-band buffers are not in a file; too many opcodes, bytes or digits are a limit."""
    for data in (P4 + b"\x97.", P4 + b"N\x98."):
        with pytest.raises(UnsupportedError):
            graph_of(data)
    for data in (P2 + b"\x8b\x01\x00\x01\x00" + b"1" * 65537 + b".",):
        with pytest.raises(LimitError):
            graph_of(data)
    with pytest.raises(CkptconvError):
        graph_of(b"L" + b"1" * 5000 + b"L\n.")
    for name, value in (("pickle_opcodes", 10), ("pickle_bytes", 64), ("pickle_line", 16)):
        limits = type(LIMITS)(**{name: value})
        monkeypatch.setattr(ckptconv.pickles.parser, "LIMITS", limits)
        monkeypatch.setattr(ckptconv.pickles.parser, "_WINDOW", 16)
        with pytest.raises(LimitError):
            graph_of(b"S'" + b"a" * 100 + b"'\n" if name == "pickle_line" else P2 + b"N0" * 500 + b"N.")


@pytest.mark.parametrize(
    "data",
    [
        P2 + b"r\xf0\xff\xff\xff".join((b"N", b"j\xf0\xff\xff\xff\x86.")),
        b"I01\n.", b"I00\n.", b"I5\n.", b"L5L\n.", b"L5\n.", b"F1.5\n.", b"S'a\\'b'\n.", b'S"a"\n.', b"Va\\u1234\n.", b"(lp0\n.",
        b"(dp0\n.", b"(I1\nI2\nd.", b"(I1\nI2\nl.", b"(I1\ntp1\n0g1\n.", b"(I1\nim\nC\n.", b"Pabc\n.",
        P2 + b"T\x2c\x01\x00\x00" + b"s" * 300 + b".", P2 + b"(NN1N.", P2 + b"(0N.", P2 + b"\x8a\x00.", P2 + b"\x8b\x00\x00\x00\x00.",
        P4 + b"\x8fq\x00(K\x01\x90.", P4 + b"(K\x01\x91.", P4 + b"\x8c\x01m\x8c\x03a.b\x93.", P4 + b"\x8c\x03m\nn\x8c\x01f\x93.",
        P4 + b"\x8d\x01\x00\x00\x00\x00\x00\x00\x00a.", P4 + b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", P4 + b"cm\nC\n)}\x92.",
        P4 + b"\x95\x02\x00\x00\x00\x00\x00\x00\x00N.", P4 + b"B\x2c\x01\x00\x00" + b"b" * 300 + b".", P4 + b"]\x942h\x00\x87.",
        P4 + b"cm\nC\n)Rq\x000h\x00h\x00\x86.",
    ],
)  # fmt: skip
def test_rare_opcodes(data: bytes) -> None:
    """Opcodes of old protocols and rare ones come out as something that says the same."""
    assert trace(again(data)) == trace(data)


@pytest.mark.parametrize("code", [1, 255, 256, 65535, 65536, (1 << 31) - 1])
def test_extension_codes(code: int) -> None:
    """A registered extension keeps its number, in the shortest opcode; nothing is looked up."""
    assert (
        again(P2 + b"\x84" + code.to_bytes(4, "little") + b"2\x86.").count(
            code.to_bytes(1 + (code > 255) + 2 * (code > 65535), "little")
        )
        >= 1
    )


def test_long_values_stay_in_the_file() -> None:
    """Text and bytes above the limit are ranges of the source, and come out the same."""
    n = LIMITS.inline_bytes + 1
    for obj, kind in (("é" * n, "str"), (b"\xff" * n, "bytes"), (bytearray(b"z" * n), "bytearray")):
        data = pickle.dumps([obj, obj, 1], 5)
        parts = emit(graph_of(data), loadable=False)
        assert [part.kind for part in parts if isinstance(part, Blob)] == [kind]
        assert pickle.loads(again(data)) == [obj, obj, 1]
    data = P2 + b"T" + n.to_bytes(4, "little") + b"s" * n + b"."
    assert again(data) == P2 + b"T" + n.to_bytes(4, "little") + b"s" * n + b"q\x00."


def test_nan_payloads_and_negative_zero() -> None:
    """Floats keep their bits."""
    for bits in (0x7FF8000000000102, 0xFFF8000000000001, 0x8000000000000000):
        data = P2 + b"G" + bits.to_bytes(8, "big") + b"."
        assert again(data) == data
        assert struct.pack(">d", pickle.loads(again(data))) == bits.to_bytes(8, "big")


def test_doubling_costs_nothing() -> None:
    """A tuple of itself twice, 60 times over, as value, key and member: as many nodes as opcodes."""
    bomb = b"]" + b"2\x86" * 60
    for data in (bomb + b".", b"}" + bomb + b"Ns.", b"\x8f(" + bomb + b"\x90.", b"(" + bomb + b"\x91."):
        assert len(again(P4 + data)) < 2000


def test_depth_needs_no_recursion() -> None:
    """100,000 levels parse and emit without Python's stack."""
    data = P2 + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert graph_of(again(data)).opcodes > 200_000
    data = P2 + b"N" + b"\x85" * 100_000 + b"."
    assert graph_of(again(data)).opcodes > 100_000


def test_every_cut_and_flipped_bit_is_typed() -> None:
    """A good pickle cut anywhere, or with any bit turned: our errors, or a graph that can be emitted."""
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes", None, Thing(x=(1,))], "b": {3: {"c"}}}, 4)
    for end in range(len(data)):
        with pytest.raises(CkptconvError):
            graph_of(data[:end])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        read = bytes(flipped)
        try:
            graph, _ = parse(lambda offset, length, read=read: read[offset : offset + length], len(read), where="here")
        except CkptconvError:
            continue
        assert emit(graph, loadable=False)
