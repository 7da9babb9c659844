"""The wheel, installed without torch and used outside of the checkout: what only moves bytes works, and what computes
numbers says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import FIXTURES, ROOT


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, click and rich in it, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("ckptconv-*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    for words in (["click", "rich"], ["--no-deps", str(wheel)]):
        subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "-q", *words], check=True)
    return folder / "venv"


def run(environment: Path, here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([environment / "bin/ckptconv", *words], cwd=here, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        "inspect ddp.pt", "verify ddp.pt", "diff ddp.pt copy.pt", "convert ddp.pt cpu.pt --to cpu --unwrap",
        "convert ddp.pt weights.safetensors", "convert ddp.pt --to cpu --in-place", "--help",
    ],
)  # fmt: skip
def test_what_needs_no_torch(words: str, environment: Path, tmp_path: Path) -> None:
    for name in ("ddp.pt", "copy.pt"):
        shutil.copy(FIXTURES / "dataparallel.pt", tmp_path / name)
    done = run(environment, tmp_path, *words.split())
    assert done.returncode == 0, done.stderr


def test_what_needs_torch(environment: Path, tmp_path: Path) -> None:
    """One line that says so, and no output."""
    shutil.copy(FIXTURES / "cpu.pt", tmp_path / "a.pt")
    done = run(environment, tmp_path, "convert", "a.pt", "half.pt", "--dtype", "bf16")
    assert done.returncode == 1 and "torch" in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_the_manual_page_is_installed(environment: Path) -> None:
    assert (environment / "share/man/man1/ckptconv.1").exists()
