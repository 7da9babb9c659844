"""Tests of a batch in one process: one thread converts while other threads wait for the disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from ckptconv.byteranges.threads import Threads
from ckptconv.conversion import batches
from ckptconv.conversion.batches import processes, run_jobs
from ckptconv.conversion.jobs import Job, Outcome, Task

AT_ONCE = 8


@pytest.fixture
def jobs(here: Path) -> list[Job]:
    """Return twelve jobs with small inputs and outputs in one folder."""
    (here / "in").mkdir()
    for i in range(12):
        torch.save({"w": torch.full((4,), float(i))}, here / "in" / f"{i}.pt")
    return [Job(f"in/{i}.pt", f"out/{i}.pt", {"map_location": "cuda:0"}) for i in range(12)]


class Disk:
    """A replacement of ``os.fsync`` that records its calls. A sync of a file waits until `at_once` files have started
    to sync. A sync of the folder ``out`` waits until `before_folder` files have.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_once: int, before_folder: int = 0) -> None:
        self.real = os.fsync
        self.needed = {"out": before_folder, "file": at_once}
        self.files: list[str] = []
        self.folders: list[str] = []
        self.change = threading.Condition()
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        kind = os.path.basename(path) if os.path.isdir(path) else "file"
        with self.change:
            (self.files if kind == "file" else self.folders).append(os.path.basename(path))
            self.change.notify_all()
            if not self.change.wait_for(lambda: len(self.files) >= self.needed.get(kind, 0), timeout=30):
                raise OSError(errno.ETIME, "nobody waits beside it")
        self.real(fd)


def run(jobs: list[Job]) -> list[Outcome]:
    """Run `jobs` in this thread. Return the outcomes, which must come in the order of the jobs."""
    said: list[Outcome] = []

    def done(outcome: Outcome) -> Outcome:
        said.append(outcome)
        return outcome

    outcomes = run_jobs(jobs, processes(1), done)
    assert said == outcomes
    assert [outcome.job for outcome in outcomes] == jobs
    return outcomes


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")


@needs_proc
def test_many_syncs_at_once(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are synced at the same time, each of them once. One sync of the folder serves several files."""
    disk = Disk(monkeypatch, AT_ONCE, len(jobs))
    assert all(outcome.report for outcome in run(jobs))
    assert len(disk.files) == len(jobs)
    assert disk.folders[-1] == "out"
    assert disk.folders.count("out") <= 1 + len(jobs) - AT_ONCE + 1
    assert sorted(os.listdir("out")) == sorted(f"{i}.pt" for i in range(12))


@needs_proc
def test_a_failing_sync_is_that_of_its_file(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sync of a file fails, only its job fails. Its temporary file is removed."""
    disk = Disk(monkeypatch, AT_ONCE)
    real = disk.real

    def fail(fd: int) -> None:
        if "/.5.pt." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    disk.real = fail
    outcomes = run(jobs)
    assert [outcome.error is None for outcome in outcomes] == [i != 5 for i in range(12)]
    assert "Input/output error" in str(outcomes[5].error)
    assert sorted(os.listdir("out")) == sorted(f"{i}.pt" for i in range(12) if i != 5)


@needs_proc
def test_a_failing_sync_of_the_folder(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sync of the folder fails, each job that waited for it fails. Each error states that the new file is in
    place.
    """
    disk = Disk(monkeypatch, len(jobs))
    real = disk.real

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/out"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    disk.real = fail
    assert all("the new file is in place" in str(outcome.error) for outcome in run(jobs))
    assert len(os.listdir("out")) == len(jobs)


@needs_proc
def test_files_beyond_the_limit_are_synced_one_by_one(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """If each file alone exceeds the limit of bytes, the files are synced one after the other."""
    monkeypatch.setattr(batches, "_WAITING", 1000)
    disk = Disk(monkeypatch, 1)
    synced: list[int] = []

    def done(outcome: Outcome) -> Outcome:
        synced.append(len(disk.files))
        return outcome

    run_jobs(jobs, processes(1), done)
    assert disk.folders.count("out") == len(jobs)
    assert synced == list(range(1, 1 + len(jobs)))  # each outcome is reported before the next file is written


def test_jobs_that_depend_on_an_output(jobs: list[Job]) -> None:
    """A job that writes or reads the output of an earlier job runs after it. The second job then fails because its
    output exists, and the third reads the first output.
    """
    twice = [jobs[0], Job("in/1.pt", "out/0.pt", {}), Job("out/0.pt", "out/again.pt", {})]
    outcomes = run(twice)
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert torch.load("out/again.pt", map_location="cpu")["w"][0] == 0


def test_no_threads(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the main thread syncs all files."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert all(outcome.report for outcome in run(jobs))
    assert len(os.listdir("out")) == len(jobs)


def test_no_more_threads(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """If only one thread can be started, no file is synced twice."""
    start, started = threading.Thread.start, []

    def once(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    real, synced = os.fsync, []

    def sync(fd: int) -> None:
        if threading.current_thread() in started:
            time.sleep(0.01)  # so that the thread is busy when the next file comes
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    assert all(outcome.report for outcome in run(jobs))
    files = [path for path in synced if path.endswith(".tmp")]
    assert len(files) == len({*files}) == len(jobs)


@needs_proc
@pytest.mark.parametrize("hard", [8, 64])
def test_few_open_files(jobs: list[Job], hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most an eighth of the limit of open files wait for the disk at the same time."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert processes(1).most == hard // 8
    disk = Disk(monkeypatch, 1)
    assert all(outcome.report for outcome in run(jobs))
    assert len(disk.files) == len(jobs)


def test_jobs_of_sets_and_patterns_wait_separately(jobs: list[Job]) -> None:
    """A set or a pattern of rank files has many open files, so its job does not wait for the disk together with
    others.
    """
    Path("model.safetensors.index.json").write_text("{}")
    for src, is_alone in ((jobs[0].src, False), ("model.safetensors.index.json", True), ("in/*.pt", True)):
        _, nbytes = batches._paths_and_size(Task(Job(src, "out.pt")))
        assert (nbytes == batches._WAITING) == is_alone, src


@needs_proc
def test_ctrl_c_twice_leaves_no_temporary(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, while the first one waits for the threads, leaves no temporary file."""
    begun = threading.Event()

    def interrupt(_: int) -> None:
        if len(os.listdir("out")) == 6:
            raise KeyboardInterrupt

    def shutdown(self: Threads) -> None:
        begun.set()
        raise KeyboardInterrupt

    def sync(_: int) -> None:
        assert threading.current_thread() is threading.main_thread() or begun.wait(30)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Threads, "shutdown", shutdown)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, processes(1, interrupt), lambda outcome: outcome)
    assert os.listdir("out") == []


@needs_proc
def test_ctrl_c_leaves_no_temporary(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while six files wait for the disk leaves no temporary file, no output and no output folder."""
    disk = Disk(monkeypatch, len(jobs))

    def interrupt(_: int) -> None:
        if len(os.listdir("out")) == 7:
            with disk.change:
                disk.change.wait_for(lambda: len(disk.files) == 6, timeout=30)
                disk.needed.clear()
                disk.change.notify_all()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, processes(1, interrupt), lambda outcome: outcome)
    assert os.listdir() == ["in"]
