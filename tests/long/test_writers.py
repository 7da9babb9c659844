"""Two hundred writers of one target, ten at the same time. The target is always the complete output of one of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ckptconv import convert
from tests.support.injection import OLD, OLD_SET, Content, content_of, put
from tests.support.writers import sharded

WRITERS = 200
AT_ONCE = 10

#: Starts a process for each command. All start to convert at the same time. Prints the exit status and the errors of
#: each.
_CROWD = """
import json, os, sys, tempfile
from ckptconv.cli.main import main
import ckptconv.conversion.convert, ckptconv.formats.opening, ckptconv.output.folders
reader, writer = os.pipe()
children = []
for command in json.load(sys.stdin):
    said = tempfile.TemporaryFile("w+")
    pid = os.fork()
    if not pid:
        os.close(writer)
        os.read(reader, 1)
        os.dup2(said.fileno(), 2)
        status = 70
        try:
            status = main(command)
        finally:
            sys.stderr.flush()
            os._exit(status)
    children.append((pid, said))
os.close(writer)
done = []
for pid, said in children:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said.seek(0)
    done.append((status, said.read()))
print(json.dumps(done))
"""


def crowd(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Run `commands` at the same time. Return the exit status and the errors of each."""
    done = subprocess.run(
        [sys.executable, "-c", _CROWD], input=json.dumps(commands), capture_output=True, text=True, check=True
    )
    return [(status, said) for status, said in json.loads(done.stdout)]


@pytest.fixture(scope="module", params=["file", "folder"])
def inputs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], list[Content]]:
    """Return two hundred different checkpoints, files or sets of shards, and the output of each."""
    folder = tmp_path_factory.mktemp("inputs")
    srcs, outputs = [], []
    for number in range(WRITERS):
        if request.param == "file":
            src, dst = folder / f"{number}.pt", folder / "dst.pt"
            torch.save({"w": torch.full((40_000,), number)}, src)
        else:
            tensor, dst = torch.full((9000,), number), folder / "dst"
            src = sharded(folder / str(number), {"w1": tensor}, {"w2": tensor})
        convert(src, dst, map_location="cuda:0", force=True)
        srcs.append(src)
        outputs.append(content_of(dst))
    return srcs, outputs


class Watcher(threading.Thread):
    """A thread that reads `target` repeatedly until it is told to end. It records the contents that are not `is_whole`,
    and the number of reads.
    """

    def __init__(self, target: Path, is_whole: Callable[[Content], bool]) -> None:
        super().__init__()
        self.target, self.is_whole = target, is_whole
        self.ended = threading.Event()
        self.looks = 0
        self.wrong: list[Content] = []

    def run(self) -> None:
        while not self.ended.wait(0.001):
            try:
                before = self.target.stat().st_ino
                seen = content_of(self.target)
                if self.target.is_dir() and self.target.stat().st_ino != before:
                    continue  # the folder has another name by now and is being deleted
            except OSError:
                continue
            self.looks += 1
            if not self.is_whole(seen):
                self.wrong.append(seen)


def test_two_hundred_writers_that_may_replace(inputs: tuple[list[Path], list[Content]], tmp_path: Path) -> None:
    """With ``--force`` a reader always sees one complete output, and afterwards the target contains one of the new
    outputs.

    A writer succeeds, or reports that another process replaced its output before the check.
    """
    srcs, outputs = inputs
    is_folder = isinstance(outputs[0], dict)
    out = tmp_path / "out"
    out.mkdir()
    target = out / ("dst" if is_folder else "dst.pt")
    put(target, OLD_SET if is_folder else OLD)
    watcher = Watcher(target, lambda seen: seen in outputs or seen in (OLD, OLD_SET))
    watcher.start()
    try:
        for begin in range(0, WRITERS, AT_ONCE):
            some = srcs[begin : begin + AT_ONCE]
            done = crowd([["convert", "-q", "-f", str(src), str(target), "--to", "cuda:0"] for src in some])
            replaced = [said for status, said in done if (status, said) != (0, "")]
            assert len(replaced) < AT_ONCE / 2
            assert all("another process replaced the output" in said for said in replaced)
            assert content_of(target) in outputs[begin : begin + AT_ONCE]
            assert len(os.listdir(out)) <= 1 + is_folder * len(replaced)
            for path in out.iterdir():  # the old folder of a writer whose output was replaced at once
                if path != target:
                    shutil.rmtree(path)
    finally:
        watcher.ended.set()
        watcher.join()
    assert watcher.wrong == []
    assert watcher.looks > 100


def test_two_hundred_writers_that_may_not(inputs: tuple[list[Path], list[Content]], tmp_path: Path) -> None:
    """Without ``--force`` exactly one of ten writers writes the target. Each other writer reports that the output
    exists, and leaves nothing.
    """
    srcs, outputs = inputs
    said: Counter[str] = Counter()
    for begin in range(0, WRITERS, AT_ONCE):
        out = tmp_path / str(begin)
        out.mkdir()
        target = out / ("dst" if isinstance(outputs[0], dict) else "dst.pt")
        some = srcs[begin : begin + AT_ONCE]
        done = crowd([["convert", "-q", str(src), str(target), "--to", "cuda:0"] for src in some])
        statuses = [status for status, _ in done]
        assert sorted(statuses) == [0] + [1] * (AT_ONCE - 1)
        assert content_of(target) == outputs[begin + statuses.index(0)]
        assert os.listdir(out) == [target.name]
        for status, line in done:
            assert line.count("\n") == 2 * status
            assert status == 0 or "the output exists" in line
            said["by now" if "another process" in line else "before"] += status
    if not isinstance(outputs[0], dict):  # a folder is checked again at the end, with the same message
        assert said["by now"] > 0
