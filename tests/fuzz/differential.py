"""Compare CPython's unpicklers with the lenient reader on many pickles: ``python -m tests.fuzz.differential
[COUNT]``.

atheris is not needed, and only findings are written, to ``.fuzz/``. The pickles are read in a fork of this process with
a limited address space, because C's unpickler makes its memo as long as the pickle requires. The exit status is 1 if
there is a finding: a global that an unpickler reaches and the lenient reader does not list, an exception of ckptconv,
or the end of the process.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import mmap
import os
import resource
import sys
import time
from pathlib import Path
from random import Random

from tests.fuzz import opcodes, unpicklers
from tests.fuzz.odd_pickles import BY_HAND, made, mutated

__all__ = ["main"]

_FINDINGS = Path(__file__).parents[2] / ".fuzz"
_ADDRESS_SPACE = 384 << 20  # bytes, of which an interpreter uses about 50 MB
_LONGEST = 4096  # bytes of a pickle
_REMEMBERED = 400  # the most pickles that are kept for changes
_NUMBER = 8  # bytes of a number on the board
_EXECUTED, _REACHED, _DOUBTFUL, _FOUND, _LENGTH = range(5)


class _Board:
    """The counters and the current pickle, in memory that is shared with the child process."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE + _LONGEST)

    def __getitem__(self, what: int) -> int:
        return int.from_bytes(self.memory[what * _NUMBER : (what + 1) * _NUMBER], "little")

    def __setitem__(self, what: int, number: int) -> None:
        self.memory[what * _NUMBER : (what + 1) * _NUMBER] = number.to_bytes(_NUMBER, "little")

    def start(self, data: bytes) -> None:
        """Store `data` as the current pickle."""
        self[_LENGTH] = len(data)
        self.memory[mmap.PAGESIZE : mmap.PAGESIZE + len(data)] = data

    def at_hand(self) -> bytes:
        """Return the current pickle."""
        return self.memory[mmap.PAGESIZE : mmap.PAGESIZE + self[_LENGTH]]


def _fuzz(count: int, seed: int, board: _Board) -> None:
    """Compare `count` pickles and keep the findings. The same `seed` gives the same pickles."""
    gc.freeze()
    random = Random(seed)
    pool = [*BY_HAND.values()]
    known: set[str] = set()
    for _ in range(count):
        data = _next(pool, random)[:_LONGEST]
        board.start(data)
        wrong = _wrong(data, board)
        board[_EXECUTED] += 1
        if wrong and wrong not in known:
            known.add(wrong)
            board[_FOUND] = len(known)
            _keep(_smaller(data, board), wrong)
        elif random.random() < 0.02:
            pool = [*pool[-_REMEMBERED:], data]


def _next(pool: list[bytes], random: Random) -> bytes:
    way = random.random()
    if way < 0.5:
        return made(random)
    data = pool[int(random.random() * len(pool))]
    if way < 0.95:
        return mutated(data, random)
    return opcodes.changed(data, random, lambda part: mutated(part, random))


def _wrong(data: bytes, board: _Board | None = None) -> str | None:
    """Return a short description of the error of the lenient reader for `data`, or None. Equal errors have equal
    descriptions.
    """
    try:
        seen = unpicklers.compared(data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if board:
        board[_REACHED] += seen.reached > 0
        board[_DOUBTFUL] += seen.doubtful
    return seen.missed


def _smaller(data: bytes, board: _Board) -> bytes:
    """Return a shortened copy of `data` that still causes an error."""
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            less = data[:at] + data[at + size :]
            board.start(less)
            if _wrong(less):
                data = less
            else:
                at += size
        size //= 2
    return data


def _keep(data: bytes, wrong: str) -> None:
    _FINDINGS.mkdir(exist_ok=True)
    name = f"lenient-{hashlib.sha256(data).hexdigest()[:8]}"
    (_FINDINGS / name).write_bytes(data)
    print(f"FOUND {name}: {wrong} in {data!r}", flush=True)


def _bounded(count: int, seed: int, board: _Board) -> int:
    """Run the comparison in a fork of this process and return the exit status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Python prints exceptions there that it cannot raise
            _fuzz(count, seed, board)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other pickles")
    asked = parser.parse_args(arguments)
    board = _Board()
    started = time.monotonic()
    status = _bounded(asked.count, asked.seed, board)
    spent = time.monotonic() - started
    if status:
        board[_FOUND] += 1
        _keep(board.at_hand(), f"the process ended with {status}")
    print(
        f"{board[_EXECUTED]:,} pickles in {spent:,.0f} s, {board[_EXECUTED] / spent:,.0f} a second: a global reached in"
        f" {board[_REACHED]:,}, not judged {board[_DOUBTFUL]:,}, findings {board[_FOUND]:,}"
    )
    return 1 if board[_FOUND] else 0


if __name__ == "__main__":
    sys.exit(main())
