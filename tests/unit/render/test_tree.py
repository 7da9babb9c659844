"""The tree of a single tensor, and of paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptconv.inspection.summary import inspect
from ckptconv.render.text import Style
from ckptconv.render.tree import tree_lines


def saved(path: Path, obj: object, **kwargs: Any) -> Path:
    torch.save(obj, path, **kwargs)
    return path


def test_tree_of_a_single_tensor_and_of_paths(tmp_path: Path) -> None:
    """A root that is a tensor; nesting and module names become levels, tied bytes count once."""
    assert list(tree_lines(inspect(saved(tmp_path / "t.pt", torch.ones(3))).tensors, Style())) == [
        ".  float32 3 cpu 12 B"
    ]
    w = torch.ones(2)
    tree = list(
        tree_lines(inspect(saved(tmp_path / "x.pt", {"m": {"a.w": w, "a.b": w, "c": w}, "l": [w, w]})).tensors, Style())
    )
    assert tree[0] == "m/  3 tensors, 8 B"
    assert tree[1] == "  a.  2 tensors, 8 B"
    assert tree[2].strip() == "w  float32 2 cpu 8 B"
