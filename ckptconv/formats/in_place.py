"""Plan the bytes that an in-place change writes: a new pickle or header over the old one, or after it.

*Same size*: The new pickle is at most as long as the old one, because it stores in the memo only what is read again. It
is padded with opcodes that do nothing. Tensor bytes stay at their positions.

*Appended* (zip): The new pickle replaces the directory, and a new directory follows. The old pickle stays as a member
with another name of the same length, so that every byte still belongs to one member. ``convert`` drops that member.

In a plain pickle, the bytes of storages are between opcodes. The ranges between these bytes change, one by one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from ckptconv.byteranges.reading import read
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Inflate, Piece
from ckptconv.byteranges.undo_journal import SECTOR, Patch, Patches, between
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.checkpoint.tensor_info import Storage
from ckptconv.errors import UnsupportedError
from ckptconv.formats import plain_pickle, safetensors, torch_legacy, torch_zip
from ckptconv.formats.distributed import dcp
from ckptconv.formats.distributed.metadata import renamed
from ckptconv.formats.layout import blob_bytes, pickle_pieces, say_for_older_loaders
from ckptconv.formats.torch_files import LegacyFile
from ckptconv.formats.zip_archive import (
    CENTRAL_CRC32,
    CENTRAL_SIZE,
    END,
    END_SIZE,
    HAS_DESCRIPTOR,
    LOCAL_CRC32,
    LOCAL_SIZE,
    STORED,
    UTF8,
    Archive,
    Member,
    central_entry,
    end_records,
    local_header,
    read_end,
)
from ckptconv.hints import Placeholder, command
from ckptconv.limits import LIMITS
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Blob, Graph

#: The first byte of no pickle and of no end of an archive.
_POISON = 0xFF
_STOP = b"."
_PROTO = 2  # bytes of the opcode with which a pickle begins
_BINPUT, _LONG_BINPUT = b"q", b"r"
_NOTHING = (b"", b"", b"N0", b"K\x000")  # opcodes that push a value and pop it again, by their number of bytes


def patches_of(checkpoint: Checkpoint) -> Patches | None:
    """Return the changes in the file of the edited `checkpoint`, or None if they do not fit.

    If they do not fit, a new file must be written. The graph of `checkpoint` is changed. Raises UnsupportedError if the
    format cannot be changed in place.
    """
    container = checkpoint.container
    if isinstance(container, Archive) and checkpoint.script_classes is None:
        return _zip(checkpoint, container)
    if isinstance(container, LegacyFile):
        if checkpoint.storages.keys() != container.keys:  # a view of a storage became a separate storage
            return None
        torch_legacy.respell(checkpoint)
        pickle, start = _fitted(checkpoint, container.pickle_length), container.pickle_offset
        return _same_size(checkpoint.source, [(start, pickle)], start) if pickle else None
    if isinstance(container, plain_pickle.PickleFile):
        return _plain(checkpoint, container.files)
    if isinstance(container, safetensors.DataStart):
        header = safetensors.header_in_place(checkpoint, container)
        # byte 7 is the highest byte of the header's length
        return _same_size(checkpoint.source, [(0, header)], 7) if header else None
    if isinstance(container, dcp.DcpFolder):
        return _metadata(checkpoint, container)
    raise _unsupported(checkpoint, f"{checkpoint.format} cannot be changed in place")


def tensor_spans(checkpoint: Checkpoint) -> list[ByteRange]:
    """Return the ranges of the storages in the file of `checkpoint`, as they are stored, sorted by offset."""
    stored = [
        storage.data.of if isinstance(storage.data, Inflate) else storage.data.stored()
        for storage in checkpoint.storages.values()
    ]
    spans = [span for span in stored if span and span.source is checkpoint.source]
    return sorted(spans, key=lambda span: span.offset)


def rest_sum(checkpoint: Checkpoint) -> str:
    """Return the SHA-256, in hex, of all bytes in the file of `checkpoint` that do not belong to a storage."""
    import hashlib  # lazily, for start-up

    digest = hashlib.sha256()
    source, at = checkpoint.source, 0
    for span in [*tensor_spans(checkpoint), ByteRange(source, source.size, 0)]:
        for part in read(ByteRange(source, at, max(0, span.offset - at))):
            digest.update(part)
        at = max(at, span.offset + span.length)
    return digest.hexdigest()


def _unsupported(checkpoint: Checkpoint, what: str) -> UnsupportedError:
    """Return an UnsupportedError with the message `what`. Its hint is the command that writes a new file."""
    path = checkpoint.source.path
    return UnsupportedError(
        what,
        where=path,
        expected="a file of torch.save, pickle.dump or safetensors, or names in a folder of DCP",
        hint="write a new file, with the same edits: " + command("convert", path, Placeholder("OUT")),
    )


def _same_size(source: Readable, parts: Sequence[tuple[int, bytes]], poisoned: int) -> Patches:
    """Return the patches where `parts` differ from `source`.

    Args:
        source: The file.
        parts: The new bytes with their offsets, in the order of the offsets.
        poisoned: The offset of the byte that makes every reader refuse the file while the patches are written. It is
            not changed if the patches are in one disk sector.
    """
    patches = [patch for offset, new in parts for patch in between(offset, source.read(offset, len(new)), new)]
    if not patches or patches[0].offset // SECTOR == (patches[-1].end - 1) // SECTOR:  # sectors are atomic
        return Patches("same size", tuple(patches), source.size, source.size, ())
    if not any(patch.offset <= poisoned < patch.end for patch in patches):
        byte = source.read(poisoned, 1)
        patches = sorted([*patches, Patch(poisoned, byte, byte)], key=lambda patch: patch.offset)
    return Patches("same size", tuple(patches), source.size, source.size, ((poisoned, _POISON),))


# Pickles


def _fitted(checkpoint: Checkpoint, length: int, graph: Graph | None = None) -> bytes | None:
    """Return the pickle of `checkpoint`, or of `graph`, padded to exactly `length` bytes. None if it does not fit.

    The padding before STOP stores a value in a memo slot that is not read again. Every unpickler accepts these opcodes,
    including torch's safe one.
    """
    for short in (False, True):
        pieces = pickle_pieces(checkpoint, graph, short=short)
        size = sum(piece.length for piece in pieces)
        padding = length - size
        if padding >= 0 and padding not in (1, 3) and size <= LIMITS.pickle_bytes:
            long = _LONG_BINPUT + bytes(4) if padding % 2 else b""
            return _joined(pieces)[:-1] + long + (_BINPUT + b"\0") * ((padding - len(long)) // 2) + _STOP
    return None


def _joined(pieces: Iterable[Piece]) -> bytes:
    """Read and return the bytes of `pieces`."""
    return b"".join(chain.from_iterable(map(read, pieces)))


# Plain pickles


def _plain(checkpoint: Checkpoint, files: dict[str, plain_pickle.StorageFile]) -> Patches | None:
    """Return the changes in a plain pickle, or None if they do not fit.

    The ranges between the storages' bytes change, and the location tags in `files`, the files inside the pickle.
    """
    heads: dict[str, bytes] = {}
    for storage in checkpoint.storages.values():
        head = _head(checkpoint, storage, files[storage.key]) if storage.key in files else None
        if head is None:
            return None
        heads[storage.key] = head
    say_for_older_loaders(checkpoint)
    calls = plain_pickle.call_again(checkpoint, lambda reference, _: heads[reference.storage.key])
    for short in (False, True):
        parts = _around(checkpoint, emit(checkpoint.graph, loadable=False, short=short), calls, files)
        if parts is not None:
            return _same_size(checkpoint.source, parts, 0)
    return None


def _head(checkpoint: Checkpoint, storage: Storage, file: plain_pickle.StorageFile) -> bytes | None:
    """Return the bytes of `file` before those of `storage`, with the storage's new location tag, in the same length.

    Return None if the new tag does not fit.
    """
    start, end, parsed = file
    head = checkpoint.source.read(start, end - start - storage.nbytes)
    if storage_id(parsed.graph.root).tag == storage.device:
        return head
    pickle = _fitted(checkpoint, parsed.pickle_length, torch_legacy.retagged(parsed, storage.device))
    at = parsed.pickle_offset - start
    return None if pickle is None else head[:at] + pickle + head[at + len(pickle) :]


def _around(
    checkpoint: Checkpoint,
    pieces: list[bytes | Blob],
    calls: dict[Blob, tuple[bytes, Storage]],
    files: dict[str, plain_pickle.StorageFile],
) -> list[tuple[int, bytes]] | None:
    """Return the new bytes between the storages with their offsets, so that the storages' bytes keep their positions.

    Return None if the new bytes do not fit into these ranges.

    Args:
        checkpoint: The checkpoint.
        pieces: The new pickle.
        calls: For each blob that is a storage's file, the bytes before the storage's bytes, and the storage.
        files: The positions of the storages' files, by key.
    """
    parts: list[tuple[int, bytes]] = []
    at, pickle = 0, bytearray()
    for piece in [*pieces, None]:  # None is the end of the file
        if isinstance(piece, bytes):
            pickle += piece
        elif piece is not None and piece not in calls:
            span = blob_bytes(checkpoint, piece)
            pickle += span.source.read(span.offset, span.length)
        else:
            head, storage = calls[piece] if piece is not None else (b"", None)
            start, end, _ = files[storage.key] if storage else (checkpoint.source.size, 0, None)
            more = start - at - len(pickle)
            if more < 0 or more == 1:
                return None
            after = 0 if at else _PROTO
            nothing = _NOTHING[2] * (more // 2 - more % 2) + _NOTHING[3] * (more % 2)
            parts.append((at, bytes(pickle[:after] + nothing + pickle[after:]) + head))
            at, pickle = end, bytearray()
        if len(pickle) > LIMITS.pickle_bytes:
            return None
    return parts


# Folders of torch.distributed.checkpoint


def _metadata(checkpoint: Checkpoint, folder: dcp.DcpFolder) -> Patches:
    """Return the changes in ``.metadata`` of a DCP folder. The size of this file may change.

    Raises UnsupportedError if anything but names changes, because the rest is in other files.
    """
    paths = dcp.new_paths(folder, checkpoint.graph.root)
    if paths is None or any(storage.device != folder.devices.get(key) for key, storage in checkpoint.storages.items()):
        raise _unsupported(checkpoint, "in place, only the names of tensors in .metadata can change")
    old_paths = {name: folder.metadata.paths.get(name, (name,)) for name in paths}
    changed = {name: path for name, path in paths.items() if path != old_paths[name]}
    if any(name != ".".join(map(str, old_paths[name])) for name in changed):
        raise _unsupported(checkpoint, "the names of the items do not match their paths")
    names = {name: ".".join(map(str, path)) for name, path in changed.items()}
    if len({names.get(name, name) for name in paths}) < len(paths):
        raise _unsupported(checkpoint, "two items would get the same name in .metadata")
    old = folder.file.read(0, folder.file.size)
    if not changed:
        return Patches("same size", (), len(old), len(old), ())
    new = renamed(folder.file, names, changed)
    return Patches("same size", (Patch(0, old, new),), len(old), len(new), ((0, _POISON),))


# Zips


def _zip(checkpoint: Checkpoint, archive: Archive) -> Patches | None:
    """Return the changes in a zip `archive`: the pickle and its checksums, in place or appended.

    Return None if there is no free name for a replaced record.
    """
    source = checkpoint.source
    member = archive.names[torch_zip.PICKLE]
    pickle = _fitted(checkpoint, member.size) if member.method == STORED else None
    if pickle is None:
        return _appended(checkpoint, archive)
    start = member.data_start()
    places = [start]
    if archive.has_checksums:
        places.append(member.entry_offset + CENTRAL_CRC32)
        local = member.header_offset + LOCAL_CRC32
        if any(source.read(local, 4)):
            places.append(local)
        if member.flags & HAS_DESCRIPTOR:
            end = start + member.stored_size
            is_signed = member.end - end in (16, 24)
            places.append(end + 4 * is_signed)
    new = zlib.crc32(pickle).to_bytes(4, "little")
    parts = [(place, pickle if place == start else new) for place in sorted(places)]
    return _same_size(source, parts, start)


def _appended(checkpoint: Checkpoint, archive: Archive) -> Patches | None:
    """Return the patches that write the new pickle over the directory, followed by a new directory.

    The old pickle and the records that describe the layout are renamed. Return None if there is no free name for one.
    """
    source, names = checkpoint.source, archive.names
    _, size, start = read_end(source)
    old = source.read(start, source.size - start)
    entries, comment = bytearray(old[:size]), old[old.rfind(END) + END_SIZE :]
    renames = []
    for name, member in names.items():
        if name in torch_zip.REPLACED:
            free_name = _free_name(name, names)
            if free_name is None:
                return None
            raw, new = member.name.encode(), f"{archive.root}/{free_name}".encode()
            renames.append(Patch(member.header_offset + LOCAL_SIZE, raw, new))
            at = member.entry_offset - start + CENTRAL_SIZE
            entries[at : at + len(new)] = new
    name, pickle = names[torch_zip.PICKLE].name, _joined(pickle_pieces(checkpoint))
    crc32 = zlib.crc32(pickle) if archive.has_checksums else 0
    record = local_header(name.encode(), crc32, len(pickle), 0) + pickle
    entries += central_entry(name.encode(), UTF8, crc32, len(pickle), start)
    end = end_records(len(names) + 1, len(entries), start + len(record), comment)
    tail = record + entries + end
    stop = start + len(tail)
    poison = tuple((end_of_file - len(comment) - END_SIZE, _POISON) for end_of_file in (source.size, stop))
    return Patches("appended", (*renames, Patch(start, old, tail)), source.size, stop, poison)


def _free_name(name: str, names: Mapping[str, Member]) -> str | None:
    """Return a name of the same length as `name` that no record in `names` has, or None if 1,000 names are taken."""
    taken = {other.casefold() for other in names}
    tries = (f"{name[:-4]}.{number:03}" for number in range(1000))
    return next((free for free in tries if free.casefold() not in taken), None)
