"""Tests of the comparison between the lenient reader and CPython's unpicklers, in separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.odd_pickles import BY_HAND

_ROOT = Path(__file__).parents[2]
_COUNT = 500_000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 15_000

#: Errors that the lenient reader once had, as statements that bring them back. A few thousand pickles show each error.
_STRICTER = {
    "slots end at NUL": "lenient._DISPATCH[ord('p')] = lambda m: m.put(int(m.line()))",
    "lines have an end": "lenient._Lenient.line = PickleMachine.line",
    "frames end in the pickle": "lenient._DISPATCH[0x95] = lambda m: m.length(8)",
    "frames cut nothing": "lenient._Lenient.check_frame = lambda m: None",
    "no buffers are given": "lenient._DISPATCH[0x97] = None",
    "a global is called by REDUCE alone": "lenient._Lenient.effect = lambda m, *_: m.stack[-1]",
}


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `program` with the findings of the driver in `folder`."""
    start = (
        "import sys; from pathlib import Path; from ckptconv.pickles import lenient;"
        " from ckptconv.pickles.machine import PickleMachine; from tests.fuzz import differential;"
        f" differential._FINDINGS = Path({str(folder)!r});"
    )
    command = [sys.executable, "-W", "ignore", "-c", f"{start}{program}"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=1800)


def test_every_global_is_listed(tmp_path: Path) -> None:
    """The lenient reader lists every global that an unpickler reaches. More than a quarter of the pickles reach a
    global.
    """
    done = _run(f"sys.exit(differential.main(['{_COUNT}', '--seed', '20']))", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    executed, reached = _numbers(done.stdout)
    assert executed == _COUNT and reached > _COUNT / 4
    assert not [*tmp_path.iterdir()]


def _numbers(line: str) -> tuple[int, int]:
    """Return the number of pickles, and of those that reach a global."""
    found = re.match(r"([\d,]+) pickles in .* a global reached in ([\d,]+),", line)
    assert found, line
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("how", _STRICTER)
def test_a_stricter_reader_is_detected(how: str, tmp_path: Path) -> None:
    """A reader that accepts less misses a global. A shortened pickle that shows this is stored."""
    done = _run(f"{_STRICTER[how]}; sys.exit(differential.main(['6000']))", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (found, *_) = tmp_path.iterdir()
    assert found.name.startswith("lenient-") and len(found.read_bytes()) < max(map(len, BY_HAND.values()))


def test_the_end_of_the_process_is_a_finding(tmp_path: Path) -> None:
    """A pickle that ends the process is a finding, and is stored."""
    done = _run(
        "import os; differential.unpicklers.compared = lambda data: os.abort(); sys.exit(differential.main(['10']))",
        tmp_path,
    )
    assert done.returncode == 1 and "the process ended with -6" in done.stdout, done.stdout + done.stderr
    assert len([*tmp_path.iterdir()]) == 1
