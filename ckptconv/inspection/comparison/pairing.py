"""Walk two graphs at the same time: pair tensors by path, and compare all objects that are not tensors.

Objects are paired by their paths, so the order of keys makes no difference. Members of sets are paired by their values.
A pair of nodes is visited only once, even if both occur at several common paths. So an object that is shared on one
side and stored twice on the other counts as the same. Values that pickles can write in several ways (bytes, sets,
bytearrays, names of Python 2) are compared after decoding.
"""

from __future__ import annotations

import codecs
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import field
from itertools import takewhile
from typing import TypeAlias

from ckptconv.byteranges.reading import read, same_streams
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.describe import describe, is_flat
from ckptconv.checkpoint.index import leaf_of
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import TensorReader, device_arguments, is_word, strided_part, torch_device
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import LimitError, count, size
from ckptconv.formats.layout import blob_bytes
from ckptconv.inspection.comparison.differences import OnlyIn, OtherDifference
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
    Extension,
    FrozenSet,
    Global,
    List,
    Node,
    Object,
    PersistentId,
    Py2String,
    Set,
    Tuple,
    Value,
    args_of,
    children,
    imported_name,
    members_of,
    strings_of,
    type_of,
)
from ckptconv.pickles.machine import HASHED_AS_IT_IS
from ckptconv.pickles.paths import Place, child_places, key_segment, parts_listed
from ckptconv.work import work

KEY_SIZE = 4096  # atoms, or kilobytes, of the largest key or member that is compared by its meaning
_LATIN_1 = ("latin1", "latin-1", "iso-8859-1")
#: A key or member as a kind and a value, which can be compared and sorted.
Comparable: TypeAlias = tuple[str, object]
#: None if it contains an object or is too large.
Meant: TypeAlias = "Comparable | None"
_SETS = {"builtins.set": "set", "builtins.frozenset": "frozenset"}


class Side:
    """One of the two checkpoints, after edits of its names, with caches of facts about its nodes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.protocol = checkpoint.graph.protocol
        self.leaf = leaf_of(checkpoint.tensor_nodes)
        self.storages = checkpoint.index.storage_of
        self.reader = TensorReader(self.storages, str(checkpoint.source.path))
        self.root = Place(None, "", checkpoint.graph.root, 0)
        self.only: list[OnlyIn] = []
        self.listed: set[int] = set()  # nodes below objects that the other side does not have
        self.shown: set[int] = set()  # arguments and states below such objects
        self.descriptions: dict[int, str] = {}
        self.meant: dict[int, Meant] = {}  # keys and members, by the ids of their nodes
        self.sorted: dict[int, list[Comparable] | None] = {}

    def tensor(self, node: Value) -> TensorInfo | None:
        """Return the tensor that the call `node` makes, or None if `node` does not make a tensor that has a path."""
        return self.checkpoint.tensor_nodes.get(id(node)) if isinstance(node, Call) else None

    def at(self, place: Place) -> TensorInfo:
        """Return the tensor at `place`.

        A node can occur at several places. Then the tensors at all places but the first are marked as tied to the
        first.
        """
        return self.checkpoint.tensors.get(place.path) or self.checkpoint.tensor_nodes[id(place.node)]

    def facts(self, place: Place) -> tuple[str, str, tuple[int, ...], int, str | None]:
        """Return the path, dtype, shape, bytes, and tie (a path or None) of the tensor at `place`."""
        info = self.at(place)
        return place.path, info.dtype, info.shape, info.nbytes, info.tied_to

    def inner_tensor(self, node: Value) -> TensorInfo | None:
        """Return the strided tensor that `node` makes, even if that is only a component of another tensor.

        None without one.
        """
        part = strided_part(node) if isinstance(node, Call) else None
        return self.reader.strided_or_none(part.function, part.args.items) if part else None

    def name(self, node: Value) -> str:
        """Return the name that unpickling looks up for `node`, after translation from Python 2.

        Empty if it is not a global.
        """
        return imported_name(node, self.protocol) if isinstance(node, Global) else ""

    def kind(self, node: Value) -> str:
        """Return the type of `node` in one or two words. For a call, return the name of the class."""
        if isinstance(node, Call):
            name = self.name(node.callable)
            data = self.data(node)
            return data.kind if data else _SETS.get(name) or name or "object"
        if isinstance(node, Blob):
            return node.kind
        return _KINDS.get(type(node)) or type_of(node).__name__

    def data(self, node: Value) -> _Data | None:
        """Return `node` as text or bytes, also if it is a call that makes bytes. Return None for all other nodes."""
        if isinstance(node, str):
            return _Data("str", node.encode("utf-8", "surrogatepass"))
        if isinstance(node, bytes):
            return _Data("bytes", node)
        if isinstance(node, (Py2String, ByteArray)):
            return _Data(_KINDS[type(node)], node.data)
        if isinstance(node, Blob):
            return _Data(node.kind, blob_bytes(self.checkpoint, node))
        if not isinstance(node, Call) or node.effects or not isinstance(node.args, Tuple) or len(node.args.items) > 2:
            return None
        name, args = self.name(node.callable), node.args.items
        if name == "_codecs.encode" and len(args) == 2:
            return self.encoded("bytes", args)
        if name in ("builtins.bytes", "builtins.bytearray"):
            kind = name.removeprefix("builtins.")
            if len(args) == 2:
                return self.encoded(kind, args)
            inner = self.data(args[0]) if args and not isinstance(args[0], ByteArray) else None
            if inner and inner.kind == "bytes" and kind == "bytearray":
                return _Data(kind, inner.of, inner.is_text)
            return _Data(kind, b"") if not args else None
        return None

    def encoded(self, kind: str, args: list[Value]) -> _Data | None:
        """Return the bytes that `args`, a text and the encoding Latin-1, stand for in pickles of protocol 2.

        Return None if `args` are different.
        """
        text, encoding = args
        if encoding not in _LATIN_1:
            return None
        if isinstance(text, Blob) and text.kind == "str":
            return _Data(kind, blob_bytes(self.checkpoint, text), is_text=True)
        try:
            return _Data(kind, text.encode("latin-1")) if isinstance(text, str) else None
        except UnicodeEncodeError:
            return None

    def members(self, node: Value) -> list[Value] | None:
        """Return the members of the set `node`. Return None if `node` is not a set."""
        return None if isinstance(node, (List, Tuple)) else members_of(node)

    def set_of(self, node: Value) -> Node | None:
        """Return the node that contains the members of the set `node`. Return None if `node` is not a set.

        For a call that makes a set of a list, this is the list. Otherwise it is `node` itself.
        """
        if isinstance(node, Call) and members_of(node, 0) is not None:
            made_of = args_of(node)
            return made_of[0] if made_of and isinstance(made_of[0], Node) else node
        return node if isinstance(node, (Set, FrozenSet)) else None

    def words(self, node: Value) -> str:
        """Return a short description of `node`. Descriptions of nodes are cached."""
        if not isinstance(node, Node):
            return describe(node)
        if id(node) not in self.descriptions:  # a node can occur at any number of paths
            self.descriptions[id(node)] = self._words(node)
        return self.descriptions[id(node)]

    def _words(self, node: Node) -> str:
        """Return the description of `node` without the cache."""
        if isinstance(node, Call) and (info := self.tensor(node)):
            return f"a tensor, {info.dtype} {list(info.shape)}"
        if isinstance(node, PersistentId):
            storage = self.storages.get(id(node))
            return f"storage of {size(storage.nbytes)} on {storage.device}" if storage else "a reference"
        data = self.data(node)
        if data and isinstance(node, Call):
            return describe(data.of) if isinstance(data.of, bytes) else f"{data.kind} of {data.of.length:,} bytes"
        if isinstance(node, (Dict, List, Tuple, Set, FrozenSet)) and not is_flat(node):
            n = sum(1 for _ in node.pairs()) if isinstance(node, Dict) else len(self.members(node) or children(node))
            return f"{self.kind(node)} of {count(n, 'item')}"
        if isinstance(node, Call) and isinstance(node.callable, Global) and any(node.pairs()):
            return f"{self.kind(node).rpartition('.')[2]} of {count(sum(1 for _ in node.pairs()), 'item')}"
        return describe(node)


_KINDS: dict[type, str] = {
    type(None): "None",
    Dict: "dict",
    List: "list",
    Tuple: "tuple",
    Set: "set",
    FrozenSet: "frozenset",
    Py2String: "py2",
    ByteArray: "bytearray",
    Global: "global",
    Extension: "extension",
    PersistentId: "storage",
}


@dataclass(frozen=True)
class _Data:
    """The bytes of a text or bytes object, in memory or as a range of the file.

    Attributes:
        kind: Its type.
        of: The bytes, or the range.
        is_text: Whether the range contains UTF-8 text, from which the bytes have to be encoded as Latin-1.
    """

    kind: str
    of: bytes | ByteRange
    is_text: bool = False

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, encoded as Latin-1 if the range contains text."""
        chunks = iter([self.of]) if isinstance(self.of, bytes) else read(self.of)
        if not self.is_text:
            yield from chunks
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for chunk in chunks:
            yield decoder.decode(chunk).encode("latin-1", "xmlcharrefreplace")
        yield decoder.decode(b"", True).encode("latin-1", "xmlcharrefreplace")


@dataclass(slots=True)
class Meaning:
    """A computation of the meaning of a key or of a member of a set: a value that can be compared between both sides.

    The meaning of a tuple or frozenset is a number that equal items share. So each is visited once, even if it is large
    and occurs often.

    Attributes:
        side: The side that contains the key.
        numbers: The numbers of tuples and frozensets, common to both sides.
        room: How many atoms may still be visited. Large byte strings count as several.
    """

    side: Side
    numbers: dict[object, int]
    room: int = KEY_SIZE

    def of(self, value: Value, depth: int) -> Meant:
        """Return the meaning of `value`.

        Return None if it contains an object, is too large, or is nested deeper than `depth`.
        """
        if id(value) in self.side.meant:
            return self.side.meant[id(value)]
        data = self.side.data(value)
        self.room -= 1 + (len(data.of) >> 10 if data and isinstance(data.of, bytes) else 0)
        if depth < 0 or self.room < 0:
            return None
        if data:
            return None if isinstance(data.of, ByteRange) else (data.kind, data.of)
        if isinstance(value, Global):
            return "global", self.side.name(value)
        if not isinstance(value, Node):
            return _atom(value)
        self.side.meant[id(value)] = meant = self.of_items(value, depth)
        return meant

    def of_items(self, value: Node, depth: int) -> Meant:
        """Return the meaning of the tuple or frozenset `value`, from the meanings of its items.

        None for all other nodes.
        """
        is_tuple = isinstance(value, Tuple)
        items = value.items if isinstance(value, Tuple) else self.side.members(value)
        if items is None or not (is_tuple or self.side.kind(value) == "frozenset"):
            return None
        meanings: list[Comparable] = []
        for item in items:
            meant = self.of(item, depth - 1)
            if meant is None:
                return None
            meanings.append(meant)
        kind, same = ("tuple", tuple(meanings)) if is_tuple else ("frozenset", tuple(sorted(meanings)))
        return kind, self.numbers.setdefault((kind, same), len(self.numbers))


def node_of_arguments(word: Call) -> Value:
    """Return the node with the arguments of `word`, a call that makes a ``torch.device`` or ``torch.Size``."""
    args = args_of(word)
    return args[0] if len(args) == 1 and isinstance(args[0], Tuple) else word.args


def arguments_in(word: Call) -> list[Comparable]:
    """Return the arguments of `word`, a call that makes a ``torch.device`` or ``torch.Size``, in comparable form."""
    inside = node_of_arguments(word)
    return [_atom(item) for item in inside.items] if isinstance(inside, Tuple) else []


def _atom(value: Value) -> Comparable:
    """Return `value` as a pair of its type and a value that can be sorted. For a node, this is its id."""
    if isinstance(value, float):
        return "float", struct.pack(">d", value + 0.0 if value == value else float("nan"))  # -0.0 is 0.0
    if value is None or isinstance(value, bool):
        return type(value).__name__, int(bool(value))
    if isinstance(value, int) and abs(value) >= HASHED_AS_IT_IS:
        return "large int", hex(value)
    return ("node", id(value)) if isinstance(value, Node) else (type(value).__name__, value)


_STEPS = 6  # of work for a pair of nodes
_KEY_DEPTH = 16  # levels of a key or member that is compared by its meaning


@dataclass
class Pairing:
    """The walk through the sides `a` and `b`, and its results.

    Attributes:
        a: The first side.
        b: The second side.
        tensors_alone: Whether to pair only the tensors that are direct items of the roots.
        passed_over: The paths on each side that are not compared. With `tensors_alone`, other objects are added.
        equal_rows: Takes pairs of values with the same name. Returns the tensors of each side that are known to be
            equal, by the ids of their nodes.
        tensors: The pairs of places at which both sides have a tensor.
        equal: The tensors of the first side that are not in `tensors`, because they are known to be equal.
        storages: The pairs of places at which both sides have a storage without a tensor.
        others: The differences between objects that are not tensors.
    """

    a: Side
    b: Side
    tensors_alone: bool
    passed_over: tuple[list[str], list[str]]
    equal_rows: Callable[[list[tuple[Value, Value]]], tuple[dict[int, TensorInfo], dict[int, TensorInfo]]]
    tensors: list[tuple[Place, Place]] = field(default_factory=list)
    equal: list[TensorInfo] = field(default_factory=list)
    storages: list[tuple[Place, Place]] = field(default_factory=list)
    others: list[OtherDifference] = field(default_factory=list)

    def __post_init__(self) -> None:
        opcodes = self.a.checkpoint.graph.opcodes + self.b.checkpoint.graph.opcodes
        self._work = work()
        self._room = LIMITS.path_characters_unpickled + LIMITS.path_characters_each * opcodes
        self._shared = self.a.checkpoint.graph.shared, self.b.checkpoint.graph.shared  # nodes that can occur again
        self._seen: set[int] = set()  # pairs, each as one number, which takes less memory
        self._listed: set[tuple[int, int]] = set()  # pairs of arguments and states that were looked into
        self._alike: dict[tuple[object, ...], bool] = {}
        self._meanings: dict[object, int] = {}  # numbers of tuples and frozensets that are keys or members

    def run(self) -> None:
        """Walk through both graphs, and fill the attributes.

        Raises LimitError if the graphs share nodes in ways that take too much work.
        """
        if self.tensors_alone:
            self._items(self.a.root, self.b.root)
            return
        todo = [self.b.root, self.a.root]  # alternating, because a list of a million pairs takes more memory
        while todo:
            a, b = todo.pop(), todo.pop()
            self._step(a)
            if self._differ(a, b):
                todo += self._pairs_below(a, b)[::-1]

    def same_parts(self, a: Call, b: Call) -> tuple[bool, list[tuple[TensorInfo, TensorInfo]]]:
        """Compare the calls `a` and `b`, which make tensors without a storage of their own, such as sparse ones.

        Return whether they are the same except for the tensors inside them, and the pairs of these inner tensors.
        """
        same = True
        tensors = []
        seen: set[tuple[int, int]] = set()
        todo: list[tuple[Value, Value]] = [(a, b)]
        while todo:
            left, right = todo.pop()
            self._step(None)
            one, other = self.a.inner_tensor(left), self.b.inner_tensor(right)
            if one and other:
                tensors.append((one, other))
                if one.kind == other.kind == "quantized":  # its scale and zero point are arguments next to its storage
                    todo.append((_quantizer(left), _quantizer(right)))
            elif one or other or not self._same_alone(left, right):
                same = False
            elif isinstance(left, Node) and isinstance(right, Node) and (id(left), id(right)) not in seen:
                seen.add((id(left), id(right)))
                parts = _parts(left, self.a), _parts(right, self.b)
                same = same and len(parts[0]) == len(parts[1])
                todo += list(zip(*parts, strict=False))[::-1]
        return same, tensors

    # Steps

    def _step(self, place: Place | None) -> None:
        """Charge the work for one pair, and the length of the path of `place`.

        Raise LimitError if a limit is exceeded.
        """
        self._work.charge(_STEPS)
        if place:
            place.length = len(place.segment) + (place.parent.length if place.parent else 0)
            self._room -= place.length
        if self._room < 0:
            raise LimitError("the paths in the two are too long", where=self.a.checkpoint.source.path)

    def _differ(self, a: Place, b: Place) -> bool:
        """Record a difference between the nodes at `a` and `b`.

        Return whether their children have to be compared too.
        """
        left, right = a.node, b.node
        tensors = bool(self.a.tensor(left)), bool(self.b.tensor(right))
        if isinstance(left, Call) and isinstance(right, Call) and all(tensors):
            self.tensors.append((a, b))
            if not (self.a.leaf(left) or self.b.leaf(right)):
                return False  # most tensors have nothing inside
        elif any(tensors):
            self._other(a, b)
            return False
        elif isinstance(left, PersistentId) and isinstance(right, PersistentId):
            self.storages.append((a, b))
            return False
        elif not self._same_alone(left, right):
            self._other(a, b)
            if not (isinstance(left, Object) and isinstance(right, Object)):
                return False
        if not (isinstance(left, Node) and isinstance(right, Node)) or id(left) << 64 | id(right) in self._seen:
            return False
        if self.a.data(left) and self.b.data(right):
            return False
        if isinstance(left, (Dict, List)) and isinstance(right, (Dict, List)) and not (left.effects or right.effects):
            return False
        self._seen.add(id(left) << 64 | id(right))
        return True

    def _same_alone(self, a: Value, b: Value) -> bool:
        """Return whether `a` and `b` are the same without their children.

        Nodes whose children are never visited, such as byte strings, are compared completely.
        """
        if type(a) is type(b) and isinstance(a, (str, bytes, int)):
            return a == b
        if not (isinstance(a, Node) and isinstance(b, Node)):
            return self._is_same(a, b)
        if a not in self._shared[0] and b not in self._shared[1]:
            return self._is_same(a, b)
        pair = id(a), id(b)
        if pair not in self._alike:  # a text of gigabytes can occur at any number of paths
            self._alike[pair] = self._is_same(a, b)
        return self._alike[pair]

    def _is_same(self, a: Value, b: Value) -> bool:
        """Return the result of :meth:`_same_alone`, without its cache."""
        data = self.a.data(a), self.b.data(b)
        if data[0] and data[1]:
            return data[0].kind == data[1].kind and same_streams(data[0].chunks(), data[1].chunks())
        if self.a.kind(a) != self.b.kind(b):
            return False
        if isinstance(a, Global):
            return self.a.name(a) == self.b.name(b)
        if isinstance(a, Extension) and isinstance(b, Extension):
            return a.code == b.code
        if isinstance(a, float) and isinstance(b, float):
            return a == b or (a != a and b != b)
        if not isinstance(a, Node):
            return a == b
        sets = self.a.set_of(a), self.b.set_of(b)
        if sets[0] and sets[1]:
            pair = "set", id(sets[0]), id(sets[1])
            if pair not in self._alike:
                self._alike[pair] = self._sorted(a, self.a) == self._sorted(b, self.b)
            return self._alike[pair]
        if is_word(a) and isinstance(a, Call) and isinstance(b, Call):
            return self._same_words(a, b)
        return True

    def _same_words(self, a: Call, b: Call) -> bool:
        """Return whether the calls `a` and `b` make the same ``torch.device`` or ``torch.Size``."""
        devices = torch_device(a), torch_device(b)
        if devices != (None, None):
            return devices[0] == devices[1]
        pair = "word", id(node_of_arguments(a)), id(node_of_arguments(b))
        if pair not in self._alike:
            self._alike[pair] = arguments_in(a) == arguments_in(b)
        return self._alike[pair]

    def _pairs_below(self, a: Place, b: Place) -> list[Place]:
        """Return the places below `a` and `b` that both sides have, alternating between the sides.

        Places that only one side has are recorded as differences. Equal atoms in two lists or two tuples are left out.
        """
        ours, theirs = _items_of(a.node), _items_of(b.node)
        if ours is not None and theirs is not None:
            self._work.charge(len(ours) + len(theirs))
            return self._pairs_of_items(a, b, ours, theirs)
        sets = self.a.set_of(a.node), self.b.set_of(b.node)
        if sets[0] and sets[1]:
            pair = id(sets[0]), id(sets[1])
            if pair in self._listed or self._sorted(a.node, self.a) is not None:
                return []
            self._listed.add(pair)
            left, right = _numbered(a, self.a.members(a.node) or []), _numbered(b, self.b.members(b.node) or [])
        else:
            again, equal = self._listed_again(a.node, b.node), self._equal_items(a.node, b.node)
            left, right = self._below(a, self.a, again[0], equal[0]), self._below(b, self.b, again[1], equal[1])
        pairs: list[Place] = []
        for what, place in left.items():
            other = right.pop(what, None)
            if other:
                pairs += (place, other)
            else:
                self._alone(place, self.a)
        for place in right.values():
            self._alone(place, self.b)
        return pairs

    def _pairs_of_items(self, a: Place, b: Place, left: list[Value], right: list[Value]) -> list[Place]:
        """Return the places of the items that both sequences have, without equal atoms.

        `left` and `right` are the items.

        The items that only the longer sequence has are recorded as differences.
        """
        pairs: list[Place] = []
        for i, (x, y) in enumerate(zip(left, right, strict=False)):
            if type(x) is not type(y) or isinstance(x, Node) or x != y:
                segment = f"[{i}]"
                pairs += (Place(a, segment, x, a.depth + 1), Place(b, segment, y, b.depth + 1))
        for place, side, items, start in ((a, self.a, left, len(right)), (b, self.b, right, len(left))):
            for i, item in enumerate(items[start:], start):
                self._alone(Place(place, f"[{i}]", item, place.depth + 1), side)
        return pairs

    def _listed_again(self, a: Value, b: Value) -> tuple[set[int], set[int]]:
        """Return the ids of the arguments and states of `a` and `b` whose pairs were visited before, for each side."""
        if not (isinstance(a, Call) and isinstance(b, Call)):  # only calls have arguments and states
            return set(), set()
        parts = zip(parts_listed(a, self.a.leaf), parts_listed(b, self.b.leaf), strict=False)
        pairs = [(id(x), id(y)) for x, y in parts if isinstance(x, Node) and isinstance(y, Node)]
        again = [pair for pair in pairs if pair in self._listed]
        self._listed.update(pairs)
        return {pair[0] for pair in again}, {pair[1] for pair in again}

    def _equal_items(self, a: Value, b: Value) -> tuple[Container[int], Container[int]]:
        """Return the ids of the tensors in the mappings `a` and `b` that need no places, and record them in `equal`."""
        named = [strings_of(node) if isinstance(node, Object) else {} for node in (a, b)]
        for node, names in zip((a, b), named, strict=True):
            if isinstance(node, Object) and len(names) != sum(1 for _ in node.entries()):
                return (), ()  # a key is not a text, or is set twice
        self._work.charge(len(named[0]) + len(named[1]))
        equal = self.equal_rows([(value, named[1][name]) for name, value in named[0].items() if name in named[1]])
        self.equal += equal[0].values()
        return equal

    def _below(self, place: Place, side: Side, again: set[int], equal: Container[int]) -> dict[object, Place]:
        """Return the places directly below `place`, by the key with which they are paired.

        The key is the segment of the path, or the meaning of a dict key that is not a text. Arguments and states whose
        ids are in `again` are left out, and values whose ids are in `equal`.
        """
        node = place.node
        keys = [effect.values[i : i + 2] for effect, i in node.pairs()] if isinstance(node, Object) else []
        if all(isinstance(key, str) for key, _ in keys):
            return {below.segment: below for below in child_places(place, side.leaf, again, equal)}
        by_key: dict[object, Place] = {}
        meanings = [None if isinstance(key, str) else self._canonical(key, side) for key, _ in keys]
        times: Counter[object] = Counter()
        n = 0
        for below in child_places(place, side.leaf, again):
            key, value = keys[n] if n < len(keys) else ("", place)
            meant = meanings[n] if n < len(keys) else None
            if meant and isinstance(key, Node) and below.segment == f"/<{n}>":
                continue  # the key, which comes before its value
            if value is not below.node or not below.segment.startswith(key_segment(key, n)):
                by_key[below.segment] = below
                continue
            n += 1
            if meant and isinstance(key, Call) and isinstance(meant[1], bytes):  # bytes in protocol 2
                below.segment = key_segment(meant[1], n)
            times[meant] += 1
            by_key[(meant, times[meant]) if meant else below.segment] = below
        return by_key

    def _sorted(self, node: Value, side: Side) -> list[Comparable] | None:
        """Return the members of the set `node` sorted by their meaning. Return None if some members are objects.

        Sets with objects are compared by the positions of their members.
        """
        stand_in = id(side.set_of(node))
        if stand_in not in side.sorted:  # any number of sets can be made of one list
            members = side.members(node) or []
            meanings = [*takewhile(bool, (self._canonical(member, side) for member in members))]
            side.sorted[stand_in] = sorted(filter(None, meanings)) if len(meanings) == len(members) else None
        return side.sorted[stand_in]

    def _canonical(self, value: Value, side: Side) -> Meant:
        """Return the meaning of the key or member `value`, or None if it is an object or too large."""
        meaning = Meaning(side, self._meanings)
        meant = meaning.of(value, _KEY_DEPTH)
        self._work.charge(KEY_SIZE - meaning.room)
        return meant

    # Differences

    def _other(self, a: Place, b: Place) -> None:
        """Record that the nodes at `a` and `b` differ, with descriptions that show the difference."""
        words = self.a.words(a.node), self.b.words(b.node)
        if words[0] == words[1]:
            kinds = self.a.kind(a.node), self.b.kind(b.node)
            words = (
                _apart(a.node, b.node, words[0])
                if kinds[0] == kinds[1]
                else (f"{words[0]} ({kinds[0]})", f"{words[1]} ({kinds[1]})")
            )
        self.others.append(OtherDifference(a.path, *words))

    def _alone(self, place: Place, side: Side) -> None:
        """Record that `place` exists only on `side`: one difference for the object, one for each tensor below it."""
        self._step(place)
        if side.tensor(place.node):
            side.only.append(OnlyIn(*side.facts(place)))
            return
        words = side.words(place.node)
        self.others.append(OtherDifference(place.path, *((words, None) if side is self.a else (None, words))))
        todo = [place]
        while todo:
            at = todo.pop()
            if isinstance(at.node, Node) and id(at.node) not in side.listed:
                side.listed.add(id(at.node))
                for below in child_places(at, side.leaf, side.shown)[::-1]:
                    self._step(below)
                    todo.append(below)
            if at is not place and side.tensor(at.node):
                side.only.append(OnlyIn(*side.facts(at)))

    def _items(self, a: Place, b: Place) -> None:
        """Pair the tensors that are direct items of the roots `a` and `b`, by name. All other items are passed over."""
        tensors_of: list[dict[str, Place]] = []
        for side, root, others in ((self.a, a, self.passed_over[0]), (self.b, b, self.passed_over[1])):
            tensors = {}
            for place in child_places(root, side.leaf):
                self._step(place)
                if side.tensor(place.node) and place.key is not None:
                    tensors[place.segment] = place
                else:
                    others.append(place.path)
            tensors_of.append(tensors)
        for segment, place in tensors_of[0].items():
            if segment in tensors_of[1]:
                self.tensors.append((place, tensors_of[1][segment]))
        for side, own, other in ((self.a, tensors_of[0], tensors_of[1]), (self.b, tensors_of[1], tensors_of[0])):
            for segment, place in own.items():
                if segment not in other:
                    side.only.append(OnlyIn(*side.facts(place)))


def _parts(node: Node, side: Side) -> list[Value]:
    """Return the function, arguments and states of `node`, a call that makes a tensor, without its device and
    attributes.

    The device and the attributes are compared elsewhere. For other nodes, return their children.
    """
    if side.data(node) is not None or is_word(node):
        return []
    parts = children(node)
    if not isinstance(node, Call):
        return parts
    attributes = {id(state) for state in side.leaf(node) or ()} if side.tensor(node) else set()
    arguments = device_arguments(node)
    devices, nested = {argument.index for argument in arguments}, any(argument.nested for argument in arguments)
    args: list[Value] = []
    for i, arg in enumerate(args_of(node)):
        if nested and i == 2 and isinstance(arg, Tuple):
            args += [each for j, each in enumerate(arg.items) if j not in devices]
        elif (nested or i not in devices) and id(arg) not in attributes:
            args.append(arg)
    states = [value for effect in node.effects for value in effect.values if id(value) not in attributes]
    return [node.callable, *args, *states]


def _quantizer(node: Value) -> Value:
    """Return the argument with the scheme, scale and zero point of the quantized tensor `node`, or None."""
    part = strided_part(node) if isinstance(node, Call) else None
    return next(iter(part.args.items[4:5]), None) if part else None


def _items_of(node: Value) -> list[Value] | None:
    """Return the items of a tuple or list, or None for all other nodes."""
    return node.items if isinstance(node, Tuple) else [*node.elements()] if isinstance(node, List) else None


def _numbered(place: Place, members: list[Value]) -> dict[object, Place]:
    """Return places for the `members` of the set at `place`, by their position."""
    return {n: Place(place, f"/{{{n}}}", member, place.depth + 1) for n, member in enumerate(members)}


def _apart(a: Value, b: Value, words: str) -> tuple[str, str]:
    """Return descriptions of `a` and `b`, which both start like `words`, at the position of the first difference."""
    if isinstance(a, (str, bytes)) and isinstance(b, (str, bytes)) and type(a) is type(b):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        start = max(0, at - 10)
        return f"… {describe(a[start:])} at {start:,}", f"… {describe(b[start:])} at {start:,}"
    return words, f"{words}, but not the same"
