"""ckptconv without torch: commands that work, and commands that are refused before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support import zoo
from tests.support.writers import distributed

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")

#: Python in which torch is not installed.
MISSING = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""
MAIN = MISSING + "from ckptconv.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def here(here: Path) -> None:
    """Write the checkpoints to the working directory."""
    zoo.save({"w": torch.ones(4), "v": torch.zeros(2)}, here / "a.pt", ("cuda:0",))
    torch.save({"w": torch.ones(4) + 1}, "other.pt")
    save_file({"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}, "fp8.safetensors")
    torch.save({"w": torch.arange(4.0).reshape(2, 2).t()}, "views.pt")
    distributed({"w": torch.ones(4)}, Path("dcp"))


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )


@pytest.mark.parametrize(
    "typed",
    [
        "inspect a.pt",
        "verify a.pt",
        "diff a.pt a.pt",
        "convert a.pt out.pt --to cpu --add-prefix module.",
        "convert a.pt out.safetensors --dtype fp32",
        "convert views.pt out.pt --compact --dtype fp32",
        "convert dcp out.pt",
        "convert a.pt --in-place --to cpu",
        "convert a.pt out.pt --dtype bf16",
        "convert fp8.safetensors out.safetensors --dtype bf16",
        "inspect a.pt --histogram",
    ],
)
def test_commands_that_move_bytes(typed: str) -> None:
    """Commands that move bytes do not need torch. A cast to the same dtype needs no computation, and NumPy rounds to
    bfloat16, applies scales and computes sums.
    """
    done = run(MAIN, *typed.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("convert a.pt out.pt --dtype fp16", "a cast"),
        ("convert a.pt out.pt --dtype fp16 --dry-run", "a cast"),
        ("convert views.pt out.safetensors", "writing out views"),
        ("convert views.pt out.safetensors --dtype bf16", "a cast"),
        ("diff a.pt other.pt", "computing numbers"),
        ("inspect fp8.safetensors --values", "computing numbers"),
    ],
)
def test_commands_that_compute_are_refused(typed: str, what: str) -> None:
    """Commands that compute values are refused, and the error names the package to install. No file is written."""
    before = sorted(os.listdir())
    done = run(MAIN, *typed.split())
    assert done.returncode == (2 if typed.startswith("diff") else 1) and done.stdout == ""
    assert f'torch is needed for {what}, and is not installed\n  pip install "ckptconv[torch]"\n' in done.stderr
    assert done.stderr.count("\n") == 2 and sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "call",
    ["load('a.pt')", "open('a.pt').load('w')", "save({}, 'b.pt')", "remap({}, 'cpu')", "devices({})"],
)
def test_functions_with_tensors(call: str) -> None:
    """Functions that return or take tensors raise a CkptconvError that is also an ImportError."""
    done = run(
        f"{MISSING}\nimport ckptconv\ntry:\n    ckptconv.{call}\n"
        "except ckptconv.CkptconvError as error:\n    assert isinstance(error, ImportError); print(error)"
    )
    assert done.stdout.endswith(', and is not installed; pip install "ckptconv[torch]"\n'), done.stderr
    assert not Path("b.pt").exists()


def test_public_names_without_torch() -> None:
    """``help`` shows the package and ``import *`` imports it. A function that needs torch raises when it is called."""
    done = run(
        f"{MISSING}\nimport ckptconv, pydoc\nfrom ckptconv import *\n"
        "assert 'torch is needed for ckptconv.remap' in pydoc.plain(pydoc.render_doc(ckptconv))\n"
        "try:\n    remap({}, 'cpu')\nexcept MissingTorchError as error:\n    print(error)"
    )
    assert done.stdout.endswith('pip install "ckptconv[torch]"\n'), done.stderr


#: Python in which torch is installed, and its import fails.
BROKEN = """
import sys, importlib.machinery
class Broken:
    def find_spec(self, name, *_):
        if name == "torch":
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise {}
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        "OSError('libcupti.so.12: cannot open shared object file')",
        "ImportError('libcupti.so.12: undefined symbol')",
        "RuntimeError('libcupti.so.12')",
        "AttributeError('libcupti.so.12')",
    ],
)
def test_a_torch_that_cannot_be_imported(error: str) -> None:
    """If the import of torch fails, the error names torch, its message and the commands that work without it. Nothing
    is written. Commands that do not need torch work.
    """
    broken = BROKEN.format(error)
    main = broken + "from ckptconv.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for typed in ("inspect a.pt", "verify a.pt", "diff a.pt a.pt", "convert a.pt moved.pt --to cpu"):
        assert run(main, *typed.split()).returncode == 0, typed
    before = {*os.listdir()}
    python = "import ckptconv\ntry:\n    {}\nexcept ckptconv.MissingTorchError as error:\n    sys.exit(str(error))"
    failing = {
        "convert a.pt out.pt --dtype fp16": 1,
        "convert views.pt out.safetensors": 1,
        "diff a.pt other.pt": 2,
        "inspect fp8.safetensors --values": 1,
        "ckptconv.load('a.pt')": 1,
        "ckptconv.open('a.pt').load('w')": 1,
        "ckptconv.save([], 'out.pt')": 1,
        "ckptconv.remap([], 'cpu')": 1,
    }
    for typed, status in failing.items():
        words = typed.split()
        ended = run(broken + python.format(typed)) if typed.startswith("ckptconv.") else run(main, *words)
        lines = 1 if typed.startswith("ckptconv.") else 3
        assert (ended.returncode, ended.stderr.count("\n")) == (status, lines), (typed, ended)
        assert "torch is installed, but cannot be imported" in ended.stderr, (typed, ended.stderr)
        assert "libcupti.so.12" in ended.stderr and "work without torch" in ended.stderr
    assert {*os.listdir()} == before
