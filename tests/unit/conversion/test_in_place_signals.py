"""Tests of signals while a file is changed in place. The file is then the old or the new one, and the message is
correct.
"""

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
    """Install the signal handlers of the command line for each test."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS[1:]:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(monkeypatch: pytest.MonkeyPatch, number: int, at: int, function: Callable[[], Any]) -> str | None:
    """Run `function`, and send the signal `number` in the fsync with the index `at`. Return the notes of the exception
    that ends `function`, or None if it is not interrupted.
    """
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


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("no_undo", [False, True])
@pytest.mark.parametrize("kind", ["zip", "shards", "dcp"])
def test_a_signal_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, no_undo: bool, number: int
) -> None:
    """A signal before everything is written restores the old bytes, and leaves no journal or temporary file. A later
    signal leaves the changed file, and the message suggests `undo`.
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
    """Return a new copy of the checkpoint, in a folder named `name`."""
    shutil.copytree(tmp_path / "kept", tmp_path / name)
    (path,) = (tmp_path / name).iterdir()
    return path


def test_a_signal_during_undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An undo is completed before a signal ends the program."""
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


def test_a_handler_that_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the handler of a signal returns, the change is not interrupted, and the handler is called once for each
    signal.
    """
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
    """If a write fails and the old bytes cannot be restored, the message suggests `undo`. A signal at the same time
    still ends the program.
    """
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
    """If SIGTERM has no Python handler, the change is completed before the signal ends the program."""
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
def test_an_interrupted_batch_prints_its_summary(tmp_path: Path, number: int) -> None:
    """If a signal ends a batch in place, the command prints the number of changed files and the state of the current
    file.
    """
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
