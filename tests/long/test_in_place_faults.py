"""Faults at every write-side call of a change in place and of its undo. strace injects them.

Afterwards the file is the old one, the new one, or one that torch and ckptconv refuse. If the journal is hot, ``undo``
restores the old file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptconv
from tests.support.in_place_kinds import LONG, Contents, contents, make, not_undone, torn

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="there is no strace")

FAULTS = ("error=EIO", "error=ENOSPC", "error=EINTR", "signal=SIGKILL", "signal=SIGTERM")
CALLS = ("openat", "write", "pwrite64", "fsync", "rename", "ftruncate", "unlink", "close", "flock")


@dataclass(frozen=True)
class Change:
    """A change of a checkpoint of some kind: the arguments of the command before the file."""

    kind: str
    arguments: tuple[str, ...]
    undoes: bool = False


CHANGES = {
    "zip": Change("zip", ("convert", "-q", "--in-place", "--to", "cuda:1")),
    "zip, no undo": Change("zip", ("convert", "-q", "--in-place", "--no-undo", "--to", "cuda:1")),
    "zip, appended": Change("zip", ("convert", "-q", "--in-place", "--rename", "^", LONG)),
    "legacy": Change("legacy", ("convert", "-q", "--in-place", "--add-prefix", "module.")),
    "pickle": Change("pickle", ("convert", "-q", "--in-place", "--rename", "layer", "LAYER")),
    "shards": Change("shards", ("convert", "-q", "--in-place", "--rename", "layer", "LAYER")),
    "safetensors": Change("safetensors", ("convert", "-q", "--in-place", "--rename", "layer", "LAYER")),
    "dcp": Change("dcp", ("convert", "-q", "--in-place", "--rename", "layer", "LAYER")),
    "undo": Change("zip", ("undo", "-q"), undoes=True),
    "undo, shards": Change("shards", ("undo", "-q"), undoes=True),
    "undo, dcp": Change("dcp", ("undo", "-q"), undoes=True),
}


def command(change: Change, path: Path) -> list[str]:
    of_set = change.undoes and change.kind == "shards"  # a set is undone by one of its shards, DCP by its folder
    target = path / next(iter(contents(path))) if of_set else path
    return [sys.executable, "-m", "ckptconv", *change.arguments, str(target)]


def traced(change: Change, path: Path, *options: str) -> tuple[int, list[str]]:
    """Run the command of `change` under strace. Return its exit status and the traced lines."""
    log = path.parent / "strace.log"
    options = ("-f", "-y", "-o", str(log), "-e", f"trace={','.join(CALLS)}", *options)
    done = subprocess.run(["strace", *options, *command(change, path)], capture_output=True)
    return done.returncode, log.read_text().splitlines()


def points(change: Change, path: Path) -> list[tuple[str, int]]:
    """Return the calls that affect the folder of `path`: each name, and its number among the calls of that name."""
    seen: dict[str, int] = {}
    found = []
    for line in traced(change, path)[1]:
        name = line.split(maxsplit=1)[1].split("(")[0]
        seen[name] = seen.get(name, 0) + 1
        if name in CALLS and re.search(re.escape(str(path.parent)) + r"(?!/strace)", line):
            found.append((name, seen[name]))
    return found


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile the modules, so that the interpreter makes the same calls in each run."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(Path(ckptconv.__file__).parent)], check=False)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_faults(change: Change, tmp_path: Path) -> None:
    sample = make(tmp_path / "sample", change.kind, tensors=20)
    shutil.copytree(sample.parent, tmp_path / "kept")  # torch's older format contains addresses, so each file differs
    old = contents(sample)
    first = next(each for each in CHANGES.values() if each.kind == change.kind and not each.undoes)
    subprocess.run(command(first if change.undoes else change, sample), check=True)
    new = contents(sample)
    assert new.keys() == old.keys()

    def prepared(name: str) -> Path:
        path = shutil.copytree(tmp_path / "kept", tmp_path / name) / sample.name
        if change.undoes:
            subprocess.run(command(first, path), check=True)
        return path

    everything = points(change, prepared("points"))
    assert {"pwrite64", "fsync"} <= {call for call, _ in everything}

    def tried(number: int, call: str, at: int, fault: str) -> str | None:
        path = prepared(f"try{number}")
        status, lines = traced(change, path, "-e", f"inject={call}:{fault}:when={at}")
        what = f"{fault} at {call} {at}, exit {status}: "
        if not any("INJECTED" in line or "--- SIG" in line or "+++ killed" in line for line in lines):
            return what + "the call never came"
        wrong = judged(change, path, status, old, new)
        if wrong is None:
            shutil.rmtree(path.parent)
        return wrong and what + wrong

    jobs = [(call, at, fault) for call, at in everything for fault in FAULTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: tried(job[0], *job[1]), enumerate(jobs)))
    wrong = [each for each in results if each]
    print(f"\n{len(results)} faults")
    assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n".join(wrong[:10])


def judged(change: Change, path: Path, status: int, old: Contents, new: Contents) -> str | None:
    """Return what is wrong after a fault, or None."""
    if status == 0 and contents(path) != (old if change.undoes else new):
        return "success without the new bytes"
    return torn(path, old, new) or not_undone(path, old)
