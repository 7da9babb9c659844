"""Without NumPy, torch prints a warning when it is imported. The command line does not show this warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def here(here: Path) -> None:
    """Write checkpoints, and a folder with a ``numpy`` module that cannot be imported."""
    for name in ("a.pt", "many/b.pt", "many/c.pt"):
        path = here / name
        path.parent.mkdir(exist_ok=True)
        torch.save({"w": torch.arange(4.0)}, path)
    (here / "none").mkdir()
    (here / "none" / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `words`, without NumPy."""
    path = os.pathsep.join((str(Path("none").absolute()), str(Path(__file__).parents[2])))
    others = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, *words]
    env = {**others, "PYTHONPATH": path, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env)


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    ["convert a.pt out.pt --dtype bf16", "convert many out -j 2 --dtype bf16", "diff a.pt many/b.pt --full"],
)
def test_no_warning_of_torch_is_printed(typed: str) -> None:
    """Results and reports are printed without torch's warning, also in worker processes."""
    said = run("-m", "ckptconv", *typed.split())
    assert "Warning" not in said.stderr and "NumPy" not in said.stderr
    assert "the same" in said.stdout or "bfloat16" in said.stderr


def test_requested_warnings_are_printed() -> None:
    """``PYTHONWARNINGS`` makes the command line show torch's warning. The import of torch alone also prints it."""
    assert "NumPy" in run("-c", "import torch").stderr
    said = run("-m", "ckptconv", "convert", "a.pt", "out.pt", "--dtype", "bf16", PYTHONWARNINGS="default")
    assert "NumPy" in said.stderr
