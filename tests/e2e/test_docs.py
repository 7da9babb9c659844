"""The documentation holds: every command and flag stands in the README, and what it shows runs."""

from __future__ import annotations

import html
import inspect
import itertools
import pickle
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import ckptconv
from ckptconv.cli.main import cli, main
from tests.support.paths import ROOT
from tests.support.writers import scripted

README = (ROOT / "README.md").read_text()


def shell_lines() -> list[str]:
    return re.findall(r"^    (ckptconv .*?)(?:   .*)?$", README, re.MULTILINE)


def test_every_command_and_flag_is_documented() -> None:
    """A command or flag that the README does not name fails."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert f"ckptconv {name}" in README
        assert command.help
        assert "Example: " in str(command.epilog)
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, option.name
                for flag in option.opts:
                    assert f"`{flag}" in README, flag


def test_commands_in_the_readme_run(tmp_path: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command line of the README ends with status 0 on files of the kind that it names."""
    assert len(shell_lines()) >= 8
    for line in shell_lines():
        folder = tmp_path / str(abs(hash(line)))
        folder.mkdir()
        monkeypatch.chdir(folder)
        for name, source in (
            ("model.pt", "cuda0"),
            ("a.pt", "two_gpus"),
            ("ddp.pt", "dataparallel"),
            ("plain.pt", "cpu"),
            ("train.pt", "training"),
            ("later.pt", "training"),
        ):
            shutil.copy(fixtures / f"{source}.pt", name)
        for name in ("a", "weights"):
            ckptconv.convert("plain.pt", f"{name}.safetensors")
        net = torch.nn.Linear(2, 2)
        torch.save(net.state_dict(), "new.pth")
        torch.save(net.state_dict(), "old.pth", _use_new_zipfile_serialization=False)
        Path("data.pkl").write_bytes(pickle.dumps(net.state_dict()))
        Path("script.pt").write_bytes(scripted(net))
        for name in ("run/model.pt", "run/deep/optimizer.pt"):
            Path(name).parent.mkdir(exist_ok=True)
            shutil.copy("a.pt", name)
        ckptconv.convert("weights.safetensors", "sharded", max_shard_size=200)
        args = [arg.strip("'") for arg in line.split()[1:]]
        if "--rename" in args:
            shutil.copy(fixtures / "dataparallel_features.pt", "a.pt")
        if args[0] == "convert" and not {"--force", "--in-place"} & {*args}:
            paths = list(itertools.takewhile(lambda word: not word.startswith("-"), args[1:]))
            Path(paths[-1]).unlink(missing_ok=True)
        assert main(args) == 0, line


def test_python_in_the_readme_runs(here: Path, fixtures: Path) -> None:
    """The Python example runs as it stands, pasted whole."""
    shutil.copy(fixtures / "dataparallel.pt", "a.pt")
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["report"].written
    assert torch.load("b.pt", map_location="cpu")


def test_every_public_function_is_in_the_readme() -> None:
    """With all the parameters that the README says it has."""
    for name in ckptconv.__all__:
        value = getattr(ckptconv, name)
        if inspect.isfunction(value):
            rows = re.findall(rf"`{name}\((.*?)\)`", README)
            assert rows, name
            documented = {part.split("=")[0].strip() for part in rows[0].split(",")} - {"...", "*"}
            assert documented <= inspect.signature(value).parameters.keys(), name


def test_the_picture_is_what_inspect_shows() -> None:
    """The lines of the SVG are those that are drawn today."""
    script = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))
    drawn = "".join(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in script["drawn"]())
    shown = re.findall(r"<text[^>]*>(.*?)</text>", (ROOT / "docs" / "inspect.svg").read_text())
    squeezed = [re.sub(r"\s|\xa0", "", text) for text in (html.unescape("".join(shown)), drawn)]
    assert squeezed[0] == squeezed[1]


def test_the_packages_of_the_design_page_exist() -> None:
    """Each package and module at the top stands in its table, and so does the module to start with."""
    table = re.findall(
        r"^\| (`[^|]*`) \| .* \| (?:`(\w+)`)? ?\|$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE
    )
    rows = {name: start for names, start in table for name in re.findall(r"`(\w+)`", names)}
    package = ROOT / "ckptconv"
    there = {path.stem for path in package.iterdir() if not path.stem.startswith("__") and path.suffix in ("", ".py")}
    assert rows.keys() == there
    for name, start in rows.items():
        assert (package / name / f"{start}.py").exists() if start else (package / f"{name}.py").exists(), name


def test_changelog_and_version() -> None:
    """The changelog speaks of what is unreleased or of this version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{ckptconv.__version__}]" in text
