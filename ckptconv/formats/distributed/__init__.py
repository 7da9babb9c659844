"""Checkpoints of distributed runs, in which each process wrote its own files: DCP, ZeRO, Megatron-Core, rank files."""
