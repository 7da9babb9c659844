"""What is recognised: state dicts, optimizers with names, and the state dict that is meant."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptconv.byteranges.sources import Source
from ckptconv.formats import opening
from tests.support.detection import numbers, rng_states, state_dicts

W = torch.zeros(2)
STATE = nn.Linear(1, 1).state_dict()


# State dicts


@pytest.mark.parametrize(
    ("obj", "paths"),
    [
        ({"w": W}, ["."]),
        (OrderedDict(w=W), ["."]),
        (defaultdict(list, w=W), ["."]),
        ({"w": nn.Parameter(W), "b": None, "fc._extra_state": {"any": "thing"}, "x_extra_state": [1]}, ["."]),
        ({"model": {"w": W}, "epoch": 3}, ["model"]),
        ({"a": {"b": [{"w": W}]}}, ["a/b[0]"]),
        ({"model": {"w": W}, "ema": {"w": W.clone()}}, ["model", "ema"]),
        ({}, []),
        ({"b": None, "x_extra_state": W}, ["."]),
        ({"b": None}, []),
        ({"w": W, "lr": 0.1}, []),
        ({"w": W, "names": ["w"]}, []),
        ({"w": W, 0: W}, []),
        ({0: W}, []),
        ([W], []),
        (W, []),
        ({"model": {"w": W, "epoch": 3}}, []),
        ({"model": {"w": W}, "same": {"outer": W, "inner_extra_state": {"w": W}}}, ["model", "same"]),
        ({"a": STATE, "b": STATE}, ["a"]),  # one under two keys stands where it stands first
        (nn.ReLU().state_dict(), ["."]),
        ({"state": {"w": W}, "param_groups": []}, []),
        ({"state": {"w": W}}, ["state"]),
        ({"net": torch.nn.BatchNorm1d(2)}, []),  # a module's parameters are attributes: no prefix is put before them
    ],
)
def test_a_mapping_of_names_to_tensors(read: Any, obj: object, paths: list[str]) -> None:
    """String keys, at least one tensor, and nothing but tensors, None and ``*_extra_state``; none
    inside another one.
    """
    assert state_dicts(read(obj)) == paths


def test_metadata_makes_a_state_dict_of_anything(read: Any) -> None:
    """``_metadata`` is what ``Module.state_dict()`` sets, whatever the values are, and an empty one too."""
    state = nn.Linear(1, 1).state_dict()
    state["version"] = "1.0"
    (found,) = read({"net": state}).state_dicts
    assert (found.path, found.names()) == ("net", ["weight", "bias", "version"])
    assert found.metadata is not None
    assert read({"w": W}).state_dicts[0].metadata is None


def test_an_optimizer_holds_no_state_dict(read: Any) -> None:
    """``optimizer['state'][0]`` looks like one and is none."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1)).backward()
    optimizer.step()
    detected = read({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "list": [optimizer.state_dict()]})
    assert state_dicts(detected) == ["model"]
    assert detected.optimizers == []


@pytest.mark.parametrize(
    "obj",
    [
        {"states": {"cpu": torch.get_rng_state(), "cuda": numbers()}},
        {"states": {"cuda": numbers(), "cpu": torch.get_rng_state()}},
        {"rng_state": {"gpu0": numbers(), "gpu1": numbers()}},
        {"python": 1, "cpu": torch.get_rng_state(), "random": {"cuda": numbers()}},
        OrderedDict(cpu=torch.get_rng_state()),
    ],
)
def test_a_mapping_of_generator_states_is_no_state_dict(read: Any, obj: object) -> None:
    """Though it has names and tensors: all of them stay on the CPU."""
    detected = read(obj)
    assert state_dicts(detected) == []
    assert {info.dtype for info in detected.rng_states} == {"uint8"}
    assert all(storage in detected.rng_storages for storage in (info.storage for info in detected.rng_states))


def test_weights_under_a_generator_key_are_a_state_dict(read: Any) -> None:
    """A GAN's generator is a model, its 1-D uint8 buffer no generator's state."""
    detected = read({"generator": {"w": W, "mask": numbers()}, "discriminator": {"w": W.clone()}})
    assert state_dicts(detected) == ["generator", "discriminator"]
    assert rng_states(detected) == []


# The state dict that is meant


@pytest.mark.parametrize(
    ("obj", "paths"),
    [
        ({"w": W}, ["."]),
        ({"anything": {"w": W}}, ["anything"]),
        ({"ema": {"w": W}, "model": {"w": W}}, ["model"]),
        ({"x": 1, "state_dict": {"w": W}, "teacher": {"v": W}}, ["state_dict"]),
        ({"module": {"w": W}, "other": {"v": W}}, ["module"]),
        ({"a": {"w": W}, "b": {"w": W}}, ["a", "b"]),
        ({"model": {"w": W}, "net": {"w": W}, "x": {"w": W}}, ["model", "net", "x"]),
        ({"epoch": 3}, []),
    ],
)
def test_which_state_dict_is_meant(read: Any, obj: object, paths: list[str]) -> None:
    """The root, else the only one, else the one under a usual name; all of them where that is not clear."""
    assert [found.path for found in read(obj).main()] == paths


# Optimizers with names


def test_an_optimizer_keyed_by_names(read: Any) -> None:
    """Every place of a name: keys of ``state``, members of ``params`` and of ``param_names``, in each group."""
    optimizer = {
        "state": {"a.w": {"step": W}, "b.w": {"step": W}},
        "param_groups": [{"lr": 1, "params": ["a.w"]}, {"params": ["b.w"], "param_names": ["b.w"], "name": "b.w"}],
    }
    (found,) = read({"model": {"a.w": W, "b.w": W}, "opt": optimizer}).optimizers
    assert found.path == "opt"
    assert found.names() == ["a.w", "b.w", "a.w", "b.w", "b.w"]


def test_named_parameters_beside_integers(read: Any) -> None:
    """torch's own ``param_names`` are names, though the state is keyed by integers."""
    net = nn.Linear(1, 1)
    (found,) = read(torch.optim.SGD(net.named_parameters()).state_dict()).optimizers
    assert found.names() == ["weight", "bias"]


@pytest.mark.parametrize(
    "obj",
    [
        {"state": {0: {"step": W}}, "param_groups": [{"params": [0]}]},
        {"state": 1, "param_groups": 2},
        {"state": {}, "param_groups": ["a"]},
        {"state": {}, "param_groups": [{"params": "weight"}]},
    ],
)
def test_an_optimizer_without_names(read: Any, obj: object) -> None:
    """Keyed by integers, or of another shape: it has no names to follow."""
    assert read(obj).optimizers == []


def test_the_training_fixture(fixtures: Path) -> None:
    """One model, an optimizer keyed by integers, two generator states."""
    with Source(fixtures / "training.pt") as source:
        detected = opening.read(source).detected
    assert state_dicts(detected) == ["model"]
    assert detected.optimizers == []
    assert rng_states(detected) == ["rng_state/cpu", "rng_state/cuda"]
