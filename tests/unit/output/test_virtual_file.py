"""A planned file as a stream: it reads like the file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from ckptconv.byteranges import reading
from ckptconv.byteranges.sources import Source
from ckptconv.formats import opening, torch_zip
from ckptconv.output.transfer import VirtualFile
from tests.support.archives import rezip
from tests.support.conversions import saved_at

# torch calls nested, quantized, compressed sparse and complex32 tensors experimental or
# deprecated, once for each process.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo")


def test_the_stream_reads_like_a_file(fixtures: Path) -> None:
    """Seek and read at every place give what the file made of the same pieces has."""
    with Source(fixtures / "two_gpus.pt") as source:
        stream = VirtualFile(torch_zip.archived(opening.read(source)))
        whole = stream.read()
        assert stream.read() == b""
        assert stream.seek(0, io.SEEK_END) == len(whole) == stream.tell()
        with zipfile.ZipFile(stream) as archive:  # type: ignore[arg-type]
            assert any(name.endswith("data.pkl") for name in archive.namelist())
        assert stream.failure is None
        for at in range(0, len(whole), 7):
            for length in (0, 1, 64, 5000):
                stream.seek(at)
                assert stream.read(length) == whole[at : at + length]
                assert stream.seek(0, io.SEEK_CUR) == min(at + length, len(whole))


def test_the_stream_inflates_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards it goes on where it was, backwards it begins anew; it never holds more than a buffer."""
    path = saved_at(tmp_path / "a.pt", {"a": torch.randn(10_000)})
    rezip(path, path, method=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(reading, "BUFFER", 1000)
    with Source(path) as source:
        stream = VirtualFile(torch_zip.archived(opening.read(source)))
        whole = stream.read()
        for at in (0, 30_000, 20_000, 39_000, 100, 40_000):
            stream.seek(at)
            assert stream.read(3000) == whole[at : at + 3000]
            assert len(stream._stream[2]) <= 1000
