"""Configurations of other packages, made by themselves, made plain: what they hold, and nothing of how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from tests.support.judge import assert_same, refusal

CONFIG = {"lr": 0.1, "model": {"layers": [1, 2], "name": "net"}, "none": None}


#: By the module of each, what makes one of CONFIG.
MAKE: dict[str, Callable[[Any], Any]] = {
    "omegaconf": lambda package: package.OmegaConf.create(CONFIG),
    "easydict": lambda package: package.EasyDict(CONFIG),
    "munch": lambda package: package.munchify(CONFIG),
    "addict": lambda package: package.Dict(CONFIG),
    "yacs.config": lambda package: package.CfgNode(CONFIG),
    "mmengine.config": lambda package: package.ConfigDict(CONFIG),
    "lightning.fabric.utilities.data": lambda package: package.AttributeDict(CONFIG),
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("module", MAKE)
def test_configurations(tmp_path: Path, module: str, protocol: int) -> None:
    """Dicts and lists of the same values, in the same order; torch refused them before."""
    package = pytest.importorskip(module)
    path, out = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"cfg": MAKE[module](package), "w": torch.ones(2)}, path, pickle_protocol=protocol)
    assert refusal(path)
    ckptconv.convert(path, out, loadable=True)
    assert_same(torch.load(out, weights_only=True), {"cfg": CONFIG, "w": torch.ones(2)})


class Color(Enum):
    """What looks like any other object in a pickle."""

    RED = 1


@dataclass
class Structured:
    """Values of the types that OmegaConf has nodes for."""

    lr: float = 0.1
    steps: int = 3
    name: str = "net"
    fast: bool = True
    data: bytes = b"ab"
    folder: Path = Path("/runs")
    either: int | str = "auto"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    later: str = "???"
    twice: str = "${name}"
    nothing: Any = None


def test_all_that_omegaconf_says(tmp_path: Path) -> None:
    """Structured configurations, types, paths and unions become their values; what is missing and interpolations stay
    text, and members of an Enum are refused by their path.
    """
    omegaconf: Any = pytest.importorskip("omegaconf")
    path, out = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"cfg": omegaconf.OmegaConf.structured(Structured)}, path)
    report = ckptconv.convert(path, out, loadable=True)
    plain = {
        "lr": 0.1, "steps": 3, "name": "net", "fast": True, "data": b"ab", "folder": "/runs", "either": "auto",
        "sizes": [1, 2], "later": "???", "twice": "${name}", "nothing": None,
    }  # a table  # fmt: skip
    assert_same(torch.load(out, weights_only=True), {"cfg": plain})
    assert [each.path for each in report.changes.made_plain if "interpolation" in each.old] == ["cfg/._content/twice"]
    torch.save({"cfg": omegaconf.OmegaConf.create({"color": Color.RED, "lr": 1})}, path)
    with pytest.raises(ckptconv.errors.RefusedError, match=r"Color at cfg/\._content/color"):
        ckptconv.convert(path, out, loadable=True, force=True)
