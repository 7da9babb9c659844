"""Repeated items: reading them in columns gives the same content of ``.metadata`` as reading each opcode, for
any file.
"""

from __future__ import annotations

import os
import pickle
import pickletools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptconv.byteranges.sources import BytesSource
from ckptconv.errors import CkptconvError
from ckptconv.formats.distributed.metadata import metadata_bytes, read_metadata
from ckptconv.pickles import repeats
from ckptconv.pickles.parser import DISPATCH
from ckptconv.pickles.repeats import RepeatedError, RepeatMachine

_COUNT = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 100
_SHAPES = ((4, 4), (8,), (), (300, 2), (2, 2, 2))
#: Replacements for an opcode or operand: gets, puts, integers, and others.
_ODD = (b"h\x05", b"K\x07", b"q\x07", b"r\x00\x01\x00\x00", b"\x94", b"0", b"2", b"]", b"\x88", b"N", b"u", b"(", b"b")


def _metadata(random: Random) -> Metadata:
    """Return torch's metadata of a few tensors in chunks. Equal sizes are one object or several."""
    ranks, shapes = random.randrange(1, 4), random.sample(_SHAPES, random.randrange(1, 4))
    name = random.choice(("layers.{}.w", "{}", "offset{}", "\u00e4.{}"))
    names = ["offset", "fqn", *map(name.format, range(random.randrange(60)))][random.randrange(3) :]
    one = {shape: torch.Size(shape) for shape in _SHAPES} if random.random() < 0.3 else {}
    items: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    at = Counter[int]()
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]  # all entries of a file share its name, as in a real run
    for name in names:
        if random.random() < 0.05:
            items[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _StorageInfo("__0_0.distcp", at[0], 50)
            at[0] += 50
            continue
        shape = random.choice(shapes)
        parts = ranks if shape and shape[0] % ranks == 0 else 1
        chunks = []
        for rank in range(parts):
            rows = shape[0] // parts if shape else 0
            offsets = torch.Size((rank * rows, *(0 for _ in shape[1:])) if shape else ())
            sizes = torch.Size((rows, *shape[1:]) if shape else ())
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            own = name[:1] + name[1:] if random.random() < 0.5 else name  # each process of a run has its own string
            index = MetadataIndex(own, offsets if random.random() < 0.5 else torch.Size(offsets), rank)
            length = random.choice((100, 100, 70_000))
            stored[index] = _StorageInfo(files[rank], at[rank], length)
            at[rank] += length
        dtype = random.choice((torch.float32, torch.float32, torch.bfloat16))
        size = one.get(shape, torch.Size(shape))
        items[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    made = Metadata(items, {name: (name,) for name in items}, stored)
    made.version = "1.0.0"
    if stored and random.random() < 0.1:
        made.storage_meta = random.choice([*stored])  # ckptconv ignores this, but reads it from the memo
    return made


def _written(random: Random) -> bytes:
    """Return the bytes of a ``.metadata`` file, as torch or this package writes it."""
    data = pickle.dumps(_metadata(random), random.choice((2, 4, 4, 5)))
    if random.random() < 0.4:
        data = metadata_bytes(read_metadata(BytesSource(data, Path("m"))))
    return pickletools.optimize(data) if random.random() < 0.2 else data  # remove puts that nothing reads


def _changed(random: Random, data: bytes) -> bytes:
    """Return `data` with a few bytes replaced, removed or inserted."""
    if random.random() < 0.5:  # put another text into a memo slot that may be read later
        *starts, _ = (at for _, _, at in pickletools.genops(data))
        at, slot = random.choice(starts[1:]), random.randrange(500)
        put = b"q%c" % slot if slot < 256 else b"r" + slot.to_bytes(4, "little")
        data = data[:at] + b"X\x06\0\0\0length" + put + b"0" + data[at:]
    for _ in range(random.choice((0, 0, 1, 1, 2, 5))):
        at = random.randrange(len(data))
        odd = random.choice((*_ODD, b"", data[at : at + random.randrange(40)], bytes([random.randrange(256)])))
        data = data[:at] + odd + data[at + random.choice((0, len(odd), 1)) :]
    return data


def _read(data: bytes) -> object:
    try:
        return read_metadata(BytesSource(data, Path("m")))
    except CkptconvError as error:
        return type(error), str(error)


@pytest.mark.untraced
def test_repeated_items_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``.metadata`` file gives the same content or the same error with and without repeated items. The files are
    written by torch and by this package, and their bytes are changed at random.
    """
    met = Counter[str]()
    for seed in range(_COUNT):
        random = Random(seed)
        data = _changed(random, _written(random))
        with monkeypatch.context() as patched:
            patched.setattr(repeats, "_MOST", 0)
            expected = _read(data)
        found = _read(data)
        assert found == expected, seed
        met["read" if hasattr(found, "items") else "refused"] += 1
        machine = RepeatMachine(lambda at, n, data=data: data[at : at + n], len(data), "m", 0, ("fqn", "offset"))
        try:
            machine.load(DISPATCH)
        except RepeatedError:
            met["again"] += 1
        except CkptconvError:
            pass
        met["items"] += len(machine._items)
    assert met["read"] > _COUNT / 6 and met["refused"] > _COUNT / 4 and met["items"] > 5 * _COUNT, met
