"""All targets, one after another: ``python -m tests.fuzz [SECONDS]``, 60 in all unless said otherwise.

A line for each; findings stand in ``.fuzz/``; exit 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main"]

_ROOT = Path(__file__).parents[2]
_FINDINGS = _ROOT / ".fuzz"
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a folder without a disk below it
_LEAST = 2  # seconds for a target
_LINE = "{:<12}{:>12}{:>12}{:>10}{:>11}{:>11}{:>9}"


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=int, default=60)
    parser.add_argument("--target", action="append", help="this one alone (repeatable)")
    asked = parser.parse_args()
    started = time.monotonic()
    _FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptconv-fuzz-", dir=_MEMORY) as name:
        # which needs torch
        seeding = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "tests.fuzz.seeds", name])
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # a line for each module
                from tests.fuzz.run import fuzz
        except ImportError as error:
            sys.exit(
                f"{error}: atheris is needed, which has wheels for CPython 3.11 to 3.13 on Linux: pip install -e"
                " '.[fuzz]'"
            )
        if seeding.wait():
            return 1
        print(_LINE.format("target", "executions", "read", "findings", "slowest", "memory", "corpus"), flush=True)
        chosen = asked.target or sorted(path.name for path in Path(name).iterdir())
        findings = 0
        for i, target in enumerate(chosen):
            left = asked.seconds - (time.monotonic() - started)
            report, corpus = _fuzz(fuzz, target, max(_LEAST, left / (len(chosen) - i)), Path(name, target))
            _say(target, report, corpus)
            findings += report["findings"]
    if findings:
        print(f"each once more: python -m tests.fuzz.again {_FINDINGS.relative_to(_ROOT)}/NAME")
    return 1 if findings else 0


def _fuzz(
    fuzz: Callable[[str, int, Path, Path], None], target: str, seconds: float, work: Path
) -> tuple[dict[str, Any], int]:
    """`fuzz` `target` for so many `seconds`, in a process of its own; where an input ends that, in another one for what
    is left. What they did, and the size of the corpus.
    """
    for kept in (Path(__file__).parent / "findings").glob(f"{target}-*"):
        (work / "corpus" / kept.name).write_bytes(kept.read_bytes())
    until = time.monotonic() + seconds
    total: dict[str, Any] = {}
    while not total or time.monotonic() < until - 1:
        status = _forked(lambda: fuzz(target, max(1, int(until - time.monotonic())), work, _FINDINGS), work / "log")
        log = (work / "log").read_text(errors="replace")
        for line in re.findall("^FOUND .*", log, re.MULTILINE):
            print(line)
        report = work / "report.json"
        if not report.exists():
            sys.exit(f"{target}: fuzzing did not start\n{log[-2000:]}")
        _add(total, json.loads(report.read_text()), executed=re.search(r"number_of_executed_units: (\d+)", log))
        report.unlink()
        if status:
            total["findings"] += 1
            print(f"FOUND {target}: the process ended with {status}\n{log[-1500:]}")
    return total, len([*(work / "corpus").iterdir()])


def _forked(run: Callable[[], None], log: Path) -> int:
    """`run` in a copy of this process, which has everything imported, with its output in `log`; the exit status."""
    pid = os.fork()
    if not pid:
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            run()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _add(total: dict[str, Any], report: dict[str, Any], executed: re.Match[str] | None) -> None:
    """`report` of one more process, into `total`; `executed`: how many inputs libFuzzer says that it tried."""
    if executed:
        report["executions"] = max(report["executions"], int(executed[1]))
    for key, value in report.items():
        total[key] = (
            total.get(key, 0) + value if key in ("executions", "read", "findings") else max(total.get(key, 0), value)
        )


def _say(target: str, report: dict[str, Any], corpus: int) -> None:
    print(
        _LINE.format(
            target,
            f"{report['executions']:,}",
            f"{report['read']:,}",
            report["findings"],
            f"{report['slowest']:.2f} s",
            f"{report['most_memory'] / (1 << 20):.0f} MiB",
            f"{corpus:,}",
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
