"""What the nodes of one of two checkpoints mean. Pickles can spell the same object in several ways."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterator
from typing import TypeAlias

from ckptconv.byteranges.reading import read
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.describe import describe, is_flat
from ckptconv.checkpoint.index import leaf_of
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import (
    TensorReader,
    strided_part,
)
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import count, size
from ckptconv.formats.layout import blob_bytes
from ckptconv.inspection.comparison.differences import OnlyIn
from ckptconv.light_dataclass import dataclass
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
    PersistentId,
    Py2String,
    Set,
    Tuple,
    Value,
    args_of,
    children,
    imported_name,
    members_of,
)
from ckptconv.pickles.machine import HASHED_AS_IT_IS
from ckptconv.pickles.paths import Place

KEY_SIZE = 4096  # atoms, or kilobytes, of the largest key or member that is compared by its meaning
_LATIN_1 = ("latin1", "latin-1", "iso-8859-1")
#: A key or member as a kind and a value, which can be compared and sorted.
Said: TypeAlias = tuple[str, object]
#: None: an object is in it, or it is too large.
Meant: TypeAlias = "Said | None"
_SETS = {"builtins.set": "set", "builtins.frozenset": "frozenset"}


class Side:
    """One of the two checkpoints, after its names were changed, and what its nodes mean."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.protocol = checkpoint.graph.protocol
        self.leaf = leaf_of(checkpoint.tensor_nodes)
        self.storages = checkpoint.index.storage_of
        self.reader = TensorReader(self.storages, str(checkpoint.source.path))
        self.root = Place(None, "", checkpoint.graph.root, 0)
        self.only: list[OnlyIn] = []
        self.listed: set[int] = set()  # nodes below what the other side has not
        self.shown: set[int] = set()  # arguments and states below it
        self.said: dict[int, str] = {}
        self.meant: dict[int, Meant] = {}  # keys and members, by the ids of their nodes
        self.sorted: dict[int, list[Said] | None] = {}

    def tensor(self, node: Value) -> TensorInfo | None:
        """The tensor that `node` makes, where it has a name."""
        return self.checkpoint.tensor_nodes.get(id(node)) if isinstance(node, Call) else None

    def at(self, place: Place) -> TensorInfo:
        """The tensor at `place`. A node can stand at several places: at all but the first it is tied to itself."""
        return self.checkpoint.tensors.get(place.path) or self.checkpoint.tensor_nodes[id(place.node)]

    def facts(self, place: Place) -> tuple[str, str, tuple[int, ...], int, str | None]:
        """The path, dtype, shape, bytes and tie of the tensor at `place`, as a result has them."""
        info = self.at(place)
        return place.path, info.dtype, info.shape, info.nbytes, info.tied_to

    def inner_tensor(self, node: Value) -> TensorInfo | None:
        """The tensor with a storage that `node` makes, wherever it stands."""
        part = strided_part(node) if isinstance(node, Call) else None
        return self.reader.strided_or_none(part.function, part.args.items) if part else None

    def name(self, node: Value) -> str:
        """The name that unpickling looks up, where `node` is one."""
        return imported_name(node, self.protocol) if isinstance(node, Global) else ""

    def kind(self, node: Value) -> str:
        """What `node` is, in a word or two: a type, or the class of an object."""
        if isinstance(node, Call):
            name = self.name(node.callable)
            data = self.data(node)
            return data.kind if data else _SETS.get(name) or name or "object"
        if isinstance(node, Blob):
            return node.kind
        return _KINDS.get(type(node)) or type(node).__name__

    def data(self, node: Value) -> _Data | None:
        """`node` as text or bytes, if it is."""
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
        """Bytes that a pickle of protocol 2 writes as a text and its encoding."""
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
        """The members of a set; None for everything else."""
        return None if isinstance(node, (List, Tuple)) else members_of(node)

    def set_of(self, node: Value) -> Node | None:
        """The node that holds the members of a set: itself, or the list it is made of; None for everything else."""
        if isinstance(node, Call) and members_of(node, 0) is not None:
            made_of = args_of(node)
            return made_of[0] if made_of and isinstance(made_of[0], Node) else node
        return node if isinstance(node, (Set, FrozenSet)) else None

    def words(self, node: Value) -> str:
        """`node` in the words that a person is shown."""
        if not isinstance(node, Node):
            return describe(node)
        if id(node) not in self.said:  # once: it can stand in any number of places
            self.said[id(node)] = self._words(node)
        return self.said[id(node)]

    def _words(self, node: Node) -> str:
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
    """The bytes of a text or bytes object of this `kind`, in memory or as a range of the file.

    `is_text`: the range holds UTF-8 text, from which the bytes have to be encoded as Latin-1.
    """

    kind: str
    of: bytes | ByteRange
    is_text: bool = False

    def chunks(self) -> Iterator[bytes]:
        """The bytes themselves."""
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
    """What a key or member of `side` means, as long as there is `room`.

    A tuple or frozenset means a number, the same in `numbers` for the same items. So it is gone through once, however
    large it is and however often it is shared.
    """

    side: Side
    numbers: dict[object, int]
    room: int = KEY_SIZE

    def of(self, value: Value, depth: int) -> Meant:
        """The meaning of `value`, down to `depth` levels; None if it is too large or an object is in it."""
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
        """The meaning of a tuple or frozenset `value`, from that of its items; None for everything else."""
        is_tuple = isinstance(value, Tuple)
        items = value.items if isinstance(value, Tuple) else self.side.members(value)
        if items is None or not (is_tuple or self.side.kind(value) == "frozenset"):
            return None
        found: list[Said] = []
        for item in items:
            meant = self.of(item, depth - 1)
            if meant is None:
                return None
            found.append(meant)
        kind, same = ("tuple", tuple(found)) if is_tuple else ("frozenset", tuple(sorted(found)))
        return kind, self.numbers.setdefault((kind, same), len(self.numbers))


def inside_word(word: Call) -> Value:
    """The node that holds the arguments of `word`, which makes a ``torch.device`` or ``torch.Size``."""
    args = args_of(word)
    return args[0] if len(args) == 1 and isinstance(args[0], Tuple) else word.args


def said_in(word: Call) -> list[Said]:
    """The arguments of `word`, which makes a ``torch.device`` or ``torch.Size``."""
    inside = inside_word(word)
    return [_atom(item) for item in inside.items] if isinstance(inside, Tuple) else []


def _atom(value: Value) -> Said:
    """`value` as a kind and a value that sorts among others of its kind. A node is its own id."""
    if isinstance(value, float):
        return "float", struct.pack(">d", value + 0.0 if value == value else float("nan"))  # -0.0 is 0.0
    if value is None or isinstance(value, bool):
        return type(value).__name__, int(bool(value))
    if isinstance(value, int) and abs(value) >= HASHED_AS_IT_IS:
        return "large int", hex(value)
    return ("node", id(value)) if isinstance(value, Node) else (type(value).__name__, value)
