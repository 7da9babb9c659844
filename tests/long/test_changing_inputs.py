"""Inputs that change while they are read, at every call that reads them and at every step of the writing.

strace stops the conversion at a call, the test changes the input, and the conversion continues. The change therefore
occurs at exactly that call. CKPTCONV_CHANGES names the JSON file for the outcome of each change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import torch

from ckptconv import convert
from tests.support.injection import OLD, content_of
from tests.support.writers import sharded

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")

CALLS = ("openat", "pread64", "preadv", "copy_file_range", "pwrite64", "fallocate", "fsync", "rename")
LEAST = 200


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwritten(path: Path) -> None:
    """Overwrite all bytes of the file and keep its length."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replaced(path: Path) -> None:
    """Give the name of the file to another file."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.rename(path)


def deleted(path: Path) -> None:
    path.unlink()


#: Changes of an input, and the two that do not affect an open file.
CHANGES: tuple[Callable[[Path], None], ...] = (shorter, empty, overwritten, longer, replaced, deleted)
HARMLESS = (replaced, deleted)


@dataclass(frozen=True)
class Change:
    """A change `how` of the input at the `number`-th `call`, and the outcome of the conversion. `early` says whether
    the change came before the complete input was copied.
    """

    conversion: str
    how: str
    call: str
    number: int
    early: bool
    exit: int = 0
    outcome: str = ""
    line: str = ""


class Reading:
    """A command ``ckptconv convert `src` DST`` whose `src`, or the file `changed` in it, changes during the run."""

    def __init__(
        self, name: str, folder: Path, src: Path, target: str, flags: tuple[str, ...], changed: str = ""
    ) -> None:
        self.name, self.folder, self.src, self.target, self.flags, self.changed = (
            name,
            folder,
            src,
            target,
            flags,
            changed,
        )
        self._numbers: Iterator[int] = count()
        self.run(None)  # compiles the modules
        place, lines, _ = self.run(None)
        self.new = content_of(place / "out" / target)
        self.moments = list(self._moments(lines, place))

    def run(self, change: Change | None) -> tuple[Path, list[str], subprocess.CompletedProcess[str]]:
        """Convert in a new folder, with `change`. Return the folder, the lines of strace and the process."""
        place = self.folder / f"{next(self._numbers):04}"
        (place / "out").mkdir(parents=True)
        src = place / self.src.name
        if self.src.is_dir():
            shutil.copytree(self.src, src)
        else:
            shutil.copy2(self.src, src)
        (place / "out" / self.target).write_bytes(OLD)
        log = place / "strace.log"
        log.touch()
        stop = ["-e", f"inject={change.call}:signal=SIGSTOP:when={change.number}"] if change else []
        process = subprocess.Popen(
            [
                "strace",
                "-f",
                "-y",
                "-o",
                log,
                "-e",
                f"trace={','.join(CALLS)}",
                *stop,
                sys.executable,
                "-m",
                "ckptconv",
                "convert",
                "-q",
                "-f",
                src,
                place / "out" / self.target,
                *self.flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        if change:
            number = stopped(log, process)
            next(each for each in CHANGES if each.__name__ == change.how)(src / self.changed)
            os.kill(number, signal.SIGCONT)
        said = process.communicate(timeout=60)[1]
        return place, log.read_text().splitlines(), subprocess.CompletedProcess([], process.returncode, "", said)

    def _moments(self, lines: list[str], place: Path) -> Iterator[tuple[str, int, bool]]:
        """Yield each call from the first read of the input on: its name, its number, and whether it comes before the
        last byte is copied.
        """
        main = lines[0].split()[0]
        seen: dict[str, int] = {}
        path = str(place / self.src.name / self.changed).rstrip("/")
        calls = []
        for line in lines:
            thread, rest = line.split(maxsplit=1)
            call = rest.split("(")[0]
            if thread != main or call not in CALLS:
                continue
            seen[call] = seen.get(call, 0) + 1
            calls.append((call, seen[call], f"<{path}>" in rest.split(" = ")[0], ".ckptconv-" in rest))
        first = next(i for i, (_, _, reads, _) in enumerate(calls) if reads)
        synced = max(i for i, (call, _, _, ours) in enumerate(calls) if call == "fsync" and ours)
        for i, (call, number, reads, ours) in enumerate(calls[first:], first):
            if reads or ours:
                yield call, number, i < synced

    def changed_at(self, how: Callable[[Path], None], moment: tuple[str, int, bool]) -> Change | str:
        """Return the outcome of the change `how` at `moment`, or a message about what is wrong with it."""
        change = Change(self.name, how.__name__, *moment)
        place, lines, done = self.run(change)
        found = content_of(place / "out" / self.target)
        outcome = (
            {OLD: "old"}.get(found, "new" if found == self.new else "another") if isinstance(found, bytes) else "?"
        )
        change = replace(change, exit=done.returncode, outcome=outcome, line=done.stderr.strip())
        wrong = []
        if (done.returncode, outcome) not in [(0, "new"), (1, "old")]:
            wrong.append("neither the output of what was there nor the old one with an error")
        if change.early and (done.returncode == 0) != (how in HARMLESS):
            wrong.append("a change that was not seen, or one that does not matter")
        if done.stderr.count("ckptconv: ") != done.returncode or "Traceback" in done.stderr or "bug" in done.stderr:
            wrong.append("not one line")
        if os.listdir(place / "out") != [self.target]:
            wrong.append("something is left")
        if wrong:
            return f"{change}: {wrong}\n" + "\n".join(lines[-10:])
        shutil.rmtree(place)
        return change


def stopped(log: Path, process: subprocess.Popen[str]) -> int:
    """Wait until strace reports a stopped thread, and return the number of the thread."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"^(\d+) +--- stopped by SIGSTOP", log.read_text(), re.MULTILINE)
        if found:
            return int(found[1])
        time.sleep(0.005)
    raise AssertionError("the call never came")


@pytest.fixture(scope="module")
def all_changes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Change]]:
    """Yield a list for the outcomes of all changes, and write it to a file at the end."""
    changes: list[Change] = []
    yield changes
    path = Path(os.environ.get("CKPTCONV_CHANGES", tmp_path_factory.getbasetemp() / "changes.json"))
    path.write_text(json.dumps([asdict(change) for change in changes], indent=0))
    print(f"\n{len(changes)} changed inputs: {path}")


@pytest.fixture(scope="module", params=["pt to pt", "pt to safetensors", "safetensors to pt", "shards to pt"])
def reading(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reading:
    """Return a conversion: one in which the kernel copies, one whose threads also read, one that reads all bytes
    itself, or one of several files.
    """
    folder = tmp_path_factory.mktemp("changing")
    weights = {f"w{i}": torch.randn(30_000) for i in range(2)}
    if request.param == "shards to pt":
        src = sharded(folder / "src", *({name: tensor} for name, tensor in weights.items()))
        return Reading(
            request.param, folder / "runs", src, "dst.pt", ("--to", "cuda:0"), "pytorch_model-00001-of-00002.bin"
        )
    src = folder / "src.pt"
    torch.save(weights, src)
    if request.param == "safetensors to pt":
        convert(src, folder / "src.safetensors")
        src = folder / "src.safetensors"
    target, flags = {
        "pt to pt": ("dst.pt", ("--to", "cuda:0")),
        "pt to safetensors": ("dst.safetensors", ()),
        "safetensors to pt": ("dst.pt", ()),
    }[request.param]
    return Reading(request.param, folder / "runs", src, target, flags)


def test_an_input_that_changes_at_any_moment(reading: Reading, all_changes: list[Change]) -> None:
    """An input that is truncated, emptied, overwritten or extended before it is copied completely is an error in one
    line, and the old output stays.

    If the input is replaced or deleted, the output is that of the original input.
    """
    tasks = [(how, moment) for how in CHANGES for moment in reading.moments]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda task: reading.changed_at(*task), tasks))
    wrong = [each for each in results if isinstance(each, str)]
    assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n\n".join(wrong[:5])
    changes = [each for each in results if isinstance(each, Change)]
    assert {change.outcome for change in changes} == {"old", "new"}
    all_changes += changes


def test_there_are_enough_changes(all_changes: list[Change]) -> None:
    """At least two hundred changes were tested if all kinds of conversion ran, and no two changes are equal."""
    distinct = {(each.conversion, each.how, each.call, each.number) for each in all_changes}
    assert len(distinct) == len(all_changes)
    if len({each.conversion for each in all_changes}) == 4:
        assert len(distinct) >= LEAST
