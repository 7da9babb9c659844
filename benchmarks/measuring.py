"""A benchmark that runs commands in turns, prints a table of their cost, and compares it with limits."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """The cost of one run of a command."""

    seconds: float
    cpu: float  #: seconds of processor time of all processes of the command
    kib: int  #: peak memory in KiB, or 0 if it is not known


class Bench:
    """A benchmark: the folder for its files, the number of runs of each command, and the results so far."""

    def __init__(self, folder: Path, runs: int, before: Path | None = None) -> None:
        self.folder = folder
        self.runs = runs
        self.before = before  #: the folder of an older version, which is measured in turn with this one
        self.limit: float | None = None  #: the limit for the first row of the next table
        self._first: list[str] = []
        self._against: list[str] = []

    def table(self, title: str, commands: dict[str, list[str]], unit: str) -> None:
        """Run `commands` in turns, each round in another order, and print a table. The first round does not count."""
        commands = dict(self._with_before(commands))
        taken = _in_turns(commands, self.runs)
        print(f"\n| {title} | lower quartile | median | of {unit} | in half of the rounds | processor | peak memory |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, done in taken.items():
            seconds = [run.seconds for run in done]
            low, high = _middle(seconds, [run.seconds for run in taken[unit]])
            ratio = _quartile(seconds) / _quartile([run.seconds for run in taken[unit]])
            peak = max(run.kib for run in done) * 1024 / 1e6
            print(
                f"| {name} | {_quartile(seconds):.2f} s | {statistics.median(seconds):.2f} s | {ratio:.2f}"
                f" | {low:.2f}–{high:.2f} | {statistics.median(run.cpu for run in done):.2f} s"
                f" | {f'{peak:,.0f} MB' if peak else ''} |",
                flush=True,
            )
            if name == next(iter(taken)):
                must = "" if self.limit is None else f"{self.limit:g}: {_judged(low, high, self.limit)}"
                self._first.append(f"| {title}: {name} | {unit} | {ratio:.2f} | {low:.2f}–{high:.2f} | {must} |")
            if (older := f"{name}, before") in taken:
                self._against.append(_against(f"{title}: {name}", done, taken[older]))

    def _with_before(self, commands: dict[str, list[str]]) -> Sequence[tuple[str, list[str]]]:
        """Return `commands`. Each ckptconv command is followed by the same command with the older version, if that
        supports it.
        """
        found = []
        for name, command in commands.items():
            found.append((name, command))
            ours = any(flag == "-c" and "import ckptconv" in code for flag, code in pairwise(command))
            if self.before and ours:
                older = ["env", f"PYTHONPATH={self.before}", *command]
                if subprocess.run(older, capture_output=True, cwd="/").returncode == 0:
                    found.append((f"{name}, before", older))
                else:
                    self._against.append(f"| {name} | the older version cannot do it | | | |")
        return found

    def summary(self) -> None:
        """Print the first row of each table with its limit, and compare each command with the older version."""
        print(
            "\n| first of each table | of | ratio | in half of the rounds | at most |\n| --- | --- | --- | --- | --- |"
        )
        print(*self._first, sep="\n")
        if self._against:
            print("\n| this version / the one before | time | in half of the rounds | processor | in half |")
            print("| --- | --- | --- | --- | --- |")
            print(*self._against, sep="\n")


def _in_turns(commands: dict[str, list[str]], runs: int) -> dict[str, list[Run]]:
    taken: dict[str, list[Run]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(-1, runs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            run = measure(commands[name])
            if turn >= 0:
                taken[name].append(run)
    return taken


def measure(command: list[str]) -> Run:
    """Return the cost of `command` from start to end. Its peak memory is the last word of its output."""
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd="/")  # not a checkout
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    last = done.stdout.split()[-1:]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cpu, int(last[0]) if last and last[0].isdigit() else 0)


def _quartile(values: list[float]) -> float:
    return statistics.quantiles(values, method="inclusive")[0] if len(values) > 1 else values[0]


def _middle(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the quartiles of the ratios of `mine` to `theirs`. Each round is compared only with itself."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, high


def _judged(low: float, high: float, limit: float) -> str:
    """Return whether `limit` is met, or "too close to tell" if the noise spans it."""
    return "kept" if high <= limit else "missed" if low > limit else "too close to tell"


def _against(name: str, now: list[Run], before: list[Run]) -> str:
    """Return a row that compares this version with the older one: the median ratio of the rounds and its quartiles."""
    columns = []
    for mine, theirs in (
        ([r.seconds for r in now], [r.seconds for r in before]),
        ([r.cpu for r in now], [r.cpu for r in before]),
    ):
        low, high = _middle(mine, theirs)
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        columns.append(f"{ratio:.2f} | {low:.2f}–{high:.2f}")
    return f"| {name} | {' | '.join(columns)} |"
