"""A user's regular expression on names that a file chose: the time is bounded, and the error has the name."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.edits import rename
from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS
from tests.support.conversions import converted, refused, saved_at

needs_timers = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such timers")
#: Patterns that never end with such a name, and the name.
ENDLESS = {
    r"(\w+)*!": "encoder." + "a" * 60,
    r"(\w+\.?)*weight$": "a" * 60 + ".bias",
}


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "LIMITS", dataclasses.replace(LIMITS, match_seconds=1))


@needs_timers
@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_match_that_does_not_end(pattern: str, one_second: None, tmp_path: Path) -> None:
    """A single match is interrupted, nothing is written, the tensor is named, and no timer is left."""
    name = ENDLESS[pattern]
    src = saved_at(tmp_path / "a.pt", {"w": torch.ones(2), name: torch.ones(2)})
    error = refused(LimitError, "takes too long", src, tmp_path / "out.pt", rename=[(pattern, "x")])
    assert name in str(error.got) and not (tmp_path / "out.pt").exists()
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


def test_many_matches_in_any_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The time of all matches together is bounded where no signal comes, too."""
    monkeypatch.setattr(rename, "LIMITS", dataclasses.replace(LIMITS, match_seconds=0))
    src = saved_at(tmp_path / "a.pt", {"w": torch.ones(2)})
    convert = partial(ckptconv.convert, src, tmp_path / "out.pt", rename=[("w", "x")])
    with ThreadPoolExecutor(1) as pool, pytest.raises(LimitError, match=r"takes too long.*at the name w"):
        pool.submit(convert).result()


@pytest.mark.parametrize("pattern", [r"\.+$", r"(\w+\.)*weight"])
def test_a_name_that_is_too_long(pattern: str, tmp_path: Path) -> None:
    """A name longer than any real one is not matched with patterns; without one it is converted."""
    name = "." * 200_000
    src = tmp_path / "a.safetensors"
    save_file({name: torch.ones(2)}, src)
    error = refused(LimitError, "too long to be matched", src, tmp_path / "out.pt", rename=[(pattern, "x")])
    assert str(error.got).startswith("200,000: ....")
    assert list(converted(src, tmp_path / "out.safetensors")) == [name]


@needs_timers
def test_a_timer_of_the_program(tmp_path: Path) -> None:
    """A timer that the program has set still rings for the program."""
    rung: list[int] = []
    src = saved_at(tmp_path / "a.pt", {"w": torch.ones(2)})
    before = signal.signal(signal.SIGVTALRM, lambda number, _: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.2)
        assert list(converted(src, tmp_path / "out.pt", rename=[("w", "x")])) == ["x"]
        stop = time.process_time() + 20
        while not rung and time.process_time() < stop:
            pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert rung == [signal.SIGVTALRM]
