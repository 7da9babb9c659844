r"""torch's zip format (since 1.6): reader and writer.

Layout: one folder, named after the file in which it was saved, in a zip of stored members
(:mod:`ckptconv.formats.zip_archive`):

    data.pkl                  the pickle; storages in it are persistent ids ('storage', class, key, location, elements)
    .format_version           '1': storages have the order and headers of torch's own writer (newer files)
    .storage_alignment        '64' (newer files)
    byteorder                 'little' or 'big'; absent means little, unless torch is told otherwise
    data/KEY                  the bytes of storage KEY, aligned to 64 bytes
    version                   '3\n'
    .data/serialization_id    a hash of the records' names and checksums (newer files)

Source: ``torch/serialization.py`` (``_save``, ``_load``) and ``caffe2/serialize/inline_container.cc`` of torch 2.13.

If only the pickle changes, all bytes after it keep their positions modulo 4,096: the padding of data.pkl's header fills
the gap. They are then one range of the source, whose blocks a copy-on-write filesystem shares. ``.format_version``
declares a layout from which torch computes offsets without looking. The written layout differs, so the records that
describe a layout are left out, and torch looks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import check_crc32
from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.reading import crc32_of
from ckptconv.byteranges.sources import BytesSource, Readable, SliceSource
from ckptconv.byteranges.spans import (
    FILESYSTEM_BLOCK,
    ByteRange,
    Deferred,
    Literal,
    OutFile,
    Piece,
    joined,
)
from ckptconv.checkpoint.legacy_python import modernize
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import LimitError, MalformedError, UnsupportedError, some
from ckptconv.formats.foreign.zips_and_pickles import cut_short, refuse_foreign_zips
from ckptconv.formats.layout import (
    Layout,
    pickle_pieces,
    refuse_unknown_dtypes,
    renumber,
    torch_layout,
)
from ckptconv.formats.writers import WRITERS
from ckptconv.formats.zip_archive import (
    CENTRAL_CRC32,
    LOCAL_CRC32,
    STORED,
    UTF8,
    Archive,
    EndMissing,
    Member,
    central_entry,
    end_records,
    local_header,
    read_archive,
    with_crc32,
)
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Graph
from ckptconv.pickles.parser import parse
from ckptconv.work import work

NAME = WRITERS["pt"].name
PICKLE = "data.pkl"
NO_CHECKSUMS = "the file has no checksums, so damage cannot be detected"
NO_STORAGE_CHECKSUMS = (
    "no storage has a checksum: torch.serialization.skip_data leaves them out, with the bytes, which are zeros until"
    " somebody fills them in; damage to them cannot be detected"
)
_LAYOUT_RECORDS = (".format_version", ".storage_alignment", ".data/serialization_id")
#: Records that an in-place change replaces if it appends a new pickle: the old pickle, and the layout's description.
REPLACED = (PICKLE, ".format_version", ".storage_alignment")
SUPERSEDED = "replaced by an in-place change"
_SUPERSEDED = regex("|".join(rf"{re.escape(name[:-4])}\.[0-9]{{3}}" for name in REPLACED))
_RECORDS = (PICKLE, "byteorder", "version", *_LAYOUT_RECORDS)
#: The record by which torch.jit.load recognises a program (:mod:`ckptconv.formats.torchscript`).
CONSTANTS = "constants.pkl"
_LOOKED_FOR = (*_RECORDS, CONSTANTS)
_ALIGNMENT = 64  # torch's storages start at multiples of this: _get_storage_alignment in torch.serialization


def looks_like(head: bytes) -> bool:
    """Return whether `head`, the first bytes of a file, starts like a zip archive."""
    return head[:4] == b"PK\x03\x04"


@dataclass(frozen=True, eq=False)
class ExportedProgram:
    """The container of a checkpoint that was read from the archive of a torch.export program."""

    archive: Archive


def is_exported(checkpoint: Checkpoint) -> bool:
    """Return whether `checkpoint` contains the weights of a torch.export program."""
    return isinstance(checkpoint.container, ExportedProgram)


def is_program(checkpoint: Checkpoint) -> bool:
    """Return whether `checkpoint` was read from a TorchScript archive: a zip with the record ``constants.pkl``.

    torch.jit.load recognises a program by the same record.
    """
    return isinstance(checkpoint.container, Archive) and CONSTANTS in checkpoint.container.names


# Reading


def read(source: Readable, like: Checkpoint | None = None) -> Checkpoint:
    """Return the checkpoint in the zip archive `source`.

    If its pickle equals that of `like`, an unchanged checkpoint, its graph consists of the same nodes.

    Raises:
        MalformedError: The archive or its pickle is damaged. Smaller defects are faults: a wrong record ``version`` or
            ``byteorder``, or a record whose name differs from torch's only in case.
        UnsupportedError: The zip is of another kind.
        LimitError: A record is too large.
    """
    try:
        archive = read_archive(source, lambda names: refuse_foreign_zips(source, names), _is_storage)
    except EndMissing as error:
        raise cut_short(source) from error
    names = archive.names
    sums = (member.crc32 for name, member in names.items() if _is_storage(name) and member.size)
    is_unsummed = archive.has_checksums and next(sums, 1) == 0 and not any(sums)
    if is_unsummed:
        # torch.serialization.skip_data writes neither checksums nor bytes of storages; other programs fill in the bytes
        members = (member._replace(checked=not (_is_storage(name) and member.size)) for name, member in names.items())
        archive = replace(archive, members=tuple(members))
        names = archive.names
    source.faults.unread(archive.unread())
    _check_case(source, names)
    where = f"{source.path}: {PICKLE}"
    if archive.root + "/" + PICKLE in archive.broken or PICKLE not in names:
        raise MalformedError("the main pickle cannot be found", where=where)
    graph, file = read_pickle(names[PICKLE], like if CONSTANTS not in names else None)
    modernize(graph)
    checkpoint = checkpoint_of(NAME, source, graph, archive, archive.records("data/"), where)
    checkpoint.blobs = file
    used = {f"data/{key}" for key in checkpoint.storages}
    checkpoint.unused = [
        LeftBehind(name, member.size, "no tensor uses it")
        for name, member in names.items()
        if name not in used and _is_storage(name)
    ]
    checkpoint.unused += [
        LeftBehind(name, names[name].size, SUPERSEDED) for name in _others(names) if _SUPERSEDED.fullmatch(name)
    ]
    if not archive.has_checksums:
        checkpoint.notes.append(NO_CHECKSUMS)
    elif is_unsummed:
        checkpoint.warn(NO_STORAGE_CHECKSUMS)
    version = _note(names, "version" if "version" in names else ".data/version")  # torch accepts both
    if version is None or not version.strip().isdigit():  # torch decides which numbers it accepts
        what, where = "the archive's version, which torch needs, is not a number", f"{source.path}: version"
        source.faults.found(MalformedError(what, where=where, expected="a number", got=version))
    read_byteorder(checkpoint, names)
    return checkpoint


def read_byteorder(checkpoint: Checkpoint, names: Mapping[str, Member]) -> None:
    """Set the byte order of `checkpoint` from the record ``byteorder`` of its archive, whose members are `names`.

    Another content than ``little`` or ``big`` is a fault.
    """
    source = checkpoint.source
    order = _note(names, "byteorder")
    if order not in (None, b"little", b"big"):
        what, where = "the byte order is unknown", f"{source.path}: byteorder"
        source.faults.found(MalformedError(what, where=where, expected="little or big", got=order))
    checkpoint.byteorder, checkpoint.is_byteorder_said = "big" if order == b"big" else "little", order is not None


def read_inner(source: Readable) -> Checkpoint:
    """Return the checkpoint in `source`, an archive inside another file. Only the graph of its pickle is used.

    Raises the same errors as :func:`read`, and UnsupportedError if the archive contains records that torch.save does
    not write. For example, torch.load runs the program of an archive with ``constants.pkl``, whatever its code does.
    """
    checkpoint = read(source)
    archive = checkpoint.container
    names = archive.names if isinstance(archive, Archive) else {}
    others = [name for name in names if not (name in (*_RECORDS, ".data/version") or _is_storage(name))]
    if others:
        raise UnsupportedError(
            "an archive inside another file contains data that torch.save does not write",
            where=source.path,
            got=some(others),
            hint="do not load it unless you trust who made it",
        )
    return checkpoint


def read_pickle(member: Member, like: Checkpoint | None = None) -> tuple[Graph, Readable]:
    """Return the graph of the pickle `member`, and the source of its bytes. `like` is as for :func:`read`.

    That is the archive, or the inflated pickle in memory. A wrong checksum is a fault, and so are bytes after the end
    of the pickle.
    """
    source, start, size, where = member.source, 0, member.size, member.where
    file = source
    if member.method == STORED:
        start = member.data_start()
        _check_crc(member)
    else:
        file = BytesSource(_inflated(member), source.path)
    source.faults.pickles(PickleSequence(where, SliceSource(file, start, size), 1))
    if like and _has_pickle(like, member):
        work().grant(size, where)
        return replace(like.graph), file
    granted = None if member.method == STORED else work().take_inflated(size, member.stored_size)
    graph, end = parse(file.read, start + size, where=where, offset=start, granted=granted)
    if end != start + size:
        source.faults.found(
            MalformedError("bytes after the end of the pickle", where=where, expected=f"{end - start} bytes", got=size)
        )
    return graph, file


def _has_pickle(checkpoint: Checkpoint, member: Member) -> bool:
    """Return whether `checkpoint` was read from an archive whose pickle is equal to `member`, and at the same offset.

    Nodes contain offsets of long texts. False for a program, for a deflated pickle and for remote files.
    """
    archive = checkpoint.container
    other = archive.names.get(PICKLE) if isinstance(archive, Archive) and not is_program(checkpoint) else None
    return (
        other is not None
        and (other.method, other.size, other.data_start()) == (STORED, member.size, member.data_start())
        and member.method == STORED
        and not (other.source.is_far or member.source.is_far)
        and reading.same_streams(reading.read(other.data()), reading.read(member.data()))
    )


def _others(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are not in the folder ``data/`` of the storages. There are only a few."""
    return [name for name in names if not name.startswith("data/")]


def _is_storage(name: str) -> bool:
    """Return whether the record `name` is a storage: in ``data/``, and not a folder."""
    return name.startswith("data/") and not name.endswith("/")


def _check_case(source: Readable, names: Mapping[str, Member]) -> None:
    """Report a fault for each record whose name differs from one of torch's only in case.

    torch ignores case, and would read such a record as its own.
    """
    text = "".join(names)
    for name in names if text.casefold() != text else ():
        if (folded := name.casefold()) == name:
            continue
        if folded in _LOOKED_FOR or (folded.startswith("data/") and not name.startswith("data/")):
            source.faults.found(
                MalformedError(
                    "a record's name differs in case from torch's name", where=source.path, expected=folded, got=name
                )
            )


def _inflated(member: Member) -> bytes:
    """Return the inflated bytes of the deflated record `member`.

    Raises LimitError if the record is longer than the limit on pickles, or far longer than its deflated bytes.
    """
    most = min(LIMITS.pickle_bytes, LIMITS.pickle_inflate_ratio * member.stored_size + LIMITS.inline_bytes)
    if member.size > most or member.stored_size > LIMITS.pickle_bytes:
        raise LimitError(
            "a deflated record is too large",
            where=member.where,
            expected=f"at most {most:,} bytes",
            got=f"{member.size:,} from {member.stored_size:,}",
        )
    return b"".join(reading.read(member.data()))


def _check_crc(member: Member) -> None:
    """Report a fault if the stored record `member` has a wrong checksum. All its bytes are read."""
    if not member.checked:
        return
    data = ByteRange(member.source, member.data_start(), member.size)
    with member.source.faults:
        check_crc32(member.crc32, crc32_of(data), member.where)


def _note(names: Mapping[str, Member], name: str) -> bytes | None:
    """Return the bytes of the short record `name`, or None if it does not exist.

    A record longer than ``LIMITS.note_bytes`` is a fault, and None is returned.
    """
    member = names.get(name)
    if member is None:
        return None
    if member.size > LIMITS.note_bytes:
        what, most = "the record is too long", f"at most {LIMITS.note_bytes} bytes"
        member.source.faults.found(MalformedError(what, where=member.where, expected=most, got=member.size))
        return None
    return record_bytes(member)


def record_bytes(member: Member) -> bytes:
    """Return the bytes of the record `member`. The size of a stored record is not limited here.

    A wrong checksum is a fault. Raises MalformedError or LimitError if a deflated record is damaged or too large.
    """
    if member.method != STORED:
        return _inflated(member)
    _check_crc(member)
    return member.source.read(member.data_start(), member.size)


# Writing


def layout(checkpoint: Checkpoint, path: Path) -> Layout:
    """Plan the file at `path` for an edited `checkpoint`, and list the contents of another container that are lost.

    A torch zip is rewritten with its own records, unless it came from a TorchScript program. Other containers become a
    new archive. Raises RefusedError if a tensor cannot be stored.
    """
    if isinstance(checkpoint.container, Archive):
        if checkpoint.script_classes is None:
            return Layout((_rewritten(checkpoint, checkpoint.container, path),))
        return Layout((_written(checkpoint, path, checked=checkpoint.container.has_checksums),))
    refuse_unknown_dtypes(checkpoint)
    return torch_layout(checkpoint, _written(checkpoint, path, checked=True))


def _rewritten(checkpoint: Checkpoint, archive: Archive, path: Path) -> OutFile:
    """Return the source's own archive with a new pickle, as a file to be written to `path`.

    Storages that are no longer used and records that describe the old layout are left out.
    """
    members = archive.names
    storages = {f"data/{key}": storage.data for key, storage in checkpoint.storages.items()}
    dropped = {name for name in members.keys() - storages.keys() if _is_storage(name)}
    added = [name for name in storages if name not in members]
    keys = renumber(checkpoint) if dropped or added else {}
    new = {f"data/{key}": f"data/{number}" for key, number in keys.items()}
    dropped.update(name for name in _others(members) if name in _LAYOUT_RECORDS or _SUPERSEDED.fullmatch(name))
    kept = [(name, member) for name, member in members.items() if name not in dropped]
    summed = all(member.checked for name, member in members.items() if _is_storage(name) and member.size)
    pickle = pickle_pieces(checkpoint)
    writer = ZipWriter(archive.root, checked=archive.has_checksums)
    for i, (name, member) in enumerate(kept):
        if name == PICKLE:
            writer.pickle(PICKLE, pickle, like=kept[i + 1][1].header_offset if i + 1 < len(kept) else 0)
        elif name in storages and not storages[name].is_record:
            writer.storage(new.get(name, name), storages[name], summed=summed)
        else:
            writer.member(new.get(name, name), member)
    for name in added:
        writer.storage(new[name], storages[name], summed=summed)
    return writer.finish(path)


def archived(checkpoint: Checkpoint) -> OutFile:
    """Return `checkpoint` as a new archive for torch's loader, whatever container it was read from.

    The archive has only the storages that the checkpoint uses, and no checksums, which torch does not verify.
    """
    return _written(checkpoint, Path("archive"), checked=False)


def _written(checkpoint: Checkpoint, path: Path, *, checked: bool) -> OutFile:
    """Return `checkpoint` as a new archive with the records that torch writes, as a file to be written to `path`.

    If `checked` is true, records have checksums. Those of storages are computed during the copy if they are not known.
    """
    keys = renumber(checkpoint)
    storages = {keys[key]: storage.data for key, storage in checkpoint.storages.items()}
    writer = ZipWriter(_root_name(path), checked=checked)
    writer.pickle(PICKLE, pickle_pieces(checkpoint), like=0)
    return writer.with_storages(storages, checkpoint.byteorder).finish(path)


def _root_name(path: Path) -> str:
    """Return the name of the folder in an archive at `path`: the file name without its suffix, as in torch.

    Return ``archive`` if that name is not valid Unicode, has a backslash, or is ``.`` or ``..``.
    """
    try:
        path.stem.encode()
    except UnicodeEncodeError:
        return "archive"
    return "archive" if path.stem in (".", "..") or "\\" in path.stem else path.stem


class ZipWriter:
    """The plan of a zip archive, to which records are appended in the order of the file.

    `root` is the folder in the archive. `checked` is whether records get checksums.
    """

    def __init__(self, root: str, *, checked: bool) -> None:
        self.root = root
        self.checked = checked
        self.pieces: list[Piece] = []
        self.directory: list[bytes] = []
        self.sums: list[Piece] = []
        self.checked_parts: set[int] = set()  # ids of ranges to verify that are written in part
        self.awaited: dict[int, int] = {}  # index in `directory` → index in `sums`, for checksums to be computed
        self.at = 0

    def add(self, piece: Piece) -> None:
        """Append `piece`, and advance the position `at` by its length."""
        self.pieces.append(piece)
        self.at += piece.length

    def header(
        self, name: str, crc32: int | Piece, size: int, wanted: int | None = None, modulus: int = 1, after: int = 0
    ) -> None:
        """Append the local header of the record `name`, and its entry in the central directory.

        Args:
            name: The name without the root folder.
            crc32: The checksum. If it is not known yet, the piece from which it is computed during the copy.
            size: The number of bytes of the record.
            wanted: If not None, the header is padded with an extra field, so that a position in the record equals
                `wanted` modulo `modulus`.
            modulus: See `wanted`.
            after: The number of bytes from the end of the header to that position.
        """
        raw_name = f"{self.root}/{name}".encode()
        known = crc32 if isinstance(crc32, int) else 0
        header = local_header(raw_name, known, size, 0)
        if wanted is not None and (padding := _padding(self.at + len(header) + after, wanted, modulus)):
            header = local_header(raw_name, known, size, padding)
        self.directory.append(central_entry(raw_name, UTF8, known, size, self.at))
        if not isinstance(crc32, int):
            place = self.awaited[len(self.directory) - 1] = len(self.sums)
            self.sums.append(crc32)
            self.add(Deferred(len(header), lambda sums: with_crc32(header, LOCAL_CRC32, sums[place])))
        else:
            self.add(Literal(header))

    def pickle(self, name: str, pieces: list[Literal | ByteRange], *, like: int | None) -> None:
        """Append the pickle `pieces` as the record `name`.

        With a number `like`, the header is padded so that the pickle ends at `like` modulo the size of a filesystem
        block. Data copied after it then keeps its place in the blocks. There is no padding if `like` is None.
        """
        size = sum(piece.length for piece in pieces)
        crc32 = 0
        if self.checked:
            for piece in pieces:
                crc32 = crc32_of(piece, crc32)
        self.header(name, crc32, size, like, FILESYSTEM_BLOCK, after=size)
        for piece in pieces:
            self.add(piece)

    def record(self, name: str, data: bytes) -> None:
        """Append a small record `name` with the content `data`, without padding."""
        self.header(name, zlib.crc32(data) if self.checked else 0, len(data))
        self.add(Literal(data))

    def storage(self, name: str, data: Piece, *, summed: bool = True) -> None:
        """Append the storage `data` as the record `name`, aligned to 64 bytes.

        The bytes are new or come from another container.
        It gets a checksum if `summed` and `checked` are true. The checksum of the data in its source, if any, is
        verified.
        """
        known = data.crc32_known()
        crc32: int | Piece = 0
        if self.checked and summed and data.length:
            crc32 = data if known is None else known
        if known is None:
            for span in data.with_checksums():
                if span is not data.checked_range() and id(span) not in self.checked_parts:
                    self.checked_parts.add(id(span))
                    self.sums.append(span)
        self.header(name, crc32, data.length, 0, _ALIGNMENT)
        if data.length:
            self.add(data)

    def with_storages(self, storages: Mapping[str, Piece], byteorder: str) -> ZipWriter:
        """Append the records that torch writes after the pickle. `storages` are the storages by key. Return self."""
        self.record("byteorder", byteorder.encode())
        for key, data in storages.items():
            self.storage(f"data/{key}", data)
        self.record("version", b"3\n")
        return self

    def member(self, name: str, member: Member) -> None:
        """Append the record `member` of another archive as `name`.

        The header is copied with the data if the name and the position in the filesystem block stay the same. Otherwise
        the record gets a new header.
        """
        data_start = member.data_start()
        is_aligned = data_start % _ALIGNMENT == 0
        same = member.name == f"{self.root}/{name}" and member.method == STORED
        may_stay = is_aligned or not name.startswith("data/")
        if same and may_stay and (self.at - member.header_offset) % FILESYSTEM_BLOCK == 0:
            self.directory.append(central_entry(member.name.encode(), member.flags, member.crc32, member.size, self.at))
            self.add(ByteRange(member.source, member.header_offset, member.end - member.header_offset))
            return
        keeps_place = member.method == STORED and is_aligned
        wanted, modulus = (data_start, FILESYSTEM_BLOCK) if keeps_place else (0, _ALIGNMENT)
        self.header(name, member.crc32, member.size, wanted, modulus)
        if member.size:
            self.add(member.data())

    def finish(self, path: Path) -> OutFile:
        """Append the central directory and the end. Return the archive as a file to be written to `path`."""
        directory = self.directory
        size = sum(map(len, directory))
        end, awaited = end_records(len(directory), size, self.at), self.awaited

        def with_sums(sums: Sequence[int]) -> bytes:
            for i, place in awaited.items():
                directory[i] = with_crc32(directory[i], CENTRAL_CRC32, sums[place])
            return b"".join([*directory, end])

        self.add(Deferred(size + len(end), with_sums) if awaited else Literal(with_sums(())))
        return OutFile(path, joined(self.pieces), self.at, tuple(self.sums))


def _padding(at: int, wanted: int, modulus: int) -> int:
    """Return the number of bytes from `at` to the next position that equals `wanted` modulo `modulus`.

    It is 0 or at least 4, because the extra field that holds the padding has at least 4 bytes.
    """
    padding = (wanted - at) % modulus
    return padding + modulus if 0 < padding < 4 else padding
