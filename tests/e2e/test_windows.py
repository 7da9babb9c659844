"""ckptconv without the parts of Python that only Unix has. Reading works, and other commands report what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

#: The first line of a program that uses torch, if it is installed.
TORCH = "import contextlib\nwith contextlib.suppress(ImportError): import torch\n"


def run(program: str, *words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{first}import tests.support.without_unix, sys\n{program}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_module_can_be_imported() -> None:
    """Every module can be imported, except the kernels, which need torch, and the calls of Windows. Prefixes of dicts
    are removed, and a file is inspected.
    """
    ended = run(
        """
import ckptconv, pkgutil
for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
    if ".kernels" not in module.name and "__main__" not in module.name and module.name != "ckptconv.system.windows":
        __import__(module.name)
print(ckptconv.strip_prefix({"module.w": 1}, "module."), len(ckptconv.inspect("fixtures/cuda0.pt").tensors))
""",
        first=TORCH,
    )
    assert (ended.returncode, ended.stdout) == (0, "{'w': 1} 11\n"), ended.stderr


def test_everything_in_memory() -> None:
    """File objects are loaded, saved in every format, inspected, verified, compared and planned."""
    pytest.importorskip("torch")
    ended = run(
        """
import ckptconv, io
before = open("fixtures/cuda0.pt", "rb").read()
for format in ("pt", "legacy", "safetensors"):
    out = io.BytesIO()
    ckptconv.save(ckptconv.load(io.BytesIO(before), map_location="cpu"), out, format=format)
    found = ckptconv.inspect(out)
    planned = ckptconv.plan(out, "new.pt", add_prefix="a.")
    print(found.format, len(found.tensors), ckptconv.verify(out).ok, planned.size > len(before) // 2)
    found = ckptconv.diff(io.BytesIO(before), out)
    print(found.tensors, found.only_in_a, found.only_in_b, sum(each.values.differing for each in found.differing))
""",
        first=TORCH,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        *("torch zip 11 True True", "11 () () 0"),
        *("torch legacy 11 True True", "11 () () 0"),
        *("safetensors 11 True True", "11 () () 0"),
    ]


@pytest.mark.parametrize(
    ("line", "status"),
    [("inspect fixtures/cuda0.pt", 0), ("verify fixtures/cuda0.pt", 0), ("diff fixtures/cuda0.pt fixtures/cpu.pt", 1)],
)
def test_commands_that_only_read(line: str, status: int) -> None:
    """Commands that only read files work without the functions that Windows lacks."""
    ended = run("from ckptconv.cli.main import main; sys.exit(main(sys.argv[1:]))", *line.split())
    assert (ended.returncode, ended.stderr) == (status, "")


@pytest.mark.parametrize("line", ["convert {} --in-place --to cpu", "undo {}"])
def test_changes_in_place_are_refused(line: str, tmp_path: Path) -> None:
    """Changes in place and their undo are refused without file owners, and the file is not changed."""
    path = tmp_path / "a.pt"
    shutil.copy(ROOT / "fixtures" / "cuda0.pt", path)
    before = path.read_bytes()
    program = "from ckptconv.system import calls; calls.HAS_OWNERS = False\n"
    ended = run(
        program + "from ckptconv.cli.main import main; sys.exit(main(sys.argv[1:]))", *line.format(path).split()
    )
    assert (ended.returncode, ended.stdout, path.read_bytes()) == (1, "", before)
    assert "cannot be changed in place on this system yet\n  write a new file:\n    ckptconv convert" in ended.stderr


def test_the_help_is_printed() -> None:
    ended = run("from ckptconv.cli.main import main; sys.exit(main(['convert', '--help']))")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--strip-prefix" in ended.stdout
