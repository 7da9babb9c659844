"""Losses of power while conversions replace a file, a folder or many files repeatedly, on a disk that loses writes
which were not flushed.

The disk is a recorded disk (:mod:`tests.support.recorded_disk`) with a real filesystem. At many moments of its history
the power is cut, the filesystem repairs itself as after a real loss, and the test examines it. The tests need root, a
loop device and FUSE. CKPTCONV_CUTS is the number of losses.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckptconv.output.files import is_temporary
from tests.support.injection import Content, content_of
from tests.support.mounts import mounted
from tests.support.paths import SUPPORT
from tests.support.recorded_disk import History
from tests.support.writers import sharded

CUTS = int(os.environ.get("CKPTCONV_CUTS", "60"))
ROUNDS = 6
#: The command that makes a filesystem, its mount options, and the size of the disk. ext4 commits every second, so names
#: also reach the disk without a sync.
FILESYSTEMS = {
    "ext4": (["mkfs.ext4", "-q", "-b", "4096"], "commit=1", 64 << 20),
    "ext4, no care for renames": (["mkfs.ext4", "-q", "-b", "4096"], "commit=1,noauto_da_alloc", 64 << 20),
    "xfs": (["mkfs.xfs", "-q"], "noatime", 320 << 20),
}
_MAIN = "from ckptconv.cli.main import main\nstatus = main()\n"
_NO_FSYNC = "import os\nos.fsync = lambda fd: None\n"
#: Treat each file as large compared to the available memory.
_DIRECTLY = """from ckptconv.output import direct_writes, transfer
direct_writes.available_memory = lambda: 0
direct_writes._LEAST, transfer.WINDOW = 0, 1 << 16
written, write = [], direct_writes.DirectDestination._write_mapped
direct_writes.DirectDestination._write_mapped = lambda self, *where: written.append(write(self, *where))
"""
#: Fail if no bytes were written around the page cache.
_FAIL_IF_CACHED = "assert written\n"


def through_a_loop(disk: Path, at: Path, options: str) -> AbstractContextManager[Path]:
    """Mount `disk` through a loop device at the folder `at`."""
    return mounted(at, "-o", f"loop,{options}", disk)


@contextmanager
def recorded(folder: Path, image: Path, log: Path) -> Iterator[Path]:
    """Yield a file that mirrors `image` and records its writes in `log`."""
    disk = folder / "disk"
    disk.touch()
    log.touch()
    server = subprocess.Popen([sys.executable, SUPPORT / "recorded_disk.py", disk, image, log])
    try:
        while disk.stat().st_size == 0:
            assert server.poll() is None, "the disk cannot be served"
            time.sleep(0.01)
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=False)
        server.wait(timeout=30)


@dataclass(frozen=True)
class Way:
    """A conversion to `target`. `inputs` makes one or more checkpoints in a folder, and each of `outputs` must appear
    completely.
    """

    inputs: Callable[[Path], list[Path]]
    target: str
    outputs: tuple[str, ...]
    before: str = ""  # code that runs before the conversion
    after: str = ""  # code that runs after it


def one_file(folder: Path) -> list[Path]:
    torch.save({"w": torch.randn(100_000)}, folder / "src.pt")
    return [folder / "src.pt"]


def shards(folder: Path) -> list[Path]:
    return [sharded(folder / "src", {"w1": torch.randn(50_000)}, {"w2": torch.randn(50_000)})]


def many_files(folder: Path) -> list[Path]:
    for name in _MANY:
        torch.save({"w": torch.randn(10_000)}, folder / name)
    return [folder / name for name in _MANY]


_MANY = tuple(f"{number}.pt" for number in range(10))
WAYS = {
    "file": Way(one_file, "dst.pt", ("dst.pt",)),
    "folder": Way(shards, "dst", ("dst",)),
    "direct": Way(one_file, "dst.pt", ("dst.pt",), _DIRECTLY, _FAIL_IF_CACHED),
    "batch": Way(many_files, "dst/", tuple(f"dst/{name}" for name in _MANY)),
}


@dataclass(frozen=True)
class Done:
    """A conversion: the length of the log at its start and end, and the contents of each output afterwards."""

    began: int
    ended: int
    new: dict[str, Content]


@pytest.fixture(params=list(FILESYSTEMS))
def filesystem(request: pytest.FixtureRequest) -> str:
    """Return the name of a filesystem. Skip the test if the machine does not support it."""
    name: str = request.param
    make = FILESYSTEMS[name][0][0]
    if os.geteuid() or not shutil.which(make) or not os.path.exists("/dev/fuse"):
        pytest.skip(f"needs root, {make} and FUSE")
    return name


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory for disks."""
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", "size=3g", "tmpfs") as folder:
        yield folder


def make_filesystem(name: str, image: Path) -> str:
    """Make the filesystem `name` in the file `image`, and return its mount options."""
    make, options, size = FILESYSTEMS[name]
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run([*make, str(image)], check=True)
    return options


def history_of(folder: Path, filesystem: str, way: Way, *, synced: bool) -> tuple[History, list[Done]]:
    """Convert two inputs in turn to one target on a recorded disk. Return the history of the disk and the
    conversions.
    """
    image, before, log, at = folder / "image", folder / "before", folder / "log", folder / "mounted"
    options = make_filesystem(filesystem, image)
    shutil.copyfile(image, before)
    srcs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        srcs.append(way.inputs(folder / name))
    program = f"{'' if synced else _NO_FSYNC}{way.before}{_MAIN}{way.after}raise SystemExit(status)\n"
    command = [sys.executable, "-c", program, "convert", "-q", "--to", "cpu"]
    done = []
    with recorded(folder, image, log) as disk, through_a_loop(disk, at, options):
        for number in range(ROUNDS):
            began = log.stat().st_size
            force = ["--force"] if number else []
            subprocess.run([*command, *force, *srcs[number % 2], f"{at}/{way.target}"], check=True, cwd=folder)
            done.append(Done(began, log.stat().st_size, {name: content_of(at / name) for name in way.outputs}))
    return History(before, log.read_bytes()), done


def what_is_wrong(at: Path, end: int, done: Sequence[Done]) -> str | None:
    """Return what is wrong on the disk mounted `at` after the power was lost at `end` of the log, or None."""
    outputs = {at / name for name in done[0].new}
    folders = {output.parent for output in outputs} | {at}
    found = {path for folder in folders if folder.exists() for path in folder.iterdir()}
    known = outputs | folders | {at / "lost+found"}
    if others := [path for path in found if path not in known and not is_temporary(path.name)]:
        return f"something is left: {others}"
    for name in done[0].new:
        ended = [each.new[name] for each in done if each.ended <= end]
        may_be = [ended[-1] if ended else None]
        may_be += [each.new[name] for each in done if each.began <= end < each.ended]
        there = content_of(at / name)
        if there not in may_be:
            older = there is None or there in [each.new[name] for each in done]
            return "an older one, after success was told" if older else "a mixture"
    return None


def judged(
    folder: Path, history: History, ends: Sequence[int], filesystem: str, problem_at: Callable[[Path, int], str | None]
) -> Iterator[tuple[str, str | None]]:
    """Cut the power at each of `ends` of the log. Yield how it was cut, and the result of `problem_at` for the mounted
    disk and the end.
    """
    choice = random.Random(2147)
    disk, at = folder / "after", folder / "mounted"
    for end in sorted(ends):
        history.go_to(end)
        subprocess.run(["cp", "--sparse=always", history.image, disk], check=True)
        how = history.cut(disk, choice)
        with through_a_loop(disk, at, FILESYSTEMS[filesystem][1]):
            problem = problem_at(at, end)
        yield how, problem and f"{problem}, at {end} of the log, of what was not flushed: {how}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "without fsync"])
def test_a_loss_of_power(filesystem: str, way: str, synced: bool, memory: Path) -> None:
    """After a loss of power at any moment, each output is the complete old or new one, and the new one if the
    conversion has ended. Without fsync the check finds losses, which is the control.
    """
    history, done = history_of(memory, filesystem, WAYS[way], synced=synced)
    moments = [end for end in history.ends if end >= done[0].began]
    ends = random.Random(2147).choices(moments, k=CUTS)
    cuts = list(judged(memory, history, ends, filesystem, lambda at, end: what_is_wrong(at, end, done)))
    wrong = [problem for _, problem in cuts if problem]
    seen = Counter(each.split(",")[0] for each in wrong)
    print(f"\n{filesystem}, {way}: {Counter(how for how, _ in cuts)} of {len(history.ends)} moments, {seen}")
    assert (wrong == []) == synced, wrong
    assert len({str(each.new) for each in done}) == 2
