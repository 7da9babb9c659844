"""What is recognised: state dicts, optimizers with names, states of random generators, and the state dict that is
meant.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptconv.byteranges.sources import Source
from ckptconv.checkpoint.state_dicts import CPU_RNG_BYTES, Detected, detect
from ckptconv.formats import opening


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """What is recognised in an object that torch saves."""

    def customs_of(obj: object) -> Detected:
        torch.save(obj, tmp_path / "x.pt")
        with Source(tmp_path / "x.pt") as source:
            return detect(opening.read(source))

    return customs_of


def state_dicts(customs: Detected) -> list[str]:
    return [found.path for found in customs.state_dicts]


def rng_states(customs: Detected) -> list[str]:
    return [info.path for info in customs.rng_states]


def numbers(n: int = 16) -> torch.Tensor:
    """A 1-D uint8 tensor that has its storage to itself, as a GPU's generator state."""
    return torch.zeros(n, dtype=torch.uint8)


W = torch.zeros(2)


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
    assert state_dicts(read(nn.ReLU().state_dict())) == ["."]
    assert read({"w": W}).state_dicts[0].metadata is None


def test_one_state_dict_under_two_keys_is_one(read: Any) -> None:
    """It stands where it stands first."""
    state = nn.Linear(1, 1).state_dict()
    assert state_dicts(read({"a": state, "b": state})) == ["a"]


def test_an_optimizer_holds_no_state_dict(read: Any) -> None:
    """``optimizer['state'][0]`` looks like one and is none."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1)).backward()
    optimizer.step()
    customs = read({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "list": [optimizer.state_dict()]})
    assert state_dicts(customs) == ["model"]
    assert customs.optimizers == []
    assert state_dicts(read({"state": {"w": W}, "param_groups": []})) == []
    assert state_dicts(read({"state": {"w": W}})) == ["state"]


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
    customs = read(obj)
    assert state_dicts(customs) == []
    assert {info.dtype for info in customs.rng_states} == {"uint8"}
    assert all(storage in customs.rng_storages for storage in (info.storage for info in customs.rng_states))


def test_weights_under_a_generator_key_are_a_state_dict(read: Any) -> None:
    """A GAN's generator is a model, its 1-D uint8 buffer no generator's state."""
    customs = read({"generator": {"w": W, "mask": numbers()}, "discriminator": {"w": W.clone()}})
    assert state_dicts(customs) == ["generator", "discriminator"]
    assert rng_states(customs) == []


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


# States of random generators


@pytest.mark.parametrize(
    ("obj", "paths"),
    [
        (torch.get_rng_state(), ["."]),
        ({"anything": torch.get_rng_state(), "w": [W]}, ["anything"]),
        ({"rng": numbers(), "x": 1}, ["rng"]),
        ({"cuda_rng_state": [numbers(), numbers()], "x": 1}, ["cuda_rng_state[0]", "cuda_rng_state[1]"]),
        ({"cudaRngState": numbers(), "x": 1}, ["cudaRngState"]),
        ({"RNGState": numbers(), "x": 1}, ["RNGState"]),
        ({"torch.seed": numbers(), "x": 1}, ["torch.seed"]),
        ({"Random": {"deep": [{"deeper": numbers()}]}, "x": 1}, ["Random/deep[0]/deeper"]),
        ({"my_generator": numbers(), "x": 1}, ["my_generator"]),
        ({"strange": numbers(), "x": 1}, []),
        ({"seedling": numbers(), "x": 1}, []),
        ({"degenerators": numbers(), "x": 1}, []),
        ({"cpu": torch.get_rng_state(), "cuda": [numbers(), numbers()], "x": 1}, ["cpu", "cuda[0]", "cuda[1]"]),
        (OrderedDict(x=1, cpu=torch.get_rng_state(), cuda=numbers()), ["cpu", "cuda"]),
        ({"a": {"cpu": torch.get_rng_state()}, "cuda": numbers(), "x": 1}, ["a/cpu"]),
        ({"cpu": torch.get_rng_state(), "x": {"data": [numbers()], "y": 1}}, ["cpu"]),
        ({"python": 1, "numpy": 2, "torch_cuda": numbers()}, ["torch_cuda"]),
        ({"python": 1, "torch_cuda": numbers()}, []),
        ({"numpy": 1, "torch_cuda": numbers()}, []),
    ],
)
def test_where_generator_states_stand(read: Any, obj: object, paths: list[str]) -> None:
    """5,056 elements; under a key with one of the words in it; beside one of 5,056 elements; beside ``python`` and
    ``numpy``.
    """
    customs = read(obj)
    assert rng_states(customs) == paths
    assert {info.storage for info in customs.rng_states} == customs.rng_storages


@pytest.mark.parametrize(
    "tensor",
    [
        numbers().to(torch.int8),
        numbers().to(torch.float32),
        numbers().reshape(4, 4),
        numbers()[:8],
        numbers()[8:],
        numbers(32)[::2],
        numbers().as_strided((16,), (0,)),
        torch.tensor(1, dtype=torch.uint8),
        torch.zeros(CPU_RNG_BYTES + 1, dtype=torch.uint8)[:CPU_RNG_BYTES],
        torch.zeros(2, CPU_RNG_BYTES // 2, dtype=torch.uint8),
    ],
    ids=["int8", "float32", "2-D", "head", "tail", "strided", "expanded", "0-D", "view of 5056", "2-D of 5056"],
)
def test_what_is_no_generator_state_wherever_it_stands(read: Any, tensor: torch.Tensor) -> None:
    """Only contiguous 1-D uint8 tensors that fill their storage are."""
    assert rng_states(read({"rng_state": tensor, "x": 1})) == []


def test_a_shared_storage_is_no_generator_state(read: Any) -> None:
    """Two tensors on one storage: moving it would move the other; one tensor under two keys is fine."""
    state = torch.get_rng_state()
    assert rng_states(read({"rng_state": state, "view": state.view(2, -1), "x": 1})) == []
    assert rng_states(read({"rng_state": state, "again": state, "x": 1})) == ["rng_state"]


def test_a_state_dict_has_no_generator_states_by_name(read: Any) -> None:
    """``random_features`` is a buffer; 5,056 elements are one even there."""
    state: Any = nn.Linear(1, 1).state_dict()
    state |= {"random_features": numbers(), "random.rng": numbers()}
    assert rng_states(read({"model": state})) == []
    assert rng_states(read({"rng_net": {"w": W, "mask": numbers()}})) == []
    state["state"] = torch.get_rng_state()
    assert rng_states(read({"model": state})) == ["model/state"]


def test_the_state_of_a_generator_object(read: Any) -> None:
    """``torch.Generator`` carries its state with it."""
    customs = read({"dropout": torch.Generator().manual_seed(1), "x": 1})
    assert [info.nbytes for info in customs.rng_states] == [CPU_RNG_BYTES]
    assert rng_states(customs) == ["dropout/.__state__[2]"]

    class OnGpu:
        def __reduce__(self) -> Any:
            return torch.Generator, (torch.device("cuda:0"),), (1, 0, numbers())

    assert rng_states(read({"dropout": [OnGpu()], "x": 1})) == ["dropout[0]/.__state__[2]"]


def test_the_trainers_file(read: Any) -> None:
    """Hugging Face's Trainer and accelerate: what they save beside a model."""
    trainer = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": [numbers()],
    }
    assert rng_states(read(trainer)) == ["cpu", "cuda[0]"]
    accelerate = {
        "step": 1,
        "random_state": random.getstate(),
        "torch_manual_seed": torch.get_rng_state(),
        "torch_cuda_manual_seed": [numbers()],
    }
    assert rng_states(read(accelerate)) == ["torch_manual_seed", "torch_cuda_manual_seed[0]"]


def test_the_training_fixture(fixtures: Path) -> None:
    """One model, an optimizer keyed by integers, two generator states."""
    with Source(fixtures / "training.pt") as source:
        customs = detect(opening.read(source))
    assert state_dicts(customs) == ["model"]
    assert customs.optimizers == []
    assert rng_states(customs) == ["rng_state/cpu", "rng_state/cuda"]


def test_parts_of_a_pickled_module_are_no_state_dict(tmp_path: Path) -> None:
    """``_parameters`` and ``_buffers`` of a whole module hold attributes: no prefix is put before them."""
    torch.save({"net": torch.nn.BatchNorm1d(2)}, tmp_path / "module.pt")
    with Source(tmp_path / "module.pt") as source:
        assert detect(opening.read(source)).state_dicts == []
