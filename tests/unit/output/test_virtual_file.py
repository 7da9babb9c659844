"""A planned file as a stream, which reads like the written file."""

from __future__ import annotations

import io
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.byteranges import reading
from ckptconv.byteranges.sources import Source
from ckptconv.errors import InputChangedError
from ckptconv.formats import opening, torch_zip
from ckptconv.output import transfer
from ckptconv.output.transfer import VirtualFile
from tests.support.archives import rezip
from tests.support.conversions import saved_at

# torch issues warnings about nested, quantized, compressed sparse and complex32 tensors once for each process: they are
# experimental or deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo")


def test_the_stream_reads_like_a_file(fixtures: Path) -> None:
    """Seeking and reading at every position gives the same bytes as one read of the complete stream."""
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
    """A deflated piece continues forward from the last position, and restarts when seeking backward. The stream never
    holds more than one buffer.
    """
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


@contextmanager
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[VirtualFile, Path]]:
    """Yield a stream and its file. A thread reads a part of each buffer, on any machine."""
    monkeypatch.setattr(transfer, "_SHARE", 1000)
    monkeypatch.setattr(transfer, "_WORTH_SHARING", 1000)
    monkeypatch.setattr(transfer, "processors", lambda: 2)
    path = saved_at(tmp_path / "a.pt", {"a": torch.randn(100_000)})
    with Source(path) as source, VirtualFile(torch_zip.archived(opening.read(source))) as stream:
        yield stream, path


def test_a_thread_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a buffer is read once, by one of two threads. If the system allows no second thread, one reads all
    parts.
    """
    readers: list[str] = []
    read_into = reading.read_into

    def recorded(*args: Any) -> None:
        readers.append(threading.current_thread().name)
        time.sleep(0.001)
        read_into(*args)

    with shared(tmp_path, monkeypatch) as (stream, path):
        monkeypatch.setattr(reading, "read_into", recorded)
        whole = stream.read()
        assert set(readers) == {"MainThread", "ckptconv-load"} and len(readers) < len(whole) / 1000 + 100
        monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
        with Source(path) as source, VirtualFile(torch_zip.archived(opening.read(source))) as other:
            assert other.read() == whole


def refuse_to_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_error_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = reading.read_into

    def short(*args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.001)
            read_into(*args)
        else:
            raise InputChangedError("it is shorter")

    with shared(tmp_path, monkeypatch) as (stream, _):
        monkeypatch.setattr(reading, "read_into", short)
        with pytest.raises(InputChangedError, match="it is shorter"):
            stream.readinto(bytearray(300_000))
        assert isinstance(stream.failure, InputChangedError)


def test_nothing_is_written_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a read has ended, even if it was interrupted, its thread no longer writes to the buffer."""
    begun = threading.Event()

    def slow(_: object, at: int, buffer: memoryview) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(10)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.1)
        buffer[:] = b"x" * len(buffer)

    with shared(tmp_path, monkeypatch) as (stream, _):
        stream.seek(100_000)  # in the storage
        monkeypatch.setattr(reading, "read_into", slow)
        buffer = bytearray(100_000)
        with pytest.raises(KeyboardInterrupt):
            stream.readinto(buffer)
        after = bytes(buffer)
        time.sleep(0.3)
        assert bytes(buffer) == after and after.count(b"x") == 1000


def test_waiting_goes_on_after_a_signal() -> None:
    """If a signal interrupts the wait for a lock, the exception is raised after the lock is free."""

    class Interrupted:
        left = 2

        def __enter__(self) -> None:
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            pass

    lock: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        transfer._wait_for(lock)
    assert not lock.left
