"""Writes that bypass the page cache: the output has the same bytes, and anything that cannot be written this way goes
through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv import convert
from ckptconv.errors import InputChangedError, InputError, OutputError
from ckptconv.output import direct_writes
from ckptconv.output.direct_writes import WINDOW
from ckptconv.system import filesystem
from tests.support.command import Command

BYTES = 3 * WINDOW // 2  # bytes of the tensor: one window and a half

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no O_DIRECT")


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that consists mostly of one tensor."""
    path = tmp_path_factory.mktemp("direct") / "src.pt"
    torch.save({"w": torch.arange(BYTES // 4, dtype=torch.int32)}, path)
    return path


@pytest.fixture
def direct_fds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat every file as large, and return a list to which the descriptors opened for direct writes are added."""
    fds: list[int] = []
    reopened = direct_writes._reopened

    def noted(fd: int) -> int:
        fds.append(reopened(fd))
        return fds[-1]

    monkeypatch.setattr(direct_writes, "_LEAST", 0)
    monkeypatch.setattr(direct_writes, "available_memory", lambda: 0)
    monkeypatch.setattr(direct_writes, "_reopened", noted)
    return fds


def on_direct(fds: list[int], call: Callable[..., Any], real: Callable[..., Any] = os.pwrite) -> Callable[..., Any]:
    """Return a replacement for ``os.pwrite`` that uses `call` for the descriptors `fds` and `real` for all others."""

    def pwrite(fd: int, data: Any, at: int) -> Any:
        return (call if fd in fds else real)(fd, data, at)

    return pwrite


def failing(code: int) -> Callable[..., Any]:
    """Return a replacement for a system call that fails with the error `code`."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def assert_right(src: Path, dst: Path) -> None:
    there, wanted = torch.load(dst, weights_only=True, map_location="cpu"), torch.load(src, weights_only=True)
    assert torch.equal(there["w"], wanted["w"])
    assert os.listdir(dst.parent) == [dst.name]


@pytest.mark.parametrize("old", [False, True])
def test_the_same_bytes(src: Path, tmp_path: Path, direct_fds: list[int], old: bool) -> None:
    """A direct write gives the right tensor, also in place of an old file, and the report contains ``direct``."""
    if old:
        (tmp_path / "dst.pt").write_bytes(b"old")
    report = convert(src, tmp_path / "dst.pt", map_location="cuda:0", verify=True, force=old)
    assert report.direct
    assert report.as_dict()["direct"] is True
    assert len(direct_fds) == 2  # one of them is a probe
    assert_right(src, tmp_path / "dst.pt")


def test_small_files_are_not_written_directly(src: Path, tmp_path: Path, command: Command) -> None:
    """A file that is small in comparison with the memory is not written directly."""
    assert command.json("convert", src, tmp_path / "dst.pt", "--to", "cuda:0")["direct"] is False


def test_casts_are_not_written_directly(src: Path, tmp_path: Path, direct_fds: list[int]) -> None:
    """Tensors that are cast are not written directly."""
    torch.save({"w": torch.randn(1000)}, tmp_path / "float.pt")
    assert not convert(tmp_path / "float.pt", tmp_path / "dst.pt", dtype="bf16").direct
    assert not direct_fds


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_fallback_if_the_file_cannot_be_opened(
    src: Path, tmp_path: Path, direct_fds: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the output cannot be opened for direct writes, at the probe or later, it is written through the page cache."""

    def refuse(_: int) -> int:
        raise OSError(code, os.strerror(code))

    reopened = direct_writes._reopened
    monkeypatch.setattr(direct_writes, "_reopened", lambda fd: refuse(fd) if direct_fds else reopened(fd))
    convert(src, tmp_path / "dst.pt", map_location="cuda:0")
    assert_right(src, tmp_path / "dst.pt")
    monkeypatch.setattr(direct_writes, "_reopened", refuse)
    assert not convert(src, tmp_path / "dst.pt", map_location="cuda:0", force=True).direct


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_fallback_if_a_write_is_refused(
    src: Path, tmp_path: Path, direct_fds: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a direct write is refused, the bytes are written through the page cache."""

    monkeypatch.setattr(os, "pwrite", on_direct(direct_fds, failing(code)))
    convert(src, tmp_path / "dst.pt", map_location="cuda:0")
    assert_right(src, tmp_path / "dst.pt")


def test_from_another_filesystem(
    src: Path, tmp_path: Path, direct_fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel cannot copy between the files, complete blocks are still written directly."""
    lengths: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        lengths.append(len(data))
        return real(fd, data, at)

    monkeypatch.setattr(os, "copy_file_range", failing(errno.EXDEV))
    monkeypatch.setattr(os, "pwrite", on_direct(direct_fds, pwrite))
    convert(src, tmp_path / "dst.pt", map_location="cuda:0")
    assert lengths == [WINDOW]
    assert_right(src, tmp_path / "dst.pt")


@pytest.mark.parametrize("code", [errno.ENODEV, errno.EMFILE, errno.ENOMEM])
def test_fallback_if_the_source_cannot_be_mapped(
    src: Path, tmp_path: Path, direct_fds: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the source cannot be mapped, because of its filesystem or a limit, it is read."""

    monkeypatch.setattr(mmap, "mmap", failing(code))
    convert(src, tmp_path / "dst.pt", map_location="cuda:0")
    monkeypatch.undo()
    assert_right(src, tmp_path / "dst.pt")


def test_short_writes(src: Path, tmp_path: Path, direct_fds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short write, the remaining bytes are written too."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", on_direct(direct_fds, lambda fd, data, at: real(fd, data[:1_000_448], at)))
    convert(src, tmp_path / "dst.pt", map_location="cuda:0")
    assert_right(src, tmp_path / "dst.pt")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failing_write(
    src: Path, tmp_path: Path, direct_fds: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a write fails, the old output stays, and no other file is left."""
    (tmp_path / "dst.pt").write_bytes(b"old")

    monkeypatch.setattr(os, "pwrite", on_direct(direct_fds, failing(code)))
    with pytest.raises(OutputError, match=os.strerror(code)):
        convert(src, tmp_path / "dst.pt", map_location="cuda:0", force=True)
    assert (tmp_path / "dst.pt").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["dst.pt"]


def test_an_input_that_becomes_shorter(
    src: Path, tmp_path: Path, direct_fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that is truncated before or after it is mapped gives an error, not a signal."""
    real = os.pwrite
    for before in (True, False):
        shrinking = tmp_path / "src.pt"
        shrinking.write_bytes(src.read_bytes())

        def fill(fd: int, data: Any, at: int, shrinking: Path = shrinking) -> int:
            os.truncate(shrinking, WINDOW // 2)
            return real(fd, data, at)

        if before:
            monkeypatch.setattr(filesystem, "fallocate", lambda *_: os.truncate(shrinking, WINDOW // 2) or True)  # noqa: B023
        else:
            monkeypatch.setattr(os, "pwrite", on_direct(direct_fds, fill))
        with pytest.raises((InputChangedError, InputError)):
            convert(shrinking, tmp_path / "dst.pt", map_location="cuda:0")
        monkeypatch.setattr(filesystem, "fallocate", lambda *_: False)
        assert os.listdir(tmp_path) == ["src.pt"]


def test_no_threads(src: Path, tmp_path: Path, direct_fds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without threads, the windows are written one after the other."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert convert(src, tmp_path / "dst.pt", map_location="cuda:0").direct
    assert_right(src, tmp_path / "dst.pt")


def test_shared_blocks_are_better(
    src: Path, tmp_path: Path, direct_fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the filesystem shares blocks, nothing is written directly."""
    monkeypatch.setattr(filesystem, "share_block", lambda *_: True)
    assert not convert(src, tmp_path / "dst.pt", map_location="cuda:0").direct


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        ({"/proc/meminfo": "MemFree: 1 kB\nMemAvailable:   2048 kB\n"}, 2 << 20),
        (
            {
                "/proc/meminfo": "MemAvailable: 2048 kB\n",
                "/proc/self/cgroup": "0::/a\n",
                "/sys/fs/cgroup/a/memory.max": "max\n",
                "/sys/fs/cgroup/memory.max": "1000000\n",
            },
            1_000_000,
        ),
        (
            {
                "/proc/meminfo": "MemAvailable: 2048 kB\n",
                "/proc/self/cgroup": "4:cpu,memory:/b\n3:cpuset:/\n0::/\n",
                "/sys/fs/cgroup/memory/b/memory.limit_in_bytes": "500\n",
            },
            500,
        ),
    ],
)
def test_available_memory(files: dict[str, str], available: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The available memory is the smallest limit of the system and of the control groups, in both versions. Without any
    information, it is unlimited.
    """

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert direct_writes.available_memory() == (available or direct_writes.sys.maxsize)
