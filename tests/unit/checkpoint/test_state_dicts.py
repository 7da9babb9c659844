"""Tests of the recognition of state dicts, of optimizers with parameter names, and of the main state dict."""

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
        ({"a": STATE, "b": STATE}, ["a"]),  # a state dict under two keys is listed under the first
        (nn.ReLU().state_dict(), ["."]),
        ({"state": {"w": W}, "param_groups": []}, []),
        ({"state": {"w": W}}, ["state"]),
        ({"net": torch.nn.BatchNorm1d(2)}, []),  # parameters of a module are attributes, so there is no state dict
    ],
)
def test_a_mapping_of_names_to_tensors(read: Any, obj: object, paths: list[str]) -> None:
    """A mapping is a state dict if its keys are strings, it contains a tensor, and all values are tensors, None or
    ``*_extra_state``. A state dict inside another one is not listed.
    """
    assert state_dicts(read(obj)) == paths


def test_metadata_makes_a_state_dict_of_anything(read: Any) -> None:
    """A mapping with ``_metadata``, which ``Module.state_dict()`` sets, is a state dict whatever its values are."""
    state = nn.Linear(1, 1).state_dict()
    state["version"] = "1.0"
    (found,) = read({"net": state}).state_dicts
    assert (found.path, found.names()) == ("net", ["weight", "bias", "version"])
    assert found.metadata is not None
    assert read({"w": W}).state_dicts[0].metadata is None


def test_the_state_of_an_optimizer_is_not_a_state_dict(read: Any) -> None:
    """``optimizer['state'][0]`` is not a state dict, although it maps names to tensors."""
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
def test_a_mapping_of_generator_states_is_not_a_state_dict(read: Any, obj: object) -> None:
    """A mapping of generator states is not a state dict, although it maps names to tensors. All its tensors are
    recognized as generator states.
    """
    detected = read(obj)
    assert state_dicts(detected) == []
    assert {info.dtype for info in detected.rng_states} == {"uint8"}
    assert all(storage in detected.rng_storages for storage in (info.storage for info in detected.rng_states))


def test_weights_under_a_generator_key_are_a_state_dict(read: Any) -> None:
    """The weights of a GAN under the key 'generator' are a state dict. A 1-D uint8 buffer in it is not a generator
    state.
    """
    detected = read({"generator": {"w": W, "mask": numbers()}, "discriminator": {"w": W.clone()}})
    assert state_dicts(detected) == ["generator", "discriminator"]
    assert rng_states(detected) == []


# The main state dict


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
def test_main_state_dict(read: Any, obj: object, paths: list[str]) -> None:
    """The main state dict is the one at the root, or the only one, or the only one under a usual name. Otherwise all
    state dicts are returned.
    """
    assert [found.path for found in read(obj).main()] == paths


# Optimizers with parameter names


def test_an_optimizer_keyed_by_names(read: Any) -> None:
    """Parameter names of an optimizer are found in the keys of ``state``, and in ``params`` and ``param_names`` of each
    group.
    """
    optimizer = {
        "state": {"a.w": {"step": W}, "b.w": {"step": W}},
        "param_groups": [{"lr": 1, "params": ["a.w"]}, {"params": ["b.w"], "param_names": ["b.w"], "name": "b.w"}],
    }
    (found,) = read({"model": {"a.w": W, "b.w": W}, "opt": optimizer}).optimizers
    assert found.path == "opt"
    assert found.names() == ["a.w", "b.w", "a.w", "b.w", "b.w"]


def test_named_parameters_next_to_integers(read: Any) -> None:
    """The names in torch's own ``param_names`` are found, although the state is keyed by integers."""
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
    """An optimizer whose state is keyed by integers, or whose groups have another form, has no parameter names."""
    assert read(obj).optimizers == []


def test_the_training_fixture(fixtures: Path) -> None:
    """The training fixture contains one state dict, an optimizer keyed by integers, and two generator states."""
    with Source(fixtures / "training.pt") as source:
        detected = opening.read(source).detected
    assert state_dicts(detected) == ["model"]
    assert detected.optimizers == []
    assert rng_states(detected) == ["rng_state/cpu", "rng_state/cuda"]
