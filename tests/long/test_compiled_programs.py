"""Archives of AOTInductor, which take a while to compile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.errors import UnsupportedError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_a_compiled_program_is_recognised(tmp_path: Path) -> None:
    """An archive of AOTInductor is refused with its own message and hint. ``torch.export.load``, which the message for
    other .pt2 archives names, cannot load it.
    """
    program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.zeros(1, 3),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    with pytest.raises(UnsupportedError, match=r"a \.pt2 archive of AOTInductor") as caught:
        ckptconv.inspect(tmp_path / "m.pt2")
    assert caught.value.hint == "save the weights of the model that it was compiled from"
    with pytest.raises(RuntimeError):
        torch.export.load(tmp_path / "m.pt2")
