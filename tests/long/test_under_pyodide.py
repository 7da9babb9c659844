"""The tests of the pure packages under the page's Python, in WebAssembly, without threads, processes and torch.

A test that needs torch, numpy or safetensors is skipped when it uses them; most make their files with them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptconv.render.page.vendor.make import published
from tests.support.paths import ROOT
from web.build import INTEGRITY, PACKAGE

PURE = ("pickles", "byteranges", "checkpoint", "edits", "formats")
#: What tests need, in wheels that are Python alone; of hypothesis the last version that is.
WHEELS = (
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "click"),
    *("hypothesis==6.100.0", "attrs", "sortedcontainers"),
)
#: Files and tests that need what a browser has not.
THREADS = ["tests/unit/byteranges/test_checksums.py", "tests/unit/byteranges/far", "tests/unit/byteranges/kernels"]
FIFOS = ["tests/unit/byteranges/test_sources.py"]
NOT_THERE = [
    *("tests/unit/checkpoint/test_danger_table.py::test_the_table_is_not_read_for_nothing",),  # a process
    *("tests/unit/checkpoint/test_dangerous_globals.py::test_what_modules_lend",),  # a process
    *(f"tests/unit/checkpoint/test_storage_ids.py::test_{name}" for name in (
        "parts_are_those_of_the_id_that_torch_writes", "sizes_are_those_of_what_is_a_storage"
    )),  # torch's classes
    *("tests/unit/checkpoint/test_weights_only.py::test_layouts_and_devices",),  # torch's names
]  # a table  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pyodide, and pytest for it."""
    folder = tmp_path_factory.mktemp("engine")
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    try:
        files = published(PACKAGE, INTEGRITY)
    except subprocess.CalledProcessError:
        pytest.skip("npm could not get Pyodide")
    for name, data in files.items():
        (folder / Path(name).name).write_bytes(data)
    typed = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "wheels"), *WHEELS]
    if subprocess.run(typed, check=False, timeout=300).returncode:
        pytest.skip("pip could not get pytest")
    return folder


@pytest.mark.parametrize("package", PURE)
def test_the_tests_of_a_package_pass_there(package: str, engine: Path) -> None:
    """Each file by itself: one that ends the stack of the browser ends no other."""
    passed = 0
    for file in sorted((ROOT / "tests" / "unit" / package).rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith((*THREADS, *FIFOS)):
            continue
        script = ROOT / "tests" / "support" / "under_pyodide.mjs"
        left_out = [word for each in NOT_THERE if each.startswith(name) for word in ("--deselect", each)]
        typed = ["node", str(script), str(engine), str(ROOT), str(engine / "wheels"), "-q", *left_out, name]
        done = subprocess.run(typed, capture_output=True, text=True, timeout=1000, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert not {"failed", "files failed"} & found.keys(), done.stdout[-3000:]
        passed += found.get("passed", 0)
    assert passed
