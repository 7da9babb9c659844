"""Real tensors in memory: load, save and move them.

Only this package and ``byteranges.kernels`` import torch.

May import: ``inspection`` and the packages below it. Start with ``files``.
"""
