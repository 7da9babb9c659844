"""Refuse a file that another program would read as something else, because the results found here would then be wrong.

Before a file is read, this module checks it as other readers do, at the positions where they look:

    tarfile         the first 512 bytes, with ``tarfile.TarInfo.frombuf``: torch.load asks tarfile first about every
                    file that is not a zip. Never ``is_tarfile``, which decompresses and follows PAX headers
    zipfile, torch  the last 64 KiB, where both look for the end of an archive, whatever precedes it. Not checked in an
                    archive, nor for a byte string of a pickle, which is searched for pickles
    pickle          byte 0 of a file that is not a pickle, and up to five consecutive pickles, as in torch's format from
                    before 1.6
    gzip            byte 0: joblib decompresses a file that starts like gzip, and unpickles the result
    h5py            offsets 512, 1024, 2048, ..., where an HDF5 file may start after a block of user data

By chance 0.2 % of ordinary safetensors headers are pickles, because the bytes of their length are opcodes. Such a
pickle refers to nothing, or to fragments of the header. Therefore a pickle counts only if it contains

* a global whose module has no NUL, quotes or brackets, which every fragment of a header has;
* an extension code, and either calls it or continues to its end, which a pickle in a header's length does not;
* a persistent id that is a tuple, or a string without those characters.

At most a few hundred kilobytes are read, and at most 16 MiB of a file that starts like a pickle.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import MalformedError
from ckptconv.formats.writers import WRITERS
from ckptconv.formats.zip_archive import (
    CENTRAL,
    CENTRAL_FIELDS,
    CENTRAL_SIZE,
    END,
    END_FIELDS,
    END_SIZE,
    LOCAL,
    LOCAL_SIZE,
    LONGEST_END,
    ONES32,
    ZIP64_END,
    ZIP64_END_FIELDS,
    ZIP64_END_SIZE,
    ZIP64_LOCATOR,
    ZIP64_LOCATOR_FIELDS,
    ZIP64_LOCATOR_SIZE,
)
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, Extension, PersistentId, Py2String, Tuple
from ckptconv.pickles.lenient import STARTS, LenientScan, scan_lenient
from ckptconv.pickles.machine import CODES

_READ_BACK = LONGEST_END + 4096  # torch's reader goes back in steps of 4096 bytes
_ENTRIES_ASKED = 16  # entries to test in data that may not be a directory
_FIRST = frozenset(bytes([code]) for code in STARTS)  # of a pickle
_BLOCK = 512  # bytes of a tar header, and where the first file in HDF5 may start
#: Numbers that tarfile accepts: in base 256, or octal digits as int() reads them, up to a NUL.
_NUMBER = regex(rb"[\x80\xff]|[\s\x1c-\x1f0-7oO_+-]*(\0|\Z)")
_HDF5 = b"\x89HDF\r\n\x1a\n"
_GZIP = b"\x1f\x8b\x08"
_UNPACKED = 1 << 17  # bytes: the longest possible header of gzip, and some of the data after it
_SUPERBLOCK = "possible HDF5 start"
_ZIPPED = WRITERS["pt"].name
_PICKLED = WRITERS["legacy"].name, WRITERS["pickle"].name
_PICKLES = 5  # consecutive pickles in torch's format before 1.6
#: Characters that occur in every fragment of a safetensors header, and in no name of a module.
_OF_HEADERS = regex(r'[\0"{}\[\],:]')


def refuse_two_readings(source: Readable, name: str) -> None:
    """Raise MalformedError if `source`, a file of the format `name`, can be read as another kind of file too.

    The error names both kinds.
    """
    tar = "a tar archive, which torch.load checks for first" if is_tar(source) else None
    if other := tar or _zip(source, name) or _pickle(source, name) or _gzip(source) or _hdf5(source):
        raise MalformedError(
            f"it can be read in two ways: as a {name} file, and as {other}",
            where=source.path,
            hint="no program writes such files by accident: do not load it",
        )


def is_tar(source: Readable) -> bool:
    """Return whether Python's tarfile accepts the first 512 bytes of `source` as a header.

    torch.load asks tarfile before it tries its own formats.
    """
    head = source.read(0, min(_BLOCK, source.size))
    if len(head) < _BLOCK or not _NUMBER.match(head[148:156]):  # the checksum of a header
        return False
    import tarfile  # imported here, because few files need it

    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _zip(source: Readable, name: str) -> str | None:
    """Return a description of the zip archive at the end of `source`, or None if there is no archive.

    None also if `source` has the zip format by `name`, or if the archives are byte strings of a pickle.
    """
    if name == _ZIPPED:
        return None
    archives = {*_archives_behind(source)}
    if not archives or (name in _PICKLED and archives <= _byte_strings(source)):
        return None
    return "a zip archive, which zipfile and torch.jit.load find from the end of the file"


def _archives_behind(source: Readable) -> Iterator[tuple[int, int]]:
    """Yield the zip archives that a reader could find from the end of `source`, whatever else the file is.

    For an archive, yield the position from which its offsets count, and the position of its end. Its directory is at
    the offset in the end record, or directly before the end record, where Python's zipfile looks. Stray signatures do
    not count: an end, an entry and a local header must point to each other.
    """
    tail_offset = max(0, source.size - _READ_BACK)
    tail = source.read(tail_offset, source.size - tail_offset)
    at = tail.find(END)
    while 0 <= at <= len(tail) - END_SIZE:
        offset = tail_offset + at
        *_, size, start, comment = END_FIELDS.unpack_from(tail, at)
        for before, nbytes, recorded in [(offset, size, start), *_zip64_directories(source, offset)]:
            for directory in {recorded, before - nbytes}:
                if _has_member(source, directory, directory + nbytes, directory - recorded):
                    yield directory - recorded, min(offset + END_SIZE + comment, source.size)
        at = tail.find(END, at + 1)


def _zip64_directories(source: Readable, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each zip64 end record before `end`, and the size and offset of its directory."""
    if end < ZIP64_LOCATOR_SIZE:
        return
    signature, _, recorded, _ = ZIP64_LOCATOR_FIELDS.unpack(source.read(end - ZIP64_LOCATOR_SIZE, ZIP64_LOCATOR_SIZE))
    if signature != ZIP64_LOCATOR:
        return
    for at in {recorded, end - ZIP64_LOCATOR_SIZE - ZIP64_END_SIZE}:
        if 0 <= at <= source.size - ZIP64_END_SIZE:
            signature, *_, size, start = ZIP64_END_FIELDS.unpack(source.read(at, ZIP64_END_SIZE))
            if signature == ZIP64_END:
                yield at, size, start


def _has_member(source: Readable, at: int, end: int, shift: int) -> bool:
    """Return whether an entry of the directory from `at` to `end` points to a local header, with or without `shift`.

    Only the first 16 entries are tested. If there are more, the answer is True.
    """
    for _ in range(_ENTRIES_ASKED):
        if at < 0 or at + CENTRAL_SIZE > min(end, source.size):
            return False
        fields = CENTRAL_FIELDS.unpack(source.read(at, CENTRAL_SIZE))
        if fields[0] != CENTRAL:
            return False
        header = fields[-1]
        starts = [start for start in {header, header + shift} if 0 <= start <= source.size - LOCAL_SIZE]
        if header == ONES32 or any(source.read(start, len(LOCAL)) == LOCAL for start in starts):
            return True
        at += CENTRAL_SIZE + sum(fields[10:13])
    return True


def _byte_strings(source: Readable) -> set[tuple[int, int]]:
    """Return the start and end of each byte string in the pickles of `source` that starts like a zip archive.

    This takes as long as reading the source.
    """
    return {
        (value.offset, value.offset + value.length)
        for seen in _pickles(source, LIMITS.pickle_opcodes, LIMITS.pickle_bytes)
        for value in seen.graph.byte_strings
        if isinstance(value, Blob) and source.read(value.offset, min(len(LOCAL), value.length)) == LOCAL
    }


def _pickle(source: Readable, name: str) -> str | None:
    """Return a description if `source`, a file of the format `name`, can be read as a pickle too.

    Otherwise return None. None also if the format `name` consists of pickles or is torch's zip.
    """
    if name in (_ZIPPED, *_PICKLED) or source.read(0, 1) not in _FIRST:
        return None
    for seen in _pickles(source, LIMITS.second_reading_opcodes, LIMITS.second_reading_bytes):
        named = _named(seen)
        if named:
            return f"a pickle that contains {named}"
        # Plain pickles are read without a persistent_load, and then PERSID stops the reader.
        if seen.doubt and source.read(0, 1) != CODES["PERSID"]:
            return f"a pickle: {seen.doubt}"
    return None


def _pickles(source: Readable, most: int, nbytes: int) -> Iterator[LenientScan]:
    """Yield a scan of each of the consecutive pickles at the start of `source`.

    Each scan stops after `most` opcodes or `nbytes` bytes. There are at most five.
    """
    at = 0
    for _ in range(_PICKLES):
        if at >= source.size:
            return
        seen = scan_lenient(source.read, at, source.size, most=most, nbytes=nbytes, leave=(LOCAL,))
        yield seen
        if not seen.is_whole:
            return
        at = seen.end


def _named(seen: LenientScan) -> str | None:
    """Return the first name in a pickle that cannot be a fragment of a safetensors header, or None."""
    graph = seen.graph
    for node in graph.globals:
        if not _OF_HEADERS.search(node.module):
            return str(node)
    if graph.extensions and (seen.is_whole or any(isinstance(call.callable, Extension) for call in graph.calls)):
        return f"extension code {graph.extensions[0].code}"
    for reference in graph.references:
        id_ = reference.id.data if isinstance(reference.id, Py2String) else reference.id
        text = id_.decode("latin-1") if isinstance(id_, bytes) else id_
        is_text = isinstance(text, str) and text and not _OF_HEADERS.search(text)
        if is_text or isinstance(text, PersistentId) or (isinstance(text, Tuple) and text.items):
            return "a persistent id"
    return None


def _gzip(source: Readable) -> str | None:
    """Return a description if the start of `source` can be decompressed as gzip. Otherwise return None."""
    if source.read(0, min(len(_GZIP), source.size)) != _GZIP:
        return None
    try:
        zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(source.read(0, min(_UNPACKED, source.size)), 1)
    except zlib.error:
        return None
    return "a gzip file, which joblib unpacks"


def _hdf5(source: Readable) -> str | None:
    """Return a description if an HDF5 file starts at one of the positions where h5py looks. Otherwise return None."""
    places = [_BLOCK << i for i in range((source.size // _BLOCK).bit_length())]
    places = [place for place in places if not source.spares(place, len(_HDF5), _SUPERBLOCK)]
    source.prefetch((place, place + len(_HDF5)) for place in places)
    for at in places:
        if at + len(_HDF5) <= source.size and source.read(at, len(_HDF5)) == _HDF5:
            return f"an HDF5 file from byte {at} on, which h5py reads"
    return None
