"""Losses of power while a checkpoint is changed in place and undone repeatedly. The disk loses writes that were not
flushed, and tears writes at sectors.

Afterwards ``undo`` runs if the journal is hot, and must restore an earlier state of the checkpoint. The tests need
root, a loop device and FUSE. CKPTCONV_CUTS is the number of losses.
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

#: Enough tensors for a pickle of several filesystem blocks, so that a write can be incomplete.
TENSORS = 200
_CHANGE, _UNDO = ("convert", "-q", "--in-place"), ("undo", "-q")
_OTHER_NAMES = (*_CHANGE, "--rename", "layer", "LAYER")
_USUAL = (_OTHER_NAMES, _UNDO, _OTHER_NAMES, (*_CHANGE, "--no-undo", "--rename", "LAYER", "Layer"))
#: The commands that run on a checkpoint of each kind, in this order.
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
#: No poisoned byte makes readers refuse an incomplete change.
NO_POISON = """from ckptconv.conversion import in_place
made = in_place._journal
import dataclasses
in_place._journal = lambda *args: dataclasses.replace(made(*args), poison=())
"""


@dataclass(frozen=True)
class Step:
    """A command: the length of the log at its start and end, and the checkpoint afterwards."""

    began: int
    ended: int
    content: Contents


def history_of(folder: Path, filesystem: str, kind: str, program: str) -> tuple[History, str, list[Step]]:
    """Return the history of the disk, the name of the checkpoint, and the steps. The first step is the creation of the
    checkpoint.
    """
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
    """Return what is wrong at `path` after the power was lost at `end` of the log, or None."""
    others = [name for name in os.listdir(path.parent) if name not in (path.name, "lost+found")]
    if [name for name in others if not is_own_file(name)]:
        return f"something is left: {others}"
    last = [step.content for step in done if step.ended <= end][-1]
    wrong = torn(path, last, *(step.content for step in done if step.began <= end < step.ended))
    return wrong or not_undone(path, *(step.content for step in done))


def cuts(folder: Path, filesystem: str, kind: str, change: str = "") -> Iterator[str | None]:
    """Yield what is wrong after each loss of power, or None, for a program with this `change`.

    With a change, all losses occur in the step that changes names without changing their lengths. Ten times as many are
    made, because a torn write lasts only a moment.
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
    """After a loss of power at any moment, the checkpoint is complete or refused, and ``undo`` restores an earlier
    state.
    """
    assert [problem for problem in cuts(memory, filesystem, kind) if problem] == []


@pytest.mark.parametrize("change", [NO_JOURNAL_SYNC, NO_POISON], ids=["no sync of the journal", "no poison"])
def test_a_loss_of_power_is_seen(filesystem: str, memory: Path, change: str) -> None:
    """Without the sync of the journal, or without the poisoned byte, a file is lost and the check reports it. This is
    the control.
    """
    assert any(cuts(memory, filesystem, "zip", change))
