"""``regroup`` in memory gives the same result as ``convert`` for a file."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptconv
from ckptconv.errors import ArgumentTypeError, CkptconvError, NoMatchError, RefusedError, UsageError
from tests.support.judge import assert_same


def numbered(*shape: int) -> torch.Tensor:
    """Return a tensor whose elements are different."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


EXPERTS = {f"l.{n}.e.{e}.{w}": numbered(6, 4) + n + 10 * e for n in range(2) for e in range(11) for w in "ab"}
#: A state dict, rules, and other options.
CASES: dict[str, tuple[dict[str, torch.Tensor], tuple[str, ...], dict[str, Any]]] = {
    "stack and join": (EXPERTS, ("l.{n}.e.{e}.a:1, l.{n}.e.{e}.b:1 = l.{n}.ab",), {}),
    "along another dimension": (EXPERTS, ("l.{n}.e.{e}.a:1, l.{n}.e.{e}.b:1 = l.{n}.ab @2",), {}),
    "unstack": ({"w": numbered(3, 8, 2)}, ("w = a.{e}:3, b.{e}:1",), {}),
    "groups": ({"w": numbered(12, 2)}, ("w @0/$g = q:4, k:1, v:1",), {"sizes": {"g": 2}}),
    "groups of a join": (
        {"q": numbered(8, 2), "k": numbered(2, 2), "v": numbered(2, 2)},
        ("w @0/2 = q:4, k:1, v:1",),
        {"reverse": True},
    ),
    "strided": ({"w": numbered(4, 6).t()}, ("w = a:1, b:2", "a = c"), {}),
    "left behind": ({"w": numbered(4, 6), "x": numbered(1)}, ("w @1 = a[4], -",), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_regroup_and_convert_give_the_same(tmp_path: Path, case: str) -> None:
    """``regroup`` gives the same names in the same order, and the same values, as ``convert``. The names of its
    argument do not change.
    """
    state, rules, options = CASES[case]
    torch.save(state, tmp_path / "a.pt")
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", regroup=rules, **options)
    before = dict(state)
    found = ckptconv.regroup(state, rules, **options)
    assert [*found] == [*(wanted := torch.load(tmp_path / "b.pt"))]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert state.keys() == before.keys()


def test_a_model(tmp_path: Path) -> None:
    """``_metadata`` follows the names, the type is kept, and parts are views. The rules can be in a file."""
    net = nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4)})
    (tmp_path / "my.rules").write_text("qkv.* = q.*:1, k.*:1, v.*:1")
    found = ckptconv.regroup(net.state_dict(), str(tmp_path / "my.rules"))
    other = nn.ModuleDict({**{name: nn.Linear(4, 4) for name in "qkv"}, "out": nn.Linear(4, 4)})
    other.load_state_dict(found, strict=True)
    assert isinstance(found, OrderedDict)
    assert {**found._metadata} == {**other.state_dict()._metadata}
    assert found["k.weight"].untyped_storage().data_ptr() == net["qkv"].weight.untyped_storage().data_ptr()
    again = ckptconv.regroup(found, [str(tmp_path / "my.rules")], reverse=True)
    assert_same(dict(net.state_dict()), dict(again))
    assert {**again._metadata} == {**net.state_dict()._metadata}


def test_parameters_and_ties() -> None:
    """Parameters stay parameters. Tied tensors are regrouped once, or refused if a rule takes only some of them."""
    weight = nn.Parameter(numbered(4, 2), requires_grad=False)
    state = {"a.w": weight, "b.w": weight, "c": weight}
    found = ckptconv.regroup({name: state[name] for name in ("a.w", "b.w")}, "**.w = **.q:1, **.k:1")
    assert isinstance(found["a.q"], nn.Parameter)
    assert not found["a.q"].requires_grad
    assert found["a.q"] is found["b.q"]
    with pytest.raises(RefusedError, match=r"c is tied to b\.w, and no rule takes it"):
        ckptconv.regroup(state, "**.w = **.q:1, **.k:1")


def test_refusals() -> None:
    """A rule that cannot be applied, and an argument that is not a state dict, raise specific errors."""
    state: dict[str, Any] = {"w": numbered(4), "x": nn.Parameter(numbered(4)), "s": torch.eye(2).to_sparse()}
    wrong: dict[str, tuple[str, type[CkptconvError]]] = {
        "w = a:$n, b:1": (r"the value of \$n is not known", UsageError),
        "w, x = a": ("the parts differ in device", RefusedError),
        "s = a:1, b:1": ("s is not a plain tensor", RefusedError),
        "nothing = a": ("no name matches the rule", NoMatchError),
    }
    for rule, (text, kind) in wrong.items():
        with pytest.raises(kind, match=text):
            ckptconv.regroup(state, rule)
    with pytest.raises(ArgumentTypeError, match="a state dict is needed"):
        ckptconv.regroup(nn.Linear(1, 1), "w = a")  # type: ignore[type-var]
