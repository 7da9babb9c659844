"""Find pickles inside byte strings and texts, because a call of ``pickle.loads`` could run them.

These values are searched from their first byte: bytes objects, bytearrays, strings of Python 2, and texts that
``_codecs.encode``, ``bytes`` or ``bytearray`` converts to bytes. A text is encoded with the codec of the call if it
is a codec of Unicode, ASCII or Latin-1, and otherwise as Latin-1. The search finds consecutive pickles, NumPy files of
objects (a header and a pickle) and files of torch. It accepts everything that their own readers accept
(:mod:`ckptconv.pickles.lenient`). A pickle that names no global does not count.

These are not searched, because other code is needed to load them:

- byte strings that are compressed or encoded otherwise (zlib, base64, other codecs);
- texts that are not encoded, or are encoded by another function (``codecs.encode``, ``functools.partial``, a method);
- the elements of tensors, and lists of numbers (``bytes([...])``);
- pickles that start neither at the first byte nor after another pickle;
- members of archives that are not called ``.pkl`` or ``.pickle``, are not files of torch or NumPy, and are not among
  the weights, constants and inputs of a program of torch.export, which unpickles what is not a file of torch;
- archives in which no member has the name of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
#: The weights, constants and inputs of a program of torch.export. Those of torch before 2.8 are in no folder.
_OF_PROGRAM = regex(r"data/(weights|constants|sample_inputs)/|serialized_[^/]*\.pt$")
_NAMES = regex(b"[" + re.escape(NAMING) + b"]")


class Inner(NamedTuple):
    """A pickle that was found.

    Attributes:
        name: The name of the pickle in paths.
        graph: The graph of the pickle.
        source: The source of its long byte strings.
    """

    name: str
    graph: Graph
    source: Readable


class Undecidable(Exception):
    """Raised if the content of a byte string cannot be determined. The text is the reason."""


class Encoded(NamedTuple):
    """The bytes of the long text `text`, encoded with `codec` and the error handler `errors`."""

    text: Blob
    codec: str
    errors: str


def byte_strings(graph: Graph) -> Iterator[tuple[Value | Encoded, Value]]:
    """Yield every value in `graph` that can contain a pickle, each once, with its node.

    The values are byte strings, whose node is the value itself, and encoded texts, whose node is the call that encodes.
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
    """Return the text, the codec and the error handler of an encoder that is called with `args`.

    Unknown codecs become ``latin_1``, and unknown error handlers ``strict``. `known` caches the codec of each name
    in the file; new names are added.
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
    """Return the number of bytes of `value`: for a long text, the number in the source.

    It is 0 if `value` is no byte string.
    """
    if isinstance(value, Encoded):
        return value.text.length
    if isinstance(value, Blob):
        return value.length
    data = _held(value)
    return len(data) if data is not None else 0


def _held(value: Value | Encoded) -> bytes | None:
    """Return the bytes of `value`. Return None if it is not a byte string or if its bytes are still in the source."""
    return value.data if isinstance(value, (Py2String, ByteArray)) else value if isinstance(value, bytes) else None


def _may_hold(value: Value | Encoded) -> bool:
    """Return whether `value` can contain a pickle that names a global, by its first byte. Long values always can."""
    if isinstance(value, (Blob, Encoded)):
        return True
    data = _held(value)
    if data is None or len(data) < _SHORTEST or _NAMES.search(data) is None:
        return False
    return data[0] in STARTS or data.startswith(_NUMPY)


def pickles_in(value: Value | Encoded, blobs: Readable, most: int) -> Iterator[Inner | int]:
    """Yield the pickles in `value`, and numbers that count the bytes that were searched.

    A negative number means that more bytes have to be searched: the members of an archive can be longer than the
    archive.

    Args:
        value: The byte string or encoded text.
        blobs: The source of the bytes if `value` is long.
        most: The number of bytes that may be searched.

    Raises:
        Undecidable: The content cannot be determined.
    """
    held = _readable(value, blobs)
    if held is not None:
        yield from _pickles_in_file(held, None, most, LIMITS.nested_pickles)


def pickles_in_member(
    member: Member, name: str, most: int, depth: int = LIMITS.nested_pickles
) -> Iterator[Inner | int]:
    """Yield the pickles in `member` of an archive, and numbers as :func:`pickles_in` does.

    Nothing is yielded unless `name` is that of a pickle (:func:`_is_pickle`), or the member starts like a file of torch
    or NumPy.

    Args:
        held: The archive.
        member: The member.
        name: The name of the member in paths.
        most: The number of bytes that may be searched.
        depth: The number of levels of archives in archives that are searched.

    Raises:
        Undecidable: The content cannot be determined.
        InputError: The archive has a fault.
    """
    if not _is_pickle(name):
        head = _head_of(member)
        if not (torch_zip.looks_like(head) or looks_like_legacy(head) or head.startswith(_NUMPY)):
            return
    yield -member.size  # more bytes to search
    yield from _pickles_in_file(_opened(member), name, most, depth)


def _pickles_in_file(held: Readable, name: str | None, most: int, depth: int) -> Iterator[Inner | int]:
    """Yield the pickles at the start of `held`, or in its members if it is an archive. Yield numbers, too.

    The numbers, `most` and `depth` are as in :func:`pickles_in_member`. `name` is the name of `held` in paths, or
    None to name it by its kind. Raises Undecidable.
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
            with _undecidable_if_damaged():
                yield from pickles_in_member(member, inner, most, depth - 1)
    else:
        known = name or ("torch file" if looks_like_legacy(head) else "pickle")
        yield from pickles_from(held, known, LIMITS.pickles_inside, most)


@contextmanager
def _undecidable_if_damaged() -> Iterator[None]:
    """Raise Undecidable in place of InputError, which means that an archive has a fault."""
    try:
        yield
    except InputChangedError:
        raise
    except InputError:
        work().check()
        raise Undecidable("an archive that cannot be read") from None


def is_numpy(member: Member) -> bool:
    """Return whether `member` of an archive starts like a NumPy file, as ``numpy.load`` checks it."""
    return member.size > len(_NUMPY) and _head_of(member).startswith(_NUMPY)


def _head_of(member: Member) -> bytes:
    """Return the first 64 bytes of `member` of an archive. Raises InputError."""
    if member.method == STORED:
        return member.stored().read(0, min(_HEAD, member.size))
    stream = Inflate(ByteRange(member.source, member.data_start(), member.stored_size), member.size, None)
    return next(inflated(stream), b"")[:_HEAD]


def _readable(value: Value | Encoded, blobs: Readable) -> Readable | None:
    """Return `value` as a source. Return None if it has no bytes, or if its text cannot be encoded.

    Raises Undecidable.
    """
    if isinstance(value, Encoded):
        return _text_as_file(value, blobs)
    if isinstance(value, Blob):
        return _window(value, blobs)
    data = _held(value)
    return None if data is None else BytesSource(data, blobs.path)


def _window(blob: Blob, blobs: Readable) -> Readable:
    """Return the bytes of `blob` as a source whose faults are raised as errors."""
    window = SliceSource(blobs, blob.offset, blob.length)
    window.faults = RAISED
    return window


def _text_as_file(value: Encoded, blobs: Readable) -> Readable | None:
    """Return the long text `value`, encoded, as a source. Return None if the codec cannot encode it.

    Latin-1 and UTF-8 are encoded while they are read. Other codecs encode in memory; Undecidable is raised if the
    text is too long for this.
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
        raise Undecidable("a string that is too long to encode")
    data = _encoded(blobs.read(text.offset, text.length).decode("utf-8", "surrogatepass"), codec, errors)
    return None if data is None else BytesSource(data, blobs.path)


def pickles_from(held: Readable, name: str, count: int, most: int) -> Iterator[Inner | int]:
    """Yield at most `count` consecutive pickles from the start of `held`, and numbers as :func:`pickles_in` does.

    A pickle that names nothing is left out. An incomplete pickle is left out, too, unless it has called something
    or named a dangerous global. `name` is the name of the pickles in paths. Raises Undecidable.
    """
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
        raise Undecidable("too many nested pickles to check")


def _next_name(held: Readable, at: int) -> int:
    """Return the offset of the first byte from `at` on that can be an opcode that names a global.

    Return -1 if there is none.
    """
    for start in range(at, held.size, _WINDOW):
        found = _NAMES.search(held.read(start, min(_WINDOW, held.size - start)))
        if found:
            return start + found.start()
    return -1


def _members(held: Readable) -> tuple[Member, ...]:
    """Return the members of the archive `held`, or none if no member has the name of a pickle or checkpoint.

    Raises Undecidable if the archive cannot be read.
    """
    with suppress(_OtherArchive), _undecidable_if_damaged():
        return read_archive(held, _want_checkpoints).members
    return ()


def _is_pickle(name: str) -> bool:
    """Return whether `name` ends in ``.pkl`` or ``.pickle``, or is a record that torch.export.load can unpickle.

    Upper and lower case are the same.
    """
    name = name.casefold()
    return name.endswith((".pkl", ".pickle")) or _OF_PROGRAM.search(name) is not None


class _OtherArchive(Exception):
    """Raised if no member of an archive is a pickle or a checkpoint."""


def _want_checkpoints(names: list[str]) -> None:
    """Raise _OtherArchive unless one of `names` is the name of a pickle or checkpoint."""
    if not any(_is_pickle(name) or name.casefold().endswith(CHECKPOINT_SUFFIXES) for name in names):
        raise _OtherArchive


def _opened(member: Member) -> Readable:
    """Return `member` of an archive as a source. A deflated member is inflated in memory.

    Raises Undecidable if the inflated member is too long, and InputError if the archive has a fault.
    """
    if member.method == STORED:
        return member.stored()
    if member.size > min(LIMITS.pickle_bytes, LIMITS.pickle_inflate_ratio * member.stored_size + LIMITS.inline_bytes):
        raise Undecidable("a pickle that is too long to check")
    stream = Inflate(ByteRange(member.source, member.data_start(), member.stored_size), member.size, None)
    return BytesSource(b"".join(inflated(stream)), member.source.path)
