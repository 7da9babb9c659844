"""Signals while a file changes in place: it is the old one or the new one, and what is said fits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptconv
from ckptconv.byteranges.undo_journal import DONE, state_of
from ckptconv.output import in_place as writing
from tests.support.in_place_kinds import contents, files_of, journals, make

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _as_the_command_line() -> Iterator[None]:
    """The handlers of the command line, for as long as a test takes."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS[1:]:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(monkeypatch: pytest.MonkeyPatch, number: int, at: int, function: Callable[[], Any]) -> str | None:
    """What the exception says that ends `function`, in the fsync `at` of which a signal comes; None if none ends it."""
    real, calls = os.fsync, iter(range(1000))

    def fsync(fd: int) -> None:
        real(fd)
        if next(calls) == at:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "fsync", fsync)
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    try:
        function()
    except expected as error:
        return "; ".join(vars(error)["__notes__"])
    finally:
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return None


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("no_undo", [False, True])
@pytest.mark.parametrize("kind", ["zip", "shards", "dcp"])
def test_a_signal_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, no_undo: bool, number: int
) -> None:
    """Before all is written, the old bytes come back, and neither a journal nor a temporary stays; after that it is
    changed, and the words name `undo`, which restores the old bytes.
    """
    make(tmp_path / "kept", kind, tensors=6)
    outcomes = []
    for at in range(100):
        path = make_again(tmp_path, str(at), kind)
        old = contents(path)
        edits: Any = {"rename": [("layer", "LAYER")], "in_place": True, "no_undo": no_undo}
        said = interrupted(monkeypatch, number, at, lambda path=path, edits=edits: ckptconv.convert(path, **edits))  # type: ignore[misc]
        is_old = contents(path) == old
        if said is None:
            break
        outcomes.append(is_old)
        if is_old:
            assert said.endswith(": nothing was changed")
            assert journals(path) == []
        else:
            assert ckptconv.verify(path).ok
            assert ("ckptconv.undo(" in said) != no_undo
            assert "was changed" in said
            assert all(state_of(file) in (None, DONE) for file in files_of(path))
            assert bool(journals(path)) != no_undo
        folder = path if path.is_dir() else path.parent
        assert not [each for each in os.listdir(folder) if each.endswith(".tmp")]
        if not is_old and not no_undo:
            ckptconv.undo(path)
            assert contents(path) == old
    assert not is_old
    assert outcomes[0] and not outcomes[-1]
    assert outcomes == sorted(outcomes, reverse=True)


def make_again(tmp_path: Path, name: str, kind: str) -> Path:
    """A copy of the checkpoint of this `kind`, in a folder of that `name`."""
    shutil.copytree(tmp_path / "kept", tmp_path / name)
    (path,) = (tmp_path / name).iterdir()
    return path


def test_a_signal_while_it_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is undone, then the signal does what it does."""
    path = make(tmp_path, "shards", tensors=6)
    old = contents(path)
    for at in range(100):
        ckptconv.convert(path, in_place=True, rename=[("layer", "LAYER")])
        said = interrupted(monkeypatch, signal.SIGINT, at, lambda: ckptconv.undo(path))
        assert contents(path) == old
        assert journals(path) == []
        if said is None:
            break
        assert said.endswith(": restored")
    assert at > 3


def test_a_handler_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that only takes note of a signal is not interrupted, and hears of each one."""
    path = make(tmp_path, "zip", tensors=6)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    for at in range(7):
        assert interrupted(monkeypatch, signal.SIGTERM, at, lambda: renamed(path)) is None
        assert ckptconv.undo(path)
    assert heard == [signal.SIGTERM] * 6


def renamed(path: Path) -> object:
    return ckptconv.convert(path, in_place=True, rename=[("layer", "LAYER")])


def test_a_fault_and_a_signal_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the old bytes cannot be put back, the words say how to go on, and the signal still ends the program."""
    path = make(tmp_path, "zip", tensors=6)

    def failing(fd: int, parts: Any, journal: Any, size: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing, "_write", failing)
    with pytest.raises(KeyboardInterrupt) as caught:
        renamed(path)
    assert f"ckptconv.undo({str(path)!r})" in vars(caught.value)["__notes__"][0]


KILLED = """
import os, signal, sys
import ckptconv
real = os.fsync
def fsync(fd):
    real(fd)
    os.kill(os.getpid(), signal.SIGTERM)
os.fsync = fsync
ckptconv.convert(sys.argv[1], in_place=True, rename=[("layer", "LAYER")])
"""


def test_a_program_that_sigterm_ends(tmp_path: Path) -> None:
    """Without a handler of Python's nothing can be taken back: it ends when all is done."""
    path = make(tmp_path, "zip", tensors=6)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert done.returncode == -signal.SIGTERM
    assert [*ckptconv.load(path)] == [f"LAYER{i}.weight" for i in range(6)]
    assert state_of(path) == DONE


INTERRUPTED = """
import os, signal, sys
from ckptconv.cli.main import main
real, calls = os.fsync, []
def fsync(fd):
    real(fd)
    calls.append(fd)
    if len(calls) == 9:
        os.kill(os.getpid(), int(sys.argv[1]))
os.fsync = fsync
raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_an_interrupted_batch_has_its_sum(tmp_path: Path, number: int) -> None:
    """Whichever signal ends it: how many are done, and what became of the one that was changing."""
    paths = [make(tmp_path / name, "zip", tensors=6) for name in "abc"]
    old = paths[1].read_bytes()
    edits = ("--in-place", "--rename", "layer", "LAYER")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, f"{number:d}", "convert", *map(str, paths), *edits],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 128 + number
    assert paths[1].read_bytes() == old
    assert state_of(paths[0]) == DONE
    lines = [line for line in done.stderr.splitlines() if line.startswith("ckptconv: ")]
    ended = ["ckptconv: interrupted"] if number == signal.SIGINT else []
    assert lines == ["ckptconv: 1 of 3 are done", f"ckptconv: {paths[1]}: nothing was changed", *ended]
