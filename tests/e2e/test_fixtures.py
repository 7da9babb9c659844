"""The checkpoints in fixtures/: they can be reproduced, and agree with ``fixtures/README.md``."""

from __future__ import annotations

import argparse
import runpy
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.judge import assert_same, tags_of

NAMES = ("cpu", "cuda0", "dataparallel", "dataparallel_features", "resnet18", "tied", "training", "two_gpus")


def test_fixtures_can_be_reproduced(fixtures: Path, tmp_path: Path) -> None:
    """``make_fixtures.py`` writes identical files if it runs with the torch version that made them."""
    script = runpy.run_path(str(fixtures / "make_fixtures.py"))
    if torch.__version__.split("+")[0] != script["TORCH"]:
        pytest.skip(f"the fixtures are those of torch {script['TORCH']}")
    script["make_all"](tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == list(NAMES)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (fixtures / path.name).read_bytes(), path.name


def test_readme_describes_every_file(fixtures: Path) -> None:
    """The table in the README has a row for each checkpoint and no other rows. All files are small."""
    rows = [line.split("`")[1] for line in (fixtures / "README.md").read_text().splitlines() if line.startswith("| `")]
    files = {path.name: path.stat().st_size for path in fixtures.glob("*.pt")}
    assert sorted(rows) == sorted(files) == [f"{name}.pt" for name in NAMES]
    assert max(files.values()) < 48_000


@pytest.mark.parametrize("name", [name for name in NAMES if name != "training"])
def test_state_dicts_have_metadata_and_load_safely(fixtures: Path, name: str) -> None:
    """All fixtures except the training checkpoint are state dicts with ``_metadata``, and torch's safe loader reads
    them.
    """
    state: Any = torch.load(fixtures / f"{name}.pt", map_location="cpu", weights_only=True)
    assert type(state) is OrderedDict
    assert "" in state._metadata


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("cpu", {"cpu": 11}),
        ("cuda0", {"cuda:0": 11}),
        ("two_gpus", {"cuda:0": 7, "cuda:1": 4}),
        ("dataparallel", {"cuda:0": 11}),
        ("dataparallel_features", {"cuda:0": 6}),
        ("tied", {"cpu": 1}),
        ("resnet18", {"cpu": 122}),
        ("training", {"cuda:0": 27, "cpu": 10}),
    ],
)
def test_location_tags(fixtures: Path, name: str, tags: dict[str, int]) -> None:
    """torch reads the expected location tags. The tied checkpoint has only one storage."""
    assert Counter(tags_of(fixtures / f"{name}.pt")[1]) == tags


def test_the_same_net_on_other_devices(fixtures: Path) -> None:
    """cpu.pt, cuda0.pt and two_gpus.pt contain the same values. The names in dataparallel.pt start with ``module.``."""
    plain, _ = tags_of(fixtures / "cpu.pt")
    assert_same(plain, tags_of(fixtures / "cuda0.pt")[0])
    assert_same(plain, tags_of(fixtures / "two_gpus.pt")[0])
    wrapped, _ = tags_of(fixtures / "dataparallel.pt")
    assert list(wrapped) == ["module." + name for name in plain]
    assert set(wrapped._metadata) == {"", "module", *(f"module.{path}" for path in plain._metadata if path)}


def test_dataparallel_over_features(fixtures: Path) -> None:
    """In dataparallel_features.pt, ``module`` is an inner segment of some names, and no name starts with it."""
    state, _ = tags_of(fixtures / "dataparallel_features.pt")
    assert {name.rpartition(".")[0] for name in state} == {"features.module.0", "features.module.2", "classifier.1"}


def test_tied(fixtures: Path) -> None:
    """Two names in tied.pt share one storage."""
    state, _ = tags_of(fixtures / "tied.pt")
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_resnet18(fixtures: Path) -> None:
    """Names and numbers of dimensions are those of torchvision's ResNet-18."""
    state, _ = tags_of(fixtures / "resnet18.pt")
    shapes = {name: len(tensor.shape) for name, tensor in state.items()}
    assert len(shapes) == 122
    assert shapes["layer4.1.bn2.num_batches_tracked"] == 0
    assert shapes["layer2.0.downsample.0.weight"] == shapes["conv1.weight"] == 4
    assert "layer1.0.downsample.0.weight" not in shapes


def test_training(fixtures: Path) -> None:
    """The training checkpoint contains model, AdamW, scheduler, epoch, arguments and generator states. Model, optimizer
    and CPU generator can be restored from it.
    """
    checkpoint, _ = tags_of(fixtures / "training.pt")
    assert list(checkpoint) == ["model", "optimizer", "scheduler", "epoch", "args", "rng_state"]
    assert isinstance(checkpoint["args"], argparse.Namespace)
    assert checkpoint["epoch"] == 1
    assert checkpoint["scheduler"]["last_epoch"] == 1
    net = runpy.run_path(str(fixtures / "make_fixtures.py"))["Net"]()
    net.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    states = checkpoint["rng_state"]
    torch.Generator().set_state(states["cpu"])
    assert states["cpu"].shape == (5056,)
    assert (states["cuda"].shape, states["cuda"].dtype) == ((16,), torch.uint8)
