"""Save a model. The old file remains until the new one is complete."""

import torch

import ckptconv

model = torch.nn.DataParallel(torch.nn.Linear(3, 2))
for epoch in range(2):
    ckptconv.save({"model": model.state_dict(), "epoch": epoch}, "last.pt", map_location="cpu", strip_prefix="module.")
ckptconv.save(model.state_dict(), "last.safetensors", strip_prefix="module.")
