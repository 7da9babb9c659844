"""The tests of the pure packages under the page's Python, in WebAssembly, without threads, processes and torch.

A test that needs torch, numpy or safetensors is skipped when it uses them.
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

#: Files with tests that need no torch; the others make all that they read with it.
FILES = """
    byteranges/test_latin1 checkpoint/test_danger_table checkpoint/test_dangerous_globals checkpoint/test_storage_ids
    checkpoint/test_weights_only edits/test_names pickles/test_parser_and_emitter pickles/test_path_segments
    pickles/test_paths
"""
#: What tests need, in wheels that are Python alone; of hypothesis the last version that is.
WHEELS = (
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "click"),
    *("hypothesis==6.100.0", "attrs", "sortedcontainers"),
)
#: What needs a process, torch's own names, or the stack and the minutes that a browser has not.
NOT_THERE = """
    test_the_table_is_not_read_for_nothing test_what_modules_lend test_parts_are_those_of_the_id_that_torch_writes
    test_sizes_are_those_of_what_is_a_storage test_layouts_and_devices test_depth_of_any_kind_needs_no_stack
    test_every_flipped_bit_and_every_cut_end_in_our_errors test_rare_opcodes
"""


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


@pytest.mark.parametrize("name", FILES.split())
def test_the_tests_of_a_file_pass_there(name: str, engine: Path) -> None:
    script, left_out = ROOT / "tests" / "support" / "under_pyodide.mjs", " or ".join(NOT_THERE.split())
    words = ["-q", "-k", f"not ({left_out})", f"tests/unit/{name}.py"]
    typed = ["node", str(script), str(engine), str(ROOT), str(engine / "wheels"), *words]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not {"failed", "files failed"} & found.keys(), done.stdout[-3000:]
    assert found["passed"] > 10
