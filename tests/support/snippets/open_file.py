"""Load single tensors of a file that does not fit into memory."""

import torch

import ckptconv

means: dict[str, float] = {}
with ckptconv.open("ddp.pt") as file:
    for path, info in file.tensors.items():
        if info.dtype == "float32" and info.nbytes < 1_000_000:
            weight: torch.Tensor = file.load(path)
            means[path] = weight.mean().item()
assert means
