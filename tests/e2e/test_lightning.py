"""Checkpoints that are one dict, as Lightning, mmengine, timm, fairseq, accelerate and averaging trainers write
them.

Edits of names change only the state dicts. Everything else stays the same.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptconv
from tests.support import zoo
from tests.support.judge import assert_same, tags_of
from tests.support.round_trips import round_trip

_MADE: list[str] = []


class AttributeDict(dict):
    """A dict whose keys are also attributes, as Lightning stores hyperparameters."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class History:
    """An object of a user or a library. It records when it is unpickled."""

    def __init__(self) -> None:
        self.scores, self.best = [0.5, 0.25], torch.tensor([0.25])
        self.names = {"module.": "module.0.weight", "model.0.weight": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _MADE.append("History")
        self.__dict__.update(state)


# Checkpoints of the trainers, with `prefix` before the names of their weights


def weights(prefix: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the state dict of a small model, or of a module that contains it under `prefix`."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return (nn.ModuleDict({prefix[:-1]: model}) if prefix else model).state_dict()


def averages(prefix: str) -> dict[str, torch.Tensor]:
    return weights(prefix, seed=1)


def optimizer(names: list[str] | None = None) -> dict[str, Any]:
    """Return the state of Adam after a step. Its keys are `names` if they are given, and numbers otherwise."""
    torch.manual_seed(2)
    keys: list[Any] = list(range(6)) if names is None else [name for name in names if name.endswith(("weight", "bias"))]
    state = {key: {"step": torch.tensor(7.0), "exp_avg": torch.randn(3, 5), "module.beta": 0.9} for key in keys}
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": keys}]}


def lightning(prefix: str) -> dict[str, Any]:
    """Return a Lightning checkpoint with averages in a callback, and with other keys that look like prefixed names."""
    return {
        "epoch": 3,
        "global_step": 1_200,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights(prefix),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4, "model.completed": 3}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val_loss'}": {
                "best_model_score": torch.tensor(0.25),
                "best_k_models": {"/runs/module.1/epoch=3.ckpt": torch.tensor(0.25)},
                "best_model_path": "model.ckpt",
            },
            "model.EMA": {"decay": 0.999, "weights": averages(prefix)},
            "module.History": History(),
        },
        "optimizer_states": [optimizer(), optimizer()],
        "lr_schedulers": [{"_step_count": 4, "base_lrs": [0.1], "module.last": 3}],
        "MixedPrecision": {"scale": 65536.0, "_growth_tracker": 12},
        "hparams_name": "kwargs",
        "hyper_parameters": AttributeDict(
            {"width": 5, "model.lr": 0.1, "module.device": torch.device("cuda:0"), "history": History()}
        ),
        "datamodule_hyper_parameters": AttributeDict(root=Path("/data/model.0")),
    }


def mmengine(prefix: str) -> dict[str, Any]:
    return {
        "meta": {
            "cfg": "model = dict(type='module.Net')",
            "seed": 3,
            "dataset_meta": {"classes": ("model.cat", "dog")},
        },
        "state_dict": weights(prefix),
        "message_hub": {
            "log_scalars": OrderedDict({"train/loss": History()}),
            "runtime_info": OrderedDict({"module.iter": 1}),
        },
        "optimizer": optimizer(),
        "param_schedulers": [{"begin": 0, "model.end": 10}],
        "ema_state_dict": averages(prefix),
    }


def timm(prefix: str) -> dict[str, Any]:
    return {
        "epoch": 5,
        "arch": "model.resnet",
        "state_dict": weights(prefix),
        "optimizer": optimizer(),
        "version": 2,
        "args": argparse.Namespace(model="module.resnet", device="cuda:0"),
        "amp_scaler": {"scale": 65536.0},
        "state_dict_ema": averages(prefix),
        "metric": 0.75,
    }


def fairseq(prefix: str) -> dict[str, Any]:
    return {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="module.transformer"), "module.task": {"data": "/model.0"}},
        "model": weights(prefix),
        "criterion": None,
        "optimizer_history": [{"optimizer_name": "module.Adam", "num_updates": 9}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 2}, "module.previous": [1.5]},
        "last_optimizer_state": optimizer(),
    }


def averaged(prefix: str) -> dict[str, Any]:
    """Return a checkpoint with a model, its average, and an optimizer that is keyed by names."""
    model = weights(prefix)
    return {
        "model": model,
        "ema": averages(prefix),
        "optimizer": optimizer(list(model)),
        "other": optimizer(),
        "updates": 12,
        "train_args": {"model": "module.yolo", "module.lr": 0.1},
    }


def random_states(prefix: str) -> dict[str, Any]:
    """Return model weights with the random states that accelerate writes."""
    return {
        "model": weights(prefix),
        "step": 4,
        "random_state": random.Random(1).getstate(),
        "numpy_random_seed": np.random.RandomState(1).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(1).get_state(),
        "torch_cuda_manual_seed": [torch.arange(16, dtype=torch.uint8)],
    }


KINDS = [lightning, mmengine, timm, fairseq, averaged, random_states]
Build = Callable[[str], dict[str, Any]]


def converted(folder: Path, obj: Any, tags: Sequence[str] = ("cpu",), **edits: Any) -> Any:
    """Return the object that torch loads after a conversion of `obj` with `edits`. The conversion runs no code of the
    file.
    """
    _MADE.clear()
    zoo.save(obj, folder / "src.ckpt", tags)
    ckptconv.convert(folder / "src.ckpt", folder / "out.ckpt", force=True, **edits)
    assert not _MADE
    return tags_of(folder / "out.ckpt")[0]


@pytest.mark.parametrize("prefix", ["module.", "model."])
@pytest.mark.parametrize("build", KINDS)
def test_prefixes(build: Build, prefix: str, tmp_path: Path) -> None:
    """``--strip-prefix`` and ``--add-prefix`` change the names of weights, averages and optimizers with names. Other
    keys stay the same, even if they look like names.

    The result equals the checkpoint that the same trainer writes with or without the wrapper.
    """
    assert_same(converted(tmp_path, build(prefix), strip_prefix=prefix), build(""))
    assert_same(converted(tmp_path, build(""), add_prefix=prefix), build(prefix))


@pytest.mark.parametrize("build", KINDS)
def test_to(build: Build, tmp_path: Path) -> None:
    """``--to`` moves every storage, except the states of random generators, which move to the CPU. Objects and values
    stay the same, also a user's ``torch.device``.
    """
    tags: list[tuple[str, bool]] = []

    def keep(storage: Any, tag: str) -> Any:
        tags.append((tag, storage.nbytes() in zoo.RNG_SIZES))
        return storage

    for target in ("cuda:1", "cpu"):
        assert_same(converted(tmp_path, build("module."), zoo.TAGS, map_location=target), build("module."))
        tags.clear()
        torch.load(tmp_path / "out.ckpt", map_location=keep, weights_only=False)
        assert all(tag == ("cpu" if is_rng else target) for tag, is_rng in tags)
        assert sum(is_rng for _, is_rng in tags) == 2 * (build is random_states)
        assert len(tags) > 10


def test_a_state_dict_is_extracted(tmp_path: Path) -> None:
    """``--state-dict`` extracts the weights of a Lightning checkpoint, and the report lists everything that is left
    behind.
    """
    found, report = round_trip(tmp_path, lightning("model."), weights_only=True, state_dict=True, strip_prefix="model.")
    assert_same(found, weights(""))
    assert [left.path for left in report.left_behind] == [key for key in lightning("") if key != "state_dict"]
