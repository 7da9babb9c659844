"""Pickles inside byte strings: what a reader of attacks misses, and a call of ``pickle.loads`` finds.

Looked into are, from their first byte on, bytes objects, bytearrays, Python 2's strings, and texts of which ``_codecs.encode``, ``bytes`` or ``bytearray`` makes bytes; pickles and files of torch in these,
read as leniently as their readers do (:mod:`ckptconv.pickles.lenient`), of which a pickle that names nothing is none.

Not looked into: byte strings that are compressed or encoded in another way (zlib, base64), texts that nothing encodes, the numbers of tensors, lists of numbers, pickles that start behind the first byte. Whoever
loads one of these needs code to get at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.dangers import is_dangerous
from ckptconv.errors import InputChangedError, InputError, MalformedError
from ckptconv.faults import RAISED
from ckptconv.formats import torch_legacy, torch_zip
from ckptconv.formats.plain_pickle import Decoded
from ckptconv.formats.zip_archive import STORED, Member, read_archive
from ckptconv.graph import Blob, ByteArray, Graph, Py2String, Value, args_of
from ckptconv.limits import LIMITS
from ckptconv.model import Inflate, Span
from ckptconv.pickles.imports import imported_name
from ckptconv.pickles.lenient import NAMING, STARTS, Glance, glance
from ckptconv.ranges import inflated
from ckptconv.sources import Held, Readable, Window

__all__ = ["Inner", "Unjudged", "byte_strings", "length_of", "pickles_from", "pickles_in"]

_HEAD = 64
_WINDOW = 1 << 20  # bytes searched at a time
_SHORTEST = 3  # bytes of a pickle that names something: EXT1, its code, STOP
_LEGACY_PICKLES = 5
_ENCODERS = ("_codecs.encode", "builtins.bytearray", "builtins.bytes")
_NAMES = re.compile(b"[" + re.escape(NAMING) + b"]")


class Inner(NamedTuple):
    """A pickle that was found: what it is called in paths, its graph, and what its own long byte strings are ranges of."""

    name: str
    graph: Graph
    of: Readable


class Unjudged(Exception):
    """Nobody can tell what is in a byte string; the text says why."""


def byte_strings(graph: Graph) -> Iterator[tuple[Value, Value]]:
    """What in GRAPH can hold a pickle, each once: byte strings, texts that become such. Each is named beside what stands for it in the graph."""
    for value in graph.byte_strings:
        if _may_hold(value):
            yield value, value
    encoders = {id(node) for node in graph.globals if imported_name(node, 2) in _ENCODERS}
    if not encoders:
        return
    seen = set()
    for call in graph.calls:
        if id(call.callable) in encoders:
            for value in args_of(call)[:1]:
                text = isinstance(value, str) or (isinstance(value, Blob) and value.kind == "str")
                if text and id(value) not in seen and _may_hold(value):
                    seen.add(id(value))
                    yield value, call


def length_of(value: Value) -> int:
    """The bytes of VALUE, a byte string or a text that becomes one."""
    if isinstance(value, Blob):
        return value.length
    data = _held(value)
    return len(data) if data is not None else 0


def _held(value: Value) -> bytes | None:
    """The bytes of VALUE where they are in memory, and are such."""
    if isinstance(value, str):
        try:
            return value.encode("latin-1")
        except UnicodeEncodeError:
            return None
    return value.data if isinstance(value, (Py2String, ByteArray)) else value if isinstance(value, bytes) else None


def _may_hold(value: Value) -> bool:
    if isinstance(value, Blob):
        return True
    data = _held(value)
    return data is not None and len(data) >= _SHORTEST and data[0] in STARTS and _NAMES.search(data) is not None


def pickles_in(value: Value, blobs: Readable, most: int) -> Iterator[Inner | int]:
    """The pickles in VALUE, which if it is long is a range of BLOBS, and before each the number of bytes that were looked at, MOST in all; less than none, where an archive has more. Raises Unjudged."""
    held = _readable(value, blobs)
    head = held.read(0, min(_HEAD, held.size)) if held else b""
    if held is None or head[:1] not in _FIRST:
        return
    if torch_zip.looks_like(head):
        for name, data in _members(held):
            yield -data.size  # which can be more than the archive has
            yield from pickles_from(data, name, 1, most)
    elif torch_legacy.looks_like(head):
        yield from pickles_from(held, "torch file", _LEGACY_PICKLES, most)
    else:
        yield from pickles_from(held, "pickle", 1, most)


_FIRST = frozenset(bytes([code]) for code in STARTS)


def _readable(value: Value, blobs: Readable) -> Readable | None:
    """VALUE as a file."""
    if not isinstance(value, Blob):
        data = _held(value)
        return None if data is None else Held(data, blobs.path)
    if value.kind != "str":
        window = Window(blobs, value.offset, value.length)
        window.faults = RAISED
        return window
    try:
        return Decoded(blobs, value, str(blobs.path))
    except MalformedError:  # characters that no byte has
        return None


def pickles_from(held: Readable, name: str, count: int, most: int) -> Iterator[Inner | int]:
    """COUNT pickles in HELD, one behind the other."""
    at = 0
    for _ in range(count):
        if held.size - at < _SHORTEST or held.read(at, 1) not in _FIRST or not _names_something(held, at):
            return
        seen = glance(held.read, at, held.size, most=min(LIMITS.nested_opcodes, most))
        yield seen.end - at
        if _counts(seen):
            yield Inner(name, seen.graph, held)
        if seen.is_long:
            raise Unjudged("a pickle too long to look into")
        if not seen.is_whole:
            return
        at = seen.end


def _names_something(held: Readable, at: int) -> bool:
    return any(
        _NAMES.search(held.read(start, min(_WINDOW, held.size - start))) for start in range(at, held.size, _WINDOW)
    )


def _counts(seen: Glance) -> bool:
    """Whether it is a pickle with anything in it. What breaks off is one where something was called before, or what is dangerous was named: bytes can start as a pickle by chance."""
    graph = seen.graph
    if seen.is_whole:
        return bool(graph.globals or graph.extensions or graph.byte_strings)
    return bool(graph.calls) or any(map(is_dangerous, graph.globals))


def _members(held: Readable) -> Iterator[tuple[str, Readable]]:
    """The members of the archive HELD that are pickles by their names. Raises Unjudged."""
    try:
        members = read_archive(held, _want_pickles).members
        for member in members:
            if member.name.endswith(_SUFFIXES):
                yield member.name, _opened(held, member)
    except _OtherArchive:
        return
    except InputChangedError:
        raise
    except InputError:
        raise Unjudged("an archive that cannot be read") from None


_SUFFIXES = (".pkl", ".pickle")


class _OtherArchive(Exception):
    """No member is a pickle."""


def _want_pickles(names: list[str]) -> None:
    if not any(name.endswith(_SUFFIXES) for name in names):
        raise _OtherArchive


def _opened(held: Readable, member: Member) -> Readable:
    """MEMBER of the archive HELD; where it is deflated, in memory."""
    if member.method == STORED:
        return Window(held, member.data_offset, member.size)
    if member.size > min(LIMITS.pickle_bytes, LIMITS.pickle_inflate_ratio * member.stored_size + LIMITS.inline_bytes):
        raise Unjudged("a pickle too long to look into")
    stream = Inflate(Span(held, member.data_offset, member.stored_size), member.size, None)
    return Held(b"".join(inflated(stream)), held.path)
