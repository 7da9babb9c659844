"""Power that is lost while a checkpoint is changed in place and changed back, again and again, on a disk that forgets
whatever was not flushed, and tears writes at sectors.

Afterwards ``undo`` runs where the journal is hot: it is then one that stood there before. Needs root, a loop
device and FUSE. CKPTCONV_CUTS: at how many moments.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptconv.output.files import is_own_file
from tests.long.test_power_loss import CUTS, filesystem, judged, make_filesystem, memory, recorded, through_a_loop
from tests.support.in_place_kinds import KINDS, LONG, Contents, contents, make, not_undone, torn
from tests.support.recorded_disk import History

__all__ = ["filesystem", "memory"]  # fixtures

#: So many that a pickle has several blocks of the filesystem: half of it can be written.
TENSORS = 200
_CHANGE, _UNDO = ("convert", "-q", "--in-place"), ("undo", "-q")
_OTHER_NAMES = (*_CHANGE, "--rename", "layer", "LAYER")
_USUAL = (_OTHER_NAMES, _UNDO, _OTHER_NAMES, (*_CHANGE, "--no-undo", "--rename", "LAYER", "Layer"))
#: What is done to a checkpoint of each kind, in turn.
STEPS = {
    **dict.fromkeys(KINDS, _USUAL),
    "zip": (
        (*_CHANGE, "--to", "cuda:1"),
        _UNDO,
        _OTHER_NAMES,
        (*_CHANGE, "--rename", "^", LONG),
        _UNDO,
        (*_CHANGE, "--no-undo", "--to", "cuda:2"),
    ),
}
PROGRAM = "import sys\n{change}from ckptconv.cli.main import main\nsys.exit(main())\n"
#: The journal is not synced before the file changes.
NO_JOURNAL_SYNC = """from ckptconv.output import in_place
def write_journal(*args, write=in_place.write_journal, sync=in_place.calls.sync):
    in_place.calls.sync = lambda fd: None
    try: write(*args)
    finally: in_place.calls.sync = sync
in_place.write_journal = write_journal
in_place.calls.sync_folder = lambda folder: None
"""
#: No byte makes readers refuse what is half written.
NO_POISON = """from ckptconv.conversion import in_place
made = in_place._journal
import dataclasses
in_place._journal = lambda *args: dataclasses.replace(made(*args), poison=())
"""


@dataclass(frozen=True)
class Step:
    """What was done: how long the log was when it began and when it had ended, and the checkpoint afterwards."""

    began: int
    ended: int
    content: Contents


def history_of(folder: Path, filesystem: str, kind: str, program: str) -> tuple[History, str, list[Step]]:
    """What the disk was told, the name of the checkpoint, and what was done, of which the first is that it was made."""
    image, before, log, at = folder / "image", folder / "before", folder / "log", folder / "mounted"
    options = make_filesystem(filesystem, image)
    at.mkdir()
    with through_a_loop(image, at, options):
        path = make(at, kind, TENSORS)
        done = [Step(0, 0, contents(path))]
    shutil.copyfile(image, before)
    with recorded(folder, image, log) as disk, through_a_loop(disk, at, options):
        for step in STEPS[kind]:
            began = log.stat().st_size
            subprocess.run([sys.executable, "-c", program, *step, str(path)], check=True, cwd=folder)
            done.append(Step(began, log.stat().st_size, contents(path)))
    return History(before, log.read_bytes()), path.name, done


def what_is_wrong(path: Path, end: int, done: Sequence[Step]) -> str | None:
    """What must not be at `path`, after the power was lost at `end` of the log."""
    others = [name for name in os.listdir(path.parent) if name not in (path.name, "lost+found")]
    if [name for name in others if not is_own_file(name)]:
        return f"something is left: {others}"
    last = [step.content for step in done if step.ended <= end][-1]
    wrong = torn(path, last, *(step.content for step in done if step.began <= end < step.ended))
    return wrong or not_undone(path, *(step.content for step in done))


def cuts(folder: Path, filesystem: str, kind: str, change: str = "") -> Iterator[str | None]:
    """What was wrong after each cut, where the program has that `change`: in the step that changes names of as many
    bytes, of which there are more cuts then, as what can be torn is on its way for a moment alone.
    """
    history, name, done = history_of(folder, filesystem, kind, PROGRAM.format(change=change))
    assert len({str(step.content) for step in done}) > 2
    steps = [done[STEPS[kind].index(_OTHER_NAMES) + 1]] if change else done
    moments = [end for end in history.ends if any(step.began <= end < step.ended for step in steps)]
    ends = random.Random(2147).choices(moments, k=CUTS * (10 if change else 1))
    seen: Counter[str] = Counter()
    for how, problem in judged(folder, history, ends, filesystem, lambda at, end: what_is_wrong(at / name, end, done)):
        seen[how] += 1
        yield problem
    print(f"\n{filesystem}, {kind}: {dict(seen)} of {len(moments)} moments")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_power(filesystem: str, kind: str, memory: Path) -> None:
    """Whenever the power goes, the checkpoint is whole or refused, and undo gives the old one back."""
    assert [problem for problem in cuts(memory, filesystem, kind) if problem] == []


@pytest.mark.parametrize("change", [NO_JOURNAL_SYNC, NO_POISON], ids=["no sync of the journal", "no poison"])
def test_a_loss_of_power_is_seen(filesystem: str, memory: Path, change: str) -> None:
    """The controls: without what protects it, a file is lost, and the test above sees it."""
    assert any(cuts(memory, filesystem, "zip", change))
