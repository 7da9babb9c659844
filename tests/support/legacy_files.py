"""Files in torch's format from before 1.6, assembled from their five pickles.

Early versions of torch and Python 2 wrote such files. The current version of torch cannot write them.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

__all__ = ["MAGIC", "SYS_INFO", "keys_and_data", "legacy", "legacy_file", "object_pickle", "storage_id"]

MAGIC = 0x1950A86A20F9469CFC6C
SYS_INFO = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def legacy(obj: Any, path: Path, **kwargs: Any) -> None:
    """Save `obj` at `path` with ``torch.save`` in the older format."""
    torch.save(obj, path, _use_new_zipfile_serialization=False, **kwargs)


class Storage:
    """A persistent id, in the place of a storage."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


def storage_id(cls: Any, key: str, tag: str, numel: int, view: Any = None) -> Storage:
    """Return the object that the pickle contains in the place of a storage."""
    return Storage("storage", cls, key, tag, numel, view)


class _Pickler(pickle._Pickler):
    """Python's own pickler, which writes storages as persistent ids, and text as a string of Python 2 if `python2` is
    true.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def __init__(self, stream: io.BytesIO, python2: bool, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.python2 = python2

    def persistent_id(self, obj: Any) -> Any:
        return obj.parts if isinstance(obj, Storage) else None

    def save_text(self, obj: str) -> None:
        """Write `obj` as Python does, or for Python 2 as a SHORT_BINSTRING (up to 19 bytes) or a STRING."""
        if not self.python2:
            pickle._Pickler.save_str(self, obj)  # type: ignore[attr-defined]
            return
        this: Any = self  # typeshed does not declare these methods
        data = obj.encode()
        if len(data) < 20:
            this.write(b"U" + bytes([len(data)]) + data)
        else:
            this.write(b"S" + repr(obj).encode() + b"\n")
        this.memoize(obj)

    dispatch[str] = save_text


def object_pickle(obj: Any, *, python2: bool = False, protocol: int = 2) -> bytes:
    """Return the pickle of `obj`, with storages as persistent ids."""
    stream = io.BytesIO()
    _Pickler(stream, python2, protocol).dump(obj)
    return stream.getvalue()


def keys_and_data(storages: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return the bytes that follow the object: the keys of `storages`, and then the number of elements and the bytes of
    each storage.
    """
    data = b"".join(struct.pack("<q", numel) + raw for numel, raw in storages.values())
    return pickle.dumps([*storages], 2) + data


def legacy_file(
    obj: Any,
    storages: Mapping[str, tuple[int, bytes]],
    *,
    python2: bool = False,
    protocol: int = 2,
    sys_info: Any = SYS_INFO,
) -> bytes:
    """Return a complete file that contains `obj` and `storages`, a mapping of keys to pairs (elements, bytes)."""
    head = b"".join(pickle.dumps(value, protocol) for value in (MAGIC, 1001, sys_info))
    return head + object_pickle(obj, python2=python2, protocol=protocol) + keys_and_data(storages)
