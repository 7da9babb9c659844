"""Short forms for detected contents of a checkpoint, and tensors that look like RNG states."""

from __future__ import annotations

import torch

from ckptconv.checkpoint.state_dicts import Detected

__all__ = ["numbers", "rng_states", "state_dicts"]


def state_dicts(detected: Detected) -> list[str]:
    """Return the paths of the state dicts in `detected`."""
    return [found.path for found in detected.state_dicts]


def rng_states(detected: Detected) -> list[str]:
    """Return the paths of the RNG states in `detected`."""
    return [info.path for info in detected.rng_states]


def numbers(n: int = 16) -> torch.Tensor:
    """Return a 1-D uint8 tensor with `n` elements and its own storage, like the RNG state of a GPU."""
    return torch.zeros(n, dtype=torch.uint8)
