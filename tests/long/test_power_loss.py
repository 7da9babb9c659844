"""Power that is lost while conversions replace a file, or a folder, again and again: on a disk
that forgets whatever was not flushed.

The disk is a recorded one (:mod:`tests.support.recorded_disk`) with a real filesystem on it. At many moments of its
history the power is taken away, the filesystem repairs itself as it does after a real loss, and somebody looks. Needs
root, a loop device and FUSE. CKPTCONV_CUTS: at how many moments.
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
#: How the filesystem is made, how it is mounted, and the size of the disk. A commit every
#: second: names also reach the disk unasked.
FILESYSTEMS = {
    "ext4": (["mkfs.ext4", "-q", "-b", "4096"], "commit=1", 64 << 20),
    "ext4, no care for renames": (["mkfs.ext4", "-q", "-b", "4096"], "commit=1,noauto_da_alloc", 64 << 20),
    "xfs": (["mkfs.xfs", "-q"], "noatime", 320 << 20),
}
_NO_FSYNC = "import os\nos.fsync = lambda fd: None\nfrom ckptconv.cli.main import main\nimport sys\nsys.exit(main())\n"


def through_a_loop(disk: Path, at: Path, options: str) -> AbstractContextManager[Path]:
    """`disk`, through a loop device, at the folder `at`."""
    return mounted(at, "-o", f"loop,{options}", disk)


@contextmanager
def recorded(folder: Path, image: Path, log: Path) -> Iterator[Path]:
    """A file that is `image`; what it is told goes into `log`."""
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
class Done:
    """A conversion: how long the log was when it began and when it had ended, and what it left at the target."""

    began: int
    ended: int
    new: Content


@pytest.fixture(params=list(FILESYSTEMS))
def filesystem(request: pytest.FixtureRequest) -> str:
    """One that this machine has."""
    name: str = request.param
    make = FILESYSTEMS[name][0][0]
    if os.geteuid() or not shutil.which(make) or not os.path.exists("/dev/fuse"):
        pytest.skip(f"needs root, {make} and FUSE")
    return name


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, for disks."""
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", "size=3g", "tmpfs") as folder:
        yield folder


def inputs(folder: Path, *, in_shards: bool) -> list[Path]:
    """Two checkpoints of about 400 KB that have nothing in common, each a file or a set of shards."""
    made = []
    for number in range(2):
        path = folder / f"src{number}"
        if in_shards:
            sharded(path, {"w1": torch.randn(50_000)}, {"w2": torch.randn(50_000)})
        else:
            torch.save({"w": torch.randn(100_000)}, path)
        made.append(path)
    return made


def make_filesystem(name: str, image: Path) -> str:
    """Make this one in the file `image`; how it is mounted."""
    make, options, size = FILESYSTEMS[name]
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run([*make, str(image)], check=True)
    return options


def history_of(
    folder: Path, srcs: Sequence[Path], filesystem: str, *, in_shards: bool, command: Sequence[str]
) -> tuple[History, list[Done]]:
    """What a disk was told while `srcs` were converted in turn, again and again, to one target on it; and
    what was done.
    """
    image, before, log, at = folder / "image", folder / "before", folder / "log", folder / "mounted"
    options = make_filesystem(filesystem, image)
    shutil.copyfile(image, before)
    at.mkdir()
    target = at / ("dst" if in_shards else "dst.pt")
    done = []
    with recorded(folder, image, log) as disk, through_a_loop(disk, at, options):
        for number in range(ROUNDS):
            began = log.stat().st_size
            args = [
                "convert",
                "-q",
                str(srcs[number % 2]),
                str(target),
                "--to",
                "cpu",
                *(["--force"] if number else []),
            ]
            subprocess.run([*command, *args], check=True, cwd=folder)
            done.append(Done(began, log.stat().st_size, content_of(target)))
    return History(before, log.read_bytes()), done


def what_is_wrong(at: Path, target: str, end: int, done: Sequence[Done]) -> str | None:
    """What must not be at `target`, of the disk that is mounted `at`, after the power was lost at `end` of the log."""
    ended = [each.new for each in done if each.ended <= end]
    may_be = [ended[-1] if ended else None]
    may_be += [each.new for each in done if each.began <= end < each.ended]
    found = content_of(at / target)
    others = [name for name in os.listdir(at) if name not in (target, "lost+found") and not is_temporary(name)]
    if others:
        return f"something is left: {others}"
    if found in may_be:
        return None
    if found is None or found in [each.new for each in done]:
        return "an older one, after success was told"
    return "a mixture"


def judged(
    folder: Path, history: History, ends: Sequence[int], filesystem: str, problem_at: Callable[[Path, int], str | None]
) -> Iterator[tuple[str, str | None]]:
    """For each of `ends` of the log at which the power goes: how it was cut, and what `problem_at` says of the disk,
    given where that is mounted and the end.
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


@pytest.mark.parametrize("in_shards", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("command", [["-m", "ckptconv"], ["-c", _NO_FSYNC]], ids=["synced", "without fsync"])
def test_a_loss_of_power(filesystem: str, in_shards: bool, command: list[str], tmp_path: Path, memory: Path) -> None:
    """Whenever the power goes: the old one or the new one, whole; and once a conversion
    has said that it is done, the new one. Without fsync, and all else as it is, it is seen what is lost.
    """
    srcs = inputs(tmp_path, in_shards=in_shards)
    words = [sys.executable, *command]
    history, done = history_of(memory, srcs, filesystem, in_shards=in_shards, command=words)
    target = "dst" if in_shards else "dst.pt"
    moments = [end for end in history.ends if end >= done[0].began]
    ends = random.Random(2147).choices(moments, k=CUTS)
    cuts = list(judged(memory, history, ends, filesystem, lambda at, end: what_is_wrong(at, target, end, done)))
    wrong = [problem for _, problem in cuts if problem]
    seen = Counter(each.split(",")[0] for each in wrong)
    print(f"\n{filesystem}: {Counter(how for how, _ in cuts)} of {len(history.ends)} moments, {seen}")
    assert (wrong == []) == (command[0] == "-m"), wrong
    assert len({str(each.new) for each in done}) == 2
