"""Tests of the RNG rule, which decides which tensors are states of random generators."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptconv.checkpoint.state_dicts import CPU_RNG_BYTES
from tests.support.detection import numbers, rng_states
from tests.support.reduced import Reduced

W = torch.zeros(2)
STATE = torch.get_rng_state()
#: A state dict with buffers whose names contain ``random`` and ``rng``.
BUFFERS = {**nn.Linear(1, 1).state_dict(), "random_features": numbers(), "random.rng": numbers()}
#: The states that Hugging Face's Trainer and accelerate save next to a model.
TRAINER = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": STATE, "cuda": [numbers()]}
ACCELERATE = {
    "step": 1,
    "random_state": random.getstate(),
    "torch_manual_seed": STATE,
    "torch_cuda_manual_seed": [numbers()],
}


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
        (TRAINER, ["cpu", "cuda[0]"]),
        (ACCELERATE, ["torch_manual_seed", "torch_cuda_manual_seed[0]"]),
        # Next to a state, a tensor is a state only if its key names a device, so a mask is not.
        ({"rng_state": STATE, "mask": numbers(), "x": 1}, ["rng_state"]),
        ({"cpu": STATE, "cuda": [numbers()], "mask": numbers(), "x": 1}, ["cpu", "cuda[0]"]),
        ({"torch": STATE, "torch.cuda": [numbers()], "x": None}, ["torch", "torch.cuda[0]"]),
        (
            {"torch": STATE, "python": (3, (1, 2), None), "numpy": {"state": {"key": 1}}, "cuda": numbers()},
            ["torch", "cuda"],
        ),
        ({"python": 1, "numpy": 2, "mask": numbers()}, []),
        # Tensors that share a storage are not states, because moving one would move the other. One tensor under two
        # keys is a state.
        ({"rng_state": STATE, "view": STATE.view(2, -1), "x": 1}, []),
        ({"rng_state": STATE, "again": STATE, "x": 1}, ["rng_state"]),
        # In a state dict, a name does not make a tensor a state, but 5,056 elements do.
        ({"model": BUFFERS}, []),
        ({"rng_net": {"w": W, "mask": numbers()}}, []),
        ({"model": {**BUFFERS, "state": STATE}}, ["model/state"]),
    ],
)
def test_generator_states(read: Any, obj: object, paths: list[str]) -> None:
    """A tensor is recognized as a generator state if it has 5,056 elements, or if a key above it contains a word such
    as 'rng'. Under the name of a device, it is also recognized next to such a state, or next to ``python`` and
    ``numpy``.
    """
    detected = read(obj)
    assert rng_states(detected) == paths
    assert {info.storage for info in detected.rng_states} == detected.rng_storages


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
def test_tensors_that_are_not_generator_states(read: Any, tensor: torch.Tensor) -> None:
    """Only contiguous 1-D uint8 tensors that fill their storage are recognized as generator states."""
    assert rng_states(read({"rng_state": tensor, "x": 1})) == []


def test_the_state_of_a_generator_object(read: Any) -> None:
    """The state tensor of a pickled ``torch.Generator`` is recognized."""
    detected = read({"dropout": torch.Generator().manual_seed(1), "x": 1})
    assert [info.nbytes for info in detected.rng_states] == [CPU_RNG_BYTES]
    assert rng_states(detected) == ["dropout/.__state__[2]"]

    on_gpu = Reduced(torch.Generator, (torch.device("cuda:0"),), (1, 0, numbers()))
    assert rng_states(read({"dropout": [on_gpu], "x": 1})) == ["dropout[0]/.__state__[2]"]
