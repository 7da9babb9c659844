"""Move a model and its optimizer to another device."""

import torch

import ckptconv

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
model, optimizer = ckptconv.remap((model, optimizer), "auto")
nbytes: dict[str, int] = ckptconv.devices([model, optimizer])
batch = ckptconv.remap({"x": torch.ones(2), "y": torch.zeros(3)}, {"cuda": "cpu"})
print(batch["y"].device, nbytes)
