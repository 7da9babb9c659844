"""Files of chunks. A file that is like an earlier one is not parsed again."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv import convert
from ckptconv.byteranges.sources import BytesSource, SliceSource
from ckptconv.byteranges.spans import ByteRange
from ckptconv.errors import InputError
from ckptconv.formats import torch_zip
from ckptconv.formats.distributed import chunk_files
from ckptconv.formats.distributed.chunk_files import ChunkFiles
from tests.support.archives import without_crc32
from tests.support.hostile_bytes import saved
from tests.support.sampled import sampled

BEFORE = b"what stands before it"


def window(raw: bytes) -> SliceSource:
    return SliceSource(BytesSource(BEFORE + raw + b"and behind", Path("here")), len(BEFORE), len(raw))


def answer(files: ChunkFiles, raw: bytes) -> object:
    """Return the facts that `files` reads of `raw`, or the error message."""
    try:
        file = files.read(window(raw))
    except InputError as error:
        return str(error)
    data = file.data
    assert data is None or isinstance(data, ByteRange)
    facts = file.info and (file.info.dtype, file.info.shape, file.info.stride, file.info.offset, file.info.kind)
    return facts, data and (data.offset, data.length, data.crc32), file.is_little_endian


def converted(tensor: torch.Tensor, folder: Path) -> bytes:
    """Return the chunk file that ckptconv writes for `tensor`. No record of this file has a data descriptor."""
    torch.save({"w": tensor}, folder / "w.pt")
    convert(folder / "w.pt", folder / "dcp", format="dcp", force=True)
    return (folder / "dcp" / "__0_0.distcp").read_bytes()


@pytest.mark.parametrize("ours", [False, True])
def test_parsed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: bool) -> None:
    """Files with the same shape and dtype are parsed once. Each tensor has its own bytes and its own checksum."""
    parsed = []
    read = torch_zip.read
    files = ChunkFiles()
    for shape in ((2, 3), (3, 2), (6,), (2, 3)):
        for _ in range(3):
            tensor = torch.randn(shape)
            raw = converted(tensor, tmp_path) if ours else saved(tensor)
            monkeypatch.setattr(torch_zip, "read", lambda source: (parsed.append(source), read(source))[1])
            expected = read(BytesSource(raw, Path("here"))).storages["0"].data
            file = files.read(window(raw))
            monkeypatch.undo()
            assert isinstance(file.data, ByteRange) and isinstance(expected, ByteRange)
            assert file.data.crc32 == expected.crc32 and file.data.offset == len(BEFORE) + expected.offset
            assert bytes(file.data.source.read(file.data.offset, file.data.length)) == bytes(tensor.numpy())
            assert file.info and file.info.shape == shape
    assert len(parsed) == 3


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("ours", [False, True])
def test_every_changed_byte_is_noticed(tmp_path: Path, ours: bool) -> None:
    """If any byte of a file is changed, the result is the same as if no other file had been read before."""
    tensors = torch.arange(4.0), torch.ones(4)
    raw, other = (converted(tensor, tmp_path) if ours else saved(tensor) for tensor in tensors)
    for i in sampled(range(len(raw))):
        for change in (1, 0xFF):
            bad = bytearray(raw)
            bad[i] ^= change
            files = ChunkFiles()
            files.read(window(other))
            assert answer(files, bytes(bad)) == answer(ChunkFiles(), bytes(bad)), i


@pytest.mark.parametrize("crc32", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4), torch.ones(0), torch.ones(4).to_sparse(), {"a": 1}, torch.ones(5)[1:], torch.ones(2, 2).t()],
)
def test_reading_again(tensor: Any, crc32: bool) -> None:
    """Files of all kinds, with and without checksums, give the same result when they are read again."""
    with nullcontext() if crc32 else without_crc32():
        raw = saved(tensor)
    files = ChunkFiles()
    assert answer(files, raw) == answer(files, raw) == answer(ChunkFiles(), raw)


def test_number_of_remembered_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of files that are remembered for each size is bounded, so a folder without similar files needs little
    extra work.
    """
    monkeypatch.setattr(chunk_files, "_MOST", 2)
    files = ChunkFiles()
    for shape in ((1, 8), (8, 1), (2, 4), (4, 2)):
        files.read(window(saved(torch.ones(shape))))
    assert [len(known) for known in files._known.values()] == [2]
