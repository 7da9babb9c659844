"""Bad files, made of good parts: pickles merged from opcodes, archives from records, and numbers patched in what
torch and Python wrote.
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

# Opcodes: each function gives those that push what it says, in protocol 2.


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
    """A reference to a storage; `numel` pushes the number of its elements."""
    return b"(" + text("storage") + b"ctorch\n" + cls.encode() + b"\n" + text(key) + text(tag) + numel + b"tQ"


def tensor(
    of: bytes | None = None, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0
) -> bytes:
    """A tensor on the storage that `of` pushes."""
    rest = integer(offset) + ints(*shape) + ints(*stride) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + (storage() if of is None else of) + rest + b"tR"


def pickle_of(*values: bytes) -> bytes:
    """A list of `values`."""
    return b"\x80\x02](" + b"".join(values) + b"e."


def dict_of(*items: bytes, protocol: int = 2) -> bytes:
    """A dict of `items`, keys and values in turn."""
    return bytes([0x80, protocol]) + b"}(" + b"".join(items) + b"u."


# Archives


def saved(obj: object, **options: Any) -> bytes:
    """`obj` by torch's own writer, with these `options` of ``torch.save``."""
    file = io.BytesIO()
    torch.save(obj, file, **options)
    return file.getvalue()


def zip_of(
    members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, file: io.BytesIO | None = None, comment: bytes = b""
) -> bytes:
    """The archive of `members` by Python's own writer."""
    file = file or io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        made.comment = comment
        for name, data in members.items():
            made.writestr(name, data)
    return file.getvalue()


def torch_zip_of(pickle: bytes, records: Mapping[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """A checkpoint in torch's zip format: `pickle`, and `records`, by default one storage of 16 bytes."""
    records = {"data/0": bytes(range(16))} if records is None else records
    members = {"data.pkl": pickle, "version": b"3\n", **records}
    return zip_of({f"made/{name}": data for name, data in members.items()}, method)


def local_header(data: bytes, name: str) -> int:
    """The offset of the local header of `name`."""
    with zipfile.ZipFile(io.BytesIO(data)) as made:
        return made.getinfo(name).header_offset


def central_entry(data: bytes, name: str) -> int:
    """The offset of the entry of `name`, whose name stands 46 bytes after it."""
    return data.rindex(b"PK\x01\x02", 0, data.rindex(name.encode()))


def data_of(data: bytes, name: str) -> int:
    """The offset of the first byte of the record `name`."""
    at = local_header(data, name)
    name_length, extra_length = struct.unpack_from("<HH", data, at + 26)
    start: int = at + 30 + name_length + extra_length
    return start


#: Where the numbers that both headers of a member have stand in the local one and in the central one, and their forms.
FIELDS = {
    "flags": (6, 8, "<H"),
    "method": (8, 10, "<H"),
    "crc": (14, 16, "<I"),
    "stored size": (18, 20, "<I"),
    "size": (22, 24, "<I"),
}


def in_header(data: bytes, side: str, name: str, field: str, value: int) -> bytes:
    """`data` with `value` in a field of the "local" or of the "central" header of the member `name`."""
    local, central, form = FIELDS[field]
    at = local_header(data, name) + local if side == "local" else central_entry(data, name) + central
    return patched(data, at, form, value)


def in_headers(data: bytes, name: str, values: Mapping[str, int]) -> bytes:
    """`data` with `values` in fields of both headers of the member `name`."""
    for field, value in values.items():
        for side in ("central", "local"):
            data = in_header(data, side, name, field, value)
    return data


def end_of(data: bytes) -> int:
    """The offset of the end of the archive."""
    return data.rindex(b"PK\x05\x06")


def patched(data: bytes, offset: int, form: str, value: int) -> bytes:
    """`data` with the number at `offset` replaced."""
    out = bytearray(data)
    struct.pack_into(form, out, offset, value)
    return bytes(out)


def flipped(data: bytes, offset: int) -> bytes:
    """`data` with the lowest bit of the byte at `offset` turned."""
    return patched(data, offset, "B", data[offset] ^ 1)


def number(data: bytes, offset: int, form: str) -> int:
    """The number at `offset`."""
    return int(struct.unpack_from(form, data, offset)[0])


def added(data: bytes, offset: int, form: str, by: int) -> bytes:
    """`data` with `by` added to the number at `offset`."""
    return patched(data, offset, form, number(data, offset, form) + by)


def found_in(data: bytes, what: bytes, times: int = 1) -> int:
    """The offset of `what` in `data`, which has it so many `times`."""
    assert data.count(what) == times
    return data.index(what)
