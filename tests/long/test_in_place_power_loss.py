"""Power that is lost while a file is changed in place and changed back, again and again, on a disk that forgets
whatever was not flushed, and tears writes at sectors.

Afterwards ``undo`` runs where the journal is hot: the file is then one that stood there before. Needs root, a loop
device and FUSE. CKPTCONV_CUTS: at how many moments.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckptconv.byteranges.undo_journal import HOT, journal_path, state_of
from ckptconv.output.files import is_own_file
from tests.long.test_power_loss import CUTS, FILESYSTEMS, filesystem, memory, recorded, through_a_loop
from tests.support.recorded_disk import History
from tests.support.torn_writes import loads

__all__ = ["filesystem", "memory"]  # fixtures

LONG = "a.name.that.is.much.longer.than.it.was."
#: What is done to the file, in turn.
STEPS = (
    ("convert", "-q", "--in-place", "--to", "cuda:1"),
    ("undo", "-q"),
    ("convert", "-q", "--in-place", "--rename", "layer", "LAYER"),
    ("convert", "-q", "--in-place", "--rename", "^", LONG),
    ("undo", "-q"),
    ("convert", "-q", "--in-place", "--no-undo", "--to", "cuda:2"),
)
PROGRAM = "import sys\n{change}from ckptconv.cli.main import main\nsys.exit(main())\n"
#: The journal is not synced before the file changes.
NO_JOURNAL_SYNC = """import os
from ckptconv.output.in_place import journal
class NoSync:
    def __getattr__(self, name):
        return (lambda fd: None) if name == 'fsync' else getattr(os, name)
journal.os = NoSync()
journal.sync_folder = lambda folder: None
"""
#: No byte makes readers refuse what is half written.
NO_POISON = """from ckptconv.conversion import in_place
made = in_place._journal
import dataclasses
in_place._journal = lambda *args: dataclasses.replace(made(*args), poison=())
"""


@dataclass(frozen=True)
class Step:
    """What was done: how long the log was when it began and when it had ended, and the file afterwards."""

    began: int
    ended: int
    content: bytes


def model(path: Path) -> None:
    """A file without checksums, whose pickle has several blocks of the filesystem: half of it can be written."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({f"layer{i}.weight": torch.ones(1) * i for i in range(200)}, path)
    finally:
        torch.serialization.set_crc32_options(True)


def history_of(folder: Path, filesystem: str, program: str) -> tuple[History, bytes, list[Step]]:
    """What the disk was told, the file in the beginning, and what was done."""
    make, options, size = FILESYSTEMS[filesystem]
    image, before, log, at = folder / "image", folder / "before", folder / "log", folder / "mounted"
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run([*make, str(image)], check=True)
    at.mkdir()
    done = []
    first = folder / "first.pt"
    model(first)
    with through_a_loop(image, at, options):
        shutil.copyfile(first, at / "model.pt")
    shutil.copyfile(image, before)
    with recorded(folder, image, log) as disk, through_a_loop(disk, at, options):
        for step in STEPS:
            began = log.stat().st_size
            subprocess.run([sys.executable, "-c", program, *step, str(at / "model.pt")], check=True, cwd=folder)
            done.append(Step(began, log.stat().st_size, (at / "model.pt").read_bytes()))
    return History(before, log.read_bytes()), first.read_bytes(), done


def what_is_wrong(at: Path, end: int, first: bytes, done: Sequence[Step]) -> str | None:
    """What must not be on the disk that is mounted `at`, after the power was lost at `end` of the log."""
    path = at / "model.pt"
    ended = [step.content for step in done if step.ended <= end]
    last = ended[-1] if ended else first
    going = [step.content for step in done if step.began <= end < step.ended]
    others = [name for name in os.listdir(at) if name not in ("model.pt", "lost+found") and not is_own_file(name)]
    if others:
        return f"something is left: {others}"
    found = path.read_bytes()
    if found not in (last, *going):
        if loads(path):
            return "a torn state that loads"
        if state_of(path) != HOT:
            return "a torn state without a hot journal"
    if state_of(path) == HOT:
        undone = subprocess.run([sys.executable, "-m", "ckptconv", "undo", "-q", str(path)], capture_output=True)
        if undone.returncode:
            return f"undo failed: {undone.stderr.decode()[-200:]}"
        if path.read_bytes() not in (first, *(step.content for step in done)):
            return "undo gave back what never was"
        if journal_path(path).exists():
            return "undo left a journal"
    return None


def judged(
    folder: Path, history: History, first: bytes, done: Sequence[Step], filesystem: str, control: bool = False
) -> list[str]:
    """What was wrong after which cut; of a `control` the first, in the step whose names are as long as the old.

    Of that, there are more cuts: what can be torn is on its way for a moment alone.
    """
    choice = random.Random(2147)
    steps = done[2:3] if control else done
    ends = [end for end in history.ends if any(step.began <= end < step.ended for step in steps)]
    disk, at = folder / "after", folder / "mounted"
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    for end in sorted(choice.choices(ends, k=CUTS * (10 if control else 1))):
        history.go_to(end)
        subprocess.run(["cp", "--sparse=always", history.image, disk], check=True)
        how = history.cut(disk, choice)
        kinds[how] += 1
        with through_a_loop(disk, at, FILESYSTEMS[filesystem][1]):
            problem = what_is_wrong(at, end, first, done)
        if problem:
            wrong.append(f"{problem}, at {end} of the log, of what was not flushed: {how}")
            if control:
                break
    print(f"\n{filesystem}: {dict(kinds)} of {len(ends)} moments; wrong: {Counter(w.split(',')[0] for w in wrong)}")
    return wrong


def test_a_loss_of_power(filesystem: str, memory: Path) -> None:
    """Whenever the power goes, the file is whole or refused, and undo gives the old one back."""
    history, first, done = history_of(memory, filesystem, PROGRAM.format(change=""))
    assert len({hashlib.sha256(step.content).digest() for step in done}) > 3
    assert judged(memory, history, first, done, filesystem) == []


@pytest.mark.parametrize("change", [NO_JOURNAL_SYNC, NO_POISON], ids=["no sync of the journal", "no poison"])
def test_a_loss_of_power_is_seen(filesystem: str, memory: Path, change: str) -> None:
    """The controls: without what protects it, files are lost, and the test above sees it."""
    history, first, done = history_of(memory, filesystem, PROGRAM.format(change=change))
    assert judged(memory, history, first, done, filesystem, control=True)
