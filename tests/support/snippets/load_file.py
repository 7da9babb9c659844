"""Load tensors on any device that is available."""

import torch

import ckptconv

weights = ckptconv.load("training.pt", map_location="auto", state_dict=True)
optimizer = ckptconv.load("training.pt", torch.device("cpu"), select="optimizer")
try:
    ckptconv.load("two_gpus.pt", "cuda:99")
except ckptconv.DeviceUnavailable as error:
    print(error.hint)


def keep(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
    return storage


ckptconv.load("two_gpus.pt", keep)
