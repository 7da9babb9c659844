"""A plain pickle that contains torch's tensors, as ``pickle.dump`` writes it: reader and writer.

Layout: one pickle, in which each storage is a call:

    torch.storage._load_from_bytes(BYTES)   BYTES are a complete file with one storage, in torch's older format
                                            (:mod:`ckptconv.formats.torch_legacy`), or, from a few versions,
                                            in its zip format
    torch.FloatStorage([1.0, 2.0])          a storage before torch 0.4, which wrote numbers in lists

So each BYTES contains a location tag, which no ``map_location`` of the outer ``pickle.load`` reaches. Protocols 0 to 2
have no opcode for bytes: Python 3 writes ``_codecs.encode(TEXT, 'latin1')``, and Python 2 its ``str``. Two tensors on
one storage get a call each, and do not share memory after loading.

The reader turns each call into a reference to a storage, whose bytes are a range of the file. The writer turns each
reference into a call. Source: ``__reduce__`` in ``torch/storage.py`` of torch 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.reading import Step
from ckptconv.byteranges.sources import BytesSource, Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Literal, Piece
from ckptconv.checkpoint.dangerous_calls import dangerous_globals
from ckptconv.checkpoint.index import leaf_of
from ckptconv.checkpoint.legacy_python import Span, bytes_in, modernize
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.storage_ids import new_id, storage_id
from ckptconv.checkpoint.tensor_info import Reference, Storage
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
    storage_classes,
    torch_layout,
)
from ckptconv.formats.torch_files import MAGIC_BYTES, LegacyFile, files_in
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import TRUSTED, option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import (
    Blob,
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
    latin_1_text,
    replace_nodes,
    walk,
)
from ckptconv.pickles.parser import parse
from ckptconv.pickles.paths import find_places

NAME = WRITERS["pickle"].name
_LEGACY = b"\x80\x02" + MAGIC_BYTES + b"."  # the magic number, as every version of torch pickles it in protocol 2
_LEGACY_TEXT = _LEGACY.decode("latin-1").encode()  # as a text that represents bytes
_OLD_START = regex(rb"\([dl]p[01]\n|[}\]]q[\0\1]|\(?c[\w.]+\n\w+\n(?:p[01]\n|q[\0\1])?[\]()]|\(i[\w.]+\n\w+\n")
#: The formats of :mod:`struct` for the numbers of storages that are lists.
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
    """Return whether a file that starts with `head` can be a pickle.

    Protocols 2 and higher start with a signature. A pickle of an older protocol is recognised only if it starts with a
    dict, a list or an object.
    """
    return (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")) or bool(_OLD_START.match(head))


# Reading


class StorageFile(NamedTuple):
    """A file inside the pickle, in its bytes `start` to `end`. It contains one storage in torch's older format."""

    start: int
    end: int
    parsed: LegacyFile


@dataclass(eq=False)
class PickleFile:
    """The container of a checkpoint that was read from a plain pickle.

    `files` has the files inside the pickle by the keys of their storages. Files that are not stored as plain bytes are
    missing from it.
    """

    files: dict[str, StorageFile]


def read(source: Readable) -> Checkpoint:
    """Return the checkpoint in the pickle `source`.

    Raises UnsupportedError if there are no tensors in it (the error names the content), MalformedError, LimitError, and
    DangerousError if a storage's file names dangerous functions.
    """
    where = str(source.path)
    source.faults.pickles(PickleSequence(where, source, 1, (LOADER,)))
    try:
        graph, end = parse(source.read, source.size, where=where, leave=(_LEGACY, _LEGACY_TEXT))
    except InputError:
        raise pickle_error(source) from None
    calls = [call for call in graph.calls if is_global(call.callable, LOADER)]
    lists = [call for call in graph.calls if _numbers(call) is not None]
    has_tensors = bool(calls or lists) or any(
        isinstance(call.callable, Global) and call.callable.module == "torch._utils" for call in graph.calls
    )
    has_file = False  # whether a byte string is a file of torch.save
    if not has_tensors:
        places = find_places(graph.root, leaf_of({}), where, graph.opcodes)
        has_file = next(files_in(places, source), None) is not None
    if graph.references or not (has_tensors or has_file):
        raise pickle_error(source)
    if end != source.size:
        source.faults.found(
            MalformedError(
                "bytes after the end of the pickle",
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


def _numbers(call: Call) -> List | None:
    """Return the list of numbers from which `call` creates a storage, as torch before 0.4 did. None for other calls.

    The list must be complete before the call.
    """
    cls, args = call.callable, args_of(call)
    if not isinstance(cls, Global) or cls.module not in ("torch", "torch.cuda") or cls.name not in _NUMBERS:
        return None
    numbers = args[0] if len(args) == 1 else None
    if not isinstance(numbers, List) or call.kind != "REDUCE" or call.effects:
        return None
    return numbers if all((effect.order or 0) < (call.order or 0) for effect in numbers.effects) else None


class _Reader:
    """Replaces the calls in `graph` that create storages by references to storages.

    Attributes:
        spans: The bytes of the storages by key.
        files: The files that contain the storages by key, if their bytes are part of the pickle.
        notes: Notes for the checkpoint.
        warnings: Warnings for the checkpoint.
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
        """Replace `calls` in the graph by references to storages.

        The keys are their numbers in the order of the pickle. `calls` is sorted in place. Raises MalformedError,
        UnsupportedError, LimitError, DangerousError.
        """
        graph = self.graph
        calls.sort(key=lambda call: call.order or 0)
        new: dict[Node, Node] = {}
        for i, call in enumerate(calls):
            with self.source.faults:
                new[call] = self.reference(call, str(i))
        if len(new) < len(calls):
            raise MalformedError("some of its storages cannot be read", where=self.source.path)
        replace_nodes(graph, new)
        if any(is_global(node, LOADER) for node in walk([graph.root, *graph.discarded])):
            raise UnsupportedError(f"{LOADER} is used for something other than a call", where=self.source.path)
        graph.globals = [node for node in graph.globals if not is_global(node, LOADER)] + [*self.classes.values()]
        graph.calls = [call for call in graph.calls if call not in new and id(call) not in self.used]
        graph.byte_strings = [value for value in graph.byte_strings if id(value) not in self.used]
        graph.references = [node for node in new.values() if isinstance(node, PersistentId)]

    def reference(self, call: Call, key: str) -> PersistentId:
        """Return the reference that replaces `call`, to a storage with the key `key`, and add its bytes to `spans`."""
        numbers, cls = _numbers(call), call.callable
        if numbers is not None and isinstance(cls, Global):
            self.use(numbers, key)
            values = [*numbers.elements()]
            try:
                data = struct.pack(f"<{len(values)}{_NUMBERS[cls.name]}", *values)
            except (struct.error, OverflowError) as error:
                raise MalformedError(
                    f"a list contains an item that {cls} cannot store", where=self.where(key), got=error
                ) from None
            tag, numel = "cuda:0" if cls.module == "torch.cuda" else "cpu", len(values)
            self.spans[key] = ByteRange(BytesSource(data, self.source.path), 0, len(data))
        else:
            cls, tag, numel, self.spans[key] = self.nested(call, key)
        module = "torch.storage" if cls.name == "UntypedStorage" else "torch"
        cls = self.classes.setdefault(cls.name, Global(module, cls.name))
        tag = self.words.setdefault(tag, tag)
        return PersistentId(new_id(cls, key, tag, numel), call.order)

    def nested(self, call: Call, key: str) -> tuple[Global, str, int, ByteRange]:
        """Return the class, tag, number of elements and bytes of the storage in the file that `call` loads.

        Raises UnsupportedError if the file contains anything but one storage, and DangerousError.
        """
        args = args_of(call)
        if call.kind != "REDUCE" or call.effects or len(args) != 1:
            self.refuse(key, "it is changed in a way that torch does not use")
        file, start, length = self.bytes_of(args[0], key)
        end = start + length
        head = file.read(start, min(len(_LEGACY), end - start))
        graph, spans = (
            self.zipped(file, start, end, key) if torch_zip.looks_like(head) else self.legacy(file, start, end, key)
        )
        dangers = sorted(dangerous_globals(graph))
        if dangers:
            raise DangerousError(
                f"it contains functions that no checkpoint needs ({some(dangers)})",
                where=self.where(key),
                hint="do not load it",
            )
        root = graph.root
        others = [*graph.calls, *graph.discarded, *graph.globals]
        if not isinstance(root, PersistentId) or len(others) != 1 or len(spans) != 1:  # one global: the class
            self.refuse(key, "its file does not contain exactly one storage")
        cls, _, tag, numel = storage_id(root)
        return cls, tag, numel, next(iter(spans.values()))

    def legacy(self, file: Readable, start: int, end: int, key: str) -> tuple[Graph, dict[str, ByteRange]]:
        """Return the graph, and the bytes of the storages by key, of a file in torch's older format.

        It is stored in bytes `start` to `end` of `file`, and loaded by the call for the storage `key`.
        """
        parsed = torch_legacy.parse_file(file, start, end, self.where(key))
        self.notes += [note for note in parsed.notes if note not in self.notes]
        self.warnings += [text for text in parsed.warnings if text not in self.warnings]
        if file is self.source:
            self.files[key] = StorageFile(start, end, parsed)
        return parsed.graph, parsed.spans

    def zipped(self, file: Readable, start: int, end: int, key: str) -> tuple[Graph, dict[str, ByteRange]]:
        """Return the graph, and the bytes of the storages by key, of a file in torch's zip format.

        It is stored in bytes `start` to `end` of `file`, and loaded by the call for the storage `key`. Raises
        UnsupportedError if its storages are big-endian or compressed.
        """
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

    def bytes_of(self, value: Value, key: str) -> Span:
        """Return the source, start and length of the bytes that `value` represents.

        `value` is a bytes object, or a text that encodes bytes. Raises UnsupportedError if it does not represent bytes.
        """
        self.use(value, key)
        if (text := latin_1_text(value)) is not None:
            self.use(text, key)
        span = bytes_in(value, self.source, self.where(key), self.decoded)
        if span is None:
            self.refuse(key, "its data is not bytes")
        return span

    def use(self, value: Value, key: str) -> None:
        """Record that the storage `key` uses `value`. Raises UnsupportedError if another storage uses this value too.

        torch never writes such pickles, and a small pickle could become a large output.
        """
        if id(value) in self.used:
            self.refuse(key, "another storage has the same bytes")
        self.used.add(id(value))

    def where(self, key: str) -> str:
        """Return the name of the storage `key` for errors."""
        return f"{self.source.path}: storage {key}"

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise UnsupportedError with the message `why` for the storage `key`."""
        raise UnsupportedError(
            why, where=self.where(key), hint="torch writes no such pickle; do not load it unless you trust who made it"
        )


# Writing


def layout(checkpoint: Checkpoint, path: Path) -> Layout:
    """Plan the file at `path` for an edited `checkpoint`.

    Raises RefusedError if torch could not read the file, or if the source refers to ``torch.storage._load_from_bytes``.
    """
    refuse_unknown_dtypes(checkpoint)
    # A reader could not distinguish another reference to this function from the calls of this format.
    if any(is_global(node, LOADER) for node in checkpoint.graph.globals):
        raise RefusedError(
            f"a plain pickle can use {LOADER} only for its storages",
            where=checkpoint.source.path,
            hint=option("format", "pt") + " writes it",
        )
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
    notes: tuple[str, ...] = ()
    nodes = walk([checkpoint.graph.root, *checkpoint.graph.discarded])
    if any(isinstance(node, Py2String) and not node.data.isascii() for node in nodes):
        notes = ("it has Python 2 strings that are not ASCII: pickle.load needs encoding='utf-8' (or 'bytes')",)
    return torch_layout(checkpoint, file_of(path, pieces, checkpoint.storages.values()), notes)


def _head_of(reference: Reference, number: int) -> bytes:
    """Return the bytes before the storage of `reference` in the file inside the pickle. Its key there is `number`."""
    cls, _, _, numel = storage_id(reference.node)
    return torch_legacy.storage_file_head(cls, str(number), reference.storage.device, numel)


def call_again(checkpoint: Checkpoint, head_of: Callable[[Reference, int], bytes]) -> dict[Blob, tuple[bytes, Storage]]:
    """Replace each reference to a storage in the graph by a call. References to one storage and class share a call.

    Args:
        checkpoint: The checkpoint, whose graph changes.
        head_of: A function that returns the bytes before the storage in its file. Its arguments are a reference and the
            number of this reference.

    Returns:
        For the argument of each call, a blob: the bytes before the storage, and the storage.
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
