"""Threads that cast tensors: their number and their blocks change neither bytes nor checksums, errors in a thread reach
the caller, and no thread remains.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptconv
from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import combined
from ckptconv.byteranges.kernels.casting import CastBuffer
from ckptconv.byteranges.sources import Source
from ckptconv.conversion.convert import run
from ckptconv.conversion.targets import find_request
from ckptconv.edits.options import edits_from
from ckptconv.output import transfer
from tests.support.archives import flip_bit
from tests.support.conversions import saved_at

OLD = b"the old output"


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with storages of odd sizes. Different casts apply to views of one storage, and some numbers are too
    large for float16.
    """
    path = tmp_path_factory.mktemp("workers") / "src.pt"
    generator = torch.manual_seed(1)
    base = torch.randn(123_457, generator=generator) * 3e4
    state = {
        "a": base[:50_000],
        "b": base[50_003:],
        "c": torch.randn(77_777, generator=generator).double() * 1e5,
        "d": torch.randn(300, 301, generator=generator).t(),
        "small": torch.ones(5),
        "ints": torch.arange(9000),
    }
    return saved_at(path, state)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "dst.pt").write_bytes(OLD)
    return tmp_path / "dst.pt"


RULES = ["fp16", "b=bf16"]


@contextmanager
def untouched(target: Path) -> Iterator[None]:
    """Check that after this context the folder contains only the old output, and that no new thread is left."""
    threads = threading.active_count()
    yield
    assert target.read_bytes() == OLD
    assert os.listdir(target.parent) == [target.name]
    for _ in range(500):  # a thread that was being started at Ctrl-C ends on its own
        if threading.active_count() <= threads:  # fewer if a thread of another test has ended
            return
        threading.Event().wait(0.01)
    raise AssertionError([thread.name for thread in threading.enumerate()])


# Equal bytes


@pytest.mark.parametrize("name", ["dst.pt", "dst.safetensors", "dst.pkl"])
def test_blocks_and_threads_do_not_matter(
    name: str, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output and the reported overflows are the same for all sizes of the blocks and all numbers of threads."""
    found = set()
    for block, threads, worth, buffer in (
        (4 << 20, 4, 64 << 10, 4 << 20),
        (8000, 4, 0, 1 << 20),
        (17 * 1000, 1, 1000, 9999),
        (4 << 20, 1, 1 << 40, 4096),
        (65_536, 3, 8, 888),
    ):
        monkeypatch.setattr(transfer, "_CAST_BLOCK", block)
        monkeypatch.setattr(transfer, "_MOST_THREADS", threads)
        monkeypatch.setattr(transfer, "_WORTH_A_THREAD", worth)
        monkeypatch.setattr(reading, "BUFFER", max(buffer, 64))
        report = ckptconv.convert(src, tmp_path / name, dtype=RULES, force=True, verify=True)
        found.add(((tmp_path / name).read_bytes(), tuple(sorted(report.overflowed.items()))))
    assert len(found) == 1
    assert len(report.overflowed) == 2


def test_progress_reaches_the_size(src: Path, tmp_path: Path) -> None:
    """The progress includes the bytes that threads write."""
    moved: list[int] = []
    planned: list[int] = []

    @contextmanager
    def progress(size: int) -> Any:
        planned.append(size)
        yield moved.append

    run(find_request(src, tmp_path / "dst.pt", edits_from(dtype=RULES)), progress)
    assert [sum(moved)] == planned == [(tmp_path / "dst.pt").stat().st_size]


def test_a_system_that_starts_no_threads(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is the same if the system allows no thread, or only one or two."""
    ckptconv.convert(src, tmp_path / "wanted.pt", dtype=RULES)
    start = threading.Thread.start
    for most in (0, 1, 2):
        left = [most]

        def refuse(thread: threading.Thread, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(transfer, "_CAST_BLOCK", 10_000)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        ckptconv.convert(src, tmp_path / "dst.pt", dtype=RULES, force=True)
        assert (tmp_path / "dst.pt").read_bytes() == (tmp_path / "wanted.pt").read_bytes()


# Errors


def failing(original: Callable[..., Any], after: int, error: BaseException) -> Callable[..., Any]:
    """Return `original` with a change: in threads that cast, it raises `error` when it has been called more than
    `after` times.
    """
    lock, calls = threading.Lock(), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.startswith("ckptconv-cast"):
            with lock:
                calls[0] += 1
                if calls[0] > after:
                    raise error
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize(
    ("owner", "name", "error", "raised"),
    [
        (Source, "read_into", OSError(errno.EIO, "Input/output error"), ckptconv.CkptconvError),
        (Source, "read_into", ckptconv.InputChangedError("it became shorter"), ckptconv.InputChangedError),
        (os, "pwrite", OSError(errno.ENOSPC, "No space left on device"), ckptconv.OutputError),
        (CastBuffer, "cast", MemoryError("no"), MemoryError),
    ],
)
def test_an_error_in_a_thread(
    owner: Any,
    name: str,
    error: BaseException,
    raised: type[BaseException],
    after: int,
    src: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error while a thread reads, writes or casts reaches the caller. The old output stays, without a temporary file
    or a thread.
    """
    monkeypatch.setattr(transfer, "_CAST_BLOCK", 10_000)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), after, error))
    with untouched(target), pytest.raises(raised):
        ckptconv.convert(src, target, dtype=RULES, force=True)


def test_an_error_outside_of_the_threads(src: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error outside the threads stops them, even if most of their work is still to be done."""
    cast = transfer.CastThreads._cast
    begun = threading.Event()
    done: list[int] = []

    def slow(*args: Any) -> Any:
        begun.set()
        threading.Event().wait(0.002)
        done.append(1)
        return cast(*args)

    def fail(*_: object) -> None:
        begun.wait(30)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(transfer, "_CAST_BLOCK", 64)
    monkeypatch.setattr(transfer.CastThreads, "_cast", slow)
    monkeypatch.setattr(transfer.CastThreads, "finish", fail)
    with untouched(target), pytest.raises(ckptconv.OutputError, match="quota"):
        ckptconv.convert(src, target, dtype=RULES, force=True)
    assert len(done) < 5000  # of more than 30,000 blocks


def test_nothing_is_written_afterwards(src: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C while a second thread starts, the conversion waits until the first thread has finished its write.

    The file is closed next, so nothing is written to it after that.
    """
    start, block, close = threading.Thread.start, transfer.CastThreads._cast, os.close
    events: list[str] = []
    started: list[str] = []
    begun = threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread.name)
        if started.count("ckptconv-cast") == 2:
            begun.wait(30)
            raise KeyboardInterrupt

    def slow(*args: Any) -> Any:
        begun.set()
        threading.Event().wait(0.05)
        done = block(*args)
        events.append("written")
        return done

    def closed(fd: int) -> None:
        events.append("closed")
        close(fd)

    monkeypatch.setattr(transfer, "_CAST_BLOCK", 10_000)
    monkeypatch.setattr(transfer, "processors", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(transfer.CastThreads, "_cast", slow)
    monkeypatch.setattr(os, "close", closed)
    with untouched(target), pytest.raises(KeyboardInterrupt):
        ckptconv.convert(src, target, dtype=RULES, force=True)
    assert "written" in events
    assert "written" not in events[len(events) - events[::-1].index("closed") :]
    monkeypatch.undo()
    assert events.index("written") < len(events) - 1


def test_interrupted(src: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while threads cast raises KeyboardInterrupt in the caller. Only the old output is left."""
    cast = transfer.CastThreads._cast

    def interrupting(*args: Any) -> Any:
        if not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        return cast(*args)

    interrupted = threading.Event()
    monkeypatch.setattr(transfer, "_CAST_BLOCK", 1000)
    monkeypatch.setattr(transfer.CastThreads, "_cast", interrupting)
    with untouched(target), pytest.raises(KeyboardInterrupt):
        ckptconv.convert(src, target, dtype=RULES, force=True)


def test_a_wrong_checksum_of_the_source(src: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong checksum of a storage that several threads read is found from the checksums of its blocks."""
    raw = torch.load(src)["c"].numpy().tobytes()
    damaged = src.with_name("damaged.pt")
    shutil.copy(src, damaged)
    flip_bit(damaged, src.read_bytes().index(raw) + 300_001)
    monkeypatch.setattr(transfer, "_CAST_BLOCK", 10_000)
    with untouched(target), pytest.raises(ckptconv.MalformedError, match="checksum"):
        ckptconv.convert(damaged, target, dtype="bf16", force=True)


def test_threads_are_for_pieces_that_are_worth_them(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads cast only large pieces. Small tensors and tensors without a cast are written without them."""
    begun: list[int] = []
    begin = transfer.CastThreads.begin
    monkeypatch.setattr(
        transfer.CastThreads, "begin", lambda self, piece, at: begun.append(piece.length) or begin(self, piece, at)
    )
    ckptconv.convert(src, tmp_path / "dst.pt", dtype=RULES)
    assert sorted(begun) == sorted([2 * 50_000, 2 * 73_454, 2 * 77_777, 2 * 90_300])
    begun.clear()
    ckptconv.convert(src, tmp_path / "dst.safetensors", dtype="./c=fp32")
    assert begun == [4 * 77_777]


# Checksums of parts


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_is_zlibs_sum_of_both(first: bytes, second: bytes) -> None:
    """The combined checksum is that of the concatenation, also for empty parts."""
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1 << 20, (1 << 20) + 1, (1 << 22) - 3])
def test_combined_of_long_parts(length: int) -> None:
    """The checksums of several long parts can be combined one after the other."""
    part = bytes(range(256)) * (length // 256) + bytes(length % 256)
    total, at_once = 0, 0
    for _ in range(3):
        total = combined(total, zlib.crc32(part), length)
        at_once = zlib.crc32(part, at_once)
    assert total == at_once


def test_combined_of_huge_lengths() -> None:
    """The combined checksum is right for parts of many gigabytes, which are too large for memory."""
    crc32, length = zlib.crc32(bytes(1024)), 1024
    for _ in range(12):
        crc32, length = combined(crc32, crc32, length), 2 * length
    assert crc32 == zlib.crc32(bytes(length))
    again = zlib.crc32(bytes(1024))
    whole = [again]
    for doubling in range(30):
        whole.append(combined(whole[-1], whole[-1], 1024 << doubling))
    parts = combined(whole[29], combined(whole[28], whole[28], 1024 << 28), 1024 << 29)
    assert parts == whole[30]
