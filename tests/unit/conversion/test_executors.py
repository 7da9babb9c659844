"""One thread that plans, and others that wait for the disk meanwhile."""

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
    """Twelve small files, to one folder."""
    (here / "in").mkdir()
    for i in range(12):
        torch.save({"w": torch.full((4,), float(i))}, here / "in" / f"{i}.pt")
    return [Job(f"in/{i}.pt", f"out/{i}.pt", {"map_location": "cuda:0"}) for i in range(12)]


class Disk:
    """Stands for ``os.fsync``: that of a file takes until `at_once` have begun, that of the folder ``out`` until
    `before_folder` have.
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
    """Do `jobs` in this thread; their outcomes, which come in the order of the jobs."""
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
    """Files are synced beside one another, each once, and one sync of the folder serves several names."""
    disk = Disk(monkeypatch, AT_ONCE, len(jobs))
    assert all(outcome.report for outcome in run(jobs))
    assert len(disk.files) == len(jobs)
    assert disk.folders[-1] == "out"
    assert disk.folders.count("out") <= 1 + len(jobs) - AT_ONCE + 1
    assert sorted(os.listdir("out")) == sorted(f"{i}.pt" for i in range(12))


@needs_proc
def test_a_failing_sync_is_that_of_its_file(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary goes, and all others are converted."""
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
def test_a_failing_sync_of_the_folder_is_that_of_all_who_waited(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says that its new file is in place."""
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
def test_what_is_larger_waits_alone(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they have no more bytes on the way than one of them may have."""
    monkeypatch.setattr(batches, "_WAITING", 1000)
    disk = Disk(monkeypatch, 1)
    synced: list[int] = []

    def done(outcome: Outcome) -> Outcome:
        synced.append(len(disk.files))
        return outcome

    run_jobs(jobs, processes(1), done)
    assert disk.folders.count("out") == len(jobs)
    assert synced == list(range(1, 1 + len(jobs)))  # each is told of before the next one's bytes are there


def test_one_output_for_two_is_not_raced_for(jobs: list[Job]) -> None:
    """The second finds the first one's output, as it always did, and reads it where it is its input."""
    twice = [jobs[0], Job("in/1.pt", "out/0.pt", {}), Job("out/0.pt", "out/again.pt", {})]
    outcomes = run(twice)
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert torch.load("out/again.pt", map_location="cpu")["w"][0] == 0


def test_no_threads(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more, the disk is waited for here."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert all(outcome.report for outcome in run(jobs))
    assert len(os.listdir("out")) == len(jobs)


def test_no_more_threads(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives one and no more: what that one was handed too is not done twice."""
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
            time.sleep(0.01)  # so that it is busy when the next comes
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    assert all(outcome.report for outcome in run(jobs))
    files = [path for path in synced if path.endswith(".tmp")]
    assert len(files) == len({*files}) == len(jobs)


@needs_proc
@pytest.mark.parametrize("hard", [8, 64])
def test_few_open_files(jobs: list[Job], hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more wait for the disk than the system lets be open."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert processes(1).most == hard // 8
    disk = Disk(monkeypatch, 1)
    assert all(outcome.report for outcome in run(jobs))
    assert len(disk.files) == len(jobs)


def test_what_is_not_one_file_waits_alone(jobs: list[Job]) -> None:
    """A set by its index, and rank files by a pattern, have all their files open."""
    Path("model.safetensors.index.json").write_text("{}")
    for src, is_alone in ((jobs[0].src, False), ("model.safetensors.index.json", True), ("in/*.pt", True)):
        _, nbytes = batches._paths_and_size(Task(Job(src, "out.pt")))
        assert (nbytes == batches._WAITING) == is_alone, src


@needs_proc
def test_ctrl_c_twice_leaves_no_temporary(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while those are waited for that the first has found at the disk."""
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
    """Six wait for the disk as it comes: none of them has its name, and no folder is left for them."""
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
