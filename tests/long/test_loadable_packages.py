"""Configurations of other packages become plain dicts, lists and values with ``--loadable``."""

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


#: Functions that make CONFIG, by the module of the package.
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
    """A configuration becomes dicts and lists of the same values in the same order. torch refused the file before."""
    package = pytest.importorskip(module)
    path, out = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"cfg": MAKE[module](package), "w": torch.ones(2)}, path, pickle_protocol=protocol)
    assert refusal(path)
    ckptconv.convert(path, out, loadable=True)
    assert_same(torch.load(out, weights_only=True), {"cfg": CONFIG, "w": torch.ones(2)})


class Color(Enum):
    """An enum, whose members look like other objects in a pickle."""

    RED = 1


@dataclass
class Structured:
    """Values of the types for which OmegaConf has nodes."""

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


def test_omegaconf_nodes(tmp_path: Path) -> None:
    """Structured configurations, paths and unions of OmegaConf become plain values. Missing values and interpolations
    stay texts. A member of an Enum is refused with its path.
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
