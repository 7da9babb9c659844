"""Folders of torch.distributed.checkpoint (DCP), in which each process of a run wrote its parts."""
