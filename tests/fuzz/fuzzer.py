"""The inputs of one target: each is run and judged. A finding is stored, and shortened if that is fast.

Besides the findings of :mod:`tests.fuzz.targets`, an input is a finding if it exceeds a budget. The budget of processor
time is 1 s and 2 s for each MB. The budget of additional memory is 64 MB and 300 bytes for each byte of input, which is
also the maximum number of opcodes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import resource
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz import targets

__all__ = ["HANG", "LONGEST", "Fuzzer", "start"]

MB = 1 << 20
LONGEST = 1 << 14  # bytes of an input
HANG = 30  # seconds
#: Limits of the processor time and of the memory for one input: a fixed amount, and an amount for each byte of the
#: input.
_BUDGET = {"seconds": (1.0, 2.0 / MB), "memory": (64 * MB, 300)}
_TOO_MUCH = 1 << 33  # bytes of address space; larger requests raise MemoryError, which is a finding
_SMALLER = 5.0  # seconds to shorten a finding
_REMEMBERED = 300  # the most inputs to remember that were read successfully
_EVERY = 20  # executions between two reports


class Fuzzer:
    """A fuzzer that runs `target` on inputs, with a report in the folder `work` and findings in the folder `finds`."""

    def __init__(self, target: str, work: Path, corpus: Path, finds: Path) -> None:
        self.target = target
        self.work = work
        self.finds = finds
        self.folder = work / "files"
        self.folder.mkdir(exist_ok=True)
        self.known: set[str] = set()
        # These inputs are also changed later, because most of a growing corpus is refused early.
        self.good = [path.read_bytes() for path in sorted(corpus.iterdir())]
        self.report = {"executions": 0, "read": 0, "findings": 0, "slowest": 0.0, "memory": 0, "most_memory": 0}
        self.peak = _peak()

    def test_one(self, data: bytes) -> None:
        """Run `data` once, and keep a finding."""
        wrong = self.wrong(data)
        self.report["executions"] += 1
        if wrong and wrong not in self.known:
            self.known.add(wrong)
            self.report["findings"] = len(self.known)
            self.keep(wrong, self.smaller(data, wrong))
        if self.report["executions"] % _EVERY == 1 or wrong:
            self.write_report()

    def write_report(self) -> None:
        """Write the current report."""
        (self.work / "report.json").write_text(json.dumps(self.report))

    def wrong(self, data: bytes) -> str | None:
        """Return a short description of the error for `data`, or None. Equal errors have equal descriptions."""
        before, started = _resident(), time.process_time()
        try:
            read = targets.run(self.target, data, self.folder)
        except Exception as error:
            return _named(error)
        spent = time.process_time() - started
        if read:
            self.report["read"] += 1
            self.good = [*self.good[-_REMEMBERED:], data]
        self.report["slowest"] = max(self.report["slowest"], round(spent, 3))
        peak = _peak()
        taken = peak - before if peak > self.peak else 0
        self.peak = max(peak, self.peak)
        self.report["memory"] = max(self.report["memory"], taken)
        self.report["most_memory"] = self.peak
        for what, value in (("seconds", spent), ("memory", taken)):
            floor, each = _BUDGET[what]
            if value > floor + each * len(data):
                return f"too much {what}"
        return None

    def smaller(self, data: bytes, wrong: str) -> bytes:
        """Return a shortened copy of `data` with the same error. The search has a time limit."""
        until = time.monotonic() + _SMALLER
        size = max(len(data) // 2, 1)
        while size and time.monotonic() < until:
            at = 0
            while at < len(data) and time.monotonic() < until:
                less = data[:at] + data[at + size :]
                if self.wrong(less) == wrong:
                    data = less
                else:
                    at += size
            size //= 2
        return data

    def keep(self, wrong: str, data: bytes) -> None:
        name = f"{self.target}-{hashlib.sha256(data).hexdigest()[:8]}"
        (self.finds / name).write_bytes(data)
        print(f"FOUND {name}: {wrong}", flush=True)


def _peak() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    """Return the current memory of this process in bytes.

    budgets.memory parses a text instead, which takes a tenth of the time of a small input.
    """
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE


def _named(error: Exception) -> str:
    where = [f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__} {re.sub(r'[0-9]+', 'N', str(error))[:60]!r} in {' < '.join(where[:-4:-1])}"


def start() -> None:
    """Set the limits of this process that every target needs.

    No objects are frozen for the garbage collector: conversions count frozen objects, which would take most of the
    time.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_TOO_MUCH, _TOO_MUCH))
    sys.setrecursionlimit(10_000)  # the reference machine recurses as deeply as the pickle nests
