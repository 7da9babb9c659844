"""Bad files made of good parts: pickles assembled from opcodes, archives assembled from records, and numbers patched in
the output of torch and Python.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

__all__ = [
    "FIELDS",
    "FOUR",
    "added",
    "central_entry",
    "data_of",
    "dict_of",
    "end_of",
    "flipped",
    "found_in",
    "in_header",
    "in_headers",
    "integer",
    "ints",
    "local_header",
    "number",
    "patched",
    "pickle_of",
    "saved",
    "storage",
    "tensor",
    "text",
    "torch_zip_of",
    "zip_of",
]

# Opcodes: each function returns opcodes of protocol 2 that push the value it is named after.


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def ints(*values: int) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


FOUR = integer(4)


def storage(key: str = "0", numel: bytes = FOUR, cls: str = "FloatStorage", tag: str = "cpu") -> bytes:
    """Return opcodes that push a reference to a storage. The opcodes `numel` push the number of its elements."""
    return b"(" + text("storage") + b"ctorch\n" + cls.encode() + b"\n" + text(key) + text(tag) + numel + b"tQ"


def tensor(
    of: bytes | None = None, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0
) -> bytes:
    """Return opcodes that push a tensor on the storage that `of` pushes."""
    rest = integer(offset) + ints(*shape) + ints(*stride) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + (storage() if of is None else of) + rest + b"tR"


def pickle_of(*values: bytes) -> bytes:
    """Return a pickle of a list of `values`, each given as opcodes."""
    return b"\x80\x02](" + b"".join(values) + b"e."


def dict_of(*items: bytes, protocol: int = 2) -> bytes:
    """Return a pickle of a dict of `items`, which alternate between the opcodes of a key and of a value."""
    return bytes([0x80, protocol]) + b"}(" + b"".join(items) + b"u."


# Archives


def saved(obj: object, **options: Any) -> bytes:
    """Return the file that ``torch.save`` writes for `obj` with `options`."""
    file = io.BytesIO()
    torch.save(obj, file, **options)
    return file.getvalue()


def zip_of(
    members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, file: io.BytesIO | None = None, comment: bytes = b""
) -> bytes:
    """Return the archive of `members` that Python's zipfile module writes."""
    file = file or io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        made.comment = comment
        for name, data in members.items():
            made.writestr(name, data)
    return file.getvalue()


def torch_zip_of(pickle: bytes, records: Mapping[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a checkpoint in torch's zip format with `pickle` and `records`. By default the records are one storage of
    16 bytes.
    """
    records = {"data/0": bytes(range(16))} if records is None else records
    members = {"data.pkl": pickle, "version": b"3\n", **records}
    return zip_of({f"made/{name}": data for name, data in members.items()}, method)


def local_header(data: bytes, name: str) -> int:
    """Return the offset of the local header of `name`."""
    with zipfile.ZipFile(io.BytesIO(data)) as made:
        return made.getinfo(name).header_offset


def central_entry(data: bytes, name: str) -> int:
    """Return the offset of the central directory entry of `name`. The name itself is 46 bytes after the offset."""
    return data.rindex(b"PK\x01\x02", 0, data.rindex(name.encode()))


def data_of(data: bytes, name: str) -> int:
    """Return the offset of the first byte of the record `name`."""
    at = local_header(data, name)
    name_length, extra_length = struct.unpack_from("<HH", data, at + 26)
    start: int = at + 30 + name_length + extra_length
    return start


#: The fields in both headers of a member: the offset in the local header, the offset in the central header, and the
#: format.
FIELDS = {
    "flags": (6, 8, "<H"),
    "method": (8, 10, "<H"),
    "crc": (14, 16, "<I"),
    "stored size": (18, 20, "<I"),
    "size": (22, 24, "<I"),
}


def in_header(data: bytes, side: str, name: str, field: str, value: int) -> bytes:
    """Return `data` with `value` in `field` of a header of the member `name`. `side` is ``"local"`` or
    ``"central"``.
    """
    local, central, form = FIELDS[field]
    at = local_header(data, name) + local if side == "local" else central_entry(data, name) + central
    return patched(data, at, form, value)


def in_headers(data: bytes, name: str, values: Mapping[str, int]) -> bytes:
    """Return `data` with `values` in the fields of both headers of the member `name`."""
    for field, value in values.items():
        for side in ("central", "local"):
            data = in_header(data, side, name, field, value)
    return data


def end_of(data: bytes) -> int:
    """Return the offset of the end record of the archive."""
    return data.rindex(b"PK\x05\x06")


def patched(data: bytes, offset: int, form: str, value: int) -> bytes:
    """Return `data` with `value` at `offset`, packed in `form`."""
    out = bytearray(data)
    struct.pack_into(form, out, offset, value)
    return bytes(out)


def flipped(data: bytes, offset: int) -> bytes:
    """Return `data` with the lowest bit of the byte at `offset` flipped."""
    return patched(data, offset, "B", data[offset] ^ 1)


def number(data: bytes, offset: int, form: str) -> int:
    """Return the number at `offset` of `data`, unpacked from `form`."""
    return int(struct.unpack_from(form, data, offset)[0])


def added(data: bytes, offset: int, form: str, by: int) -> bytes:
    """Return `data` with `by` added to the number at `offset`."""
    return patched(data, offset, form, number(data, offset, form) + by)


def found_in(data: bytes, what: bytes, times: int = 1) -> int:
    """Return the offset of the first `what` in `data`. Fail unless `data` contains it exactly `times` times."""
    assert data.count(what) == times
    return data.index(what)
