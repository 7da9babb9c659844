"""Limits for a user's regular expression that is matched with the names in a file. The time is bounded, and the error
contains the name.
"""

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
#: Patterns, each with a name for which the match never ends.
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
    """A single match that takes too long is interrupted. The error contains the name of the tensor, nothing is written,
    and no timer remains.
    """
    name = ENDLESS[pattern]
    src = saved_at(tmp_path / "a.pt", {"w": torch.ones(2), name: torch.ones(2)})
    error = refused(LimitError, "takes too long", src, tmp_path / "out.pt", rename=[(pattern, "x")])
    assert name in str(error.got) and not (tmp_path / "out.pt").exists()
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


def test_many_matches_in_any_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The total time of all matches is bounded, also in a thread that receives no signal."""
    monkeypatch.setattr(rename, "LIMITS", dataclasses.replace(LIMITS, match_seconds=0))
    src = saved_at(tmp_path / "a.pt", {"w": torch.ones(2)})
    convert = partial(ckptconv.convert, src, tmp_path / "out.pt", rename=[("w", "x")])
    with ThreadPoolExecutor(1) as pool, pytest.raises(LimitError, match=r"takes too long.*at the name w"):
        pool.submit(convert).result()


@pytest.mark.parametrize("pattern", [r"\.+$", r"(\w+\.)*weight"])
def test_a_name_that_is_too_long(pattern: str, tmp_path: Path) -> None:
    """A name that is longer than any real name is not matched with a pattern. Without a pattern, its file is
    converted.
    """
    name = "." * 200_000
    src = tmp_path / "a.safetensors"
    save_file({name: torch.ones(2)}, src)
    error = refused(LimitError, "too long to be matched", src, tmp_path / "out.pt", rename=[(pattern, "x")])
    assert str(error.got).startswith("200,000: ....")
    assert list(converted(src, tmp_path / "out.safetensors")) == [name]


@needs_timers
def test_a_timer_of_the_program(tmp_path: Path) -> None:
    """A timer that the program has set before a conversion still fires."""
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
