"""Tests of readers and writers of a file that is changed in place. They do not wait for each other, and no reader sees
an incomplete change.
"""

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
    """Change the prefix of all names in the file to `to`."""
    return ckptconv.convert(path, in_place=True, rename=[(r"^.*\.", f"{to}.")])


def prefixes(path: Path) -> set[str]:
    """Return the prefixes of all names in the file."""
    return {tensor.path.rpartition(".")[0] for tensor in ckptconv.inspect(path).tensors}


@pytest.mark.parametrize("change", ["it grows", "it shrinks"])
def test_a_change_that_ends_while_a_reader_opens_the_file(
    checkpoint: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a change ends while a reader opens the file, the reader uses the new size, because it reads the size after it
    gets the lock.
    """
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
    """While threads change the file, every read finds one prefix in all names, or fails because another thread uses the
    file.
    """
    read: Counter[str] = Counter()
    failed: list[Exception] = []
    changed = threading.Event()

    def told(work: Callable[[], object]) -> object:
        """Do `work`, and return None if another thread uses the file."""
        try:
            return work()
        except (ckptconv.InputError, ckptconv.RefusedError) as error:
            if "another process" not in error.what and "there is no undo journal" not in error.what:
                failed.append(error)
            return None
        finally:
            time.sleep(0.02)  # so that the other threads can run

    def reader() -> None:
        done = False
        while not failed and not (done and changed.is_set()):
            if (found := told(lambda: prefixes(checkpoint))) is not None:
                read[str(found)] += 1
                done = True

    def writer() -> None:
        changes: list[Callable[[], object]] = [partial(rename, checkpoint, to) for to in NAMES]
        changes.append(partial(ckptconv.undo, checkpoint))
        turns = cycle(changes)
        done = 0
        try:
            while not failed and done < 8:
                done += told(next(turns)) is not None
        finally:
            changed.set()

    threads = [threading.Thread(target=work) for work in (reader, reader, reader, writer, writer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert read.keys() <= {str({name}) for name in NAMES}
    assert ckptconv.verify(checkpoint).ok
