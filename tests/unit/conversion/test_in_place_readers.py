"""Readers and writers of a file that is changed in place: none waits, and none sees half of a change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.byteranges import sources
from tests.support.conversions import saved_at

N = 40
LONG = "a.name.that.is.much.longer.than.it.was"
NAMES = ("a", "b", LONG)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved_at(tmp_path / "model.pt", {f"a.{i}": torch.arange(4.0) + i for i in range(N)})


def rename(path: Path, to: str) -> object:
    """Let all names in the file start with `to`."""
    return ckptconv.convert(path, in_place=True, rename=[(r"^.*\.", f"{to}.")])


def prefixes(path: Path) -> set[str]:
    """What the names in the file start with."""
    return {tensor.path.rpartition(".")[0] for tensor in ckptconv.inspect(path).tensors}


@pytest.mark.parametrize("change", ["it grows", "it shrinks"])
def test_a_change_that_ends_while_a_reader_opens_the_file(
    checkpoint: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is asked for under the lock: the one from before would be another file's."""
    if change == "it shrinks":
        rename(checkpoint, LONG)
    lock_shared = sources.lock_shared

    def late(fd: int, where: object) -> None:
        monkeypatch.undo()
        rename(checkpoint, LONG) if change == "it grows" else ckptconv.undo(checkpoint)
        lock_shared(fd, where)

    monkeypatch.setattr(sources, "lock_shared", late)
    assert prefixes(checkpoint) == {LONG if change == "it grows" else "a"}


@pytest.mark.untraced
def test_readers_and_writers_at_once(checkpoint: Path) -> None:
    """Whoever reads finds one name for all tensors, or is told at once that the file is being changed."""
    said: Counter[str] = Counter()
    changed = threading.Event()

    def told(work: Callable[[], object]) -> object:
        try:
            return work()
        except (ckptconv.InputError, ckptconv.RefusedError) as error:
            if "another process" in error.what or "there is no undo journal" in error.what:
                return None
            raise

    def read() -> None:
        while not changed.is_set():
            said[str(told(lambda: prefixes(checkpoint)))] += 1
            time.sleep(0.01)  # in which a writer has its turn

    def write() -> None:
        changes = cycle([*(partial(rename, checkpoint, to) for to in NAMES), lambda: ckptconv.undo(checkpoint)])
        done = 0
        while done < 8:
            done += told(next(changes)) is not None
        changed.set()

    threads = [threading.Thread(target=work) for work in (read, read, read, write, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.keys() <= {"None", *(str({name}) for name in NAMES)}, said
    assert len(said) > 1
    assert ckptconv.verify(checkpoint).ok
