"""Optimizers follow weights that are split, joined and stacked. Training continues as with a model that torch changed
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import ckptconv
from ckptconv.errors import LimitError, NoMatchError, RefusedError
from ckptconv.limits import Limits
from tests.support.judge import assert_same

RULES = ("q.*:1, k.*:1, v.*:1 = qkv.*", "experts.{e}.weight = experts.w")
State = dict[str, torch.Tensor]


class Lion(torch.optim.Optimizer):
    """The optimizer Lion (Chen et al., 2023, algorithm 2), which torch does not contain."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.lerp(p.grad, momentum, first).sign())
                momentum.lerp_(p.grad, 1 - second)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Lion": Lion,
}


class Experts(nn.Module):
    """Experts in one stacked parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2, 4))

    def forward(self, x: torch.Tensor) -> Iterable[torch.Tensor]:
        return [x @ w.T for w in self.w]


class Net(nn.Module):
    """A model with attention and experts, in separate or `fused` weights. The weight of the norm is frozen, and `spare`
    never gets a gradient.
    """

    def __init__(self, *, fused: bool, spare: bool = True, backwards: bool = False) -> None:
        super().__init__()
        parts: dict[str, nn.Module] = {"norm": nn.LayerNorm(4)}
        parts |= {"qkv": nn.Linear(4, 12)} if fused else {name: nn.Linear(4, 4) for name in "qkv"}
        parts["experts"] = Experts() if fused else nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(3))
        parts |= {"out": nn.Linear(4, 1)}
        if spare:
            parts["spare"] = nn.Linear(3, 1)
        for name, part in reversed(parts.items()) if backwards else parts.items():
            self.add_module(name, part)
        self.norm.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        x = q * torch.tanh(k) + v
        each = self.experts(x) if isinstance(self.experts, Experts) else [expert(x) for expert in self.experts]
        return self.out(x).square().mean() + sum(y.square().mean() * i for i, y in enumerate(each))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> list[float]:
    """Return the losses of three steps on random data."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(7, 4, generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def groups_of(net: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """Return the vectors in one group and all other parameters in another. Include the names if `named`."""
    every = list(net.named_parameters())
    parts = [[each for each in every if (each[1].ndim == 1) == is_vector] for is_vector in (False, True)]
    return [
        {"params": part if named else [p for _, p in part], "weight_decay": i * 0.1} for i, part in enumerate(parts)
    ]


def changed(state: State, *, split: bool) -> State:
    """Return `state` in its split or joined form, computed by torch."""
    state = dict(state)
    for last in ("weight", "bias"):
        if split and f"qkv.{last}" in state:
            state |= zip((f"{name}.{last}" for name in "qkv"), state.pop(f"qkv.{last}").chunk(3), strict=True)
        elif f"q.{last}" in state:
            state[f"qkv.{last}"] = torch.cat([state.pop(f"{name}.{last}") for name in "qkv"])
    if split and "experts.w" in state:
        state |= {f"experts.{e}.weight": w for e, w in enumerate(state.pop("experts.w"))}
    elif "experts.0.weight" in state:
        state["experts.w"] = torch.stack([state.pop(f"experts.{e}.weight") for e in range(3)])
    return state


def in_memory(net: Net, optimizer: torch.optim.Optimizer, kind: str, *, split: bool) -> tuple[Net, Any]:
    """Return the model and the optimizer in the other form, with all weights and states converted by torch."""
    new = Net(fused=not split, spare=hasattr(net, "spare"))
    new.load_state_dict(changed(net.state_dict(), split=split))
    taker = OPTIMIZERS[kind](groups_of(new))
    by_name = {name: optimizer.state[p] for name, p in net.named_parameters() if p in optimizer.state}
    parameters = dict(new.named_parameters())
    for field in next(iter(by_name.values()), {}):
        like = {name: values[field] for name, values in by_name.items()}
        if any(torch.is_tensor(value) and value.ndim for value in like.values()):
            theirs = changed(like, split=split)
        else:  # a number that is the same for all parameters
            theirs = {name: like.get(name, like["q.weight" if not split else "qkv.weight"]) for name in parameters}
            theirs = {name: value for name, value in theirs.items() if parameters[name].grad is None}
            theirs = {n: v for n, v in theirs.items() if "spare" not in n and parameters[n].requires_grad}
        for name, value in theirs.items():
            taker.state[parameters[name]][field] = value.clone() if torch.is_tensor(value) else value
    return new, taker


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return copies of the state of each parameter by its name."""
    return {
        name: {key: value.clone() if torch.is_tensor(value) else value for key, value in optimizer.state[p].items()}
        for name, p in sorted(net.named_parameters())
        if optimizer.state.get(p)
    }


@pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
@pytest.mark.parametrize(
    ("kind", "way"), [("Adam", "names"), ("Adam", "like"), *((kind, "order") for kind in OPTIMIZERS)]
)
def test_training_continues_with_regrouped_weights(tmp_path: Path, kind: str, split: bool, way: str) -> None:
    """``set_optimizer_state_dict``, which needs a state for each parameter, loads the regrouped state by names.
    ``load_state_dict`` loads it by numbers, in the order of the output or of another checkpoint. Training continues.
    """
    src, dst, like = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    torch.manual_seed(1)
    net = Net(fused=split, spare=way == "like")
    optimizer = OPTIMIZERS[kind](groups_of(net, named=way != "order"))
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, src)
    new = Net(fused=not split, spare=way == "like", backwards=way == "like")
    taker = OPTIMIZERS[kind](groups_of(new, named=True))
    torch.save({"model": new.state_dict(), "optimizer": taker.state_dict()}, like)
    expected_net, expected = in_memory(net, optimizer, kind, split=split)

    options: dict[str, Any] = {
        "names": {"optimizer": "names"},
        "like": {"like": like},
        "order": {"optimizer_order": "model"},
    }[way]
    report = ckptconv.convert(src, dst, regroup=RULES, reverse=split, **options)

    assert report.changes.optimizers["optimizer"].regrouped == (9 if split else 3)
    assert "regrouped with the weights" in str(report)
    assert ("as you confirmed" in str(report)) == (way == "order")
    made = torch.load(dst)
    new.load_state_dict(made["model"], strict=True)
    if way == "names":
        taker = OPTIMIZERS[kind](groups_of(new))
        set_optimizer_state_dict(new, taker, made["optimizer"])
    else:
        taker.load_state_dict(made["optimizer"])
    assert_same(moments(new, taker), moments(expected_net, expected))
    assert train(new, taker, seed=2) == train(expected_net, expected, seed=2)


# Refused states


def adam(**of: Any) -> dict[str, Any]:
    """Return the state of a parameter of shape (2, 3) in Adam, updated with `of`."""
    return {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3), **of}


def named(a: Any, b: Any, *, groups: Any = None, names: Iterable[str] = "ab") -> dict[str, Any]:
    """Return an optimizer of the weights ``a`` and ``b``, keyed by names. Leave out an entry that is None."""
    state = {key: entry for key, entry in zip("ab", (a, b), strict=True) if entry is not None}
    return {"state": state, "param_groups": groups or [{"lr": 0.1, "params": [*names]}]}


BLOCKS = {  # bitsandbytes/optim/optimizer.py, Optimizer1State.init_state, for weights of at least 4,096 numbers
    "step": 3,
    "state1": torch.zeros(2, 3, dtype=torch.uint8),
    "qmap1": torch.zeros(256),
    "absmax1": torch.zeros(1),
}
#: The optimizer of a file whose weights a and b are joined, and the reason why the rule is refused.
REFUSED: dict[str, tuple[Any, str]] = {
    "steps that differ": (named(adam(), adam(step=torch.tensor(2.0))), "step of a, b must be equal"),
    "numbers that differ": (named(adam(step=3), adam(step=2)), r"step of a, b must be equal \(got 3, 2\)"),
    "a number and a tensor": (named(adam(), adam(step=3)), "unknown name: step"),
    "a parameter without state": (named(adam(), None), "a has a state, and b has none: it is frozen or was never"),
    "other options": (
        named(adam(), adam(), groups=[{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}]),
        "a, b are in groups with different options",
    ),
    "a parameter of no group": (named(adam(), None, names="a"), "a is one of its parameters, and b is not"),
    "Adafactor of torch": (
        named(*({"step": torch.tensor(3.0), "row_var": torch.ones(2, 1), "col_var": torch.ones(1, 3)} for _ in "ab")),
        r"its state of a has another shape, or an unknown name: row_var \[2, 1\], col_var \[1, 3\]",
    ),
    "Adafactor of transformers": (
        named(*({"step": 3, "exp_avg_sq_row": torch.ones(2), "exp_avg_sq_col": torch.ones(3)} for _ in "ab")),
        r"exp_avg_sq_row \[2\], exp_avg_sq_col \[3\]",
    ),
    "blocks of 8 bits": (named(BLOCKS, BLOCKS), r"qmap1 \[256\], absmax1 \[1\]"),
    "a name that may mean another thing": (named(adam(gram=torch.ones(2, 3)), adam(gram=torch.ones(2, 3))), "gram"),
    "lists": (named(adam(history=[]), adam(history=[])), "unknown name: history"),
    "keys that are no strings": (named(adam(), {**adam(), 7: 1}), "have different or unknown keys"),
    "numbers that nobody prints": (named({"step": 1 << 20_000}, {"step": 1}), r"got int of 20,001 bits, 1\)"),
    "other keys": (named(adam(), adam(max_exp_avg_sq=torch.ones(2, 3))), "have different or unknown keys"),
    "an entry that is no dict": (named(adam(), torch.ones(2, 3)), "unknown keys, or are not dicts"),
    "other dtypes": (named(adam(), adam(exp_avg=torch.ones(2, 3).half())), "exp_avg of a, b differs in dtype"),
    "shapes of another model": (named(adam(exp_avg=torch.ones(3, 3)), adam()), r"unknown name: exp_avg \[3, 3\]"),
    "names of another model": (
        {"state": {}, "param_groups": [{"params": ["x.a", "x.b"]}]},
        "no state dict contains its parameters",
    ),
    "numbers that shapes do not tell": (
        {"state": {0: adam(), 1: adam()}, "param_groups": [{"params": [0, 1]}]},
        r"0, 1 can be a, b and have the same shape\); optimizer_order='model'",
    ),
    "LBFGS": ({"state": {0: {"prev_flat_grad": 0}}, "param_groups": [{"params": [0, 1]}]}, "LBFGS has one state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_cannot_follow_is_refused(tmp_path: Path, case: str) -> None:
    """State that cannot follow its weights is refused, and nothing is written. The error contains the reason, and a
    hint suggests leaving out the optimizer. Without the optimizer, the conversion succeeds.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    optimizer, why = REFUSED[case]
    torch.save({"model": {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, "optimizer": optimizer}, src)
    with pytest.raises(RefusedError, match=why) as caught:
        ckptconv.convert(src, dst, regroup="a, b = ab")
    assert "to leave out the optimizer: drop='optimizer'" in str(caught.value)
    assert not dst.exists()
    ckptconv.convert(src, dst, regroup="a, b = ab", drop="optimizer")
    ckptconv.convert(src, tmp_path / "c.safetensors", regroup="a, b = ab")  # this format contains no optimizer


def test_nested_options_with_shared_parts_are_compared_quickly(tmp_path: Path) -> None:
    """Nested options that share their parts are compared without expanding them. Expanded, these tuples would have
    2**400 members.
    """

    def options() -> Any:
        made: Any = ()
        for _ in range(400):
            made = (made, made)
        return made

    src = tmp_path / "a.pt"
    groups = [{"params": [name], "options": options()} for name in "ab"]
    torch.save(
        {"model": {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, "opt": named(adam(), adam(), groups=groups)}, src
    )
    report = ckptconv.convert(src, tmp_path / "b.pt", regroup="a, b = ab")
    assert report.changes.optimizers["opt"].regrouped == 1


def one_group(*names: str, **options: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"params": [*names], **options}]}


#: Functions that return a checkpoint and a rule.
LARGE: dict[str, Callable[[], tuple[dict[str, Any], str]]] = {
    "options of a group": lambda: (
        {
            "model": (model := dict.fromkeys((f"{i}.{part}" for i in range(300) for part in "ab"), torch.ones(1, 1))),
            "optimizer": one_group(*model, **dict.fromkeys(map(str, range(400)))),
        },
        "{i}.a, {i}.b = {i}.ab",
    ),
    "numbers in the state of what is unstacked": lambda: (
        {
            "model": {"a": torch.ones(2000, 0)},
            "optimizer": one_group("a") | {"state": {"a": dict.fromkeys(map(str, range(20)), torch.tensor(1.0))}},
        },
        "a = {e}",
    ),
    "names in an optimizer of no model": lambda: (
        {"models": [{"a": torch.ones(0)} for _ in range(1000)], "optimizer": one_group(*map(str, range(3000)))},
        "a = b",
    ),
    "names in an optimizer of many models": lambda: (
        {"models": [{f"{i}": torch.ones(0)} for i in range(300)], "optimizer": one_group(*map(str, range(1200)))},
        "{i} = a.{i}",
    ),
}


@pytest.mark.untraced
@pytest.mark.parametrize("case", LARGE)
def test_repeated_reading_is_counted_as_work(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=100_000))
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    checkpoint, rule = LARGE[case]()
    torch.save(checkpoint, src)
    with pytest.raises(LimitError, match="take too much work"):
        ckptconv.convert(src, dst, regroup=rule, optimizer="numbers" if "many" in case else None)


def numbered(names: str, *shapes: tuple[int, ...]) -> dict[str, Any]:
    """Return an optimizer that is keyed by numbers, with these `names` and a state for each of the `shapes`."""
    state = {i: adam(exp_avg=torch.ones(shape), exp_avg_sq=torch.ones(shape)) for i, shape in enumerate(shapes)}
    return {"state": state, "param_groups": [{"params": [*state], "param_names": names.split()}]}


def test_new_parameter_numbers_are_not_guessed(tmp_path: Path) -> None:
    """The order of new modules is not guessed, because code can register them in any order. The user confirms the
    order, requests names, or passes a checkpoint with the order. An order that no model can have is refused in any
    case.
    """
    src, dst, other = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    model = {"qk.weight": torch.ones(4, 3), "qk.bias": torch.ones(4)}
    optimizer = numbered("qk.weight qk.bias", (4, 3), (4,))
    torch.save({"model": model, "optimizer": optimizer}, src)
    rule = "qk.* = q.*:1, k.*:1"
    with pytest.raises(RefusedError, match="the new parameter numbers are not known"):
        ckptconv.convert(src, dst, regroup=rule)
    with pytest.raises(
        RefusedError, match=r"got q\.bias without the other parameters of its module\); optimizer='names'"
    ):
        ckptconv.convert(src, dst, regroup=rule, optimizer_order="model")
    ckptconv.convert(src, other, regroup=rule, optimizer="names")
    with pytest.raises(RefusedError, match="the new parameter numbers are not known"):
        ckptconv.convert(other, dst, regroup=rule, reverse=True, optimizer="numbers")
    new = nn.ModuleDict({name: nn.Linear(3, 2) for name in "kq"})
    torch.save({"model": new.state_dict(), "optimizer": torch.optim.Adam(new.named_parameters()).state_dict()}, other)
    ckptconv.convert(src, dst, regroup=rule, like=other)
    assert torch.load(dst)["optimizer"]["param_groups"][0]["param_names"] == [
        "k.weight",
        "k.bias",
        "q.weight",
        "q.bias",
    ]


def test_joined_tensor_takes_the_position_of_its_first_part(tmp_path: Path) -> None:
    """A joined tensor takes the position of its first part in the state dict and in the optimizer, so both have the
    same order.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {"z": torch.ones(1), "a": torch.ones(2, 3), "c": torch.ones(2), "b": torch.ones(2, 3)}
    torch.save({"model": model, "optimizer": numbered("z a c b", (1,), (2, 3), (2,), (2, 3))}, src)
    ckptconv.convert(src, dst, regroup="b, a = ba", optimizer_order="model")
    made = torch.load(dst)
    assert [*made["model"]] == made["optimizer"]["param_groups"][0]["param_names"] == ["z", "ba", "c"]
    assert [*made["optimizer"]["state"]] == [0, 1, 2]


def test_each_part_has_a_step_of_its_own(tmp_path: Path) -> None:
    """Each part has its own step, because torch counts the steps in place. Later rules of the same command apply to the
    optimizer too, and the report names the dropped parts.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {"ab": torch.ones(5, 3), "c": torch.ones(2)}
    optimizer = numbered("ab c", (5, 3), (2,))
    optimizer["state"][0]["exp_avg"] = torch.arange(15.0).reshape(5, 3)
    torch.save({"model": model, "optimizer": optimizer}, src)
    rules = ["ab = a[2], b[2], -", "c = d", "b = e"]
    report = ckptconv.convert(src, dst, regroup=rules, optimizer="names")
    made = torch.load(dst)["optimizer"]
    assert made["param_groups"][0]["params"] == [*made["state"]] == ["a", "e", "d"]
    assert made["state"]["e"]["exp_avg"].tolist() == [[6, 7, 8], [9, 10, 11]]
    steps = [made["state"][name]["step"] for name in "ae"]
    steps[0] += 1
    assert steps == [4, 3]
    assert {left.path for left in report.left_behind} == {
        f"{path}, 1 of 5 along dimension 0"
        for path in ("model/ab", "optimizer/state[0]/exp_avg", "optimizer/state[0]/exp_avg_sq")
    }


def test_an_optimizer_of_other_weights_does_not_change(tmp_path: Path) -> None:
    """An optimizer does not change, except for renames, if it belongs to another model, or if the regrouped weights are
    frozen and in none of its groups.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    obj = {
        "gen": {"a": torch.ones(2, 3), "b": torch.ones(2, 3), "lora": torch.ones(1)},
        "disc": {"d": torch.ones(4)},
        "opt_g": {"state": {}, "param_groups": [{"params": ["lora"]}]},
        "opt_d": {"state": {}, "param_groups": [{"params": [0], "param_names": ["d"]}]},
    }
    torch.save(obj, src)
    report = ckptconv.convert(src, dst, regroup=["a, b = ab", "d = e"])
    made = torch.load(dst)
    assert_same(made["opt_g"], obj["opt_g"])
    assert made["opt_d"]["param_groups"] == [{"params": [0], "param_names": ["e"]}]
    assert not report.changes.optimizers


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    """Tied weights are one parameter, and its state has the first of the new names."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    a, b = torch.ones(2, 3), torch.ones(2, 3) * 2
    model = {"x.0.a": a, "x.0.b": b, "x.1.a": a, "x.1.b": b}
    torch.save({"model": model, "optimizer": numbered("x.0.a x.0.b", (2, 3), (2, 3))}, src)
    ckptconv.convert(src, dst, regroup="x.{n}.a, x.{n}.b = x.{n}.ab", optimizer="names")
    made = torch.load(dst)
    assert [*made["optimizer"]["state"]] == ["x.0.ab"]
    assert made["model"]["x.0.ab"].data_ptr() == made["model"]["x.1.ab"].data_ptr()


def test_an_optimizer_in_a_file_of_its_own(tmp_path: Path) -> None:
    """``model`` names the file with the weights of an optimizer in a separate file. This file does not change."""
    model, src, dst = tmp_path / "model.pt", tmp_path / "optimizer.pt", tmp_path / "b.pt"
    torch.save({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, model)
    before = model.read_bytes()
    torch.save(numbered("a b", (2, 3), (2, 3)), src)
    report = ckptconv.convert(src, dst, regroup="a, b = ab", model=model, optimizer="names")
    made = torch.load(dst)
    assert made["param_groups"][0]["params"] == ["ab"]
    assert made["state"]["ab"]["exp_avg"].shape == (4, 3)
    assert model.read_bytes() == before
    assert not report.changes.regrouped and report.changes.optimizers["."].regrouped == 1
    with pytest.raises(NoMatchError):
        ckptconv.convert(src, dst, regroup="a, b = ab", force=True)
