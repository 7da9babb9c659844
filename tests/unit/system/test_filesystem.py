"""System calls that Python lacks: each one does its work, or reports that the system does not offer it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptconv.system import calls, filesystem


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """Yield the descriptor of an empty file that is open for writing."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_fallocate_reserves(fd: int) -> None:
    """``fallocate`` fills a file with zeros up to the size. If the system does not offer it, the file is unchanged."""
    done = filesystem.fallocate(fd, 10_000)
    assert calls.pread(fd, 20_000, 0) == (bytes(10_000) if done else b"")


def test_fallocate_of_too_much_is_an_error(fd: int) -> None:
    """If the size exceeds any disk, ``fallocate`` raises an OSError with its number. False would mean that the system
    does not offer the call.
    """
    if filesystem.fallocate(fd, 1):
        with pytest.raises(OSError, match=r"space|large") as caught:
            filesystem.fallocate(fd, 1 << 60)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_start_writeback_never_fails(fd: int) -> None:
    """``start_writeback`` is only advice, so it never fails. fsync reports the errors."""
    calls.pwrite(fd, b"data", 0)
    filesystem.start_writeback(fd, 0, 4)
    filesystem.start_writeback(-1, 0, 4)
    assert calls.pread(fd, 10, 0) == b"data"


def test_rename_if_absent(tmp_path: Path) -> None:
    """A file gets a free name. If the name exists, an error is raised and nothing changes."""
    old, new = tmp_path / "öld", tmp_path / "new"
    old.write_text("old")
    done = filesystem.rename_if_absent(str(old), str(new))
    assert [path.name for path in tmp_path.iterdir()] == (["new"] if done else ["öld"])
    old.write_text("again")
    if done:
        with pytest.raises(FileExistsError):
            filesystem.rename_if_absent(str(old), str(new))
        assert (old.read_text(), new.read_text()) == ("again", "old")


def test_share_block(fd: int, tmp_path: Path) -> None:
    """A shared block has the bytes of the source. If the filesystem cannot share blocks, nothing is written."""
    (tmp_path / "src").write_bytes(b"x" * 8192)
    with (tmp_path / "src").open("rb") as src:
        done = filesystem.share_block(src.fileno(), fd, 4096)
    assert calls.pread(fd, 8192, 0) == (b"x" * 4096 if done else b"")
    assert not filesystem.share_block(-1, fd, 4096)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_not_offered_is_no_error(code: int) -> None:
    """A call that the system does not offer returns False, so that the caller can use another way."""
    ctypes.set_errno(code)
    assert filesystem._done(-1) is False


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failure_is_an_error(code: int) -> None:
    """A call that the system offers, but that fails, raises an OSError with its number."""
    ctypes.set_errno(code)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        filesystem._done(-1)
    assert caught.value.errno == code


def test_other_systems(fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other systems, no call changes anything. Calls with a result return False."""
    monkeypatch.setattr(filesystem, "_libc", None)
    (tmp_path / "old").touch()
    assert filesystem.fallocate(fd, 100) is False
    assert filesystem.rename_if_absent(str(tmp_path / "old"), str(tmp_path / "new")) is False
    filesystem.start_writeback(fd, 0, 100)
    assert os.fstat(fd).st_size == 0
    assert (tmp_path / "old").exists()
