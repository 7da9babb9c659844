"""Find pickles inside byte strings and texts, because a call of ``pickle.loads`` could run them.

Searched from their first byte on: bytes objects, bytearrays, Python 2's strings, and texts that ``_codecs.encode``,
``bytes`` or ``bytearray`` turns into bytes. A text is encoded with the codec in the call if that is one of Unicode,
ASCII or Latin-1, and otherwise as Latin-1. Found in these: consecutive pickles, NumPy files, whose objects are a pickle
after the header, and files of torch. They are read as leniently as their own readers read them
(:mod:`ckptconv.pickles.lenient`). A pickle that names nothing does not count.

Not searched: byte strings that are compressed or encoded in another way (zlib, base64, other codecs), texts that
nothing encodes or that something else encodes (``codecs.encode``, ``functools.partial``, a method), the numbers of
tensors, lists of numbers (``bytes([...])``), pickles that start neither at the first byte nor after another pickle,
members of archives that are not called ``.pkl`` or ``.pickle`` and are not files of torch or NumPy, and archives in
which no name is the name of a checkpoint. Loading one of these takes other code first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import NamedTuple

from ckptconv.byteranges.fault_sink import RAISED
from ckptconv.byteranges.reading import Latin1Text, inflated
from ckptconv.byteranges.sources import BytesSource, Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Inflate
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.errors import InputChangedError, InputError, MalformedError
from ckptconv.formats import torch_zip
from ckptconv.formats.foreign.paths import CHECKPOINT_SUFFIXES
from ckptconv.formats.torch_files import looks_like_legacy
from ckptconv.formats.zip_archive import STORED, Member, read_archive
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, ByteArray, Graph, Py2String, Value, args_of, imported_name
from ckptconv.pickles.lenient import NAMING, STARTS, scan_lenient
from ckptconv.work import work

_HEAD = 64
_FIRST = frozenset(bytes([code]) for code in STARTS)
_NUMPY = b"\x93NUMPY"
_WINDOW = 1 << 20  # bytes searched at a time
_SHORTEST = 3  # bytes of a pickle that names something: EXT1, its code, STOP
_LONGEST_TEXT = 16 << 20  # bytes of the longest text that is encoded in memory
#: Python's codecs that can turn a text into a pickle, and ways to handle characters that a codec does not have.
_CODECS = frozenset([
    "ascii", "latin_1", "raw_unicode_escape", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le",
    "utf_7", "utf_8", "utf_8_sig",
])  # a table  # fmt: skip
_ERRORS = frozenset(["backslashreplace", "ignore", "replace", "strict", "surrogateescape", "surrogatepass"])
_ENCODERS = ("_codecs.encode", "builtins.bytearray", "builtins.bytes")
_NAMES = regex(b"[" + re.escape(NAMING) + b"]")


class Inner(NamedTuple):
    """A pickle that was found.

    `name` is its name in paths, `graph` its graph, and `source` the source of its long byte strings.
    """

    name: str
    graph: Graph
    source: Readable


class Undecidable(Exception):
    """The content of a byte string cannot be determined. The text is the reason."""


class Encoded(NamedTuple):
    """Bytes that result from encoding the long text `text` with `codec`."""

    text: Blob
    codec: str
    errors: str


def byte_strings(graph: Graph) -> Iterator[tuple[Value | Encoded, Value]]:
    """Yield every value in `graph` that can contain a pickle, each once, with the node that stands for it in the graph.

    The values are byte strings, and the bytes of texts that a call encodes. For the latter the node is the call.
    """
    for value in graph.byte_strings:
        if _may_hold(value):
            yield value, value
    encoders = {id(node) for node in graph.globals if imported_name(node, 2) in _ENCODERS}
    if not encoders:
        return
    seen = set()
    known: dict[str, str] = {}
    for call in graph.calls:
        if id(call.callable) in encoders and args_of(call):
            text, codec, errors = _encoding(args_of(call), known)
            if (id(text), codec, errors) not in seen:
                seen.add((id(text), codec, errors))
                data: Value | Encoded = None
                if isinstance(text, Blob) and text.kind == "str":
                    data = Encoded(text, codec, errors)
                elif isinstance(text, str):
                    data = _encoded(text, codec, errors)
                if _may_hold(data):
                    yield data, call


def _encoding(args: list[Value], known: dict[str, str]) -> tuple[Value, str, str]:
    """Return the text, the codec and the handling of errors that an encoder with the arguments `args` uses.

    `known` maps each name of a codec in the file to the codec, and is extended. The returned names come from this
    module, not from the file.
    """
    text, codec, errors = (*args, None, None)[:3]
    name = "utf-8" if len(args) == 1 else text_of(codec) or ""
    if name not in known:
        word = normalize_encoding(name.lower()).replace(".", "_")
        word = aliases.get(word, word)
        known[name] = word if word in _CODECS else "latin_1"
    how = text_of(errors)
    return text, known[name], how if how in _ERRORS else "strict"


def _encoded(text: str, codec: str, errors: str) -> bytes | None:
    """Return `text` encoded, or None if the codec refuses it."""
    try:
        return text.encode(codec, errors)
    except UnicodeError:
        return None


def string_length(value: Value | Encoded) -> int:
    """Return the number of bytes of `value`. For a long text it is the number of bytes in the source."""
    if isinstance(value, Encoded):
        return value.text.length
    if isinstance(value, Blob):
        return value.length
    data = _held(value)
    return len(data) if data is not None else 0


def _held(value: Value | Encoded) -> bytes | None:
    """Return the bytes of `value`, or None if it is not a byte string or its bytes are not in memory."""
    return value.data if isinstance(value, (Py2String, ByteArray)) else value if isinstance(value, bytes) else None


def _may_hold(value: Value | Encoded) -> bool:
    """Return whether `value` can contain a pickle that names a global, by its first byte. A long value always can."""
    if isinstance(value, (Blob, Encoded)):
        return True
    data = _held(value)
    if data is None or len(data) < _SHORTEST or _NAMES.search(data) is None:
        return False
    return data[0] in STARTS or data.startswith(_NUMPY)


def pickles_in(value: Value | Encoded, blobs: Readable, most: int) -> Iterator[Inner | int]:
    """Yield the pickles in `value`, whose bytes are in `blobs` if it is long.

    Between the pickles, numbers are yielded: the number of bytes that were searched. At most `most` bytes are searched.
    A negative number adds to the bytes that are still to be searched, because the content of an archive can be longer
    than the archive. Raises Undecidable.
    """
    held = _readable(value, blobs)
    if held is not None:
        yield from _pickles_in_file(held, None, most, LIMITS.nested_pickles)


def pickles_in_member(
    held: Readable, member: Member, name: str, most: int, depth: int = LIMITS.nested_pickles
) -> Iterator[Inner | int]:
    """Yield the same as :func:`pickles_in` for `member` of the archive `held`.

    Nothing is yielded unless `name` is the name of a pickle or the member starts like a file of torch or NumPy.
    Archives in archives are searched up to `depth` levels. Raises Undecidable and InputError.
    """
    if not _is_pickle(name):
        head = _head_of(held, member)
        if not (torch_zip.looks_like(head) or looks_like_legacy(head) or head.startswith(_NUMPY)):
            return
    yield -member.size  # more bytes to search
    yield from _pickles_in_file(_opened(held, member), name, most, depth)


def _pickles_in_file(held: Readable, name: str | None, most: int, depth: int) -> Iterator[Inner | int]:
    """Yield the pickles at the start of `held`, or in its members if it is an archive. `name` is its name in paths, or
    None.
    """
    head = held.read(0, min(_HEAD, held.size))
    if head.startswith(_NUMPY):
        wide = 2 if head[6:7] == b"\1" else 4  # bytes of the length of the header, which the major version decides
        at = min(8 + wide + int.from_bytes(head[8 : 8 + wide], "little"), held.size)
        yield from pickles_from(SliceSource(held, at, held.size - at), name or "NumPy file", 1, most)
        return
    if head[:1] not in _FIRST:
        return
    if torch_zip.looks_like(head):
        if not depth:
            raise Undecidable("archives nested too deeply")
        for member in _members(held):
            inner = f"{name}: {member.name}" if name else member.name
            yield from _member(held, member, inner, most, depth - 1)
    else:
        known = name or ("torch file" if looks_like_legacy(head) else "pickle")
        yield from pickles_from(held, known, LIMITS.pickles_inside, most)


def _member(held: Readable, member: Member, name: str, most: int, depth: int) -> Iterator[Inner | int]:
    """Yield the same as :func:`pickles_in_member` for an archive inside the checkpoint. Raises Undecidable."""
    try:
        yield from pickles_in_member(held, member, name, most, depth)
    except InputChangedError:
        raise
    except InputError:
        work().check()
        raise Undecidable("an archive that cannot be read") from None


def is_numpy(held: Readable, member: Member) -> bool:
    """Return whether ``numpy.load`` reads `member` of the archive `held` as an array. Its name does not matter."""
    return member.size > len(_NUMPY) and _head_of(held, member).startswith(_NUMPY)


def _head_of(held: Readable, member: Member) -> bytes:
    """Return the first bytes of `member` of the archive `held`. Raises InputError."""
    if member.method == STORED:
        return held.read(member.data_start(held), min(_HEAD, member.size))
    stream = Inflate(ByteRange(held, member.data_start(held), member.stored_size), member.size, None)
    return next(inflated(stream), b"")[:_HEAD]


def _readable(value: Value | Encoded, blobs: Readable) -> Readable | None:
    """Return `value` as a source, or None if it has no bytes."""
    if isinstance(value, Encoded):
        return _text_as_file(value, blobs)
    if isinstance(value, Blob):
        return _window(value, blobs)
    data = _held(value)
    return None if data is None else BytesSource(data, blobs.path)


def _window(blob: Blob, blobs: Readable) -> Readable:
    """Return the bytes of `blob` as a source that raises each fault."""
    window = SliceSource(blobs, blob.offset, blob.length)
    window.faults = RAISED
    return window


def _text_as_file(value: Encoded, blobs: Readable) -> Readable | None:
    """Return a long text, encoded, as a source, or None if it cannot be encoded.

    It is encoded in memory unless the codec is Latin-1 or UTF-8. Raises Undecidable if it is too long for that.
    """
    text, codec, errors = value
    if (codec, errors) == ("latin_1", "strict"):
        try:
            return Latin1Text(ByteRange(blobs, text.offset, text.length))
        except MalformedError:  # the text has characters outside Latin-1
            return None
    if codec == "utf_8":
        return _window(text, blobs)  # texts are stored as UTF-8
    if text.length > _LONGEST_TEXT:
        raise Undecidable("a text too long to encode")
    data = _encoded(blobs.read(text.offset, text.length).decode("utf-8", "surrogatepass"), codec, errors)
    return None if data is None else BytesSource(data, blobs.path)


def pickles_from(held: Readable, name: str, count: int, most: int) -> Iterator[Inner | int]:
    """Yield the pickles from the start of `held`, at most `count` consecutive ones, as :func:`pickles_in` does."""
    at, names = 0, -1
    left = min(LIMITS.nested_opcodes, most)
    for _ in range(count):
        if held.size - at < _SHORTEST or held.read(at, 1) not in _FIRST:
            return
        names = names if names >= at else _next_name(held, at)
        if names < 0:
            return
        seen = scan_lenient(held.read, at, held.size, most=left)
        yield seen.end - at
        graph = seen.graph
        # Bytes can start like a pickle by chance, so an incomplete one must have called or named something dangerous.
        is_whole = seen.is_whole and bool(graph.globals or graph.extensions or graph.byte_strings)
        if is_whole or (not seen.is_whole and (graph.outer_calls or any(map(is_dangerous, graph.globals)))):
            yield Inner(name, graph, held)
        if seen.doubt:
            raise Undecidable(seen.doubt)
        if not seen.is_whole:
            return
        at = seen.end
        left -= graph.opcodes
    if count == LIMITS.pickles_inside:
        raise Undecidable("more pickles inside than are looked into")


def _next_name(held: Readable, at: int) -> int:
    """Return the offset of the first byte from `at` on that can be an opcode which names a global, or -1 if there is
    none.
    """
    for start in range(at, held.size, _WINDOW):
        found = _NAMES.search(held.read(start, min(_WINDOW, held.size - start)))
        if found:
            return start + found.start()
    return -1


def _members(held: Readable) -> tuple[Member, ...]:
    """Return the members of the archive `held`. Return none if no name is the name of a pickle or checkpoint.

    Raises Undecidable if the archive cannot be read.
    """
    try:
        return read_archive(held, _want_checkpoints).members
    except _OtherArchive:
        return ()
    except InputChangedError:
        raise
    except InputError:
        work().check()
        raise Undecidable("an archive that cannot be read") from None


def _is_pickle(name: str) -> bool:
    """Return whether a member with this `name` is a pickle. The case does not matter, as in torch."""
    return name.casefold().endswith((".pkl", ".pickle"))


class _OtherArchive(Exception):
    """No member is a pickle or a checkpoint."""


def _want_checkpoints(names: list[str]) -> None:
    """Raise _OtherArchive unless one of `names` is the name of a pickle or checkpoint."""
    if not any(_is_pickle(name) or name.casefold().endswith(CHECKPOINT_SUFFIXES) for name in names):
        raise _OtherArchive


def _opened(held: Readable, member: Member) -> Readable:
    """Return `member` of the archive `held` as a source. A deflated member is inflated in memory.

    Raises Undecidable if it is too long, and InputError.
    """
    if member.method == STORED:
        return SliceSource(held, member.data_start(held), member.size)
    if member.size > min(LIMITS.pickle_bytes, LIMITS.pickle_inflate_ratio * member.stored_size + LIMITS.inline_bytes):
        raise Undecidable("a pickle too long to look into")
    stream = Inflate(ByteRange(held, member.data_start(held), member.stored_size), member.size, None)
    return BytesSource(b"".join(inflated(stream)), held.path)
