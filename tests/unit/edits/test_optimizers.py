"""Optimizers follow their parameters. Training continues from the output as it would from the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ckptconv
from ckptconv.checkpoint import optimizers as reading
from ckptconv.edits import optimizers as editing
from ckptconv.errors import NoMatchError, RefusedError, UsageError
from ckptconv.limits import LIMITS
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
    """A model with a body, a norm, a neck and an optional head. Only the parameters of the norm and the bias of the
    body have equal shapes.
    """

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
    """Train for `steps` steps on random data, and return the losses."""
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
    """Return all parameters in one group, or the weights and the vectors in two groups if `several`. Include the names
    if `named`.
    """
    every = list(net.named_parameters())
    parts = (
        [[(n, p) for n, p in every if p.ndim > 1], [(n, p) for n, p in every if p.ndim == 1]] if several else [every]
    )
    return [
        {"params": part if named else [p for _, p in part], "weight_decay": 0.1 * i} for i, part in enumerate(parts)
    ]


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter by its name."""
    return {name: dict(optimizer.state[p]) for name, p in sorted(net.named_parameters()) if p in optimizer.state}


@pytest.mark.parametrize("several", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("named", [False, True], ids=["shapes", "param_names"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_without_excluded_weights(tmp_path: Path, kind: str, named: bool, several: bool) -> None:
    """Torch loads the state without the excluded weights. Each moment belongs to the same name as before, and the next
    losses equal those of a model that was changed in memory.
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


def test_frozen_parameters_keep_their_numbers(tmp_path: Path) -> None:
    """A frozen parameter keeps its number, for which there is no state. An optimizer in a list, as Lightning stores it,
    is found.
    """
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
    """Return the state of an Adam optimizer for parameters of these `shapes`, keyed by `names` or by numbers. Add the
    options of `group`.
    """
    keys = names or [*range(len(shapes))]
    return {
        "state": {key: {"step": torch.ones(()), "exp_avg": torch.ones(s)} for key, s in zip(keys, shapes, strict=True)},
        "param_groups": [{"lr": 0.1, "params": keys, **group}],
    }


W, V = torch.ones(2, 3), torch.ones(2, 3) + 1
MODEL = {"q": W, "k": V, "out": torch.ones(3, 2)}
SHAPES = [(2, 3), (2, 3), (3, 2)]

#: The contents of a file, the glob of the excluded weights, and the reason why the conversion is refused.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "one of two equal shapes": ({"model": MODEL, "optimizer": _state(SHAPES)}, "q", "0, 1 can be q, k"),
    "a parameter without state": (
        {"model": {"a": W, "b": torch.ones(4)}, "optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
        "a",
        "0 can be a, b and have the same shape",
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
    "LBFGS": (
        {"model": MODEL, "optimizer": {"state": {0: {"prev_flat_grad": V}}, "param_groups": [{"params": [0, 1, 2]}]}},
        "q",
        "LBFGS has one state for all parameters",
    ),
    "names of another model": (
        {"model": MODEL, "optimizer": _state(SHAPES, ["x.q", "x.k", "x.out"])},
        "q",
        "no state dict contains its parameters",
    ),
    "shapes of another model": (
        {"model": MODEL, "optimizer": _state([(9, 9)])},
        "q",
        "no state dict contains its parameters",
    ),
    "more parameters than weights": (
        {"model": MODEL, "optimizer": {"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]}},
        "q",
        "no state dict contains its parameters",
    ),
    "names with other shapes": (
        {"model": MODEL, "optimizer": _state([(3, 3), (2, 3), (3, 2)], param_names=["q", "k", "out"])},
        "out",
        "its state of q has the shape [3, 3], but the weight [2, 3]",
    ),
    "one name of a tie": (
        {"model": {"a": W, "b": W, "out": MODEL["out"]}, "optimizer": _state([(2, 3), (3, 2)])},
        "a",
        "a has another name that is unchanged (b)",
    ),
    "one optimizer of two models": (
        {"one": {"a": W, "b": V}, "two": {"c": W}, "optimizer": _state([(2, 3)] * 3, ["a", "b", "c"])},
        "c",
        "it can belong to one, two",
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
def test_uncertain_optimizers_are_refused(tmp_path: Path, case: str) -> None:
    """An optimizer that cannot follow its parameters for certain is refused with the reason, and nothing is written.
    Without the optimizer, the conversion succeeds.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    obj, glob, why = REFUSED[case]
    torch.save(obj, src)
    with pytest.raises(RefusedError) as caught:
        ckptconv.convert(src, dst, exclude=glob)
    assert why in str(caught.value)
    assert not dst.exists()
    ckptconv.convert(src, dst, exclude=glob, drop="optimizer")  # as the hint suggests


@pytest.mark.parametrize(
    ("glob", "left"),
    [
        ("out", 1),  # no other parameter has this shape
        ("[qk]", 2),  # all parameters of this shape, so their order does not matter
        ("step", 0),  # an integer, which no optimizer updates
        ("*mean", 0),  # no state has this shape
    ],
)
def test_results_that_do_not_depend_on_the_order_are_not_refused(tmp_path: Path, glob: str, left: int) -> None:
    """An optimizer is edited if every possible assignment of parameters to names gives the same result."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {**MODEL, "step": torch.tensor(3), "mean": torch.ones(7)}
    torch.save({"model": model, "optimizer": _state(SHAPES)}, src)
    ckptconv.convert(src, dst, exclude=glob)
    made = torch.load(dst)["optimizer"]
    assert made["param_groups"][0]["params"] == [*range(3 - left)]
    assert [*made["state"]] == [*range(3 - left)]


def test_each_of_two_optimizers_follows_its_own_model(tmp_path: Path) -> None:
    """Each optimizer follows the model that contains its parameter names, which are its keys or its ``param_names``. A
    copy of a model with the same names does not matter.
    """
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
    assert "opt_d: 1 parameter left out" in str(report)


def test_dropping_a_complete_model_keeps_the_optimizer(tmp_path: Path) -> None:
    """``drop`` of a complete model does not change the optimizer. Weights can be excluded from safetensors output,
    which contains no optimizer.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    obj = {"model": MODEL, "optimizer": _state(SHAPES)}
    torch.save(obj, src)
    ckptconv.convert(src, dst, drop="model")
    assert_same(torch.load(dst), {"optimizer": obj["optimizer"]})
    ckptconv.convert(src, tmp_path / "b.safetensors", exclude="q")


def test_report_of_a_folder_contains_file_names(tmp_path: Path) -> None:
    """In the report of a folder, the paths of edited optimizers and of objects that became plain begin with the name of
    the file.
    """
    run = tmp_path / "run"
    torch.save(MODEL, tmp_path / "model.pt")
    ckptconv.convert(tmp_path / "model.pt", run, max_shard_size=24, format="safetensors")
    obj = {"model": MODEL, "optimizer": _state(SHAPES), "seed": np.float64(1.5)}
    torch.save(obj, run / "train.pt")
    report = ckptconv.convert(run, tmp_path / "new", exclude="out", loadable=True)
    assert report.as_dict()["optimizers"] == [
        {
            **dict.fromkeys(("keyed_by", "groups")),
            "path": "train.pt: optimizer",
            "names": 0,
            "left_out": 1,
            "names_from": "shapes",
            "regrouped": 0,
        }
    ]
    assert [plain["path"] for plain in report.as_dict()["made_plain"]] == ["train.pt: seed"]


# Names and numbers


@pytest.mark.parametrize("several", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_by_names_and_back_to_numbers(tmp_path: Path, kind: str, several: bool) -> None:
    """Keyed by names, the state equals the result of ``get_optimizer_state_dict``, and ``set_optimizer_state_dict``
    loads the state. After the conversion back to numbers, ``load_state_dict`` loads the state, and training continues.
    """
    src, named, numbered = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    torch.manual_seed(1)
    net = Net()
    optimizer = OPTIMIZERS[kind](groups_of(net, named=False, several=several))
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, src)

    report = ckptconv.convert(src, named, optimizer="names", optimizer_order="model")

    change = report.changes.optimizers["optimizer"]
    assert (change.keyed_by, change.names_from) == ("names", "order")
    assert "in the order of model.parameters(), as you confirmed" in str(report)
    made = torch.load(named)
    if kind != "Adafactor":  # torch cannot flatten its lists of None
        assert_same(made["optimizer"], get_optimizer_state_dict(net, optimizer))
    after = Net()
    after.load_state_dict(made["model"])
    taker = OPTIMIZERS[kind](groups_of(after, named=False, several=several))
    set_optimizer_state_dict(after, taker, made["optimizer"])
    assert_same(moments(after, taker), moments(net, optimizer))

    ckptconv.convert(named, numbered, optimizer="numbers")
    after.load_state_dict(made["model"])
    taker = OPTIMIZERS[kind](groups_of(after, named=False, several=several))
    taker.load_state_dict(torch.load(numbered)["optimizer"])
    assert train(after, taker, seed=2) == train(net, optimizer, seed=2)
    back = torch.load(numbered)["optimizer"]
    names = [name for group in back["param_groups"] for name in group.pop("param_names")]
    assert_same(back, torch.load(src)["optimizer"])
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())


def test_named_state_without_weights(tmp_path: Path) -> None:
    """A state that is keyed by names needs no weights for a conversion to numbers. A state that already has the
    requested form does not change, and the report contains a note.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"optimizer": _state(SHAPES, ["q", "k", "out"])}, src)
    report = ckptconv.convert(src, dst, optimizer="numbers")
    expected = _state(SHAPES, param_names=["q", "k", "out"])
    assert_same(torch.load(dst)["optimizer"], expected)
    assert report.changes.optimizers["optimizer"].names_from == "itself"
    again = ckptconv.convert(dst, tmp_path / "c.pt", optimizer="numbers")
    assert again.notes == ("every optimizer is keyed like this already, so optimizer='numbers' changed nothing",)
    assert not again.changed
    ckptconv.convert(dst, src, optimizer="names", force=True)
    expected = _state(SHAPES, ["q", "k", "out"])
    assert_same(torch.load(src)["optimizer"], expected)


def test_numbers_that_are_text(tmp_path: Path) -> None:
    """DCP stores parameter numbers as text. ``load_state_dict`` ignores the state of such keys, so an edit of the
    optimizer converts them to numbers.
    """
    src, dcp, dst = tmp_path / "a.pt", tmp_path / "dcp", tmp_path / "b.pt"
    obj = {"model": MODEL, "optimizer": _state(SHAPES)}
    torch.save(obj, src)
    report = ckptconv.convert(src, dcp, format="dcp")
    assert any("set_optimizer_state_dict needs names: optimizer='names'" in note for note in report.notes)
    (found,) = ckptconv.inspect(dcp).optimizers
    assert found.has_texts and found.entries == 3 and found.shapes_agree
    report = ckptconv.convert(dcp, dst, optimizer="numbers")
    assert_same(torch.load(dst)["optimizer"], obj["optimizer"])
    assert report.changes.optimizers["optimizer"].names_from == "itself"
    assert not ckptconv.inspect(dst).optimizers[0].has_texts
    ckptconv.convert(dcp, dst, exclude="out", force=True)
    assert_same(torch.load(dst)["optimizer"], _state(SHAPES[:2]))
    ckptconv.convert(dcp, dst, optimizer="names", optimizer_order="model", force=True)
    assert [*torch.load(dst)["optimizer"]["state"]] == [*MODEL]
    options = {"optimizer": "names", "optimizer_order": "model", "force": True}
    ckptconv.convert(dcp, dst, regroup="q, k = qk", **options)
    assert [*torch.load(dst)["optimizer"]["state"]] == ["qk", "out"]


def test_shapes_with_one_possible_assignment(tmp_path: Path) -> None:
    """Shapes identify the parameters if only one assignment is possible. The order of the groups does not matter. A
    parameter without state gets the only remaining name.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}
    optimizer = _state([(3,), (1,)])
    optimizer["param_groups"].append({"lr": 0.2, "params": [2]})
    torch.save({"model": model, "optimizer": optimizer}, src)
    report = ckptconv.convert(src, dst, optimizer="names")
    made = torch.load(dst)["optimizer"]
    assert [group["params"] for group in made["param_groups"]] == [["c", "a"], ["b"]]
    assert [*made["state"]] == ["c", "a"]
    assert report.changes.optimizers["optimizer"].names_from == "shapes"


#: Weights, an optimizer that the order of the model does not identify either, and the reason.
OUT_OF_ORDER: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "a buffer of the same shape": (
        {"w": W, "mask": V, "out": MODEL["out"]},
        _state(SHAPES[1:]),
        "0 can be mask, w and have the same shape",
    ),
    "another order": (MODEL, _state([(3, 2), (2, 3), (2, 3)]), "the order of model does not match the shapes"),
    "groups that could be exchanged": (
        {"a": W, "b": V},
        {"state": _state(SHAPES[:2])["state"], "param_groups": [{"params": [0]}, {"params": [1]}]},
        "0 can be a, b",
    ),
    "a parameter of another model": ({"a": W}, _state(SHAPES[:2]), "no state dict contains its parameters"),
}


@pytest.mark.parametrize("case", OUT_OF_ORDER)
def test_order_that_does_not_identify_parameters(tmp_path: Path, case: str) -> None:
    """An optimizer is refused with the reason if the order of the model does not identify its parameters, even if the
    user confirms the order.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model, optimizer, why = OUT_OF_ORDER[case]
    torch.save({"model": model, "optimizer": optimizer}, src)
    for options in ({"optimizer": "names"}, {"exclude": next(iter(model))}):
        with pytest.raises(RefusedError) as caught:
            ckptconv.convert(src, dst, optimizer_order="model", **options)
        assert why in str(caught.value)
    assert not dst.exists()


def test_parameters_of_the_same_shape_are_never_guessed(tmp_path: Path) -> None:
    """Parameters of the same shape are never guessed. Files in which two of them are exchanged cannot be distinguished,
    so both files are refused. With ``param_names``, both are converted correctly.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    for order in (["q", "k", "out"], ["k", "q", "out"]):
        state = _state(SHAPES)
        for number, name in enumerate(order):
            state["state"][number]["exp_avg"] = MODEL[name] * 2
        torch.save({"model": MODEL, "optimizer": state}, src)
        with pytest.raises(
            RefusedError, match=r"0, 1 can be q, k and have the same shape\); optimizer_order='model' if"
        ):
            ckptconv.convert(src, dst, optimizer="names")
        state["param_groups"][0]["param_names"] = order
        torch.save({"model": MODEL, "optimizer": state}, src)
        ckptconv.convert(src, dst, optimizer="names", force=True)
        made = torch.load(dst)["optimizer"]["state"]
        dst.unlink()
        for name, entry in made.items():
            assert torch.equal(entry["exp_avg"], MODEL[name] * 2)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_an_optimizer_in_a_file_of_its_own(tmp_path: Path, suffix: str) -> None:
    """An optimizer in a separate file, like ``optimizer.pt`` of Trainer, gets its names from the file that is passed as
    ``model``, and globs match these names. The order of a safetensors file is not used, because safetensors sorts
    names.
    """
    model, src, dst = tmp_path / f"model.{suffix}", tmp_path / "optimizer.pt", tmp_path / "b.pt"
    save_file(MODEL, model) if suffix == "safetensors" else torch.save(MODEL, model)
    torch.save(_state(SHAPES), src)
    ckptconv.convert(src, dst, exclude="out", model=model)
    assert torch.load(dst)["param_groups"][0]["params"] == [0, 1]
    ckptconv.convert(src, dst, include=["q", "k"], model=model, force=True)
    assert torch.load(dst)["param_groups"][0]["params"] == [0, 1]
    with pytest.raises(NoMatchError, match="no name in the model matches 'head'"):
        ckptconv.convert(src, dst, exclude="head", model=model, force=True)
    if suffix == "pt":
        ckptconv.convert(src, dst, optimizer="names", model=str(model), optimizer_order="model", force=True)
        assert [*torch.load(dst)["state"]] == ["q", "k", "out"]
    else:
        with pytest.raises(RefusedError, match="safetensors sorts names"):
            ckptconv.convert(src, dst, optimizer="names", model=model, optimizer_order="model", force=True)
    with pytest.raises(RefusedError, match=r"there is no state dict\); use the file with the weights: model=FILE"):
        ckptconv.convert(src, dst, optimizer="names", force=True)


def test_buffers_of_batch_norm_are_not_parameters(tmp_path: Path) -> None:
    """Parameters without any state, as with SGD without momentum, are assigned in the order of the model. The buffers
    of batch norm are not counted.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    net = Net()
    torch.save({"model": net.state_dict(), "opt": torch.optim.SGD(net.parameters()).state_dict()}, src)
    ckptconv.convert(src, dst, optimizer="names", optimizer_order="model")
    assert torch.load(dst)["opt"]["param_groups"][0]["params"] == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize("options", [{"optimizer": "name"}, {"optimizer": True}, {"optimizer_order": "names"}])
def test_a_wrong_value_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    """A wrong value of ``optimizer`` or ``optimizer_order`` is reported before anything is read."""
    with pytest.raises(UsageError, match=r"optimizer(_order)? must be '(names|model)'"):
        ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", **options)


# The option ``like``


class Backwards(nn.Module):
    """A model with the modules of `net` in reverse order, and one more module if `more`."""

    def __init__(self, net: Net, *, more: bool = False) -> None:
        super().__init__()
        for name, module in reversed(list(net.named_children())):
            self.add_module(name, module)
        if more:
            self.more = nn.Linear(1, 1)

    forward = Net.forward


@pytest.mark.parametrize("more", [False, True], ids=["the same", "one more"])
@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_order_and_other_groups(tmp_path: Path, kind: str, named: bool, more: bool) -> None:
    """Code that registers its modules in another order, and groups its parameters, loads the state of each parameter by
    its name. Parameters that exist only in this code get no state, and a note names them.
    """
    src, other, dst = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    torch.manual_seed(1)
    net = Net()
    optimizer = OPTIMIZERS[kind]([{"params": [p for _, p in net.named_parameters()], "weight_decay": 0.1}])
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, src)
    if named:
        ckptconv.convert(src, dst, optimizer="names", optimizer_order="model")
        dst.replace(src)
    changed = Backwards(Net(), more=more)
    after = OPTIMIZERS[kind](groups_of(changed, named=True, several=True))
    torch.save({"model": changed.state_dict(), "optimizer": after.state_dict()}, other)

    options = {"optimizer": "numbers"} if named else {"optimizer_order": "model"}
    report = ckptconv.convert(src, dst, like=other, **options)

    made = torch.load(dst)
    names = [name for name in changed.state_dict() if "more" not in name]
    assert [*made["model"]] == names
    assert [note for note in report.notes if "does not have" in note] == [
        f"{path} does not have 2 names of the other checkpoint: more.bias, more.weight"
        for path in ("model", "optimizer")
        if more
    ]
    changed.load_state_dict(made["model"], strict=False)
    after.load_state_dict(made["optimizer"])
    assert_same(moments(changed, after), moments(net, optimizer))
    assert [group["weight_decay"] for group in after.param_groups] == [0.1, 0.1]
    if not more:
        assert train(changed, after, seed=2) == pytest.approx(train(net, optimizer, seed=2), rel=1e-6)


def test_weights_that_the_other_checkpoint_lacks_are_left_behind(tmp_path: Path) -> None:
    """Weights that the other checkpoint lacks are left behind with their state. The state of a parameter that is frozen
    in the other checkpoint is left behind too. The report names all of them.
    """
    src, other, dst = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    torch.save({"model": MODEL, "optimizer": _state(SHAPES, param_names=["q", "k", "out"])}, src)
    torch.save({"model": {"out": MODEL["out"], "k": W}, "optimizer": _state(SHAPES[2:], ["out"])}, other)
    report = ckptconv.convert(src, dst, like=other)
    made = torch.load(dst)
    assert [*made["model"]] == ["out", "k"]
    assert made["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0], "param_names": ["out"]}]
    assert_same(made["optimizer"]["state"], {0: _state(SHAPES)["state"][2]})
    assert {left.path for left in report.left_behind} == {"model/q", "optimizer/state[0]", "optimizer/state[1]"}
    assert report.changes.reordered == ["model"] and report.changes.optimizers["optimizer"].groups == 1
    assert "in the order of the other checkpoint: model" in str(report)

    torch.save(MODEL, other)
    report = ckptconv.convert(src, dst, like=other, force=True)
    assert_same(torch.load(dst), torch.load(src))
    assert "has no optimizer like optimizer, which keeps its groups" in str(report)


def _grouped(*groups: tuple[float, list[str]]) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"lr": lr, "params": names} for lr, names in groups]}


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (_grouped((0.1, ["q"]), (0.2, ["k", "out"])), _grouped((0.3, ["q", "k", "out"])), "with different options"),
        (_grouped((0.1, ["k", "out"])), _grouped((0.1, ["k", "out"]), (0.2, ["q"])), "none of q is in a group"),
        (_state(SHAPES), _grouped((0.1, ["q", "k", "out"])), "0, 1 can be q, k and have the same shape"),
        (_grouped((0.1, ["q", "k", "out"])), _state(SHAPES), "0, 1 can be q, k and have the same shape"),
    ],
)
def test_undetermined_groups_are_refused(tmp_path: Path, ours: Any, theirs: Any, why: str) -> None:
    """Groups that the two checkpoints do not determine are refused. No option of a group is invented, and no order is
    taken from the other checkpoint.
    """
    src, other, dst = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    torch.save({"model": MODEL, "optimizer": ours}, src)
    torch.save({"model": MODEL, "optimizer": theirs}, other)
    with pytest.raises(RefusedError, match=why):
        ckptconv.convert(src, dst, like=other)
    assert not dst.exists()


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    """A checkpoint is refused as ``like`` if it contains no name of the input, or no state dict."""
    src, other = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"model": MODEL}, src)
    torch.save({"module.q": W}, other)
    with pytest.raises(RefusedError, match=r"none of the names \(got q, k, out; the other has module\.q\)"):
        ckptconv.convert(src, tmp_path / "c.pt", like=other)
    torch.save([W], other)
    with pytest.raises(RefusedError, match="one state dict is needed"):
        ckptconv.convert(src, tmp_path / "c.pt", like=other)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for parameters without state, and for combinations of optimizers and models, is bounded."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {f"w{i}": torch.ones(1) for i in range(20)}
    group = {"params": [*range(10)]}
    torch.save({"model": model, "optimizer": {"state": {}, "param_groups": [group]}}, src)
    for steps, what in (
        (150, "have the same shape"),
        (100, "too many parameters have no state"),
        (50, "too many optim"),
    ):
        limits = dataclasses.replace(LIMITS, optimizer_steps=steps)
        for module in (reading, editing):
            monkeypatch.setattr(module, "LIMITS", limits)
        with pytest.raises(ckptconv.CkptconvError, match=what):
            ckptconv.convert(src, dst, optimizer="names", optimizer_order="model")


def test_many_groups_without_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for new positions in the groups is counted before they are created, because each position contains one
    number for each group.
    """
    src = tmp_path / "a.pt"
    looked: list[object] = []
    groups = [{"params": [i]} for i in range(100)]
    torch.save({"model": {f"w{i}": torch.ones(1) for i in range(100)}, "o": {"state": {}, "param_groups": groups}}, src)
    for module in (reading, editing):
        monkeypatch.setattr(module, "LIMITS", dataclasses.replace(LIMITS, optimizer_steps=30_000))
    monkeypatch.setattr(reading, "_may_be", lambda *args: not looked.append(args))
    with pytest.raises(RefusedError, match="too many parameters have no state"):
        ckptconv.convert(src, tmp_path / "b.pt", optimizer="names", optimizer_order="model")
    assert len(looked) < 30_000


def test_huge_parameter_numbers_are_reported(tmp_path: Path) -> None:
    src = tmp_path / "a.pt"
    optimizer = {"state": {}, "param_groups": [{"params": [1 << 20_000]}]}
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": optimizer}, src)
    trouble = "a group does not list its parameters by numbers or names"
    assert [each.trouble for each in ckptconv.inspect(src).optimizers] == [trouble]
    with pytest.raises(RefusedError, match=trouble):
        ckptconv.convert(src, tmp_path / "b.pt", optimizer="names")
