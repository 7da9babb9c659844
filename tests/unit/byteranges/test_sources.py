"""Tests of the input file: files that are refused before they are opened, and files that change while they are read."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from ckptconv.byteranges import reading
from ckptconv.byteranges.fault_sink import CollectingSink
from ckptconv.byteranges.sources import Readable, SliceSource, Source, lock_exclusive, open_part
from ckptconv.errors import InputChangedError, InputError, RefusedError, UnreadableError
from tests.support.no_files import NO_FILES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file of ten bytes."""
    path = tmp_path / "m.pt"
    path.write_bytes(b"0123456789")
    return path


@pytest.fixture
def source(path: Path) -> Iterator[Source]:
    """Yield the file at `path` as an open source."""
    with Source(path) as source:
        yield source


def test_read_returns_requested_range(source: Source) -> None:
    """A read returns exactly the requested range, up to the last byte. A range of length 0 is empty."""
    assert source.size == 10
    assert (source.read(0, 10), source.read(8, 2), source.read(10, 0)) == (b"0123456789", b"89", b"")


def test_short_reads_are_continued(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read continues if the system returns fewer bytes than requested."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 3), offset))
    assert source.read(1, 8) == b"12345678"


def test_window_reads_ahead_despite_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive short reads are served by one read ahead. Damage that the read ahead finds after the requested bytes
    is not an error.
    """
    content = bytes(i % 251 for i in range(100_000))
    (tmp_path / "m.pt").write_bytes(content)
    reads, faults, pread = [0], CollectingSink(), os.pread

    def damaged(fd: int, length: int, offset: int) -> bytes:
        reads[0] += 1
        if offset + length > 5_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, offset)

    with Source(tmp_path / "m.pt", faults) as source:
        monkeypatch.setattr(os, "pread", damaged)
        for kind in (source, SliceSource(source, 100, 90_000)):
            reads[0], start = 0, 100 if isinstance(kind, SliceSource) else 0
            window = reading.Window(kind)
            assert all(window.read(at, 10) == content[start + at : start + at + 10] for at in range(0, 4_000, 20))
            assert reads == [1]
            assert window.read(4_800, 100) == content[start + 4_800 : start + 4_900]
            assert not faults.not_read
            with pytest.raises(UnreadableError):
                window.read(4_990, 120)
            faults.not_read.clear()


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("put", "what"),
    [
        (NO_FILES["folder"], "a folder and not a file"),
        (NO_FILES["FIFO"], "a FIFO and not a file"),
        (NO_FILES["link to a device"], "a device and not a file"),
        (bind_socket, "a socket and not a file"),
    ],
    ids=["folder", "FIFO", "device", "socket"],
)
def test_other_kinds_of_files_are_refused(here: Path, put: Callable[[Path], object], what: str) -> None:
    """A folder, a FIFO, a device and a socket are refused with their kind. Opening a FIFO for reading would wait for a
    writer.
    """
    put(Path("thing"))
    with pytest.raises(InputError, match=what):
        Source("thing")


def test_a_fifo_that_replaces_the_file_is_refused_without_waiting(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO that replaces the file before it is opened is refused without waiting. The descriptor is closed."""
    os.mkfifo(tmp_path / "fifo")
    regular = os.stat(path)
    free = os.open(path, os.O_RDONLY)
    os.close(free)
    monkeypatch.setattr(os, "stat", lambda name: regular)
    with pytest.raises(InputError, match="a FIFO and not a file"):
        Source(tmp_path / "fifo")
    again = os.open(path, os.O_RDONLY)
    os.close(again)
    assert again == free


def test_a_link_to_a_file_is_that_file(path: Path) -> None:
    """A link to a file is read as that file, because the caches of the Hub consist of links."""
    link = path.with_name("link.pt")
    link.symlink_to(path)
    with Source(link) as source:
        assert source.read(0, 3) == b"012"
        assert source.is_same_file(os.stat(path))
        assert not source.is_same_file(os.stat(path.parent))


@pytest.mark.parametrize("name", ["missing.pt", "no/such/folder.pt", "m.pt/x", "a" * 300, "loop"])
def test_missing_file_is_an_input_error(path: Path, name: str) -> None:
    """A missing file or folder, a file used as a folder, a name that is too long, and a link to itself are input
    errors.
    """
    path.with_name("loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be read: ") as caught:
        Source(path.parent / name)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_path_with_nul_is_an_input_error() -> None:
    """A path with NUL is an input error, although Python raises ValueError."""
    with pytest.raises(InputError, match="this path cannot exist"):
        Source("m\0.pt")


def test_a_file_without_permission_is_an_input_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without read permission is an input error. The error is simulated, because root can read every file."""
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        Source(path)


def test_a_read_that_fails_is_an_input_error(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a bad sector contains the position."""
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(InputError, match="at byte 4: cannot be read: Input/output error"):
        source.read(4, 2)


@pytest.mark.parametrize(("most", "expected"), [(100, [(100, 0)]), (50, [(100, 0), (10, 20), (5, 95)])])
def test_a_small_file_is_read_at_once(
    path: Path, most: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is read completely with one call. If that call fails, each part is read separately, because some
    parts may be readable.
    """
    path.write_bytes(bytes(range(100)))
    real, asked = os.pread, []

    def pread(fd: int, length: int, offset: int) -> bytes:
        asked.append((length, offset))
        if length > most:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    with Source(path) as source:
        assert (source.read(20, 10), source.read(95, 5)) == (bytes(range(20, 30)), bytes(range(95, 100)))
    assert asked == expected


@pytest.mark.parametrize("size", [0, 9])
def test_a_file_that_became_shorter_is_an_input_changed_error(source: Source, path: Path, size: int) -> None:
    """If the file is truncated while it is open, a read beyond the new end and the final check both report it."""
    os.truncate(path, size)
    with pytest.raises(InputChangedError, match="became shorter"):
        source.read(5, 5)
    with pytest.raises(InputChangedError, match="changed while it was read: size"):
        source.check_unchanged()


def test_an_untouched_file_is_unchanged(source: Source) -> None:
    """Reading does not change the properties that the final check compares."""
    source.read(0, 10)
    source.check_unchanged()


def test_a_touched_file_is_changed(source: Source, path: Path) -> None:
    """A file with another modification time has changed, also if its size is the same. It may have been rewritten in
    place.
    """
    later = os.stat(path).st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    with pytest.raises(InputChangedError, match="mtime_ns"):
        source.check_unchanged()


def test_replaced_file_is_still_read(source: Source, path: Path) -> None:
    """If another file takes the name, the open file is still the complete old one."""
    other = path.with_name("other")
    other.write_bytes(b"x")
    os.replace(other, path)
    assert source.read(0, 10) == b"0123456789"
    source.check_unchanged()


def test_closing_twice_is_harmless(path: Path) -> None:
    """Closing a source twice does not close another file whose descriptor has the same number."""
    source = Source(path)
    source.close()
    with path.open("rb") as other:
        source.close()
        assert other.read() == b"0123456789"


@pytest.fixture
def part(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readable]:
    """Yield the file at `path` as a part, as if more files than allowed were open."""
    resource = pytest.importorskip("resource")
    with monkeypatch.context() as limited:
        limited.setattr(resource, "getrlimit", lambda _: (2, 2))
        part = open_part(path)
    with part:
        yield part


def rewrite(path: Path) -> None:
    path.write_bytes(b"9876543210")
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    stamp = path.stat().st_mtime_ns
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"9876543210")
    os.utime(path, ns=(stamp, stamp))


def put_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Lock the file at `path` as a process that changes it in place does."""
    fd = os.open(path, os.O_RDWR)
    try:
        lock_exclusive(fd, path)
        yield
    finally:
        os.close(fd)


def test_a_part_is_open_only_while_it_is_read(
    part: Readable, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is open and locked only while it is read. A change of the current folder does not matter."""
    monkeypatch.chdir(tmp_path)
    pread, refused = os.pread, []

    def read(fd: int, length: int, offset: int) -> bytes:
        with pytest.raises(RefusedError), changing(path):
            pass
        refused.append(fd)
        return pread(fd, length, offset)

    with changing(path):
        assert part.fd == -1
    monkeypatch.setattr(os, "pread", read)
    assert part.read(2, 3) == b"234"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(refused[0])
    with changing(path):
        pass
    part.check_unchanged()


@pytest.mark.parametrize("change", [rewrite, replace, Path.unlink, put_a_fifo, changing])
def test_a_shard_that_was_replaced_before_it_is_read(
    part: Readable, path: Path, change: Callable[[Path], object]
) -> None:
    """If the file of a part was replaced, removed or changed, or is being changed, every way to read it raises
    UnreadableError, and no bytes are returned.
    """
    done = change(path)
    with done if change is changing else contextlib.nullcontext():  # type: ignore[attr-defined]
        buffer = bytearray(3)
        for use in (lambda: part.read(0, 3), lambda: part.read_into(0, memoryview(buffer)), part.check_unchanged):
            with pytest.raises(
                UnreadableError, match=r"changed while it was read|another process is changing"
            ) as caught:
                use()
            assert str(path) in str(caught.value)
        assert buffer == bytes(3)


def test_part_is_read_by_two_threads(part: Readable, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads can read a part at the same time, because each read has its own descriptor."""
    pread, both = os.pread, threading.Barrier(2)
    fds: list[int] = []

    def read(fd: int, length: int, offset: int) -> bytes:
        fds.append(fd)
        both.wait(20)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", read)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda at=at: found.append(part.read(at, 2))) for at in (0, 4)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [b"01", b"45"]
    assert len(set(fds)) == 2


def test_a_part_that_is_closed_is_not_read(part: Readable) -> None:
    """A closed part does not open its file again."""
    part.close()
    with pytest.raises(UnreadableError):
        part.read(0, 3)
