"""``--drop`` leaves out the object at a path and changes nothing else. The results are loaded by torch."""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.errors import DangerousError, NoMatchError, RefusedError
from tests.support.conversions import refused, refused_in_place
from tests.support.judge import assert_same
from tests.support.reduced import Reduced

W = torch.arange(4.0)


def training() -> dict[str, Any]:
    """Return a training checkpoint that contains an object of each kind that can be left out."""
    model = OrderedDict(w=W, b=W[:2] + 1)
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    shared = {"lr": 0.1, "steps": [1, 2, 3]}
    return {
        "model": model,
        "optimizer": {"state": {0: {"exp_avg": W + 2, "step": 3}, 1: {"exp_avg": W + 4}}, "param_groups": [shared, {}]},
        "again": shared,
        "args": argparse.Namespace(lr=0.1, path="x", a={"b": 1}),
        "seen": {"x"},
        "a/b": 1,
        "pair": (1, W),
        "epoch": 7,
    }


def without(*where: Any) -> dict[str, Any]:
    """Return the training checkpoint without the objects at `where`. Each element of `where` is a list of keys, and a
    key that begins with a dot is an attribute.
    """
    obj = training()
    for *above, last in where:
        at: Any = obj
        for key in above:
            at = getattr(at, key[1:]) if str(key).startswith(".") else at[key]
        if isinstance(last, str) and last.startswith("."):
            delattr(at, last[1:])
        elif isinstance(at, set):
            at.remove(last)
        else:
            del at[last]
    return obj


@pytest.mark.parametrize(
    ("paths", "where"),
    [
        (["optimizer"], [["optimizer"]]),
        (["epoch", "args"], [["epoch"], ["args"]]),
        (["optimizer/state[0]"], [["optimizer", "state", 0]]),
        (["optimizer/state[0]/exp_avg"], [["optimizer", "state", 0, "exp_avg"]]),
        (
            ["optimizer/state[[]*]/exp_avg"],
            [["optimizer", "state", 0, "exp_avg"], ["optimizer", "state", 1, "exp_avg"]],
        ),
        (["optimizer/param_groups[1]"], [["optimizer", "param_groups", 1]]),
        (["optimizer/param_groups[0]/steps[1]"], [["again", "steps", 1]]),  # a list at two paths
        (["args/.lr"], [["args", ".lr"]]),
        (["args/.a/b"], [["args", ".a", "b"]]),
        (["seen/(0)[0]"], [["seen", "x"]]),  # pickle creates a set from a list
        ([r"a\/b"], [["a/b"]]),
        (["model/._metadata"], [["model", "._metadata"]]),
        (["model/w", "pair", "optimizer"], [["model", "w"], ["pair"], ["optimizer"]]),
        (["optimizer/*"], [["optimizer", "state"], ["optimizer", "param_groups"]]),
    ],
)
def test_only_dropped_objects_are_missing(tmp_path: Path, paths: list[str], where: list[list[Any]]) -> None:
    """Only the items, elements and attributes at the given paths are dropped, and the report names them. A glob drops
    each outermost match.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(training(), src)
    report = ckptconv.convert(src, dst, drop=paths)
    assert_same(torch.load(dst, weights_only=False), without(*where))
    named = {left.path for left in report.left_behind}
    assert all(path in named for path in paths if "*" not in path) and named
    assert (tmp_path / "b.pt").stat().st_size <= src.stat().st_size


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("optimzer", NoMatchError, "there is nothing at optimzer; did you mean optimizer"),
        ("*/nothing", NoMatchError, "there is nothing at"),
        ("pair[0]", RefusedError, "only items, attributes and elements of lists.*drop='pair'"),
        (".", RefusedError, "only items, attributes"),
        ("args/(call)", NoMatchError, "there is nothing"),
    ],
)
def test_unchanged_values(tmp_path: Path, path: str, error: type[ckptconv.CkptconvError], words: str) -> None:
    """Objects that do not exist, members of tuples, and the complete checkpoint cannot be dropped."""
    torch.save(training(), tmp_path / "a.pt")
    refused(error, words, tmp_path / "a.pt", tmp_path / "b.pt", drop=path)


def test_arguments_of_a_call_cannot_be_dropped(tmp_path: Path) -> None:
    """An argument of a call cannot be dropped, because the call would become a different one."""
    torch.save({"w": W, "made": Reduced(range, (1, 2), None)}, tmp_path / "a.pt")
    refused(RefusedError, "drop='made'", tmp_path / "a.pt", tmp_path / "b.pt", drop="made/(0)")
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", drop="made")
    assert torch.load(tmp_path / "b.pt").keys() == {"w"}


def test_dangerous_objects_can_be_dropped(tmp_path: Path) -> None:
    """If the dangerous call of a file is dropped, the file is converted."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"w": W, "evil": Reduced(os.system, (f"touch {tmp_path}/ran",), None)}, src)
    refused(DangerousError, "system", src, dst)
    ckptconv.convert(src, dst, drop="evil")
    assert torch.load(dst).keys() == {"w"} and not (tmp_path / "ran").exists()


def test_drop_applies_after_select_and_before_globs(tmp_path: Path) -> None:
    """``drop`` applies after ``select`` and before globs and prefixes. Its paths are those of the source. ``drop`` in
    place is refused.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(training(), src)
    ckptconv.convert(src, dst, select="model", drop="model/b", add_prefix="m.")
    assert torch.load(dst).keys() == {"m.w"}
    refused(NoMatchError, "no name", src, tmp_path / "c.pt", select="model", drop="model/b", exclude="b")
    refused_in_place(ckptconv.UsageError, "drop", src, drop="epoch")


@pytest.mark.parametrize(
    "options",
    [
        {"drop": "optimizer"},
        {"drop": ["args/.lr", "optimizer/*"]},
        {"drop": "optimizer", "select": "model", "state_dict": False},
        {"exclude": "optimizer/*"},
    ],
)
def test_paths_that_are_left_behind_already_are_not_errors(tmp_path: Path, options: Any) -> None:
    """A path that another option has already left behind is not an error. For example, ``--state-dict`` already removes
    the optimizer that ``--drop optimizer`` names. A path that does not exist is still an error.
    """
    torch.save(training(), tmp_path / "a.pt")
    made = ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", **{"state_dict": True, **options})
    assert_same(torch.load(tmp_path / "b.pt"), training()["model"])
    assert "optimizer" in {left.path for left in made.left_behind}
    field = "exclude" if "exclude" in options else "drop"
    refused(NoMatchError, None, tmp_path / "a.pt", tmp_path / "c.pt", **{**options, field: "optimizr/*"})
    error = refused(NoMatchError, None, tmp_path / "a.pt", tmp_path / "c.pt", state_dict=True, drop="optimizr")
    assert error.hint == "did you mean optimizer?"


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        (torch.optim.Adam([torch.ones(2, requires_grad=True)]).state_dict(), "it is the state of an optimizer"),
        ({"optim": {"state": {0: {"m": torch.ones(1)}}, "param_groups": [{}]}}, "optim is the state of an optimizer"),
        ([torch.ones(1), torch.ones(2)], "it is a list of 2 tensors without names"),
        ({"decay": 0.9, "shadow_params": [torch.ones(1)]}, "shadow_params is a list of 1 tensor without names"),
        ({"epoch": 1}, "no dict contains only names and tensors"),
    ],
)
def test_objects_without_names_are_described(obj: object, said: str, tmp_path: Path) -> None:
    """An object without names cannot become safetensors, and the error describes the object. Examples are the state of
    an optimizer, and the list of tensors in averages of weights.
    """
    torch.save(obj, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match="there is no state dict in it: " + said):
        ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.safetensors")


def test_average_of_the_weights_is_named(tmp_path: Path) -> None:
    """The report names the path of an average (EMA) that is left behind, but not that of an average of another model.
    If a path is selected, the report does not mention averages.
    """
    weights = torch.nn.Linear(2, 2).state_dict()
    shadow = {f"module.{name}": tensor for name, tensor in weights.items()}
    for average, is_named in (
        (shadow, True),
        ({"bias": shadow["module.bias"]}, True),
        ({"other": torch.ones(1)}, False),
    ):
        torch.save({"model": weights, "ema": {"decay": 0.9, "shadow": average}}, tmp_path / "x.pt")
        report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.safetensors", force=True)
        assert any("ema/shadow is an average" in note for note in report.notes) == is_named
        assert any(each.kind == "ema" for each in ckptconv.inspect(tmp_path / "x.pt").findings) == is_named
        report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.safetensors", select="model", force=True)
        assert not any("is an average" in note for note in report.notes)
