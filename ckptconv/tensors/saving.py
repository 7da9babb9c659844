"""Create a checkpoint from an object in memory: parse its pickle, and refer to its storages without copying them.

So saving is a conversion like any other: edits, a plan, and a file that is written completely or not at all.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from ckptconv.byteranges.sources import BytesSource, Readable
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.dtypes import BY_NAME, UNTYPED, DType
from ckptconv.errors import RefusedError
from ckptconv.pickles.parser import parse

_NAME = "memory"
_WHERE = Path("the object")


def checkpoint_of_object(obj: object) -> Checkpoint:
    """Return `obj` as a checkpoint, with the pickle that ``torch.save`` would write.

    The object must not change until the checkpoint is written. Raises RefusedError if torch's format cannot store a
    tensor, and every exception of pickling `obj`.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(obj)
    source = BytesSource(stream.getvalue(), _WHERE)
    graph, _ = parse(source.read, source.size, where=str(_WHERE))
    storages = {key: ByteRange(Memory(storage), 0, storage.nbytes()) for key, storage in pickler.storages.items()}
    checkpoint = checkpoint_of(_NAME, source, graph, None, storages.get, str(_WHERE))
    checkpoint.byteorder = sys.byteorder
    return checkpoint


class Memory(Readable):
    """The bytes of a storage on any device, as a source. ``fd`` is -1, because there is no file."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.path = _WHERE
        self.size = storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`."""
        part = self._bytes[offset : offset + length].cpu()
        return ctypes.string_at(part.data_ptr(), length)


class _Pickler(pickle.Pickler):
    """A pickler that writes storages as persistent ids.

    Protocol and persistent ids are the same as in torch's own writer (``torch.serialization._save`` of 2.13).
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._known: dict[int, tuple[str, DType]] = {}  # by the address of a storage, which `storages` keeps alive

    def persistent_id(self, obj: Any) -> tuple[object, ...] | None:
        """Return the persistent id of a storage, and record the storage in ``storages``.

        Return None for any other object.

        Raises RefusedError if torch's format cannot store the dtype, or two dtypes on one storage.
        """
        if isinstance(obj, torch.storage.TypedStorage):
            storage = obj._untyped_storage  # its public name emits a deprecation warning
            dtype = BY_NAME[str(obj.dtype).removeprefix("torch.")]
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, UNTYPED
        else:
            return None
        key, first = self._known.setdefault(storage._cdata, (str(len(self._known)), dtype))
        if first.name != dtype.name:  # a loader expects one dtype for each storage
            raise RefusedError(
                f"two tensors are views of one storage as {first.name} and {dtype.name}, which torch's format"
                " cannot say",
                where=_WHERE,
                hint="clone() one of them",
            )
        if dtype.storage_class is None:
            raise RefusedError(f"torch's format has no storage for {dtype.name}", where=_WHERE)
        self.storages[key] = storage
        location = torch.serialization.location_tag(storage)
        return "storage", getattr(torch, dtype.storage_class), key, location, storage.nbytes() // dtype.itemsize
