"""The input file: what is refused before it is opened, and what happens when it changes under the reader."""

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
    """A file of ten bytes."""
    path = tmp_path / "m.pt"
    path.write_bytes(b"0123456789")
    return path


@pytest.fixture
def source(path: Path) -> Iterator[Source]:
    """That file, open."""
    with Source(path) as source:
        yield source


def test_reads_exactly_what_is_asked(source: Source) -> None:
    """Any range, up to the last byte; nothing of length 0."""
    assert source.size == 10
    assert (source.read(0, 10), source.read(8, 2), source.read(10, 0)) == (b"0123456789", b"89", b"")


def test_short_reads_are_continued(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give fewer bytes than were asked for."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 3), offset))
    assert source.read(1, 8) == b"12345678"


def test_a_window_reads_ahead_except_from_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short reads that follow each other are one read. Damage behind the bytes that are needed is no fault."""
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
def test_what_is_no_file_is_refused(here: Path, put: Callable[[Path], object], what: str) -> None:
    """Said as it is. Opening a FIFO for reading would wait for a writer; /dev/null is empty and endless at once; a
    socket cannot be opened at all.
    """
    put(Path("thing"))
    with pytest.raises(InputError, match=what):
        Source("thing")


def test_a_fifo_that_takes_the_files_place_is_refused_without_waiting(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the name and its opening; nothing stays open."""
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
    """Hub caches are links."""
    link = path.with_name("link.pt")
    link.symlink_to(path)
    with Source(link) as source:
        assert source.read(0, 3) == b"012"
        assert source.is_same_file(os.stat(path))
        assert not source.is_same_file(os.stat(path.parent))


@pytest.mark.parametrize("name", ["missing.pt", "no/such/folder.pt", "m.pt/x", "a" * 300, "loop"])
def test_what_is_not_there_is_an_input_error(path: Path, name: str) -> None:
    """No file, no folder, a file as a folder, a name that is too long, a link to itself."""
    path.with_name("loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be read: ") as caught:
        Source(path.parent / name)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_path_with_nul_is_an_input_error() -> None:
    """Python raises ValueError for it."""
    with pytest.raises(InputError, match="this path cannot exist"):
        Source("m\0.pt")


def test_a_file_without_permission_is_an_input_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root reads everything, so the refusal is played."""
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        Source(path)


def test_a_read_that_fails_is_an_input_error(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector: named with its place."""
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(InputError, match="at byte 4: cannot be read: Input/output error"):
        source.read(4, 2)


@pytest.mark.parametrize(("most", "expected"), [(100, [(100, 0)]), (50, [(100, 0), (10, 20), (5, 95)])])
def test_a_small_file_is_read_at_once(
    path: Path, most: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is asked once for all of it; where that fails, for each part, of which some may be readable."""
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
    """Cut while it is open: reading beyond the new end, and the check at the end, both say so."""
    os.truncate(path, size)
    with pytest.raises(InputChangedError, match="became shorter"):
        source.read(5, 5)
    with pytest.raises(InputChangedError, match="changed while it was read: size"):
        source.check_unchanged()


def test_an_untouched_file_is_unchanged(source: Source) -> None:
    """Reading changes nothing that is checked."""
    source.read(0, 10)
    source.check_unchanged()


def test_a_touched_file_is_changed(source: Source, path: Path) -> None:
    """The same size, another modification time: it may have been rewritten in place."""
    later = os.stat(path).st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    with pytest.raises(InputChangedError, match="mtime_ns"):
        source.check_unchanged()


def test_a_file_that_is_replaced_by_name_is_read_on(source: Source, path: Path) -> None:
    """The open file is still the old one, whole."""
    other = path.with_name("other")
    other.write_bytes(b"x")
    os.replace(other, path)
    assert source.read(0, 10) == b"0123456789"
    source.check_unchanged()


def test_closing_twice_is_harmless(path: Path) -> None:
    """The second time, the number may belong to another file."""
    source = Source(path)
    source.close()
    with path.open("rb") as other:
        source.close()
        assert other.read() == b"0123456789"


@pytest.fixture
def part(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readable]:
    """That file as one of more files than may be open."""
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
    """Somebody changes the file in place."""
    fd = os.open(path, os.O_RDWR)
    try:
        lock_exclusive(fd, path)
        yield
    finally:
        os.close(fd)


def test_a_part_is_open_only_while_it_is_read(
    part: Readable, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is locked then, and not in between. Where the current folder is another one by then does not matter."""
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
def test_a_part_that_is_another_file_by_now(part: Readable, path: Path, change: Callable[[Path], object]) -> None:
    """Each way to read it is an error, which says that nothing is damaged: it could not be read."""
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


def test_a_part_is_read_by_threads_at_once(part: Readable, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read has a descriptor of its own: one that ends takes none from another."""
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
    """It does not open its file again."""
    part.close()
    with pytest.raises(UnreadableError):
        part.read(0, 3)
