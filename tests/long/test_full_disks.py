"""Full disks: real disks of every size from too small to just large enough, and disks with less space than they
report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest
import torch

from ckptconv import convert
from ckptconv.conversion.convert import run
from ckptconv.conversion.targets import find_request
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits
from ckptconv.errors import OutputError
from tests.support.injection import OLD, Content, content_of, put
from tests.support.mounts import mounted
from tests.support.waiting import wait_for

PAGE = 4096
SIZES = 20
OLD_SET: Content = {"model-00001-of-00001.safetensors": b"old", "model.safetensors.index.json": b"{}"}
TO_SHARDS = ("--format", "safetensors", "--max-shard-size", "70KB")
TO_CPU = Edits(to_devices("cpu"))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def disk_of(folder: Path, size: int, *options: str) -> AbstractContextManager[Path]:
    """Mount a disk of `size` bytes in memory in `folder`. `options` are options of ``mount``."""
    return mounted(folder / "disk", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs")


def pages(content: Content) -> int:
    """Return the number of pages that a disk in memory needs for `content`."""
    files = content.values() if isinstance(content, dict) else [content or b""]
    return sum(-(-len(data) // PAGE) for data in files)


def sizes(needed: int) -> list[int]:
    """Return twenty numbers of free pages from 0 to `needed`, including 1 and `needed` - 1."""
    between = {round(needed * i / (SIZES - 3)) for i in range(1, SIZES - 3)}
    found = sorted({0, 1, needed - 1, needed, *between})
    assert len(found) == SIZES
    return found


def command(src: Path, target: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "ckptconv", "convert", "-q", "-f", str(src), str(target), *flags]


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 300 KB in tensors of 30 KB."""
    path = tmp_path_factory.mktemp("src") / "src.pt"
    torch.save({f"w{i}": torch.randn(7500) for i in range(10)}, path)
    return path


def check(
    done: subprocess.CompletedProcess[str], disk: Path, name: str, old: Content, new: Content, *, fits: bool
) -> None:
    """Fail unless `disk` contains only the new output if it `fits`, and otherwise the old output with an error in one
    line.
    """
    assert os.listdir(disk) == [name]
    assert content_of(disk / name) == (new if fits else old)
    assert (done.returncode, done.stderr.count("ckptconv: ")) == ((0, 0) if fits else (1, 1)), done


#: Simulates a filesystem that reserves space which it does not have: strace lets ``fallocate`` succeed without an
#: effect.
LIES = ("strace", "-f", "-o", "/dev/null", "-e", "trace=fallocate", "-e", "inject=fallocate:retval=0")
#: The wrapper of the command, its flags, the name of the output, the old output, and the error if the disk is too
#: small.
DISKS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, Content, str]] = {
    "to a file": ((), ("--to", "cpu"), "dst.pt", OLD, "not enough free space"),
    "verified": ((), ("--to", "cuda:1", "--verify"), "dst.pt", OLD, "not enough free space"),
    "compacted": ((), ("--compact",), "dst.pt", OLD, "not enough free space"),
    "full in the midst of writing": (LIES, ("--to", "cpu"), "dst.pt", OLD, "No space left"),
    "full in the midst of a cast": (LIES, ("--dtype", "bf16"), "dst.pt", OLD, "No space left"),
    "to shards": ((), (*TO_SHARDS, "-j", "1"), "dst", OLD_SET, ""),
    "to shards, in threads": ((), (*TO_SHARDS, "-j", "3"), "dst", OLD_SET, ""),
}


@pytest.mark.parametrize("case", DISKS)
def test_every_size_of_a_disk(src: Path, tmp_path: Path, case: str) -> None:
    """On each of twenty disks, too little space is an error in one line, and the old output is intact. No part of a set
    of shards appears. A disk with just enough space contains the new output.
    """
    before, flags, name, old, words = DISKS[case]
    if before and not shutil.which("strace"):
        pytest.skip("strace is not installed")
    subprocess.run(command(src, tmp_path / name, *flags), check=True)
    new = content_of(tmp_path / name)
    assert not isinstance(new, dict) or len(new) > 4
    for free in sizes(pages(new)):
        with disk_of(tmp_path, (free + pages(old)) * PAGE) as disk:
            put(disk / name, old)
            done = subprocess.run([*before, *command(src, disk / name, *flags)], capture_output=True, text=True)
            check(done, disk, name, old, new, fits=free >= pages(new))
            assert (words in done.stderr) == (free < pages(new)) or not words


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_another_process_uses_the_space(src: Path, tmp_path: Path, shards: int) -> None:
    """If another process takes the free space while a set of shards is written, the conversion fails with one line, and
    the old folder stays.
    """
    delay = f"inject=fsync:delay_enter=1000000:when={shards}"
    slow = ["strace", "-f", "-o", "/dev/null", "-e", "trace=fsync", "-e", delay]
    with disk_of(tmp_path, 200 * PAGE) as disk:
        put(disk / "dst", OLD_SET)

        def take() -> None:
            def begun() -> int:
                return sum(len(files) for path, _, files in os.walk(disk) if ".ckptconv-" in path)

            wait_for(lambda: begun() == shards)
            time.sleep(0.2)  # the shard that is begun has its space by now
            fill_up(disk / "taken")

        other = threading.Thread(target=take)
        other.start()
        done = subprocess.run([*slow, *command(src, disk / "dst", *TO_SHARDS)], capture_output=True, text=True)
        other.join()
        (disk / "taken").unlink()
        check(done, disk, "dst", OLD_SET, None, fits=False)
        assert "space" in done.stderr


def fill_up(path: Path) -> None:
    """Use all free space of the disk with a file at `path`."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(PAGE))


def test_disk_smaller_than_it_reports(src: Path, tmp_path: Path) -> None:
    """On a filesystem whose device has no more blocks (a loop device on a sparse file, as with thin provisioning),
    writing fails at the end, at fsync. The error is one line, and the old output stays.
    """
    with disk_of(tmp_path, 1 << 20) as thin:
        with (thin / "image").open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(
            ["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(thin / "image")],
            check=True,
        )
        with mounted(tmp_path / "at", "-o", "loop", thin / "image") as at:
            (at / "dst.pt").write_bytes(OLD)
            subprocess.run(["sync", "-f", str(at)], check=True)
            fill_up(thin / "taken")
            done = subprocess.run(command(src, at / "dst.pt", "--to", "cpu"), capture_output=True, text=True)
            left = [name for name in os.listdir(at) if name not in ("dst.pt", "lost+found")]
            assert (done.returncode, done.stderr.count("ckptconv: ")) == (1, 1), done
            assert (at / "dst.pt").read_bytes() == OLD
            assert left == []
            assert "could not be written" in done.stderr


def test_nothing_is_written_without_enough_space(src: Path, tmp_path: Path) -> None:
    """A disk that is too small is reported before the first byte is written."""
    with disk_of(tmp_path, 64 * PAGE) as disk:
        counts: list[int] = []
        with pytest.raises(OutputError, match="not enough free space"):
            run(find_request(src, disk / "dst.pt", TO_CPU), progress=lambda size: nullcontext(counts.append))
        assert counts == []


def test_a_disk_of_another_kind(src: Path, tmp_path: Path) -> None:
    """A conversion from a disk to memory, between which the kernel cannot copy, gives the same output as a conversion
    on the disk.
    """
    with disk_of(tmp_path, 4 << 20) as disk:
        convert(src, disk / "dst.pt", map_location="cuda:1")
        convert(src, tmp_path / "here.pt", map_location="cuda:1")
        assert (disk / "dst.pt").read_bytes() == (tmp_path / "here.pt").read_bytes()


def test_a_disk_without_room_for_a_name(src: Path, tmp_path: Path) -> None:
    """A disk with free space but without a free inode is an error in one line, and the old output stays."""
    with disk_of(tmp_path, 4 << 20, "nr_inodes=2") as at:
        (at / "dst.pt").write_bytes(OLD)
        done = subprocess.run(command(src, at / "dst.pt", "--to", "cpu"), capture_output=True, text=True)
        check(done, at, "dst.pt", OLD, None, fits=False)


def test_a_disk_that_is_read_only(src: Path, tmp_path: Path) -> None:
    """A read-only disk is an error in one line for a file and for a folder."""
    with disk_of(tmp_path, 4 << 20) as disk:
        (disk / "dst.pt").write_bytes(OLD)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = subprocess.run(command(src, disk / "dst.pt", "--to", "cpu"), capture_output=True, text=True)
        check(done, disk, "dst.pt", OLD, None, fits=False)
        shards = subprocess.run(command(src, disk / "dst", *TO_SHARDS), capture_output=True, text=True)
        assert (shards.returncode, shards.stderr.count("ckptconv: ")) == (1, 1)
        for each in (done, shards):
            assert "Read-only file system" in each.stderr


def test_a_limit_on_the_size_of_files(src: Path, tmp_path: Path) -> None:
    """A process with a limit of 128 KB on file sizes fails with one line. The old output stays, and no other file is
    left.
    """
    (tmp_path / "dst.pt").write_bytes(OLD)
    limited = ["bash", "-c", 'ulimit -f 128; exec "$@"', "bash", *command(src, tmp_path / "dst.pt", "--to", "cpu")]
    done = subprocess.run(limited, capture_output=True, text=True)
    check(done, tmp_path, "dst.pt", OLD, None, fits=False)
    assert "File too large" in done.stderr
