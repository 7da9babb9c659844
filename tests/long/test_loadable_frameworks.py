"""Training files of frameworks: what torch's safe loader accepts before and after ``--loadable``, and which objects are
refused.

Lightning, the Trainer and accelerate are in ``test_trainers.py``, whose runs continue from the converted files. A
framework that is not installed is skipped. ``pytest -s`` prints the table.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import ckptconv
from tests.support.judge import assert_same, refusal

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other packages


def trained(model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
    """Return the optimizer of `model` after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(x).float().sum().backward()
    optimizer.step()
    return optimizer


def timm(folder: Path) -> list[Path]:
    """Save files with ``CheckpointSaver``, as timm's training script does."""
    timm = pytest.importorskip("timm")
    from timm.utils import CheckpointSaver, ModelEmaV3

    model = timm.create_model("test_resnet", num_classes=3)
    optimizer = trained(model, torch.rand(2, 3, 64, 64))
    args = argparse.Namespace(model="test_resnet", lr=0.01, betas=(0.9, 0.99), opt_kwargs={}, output=folder)
    saver = CheckpointSaver(model, optimizer, args, model_ema=ModelEmaV3(model), checkpoint_dir=str(folder))
    saver.save_checkpoint(0, metric=0.5)
    return [folder / "last.pth.tar"]


def mmengine(folder: Path) -> list[Path]:
    """Save files with the ``Runner`` of a model that trains one epoch."""
    pytest.importorskip("mmengine")
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "loss") -> Any:
            return {"loss": (self.linear(x).sum(1) - y).square().mean()} if mode == "loss" else self.linear(x)

    data = torch.utils.data.TensorDataset(torch.rand(6, 3), torch.rand(6))
    loader = {"dataset": data, "batch_size": 2, "collate_fn": {"type": "default_collate"}}
    Runner(
        model=Model(),
        work_dir=str(folder),
        train_dataloader={**loader, "sampler": {"type": "DefaultSampler", "shuffle": True}},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01}},
        param_scheduler={"type": "MultiStepLR", "milestones": [1]},
        train_cfg={"by_epoch": True, "max_epochs": 1},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        log_level="ERROR",
    ).train()
    return [folder / "epoch_1.pth"]


def speechbrain(folder: Path) -> list[Path]:
    """Save files with a ``Checkpointer`` and the usual parts of a recipe."""
    pytest.importorskip("speechbrain")
    from speechbrain.nnet.schedulers import NewBobScheduler, NoamScheduler
    from speechbrain.processing.features import InputNormalization
    from speechbrain.utils.checkpoints import Checkpointer

    model, norm, bob, noam = nn.Linear(3, 2), InputNormalization(), NewBobScheduler(0.1), NoamScheduler(0.1, 10)
    norm(torch.rand(2, 5, 3), torch.ones(2))
    bob(1.5)
    bob(np.float64(1.2))
    optimizer = trained(model, torch.rand(2, 3))
    noam(optimizer)
    parts = {"model": model, "optimizer": optimizer, "normalize": norm, "bob": bob, "noam": noam}
    made = Checkpointer(folder, parts).save_checkpoint(meta={"WER": 12.5})
    return [made.paramfiles[name] for name in parts]


def ultralytics(folder: Path) -> list[Path]:
    """Save files with the trainer's ``save_model`` and a model that has not seen any pictures."""
    pytest.importorskip("ultralytics")
    from ultralytics.cfg import get_cfg
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.nn.tasks import ClassificationModel
    from ultralytics.utils.torch_utils import ModelEMA

    model = ClassificationModel("yolov8n-cls.yaml", nc=3, verbose=False).train()
    optimizer = trained(model, torch.rand(2, 3, 64, 64))
    trainer = SimpleNamespace(
        model=model, ema=ModelEMA(model), optimizer=optimizer, args=get_cfg(), epoch=0, epochs=2, best_fitness=0.5,
        fitness=np.float64(0.5), metrics={"top1": np.float64(0.5)}, read_results_csv=lambda: {"epoch": [1]},
        stopper=SimpleNamespace(best_fitness=0.5, best_epoch=0), scaler=torch.amp.GradScaler("cpu", enabled=False),
        wdir=folder, last=folder / "last.pt", best=folder / "best.pt", save_period=-1,
    )  # a table  # fmt: skip
    BaseTrainer.save_model(trainer)
    return [folder / "last.pt"]


def pyannote(folder: Path) -> list[Path]:
    """Save a model of pyannote with Lightning's trainer."""
    pytest.importorskip("pyannote.audio")
    from lightning.pytorch import Trainer
    from pyannote.audio.core.task import Problem, Resolution, Specifications
    from pyannote.audio.models.segmentation import PyanNet

    specifications = Specifications(
        problem=Problem.MONO_LABEL_CLASSIFICATION, resolution=Resolution.FRAME, duration=2.0, classes=["a", "b"]
    )
    model = PyanNet(lstm={"hidden_size": 4, "num_layers": 1}, linear={"hidden_size": 4, "num_layers": 1})
    model.specifications = specifications
    model.build()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(folder / "last.ckpt")
    return [folder / "last.ckpt"]


class Outcome(NamedTuple):
    """Whether torch's safe loader accepts a file `before` and `after`. `refused` names the refused classes, and `gone`
    contains the keys that lead to their objects.
    """

    before: bool
    after: bool = True
    refused: tuple[str, ...] = ()
    gone: tuple[tuple[str, ...], ...] = ()


def buffers() -> tuple[tuple[str, ...], ...]:
    return tuple(("message_hub", "log_scalars", f"train/{name}") for name in ("lr", "data_time", "loss", "time"))


#: The function that makes the files of each framework, and the outcome of each file.
FRAMEWORKS: dict[str, tuple[Callable[[Path], list[Path]], dict[str, Outcome]]] = {
    "timm": (timm, {"last.pth.tar": Outcome(before=False)}),
    "mmengine": (
        mmengine,
        {"epoch_1.pth": Outcome(False, False, ("mmengine.logging.history_buffer.HistoryBuffer",), buffers())},
    ),
    "speechbrain": (
        speechbrain,
        {
            **dict.fromkeys(["model.ckpt", "optimizer.ckpt", "normalize.ckpt", "noam.ckpt"], Outcome(before=True)),
            "bob.ckpt": Outcome(before=False),
        },
    ),
    "ultralytics": (
        ultralytics, {"last.pt": Outcome(False, False, ("ultralytics.nn.tasks.ClassificationModel",), (("ema",),))}
    ),
    "pyannote": (
        pyannote,
        {
            "last.ckpt": Outcome(
                False, False, ("pyannote.audio.core.task.Specifications",), (("pyannote.audio", "specifications"),)
            )
        },
    ),
}  # a table  # fmt: skip


def as_plain(value: Any) -> Any:
    """Return the plain form of `value` according to `docs/loadable.md`."""
    if isinstance(value, argparse.Namespace):
        return as_plain(vars(value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (PurePath, torch.torch_version.TorchVersion)):
        return str(value)
    if isinstance(value, dict):
        plain = type(value)()
        for key, inner in value.items():  # a Counter would count pairs
            plain[key] = as_plain(inner)
        if hasattr(value, "__dict__"):  # _metadata
            vars(plain).update(vars(value))
        return plain
    return type(value)(map(as_plain, value)) if type(value) in (list, tuple) else value


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name: str, tmp_path: Path) -> None:
    """A converted file equals the original in its plain form. Refused objects are named by class and path, and
    everything else loads without them.
    """
    make, outcomes = FRAMEWORKS[name]
    files = make(tmp_path)
    assert {path.name for path in files} == {*outcomes}
    for path in files:
        expected, out = outcomes[path.name], tmp_path / "out.pt"
        assert (refusal(path) is None) == expected.before
        original = torch.load(path, map_location="cpu", weights_only=False)
        options: dict[str, Any] = {"loadable": True, "force": True}
        if not expected.after:
            with pytest.raises(ckptconv.errors.RefusedError) as caught:
                ckptconv.convert(path, out, **options)
            assert all(word in str(caught.value) for word in expected.refused)
            drops = re.search(r"drop=(.+?)\)(;|$)", str(caught.value.hint))
            assert drops
            options["drop"] = ast.literal_eval(drops[1])
            for *above, last in expected.gone:
                inner = original
                for key in above:
                    inner = inner[key]
                del inner[last]
        changed = ckptconv.convert(path, out, **options).changes.made_plain
        assert_same(torch.load(out, weights_only=True), as_plain(original))
        why = f"refused: {', '.join(expected.refused)}" if expected.refused else f"{len(changed)} objects made plain"
        print(f"| {name} | {path.name} | {expected.before} | {expected.after} | {why} |")
