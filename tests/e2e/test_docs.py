"""Tests of the documentation: it describes every command and flag, its examples run, and its links exist."""

from __future__ import annotations

import contextlib
import html
import inspect
import io
import itertools
import json
import pickle
import re
import runpy
import shlex
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import ckptconv
from ckptconv.cli.main import cli, main
from tests.support import versions
from tests.support.paths import ROOT
from tests.support.rank_runs import save_as_ranks
from tests.support.writers import scripted
from tests.support.zero_folders import write_zero

README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs/reference/options.md").read_text()
API = "".join((ROOT / f"docs/reference/{name}.md").read_text() for name in ("api", "api-results"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def shell_lines() -> list[str]:
    """Return the commands in the README and on the page of options, without their explanations."""
    return list(
        dict.fromkeys(re.findall(r"^(?:\| `)?(ckptconv .*?)(?:   .*|` \|.*)?$", README + OPTIONS, re.MULTILINE))
    )


def test_the_readme_is_short() -> None:
    """The README has at most 1,500 words. The first shell block has two lines: the first converts a checkpoint, and the
    second runs the tests.
    """
    assert len(README.split()) <= 1500
    first = re.findall(r"^```sh\n(.*?)```", README, re.MULTILINE | re.DOTALL)[0].splitlines()
    assert len(first) == 2 and "ckptconv convert" in first[0] and "pytest" in first[1]


def test_every_relative_link_exists() -> None:
    """All links to other pages and files exist. Links to other hosts are not followed."""
    seen = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not link.startswith("http"):
                seen += 1
                assert (page.parent / link.partition("#")[0]).exists(), (page, link)
    assert seen > 50


#: Words to avoid, because they are figurative or unusual, and their replacements.
_UNUSED = {
    "stranger": "somebody else", "lend": "have", "lends": "has", "comes along": "is copied, is kept",
    "come along": "are copied, are kept", "cut short": "truncated", "utilize": "use", "in order to": "to",
}  # fmt: skip


def test_plain_words() -> None:
    """No page and no module of the package contains an avoided word."""
    for path in [*PAGES, *(ROOT / "ckptconv").rglob("*.py")]:
        if path.name != "CHANGELOG.md":
            found = re.search(rf"(?i)\b({'|'.join(_UNUSED)})\b", path.read_text())
            assert not found, (path, found[0], _UNUSED[found[0].lower()])


def test_every_page_is_in_a_table_of_contents() -> None:
    """Every page is in the table of contents of an index. `sphinx-build -W` also checks this."""
    listed = set()
    for index in (ROOT / "docs").rglob("index.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)```", index.read_text(), re.MULTILINE | re.DOTALL):
            words = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(index.parent / f"{word}.md").resolve() for word in words}
    assert listed == {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - {ROOT / "docs/index.md"}


def test_the_page_of_versions_is_current() -> None:
    """The page of versions contains the current rows. ``.ci/versions`` writes both."""
    assert versions.page(versions.rows()) in versions.PAGE.read_text()


def test_an_index_lists_its_pages_by_their_titles() -> None:
    """Each index lists its pages by title, as links. The repository shows a table of contents only as names."""
    for index in ((ROOT / "docs" / name / "index.md") for name in ("fix", "how-to", "reference")):
        text = index.read_text().replace("\n  ", " ")  # a title may be longer than one line
        listed = re.findall(r"^- \[(.*)\]\((.*)\)$", text, re.MULTILINE)
        pages = (page for page in index.parent.glob("*.md") if page != index)
        assert sorted(listed) == sorted((page.read_text().splitlines()[0][2:], page.name) for page in pages)


def test_every_command_and_flag_is_documented() -> None:
    """Every command has a help text and an example, and the page of options names every command and flag."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert f"ckptconv {name}" in OPTIONS
        assert command.help
        assert "Example: " in str(command.epilog)
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, option.name
                for flag in option.opts:
                    assert f"`{flag}" in OPTIONS, flag


def test_the_manual_page_has_every_flag() -> None:
    """The manual page contains every flag. ``sphinx-build -b man docs docs/man`` generates the page."""
    page = (ROOT / "docs/man/ckptconv.1").read_text().replace("\\-", "-")
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command
        for option in command.params:
            for flag in option.opts if isinstance(option, click.Option) else ():
                assert re.search(rf"{flag}\b", page), (name, flag)


@pytest.mark.slow
def test_commands_in_the_readme_run(tmp_path: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command in the README and on the page of options ends with exit status 0 on suitable files."""
    assert len(shell_lines()) >= 35
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
        save_as_ranks(net.state_dict(), Path("actor"))
        torch.save({"a.qkv.weight": torch.ones(6, 2), "a.qkv.bias": torch.ones(6)}, "fused.pt")
        write_zero(Path("zero"))
        parts = product(range(2), ("gate", "up", "down"))
        torch.save({f"mlp.experts.{e}.{part}_proj.weight": torch.ones(2, 2) for e, part in parts}, "moe.pt")
        args = shlex.split(line)[1:]
        if "--rename" in args:
            shutil.copy(fixtures / "dataparallel_features.pt", "a.pt")
        if args[0] == "convert" and not {"--force", "--in-place"} & {*args}:
            paths = list(itertools.takewhile(lambda word: not word.startswith("-"), args[1:]))
            Path(paths[-1]).unlink(missing_ok=True)
        assert main(args) == 0, line


def test_python_in_the_readme_runs(here: Path, fixtures: Path) -> None:
    """The Python example in the README runs unchanged."""
    shutil.copy(fixtures / "dataparallel.pt", "a.pt")
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["report"].written
    assert torch.load("b.pt", map_location="cpu")


def test_every_public_name_is_documented() -> None:
    """The API reference contains every public name, and the parameters in its tables exist."""
    for name in ckptconv.__all__:
        assert name in ("__version__", "MapLocation") or f":: ckptconv.{name}\n" in API, name
        value = getattr(ckptconv, name)
        if inspect.isfunction(value):
            rows = re.findall(rf"`{name}\((.*?)\)`", API)
            assert rows, name
            documented = {part.split("=")[0].strip() for part in rows[0].split(",")} - {"...", "*"}
            assert documented <= inspect.signature(value).parameters.keys(), name


@pytest.mark.parametrize("command", ["inspect", "convert", "verify", "diff"])
def test_every_key_of_the_json_is_documented(command: str, here: Path, fixtures: Path) -> None:
    """The documented keys of the JSON output are exactly the printed keys."""
    shutil.copy(fixtures / "training.pt", "a.pt")
    words = {"convert": ["b.pt", "--to", "cpu"], "diff": ["a.pt"]}.get(command, [])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([command, "a.pt", *words, "--json"])
    page = (ROOT / "docs/reference/json.md").read_text()
    (section,) = re.findall(rf"^## {command}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named | {"schema_version"} == json.loads(out.getvalue()).keys()


def test_the_picture_matches_the_output_of_inspect() -> None:
    """The SVG contains the current output of ``inspect``."""
    script = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))
    drawn = "".join(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in script["drawn"]())
    shown = re.findall(r"<text[^>]*>(.*?)</text>", (ROOT / "docs" / "inspect.svg").read_text())
    squeezed = [re.sub(r"\s|\xa0", "", text) for text in (html.unescape("".join(shown)), drawn)]
    assert squeezed[0] == squeezed[1]


def test_the_packages_of_the_design_page_exist() -> None:
    """The table of the design page lists every top-level package and module, and the suggested first modules exist."""
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
    """The changelog contains a section for unreleased changes or for this version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{ckptconv.__version__}]" in text
