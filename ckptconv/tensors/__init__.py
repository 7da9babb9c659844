"""Real tensors in memory: load, save and move them.

The only package, beside ``byteranges.kernels``, that imports torch.

May import: ``inspection`` and what stands below it. Start with ``files``.
"""
