"""Common ways to move models between devices. Location tags are tested everywhere, real devices only with GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptconv
from ckptconv.tensors.moving import devices, remap
from tests.support import zoo
from tests.support.judge import assert_same, tags_of


def needs_gpus(count: int) -> Callable[[Any], Any]:
    """Return a decorator that skips a test if torch finds fewer than `count` GPUs."""

    def marked(test: Any) -> Any:
        lacking = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
        return pytest.mark.cuda(lacking(test))

    return marked


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus the output of the convolutions."""
        inner = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return torch.relu(x + inner)


class ResNet(nn.Module):
    """A small ResNet with two parts that users wrap: ``features`` and ``classifier``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Block(8), Block(8), nn.AdaptiveAvgPool2d(1)
        )
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.classifier(self.features(x).flatten(1))
        return logits


IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
LABELS = torch.tensor([1, 4])
Training = tuple[ResNet, nn.Module, torch.optim.Optimizer]


def training(seed: int = 0) -> Training:
    """Return a new model, criterion and optimizer. The criterion has weights, which are also on a device."""
    torch.manual_seed(seed)
    model = ResNet()
    return model, nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0)), torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> float:
    """Train one step and return the loss before it."""
    optimizer.zero_grad()
    loss: torch.Tensor = criterion(model(IMAGES.to(device)), LABELS.to(device))
    loss.backward()
    optimizer.step()
    return loss.item()


def checkpoint_of(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the checkpoint that a training script saves."""
    return {
        "model": model.state_dict(),
        "criterion": criterion.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 1,
    }


def restored(path: Path, **kwargs: Any) -> Training:
    """Return a new model, criterion and optimizer with the state of the checkpoint at `path`."""
    model, criterion, optimizer = training(seed=1)
    loaded = torch.load(path, weights_only=True, **kwargs)
    model.load_state_dict(loaded["model"])
    criterion.load_state_dict(loaded["criterion"])
    optimizer.load_state_dict(loaded["optimizer"])
    return model, criterion, optimizer


def logits(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    """Return the output of `model` on the CPU."""
    with torch.no_grad():
        return model.eval()(IMAGES.to(device)).cpu()


def tags(path: Path) -> set[str]:
    """Return the location tags in the file at `path`."""
    return set(tags_of(path, weights_only=True)[1])


# A ResNet to the GPU and back


@pytest.mark.parametrize(
    "there", ["gpu", "cuda", "cuda:0", torch.device("cuda", 0), {"cpu": "cuda:0"}, lambda tag: "cuda:0"]
)
def test_a_resnet_to_the_gpus_tags_and_back(tmp_path: Path, there: Any) -> None:
    """A state dict is converted to ``cuda:0`` and back to the CPU without a GPU. It has the same values, and the file
    is identical to a direct conversion.
    """
    model, *_ = training()
    torch.save(model.state_dict(), tmp_path / "cpu.pt")
    ckptconv.convert(tmp_path / "cpu.pt", tmp_path / "gpu.pt", map_location=there)
    assert tags(tmp_path / "gpu.pt") == {"cuda:0"}
    ckptconv.convert(tmp_path / "gpu.pt", tmp_path / "back.pt", map_location="cpu")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), model.state_dict())
    ckptconv.convert(tmp_path / "cpu.pt", tmp_path / "same.pt", map_location="cpu")
    assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "same.pt").read_bytes()


@needs_gpus(1)
def test_a_resnet_to_the_gpu_and_back(tmp_path: Path) -> None:
    """A file that was converted to ``gpu`` loads onto the GPU without ``map_location``. A model that is moved back to
    the CPU gives the same output.
    """
    model, *_ = training()
    torch.save(model.state_dict(), tmp_path / "cpu.pt")
    ckptconv.convert(tmp_path / "cpu.pt", tmp_path / "gpu.pt", map_location="gpu")
    loaded = torch.load(tmp_path / "gpu.pt", weights_only=True)
    assert devices(loaded).keys() == {"cuda:0"}
    torch.save(loaded, tmp_path / "there.pt")
    ckptconv.convert(tmp_path / "there.pt", tmp_path / "back.pt", map_location="cpu")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), model.state_dict())
    before = logits(model)
    assert remap(model, "gpu") is model and devices(model).keys() == {"cuda:0"}
    torch.testing.assert_close(logits(model, "cuda:0"), before, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(remap(model, "cpu")), before)


# Model, criterion and optimizer together


def test_a_training_moves_as_a_whole(tmp_path: Path) -> None:
    """A checkpoint of model, criterion and optimizer from a GPU is converted to the CPU. The training resumes with the
    same losses.
    """
    run = training()
    step(*run)
    zoo.save(checkpoint_of(*run), tmp_path / "gpu.pt", tags=["cuda:0"])
    ckptconv.convert(tmp_path / "gpu.pt", tmp_path / "cpu.pt", map_location="cpu")
    assert tags(tmp_path / "cpu.pt") == {"cpu"}
    again = restored(tmp_path / "cpu.pt")
    assert_same(checkpoint_of(*again), checkpoint_of(*run))
    assert [step(*again) for _ in range(3)] == [step(*run) for _ in range(3)]


@needs_gpus(1)
def test_a_training_moves_as_a_whole_on_a_gpu(tmp_path: Path) -> None:
    """One call moves model, criterion and optimizer during a training. The training resumes on the GPU, and on the CPU
    from a converted file.
    """
    run = training()
    step(*run)
    model, criterion, optimizer = remap(run, "cuda:0")
    assert (model, criterion, optimizer) == run and model is run[0] and optimizer is run[2]
    step(*run, device="cuda:0")
    assert devices(criterion).keys() == {"cuda:0"}
    torch.save(checkpoint_of(*run), tmp_path / "gpu.pt")
    ckptconv.convert(tmp_path / "gpu.pt", tmp_path / "cpu.pt", map_location="cpu")
    again = restored(tmp_path / "cpu.pt")
    remap(run, "cpu")
    assert devices(run).keys() == {"cpu"}
    assert_same(checkpoint_of(*again), checkpoint_of(*run))
    assert step(*again) == step(*run)


# GPUs by index


def four_parts() -> dict[str, torch.Tensor]:
    """Return a tensor for each of four GPUs."""
    return {f"stage{i}.weight": torch.full((3,), float(i)) for i in range(4)}


GPUS = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"cuda:3": "cuda:0"}, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        (
            {"cuda:0": "cuda:1", "cuda:1": "cuda:2", "cuda:2": "cuda:3", "cuda:3": "cuda:0"},
            ["cuda:1", "cuda:2", "cuda:3", "cuda:0"],
        ),
        ({"cuda:2": "cpu", "cuda": "cuda:0"}, ["cuda:0", "cuda:0", "cpu", "cuda:0"]),
        ({"cuda": "xpu"}, ["xpu:0", "xpu:1", "xpu:2", "xpu:3"]),
        (lambda tag: f"cuda:{int(tag[-1]) // 2}", ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        ("cuda:1", ["cuda:1"] * 4),
        ("cpu", ["cpu"] * 4),
    ],
)
def test_four_gpus_by_index(tmp_path: Path, wish: Any, expected: list[str]) -> None:
    """Each tensor moves to the device that the mapping selects for its location tag. All mappings apply at the same
    time, so a tensor moves only once.
    """
    zoo.save(four_parts(), tmp_path / "four.pt", tags=GPUS)
    ckptconv.convert(tmp_path / "four.pt", tmp_path / "out.pt", map_location=wish)
    loaded, found = tags_of(tmp_path / "out.pt", weights_only=True)
    assert found == expected
    assert_same(loaded, four_parts())


@needs_gpus(4)
def test_four_gpus_moved_by_one() -> None:
    """Four tensors on four GPUs are each moved to the next GPU in memory."""
    there = {name: part.to(gpu) for (name, part), gpu in zip(four_parts().items(), GPUS, strict=True)}
    moved = remap(there, {f"cuda:{i}": f"cuda:{(i + 1) % 4}" for i in range(4)})
    assert [part.device.index for part in moved.values()] == [1, 2, 3, 0]
    assert_same(remap(moved, "cpu"), four_parts())


@needs_gpus(2)
def test_a_checkpoint_really_saved_under_visible_devices(tmp_path: Path) -> None:
    """A process that sees only the last GPU saves its tensors as ``cuda:0``. After a conversion, they load onto the
    last GPU.
    """
    last = torch.cuda.device_count() - 1
    code = "import sys, torch; torch.save({'w': torch.ones(3, device='cuda')}, sys.argv[1])"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(last)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "last.pt"], env=environment, check=True, timeout=300)
    assert tags(tmp_path / "last.pt") == {"cuda:0"}
    ckptconv.convert(tmp_path / "last.pt", tmp_path / "out.pt", map_location={"cuda:0": f"cuda:{last}"})
    assert torch.load(tmp_path / "out.pt", weights_only=True)["w"].device.index == last


# DataParallel


def wrapped(which: str, model: ResNet) -> nn.Module:
    """Return `model` with DataParallel around all of it, or around two of its parts."""
    if which == "whole":
        return nn.DataParallel(model)
    model.features = nn.DataParallel(model.features)
    model.classifier = nn.DataParallel(model.classifier)
    return model


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"strip_prefix": "module."},
    "parts": {"rename": [(r"^(features|classifier)\.module\.", r"\1.")]},
}


@pytest.mark.parametrize("which", WAYS)
def test_data_parallel_without_a_gpu(tmp_path: Path, which: str) -> None:
    """The prefixes of DataParallel are removed, around the whole model or around its parts. A plain model loads the
    weights on the CPU.
    """
    model, *_ = training()
    expected = logits(model)
    plain = model.state_dict()
    state = wrapped(which, model).cpu().state_dict()  # with GPUs, DataParallel moves its module
    assert all(name.startswith("module.") if which == "whole" else ".module." in name for name in state)
    zoo.save(state, tmp_path / "gpu.pt", tags=["cuda:0"])
    ckptconv.convert(tmp_path / "gpu.pt", tmp_path / "cpu.pt", map_location="cpu", **WAYS[which])
    assert tags(tmp_path / "cpu.pt") == {"cpu"}
    loaded = torch.load(tmp_path / "cpu.pt", weights_only=True)
    assert list(loaded) == list(plain)
    other, *_ = training(seed=1)
    other.load_state_dict(loaded)
    assert torch.equal(logits(other), expected)


@needs_gpus(1)
@pytest.mark.parametrize("which", WAYS)
def test_data_parallel_on_gpus(tmp_path: Path, which: str) -> None:
    """A model is trained for one step with DataParallel on all GPUs. After a conversion, a plain model on the CPU loads
    its weights.
    """
    model, criterion, optimizer = training()
    parallel = wrapped(which, model.to("cuda"))
    remap((criterion, optimizer), "cuda:0")
    step(parallel, criterion, optimizer, "cuda:0")
    torch.save(parallel.state_dict(), tmp_path / "gpu.pt")
    ckptconv.convert(tmp_path / "gpu.pt", tmp_path / "cpu.pt", map_location="cpu", **WAYS[which])
    other, *_ = training(seed=1)
    other.load_state_dict(torch.load(tmp_path / "cpu.pt", weights_only=True))
    torch.testing.assert_close(logits(other), logits(parallel, "cuda:0"), rtol=1e-3, atol=1e-3)


# Reports of devices


def reported(path: Path) -> dict[str, int]:
    """Return the number of bytes on each device, as reported by ``inspect``."""
    return {tag: found.nbytes for tag, found in ckptconv.inspect(path).devices.items()}


def test_a_report_of_mixed_devices(tmp_path: Path) -> None:
    """The number of bytes on each device is reported for a file with mixed devices. One conversion moves all tensors to
    the same device.
    """
    state = {"a": torch.ones(1000), "b": torch.ones(400, dtype=torch.float64), "forgotten": torch.ones(1)}
    zoo.save(state, tmp_path / "mixed.pt", tags=["cuda:0", "cuda:1", "cpu"])
    assert reported(tmp_path / "mixed.pt") == {"cuda:0": 4000, "cuda:1": 3200, "cpu": 4}
    ckptconv.convert(tmp_path / "mixed.pt", tmp_path / "one.pt", map_location={"cuda:1": "cuda:0", "cpu": "cuda:0"})
    assert reported(tmp_path / "one.pt") == {"cuda:0": 7204}
    assert devices(torch.load(tmp_path / "one.pt", weights_only=True, map_location="cpu")) == {"cpu": 7204}


@needs_gpus(1)
def test_a_report_of_mixed_devices_in_memory(tmp_path: Path) -> None:
    """``devices`` and ``inspect`` report the same bytes for a model on mixed devices and for its file. One call moves
    the model to one device.
    """
    model, *_ = training()
    model.features.to("cuda:0")
    found = devices(model)
    assert found.keys() == {"cuda:0", "cpu"} and found["cpu"] == (8 * 5 + 5) * 4
    torch.save(model.state_dict(), tmp_path / "mixed.pt")
    assert reported(tmp_path / "mixed.pt") == found
    with pytest.raises(RuntimeError, match="same device"):
        logits(model, "cuda:0")
    assert devices(remap(model, "auto")).keys() == {"cuda:0"}
    logits(model, "cuda:0")


@needs_gpus(2)
def test_a_report_of_two_gpus() -> None:
    """A model on two GPUs is moved to the second one."""
    model, *_ = training()
    model.features.to("cuda:0")
    model.classifier.to("cuda:1")
    assert devices(model).keys() == {"cuda:0", "cuda:1"}
    assert devices(remap(model, "cuda:1")).keys() == {"cuda:1"}
