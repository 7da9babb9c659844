"""Checksums beside the copy: computed in threads, checked where a range says what they should be."""

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


def test_sums_are_zlibs_in_the_order_of_the_spans(source: Source) -> None:
    """Large and small and empty ranges, more of them than threads."""
    ends = [0, 1, 7, 5_000_000, 3_000_000, 12, 4_999_999, 2]
    with Sums([span(source, 0, end) for end in ends]) as sums:
        assert list(sums.results()) == [zlib.crc32(DATA[:end]) for end in ends]
        assert list(sums.results()) == [zlib.crc32(DATA[:end]) for end in ends]


@pytest.mark.parametrize("ends", [[], [10, 1000]])
def test_next_to_nothing_to_sum_starts_no_thread(
    ends: list[int], source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that knows its checksums pays nothing, and one of a small file has them sooner without."""
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=AssertionError("a thread was started")))
    with Sums([span(source, 0, end) for end in ends]) as sums:
        assert list(sums.results()) == [zlib.crc32(DATA[:end]) for end in ends]


def test_a_range_that_is_damaged(source: Source) -> None:
    """The error says where, what was expected and what was found, and the threads are gone."""
    wrong = zlib.crc32(DATA[10:20]) ^ 1
    spans = [span(source, 0, 5_000_000), span(source, 10, 20, wrong), span(source, 0, 3)]
    before = threading.active_count()
    with Sums(spans) as sums, pytest.raises(MalformedError, match=rf"byte 10: .*damaged.*{wrong:08x}"):
        sums.results()
    assert threading.active_count() == before


def test_bytes_in_several_ranges_are_read_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts, and all of what they are parts of, which has the checksum, get theirs from one reading."""
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


def test_an_error_of_reading_reaches_who_asks(source: Source) -> None:
    """A file that became shorter is said to have."""
    with Sums([span(source, 0, len(DATA) + 5)]) as sums, pytest.raises(InputChangedError, match="shorter"):
        sums.results()


def test_leaving_ends_the_threads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C does not wait for gigabytes: a thread stops at its next megabyte."""
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


def test_what_is_damaged_is_no_output(source: Source, tmp_path: Path) -> None:
    """A wrong checksum of a range that is copied leaves the old file and no temporary."""
    target = tmp_path / "target"
    target.write_bytes(b"old")
    whole = span(source, 0, len(DATA), zlib.crc32(DATA) ^ 1)
    with pytest.raises(MalformedError, match="damaged"):
        output_files.write(OutFile(target, (whole,), len(DATA), (whole,)), source, replace=True, verify=False)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("verify", [False, True])
def test_late_pieces_get_the_sums(source: Source, tmp_path: Path, verify: bool) -> None:
    """They stand where the plan has them, before and behind the data, and are read back like the rest."""
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
    """It would overwrite what follows it."""
    file = OutFile(tmp_path / "target", (Deferred(2, lambda sums: b"abc"), Literal(b"xyz")), 5)
    with pytest.raises(OutputError, match="bug"):
        output_files.write(file, source, replace=False, verify=False)
    assert not (tmp_path / "target").exists()


def test_a_system_that_gives_no_threads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the sums computes them."""
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    with Sums([span(source, 0, 5), span(source, 3, 4_000_000)]) as sums:
        assert list(sums.results()) == [zlib.crc32(DATA[:5]), zlib.crc32(DATA[3:4_000_000])]
    with Sums([span(source, 0, 5, 1)]) as sums, pytest.raises(MalformedError):
        sums.results()
