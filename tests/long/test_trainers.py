"""Runs of real trainers: Lightning, transformers' Trainer and accelerate. They resume from checkpoints that were sent
to a GPU and back, or made loadable, bit for bit as from the originals.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptconv
from tests.support.judge import refusal
from tests.support.tiny_models import transformers_offline

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries

Losses = list[float]


def there_and_back(file: Path, folder: Path) -> Path:
    """Convert `file` to a GPU and back to the CPU, in `folder`, and return the result. The answer of torch's safe
    loader must be the same for all three files.
    """
    away, back = folder / f"on-gpu-{file.name}", folder / file.name
    ckptconv.convert(file, away, map_location="cuda:0")
    ckptconv.convert(away, back, map_location="cpu")
    before = ckptconv.inspect(file)
    if before.format != "safetensors":
        there = ckptconv.inspect(away)
        on_gpu = {t.path for t in there.tensors if t.device == "cuda:0"}
        assert on_gpu == {t.path for t in before.tensors} - set(before.rng_states)
        assert refusal(file) == refusal(away) == refusal(back)
        assert set(ckptconv.inspect(back).devices) <= {"cpu"}
    away.unlink()
    return back


# Lightning


class Config:
    """A user's class among the hyperparameters, which torch's safe loader refuses."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and other.width == self.width

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'ckptconv[long]'")


Fit = Callable[..., tuple[Losses, dict[str, torch.Tensor]]]


@pytest.fixture
def fit(lightning: ModuleType, tmp_path: Path) -> Fit:
    """Train a small network for four epochs, or resume from a checkpoint. Return the losses of this run, and the
    weights.

    The checkpoint must also restore a scheduler, BatchNorm's buffers and a generator of noise.
    """

    class Noise(lightning.Callback):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(3)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            batch[0].add_(torch.randn(batch[0].shape, generator=self.generator) / 10)

        def state_dict(self) -> dict[str, Any]:
            return {"generator": self.generator.get_state()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.generator.set_state(state_dict["generator"])

    class Net(lightning.LightningModule):
        def __init__(self, width: int = 8, config: object = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
            self.losses: Losses = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]

    def fit(folder: str, resume: Path | None = None, config: object = None, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        net = Net(config=config)
        every_epoch = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1)
        trainer = lightning.Trainer(
            max_epochs=4,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Noise(), every_epoch],
            default_root_dir=tmp_path,
        )
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resume, **kwargs)
        return net.losses, net.state_dict()

    return fit


def test_a_lightning_run_goes_on(fit: Fit, tmp_path: Path) -> None:
    """A run that resumes from the retagged checkpoint has the same losses and weights as a run without interruption,
    and as a run that resumes from the original.
    """
    losses, weights = fit("run")
    original = tmp_path / "run" / "epoch=1.ckpt"
    ours = there_and_back(original, tmp_path)
    for name, checkpoint in [("again", original), ("once more", original), ("ours", ours)]:
        resumed, after = fit(name, checkpoint)
        assert resumed == losses[len(losses) // 2 :], name
        assert all(torch.equal(after[key], weights[key]) for key in weights), name


@pytest.mark.parametrize("left_out", ["optimizer_states", "lr_schedulers", "callbacks", "state_dict"])
def test_every_part_of_a_lightning_checkpoint_counts(fit: Fit, tmp_path: Path, left_out: str) -> None:
    """If one part of the checkpoint is from an earlier epoch, the losses differ. This is the control for
    ``test_a_lightning_run_goes_on``.
    """
    losses, _ = fit("run")
    checkpoint, earlier = (torch.load(tmp_path / "run" / f"epoch={epoch}.ckpt", weights_only=True) for epoch in (1, 0))
    checkpoint[left_out] = earlier[left_out]
    torch.save(checkpoint, tmp_path / "mixed.ckpt")
    assert fit("again", tmp_path / "mixed.ckpt")[0] != losses[len(losses) // 2 :]


def test_files_that_lightning_refuses(fit: Fit, tmp_path: Path) -> None:
    """A class among the hyperparameters is refused with ``weights_only=True`` before and after the conversion, and is
    restored without it.
    """
    config = Config(8)
    losses, _ = fit("run", config=config)
    original = tmp_path / "run" / "epoch=1.ckpt"
    ours = there_and_back(original, tmp_path)
    for checkpoint in (original, ours):
        with pytest.raises(Exception, match=r"test_trainers\.Config"):
            fit("refused", checkpoint, config, weights_only=True)
        assert fit("taken", checkpoint, config, weights_only=False)[0] == losses[len(losses) // 2 :]
        assert torch.load(checkpoint, weights_only=False)["hyper_parameters"]["config"] == config


def test_a_lightning_run_goes_on_from_what_was_made_loadable(fit: Fit, tmp_path: Path) -> None:
    """A checkpoint whose hyperparameters torch's safe loader refuses resumes with ``weights_only=True`` after
    ``--loadable``. The losses and weights equal those of a run without interruption.
    """
    config = argparse.Namespace(width=8, path=tmp_path, scale=np.float32(0.5), table=np.arange(3.0))
    config.sub = argparse.Namespace(steps=np.int64(3), random=np.random.RandomState(0).get_state())
    losses, weights = fit("run", config=config)
    original, ours = tmp_path / "run" / "epoch=1.ckpt", tmp_path / "loadable.ckpt"
    with pytest.raises(Exception, match=r"argparse\.Namespace|_reconstruct"):
        fit("refused", original, config, weights_only=True)
    report = ckptconv.convert(original, ours, loadable=True)
    changed = {each.path: each.new for each in report.changes.made_plain}
    assert changed["hyper_parameters/config"] == "dict"
    assert changed["hyper_parameters/config/.table"] == "tensor"
    for name, checkpoint, weights_only in (("original", original, False), ("ours", ours, True)):
        resumed, after = fit(name, checkpoint, config, weights_only=weights_only)
        assert resumed == losses[len(losses) // 2 :], name
        assert all(torch.equal(after[key], weights[key]) for key in weights), name
    plain = torch.load(ours, weights_only=True)["hyper_parameters"]["config"]
    assert (plain["width"], plain["path"], plain["scale"]) == (8, str(tmp_path), 0.5)
    assert torch.equal(plain["table"], torch.arange(3.0, dtype=torch.float64))


# transformers


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    """Yield the library. Its Trainer needs accelerate."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'ckptconv[long]'")
    with transformers_offline() as library:
        yield library


@pytest.fixture
def train(transformers: ModuleType, tmp_path: Path) -> Fit:
    """Train a small GPT-2 with dropout for eight steps, or resume from a folder. Return the losses of all steps, and
    the weights.
    """

    def train(folder: str, resume: Path | None = None) -> Any:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        )
        tokens = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder),
            max_steps=8,
            save_steps=4,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            seed=3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model.state_dict()

    return train


def retagged(checkpoint: Path, folder: Path) -> Path:
    """Copy `checkpoint`, a folder of the Trainer, to `folder`. Files that can contain tensors are converted to a GPU
    and back.
    """
    shutil.copytree(checkpoint, folder)
    for file in checkpoint.iterdir():
        if file.suffix in (".pt", ".pth", ".bin", ".safetensors"):
            (folder / file.name).unlink()
            there_and_back(file, folder)
    return folder


def test_a_run_of_the_trainer_goes_on(train: Fit, tmp_path: Path) -> None:
    """A run that resumes from retagged files has the losses and weights of a run without interruption. The weights can
    also be in a ``pytorch_model.bin``.
    """
    losses, weights = train("run")
    original = tmp_path / "run" / "checkpoint-4"
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} <= {
        file.name for file in original.iterdir()
    }
    ours = retagged(original, tmp_path / "ours")
    as_bin = tmp_path / "bin"
    shutil.copytree(ours, as_bin)
    ckptconv.convert(as_bin / "model.safetensors", tmp_path / "weights.bin", map_location="cuda:0")
    ckptconv.convert(tmp_path / "weights.bin", as_bin / "pytorch_model.bin", map_location="cpu")
    (as_bin / "model.safetensors").unlink()
    for name, checkpoint in [("again", original), ("once more", original), ("resumed", ours), ("of bin", as_bin)]:
        resumed, after = train(name, checkpoint)
        assert resumed == losses, name
        assert all(torch.equal(after[key], weights[key]) for key in weights), name


def test_a_run_of_the_trainer_goes_on_from_what_was_made_loadable(train: Fit, tmp_path: Path) -> None:
    """After ``--loadable`` every file of the Trainer loads with ``weights_only=True``, and the resumed run has the same
    losses and weights. Before, torch refused numpy's generator states and the arguments.
    """
    losses, weights = train("run")
    original, ours = tmp_path / "run" / "checkpoint-4", tmp_path / "ours"
    assert refusal(original / "rng_state.pth") and refusal(original / "training_args.bin")
    shutil.copytree(original, ours)
    for name, objects in (("rng_state.pth", False), ("training_args.bin", True), ("optimizer.pt", False)):
        ckptconv.convert(original / name, ours / name, force=True, loadable=True, loadable_objects=objects)
        assert refusal(ours / name) is None
    arguments = torch.load(ours / "training_args.bin", weights_only=True)
    assert arguments["__class__"] == "transformers.training_args.TrainingArguments"
    assert (arguments["learning_rate"], arguments["max_steps"]) == (1e-2, 8)
    resumed, after = train("resumed", ours)
    assert resumed == losses
    assert all(torch.equal(after[key], weights[key]) for key in weights)


# accelerate


def test_a_state_of_accelerate_goes_on_from_what_was_made_loadable(tmp_path: Path) -> None:
    """The generator states of accelerate, which contain numpy's, load after ``--loadable``. The noise of torch, numpy
    and Python continues at the same position.
    """
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'ckptconv[long]'")

    def noise() -> list[float]:
        return [torch.rand(1).item(), np.random.rand(), random.random()]

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path / "state"))
    expected = noise()
    states = tmp_path / "state" / "random_states_0.pkl"
    assert refusal(states)
    ckptconv.convert(states, states, format="pt", force=True, loadable=True)
    assert refusal(states) is None
    accelerator.load_state(str(tmp_path / "state"))
    assert noise() == expected
    del model


@pytest.mark.parametrize("wrong", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_every_file_of_the_trainer_counts(train: Fit, tmp_path: Path, wrong: str) -> None:
    """Without the optimizer or the generator states, or with a restarted scheduler, the losses differ. This is the
    control for ``test_a_run_of_the_trainer_goes_on``.
    """
    losses, _ = train("run")
    file = tmp_path / "run" / "checkpoint-4" / wrong
    if wrong == "scheduler.pt":  # without the scheduler the optimizer is not loaded either
        torch.save({**torch.load(file, weights_only=True), "last_epoch": 0}, file)
    else:
        file.unlink()
    assert train("again", file.parent)[0] != losses
