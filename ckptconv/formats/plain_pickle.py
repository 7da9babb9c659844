"""A plain pickle with torch's tensors in it, as ``pickle.dump`` writes it: reader and writer.

Layout: one pickle, in which each storage is a call:

    torch.storage._load_from_bytes(BYTES)   BYTES are a whole file that holds one storage: torch's older format
                                            (:mod:`ckptconv.formats.torch_legacy`), or, from a few versions,
                                            its zip format
    torch.FloatStorage([1.0, 2.0])          the same before torch 0.4, when numbers stood in lists

So a location tag stands inside each BYTES, where no ``map_location`` of the outer ``pickle.load`` reaches it. Protocols
0 to 2 have no opcode for bytes: Python 3 writes ``_codecs.encode(TEXT, 'latin1')``, Python 2 its ``str``. Two tensors
on one storage get a call each, and share nothing afterwards.

Read, a call becomes a reference to a storage, whose bytes are a range of the file; written, a reference becomes a call
again. Source: ``__reduce__`` in ``torch/storage.py`` of torch 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.reading import Latin1Text, Step, no_bytes
from ckptconv.byteranges.sources import BytesSource, Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Literal, Piece
from ckptconv.checkpoint.dangerous_calls import dangerous_globals
from ckptconv.checkpoint.index import leaf_of
from ckptconv.checkpoint.legacy_python import modernize
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.storage_ids import new_id, storage_id
from ckptconv.checkpoint.tensor_info import Reference, Storage
from ckptconv.dtypes import BY_STORAGE_CLASS
from ckptconv.errors import (
    DangerousError,
    InputError,
    MalformedError,
    RefusedError,
    UnsupportedError,
    count,
    some,
)
from ckptconv.formats import torch_legacy, torch_zip
from ckptconv.formats.foreign.zips_and_pickles import LOADER, pickle_error
from ckptconv.formats.layout import (
    Layout,
    blob_bytes,
    file_of,
    little_endian,
    refuse_unknown_dtypes,
    say_for_older_loaders,
    sources_left_behind,
    storage_classes,
    texts_left_behind,
)
from ckptconv.formats.torch_files import MAGIC_BYTES, LegacyFile, files_in
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import TRUSTED, option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Global,
    Graph,
    List,
    Node,
    PersistentId,
    Py2String,
    Tuple,
    Value,
    args_of,
    is_global,
    replace_nodes,
    walk,
)
from ckptconv.pickles.parser import parse
from ckptconv.pickles.paths import find_places

NAME = WRITERS["pickle"].name
_LEGACY = b"\x80\x02" + MAGIC_BYTES + b"."  # the magic number, as every version of torch pickles it here
_LEGACY_TEXT = _LEGACY.decode("latin-1").encode()  # as a text that stands for bytes
_OLD_START = regex(rb"\([dl]p[01]\n|[}\]]q[\0\1]|\(?c[\w.]+\n\w+\n(?:p[01]\n|q[\0\1])?[\]()]|\(i[\w.]+\n\w+\n")
_LATIN_1 = ("latin1", "latin-1")
#: How :mod:`struct` packs the numbers of those storages that were lists.
_NUMBERS = {
    "DoubleStorage": "d",
    "FloatStorage": "f",
    "HalfStorage": "e",
    "LongStorage": "q",
    "IntStorage": "i",
    "ShortStorage": "h",
    "CharStorage": "b",
    "ByteStorage": "B",
}


def looks_like(head: bytes) -> bool:
    """Whether a file that starts with `head` can be a pickle: protocols 2 and higher say so, a dict, a list or an
    object of older ones is told by how it starts.
    """
    return (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")) or bool(_OLD_START.match(head))


# Reading


class StorageFile(NamedTuple):
    """A file that stands in the pickle, from byte `start` to `end`: one storage of torch's older format."""

    start: int
    end: int
    parsed: LegacyFile


@dataclass(eq=False)
class PickleFile:
    """The files of storages in a pickle, by the storages' keys, as far as they stand in it byte for byte."""

    files: dict[str, StorageFile]


def read(source: Readable) -> Checkpoint:
    """The checkpoint in `source`.

    Raises UnsupportedError with what is in it where that is no tensor, MalformedError, LimitError.
    """
    where = str(source.path)
    source.faults.pickles(PickleSequence(where, source, 1, (LOADER,)))
    try:
        graph, end = parse(source.read, source.size, where=where, leave=(_LEGACY, _LEGACY_TEXT))
    except InputError:
        raise pickle_error(source) from None
    calls = [call for call in graph.calls if is_global(call.callable, LOADER)]
    lists = [call for call in graph.calls if _numbers(call) is not None]
    has_tensors = bool(calls or lists) or any(_is_torchs(call) for call in graph.calls)
    has_file = not has_tensors and _has_file(graph, source)
    if graph.references or not (has_tensors or has_file):
        raise pickle_error(source)
    if end != source.size:
        source.faults.found(
            MalformedError(
                "bytes behind the end of the pickle",
                where=where,
                expected=f"{end} bytes",
                got=source.size,
                hint=f"{TRUSTED}, take several pickles apart with pickle.load, one after another",
            )
        )
    reader = _Reader(source, graph)
    reader.read([*calls, *lists])
    modernize(graph)
    checkpoint = checkpoint_of(NAME, source, graph, PickleFile(reader.files), reader.spans.get, where)
    if not (checkpoint.tensors or checkpoint.storages or has_file):
        raise pickle_error(source)
    checkpoint.notes += reader.notes
    for text in reader.warnings:
        checkpoint.warn(text)
    if lists:
        stored = count(len(lists), "storage")
        checkpoint.notes.append(f"{stored} stored as a list of numbers, as before torch 0.4; bytes are written")
    return checkpoint


def _has_file(graph: Graph, source: Readable) -> bool:
    """Return whether a byte string somewhere in `graph` is a file of torch.save."""
    places = find_places(graph.root, leaf_of({}), str(source.path), graph.opcodes)
    return next(files_in(places, source), None) is not None


def _is_torchs(call: Call) -> bool:
    return isinstance(call.callable, Global) and call.callable.module == "torch._utils"


def _numbers(call: Call) -> List | None:
    """The list that is the storage that `call` makes, if it was complete by then."""
    cls, args = call.callable, args_of(call)
    if not isinstance(cls, Global) or cls.module not in ("torch", "torch.cuda") or cls.name not in _NUMBERS:
        return None
    numbers = args[0] if len(args) == 1 else None
    if not isinstance(numbers, List) or call.kind != "REDUCE" or call.effects:
        return None
    return numbers if all((effect.order or 0) < (call.order or 0) for effect in numbers.effects) else None


class _Reader:
    """Puts references to storages for the calls in `graph` that make them.

    ``spans``: the bytes of the storages by key, ``files`` what they stand in.
    """

    def __init__(self, source: Readable, graph: Graph) -> None:
        self.source = source
        self.graph = graph
        self.files: dict[str, StorageFile] = {}
        self.spans: dict[str, ByteRange] = {}
        self.words: dict[str, str] = {}
        self.classes: dict[str, Global] = {}
        self.used: set[int] = set()
        self.decoded = Step()
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def read(self, calls: list[Call]) -> None:
        """Put references for `calls`."""
        graph = self.graph
        calls.sort(key=lambda call: call.order or 0)
        new: dict[Node, Node] = {}
        for i, call in enumerate(calls):
            with self.source.faults:
                new[call] = self.reference(call, str(i))
        if len(new) < len(calls):
            raise MalformedError("not all storages in it can be read", where=self.source.path)
        replace_nodes(graph, new)
        if any(is_global(node, LOADER) for node in walk([graph.root, *graph.discarded])):
            raise UnsupportedError(f"{LOADER} is used for something else than a call", where=self.source.path)
        graph.globals = [node for node in graph.globals if not is_global(node, LOADER)] + [*self.classes.values()]
        graph.calls = [call for call in graph.calls if call not in new and id(call) not in self.used]
        graph.byte_strings = [value for value in graph.byte_strings if id(value) not in self.used]
        graph.references = [node for node in new.values() if isinstance(node, PersistentId)]

    def reference(self, call: Call, key: str) -> PersistentId:
        """The storage `key`, which `call` makes."""
        numbers = _numbers(call)
        if numbers is not None and isinstance(call.callable, Global):
            cls = call.callable
            self.spans[key] = span = self.packed(numbers, cls, key)
            tag, numel = "cuda:0" if cls.module == "torch.cuda" else "cpu", span.length
            numel //= BY_STORAGE_CLASS[cls.name].itemsize
        else:
            cls, tag, numel, self.spans[key] = self.nested(call, key)
        module = "torch.storage" if cls.name == "UntypedStorage" else "torch"
        cls = self.classes.setdefault(cls.name, Global(module, cls.name))
        tag = self.words.setdefault(tag, tag)
        return PersistentId(new_id(cls, key, tag, numel), call.order)

    def packed(self, numbers: List, cls: Global, key: str) -> ByteRange:
        self.use(numbers, key)
        values = [*numbers.elements()]
        try:
            data = struct.pack(f"<{len(values)}{_NUMBERS[cls.name]}", *values)
        except (struct.error, OverflowError) as error:
            raise MalformedError(f"a list holds what {cls} cannot", where=self.where(key), got=error) from None
        return ByteRange(BytesSource(data, self.source.path), 0, len(data))

    def nested(self, call: Call, key: str) -> tuple[Global, str, int, ByteRange]:
        """Class, location tag, number of elements and bytes of the one storage in the file with which
        `call` is called.
        """
        args = args_of(call)
        if call.kind != "REDUCE" or call.effects or len(args) != 1:
            self.refuse(key, "something else is done to it than torch does")
        file, start, end = self.bytes_of(args[0], key)
        head = file.read(start, min(len(_LEGACY), end - start))
        graph, spans = (
            self.zipped(file, start, end, key) if torch_zip.looks_like(head) else self.legacy(file, start, end, key)
        )
        dangers = sorted(dangerous_globals(graph))
        if dangers:
            raise DangerousError(
                f"it names what no checkpoint needs ({some(dangers)})", where=self.where(key), hint="do not load it"
            )
        root = graph.root
        made = [*graph.calls, *graph.discarded, *graph.globals]
        if not isinstance(root, PersistentId) or len(made) != 1 or len(spans) != 1:  # the class alone
            self.refuse(key, "its file holds something else than one storage")
        cls, _, tag, numel = storage_id(root)
        return cls, tag, numel, next(iter(spans.values()))

    def legacy(self, file: Readable, start: int, end: int, key: str) -> tuple[Graph, dict[str, ByteRange]]:
        parsed = torch_legacy.parse_file(file, start, end, self.where(key))
        self.notes += [note for note in parsed.notes if note not in self.notes]
        self.warnings += [text for text in parsed.warnings if text not in self.warnings]
        if file is self.source:
            self.files[key] = StorageFile(start, end, parsed)
        return parsed.graph, parsed.spans

    def zipped(self, file: Readable, start: int, end: int, key: str) -> tuple[Graph, dict[str, ByteRange]]:
        window = SliceSource(file, start, end - start)
        window.faults = self.source.faults.about(f"storage {key}")
        inner = torch_zip.read_inner(window)
        if inner.byteorder != "little":
            self.refuse(key, "its numbers are big-endian")
        spans = {}
        for name, storage in inner.storages.items():
            if not isinstance(storage.data, ByteRange):
                self.refuse(key, "its file is compressed")
            spans[name] = replace(storage.data, source=file, offset=start + storage.data.offset)
        return inner.graph, spans

    def bytes_of(self, value: Value, key: str) -> tuple[Readable, int, int]:
        """Where the bytes that `value` says stand: a file, a start and an end."""
        path = self.source.path
        self.use(value, key)
        if isinstance(value, Call) and is_global(value.callable, "_codecs.encode") and not value.effects:
            text, encoding = (*args_of(value), None, None)[:2]
            self.use(text, key)
            if encoding in _LATIN_1 and isinstance(text, Blob):
                decoded = Latin1Text(ByteRange(self.source, text.offset, text.length), self.where(key), self.decoded)
                return decoded, 0, decoded.size
            if encoding in _LATIN_1 and isinstance(text, str):
                try:
                    value = text.encode("latin-1")
                except UnicodeEncodeError:
                    raise no_bytes(self.where(key)) from None
        if isinstance(value, Blob) and value.kind != "str":
            return self.source, value.offset, value.offset + value.length
        if isinstance(value, (Py2String, ByteArray)):
            value = value.data
        if not isinstance(value, bytes):
            self.refuse(key, "what it is loaded from is no bytes")
        return BytesSource(value, path), 0, len(value)

    def use(self, value: Value, key: str) -> None:
        """Refuse what torch never writes, and what could make a small file large: one `value` for two storages."""
        if id(value) in self.used:
            self.refuse(key, "its bytes are another storage's as well")
        self.used.add(id(value))

    def where(self, key: str) -> str:
        return f"{self.source.path}: storage {key}"

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedError(
            why, where=self.where(key), hint="torch writes no such pickle; do not load it unless you trust who made it"
        )


# Writing


def layout(checkpoint: Checkpoint, path: Path) -> Layout:
    """The file that `checkpoint`, edited, becomes at `path`. Raises RefusedError for what torch could not read back."""
    refuse_unknown_dtypes(checkpoint)
    _refuse_loader(checkpoint)
    say_for_older_loaders(checkpoint)
    classes = storage_classes(checkpoint, "a plain pickle")
    files = call_again(checkpoint, _head_of)
    pieces: list[Piece] = []
    for part in emit(checkpoint.graph, loadable=False):
        if isinstance(part, bytes):
            pieces.append(Literal(part))
        elif part in files:
            head, storage = files[part]
            pieces.append(Literal(head))
            if storage.nbytes:
                pieces.append(little_endian(storage, classes[storage], checkpoint.byteorder))
        else:
            pieces.append(blob_bytes(checkpoint, part))
    file = file_of(path, pieces, checkpoint.storages.values())
    left_behind = (*texts_left_behind(checkpoint), *sources_left_behind(checkpoint))
    return Layout((file,), left_behind, _about_texts(checkpoint), tuple(checkpoint.ties.items()))


def _refuse_loader(checkpoint: Checkpoint) -> None:
    """Raise RefusedError where the source names what makes a storage here, and nobody
    could tell one from the other afterwards.
    """
    if any(is_global(node, LOADER) for node in checkpoint.graph.globals):
        raise RefusedError(
            f"a plain pickle cannot hold {LOADER} for anything but its storages",
            where=checkpoint.source.path,
            hint=option("format", "pt") + " writes it",
        )


def _about_texts(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What torch's loader does by itself and Python's has to be told."""
    every = walk([checkpoint.graph.root, *checkpoint.graph.discarded])
    if any(isinstance(node, Py2String) and not node.data.isascii() for node in every):
        return ("it has texts of Python 2 that are no ASCII: pickle.load needs encoding='utf-8' (or 'bytes')",)
    return ()


def _head_of(reference: Reference, number: int) -> bytes:
    """What stands before the bytes of a storage in its file, whose key is `number`."""
    cls, _, _, numel = storage_id(reference.node)
    return torch_legacy.storage_file_head(cls, str(number), reference.storage.device, numel)


def call_again(checkpoint: Checkpoint, head_of: Callable[[Reference, int], bytes]) -> dict[Blob, tuple[bytes, Storage]]:
    """Put a call for each reference to a storage, one for all that mean the same.

    What its argument is made of: all but the storage's bytes, which is asked for by the reference's number, and the
    storage.
    """
    loader = Global("torch.storage", "_load_from_bytes")
    calls: dict[tuple[str, str], Call] = {}
    files: dict[Blob, tuple[bytes, Storage]] = {}
    new: dict[Node, Node] = {}
    for i, reference in enumerate(checkpoint.references):
        storage = reference.storage
        cls = storage_id(reference.node).cls
        call = calls.get((storage.key, cls.name))
        if call is None:
            head = head_of(reference, i)
            blob = Blob("bytes", 0, len(head) + storage.nbytes)
            files[blob] = head, storage
            call = calls[storage.key, cls.name] = Call("REDUCE", loader, Tuple([blob]), order=reference.node.order)
        new[reference.node] = call
    replace_nodes(checkpoint.graph, new)
    checkpoint.changed()
    return files
