"""The table of what libraries lend covers Python, torch and what it needs; gadgets do what they are said to."""

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
def test_it_covers_them() -> None:
    """Made again with all that is here, the table has nothing that the one in the package has not."""
    assert make.read_table().add(make.walked(make.STDLIB, make.PACKAGES)) == []


@pytest.mark.parametrize("name", [name for name, gadget in GADGETS.items() if gadget.effect != "fetched"])
def test_gadgets_do_harm(tmp_path: Path, name: str) -> None:
    """Loaded as nobody should load it, in a folder of its own, each writes its marker or reads the file there."""
    gadget = GADGETS[name]
    if sys.version_info[:2] > gadget.python or not all(map(find_spec, gadget.needs)):
        pytest.skip("this Python or a package that is here has it no more")
    for file, text in SETUP.items():
        (tmp_path / file).write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", LOAD, gadget.pickle.hex()]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    made = {path.name for path in tmp_path.iterdir()} - {*SETUP}
    assert any(each.startswith("marker") for each in made) if gadget.effect == "marker" else "text" in told.stdout
