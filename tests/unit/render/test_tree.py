"""Trees of a single tensor and of nested tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from ckptconv.inspection.summary import inspect
from ckptconv.render.table import tree_lines
from ckptconv.render.text import Style
from tests.support.command import Command
from tests.support.conversions import saved_at


def test_tree_of_a_single_tensor_and_of_paths(tmp_path: Path) -> None:
    """A single tensor is the root of its tree. Nested dicts and the dots in names become levels, and tied bytes count
    once.
    """
    assert list(tree_lines(inspect(saved_at(tmp_path / "t.pt", torch.ones(3))).tensors, Style())) == [
        ".  float32 3 cpu 12 B"
    ]
    w = torch.ones(2)
    tree = list(
        tree_lines(
            inspect(saved_at(tmp_path / "x.pt", {"m": {"a.w": w, "a.b": w, "c": w}, "l": [w, w]})).tensors, Style()
        )
    )
    assert tree[0] == "m/  3 tensors, 8 B"
    assert tree[1] == "  a.  2 tensors, 8 B"
    assert tree[2].strip() == "w  float32 2 cpu 8 B"


def test_depth_and_shares(command: Command, here: Path) -> None:
    """A terminal shows the share of each branch. Tensors that are deeper than ``depth`` levels count in the branch
    above them.
    """
    torch.save(
        {"a.b.c": torch.ones(3), "a.b.d": torch.ones(3), "a.e": torch.ones(2), "f": torch.ones(2)}, here / "m.pt"
    )
    tensors = inspect(here / "m.pt").tensors
    lines = [line.split() for line in tree_lines(tensors, Style(width=80, unicode=False), depth=2)][2:]
    assert [(words[0], words[-2]) for words in lines] == [("a.", "80%"), ("b.", "60%"), ("e", "20%"), ("f", "20%")]
    said = command("inspect", "m.pt", "--depth", "1").out.split("\n\n")[1]
    assert said == "a.  3 tensors, 32 B\nf  float32 2 cpu 8 B\n"
    assert command("inspect", "m.pt", "--tree", "--depth", "1").out.endswith(said)
