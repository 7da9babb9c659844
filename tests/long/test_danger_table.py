"""The table of dangerous names covers Python, torch and its dependencies, and each gadget does the harm that it
claims.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.gadgets import GADGETS, SETUP
from tools.danger_table import make

LOAD = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])))"


@pytest.mark.skipif(make.PYTHON not in make.read_table().pythons, reason="the table was made with other Pythons")
def test_table_is_complete() -> None:
    """A new walk over the installed packages adds no name to the table in the package."""
    assert make.read_table().add(make.walked(make.STDLIB, make.PACKAGES)) == []


@pytest.mark.parametrize("name", [name for name, gadget in GADGETS.items() if gadget.effect != "fetched"])
def test_gadgets_do_harm(tmp_path: Path, name: str) -> None:
    """Each gadget, loaded with pickle in a separate folder, writes its marker or reads the file there."""
    gadget = GADGETS[name]
    if sys.version_info[:2] > gadget.python or not all(map(find_spec, gadget.needs)):
        pytest.skip("this Python or a package that is here has it no more")
    for file, text in SETUP.items():
        (tmp_path / file).write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", LOAD, gadget.pickle.hex()]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    made = {path.name for path in tmp_path.iterdir()} - {*SETUP}
    assert any(each.startswith("marker") for each in made) if gadget.effect == "marker" else "text" in told.stdout
