"""Tests of checksums that threads compute during a copy. They are compared with the checksums that ranges contain."""

from __future__ import annotations

import threading
import time
import zlib
from pathlib import Path
from unittest import mock

import pytest

from ckptconv.byteranges import record_checks
from ckptconv.byteranges.record_checks import Sums
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Concat, Deferred, Literal, OutFile
from ckptconv.errors import InputChangedError, MalformedError, OutputError
from ckptconv.output import files as output_files

DATA = bytes(range(256)) * 20_000  # 5 MB


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return Source(path)


def span(source: Source, start: int, end: int, crc32: int | None = None) -> ByteRange:
    return ByteRange(source, start, end - start, crc32)


def test_checksums_equal_those_of_zlib(source: Source) -> None:
    """The results are the checksums of zlib in the order of the spans, for large, small and empty ranges."""
    ends = [0, 1, 7, 5_000_000, 3_000_000, 12, 4_999_999, 2]
    with Sums([span(source, 0, end) for end in ends]) as sums:
        assert list(sums.results()) == [zlib.crc32(DATA[:end]) for end in ends]
        assert list(sums.results()) == [zlib.crc32(DATA[:end]) for end in ends]


@pytest.mark.parametrize("ends", [[], [10, 1000]])
def test_no_thread_is_started_for_small_ranges(
    ends: list[int], source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is started if there are no ranges or only small ones, because this is faster."""
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=AssertionError("a thread was started")))
    with Sums([span(source, 0, end) for end in ends]) as sums:
        assert list(sums.results()) == [zlib.crc32(DATA[:end]) for end in ends]


def test_damaged_range_is_reported(source: Source) -> None:
    """The error for a damaged range contains its position and the expected checksum. The threads end after the
    error.
    """
    wrong = zlib.crc32(DATA[10:20]) ^ 1
    spans = [span(source, 0, 5_000_000), span(source, 10, 20, wrong), span(source, 0, 3)]
    before = threading.active_count()
    with Sums(spans) as sums, pytest.raises(MalformedError, match=rf"byte 10: .*damaged.*{wrong:08x}"):
        sums.results()
    assert threading.active_count() == before


def test_bytes_in_several_ranges_are_read_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that are parts of a larger range with a checksum are read once together with it. Damage of the larger
    range is reported.
    """
    nbytes: list[int] = []
    original = Source.read_into

    def counting(self: Source, offset: int, buffer: memoryview) -> None:
        nbytes.append(len(buffer))
        original(self, offset, buffer)

    monkeypatch.setattr(Source, "read_into", counting)
    bounds = [(10, 3_000_000), (3_000_000, 3_000_000), (3_000_000, 3_000_001), (2_999_999, 3_999_999), (20, 30)]
    parts = [span(source, *each) for each in bounds]
    whole = span(source, 5, 4_000_000, zlib.crc32(DATA[5:4_000_000]))
    both = Concat((parts[3], parts[0]), None, parts[3].length + parts[0].length)
    with Sums([both, *parts, whole]) as sums:
        found = list(sums.results())
    assert found[0] == zlib.crc32(DATA[10:3_000_000], zlib.crc32(DATA[2_999_999:3_999_999]))
    assert found[1:-1] == [zlib.crc32(DATA[start:end]) for start, end in bounds]
    assert (found[-1], sum(nbytes)) == (whole.crc32, whole.length)
    whole = span(source, 5, 4_000_000, 3)
    with Sums([*parts, whole]) as sums, pytest.raises(MalformedError, match="damaged"):
        sums.results()


def test_read_error_is_raised_by_results(source: Source) -> None:
    """If the file became shorter, the error is raised by ``results``."""
    with Sums([span(source, 0, len(DATA) + 5)]) as sums, pytest.raises(InputChangedError, match="shorter"):
        sums.results()


def test_end_of_context_stops_threads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the context ends, each thread stops after its current chunk. Therefore Ctrl-C does not wait for
    gigabytes.
    """
    began = threading.Event()
    original = Source.read_into

    def slow(self: Source, offset: int, buffer: memoryview) -> None:
        began.set()
        time.sleep(0.01)
        original(self, offset, buffer)

    monkeypatch.setattr(Source, "read_into", slow)
    monkeypatch.setattr(record_checks, "_CHUNK", 1000)
    before = threading.active_count()
    with Sums([span(source, 0, len(DATA))] * 20) as sums:
        began.wait()
    assert threading.active_count() == before
    assert not sums._found


def test_damaged_range_is_not_written(source: Source, tmp_path: Path) -> None:
    """If a copied range has a wrong checksum, the old file remains and no temporary file is left."""
    target = tmp_path / "target"
    target.write_bytes(b"old")
    whole = span(source, 0, len(DATA), zlib.crc32(DATA) ^ 1)
    with pytest.raises(MalformedError, match="damaged"):
        output_files.write(OutFile(target, (whole,), len(DATA), (whole,)), source, replace=True, verify=False)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("verify", [False, True])
def test_late_pieces_contain_checksums(source: Source, tmp_path: Path, verify: bool) -> None:
    """Pieces that contain checksums are written at their positions before and after the data. With `verify`, they are
    read back like the rest.
    """
    first, second = span(source, 0, 1000), span(source, 5, 4_000_000)
    front = Deferred(8, lambda sums: b"".join(n.to_bytes(4, "little") for n in sums))
    back = Deferred(4, lambda sums: sums[1].to_bytes(4, "big"))
    target = tmp_path / "target"
    size = 8 + 1000 + 3 + 3_999_995 + 4
    written: list[int] = []
    file = OutFile(target, (front, first, Literal(b"and"), second, back), size, (first, second))
    output_files.write(file, source, replace=False, verify=verify, progress=written.append)
    one, two = zlib.crc32(DATA[:1000]), zlib.crc32(DATA[5:4_000_000])
    expected = one.to_bytes(4, "little") + two.to_bytes(4, "little") + DATA[:1000] + b"and" + DATA[5:4_000_000]
    assert target.read_bytes() == expected + two.to_bytes(4, "big")
    assert sum(written) == size


def test_a_late_piece_of_another_length_is_a_bug(source: Source, tmp_path: Path) -> None:
    """A late piece with another length than planned is an internal error, because it would overwrite the bytes after
    it.
    """
    file = OutFile(tmp_path / "target", (Deferred(2, lambda sums: b"abc"), Literal(b"xyz")), 5)
    with pytest.raises(OutputError, match="bug"):
        output_files.write(file, source, replace=False, verify=False)
    assert not (tmp_path / "target").exists()


def test_a_system_that_starts_no_threads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system cannot start a thread, ``results`` computes the checksums itself."""
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    with Sums([span(source, 0, 5), span(source, 3, 4_000_000)]) as sums:
        assert list(sums.results()) == [zlib.crc32(DATA[:5]), zlib.crc32(DATA[3:4_000_000])]
    with Sums([span(source, 0, 5, 1)]) as sums, pytest.raises(MalformedError):
        sums.results()
