"""The tests of the modules in the page, under the page's Python: in WebAssembly, without threads, processes, Unix or
torch.

``tests/support/lacking.py`` skips a test that uses one of these. Most tests use torch to make their inputs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.recording import make_inputs
from web.build import INTEGRITY, PACKAGE, published

#: Folders and files with tests of modules that the page contains.
WHERE = """
    unit/byteranges unit/checkpoint unit/conversion unit/edits unit/formats unit/inspection unit/pickles unit/render
    unit/safety unit/test_errors.py unit/test_hints.py unit/test_init.py unit/test_light_dataclass.py
    unit/test_limits.py unit/test_sizes.py e2e/test_web_bridge.py
"""
#: Packages that the tests need, as pure Python wheels. This is the last version of hypothesis with such a wheel.
WHEELS = (
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "click"),
    *("hypothesis==6.100.0", "attrs", "sortedcontainers"),
)
#: Excluded tests, with the reasons.
LEFT_OUT = {
    "test_depth_of_any_kind_needs_no_stack": "100,000 levels, which Python frees one within another: the stack ends",
    "test_a_long_chain_of_modules_ends": "20,000 levels, likewise",
    "test_nesting_is_a_limit_of_ours": "more than 400 levels",
    "test_every_flipped_bit_and_every_truncation_raises_a_typed_error": "takes many minutes",
    "test_rare_opcodes": "the number of a memo that CPython refuses where it has 32 bits",
    "test_a_touched_file_is_changed": "files there have milliseconds, and no nanoseconds",
    "test_attributes_that_torch_sets_itself": "lists what torch has",
    "test_layouts_and_devices": "lists what torch has",
    "test_contradictions": "has a device of torch in its table",
    "test_the_real_bounds_are_those_of_the_page": "has the bounds of the command line",
    "test_the_verdict_names_the_installed_version": "of torch",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with Pyodide, and with pytest for it."""
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


def printed(engine: Path, folder: Path, *words: str) -> dict[str, Any]:
    """Run a module's ``main`` under Pyodide and return the JSON that it prints."""
    script = ROOT / "tests" / "support" / "under_pyodide.mjs"
    typed = ["node", str(script), str(engine), str(ROOT), str(folder), *words]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found.get("status"), done.stdout[-3000:]
    return found


@pytest.mark.parametrize("name", WHERE.split())
def test_modules_of_the_page_pass_their_tests(name: str, engine: Path) -> None:
    words = ["-q", "-k", f"not ({' or '.join(LEFT_OUT)})", f"tests/{name}"]
    assert printed(engine, engine / "wheels", "tests.support.lacking", *words)["passed"]


@pytest.mark.filterwarnings("ignore")  # warnings of torch about the odd files
def test_answers_are_the_same_under_pyodide(engine: Path, tmp_path: Path) -> None:
    """For hundreds of files, real, broken, hostile and of other programs, the verdict, the page, the plans and the
    copied bytes are the same under Pyodide as here.
    """
    make_inputs(tmp_path / "inputs")
    typed = [sys.executable, "-m", "tests.support.web_answers", str(tmp_path / "inputs")]
    here = subprocess.run(typed, capture_output=True, text=True, cwd=ROOT, timeout=600, check=True).stdout
    there = printed(engine, tmp_path / "inputs", "tests.support.web_answers", "/given")
    expected = json.loads(here)
    assert len(expected) > 300
    assert {path: (expected[path], said) for path, said in there.items() if said != expected[path]} == {}


def test_all_folders_of_tests_are_considered() -> None:
    """Every folder of unit tests is in ``WHERE``, except those of modules that the page does not contain."""
    there = {f"unit/{path.name}" for path in (ROOT / "tests" / "unit").iterdir() if not path.name.startswith("_")}
    assert there - set(WHERE.split()) == {"unit/cli", "unit/output", "unit/tensors"}
