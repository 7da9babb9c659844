"""Tests that flip single bits. In a zip file, every flip is found or has no effect.

The two formats without checksums are tested as well, with the flips that can be found there.

:func:`fields_of` assigns each byte of a zip file to a field, so a flip that is not found is known by its field.
``HYPOTHESIS_PROFILE=long pytest -s tests/hostile/test_bit_flips.py`` tests all bits and prints the numbers.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptconv
from ckptconv.byteranges import record_checks
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange
from ckptconv.formats import opening
from ckptconv.inspection.verification import verify
from tests.support.hostile_bytes import saved
from tests.support.judge import assert_same

#: Every bit in the long profile, and every 61st bit otherwise. 61 has no divisor in common with 8, so all eight bits of
#: bytes occur.
STEP = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 61


class Settings:
    """A user's object in the checkpoint, next to the tensors."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def checkpoint() -> dict[str, Any]:
    """Return a checkpoint with views, a tie, dtypes of several sizes, an empty storage and a user's object."""
    weight = torch.arange(6.0).reshape(2, 3)
    model = {
        "w": weight,
        "t": weight.T,
        "row": weight[1],
        "tied": weight,
        "h": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "n": torch.tensor(7),
        "empty": torch.empty(0, 2),
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    return {"model": model, "settings": Settings(lr=0.1, name="run")}


def of_torch() -> bytes:
    """Return a file of torch's writer, with data descriptors."""
    return saved(checkpoint())


def of_ours(tmp_path: Path) -> bytes:
    """Return a converted file, in which some headers are new and others are copied from the source."""
    (tmp_path / "in.pt").write_bytes(of_torch())
    ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", map_location="cuda", exclude="h")
    return (tmp_path / "out.pt").read_bytes()


# The fields of a zip file

_LOCAL = [
    ("signature", 4), ("version needed", 2), ("flags", 2), ("method", 2), ("time", 2), ("date", 2), ("checksum", 4),
    ("stored size", 4), ("size", 4), ("length of name", 2), ("length of extra", 2),
]  # a table  # fmt: skip
_CENTRAL = [
    ("signature", 4),
    ("version made by", 2),
    *_LOCAL[1:],
    ("length of comment", 2),
    ("disk", 2),
    ("internal attributes", 2),
    ("external attributes", 4),
    ("offset", 4),
]
_ZIP64_END = [
    ("signature", 4), ("length", 8), ("version made by", 2), ("version needed", 2), ("disk", 4),
    ("disk of directory", 4), ("count on disk", 8), ("count", 8), ("size", 8), ("offset", 8),
]  # a table  # fmt: skip
_LOCATOR = [("signature", 4), ("disk", 4), ("offset", 8), ("disks", 4)]
_END = [
    ("signature", 4),
    ("disk", 2),
    ("disk of directory", 2),
    ("count on disk", 2),
    ("count", 2),
    ("size", 4),
    ("offset", 4),
    ("length of comment", 2),
]


def fields_of(data: bytes) -> list[str]:
    """Return the name of its field for each byte of the zip file `data`."""
    found = ["?"] * len(data)

    def name(at: int, what: str, fields: list[tuple[str, int]]) -> int:
        for field, length in fields:
            found[at : at + length] = [f"{what}: {field}"] * length
            at += length
        return at

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            at = name(info.header_offset, "local header", _LOCAL)
            names, extra = struct.unpack_from("<HH", data, at - 4)
            at = name(at, "local header", [("name", names)])
            at = _extras(found, data, at, extra)
            at = name(at, "record", [(info.filename.split("/", 1)[1], info.compress_size)])
            if info.flag_bits & 8:
                wide = data[at + 16 : at + 20] not in (b"PK\3\4", b"PK\1\2")
                name(at, "descriptor", [("signature", 4), ("checksum", 4), ("sizes", 16 if wide else 8)])
        at = archive.start_dir
    while data[at : at + 4] == b"PK\1\2":
        names, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        at = name(at, "directory", [*_CENTRAL, ("name", names), ("extra", extra), ("comment", comment)])
    if data[at : at + 4] == b"PK\6\6":
        at = name(name(at, "zip64 end", _ZIP64_END), "zip64 locator", _LOCATOR)
    assert name(at, "end", _END) == len(data)
    assert "?" not in found
    return found


def _extras(found: list[str], data: bytes, at: int, length: int) -> int:
    """Name the extra fields of a local header in `found`, and return the offset of their end."""
    end = at + length
    while at < end:
        kind, size = struct.unpack_from("<HH", data, at)
        word = {1: "zip64", 0x4246: "padding"}[kind]
        found[at : at + 4] = [f"local header: head of {word}"] * 4
        found[at + 4 : at + 4 + size] = [f"local header: {word}"] * size
        at += 4 + size
    return end


#: Fields that no reader of a checkpoint uses, or that may have any value: times, attributes, versions, and padding.
UNUSED = {
    "local header: version needed", "local header: time", "local header: date", "local header: padding",
    "local header: zip64", "local header: head of padding", "directory: version needed",
    "directory: version made by", "directory: time", "directory: date", "directory: internal attributes",
    "directory: external attributes", "zip64 end: version made by", "zip64 end: version needed",
}  # a table  # fmt: skip


# The effects of flips


def flips(data: bytes, path: Path, step: int = 1) -> Iterator[int]:
    """Yield the number of each bit while `path` contains `data` with that bit flipped."""
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for bit in range(0, 8 * len(data), step):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit % 8]), at)
            yield bit
            os.pwrite(file.fileno(), data[at : at + 1], at)


def tensors_in(path: Path) -> list[tuple[Any, ...]]:
    """Return the properties and storage bytes of each tensor in the file at `path`."""
    with Source(path) as source:
        found = opening.read(source)
        return [
            (
                place,
                info.dtype,
                info.shape,
                info.stride,
                info.offset,
                info.device,
                info.requires_grad,
                info.tied_to,
                _bytes_of(info),
            )
            for place, info in found.tensors.items()
        ]


def _bytes_of(info: Any) -> bytes:
    data = info.storage.data if info.storage else None
    return data.source.read(data.offset, data.length) if data else b""


def judged(data: bytes, path: Path, step: int, load: Callable[[Path], Any]) -> dict[str, list[int]]:
    """Return the bits of `data` by the effect of a flip.

    ``verify`` reports a "found" flip. For the others, `load` raises an exception ("unloadable"), returns an equal
    object and tensors ("harmless"), or returns other values ("silent").
    """
    path.write_bytes(data)
    assert verify(path).ok
    original, seen = load(path), tensors_in(path)
    bits: dict[str, list[int]] = {"found": [], "unloadable": [], "harmless": [], "silent": []}
    for bit in flips(data, path, step):
        if not verify(path).ok:
            bits["found"].append(bit)
            continue
        try:
            loaded = load(path)
        except Exception:  # torch raises any exception for a damaged file
            bits["unloadable"].append(bit)
            continue
        bits["harmless" if _same(loaded, original) and tensors_in(path) == seen else "silent"].append(bit)
    sums = ", ".join(f"{len(found):,} {kind}" for kind, found in bits.items())
    print(f"\n{path.name}, {len(data):,} bytes, {sum(map(len, bits.values())):,} flips: {sums}")
    return bits


def _same(left: Any, right: Any) -> bool:
    try:
        assert_same(left, right)
    except AssertionError:
        return False
    return True


def safely(path: Path) -> Any:
    """Return the object in the file at `path`, loaded by torch's safe loader."""
    with torch.serialization.safe_globals([Settings]):
        return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off threads, which would take most of the time for thousands of tiny files."""
    monkeypatch.setattr(record_checks, "_MOST_THREADS", 0)


@pytest.mark.parametrize("writer", ["torch", "ckptconv"])
def test_no_flip_in_a_zip_is_silent(tmp_path: Path, writer: str) -> None:
    """``verify`` finds every single flip in a zip file, or the flip is in an unused field. Then torch and the reader
    return the same tensors.
    """
    data = of_torch() if writer == "torch" else of_ours(tmp_path)
    bits = judged(data, tmp_path / f"{writer}.pt", STEP, safely)
    fields = fields_of(data)
    assert not bits["silent"] + bits["unloadable"], Counter(fields[bit // 8] for bit in bits["silent"])
    assert {fields[bit // 8] for bit in bits["harmless"]} <= UNUSED
    assert len(bits["found"]) > len(bits["harmless"])


def test_flips_in_safetensors(tmp_path: Path) -> None:
    """In safetensors, which has no checksums, a flip is silent only in values of tensors, names and texts. Every other
    flip in the header is found, except in padding.
    """
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "h": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    data = safetensors.torch.save(tensors, {"format": "pt"})
    bits = judged(data, tmp_path / "m.safetensors", STEP, safetensors.torch.load_file)
    start = 8 + int.from_bytes(data[:8], "little")
    texts = {data.index(text) + i for text in (b'"w"', b'"h"', b'"format"', b'"pt"') for i in range(1, len(text) - 1)}
    silent = {bit // 8 for bit in bits["silent"] if bit // 8 < start}
    assert silent <= texts and bits["found"] and bits["silent"] and not bits["unloadable"]
    assert all(bit // 8 in texts or data[bit // 8] == ord(" ") for bit in bits["harmless"])


def test_flips_in_the_legacy_format(tmp_path: Path) -> None:
    """In the older format, which has no checksums, a flip is silent only in values of tensors and in the pickle of the
    object.
    """
    data = saved(checkpoint(), _use_new_zipfile_serialization=False)
    bits = judged(data, tmp_path / "older.pt", STEP, safely)
    stream, ends = io.BytesIO(data), []
    for _ in range(5):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    with Source(tmp_path / "older.pt") as source:
        spans = [storage.data for storage in opening.read(source).storages.values()]
    numbers = {span.offset + i for span in spans if isinstance(span, ByteRange) for i in range(span.length)}
    assert bits["found"] and bits["silent"]
    assert all(bit // 8 in numbers or ends[2] <= bit // 8 < ends[3] for bit in bits["silent"])
