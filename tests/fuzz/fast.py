"""Fuzz one target without coverage, which is several times as fast. An input is new if it raises an error at a new
place.

atheris is not needed. An input that hangs ends the process, and is stored in ``work/at_hand``.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from ckptconv.errors import CkptconvError
from tests.fuzz.fuzzer import HANG, LONGEST, Fuzzer, start
from tests.fuzz.mutators import MUTATORS, noise

__all__ = ["fuzz"]

_NUMBER = 8  # bytes of the length before the current input, little-endian
_CHANGES = (1, 1, 1, 2, 4)  # numbers of successive changes


class _Places:
    """The places where errors are created: the line of the call, and the line of its caller."""

    def __init__(self) -> None:
        self.known: set[object] = set()
        self.is_new = False

    def watch(self) -> None:
        """Record every CkptconvError that is created from now on."""
        made = CkptconvError.__init__

        def watched(error: CkptconvError, *args: Any, **kwargs: Any) -> None:
            made(error, *args, **kwargs)
            self.add(sys._getframe(1))

        CkptconvError.__init__ = watched  # type: ignore[method-assign]

    def add(self, frame: FrameType | None) -> None:
        while frame and frame.f_code.co_name == "__init__":
            frame = frame.f_back
        above = frame and frame.f_back
        place = tuple((each.f_code, each.f_lineno) for each in (frame, above) if each)
        self.is_new |= place not in self.known
        self.known.add(place)


def fuzz(target: str, seconds: int, work: Path, corpus: Path, finds: Path) -> None:
    """Fuzz `target` with the inputs in `corpus`, and add new inputs to it.

    The report is written to `work`, and findings to `finds`.
    """
    start()
    until = time.monotonic() + seconds
    fuzzer, places, random = Fuzzer(target, work, corpus, finds), _Places(), Random(os.urandom(8))
    places.watch()
    fuzzer.write_report()  # for the parent, if the first input ends this process
    pool, known = [*fuzzer.good], set(fuzzer.good)
    first = iter(pool.copy())  # run first, so that changes count only with new errors
    with (work / "at_hand").open("w+b") as file:
        file.truncate(_NUMBER + LONGEST)
        hand = mmap.mmap(file.fileno(), 0)
        while time.monotonic() < until:
            data = next(first, None) or _changed(target, random.choice(random.choice((pool, fuzzer.good))), random)
            data = data[:LONGEST]
            hand[: _NUMBER + len(data)] = len(data).to_bytes(_NUMBER, "little") + data
            signal.setitimer(signal.ITIMER_PROF, HANG)
            places.is_new = False
            fuzzer.test_one(data)
            if places.is_new and data not in known:
                known.add(data)
                pool.append(data)
                (corpus / hashlib.sha256(data).hexdigest()[:40]).write_bytes(data)
    fuzzer.write_report()
    os._exit(0)


def _changed(target: str, data: bytes, random: Random) -> bytes:
    def change(part: bytes) -> bytes:
        return noise(part, random)

    for _ in range(random.choice(_CHANGES)):
        data = change(data) if random.random() < 0.1 else MUTATORS[target](data, random, change)
    return data
