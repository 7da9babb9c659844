"""Read and write ``.metadata`` of a torch.distributed.checkpoint folder: items, chunks of tensors, their positions.

The file is a plain pickle of these objects (torch 2.15; older versions have fewer fields):

    Metadata                state_dict_metadata   {NAME: TensorStorageMetadata | BytesStorageMetadata}
                            planner_data          {NAME: (key or index, ...)}, the place of each item in nested dicts
                                                  and lists; or None
                            storage_data          {MetadataIndex: _StorageInfo}
                            storage_meta, version
    TensorStorageMetadata   properties (TensorProperties: dtype, layout, ...), size,
                            chunks [ChunkStorageMetadata: offsets, sizes]
    MetadataIndex           fqn (NAME), offset (the first index of a tensor's chunk)
    _StorageInfo            relative_path, offset, length, transform_descriptors

Megatron-Core adds two attributes to Metadata. ``all_local_plans`` contains the plans of the run's processes; it is not
read. ``mcore_data`` (up to 0.15) names the tensors that are stored in another shape than that of the parameter:
``{NAME: {"nd_reformulated_orig_global_shape": SHAPE}}``.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``, and
``megatron/core/dist_checkpointing/strategies/torch.py``. The file is read as a graph, in which only these classes are
understood. A file that names anything else is refused. An object that has more than this version
knows, as a later torch may write it, is unsupported and not malformed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from operator import add, itemgetter, le
from typing import NamedTuple, NoReturn, TypeAlias

from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.dangerous_calls import dangerous_globals
from ckptconv.checkpoint.merging import TensorCalls, empty_graph
from ckptconv.dtypes import BY_NAME, DType
from ckptconv.errors import LimitError, MalformedError, UnsupportedError, printable, some
from ckptconv.formats.distributed.chunks import Chunk
from ckptconv.limits import LIMITS
from ckptconv.pickles.emitter import emit, pickle_of
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Effect,
    Global,
    List,
    Tuple,
    Value,
    args_of,
    imported_name,
    is_count,
    is_global,
    set_items,
    type_of,
)
from ckptconv.pickles.parser import parse
from ckptconv.pickles.repeats import Like
from ckptconv.system.names import stays_inside

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_PROPERTIES = (f"{_METADATA}.TensorProperties", f"{_BEFORE_2_3}.TensorProperties")
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ROOTS = (f"{_METADATA}.Metadata", f"{_MEGATRON}.MCoreMetadata")
_SIZE = "torch.Size"
_LAYOUT = "torch.serialization._get_layout"
_KNOWN = frozenset(
    {
        *_ROOTS,
        f"{_METADATA}.TensorStorageMetadata",
        f"{_METADATA}.BytesStorageMetadata",
        f"{_METADATA}.ChunkStorageMetadata",
        f"{_METADATA}.MetadataIndex",
        f"{_METADATA}.StorageMeta",
        f"{_METADATA}._MEM_FORMAT_ENCODING",
        f"{_BEFORE_2_3}.MEM_FORMAT_ENCODING",
        f"{_FILESYSTEM}._StorageInfo",
        *_PROPERTIES,
        _SIZE,
        _LAYOUT,
        "builtins.getattr",
        *(f"torch.{name}" for name in BY_NAME),
        # plans of Megatron-Core
        f"{_MEGATRON}.MCoreSavePlan",
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        # a checkpoint's path, in StorageMeta
        *(
            f"{module}.{kind}Path"
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
        ),
    }
)
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_OF_MEGATRON = {"all_local_plans", "mcore_data"}
_OTHER_SHAPE = "nd_reformulated_orig_global_shape"
_VARYING = ("fqn", "offset")  # the attributes that are different for each chunk: its name, and its position in a file
_VERSION = "1."  # CURRENT_DCP_VERSION is 1.0.0
_STATE = 5, 6  # the lengths of a TensorProperties' state; the sixth item, strides, came with torch 2.15

#: Keys of dicts and indices of lists, from the root to an item.
ItemPath: TypeAlias = "tuple[str | int, ...]"
#: The name of an item, and the first index of the chunk, or None if the item is not a tensor.
_Key: TypeAlias = "tuple[str, tuple[int, ...] | None]"


class TensorItem(NamedTuple):
    """The dtype and shape of a tensor, and the chunks in which it was saved."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Stored(NamedTuple):
    """The position of a saved chunk or object: `length` bytes at `offset` of `file`, a path relative to the folder."""

    file: str
    offset: int
    length: int


class Metadata(NamedTuple):
    """The content of ``.metadata``.

    Attributes:
        items: The items by name. The value is None for an item that is not a tensor.
        paths: The path of each item in nested dicts and lists, by its name. Empty if the file has no ``planner_data``.
        stored: The position of each chunk and each object.
        unread: The names of items that are not in `items`, because a fault was reported for them, or because they are
            left behind.
        reshaped: The names of tensors that Megatron-Core stored in another shape than that of the parameter.
        has_strides: Whether torch 2.15 or newer wrote the file. Older versions do not read it.
    """

    items: dict[str, TensorItem | None]
    paths: dict[str, ItemPath]
    stored: dict[_Key, Stored]
    unread: frozenset[str] = frozenset()
    reshaped: frozenset[str] = frozenset()
    has_strides: bool = False


def read_metadata(source: Readable) -> Metadata:
    """Return the content of the file `source`.

    Raises:
        MalformedError: The pickle is damaged, or its objects are inconsistent.
        UnsupportedError: It contains classes or fields that this version does not know.
        LimitError: A path is nested too deeply.
    """
    source.faults.pickles(PickleSequence(str(source.path), source, 1, _KNOWN))
    graph, end = parse(source.read, source.size, where=str(source.path), free=_VARYING)
    reader = _Reader(source, graph.opcodes // LIMITS.opcodes_of_a_chunk)
    if end != source.size or graph.references or graph.discarded:
        reader.fail("it is not a plain pickle of Metadata")
    unknown = [name for node in graph.globals if (name := imported_name(node, graph.protocol)) not in _KNOWN]
    unknown = [*dict.fromkeys(unknown), *dangerous_globals(graph)]  # known globals can reach everything by getattr
    if unknown:
        reader.refuse(
            "it contains classes that torch.distributed.checkpoint does not write",
            got=some(unknown),
            hint="load it with the framework that wrote it, and save it with torch.save",
        )
    return reader.metadata(graph.root)


def metadata_bytes(metadata: Metadata) -> bytes:
    """Return the bytes of a ``.metadata`` file with the content `metadata`. torch 2.6 and newer read it.

    ``TensorProperties`` get five items, which all these versions read. torch 2.15 writes six.
    """
    graph = empty_graph()
    graph.root = _Writer(TensorCalls(graph)).metadata(metadata)
    return pickle_of(graph, loadable=False)


class _Writer:
    """A builder of the nodes of ``.metadata``. `calls` creates the nodes for globals."""

    def __init__(self, calls: TensorCalls) -> None:
        self._calls = calls

    def metadata(self, metadata: Metadata) -> Call:
        """Return the root node for `metadata`."""
        stored: list[Value] = []
        for (name, offsets), place in metadata.stored.items():
            first = {} if offsets is None else {"offset": self.size(offsets)}
            stored.append(self.object("MetadataIndex", fqn=name, **first))
            file, start, length = place
            stored.append(self.object("_StorageInfo", _FILESYSTEM, relative_path=file, offset=start, length=length))
        return self.object(
            "Metadata",
            state_dict_metadata=_mapping((name, self.item(item)) for name, item in metadata.items.items()),
            planner_data=_mapping((name, Tuple([*path])) for name, path in metadata.paths.items()),
            storage_data=set_items(Dict(), stored),
            version=f"{_VERSION}0.0",
        )

    def item(self, item: TensorItem | None) -> Call:
        """Return the TensorStorageMetadata node for `item`, or a BytesStorageMetadata node if `item` is None."""
        if item is None:
            return self.object("BytesStorageMetadata")
        layout = self._call(_LAYOUT, "torch.strided")
        memory_format = self._call(f"{_METADATA}._MEM_FORMAT_ENCODING", 0)
        properties = self.object("TensorProperties")
        state = Tuple([self._calls.word("torch", item.dtype.name), layout, False, memory_format, False])
        properties.add(Effect("BUILD", [state], None))
        chunks = List()
        for offsets, sizes in item.chunks:
            chunk = self.object("ChunkStorageMetadata", offsets=self.size(offsets), sizes=self.size(sizes))
            chunks.add(Effect("APPEND", [chunk], None))
        return self.object("TensorStorageMetadata", properties=properties, size=self.size(item.shape), chunks=chunks)

    def size(self, numbers: tuple[int, ...]) -> Call:
        """Return a ``torch.Size`` node of `numbers`."""
        return self._call(_SIZE, Tuple([*numbers]))

    def object(self, cls: str, module: str = _METADATA, /, **attributes: Value) -> Call:
        """Return a node for an object of the class `cls` of `module`, with these `attributes` as its state."""
        call = Call("NEWOBJ", self._calls.word(module, cls), Tuple([]))
        if attributes:
            call.add(Effect("BUILD", [_mapping(attributes.items())], None))
        return call

    def _call(self, name: str, argument: Value) -> Call:
        return Call("REDUCE", self._calls.word(*name.rsplit(".", 1)), Tuple([argument]))


def _mapping(items: Iterable[tuple[str, Value]]) -> Dict:
    return set_items(Dict(), [each for item in items for each in item])


def renamed(source: Readable, names: dict[str, str], paths: dict[str, ItemPath]) -> bytes:
    """Return the bytes of the metadata file `source` with other names and paths of items.

    Args:
        source: A file for which :func:`read_metadata` succeeded.
        names: New names, by the old ones. Other names stay.
        paths: New paths, by the old names. Other paths stay.
    """
    graph, _ = parse(source.read, source.size, where=str(source.path))
    (state,) = (state for state in states_of(graph.root))
    for effect, i in state.pairs():
        field, mapping = effect.values[i], effect.values[i + 1]
        if field not in ("state_dict_metadata", "planner_data", "storage_data") or not isinstance(mapping, Dict):
            continue
        for inner, j in mapping.pairs():
            key = inner.values[j]
            if isinstance(key, str):
                path = paths.get(key) if field == "planner_data" else None
                inner.values[j : j + 2] = [names.get(key, key), Tuple([*path]) if path else inner.values[j + 1]]
            for index in states_of(key):
                for fields, k in index.pairs():
                    if fields.values[k] == "fqn":
                        fields.values[k + 1] = names.get(str(fields.values[k + 1]), fields.values[k + 1])
    pieces = emit(graph, loadable=False)
    return b"".join(each if isinstance(each, bytes) else source.read(each.offset, each.length) for each in pieces)


def states_of(node: Value) -> Iterator[Dict]:
    """Yield the attribute dicts of `node`, or nothing if `node` is not an object."""
    if isinstance(node, Call):
        yield from (state for state in node.states() if isinstance(state, Dict))


def plain(value: Value) -> object:
    """Return `value` if it is a number or a string, otherwise the name of its type."""
    return value if isinstance(value, (int, str, float)) else type_of(value).__name__


class _Reader:
    """A reader of the nodes of one ``.metadata`` file, which raises or reports each defect.

    `most` is the greatest number of chunks that a file of this size can describe without reusing a node.
    """

    def __init__(self, source: Readable, most: int) -> None:
        self.source = source
        self.where = str(source.path)
        self.most = most
        self.has_strides = False
        # By the id of the node, because one node can be the value of any number of items.
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._tensors: dict[int, tuple[TensorItem, int]] = {}
        self._fields: dict[tuple[int, str], dict[str, Value]] = {}
        self._paths: dict[int, ItemPath] = {}

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:
        raise MalformedError(what, where=self.where, expected=expected, got=got)

    def refuse(self, what: str, *, expected: object = None, got: object = None, hint: str | None = None) -> NoReturn:
        raise UnsupportedError(what, where=self.where, expected=expected, got=got, hint=hint)

    def metadata(self, root: Value) -> Metadata:
        """Return the content of `root`, the Metadata object of the file.

        An item with a defect is reported as a fault and left out. Other defects raise MalformedError or
        UnsupportedError.
        """
        fields = self.object(root, *_ROOTS)
        others = sorted(fields.keys() - _FIELDS - _OF_MEGATRON)
        if others:
            self.refuse("Metadata has fields that this version does not know", got=some(others))
        version = fields.get("version")
        if version is not None and not (isinstance(version, str) and version.startswith(_VERSION)):
            self.refuse(
                "a version of the format that is not known",
                expected=f"{_VERSION}x",
                got=plain(version),
            )
        items = {}
        nodes = self.mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
        for name, node in nodes.items():
            with self.source.faults:
                items[name] = self.item(name, node)
        planner_data = fields.get("planner_data")
        places = {} if planner_data is None else self.mapping(planner_data, "planner_data")
        paths = {name: self.path(name, node) for name, node in places.items()}
        stored = self.stored(fields.get("storage_data"))
        self.check_container(items, stored)
        self.check_bytes(stored)
        mcore_data = fields.get("mcore_data")
        of_megatron = {} if mcore_data is None else self.mapping(mcore_data, "mcore_data")
        reshaped = frozenset(
            name
            for name, node in of_megatron.items()
            if isinstance(node, Dict) and next((key == _OTHER_SHAPE for key, _ in node.entries()), False)
        )
        return Metadata(items, paths, stored, frozenset(nodes.keys() - items.keys()), reshaped, self.has_strides)

    def item(self, name: str, node: Value) -> TensorItem | None:
        """Return the tensor that `node` describes, or None if the item `name` is not a tensor.

        Raises MalformedError if the node is damaged, and UnsupportedError if the tensor's dtype or layout is unknown.
        """
        if isinstance(node, Call) and is_global(node.callable, f"{_METADATA}.BytesStorageMetadata"):
            self.object(node, f"{_METADATA}.BytesStorageMetadata")
            return None
        if id(node) in self._tensors:
            self.count(name, self._tensors[id(node)][1])
            return self._tensors[id(node)][0]
        fields = self.object(node, f"{_METADATA}.TensorStorageMetadata")
        shape = self.size(fields.get("size"), "the size", name)
        chunks = fields.get("chunks")
        if not isinstance(chunks, List):
            self.fail(f"the chunks of {name!r} are not a list")
        n = sum(1 + len(effect.values) for effect in chunks.effects)
        self.count(name, n)
        dtype = self.dtype(name, fields.get("properties"))
        item = TensorItem(dtype, shape, [self.chunk(name, shape, chunk) for chunk in chunks.elements()])
        self._tensors[id(node)] = item, n
        return item

    def count(self, name: str, chunks: int) -> None:
        """Count the `chunks` of the tensor `name`. Raise MalformedError if there are too many for the file."""
        self.most -= chunks
        if self.most < 0:
            self.fail(
                "there are more chunks than a file of its size can describe",
                got=f"{name!r} and others share their chunks",
            )

    def dtype(self, name: str, properties: Value) -> DType:
        """Return the dtype from `properties`, the TensorProperties of the tensor `name`.

        Their state is a tuple: dtype, layout, three items that torch no longer uses, and strides. The strides are not
        read: they are those of one rank's local tensor, and the file of each chunk has its own strides. Raises
        UnsupportedError if the dtype or the layout is not known.
        """
        state = self.state(properties, *_PROPERTIES)
        if not isinstance(state, Tuple) or len(state.items) > _STATE[-1]:
            got = f"{len(state.items)} items" if isinstance(state, Tuple) else type_of(state).__name__
            self.refuse(
                f"the properties of {name!r} have a state that is not known to this version",
                expected=f"{_STATE[0]} or {_STATE[1]} items",
                got=got,
            )
        if len(state.items) < _STATE[0] or not isinstance(dtype := state.items[0], Global):
            self.fail(f"the properties of {name!r} are not a TensorProperties")
        self.has_strides |= len(state.items) > _STATE[0]
        layout = state.items[1]
        if dtype.module != "torch" or dtype.name not in BY_NAME:
            self.refuse(f"{name!r} has a dtype that is not known to this version", got=dtype)
        words = args_of(layout) if isinstance(layout, Call) and is_global(layout.callable, _LAYOUT) else []
        if words != ["torch.strided"]:
            got = printable(words[0]) if words and isinstance(words[0], str) else "something else"
            self.refuse(f"{name!r} has a layout that is not torch.strided", got=got)
        return BY_NAME[dtype.name]

    def chunk(self, name: str, shape: tuple[int, ...], node: Value) -> Chunk:
        """Return the chunk `node` of the tensor `name`. Raises MalformedError if it lies outside of `shape`."""
        fields = self.object(node, f"{_METADATA}.ChunkStorageMetadata")
        offsets = self.size(fields.get("offsets"), "the offsets of a chunk", name)
        sizes = self.size(fields.get("sizes"), "the sizes of a chunk", name)
        if not len(offsets) == len(sizes) == len(shape) or not all(map(le, map(add, offsets, sizes), shape)):
            self.fail(f"a chunk lies outside of {name!r}", expected=f"inside {shape}", got=f"{sizes} at {offsets}")
        return Chunk(offsets, sizes)

    def path(self, name: str, node: Value) -> ItemPath:
        """Return the path in `node` of the item `name`: dict keys and list indices, of which the first is a key.

        Raises MalformedError if it is not such a tuple, and LimitError if it is too long.
        """
        if id(node) in self._paths:
            return self._paths[id(node)]
        path = node.items if isinstance(node, Tuple) else []
        if len(path) > LIMITS.nesting:
            raise LimitError(
                f"{name!r} is nested too deeply",
                where=self.where,
                expected=f"at most {LIMITS.nesting:,} levels",
                got=len(path),
            )
        parts = tuple(part for part in path if isinstance(part, str) or is_count(part))
        if not path or len(parts) != len(path) or not isinstance(parts[0], str):
            self.fail(f"planner_data has no path for {name!r}", expected="a tuple of keys and indices")
        self._paths[id(node)] = parts
        return parts

    def stored(self, storage_data: Value) -> dict[_Key, Stored]:
        """Return the position of each chunk and each object from the dict `storage_data`.

        Raises MalformedError if a chunk is listed twice.
        """
        stored: dict[_Key, Stored] = {}
        for key, node in self.pairs(storage_data, "storage_data"):
            index = self.object(key, f"{_METADATA}.MetadataIndex")
            name, offset = index.get("fqn"), index.get("offset")
            if not isinstance(name, str):
                self.fail("a MetadataIndex has no name")
            place = (name, None if offset is None else self.size(offset, "the offset", name))
            if place in stored:
                self.fail(f"{name!r} is stored twice", got=place[1])
            stored[place] = self.info(name, node)
        return stored

    def info(self, name: str, node: Value) -> Stored:
        """Return the position in `node`, the _StorageInfo of the item `name`.

        Raises UnsupportedError if the item was stored through a transform (compression, for example), and
        MalformedError if the file, offset or length is not valid.
        """
        fields = self.object(node, f"{_FILESYSTEM}._StorageInfo")
        transforms = fields.get("transform_descriptors")
        if transforms is not None and (not isinstance(transforms, List) or transforms.effects):
            elements = transforms.elements() if isinstance(transforms, List) else ()
            self.refuse(
                f"{name!r} was stored through a transform",
                got=some([word for word in elements if isinstance(word, str)]) or None,
                hint="load it with torch.distributed.checkpoint and the extension that wrote it, and save it again"
                " without _extensions",
            )
        file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if not isinstance(file, str) or not stays_inside(file, folders=True):
            self.fail(
                f"the file of {name!r} is not a path inside the folder",
                got=repr(file) if isinstance(file, str) else None,
            )
        if not is_count(offset) or not is_count(length):
            self.fail(f"{name!r} has no valid offset and length", got=plain(length if is_count(offset) else offset))
        return Stored(file, offset, length)

    def check_container(self, items: dict[str, TensorItem | None], stored: dict[_Key, Stored]) -> None:
        """Raise UnsupportedError if tensors are stored as bare bytes, as serialization_format=SAFETENSORS does.

        Only the first tensor with elements is checked: its length in the file is then exactly that of its elements. One
        process writes all tensors in one way.
        """
        for name, item in items.items():
            chunk = next((chunk for chunk in item.chunks if 0 not in chunk.sizes), None) if item else None
            if item is None or chunk is None:
                continue
            nbytes = item.dtype.bytes_of(prod(chunk.sizes))
            place = stored.get((name, chunk.offsets))
            if place is not None and place.length == nbytes:
                self.refuse(
                    "its .distcp files were written with serialization_format=SAFETENSORS, so the positions of the"
                    " tensors in them are not known",
                    got=f"{nbytes:,} bytes for {name!r}, which has that many bytes",
                    hint="save it again without serialization_format",
                )
            return

    def check_bytes(self, stored: dict[_Key, Stored]) -> None:
        """Raise MalformedError if two items share bytes of a file.

        Otherwise a small folder could request any number of copies of the same bytes.
        """
        last: tuple[Stored, str] | None = None
        for (name, _), place in sorted(stored.items(), key=itemgetter(1)):
            if last and last[0].file == place.file and last[0].offset + last[0].length > place.offset:
                self.fail(
                    f"{last[1]!r} and {name!r} are stored in the same bytes",
                    got=f"{place.file} at byte {place.offset:,}",
                )
            last = place, name

    # Nodes

    def state(self, node: Value, *classes: str) -> Value:
        """Return the argument of BUILD of the object `node`, or None if the object has no state.

        Raises MalformedError unless `node` is an object of one of `classes`, and UnsupportedError unless the object is
        created without arguments and set up by at most one BUILD.
        """
        if not isinstance(node, Call) or not is_global(node.callable, *classes):
            called = node.callable if isinstance(node, Call) else None
            got = called if isinstance(called, Global) else type_of(node).__name__
            self.fail("an object of another class", expected=classes[0], got=got)
        if node.kind != "NEWOBJ" or args_of(node) or node.kwargs is not None or not isinstance(node.args, Tuple):
            self.refuse(f"a {classes[0]} is created in a way that this version does not know", got=node.kind)
        if len(node.effects) > 1 or any(effect.opcode != "BUILD" for effect in node.effects):
            self.refuse(f"a {classes[0]} is set up in a way that this version does not know")
        return node.effects[0].values[0] if node.effects else None

    def object(self, node: Value, cls: str, *others: str) -> dict[str, Value]:
        """Return the attributes of `node`, an object of the class `cls` or of one of `others`.

        The result is empty if the object has no state.
        Raises the errors of :meth:`state`.
        """
        if isinstance(node, Like):
            known = self._fields.get((id(node.like), cls))
            if known is None:
                self._fields[id(node.like), cls] = known = self.object(node.like, cls, *others)
            return known | node.changed
        state = self.state(node, cls, *others)
        if state is None:
            return {}
        if not isinstance(state, Dict):
            self.refuse(f"a {cls} has a state that is not known to this version", got=type_of(state).__name__)
        if sum(1 + len(effect.values) for effect in state.effects) > LIMITS.metadata_state:
            self.fail(f"a {cls} has too many fields")
        return self.mapping(state, cls)

    def mapping(self, node: Value, what: str) -> dict[str, Value]:
        """Return the items of the dict `node`. Raises MalformedError if a key is not a string or occurs twice.

        `what` names the dict in errors.
        """
        items: dict[str, Value] = {}
        for key, value in self.pairs(node, what):
            if not isinstance(key, str):
                self.fail(f"a key of {what} is not a string", got=type_of(key).__name__)
            if key in items:
                self.fail(f"a key occurs twice in {what}", got=repr(key))
            items[key] = value
        return items

    def pairs(self, node: Value, what: str) -> Iterator[tuple[Value, Value]]:
        """Yield the keys and values of the dict `node`. Raises MalformedError if it is not a dict.

        `what` names the dict in errors.
        """
        if not isinstance(node, Dict):
            self.fail(f"{what} is not a dict", got=type_of(node).__name__)
        for effect, i in node.pairs():
            yield effect.values[i], effect.values[i + 1]

    def size(self, node: Value, what: str, name: str) -> tuple[int, ...]:
        """Return the numbers of `node`, a torch.Size. Raises MalformedError if it is anything else.

        In errors it is called `what` of the tensor `name`.
        """
        known = self._sizes.get(id(node))
        if known is not None:
            return known
        args = args_of(node) if isinstance(node, Call) and is_global(node.callable, _SIZE) else []
        numbers = args[0].items if len(args) == 1 and isinstance(args[0], Tuple) else None
        if numbers is None or len(numbers) > LIMITS.rank:
            self.fail(f"{what} of {name!r} is not a torch.Size", expected=f"at most {LIMITS.rank} numbers")
        counts = tuple(number for number in numbers if is_count(number))
        if len(counts) != len(numbers):
            self.fail(f"{what} of {name!r} has a number that is not a count", expected="0 to 2^62")
        self._sizes[id(node)] = counts
        return counts
