"""Short forms for what is detected in a checkpoint, and tensors that could be states of random generators."""

from __future__ import annotations

import torch

from ckptconv.checkpoint.state_dicts import Detected

__all__ = ["numbers", "rng_states", "state_dicts"]


def state_dicts(detected: Detected) -> list[str]:
    """Their paths."""
    return [found.path for found in detected.state_dicts]


def rng_states(detected: Detected) -> list[str]:
    """Their paths."""
    return [info.path for info in detected.rng_states]


def numbers(n: int = 16) -> torch.Tensor:
    """A 1-D uint8 tensor that has its storage to itself, as a GPU's generator state."""
    return torch.zeros(n, dtype=torch.uint8)
