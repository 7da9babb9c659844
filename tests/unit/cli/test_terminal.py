"""Progress on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptconv import convert
from ckptconv.cli import terminal
from ckptconv.cli.main import main


def test_progress_on_a_terminal(
    ddp: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal an output that is large gets a bar that ends at its own size; small ones, dry runs
    and -q get none.
    """
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    out = ddp.with_name("o.pt")
    convert(fixtures / "training.pt", out, state_dict=True)
    monkeypatch.setattr(terminal, "PROGRESS_FROM", out.stat().st_size)
    command = ["convert", str(fixtures / "training.pt"), str(out), "--state-dict", "--force"]
    assert main(command) == 0
    total = f"/{out.stat().st_size / 1000:.1f} kB"
    assert total in capsys.readouterr().err
    assert torch.load(out, map_location="cpu")
    for flag in ("--dry-run", "-q"):
        assert main([*command, flag]) == 0
        assert total not in capsys.readouterr().err
    monkeypatch.setattr(terminal, "PROGRESS_FROM", out.stat().st_size + 1)
    assert main(command) == 0
    assert total not in capsys.readouterr().err
