"""Fuzz all targets, one after another: ``python -m tests.fuzz [SECONDS]``. The default is 60 seconds in total.

One line is printed for each target. Findings are stored in ``.fuzz/``, and the exit status is 1 if there are any.
``--fast`` turns off coverage, which takes more time than the targets themselves. ``--corpora FOLDER`` or
``CKPTCONV_FUZZ_CORPORA`` keeps the inputs in a folder for the next run, with the sums of all runs in ``tally.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["main"]

_ROOT = Path(__file__).parents[2]
_FINDINGS = _ROOT / ".fuzz"
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a folder in memory
_LEAST = 2  # the least seconds for each target
_LINE = "{:<12}{:>12}{:>10}{:>12}{:>10}{:>11}{:>11}{:>9}"
_ADDED = ("executions", "read", "findings", "seconds", "runs")  # added up over processes; the other values are maximums

_Fuzz = Callable[[str, int, Path, Path, Path], None]


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=int, default=60)
    parser.add_argument("--target", action="append", help="this one alone (repeatable)")
    parser.add_argument("--fast", action="store_true", help="without coverage; needs no atheris")
    parser.add_argument("--corpora", type=Path, default=os.environ.get("CKPTCONV_FUZZ_CORPORA"))
    asked = parser.parse_args()
    started = time.monotonic()
    _FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptconv-fuzz-", dir=_MEMORY) as name:
        corpora = Path(asked.corpora or Path(name, "corpora"))
        # a separate process, because the seeds need torch
        seeding = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "tests.fuzz.seeds", str(corpora)])
        fuzz = _driver(fast=asked.fast)
        if seeding.wait():
            return 1
        print(
            _LINE.format("target", "executions", "a second", "read", "findings", "slowest", "memory", "corpus"),
            flush=True,
        )
        chosen = asked.target or sorted(path.name for path in corpora.iterdir() if path.is_dir())
        findings = 0
        for i, target in enumerate(chosen):
            left = asked.seconds - (time.monotonic() - started)
            work = Path(name, target)
            work.mkdir()
            report = _fuzz(fuzz, target, max(_LEAST, left / (len(chosen) - i)), work, corpora / target)
            _say(target, report, corpora / target)
            findings += report["findings"]
            if asked.corpora:
                _tally(corpora / "tally.json", target, report)
        if asked.corpora:
            _say_sum(corpora)
    if findings:
        print(f"each once more: python -m tests.fuzz.again {_FINDINGS.relative_to(_ROOT)}/NAME")
    return 1 if findings else 0


def _driver(*, fast: bool) -> _Fuzz:
    """Return the function that fuzzes one target."""
    if fast:
        from tests.fuzz import fast as plain

        return plain.fuzz
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # atheris prints a line for each module
            from tests.fuzz import run
    except ImportError as error:
        sys.exit(
            f"{error}: atheris is needed, which has wheels for CPython 3.11 to 3.13 on Linux: pip install -e '.[fuzz]'"
        )
    return run.fuzz


def _fuzz(fuzz: _Fuzz, target: str, seconds: float, work: Path, corpus: Path) -> dict[str, Any]:
    """Run `fuzz` on `target` for `seconds` in a child process, and return the report.

    If an input ends the process, another process uses the remaining time, and the reports are combined.
    """
    for kept in (Path(__file__).parent / "findings").glob(f"{target}-*"):
        (corpus / kept.name).write_bytes(kept.read_bytes())
    started = time.monotonic()
    until = started + seconds
    total: dict[str, Any] = {}
    while not total or time.monotonic() < until - 1:
        left = max(1, int(until - time.monotonic()))
        status = _forked(partial(fuzz, target, left, work, corpus, _FINDINGS), work / "log")
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
            _keep_at_hand(target, work)
    return total | {"seconds": round(time.monotonic() - started, 1)}


def _keep_at_hand(target: str, work: Path) -> None:
    """Store the input that ended a process of the fast driver. libFuzzer stores its own inputs."""
    try:
        length, data = struct.unpack("<Q", (found := (work / "at_hand").read_bytes())[:8])[0], found[8:]
    except FileNotFoundError:
        return
    (_FINDINGS / f"{target}-{hashlib.sha256(data[:length]).hexdigest()[:8]}").write_bytes(data[:length])


def _forked(run: Callable[[], object], log: Path) -> int:
    """Call `run` in a fork of this process, with its output in `log`, and return the exit status.

    The fork has already imported all modules.
    """
    pid = os.fork()
    if not pid:
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _add(total: dict[str, Any], report: dict[str, Any], executed: re.Match[str] | None) -> None:
    """Add the `report` of another process to `total`. `executed` contains libFuzzer's own number of executions."""
    if executed:
        report["executions"] = max(report["executions"], int(executed[1]))
    for key, value in report.items():
        total[key] = total.get(key, 0) + value if key in _ADDED else max(total.get(key, 0), value)


def _tally(path: Path, target: str, report: dict[str, Any]) -> None:
    """Add the `report` of a run to the file at `path`."""
    tally = json.loads(path.read_text()) if path.exists() else {}
    _add(tally.setdefault(target, {}), {**report, "runs": 1}, executed=None)
    path.write_text(json.dumps(tally, indent=1) + "\n")


def _say_sum(corpora: Path) -> None:
    """Print the sums of all runs with these `corpora`."""
    tally = json.loads((corpora / "tally.json").read_text())
    print("in all runs:")
    for target, report in tally.items():
        _say(target, report, corpora / target)
    total: dict[str, Any] = {}
    for report in tally.values():
        _add(total, report, executed=None)
    _say("all", total, None)


def _say(target: str, report: dict[str, Any], corpus: Path | None) -> None:
    print(
        _LINE.format(
            target,
            f"{report['executions']:,}",
            f"{report['executions'] / report['seconds']:,.0f}",
            f"{report['read']:,}",
            report["findings"],
            f"{report['slowest']:.2f} s",
            f"{report['most_memory'] / (1 << 20):.0f} MiB",
            f"{len([*corpus.iterdir()]):,}" if corpus else "",
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
