"""Tests of the progress bar on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptconv import convert
from ckptconv.cli import terminal
from tests.support.command import Command


def test_progress_on_a_terminal(ddp: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """On a terminal, a large output has a progress bar that ends at its size. Small outputs, dry runs and ``-q`` have
    none.
    """
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    out = ddp.with_name("o.pt")
    convert(fixtures / "training.pt", out, state_dict=True)
    monkeypatch.setattr(terminal, "PROGRESS_FROM", out.stat().st_size)
    words = "convert", fixtures / "training.pt", out, "--state-dict", "--force"
    total = f"/{out.stat().st_size / 1000:.1f} kB"
    command(*words, err=total)
    assert torch.load(out, map_location="cpu")
    for flag in ("--dry-run", "-q"):
        assert total not in command(*words, flag).err
    monkeypatch.setattr(terminal, "PROGRESS_FROM", out.stat().st_size + 1)
    assert total not in command(*words).err
