"""What an in-place change writes into a file: the new pickle or header in the bytes of the old one, or behind them.

*Same size*: the new pickle is at most as long as the old one once nothing is put into the memo that is not read again,
and is padded with opcodes that do nothing. Tensor bytes stay where they are.

*Appended* (zip): the new pickle stands where the directory stood, and a new directory follows. The old pickle is kept
as a member with another name of the same length, so that every byte still belongs to one member; ``convert`` drops it.

In a plain pickle the bytes of storages stand between opcodes: what is between them changes, piece by piece.
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
    END_SIZE,
    HAS_DESCRIPTOR,
    LOCAL_SIZE,
    STORED,
    UTF8,
    Archive,
    Member,
    NewEntry,
    RawDirectory,
    RawEntry,
    central_entry,
    end_records,
    local_header,
    raw_directory,
)
from ckptconv.hints import Placeholder, command
from ckptconv.limits import LIMITS
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Blob, Graph

#: No pickle, no end of an archive, starts with it.
_POISON = 0xFF
_STOP = b"."
_PROTO = 2  # bytes of the opcode with which a pickle begins
_BINPUT, _LONG_BINPUT = b"q", b"r"


def patches_of(checkpoint: Checkpoint) -> Patches | None:
    """What changes in the file of `checkpoint`, whose graph was edited; None where it has to be written anew.

    Raises:
        UnsupportedError: The format cannot be changed in place.
    """
    if isinstance(checkpoint.container, Archive) and checkpoint.script_classes is None:
        return _zip(checkpoint, checkpoint.container)
    if isinstance(checkpoint.container, LegacyFile):
        return _stream(checkpoint, checkpoint.container)
    if isinstance(checkpoint.container, plain_pickle.PickleFile):
        return _plain(checkpoint, checkpoint.container.files)
    if isinstance(checkpoint.container, safetensors.DataStart):
        header = safetensors.header_in_place(checkpoint, checkpoint.container)
        return (
            _same_size(checkpoint.source, [(0, header)], (7, _POISON)) if header else None
        )  # the top byte of its length
    if isinstance(checkpoint.container, dcp.DcpFolder):
        return _metadata(checkpoint, checkpoint.container)
    raise _unsupported(checkpoint, f"{checkpoint.format} cannot be changed in place")


def tensor_spans(checkpoint: Checkpoint) -> list[ByteRange]:
    """Where in the file of `checkpoint` the bytes of its tensors stand, in the order of their offsets."""
    stored = [
        storage.data.of if isinstance(storage.data, Inflate) else storage.data.stored()
        for storage in checkpoint.storages.values()
    ]
    here = [span for span in stored if span and span.source is checkpoint.source]
    return sorted(here, key=lambda span: span.offset)


def rest_sum(checkpoint: Checkpoint) -> str:
    """The SHA-256, in hex, of all bytes in the file of `checkpoint` that are none of a tensor."""
    import hashlib  # not at the start of commands that need none

    summed = hashlib.sha256()
    source, at = checkpoint.source, 0
    for span in [*tensor_spans(checkpoint), ByteRange(source, source.size, 0)]:
        for part in read(ByteRange(source, at, max(0, span.offset - at))):
            summed.update(part)
        at = max(at, span.offset + span.length)
    return summed.hexdigest()


def _unsupported(checkpoint: Checkpoint, what: str) -> UnsupportedError:
    path = checkpoint.source.path
    return UnsupportedError(
        what,
        where=path,
        expected="a file of torch.save, pickle.dump or safetensors, or names in a folder of DCP",
        hint=command("convert", path, Placeholder("OUT")) + ", with the same edits, writes a new file",
    )


def _same_size(source: Readable, parts: Sequence[tuple[int, bytes]], poison: tuple[int, int]) -> Patches:
    """What differs between `source` and `parts`, each bytes and the offset at which they shall stand."""
    patches = [patch for offset, new in parts for patch in between(offset, source.read(offset, len(new)), new)]
    at, _ = poison
    is_whole = (
        not patches or patches[0].offset // SECTOR == (patches[-1].end - 1) // SECTOR
    )  # a disk writes all or nothing
    if not is_whole and not any(each.offset <= at < each.end for each in patches):
        byte = source.read(at, 1)
        patches = sorted([*patches, Patch(at, byte, byte)], key=lambda each: each.offset)
    return Patches("same size", tuple(patches), source.size, source.size, () if is_whole else (poison,))


# Pickles


def _fitted(checkpoint: Checkpoint, length: int, graph: Graph | None = None) -> bytes | None:
    """The pickle of `checkpoint`, or of another `graph` in it, in exactly `length` bytes, if that can be."""
    for short in (False, True):
        pieces = pickle_pieces(checkpoint, graph, short=short)
        size = sum(piece.length for piece in pieces)
        if size <= length and size <= LIMITS.pickle_bytes:
            fitted = _padded(_joined(pieces), length - size)
            if fitted is not None:
                return fitted
    return None


def _joined(pieces: Iterable[Piece]) -> bytes:
    return b"".join(chain.from_iterable(map(read, pieces)))


def _padded(pickle: bytes, more: int) -> bytes | None:
    """`pickle` with so many bytes `more` before its STOP that change nothing: puts into a slot that is not read again,
    which every unpickler takes, torch's safe one too.
    """
    if more in (1, 3):
        return None
    long = _LONG_BINPUT + bytes(4) if more % 2 else b""
    return pickle[:-1] + long + (_BINPUT + b"\0") * ((more - len(long)) // 2) + _STOP


# Streams


def _stream(checkpoint: Checkpoint, file: LegacyFile) -> Patches | None:
    """Of torch's older format: the object's pickle, behind which the keys and bytes of the storages stay."""
    if checkpoint.storages.keys() != file.keys:  # parts of storages that stand alone now
        return None
    torch_legacy.respell(checkpoint)
    pickle = _fitted(checkpoint, file.pickle_length)
    if pickle is None:
        return None
    return _same_size(checkpoint.source, [(file.pickle_offset, pickle)], (file.pickle_offset, _POISON))


# Plain pickles

_NOTHING = (b"", b"", b"N0", b"K\x000")  # pushes something and pops it again, in so many bytes


def _plain(checkpoint: Checkpoint, files: dict[str, plain_pickle.StorageFile]) -> Patches | None:
    """Of a plain pickle: what stands between the bytes of the storages, and the tags in the files of these."""
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
            return _same_size(checkpoint.source, parts, (0, _POISON))
    return None


def _head(checkpoint: Checkpoint, storage: Storage, file: plain_pickle.StorageFile) -> bytes | None:
    """What stands before the bytes of `storage` in its `file`, with the tag that it has now; as long as before."""
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
    """Where what is not the bytes of storages stands, if these stay where they are: `pieces` of a pickle."""
    parts: list[tuple[int, bytes]] = []
    at, pickle = 0, bytearray()
    for piece in [*pieces, None]:
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
    """Of a folder of torch.distributed.checkpoint: ``.metadata``, which may become longer or shorter.

    Raises UnsupportedError where something changes that stands in another file.
    """
    paths = dcp.new_paths(folder, checkpoint.graph.root)
    kept = all(storage.device == folder.devices.get(key) for key, storage in checkpoint.storages.items())
    if paths is None or not kept:
        raise _unsupported(checkpoint, "in place, names of tensors alone can change in .metadata")
    old_paths = {name: folder.metadata.paths.get(name, (name,)) for name in paths}
    changed = {name: path for name, path in paths.items() if path != old_paths[name]}
    if any(name != ".".join(map(str, old_paths[name])) for name in changed):
        raise _unsupported(checkpoint, "the items are called otherwise than their places are")
    names = {name: ".".join(map(str, path)) for name, path in changed.items()}
    if len({names.get(name, name) for name in paths}) < len(paths):
        raise _unsupported(checkpoint, "two items would get one name in .metadata")
    old = folder.file.read(0, folder.file.size)
    if not changed:
        return Patches("same size", (), len(old), len(old), ())
    new = renamed(folder.file, names, changed)
    return Patches("same size", (Patch(0, old, new),), len(old), len(new), ((0, _POISON),))


# Zips


def _zip(checkpoint: Checkpoint, archive: Archive) -> Patches | None:
    member = archive.names()[torch_zip.PICKLE]
    directory = raw_directory(checkpoint.source)
    pickle = _fitted(checkpoint, member.size) if member.method == STORED else None
    if pickle is None:
        return _appended(checkpoint, archive, directory)
    parts = [(member.data_offset, pickle)]
    if archive.has_checksums:
        parts += _checksums(checkpoint.source, member, _entry(directory, member), zlib.crc32(pickle))
    return _same_size(checkpoint.source, sorted(parts), (member.data_offset, _POISON))


def _entry(directory: RawDirectory, member: Member) -> RawEntry:
    return next(entry for entry in directory.entries if entry.name == member.name.encode())


def _checksums(source: Readable, member: Member, entry: RawEntry, crc32: int) -> list[tuple[int, bytes]]:
    """Where the checksum of `member` stands, wherever it is not left out, and the new one."""
    new = crc32.to_bytes(4, "little")
    places = [entry.crc32_offset]
    local = member.header_offset + 14
    if any(source.read(local, 4)):
        places.append(local)
    if member.flags & HAS_DESCRIPTOR:
        end = member.data_offset + member.stored_size
        signed = member.end - end in (16, 24)
        places.append(end + 4 * signed)
    return [(place, new) for place in places]


def _appended(checkpoint: Checkpoint, archive: Archive, directory: RawDirectory) -> Patches | None:
    """The new pickle where the directory stood, and a directory that names the old one as superseded."""
    source = checkpoint.source
    names = archive.names()
    pickle = _joined(pickle_pieces(checkpoint))
    new_names: dict[bytes, bytes] = {}
    for name in torch_zip.REPLACED:
        if name in names:
            new_name = _free_name(name, names)
            if new_name is None:
                return None
            new_names[names[name].name.encode()] = f"{archive.root}/{new_name}".encode()
    raw_name = names[torch_zip.PICKLE].name.encode()
    crc32 = zlib.crc32(pickle) if archive.has_checksums else 0
    record = local_header(raw_name, crc32, len(pickle), 0) + pickle
    entries = [
        entry.renamed(new_names[entry.name]) if entry.name in new_names else entry.data for entry in directory.entries
    ]
    entries.append(central_entry(NewEntry(raw_name, UTF8, crc32, len(pickle), directory.start)))
    listed = b"".join(entries)
    start = directory.start + len(record)
    end = end_records(len(entries), len(listed), start, directory.comment)
    tail = record + listed + end
    old = source.read(directory.start, source.size - directory.start)
    renames = [
        Patch(member.header_offset + LOCAL_SIZE, raw, new_names[raw])
        for member in archive.members
        if (raw := member.name.encode()) in new_names
    ]
    new_size = directory.start + len(tail)
    ends = [directory.end, start + len(listed) + len(end) - len(directory.comment) - END_SIZE]
    return Patches(
        "appended",
        (*renames, Patch(directory.start, old, tail)),
        source.size,
        new_size,
        tuple((offset, _POISON) for offset in ends),
    )


def _free_name(name: str, names: Mapping[str, Member]) -> str | None:
    """A name of the same length that no record has."""
    taken = {each.casefold() for each in names}
    tries = (f"{name[:-4]}.{number:03}" for number in range(1000))
    return next((each for each in tries if each.casefold() not in taken), None)
