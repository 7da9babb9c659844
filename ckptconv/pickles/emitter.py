"""Emit a graph as a pickle that does the same things in the same order.

There are two ways. The *plain* way works like pickle's own writer: each object is written where it is first needed,
followed by its effects. A pickle that ``torch.save`` wrote comes out byte for byte, with two exceptions: texts of one
character, because Python decodes equal ones to one object, and a tuple that contains itself. If the plain way would
change the order of effects (a value is read between two changes of it) or make an object before its parts, the
*replayed* way writes each effect on its own, in the order of the source.

A graph that torch's ``weights_only`` unpickler accepts is written with that unpickler's opcodes and the header of
protocol 2. Other graphs keep the protocol of their header, or get 2 if it is lower: with a header below protocol 3,
unpicklers map Python 2's module names to Python 3's, so it never falls below 3. Unpicklers accept every opcode
under every header, so the oldest opcode for a value is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
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
from ckptconv.pickles.machine import CODES
from ckptconv.pickles.rows import RowCall, RowForm, RowItems

# By the number of items; the last is for more than three.
_TUPLE = [CODES[name] for name in ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")]
_SHORT_TEXTS = 4  # the first protocol with an opcode for short texts
_MARK, _POP = CODES["MARK"], CODES["POP"]
# Each opcode with each operand, to be looked up for each value.
_BINPUT, _BINGET, _BININT1 = (
    [CODES[name] + bytes([n]) for n in range(256)] for name in ("BINPUT", "BINGET", "BININT1")
)
_LONG_BINPUT, _LONG_BINGET, _BINUNICODE = CODES["LONG_BINPUT"], CODES["LONG_BINGET"], CODES["BINUNICODE"]
_with_number = struct.Struct("<cI").pack


def emit(graph: Graph, *, loadable: bool, short: bool = False, splice: bool = False) -> list[bytes | Blob]:
    """Return the pickle of `graph` in pieces: bytes, and the blobs that stay in the source.

    Args:
        graph: The graph to write.
        loadable: Whether torch's ``weights_only`` unpickler accepts the graph. If so, use only its opcodes.
        short: Put into the memo only the values that are read from it again, which takes twice the time. Use the short
            opcode for texts if the header's protocol has it.
        splice: Also return a blob for items of mappings that the source contains in the same bytes.
    """
    if not graph.discarded:
        with suppress(_OutOfOrder):
            return _ShortPlain(graph, loadable).pickle() if short else _Plain(graph, loadable, splice).pickle()
    return (_ShortReplayed if short else _Replayed)(graph, False).pickle()


def pickle_of(graph: Graph, *, loadable: bool) -> bytes:
    """Return the pickle of `graph`, which has no blobs. `loadable` is as in :func:`emit`."""
    return b"".join(part for part in emit(graph, loadable=loadable) if isinstance(part, bytes))


class _OutOfOrder(Exception):
    """Raised if the plain way would change the order of effects."""


class _Do:
    """A planned step: write the opcode ``code`` after its operands.

    Attributes:
        code: The opcode.
        made: The node that is complete after the opcode, or None.
        order: The position of the opcode in the source, or None if an edit has added it.
    """

    __slots__ = ("code", "made", "order")

    def __init__(self, code: bytes, order: int | None = None, made: Node | None = None) -> None:
        self.code = code
        self.order = order
        self.made = made


_Step: TypeAlias = "Value | _Do"
_MARK_STEP = _Do(_MARK)


class _Writer:
    """The output and the memo of one pickle, and the functions that write atoms. The base of both ways of writing."""

    short_texts = False

    def __init__(self, graph: Graph, loadable: bool) -> None:
        self.graph = graph
        self.loadable = loadable
        self.pieces: list[bytes | Blob] = []
        self.out = bytearray(CODES["PROTO"] + bytes([2 if loadable else max(graph.protocol, 2)]))
        self.memo: dict[int, int] = {}
        self.slots = 0
        self.kept: list[object] = []  # keeps alive the objects whose ids are in the memo

    def pickle(self) -> list[bytes | Blob]:
        """Return the pieces of the pickle: bytes, and blobs that are copied from the source."""
        raise NotImplementedError

    def finish(self) -> list[bytes | Blob]:
        """Write STOP and return the pieces."""
        self.out += CODES["STOP"]
        return [*self.pieces, bytes(self.out)]

    def put(self, value: Value) -> None:
        """Put `value`, which was just written, into the next memo slot."""
        slot = self.slots
        self.slots += 1
        self.memo[id(value)] = slot
        self.kept.append(value)
        self.out += _BINPUT[slot] if slot < 256 else _with_number(_LONG_BINPUT, slot)

    def get(self, slot: int) -> None:
        """Write a read of the memo slot `slot`."""
        self.out += _BINGET[slot] if slot < 256 else _with_number(_LONG_BINGET, slot)

    def put_if_shared(self, value: Node) -> None:
        """Put `value` into the memo if the source refers to it more than once."""
        if value in self.graph.shared:
            self.put(value)

    def atom(self, value: Value) -> bool:
        """Write `value` if it is an atom or an empty tuple. Return whether it was written."""
        write = _ATOMS.get(type(value))
        if write is not None:
            write(self, value)
            return True
        if type(value) is not Tuple or value.items:
            return False
        self.out += CODES["EMPTY_TUPLE"]
        return True

    def blob(self, blob: Blob) -> None:
        """Write the opcode and length of `blob`, and add the blob to the pieces."""
        opcode, width = _BLOB_OPCODES[blob.kind]
        if blob.length >> 32 and width == 4:
            opcode, width = ("BINUNICODE8" if blob.kind == "str" else "BINBYTES8"), 8
        self.out += CODES[opcode] + blob.length.to_bytes(width, "little")
        self.pieces += (bytes(self.out), blob)
        self.out = bytearray()
        self.put(blob)


class _Plain(_Writer):
    """The plain way, depth first. Raises _OutOfOrder if the result would not do the same as the source.

    If `splice` is set, items of rows are left in the source if the same bytes would be written.
    """

    def __init__(self, graph: Graph, loadable: bool, splice: bool = False) -> None:
        super().__init__(graph, loadable)
        self.splice = splice
        self.todo: list[_Step] = [graph.root]
        self.open: set[int] = set()  # ids of nodes that are started and not complete
        self.order = 0
        # the pieces of rows by form and tag; None after one row, because making pieces takes as long as writing a row
        self.rows: dict[tuple[RowForm, str | int], tuple[bytes, Callable[..., bytes], list[bytes | int]] | None] = {}

    def pickle(self) -> list[bytes | Blob]:
        """Return the pieces of the pickle."""
        self.run()
        return self.finish()

    def run(self) -> None:
        """Do all planned steps, including those that are added meanwhile."""
        todo = self.todo
        while todo:
            step = todo.pop()
            if isinstance(step, _Do):
                if step.order is not None:
                    self.advance(step.order)
                self.out += step.code
                if step.made is not None:
                    self.done(step.made)
            elif (slot := self.memo.get(id(step))) is not None:
                self.get(slot)
            elif type(step) is RowCall and self.row(step):
                if self.splice:
                    self.leave_items(step)
            elif not self.atom(step):
                self.start(step)

    def row(self, call: RowCall) -> bool:
        """Write `call` as one row. Return whether it was written.

        It is not written if it is the first of its kind, if it was changed since it was read, or if the memo lacks an
        object that it needs. Raises _OutOfOrder if a later effect of the source was written already.
        """
        form, reference, slot, memo = call.row, call.reference, self.slots, self.memo
        key, tag = reference.key, reference.tag
        if form is None or key is tag or slot < len(_BINPUT) or reference in self.graph.shared:
            return False
        known, known_key = memo.get(id(tag)), memo.get(id(key))
        kind = form, tag if known is None else known
        pieces = self.rows.get(kind)
        if pieces is None:
            is_first = kind not in self.rows and call.next_items is None
            self.rows[kind] = None
            if is_first or any(id(x) not in memo for x in (*form.functions, *form.values) if x is not form.tag):
                return False
            pieces = self.rows[kind] = self.row_pieces(form, tag)
        for order in (reference.order, call.order):
            if order is not None:  # an edit may have added the row
                self.advance(order)
        start, pack, parts = pieces
        if known_key is None:
            text = key.encode("utf-8", "surrogatepass")
            self.out += start + len(text).to_bytes(4, "little") + text
            memo[id(key)] = slot
        else:
            self.out += start[: -len(_BINUNICODE)]
            self.get(known_key)
            slot -= 1  # the put of the key is left out
        parts[1::2] = range(slot, slot + len(parts) // 2)
        self.out += pack(*parts)[0 if known_key is None else len(_LONG_BINPUT) + 4 :]
        if known is None:
            memo[id(tag)] = slot + 1
        self.slots = slot + len(parts) // 2
        memo[id(call)] = self.slots - 1
        self.kept += (key, tag, call)
        return True

    def row_pieces(self, form: RowForm, tag: str) -> tuple[bytes, Callable[..., bytes], list[bytes | int]]:
        """Return the pieces of rows of this `form` with this `tag`.

        Returns:
            The bytes before the length of the key, a function that packs the bytes after the key, and the arguments of
            this
            function: bytes and a memo slot in turn.
        """
        pieces = _Pieces(self.graph, self.loadable)
        pieces.memo = self.memo
        key = b"key".decode()  # a new object, which is not in the memo
        reference = PersistentId(Tuple([form.word, form.cls, key, tag, form.numel]))
        pieces.todo = [Call("REDUCE", form.functions[0], form.arguments(reference, None))]
        pieces.run()
        first, *parts = pieces.parts
        assert isinstance(first, bytes)
        start = first[: -4 - len(key) - len(_LONG_BINPUT)]
        parts = [_LONG_BINPUT, *parts]
        sizes = (f"{len(each)}sI" for each in parts[::2] if isinstance(each, bytes))
        return start, struct.Struct("<" + "".join(sizes)).pack, parts

    def done(self, made: Node) -> None:
        """Put the node `made`, which was just written, into the memo, and plan its effects."""
        self.open.discard(id(made))
        if isinstance(made, PersistentId):
            self.put_if_shared(made)
        else:
            self.put(made)
        if isinstance(made, Object) and made.effects:
            self.effects(made)

    def advance(self, order: int) -> None:
        """Record that the effect at position `order` of the source is written.

        Raises _OutOfOrder if a later effect was written already.
        """
        if order < self.order:
            raise _OutOfOrder
        self.order = order

    def start(self, node: Value) -> None:
        """Write `node`, if it is a list, dict or set, or else plan the steps that construct it.

        Raises _OutOfOrder if the node is being constructed already: then it contains itself.
        """
        if id(node) in self.open:
            raise _OutOfOrder
        if isinstance(node, (List, Dict)) or (isinstance(node, Set) and not (self.loadable and node.effects)):
            self.out += _EMPTY[type(node)]
            self.put(node)
            if node.effects:
                self.effects(node)
        else:
            self.open.add(id(node))
            self.todo += _construction(node)[::-1]

    def effects(self, target: Object) -> None:
        """Plan the effects on `target`, which was just written.

        A set in a loadable pickle has none: its members are arguments of ``builtins.set``.
        """
        if isinstance(target, Set) and self.loadable:
            return
        steps: list[_Step] = []
        for effect in target.effects:
            steps += _effect_steps(effect)
        self.todo += steps[::-1]

    def leave_items(self, row: RowCall) -> None:
        """Leave in the source the items after `row`, which was just written, if they come next and are unchanged."""
        while (items := row.next_items) and self.follow(items):
            self.pieces += (bytes(self.out), Blob("str", items.offset, items.length))
            self.out = bytearray()
            row = items.rows()[-1]

    def follow(self, items: RowItems) -> bool:
        """Update the state as if `items` were written.

        Return False if they do not come next or would be written in other bytes.
        """
        memo, rows, starts = self.memo, items.rows(), items.starts
        names, n = items.values[::2], len(items.values)
        coming = self.todo[: -n - 1 : -1]
        if len(coming) < n or not all(map(is_, coming, items.values)) or not items.is_as_read():
            return False
        if self.slots != starts[0] or items.order < self.order:
            return False
        if any(memo.get(id(function)) != slot for function, slot in items.called.items()):
            return False
        texts = {*map(id, chain(names, items.keys))}  # equal texts of one character are one object
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


class _Pieces(_Plain):
    """A writer that splits its output after each put into the memo, so that the memo slots can be filled in later."""

    def __init__(self, graph: Graph, loadable: bool) -> None:
        super().__init__(graph, loadable)
        self.out.clear()
        self.parts: list[bytes | int] = []

    def put(self, value: Value) -> None:  # noqa: ARG002 - a row reads nothing from the memo that it has put there
        self.parts += (bytes(self.out) + _LONG_BINPUT, 0)
        self.out.clear()


class _Replayed(_Writer):
    """The replayed way of writing, for effects whose order matters.

    For each effect in the order of the source: push its operands, write it, and pop the result.
    """

    def pickle(self) -> list[bytes | Blob]:
        """Return the pieces of the pickle."""
        everything = [*self.graph.discarded, self.graph.root]
        calls: list[tuple[int, Node, Effect | None]] = []
        for node in walk(everything):
            if isinstance(node, (Call, PersistentId, FrozenSet)) and node.order is not None:
                calls.append((node.order, node, None))
            if isinstance(node, Object):
                calls += [(effect.order, node, effect) for effect in node.effects if effect.order is not None]
        for _, target, effect in sorted(calls, key=lambda call: call[0]):
            if effect is None and id(target) in self.memo:  # an effect that an edit has added needed it earlier
                continue
            self.push(_construction(target) if effect is None else [target, *_effect_steps(effect)])
            self.out += _POP
        self.push([self.graph.root])
        return self.finish()

    def push(self, steps: list[_Step]) -> None:
        """Write `steps`.

        A node that is not in the memo yet is constructed first, with the effects that an edit has added to it.
        """
        todo = steps[::-1]
        while todo:
            step = todo.pop()
            if isinstance(step, _Do):
                self.out += step.code
                if step.made is not None:
                    self.put(step.made)
                    todo += _added_effects(step.made)
            elif (slot := self.memo.get(id(step))) is not None:
                self.get(slot)
            elif isinstance(step, (List, Dict, Set)):
                self.out += _EMPTY[type(step)]
                self.put(step)
                todo += _added_effects(step)
            elif not self.atom(step):
                todo += _construction(step)[::-1]


def _added_effects(made: Node) -> list[_Step]:
    """Return the steps of the effects that an edit has added to `made`, in reverse order.

    These are the effects without an order. The list is empty if there are none or `made` is not an Object.
    """
    if not isinstance(made, Object):
        return []
    return [step for effect in made.effects if effect.order is None for step in _effect_steps(effect)][::-1]


class _Short(_Writer):
    """A writer that puts only values into the memo that are read again.

    It writes the pickle twice. The first run finds the puts that are needed.

    Args:
        graph: The graph to write.
        loadable: Whether to use only the opcodes of torch's unpickler.
        needed: The numbers of the puts that are needed, counted from 0, or None for the first run.
    """

    def __init__(self, graph: Graph, loadable: bool, needed: set[int] | None = None) -> None:
        super().__init__(graph, loadable)
        self.needed = needed
        self.short_texts = not loadable and graph.protocol >= _SHORT_TEXTS
        self.read: set[int] = set()
        self.puts = 0

    def pickle(self) -> list[bytes | Blob]:
        """Return the pieces of the pickle."""
        pieces = super().pickle()
        return pieces if self.needed is not None else type(self)(self.graph, self.loadable, self.read).pickle()

    def row(self, call: RowCall) -> bool:  # noqa: ARG002 - only the steps of a row show what is read again
        return False

    def get(self, slot: int) -> None:
        self.read.add(slot)
        super().get(slot)

    def put(self, value: Value) -> None:
        number = self.puts
        self.puts += 1
        if self.needed is None or number in self.needed:
            super().put(value)
        else:
            self.kept.append(value)


class _ShortPlain(_Short, _Plain):
    """The plain way with as few puts as possible."""


class _ShortReplayed(_Short, _Replayed):
    """The replayed way with as few puts as possible."""


_EMPTY: dict[type, bytes] = {List: CODES["EMPTY_LIST"], Dict: CODES["EMPTY_DICT"], Set: CODES["EMPTY_SET"]}


def _construction(node: Value) -> list[_Step]:
    """Return the steps that construct `node`, without its effects: its operands, and the opcode."""
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
    """Return the argument of ``builtins.set`` for `members`. Torch's unpickler does not know the opcode ADDITEMS."""
    result = List()
    for effect in members.effects:
        result.add(Effect("APPENDS", effect.values, effect.order))
    return result


def _effect_steps(effect: Effect) -> list[_Step]:
    """Return the steps of `effect` on the object on top of the stack.

    There are none if an edit has removed its item.
    """
    done = _Do(CODES[effect.opcode], effect.order)
    if effect.opcode not in ("APPEND", "SETITEM", "BUILD"):
        return [_MARK_STEP, *effect.values, done]
    return [*effect.values, done] if effect.values else []  # an edit has removed the item


# Atoms


def _with_length(short: str, long: str, data: bytes) -> bytes:
    """Return an opcode, the length of `data`, and `data`.

    The opcode is `short`, with a length of one byte, for less than 256 bytes, or else `long` with a length of four
    bytes.
    """
    n = len(data)
    return (CODES[short] + bytes([n]) if n < 256 else CODES[long] + n.to_bytes(4, "little")) + data


def _write_int(w: _Writer, value: int) -> None:
    if 0 <= value < 256:
        w.out += _BININT1[value]
    elif 0 <= value < 65536:
        w.out += CODES["BININT2"] + value.to_bytes(2, "little")
    elif -(1 << 31) <= value < 1 << 31:
        w.out += CODES["BININT"] + value.to_bytes(4, "little", signed=True)
    else:
        data = value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "little", signed=True)
        w.out += _with_length("LONG1", "LONG4", data)


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
    else:
        w.out += _with_length("SHORT_BINBYTES", "BINBYTES", value)
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
    w.out += _with_length("SHORT_BINSTRING", "BINSTRING", value.data)
    w.put(value)


def _write_global(w: _Writer, value: Global) -> None:
    try:
        names = f"{value.module}\n{value.name}\n".encode()
    except UnicodeEncodeError:
        names = b""
    if value.module and value.name and names.count(b"\n") == 2:
        w.out += CODES["GLOBAL"] + names
    else:  # GLOBAL takes two lines of strict UTF-8, and C's unpickler refuses empty ones
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
