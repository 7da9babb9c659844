"""Checkpoints of torch.distributed.checkpoint: folders in which each process of a run wrote its parts of the tensors."""
