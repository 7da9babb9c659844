"""The system calls of this platform, and the quoting of commands for Windows. The module for Windows can be imported on
any system with stand-ins.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptconv.system import calls, filesystem, seeking

DATA = b"abc\r\n\x1adef\n" * 1000


@pytest.fixture(params=["the system's", "by seeking"])
def at(request: pytest.FixtureRequest) -> Any:
    """Return the module that reads and writes at an offset."""
    return calls if request.param == "the system's" else seeking


def test_bytes_at_an_offset(at: Any, tmp_path: Path) -> None:
    """Line ends and Ctrl-Z are read and written without translation. Nothing is read after the end of the file."""
    fd = calls.create(tmp_path / "a", 0o600)
    assert at.pwrite(fd, DATA, 7) == len(DATA)
    assert at.pwrite(fd, memoryview(b"1234567"), 0) == 7
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"1234567" + DATA
    fd = calls.open_to_read(tmp_path / "a")
    room = bytearray(5)
    assert (at.pread(fd, 4, 9), at.pread_into(fd, memoryview(room), 7), bytes(room)) == (DATA[2:6], 5, DATA[:5])
    assert at.pread(fd, 10, 7 + len(DATA)) == b"" and at.pread_into(fd, memoryview(room), 1 << 40) == 0
    os.close(fd)


def test_threads_that_read_one_file_by_seeking(tmp_path: Path) -> None:
    """Each thread gets the bytes at its own offset."""
    (tmp_path / "a").write_bytes(bytes(range(256)) * 64)
    fd = calls.open_to_read(tmp_path / "a")
    wrong: list[int] = []

    def read(first: int) -> None:
        wrong.extend(i for i in range(first, 16384, 97) if seeking.pread(fd, 1, i) != bytes([i % 256]))

    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    os.close(fd)
    assert wrong == []


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    """A new file replaces no other file, neither when it is created nor when it is published. An open file may be
    renamed.
    """
    fd = calls.create(tmp_path / "a", 0o600)
    with pytest.raises(FileExistsError):
        calls.create(tmp_path / "a", 0o600)
    (tmp_path / "b").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        calls.publish(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"theirs"
    assert calls.publish(tmp_path / "a", tmp_path / "c")
    assert calls.is_same_file(os.lstat(tmp_path / "c"), os.fstat(fd))
    assert not calls.is_same_file(os.lstat(tmp_path / "b"), os.fstat(fd))
    calls.sync(fd)
    calls.sync_folder(tmp_path)
    os.close(fd)


def test_an_open_file_can_be_renamed_and_deleted(tmp_path: Path) -> None:
    """An open file can be renamed and deleted. Its descriptor still reads the old bytes."""
    (tmp_path / "a").write_bytes(b"old")
    fd = calls.open_to_read(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    os.unlink(tmp_path / "b")
    assert calls.pread(fd, 9, 0) == b"old"
    os.close(fd)


def test_folders(tmp_path: Path) -> None:
    """A folder can replace an empty folder, but not one with files."""
    for name in ("new", "empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "a").write_bytes(b"")
    fd = calls.open_folder(tmp_path / "new")
    with pytest.raises(OSError, match=r"\S") as caught:
        calls.rename_folder(tmp_path / "new", tmp_path / "full")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES)
    calls.rename_folder(tmp_path / "new", tmp_path / "empty")
    assert calls.is_same_file(os.lstat(tmp_path / "empty"), os.fstat(fd))
    os.close(fd)
    assert sorted(os.listdir(tmp_path)) == ["empty", "full"]


@pytest.mark.skipif(not hasattr(os, "symlink") or sys.platform == "win32", reason="links need a right on Windows")
def test_a_link_is_followed_only_if_allowed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to("a")
    os.close(calls.open_to_read(tmp_path / "link"))
    with pytest.raises(OSError, match="symbolic links"):
        calls.open_to_read(tmp_path / "link", follow=False)


def test_space_and_limits(tmp_path: Path) -> None:
    soft, hard = calls.open_limits()
    assert calls.free_space(tmp_path) > 0 and 0 < soft <= hard


# macOS, on any system


class _Library:
    """A C library with the one call of macOS, which records its arguments."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def renamex_np(self, *given: Any) -> int:
        self.given.append(given)
        return 0


def test_renames_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """In sys/stdio.h, RENAME_SWAP is 2 and RENAME_EXCL is 4. Calls that only Linux has are not made."""
    library = _Library()
    monkeypatch.setattr(filesystem, "_libc", library)
    assert filesystem.rename_if_absent("a", "b") and filesystem.exchange("c", "d")
    assert library.given == [(b"a", b"b", 4), (b"c", b"d", 2)]
    assert not filesystem.fallocate(0, 1)
    filesystem.start_writeback(0, 0, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fcntl")
@pytest.mark.parametrize("has", [True, False])
def test_macos_flushes_the_disk_too(has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, F_FULLFSYNC flushes the disk, too. A filesystem without it gets fsync."""
    import fcntl

    done: list[Any] = []

    def control(fd: int, command: int) -> int:
        done.append(command)
        if not has:
            raise OSError(errno.ENOTSUP, "not supported")
        return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda fd: done.append("fsync"))
    calls.sync_folder(tmp_path)
    assert done == ([51] if has else [51, "fsync"])


# Commands that Windows prints


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module for Windows. On other systems, its system calls cannot be called."""
    if sys.platform != "win32":
        monkeypatch.setattr(sys, "platform", "win32")
        for name in ("_winapi", "msvcrt"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, "ckptconv.system.windows", raising=False)
    return importlib.import_module("ckptconv.system.windows")


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("a.pt", "a.pt"),
        ("C:\\a\\b.pt", "C:\\a\\b.pt"),
        ("--map", "--map"),
        ("", '""'),
        ("a b.pt", '"a b.pt"'),
        ("*weight*", '"*weight*"'),
        ("a&b|c<d>e^f(g)", '"a&b|c<d>e^f(g)"'),
        ("it's", '"it\'s"'),
        ("C:\\my models\\", '"C:\\my models/"'),
        ("模型.pt", "模型.pt"),
        ("a$b.pt", '"a`$b.pt"'),
        ("%PATH%", '"%PATH%"'),
        ("a`b'c", '"a``b\'c"'),
        ('say "x" & y', '"say `u{22}x`u{22} & y"'),
        ("“a”", '"`“a`”"'),
        ("a\nb", '"a`u{a}b"'),
    ],
)
def test_words_of_windows(word: str, typed: str, windows: ModuleType) -> None:
    """A word that cmd and PowerShell read in the same way is in double quotes. Other words have the syntax of
    PowerShell, and cmd runs no part of them.
    """
    assert windows.quoted(word) == typed
    line = windows.command_line(["ckptconv", "inspect", word])
    assert line.endswith(f"ckptconv inspect {typed}")
    assert line.startswith("in PowerShell: ") == any(c in word for c in '$%`"“\n')
    assert typed.count('"') in (0, 2)


def test_ascii_words_of_windows(windows: ModuleType) -> None:
    assert windows.quoted("é$", ascii_only=True) == '"`u{e9}`$"'


def test_identity_of_files_of_windows(windows: ModuleType) -> None:
    """Files are the same if their file numbers and their disk numbers are equal. A disk without a number equals any
    disk.
    """

    def status(inode: int, device: int) -> os.stat_result:
        return os.stat_result((0, inode, device, *[0] * 7))

    for other, is_same in (((5, 1), True), ((5, 0), True), ((5, 2), False), ((6, 1), False), ((6, 0), False)):
        assert windows.is_same_file(status(5, 1), status(*other)) is is_same
        assert windows.is_same_file(status(*other), status(5, 1)) is is_same


@pytest.mark.skipif(sys.platform != "win32", reason="the C library of Windows")
@pytest.mark.parametrize("word", ["a b", "it's", "C:\\my models\\", "a&b", "é ü", "*", "-x=1", ""])
def test_words_as_a_program_gets_them(word: str, windows: ModuleType) -> None:
    """A program gets the word that was quoted. A backslash at its end becomes a slash, which leads to the same
    folder.
    """
    program = f'"{sys.executable}" -c "import sys; print(ascii(sys.argv[1]))" {windows.quoted(word)}'
    done = subprocess.run(program, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout.strip() == ascii(word.replace("models\\", "models/"))


@pytest.mark.parametrize("name", [name for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)])
def test_the_main_thread_can_be_ended(name: str) -> None:
    """``end_main_thread`` runs the handler of SIGTERM."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        calls.end_main_thread()
        threading.Event().wait(0.1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert name in calls.ENDING


@pytest.mark.skipif(sys.platform != "win32", reason="prefixes of Windows")
def test_long_paths(tmp_path: Path) -> None:
    path = calls.usable(tmp_path / Path(*["folder" * 10] * 5))
    path.mkdir(parents=True)
    fd = calls.create(path / "a", 0o600)
    os.close(fd)
    assert (path / "a").exists() and len(str(path)) > 300
    assert calls.usable(Path("a")) == Path("a")
