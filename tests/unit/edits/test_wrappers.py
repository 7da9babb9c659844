"""Removal of wrappers from names. The model without wrappers loads the results with ``strict=True``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptconv
from ckptconv.edits.names import unwrapped
from ckptconv.errors import CollisionError, NoMatchError
from tests.support.judge import assert_same
from tests.support.round_trips import round_trip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # raised by an import of torch.compile


class Block(nn.Module):
    """A block with a submodule that is really named ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)


def net() -> nn.Module:
    return nn.Sequential(Block(), nn.Sequential(nn.Linear(2, 2), Block()))


def with_inner_wrappers(model: nn.Module) -> nn.Module:
    """Return `model` with some of its parts compiled. Activation checkpointing is not used, because it hides its own
    names since torch 1.12.
    """
    model[0] = torch.compile(model[0])  # type: ignore[operator,index,assignment]
    model[1][0] = torch.compile(model[1][0])  # type: ignore[operator,index,assignment]
    # The version of the norm in _metadata is 2, that of the wrapper is 1.
    model[1][1].norm = torch.compile(model[1][1].norm)  # type: ignore[index,union-attr]
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "compile of DataParallel": lambda model: torch.compile(nn.DataParallel(model)),
    "DataParallel of compile": lambda model: nn.DataParallel(torch.compile(model)),  # type: ignore[arg-type]
    "parts compiled": with_inner_wrappers,
    "all at once": lambda model: nn.DataParallel(torch.compile(with_inner_wrappers(model))),  # type: ignore[arg-type]
    "nothing": lambda model: model,
}


def unwrapped_from(folder: Path, obj: Any, **options: Any) -> tuple[Any, ckptconv.Report]:
    """Convert `obj` with ``unwrap``. Return the result as loaded with ``weights_only=True``, and the report."""
    return round_trip(folder, obj, weights_only=True, unwrap=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_torch_are_removed(wrapper: str, tmp_path: Path) -> None:
    """Names, order, values and ``_metadata`` of the output are those of the model. A submodule that is named ``module``
    keeps its name.
    """
    model = net()
    wanted = model.state_dict()
    found, report = unwrapped_from(tmp_path, WRAPPERS[wrapper](model).state_dict())
    assert_same(wanted, found)
    net().load_state_dict(found, strict=True)
    assert any("no name contains a wrapper" in note for note in report.notes) == (wrapper == "nothing")
    again = ckptconv.convert(tmp_path / "dst.pt", tmp_path / "again.pt", unwrap=True)
    assert not again.changes.names


@pytest.mark.parametrize("word", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_orig_mod"])
def test_wrapper_names_are_removed_at_any_depth(word: str) -> None:
    """Wrapper names that no model uses are removed at every level, also if they are repeated. A tensor with such a name
    keeps it.
    """
    names = [f"{word}.a.{word}.w", f"{word}.a.{word}.{word}.b", f"{word}.{word}"]
    assert list(unwrapped(names).values()) == ["a.w", "a.b", word]


def test_optimizer_names_follow_the_state_dict() -> None:
    """The names in an optimizer lose the same prefixes as those in the state dict, including the name of a tied weight
    that the state dict lacks. Only the state dict decides whether ``module`` is removed.
    """
    assert unwrapped(["module.a"], ["module._orig_mod.b", "module.a", "c"]) == {
        "module.a": "a",
        "module._orig_mod.b": "b",
        "c": "c",
    }
    assert unwrapped(["n_averaged", "module.a"], ["module.a"]) == {"n_averaged": "n_averaged", "module.a": "module.a"}


@pytest.mark.parametrize("front", ["", "module.", "_forward_module.", "_forward_module.module."])
def test_sharded_models(front: str, tmp_path: Path) -> None:
    """Names as written by FSDP, activation checkpointing inside it, and Fabric around it are unwrapped. The model loads
    the result, which includes its own ``module``.
    """
    model = net()
    inner = {
        "0.": "0._fsdp_wrapped_module._checkpoint_wrapped_module.",
        "1.1.": "1._fsdp_wrapped_module.1._fsdp_wrapped_module.",
    }
    state = {}
    for name, value in model.state_dict().items():
        part = next((part for part in inner if name.startswith(part)), "")
        state[f"{front}_fsdp_wrapped_module.{inner.get(part, part)}{name.removeprefix(part)}"] = value
    found, _ = unwrapped_from(tmp_path, state)
    assert_same(found, dict(model.state_dict()))
    net().load_state_dict(found, strict=True)


def test_module_is_removed_once_and_only_from_all_names() -> None:
    """``module`` is removed only once, and only if all names begin with it. A second or inner ``module``, or one that
    some names lack, can be part of the model.
    """
    assert list(unwrapped(["module.module.w", "module.b"]).values()) == ["module.w", "b"]
    assert list(unwrapped(["hidden.0.module.w", "module.b"]).values()) == ["hidden.0.module.w", "module.b"]
    assert list(unwrapped(["module.a", "n_averaged"]).values()) == ["module.a", "n_averaged"]
    assert unwrapped([]) == {}


def test_optimizers_and_averages_follow(tmp_path: Path) -> None:
    """Optimizers and averages that are keyed by names get the new names. A separate state dict without wrappers does
    not change.
    """
    weights = {"module.a": torch.ones(1), "module._orig_mod.b": torch.ones(1)}
    other = {"module.c": torch.ones(1), "d": torch.ones(1)}
    named = {
        "state": {"module._orig_mod.b": {"m": torch.ones(1)}},
        "param_groups": [{"params": ["module.a", "module._orig_mod.b"]}],
    }
    obj = {"model": weights, "ema": dict(weights), "other": other, "optimizer": named}
    found, _ = unwrapped_from(tmp_path, obj)
    assert [list(found[key]) for key in ("model", "ema", "other")] == [["a", "b"], ["a", "b"], ["module.c", "d"]]
    assert list(found["optimizer"]["state"]) == ["b"]
    assert found["optimizer"]["param_groups"] == [{"params": ["a", "b"]}]


def test_an_optimizer_follows_its_model(tmp_path: Path) -> None:
    """An optimizer follows its model, even if an average with unchanged prefixes comes first. The name of a tied weight
    that the state dict lacks changes too. Without a model, the optimizer's own names decide, and the report contains
    them.
    """
    weights = {"module.a": torch.ones(1), "module._orig_mod.b": torch.ones(1)}
    average = {"n_averaged": torch.ones(1), **weights}
    named = {"state": {"module._orig_mod.tied": {}, "module.a": {}}, "param_groups": [{"params": ["module.a"]}]}
    for order in (("ema", "model", "optimizer"), ("optimizer", "model", "ema")):
        obj = {"ema": dict(average), "model": dict(weights), "optimizer": named}
        found, _ = unwrapped_from(tmp_path, {key: obj[key] for key in order})
        assert list(found["model"]) == ["a", "b"]
        assert list(found["ema"]) == ["n_averaged", "module.a", "module.b"]
        assert found["optimizer"] == {"state": {"tied": {}, "a": {}}, "param_groups": [{"params": ["a"]}]}
    alone, report = unwrapped_from(tmp_path, obj, select="optimizer")
    assert alone == found["optimizer"]
    assert [(change.old, change.new) for change in report.changes.names] == [
        ("module._orig_mod.tied", "tied"),
        ("module.a", "a"),
    ]


def test_unwrap_applies_before_prefixes(tmp_path: Path) -> None:
    """Names are unwrapped before prefixes are removed and added, whatever the order of the keywords."""
    state = {"module._orig_mod.model.w": torch.ones(1)}
    found, _ = unwrapped_from(tmp_path, state, add_prefix="net", strip_prefix="model")
    assert list(found) == ["net.w"]


def test_two_names_that_would_be_one(tmp_path: Path) -> None:
    """If two names would become one, the conversion is refused."""
    with pytest.raises(CollisionError, match=r"'a\.w'"):
        unwrapped_from(tmp_path, {"a.w": torch.ones(1), "a._orig_mod.w": torch.ones(1)})


def test_pickled_wrappers(tmp_path: Path) -> None:
    """The names of a pickled wrapper are unwrapped if its state dict is extracted. Otherwise they cannot be changed,
    and the error suggests ``state_dict=True``.
    """
    model = nn.DataParallel(net())
    with pytest.raises(NoMatchError, match="state_dict=True"):
        unwrapped_from(tmp_path, model)
    net().load_state_dict(unwrapped_from(tmp_path, model, state_dict=True)[0], strict=True)


def test_activation_checkpointing(tmp_path: Path) -> None:
    """The names of parameters inside a wrapper for activation checkpointing are unwrapped."""
    model = net()
    wrapped = checkpoint_wrapper(model)
    found, _ = unwrapped_from(tmp_path, dict([*wrapped.named_parameters(), *wrapped.named_buffers()]))
    assert set(found) == set(model.state_dict())


def test_activation_checkpointing_hides_its_names_in_a_state_dict(tmp_path: Path) -> None:
    """Activation checkpointing hides its names in the state dict but not in ``_metadata``, where the version of the
    wrapper replaces that of the model. ``unwrap`` restores ``_metadata``.
    """
    model = net()
    wanted = copy.deepcopy(model.state_dict())
    model[0] = checkpoint_wrapper(model[0])  # type: ignore[index,operator]
    model[1][1].norm = checkpoint_wrapper(model[1][1].norm)  # type: ignore[index,union-attr]
    state = model.state_dict()
    assert list(state) == list(wanted)
    assert state._metadata["1.1.norm"] == {"version": 1} != wanted._metadata["1.1.norm"]
    found, report = unwrapped_from(tmp_path, state)
    assert_same(found, wanted)
    assert report.notes == ("no name contains a wrapper's prefix, so unwrap=True changed only _metadata",)


_SEGMENTS = st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module", "a", "0", "w"])


@given(st.lists(st.lists(_SEGMENTS, min_size=1, max_size=5).map(".".join), unique=True))
def test_nothing_else_is_removed(names: list[str]) -> None:
    """Words that no model uses are removed, except for the last segment. A leading ``module`` is removed at most once.
    All other segments remain in order.
    """
    words = {"_orig_mod", "_fsdp_wrapped_module"}
    for old, new in unwrapped(names).items():
        *modules, last = old.split(".")
        kept = [*(segment for segment in modules if segment not in words), last]
        assert new.split(".") in (kept, kept[1:] if kept[0] == "module" else kept)
