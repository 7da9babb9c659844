"""Single bits that turn: in a zip each is found, or changes nothing.

The two formats without checksums are here as well, with what can be seen there.

What stands where in a file is told apart by :func:`fields_of`, so that a flip which nobody finds is known by the field
that it is in. All bits, and how many were what: ``HYPOTHESIS_PROFILE=long pytest -s tests/hostile/test_bit_flips.py``.
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

#: All bits in the long profile, every so manieth here: a number that has no divisor in common with 8, so that each bit
#: of a byte has its turn.
STEP = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 61


class Settings:
    """A user's own object, in the checkpoint beside the tensors."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def checkpoint() -> dict[str, Any]:
    """Views, a tie, dtypes of several sizes, an empty storage, an object of nobody's class."""
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
    """The layout of torch's own writer, with data descriptors."""
    return saved(checkpoint())


def of_ours(tmp_path: Path) -> bytes:
    """What a conversion writes: headers of its own, and none where the source's could be copied."""
    (tmp_path / "in.pt").write_bytes(of_torch())
    ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", map_location="cuda", exclude="h")
    return (tmp_path / "out.pt").read_bytes()


# Where a byte of a zip stands

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
    """For each byte of a zip, what it is a part of."""
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
    """Name the extra fields of a local header; where they end."""
    end = at + length
    while at < end:
        kind, size = struct.unpack_from("<HH", data, at)
        word = {1: "zip64", 0x4246: "padding"}[kind]
        found[at : at + 4] = [f"local header: head of {word}"] * 4
        found[at + 4 : at + 4 + size] = [f"local header: {word}"] * size
        at += 4 + size
    return end


#: What no reader of a checkpoint looks at, or what may be anything: times, attributes, by which version it could be
#: unpacked, padding.
UNUSED = {
    "local header: version needed", "local header: time", "local header: date", "local header: padding",
    "local header: zip64", "local header: head of padding", "directory: version needed",
    "directory: version made by", "directory: time", "directory: date", "directory: internal attributes",
    "directory: external attributes", "zip64 end: version made by", "zip64 end: version needed",
}  # a table  # fmt: skip


# What becomes of flips


def flips(data: bytes, path: Path, step: int = 1) -> Iterator[int]:
    """The number of each bit, while `path` has `data` with that bit turned."""
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for bit in range(0, 8 * len(data), step):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit % 8]), at)
            yield bit
            os.pwrite(file.fileno(), data[at : at + 1], at)


def tensors_in(path: Path) -> list[tuple[Any, ...]]:
    """Each tensor as the reader sees it: path, dtype, shape, strides, offset, device, and the bytes of its storage."""
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
    """The bits of `data` by what becomes of it when they turn: found by ``verify``; unloadable by whoever LOADs it,
    which ``verify`` does not see; harmless, when all see the same; silent.
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
        except Exception:  # whatever torch makes of a damaged file
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
    """The object in `path` by torch's safe loader."""
    with torch.serialization.safe_globals([Settings]):
        return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For files of a few bytes, by the thousand, they would take most of the time."""
    monkeypatch.setattr(record_checks, "_MOST_THREADS", 0)


@pytest.mark.parametrize("writer", ["torch", "ckptconv"])
def test_no_flip_in_a_zip_is_silent(tmp_path: Path, writer: str) -> None:
    """Whatever single bit turns: ``verify`` finds it, or torch loads the same object and the reader sees the same
    tensors; and that is so in fields that say nothing about either.
    """
    data = of_torch() if writer == "torch" else of_ours(tmp_path)
    bits = judged(data, tmp_path / f"{writer}.pt", STEP, safely)
    fields = fields_of(data)
    assert not bits["silent"] + bits["unloadable"], Counter(fields[bit // 8] for bit in bits["silent"])
    assert {fields[bit // 8] for bit in bits["harmless"]} <= UNUSED
    assert len(bits["found"]) > len(bits["harmless"])


def test_flips_in_safetensors(tmp_path: Path) -> None:
    """It has no checksums: what is silent stands in the numbers of tensors and in names and
    texts; everything else in the header is found.
    """
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "h": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    data = safetensors.torch.save(tensors, {"format": "pt"})
    bits = judged(data, tmp_path / "m.safetensors", STEP, safetensors.torch.load_file)
    start = 8 + int.from_bytes(data[:8], "little")
    texts = {data.index(text) + i for text in (b'"w"', b'"h"', b'"format"', b'"pt"') for i in range(1, len(text) - 1)}
    silent = {bit // 8 for bit in bits["silent"] if bit // 8 < start}
    assert silent <= texts and bits["found"] and bits["silent"] and not bits["unloadable"]
    assert all(bit // 8 in texts or data[bit // 8] == ord(" ") for bit in bits["harmless"])


def test_flips_in_the_older_format(tmp_path: Path) -> None:
    """It has no checksums either: what is silent stands in the numbers of tensors and in the object's pickle; the sizes
    of storages and their keys are checked against each other.
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
