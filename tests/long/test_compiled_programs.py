"""Archives of AOTInductor, which compiles for a while: the command that their message gives."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.errors import UnsupportedError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_the_command_loads_a_compiled_program(tmp_path: Path) -> None:
    """``torch.export.load``, which the message for other archives names, does not."""
    program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.zeros(1, 3),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    with pytest.raises(UnsupportedError, match=r"a \.pt2 archive of AOTInductor") as caught:
        ckptconv.inspect(tmp_path / "m.pt2")
    words = shlex.split(str(caught.value.hint).split(": ")[1])
    assert words[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *words[1:]], check=True)
    with pytest.raises(RuntimeError):
        torch.export.load(tmp_path / "m.pt2")
