"""Optimizers follow their parameters: a run goes on from the output as it would from the input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptconv
from ckptconv.errors import RefusedError
from tests.support.judge import assert_same

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


class Net(nn.Module):
    """A body, and a head that can be left out. All shapes differ but those of the norm and the body's bias."""

    def __init__(self, *, head: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.neck = nn.Linear(6, 5)
        self.head = nn.Linear(6, 2) if head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.body(x)))
        return self.neck(hidden).square().mean() + (self.head(hidden).square().mean() if self.head else 0)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> list[float]:
    """Return the losses of some steps on random data."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(7, 4, generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def groups_of(net: nn.Module, *, named: bool, several: bool) -> list[dict[str, Any]]:
    """Return the weights and the vectors in two groups, or all in one, with their names or without."""
    every = list(net.named_parameters())
    parts = (
        [[(n, p) for n, p in every if p.ndim > 1], [(n, p) for n, p in every if p.ndim == 1]] if several else [every]
    )
    return [
        {"params": part if named else [p for _, p in part], "weight_decay": 0.1 * i} for i, part in enumerate(parts)
    ]


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter by its name."""
    return {name: dict(optimizer.state[p]) for name, p in net.named_parameters() if p in optimizer.state}


@pytest.mark.parametrize("several", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("named", [False, True], ids=["shapes", "param_names"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_without_the_weights_that_were_left_out(
    tmp_path: Path, kind: str, named: bool, several: bool
) -> None:
    """Torch takes the state, the moments are those of the same names, and the next losses those of a run that was
    changed in memory.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.manual_seed(1)
    net = Net()
    optimizer = OPTIMIZERS[kind](groups_of(net, named=named, several=several))
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, src)

    report = ckptconv.convert(src, dst, exclude="neck.*")

    assert report.changes.optimizers["optimizer"].left_out == 2
    made = torch.load(dst)
    net.neck = nn.Identity()
    changed = Net()
    changed.neck = nn.Identity()
    changed.load_state_dict(made["model"])
    after = OPTIMIZERS[kind](groups_of(changed, named=named, several=several))
    after.load_state_dict(made["optimizer"])
    assert_same(moments(changed, after), moments(net, optimizer))
    assert made["optimizer"]["param_groups"] == after.state_dict()["param_groups"]
    assert train(changed, after, seed=2) == train(net, optimizer, seed=2)
    assert {left.path for left in report.left_behind if "state of" in left.why} == {
        f"optimizer/state[{n}]" for n in _numbers_of_neck(several=several)
    }


def _numbers_of_neck(*, several: bool) -> list[int]:
    return [1, 6] if several else [4, 5]


def test_frozen_parameters_and_those_that_never_stepped_keep_their_places(tmp_path: Path) -> None:
    """They have a number and no state. An optimizer of a list (Lightning) is found too."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    net = Net()
    net.body.weight.requires_grad = False
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer)
    torch.save({"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}, src)
    ckptconv.convert(src, dst, exclude="head.*")
    (made,) = torch.load(dst)["optimizer_states"]
    assert made["param_groups"][0]["params"] == [0, 1, 2, 3, 4, 5]
    assert [*made["state"]] == [1, 2, 3, 4, 5]
    fewer = Net(head=False)
    after = torch.optim.Adam(fewer.parameters())
    after.load_state_dict(made)
    assert_same(moments(fewer, after), {k: v for k, v in moments(net, optimizer).items() if "head" not in k})


def _state(shapes: list[tuple[int, ...]], names: list[str] | None = None, **group: Any) -> dict[str, Any]:
    """Return the state of an Adam for parameters of these shapes."""
    keys = names or [*range(len(shapes))]
    return {
        "state": {key: {"step": torch.ones(()), "exp_avg": torch.ones(s)} for key, s in zip(keys, shapes, strict=True)},
        "param_groups": [{"lr": 0.1, "params": keys, **group}],
    }


W, V = torch.ones(2, 3), torch.ones(2, 3) + 1
MODEL = {"q": W, "k": V, "out": torch.ones(3, 2)}
SHAPES = [(2, 3), (2, 3), (3, 2)]

#: What is in the file, the glob of what is left out, and what decides that it is refused.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "one of two equal shapes": ({"model": MODEL, "optimizer": _state(SHAPES)}, "q", "0, 1 can be q, k"),
    "a parameter without state": (
        {"model": {"a": W, "b": torch.ones(4)}, "optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
        "a",
        "0 can be a, b",
    ),
    "a group that is none": (
        {"model": MODEL, "optimizer": {"state": {}, "param_groups": [{"params": "q"}]}},
        "q",
        "a group does not list its parameters",
    ),
    "a state without its group": (
        {"model": MODEL, "optimizer": {**_state(SHAPES), "param_groups": [{"params": [0, 1]}]}},
        "q",
        "parameters that are in no group",
    ),
    "a number that is listed twice": (
        {"model": MODEL, "optimizer": {**_state(SHAPES), "param_groups": [{"params": [0, 1, 2, 2]}]}},
        "q",
        "list a parameter twice",
    ),
    "numbers and names": (
        {"model": MODEL, "optimizer": {"state": {}, "param_groups": [{"params": [0, "k"]}]}},
        "q",
        "numbers and names",
    ),
    "names of another model": (
        {"model": MODEL, "optimizer": _state(SHAPES, ["x.q", "x.k", "x.out"])},
        "q",
        "no state dict in the file has its parameters",
    ),
    "shapes of another model": (
        {"model": MODEL, "optimizer": _state([(9, 9)])},
        "q",
        "no state dict in the file has its parameters",
    ),
    "more parameters than weights": (
        {"model": MODEL, "optimizer": {"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]}},
        "q",
        "no state dict in the file has its parameters",
    ),
    "names with other shapes": (
        {"model": MODEL, "optimizer": _state([(3, 3), (2, 3), (3, 2)], param_names=["q", "k", "out"])},
        "out",
        "its state of q has the shape [3, 3], and the weight [2, 3]",
    ),
    "one name of a tie": (
        {"model": {"a": W, "b": W, "out": MODEL["out"]}, "optimizer": _state([(2, 3), (3, 2)])},
        "a",
        "a has another name that stays (b)",
    ),
    "two models that it could belong to": (
        {
            "gen": {"w": W, "x": MODEL["out"]},
            "disc": {"v": V, "y": MODEL["out"]},
            "optimizer": _state([(2, 3), (3, 2)]),
        },
        "w",
        "it can belong to gen, disc",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_sure_is_refused(tmp_path: Path, case: str) -> None:
    """Nothing is written, and the error says what is in question."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    obj, glob, why = REFUSED[case]
    torch.save(obj, src)
    with pytest.raises(RefusedError) as caught:
        ckptconv.convert(src, dst, exclude=glob)
    assert why in str(caught.value)
    assert not dst.exists()
    ckptconv.convert(src, dst, exclude=glob, drop="optimizer")  # as the hint says


@pytest.mark.parametrize(
    ("glob", "left"),
    [
        ("out", 1),  # a shape that no other has
        ("[qk]", 2),  # all of one shape, so it does not matter which is which
        ("step", 0),  # an integer, which no optimizer updates
        ("*mean", 0),  # a shape that no state has
    ],
)
def test_what_does_not_depend_on_the_order_is_not_refused(tmp_path: Path, glob: str, left: int) -> None:
    """The same parameters go in every reading of the shapes."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {**MODEL, "step": torch.tensor(3), "mean": torch.ones(7)}
    torch.save({"model": model, "optimizer": _state(SHAPES)}, src)
    ckptconv.convert(src, dst, exclude=glob)
    made = torch.load(dst)["optimizer"]
    assert made["param_groups"][0]["params"] == [*range(3 - left)]
    assert [*made["state"]] == [*range(3 - left)]


def test_of_two_models_each_optimizer_follows_its_own(tmp_path: Path) -> None:
    """Names decide, also for states that are keyed by them. A twin with the same names changes nothing."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    gen, disc = {"a": W, "b": V}, {"c": W, "d": V}
    obj = {
        "gen": gen,
        "target": {"a": W.clone(), "b": V.clone()},
        "disc": disc,
        "opt_g": _state(SHAPES[:2], ["a", "b"]),
        "opt_d": _state(SHAPES[:2], param_names=["c", "d"]),
    }
    torch.save(obj, src)
    report = ckptconv.convert(src, dst, exclude=["a", "c"])
    made = torch.load(dst)
    assert made["opt_g"]["param_groups"][0]["params"] == [*made["opt_g"]["state"]] == ["b"]
    assert made["opt_d"]["param_groups"] == [{"lr": 0.1, "params": [0], "param_names": ["d"]}]
    assert [*made["opt_d"]["state"]] == [0]
    assert "opt_d: 1 parameter left out with the weights" in str(report)


def test_a_part_that_goes_as_a_whole_takes_no_state_with_it(tmp_path: Path) -> None:
    """``--drop model`` says nothing about parameters, and what goes to safetensors has no optimizer."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    obj = {"model": MODEL, "optimizer": _state(SHAPES)}
    torch.save(obj, src)
    ckptconv.convert(src, dst, drop="model")
    assert_same(torch.load(dst), {"optimizer": obj["optimizer"]})
    ckptconv.convert(src, tmp_path / "b.safetensors", exclude="q")


def test_in_a_folder_the_report_says_it_too(tmp_path: Path) -> None:
    """With the name of the file before the path, for what became plain as well."""
    run = tmp_path / "run"
    torch.save(MODEL, tmp_path / "model.pt")
    ckptconv.convert(tmp_path / "model.pt", run, max_shard_size=24, format="safetensors")
    obj = {"model": MODEL, "optimizer": _state(SHAPES), "seed": np.float64(1.5)}
    torch.save(obj, run / "train.pt")
    report = ckptconv.convert(run, tmp_path / "new", exclude="out", loadable=True)
    assert report.as_dict()["optimizers"] == [{"path": "train.pt: optimizer", "names": 0, "left_out": 1}]
    assert [plain["path"] for plain in report.as_dict()["made_plain"]] == ["train.pt: seed"]
