"""Zip archives as lists of records that can be changed and written again, with correct or incorrect checksums."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from random import Random

__all__ = ["Record", "archive", "records_of"]

_LOCAL, _CENTRAL = struct.Struct("<4sHHHHHIIIHH"), struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL_FIELDS = (
    "signature",
    "version",
    "flags",
    "method",
    "time",
    "date",
    "crc",
    "stored",
    "size",
    "n_name",
    "n_extra",
)
_CENTRAL_FIELDS = (
    "signature", "made", "version", "flags", "method", "time", "date", "crc", "stored", "size", "n_name", "n_extra",
    "n_comment", "disk", "internal", "external", "offset",
)  # a table  # fmt: skip
_ODD = (
    0,
    1,
    2,
    3,
    6,
    8,
    9,
    12,
    16,
    20,
    32,
    45,
    63,
    64,
    100,
    255,
    256,
    2048,
    0x808,
    4096,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFE,
    0xFFFFFFFF,
)
_MOST = 1 << 20  # the most bytes that a deflated record is inflated to


@dataclass(frozen=True)
class Record:
    """A member of an archive. `data` is not compressed.

    `lies` contains false values for fields of the headers. The keys are ``local.FIELD`` or ``central.FIELD``.
    """

    name: bytes
    data: bytes
    deflated: bool = False
    checked: bool = True
    descriptor: bool = False
    aligned: bool = False
    lies: dict[str, int] = field(default_factory=dict)

    def lying(self, random: Random) -> Record:
        """Return a copy of this record with another false value in a header."""
        where, fields = random.choice((("local", _LOCAL_FIELDS), ("central", _CENTRAL_FIELDS)))
        lies = {f"{where}.{random.choice(fields[1:])}": random.choice(_ODD)}
        return replace(self, lies={**self.lies, **lies})


def archive(records: list[Record], *, zip64: bool = False, comment: bytes = b"") -> bytes:
    """Return a zip archive of `records`."""
    out, directory = bytearray(), bytearray()
    for record in records:
        local, central, stored = _headers(record, len(out))
        out += local + stored
        if record.descriptor:
            size, crc = len(record.data), zlib.crc32(record.data) if record.checked else 0
            out += b"PK\x07\x08" + struct.pack("<III", crc, len(stored), size)
        directory += central
    start, n = len(out), len(records)
    out += directory
    if zip64:
        out += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, n, n, len(directory), start)
        out += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1)
    out += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, n & 0xFFFF, n & 0xFFFF, len(directory), start, len(comment))
    return bytes(out + comment)


def _headers(record: Record, at: int) -> tuple[bytes, bytes, bytes]:
    """Return the local header of `record` at offset `at` with name and extra field, its directory entry, and its stored
    bytes.
    """
    deflate = zlib.compressobj(wbits=-15)
    stored = deflate.compress(record.data) + deflate.flush() if record.deflated else record.data
    padding = -(at + _LOCAL.size + len(record.name) + 4) % 64 if record.aligned else 0
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding if record.aligned else b""
    facts = {
        "version": 20,
        "flags": 0x808 if record.descriptor else 0x800,
        "method": 8 if record.deflated else 0,
        "crc": zlib.crc32(record.data) if record.checked else 0,
        "stored": len(stored),
        "size": len(record.data),
        "n_name": len(record.name),
        "offset": at,
    }
    local = {**facts, "n_extra": len(extra)} | ({"crc": 0, "stored": 0, "size": 0} if record.descriptor else {})
    head = _packed(_LOCAL, _LOCAL_FIELDS, b"PK\x03\x04", local, record, "local")
    entry = _packed(_CENTRAL, _CENTRAL_FIELDS, b"PK\x01\x02", facts, record, "central")
    return head + record.name + extra, entry + record.name, stored


def _packed(
    form: struct.Struct, fields: tuple[str, ...], signature: bytes, facts: dict[str, int], record: Record, where: str
) -> bytes:
    said = facts | {name.split(".")[1]: value for name, value in record.lies.items() if name.startswith(where)}
    widths = [2 if code == "H" else 4 for code in form.format.replace("<4s", "")]
    values = [said.get(name, 0) & ((1 << 8 * width) - 1) for name, width in zip(fields[1:], widths, strict=True)]
    return form.pack(signature, *values)


def records_of(data: bytes) -> list[Record] | None:
    """Return the records of the zip archive `data`, or None if Python's zipfile cannot read any."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            return [_record(data, info) for info in opened.infolist()] or None
    except Exception:
        return None


def _record(data: bytes, info: zipfile.ZipInfo) -> Record:
    at = info.header_offset
    n_name, n_extra = struct.unpack("<HH", data[at + 26 : at + 30])
    start = at + _LOCAL.size + n_name + n_extra
    stored = data[start : start + info.compress_size]
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    raw = zlib.decompressobj(-15).decompress(stored, _MOST) if deflated else stored
    aligned = data[at + _LOCAL.size + n_name :][:2] == b"FB"
    checked = bool(info.CRC) or not raw
    return Record(info.filename.encode(), raw, deflated, checked, bool(info.flag_bits & 8), aligned)
