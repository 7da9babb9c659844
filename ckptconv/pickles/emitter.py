"""Emit a graph as a pickle that does the same things in the same order.

Two ways. The *plain* way is the one pickle's own writer takes: each object where it is first needed, then what
is done to it; a pickle that ``torch.save`` wrote comes out byte for byte (but for one-character texts, which
Python decodes to one object each, and a tuple in itself). Where that would change the order of effects
(something is read between two changes of it) or make an object before what it needs, the *replayed* way says the
effects one after another, in the source's order.

What torch's ``weights_only`` unpickler takes is written with its opcodes and the header of protocol 2, other graphs
with the header they had: below 3, unpickling maps Python 2's module names to Python 3's, so a header must not fall
below that. Unpicklers read every opcode under every header, so the oldest opcode that says a thing is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import TypeAlias

from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
    Effect,
    Extension,
    FrozenSet,
    Global,
    Graph,
    List,
    Node,
    Object,
    PersistentId,
    Py2String,
    Set,
    Tuple,
    Value,
    walk,
)
from ckptconv.pickles.opcodes import CODES
from ckptconv.pickles.rows import RowCall, RowForm, RowItems

__all__ = ["emit"]

_TUPLE = [CODES[name] for name in ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")]  # by the number of items
_SHORT_TEXTS = 4  # the protocol that brought an opcode for them
_MARK, _POP = CODES["MARK"], CODES["POP"]
# Looked up once for each value: with the byte behind it, and without.
_BINPUT, _BINGET, _BININT1 = (
    [CODES[name] + bytes([n]) for n in range(256)] for name in ("BINPUT", "BINGET", "BININT1")
)
_LONG_BINPUT, _LONG_BINGET, _BINUNICODE = CODES["LONG_BINPUT"], CODES["LONG_BINGET"], CODES["BINUNICODE"]
_BINPERSID, _REDUCE = CODES["BINPERSID"], CODES["REDUCE"]
_with_number = struct.Struct("<cI").pack
_FEW = 64  # parts of what is written without steps: a tensor has some twenty


def emit(graph: Graph, *, loadable: bool, short: bool = False, splice: bool = False) -> list[bytes | Blob]:
    """The pickle of `graph` in pieces: bytes, and the blobs that stay where they are.

    Args:
        graph: What to say.
        loadable: torch's ``weights_only`` unpickler takes the graph, so say it with that unpickler's opcodes.
        short: Put into the memo only what is read from it again, which takes twice the time; and use the short opcode
            for texts where the header is one that has it.
        splice: Items of mappings that the source says in the same bytes are blobs too.
    """
    if not graph.discarded:
        try:
            return _written(_Splicing if splice else _Plain, graph, loadable, short)
        except _OutOfOrder:
            pass
    return _written(_Replayed, graph, False, short)


def _written(way: type[_Plain | _Replayed], graph: Graph, loadable: bool, short: bool) -> list[bytes | Blob]:
    if not short:
        return way(graph, loadable).pickle()
    noting = type("_Noting", (_NotesReads, way), {})(graph, loadable)
    noting.pickle()
    shortened = type("_Short", (_PutsWhatIsRead, way), {})(graph, loadable)
    shortened.read = noting.read
    shortened.short_texts = not loadable and graph.protocol >= _SHORT_TEXTS
    pieces: list[bytes | Blob] = shortened.pickle()
    return pieces


class _OutOfOrder(Exception):
    """The plain way would change the order of effects."""


class _Do:
    """A step for later: write `code`, an effect if it has an `order`; what it makes, if anything, is `made`."""

    __slots__ = ("code", "made", "order")

    def __init__(self, code: bytes, order: int | None = None, made: Node | None = None) -> None:
        self.code = code
        self.order = order
        self.made = made


_Step: TypeAlias = "Value | _Do"
_MARK_STEP = _Do(_MARK)


class _Writer:
    """The output, the memo, and what both ways do with atoms."""

    short_texts = False

    def __init__(self, graph: Graph, loadable: bool) -> None:
        self.graph = graph
        self.loadable = loadable
        self.pieces: list[bytes | Blob] = []
        self.out = bytearray(CODES["PROTO"] + bytes([2 if loadable else max(graph.protocol, 2)]))
        self.memo: dict[int, int] = {}
        self.slots = 0
        self.kept: list[object] = []  # nothing whose id is in the memo may die

    def finish(self) -> list[bytes | Blob]:
        self.out += CODES["STOP"]
        return [*self.pieces, bytes(self.out)]

    def put(self, value: Value) -> None:
        slot = self.slots
        self.slots += 1
        self.memo[id(value)] = slot
        self.kept.append(value)
        self.out += _BINPUT[slot] if slot < 256 else _with_number(_LONG_BINPUT, slot)

    def get(self, slot: int) -> None:
        self.out += _BINGET[slot] if slot < 256 else _with_number(_LONG_BINGET, slot)

    def put_if_shared(self, value: Node) -> None:
        if value in self.graph.shared:
            self.put(value)

    def atom(self, value: Value) -> bool:
        """Write `value` if it needs no other node written first."""
        if type(value) is Tuple and not value.items:
            self.out += CODES["EMPTY_TUPLE"]
            return True
        write = _ATOMS.get(type(value))
        if write is None:
            return False
        write(self, value)
        return True

    def blob(self, blob: Blob) -> None:
        opcode, width = _BLOB_OPCODES[blob.kind]
        if blob.length >> 32 and width == 4:
            opcode, width = ("BINUNICODE8" if blob.kind == "str" else "BINBYTES8"), 8
        self.out += CODES[opcode] + blob.length.to_bytes(width, "little")
        self.pieces += (bytes(self.out), blob)
        self.out = bytearray()
        self.put(blob)


class _Plain(_Writer):
    """Depth first, as pickle's own writer does it; raises _OutOfOrder where that would not be faithful."""

    def __init__(self, graph: Graph, loadable: bool) -> None:
        super().__init__(graph, loadable)
        self.todo: list[_Step] = [graph.root]
        self.open: set[int] = set()  # what is being made: its parts are written, it is not
        self.order = 0
        self.rows: dict[tuple[RowForm, str | int], tuple[bytes, Callable[..., bytes], list[bytes | int]]] = {}

    def pickle(self) -> list[bytes | Blob]:
        todo = self.todo
        while todo:
            step = todo.pop()
            if isinstance(step, _Do):
                self.do(step)
            elif (slot := self.memo.get(id(step))) is not None:
                self.get(slot)
            elif type(step) is RowCall and self.row(step):
                self.leave_items_behind(step)
            elif not self.atom(step):
                self.start(step)
        return self.finish()

    def row(self, call: RowCall) -> bool:
        """Write `call` as its steps would, if it is a row and all that it reads from the memo is there."""
        form, reference, slot, memo = call.row, call.reference, self.slots, self.memo
        order, key, tag = reference.order, reference.key, reference.tag
        if form is None or order is None or slot < len(_BINPUT) or reference in self.graph.shared:
            return False
        if key is tag:
            return False
        known, known_key = memo.get(id(tag)), memo.get(id(key))
        pieces = self.rows.get((form, tag if known is None else known))
        if pieces is None:
            if any(id(each) not in memo for each in (*form.functions, *form.values) if each is not form.tag):
                return False
            pieces = self.rows[form, tag if known is None else known] = self.row_pieces(form, tag)
        if order < self.order:
            raise _OutOfOrder
        self.order = call.order or order
        start, pack, parts = pieces
        if known_key is None:
            text = key.encode("utf-8", "surrogatepass")
            self.out += start + len(text).to_bytes(4, "little") + text
            memo[id(key)] = slot
        else:
            self.out += start[: -len(_BINUNICODE)]
            self.get(known_key)
            slot -= 1  # of what follows the key, its put is left out
        parts[1::2] = range(slot, slot + len(parts) // 2)
        self.out += pack(*parts)[0 if known_key is None else len(_LONG_BINPUT) + 4 :]
        if known is None:
            memo[id(tag)] = slot + 1
        self.slots = slot + len(parts) // 2
        memo[id(call)] = self.slots - 1
        self.kept += (key, tag, call)
        return True

    def leave_items_behind(self, row: RowCall) -> None:
        """Leave in the source what comes behind `row`, which is on top of the stack; here nothing is left there."""

    def row_pieces(self, form: RowForm, tag: str) -> tuple[bytes, Callable[..., bytes], list[bytes | int]]:
        """What rows of the `form` start with, up to the length of the key, and what follows the key: bytes, and the
        slots that they end with, in turn.
        """
        pieces = _Pieces(self.graph, self.loadable)
        pieces.memo = self.memo
        key = "".join(("a", " key"))  # which nothing else is
        reference = PersistentId(Tuple([form.word, form.cls, key, tag, form.numel]))
        pieces.write(Call("REDUCE", form.functions[0], form.arguments(reference, None)))
        first, *parts = pieces.parts
        assert isinstance(first, bytes)
        start = first[: -4 - len(key) - len(_LONG_BINPUT)]
        parts = [_LONG_BINPUT, *parts]
        sizes = (f"{len(each)}sI" for each in parts[::2] if isinstance(each, bytes))
        return start, struct.Struct("<" + "".join(sizes)).pack, parts

    def do(self, step: _Do) -> None:
        if step.made is not None:
            self.open.discard(id(step.made))
        self.done(step.code, step.order, step.made)

    def done(self, code: bytes, order: int | None, made: Node | None) -> None:
        """Write `code`, behind the parts that it takes, and plan what is done to what it `made`."""
        if order is not None:
            if order < self.order:
                raise _OutOfOrder
            self.order = order
        self.out += code
        if made is not None:
            if isinstance(made, PersistentId):
                self.put_if_shared(made)
            else:
                self.put(made)
            if isinstance(made, Object) and made.effects:
                self.effects(made)

    def start(self, node: Value) -> None:
        """Plan the steps that make `node`."""
        if id(node) in self.open:
            raise _OutOfOrder
        if self.is_simple(node):
            self.write(node)
        elif isinstance(node, (List, Dict)) or (isinstance(node, Set) and not (self.loadable and node.effects)):
            self.out += _EMPTY[type(node)]
            self.put(node)
            if node.effects:
                self.effects(node)
        else:
            self.open.add(id(node))
            self.todo += _construction(node)[::-1]

    def is_simple(self, node: Value) -> bool:
        """Whether `node` is a call, id or tuple of a few parts, in them too, and nothing is done to it: as most tensors
        are. It can be written without steps. Looks at a few parts only, as it may be asked again for each of them.
        """
        memo, left = self.memo, _FEW
        todo = [node]
        while todo:
            node = todo.pop()
            if type(node) is RowCall and node.row:
                continue
            if not isinstance(node, (Tuple, PersistentId)) and not (
                isinstance(node, Call) and node.kind == "REDUCE" and not node.effects
            ):
                return False
            parts = _parts(node)
            left -= len(parts)
            if left < 0:
                return False
            todo += [part for part in parts if type(part) not in _ATOMS and id(part) not in memo]
        return True

    def write(self, node: Value) -> None:
        """Write `node`, which is simple, as its steps would."""
        memo = self.memo
        parts = _parts(node)
        if len(parts) > 3:
            self.out += _MARK
        for part in parts:
            if (slot := memo.get(id(part))) is not None:
                self.get(slot)
            elif (write := _ATOMS.get(type(part))) is not None:
                write(self, part)
            elif type(part) is not RowCall or not self.row(part):
                self.write(part)
        if isinstance(node, (PersistentId, Call)):
            self.done(_REDUCE if isinstance(node, Call) else _BINPERSID, node.order, node)
        else:
            self.out += _TUPLE[min(len(parts), 4)]
            if parts:
                self.put(node)

    def effects(self, target: Object) -> None:
        """Plan what is done to `target`, which was just written."""
        if isinstance(target, Set) and self.loadable:
            return
        steps: list[_Step] = []
        for effect in target.effects:
            steps += _doing(effect)
        self.todo += steps[::-1]


class _Pieces(_Plain):
    """Takes apart what it writes, at the slots of what it puts into the memo, which it leaves as it is."""

    def __init__(self, graph: Graph, loadable: bool) -> None:
        super().__init__(graph, loadable)
        self.out.clear()
        self.parts: list[bytes | int] = []

    def put(self, value: Value) -> None:  # noqa: ARG002 - nothing in a row is read from the memo again
        self.parts += (bytes(self.out) + _LONG_BINPUT, 0)
        self.out.clear()


class _Splicing(_Plain):
    """Leaves the items of mappings that are rows where the source has them, if it would write the same bytes."""

    def leave_items_behind(self, row: RowCall) -> None:
        while (items := row.next_items) and self.follow(items):
            self.pieces += (bytes(self.out), Blob("str", items.offset, items.length))
            self.out = bytearray()
            row = items.rows()[-1]

    def follow(self, items: RowItems) -> bool:
        """Do as if `items` were written, if they come next and would be what they are in the source."""
        memo, rows, starts = self.memo, items.rows(), items.starts
        names, n = items.values[::2], len(items.values)
        coming = self.todo[: -n - 1 : -1]
        if len(coming) < n or not all(map(is_, coming, items.values)) or not items.is_as_read():
            return False
        if self.slots != starts[0] or items.order < self.order:
            return False
        if any(memo.get(id(function)) != slot for function, slot in items.called.items()):
            return False
        texts = {*map(id, chain(names, items.keys))}  # those of one character are one object wherever they stand
        if len(texts) < n or not memo.keys().isdisjoint(texts):
            return False
        if not self.graph.shared.isdisjoint(row.reference for row in rows):
            return False
        tags = {(row.form, id(row.reference.tag)): row.reference.tag for row in rows}
        for (form, _), tag in tags.items():
            if form is None or form.tag_slot is None:
                return False
            for slot, value in zip(form.reads, form.values, strict=True):
                if memo.get(id(tag if slot == form.tag_slot else value)) != slot:
                    return False
        memo.update(zip(map(id, names), starts, strict=False))
        memo.update(zip(map(id, items.keys), (start + 1 for start in starts), strict=False))
        memo.update(zip(map(id, rows), (start - 1 for start in starts[1:]), strict=True))
        self.slots, self.order = starts[-1], rows[-1].order or 0
        del self.todo[-n:]
        return True


class _Replayed(_Writer):
    """Effect after effect, each on its own: push what it needs, do it, pop the result."""

    def pickle(self) -> list[bytes | Blob]:
        everything = [*self.graph.discarded, self.graph.root]
        calls: list[tuple[int, Node, Effect | None]] = []
        for node in walk(everything):
            if isinstance(node, (Call, PersistentId, FrozenSet)) and node.order is not None:
                calls.append((node.order, node, None))
            if isinstance(node, Object):
                calls += [(effect.order, node, effect) for effect in node.effects if effect.order is not None]
        for _, target, effect in sorted(calls, key=lambda call: call[0]):
            self.push(_construction(target) if effect is None else [target, *_doing(effect)])
            self.out += _POP
        self.push([self.graph.root])
        return self.finish()

    def push(self, steps: list[_Step]) -> None:
        """Write `steps`; what they name and the memo has not is made on the way, with what
        an edit (not the source) does to it.
        """
        todo = steps[::-1]
        while todo:
            step = todo.pop()
            if isinstance(step, _Do):
                self.out += step.code
                if step.made is not None:
                    self.put(step.made)
                    todo += _edited(step.made)
            elif (slot := self.memo.get(id(step))) is not None:
                self.get(slot)
            elif isinstance(step, (List, Dict, Set)):
                self.out += _EMPTY[type(step)]
                self.put(step)
                todo += _edited(step)
            elif not self.atom(step):
                todo += _construction(step)[::-1]


def _edited(made: Node) -> list[_Step]:
    """The steps, last first, of what an edit does to what was just `made`."""
    if not isinstance(made, Object):
        return []
    return [step for effect in made.effects if effect.order is None for step in _doing(effect)][::-1]


class _NotesReads(_Writer):
    """Notes which memo slots are read."""

    def __init__(self, graph: Graph, loadable: bool) -> None:
        super().__init__(graph, loadable)
        self.read: set[int] = set()

    def row(self, call: RowCall) -> bool:  # noqa: ARG002 - what is read stands in its steps
        return False

    def get(self, slot: int) -> None:
        self.read.add(slot)
        super().get(slot)


class _PutsWhatIsRead(_Writer):
    """Leaves out the puts that an earlier run over the same graph, whose puts are counted alike, never `read`."""

    read: set[int]
    puts = 0

    def row(self, call: RowCall) -> bool:  # noqa: ARG002 - which is read again stands in its steps
        return False

    def put(self, value: Value) -> None:
        number = self.puts
        self.puts += 1
        if number in self.read:
            super().put(value)
        else:
            self.kept.append(value)


_EMPTY: dict[type, bytes] = {List: CODES["EMPTY_LIST"], Dict: CODES["EMPTY_DICT"], Set: CODES["EMPTY_SET"]}


def _parts(node: Value) -> list[Value]:
    """What a tuple, a persistent id or a REDUCE is made of."""
    if isinstance(node, Tuple):
        return node.items
    return [node.callable, node.args] if isinstance(node, Call) else [node.id] if isinstance(node, PersistentId) else []


def _construction(node: Value) -> list[_Step]:
    """The steps that make `node` of its parts."""
    if isinstance(node, Tuple):
        n = len(node.items)
        return [*([_MARK_STEP] if n > 3 else []), *node.items, _Do(_TUPLE[min(n, 4)], made=node)]
    if isinstance(node, PersistentId):
        return [node.id, _Do(CODES["BINPERSID"], node.order, node)]
    if isinstance(node, FrozenSet):
        return [_MARK_STEP, *node.items, _Do(CODES["FROZENSET"], node.order, node)]
    if isinstance(node, Set):
        return [_SET, Tuple([_as_list(node)]), _Do(CODES["REDUCE"], made=node)]
    assert isinstance(node, Call)
    done = _Do(CODES[node.kind], node.order, node)
    if node.kind == "OBJ":
        assert isinstance(node.args, Tuple)
        return [_MARK_STEP, node.callable, *node.args.items, done]
    if node.kind == "NEWOBJ_EX":
        return [node.callable, node.args, node.kwargs, done]
    return [node.callable, node.args, done]


_SET = Global("builtins", "set")


def _as_list(members: Set) -> List:
    """What ``builtins.set`` takes: the opcode ADDITEMS is none of those that torch's unpickler knows."""
    result = List()
    for effect in members.effects:
        result.add(Effect("APPENDS", effect.values, effect.order))
    return result


def _doing(effect: Effect) -> list[_Step]:
    """The steps of `effect` on what lies on top of the stack."""
    done = _Do(CODES[effect.opcode], effect.order)
    if effect.opcode not in ("APPEND", "SETITEM", "BUILD"):
        return [_MARK_STEP, *effect.values, done]
    return [*effect.values, done] if effect.values else []  # an edit took its item away


# Atoms


def _write_int(w: _Writer, value: int) -> None:
    if 0 <= value < 256:
        w.out += _BININT1[value]
    elif 0 <= value < 65536:
        w.out += CODES["BININT2"] + value.to_bytes(2, "little")
    elif -(1 << 31) <= value < 1 << 31:
        w.out += CODES["BININT"] + value.to_bytes(4, "little", signed=True)
    else:
        data = value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "little", signed=True)
        n = len(data)
        w.out += CODES["LONG1"] + bytes([n]) if n < 256 else CODES["LONG4"] + n.to_bytes(4, "little")
        w.out += data


def _write_str(w: _Writer, value: str) -> None:
    data = value.encode("utf-8", "surrogatepass")
    if w.short_texts and len(data) < 256:
        w.out += CODES["SHORT_BINUNICODE"] + bytes([len(data)]) + data
    else:
        w.out += _with_number(_BINUNICODE, len(data)) + data
    w.put(value)


def _write_bytes(w: _Writer, value: bytes) -> None:
    if w.loadable:
        w.out += b"c_codecs\nencode\n"
        _write_str(w, value.decode("latin-1"))
        _write_str(w, "latin1")
        w.out += CODES["TUPLE2"] + CODES["REDUCE"]
    elif len(value) < 256:
        w.out += CODES["SHORT_BINBYTES"] + bytes([len(value)]) + value
    else:
        w.out += CODES["BINBYTES"] + len(value).to_bytes(4, "little") + value
    w.put(value)


def _write_bytearray(w: _Writer, value: ByteArray) -> None:
    if w.loadable:
        w.out += b"cbuiltins\nbytearray\n"
        _write_bytes(w, value.data)
        w.out += CODES["TUPLE1"] + CODES["REDUCE"]
    else:
        w.out += CODES["BYTEARRAY8"] + len(value.data).to_bytes(8, "little") + value.data
    w.put(value)


def _write_py2_string(w: _Writer, value: Py2String) -> None:
    n = len(value.data)
    w.out += CODES["SHORT_BINSTRING"] + bytes([n]) if n < 256 else CODES["BINSTRING"] + n.to_bytes(4, "little")
    w.out += value.data
    w.put(value)


def _write_global(w: _Writer, value: Global) -> None:
    try:
        names = f"{value.module}\n{value.name}\n".encode()
    except UnicodeEncodeError:
        names = b""
    if value.module and value.name and names.count(b"\n") == 2:
        w.out += CODES["GLOBAL"] + names
    else:  # GLOBAL is two lines of strict UTF-8, of which C's unpickler takes none that is empty
        for text in (value.module, value.name):
            if (slot := w.memo.get(id(text))) is not None:
                w.get(slot)
            else:
                _write_str(w, text)
        w.out += CODES["STACK_GLOBAL"]
    w.put(value)


def _write_extension(w: _Writer, value: Extension) -> None:
    for opcode, width in (("EXT1", 1), ("EXT2", 2), ("EXT4", 4)):
        if value.code < 1 << (8 * width):
            w.out += CODES[opcode] + value.code.to_bytes(width, "little")
            break
    w.put_if_shared(value)


_ATOMS: dict[type, Callable[..., None]] = {
    type(None): lambda w, value: w.out.extend(CODES["NONE"]),
    bool: lambda w, value: w.out.extend(CODES["NEWTRUE"] if value else CODES["NEWFALSE"]),
    int: _write_int,
    float: lambda w, value: w.out.extend(CODES["BINFLOAT"] + struct.pack(">d", value)),
    str: _write_str,
    bytes: _write_bytes,
    ByteArray: _write_bytearray,
    Py2String: _write_py2_string,
    Blob: _Writer.blob,
    Extension: _write_extension,
    Global: _write_global,
}
_BLOB_OPCODES = {
    "str": ("BINUNICODE", 4),
    "bytes": ("BINBYTES", 4),
    "bytearray": ("BYTEARRAY8", 8),
    "py2": ("BINSTRING", 4),
}
