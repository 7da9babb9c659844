"""The calls that Python lacks: each does what it says here, or says that it cannot;
elsewhere than on Linux none ever does.
"""

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
    """An empty file, open for writing."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_fallocate_reserves(fd: int) -> None:
    """The file has its size afterwards, in zeros, or it is as it was."""
    done = filesystem.fallocate(fd, 10_000)
    assert calls.pread(fd, 20_000, 0) == (bytes(10_000) if done else b"")


def test_fallocate_says_what_is_too_much(fd: int) -> None:
    """More than any disk has is an OSError with its number, not a False that means "not offered here"."""
    if filesystem.fallocate(fd, 1):
        with pytest.raises(OSError, match=r"space|large") as caught:
            filesystem.fallocate(fd, 1 << 60)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_start_writeback_never_fails(fd: int) -> None:
    """It is advice: what goes wrong with it, fsync tells."""
    calls.pwrite(fd, b"data", 0)
    filesystem.start_writeback(fd, 0, 4)
    filesystem.start_writeback(-1, 0, 4)
    assert calls.pread(fd, 10, 0) == b"data"


def test_rename_if_absent(tmp_path: Path) -> None:
    """A free name is taken, a name that is taken is an error that changes nothing."""
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
    """A shared block has the bytes of the source; where the filesystem cannot share, nothing is written."""
    (tmp_path / "src").write_bytes(b"x" * 8192)
    with (tmp_path / "src").open("rb") as src:
        done = filesystem.share_block(src.fileno(), fd, 4096)
    assert calls.pread(fd, 8192, 0) == (b"x" * 4096 if done else b"")
    assert not filesystem.share_block(-1, fd, 4096)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_not_offered_is_no_error(code: int) -> None:
    """What the system does not know is a False, so that the caller goes another way."""
    ctypes.set_errno(code)
    assert filesystem._done(-1) is False


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failure_is_an_error(code: int) -> None:
    """What the system knows and could not do is an OSError with its number."""
    ctypes.set_errno(code)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        filesystem._done(-1)
    assert caught.value.errno == code


def test_elsewhere(fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other systems every call says that it cannot, and does nothing."""
    monkeypatch.setattr(filesystem, "_libc", None)
    (tmp_path / "old").touch()
    assert filesystem.fallocate(fd, 100) is False
    assert filesystem.rename_if_absent(str(tmp_path / "old"), str(tmp_path / "new")) is False
    filesystem.start_writeback(fd, 0, 100)
    assert os.fstat(fd).st_size == 0
    assert (tmp_path / "old").exists()
