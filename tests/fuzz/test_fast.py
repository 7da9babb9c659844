"""Tests of the driver without coverage, in separate processes: it keeps new inputs and findings, and adds up runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

_HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  '
_FILE = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)


def _fuzz(folder: Path, change: str = "", seconds: int = 2) -> tuple[dict[str, Any], str]:
    """Run the driver for `seconds` after the statement `change`, and return its report and output.

    The corpus, the findings and the tally are in `folder`.
    """
    for name in ("corpus", "finds", "work"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "corpus" / "one").write_bytes(_FILE)
    program = (
        "import json, os, sys; from pathlib import Path; from tests.fuzz import __main__ as main, fast, targets;"
        f" folder = Path({str(folder)!r}); main._FINDINGS = folder / 'finds'; {change or 'pass'};"
        f" report = main._fuzz(fast.fuzz, 'safetensors', {seconds}, folder / 'work', folder / 'corpus');"
        " main._tally(folder / 'tally.json', 'safetensors', report); print(json.dumps(report))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *said, report = done.stdout.splitlines()
    return json.loads(report), "\n".join(said)


def test_runs_add_up(tmp_path: Path) -> None:
    """Inputs that raise an error at a new place are added to the corpus. The next run starts with them, and the tally
    contains the sums of both runs.
    """
    first, said = _fuzz(tmp_path)
    corpus = {path.name for path in (tmp_path / "corpus").iterdir()}
    assert first["executions"] > 20 and first["read"] and not first["findings"], said
    assert len(corpus) > 1
    second, _ = _fuzz(tmp_path)
    assert {path.name for path in (tmp_path / "corpus").iterdir()} >= corpus
    tally = json.loads((tmp_path / "tally.json").read_text())["safetensors"]
    assert tally["runs"] == 2 and tally["executions"] == first["executions"] + second["executions"]
    assert tally["slowest"] == max(first["slowest"], second["slowest"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("targets._verified = lambda given: [][1]", "IndexError"),
        ("targets._verified = lambda given: os.abort()", "the process ended with -6"),
        ("fast.HANG = 1; targets._verified = lambda given: sum(iter(int, 1))", "the process ended with -27"),
    ],
    ids=["an error that is none of ours", "the end of the process", "a hang"],
)
def test_findings_are_stored(change: str, words: str, tmp_path: Path) -> None:
    """An unexpected exception, the end of the process and a hang are findings, and the input is stored."""
    report, said = _fuzz(tmp_path, change)
    assert report["findings"] and words in said
    assert all(path.name.startswith("safetensors-") for path in (tmp_path / "finds").iterdir())
    assert [*(tmp_path / "finds").iterdir()]
