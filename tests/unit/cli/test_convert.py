"""``ckptconv convert`` as its users meet it: reports, JSON, dry runs, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ckptconv.cli.main import main


def test_to_cpu_strips_and_reports(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The main job: one line for what became of devices, one for names, on stderr; torch loads the result."""
    out = ddp.with_name("plain.pt")
    assert main(["convert", str(ddp), str(out), "--to", "cpu", "--strip-prefix", "module"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cuda:0 → cpu" in captured.err
    assert "module." in captured.err
    assert not any(name.startswith("module.") for name in torch.load(out))


def test_convert_json_is_on_stdout(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report as JSON has a version and integers in bytes."""
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt")), "--map", "cuda:0=cuda:1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert report["written"] is True
    assert report["size"] == ddp.with_name("o.pt").stat().st_size
    assert [(d["old"], d["new"]) for d in report["devices"]] == [("cuda:0", "cuda:1")]


def test_dry_run_writes_nothing(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints its plan on stdout, every name with -v, and creates no file."""
    out = ddp.with_name("o.pt")
    assert main(["convert", str(ddp), str(out), "--strip-prefix", "module.", "-n", "-v"]) == 0
    printed = capsys.readouterr().out
    assert "would write" in printed
    assert printed.count(" → ") == len(torch.load(ddp, map_location="cpu"))
    assert sorted(path.name for path in ddp.parent.iterdir()) == ["ddp.pt"]


def test_quiet_says_nothing(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-q silences the report but not what a dry run or an error has to say."""
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt")), "--to", "cpu", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt")), "--to", "cpu", "-q"]) == 1
    assert "--force" in capsys.readouterr().err


def test_unsafe_is_refused_and_carried_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What calls os.system is not carried over, unless asked; then it is data still, and nothing ran."""

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"w": torch.zeros(2), "x": Attack()}, tmp_path / "bad.pt")
    out = tmp_path / "out.pt"
    assert main(["convert", str(tmp_path / "bad.pt"), str(out), "--to", "cpu"]) == 1
    assert "posix.system" in capsys.readouterr().err
    assert not out.exists()
    assert main(["convert", str(tmp_path / "bad.pt"), str(out), "--to", "cuda:1", "--allow-unsafe"]) == 0
    assert main(["inspect", str(out)]) == 0
    assert "DANGEROUS" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("flag", ["-n", "--dry-run", "-f", "--to"])
def test_a_flag_is_no_replacement(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """A forgotten replacement does not turn a dry run into a conversion."""
    assert main(["convert", str(fixtures / "cpu.pt"), str(tmp_path / "out.pt"), "--rename", "conv", flag]) == 2
    assert f"{flag} stands where the replacement for 'conv' should be" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
