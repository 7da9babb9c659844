"""The wheel, installed without torch and used outside of the checkout. Commands that only move bytes work, and commands
that compute numbers print the package to install. The last tests check the files that ``.ci/release`` publishes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptconv
from ckptconv import convert
from tests.support.paths import FIXTURES, ROOT


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new environment with the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("ckptconv-*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "-q", wheel], check=True)
    return folder / "venv"


def run(environment: Path, here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([environment / "bin/ckptconv", *words], cwd=here, env=clean, capture_output=True, text=True)


def test_dependencies_exclude_torch_and_numpy(environment: Path) -> None:
    """The wheel installs only click and rich, with their dependencies."""
    typed = [environment / "bin/python", "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(typed, capture_output=True, text=True, check=True).stdout
    names = {line.partition("==")[0].lower().partition(" @")[0] for line in listed.splitlines()} - {"pip", "setuptools"}
    assert names == {"ckptconv", "click", "rich", "markdown-it-py", "mdurl", "pygments"}


@pytest.mark.parametrize(
    "words",
    [
        "inspect ddp.pt", "inspect ddp.pt --json", "inspect . --tree", "inspect ddp.pt --html page.html",
        "verify ddp.pt", "verify . --json", "diff ddp.pt copy.pt", "diff ddp.pt copy.pt --html page.html",
        "convert ddp.pt cpu.pt --to cpu --unwrap --verify", "convert ddp.pt weights.safetensors",
        "convert ddp.pt old.pt --format legacy", "convert ddp.pt plain.pkl --format pickle",
        "convert ddp.pt plain.pt --loadable --compact", "convert ddp.pt same.safetensors --dtype fp32",
        "convert ddp.pt copy.pt out/ --to cpu -j 2", "convert ddp.pt --to cpu --in-place", "--help", "convert --help",
        "help completion",
    ],
)  # fmt: skip
def test_commands_that_need_no_torch(words: str, environment: Path, tmp_path: Path) -> None:
    for name in ("ddp.pt", "copy.pt"):
        shutil.copy(FIXTURES / "dataparallel.pt", tmp_path / name)
    done = run(environment, tmp_path, *words.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "convert a.pt half.pt --dtype bf16", "convert a.pt half.pt --dtype bf16 --dry-run", "inspect a.pt --values",
        "inspect a.pt --fail-on nan", "inspect a.pt --histogram --html page.html", "diff a.pt changed.safetensors",
        "diff a.pt changed.safetensors --html page.html",
    ],
)  # fmt: skip
def test_options_that_need_torch(words: str, environment: Path, tmp_path: Path) -> None:
    """A command that needs torch prints the command that installs it, and writes nothing."""
    shutil.copy(FIXTURES / "cpu.pt", tmp_path / "a.pt")
    assert run(environment, tmp_path, "convert", "a.pt", "changed.safetensors").returncode == 0
    with (tmp_path / "changed.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    before = sorted(tmp_path.iterdir())
    done = run(environment, tmp_path, *words.split())
    assert done.returncode == (2 if words.startswith("diff") else 1) and done.stdout == ""
    assert 'pip install "ckptconv[torch]"' in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def unversioned(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return `outcome` without the version of torch whose rules were used. It is the installed version, or else the
    newest known one.
    """
    for stream in ("stdout", "stderr"):
        outcome[stream] = re.sub(r'"installed": [^,]*', '"installed": T', outcome[stream])
        outcome[stream] = re.sub(r"\b2\.1[0-9]\b", "2.N", outcome[stream])
    return outcome


def test_all_else_is_the_same_with_and_without_torch(environment: Path, tmp_path: Path) -> None:
    """More than 400 runs of commands on the fixtures, in three formats, print and write the same with and without
    torch, or else print the command that installs torch or huggingface_hub and write nothing.
    """
    inputs = tmp_path / "inputs"
    shutil.copytree(FIXTURES, inputs / "fixtures", ignore=shutil.ignore_patterns("*.py", "*.md"))
    for name in ("tied", "dataparallel"):
        convert(FIXTURES / f"{name}.pt", inputs / f"{name}.safetensors")
        convert(FIXTURES / f"{name}.pt", inputs / f"{name}.legacy.pt", format="legacy")
    recordings = []
    for python in (sys.executable, str(environment / "bin/python")):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        out = tmp_path / f"{len(recordings)}.json"
        typed = [python, ROOT / "tests/support/recording.py", "make", inputs, out]
        subprocess.run(typed, cwd=tmp_path, env=clean, check=True)
        recordings.append({key: unversioned(each) for key, each in json.loads(out.read_text()).items()})
    with_torch, without = recordings
    differing = {key for key in with_torch if with_torch[key] != without[key]}
    assert len(with_torch) > 400 and len(differing) < len(with_torch) / 5
    for key in differing:
        named = re.search(r'pip install "ckptconv\[(torch|hub)\]"', without[key]["stderr"])
        assert named, (key, with_torch[key], without[key])
        assert without[key]["exit"] in (1, 2, 3) and without[key]["written"] == {}, (key, without[key])


def test_the_manual_page_is_installed(environment: Path) -> None:
    assert (environment / "share/man/man1/ckptconv.1").exists()


def release(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / ".ci/release", *words], capture_output=True, text=True)


def test_contents_of_the_release(tmp_path: Path) -> None:
    """Two builds are equal, and the checks of other tools pass."""
    done = release(tmp_path / "dist")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.suffix for path in (tmp_path / "dist").iterdir()) == [".gz", ".whl"]
    assert "valid, and nothing of others is in the wheel" in done.stdout


def test_refused_releases(tmp_path: Path) -> None:
    """A release is refused if the tag belongs to another version, or if the account is still a placeholder."""
    done = release(tmp_path / "dist", "v0.0.0")
    assert done.returncode == 1 and "the tag is v0.0.0" in done.stdout
    done = release(tmp_path / "dist", f"v{ckptconv.__version__}")
    assert (done.returncode == 1) == ("OWNER" in (ROOT / "pyproject.toml").read_text())
