"""Strip and add prefixes of a state dict in memory."""

import torch

import ckptconv

state = torch.nn.DataParallel(torch.nn.BatchNorm1d(3)).state_dict()
plain = ckptconv.strip_prefix(state, "module.")
torch.nn.BatchNorm1d(3).load_state_dict(plain, strict=True)
again: dict[str, torch.Tensor] = ckptconv.add_prefix(dict(plain), "module")
assert list(again) == list(state)
