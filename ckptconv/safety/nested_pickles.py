"""Find pickles inside byte strings and texts: a call of ``pickle.loads`` could run them.

Looked into are, from their first byte on, bytes objects, bytearrays, Python 2's strings, and texts of which
``_codecs.encode``, ``bytes`` or ``bytearray`` makes bytes, as the codec that is named there does where it is one of
Unicode, ASCII or Latin-1, else as Latin-1. In these: pickles, one behind another, NumPy's files, whose objects are a
pickle behind the header, and files of torch, read as leniently as their readers do (:mod:`ckptconv.pickles.lenient`),
of which a pickle that names nothing is none.

Not looked into: byte strings that are compressed or encoded in another way (zlib, base64, other codecs), texts that
nothing encodes or something else does (``codecs.encode``, ``functools.partial``, a method), the numbers of tensors,
lists of numbers (``bytes([...])``), pickles that start behind the first byte and no other pickle, members of archives
that are not called ``.pkl`` or ``.pickle`` and are no files of torch or NumPy, archives without any name of a
checkpoint in them. Whoever loads one of these needs code to get at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import NamedTuple

from ckptconv.byteranges.fault_sink import RAISED
from ckptconv.byteranges.latin1 import Latin1Text
from ckptconv.byteranges.reading import inflated
from ckptconv.byteranges.sources import BytesSource, Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange, Inflate
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.errors import InputChangedError, InputError, MalformedError
from ckptconv.formats import legacy_file, torch_zip
from ckptconv.formats.foreign.folders import CHECKPOINT_SUFFIXES
from ckptconv.formats.zip_archive import STORED, Member, read_archive
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, ByteArray, Graph, Py2String, Value, args_of
from ckptconv.pickles.lenient import NAMING, STARTS, LenientScan, scan_lenient
from ckptconv.pickles.python2_names import imported_name

__all__ = [
    "Encoded",
    "Inner",
    "Undecidable",
    "byte_strings",
    "is_numpy",
    "pickles_from",
    "pickles_in",
    "pickles_in_member",
    "string_length",
]

_HEAD = 64
_FIRST = frozenset(bytes([code]) for code in STARTS)
_NUMPY = b"\x93NUMPY"
_WINDOW = 1 << 20  # bytes searched at a time
_SHORTEST = 3  # bytes of a pickle that names something: EXT1, its code, STOP
_LONGEST_TEXT = 16 << 20  # bytes of a text that is encoded in memory
#: Codecs of Python's own in which a text can be a pickle, and what they do with characters that they do not have.
_CODECS = frozenset([
    "ascii", "latin_1", "raw_unicode_escape", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le",
    "utf_7", "utf_8", "utf_8_sig",
])  # a table  # fmt: skip
_ERRORS = frozenset(["backslashreplace", "ignore", "replace", "strict", "surrogateescape", "surrogatepass"])
_ENCODERS = ("_codecs.encode", "builtins.bytearray", "builtins.bytes")
_NAMES = regex(b"[" + re.escape(NAMING) + b"]")


class Inner(NamedTuple):
    """A pickle that was found: what it is called in paths, its graph, and what its own long byte
    strings are ranges of.
    """

    name: str
    graph: Graph
    of: Readable


class Undecidable(Exception):
    """Nobody can tell what is in a byte string; the text says why."""


class Encoded(NamedTuple):
    """Bytes that are a long `text` in `codec`."""

    text: Blob
    codec: str
    errors: str


def byte_strings(graph: Graph) -> Iterator[tuple[Value | Encoded, Value]]:
    """What in `graph` can hold a pickle, each once: byte strings, texts that become such, as their bytes.

    Each is named beside what stands for it in the graph.
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
                data = _as_bytes(text, codec, errors)
                if data is not None and _may_hold(data):
                    yield data, call


def _encoding(args: list[Value], known: dict[str, str]) -> tuple[Value, str, str]:
    """Text, codec and what becomes of characters that it does not have, as `args` say them to an encoder.

    `known` are the codecs by what the file calls them. The names given are ours, not the file's.
    """
    text, codec, errors = (*args, None, None)[:3]
    said = "utf-8" if len(args) == 1 else text_of(codec) or ""
    if said not in known:
        word = normalize_encoding(said.lower()).replace(".", "_")
        word = aliases.get(word, word)
        known[said] = word if word in _CODECS else "latin_1"
    how = text_of(errors)
    return text, known[said], how if how in _ERRORS else "strict"


def _as_bytes(text: Value, codec: str, errors: str) -> bytes | Encoded | None:
    if isinstance(text, Blob) and text.kind == "str":
        return Encoded(text, codec, errors)
    return _encoded(text, codec, errors) if isinstance(text, str) else None


def _encoded(text: str, codec: str, errors: str) -> bytes | None:
    try:
        return text.encode(codec, errors)
    except UnicodeError:
        return None


def string_length(value: Value | Encoded) -> int:
    """The bytes of `value`, a byte string or a text that becomes one."""
    if isinstance(value, Encoded):
        return value.text.length
    if isinstance(value, Blob):
        return value.length
    data = _held(value)
    return len(data) if data is not None else 0


def _held(value: Value | Encoded) -> bytes | None:
    """The bytes of `value` where they are in memory, and are such."""
    return value.data if isinstance(value, (Py2String, ByteArray)) else value if isinstance(value, bytes) else None


def _may_hold(value: Value | Encoded) -> bool:
    if isinstance(value, (Blob, Encoded)):
        return True
    data = _held(value)
    if data is None or len(data) < _SHORTEST or _NAMES.search(data) is None:
        return False
    return data[0] in STARTS or data.startswith(_NUMPY)


def pickles_in(value: Value | Encoded, blobs: Readable, most: int) -> Iterator[Inner | int]:
    """The pickles in `value`, which is a range of `blobs` if it is long. Raises Undecidable.

    Between them are numbers: so many bytes were looked at, of `most` in all. A negative one says how many more there
    are to look at: what is deflated in an archive can be more than the archive.
    """
    held = _readable(value, blobs)
    if held is not None:
        yield from _pickles_in_file(held, None, most, LIMITS.nested_pickles)


def pickles_in_member(
    held: Readable, member: Member, name: str, most: int, depth: int = LIMITS.nested_pickles
) -> Iterator[Inner | int]:
    """What :func:`pickles_in` gives, of `member`, called `name`, of the archive `held`, if it is a pickle by its name
    or a file of torch or NumPy by its first bytes; archives are looked into `depth` deep. Raises Undecidable and
    InputError.
    """
    if _is_pickle(name) or _is_looked_into(_head_of(held, member)):
        yield -member.size  # more to look at
        yield from _pickles_in_file(_opened(held, member), name, most, depth)


def _pickles_in_file(held: Readable, name: str | None, most: int, depth: int) -> Iterator[Inner | int]:
    """The pickles at the start of `held`, called `name` if it has one, or those in it, if it is an archive."""
    head = held.read(0, min(_HEAD, held.size))
    if head.startswith(_NUMPY):
        at = min(_behind_header(head), held.size)
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
        known = name or ("torch file" if legacy_file.looks_like(head) else "pickle")
        yield from pickles_from(held, known, LIMITS.pickles_inside, most)


def _member(held: Readable, member: Member, name: str, most: int, depth: int) -> Iterator[Inner | int]:
    """What :func:`pickles_in_member` gives of an archive that is not the checkpoint itself. Raises Undecidable."""
    try:
        yield from pickles_in_member(held, member, name, most, depth)
    except InputChangedError:
        raise
    except InputError:
        raise Undecidable("an archive that cannot be read") from None


def _is_looked_into(head: bytes) -> bool:
    """Whether a file that starts with `head` is one of torch or NumPy."""
    return torch_zip.looks_like(head) or legacy_file.looks_like(head) or head.startswith(_NUMPY)


def _behind_header(head: bytes) -> int:
    """Where the numbers or objects start in one of NumPy's files, which starts with `head`: two bytes of a version, of
    which the first decides how many the length of the header has.
    """
    wide = 2 if head[6:7] == b"\1" else 4
    return 8 + wide + int.from_bytes(head[8 : 8 + wide], "little")


def is_numpy(held: Readable, member: Member) -> bool:
    """Whether ``numpy.load`` takes `member` of the archive `held` for an array, whatever it is called."""
    return member.size > len(_NUMPY) and _head_of(held, member).startswith(_NUMPY)


def _head_of(held: Readable, member: Member) -> bytes:
    """The first bytes of `member` of the archive `held`. Raises InputError."""
    if member.method == STORED:
        return held.read(member.data_offset, min(_HEAD, member.size))
    stream = Inflate(ByteRange(held, member.data_offset, member.stored_size), member.size, None)
    return next(inflated(stream), b"")[:_HEAD]


def _readable(value: Value | Encoded, blobs: Readable) -> Readable | None:
    """`value` as a file."""
    if isinstance(value, Encoded):
        return _text_as_file(value, blobs)
    if isinstance(value, Blob):
        return _window(value, blobs)
    data = _held(value)
    return None if data is None else BytesSource(data, blobs.path)


def _window(blob: Blob, blobs: Readable) -> Readable:
    window = SliceSource(blobs, blob.offset, blob.length)
    window.faults = RAISED
    return window


def _text_as_file(value: Encoded, blobs: Readable) -> Readable | None:
    """A long text, encoded; in memory, where it must be."""
    text, codec, errors = value
    if (codec, errors) == ("latin_1", "strict"):
        try:
            return Latin1Text(ByteRange(blobs, text.offset, text.length))
        except MalformedError:  # characters that no byte has
            return None
    if codec == "utf_8":
        return _window(text, blobs)  # as it stands
    if text.length > _LONGEST_TEXT:
        raise Undecidable("a text too long to encode")
    data = _encoded(blobs.read(text.offset, text.length).decode("utf-8", "surrogatepass"), codec, errors)
    return None if data is None else BytesSource(data, blobs.path)


def pickles_from(held: Readable, name: str, count: int, most: int) -> Iterator[Inner | int]:
    """The pickles in `held`, one behind the other, `count` at most."""
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
        if _is_looked_at(seen):
            yield Inner(name, seen.graph, held)
        if seen.doubt:
            raise Undecidable(seen.doubt)
        if not seen.is_whole:
            return
        at = seen.end
        left -= seen.graph.opcodes
    if count == LIMITS.pickles_inside:
        raise Undecidable("more pickles inside than are looked into")


def _next_name(held: Readable, at: int) -> int:
    """The offset of the first byte from `at` on with which a pickle can name something; -1 where there is none."""
    for start in range(at, held.size, _WINDOW):
        found = _NAMES.search(held.read(start, min(_WINDOW, held.size - start)))
        if found:
            return start + found.start()
    return -1


def _is_looked_at(seen: LenientScan) -> bool:
    """Whether it is a pickle that names or holds something.

    Bytes can start as a pickle by chance. So one that breaks off counts only if something was called before, or
    something dangerous was named.
    """
    graph = seen.graph
    if seen.is_whole:
        return bool(graph.globals or graph.extensions or graph.byte_strings)
    return bool(graph.outer_calls) or any(map(is_dangerous, graph.globals))


def _members(held: Readable) -> tuple[Member, ...]:
    """The members of the archive `held`, if one of them can be a checkpoint by its name. Raises Undecidable."""
    try:
        return read_archive(held, _want_checkpoints).members
    except _OtherArchive:
        return ()
    except InputChangedError:
        raise
    except InputError:
        raise Undecidable("an archive that cannot be read") from None


def _is_pickle(name: str) -> bool:
    """Whether a member of an archive is a pickle by its `name`, in any case: so torch looks names up."""
    return name.casefold().endswith((".pkl", ".pickle"))


class _OtherArchive(Exception):
    """No member is a pickle or a checkpoint."""


def _want_checkpoints(names: list[str]) -> None:
    if not any(_is_pickle(name) or name.casefold().endswith(CHECKPOINT_SUFFIXES) for name in names):
        raise _OtherArchive


def _opened(held: Readable, member: Member) -> Readable:
    """`member` of the archive `held`; where it is deflated, in memory. Raises Undecidable, InputError."""
    if member.method == STORED:
        return SliceSource(held, member.data_offset, member.size)
    if member.size > min(LIMITS.pickle_bytes, LIMITS.pickle_inflate_ratio * member.stored_size + LIMITS.inline_bytes):
        raise Undecidable("a pickle too long to look into")
    stream = Inflate(ByteRange(held, member.data_offset, member.stored_size), member.size, None)
    return BytesSource(b"".join(inflated(stream)), held.path)
